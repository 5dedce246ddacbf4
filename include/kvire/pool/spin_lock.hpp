// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <thread>

#include <kvire/base/config.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// A lock for a handful of instructions. Yields when it has to wait for long: the holder may have lost its core.
class SpinLock {
 public:
  void lock() {
    for (int spins = 0; held_.exchange(true, std::memory_order_acquire);) {
      while (held_.load(std::memory_order_relaxed)) {
        if (++spins % 64 == 0) std::this_thread::yield();
      }
    }
  }
  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> held_{false};
};

}  // namespace detail

KVIRE_NAMESPACE_END
