// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <kvire/codec/float_bits.hpp>
#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/kernel/ptx/wgmma.cuh>
#include <kvire/kernel/tuning.hpp>
#include <kvire/layout/reader.hpp>

KVIRE_NAMESPACE_BEGIN

/// Paged sparse logits for Hopper: logit[b,t,s] = k_scale[s] * sum over heads of w[b,t,h] * relu(q[b,t,h] . k[s]).
///
/// How it works. The pages of all rows, cut into tiles of 64 tokens, form one list; each CTA takes a contiguous share of it, found from the
/// lengths inside the kernel. One warp brings tiles to shared memory by bulk copies through a ring of mbarriers; a warpgroup moves a tile to
/// registers (and frees its stage), multiplies it by the queries (tokens are the rows of the product, heads the columns, so that the head sum
/// stays within four lanes), and writes 64 logits. Dot products do not care about the order of k, nor the head sum about the order of heads:
/// the queries are laid out in shared memory so that each lane's operand is the 16 bytes it can read without bank conflicts, straight from
/// the page as it lies in memory. No tensor map is needed, so any page stride that is a multiple of 16 bytes will do.
namespace sm90 {

inline constexpr int tile_tokens = 64;
inline constexpr int group_threads = 128;

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
  unsigned long long* bad_pages = nullptr;   ///< counts page ids at or above page_count; may be null
  unsigned long long* nan_logits = nullptr;  ///< counts logits that were NaN, written as -inf; may be null
};

/// How a CTA is built: stages of the ring, CTAs that share an SM, query tokens of one product (1 or 2), and whether the operand is complete
/// before the product's fence (one fence, against one more whenever the compiler moves part of it behind).
template <int Stages, int CtasPerSm, int Together = 1, bool Firm = false>
struct LogitsShape {
  static constexpr bool firm = Firm;
  static constexpr int together = Together;
  static constexpr int stages = Stages;
  static constexpr int ctas_per_sm = CtasPerSm;
  static constexpr int threads = group_threads + 32;
  static_assert(require_tuning<LogitsShape, (Stages <= 32)>());  // a lane of the producer sets up each
};

/// What the kernel asks of a page.
struct LogitsReader {
  static constexpr ReaderNeeds needs{.page_multiple = 16, .vector_bytes = 0, .least_tokens = 32, .most_tokens = 128};
};

template <class P, Element Query, int Heads, int NextN, class Shape>
struct LogitsPlan {
  static constexpr Element key = P::template element_of<role::Value>;
  static constexpr int next_n = NextN;
  static constexpr bool firm = Shape::firm;
  static constexpr int dim = P::template count_of<role::Value>;
  static constexpr int tokens = P::tokens_per_page;
  static constexpr bool scaled = P::template has<role::Scale>;
  static constexpr bool fp8 = Query == Element::e4m3;
  static constexpr int query_row = dim * bits(Query) / 8;  // bytes
  static constexpr int key_row = dim * bits(key) / 8;
  static constexpr bool fp4 = key == Element::e2m1;
  static constexpr int blocks = [] {
    if constexpr (scaled) return P::template count_of<role::Scale>;
    return 0;
  }();
  static constexpr int scale_row = [] {
    if constexpr (scaled) return blocks * bits(P::template element_of<role::Scale>) / 8;
    return 0;
  }();
  // Bytes from a key to the next: more than a key where scales stand between them.
  static constexpr int key_pitch = static_cast<int>(P::template offset<role::Value>(1) - P::template offset<role::Value>(0));
  static constexpr bool interleaved = key_pitch != key_row;
  static constexpr bool scale_plane = scaled && !interleaved;
  static constexpr int steps = query_row / 32;
  static constexpr int columns = Heads / 2;  // accumulators of a thread and query token

  static constexpr int value_bytes = tile_tokens * key_pitch;
  static constexpr int tile_bytes = value_bytes + (scale_plane ? tile_tokens * scale_row : 0);
  static constexpr int stage_bytes = (tile_bytes + 127) / 128 * 128;
  static constexpr int query_bytes = Heads * query_row;
  static constexpr int pages_per_tile = tokens < tile_tokens ? tile_tokens / tokens : 1;
  static constexpr int tiles_per_page = tokens > tile_tokens ? tokens / tile_tokens : 1;
  // One copy brings a whole tile where page and tile are the same bytes.
  static constexpr bool whole_page = tokens == tile_tokens && P::page_bytes == tile_bytes;

  static_assert(require_tuning<LogitsPlan, Heads == 32 || Heads == 64>());
  static_assert(require_tuning<LogitsPlan, key_pitch == key_row + (interleaved ? scale_row : 0)>());
  static_assert(require_tuning<LogitsPlan, blocks == (fp4 ? dim / 32 : key == Element::e4m3 ? 1 : 0) && (key == Element::e2m1 || key == Query)>());

