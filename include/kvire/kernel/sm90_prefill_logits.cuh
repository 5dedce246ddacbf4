// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include <kvire/kernel/cuda/launch.cuh>
#include <kvire/kernel/sm90_logits_operand.cuh>

KVIRE_NAMESPACE_BEGIN

/// Prefill logits for Hopper: logit[r,s] = k_scale[s] * sum over heads of w[r,h] * relu(q[r,h] . k[s]) for s in [starts[r], ends[r]).
///
/// How it works. `Rows` neighbouring rows form a group, whose queries stay in shared memory while keys stream past them. The groups' key ranges
/// (from the first start to the last end of a group), in steps of one 64-key tile for each warpgroup, form one list; each CTA takes a contiguous share of
/// it, found from the ranges inside the kernel. Each warpgroup brings its own tiles by bulk copies, several ahead; it moves a tile to registers, asks
/// for the next one, and multiplies it by the queries of four rows after four. The columns of a product are dealt so that each lane of a quad holds all
/// heads of a row of its own: head sums need no exchange between lanes. There is no producer warp: it would cost the others 32 registers a
/// thread. Operands lie, and sums run, in the order of the decode kernel for one fp8 query token (sm90_sparse_logits.cuh): a row gets the same bits
/// from both.
namespace sm90 {

/// What the kernel reads and writes: device memory. Positions are keys of one flat space that all rows share.
struct PrefillArguments {
  const kstd::byte* keys = nullptr;           ///< paged: page 0 of the layer; contiguous: the plane of values (interleaved: of whole rows), token after token
  const kstd::byte* scales = nullptr;         ///< contiguous only: the plane of scales, if the layout has one
  const kstd::int32_t* page_table = nullptr;  ///< position s lies on page page_table[s / tokens]; negative: no page, scores -inf. Null: keys are contiguous
  kstd::int64_t page_stride = 0;              ///< bytes, a multiple of 16
  kstd::int32_t page_count = 0;               ///< ids at or above are skipped and counted
  kstd::int32_t key_count = 0;                ///< positions that there are; ranges are cut there
  const void* queries = nullptr;              ///< [rows][heads][dim], 16-byte aligned
  const float* weights = nullptr;             ///< [rows][heads]
  const kstd::int32_t* starts = nullptr;      ///< [rows]
  const kstd::int32_t* ends = nullptr;        ///< [rows]
  kstd::int32_t rows = 0;
  void* logits = nullptr;                     ///< [rows][logits_stride], f32 or bf16; position s at index s
  kstd::int64_t logits_stride = 0;            ///< elements; ranges are cut there
  unsigned long long* bad_pages = nullptr;    ///< counts page ids at or above page_count, one a row and entry; may be null
  unsigned long long* nan_logits = nullptr;   ///< counts logits that were NaN, written as -inf; may be null
};

/// How a CTA, one an SM, is built: warpgroups, rows of a group, tiles in flight for each warpgroup.
template <int Warpgroups, int Rows, int Depth>
struct PrefillShape {
  static constexpr int warpgroups = Warpgroups;
  static constexpr int rows = Rows;
  static constexpr int depth = Depth;
  static constexpr int columns = 128;  // of a product; a quarter of them are heads of one row
  static constexpr int threads = Warpgroups * group_threads;
  static_assert(require_tuning<PrefillShape, Rows % 4 == 0 && Rows <= 32>());
};

template <class P, Element Query, int Heads, class Shape>
struct PrefillPlan : LogitsPlan<P, Query, Heads, Shape::rows, LogitsShape<1, 1>> {
  using Base = LogitsPlan<P, Query, Heads, Shape::rows, LogitsShape<1, 1>>;
  static constexpr int rows = Shape::rows;
  static constexpr int stages = Shape::depth * Shape::warpgroups;
  static constexpr int heads_together = Shape::columns / 4;      // of a row in a product
  static constexpr int products = Heads / heads_together;        // for four rows
  static constexpr int product_bytes = Shape::columns * Base::query_row;
  static_assert(require_tuning<PrefillPlan, !Base::fp4 && products >= 1>());

