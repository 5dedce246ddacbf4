// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/float_bits.hpp>
#include <kvire/kernel/candidate_slots.cuh>
#include <kvire/kernel/key_bins.cuh>
#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/kernel/tuning.hpp>

/// The scores of a CTA's part of a row, on their way to a selection: kept in shared memory, pruned to what may still be selected when it is full and at the
/// part's end, then written to the part's slot (candidate_slots.cuh).
///
/// A prune keeps the k best of what there is, and those that it does not tell apart from them as far as the slot has room; of equal scores at the cut
/// those at lower positions. So the k best of the row, by score and then position, are among what the parts keep, whatever the distribution.

KVIRE_NAMESPACE_BEGIN

namespace sm90::detail {

/// Buffer: scores of a query token that are kept before a prune.
template <int Buffer, int NextN>
struct KeptScoresMemory {
  static constexpr int most = CandidateSlots::capacity_for(CandidateSlots::most_k);
  alignas(16) float scores[NextN][Buffer];
  alignas(16) float out[most];
  alignas(16) kstd::uint32_t counts[kvire::detail::topk::key_bins];
  kvire::detail::topk::FindMemory find;
  kstd::uint32_t warps[32];
  kstd::uint16_t old_place[NextN][most];  // of what has been pruned before: tokens from the part's first
  kstd::uint16_t out_place[most];
};

constexpr int kept_scores_bytes(int buffer, int next_n) {
  constexpr int most = CandidateSlots::capacity_for(CandidateSlots::most_k);
  return next_n * (buffer * 4 + most * 2) + most * 6 + kvire::detail::topk::key_bins * 4 + static_cast<int>(sizeof(kvire::detail::topk::FindMemory)) + 32 * 4;
}
static_assert(require_tuning<KeptScoresMemory<4096, 2>, sizeof(KeptScoresMemory<4096, 2>) == kept_scores_bytes(4096, 2)>());

#if KVIRE_CUDA_COMPILER

/// Of one warpgroup; all of its threads call everything.
template <int Buffer, int NextN>
class KeptScores {
 public:
  using Memory = KeptScoresMemory<Buffer, NextN>;
  static constexpr int threads = 128;
  static constexpr int tile = 64;

  /// `whole`: whether slots have room for all scores of a part.
  KVIRE_DEVICE KVIRE_INLINE KeptScores(const CandidateSlots& slots, Memory& memory, bool whole, int thread) : slots_(slots), s_(memory), whole_(whole), thread_(thread) {}

  /// A part of a row begins with token `first`.
  KVIRE_DEVICE KVIRE_INLINE void begin(int first) {
    part_ = chunk_ = first;
    tokens_ = 0;
    pruned_ = false;
    for (int& n : old_) n = 0;
  }
  /// Whether there is no room for another tile: time for a flush.
  KVIRE_DEVICE KVIRE_INLINE bool full() const { return (pruned_ ? slots_.capacity : 0) + tokens_ + tile > Buffer; }
  KVIRE_DEVICE KVIRE_INLINE void next_tile() { tokens_ += tile; }
  /// Keeps the score of a token of the tile that query token q sees; NaN: not to be selected.
  KVIRE_DEVICE KVIRE_INLINE void put(int q, int token, float score) { s_.scores[q][old(q) + token - chunk_] = score; }
  /// Makes room or, at the part's end, writes it to its slot; barriers inside. `slot`: that of query token 0. `seen(q)`: tokens that query token q sees of
  /// the row.
  template <class Seen>
  KVIRE_DEVICE KVIRE_INLINE void flush(bool ended, kstd::int64_t slot, Seen&& seen) {
#pragma unroll 1
    for (int q = 0; q < NextN; ++q) {
      int n = there(q, seen(q));
      pad(q, n);
      meet();
      const bool pruned = n > slots_.capacity;
      if (pruned) n = prune(q, n);
      if (ended) {
        write(slot + q, pruned ? s_.out : s_.scores[q], n, [&](int i) { return pruned ? static_cast<int>(s_.out_place[i]) : place(q, i); });
      } else if (pruned) {
        for (int i = thread_; i < n; i += threads) {
          s_.scores[q][i] = s_.out[i];
          s_.old_place[q][i] = s_.out_place[i];
        }
      } else {
        for (int i = old(q) + thread_; i < n; i += threads) s_.old_place[q][i] = static_cast<kstd::uint16_t>(place(q, i));
      }
      meet();
      if (q == 0) old_[0] = n;
      if (q != 0) old_[NextN - 1] = n;
    }
    chunk_ += tokens_;
    tokens_ = 0;
    pruned_ = true;
  }

