// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include <kvire/sync/lease.hpp>

KVIRE_NAMESPACE_BEGIN
namespace detail {

/// `n` entries of a page table as a kernel under the lease may follow them: pages of the pool that the lease does not name become ids beyond it, which
/// kernels count and leave alone. `own` holds what differs from `table`. Made when the kernel runs, since the table may be written until then.
template <class Lease>
const std::int32_t* readable_pages(const Lease& lease, const std::int32_t* table, std::int64_t n, std::int32_t page_count, std::vector<std::int32_t>& own) {
  if (!kernel_access::names_pages(lease)) return table;
  own.assign(table, table + n);
  for (std::int32_t& page : own) {
    if (page >= 0 && !kernel_access::reads(lease, page)) page = page_count;
  }
  return own.data();
}

}  // namespace detail
KVIRE_NAMESPACE_END
