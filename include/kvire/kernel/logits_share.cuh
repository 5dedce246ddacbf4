// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/candidate_slots.cuh>
#include <kvire/kernel/logits_math.cuh>

KVIRE_NAMESPACE_BEGIN

/// How a sparse-logits kernel divides its work. The pages of all rows, cut into tiles of 64 tokens, form one list; each CTA, or warpgroup, takes a
/// contiguous share of it, found from the lengths inside the kernel. A plan says how pages and tiles lie in each other: next_n, tokens,
/// pages_per_tile, tiles_per_page; and whether the kernel has `options`: bf16 scores and lists of blocks.
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
  void* logits = nullptr;                 ///< [B * next_n][logits_stride], f32, or bf16 if the kernel has options
  kstd::int64_t logits_stride = 0;        ///< elements
  bool bf16 = false;                      ///< options: scores are bf16, rounded to nearest even once
  const kstd::int32_t* blocks = nullptr;  ///< options: [B][max_blocks] entries of the page table to score in this order, negative: none; see SparseLogitsOptions
  kstd::int64_t max_blocks = 0;
  kstd::uint32_t* group_best = nullptr;   ///< KeepBest: [B * next_n][(logits_stride + 15) / 16], order_key of the best of 16 aligned tokens that are seen and on a page, 0 for none; groups beyond the length stay untouched
  CandidateSlots candidates;              ///< KeepCandidates: scores go there, and `logits` is not used
  unsigned long long* bad_pages = nullptr;   ///< counts page ids at or above page_count; may be null
  unsigned long long* nan_logits = nullptr;  ///< counts logits that were NaN, written as -inf; may be null
};

#if KVIRE_CUDA_COMPILER
namespace detail {

struct Share {
  int row = -1;   // first row
  int tile = 0;   // first tile within it
  int tiles = 0;  // tiles of this CTA
  int each = 0;   // tiles of every CTA, or one less
};

template <class Plan>
KVIRE_DEVICE KVIRE_INLINE bool listed(const LogitsArguments& a) {
  if constexpr (Plan::options) return a.blocks != nullptr;
  return false;
}
/// Tokens of a row that are scored, whatever the lengths say: what table and output have room for; listed blocks need not lie within the output.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE int clamp_length(const LogitsArguments& a, int length) {
  if (listed<Plan>(a)) return length <= 0 ? 0 : length;
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
/// Scores of a query token that listed blocks have.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE int listed_scores(const LogitsArguments& a) {
  const kstd::int64_t all = a.max_blocks * Plan::tokens;
  return static_cast<int>(all < a.logits_stride ? all : a.logits_stride);
}
/// Scores of a row that some query token writes: those of what it sees, or of all listed blocks.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE int row_scores(const LogitsArguments& a, int row) {
  return listed<Plan>(a) ? listed_scores<Plan>(a) : row_tokens<Plan>(a, row);
}
/// The most that a row can have.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE int most_scores(const LogitsArguments& a) {
  return listed<Plan>(a) ? listed_scores<Plan>(a) : clamp_length<Plan>(a, 0x7FFFFFFF);
}
KVIRE_DEVICE KVIRE_INLINE int tiles_of(int tokens) { return (tokens + tile_tokens - 1) / tile_tokens; }

/// Writes the score of that index.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE void store_score(const LogitsArguments& a, kstd::int64_t index, float score) {
  if (Plan::options && a.bf16) {
    store_logit(static_cast<kstd::uint16_t*>(a.logits) + index, score);
  } else {
    store_logit(static_cast<float*>(a.logits) + index, score);
  }
}

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

/// The contiguous share of CTA `index` of `count`; called by whole warps, the same answer in all lanes. Rows are dealt to lanes in runs, so that
/// a few thousand rows cost one pass and one scan.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE Share find_share(const LogitsArguments& a, int lane, unsigned index, unsigned count) {
  Share share;
  int begin;
  constexpr int few = 4;  // rows of a lane that it remembers
  if (a.batch <= 32 * few) {
    const int run = (a.batch + 31) / 32;
    int tiles[few];
    int sum = 0;
#pragma unroll
    for (int i = 0; i < few; ++i) {
      tiles[i] = i < run && lane * run + i < a.batch ? tiles_of(row_scores<Plan>(a, lane * run + i)) : 0;
      sum += tiles[i];
    }
    const int through = inclusive_scan(sum, lane);
    split(static_cast<unsigned>(__shfl_sync(~0U, through, 31)), index, count, begin, share.tiles);
    share.each = __shfl_sync(~0U, through, 31) / static_cast<int>(count);
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
    share.row = __shfl_sync(~0U, lane * run + i, owner);
    share.tile = __shfl_sync(~0U, tile, owner);
    return share;
  }
  const int run = (a.batch + 31) / 32;
  const int first = lane * run;
  const int last = first + run < a.batch ? first + run : a.batch;
  int sum = 0;
