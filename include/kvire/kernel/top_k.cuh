// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/cuda/launch.cuh>
#include <kvire/kernel/top_k_short_row.cuh>
#include <kvire/kernel/top_k_streamed_row.cuh>

/// The tuned top-k kernel: the same selection as body::top_k, bit for bit, from one launch without workspace.
///
/// Short rows (up to 8192 scores): one block keeps the row in registers. Bins of equal width, from somewhat above the largest score of a sample down, say
/// which scores are above the k-th best and which few share its bin; every warp ranks those, and lists what it has of the selected behind the warps before it.
///
/// Longer rows: the blocks of a thread-block cluster (one block where there are none) first read the same sample of the whole row and so
/// agree, without talking, on a threshold that somewhat more than k scores should pass. Each block then reads its part of the row once and
/// lists what passes; the lists meet in the first block's shared memory, which selects exactly among them. If fewer than k passed, or more
/// than the list holds, the sample was misleading and the first block takes the row again, without guessing: the threshold is the k-th best
/// of what it has read so far, and a list that runs over is pruned to its exact top k.
///
/// The cut is a pair of key and position, unique in the row, so ties need no path of their own and nothing depends on the order in which
/// threads arrive. The guess decides how much work is left, never what is selected.
KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

#if KVIRE_CUDA_COMPILER

template <int Threads, int Items, bool Clustered, bool Paged>
struct TopK : StreamedRow<Threads, Items, Clustered, Paged> {
  using Base = StreamedRow<Threads, Items, Clustered, Paged>;
  using Base::blocks, Base::chunk, Base::hist, Base::lane, Base::nans, Base::p, Base::rank, Base::row, Base::row_in_stream, Base::scores, Base::visible;

  __device__ void run() {
    blocks = Clustered ? u32(p.blocks) : 1;
    rank = Clustered ? ptx::cluster_rank() : 0;
    scores = p.args.scores + std::int64_t(row) * p.args.stride;
    const int length = visible();
    if (length <= chunk) {
      using Memory = ShortMemory<Threads, Items>;
      static_assert(require_tuning<Memory, (sizeof(Memory) <= Base::shared_bytes)>());
      if (rank == 0) select_short<Threads, Items, Paged>(p, row, *reinterpret_cast<Memory*>(hist));
      return;
    }
    row_in_stream(length);
    if (p.counts != nullptr) {
      nans = __reduce_add_sync(~0U, nans);
      if (lane == 0 && nans != 0) atomicAdd(p.counts, u64(nans));
      if (rank == 0) this->count_pages(length);
    }
  }
};

template <int Threads, int Items, bool Clustered, bool Paged>
__global__ __launch_bounds__(Threads, 1) void top_k_kernel(const __grid_constant__ Params p) {
  if constexpr (!Clustered || KVIRE_DEVICE_ARCH >= 900) {  // clusters are launched where there are some
    ptx::launch_dependents();
    ptx::wait_for_earlier_grids();
    extern __shared__ __align__(16) unsigned char dynamic[];
    __shared__ Scratch scratch;
    u32* hist = reinterpret_cast<u32*>(dynamic);
    u32* passing = hist + bins;
    u64* list = reinterpret_cast<u64*>(passing + bins);
    const Row<Paged> row{p, Clustered ? blockIdx.x >> p.block_shift : blockIdx.x};
    TopK<Threads, Items, Clustered, Paged> block{
        {{{row, scratch, hist, passing, list, reinterpret_cast<u64*>(passing), int(threadIdx.x), int(threadIdx.x & 31U), int(threadIdx.x >> 5)}}}};
    block.run();
  } else {
    (void)p;
    __trap();
  }
}

