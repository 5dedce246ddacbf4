// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <type_traits>

#include <kvire/kernel/cuda/plain_kernel.cuh>
#include <kvire/kernel/prefill_logits.hpp>
#include <kvire/kernel/sm90_prefill_logits.cuh>
#include <kvire/kernel/sparse_logits.cuh>
#include <kvire/sync/cuda/lease.hpp>

KVIRE_NAMESPACE_BEGIN

struct CudaPrefillLogitsOptions {
  LogitsCounts* counts = nullptr;  ///< in device memory; added to when the work runs
  KernelChoice kernel = KernelChoice::automatic;
  KernelServed* served = nullptr;  ///< filled by the call: which kernel it queued
};

/// The heads that the tuned prefill kernel is built for.
template <int Heads>
struct TunedPrefill {};
using DefaultTunedPrefill = TunedPrefill<64>;

namespace detail {
/// body::prefill_logits, one block of positions of a row a work item.
template <LayoutPolicy P>
struct PrefillLogitsItem {
  using counts = LogitsCounts;
  body::PrefillLogitsArgs<P> args;
  template <LaneGroup G>
  KVIRE_HD LogitsCounts operator()(G g, kstd::int64_t item) const {
    return body::prefill_logits<P>(g, item, args);
  }
};
}  // namespace detail

#if KVIRE_CUDA_COMPILER

/// Queues prefill logits by the plain body: every policy, any heads and kind of queries, from sm_80 on; the bits of the host. Pointers in device
/// memory; ranges beyond the keys or the scores are cut there. `counts` (or null) is added to. Captures; allocates nothing, waits for nothing.
template <LayoutPolicy P>
cudaError_t launch_generic_prefill_logits(const body::PrefillLogitsArgs<P>& args, LogitsCounts* counts, cudaStream_t stream) {
  static_assert(require_layout<P>());
  return detail::launch_plain(detail::PrefillLogitsItem<P>{args}, args.rows * args.blocks(), counts, stream);
}

namespace detail {

/// The tuned kernel reads the decode kernel's keys, fp4 excepted; values in the first plane, scales with them or in the second.
template <class P>
constexpr bool tuned_prefill_keys() {
  if constexpr (!tuned_keys<P>()) {
    return false;
  } else {
    return P::template element_of<role::Value> != Element::e2m1;
  }
}

/// Queues the tuned kernel if it serves the call; otherwise says in `reason` why not.
template <class P, int Heads>
bool queue_tuned_prefill(TunedPrefill<Heads>, const body::PrefillLogitsArgs<P>& args, LogitsCounts* counts, int device, cudaStream_t stream, cudaError_t& error,
                         std::string& reason) {
  if constexpr (!tuned_prefill_keys<P>()) {
    reason = std::string("it does not read keys of ") + P::name;
    return false;
  } else {
    constexpr Element key = P::template element_of<role::Value>;
    const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
    const bool paged = args.page_table != nullptr;
    int processors = 0;
    if (!device_code(device).hopper) {
      reason = "device " + std::to_string(device) + " does not run code for sm_90a, or the program has none";
    } else if (args.heads != Heads) {
      reason = "there are " + std::to_string(args.heads) + " heads, it is built for " + std::to_string(Heads);
    } else if (args.query_element != key) {
      reason = std::string("queries are ") + name_of(args.query_element) + ", keys " + name_of(key);
    } else if (!aligned(args.queries) || !aligned(paged ? args.pages : args.planes[0]) || !aligned(args.planes[P::plane_count - 1]) || args.page_stride % 16 != 0) {
      reason = "keys, scales, the page stride or queries are not aligned to 16 bytes";
    } else if (const cudaError_t e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device); e != cudaSuccess) {
      error = e;
      return true;
    } else {
      sm90::PrefillArguments a;
      a.keys = paged ? args.pages : args.planes[0];
      a.scales = paged ? nullptr : args.planes[P::plane_count - 1];
      a.page_table = args.page_table;
      a.page_stride = args.page_stride;
      a.page_count = args.page_count;
      a.key_count = args.key_count;
      a.queries = args.queries;
      a.weights = args.weights;
      a.starts = args.starts;
      a.ends = args.ends;
      a.rows = args.rows;
      a.logits = args.scores.data;
      a.logits_stride = args.stride;
      if (counts != nullptr) {
        a.bad_pages = reinterpret_cast<unsigned long long*>(&counts->bad_pages);
        a.nan_logits = reinterpret_cast<unsigned long long*>(&counts->nan_logits);
      }
      error = args.scores.element == Element::bf16 ? sm90::launch_prefill_logits<P, key, Heads, kstd::uint16_t>(a, processors, stream)
                                                   : sm90::launch_prefill_logits<P, key, Heads, float>(a, processors, stream);
      return true;
    }
    return false;
  }
}

