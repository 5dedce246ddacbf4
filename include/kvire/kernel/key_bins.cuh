// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/std.hpp>

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

/// Where a bin is counted.
__device__ inline u32 bin_at(u32 bin) { return bin + bin / 16 * 4; }

__device__ inline u32 scan_lanes(u32 x, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
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
  uint4 v[4];
  u32 sums[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = *reinterpret_cast<const uint4*>(counts + lane * 20 + j * 4);
#pragma unroll
  for (int j = 0; j < 4; ++j) sums[j] = (v[j].x + v[j].y) + (v[j].z + v[j].w);
  const u32 sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  const u32 through = scan_lanes(sum, lane);
  const u32 reached = __ballot_sync(~0U, through >= need);
  if (reached == 0) return {0, 0, 0, 1};
  // Within the lane: first the quad, then the bin.
  const u32 first = through - sum, second = first + sums[0], third = second + sums[1], fourth = third + sums[2];
  const auto pick = [&](u32 a, u32 b, u32 c, u32 d) { return fourth < need ? d : third < need ? c : second < need ? b : a; };
  u32 before = pick(first, second, third, fourth);
  u32 bin = u32(lane * 16) + pick(0, 4, 8, 12);
  const u32 w[4] = {pick(v[0].x, v[1].x, v[2].x, v[3].x), pick(v[0].y, v[1].y, v[2].y, v[3].y), pick(v[0].z, v[1].z, v[2].z, v[3].z),
                    pick(v[0].w, v[1].w, v[2].w, v[3].w)};
  u32 count = w[0];
#pragma unroll
  for (int j = 1; j < 4; ++j) {
    const bool further = before + count < need;
    before += further ? count : 0;
    count = further ? w[j] : count;
    bin += further ? 1U : 0U;
  }
  const int owner = __ffs(int(reached)) - 1;
  return {__shfl_sync(~0U, bin, owner), __shfl_sync(~0U, before, owner), __shfl_sync(~0U, count, owner), 0};
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