inline constexpr int short_threads = 512;  // more issue every instruction of a scan more often, fewer wait for each
inline constexpr int many_rows = 256;      // of up to 4,096 scores: above it three blocks a multiprocessor are better than two with more registers
template <int Items, int Blocks, bool Paged>
__global__ __launch_bounds__(short_threads, Blocks) void short_top_k_kernel(const __grid_constant__ Params p) {
  ptx::launch_dependents();
  ptx::wait_for_earlier_grids();
  __shared__ ShortMemory<short_threads, Items> memory;
  select_short<short_threads, Items, Paged>(p, blockIdx.x, memory);
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

/// How a launch is shaped. Results do not depend on it.
struct TopKShape {
  int threads = 1024;  ///< 1024; rows of up to 1024 times `items` scores, which one block keeps, have 512
  int items = 8;       ///< scores per thread kept in registers: 4 or 8
  int blocks = 1;      ///< blocks per row: 1, 2, 4, 8 or 16 (above 1 only where there are clusters)
};

#if KVIRE_CUDA_COMPILER

namespace detail::topk {

template <int Threads, int Items, bool Clustered, bool Paged>
cudaError_t launch(const Params& p, std::int64_t rows, cudaStream_t stream) {
  using B = TopK<Threads, Items, Clustered, Paged>;
  auto* kernel = top_k_kernel<Threads, Items, Clustered, Paged>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(B::shared_bytes));
  if (error != cudaSuccess) return error;
  if constexpr (Clustered) {
    if (p.blocks > 8) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (error != cudaSuccess) return error;
    }
  }
  const int blocks = Clustered ? p.blocks : 1;
  return launch_kernel(kernel, {rows * blocks, Threads, B::shared_bytes, p.overlap, blocks}, stream, p);
}

template <int Threads, int Items>
cudaError_t launch(const Params& p, std::int64_t rows, cudaStream_t stream) {
  const bool paged = p.args.page_table != nullptr;
  if (p.blocks > 1) return paged ? launch<Threads, Items, true, true>(p, rows, stream) : launch<Threads, Items, true, false>(p, rows, stream);
  return paged ? launch<Threads, Items, false, true>(p, rows, stream) : launch<Threads, Items, false, false>(p, rows, stream);
}

template <int Items, int Blocks>
cudaError_t launch_short(const Params& p, std::int64_t rows, cudaStream_t stream) {
  auto* kernel = p.args.page_table != nullptr ? short_top_k_kernel<Items, Blocks, true> : short_top_k_kernel<Items, Blocks, false>;
  return launch_kernel(kernel, {rows, short_threads, 0, p.overlap}, stream, p);
}

}  // namespace detail::topk

/// The shape for `rows` rows of up to `columns` scores on a device of `processors` multiprocessors.
inline TopKShape top_k_shape(std::int64_t rows, std::int64_t columns, int processors, bool clusters) {
  TopKShape shape;
  if (columns <= 8192) {
    shape.items = columns <= 4096 ? 4 : 8;
    return shape;
  }
  // Clusters of four and more stay within a part of the device, of which each has multiprocessors left over: where there is no room for all, some wait.
  const auto room = [&] { return shape.blocks == 1 ? processors : processors * 3 / 4; };
  while (clusters && shape.blocks < 16 && rows * shape.blocks * 2 <= room() && columns > std::int64_t(shape.blocks) * 4096) shape.blocks *= 2;
  shape.items = shape.blocks == 1 || columns / shape.blocks > 32768 ? 8 : 4;  // a longer part pays for a larger sample
  return shape;
}

/// Exact, deterministic top-k; see body::top_k for what is selected and body::TopKArgs for extents. `counts` (device memory, or null) is
/// added to. `overlap`: programmatic dependent launch, from sm_90 on; the kernel waits for the stream's earlier one before it reads. Captures into
/// graphs; allocates nothing, waits for nothing.
template <int = 0>  // compiled where it is called, not wherever the header is included
cudaError_t launch_top_k(const body::TopKArgs& args, TopKCounts* counts, cudaStream_t stream, const TopKShape& shape, bool overlap = false) {
  const std::int64_t rows = std::int64_t(args.batch) * args.next_n;
  if (args.k < 0 || args.k > detail::topk::max_k || args.stride > (std::int64_t(1) << detail::topk::position_bits)) return cudaErrorInvalidValue;
  if (rows == 0 || args.k == 0) return cudaSuccess;
  detail::topk::Params p = detail::topk::make_params(args, counts, overlap);
  p.blocks = shape.blocks;
  while (1 << p.block_shift < p.blocks) ++p.block_shift;
  if (args.stride <= 4096) return rows <= detail::topk::many_rows ? detail::topk::launch_short<8, 2>(p, rows, stream) : detail::topk::launch_short<8, 3>(p, rows, stream);
  if (args.stride <= 1024 * shape.items) return detail::topk::launch_short<16, 1>(p, rows, stream);
  if (shape.items == 4) return detail::topk::launch<1024, 4>(p, rows, stream);
  return detail::topk::launch<1024, 8>(p, rows, stream);
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
