// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/exec/cuda/stream.hpp>
#include <kvire/kernel/choice.hpp>
#include <kvire/kernel/cuda/device_code.cuh>
#include <kvire/kernel/generic_top_k.cuh>
#include <kvire/kernel/held_top_k.cuh>
#include <kvire/kernel/top_k.cuh>
#include <kvire/kernel/top_k.hpp>

KVIRE_NAMESPACE_BEGIN

struct CudaTopKOptions {
  TopKOrder order = TopKOrder::by_position;
  Tensor<const std::int32_t, 2> page_table = {};  ///< in device memory; the rest as in TopKOptions
  std::int64_t tokens_per_page = 0;
  std::int64_t pages = detail::most_int32;
  bool translate = false;

  TopKCounts* counts = nullptr;  ///< in device memory; added to when the work runs
  KernelChoice kernel = KernelChoice::automatic;
  KernelServed* served = nullptr;  ///< filled by the call: which kernel it queued
  bool overlap = false;  ///< programmatic dependent launch from sm_90 on: the tuned kernel starts while the stream's last kernel ends, and waits for that end before it reads what it goes by
};

#if KVIRE_CUDA_COMPILER

namespace detail {
/// The faster tuned kernel. `clusters`: device and code know them, and dependent launch.
template <int = 0>
cudaError_t queue_tuned_top_k(const body::TopKArgs& args, TopKCounts* counts, cudaStream_t stream, int processors, bool clusters, bool overlap) {
  const std::int64_t rows = std::int64_t(args.batch) * args.next_n;
  if (clusters && held_top_k_pays(args, processors)) return launch_held_top_k(args, counts, stream, held_top_k_blocks(rows, args.stride, processors), overlap);
  return launch_top_k(args, counts, stream, top_k_shape(rows, args.stride, processors, clusters), overlap && clusters);
}
// Of the scratch that selections by score need beside the tuned kernel.
template <int = 0>
cudaError_t queue_generic_top_k(body::TopKArgs args, TopKCounts* counts, cudaStream_t stream) {
  void* scratch = nullptr;
  if (args.order == TopKOrder::by_score) {
    const std::int64_t slots = std::int64_t(args.batch) * args.next_n * args.k;
    if (const cudaError_t e = cudaMallocAsync(&scratch, static_cast<std::size_t>(slots) * sizeof(std::int32_t), stream); e != cudaSuccess) return e;
    args.scratch = static_cast<std::int32_t*>(scratch);
  }
  const cudaError_t error = launch_generic_top_k(args, counts, stream);
  const cudaError_t freed = scratch != nullptr ? cudaFreeAsync(scratch, stream) : cudaSuccess;
  return error != cudaSuccess ? error : freed;
}
}  // namespace detail

/// top_k of the host on the CUDA backend: scores, lengths, page table, `selected` and `counts` in device memory. Lengths are not read by the
/// call: those below 0 are taken as 0, those beyond a row or its page table are cut there. The tuned kernel takes k up to 2,048 and rows up to
/// 2^28 on devices with 160 KiB of shared memory a block; the plain one takes all, with the same answer.
template <class Backend>
  requires std::is_same_v<Backend, Cuda>  // a template, so that its kernels are compiled where it is called alone
Status top_k(Tensor<const float, 3> scores, Tensor<const std::int32_t, 2> lengths, Tensor<std::int32_t, 3> selected, Stream<Backend>& stream,
             CudaTopKOptions options = {}) {
  TopKOptions plain;
  plain.order = options.order;
  plain.page_table = options.page_table;
  plain.tokens_per_page = options.tokens_per_page;
  plain.pages = options.pages;
  plain.translate = options.translate;
  const auto checked = check_top_k(scores, lengths, selected, plain, false);
  if (!checked.ok()) return checked.error();
  const body::TopKArgs& args = checked.value();

  std::string reason;
  detail::DeviceScope scope(stream.device());
  const auto attribute = [&](cudaDeviceAttr what) {
    int value = 0;
    return cudaDeviceGetAttribute(&value, what, stream.device()) == cudaSuccess ? value : 0;
  };
  if (args.k > detail::topk::max_k) {
    reason = "k is " + std::to_string(args.k) + ", above " + std::to_string(detail::topk::max_k);
  } else if (args.stride > (std::int64_t(1) << detail::topk::position_bits)) {
    reason = "rows have " + std::to_string(args.stride) + " scores";
  } else if (attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) < 160 * 1024) {
    reason = "device " + std::to_string(stream.device()) + " has too little shared memory a block";
  }
  const bool tuned = options.kernel != KernelChoice::plain && reason.empty();
  if (!tuned && options.kernel == KernelChoice::tuned) return Error{ErrorCode::unsupported, "top_k: the tuned kernel cannot serve this call: " + reason};
  cudaError_t error = cudaSuccess;
  if (tuned) {
    const bool sm90 = detail::device_code(stream.device()).overlap;  // the code that may overlap has clusters too
    error = detail::queue_tuned_top_k(args, options.counts, stream.native(), attribute(cudaDevAttrMultiProcessorCount), sm90, options.overlap);
  } else {
    error = detail::queue_generic_top_k(args, options.counts, stream.native());
  }
  if (error == cudaSuccess && options.served != nullptr) *options.served = {tuned ? "tuned top-k" : "plain top-k", tuned};
  return error == cudaSuccess ? Status() : Status(stream.error(error, "top_k"));
}

/// The same with k given in the code: `selected` must be [batch][next_n][K].
template <int K, class Backend>
  requires(K > 0 && std::is_same_v<Backend, Cuda>)
Status top_k(Tensor<const float, 3> scores, Tensor<const std::int32_t, 2> lengths, Tensor<std::int32_t, 3> selected, Stream<Backend>& stream,
             CudaTopKOptions options = {}) {
  if (selected.extent[2] != K) {
    return Error{ErrorCode::mismatch, "top_k: selected has " + std::to_string(selected.extent[2]) + " slots a row, k is " + std::to_string(K)};
  }
  return top_k(scores, lengths, selected, stream, options);
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
