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
  bool without_scores = false;   ///< no scores in memory: scratch of fused_selection_bytes is enough, and kernels for Hopper serve the call or it is an error
  LogitsCounts* logits_counts = nullptr;  ///< in device memory; added to when the work runs
  TopKCounts* counts = nullptr;           ///< likewise
  KernelChoice kernel = KernelChoice::automatic;  ///< tuned: the pair of kernels wherever it serves the call, not only where it pays
  bool overlap = false;            ///< programmatic dependent launch of the first kernel, as CudaSparseLogitsOptions::overlap
  KernelServed* served = nullptr;  ///< filled by the call: the kernel of the logits
};

/// Bytes of device memory that select_keys works in, for `rows` = batch * next_n query tokens and a page table of `positions` tokens a row; 256-byte
/// aligned. Less, by the scores, if the caller keeps those. Enough for every call; -1 if 63 bits cannot count them.
inline std::int64_t selection_scratch_bytes(std::int64_t rows, std::int64_t positions, bool with_scores = true) {
  const std::int64_t best = checked_mul(rows, ceil_div(positions, std::int64_t(detail::topk::group_size)) * 4), scores = checked_mul(checked_mul(rows, positions), 4);
  const std::int64_t bytes = checked_add(best, 255);
  return bytes < 0 || scores < 0 ? -1 : checked_add(bytes / 256 * 256, with_scores ? scores : 0);
}

/// Bytes with which select_keys does without scores (CudaSelectionOptions::without_scores): for each part of a row that a block of threads scores, what
/// may still be selected of it. They depend on the batch, k and the device's `processors` alone, not on the length of rows: 3.8 MB for 64 rows, k of
/// 512 and 132 processors. 0 where k is more than those kernels select.
inline std::int64_t fused_selection_bytes(std::int64_t batch, std::int64_t next_n, std::int64_t k, int processors) {
  using sm90::CandidateSlots;
  if (k > CandidateSlots::most_k) return 0;
  return CandidateSlots::bytes(CandidateSlots::slots(batch, static_cast<int>(next_n), std::int64_t(processors) * CandidateSlots::most_ctas), static_cast<int>(k));
}

#if KVIRE_CUDA_COMPILER

