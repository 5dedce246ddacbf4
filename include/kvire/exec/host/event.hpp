// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <kvire/base/result.hpp>
#include <kvire/exec/backend.hpp>

KVIRE_NAMESPACE_BEGIN

/// A one-shot event of the host backend: a shared handle, copyable, usable from any thread.
/// It is made unrecorded, recorded once by a stream (`Stream<Host>::record`) or completed once by hand, and then never changes again.
/// Waiting on an event that was never recorded does not pass: it blocks until the deadline and then fails.
template <HostTag Backend>
class Event<Backend> {
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

  /// False for an empty handle.
  bool valid() const { return state_ != nullptr; }

  /// Present state, without waiting; an empty handle is unrecorded.
  EventState query() const { return state_ ? state_->state.load(std::memory_order_acquire) : EventState::unrecorded; }

  /// Blocks the calling thread until the event is final. Errors: the failure of the work; timeout (which proves nothing about the work:
  /// it may still be running); invalid_argument for an empty handle.
  Status wait(Deadline deadline = no_deadline) const {
    if (!state_) return Error{ErrorCode::invalid_argument, "waiting on an empty event: it stands for no work"};
    std::unique_lock lock(state_->mutex);
    const auto done = [&] { return is_final(query()); };
    if (deadline == no_deadline) {
      state_->changed.wait(lock, done);
    } else if (!state_->changed.wait_until(lock, deadline, done)) {
      const bool unrecorded = query() == EventState::unrecorded;
      return Error{ErrorCode::timeout, "event '" + state_->label + "' was " + (unrecorded ? "never recorded" : "still pending") +
                                           " when the deadline passed"};
    }
    if (query() == EventState::failed) return state_->error;
    return {};
  }

  /// The failure of a failed event; success otherwise.
  Status status() const {
    if (query() != EventState::failed) return {};
    std::lock_guard lock(state_->mutex);
    return state_->error;
  }

  /// Marks an unrecorded event as recorded by somebody who will complete it. False (and no effect) if it was recorded already.
  bool mark_recorded() const {
    if (!state_) return false;
    std::lock_guard lock(state_->mutex);
    if (query() != EventState::unrecorded) return false;
    state_->state.store(EventState::pending, std::memory_order_release);
    return true;
  }

  /// Makes the event final, recorded or not, and wakes its waiters. The first call decides; later ones return false and change nothing,
  /// so a failure can never turn into a success.
  bool complete() const { return finish(nullptr); }
  bool complete(const Status& status) const { return finish(status.ok() ? nullptr : &status.error()); }

  const std::string& label() const {
    static const std::string none;
    return state_ ? state_->label : none;
  }

  friend bool operator==(const Event& a, const Event& b) { return a.state_ == b.state_; }

 private:
  bool finish(const Error* error) const {
    if (!state_) return false;
    std::lock_guard lock(state_->mutex);
    if (is_final(query())) return false;
    if (error != nullptr) state_->error = *error;
    state_->state.store(error == nullptr ? EventState::complete : EventState::failed, std::memory_order_release);
    // Under the lock: a waiter may let go of the last handle as soon as it sees the state.
    state_->changed.notify_all();
    return true;
  }

  struct State {
    std::atomic<EventState> state{EventState::unrecorded};
    std::mutex mutex;
    std::condition_variable changed;
    Error error;
    std::string label;
  };
  std::shared_ptr<State> state_;
};

KVIRE_NAMESPACE_END
