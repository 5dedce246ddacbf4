// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <kvire/exec/backend.hpp>
#include <kvire/exec/cuda/error.hpp>
#include <kvire/exec/function.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// CUDA events that nobody uses, by device: making one takes longer than recording it. Never destroyed, since handles may outlive everything.
class EventCache {
 public:
  static EventCache& get() {
    static auto* cache = new EventCache;
    return *cache;
  }

  /// An event of the device, which need not be current. Errors of the runtime.
  Result<cudaEvent_t> take(int device) {
    {
      std::lock_guard lock(mutex_);
      auto& spare = of(device);
      if (!spare.empty()) {
        const cudaEvent_t event = spare.back();
        spare.pop_back();
        return event;
      }
    }
    DeviceScope scope(device);
    RelaxedCapture relaxed;
    cudaEvent_t event = nullptr;
    if (const cudaError_t e = cudaEventCreateWithFlags(&event, cudaEventDisableTiming); e != cudaSuccess) return cuda_error(e, "creating an event");
    return event;
  }
  void give(int device, cudaEvent_t event) {
    std::lock_guard lock(mutex_);
    of(device).push_back(event);
  }

 private:
  std::vector<cudaEvent_t>& of(int device) {
    const auto index = static_cast<std::size_t>(device);
    if (index >= spare_.size()) spare_.resize(index + 1);
    return spare_[index];
  }
  std::mutex mutex_;
  std::vector<std::vector<cudaEvent_t>> spare_;
};

}  // namespace detail

/// A one-shot event of the CUDA backend: a shared handle around a CUDA event, usable from any thread. CUDA's own events count as complete
/// before they are recorded; this one knows on the host whether it was, and a wait on it blocks until then.
/// It is made unrecorded, recorded once by a stream (`Stream<Cuda>::record`) or completed once by hand, and then never changes again.
template <>
class Event<Cuda> {
 public:
  /// An empty handle; it stands for no work and waiting on it is an error at once.
  Event() = default;

  /// An unrecorded event. `label` names it in error messages.
  static Event make(std::string label = {}) {
    Event event;
    event.state_ = std::make_shared<State>();
    event.state_->label = std::move(label);
    return event;
  }

  bool valid() const { return state_ != nullptr; }
  /// True if it may still fail, or will, though its work runs to the end (see Stream<Cuda>::record).
  bool judged() const {
    if (!state_) return false;
    std::lock_guard lock(state_->mutex);
    return state_->verdict || state_->error;
  }
  /// The device of the stream that recorded it; -1 before and for events completed by hand.
  int device() const { return state_ ? state_->device.load(std::memory_order_acquire) : -1; }

  /// Present state: asks the device, does not wait. An empty handle is unrecorded.
  EventState query() const {
    if (!state_) return EventState::unrecorded;
    const EventState known = state_->state.load(std::memory_order_acquire);
    if (known != EventState::pending) return known;
    std::lock_guard lock(state_->mutex);
    return poll();
  }

  /// Blocks the calling thread until the event is final. Errors: the failure of the work, with the runtime's name for it; timeout (which proves
  /// nothing about the work); invalid_argument for an empty handle.
  Status wait(Deadline deadline = no_deadline) const {
    if (!state_) return Error{ErrorCode::invalid_argument, "waiting on an empty event: it stands for no work"};
    for (int round = 0; !is_final(query()); ++round) {
      const auto now = Clock::now();
      if (now >= deadline) {
        const bool unrecorded = query() == EventState::unrecorded;
        return Error{ErrorCode::timeout,
                     "event '" + state_->label + "' was " + (unrecorded ? "never recorded" : "still pending") + " when the deadline passed"};
      }
      std::unique_lock lock(state_->mutex);
      if (state_->marks.empty()) {
        // Nobody can say more before somebody records it.
        const auto final_or_marked = [&] { return is_final(state_->state.load(std::memory_order_acquire)) || !state_->marks.empty(); };
        if (deadline == no_deadline) {
          state_->changed.wait(lock, final_or_marked);
        } else {
          (void)state_->changed.wait_until(lock, deadline, final_or_marked);
        }
        continue;
      }
      lock.unlock();
      if (round < 64) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }
    return status();
  }

  /// The failure of a failed event; success otherwise. Asks as `query` does, so that work which has ended by now is judged by now.
  Status status() const {
    if (query() != EventState::failed) return {};
    std::lock_guard lock(state_->mutex);
    return *state_->error;
  }

  /// Marks an unrecorded event as recorded by somebody who will complete it by hand. False (and no effect) if it was recorded already.
  bool mark_recorded() const {
    if (!state_) return false;
    std::lock_guard lock(state_->mutex);
    if (state_->state.load(std::memory_order_acquire) != EventState::unrecorded) return false;
    state_->state.store(EventState::pending, std::memory_order_release);
    return true;
  }

  /// Makes the event final by hand and wakes its waiters. The first call decides. False, without effect, for an event that a stream recorded:
  /// only its work decides about that.
  bool complete() const { return complete(Status()); }
  bool complete(const Status& status) const {
    if (!state_) return false;
    std::lock_guard lock(state_->mutex);
    if (is_final(state_->state.load(std::memory_order_acquire)) || !state_->marks.empty()) return false;
    if (!status.ok()) state_->error = status.error();
    finish();
    return true;
  }

  const std::string& label() const {
    static const std::string none;
    return state_ ? state_->label : none;
  }

  friend bool operator==(const Event& a, const Event& b) { return a.state_ == b.state_; }

 private:
  friend class Stream<Cuda>;

  struct State {
    std::atomic<EventState> state{EventState::unrecorded};
    std::atomic<int> device{-1};
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<cudaEvent_t> marks;  // all of them have to pass
    std::optional<Error> error;      // what it fails with once they have
    MoveOnlyFunction<Status()> verdict;  // asked then whether the work did what it should
    std::string label;
    ~State() {
      for (cudaEvent_t mark : marks) detail::EventCache::get().give(device.load(), mark);
    }
  };

  // Under the mutex, pending.
  EventState poll() const {
    State& s = *state_;
    if (const EventState known = s.state.load(std::memory_order_acquire); known != EventState::pending || s.marks.empty()) return known;
    detail::RelaxedCapture relaxed;
    for (cudaEvent_t mark : s.marks) {
      const cudaError_t e = cudaEventQuery(mark);
      if (e == cudaErrorNotReady) {
        if (cudaPeekAtLastError() == e) (void)cudaGetLastError();
        return EventState::pending;
      }
      if (e != cudaSuccess && !s.error) s.error = detail::cuda_error(e, "event '" + s.label + "'");
    }
    if (s.verdict && !s.error) {
      if (Status status = s.verdict(); !status.ok()) s.error = status.error();
    }
    s.verdict = {};
    return finish();
  }

  EventState finish() const {
    const EventState final = state_->error ? EventState::failed : EventState::complete;
    state_->state.store(final, std::memory_order_release);
    state_->changed.notify_all();
    return final;
  }

  std::shared_ptr<State> state_;
};

KVIRE_NAMESPACE_END