template <class P, class Tuned>
Status queue_prefill(const body::PrefillLogitsArgs<P>& args, Stream<Cuda>& stream, cudaStream_t native, const CudaPrefillLogitsOptions& options) {
  cudaError_t error = cudaSuccess;
  std::string reason;
  const bool tuned = options.kernel != KernelChoice::plain && queue_tuned_prefill<P>(Tuned{}, args, options.counts, stream.device(), native, error, reason);
  if (!tuned) {
    if (options.kernel == KernelChoice::tuned) {
      return Error{ErrorCode::unsupported, std::string("prefill_logits<") + P::name + ">: the tuned kernel cannot serve this call: " + reason};
    }
    error = launch_generic_prefill_logits<P>(args, options.counts, native);
  }
  if (error != cudaSuccess) return stream.error(error, "prefill_logits");
  if (options.served != nullptr) *options.served = {tuned ? "sm_90a prefill logits" : "plain prefill logits", tuned};
  return {};
}

}  // namespace detail

/// prefill_logits of the host on the CUDA backend: everything in device memory. Starts and ends are not read by the call: ranges are cut to the keys
/// and scores that there are.
///
/// The plain kernel serves every policy and shape with the bits of the host. The tuned one serves fp8 and bf16 keys with queries of their
/// element on Hopper; for fp8 with the bits of the tuned sparse_logits of one query token. Which of them was queued is in CudaPrefillLogitsOptions::served.
/// Errors: extents that disagree; unsupported, with the reason, where the tuned kernel is demanded and cannot serve; those of the runtime.
template <LayoutPolicy P, class Tuned = DefaultTunedPrefill>
Status prefill_logits(const Queries& queries, Tensor<const float, 2> weights, const ContiguousKeys<P>& keys, Tensor<const std::int32_t, 1> starts,
                      Tensor<const std::int32_t, 1> ends, const ScoreTensor<2>& scores, Stream<Cuda>& stream, CudaPrefillLogitsOptions options = {}) {
  static_assert(require_layout<P>());
  require_readable<P>();
  if constexpr (readable_elements<P>) {
    const auto checked = detail::check_contiguous_prefill(queries, weights, keys, starts, ends, scores, false);
    if (!checked.ok()) return checked.error();
    const detail::DeviceScope scope(stream.device());
    return detail::queue_prefill<P, Tuned>(checked.value(), stream, stream.native(), options);
  }
  return {};
}
template <class Policy = void, class Tuned = DefaultTunedPrefill, class Lease>
Status prefill_logits(const Queries& queries, Tensor<const float, 2> weights, const Lease& keys, Tensor<const std::int32_t, 1> page_table,
                      Tensor<const std::int32_t, 1> starts, Tensor<const std::int32_t, 1> ends, const ScoreTensor<2>& scores, Stream<Cuda>& stream,
                      CudaPrefillLogitsOptions options = {}) {
  require_keys<Policy, Lease>();
  if constexpr (reads_keys<Policy, Lease>) {
    using P = typename Lease::policy;
    const auto checked = detail::check_paged_prefill<P>(queries, weights, page_table, starts, ends, scores, false);
    if (!checked.ok()) return checked.error();
    return launch(
        stream,
        [&](cudaStream_t native, const auto& view) -> Status {
          body::PrefillLogitsArgs<P> args = checked.value();
          args.pages = view.base;
          args.page_stride = view.page_stride;
          args.page_count = view.pages;
          return detail::queue_prefill<P, Tuned>(args, stream, native, options);
        },
        keys);
  }
  return {};
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
