// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/logits_arguments.cuh>

KVIRE_NAMESPACE_BEGIN

/// Persistent tile scheduling. The pages of all rows, cut into tiles of 64 tokens, form one list; each CTA, or warpgroup, takes a contiguous share of it, found
/// from the lengths inside the kernel.
namespace sm90 {

#if KVIRE_CUDA_COMPILER
namespace detail {

/// Tiles of the list that follow each other: what one CTA takes.
struct Share {
  int row = -1;   // first row
  int tile = 0;   // first tile within it
  int tiles = 0;  // tiles of this CTA
  int each = 0;   // tiles of every CTA, or one less
};

KVIRE_DEVICE KVIRE_INLINE int inclusive_scan(int x, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int y = __shfl_up_sync(~0U, x, d);
    if (lane >= d) x += y;
  }
  return x;
}

/// Part `index` of `total` things dealt to `count`: the first ones get one more than the others, whose number is returned.
KVIRE_DEVICE KVIRE_INLINE int split(unsigned total, unsigned index, unsigned count, int& begin, int& size) {
  const unsigned each = total / count;
  const unsigned more = total - each * count;
  begin = static_cast<int>(each * index + (index < more ? index : more));
  size = static_cast<int>(each + (index < more ? 1U : 0U));
  return static_cast<int>(each);
}

/// Rows are dealt to lanes in runs, so that a few thousand of them cost one pass and one scan. Of up to 128 rows a lane has at most four, whose scores it asks for
/// at once, without a branch between the loads.
template <class Plan>
struct LaneRows {
  static constexpr int few = 4;
  const LogitsArguments& a;
  int run;    // rows of a lane
  int first;  // the first one of this lane
  int scores[few];

  KVIRE_DEVICE KVIRE_INLINE LaneRows(const LogitsArguments& arguments, int lane) : a(arguments), run((a.batch + 31) / 32), first(lane * run) {}
  KVIRE_DEVICE KVIRE_INLINE bool has(int i) const { return i < run && first + i < a.batch; }
  KVIRE_DEVICE KVIRE_INLINE void ask() {
#pragma unroll
    for (int i = 0; i < few; ++i) scores[i] = row_scores<Plan>(a, has(i) ? first + i : 0);
  }
};

/// The contiguous share of CTA `index` of `count`; called by whole warps, the same answer in all lanes. `rows` have been asked for.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE Share find_share(const LogitsArguments& a, const LaneRows<Plan>& rows, int lane, unsigned index, unsigned count) {
  Share share;
  int begin;
  constexpr int few = LaneRows<Plan>::few;
  const int run = rows.run;
  if (run <= few) {
    int tiles[few];
    int sum = 0;
#pragma unroll
    for (int i = 0; i < few; ++i) {
      tiles[i] = rows.has(i) ? tiles_of(rows.scores[i]) : 0;
      sum += tiles[i];
    }
    share.each = split(__reduce_add_sync(~0U, static_cast<unsigned>(sum)), index, count, begin, share.tiles);  // beside the scan, not behind it
    const int through = inclusive_scan(sum, lane);
    const int owner = __ffs(static_cast<int>(__ballot_sync(~0U, through > begin))) - 1;
    if (share.tiles == 0) return share;
    int i = 0, tile = begin - (through - sum);
#pragma unroll
    for (int skipped = 0; skipped + 1 < few; ++skipped) {
      if (i == skipped && tile >= tiles[skipped]) {
        tile -= tiles[skipped];
        ++i;
      }
    }
    share.row = __shfl_sync(~0U, rows.first + i, owner);
    share.tile = __shfl_sync(~0U, tile, owner);
    return share;
  }
  const int first = rows.first;
  const int last = first + run < a.batch ? first + run : a.batch;
  int sum = 0;
#pragma unroll 4
  for (int row = first; row < last; ++row) sum += tiles_of(row_scores<Plan>(a, row));
  int through = inclusive_scan(sum, lane);
  share.each = split(static_cast<unsigned>(__shfl_sync(~0U, through, 31)), index, count, begin, share.tiles);
  if (share.tiles == 0) return share;
  const int owner = __ffs(static_cast<int>(__ballot_sync(~0U, through > begin))) - 1;
  int before = __shfl_sync(~0U, through - sum, owner);
  for (int base = owner * run;; base += 32) {
    const int row = base + lane;
    const int mine = row < (owner + 1) * run && row < a.batch ? tiles_of(row_scores<Plan>(a, row)) : 0;
    through = before + inclusive_scan(mine, lane);
    const unsigned past = __ballot_sync(~0U, through > begin);
    if (past != 0) {
      const int at = __ffs(static_cast<int>(past)) - 1;
      share.row = base + at;
      share.tile = begin - __shfl_sync(~0U, through - mine, at);
      return share;
    }
    before = __shfl_sync(~0U, through, 31);
  }
}

}  // namespace detail
#endif  // KVIRE_CUDA_COMPILER
}  // namespace sm90

KVIRE_NAMESPACE_END
