// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>

#include <kvire/kernel/choice.hpp>
#include <kvire/kernel/cuda/device_code.cuh>
#include <kvire/kernel/generic_sparse_logits.cuh>
#include <kvire/kernel/sm80_sparse_logits.cuh>
#include <kvire/kernel/sm90_sparse_logits.cuh>
#include <kvire/kernel/sparse_logits.hpp>
#include <kvire/sync/cuda/lease.hpp>

KVIRE_NAMESPACE_BEGIN

struct CudaSparseLogitsOptions {
  LogitsCounts* counts = nullptr;  ///< in device memory; added to when the work runs
  KernelChoice kernel = KernelChoice::automatic;
  bool portable = false;  ///< pass over kernels of one GPU generation: of the tuned ones only that of every GPU from sm_80 on
  bool overlap = false;   ///< programmatic dependent launch: the Hopper kernel may start while the stream's last kernel ends. It waits for the end
                          ///< of that one before it reads or writes anything, so the stream's order holds; 0.5 to 1 us less a call
  KernelServed* served = nullptr;  ///< filled by the call: which kernel it queued
  Tensor<const std::int32_t, 2> blocks = {};  ///< in device memory; as SparseLogitsOptions::blocks
  int multiprocessors = 0;  ///< most that a tuned kernel takes; 0: all of the device's. Others are free for transfers with Pace::apart
};

/// What tuned kernels are built for: the heads and, each by its own kernels, the query tokens of a row. Every kernel costs time to compile; for Hopper
/// there are two, one of them for bf16 scores and lists of blocks.
template <int Heads, int... NextN>
struct TunedLogits {};
using DefaultTunedLogits = TunedLogits<64, 1, 2>;

#if KVIRE_CUDA_COMPILER

namespace detail {

/// Tuned kernels read keys of one field: e4m3 with one f32 scale, bf16, or e2m1 with a ue8m0 scale for each 32, of 64 or 128 dims; values from the
/// page's first byte on, scales right behind each key or behind all of them.
template <class P>
constexpr bool tuned_keys() {
  if constexpr (!P::template has<role::Value>) {
    return false;
  } else {
    constexpr Element key = P::template element_of<role::Value>;
    if (!reader_accepts<P, sm90::LogitsReader>() || (P::dim != 64 && P::dim != 128) || !sm90::in_order<P>()) return false;
    if constexpr (P::template has<role::Scale>) {
      constexpr Element scale = P::template element_of<role::Scale>;
      constexpr int scales = P::template count_of<role::Scale>;
      return (key == Element::e4m3 && scale == Element::f32 && scales == 1 && P::Scaling::formula != ScaleFormula::none) ||
             (key == Element::e2m1 && scale == Element::ue8m0 && scales * 32 == P::dim);
    } else {
      return key == Element::bf16;
    }
  }
}

template <class P, Element Query, int NextN>
constexpr bool tuned_serves() {
  if constexpr (!tuned_keys<P>()) {
    return false;
  } else {
    constexpr Element key = P::template element_of<role::Value>;
    return (key == Query || key == Element::e2m1) && (Query == Element::e4m3 || Query == Element::bf16) && NextN >= 1 && NextN <= 6;
  }
}
/// The portable kernel reads keys in 16-byte steps.
template <class P, Element Query, int NextN>
constexpr bool portable_serves() {
  if constexpr (!tuned_serves<P, Query, NextN>()) {
    return false;
  } else {
    return reader_accepts<P, sm80::LogitsReader>() && P::template offset<role::Value>(1) * 8 == P::dim * bits(P::template element_of<role::Value>);
  }
}

inline sm90::LogitsArguments tuned_arguments(const body::SparseLogitsArgs& args, LogitsCounts* counts) {
  sm90::LogitsArguments a;
  a.pages = args.pages;
  a.page_stride = args.page_stride;
  a.page_count = args.page_count;
  a.batch = args.batch;
  a.queries = args.queries;
  a.weights = args.weights;
  a.page_table = args.page_table;
  a.table_stride = args.max_pages;
  a.table_width = static_cast<std::int32_t>(args.max_pages);
  a.lengths = args.lengths;
  a.lengths_per_query = args.lengths_per_query;
  a.logits = args.scores.data;
  a.logits_stride = args.stride;
  a.bf16 = args.scores.element == Element::bf16;
  a.blocks = args.blocks;
  a.max_blocks = args.max_blocks;
  if (counts != nullptr) {
    a.bad_pages = reinterpret_cast<unsigned long long*>(&counts->bad_pages);
    a.nan_logits = reinterpret_cast<unsigned long long*>(&counts->nan_logits);
  }
  return a;
}

/// Calls `queue` with the one of the built (query element, query tokens) pairs that the call asks for; false if there is none or it declines.
template <int... NextN, class Queue>
bool with_built(const body::SparseLogitsArgs& args, Queue&& queue) {
  const auto with = [&]<Element Query>(std::integral_constant<Element, Query> element) {
    return ((args.next_n == NextN && queue(element, std::integral_constant<int, NextN>{})) || ...);
  };
  if (args.query_element == Element::e4m3) return with(std::integral_constant<Element, Element::e4m3>{});
  if (args.query_element == Element::bf16) return with(std::integral_constant<Element, Element::bf16>{});
  return false;
}

/// Queues the best tuned kernel that serves the call and returns its name; null, with the reason, if none does.
template <class P, int Heads, int... NextN>
const char* queue_tuned(TunedLogits<Heads, NextN...>, const body::SparseLogitsArgs& args, const CudaSparseLogitsOptions& options, int device,
                        cudaStream_t stream, cudaError_t& error, std::string& reason) {
  const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  if constexpr (!tuned_keys<P>()) {
    reason = std::string("it does not read pages of ") + P::name + " with " + std::to_string(P::tokens_per_page) + " tokens";
  } else {
    int processors = 0;
    int shared = 0;
    const DeviceCode code = device_code(device);
    if (!code.hopper && !code.portable) {
      reason = "device " + std::to_string(device) + " runs neither code for sm_90a nor for sm_80, or the program has none";
    } else if (args.heads != Heads) {
      reason = "there are " + std::to_string(args.heads) + " heads, it is built for " + std::to_string(Heads);
    } else if (args.page_stride % 16 != 0 || !aligned(args.pages) || !aligned(args.queries) || !aligned(args.weights)) {
      reason = "pages, their stride, queries or weights are not aligned to 16 bytes";
    } else if (error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device); error != cudaSuccess) {
      return "";
    } else if (error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device); error != cudaSuccess) {
      return "";
    } else {
      if (options.multiprocessors > 0) processors = std::min(processors, options.multiprocessors);
      const sm90::LogitsArguments a = tuned_arguments(args, options.counts);
      const bool hopper = code.hopper && !options.portable && with_built<NextN...>(args, [&](auto element, auto next_n) {
                            if constexpr (tuned_serves<P, element(), next_n()>()) {
                              using Shape = sm90::DefaultLogitsShape<P, element(), Heads, next_n()>;
                              error = a.bf16 || a.blocks != nullptr
                                          ? sm90::launch_logits<P, element(), Heads, next_n(), sm90::WithOptions<Shape>>(a, processors, stream, options.overlap)
                                          : sm90::launch_logits<P, element(), Heads, next_n(), Shape>(a, processors, stream, options.overlap);
                              return true;
                            } else {
                              return false;
                            }
                          });
      if (hopper) return "sm_90a sparse logits";
      const bool portable = code.portable && with_built<NextN...>(args, [&](auto element, auto next_n) {
                              if constexpr (portable_serves<P, element(), next_n()>()) {
                                if (sm80::shared_bytes<P, element(), Heads, next_n()> > shared) return false;
                                error = sm80::launch_logits<P, element(), Heads, next_n()>(a, processors, stream);
                                return true;
                              } else {
                                return false;
                              }
                            });
      if (portable) return "sm_80 sparse logits";
      reason = std::string("it is not built for ") + name_of(args.query_element) + " queries of " + std::to_string(args.next_n) +
               " tokens a row and these keys, or needs more shared memory than the device has";
    }
  }
  return nullptr;
}

}  // namespace detail