  static constexpr int queries_at = 0;
  static constexpr int stages_at = queries_at + rows * Base::query_bytes;
  static constexpr int weights_at = stages_at + stages * Base::stage_bytes;
  static constexpr int weight_row = Heads * 4 + 16;  // 16 bytes more for the banks
  static constexpr int ranges_at = weights_at + rows * weight_row;  // [rows][2]
  static constexpr int meta_at = (ranges_at + rows * 8 + 15) / 16 * 16;
  static constexpr int full_at = meta_at + stages * 16;
  static constexpr int empty_at = full_at + stages * 8;
  static constexpr int share_at = empty_at + stages * 8;
  static constexpr int feeds_at = share_at + 16;  // a Feed for each warpgroup
  static constexpr int scan_at = feeds_at + Shape::warpgroups * 32;
  static constexpr int shared_bytes = scan_at + Shape::threads / 32 * 4;
  static_assert(require_tuning<PrefillPlan, (shared_bytes <= 227 * 1024)>());
};

namespace detail {

/// [start, end) of a row, empty as {0, 0}; cut to what exists.
struct Range {
  int start = 0, end = 0;
};
KVIRE_DEVICE KVIRE_INLINE Range row_range(const PrefillArguments& a, int row) {
  Range range;
  if (row >= a.rows) return range;
  const int most = a.logits_stride < a.key_count ? static_cast<int>(a.logits_stride) : a.key_count;
  const int start = __ldg(a.starts + row), end = __ldg(a.ends + row);
  range.start = start < 0 ? 0 : start;
  range.end = end > most ? most : end;
  return range.start < range.end ? range : Range{};
}

/// Tiles [first, last) that some row of a group sees.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE Range group_tiles(const PrefillArguments& a, int group) {
  Range tiles{0x7FFFFFFF, 0};
#pragma unroll
  for (int r = 0; r < Plan::rows; ++r) {
    const Range range = row_range(a, group * Plan::rows + r);
    const int first = range.start / tile_tokens, last = tiles_of(range.end);
    tiles.start = range.end != 0 && first < tiles.start ? first : tiles.start;
    tiles.end = last > tiles.end ? last : tiles.end;
  }
  return tiles.end == 0 ? Range{} : tiles;
}
template <class Shape>
KVIRE_DEVICE KVIRE_INLINE int steps_of(Range tiles) {
  return (tiles.end - tiles.start + Shape::warpgroups - 1) / Shape::warpgroups;
}

/// The contiguous share of this CTA, in steps; called by the whole CTA, the answer in shared memory: first group, first step in it, steps.
template <class Plan, class Shape>
KVIRE_DEVICE KVIRE_INLINE void share_steps(const PrefillArguments& a, kstd::uint32_t shared, int thread) {
  const int groups = (a.rows + Plan::rows - 1) / Plan::rows;
  const int run = (groups + Shape::threads - 1) / Shape::threads;
  const int lane = thread % 32;
  int sum = 0;
  for (int g = thread * run; g < (thread + 1) * run && g < groups; ++g) sum += steps_of<Shape>(group_tiles<Plan>(a, g));
  const int through = inclusive_scan(sum, lane);
  if (lane == 31) ptx::store_shared(shared + Plan::scan_at + thread / 32 * 4, static_cast<kstd::uint32_t>(through));
  __syncthreads();
  int before = through - sum, total = 0;
  for (int w = 0; w < Shape::threads / 32; ++w) {
    const int s = static_cast<int>(ptx::load_shared(shared + Plan::scan_at + w * 4));
    if (w < thread / 32) before += s;
    total += s;
  }
  int begin, size;
  split(static_cast<unsigned>(total), blockIdx.x, gridDim.x, begin, size);
  if (size == 0 && thread == 0) ptx::store_shared4(shared + Plan::share_at, {0, 0, 0, 0});
  if (size > 0 && before <= begin && begin < before + sum) {
    for (int g = thread * run;; ++g) {
      const int steps = steps_of<Shape>(group_tiles<Plan>(a, g));
      if (begin < before + steps) {
        ptx::store_shared4(shared + Plan::share_at, {static_cast<kstd::uint32_t>(g), static_cast<kstd::uint32_t>(begin - before), static_cast<kstd::uint32_t>(size), 0});
        break;
      }
      before += steps;
    }
  }
  __syncthreads();
}

#if KVIRE_SM90A

/// What the copy engine leaves of `bytes` (a multiple of 4): the last few, if they are not 16.
KVIRE_DEVICE KVIRE_INLINE void load_rest(kstd::uint32_t to, const kstd::byte* from, int bytes) {
  for (int at = bytes & ~15; at < bytes; at += 4) ptx::store_shared(to + at, __ldg(reinterpret_cast<const unsigned*>(from + at)));
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
  constexpr int tokens = tile_tokens / ids;  // of a tile that lie on one page
  const int table_width = (a.key_count + Plan::tokens - 1) / Plan::tokens;
  int id[ids];
  kstd::uint32_t missing = 0, bytes = 0;
#pragma unroll
  for (int i = 0; i < ids; ++i) {
    const int entry = page_of<Plan>(tile, i);
    id[i] = entry < table_width ? __ldg(a.page_table + entry) : -1;
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
    if (id[i] < 0) continue;
    const kstd::byte* page = a.keys + a.page_stride * id[i];
    const int part = tile % Plan::tiles_per_page;
    if constexpr (Plan::whole_page) {
      ptx::bulk_load(to, page, Plan::tile_bytes, full);
    } else {
      ptx::bulk_load(to + i * tokens * Plan::key_pitch, page + part * Plan::value_bytes, tokens * Plan::key_pitch, full);
      if constexpr (Plan::scale_plane) {
        ptx::bulk_load(to + Plan::value_bytes + i * tokens * Plan::scale_row, page + Plan::tokens * Plan::key_pitch + part * tile_tokens * Plan::scale_row,
                       tokens * Plan::scale_row, full);
      }
    }
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
    const float w = at / Heads < present ? __ldg(a.weights + first * Heads + at) : 0.0F;
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

/// Weighted relu sums, for a lane's two tokens and its row, of a product's heads. Products stand still while FMA-pipe instructions run, but not for
/// comparisons: relu is max(x, 0) and one instruction an element is left in the way. In the order of the decode kernel, whose x + |x| with half the
/// weight gives the same bits: two chains for each quarter of the heads; the quarters meet in pairs.
template <class Plan, int Heads, int Columns>
KVIRE_DEVICE KVIRE_INLINE void product_sums(const float (&d)[Columns], kstd::uint32_t weights, int product, float (&low)[4], float (&high)[4]) {
  constexpr int length = Heads / 8;                            // of a chain
  constexpr int quarters = Plan::heads_together / (Heads / 4);  // in a product
#pragma unroll
  for (int quarter = 0; quarter < quarters; ++quarter) {
    float s[4] = {0, 0, 0, 0};
#pragma unroll
    for (int pair = 0; pair < length / 2; ++pair) {
      const Words4 w = ptx::load_shared4(weights + (quarter * length + 2 * pair) * 8);
      const float w4[4] = {__uint_as_float(w.x), __uint_as_float(w.y), __uint_as_float(w.z), __uint_as_float(w.w)};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] = fma_exact(relu_max(d[4 * (quarter * length + 2 * pair + half) + e]), w4[2 * half + e % 2], s[e]);
      }
    }
    low[product * quarters + quarter] = add_exact(s[0], s[1]);
    high[product * quarters + quarter] = add_exact(s[2], s[3]);
  }
}

/// A warpgroup: its tiles of the share.
template <class Plan, class Shape, int Heads, class Score>
KVIRE_DEVICE KVIRE_INLINE void consume_steps(const PrefillArguments& a, kstd::uint32_t shared, int cta_thread) {
  const int warpgroup = __shfl_sync(~0U, cta_thread / group_threads, 0), thread = cta_thread % group_threads;
  const int warp = __shfl_sync(~0U, thread / 32, 0), lane = thread & 31, c = lane & 3;
  const int local = warp * 16 + (lane >> 2);  // this lane's first token of a tile; the other is 8 on
  constexpr int row_bytes = Plan::products * Plan::product_bytes >> 4;  // of four rows, in a descriptor's units
  constexpr int quads = Plan::rows / 4;
  const ptx::Descriptor queries = query_operand<Plan>(shared + Plan::queries_at);
  if (thread == 0) start_feeding<Plan, Shape>(a, shared, warpgroup);
  __syncwarp();
  int group = -1, slot = 0;
  unsigned latest_start = 0, first_end = 0;  // of the group's rows
  kstd::uint32_t parity = 0;
#pragma unroll 1
  for (;;) {
    const int stage = slot * Shape::warpgroups + warpgroup;
    ptx::mbarrier_wait(shared + Plan::full_at + stage * 8, parity);
    const Words4 meta = ptx::load_shared4(shared + Plan::meta_at + stage * 16);
    if (static_cast<int>(meta.x) < 0) break;
    if (static_cast<int>(meta.x) != group) {
      group = static_cast<int>(meta.x);
      __syncthreads();  // all are through with the old group's queries
      load_group<Plan, Shape, Heads>(a, group, shared, cta_thread);
      __syncthreads();
      const kstd::uint32_t range = shared + Plan::ranges_at + (lane < Plan::rows ? lane : 0) * 8;
      const unsigned start = ptx::load_shared(range);
      latest_start = __reduce_max_sync(~0U, start);
      first_end = __reduce_min_sync(~0U, start + ptx::load_shared(range + 4));
    }
    const bool tile = static_cast<int>(meta.y) >= 0;
    const kstd::uint32_t at = shared + Plan::stages_at + stage * Plan::stage_bytes;
    kstd::uint32_t keys[Plan::steps][4];
    float scale[2] = {1, 1};
    if (tile) {
      load_keys<Plan>(keys, at + key_offset<Plan>(warp, lane), lane / 4 % 2 != 0);
      if constexpr (Plan::scaled) {
        constexpr int from = Plan::interleaved ? Plan::key_row : Plan::value_bytes;
        constexpr int pitch = Plan::interleaved ? Plan::key_pitch : 4;
        scale[0] = __uint_as_float(ptx::load_shared(at + from + local * pitch));
        scale[1] = __uint_as_float(ptx::load_shared(at + from + (local + 8) * pitch));
      }
    }
    // Once the tile is in everyone's registers its place is free for the next one; that is asked for while the first product runs.
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(shared + Plan::empty_at + stage * 8);
    const auto refill = [&, parity] {
      if (thread == 0) {
        ptx::mbarrier_wait(shared + Plan::empty_at + stage * 8, parity);
        feed<Plan, Shape>(a, shared, warpgroup);
      }
      __syncwarp();
    };
    if (++slot == Shape::depth) {
      slot = 0;
      parity ^= 1;
    }
    if (!tile) {
      refill();
      continue;
    }

    complete(keys);
    // A warp's tokens lie on one page.
    const bool missing = (meta.z >> (Plan::pages_per_tile > 1 ? warp * 16 / (tile_tokens / Plan::pages_per_tile) : 0) & 1U) != 0;
    const bool plain = meta.y >= latest_start && meta.y + tile_tokens <= first_end && !missing;  // every row sees all of the tile
    const unsigned token = meta.y + static_cast<unsigned>(local);
    Score* out = static_cast<Score*>(a.logits) + (static_cast<kstd::int64_t>(group) * Plan::rows + c) * a.logits_stride + token;
    const kstd::int64_t out_step = 4 * a.logits_stride;
    kstd::uint32_t weights = shared + Plan::weights_at + c * Plan::weight_row;
    kstd::uint32_t range = shared + Plan::ranges_at + c * 8;

    // What is not so simple: ranges, missing pages, NaN.
    const auto finish_one = [&](unsigned s, float logit, Score* to) {
      if (s - ptx::load_shared(range) >= ptx::load_shared(range + 4)) return;
      if (missing) logit = -__int_as_float(0x7F800000);
      if (logit != logit) {
        logit = -__int_as_float(0x7F800000);
        if (a.nan_logits != nullptr) atomicAdd(a.nan_logits, 1ULL);
      }
      store_logit(to, logit);
    };
    // From the sums of the quarters of the heads.
    const auto finish_quad = [&](const float (&low)[4], const float (&high)[4]) {
      float x = add_exact(add_exact(low[0], low[1]), add_exact(low[2], low[3]));
      float y = add_exact(add_exact(high[0], high[1]), add_exact(high[2], high[3]));
      if constexpr (Plan::scaled) {
        x = mul_exact(x, scale[0]);
        y = mul_exact(y, scale[1]);
      }
      if (plain && x == x && y == y) {
        store_logit(out, x);
        store_logit(out + 8, y);
      } else {
        finish_one(token, x, out);
        finish_one(token + 8, y, out + 8);
      }
      out += out_step;
      weights += 4 * Plan::weight_row;
      range += 32;
    };
#pragma unroll 1
    for (int quad = 0; quad < quads; ++quad) {
      float low[4], high[4];
#pragma unroll
      for (int product = 0; product < Plan::products; ++product) {
        float d[Shape::columns / 2];
        start_product<Plan>(d, keys, {queries.low + quad * row_bytes + product * (Plan::product_bytes >> 4), queries.high});
        if (quad + product == 0) refill();
        ptx::wgmma_wait<0>();
        ptx::touch(d);
        product_sums<Plan, Heads>(d, weights + product * Plan::heads_together * 4, product, low, high);
      }
      finish_quad(low, high);
    }
  }
}

#endif  // KVIRE_SM90A
}  // namespace detail

