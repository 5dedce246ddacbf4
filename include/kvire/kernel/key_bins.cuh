// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/float_bits.hpp>
#include <kvire/kernel/tuning.hpp>

/// A search among keys by histograms of 512 bins, for a block or a part of one: its threads count together, and look for the bin together.

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

using u32 = unsigned int;
using u64 = unsigned long long;

inline constexpr int key_bins = 512;
inline constexpr int key_digit = 9;

#if KVIRE_CUDA_COMPILER

/// The least score whose order_key reaches `key`.
__device__ inline float float_of_key(u32 key) {
  return key >= sign_bit ? float_of(key - sign_bit) : float_of(sign_bit | (sign_bit - max(key, 0x00800000U)));
}
/// The larger of two scores, or the one that is not NaN.
__device__ inline float larger(float a, float b) {
  float c;
  asm("max.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
/// The smaller of two scores, or the one that is not NaN.
__device__ inline float smaller(float a, float b) {
  float c;
  asm("min.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
/// Whether a score, not NaN, is `least` or more. Both whatever the build does to subnormals.
__device__ inline bool reaches(float x, float least) {
  u32 yes;
  asm("set.ge.u32.f32 %0, %1, %2;" : "=r"(yes) : "f"(x), "f"(least));
  return yes != 0;
}

/// The sum of x in the lanes up to this one; for a whole warp.
__device__ inline u32 scan_lanes(u32 x) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    asm volatile("{\n.reg .pred p;\n.reg .u32 y;\nshfl.sync.up.b32 y|p, %0, %1, 0, -1;\n@p add.u32 %0, %0, y;\n}" : "+r"(x) : "r"(d));
  }
  return x;
}

struct BlockBarrier {
  __device__ void operator()() const { __syncthreads(); }
};

struct alignas(16) FoundBin {
  u32 bin, above, count;  // of the bin: its number, what is in those before it, what is in itself
  u32 missing;            // there are fewer
};

/// What a search needs of shared memory.
struct FindMemory {
  FoundBin found;
  u32 sums[16];  // of warps
};

/// The bin, from the first on, that holds the need-th of what is counted; for all of `Threads` threads, whose barrier `meet` is. When it returns, nobody reads
/// the counts any more.
template <int Threads, class Meet>
__device__ inline FoundBin find_bin(const u32* counts, u32 need, FindMemory& memory, int thread, Meet meet) {
  constexpr int warps = Threads / 32, each = key_bins / Threads;
  static_assert(require_tuning<FindMemory, (each >= 1 && each <= 4 && each * Threads == key_bins && warps <= 16)>());
  const int lane = thread % 32, warp = thread / 32;
  u32 n[each];
  u32 sum = 0;
#pragma unroll
  for (int j = 0; j < each; ++j) {
    n[j] = counts[thread * each + j];
    sum += n[j];
  }
  u32 through = scan_lanes(sum);
  if (lane == 31) memory.sums[warp] = through;
  meet();
  through += __reduce_add_sync(~0U, lane < warp ? memory.sums[lane] : 0);
  u32 above = through - sum;
  if (above < need && need <= through) {
#pragma unroll
    for (int j = 0; j < each; ++j) {
      if (above < need && need <= above + n[j]) memory.found = {u32(thread * each + j), above, n[j], 0};
      above += n[j];
    }
  } else if (thread == Threads - 1 && through < need) {
    memory.found = {0, 0, 0, 1};
  }
  meet();
  return memory.found;
}

struct Floor {
  u32 key = 1;       // at least `need` keys reach it; 1 if there are fewer
  u32 above = 0;     // keys above it, where it is one that too many have
  bool tied = false;
};

/// A key, at least 1, that `need` keys reach and no more than `allowed`, unless too many are equal to it. `most`: the largest key. `each(see)` calls
/// see(key) for every key of the calling thread, 0 for none. `counts`: key_bins in shared memory, clear. `memory`, `meet`: as find_bin takes them.
template <int Threads, class Each, class Meet>
__device__ inline Floor find_floor(u32* counts, FindMemory& memory, u32 most, u32 need, u32 allowed, int thread, Meet meet, Each each) {
  u32 top = most, above = 0;
  int shift = 17;  // 8 binades below the largest; if that is too little, everything
#pragma unroll 1
  for (;;) {
    each([&](u32 key) {
      const u32 bin = (top - key) >> shift;
      if (key != 0 && key <= top && bin < u32(key_bins)) atomicAdd(&counts[bin], 1U);
    });
    meet();
    const FoundBin f = find_bin<Threads>(counts, need, memory, thread, meet);
    if (f.missing == 0) {
      above += f.above;
      const u64 reach = u64(f.bin + 1) << shift;
      const bool few = above + f.count <= allowed;
      if (few || shift == 0) return {reach > top ? 1 : max(top - u32(reach) + 1, 1U), above, !few};
      need -= f.above;
      top -= f.bin << shift;
      shift = max(0, shift - key_digit);
    } else if (shift == 32 - key_digit) {
      return {};
    } else {
      shift = 32 - key_digit;  // nothing has been narrowed yet
    }
    for (int i = thread; i < key_bins / 4; i += Threads) reinterpret_cast<uint4*>(counts)[i] = uint4{0, 0, 0, 0};
    meet();
  }
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END
