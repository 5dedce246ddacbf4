// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/body/top_k.hpp>
#include <kvire/kernel/cuda/plain_kernel.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail {
/// body::top_k, one row a work item.
struct TopKItem {
  using counts = TopKCounts;
  body::TopKArgs args;
  template <LaneGroup G>
  KVIRE_HD TopKCounts operator()(G g, kstd::int64_t row) const {
    return body::top_k(g, row, args);
  }
};
}  // namespace detail

#if KVIRE_CUDA_COMPILER

/// Queues a top-k by the plain body, a warp a row: every k and any length of rows. By score it needs `args.scratch`, as large as the
/// selection. Pointers in device memory; `counts` (or null) is added to. Captures; allocates nothing, waits for nothing.
template <int = 0>  // compiled where it is called, not wherever the header is included
cudaError_t launch_generic_top_k(const body::TopKArgs& args, TopKCounts* counts, cudaStream_t stream) {
  if (args.order == TopKOrder::by_score && args.scratch == nullptr) return cudaErrorInvalidValue;
  return detail::launch_plain(detail::TopKItem{args}, std::int64_t(args.batch) * args.next_n, counts, stream);
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