  // Shared memory. Weights: each lane of a quad its heads, 16 bytes apart for the banks.
  static constexpr int weight_run = Heads + 16;
  static constexpr int queries_at = 0;
  static constexpr int stages_at = queries_at + NextN * query_bytes;
  static constexpr int weights_at = stages_at + Shape::stages * stage_bytes;
  static constexpr int meta_at = weights_at + NextN * 4 * weight_run;
  static constexpr int full_at = meta_at + Shape::stages * 16;
  static constexpr int empty_at = full_at + Shape::stages * 8;
  static constexpr int visible_at = empty_at + Shape::stages * 8;
  static constexpr int codes_at = (visible_at + NextN * 4 + 15) / 16 * 16;
  static constexpr int shared_bytes = codes_at + (fp4 && fp8 ? 17 * 8 : 0);
  static_assert(require_tuning<LogitsPlan, (shared_bytes <= 227 * 1024)>());
};

namespace detail {

using ptx::Words4;

KVIRE_DEVICE KVIRE_INLINE float fma_exact(float a, float b, float c) {
  float d;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}
KVIRE_DEVICE KVIRE_INLINE float add_exact(float a, float b) {
  float d;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
KVIRE_DEVICE KVIRE_INLINE float mul_exact(float a, float b) {
  float d;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
/// 2 relu(x), exact: x + |x| goes to the wide FMA pipe, where max(x, 0) would go to the half-rate one.
KVIRE_DEVICE KVIRE_INLINE float twice_relu(float x) {
  float d;
  asm("{\n.reg .f32 m;\nabs.f32 m, %1;\nadd.rn.f32 %0, %1, m;\n}" : "=f"(d) : "f"(x));
  return d;
}

/// Four bytes picked from the eight of low and high by the nibbles of `select`, all below 8.
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t permute(kstd::uint32_t low, kstd::uint32_t high, kstd::uint32_t select) {
  kstd::uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(select));
  return d;
}

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

template <class P, Element Query, int Heads, int NextN>
struct DefaultShape {
  template <int Stages, int Ctas>
  using Try = LogitsPlan<P, Query, Heads, NextN, LogitsShape<Stages, Ctas>>;
  // Twelve tiles in flight an SM, eight for fp8 keys and one query token: more only lengthen the queue before memory. Keys of 32 words a lane
  // need the registers of three CTAs an SM.
  static constexpr bool lean = NextN == 1 && P::template element_of<role::Value> == Element::e4m3;
  static constexpr int flight = lean ? 8 : 12;
  static constexpr int fixed = Try<1, 1>::shared_bytes - Try<1, 1>::stage_bytes;
  static constexpr int stage = Try<1, 1>::stage_bytes + 32;
  static constexpr int most = Query == Element::e4m3 ? 4 : 3;
  static constexpr int stages_at(int ctas) { return ((227 * 1024) / ctas - 1024 - fixed) / stage; }
  static constexpr int ctas = stages_at(most) >= 2 ? most : stages_at(3) >= 2 ? 3 : stages_at(2) >= 2 ? 2 : 1;
  static constexpr int stages = stages_at(ctas) < flight / ctas ? stages_at(ctas) : flight / ctas;
  using type = LogitsShape<stages, ctas, 1, lean>;
};

}  // namespace detail

/// The shape that did best for these arguments.
template <class P, Element Query, int Heads, int NextN>
using DefaultLogitsShape = typename detail::DefaultShape<P, Query, Heads, NextN>::type;

#if KVIRE_SM90A
namespace detail {

template <class Plan, class Shape>
KVIRE_DEVICE KVIRE_INLINE void produce(const LogitsArguments& a, const Guess<Plan>& guess, Share share, kstd::uint32_t shared, int lane) {
  constexpr int ids = Plan::pages_per_tile;
  Walk<Plan> walk(a, lane, share);
  Segment<ids> now, next;
  bool more = walk.next(now, &guess);
  int stage = 0;
  kstd::uint32_t parity = 1;
  while (more) {
#pragma unroll 1
    for (int t = 0; t < now.tiles; ++t) {
      int id[ids];
#pragma unroll
      for (int i = 0; i < ids; ++i) id[i] = __shfl_sync(~0U, now.id[i], t);
      const kstd::uint32_t full = shared + Plan::full_at + stage * 8;
      if (lane == 0) {
        ptx::mbarrier_wait(shared + Plan::empty_at + stage * 8, parity);
        const int token = (now.tile + t) * tile_tokens;
        kstd::uint32_t missing = 0;
        kstd::uint32_t bytes = 0;
#pragma unroll
        for (int i = 0; i < ids; ++i) {
          if (id[i] < 0) {
            missing |= 1U << i;
          } else {
            bytes += Plan::tile_bytes / ids;
          }
        }
        ptx::store_shared4(shared + Plan::meta_at + stage * 16, {static_cast<kstd::uint32_t>(now.row), static_cast<kstd::uint32_t>(token), missing, 0});
        ptx::mbarrier_arrive_expect(full, bytes);
        const kstd::uint32_t to = shared + Plan::stages_at + stage * Plan::stage_bytes;
#pragma unroll
        for (int i = 0; i < ids; ++i) {
          if (id[i] < 0) continue;
          const kstd::byte* page = a.pages + a.page_stride * id[i];
          if constexpr (Plan::whole_page) {
            ptx::bulk_load(to, page, Plan::tile_bytes, full);
          } else {
            constexpr int rows = tile_tokens / ids;
            const int half = (now.tile + t) % Plan::tiles_per_page;
            ptx::bulk_load(to + i * rows * Plan::key_pitch, page + half * Plan::value_bytes, rows * Plan::key_pitch, full);
            if constexpr (Plan::scale_plane) {
              ptx::bulk_load(to + Plan::value_bytes + i * rows * Plan::scale_row,
                             page + Plan::tokens * Plan::key_pitch + half * tile_tokens * Plan::scale_row, rows * Plan::scale_row, full);
            }
          }
        }
      }
      __syncwarp();
      if (++stage == Shape::stages) {
        stage = 0;
        parity ^= 1;
      }
      if (t == 1 || (t == 0 && now.tiles == 1)) {
        // The first tiles are under way: the ids of the next segment can follow, and, if it is of another row, its queries as far as L2.
        more = walk.next(next);
        if (more && next.row != now.row) {
          const char* q = static_cast<const char*>(a.queries) + static_cast<kstd::int64_t>(next.row) * Plan::next_n * Plan::query_bytes;
          for (int i = lane * 128; i < Plan::next_n * Plan::query_bytes; i += 32 * 128) ptx::prefetch_l2(q + i);
        }
      }
    }
    now = next;
  }
  if (lane == 0) {
    ptx::mbarrier_wait(shared + Plan::empty_at + stage * 8, parity);
    ptx::store_shared4(shared + Plan::meta_at + stage * 16, {~0U, 0, 0, 0});
    ptx::mbarrier_arrive(shared + Plan::full_at + stage * 8);
  }
}

/// Brings the queries and weights of `row` to shared memory, in the order the products want; one warpgroup.
template <class Plan, int Heads>
KVIRE_DEVICE KVIRE_INLINE void load_row(const LogitsArguments& a, int row, kstd::uint32_t shared, int thread) {
  constexpr int chunks = Plan::query_row / 16;
  constexpr int each = Heads * chunks / group_threads;
  const kstd::int64_t first = static_cast<kstd::int64_t>(row) * Plan::next_n;
  float w[(Plan::next_n * Heads + group_threads - 1) / group_threads];
#pragma unroll
  for (int i = 0; i * group_threads < Plan::next_n * Heads; ++i) {
    const int at = i * group_threads + thread;
    w[i] = at < Plan::next_n * Heads ? __ldg(a.weights + first * Heads + at) : 0.0F;
  }
  const int visible = thread < Plan::next_n ? visible_tokens<Plan>(a, row, thread) : 0;
#pragma unroll 1
  for (int q = 0; q < Plan::next_n; ++q) {
    const char* from = static_cast<const char*>(a.queries) + (first + q) * Plan::query_bytes;
    const kstd::uint32_t to = shared + Plan::queries_at + q * Plan::query_bytes;
    Words4 v[each];
#pragma unroll
    for (int i = 0; i < each; ++i) {
      // lane: which of the 4 lanes of a quad will own this chunk, and the column within a core; then blocks of 8 columns, then blocks of 4 chunks
      const int at = i * group_threads + thread;
      const int c = at % 4, r = at / 4 % 8, n = at / 32 % (Heads / 8), k = at / (4 * Heads);
      const int head = Heads / 4 * (r / 2) + 2 * n + r % 2;
      // fp4: lane c of a quad owns block c, 32 elements
      const int chunk = Plan::fp4 ? Plan::steps / 2 * c + k : c + 4 * k;
      v[i] = ptx::load_global4(from + head * Plan::query_row + chunk * 16);
    }
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int at = i * group_threads + thread;
      const int c = at % 4, r = at / 4 % 8, n = at / 32 % (Heads / 8), k = at / (4 * Heads);
      if constexpr (Plan::fp4 && Plan::fp8) v[i] = {permute(v[i].x, v[i].y, 0x6420), permute(v[i].x, v[i].y, 0x7531), permute(v[i].z, v[i].w, 0x6420), permute(v[i].z, v[i].w, 0x7531)};
      if constexpr (Plan::fp4 && !Plan::fp8) v[i] = {permute(v[i].x, v[i].z, 0x5410), permute(v[i].x, v[i].z, 0x7632), permute(v[i].y, v[i].w, 0x5410), permute(v[i].y, v[i].w, 0x7632)};
      const kstd::uint32_t core = to + (n * 2 * Plan::steps + 4 * k) * 128 + r * 16 + c * 4;
      ptx::store_shared(core, v[i].x);
      ptx::store_shared(core + 128, v[i].y);
      ptx::store_shared(core + 256, v[i].z);
      ptx::store_shared(core + 384, v[i].w);
    }
  }
#pragma unroll
  for (int i = 0; i * group_threads < Plan::next_n * Heads; ++i) {
    const int at = i * group_threads + thread, q = at / Heads, h = at % Heads;
    if (at < Plan::next_n * Heads) {
      ptx::store_shared(shared + Plan::weights_at + (q * 4 + h / (Heads / 4)) * Plan::weight_run + h % (Heads / 4) * 4, __float_as_uint(mul_exact(0.5F, w[i])));
    }
  }
  if (thread < Plan::next_n) ptx::store_shared(shared + Plan::visible_at + thread * 4, static_cast<kstd::uint32_t>(visible));
  ptx::fence_async_shared();
}

template <class Plan>
KVIRE_DEVICE KVIRE_INLINE void load_weights(float (&w)[Plan::columns / 2], kstd::uint32_t at) {
#pragma unroll
  for (int i = 0; i < Plan::columns / 8; ++i) {
    const Words4 v = ptx::load_shared4(at + i * 16);
    w[4 * i] = __uint_as_float(v.x);
    w[4 * i + 1] = __uint_as_float(v.y);
    w[4 * i + 2] = __uint_as_float(v.z);
    w[4 * i + 3] = __uint_as_float(v.w);
  }
}

/// This lane's part of a tile as operand A: rows g and g + 8 of its warp, k in the order that load_row gave the queries.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE void load_keys(kstd::uint32_t (&k)[Plan::steps][4], kstd::uint32_t stage, int warp, int lane) {
  const int g = lane / 4, c = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const kstd::uint32_t row = stage + (warp * 16 + half * 8 + g) * Plan::key_pitch;
    if constexpr (Plan::interleaved) {
      // Rows of an odd number of words: single words meet few bank conflicts.
#pragma unroll
      for (int j = 0; j < Plan::steps; ++j) {
        const kstd::uint32_t word = row + (c + 4 * (j / 2)) * 16 + j % 2 * 8;
        k[j][half] = ptx::load_shared(word);
        k[j][half + 2] = ptx::load_shared(word + 4);
      }
    } else if constexpr (Plan::steps == 2) {  // 64-byte rows
      const Words4 x = ptx::load_shared4(row + c * 16);
      k[0][half] = x.x;
      k[0][half + 2] = x.y;
      k[1][half] = x.z;
      k[1][half + 2] = x.w;
    } else {
#pragma unroll
      for (int pair = 0; pair < Plan::steps / 4; ++pair) {
        // Rows are a multiple of 128 bytes: neighbouring rows of one quarter-warp take the two 64-byte halves in opposite order, then swap.
        const bool odd = g % 2 != 0;
        const Words4 x = ptx::load_shared4(row + pair * 128 + (c + (odd ? 4 : 0)) * 16);
        const Words4 y = ptx::load_shared4(row + pair * 128 + (c + (odd ? 0 : 4)) * 16);
        const Words4 low = odd ? y : x;
        const Words4 high = odd ? x : y;
        k[4 * pair][half] = low.x;
        k[4 * pair][half + 2] = low.y;
        k[4 * pair + 1][half] = low.z;
        k[4 * pair + 1][half + 2] = low.w;
        k[4 * pair + 2][half] = high.x;
        k[4 * pair + 2][half + 2] = high.y;
        k[4 * pair + 3][half] = high.z;
        k[4 * pair + 3][half + 2] = high.w;
      }
    }
  }
}