 private:
  using u32 = kvire::detail::topk::u32;
  static constexpr int rounds = Buffer / (4 * threads);
  static_assert(require_tuning<KeptScores, (Buffer % (4 * threads) == 0 && rounds <= 8 && Buffer >= Memory::most + tile)>());

  KVIRE_DEVICE KVIRE_INLINE static void meet() { ptx::named_barrier(1, threads); }
  KVIRE_DEVICE KVIRE_INLINE static u32 key_of(float x) { return is_nan(x) ? 0 : order_key(x); }
  KVIRE_DEVICE KVIRE_INLINE int old(int q) const { return NextN == 1 ? old_[0] : q == 0 ? old_[0] : old_[NextN - 1]; }
  KVIRE_DEVICE KVIRE_INLINE static u32 best_of(const float4& v) {
    using kvire::detail::topk::larger;
    return key_of(larger(larger(v.x, v.y), larger(v.z, v.w)));
  }
  /// Scores in the buffer.
  KVIRE_DEVICE KVIRE_INLINE int there(int q, int seen) const {
    const int here = seen - chunk_;
    return old(q) + (here < 0 ? 0 : here < tokens_ ? here : tokens_);
  }
  /// Where entry i of the buffer stands, in tokens from the part's first.
  KVIRE_DEVICE KVIRE_INLINE int place(int q, int i) const { return i < old(q) ? static_cast<int>(s_.old_place[q][i]) : chunk_ - part_ + i - old(q); }
  KVIRE_DEVICE KVIRE_INLINE void pad(int q, int n) {
    const int up = (n + 15) / 16 * 16;
    if (n + thread_ < up) s_.scores[q][n + thread_] = float_of(nan_bits);
  }

  /// The k best of n scores, and more while there is room, to s_.out in order of position; how many.
  KVIRE_DEVICE KVIRE_INLINE int prune(int q, int n) {
    namespace topk = kvire::detail::topk;
    const int lane = thread_ % 32, warp = thread_ / 32;
    const auto load = [&](int r) {
      const int i = (r * threads + thread_) * 4;
      const float none = float_of(nan_bits);
      return i < n ? *reinterpret_cast<const float4*>(&s_.scores[q][i]) : float4{none, none, none, none};
    };
    // First by the best of each four: k of them have k scores, and they are fewer to count.
    u32 best[rounds];
    u32 most = 0;
#pragma unroll
    for (int r = 0; r < rounds; ++r) {
      const float4 v = load(r);
      best[r] = best_of(v);
      most = max(most, best[r]);
    }
    clear();
    most = __reduce_max_sync(~0U, most);
    if (lane == 0) s_.warps[warp] = most;
    meet();
    most = max(max(s_.warps[0], s_.warps[1]), max(s_.warps[2], s_.warps[3]));
    const u32 k = static_cast<u32>(slots_.k), capacity = static_cast<u32>(slots_.capacity);
    topk::Floor floor = topk::find_floor<threads>(s_.counts, s_.find, most, k, k + 64, thread_, [] { meet(); }, [&](auto see) {
#pragma unroll
      for (int r = 0; r < rounds; ++r) see(best[r]);
    });
    floor.tied = false;  // equal ones may all be kept as yet
    u32 kept = count(load, floor, 0);
    if (kept > capacity) {
      clear();
      meet();
      floor = topk::find_floor<threads>(s_.counts, s_.find, most, k, capacity, thread_, [] { meet(); }, [&](auto see) {
#pragma unroll 1
        for (int r = 0; r < rounds; ++r) {
          const float4 v = load(r);
          see(key_of(v.x));
          see(key_of(v.y));
          see(key_of(v.z));
          see(key_of(v.w));
        }
      });
      kept = count(load, floor, k - floor.above);
    }
    // Where those of a round and warp begin: equal ones in the upper half.
    const u32 mine = lane < rounds * 4 ? s_.warps[lane] : 0;
    const u32 before = topk::scan_lanes(mine) - mine;
    const u32 quota = floor.tied ? k - floor.above : 0;
    const float least = topk::float_of_key(floor.key);
#pragma unroll 1
    for (int r = 0; r < rounds; ++r) {
      const float4 v = load(r);
      const float x[4] = {v.x, v.y, v.z, v.w};
      const u32 n4 = taken(x[0], least, floor) + taken(x[1], least, floor) + taken(x[2], least, floor) + taken(x[3], least, floor);
      u32 at = __shfl_sync(~0U, before, r * 4 + warp) + topk::scan_lanes(n4) - n4;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const u32 one = taken(x[c], least, floor);
        const u32 equal = at >> 16;
        if (one == 1 || (one != 0 && equal < quota)) {
          const u32 to = (at & 0xFFFFU) + min(equal, quota);
          s_.out[to] = x[c];
          s_.out_place[to] = static_cast<kstd::uint16_t>(place(q, (r * threads + thread_) * 4 + c));
        }
        at += one;
      }
    }
    const int all = static_cast<int>(kept);
    const int up = (all + 15) / 16 * 16;
    if (all + thread_ < up) s_.out[all + thread_] = float_of(nan_bits);
    meet();
    return all;
  }
  KVIRE_DEVICE KVIRE_INLINE void clear() {
    for (int i = thread_; i < kvire::detail::topk::key_bins; i += threads) s_.counts[i] = 0;
  }
  /// 1 for a score that is kept, 1 << 16 for one at the tied cut.
  KVIRE_DEVICE KVIRE_INLINE static u32 taken(float x, float least, const kvire::detail::topk::Floor& floor) {
    const u32 one = kvire::detail::topk::reaches(x, least) ? 1U : 0U;
    return floor.tied && key_of(x) == floor.key ? 1U << 16 : one;
  }
  /// How many are kept; for each round and warp in s_.warps. Barriers before and behind.
  template <class Load>
  KVIRE_DEVICE KVIRE_INLINE u32 count(Load& load, const kvire::detail::topk::Floor& floor, u32 quota) {
    meet();
    const float least = kvire::detail::topk::float_of_key(floor.key);
#pragma unroll 2
    for (int r = 0; r < rounds; ++r) {
      const float4 v = load(r);
      const u32 n = __reduce_add_sync(~0U, taken(v.x, least, floor) + taken(v.y, least, floor) + taken(v.z, least, floor) + taken(v.w, least, floor));
      if (thread_ % 32 == 0) s_.warps[r * 4 + thread_ / 32] = n;
    }
    meet();
    const u32 all = __reduce_add_sync(~0U, thread_ % 32 < rounds * 4 ? s_.warps[thread_ % 32] : 0);
    return (all & 0xFFFFU) + min(all >> 16, quota);
  }

