// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/cuda/launch.cuh>
#include <kvire/kernel/grouped_block.cuh>
#include <kvire/kernel/slot_groups.cuh>

/// Top-k of rows whose best score of each 16 is known already: what the logits kernel leaves on its way. The same selection as body::top_k, bit for
/// bit.
///
/// Order groups by (best score down, position up) and take k of them: no entry of another group can be selected, for each of the k holds an entry
/// that comes before it. So a floor that k groups or more reach is a floor of the k-th score, and only those groups' scores are read: 16 k
/// of them at most beside ties, whatever the distribution, and mostly little more than k that reach the floor themselves. Among those the cut is
/// found exactly.
///
/// What counts here is the number of instructions that wait for each other. With few rows, those that read scores are dealt to the blocks of a cluster; what
/// is left of a block's part goes to the first block by asynchronous stores. Positions come into order by a bit each. Where a row does not fit (many equal
/// scores) its entries are read again, digit after digit.

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

#if KVIRE_CUDA_COMPILER

inline constexpr int grouped_threads = 512;

template <int Items, class Source, bool Paged, bool Clustered>
__global__ __launch_bounds__(grouped_threads, 1) void grouped_top_k_kernel(const __grid_constant__ GroupedParams<Source> p) {
  if constexpr (!Clustered || KVIRE_DEVICE_ARCH >= 900) {  // clusters are launched where there are some
    ptx::launch_dependents();
    extern __shared__ __align__(16) unsigned char dynamic[];
    using B = GroupedBlock<grouped_threads, Items, Source, Paged, Clustered>;
    B block{{{p.base, Clustered ? blockIdx.x >> p.base.block_shift : blockIdx.x},
             *reinterpret_cast<typename B::Memory*>(dynamic),
             int(threadIdx.x),
             int(threadIdx.x & 31U),
             int(threadIdx.x >> 5),
             Clustered ? ptx::cluster_rank() : 0,
             Clustered ? u32(p.base.blocks) : 1}};
    block.run(p);
  } else {
    (void)p;
    __trap();
  }
}

template <int Items, class Source, bool Paged, bool Clustered>
cudaError_t launch_grouped(const GroupedParams<Source>& p, std::int64_t rows, cudaStream_t stream) {
  constexpr std::size_t bytes = sizeof(typename GroupedBlock<grouped_threads, Items, Source, Paged, Clustered>::Memory);
  auto* kernel = grouped_top_k_kernel<Items, Source, Paged, Clustered>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  if (error != cudaSuccess) return error;
  return launch_kernel(kernel, {rows * p.base.blocks, grouped_threads, bytes, p.base.overlap, p.base.blocks}, stream, p);
}

template <class Source, bool Paged, bool Clustered>
cudaError_t launch_grouped_for(const GroupedParams<Source>& p, std::int64_t groups, std::int64_t rows, cudaStream_t stream) {
  constexpr int few = 2560 / grouped_threads, many = 8704 / grouped_threads;
  if (groups > many * grouped_threads) return cudaErrorInvalidValue;
  return groups <= few * grouped_threads ? launch_grouped<few, Source, Paged, Clustered>(p, rows, stream) : launch_grouped<many, Source, Paged, Clustered>(p, rows, stream);
}

