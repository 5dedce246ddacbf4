// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/body/migrate.hpp>
#include <kvire/kernel/cuda/plain_kernel.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail {
/// body::migrate, one row a work item.
template <LayoutPolicy From, LayoutPolicy To>
struct MigrateItem {
  using counts = CopyCounts;
  body::MigrateArgs args;
  template <LaneGroup G>
  KVIRE_HD CopyCounts operator()(G g, kstd::int64_t item) const {
    return body::migrate<From, To>(g, item, args);
  }
};

#if KVIRE_CUDA_COMPILER

// Queues the migration of `n` pages from layout `From` to layout `To`, for transfers, which have checked that the two may be migrated. Pointers
// in memory that the device can reach; `counts` (or null) is added to, in pages. Captures; allocates nothing, waits for nothing.
template <LayoutPolicy From, LayoutPolicy To>
cudaError_t launch_migrate(const body::MigrateArgs& args, std::int64_t n, CopyCounts* counts, cudaStream_t stream) {
  static_assert(require_layout<From>() && require_layout<To>());
  return launch_plain(MigrateItem<From, To>{args}, n * From::tokens_per_page, counts, stream);
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail

KVIRE_NAMESPACE_END
