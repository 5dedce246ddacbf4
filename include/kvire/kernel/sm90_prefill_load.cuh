// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/logits_page_walk.cuh>
#include <kvire/kernel/sm90_prefill_plan.cuh>

KVIRE_NAMESPACE_BEGIN

/// How tiles of keys and groups of queries come to shared memory, for the prefill logits kernel.
namespace sm90 {

#if KVIRE_SM90A
namespace detail {

using ptx::Words4;

/// What the copy engine leaves of `bytes` (a multiple of 4): the last few, if they are not 16.
KVIRE_DEVICE KVIRE_INLINE void load_rest(kstd::uint32_t to, const kstd::byte* from, int bytes) {
  for (int at = bytes & ~15; at < bytes; at += 4) ptx::store_shared(to + at, *reinterpret_cast<const unsigned*>(from + at));
}

/// Brings one tile to its stage; one thread. Which of its pages are missing goes to the stage's meta words.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE void load_tile(const PrefillArguments& a, int group, int tile, kstd::uint32_t shared, int stage) {
  const kstd::uint32_t full = shared + Plan::full_at + stage * 8;
  const kstd::uint32_t to = shared + Plan::stages_at + stage * Plan::stage_bytes;
  const kstd::uint32_t meta = shared + Plan::meta_at + stage * 16;
  const auto first = static_cast<kstd::uint32_t>(tile * tile_tokens);
  if (a.page_table == nullptr) {
    const int rest = a.key_count - tile * tile_tokens;
    const int count = rest < tile_tokens ? rest : tile_tokens;
    const kstd::byte* keys = a.keys + static_cast<kstd::int64_t>(tile) * tile_tokens * Plan::key_pitch;
    const kstd::byte* scales = Plan::scale_plane ? a.scales + static_cast<kstd::int64_t>(tile) * tile_tokens * Plan::scale_row : nullptr;
    const int bytes = count * Plan::key_pitch, scale_bytes = Plan::scale_plane ? count * Plan::scale_row : 0;
    load_rest(to, keys, bytes);
    if constexpr (Plan::scale_plane) load_rest(to + Plan::value_bytes, scales, scale_bytes);
    ptx::store_shared4(meta, {static_cast<kstd::uint32_t>(group), first, 0, 0});
    ptx::mbarrier_arrive_expect(full, static_cast<kstd::uint32_t>((bytes & ~15) + (scale_bytes & ~15)));
    if (bytes >= 16) ptx::bulk_load(to, keys, static_cast<kstd::uint32_t>(bytes & ~15), full);
    if (scale_bytes >= 16) ptx::bulk_load(to + Plan::value_bytes, scales, static_cast<kstd::uint32_t>(scale_bytes & ~15), full);
    return;
  }
  constexpr int ids = Plan::pages_per_tile;
  const int table_width = (a.key_count + Plan::tokens - 1) / Plan::tokens;
  int id[ids];
  kstd::uint32_t missing = 0, bytes = 0;
#pragma unroll
  for (int i = 0; i < ids; ++i) {
    const int entry = page_of<Plan>(tile, i);
    id[i] = entry < table_width ? a.page_table[entry] : -1;
    if (id[i] >= a.page_count) {
      // One for each row that sees some of the page, and first meets it in this tile.
      if (a.bad_pages != nullptr) {
        unsigned long long met = 0;
        for (int r = 0; r < Plan::rows; ++r) {
          const Range range = row_range(a, group * Plan::rows + r);
          const int page_start = entry * Plan::tokens;
          const int p = range.start > page_start ? range.start : page_start;
          if (p < range.end && p < page_start + Plan::tokens && p / tile_tokens == tile) ++met;
        }
        if (met != 0) atomicAdd(a.bad_pages, met);
      }
      id[i] = -1;
    }
    if (id[i] < 0) {
      missing |= 1U << i;
    } else {
      bytes += Plan::tile_bytes / ids;
    }
  }
  ptx::store_shared4(meta, {static_cast<kstd::uint32_t>(group), first, missing, 0});
  ptx::mbarrier_arrive_expect(full, bytes);
#pragma unroll
  for (int i = 0; i < ids; ++i) {
    if (id[i] >= 0) bring_page<Plan>(to, a.keys + a.page_stride * id[i], tile, i, full);
  }
}

/// Asks for a warpgroup's next tile, or says that there is none; one thread. Where it is in the share is kept in shared memory:
/// {group, step, steps left of the share, slot of the ring}, {first tile, last tile of the group}.
template <class Plan, class Shape>
KVIRE_DEVICE KVIRE_INLINE void feed(const PrefillArguments& a, kstd::uint32_t shared, int warpgroup) {
  const kstd::uint32_t at = shared + Plan::feeds_at + warpgroup * 32;
  const Words4 where = ptx::load_shared4(at);
  int group = static_cast<int>(where.x), step = static_cast<int>(where.y), left = static_cast<int>(where.z), slot = static_cast<int>(where.w);
  Range tiles{static_cast<int>(ptx::load_shared(at + 16)), static_cast<int>(ptx::load_shared(at + 20))};
  const int stage = slot * Shape::warpgroups + warpgroup;
  if (left <= 0) {
    if (left < 0) return;
    ptx::store_shared4(shared + Plan::meta_at + stage * 16, {~0U, 0, 0, 0});
    ptx::mbarrier_arrive(shared + Plan::full_at + stage * 8);
    ptx::store_shared(at + 8, ~0U);
    return;
  }
  while (step >= steps_of<Shape>(tiles)) {
    tiles = group_tiles<Plan>(a, ++group);
    step = 0;
    ptx::store_shared(at + 16, static_cast<kstd::uint32_t>(tiles.start));
    ptx::store_shared(at + 20, static_cast<kstd::uint32_t>(tiles.end));
  }
  const int tile = tiles.start + step * Shape::warpgroups + warpgroup;
  if (tile < tiles.end) {
    load_tile<Plan>(a, group, tile, shared, stage);
  } else {
    ptx::store_shared4(shared + Plan::meta_at + stage * 16, {static_cast<kstd::uint32_t>(group), ~0U, 0, 0});
    ptx::mbarrier_arrive(shared + Plan::full_at + stage * 8);
  }
  ptx::store_shared4(at, {static_cast<kstd::uint32_t>(group), static_cast<kstd::uint32_t>(step + 1), static_cast<kstd::uint32_t>(left - 1),
                          static_cast<kstd::uint32_t>(slot + 1 == Shape::depth ? 0 : slot + 1)});
}
/// Its first state, and the first tiles.
template <class Plan, class Shape>
KVIRE_DEVICE KVIRE_INLINE void start_feeding(const PrefillArguments& a, kstd::uint32_t shared, int warpgroup) {
  const Words4 share = ptx::load_shared4(shared + Plan::share_at);
  const kstd::uint32_t at = shared + Plan::feeds_at + warpgroup * 32;
  const Range tiles = share.z != 0 ? group_tiles<Plan>(a, static_cast<int>(share.x)) : Range{};
  ptx::store_shared4(at, {share.x, share.y, share.z, 0});
  ptx::store_shared(at + 16, static_cast<kstd::uint32_t>(tiles.start));
  ptx::store_shared(at + 20, static_cast<kstd::uint32_t>(tiles.end));
#pragma unroll 1
  for (int i = 0; i < Shape::depth; ++i) feed<Plan, Shape>(a, shared, warpgroup);
}

/// Brings the queries, weights and ranges of a group to shared memory; the whole CTA. Column 8i + 2c + e of a product is head 2i + e, of those of
/// the product, of its row c; k lies in the order of load_keys.
template <class Plan, class Shape, int Heads>
KVIRE_DEVICE KVIRE_INLINE void load_group(const PrefillArguments& a, int group, kstd::uint32_t shared, int thread) {
  constexpr int chunks = Plan::query_row / 16;
  constexpr int cores = Shape::columns / 8;
  constexpr int units = Plan::rows * Heads * chunks;
  constexpr int batch = 4;
  const kstd::int64_t first = static_cast<kstd::int64_t>(group) * Plan::rows;
  const int present = a.rows - group * Plan::rows;
#pragma unroll 1
  for (int base = thread; base < units; base += batch * Shape::threads) {
    Words4 v[batch];
    kstd::uint32_t to[batch];
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int unit = base + i * Shape::threads;
      const int c = unit % 4, r = unit / 4 % 8, n = unit / 32 % cores, k = unit / (32 * cores) % (chunks / 4), product = unit / (Shape::columns * chunks);
      const int row = product / Plan::products * 4 + r / 2;
      const int head = product % Plan::products * Plan::heads_together + 2 * n + r % 2;
      to[i] = shared + Plan::queries_at + product * Plan::product_bytes + (n * 2 * Plan::steps + 4 * k) * 128 + r * 16 + c * 4;
      v[i] = {0, 0, 0, 0};
      if (row < present && unit < units) {
        v[i] = ptx::load_global4(static_cast<const char*>(a.queries) + (first + row) * Plan::query_bytes + head * Plan::query_row + (c + 4 * k) * 16);
      }
    }
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      if (base + i * Shape::threads >= units) break;
      ptx::store_shared(to[i], v[i].x);
      ptx::store_shared(to[i] + 128, v[i].y);
      ptx::store_shared(to[i] + 256, v[i].z);
      ptx::store_shared(to[i] + 384, v[i].w);
    }
  }
  for (int at = thread; at < Plan::rows * Heads; at += Shape::threads) {
    const float w = at / Heads < present ? a.weights[first * Heads + at] : 0.0F;
    ptx::store_shared(shared + Plan::weights_at + at / Heads * Plan::weight_row + at % Heads * 4, __float_as_uint(w));
  }
  // The next group's on their way to L2.
  const int later = present - Plan::rows;
  const int bytes = (later < Plan::rows ? later : Plan::rows) * Plan::query_bytes;
  for (int at = thread * 128; at < bytes; at += Shape::threads * 128) {
    ptx::prefetch_l2(static_cast<const char*>(a.queries) + (first + Plan::rows) * Plan::query_bytes + at);
  }
  if (thread < Plan::rows) {
    const Range range = row_range(a, static_cast<int>(first) + thread);
    ptx::store_shared(shared + Plan::ranges_at + thread * 8, static_cast<kstd::uint32_t>(range.start));
    ptx::store_shared(shared + Plan::ranges_at + thread * 8 + 4, static_cast<kstd::uint32_t>(range.end - range.start));
  }
  ptx::fence_async_shared();
}

}  // namespace detail
#endif  // KVIRE_SM90A
}  // namespace sm90

KVIRE_NAMESPACE_END