/// The e4m3 codes of the eight e2m1 magnitudes times 2^(index - 9), for index 1 to 15, all exact; zeros for 0, NaN for 16.
KVIRE_DEVICE KVIRE_INLINE void make_codes(kstd::uint32_t at, int index) {
  kstd::uint32_t low = 0x3C383000U + 0x08080800U * static_cast<kstd::uint32_t>(index - 9);
  kstd::uint32_t high = 0x4C484440U + 0x08080808U * static_cast<kstd::uint32_t>(index - 9);
  if (index == 3) low = 0x0C080400U, high = 0x1C181410U;
  if (index == 2) low = 0x06040200U, high = 0x14100C08U;
  if (index == 1) low = 0x03020100U, high = 0x0C080604U;
  if (index == 0) low = 0, high = 0;
  if (index == 16) low = high = 0x7F7F7F7FU;
  ptx::store_shared(at + index * 8, low);
  ptx::store_shared(at + index * 8 + 4, high);
}

/// The same for e2m1 keys: lane c of a quad owns block c. The blocks' exponents are taken relative to the token's largest, and that one,
/// as the factor of the token this lane finishes, is returned. e4m3 operands hold magnitudes times 2^-8 to 2^6 exactly; `lost` says that a
/// block lay below that.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE float load_fp4_keys(kstd::uint32_t (&k)[Plan::steps][4], bool (&lost)[2], kstd::uint32_t stage, kstd::uint32_t codes, int warp, int lane) {
  const int g = lane / 4, c = lane % 4;
  constexpr int n = Plan::key_row / 16;  // words of a lane and key: 8 elements each
  kstd::uint32_t exponent[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const kstd::uint32_t at = stage + Plan::value_bytes + (warp * 16 + half * 8 + g) * Plan::scale_row + c * Plan::blocks / 4;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(exponent[half]) : "r"(at) : "memory");
  }
  kstd::uint32_t most = (exponent[0] == 255 ? 0 : exponent[0]) | (exponent[1] == 255 ? 0 : exponent[1]) << 16;
  most = __vmaxu2(most, __shfl_xor_sync(~0U, most, 1));
  most = __vmaxu2(most, __shfl_xor_sync(~0U, most, 2));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const kstd::uint32_t from = stage + (warp * 16 + half * 8 + g) * Plan::key_row + c * n * 4;
    kstd::uint32_t words[n];
    if constexpr (n == 4) {
      const Words4 v = ptx::load_shared4(from);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else {
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from) : "memory");
    }
    const int below = static_cast<int>(exponent[half]) - static_cast<int>(most >> 16 * half & 0xFFFFU);  // at most 0
    if constexpr (Plan::fp8) {
      int index = below + 15 < 0 ? 0 : below + 15;
      if (exponent[half] == 255) index = 16;
      lost[half] = below < -14 && exponent[half] != 255;
      kstd::uint32_t low, high;
      asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(low), "=r"(high) : "r"(codes + index * 8) : "memory");
