// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mutex>
#include <string>

#include <kvire/exec/host/parallel.hpp>
#include <kvire/kernel/body/copy_pages.hpp>
#include <kvire/kernel/require.hpp>
#include <kvire/sync/host.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

// Adds up what `one(item)` returns over [0, n), on all cores.
template <class F>
CopyCounts count_parallel(std::int64_t n, std::int64_t grain, F&& one) {
  std::mutex mutex;
  CopyCounts total;
  parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
    CopyCounts counts;
    for (std::int64_t item = begin; item < end; ++item) counts += one(item);
    std::lock_guard lock(mutex);
    total += counts;
  });
  return total;
}

// An id or slot list without memory, or of negative length.
inline Status check_list(const char* what, std::int64_t n, const void* from, const void* to) {
  if (n < 0 || (n > 0 && (from == nullptr || to == nullptr))) {
    return Error{ErrorCode::invalid_argument, std::string(what) + ": a list of " + std::to_string(n) + " without memory"};
  }
  return {};
}

}  // namespace detail

/// Queues the copy of `n` whole pages, `from_ids[i]` under `from` to `to_ids[i]` under `to`, within or between pools of the same layout.
/// The lists stay as they are until the stream has run the kernel. Negative ids and the null page are dropped, ids beyond a pool or of pages
/// that the lease does not cover are dropped and counted as bad. Pages written must be distinct and not be read by the same call.
/// `counts`, if any, is added to when the kernel runs. Errors: invalid_argument for a list without memory.
template <LayoutPolicy P, class From, class To>
Status copy_pages(const std::int32_t* from_ids, const From& from, const std::int32_t* to_ids, const To& to, std::int64_t n, Stream<Host>& stream,
                  CopyCounts* counts = nullptr) {
  require_source<P, From>();
  require_target<P, To>();
  if constexpr (reads_pages<P, From> && writes_pages<P, To>) {
    if (Status status = detail::check_list("copy_pages", n, from_ids, to_ids); !status.ok()) return status;
    launch(
        stream,
        [=](const auto& source, const auto& target) {
          const body::CopyPagesArgs args{source.base, source.page_stride, source.pages, target.base, target.page_stride, target.pages, from_ids, to_ids};
          const CopyCounts total = detail::count_parallel(n, 16, [&](std::int64_t item) {
            const std::int32_t page = to_ids[item];
            if (from_ids[item] >= 0 && page > null_page && page < target.pages && !kernel_access::covers(to, page)) return CopyCounts{.bad_ids = 1};
            if (from_ids[item] >= 0 && from_ids[item] < source.pages && page > null_page && !kernel_access::reads(from, from_ids[item])) {
              return CopyCounts{.bad_ids = 1};
            }
            // One lane: the same bytes, and runs that the compiler turns into wide moves.
            return body::copy_pages<P>(HostGroup<1>{}, item, args);
          });
          if (counts != nullptr) *counts += total;
        },
        from, to);
  }
  return {};
}

KVIRE_NAMESPACE_END