namespace detail {

/// Where the pair of kernels was the faster way: a short row is read as fast whole, and one that a few blocks hold in registers faster.
inline bool tuned_selection_pays(const body::TopKArgs& top, int processors) { return top.stride >= 1 << 14 && !held_top_k_fits(top, processors); }

/// What queue_selection works in: rows of scores with the best of each 16, or slots.
struct SelectionMemory {
  kstd::uint32_t* best = nullptr;
  void* slots = nullptr;
  std::int64_t slot_bytes = 0;
  bool everywhere = false;  // not only where it pays
};

/// Queues logits that leave what may be selected, and the top-k of that. False, with nothing queued, where this does not serve the call.
template <class P, int Heads, int... NextN>
bool queue_selection(TunedLogits<Heads, NextN...>, const body::SparseLogitsArgs& args, const body::TopKArgs& top, const SelectionMemory& memory,
                     const CudaSelectionOptions& options, int device, cudaStream_t stream, cudaError_t& error) {
  if constexpr (!tuned_keys<P>()) {
    return false;
  } else {
    const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
    int processors = 0;
    if (!device_code(device).hopper || args.heads != Heads) return false;
    if (args.page_stride % 16 != 0 || !aligned(args.pages) || !aligned(args.queries) || !aligned(args.weights)) return false;
    if (cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return false;
    sm90::LogitsArguments a = tuned_arguments(args, options.logits_counts);
    const int blocks = grouped_top_k_blocks(std::int64_t(args.batch) * args.next_n, processors);
    if (!memory.everywhere && !tuned_selection_pays(top, processors)) return false;
    return with_built<NextN...>(args, [&](auto element, auto next_n) {
      if constexpr (tuned_serves<P, element(), next_n()>()) {
        using Default = sm90::DefaultLogitsShape<P, element(), Heads, next_n()>;
        if (memory.slots != nullptr) {
          if constexpr (sm90::keeps_candidates<P, next_n()>()) {
            using Shape = sm90::KeepCandidates<Default>;
            const auto ctas = sm90::logits_ctas<P, Shape>(a, processors);
            const std::int64_t slots = sm90::CandidateSlots::slots(args.batch, args.next_n, ctas);
            if (!slot_top_k_serves(top, ctas) || sm90::CandidateSlots::bytes(slots, top.k) > memory.slot_bytes) return false;
            a.candidates = sm90::CandidateSlots::at(memory.slots, slots, top.k);
            error = sm90::launch_logits<P, element(), Heads, next_n(), Shape>(a, processors, stream, options.overlap);
            if (error == cudaSuccess) error = launch_slot_top_k(top, a.candidates, static_cast<int>(ctas), options.counts, stream, true, blocks, true);
            return true;
          } else {
            return false;
          }
        }
        if (!grouped_top_k_serves(top)) return false;
        a.group_best = memory.best;
        error = sm90::launch_logits<P, element(), Heads, next_n(), sm90::KeepBest<Default>>(a, processors, stream, options.overlap);
        if (error == cudaSuccess) error = launch_grouped_top_k(top, memory.best, options.counts, stream, true, blocks);
        return true;
      } else {
        return false;
      }
    });
  }
}

}  // namespace detail

/// select_keys of the host on the CUDA backend: everything in device memory. `scratch`: selection_scratch_bytes(batch * next_n, max_pages * tokens per
/// page), 256-byte aligned, free again when the work has run.
///
/// It is sparse_logits and then top_k, which starts while the logits end and reads scores that L2 evicts last (so lend the same scratch to every layer); but on Hopper, where no kernel holds rows in registers (held_top_k_fits), for k up to 1,024 and
/// rows of 16,384 to 131,072 positions, the logits kernel leaves the best of each 16 scores on its way, and a kernel that is launched while the first one
/// ends reads little more than the scores that it selects (kernel/grouped_top_k.cuh). With CudaSelectionOptions::without_scores the logits kernel leaves what
/// may still be selected instead of scores (kernel/kept_scores.cuh): for k up to 1,024, up to 131,072 positions, one or two query tokens, fp8 and bf16 keys;
/// about as fast where a block scores a few hundred positions, slower where it scores thousands. The selection is the same.
template <class Policy = void, class Tuned = DefaultTunedLogits, class Lease>
Status select_keys(const Queries& queries, Tensor<const float, 3> weights, const Lease& keys, Tensor<const std::int32_t, 2> page_table,
                   Tensor<const std::int32_t, 2> lengths, Tensor<std::int32_t, 3> selected, Tensor<std::byte, 1> scratch, Stream<Cuda>& stream,
                   CudaSelectionOptions options = {}) {
  require_keys<Policy, Lease>();
  if constexpr (reads_keys<Policy, Lease>) {
    using P = typename Lease::policy;
    const bool kept = options.scores.data != nullptr, slots = options.without_scores;
    if (kept && slots) return Error{ErrorCode::invalid_argument, "select_keys: scores are to be kept, and to be in no memory"};
    if (const auto beyond = reinterpret_cast<std::uintptr_t>(scratch.data) % 256; beyond != 0) {
      return Error{ErrorCode::invalid_argument, "select_keys: scratch is " + std::to_string(beyond) + " bytes beyond a multiple of 256"};
    }
    float later = 0;  // stands for memory that is there once the arguments have been checked
    Tensor<float, 3> scores = kept ? options.scores : detail::selection_scores(queries, page_table, P::tokens_per_page, &later);
    const auto logits = check_sparse_logits(P::name, P::dim, P::tokens_per_page, queries, weights, page_table, lengths, scores, SimdLevel::plain, false);
    if (!logits.ok()) return logits.error();
    const auto checked = check_top_k(scores, lengths, selected, detail::selection_top_k<P>(options, page_table), false);
    if (!checked.ok()) return checked.error();
    const std::int64_t rows = queries.batch * queries.next_n, positions = scores.extent[2];
    int processors = 0;
    if (const cudaError_t e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, stream.device()); e != cudaSuccess) return stream.error(e, "select_keys");
    const std::int64_t need = slots ? fused_selection_bytes(queries.batch, queries.next_n, selected.extent[2], processors) : selection_scratch_bytes(rows, positions, !kept);
    if (need < 0) return Error{ErrorCode::out_of_range, "select_keys: " + std::to_string(rows) + " rows of " + std::to_string(positions) + " scores are more bytes than 63 bits can count"};
    if (scratch.extent[0] < need || (need > 0 && scratch.data == nullptr)) {
      return Error{ErrorCode::invalid_argument, "select_keys: scratch has " + std::to_string(scratch.extent[0]) + " bytes, " + std::to_string(need) + " are needed"};
    }
    auto* best = reinterpret_cast<kstd::uint32_t*>(scratch.data);
    if (!kept && !slots && need > 0) scores.data = reinterpret_cast<float*>(scratch.data + selection_scratch_bytes(rows, positions, false));

    std::int64_t pages = 0;
    bool ran = false, done = false;  // nothing runs where a load of the lease has failed; its step says so
    const Status queued = launch(
        stream,
        [&](cudaStream_t native, const auto& view) -> Status {
          ran = true;
          body::SparseLogitsArgs args = logits.value();
          args.scores.data = scores.data;
          args.pages = view.base;
          args.page_stride = view.page_stride;
          args.page_count = view.pages;
          body::TopKArgs top = checked.value();
          top.scores = scores.data;
          top.page_count = view.pages;
          pages = view.pages;
          cudaError_t error = cudaSuccess;
          detail::SelectionMemory memory;
          memory.everywhere = options.kernel == KernelChoice::tuned || slots;
          if (slots) {
            memory.slots = scratch.data;
            memory.slot_bytes = scratch.extent[0];
          } else {
            memory.best = best;
          }
          done = options.kernel != KernelChoice::plain &&
                 detail::queue_selection<P>(Tuned{}, args, top, memory, options, stream.device(), native, error);
          if (done && options.served != nullptr) *options.served = {"sm_90a selection", true};
          return error == cudaSuccess ? Status() : Status(stream.error(error, "select_keys"));
        },
        keys);
    if (!queued.ok() || !ran || done) return queued;
    if (slots) return Error{ErrorCode::unsupported, std::string("select_keys<") + P::name + ">: no kernel can serve this call without scores in memory"};

    KernelServed served{nullptr};  // stays so where the load has failed since
    const Status scored = sparse_logits<Policy, Tuned>(queries, weights, keys, page_table, lengths, scores, stream,
                                                       {.counts = options.logits_counts, .kernel = options.kernel, .overlap = options.overlap, .served = &served});
    if (!scored.ok() || served.name == nullptr) return scored;
    if (options.served != nullptr) *options.served = served;
    auto top = detail::selection_top_k<P, CudaTopKOptions>(options, page_table);
    top.pages = pages;
    top.counts = options.counts;
    top.overlap = true;
    if (options.kernel == KernelChoice::plain) top.kernel = KernelChoice::plain;
    return top_k(scores, lengths, selected, stream, top);
  }
  return {};
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