/// Starts nothing unless compiled for sm_90a. Grid: any number of CTAs; block: Shape::threads; dynamic shared memory: Plan::shared_bytes.
template <class P, Element Query, int Heads, class Shape, class Score>
__global__ void __launch_bounds__(Shape::threads, 1) prefill_kernel(const __grid_constant__ PrefillArguments a) {
#if KVIRE_SM90A
  using Plan = PrefillPlan<P, Query, Heads, Shape>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const kstd::uint32_t shared = ptx::shared_address(memory);
  const int thread = static_cast<int>(threadIdx.x);
  ptx::launch_dependents();
  if (thread < Plan::stages) {
    ptx::mbarrier_init(shared + Plan::full_at + thread * 8, 1);
    ptx::mbarrier_init(shared + Plan::empty_at + thread * 8, group_threads / 32);
    ptx::fence_mbarrier_init();
  }
  ptx::wait_for_earlier_grids();
  detail::share_steps<Plan, Shape>(a, shared, thread);
  detail::consume_steps<Plan, Shape, Heads, Score>(a, shared, thread);
#else
  (void)a;
  __trap();
#endif
}

/// What did best for fp8 keys; what fits for bf16.
template <class P>
using DefaultPrefillShape =
    std::conditional_t<P::template element_of<role::Value> == Element::e4m3, PrefillShape<4, 16, 2>, PrefillShape<3, 4, 3>>;

/// Launches the kernel on `stream` with `sms` CTAs. `Score`: float or kstd::uint16_t (bf16 codes).
/// `overlap`: programmatic dependent launch, as launch_logits.
template <class P, Element Query, int Heads, class Score = float, class Shape = DefaultPrefillShape<P>>
cudaError_t launch_prefill_logits(const PrefillArguments& a, int sms, cudaStream_t stream, bool overlap = false) {
  static_assert(require_reader<P, LogitsReader>());
  using Plan = PrefillPlan<P, Query, Heads, Shape>;
  auto* kernel = &prefill_kernel<P, Query, Heads, Shape, Score>;
  if (a.rows <= 0 || a.key_count <= 0 || a.logits_stride <= 0) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Plan::shared_bytes);
  if (error != cudaSuccess) return error;
  return kvire::detail::launch_kernel(kernel, {sms, Shape::threads, Plan::shared_bytes, overlap}, stream, a);
}

}  // namespace sm90

KVIRE_NAMESPACE_END