  /// n scores, filled up to a multiple of 16, to a slot; four lanes a group.
  template <class Place>
  KVIRE_DEVICE KVIRE_INLINE void write(kstd::int64_t slot, const float* from, int n, Place&& place_of) {
    const int quads = (n + 15) / 16 * 4, all = slots_.capacity / 4;
    float* scores = slots_.scores + slot * slots_.capacity;
    kstd::int32_t* positions = slots_.positions + slot * slots_.capacity;
    kstd::uint32_t* best = slots_.best + slot * (slots_.capacity / CandidateSlots::group);
#pragma unroll 1
    for (int i = thread_; i - thread_ % 32 < (whole_ ? quads : all); i += threads) {
      u32 most = 0;
      if (i < quads) {
        const float4 v = *reinterpret_cast<const float4*>(from + i * 4);
        most = best_of(v);
        *reinterpret_cast<float4*>(scores + i * 4) = v;
        if (!whole_) {
          const auto at = [&](int c) { return part_ + place_of(min(i * 4 + c, n - 1)); };
          *reinterpret_cast<int4*>(positions + i * 4) = int4{at(0), at(1), at(2), at(3)};
        }
      }
      most = max(most, __shfl_xor_sync(~0U, most, 1));
      most = max(most, __shfl_xor_sync(~0U, most, 2));
      if (thread_ % 4 == 0 && i < all) best[i / 4] = most;
    }
  }

  const CandidateSlots& slots_;
  Memory& s_;
  const bool whole_;
  const int thread_;
  int part_ = 0;   // first token of the part
  int chunk_ = 0;  // first token of what has come since the last prune
  int tokens_ = 0;  // how many, in whole tiles
  bool pruned_ = false;
  int old_[NextN > 1 ? 2 : 1] = {};  // what the last prune kept, at the buffer's start
};

#endif  // KVIRE_CUDA_COMPILER

}  // namespace sm90::detail

KVIRE_NAMESPACE_END
