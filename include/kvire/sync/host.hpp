// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <kvire/exec/host/stream.hpp>
#include <kvire/sync/lease.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {
template <HostTag Backend>
class LeaseEnd<Backend> {
 public:
  /// The lease has gone.
  void finish(const Status& outcome, const std::shared_ptr<StepFailure>&) { (void)event_.complete(outcome); }
  /// An event that is pending from now on and final when the lease has gone.
  Event<Backend> begin() {
    event_ = Event<Backend>::make("lease");
    (void)event_.mark_recorded();
    return event_;
  }
  /// Queued kernels hold copies of the lease, so it needs no list of streams.
  void used(Stream<Backend>&) {}

 private:
  Event<Backend> event_;
};

template <HostTag Backend>
struct QueueWait<Backend> {
  /// The wait runs as work of the stream and, when the load has failed, fails the step instead of the stream: kernels of other steps queued
  /// behind it do not depend on this load.
  static void queue(Stream<Backend>& stream, const LeaseWait<Backend>& wait, std::shared_ptr<StepFailure> failure, std::chrono::milliseconds limit) {
    if (wait.event.query() == EventState::complete) return;
    stream.launch([wait, failure = std::move(failure), limit] {
      const Status status = wait.event.wait(deadline_in(limit));
      if (status.ok() || (wait.may_fail && status.error().code != ErrorCode::timeout)) return;
      failure->fail(Error{status.error().code, wait.what + ": " + status.error().message});
    });
  }
};
}  // namespace detail

/// Runs `f(views...)` as work of the stream, under the leases: a kernel of the caller's own. Skipped if a load of the leases has failed.
/// `f` may return a Status, whose error fails the stream; so does an empty lease.
template <HostTag Backend, class F, class... Leases>
void launch(Stream<Backend>& stream, F&& f, const Leases&... leases) {
  (require_lease<Leases>(), ...);
  if constexpr ((is_lease<Leases> && ...)) {
    Status given;
    ((given.ok() ? void(given = kernel_access::given(leases)) : void()), ...);
    if (!given.ok()) return stream.launch([given] { return given; });
    (kernel_access::queued(leases), ...);
    stream.launch([f = std::forward<F>(f), ... leases = leases, ... views = kernel_access::view(leases, stream)]() mutable -> Status {
      if (!(kernel_access::ready(leases) && ...)) return {};
      Status status;
      if constexpr (std::is_same_v<decltype(f(views...)), Status>) {
        (void)(status = f(views...));  // nvcc takes the assignment for a value ignored
      } else {
        f(views...);
      }
      if (status.ok()) (kernel_access::ran(leases), ...);
      return status;
    });
  }
}

/// One field of every row of a pool, as bytes: scales alone, values alone. Rows of a plane are `row_bytes` apart, pages `page_stride`.
template <class P, class Role>
class FieldView {
 public:
  static constexpr Element element = P::template element_of<Role>;
  static constexpr int count = P::template count_of<Role>;
  /// Bytes of the field in one row.
  static constexpr std::int64_t bytes = static_cast<std::int64_t>(count) * bits(element) / 8;

  explicit FieldView(ConstPageView<P, Host> view) : view_(view) {}
  /// First byte of the field in a row. Requires 0 <= page < pages of the pool and 0 <= token < tokens per page.
  const std::byte* row(std::int32_t page, int token) const { return view_.page(page) + P::template offset<Role>(token); }

 private:
  ConstPageView<P, Host> view_;
};

/// Queues the copy of pages into one contiguous buffer of `pages.size()` * page bytes, in the order given; -1 leaves its page untouched. A page
/// id beyond the pool, or of a page that a lease with names does not name, fails the stream, and nothing of that page or later ones is copied; so does no memory to copy to, unless there is no page.
template <class Lease, HostTag Backend>
void gather(const Lease& lease, std::vector<std::int32_t> pages, std::byte* to, Stream<Backend>& stream) {
  static_assert(require_lease<Lease>());
  using P = typename Lease::policy;
  launch(
      stream,
      [pages = std::move(pages), to, lease](const auto& view) -> Status {
        for (std::size_t i = 0; i < pages.size(); ++i) {
          if (pages[i] < 0) continue;
          if (to == nullptr) return Error{ErrorCode::invalid_argument, "gather: no memory to copy " + std::to_string(pages.size()) + " pages to"};
          if (pages[i] >= view.pages) {
            return Error{ErrorCode::out_of_range, "gather: page " + std::to_string(pages[i]) + " is not below " + std::to_string(view.pages)};
          }
          if (!kernel_access::reads(lease, pages[i])) {
            return Error{ErrorCode::invalid_argument, "gather: page " + std::to_string(pages[i]) + " is none of those that the lease names"};
          }
          std::memcpy(to + static_cast<std::int64_t>(i) * P::page_bytes, view.page(pages[i]), static_cast<std::size_t>(P::page_bytes));
        }
        return {};
      },
      lease);
}

KVIRE_NAMESPACE_END
