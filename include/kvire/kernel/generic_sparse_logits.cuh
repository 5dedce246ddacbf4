// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/body/sparse_logits.hpp>
#include <kvire/kernel/cuda/plain_kernel.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail {
/// body::sparse_logits, one page-table entry (or listed block) of a row a work item.
template <LayoutPolicy P>
struct SparseLogitsItem {
  using counts = LogitsCounts;
  body::SparseLogitsArgs args;
  template <LaneGroup G>
  KVIRE_HD LogitsCounts operator()(G g, kstd::int64_t item) const {
    return body::sparse_logits<P>(g, item, args);
  }
};
}  // namespace detail

#if KVIRE_CUDA_COMPILER

/// Queues sparse logits by the plain body: every policy, any heads, query tokens and kind of queries, from sm_80 on; the bits of the host.
/// Pointers in device memory; lengths beyond the page table or the stride of the scores are cut there. `counts` (or null) is added to.
/// Captures; allocates nothing, waits for nothing.
template <LayoutPolicy P>
cudaError_t launch_generic_sparse_logits(const body::SparseLogitsArgs& args, LogitsCounts* counts, cudaStream_t stream) {
  static_assert(require_layout<P>());
  return detail::launch_plain(detail::SparseLogitsItem<P>{args}, args.batch * args.entries(), counts, stream);
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
