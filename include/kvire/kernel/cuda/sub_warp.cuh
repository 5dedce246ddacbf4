// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/group.hpp>

KVIRE_NAMESPACE_BEGIN

/// `Size` neighbouring lanes of a warp (a power of two up to 32) as a lane group; groups of one warp may go different ways. The lanes of
/// a group must reach each call together.
template <int Size>
struct SubWarpGroup {
  static constexpr int size = Size;

  template <class T>
  struct Lanes {
    T value;
    KVIRE_HD T& operator[](int) { return value; }
    KVIRE_HD const T& operator[](int) const { return value; }
  };

  // Host-device, because bodies are: nvcc checks their host side too. Only the device side is ever run.
  template <class F>
  KVIRE_HD void each(F&& f) const {
    f(lane());
  }

  KVIRE_HD void sync() const {
#if KVIRE_DEVICE_PASS
    __syncwarp(mask());
#endif
  }

  template <class T>
  KVIRE_HD Lanes<T> shuffle_xor(const Lanes<T>& x, [[maybe_unused]] int distance) const {
#if KVIRE_DEVICE_PASS
    return {__shfl_xor_sync(mask(), x.value, distance)};
#else
    return x;
#endif
  }

  /// True in every lane if it is in one.
  KVIRE_HD bool any(bool x) const {
#if KVIRE_DEVICE_PASS
    return __any_sync(mask(), x) != 0;
#else
    return x;
#endif
  }

  KVIRE_HD static int lane() {
#if KVIRE_DEVICE_PASS
    return static_cast<int>(threadIdx.x & unsigned(Size - 1));
#else
    return 0;
#endif
  }

 private:
#if KVIRE_DEVICE_PASS
  __device__ static unsigned mask() {
    constexpr unsigned lanes = Size == 32 ? 0xFFFFFFFFU : (1U << Size) - 1U;
    return lanes << (threadIdx.x & 31U & ~unsigned(Size - 1));
  }
#endif
};

KVIRE_NAMESPACE_END
