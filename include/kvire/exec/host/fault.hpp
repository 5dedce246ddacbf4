// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include <kvire/base/result.hpp>
#include <kvire/exec/backend.hpp>
#include <kvire/exec/function.hpp>

KVIRE_NAMESPACE_BEGIN

enum class CopyDirection : unsigned char { host_to_host, host_to_device, device_to_host, device_to_device };

constexpr const char* name_of(CopyDirection direction) {
  switch (direction) {
    case CopyDirection::host_to_host: return "host to host";
    case CopyDirection::host_to_device: return "host to device";
    case CopyDirection::device_to_host: return "device to host";
    case CopyDirection::device_to_device: return "device to device";
  }
  return "unknown";
}

/// What a copy is, for fault hooks and error messages.
struct CopyInfo {
  const char* entry = "";  ///< name of the cache entry; must outlive the copy
  int layer = -1;          ///< model layer, -1 if the copy is of no layer
  CopyDirection direction = CopyDirection::host_to_host;
  std::int64_t bytes = 0;  ///< filled in by the stream for plain copies
  std::int64_t index = 0;  ///< running number of the copy on its stream, from 0; filled in by the stream
};

/// Keeps copies open until released. Shared between the hook and the test that releases it.
template <HostTag Backend>
class BasicCopyHold {
 public:
  static std::shared_ptr<BasicCopyHold> make() { return std::make_shared<BasicCopyHold>(); }

  /// Lets every held copy, present and future, go on.
  void release() {
    std::lock_guard lock(mutex_);
    released_ = true;
    changed_.notify_all();
  }

  /// Blocks until `copies` copies have arrived at the hold. False when the deadline passed first.
  bool wait_reached(Deadline deadline, int copies = 1) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] { return reached_ >= copies; });
  }

  /// Called by the stream: blocks until released (true) or until `stop` is set (false).
  bool hold(const std::atomic<bool>& stop) {
    std::unique_lock lock(mutex_);
    ++reached_;
    changed_.notify_all();
    while (!released_) {
      if (stop.load(std::memory_order_acquire)) return false;
      // The stopping stream does not know this hold, so the flag is looked at again every now and then.
      changed_.wait_for(lock, std::chrono::milliseconds(2));
    }
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool released_ = false;
  int reached_ = 0;
};
using CopyHold = BasicCopyHold<Host>;

/// What happens to one copy instead of simply running.
struct Fault {
  enum class Kind : unsigned char {
    none,
    delay,  ///< sleep, then copy
    fail,   ///< no byte moves; the copy reports an error
    drop,   ///< the copy is lost: no byte moves and its completion never arrives (until its stream is destroyed, when it fails)
    hold,   ///< wait at a CopyHold, then copy (fails if the stream is destroyed first)
    skip,   ///< no byte moves, and the copy reports success: what only a digest can notice
  };
  Kind kind = Kind::none;
  std::chrono::microseconds time{0};
  std::string message = {};
  std::shared_ptr<CopyHold> gate = {};

  static Fault none() { return {}; }
  static Fault delay(std::chrono::microseconds time) { return {Kind::delay, time, {}, {}}; }
  static Fault fail(std::string message = "injected failure") { return {Kind::fail, std::chrono::microseconds(0), std::move(message), {}}; }
  static Fault drop() { return {Kind::drop, std::chrono::microseconds(0), {}, {}}; }
  static Fault hold(std::shared_ptr<CopyHold> gate) { return {Kind::hold, std::chrono::microseconds(0), {}, std::move(gate)}; }
  static Fault skip() { return {Kind::skip, std::chrono::microseconds(0), {}, {}}; }
};

/// Decides the fate of each copy of the streams it is given to. The callable runs on the streams' threads, one call at a time.
template <HostTag Backend>
class BasicFaultHooks {
 public:
  using Decide = MoveOnlyFunction<Fault(const CopyInfo&)>;

  static std::shared_ptr<BasicFaultHooks> make(Decide decide = {}) {
    auto hooks = std::make_shared<BasicFaultHooks>();
    hooks->set(std::move(decide));
    return hooks;
  }

  /// Replaces the decision from the next copy on; an empty one means no faults.
  void set(Decide decide) {
    std::lock_guard lock(mutex_);
    decide_ = std::move(decide);
  }

  Fault decide(const CopyInfo& info) {
    std::lock_guard lock(mutex_);
    return decide_ ? decide_(info) : Fault::none();
  }

 private:
  std::mutex mutex_;
  Decide decide_;
};
using FaultHooks = BasicFaultHooks<Host>;

KVIRE_NAMESPACE_END