#pragma unroll
      for (int u = 0; u < n; ++u) {
        const kstd::uint32_t magnitude = words[u] & 0x77777777U;
        const kstd::uint32_t a = permute(low, high, magnitude), b = permute(low, high, magnitude >> 16);
        k[u][half] = permute(a, b, 0x6420) | (words[u] << 4 & 0x80808080U);      // elements 0, 2, 4, 6
        k[u][half + 2] = permute(a, b, 0x7531) | (words[u] & 0x80808080U);  // 1, 3, 5, 7
      }
    } else {
      // As bf16 subnormals and small normals the bits of e2m1 are its value times 2^-126.
      const int biased = 253 + below;
      kstd::uint32_t factor = biased < 1 ? 0 : static_cast<kstd::uint32_t>(biased) << 7;
      if (exponent[half] == 255) factor = 0x7FC0;
      factor |= factor << 16;
#pragma unroll
      for (int u = 0; u < n; ++u) {
        const kstd::uint32_t w = words[u];
        const kstd::uint32_t pairs[4] = {(w << 6 & 0x01C001C0U) | (w << 12 & 0x80008000U), (w << 2 & 0x01C001C0U) | (w << 8 & 0x80008000U),
                                         (w >> 2 & 0x01C001C0U) | (w << 4 & 0x80008000U), (w >> 6 & 0x01C001C0U) | (w & 0x80008000U)};
#pragma unroll
        for (int r = 0; r < 4; ++r) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(k[2 * u + r / 2][half + 2 * (r % 2)]) : "r"(pairs[r]), "r"(factor));
      }
    }
  }
  const kstd::uint32_t top = c % 2 != 0 ? most >> 16 : most & 0xFFFFU;
  if constexpr (Plan::fp8) return __uint_as_float(top > 6 ? (top - 6) << 23 : 1U << (top + 16));  // 2^(top - 127 - 6)
  return __uint_as_float(top > 0 ? top << 23 : 0x400000U);
}