/// `groups`: the most that a row may have. `blocks`: of a row.
template <class Source>
cudaError_t launch_grouped_rows(GroupedParams<Source> p, std::int64_t groups, std::int64_t rows, int blocks, cudaStream_t stream) {
  if (blocks < 1 || blocks > grouped_blocks || (blocks & (blocks - 1)) != 0) return cudaErrorInvalidValue;
  p.base.blocks = blocks;
  while (1 << p.base.block_shift < blocks) ++p.base.block_shift;
  const bool paged = p.base.args.page_table != nullptr;
  if (blocks > 1) return paged ? launch_grouped_for<Source, true, true>(p, groups, rows, stream) : launch_grouped_for<Source, false, true>(p, groups, rows, stream);
  return paged ? launch_grouped_for<Source, true, false>(p, groups, rows, stream) : launch_grouped_for<Source, false, false>(p, groups, rows, stream);
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

#if KVIRE_CUDA_COMPILER

/// Blocks of a row that did best for `rows` rows, on a device of `processors` multiprocessors that has clusters: two or four were never the best.
inline int grouped_top_k_blocks(std::int64_t rows, int processors) {
  constexpr int most = detail::topk::grouped_blocks;
  return rows * most <= processors ? most : 1;
}

/// Whether launch_grouped_top_k serves a selection: k up to 1,024, rows of up to 128 Ki positions that start on 16 bytes, and 16 positions or a
/// multiple a page.
inline bool grouped_top_k_serves(const body::TopKArgs& args) {
  const bool whole = args.page_table == nullptr || (args.tokens_per_page % detail::topk::group_size == 0 &&
                                                    (!args.translate || args.page_count <= 0x7FFFFFFF / args.tokens_per_page));
  return args.k >= 1 && args.k <= 1024 && args.stride <= 8192 * detail::topk::group_size && args.stride % 4 == 0 &&
         reinterpret_cast<std::uintptr_t>(args.scores) % 16 == 0 && whole;
}

/// Exact, deterministic top-k by the best of each 16 scores: `best` is [rows][ceil(stride / 16)], order_key of the best score that may be selected of
/// positions 16 i to 16 i + 15 (those that are seen and lie on a page), 0 where there is none; what it holds beyond a row's length is not used.
/// NaN scores must be none of these. `counts` (device memory, or null): bad pages are added to it. `overlap`: programmatic dependent launch; the
/// kernel waits for the stream's earlier one before it reads anything. `blocks`: of a row, 1, 2, 4 or 8 (above 1 a cluster, from sm_90 on); the selection does not
/// depend on it. Captures into graphs; allocates nothing, waits for nothing, keeps nothing from call to call.
template <int = 0>  // compiled where it is called, not wherever the header is included
cudaError_t launch_grouped_top_k(const body::TopKArgs& args, const kstd::uint32_t* best, TopKCounts* counts, cudaStream_t stream, bool overlap, int blocks = 1) {
  using detail::topk::RowGroups;
  const std::int64_t rows = std::int64_t(args.batch) * args.next_n;
  if (!grouped_top_k_serves(args)) return cudaErrorInvalidValue;
  if (rows == 0) return cudaSuccess;
  detail::topk::GroupedParams<RowGroups> p;
  p.base = detail::topk::make_params(args, counts, overlap);
  p.source = {args.scores, best, args.stride, (args.stride + detail::topk::group_size - 1) / detail::topk::group_size};
  return detail::topk::launch_grouped_rows(p, p.source.group_stride, rows, blocks, stream);
}

/// Whether launch_slot_top_k serves a selection from what a logits kernel of `ctas` CTAs leaves: k up to 1,024, next_n of 1 or 2, rows of up to 128 Ki
/// positions, and parts of them that a CTA scores of less than 64 Ki.
inline bool slot_top_k_serves(const body::TopKArgs& args, std::int64_t ctas) {
  const bool whole = !args.translate || args.page_count <= 0x7FFFFFFF / args.tokens_per_page;
  return args.k >= 1 && args.k <= sm90::CandidateSlots::most_k && args.next_n <= 2 && args.stride <= 8192 * detail::topk::group_size && ctas > 0 &&
         args.batch * args.stride < ctas * 0xF000 && whole;
}

/// The same by what a logits kernel of `ctas` CTAs has left in `slots`: of `args`, the scores are not looked at, and stride is the positions that a row may
/// have. Next_n of 1 or 2. `early_lengths`: lengths may be read before the wait for the stream's earlier kernel, which does not write them and lets this kernel
/// start only when all before it have ended.
template <int = 0>
cudaError_t launch_slot_top_k(const body::TopKArgs& args, const sm90::CandidateSlots& slots, int ctas, TopKCounts* counts, cudaStream_t stream, bool overlap,
                              int blocks = 1, bool early_lengths = false) {
  using detail::topk::SlotGroups;
  const std::int64_t rows = std::int64_t(args.batch) * args.next_n;
  if (rows == 0) return cudaSuccess;
  detail::topk::GroupedParams<SlotGroups> p;
  p.base = detail::topk::make_params(args, counts, overlap);
  p.source = {slots, ctas};
  p.early_lengths = early_lengths;
  // Parts are longer than a slot where they are pruned, all but a row's first and last.
  const std::int64_t most = (args.stride + detail::topk::group_size - 1) / detail::topk::group_size + 2 * (slots.capacity / detail::topk::group_size);
  return detail::topk::launch_grouped_rows(p, most, rows, blocks, stream);
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