#pragma unroll 4
  for (int row = first; row < last; ++row) sum += tiles_of(row_scores<Plan>(a, row));
  int through = inclusive_scan(sum, lane);
  split(static_cast<unsigned>(__shfl_sync(~0U, through, 31)), index, count, begin, share.tiles);
  share.each = __shfl_sync(~0U, through, 31) / static_cast<int>(count);
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

/// Index in its row of the i-th page of a tile.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE int page_of(int tile, int i) {
  return Plan::tiles_per_page > 1 ? tile / Plan::tiles_per_page : tile * Plan::pages_per_tile + i;
}

/// Up to 32 consecutive tiles of one row; lane i holds the page ids of tile i.
template <class Plan>
struct Segment {
  int row = 0;
  int tile = 0;
  int tiles = 0;
  int id[Plan::pages_per_tile] = {};                               // negative: no page
  unsigned position[Plan::options ? Plan::pages_per_tile : 1] = {};  // options: token of the row that the tile's first one on that page is
};

/// A position that no query token sees.
inline constexpr unsigned nowhere = 0x80000000U;

/// Page ids of the share this CTA would own were all rows as long as the table is wide, read while the lengths are still on their way.
template <class Plan>
struct Guess {
  int row = -1;
  int tile = 0;
  int id[Plan::pages_per_tile] = {};

  KVIRE_DEVICE KVIRE_INLINE Guess(const LogitsArguments& a, int lane, int guessed_row, int guessed_tile) : row(guessed_row), tile(guessed_tile) {
    if (listed<Plan>(a)) return;
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
  int chunk, lengths;  // lane i: scores of row chunk + i
  bool counts;

  /// `first`: of the warps that walk this share, the one that counts bad pages.
  KVIRE_DEVICE KVIRE_INLINE Walk(const LogitsArguments& arguments, int l, Share share, bool first)
      : a(arguments), lane(l), row(share.row), tile(share.tile), left(share.tiles), chunk(0), lengths(0), counts(first) {
    if (left > 0) load_chunk();
  }
  KVIRE_DEVICE KVIRE_INLINE void load_chunk() {
    chunk = row;
    lengths = row + lane < a.batch ? row_scores<Plan>(a, row + lane) : 0;
  }
  /// False when the share is used up. The ids are as the page table has them, and may still be on their way: check() before they are used.
  KVIRE_DEVICE KVIRE_INLINE bool next(Segment<Plan>& s, const Guess<Plan>* guess = nullptr) {
    if (left == 0) return false;
    int scores;
    for (;;) {
      if (row - chunk >= 32) load_chunk();
      scores = __shfl_sync(~0U, lengths, row - chunk);
      const int rest = tiles_of(scores) - tile;
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
      const bool wanted = lane < s.tiles && page * Plan::tokens < scores;
      s.id[i] = -1;
      if constexpr (Plan::options) s.position[i] = static_cast<unsigned>(page * Plan::tokens + part_of(tile + lane));
      if (listed<Plan>(a)) {
        const int entry = wanted ? __ldg(a.blocks + a.max_blocks * row + page) : -1;
        const kstd::int64_t first = static_cast<kstd::int64_t>(entry) * Plan::tokens;
        if (entry >= 0 && first < row_tokens<Plan>(a, row)) {
          s.id[i] = entry < a.table_width ? __ldg(table + entry) : a.page_count;
          if constexpr (Plan::options) s.position[i] = static_cast<unsigned>(first + part_of(tile + lane));
        }
      } else if (guess != nullptr && guess->row == row && guess->tile == tile) {
        if (wanted) s.id[i] = guess->id[i];
      } else if (wanted) {
        s.id[i] = __ldg(table + page);
      }
    }
    tile += s.tiles;
    left -= s.tiles;
    return true;
  }
  /// Leaves only ids of pages that there are.
  KVIRE_DEVICE KVIRE_INLINE void check(Segment<Plan>& s) const {
#pragma unroll
    for (int i = 0; i < ids; ++i) {
      if (s.id[i] >= a.page_count) {
        s.id[i] = -1;
        if (counts && part_of(s.tile + lane) == 0 && a.bad_pages != nullptr) atomicAdd(a.bad_pages, 1ULL);
      }
      if constexpr (Plan::options) s.position[i] = s.id[i] < 0 ? nowhere : s.position[i];
    }
  }

 private:
  /// Where on its page a tile starts.
  KVIRE_DEVICE KVIRE_INLINE static int part_of(int t) { return Plan::tiles_per_page > 1 ? t % Plan::tiles_per_page * tile_tokens : 0; }
};

}  // namespace detail
#endif  // KVIRE_CUDA_COMPILER
}  // namespace sm90

KVIRE_NAMESPACE_END
