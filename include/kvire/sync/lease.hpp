// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvire/base/result.hpp>
#include <kvire/base/sort.hpp>
#include <kvire/exec/backend.hpp>
#include <kvire/exec/function.hpp>
#include <kvire/pool/view.hpp>
#include <kvire/pool/work_stream.hpp>

KVIRE_NAMESPACE_BEGIN

struct kernel_access;

namespace detail {

/// First failure of a step; shared with everything the step queued.
class StepFailure {
 public:
  void fail(Error error) {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  /// For what is only found out after it has run: `status` asks `later`, maybe from several threads at once, which succeeds for as long as it does not
  /// know better.
  void watch(MoveOnlyFunction<Status()> later) {
    std::lock_guard lock(mutex_);
    later_.push_back(std::move(later));
  }
  /// How many are watched so far.
  std::size_t watched() const {
    std::lock_guard lock(mutex_);
    return later_.size();
  }
  /// What the first `n` watched know: all that work depends on which was queued when there were no more. What is watched since may depend on that work.
  Status known(std::size_t n) const {
    for (std::size_t i = 0; i < n; ++i) {
      std::unique_lock lock(mutex_);
      auto& later = later_[i];
      lock.unlock();  // events have locks of their own, and may ask this in turn
      if (Status found = later(); !found.ok()) return found;
    }
    return {};
  }
  Status status() const {
    const Status found = known(watched());
    std::lock_guard lock(mutex_);
    if (!error_ && !found.ok()) error_ = found.error();
    return error_ ? Status(*error_) : Status();
  }

 private:
  mutable std::mutex mutex_;
  mutable std::optional<Error> error_;
  mutable std::deque<MoveOnlyFunction<Status()>> later_;  // stay where they are
};

/// How a wait for a load is queued on a stream; specialised per backend (sync/host.hpp).
template <class Backend>
struct QueueWait;

/// Work that must have finished before the lease's kernels run: a transfer, or kernels of another lease.
template <class Backend>
struct LeaseWait {
  Event<Backend> event;
  std::string what;       ///< for messages
  bool may_fail = false;  ///< only its end matters: a backup that failed has stopped reading
  bool ordered = false;   ///< on the lease's own stream nothing need be queued, since that is behind the work
};

/// The end of a lease's kernels, as an event for transfers of its pages; specialised per backend (sync/host.hpp). It fails if one of them did not run.
template <class Backend>
class LeaseEnd;

/// What the copies of one lease share; dies with the last of them, and so with the last kernel queued with it.
template <class Backend>
struct LeaseState {
  LeaseState() = default;
  LeaseState(const LeaseState&) = delete;
  LeaseState& operator=(const LeaseState&) = delete;
  ~LeaseState() { end.finish(outcome(), any_page ? nullptr : failure); }

  Event<Backend> begin() { return end.begin(); }
  /// Of kernels that write: whether all that were queued have run.
  Status outcome() const {
    if (ran.load() == queued.load()) return {};
    const Status failed = failure ? failure->status() : Status();
    return failed.ok() ? Status(Error{ErrorCode::failed, "a kernel of the lease did not run"}) : failed;
  }

  std::shared_ptr<StepFailure> failure;  ///< none for assume_ready
  const void* stream = nullptr;          ///< where the waits are queued
  std::shared_ptr<WorkStream> work;      ///< of the hold; none without
  std::chrono::milliseconds wait_limit{0};
  std::vector<LeaseWait<Backend>> waits;
  bool any_page = true;                ///< of a write lease: whether it is not limited to `pages`
  std::vector<std::int32_t> pages;     ///< of a write lease, ascending; of a read lease that is `named`
  bool named = false;                  ///< of a read lease: whether it is limited to `pages`
  std::shared_ptr<const void> memory;  ///< keeps the pool's bytes, and names the pool
  std::shared_ptr<void> hold;          ///< of the pages, where they are known
  mutable std::atomic<int> queued{0};  ///< kernels that write
  mutable std::atomic<int> ran{0};     ///< of these
  mutable LeaseEnd<Backend> end;
};

struct LeaseMaker;

}  // namespace detail

/// Permission to read one layer of a pool in one step, or to write some pages of it: its kernels run after the layer's loads have landed and, where it names its
/// pages, after kernels that write them; those that write also after backups of them and kernels that read them. Copyable; kernels queued with it keep the pool's
/// memory alive. There is no pointer to be had from it but by kernels (`kernel_access`).
template <class P, class Backend, bool CanWrite>
class Lease {
 public:
  using policy = P;
  using backend = Backend;
  using view = std::conditional_t<CanWrite, PageView<P, Backend>, ConstPageView<P, Backend>>;
  static constexpr bool can_write = CanWrite;

