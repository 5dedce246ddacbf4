// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/logits_tile_scheduler.cuh>
#include <kvire/kernel/ptx/barrier.cuh>

KVIRE_NAMESPACE_BEGIN

/// Page-table walk: from a CTA's share of the tiles to the pages that hold them, up to 32 tiles of one row at a time, with ids asked for before they are needed.
namespace sm90 {

#if KVIRE_CUDA_COMPILER
namespace detail {

/// Index in its row of the i-th page of a tile.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE int page_of(int tile, int i) {
  return Plan::tiles_per_page > 1 ? tile / Plan::tiles_per_page : tile * Plan::pages_per_tile + i;
}

/// Brings what a tile has of its i-th page, which starts at `page`, to its place in the stage `to`; one thread. Counted on the mbarrier `full`.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE void bring_page(kstd::uint32_t to, const kstd::byte* page, int tile, int i, kstd::uint32_t full) {
  constexpr int rows = tile_tokens / Plan::pages_per_tile;
  const int part = tile % Plan::tiles_per_page;
  if constexpr (Plan::whole_page) {
    ptx::bulk_load(to, page, Plan::tile_bytes, full);
  } else {
    ptx::bulk_load(to + i * rows * Plan::key_pitch, page + part * Plan::value_bytes, rows * Plan::key_pitch, full);
    if constexpr (Plan::scale_plane) {
      ptx::bulk_load(to + Plan::value_bytes + i * rows * Plan::scale_row, page + Plan::tokens * Plan::key_pitch + part * tile_tokens * Plan::scale_row,
                     rows * Plan::scale_row, full);
    }
  }
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
      if (page < a.table_width) id[i] = table[page];
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

  /// `first`: of the warps that walk this share, the one that counts bad pages. `likely`: a row that the share may start in, or shortly behind.
  KVIRE_DEVICE KVIRE_INLINE Walk(const LogitsArguments& arguments, int l, bool first, int likely)
      : a(arguments), lane(l), row(likely), tile(0), left(0), chunk(0), lengths(0), counts(first) {
    load_chunk();
  }
  KVIRE_DEVICE KVIRE_INLINE void start(Share share) {
    row = share.row;
    tile = share.tile;
    left = share.tiles;
    if (left > 0 && row < chunk) load_chunk();
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
        const int entry = wanted ? a.blocks[a.max_blocks * row + page] : -1;
        const kstd::int64_t first = static_cast<kstd::int64_t>(entry) * Plan::tokens;
        if (entry >= 0 && first < row_tokens<Plan>(a, row)) {
          s.id[i] = entry < a.table_width ? table[entry] : a.page_count;
          if constexpr (Plan::options) s.position[i] = static_cast<unsigned>(first + part_of(tile + lane));
        }
      } else if (guess != nullptr && guess->row == row && guess->tile == tile) {
        if (wanted) s.id[i] = guess->id[i];
      } else if (wanted) {
        s.id[i] = table[page];
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
