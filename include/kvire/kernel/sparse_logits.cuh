// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <string>

#include <kvire/kernel/choice.hpp>
#include <kvire/kernel/generic_sparse_logits.cuh>
#include <kvire/kernel/sm90_sparse_logits.cuh>
#include <kvire/kernel/sparse_logits.hpp>
#include <kvire/sync/cuda/lease.hpp>

KVIRE_NAMESPACE_BEGIN

struct CudaSparseLogitsOptions {
  LogitsCounts* counts = nullptr;  ///< in device memory; added to when the work runs
  KernelChoice kernel = KernelChoice::automatic;
  KernelServed* served = nullptr;  ///< filled by the call: which kernel it queued
  Tensor<const std::int32_t, 2> blocks = {};  ///< in device memory; as SparseLogitsOptions::blocks
};

/// What tuned kernels are built for: the heads and, each by its own kernel, the query tokens of a row. Every kernel costs time to compile.
template <int Heads, int... NextN>
struct TunedLogits {};
using DefaultTunedLogits = TunedLogits<64, 1, 2>;

#if KVIRE_CUDA_COMPILER

namespace detail {

/// The tuned kernel reads keys of one field: e4m3 with one f32 scale, bf16, or e2m1 with a ue8m0 scale for each 32, of 64 or 128 dims.
template <class P>
constexpr bool tuned_keys() {
  if constexpr (!P::template has<role::Value>) {
    return false;
  } else {
    constexpr Element key = P::template element_of<role::Value>;
    if (!reader_accepts<P, sm90::LogitsReader>() || P::template count_of<role::Value> != P::dim || (P::dim != 64 && P::dim != 128)) return false;
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

template <class P, Element Query, int Heads, int NextN>
constexpr bool tuned_serves() {
  if constexpr (!tuned_keys<P>()) {
    return false;
  } else {
    constexpr Element key = P::template element_of<role::Value>;
    constexpr int query_bytes = NextN * Heads * P::dim * bits(Query) / 8;
    return (key == Query || key == Element::e2m1) && (Query == Element::e4m3 || Query == Element::bf16) && (Heads == 32 || Heads == 64) &&
           query_bytes <= 64 * 1024;
  }
}

/// Uses much shared memory where it is compiled for sm_90a and none elsewhere: its attributes tell which of the two a device has got.
template <int Bytes>
__global__ void sm90a_probe_kernel(int* out) {
#if KVIRE_SM90A
  __shared__ int marker[Bytes / sizeof(int)];
  marker[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = marker[out[threadIdx.x]];
#else
  (void)out;
#endif
}

/// Whether the program has code for sm_90a and the device runs it. Asked once a device.
inline bool runs_sm90a(int device) {
  static std::atomic<int> known[64];  // 0: not asked yet
  std::atomic<int>& cached = known[device & 63];
  int answer = cached.load(std::memory_order_relaxed);
  if (answer == 0 || device > 63) {
    constexpr int bytes = 4096;
    int major = 0;
    int minor = 0;
    cudaFuncAttributes attributes{};
    const bool yes = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 && minor == 0 &&
                     cudaFuncGetAttributes(&attributes, sm90a_probe_kernel<bytes>) == cudaSuccess && attributes.sharedSizeBytes >= bytes;
    (void)cudaGetLastError();
    answer = yes ? 1 : 2;
    cached.store(answer, std::memory_order_relaxed);
  }
  return answer == 1;
}

/// Queues the tuned kernel if it serves the call; otherwise says in `reason` why not.
template <class P, Element Query, int Heads, int... NextN>
bool queue_tuned_for(const body::SparseLogitsArgs& args, LogitsCounts* counts, int processors, cudaStream_t stream, cudaError_t& error) {
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
  a.logits = args.scores.f32();
  a.logits_stride = args.stride;
  if (counts != nullptr) {
    a.bad_pages = reinterpret_cast<unsigned long long*>(&counts->bad_pages);
    a.nan_logits = reinterpret_cast<unsigned long long*>(&counts->nan_logits);
  }
  const auto one = [&]<int N>(std::integral_constant<int, N>) {
    if constexpr (tuned_serves<P, Query, Heads, N>()) {
      if (args.next_n != N) return false;
      error = sm90::launch_logits<P, Query, Heads, N>(a, processors, stream);
      return true;
    } else {
      return false;
    }
  };
  return (one(std::integral_constant<int, NextN>{}) || ...);
}

template <class P, int Heads, int... NextN>
bool queue_tuned(TunedLogits<Heads, NextN...>, const body::SparseLogitsArgs& args, LogitsCounts* counts, int device, cudaStream_t stream, cudaError_t& error,
                 std::string& reason) {
  const auto aligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; };
  if constexpr (!tuned_keys<P>()) {
    reason = std::string("it does not read pages of ") + P::name + " with " + std::to_string(P::tokens_per_page) + " tokens";
    return false;
  } else {
    int processors = 0;
    if (!runs_sm90a(device)) {
      reason = "device " + std::to_string(device) + " does not run code for sm_90a, or the program has none";
    } else if (args.scores.element != Element::f32 || args.blocks != nullptr) {
      reason = args.blocks != nullptr ? "blocks are listed" : "scores are bf16";
    } else if (args.heads != Heads) {
      reason = "there are " + std::to_string(args.heads) + " heads, it is built for " + std::to_string(Heads);
    } else if (args.page_stride % 16 != 0 || !aligned(args.pages) || !aligned(args.queries) || !aligned(args.weights)) {
      reason = "pages, their stride, queries or weights are not aligned to 16 bytes";
    } else if (const cudaError_t e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device); e != cudaSuccess) {
      error = e;
      return true;
    } else {
      const bool served = args.query_element == Element::e4m3   ? queue_tuned_for<P, Element::e4m3, Heads, NextN...>(args, counts, processors, stream, error)
                          : args.query_element == Element::bf16 ? queue_tuned_for<P, Element::bf16, Heads, NextN...>(args, counts, processors, stream, error)
                                                                : false;
      if (served) return true;
      reason = std::string("it is not built for ") + name_of(args.query_element) + " queries of " + std::to_string(args.next_n) + " tokens a row and these keys";
    }
    return false;
  }
}

}  // namespace detail

/// sparse_logits of the host on the CUDA backend: queries, weights, page table, lengths, scores and `counts` in device memory. Lengths are not
/// read by the call: those below 0 are taken as 0, those beyond the page table or the scores are cut there.
///
/// The plain kernel serves every policy and shape with the bits of the host. The tuned one serves what `Tuned` names, on Hopper: its sums run
/// on tensor cores, within the documented tolerance of the plain kernel's. Which of them was queued is in CudaSparseLogitsOptions::served.
/// Errors: extents that disagree; unsupported, with the reason, where the tuned kernel is demanded and cannot serve; those of the runtime.
template <class Policy = void, class Tuned = DefaultTunedLogits, class Lease>
Status sparse_logits(const Queries& queries, Tensor<const float, 3> weights, const Lease& keys, Tensor<const std::int32_t, 2> page_table,
                     Tensor<const std::int32_t, 2> lengths, const ScoreTensor<3>& scores, Stream<Cuda>& stream, CudaSparseLogitsOptions options = {}) {
  static_assert(require_lease<Lease>());
  if constexpr (!std::is_void_v<Policy>) static_assert(require_kernel_policy<Policy, Lease>());
  if constexpr (is_lease<Lease>) {
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
          const bool tuned =
              options.kernel != KernelChoice::plain && detail::queue_tuned<P>(Tuned{}, args, options.counts, stream.device(), native, error, reason);
          if (!tuned) {
            if (options.kernel == KernelChoice::tuned) {
              return Error{ErrorCode::unsupported, std::string("sparse_logits<") + P::name + ">: the tuned kernel cannot serve this call: " + reason};
            }
            error = launch_generic_sparse_logits<P>(args, options.counts, native);
          }
          if (error != cudaSuccess) return stream.error(error, "sparse_logits");
          if (options.served != nullptr) *options.served = {tuned ? "sm_90a sparse logits" : "plain sparse logits", tuned};
          return {};
        },
        keys);
  }
  return {};
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