  /// Permits nothing, and a kernel that is given it is refused; to be assigned to before.
  Lease() = default;

 private:
  friend struct kernel_access;
  friend struct detail::LeaseMaker;
  Lease(view v, std::shared_ptr<const detail::LeaseState<Backend>> state) : view_(v), state_(std::move(state)) {}

  view view_;
  std::shared_ptr<const detail::LeaseState<Backend>> state_;
};

template <class P, class Backend>
using ReadLease = Lease<P, Backend, false>;
template <class P, class Backend>
using WriteLease = Lease<P, Backend, true>;

template <class T>
inline constexpr bool is_lease = false;
template <class P, class B, bool W>
inline constexpr bool is_lease<Lease<P, B, W>> = true;

template <class T>
inline constexpr bool is_write_lease = false;
template <class P, class B>
inline constexpr bool is_write_lease<WriteLease<P, B>> = true;

namespace rule {
template <class Argument, bool IsLease>
struct NoLease {
  static_assert(IsLease,
                "kvire [sync.no-lease]: kernels take a lease, not a view, a pool or a pointer, nor the Result around one. Without one they may run before the layer's load has landed. "
                "Fix: pass .value() of the Result that step.read(pool, slot, pages) or step.write(pool, slot, pages) returned, or assume_ready(view) for memory that no transfer "
                "touches.");
};
template <class Argument, bool IsWriteLease>
struct ReadOnly {
  static_assert(IsWriteLease,
                "kvire [sync.read-only]: a kernel that writes pages takes a write lease. A read lease waits for loads only, so a store could damage a page under "
                "backup or one that others share. Fix: ask for step.write(pool, slot, pages), or for assume_ready(view) of a PageView.");
};
}  // namespace rule

/// For kernels: refuses, in words, an argument that is no lease. `T` without reference.
template <class T>
constexpr bool require_lease() {
  (void)sizeof(rule::NoLease<T, is_lease<std::remove_cv_t<T>>>);
  return true;
}
/// The same for kernels that write.
template <class T>
constexpr bool require_write_lease() {
  require_lease<T>();
  if constexpr (is_lease<std::remove_cv_t<T>>) (void)sizeof(rule::ReadOnly<T, is_write_lease<std::remove_cv_t<T>>>);
  return true;
}

namespace detail {
struct LeaseMaker {
  template <class L>
  static L make(typename L::view view, std::shared_ptr<const LeaseState<typename L::backend>> state) {
    return L(view, std::move(state));
  }
  /// For who alone owns all pages of a pool: a read lease on one of its layers as one that may write any page of `view`, that layer.
  template <class P, class B>
  static WriteLease<P, B> writable(PageView<P, B> view, const ReadLease<P, B>& lease) {
    return make<WriteLease<P, B>>(view, lease.state_);
  }
};
}  // namespace detail

/// The one door from a lease to bytes; for kernels, whose work runs on a stream. Never use the view from the host thread: the load it waits
/// for is waited for on the stream alone.
struct kernel_access {
  /// The pages. Kernels must be queued on `stream` after this call; the waits are repeated there if it is not the step's own stream. The step
  /// fails if a transfer or a lease of these pages has been given on the step's stream before, counting on the kernels to be there as well.
  template <class P, class B, bool W>
  static typename Lease<P, B, W>::view view(const Lease<P, B, W>& lease, Stream<B>& stream) {
    if (!lease.state_) return lease.view_;
    queue_waits(*lease.state_, stream);
    lease.state_->end.used(stream);
    return lease.view_;
  }

