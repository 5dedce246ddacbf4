// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/logits_page_walk.cuh>
#include <kvire/kernel/sm90_logits_pipeline.cuh>
#include <kvire/kernel/sm90_logits_queries.cuh>
#include <kvire/kernel/sm90_tensor_map.cuh>

KVIRE_NAMESPACE_BEGIN

/// The producer warp: walks the page table and brings tile after tile of a share to the stages of the ring, by bulk or tensor copies, page ids and the next row's
/// queries ahead of them.
namespace sm90::detail {

#if KVIRE_SM90A

/// Brings tile `t` of a segment to a stage that is free; one warp.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE void bring_tile(const LogitsArguments& a, [[maybe_unused]] const TensorMap& map, const Segment<Plan>& s, int t, kstd::uint32_t shared, int stage) {
  constexpr int ids = Plan::pages_per_tile;
  constexpr int rows = tile_tokens / ids;  // of a tile on one page
  int id[ids];
  unsigned position[ids];
#pragma unroll
  for (int i = 0; i < ids; ++i) {
    id[i] = __shfl_sync(~0U, s.id[i], t);
    if constexpr (Plan::options) position[i] = __shfl_sync(~0U, s.position[i], t);
  }
  const kstd::uint32_t full = shared + Plan::full_at + stage * 8;
  const kstd::uint32_t to = shared + Plan::stages_at + stage * Plan::stage_bytes;
  if (ptx::elect()) {
    const int tile = s.tile + t;
    kstd::uint32_t bytes = 0;
#pragma unroll
    for (int i = 0; i < ids; ++i) {
      if constexpr (!Plan::options) position[i] = id[i] < 0 ? nowhere : static_cast<unsigned>(tile * tile_tokens + i * rows);
      if (id[i] >= 0) bytes += Plan::tile_bytes / ids;
    }
    const kstd::uint32_t missing = id[0] < 0 ? 0xFF800000U : 0x80000000U;  // as TilePlace has it
    ptx::store_shared4(shared + Plan::meta_at + stage * 16, {static_cast<kstd::uint32_t>(s.row), static_cast<kstd::uint32_t>(tile * tile_tokens), position[0],
                                                             ids > 1 ? position[ids - 1] : missing});
    ptx::mbarrier_arrive_expect(full, bytes);
#pragma unroll
    for (int i = 0; i < ids; ++i) {
      if (id[i] < 0) continue;
      const kstd::byte* page = a.pages + a.page_stride * static_cast<unsigned>(id[i]);
      if constexpr (Plan::swizzled) {
        const int part = tile % Plan::tiles_per_page;
        ptx::tensor_load(to + i * rows * Plan::key_row, &map, 0, part * (tile_tokens / 8), id[i], full);
        if constexpr (Plan::scaled) {
          ptx::bulk_load(shared + Plan::scales_at + stage * Plan::scale_bytes + i * rows * Plan::scale_row,
                         page + Plan::tokens * Plan::key_row + part * tile_tokens * Plan::scale_row, rows * Plan::scale_row, full);
        }
      } else {
        bring_page<Plan>(to, page, tile, i, full);
      }
    }
  }
  __syncwarp();
}

/// The producer warp. Row `guess` may be the first one's.
template <class Plan, int Heads, class Shape>
struct Producer {
  const LogitsArguments& a;
  const TensorMap& keys;
  const TensorMap& queries;
  kstd::uint32_t shared;
  int lane;
  Ring<Plan::query_stages> rows{1};

  KVIRE_DEVICE KVIRE_INLINE void bring_queries(int row) {
    ptx::mbarrier_wait(shared + Plan::query_empty_at + rows.stage * 8, rows.parity);
    bring_row<Plan, Heads>(a, &queries, row, shared, rows.stage, lane);
    announce_queries(row);
  }
  KVIRE_DEVICE KVIRE_INLINE void announce_queries(int row) {
    announce_row<Plan, Heads>(a, row, shared, rows.stage, lane);
    rows.advance();
  }
  /// Brings all tiles of the share.
  KVIRE_DEVICE KVIRE_INLINE void run(const Guess<Plan>& guess, Walk<Plan>& walk, Share share) {
    if constexpr (Plan::swizzled) {
      announce_queries(guess.row);  // which needed the lengths
      if (share.tiles == 0) return ptx::mbarrier_wait(shared + Plan::query_full_at, 0);  // what is on its way must have come before the CTA ends
      if (share.row != guess.row) bring_queries(share.row);
    }
    walk.start(share);
    Segment<Plan> now, next;
    [[maybe_unused]] int row = share.row;  // whose queries have been asked for
    bool more = walk.next(now, &guess);
    Ring<Shape::stages> tiles{1};
    while (more) {
      walk.check(now);
#pragma unroll 1
      for (int t = 0; t < now.tiles; ++t) {
        ptx::mbarrier_wait(shared + Plan::empty_at + tiles.stage * 8, tiles.parity);
        bring_tile<Plan>(a, keys, now, t, shared, tiles.stage);
        tiles.advance();
        if constexpr (Plan::swizzled && Plan::query_stages == 1) {  // behind the tile that makes the consumers leave the row before
          if (now.row != row) bring_queries(now.row);
          row = now.row;
        }
        if (t == 1 || now.tiles == 1) {
          // The first tiles are under way: the ids of the next segment can follow, and, if it is of another row, its queries, at least as far as L2.
          more = walk.next(next);
          if (more && next.row != now.row) {
            if constexpr (Plan::query_stages > 1) {
              bring_queries(next.row);
            } else {
              prefetch_queries<Plan>(a, next.row, lane, 32);
            }
          }
        }
      }
      now = next;
    }
  }
};

#endif  // KVIRE_SM90A
}  // namespace sm90::detail

KVIRE_NAMESPACE_END
