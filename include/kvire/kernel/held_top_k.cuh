// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/cuda/launch.cuh>
#include <kvire/kernel/held_row.cuh>

/// Top-k of rows that fit the registers of a few blocks: the same selection as body::top_k, bit for bit, from one launch without workspace.
///
/// The blocks of a cluster read a row once and search together. Each sends the others its largest score and a guess; between those, every block counts its
/// scores in 256 bins and sends all the others how many it has up to each. So each knows the bin of the k-th, and what of it and before it is whose. The
/// scores of that bin go to all blocks, which rank them; or, where they are many, it is divided into bins in turn. Then every block knows what of its own
/// is selected and how many stand before that, and lists it.
///
/// A guess decides where bins are, never what is selected; nothing depends on the order in which threads arrive.
KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

#if KVIRE_CUDA_COMPILER

template <int Quads>
__global__ __launch_bounds__(held_threads, 1) void held_top_k_kernel(const __grid_constant__ HeldParams p) {
#if KVIRE_DEVICE_ARCH >= 900  // what is launched on older GPUs is another kernel
  ptx::launch_dependents();
  extern __shared__ __align__(16) unsigned char dynamic[];
  HeldRow<Quads> block{{{p.base, blockIdx.x >> p.base.block_shift},
                        *reinterpret_cast<HeldMemory<Quads>*>(dynamic),
                        int(threadIdx.x),
                        int(threadIdx.x & 31U),
                        int(threadIdx.x >> 5),
                        ptx::cluster_rank(),
                        u32(p.base.blocks)}};
  block.run(p);
#else
  (void)p;
  __trap();
#endif
}

template <int Quads>
cudaError_t launch_held(const HeldParams& p, std::int64_t rows, cudaStream_t stream) {
  // More than half of a multiprocessor's, so that each has one block: two would share what each row waits for.
  constexpr int bytes = Quads == 2 ? 128 * 1024 : 180 * 1024;
  static_assert(require_tuning<HeldMemory<Quads>, (sizeof(HeldMemory<Quads>) <= bytes)>());
  auto* kernel = held_top_k_kernel<Quads>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, {rows * p.base.blocks, held_threads, bytes, p.base.overlap, p.base.blocks}, stream, p);
}

#endif  // KVIRE_CUDA_COMPILER

// 16-byte loads of each thread, where `blocks` share a row of up to `columns` scores; 0 where they cannot.
inline int held_quads(std::int64_t columns, int blocks) {
  const std::int64_t quads = (columns + blocks * 2048 - 1) / (blocks * 2048);
  return quads <= 2 ? 2 : quads <= 8 ? 8 : 0;
}

}  // namespace detail::topk

/// Blocks of a row that launch_held_top_k shall take for `rows` rows of up to `columns` scores on a device of `processors` multiprocessors: as many as
/// leave room, since clusters stay within a part of the device and a few multiprocessors of each part are left over, and find 2,048 scores each; more where
/// fewer cannot hold a row.
inline int held_top_k_blocks(std::int64_t rows, std::int64_t columns, int processors) {
  int blocks = 2;
  const auto room = [&] { return rows * blocks * 2 <= processors * 3 / 4 && columns >= std::int64_t(blocks) * 4096; };
  while (blocks < 8 && (detail::topk::held_quads(columns, blocks) == 0 || room())) blocks *= 2;
  return blocks;
}

/// Whether launch_held_top_k serves a selection: k up to 2,048, rows that start on 16 bytes and that `blocks` (2, 4 or 8) hold, 16,384 scores each; pages of
/// a multiple of four positions.
inline bool held_top_k_serves(const body::TopKArgs& args, int blocks) {
  return (blocks == 2 || blocks == 4 || blocks == 8) && args.k >= 1 && args.k <= 2048 && args.stride % 4 == 0 &&
         reinterpret_cast<std::uintptr_t>(args.scores) % 16 == 0 && detail::topk::held_quads(args.stride, blocks) != 0 && (args.page_table == nullptr || args.tokens_per_page % 4 == 0);
}

/// Whether all rows find room at once, with that many blocks; shorter rows have a faster kernel.
inline bool held_top_k_fits(const body::TopKArgs& args, int processors) {
  const std::int64_t rows = std::int64_t(args.batch) * args.next_n;
  const int blocks = held_top_k_blocks(rows, args.stride, processors);
  return held_top_k_serves(args, blocks) && args.stride > 8192 && rows * blocks <= processors;
}

/// Where it is the fastest kernel: of clusters of four and more, some wait where they want all multiprocessors.
inline bool held_top_k_pays(const body::TopKArgs& args, int processors) {
  const std::int64_t rows = std::int64_t(args.batch) * args.next_n;
  const int blocks = held_top_k_blocks(rows, args.stride, processors);
  return held_top_k_fits(args, processors) && (blocks == 2 || rows * blocks <= processors * 3 / 4);
}

#if KVIRE_CUDA_COMPILER

/// Exact, deterministic top-k from sm_90 on; see body::top_k for what is selected and body::TopKArgs for extents. `blocks`: of a row; the selection does not
/// depend on it. `counts` (device memory, or null) is added to. `overlap`: programmatic dependent launch; the kernel waits for the stream's earlier one before
/// it reads what it goes by. Captures into graphs; allocates nothing, waits for nothing.
template <int = 0>  // compiled where it is called, not wherever the header is included
cudaError_t launch_held_top_k(const body::TopKArgs& args, TopKCounts* counts, cudaStream_t stream, int blocks, bool overlap = false) {
  const std::int64_t rows = std::int64_t(args.batch) * args.next_n;
  if (!held_top_k_serves(args, blocks)) return cudaErrorInvalidValue;
  if (rows == 0) return cudaSuccess;
  detail::topk::HeldParams p;
  p.base = detail::topk::make_params(args, counts, overlap);
  p.base.blocks = blocks;
  while (1 << p.base.block_shift < blocks) ++p.base.block_shift;
  // Of so many groups of a warp the least best score is reached by 2.5, 7, 20, 50 and 120 of its scores: by its share of k, and some more.
  const int share = args.k >> (p.base.block_shift + 4);
  p.group_shift = share < 2 ? 4 : share < 6 ? 3 : share < 17 ? 2 : share < 41 ? 1 : 0;
  const int quads = detail::topk::held_quads(args.stride, blocks);
  return quads == 2 ? detail::topk::launch_held<2>(p, rows, stream) : detail::topk::launch_held<8>(p, rows, stream);
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
