// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvire/exec/cuda/stream.hpp>
#include <kvire/sync/lease.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// When the last copy of a lease goes, everything queued with it is queued: an event is recorded there, and transfers of its pages wait for that.
/// Until then they are refused as busy. On a stream that captures there is nothing to record: the lease ends with its work elsewhere, and who replays the
/// graph orders it with transfers (a step begun before each replay waits for its loads; `after` of a backup takes an event recorded behind it).
template <>
class LeaseEnd<Cuda> {
 public:
  /// The lease has gone. `failure`: of the step of a lease that writes; what is yet to be found out of the loads so far is judged when the kernels have run.
  void finish(const Status& outcome, const std::shared_ptr<StepFailure>& failure) {
    if (!event_.valid()) return;
    Status status;
    if (!streams_.empty()) {
      MoveOnlyFunction<Status()> verdict;
      // Of those watched by now: an event's verdict asks none that was recorded after it, so that no two ask each other.
      const std::size_t watched = failure ? failure->watched() : 0;
      if (watched > 0) verdict = [failure, watched] { return failure->known(watched); };
      (void)(status = Stream<Cuda>::record_all(event_, streams_, outcome, std::move(verdict)));
    }
    if (streams_.empty() || !status.ok()) (void)event_.complete(status.ok() || status.error().code == ErrorCode::unsupported ? outcome : status);
  }
  Event<Cuda> begin() {
    event_ = Event<Cuda>::make("lease");
    return event_;
  }
  /// Kernels are about to be queued there.
  void used(Stream<Cuda>& stream) {
    if (!event_.valid()) return;
    std::lock_guard lock(mutex_);
    for (const auto& known : streams_) {
      if (known.identity() == stream.identity()) return;
    }
    streams_.push_back(stream.share());
  }

 private:
  Event<Cuda> event_;
  std::mutex mutex_;
  std::vector<Stream<Cuda>> streams_;
};

/// Waits are queued on the device. A load that is known to have failed, or that cannot be waited for, fails the step at once: its kernels are
/// not queued. One whose verdict is still to come (a digest) fails it when that is known, though its kernels may have run.
template <>
struct QueueWait<Cuda> {
  static void queue(Stream<Cuda>& stream, const LeaseWait<Cuda>& wait, std::shared_ptr<StepFailure> failure, std::chrono::milliseconds) {
    const auto error = [](const LeaseWait<Cuda>& of, const Status& status) { return Error{status.error().code, of.what + ": " + status.error().message}; };
    const Status status = stream.wait(wait.event);
    if (!status.ok() && !(wait.may_fail && wait.event.query() == EventState::failed)) failure->fail(error(wait, status));
    if (!status.ok() || wait.may_fail || !wait.event.judged()) return;
    failure->watch([wait, error] { return wait.event.query() == EventState::failed ? Status(error(wait, wait.event.status())) : Status(); });
  }
};

}  // namespace detail

/// Calls `f(stream, views...)`, which queues kernels of the caller's own on the stream under the leases. Skipped if a load of the leases has failed.
/// `f` may return a Status; a launch that failed is found even if it does not. Errors: that, with the runtime's reason; invalid_argument
/// for an empty lease.
template <class F, class... Leases>
Status launch(Stream<Cuda>& stream, F&& f, const Leases&... leases) {
  (require_lease<Leases>(), ...);
  if constexpr ((is_lease<Leases> && ...)) {
    Status status;
    ((status.ok() ? void(status = kernel_access::given(leases)) : void()), ...);
    if (!status.ok()) return status;
    (kernel_access::queued(leases), ...);
    const auto run = [&](const auto&... views) {
      if (!(kernel_access::ready(leases) && ...)) return;
      detail::DeviceScope scope(stream.device());
      if constexpr (std::is_same_v<decltype(f(stream.native(), views...)), Status>) {
        (void)(status = f(stream.native(), views...));  // nvcc takes the assignment for a value ignored
      } else {
        f(stream.native(), views...);
      }
      if (const cudaError_t e = cudaGetLastError(); status.ok() && e != cudaSuccess) (void)(status = stream.error(e, "launching a kernel"));
      if (status.ok()) (kernel_access::ran(leases), ...);
    };
    run(kernel_access::view(leases, stream)...);
    return status;
  }
  return {};
}

KVIRE_NAMESPACE_END