/// sparse_logits of the host on the CUDA backend: queries, weights, page table, lengths, scores and `counts` in device memory. Lengths are not
/// read by the call: those below 0 are taken as 0, those beyond the page table or the scores are cut there.
///
/// The plain kernel serves every policy and shape with the bits of the host. Two kernels on tensor cores serve what `Tuned` names, within the
/// documented tolerance of the plain kernel's: one for Hopper and a portable one for every GPU from sm_80 on; the first that can takes the call.
/// They store scores so that L2 evicts them last: memory that every layer writes again hardly ever goes to DRAM, and a top-k behind them reads L2, if as much of
/// it is set aside (set_aside_l2; 11 MiB are by default on an H200).
/// Which of the three was queued is in CudaSparseLogitsOptions::served.
/// Errors: extents that disagree; unsupported, with the reason, where the tuned kernel is demanded and cannot serve; those of the runtime.
template <class Policy = void, class Tuned = DefaultTunedLogits, class Lease>
Status sparse_logits(const Queries& queries, Tensor<const float, 3> weights, const Lease& keys, Tensor<const std::int32_t, 2> page_table,
                     Tensor<const std::int32_t, 2> lengths, const ScoreTensor<3>& scores, Stream<Cuda>& stream, CudaSparseLogitsOptions options = {}) {
  require_keys<Policy, Lease>();
  if constexpr (reads_keys<Policy, Lease>) {
    using P = typename Lease::policy;
    const auto checked =
        check_sparse_logits(P::name, P::dim, P::tokens_per_page, queries, weights, page_table, lengths, scores, SimdLevel::plain, false, options.blocks);
    if (!checked.ok()) return checked.error();
    return launch(
        stream,
        [&](cudaStream_t native, const auto& view) -> Status {
          body::SparseLogitsArgs args = checked.value();
          args.pages = view.base;
          args.page_stride = view.page_stride;
          args.page_count = view.pages;
          cudaError_t error = cudaSuccess;
          std::string reason;
          const char* tuned = options.kernel == KernelChoice::plain ? nullptr : detail::queue_tuned<P>(Tuned{}, args, options, stream.device(), native, error, reason);
          if (tuned == nullptr) {
            if (options.kernel == KernelChoice::tuned) {
              return Error{ErrorCode::unsupported, std::string("sparse_logits<") + P::name + ">: no tuned kernel can serve this call: " + reason};
            }
            error = launch_generic_sparse_logits<P>(args, options.counts, native);
          }
          if (error != cudaSuccess) return stream.error(error, "sparse_logits");
          if (options.served != nullptr) *options.served = {tuned != nullptr ? tuned : "plain sparse logits", tuned != nullptr};
          return {};
        },
        keys);
  }
  return {};
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