/// The product of a tile with the queries at `query`, as many as d has columns for.
template <class Plan, int Columns>
KVIRE_DEVICE KVIRE_INLINE void multiply(float (&d)[Columns], kstd::uint32_t (&k)[Plan::steps][4], kstd::uint32_t query) {
  if constexpr (Plan::firm) {
#pragma unroll
    for (int j = 0; j < Plan::steps; ++j) asm volatile("" : "+r"(k[j][0]), "+r"(k[j][1]), "+r"(k[j][2]), "+r"(k[j][3]));
  }
  ptx::wgmma_fence();
#pragma unroll
  for (int j = 0; j < Plan::steps; ++j) {
    const kstd::uint64_t b = ptx::core_descriptor(query + j * 256, 128, 2 * Plan::steps * 128);
    if constexpr (Plan::fp8) {
      ptx::wgmma_e4m3(d, k[j], b, j != 0);
    } else {
      ptx::wgmma_bf16(d, k[j], b, j != 0);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::touch(d);
}

/// Weighted relu sums of this lane's columns, for its two rows; pairs of fixed order.
template <class Plan, int First, int Columns>
KVIRE_DEVICE KVIRE_INLINE void head_sums(const float (&d)[Columns], const float (&w)[Plan::columns / 2], float& low, float& high) {
  float s[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < Plan::columns / 4; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = fma_exact(twice_relu(d[First + 4 * i + e]), w[2 * i + e % 2], s[e]);
  }
  low = add_exact(s[0], s[1]);
  high = add_exact(s[2], s[3]);
}

/// The logits of one token whose blocks span more binades than e4m3 has, in f32 by one warp: rare, and slow.
template <class P, class Plan, int Heads>
KVIRE_DEVICE KVIRE_INLINE void exact_fp4(const LogitsArguments& a, int row, int token, kstd::uint32_t shared, int lane) {
  const int id = __ldg(a.page_table + a.table_stride * row + token / Plan::tokens);
  if (id < 0 || id >= a.page_count) return;
  const kstd::byte* page = a.pages + a.page_stride * id;
  const auto* key = reinterpret_cast<const kstd::uint8_t*>(page + P::template offset<role::Value>(token % Plan::tokens));
  const auto* scales = reinterpret_cast<const kstd::uint8_t*>(page + P::template offset<role::Scale>(token % Plan::tokens));
  // A block of zeros loses nothing. Lanes look at their bytes of the key.
  int most = 0;
  for (int b = 0; b < Plan::blocks; ++b) most = __ldg(scales + b) != 255 && __ldg(scales + b) > most ? __ldg(scales + b) : most;
  bool numbers = false;
  for (int i = lane; i < Plan::key_row; i += 32) numbers |= (__ldg(key + i) & 0x77) != 0 && __ldg(scales + i / 16) != 255 && __ldg(scales + i / 16) + 14 < most;
  if (!__any_sync(~0U, numbers)) return;
  __syncwarp();  // after the fast path's store
#pragma unroll 1
  for (int q = 0; q < Plan::next_n; ++q) {
    const kstd::int64_t at = static_cast<kstd::int64_t>(row) * Plan::next_n + q;
    float sum = 0;
#pragma unroll 1
    for (int h = lane; h < Heads; h += 32) {
      const auto* query = static_cast<const kstd::uint8_t*>(a.queries) + (at * Heads + h) * Plan::query_row;
      float dot = 0;
#pragma unroll 1
      for (int d = 0; d < Plan::dim; ++d) {
        const auto code = static_cast<kstd::uint8_t>(__ldg(key + d / 2) >> d % 2 * 4 & 15);
        dot = fma_exact(f32_from_e4m3(__ldg(query + d)), mul_exact(f32_from_e2m1(code), f32_from_ue8m0(__ldg(scales + d / 32))), dot);
      }
      sum = fma_exact(twice_relu(dot), mul_exact(0.5F, __ldg(a.weights + at * Heads + h)), sum);
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum = add_exact(sum, __shfl_xor_sync(~0U, sum, mask));
    if (lane == 0 && token < static_cast<int>(ptx::load_shared(shared + Plan::visible_at + q * 4)) && sum == sum) a.logits[at * a.logits_stride + token] = sum;
  }
}

/// The consumer warpgroup: all tiles of the share. `row`: whose queries are in shared memory.
template <class P, class Plan, int Heads, class Shape>
KVIRE_DEVICE KVIRE_INLINE void consume(const LogitsArguments& a, int row, kstd::uint32_t shared, int thread) {
  const int warp = thread / 32, lane = thread % 32, c = lane % 4;
  const int local = warp * 16 + lane / 4 + c % 2 * 8;  // the token of a tile that this lane finishes
  const kstd::uint32_t weights = shared + Plan::weights_at + c * Plan::weight_run;
  constexpr int columns = Plan::columns;
  int stage = 0;
  kstd::uint32_t parity = 0;
  float* out = a.logits + static_cast<kstd::int64_t>(row) * Plan::next_n * a.logits_stride;
  int visible = static_cast<int>(ptx::load_shared(shared + Plan::visible_at));  // to the first query token
  for (;;) {
    ptx::mbarrier_wait(shared + Plan::full_at + stage * 8, parity);
    const Words4 meta = ptx::load_shared4(shared + Plan::meta_at + stage * 16);
    if (static_cast<int>(meta.x) < 0) break;
    if (static_cast<int>(meta.x) != row) {
      row = static_cast<int>(meta.x);
      out = a.logits + static_cast<kstd::int64_t>(row) * Plan::next_n * a.logits_stride;
      ptx::named_barrier(1, group_threads);  // all warps are through with the old row's queries
      load_row<Plan, Heads>(a, row, shared, thread);
      ptx::named_barrier(1, group_threads);
      visible = static_cast<int>(ptx::load_shared(shared + Plan::visible_at));
    }
    const kstd::uint32_t at = shared + Plan::stages_at + stage * Plan::stage_bytes;
    kstd::uint32_t keys[Plan::steps][4];
    float scale = 1;
    [[maybe_unused]] bool lost[2] = {false, false};
    if constexpr (Plan::fp4) {
      scale = load_fp4_keys<Plan>(keys, lost, at, shared + Plan::codes_at, warp, lane);
    } else {
      load_keys<Plan>(keys, at, warp, lane);
      if constexpr (Plan::scaled) {
        scale = __uint_as_float(ptx::load_shared(at + (Plan::interleaved ? local * Plan::key_pitch + Plan::key_row : Plan::value_bytes + local * 4)));
      }
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(shared + Plan::empty_at + stage * 8);  // the tile is in registers
    if (++stage == Shape::stages) {
      stage = 0;
      parity ^= 1;
    }

    const bool missing = (meta.z >> (Plan::pages_per_tile > 1 ? local / (tile_tokens / Plan::pages_per_tile) : 0) & 1U) != 0;
    const int token = static_cast<int>(meta.y) + local;
    // Writes the logit of query token q, if the lane's token is one it sees.
    auto finish = [&](int q, float sum) {
      if (token >= (Plan::next_n == 1 ? visible : static_cast<int>(ptx::load_shared(shared + Plan::visible_at + q * 4)))) return;
      float logit = Plan::scaled ? mul_exact(sum, scale) : sum;
      if (missing) logit = -__int_as_float(0x7F800000);
      if (logit != logit) {
        logit = -__int_as_float(0x7F800000);
        if (a.nan_logits != nullptr) atomicAdd(a.nan_logits, 1ULL);
      }
      out[Plan::next_n == 1 ? token : q * a.logits_stride + token] = logit;
    };
    // Lanes with even c finish the low row, those with odd c the high one.
    auto rows_apart = [&](float low, float high) { return add_exact(c % 2 != 0 ? high : low, __shfl_xor_sync(~0U, c % 2 != 0 ? low : high, 1)); };
#pragma unroll 1
    for (int q = 0; Shape::together == 2 && q + 1 < Plan::next_n; q += 2) {
      float d[2 * columns];
      multiply<Plan>(d, keys, shared + Plan::queries_at + q * Plan::query_bytes);
      float w[columns / 2], low, high;
      load_weights<Plan>(w, weights + q * 4 * Plan::weight_run);
      head_sums<Plan, 0>(d, w, low, high);
      const float first = rows_apart(low, high);
      load_weights<Plan>(w, weights + (q + 1) * 4 * Plan::weight_run);
      head_sums<Plan, columns>(d, w, low, high);
      const float second = rows_apart(low, high);
      // and of two query tokens, lanes with c < 2 the first
      finish(q + c / 2, add_exact(c >= 2 ? second : first, __shfl_xor_sync(~0U, c >= 2 ? first : second, 2)));
    }
#pragma unroll 1
    for (int q = Shape::together == 2 ? Plan::next_n / 2 * 2 : 0; q < Plan::next_n; ++q) {
      float d[columns];
      multiply<Plan>(d, keys, shared + Plan::queries_at + q * Plan::query_bytes);
      float w[columns / 2], low, high;
      load_weights<Plan>(w, weights + q * 4 * Plan::weight_run);
      head_sums<Plan, 0>(d, w, low, high);
      const float mine = rows_apart(low, high);
      const float sum = add_exact(mine, __shfl_xor_sync(~0U, mine, 2));
      if (c < 2) finish(q, sum);
    }
    if constexpr (Plan::fp4 && Plan::fp8) {
      if (__any_sync(~0U, lost[0] || lost[1])) {
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          unsigned found = __ballot_sync(~0U, half == 0 ? lost[0] : lost[1]);
          while (found != 0) {
            const int quad = (__ffs(static_cast<int>(found)) - 1) / 4;
            found &= ~(15U << quad * 4);
            exact_fp4<P, Plan, Heads>(a, row, token - local + warp * 16 + half * 8 + quad, shared, lane);
          }
        }
      }
    }
  }
}

}  // namespace detail
#endif  // KVIRE_SM90A

/// Starts nothing unless compiled for sm_90a. Grid: any number of CTAs; block: Shape::threads; dynamic shared memory: Plan::shared_bytes.
template <class P, Element Query, int Heads, int NextN, class Shape>
__global__ void __launch_bounds__(Shape::threads, Shape::ctas_per_sm) logits_kernel(const __grid_constant__ LogitsArguments a) {
#if KVIRE_SM90A
  using Plan = LogitsPlan<P, Query, Heads, NextN, Shape>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const kstd::uint32_t shared = ptx::shared_address(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = __shfl_sync(~0U, thread / 32, 0);
  constexpr int producer = group_threads / 32;
  ptx::launch_dependents();
  // Where this CTA's share would start were all rows as long as the table is wide: what lies there is read while the lengths are on their way.
  const int width = detail::tiles_of(detail::clamp_length<Plan>(a, 0x7FFFFFFF));
  int begin, size;
  detail::split(static_cast<unsigned>(width) * static_cast<unsigned>(a.batch), blockIdx.x, gridDim.x, begin, size);
  const int guess = begin / width < a.batch ? begin / width : 0;

  if (warp == producer) {
    const int lane = thread % 32;
    if (lane < Shape::stages) {
      ptx::mbarrier_init(shared + Plan::full_at + lane * 8, 1);
      ptx::mbarrier_init(shared + Plan::empty_at + lane * 8, 4);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::named_barrier_arrive(2, Shape::threads);
    ptx::wait_for_earlier_grids();
    const detail::Guess<Plan> ids(a, lane, guess, begin - guess * width);
    const detail::Share share = detail::find_share<Plan>(a, lane, blockIdx.x, gridDim.x);
    detail::produce<Plan, Shape>(a, ids, share, shared, lane);
  } else {
    ptx::wait_for_earlier_grids();
    // Warms L2: the whole page table, line by line over all CTAs.
    const kstd::int64_t lines = (a.table_stride * a.batch * 4 + 127) / 128;
    const kstd::int64_t line = static_cast<kstd::int64_t>(blockIdx.x) * group_threads + thread;
    if (line < lines) ptx::prefetch_l2(reinterpret_cast<const char*>(a.page_table) + line * 128);
    if constexpr (Plan::fp4 && Plan::fp8) {
      if (thread < 17) detail::make_codes(shared + Plan::codes_at, thread);
    }
    detail::load_row<Plan, Heads>(a, guess, shared, thread);
    ptx::named_barrier(2, Shape::threads);
    detail::consume<P, Plan, Heads, Shape>(a, guess, shared, thread);
  }
#else
  (void)a;
  __trap();
#endif
}

/// Launches the kernel on `stream` with at most `sms` times Shape::ctas_per_sm CTAs; fewer where the table cannot hold as many tiles.
/// `overlap`: programmatic dependent launch. The kernel may then start while the stream's earlier kernel ends; it waits for that one before
/// it reads anything.
template <class P, Element Query, int Heads, int NextN, class Shape = DefaultLogitsShape<P, Query, Heads, NextN>>
cudaError_t launch_logits(const LogitsArguments& a, int sms, cudaStream_t stream, bool overlap = false) {
  static_assert(require_reader<P, LogitsReader>());
  using Plan = LogitsPlan<P, Query, Heads, NextN, Shape>;
  auto* kernel = &logits_kernel<P, Query, Heads, NextN, Shape>;
  if (a.batch <= 0 || a.table_width <= 0 || a.logits_stride <= 0) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Plan::shared_bytes);
  if (error != cudaSuccess) return error;
  const kstd::int64_t most = static_cast<kstd::int64_t>(a.batch) * ((static_cast<kstd::int64_t>(a.table_width) * Plan::tokens + tile_tokens - 1) / tile_tokens);
  const kstd::int64_t fits = static_cast<kstd::int64_t>(sms) * Shape::ctas_per_sm;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(most < fits ? most : fits));
  config.blockDim = dim3(Shape::threads);
  config.dynamicSmemBytes = Plan::shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, a);
}

}  // namespace sm90

KVIRE_NAMESPACE_END
