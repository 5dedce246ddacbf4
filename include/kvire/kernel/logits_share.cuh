// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/std.hpp>

KVIRE_NAMESPACE_BEGIN

/// How a sparse-logits kernel divides its work. The pages of all rows, cut into tiles of 64 tokens, form one list; each CTA, or warpgroup, takes a
/// contiguous share of it, found from the lengths inside the kernel. A plan says how pages and tiles lie in each other: next_n, tokens,
/// pages_per_tile, tiles_per_page.
namespace sm90 {

inline constexpr int tile_tokens = 64;

/// What the kernel reads. Plain pointers to device memory; lengths in cached tokens. Rows are (batch, query token) pairs.
struct LogitsArguments {
  const kstd::byte* pages = nullptr;      ///< page 0 of the layer
  kstd::int64_t page_stride = 0;          ///< bytes, a multiple of 16
  kstd::int32_t page_count = 0;           ///< ids at or above are skipped and counted
  kstd::int32_t batch = 0;                ///< B
  const void* queries = nullptr;          ///< [B][next_n][heads][dim], 16-byte aligned
  const float* weights = nullptr;         ///< [B][next_n][heads], 16-byte aligned
  const kstd::int32_t* page_table = nullptr;  ///< [B][table_stride]; negative: no page, scores -inf
  kstd::int64_t table_stride = 0;         ///< elements
  kstd::int32_t table_width = 0;          ///< entries of a row that may be read
  const kstd::int32_t* lengths = nullptr;  ///< [B], or [B][next_n] if lengths_per_query; one length is the last query token's, each earlier one sees one less
  bool lengths_per_query = false;
  float* logits = nullptr;                ///< [B * next_n][logits_stride]
  kstd::int64_t logits_stride = 0;        ///< elements
  kstd::uint32_t* group_best = nullptr;   ///< KeepBest: [B * next_n][(logits_stride + 15) / 16], order_key of the best of 16 aligned tokens that are seen and on a page, 0 for none; groups beyond the length stay untouched
  unsigned long long* bad_pages = nullptr;   ///< counts page ids at or above page_count; may be null
  unsigned long long* nan_logits = nullptr;  ///< counts logits that were NaN, written as -inf; may be null
};

#if KVIRE_CUDA_COMPILER
namespace detail {

struct Share {
  int row = -1;   // first row
  int tile = 0;   // first tile within it
  int tiles = 0;  // tiles of this CTA
};

/// Tokens that the table and the output have room for, whatever the lengths say.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE int clamp_length(const LogitsArguments& a, int length) {
  const kstd::int64_t pages = static_cast<kstd::int64_t>(a.table_width) * Plan::tokens;
  const kstd::int64_t most = pages < a.logits_stride ? pages : a.logits_stride;
  return length <= 0 ? 0 : static_cast<kstd::int64_t>(length) > most ? static_cast<int>(most) : length;
}
/// Tokens that a query token of a row sees.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE int visible_tokens(const LogitsArguments& a, int row, int query) {
  if (a.lengths_per_query) return clamp_length<Plan>(a, __ldg(a.lengths + static_cast<kstd::int64_t>(row) * Plan::next_n + query));
  return clamp_length<Plan>(a, __ldg(a.lengths + row) - (Plan::next_n - 1 - query));
}
/// Tokens that any query token of a row sees.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE int row_tokens(const LogitsArguments& a, int row) {
  int most = visible_tokens<Plan>(a, row, Plan::next_n - 1);
  if (a.lengths_per_query) {
    for (int q = 0; q + 1 < Plan::next_n; ++q) {
      const int v = visible_tokens<Plan>(a, row, q);
      most = v > most ? v : most;
    }
  }
  return most;
}
KVIRE_DEVICE KVIRE_INLINE int tiles_of(int tokens) { return (tokens + tile_tokens - 1) / tile_tokens; }

KVIRE_DEVICE KVIRE_INLINE int inclusive_scan(int x, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int y = __shfl_up_sync(~0U, x, d);
    if (lane >= d) x += y;
  }
  return x;
}

/// Part `index` of `total` things dealt to `count`: the first ones get one more.
KVIRE_DEVICE KVIRE_INLINE void split(unsigned total, unsigned index, unsigned count, int& begin, int& size) {
  const unsigned each = total / count;
  const unsigned more = total - each * count;
  begin = static_cast<int>(each * index + (index < more ? index : more));
  size = static_cast<int>(each + (index < more ? 1U : 0U));
}

