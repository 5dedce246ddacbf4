// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include <kvire/kernel/cuda_top_k.cuh>
#include <kvire/kernel/grouped_top_k.cuh>
#include <kvire/kernel/selection.hpp>
#include <kvire/kernel/sparse_logits.cuh>

KVIRE_NAMESPACE_BEGIN

struct CudaSelectionOptions {
  TopKOrder order = TopKOrder::by_position;
  bool translate = false;        ///< list token slots instead of positions
  Tensor<float, 3> scores = {};  ///< in device memory; as SelectionOptions::scores
  LogitsCounts* logits_counts = nullptr;  ///< in device memory; added to when the work runs
  TopKCounts* counts = nullptr;           ///< likewise
  KernelChoice kernel = KernelChoice::automatic;  ///< tuned: the pair of kernels wherever it serves the call, not only where it pays
  bool overlap = false;            ///< programmatic dependent launch of the first kernel, as CudaSparseLogitsOptions::overlap
  KernelServed* served = nullptr;  ///< filled by the call: the kernel of the logits
};

/// Bytes of device memory that select_keys works in, for `rows` = batch * next_n query tokens and a page table of `positions` tokens a row; 256-byte
/// aligned. Less, by the scores, if the caller keeps those.
inline std::int64_t selection_scratch_bytes(std::int64_t rows, std::int64_t positions, bool with_scores = true) {
  const std::int64_t best = ceil_div(ceil_div(positions, std::int64_t(detail::topk::group_size)) * rows * 4, std::int64_t(256)) * 256;
  return best + (with_scores ? rows * positions * 4 : 0);
}

#if KVIRE_CUDA_COMPILER

