// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/cuda/warp_group.cuh>
#include <kvire/kernel/tuning.hpp>

KVIRE_NAMESPACE_BEGIN

/// A whole one-dimensional block of `Size` threads (full warps, a power of two of them) as a group for bodies that reduce and scan: no exchange between two
/// lanes, but `reduce`, `scan_sum` and `sync_any` with two barriers at most. All threads must reach each call.
template <int Size>
struct BlockGroup {
  static_assert(require_tuning<BlockGroup, (Size % 32 == 0 && Size <= 1024 && (Size & (Size - 1)) == 0)>());
  static constexpr int size = Size;
  static constexpr int warps = Size / 32;

  /// Shared memory that reductions use.
  struct Exchange {
    alignas(8) unsigned char bytes[8 * 32];
  };
  Exchange* exchange;

  template <class T>
  using Lanes = ThreadValue<T>;

  // Host-device, because bodies are: nvcc checks their host side too. Only the device side is ever run.
  template <class F>
  KVIRE_HD void each(F&& f) const {
    f(lane());
  }

  KVIRE_HD void sync() const {
#if KVIRE_DEVICE_PASS
    __syncthreads();
#endif
  }

  KVIRE_HD static int lane() {
#if KVIRE_DEVICE_PASS
    return static_cast<int>(threadIdx.x);
#else
    return 0;
#endif
  }

  /// The values of all warps, one from each: lane i of every warp has that of warp i % warps. Memory written before is seen by the block after.
  template <class T>
  KVIRE_HD T of_warps(T mine) const {
    static_assert(sizeof(rule::KernelTuning<BlockGroup, (sizeof(T) * warps <= sizeof(Exchange))>) > 0);
#if KVIRE_DEVICE_PASS
    T* shared = reinterpret_cast<T*>(exchange);
    __syncthreads();  // what an earlier call left has been read
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = mine;
    __syncthreads();
    return shared[threadIdx.x % warps];
#else
    return mine;
#endif
  }
};

/// As `reduce` of any group, in the same tree: lane distance 1 first.
template <int Size, class T, class Op>
KVIRE_HD void reduce([[maybe_unused]] BlockGroup<Size> g, [[maybe_unused]] ThreadValue<T>& x, [[maybe_unused]] Op op) {
#if KVIRE_DEVICE_PASS
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) x.value = op(x.value, __shfl_xor_sync(~0U, x.value, distance));
  x.value = g.of_warps(x.value);
#pragma unroll
  for (int distance = 1; distance < g.warps; distance *= 2) x.value = op(x.value, __shfl_xor_sync(~0U, x.value, distance));
#endif
}

/// As `scan_sum` of any group.
template <int Size, class T>
KVIRE_HD T scan_sum([[maybe_unused]] BlockGroup<Size> g, ThreadValue<T>& x) {
  T total = x.value;
#if KVIRE_DEVICE_PASS
  const unsigned lane = threadIdx.x % 32;
  const auto inclusive = [lane](T v) {
#pragma unroll
    for (unsigned distance = 1; distance < 32; distance *= 2) {
      const T below = __shfl_up_sync(~0U, v, distance);
      if (lane >= distance) v += below;
    }
    return v;
  };
  const T up_to = inclusive(x.value);
  const T warps = inclusive(g.of_warps(__shfl_sync(~0U, up_to, 31)));
  total = __shfl_sync(~0U, warps, g.warps - 1);
  const T before = __shfl_sync(~0U, warps, (threadIdx.x / 32 + 31) % 32);
  x.value = up_to - x.value + (threadIdx.x < 32 ? T(0) : before);
#endif
  return total;
}

/// As `sync_any` of any group.
template <int Size, class T>
KVIRE_HD bool sync_any(BlockGroup<Size>, ThreadValue<T> x) {
#if KVIRE_DEVICE_PASS
  return __syncthreads_or(x.value != 0) != 0;
#else
  return x.value != 0;
#endif
}

KVIRE_NAMESPACE_END
