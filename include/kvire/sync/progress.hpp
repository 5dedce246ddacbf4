// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <kvire/base/result.hpp>
#include <kvire/exec/backend.hpp>
#include <kvire/pool/extent.hpp>

KVIRE_NAMESPACE_BEGIN

enum class LayerState : unsigned char {
  unissued,  ///< nobody has queued the copies of this layer yet: there is no event to wait for
  issued,    ///< the copies are queued and an event stands behind them
  failed     ///< known to have failed, or dropped before it was issued; final
};

/// What is known about one transfer, layer by layer: shared by the thread that issues it and everybody who waits for it. A layer here is a
/// position in the order of the transfer; pools name the position of each of their entry slots (`extent`).
///
/// A wait never passes on what was not issued: an event that nobody recorded means nothing, so waiters block on the state first and on the
/// event afterwards. A failure at position i fails waiters of i and all later positions; earlier ones pass.
///
/// Safe from any thread.
template <class Backend>
class LoadProgress {
 public:
  /// `labels[i]` is the number that messages give position i: a model layer, or an entry slot. `done` stands behind the whole transfer.
  LoadProgress(std::string name, std::vector<std::int32_t> labels, Event<Backend> done)
      : name_(std::move(name)), labels_(std::move(labels)), layers_(labels_.size()), failed_from_(layers_.size()), done_(std::move(done)) {}

  const std::string& name() const { return name_; }
  int layers() const { return static_cast<int>(labels_.size()); }
  /// Behind the last byte of the transfer; recorded when it is issued, failed if it never will be.
  const Event<Backend>& done() const { return done_; }

  /// Which entry slots of which pools it touches, by position. Filled before anybody waits.
  PageExtent& extent() { return extent_; }
  const PageExtent& extent() const { return extent_; }
  /// Position of a pool's slot, or -1 if this transfer does not touch it.
  int position(const void* pool, int slot) const { return extent_.position(pool, slot); }

  // --- the issuing side ---

  /// The copies of a position are queued, and `event` was recorded behind them.
  void issued(int position, Event<Backend> event) {
    std::lock_guard lock(mutex_);
    Layer& layer = layers_[static_cast<std::size_t>(position)];
    if (layer.state != LayerState::unissued) return;
    layer.event = std::move(event);
    layer.state = LayerState::issued;
    changed_.notify_all();
  }

  /// Fails the waiters of `position` and of all later ones, for good. A later call matters only if it names an earlier position.
  void fail(int position, Error error) {
    std::lock_guard lock(mutex_);
    const auto from = static_cast<std::size_t>(position > 0 ? position : 0);
    if (from >= failed_from_) return;
    for (std::size_t i = from; i < failed_from_; ++i) layers_[i].state = LayerState::failed;
    failed_from_ = from;
    error_ = std::move(error);
    changed_.notify_all();
  }

  /// Fails every position if any of them was never issued.
  void drop() {
    {
      std::lock_guard lock(mutex_);
      if (first_unissued() == layers()) return;
    }
    fail(0, Error{ErrorCode::failed, "transfer '" + name_ + "' was dropped before it was issued: its layers will never arrive"});
  }

  // --- the waiting side ---

  LayerState state(int position) const {
    std::lock_guard lock(mutex_);
    return layers_[static_cast<std::size_t>(position)].state;
  }

  /// Event of an issued position; empty otherwise.
  Event<Backend> event(int position) const {
    std::lock_guard lock(mutex_);
    return layers_[static_cast<std::size_t>(position)].event;
  }

  /// What is known of a position without waiting: success if it may still arrive or has arrived.
  Status known(int position) const {
    std::unique_lock lock(mutex_);
    const Layer& layer = layers_[static_cast<std::size_t>(position)];
    if (layer.state == LayerState::failed) return describe(position, *error_);
    if (layer.state == LayerState::unissued) return {};
    const Event<Backend> event = layer.event;
    lock.unlock();
    if (const Status status = event.status(); !status.ok()) return describe(position, status.error());
    return {};
  }

  /// Blocks until no position is unissued. Error timeout: names the transfer and the first layer that nobody issued. Errors of the transfer:
  /// only if no position at all can arrive any more.
  Status wait_issued(Deadline deadline) const {
    std::unique_lock lock(mutex_);
    if (!wait_until(lock, deadline, [&] { return first_unissued() == layers(); })) {
      return Error{ErrorCode::timeout, "transfer '" + name_ + "': " + label(first_unissued()) + " had not been issued when the deadline passed"};
    }
    if (failed_from_ == 0 && !layers_.empty()) return describe(0, *error_);
    return {};
  }

  /// Blocks the calling thread until a position has arrived: first until it is issued, then until its event is complete.
  Status wait(int position, Deadline deadline = no_deadline) const {
    Event<Backend> event;
    {
      std::unique_lock lock(mutex_);
      const Layer& layer = layers_[static_cast<std::size_t>(position)];
      if (!wait_until(lock, deadline, [&] { return layer.state != LayerState::unissued; })) {
        return Error{ErrorCode::timeout, "transfer '" + name_ + "': " + label(position) + " had not been issued when the deadline passed"};
      }
      if (layer.state == LayerState::failed) return describe(position, *error_);
      event = layer.event;
    }
    if (const Status status = event.wait(deadline); !status.ok()) return describe(position, status.error());
    return known(position);
  }

  /// Blocks until everything has arrived.
  Status wait_all(Deadline deadline = no_deadline) const {
    for (int i = 0; i < layers(); ++i) {
      if (Status status = wait(i, deadline); !status.ok()) return status;
    }
    return {};
  }

 private:
  struct Layer {
    LayerState state = LayerState::unissued;
    Event<Backend> event;
  };
  template <class Done>
  bool wait_until(std::unique_lock<std::mutex>& lock, Deadline deadline, Done done) const {
    if (deadline != no_deadline) return changed_.wait_until(lock, deadline, done);
    changed_.wait(lock, done);
    return true;
  }

  // Under the mutex. layers() if there is none.
  int first_unissued() const {
    int position = 0;
    while (position < layers() && layers_[static_cast<std::size_t>(position)].state != LayerState::unissued) ++position;
    return position;
  }

  std::string label(int position) const { return "layer " + std::to_string(labels_[static_cast<std::size_t>(position)]); }
  Error describe(int position, const Error& error) const {
    return Error{error.code, "transfer '" + name_ + "', " + label(position) + ": " + error.message};
  }

  const std::string name_;
  const std::vector<std::int32_t> labels_;
  PageExtent extent_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<Layer> layers_;
  std::size_t failed_from_;
  std::optional<Error> error_;
  const Event<Backend> done_;
};

KVIRE_NAMESPACE_END