namespace detail {

/// Where the pair was the faster one: a short row is read as fast whole, and a single long one by many blocks.
inline bool grouped_top_k_pays(const body::TopKArgs& top) {
  return top.stride >= 1 << 14 && (top.stride <= 1 << 16 || std::int64_t(top.batch) * top.next_n >= 8);
}

/// Queues logits that leave the best of each 16 scores, and the top-k by them; false, with nothing queued, where the pair does not serve the call.
template <class P, int Heads, int... NextN>
bool queue_selection(TunedLogits<Heads, NextN...>, const body::SparseLogitsArgs& args, const body::TopKArgs& top, kstd::uint32_t* best,
                     const CudaSelectionOptions& options, int device, cudaStream_t stream, cudaError_t& error) {
  if constexpr (!tuned_keys<P>()) {
    return false;
  } else {
    const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
    int processors = 0;
    if (!logits_code(device).hopper || args.heads != Heads || !grouped_top_k_serves(top)) return false;
    if (options.kernel != KernelChoice::tuned && !grouped_top_k_pays(top)) return false;
    if (args.page_stride % 16 != 0 || !aligned(args.pages) || !aligned(args.queries) || !aligned(args.weights)) return false;
    if (cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return false;
    sm90::LogitsArguments a = tuned_arguments(args, options.logits_counts);
    a.group_best = best;
    const bool queued = with_built<NextN...>(args, [&](auto element, auto next_n) {
      if constexpr (tuned_serves<P, element(), next_n()>()) {
        using Shape = sm90::KeepBest<sm90::DefaultLogitsShape<P, element(), Heads, next_n()>>;
        error = sm90::launch_logits<P, element(), Heads, next_n(), Shape>(a, processors, stream, options.overlap);
        return true;
      } else {
        return false;
      }
    });
    if (queued && error == cudaSuccess) error = launch_grouped_top_k(top, best, options.counts, stream, true);
    return queued;
  }
}

}  // namespace detail

/// select_keys of the host on the CUDA backend: everything in device memory. `scratch`: selection_scratch_bytes(batch * next_n, max_pages * tokens per
/// page), 256-byte aligned, free again when the work has run.
///
/// On Hopper, for k up to 1,024 and rows of 16,384 to 131,072 positions, where it pays, the logits kernel leaves the best of each 16 scores on its way, and the top-k reads
/// little more than the scores that it selects (kernel/grouped_top_k.cuh), in a kernel that is launched while the first one ends. Otherwise sparse_logits
/// and top_k follow each other. The selection is the same.
template <class Policy = void, class Tuned = DefaultTunedLogits, class Lease>
Status select_keys(const Queries& queries, Tensor<const float, 3> weights, const Lease& keys, Tensor<const std::int32_t, 2> page_table,
                   Tensor<const std::int32_t, 2> lengths, Tensor<std::int32_t, 3> selected, Tensor<std::byte, 1> scratch, Stream<Cuda>& stream,
                   CudaSelectionOptions options = {}) {
  static_assert(require_lease<Lease>());
  if constexpr (!std::is_void_v<Policy>) static_assert(require_kernel_policy<Policy, Lease>());
  if constexpr (is_lease<Lease>) {
    using P = typename Lease::policy;
    const bool kept = options.scores.data != nullptr;
    const std::int64_t rows = queries.batch * queries.next_n;
    const std::int64_t positions = kept ? options.scores.extent[2] : page_table.extent[1] * P::tokens_per_page;
    const std::int64_t need = selection_scratch_bytes(rows, positions, !kept);
    if (scratch.extent[0] < need || (need > 0 && scratch.data == nullptr)) {
      return Error{ErrorCode::invalid_argument, "select_keys: scratch has " + std::to_string(scratch.extent[0]) + " bytes, " + std::to_string(need) + " are needed"};
    }
    auto* best = reinterpret_cast<kstd::uint32_t*>(scratch.data);
    const Tensor<float, 3> scores =
        kept ? options.scores
             : detail::selection_scores(queries, page_table, P::tokens_per_page, reinterpret_cast<float*>(scratch.data + selection_scratch_bytes(rows, positions, false)));
    const auto logits = check_sparse_logits(P::name, P::dim, P::tokens_per_page, queries, weights, page_table, lengths, scores, SimdLevel::plain, false);
    if (!logits.ok()) return logits.error();
    TopKOptions plain;
    plain.order = options.order;
    plain.page_table = page_table;
    plain.tokens_per_page = P::tokens_per_page;
    plain.translate = options.translate;
    const auto checked = check_top_k(scores, lengths, selected, plain, false);
    if (!checked.ok()) return checked.error();

    std::int64_t pages = 0;
    bool done = false;
    const Status queued = launch(
        stream,
        [&](cudaStream_t native, const auto& view) -> Status {
          body::SparseLogitsArgs args = logits.value();
          args.pages = view.base;
          args.page_stride = view.page_stride;
          args.page_count = view.pages;
          body::TopKArgs top = checked.value();
          top.page_count = view.pages;
          pages = view.pages;
          cudaError_t error = cudaSuccess;
          done = options.kernel != KernelChoice::plain &&
                 detail::queue_selection<P>(Tuned{}, args, top, best, options, stream.device(), native, error);
          if (done && options.served != nullptr) *options.served = {"sm_90a selection", true};
          return error == cudaSuccess ? Status() : Status(stream.error(error, "select_keys"));
        },
        keys);
    if (!queued.ok() || done) return queued;

    const Status scored = sparse_logits<Policy, Tuned>(queries, weights, keys, page_table, lengths, scores, stream,
                                                       {.counts = options.logits_counts, .kernel = options.kernel, .overlap = options.overlap, .served = options.served});
    if (!scored.ok()) return scored;
    CudaTopKOptions top;
    top.order = options.order;
    top.page_table = page_table;
    top.tokens_per_page = P::tokens_per_page;
    top.pages = pages;
    top.translate = options.translate;
    top.counts = options.counts;
    top.overlap = true;
    if (options.kernel == KernelChoice::plain) top.kernel = KernelChoice::plain;
    return top_k(scores, lengths, selected, stream, top);
  }
  return {};
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