  /// Error invalid_argument for a lease that nobody gave: made by default, or moved from. `launch` asks before it queues anything.
  template <class Lease>
  static Status given(const Lease& lease) {
    if (lease.state_) return {};
    return Error{ErrorCode::invalid_argument, "a kernel was given an empty lease, which permits nothing"};
  }

  /// Asked by host kernels when they run: false if a load they depend on has failed. They then do nothing; the step reports the failure.
  template <class Lease>
  static bool ready(const Lease& lease) {
    return !lease.state_ || !lease.state_->failure || lease.state_->failure->status().ok();
  }

  /// Told by `launch`: a kernel of the lease has been queued, and has run. Of a write lease that ends before all of its kernels have run nobody can read the pages.
  template <class P, class B, bool W>
  static void queued(const Lease<P, B, W>& lease) {
    if (!W || !lease.state_) return;
    lease.state_->queued.fetch_add(1, std::memory_order_relaxed);
    if (lease.state_->work) lease.state_->work->begin();
  }
  template <class P, class B, bool W>
  static void ran(const Lease<P, B, W>& lease) {
    if (W && lease.state_) lease.state_->ran.fetch_add(1, std::memory_order_relaxed);
  }

  /// Whether a page may be written under this lease; kernels skip and count the others.
  template <class P, class B>
  static bool covers(const WriteLease<P, B>& lease, std::int32_t page) {
    if (!lease.state_) return false;
    const auto& pages = lease.state_->pages;
    return lease.state_->any_page || detail::contains(pages, page);
  }

  /// Whether a page may be read under a lease: one that names its pages covers these, and the null page, which nobody owns and transfers leave alone.
  template <class P, class B, bool W>
  static bool reads(const Lease<P, B, W>& lease, std::int32_t page) {
    return !names_pages(lease) || page == null_page || detail::contains(lease.state_->pages, page);
  }
  /// Whether `reads` is false of any page.
  template <class P, class B, bool W>
  static bool names_pages(const Lease<P, B, W>& lease) {
    return lease.state_ && lease.state_->named;
  }

  /// The pages that a write lease is limited to, ascending; null if to none in particular. For kernels that cannot ask page by page.
  template <class P, class B>
  static const std::vector<std::int32_t>* limit(const WriteLease<P, B>& lease) {
    return !lease.state_ || lease.state_->any_page ? nullptr : &lease.state_->pages;
  }

  /// Marks the step failed, for kernels that find their input unusable at run time.
  template <class Lease>
  static void fail(const Lease& lease, Error error) {
    if (lease.state_ && lease.state_->failure) lease.state_->failure->fail(std::move(error));
  }

 private:
  template <class B>
  static void queue_waits(const detail::LeaseState<B>& state, Stream<B>& stream) {
    if (stream.identity() == state.stream) return;
    if (state.work && !state.work->leave()) {
      state.failure->fail(Error{ErrorCode::busy, "stream '" + stream.name() + "': a lease of another stream, on which other work on its pages was queued since"});
    }
    for (const auto& wait : state.waits) detail::QueueWait<B>::queue(stream, wait, state.failure, state.wait_limit);
  }
};

/// The one way past the gate, by name: a lease on memory of which the caller knows that no load, backup or other writer touches it while the
/// kernels run. Waits for nothing and keeps nothing alive.
template <class Backend, class P>
ReadLease<P, Backend> assume_ready(ConstPageView<P, Backend> view) {
  return detail::LeaseMaker::make<ReadLease<P, Backend>>(view, std::make_shared<detail::LeaseState<Backend>>());
}
template <class Backend, class P>
WriteLease<P, Backend> assume_ready(PageView<P, Backend> view) {
  return detail::LeaseMaker::make<WriteLease<P, Backend>>(view, std::make_shared<detail::LeaseState<Backend>>());
}

KVIRE_NAMESPACE_END
