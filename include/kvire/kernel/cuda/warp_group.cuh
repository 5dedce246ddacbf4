// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/group.hpp>

KVIRE_NAMESPACE_BEGIN

/// The lanes' values where each lane is a thread: this thread's, whatever lane is asked for; a lane asks for its own, or for a value that all hold.
template <class T>
struct ThreadValue {
  T value;
  KVIRE_HD T& operator[](int) { return value; }
  KVIRE_HD const T& operator[](int) const { return value; }
};

/// A full warp of a one-dimensional block (a multiple of 32 threads) as a lane group. All 32 lanes must reach each call.
struct WarpGroup {
  static constexpr int size = 32;

  template <class T>
  using Lanes = ThreadValue<T>;

  // Host-device, because bodies are: nvcc checks their host side too. Only the device side is ever run.
  template <class F>
  KVIRE_HD void each(F&& f) const {
    f(lane());
  }

  KVIRE_HD void sync() const {
#if KVIRE_DEVICE_PASS
    __syncwarp();
#endif
  }

  template <class T>
  KVIRE_HD Lanes<T> shuffle_xor(const Lanes<T>& x, [[maybe_unused]] int mask) const {
#if KVIRE_DEVICE_PASS
    return {__shfl_xor_sync(0xFFFFFFFFU, x.value, mask)};
#else
    return x;
#endif
  }

  /// This thread's lane, and the warp's number in the block.
  KVIRE_HD static int lane() {
#if KVIRE_DEVICE_PASS
    return static_cast<int>(threadIdx.x & 31U);
#else
    return 0;
#endif
  }
  KVIRE_HD static int warp() {
#if KVIRE_DEVICE_PASS
    return static_cast<int>(threadIdx.x >> 5);
#else
    return 0;
#endif
  }
};

KVIRE_NAMESPACE_END