/// The contiguous share of CTA `index` of `count`; called by one warp, the same answer in all lanes. Rows are dealt to lanes in runs, so that
/// a few thousand rows cost one pass and one scan.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE Share find_share(const LogitsArguments& a, int lane, unsigned index, unsigned count) {
  Share share;
  int begin;
  if (a.batch <= 32) {
    const int mine = lane < a.batch ? tiles_of(row_tokens<Plan>(a, lane)) : 0;
    const int through = inclusive_scan(mine, lane);
    split(static_cast<unsigned>(__shfl_sync(~0U, through, 31)), index, count, begin, share.tiles);
    const unsigned past = __ballot_sync(~0U, through > begin);
    if (share.tiles == 0) return share;
    share.row = __ffs(static_cast<int>(past)) - 1;
    share.tile = begin - __shfl_sync(~0U, through - mine, share.row);
    return share;
  }
  const int run = (a.batch + 31) / 32;
  const int first = lane * run;
  const int last = first + run < a.batch ? first + run : a.batch;
  int sum = 0;
#pragma unroll 4
  for (int row = first; row < last; ++row) sum += tiles_of(row_tokens<Plan>(a, row));
  int through = inclusive_scan(sum, lane);
  split(static_cast<unsigned>(__shfl_sync(~0U, through, 31)), index, count, begin, share.tiles);
  if (share.tiles == 0) return share;
  const int owner = __ffs(static_cast<int>(__ballot_sync(~0U, through > begin))) - 1;
  int before = __shfl_sync(~0U, through - sum, owner);
  for (int base = owner * run;; base += 32) {
    const int row = base + lane;
    const int mine = row < (owner + 1) * run && row < a.batch ? tiles_of(row_tokens<Plan>(a, row)) : 0;
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

/// Index in its row of the i-th page of a tile.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE int page_of(int tile, int i) {
  return Plan::tiles_per_page > 1 ? tile / Plan::tiles_per_page : tile * Plan::pages_per_tile + i;
}

/// Up to 32 consecutive tiles of one row; lane i holds the page ids of tile i.
template <int Ids>
struct Segment {
  int row = 0;
  int tile = 0;
  int tiles = 0;
  int length = 0;  // tokens of the row
  int id[Ids] = {};
};

/// Page ids of the share this CTA would own were all rows as long as the table is wide, read while the lengths are still on their way.
template <class Plan>
struct Guess {
  int row = -1;
  int tile = 0;
  int id[Plan::pages_per_tile] = {};

  KVIRE_DEVICE KVIRE_INLINE Guess(const LogitsArguments& a, int lane, int guessed_row, int guessed_tile) : row(guessed_row), tile(guessed_tile) {
    const kstd::int32_t* table = a.page_table + a.table_stride * row;
#pragma unroll
    for (int i = 0; i < Plan::pages_per_tile; ++i) {
      const int page = page_of<Plan>(tile + lane, i);
      if (page < a.table_width) id[i] = __ldg(table + page);
    }
  }
};

/// Walks a share segment by segment; one warp.
template <class Plan>
struct Walk {
  static constexpr int ids = Plan::pages_per_tile;
  const LogitsArguments& a;
  int lane;
  int row, tile, left;
  int chunk, lengths;  // lane i: tokens of row chunk + i

  KVIRE_DEVICE KVIRE_INLINE Walk(const LogitsArguments& arguments, int l, Share share)
      : a(arguments), lane(l), row(share.row), tile(share.tile), left(share.tiles), chunk(0), lengths(0) {
    if (left > 0) load_chunk();
  }
  KVIRE_DEVICE KVIRE_INLINE void load_chunk() {
    chunk = row;
    lengths = row + lane < a.batch ? row_tokens<Plan>(a, row + lane) : 0;
  }
  /// False when the share is used up.
  KVIRE_DEVICE KVIRE_INLINE bool next(Segment<ids>& s, const Guess<Plan>* guess = nullptr) {
    if (left == 0) return false;
    for (;;) {
      if (row - chunk >= 32) load_chunk();
      s.length = __shfl_sync(~0U, lengths, row - chunk);
      const int rest = tiles_of(s.length) - tile;
      if (rest > 0) {
        s.tiles = rest < left ? rest : left;
        if (s.tiles > 32) s.tiles = 32;
        break;
      }
      ++row;
      tile = 0;
    }
    s.row = row;
    s.tile = tile;
    const kstd::int32_t* table = a.page_table + a.table_stride * row;
#pragma unroll
    for (int i = 0; i < ids; ++i) {
      const int page = page_of<Plan>(tile + lane, i);
      const bool wanted = lane < s.tiles && page * Plan::tokens < s.length;
      int id = -1;
      if (guess != nullptr && guess->row == row && guess->tile == tile) {
        id = wanted ? guess->id[i] : -1;
      } else if (wanted) {
        id = __ldg(table + page);
      }
      const bool counted = id >= a.page_count && (Plan::tiles_per_page == 1 || (tile + lane) % Plan::tiles_per_page == 0);
      if (counted && a.bad_pages != nullptr) atomicAdd(a.bad_pages, 1ULL);
      s.id[i] = id >= a.page_count ? -1 : id;
    }
    tile += s.tiles;
    left -= s.tiles;
    return true;
  }
};

}  // namespace detail
#endif  // KVIRE_CUDA_COMPILER
}  // namespace sm90

KVIRE_NAMESPACE_END
