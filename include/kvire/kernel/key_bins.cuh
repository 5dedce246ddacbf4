// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/float_bits.hpp>

/// A search among keys by histograms of 512 bins, for a block or a part of one: the threads count together, then one warp looks for the bin and tells the
/// others. All of them looking would save a barrier, but takes longer from eight warps on: they read the whole histogram each.

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

using u32 = unsigned int;
using u64 = unsigned long long;

inline constexpr int key_bins = 512;
inline constexpr int key_digit = 9;
inline constexpr int key_words = key_bins + key_bins / 4;  // the 16 bins of a lane stand 4 words apart from the next lane's, for the banks

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
/// Whether a score, not NaN, is `least` or more. Both whatever the build does to subnormals.
__device__ inline bool reaches(float x, float least) {
  u32 yes;
  asm("set.ge.u32.f32 %0, %1, %2;" : "=r"(yes) : "f"(x), "f"(least));
  return yes != 0;
}

/// Where a bin is counted.
__device__ inline u32 bin_at(u32 bin) { return bin + bin / 16 * 4; }

template <int Lanes = 32>
__device__ inline u32 scan_lanes(u32 x, int lane) {
#pragma unroll
  for (int d = 1; d < Lanes; d *= 2) {
    const u32 other = __shfl_up_sync(~0U, x, d);
    if (lane >= d) x += other;
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

/// The bin, from the first on, that holds the need-th of what is counted. One warp.
__device__ inline FoundBin look_for_bin(const u32* counts, u32 need, int lane) {
  u32 sum = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint4 v = *reinterpret_cast<const uint4*>(counts + lane * 20 + j * 4);
    sum += (v.x + v.y) + (v.z + v.w);
  }
  const u32 through = scan_lanes(sum, lane);
  const u32 reached = __ballot_sync(~0U, through >= need);
  if (reached == 0) return {0, 0, 0, 1};
  // Then a lane looks at each bin of the lane that has it.
  const int owner = __ffs(int(reached)) - 1;
  const u32 count = lane < 16 ? counts[owner * 20 + lane] : 0;
  const u32 up = __shfl_sync(~0U, through - sum, owner) + scan_lanes<16>(count, lane);
  const int bin = __ffs(int(__ballot_sync(~0U, up >= need))) - 1;
  return {u32(owner * 16 + bin), __shfl_sync(~0U, up - count, bin), __shfl_sync(~0U, count, bin), 0};
}

/// The same for all threads: `meet` is their barrier, `told` in shared memory. When it returns, nobody reads the counts any more.
template <class Meet>
__device__ inline FoundBin find_bin(const u32* counts, u32 need, FoundBin& told, int thread, Meet meet) {
  if (thread < 32) {
    const FoundBin f = look_for_bin(counts, need, thread);
    if (thread == 0) told = f;
  }
  meet();
  return told;
}

struct Floor {
  u32 key = 1;       // at least `need` keys reach it; 1 if there are fewer
  u32 above = 0;     // keys above it, where it is one that too many have
  bool tied = false;
};

/// A key, at least 1, that `need` keys reach and no more than `allowed`, unless too many are equal to it. `most`: the largest key. `each(see)` calls
/// see(key) for every key of the calling thread, 0 for none. `counts`: key_words in shared memory, clear. `told`, `meet`: as find_bin takes them.
template <class Each, class Meet>
__device__ inline Floor find_floor(u32* counts, FoundBin& told, u32 most, u32 need, u32 allowed, int thread, int threads, Meet meet, Each each) {
  u32 top = most, above = 0;
  int shift = 17;  // 8 binades below the largest; if that is too little, everything
#pragma unroll 1
  for (;;) {
    each([&](u32 key) {
      const u32 bin = (top - key) >> shift;
      if (key != 0 && key <= top && bin < u32(key_bins)) atomicAdd(&counts[bin_at(bin)], 1U);
    });
    meet();
    const FoundBin f = find_bin(counts, need, told, thread, meet);
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
    for (int i = thread; i < key_words / 4; i += threads) reinterpret_cast<uint4*>(counts)[i] = uint4{0, 0, 0, 0};
    meet();
  }
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END
