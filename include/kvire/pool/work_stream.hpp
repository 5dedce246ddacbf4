// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

#include <kvire/base/config.hpp>

KVIRE_NAMESPACE_BEGIN

/// The stream that work on pages is queued on. Later work on that stream need not wait for it, as long as none of it is queued elsewhere: one side
/// may count on the order of the stream or the other leave it, whichever comes first. Safe from any thread.
class WorkStream {
 public:
  /// `stream`: its identity.
  explicit WorkStream(const void* stream) : stream_(stream) {}

  /// For work queued on `stream` later: true if the stream's order is behind all of this work, and will be.
  bool covers(const void* stream) {
    if (stream != stream_) return false;
    Use seen = Use::alone;
    return use_.compare_exchange_strong(seen, Use::counted_on) || seen == Use::counted_on;
  }

  /// Some work has been queued; before that there is none that could do anything to the pages.
  void begin() { begun_.store(true, std::memory_order_release); }
  bool begun() const { return begun_.load(std::memory_order_acquire); }

  /// Some of the work is about to be queued on another stream. False: too late, others count on it that none is.
  bool leave() {
    Use seen = Use::alone;
    return use_.compare_exchange_strong(seen, Use::left) || seen == Use::left;
  }

 private:
  enum class Use : unsigned char { alone, counted_on, left };
  const void* const stream_;
  std::atomic<Use> use_{Use::alone};
  std::atomic<bool> begun_{false};
};

KVIRE_NAMESPACE_END
