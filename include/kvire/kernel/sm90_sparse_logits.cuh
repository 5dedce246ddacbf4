// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <kvire/codec/float_bits.hpp>
#include <kvire/kernel/fp4_operand.cuh>
#include <kvire/kernel/logits_math.cuh>
#include <kvire/kernel/logits_share.cuh>
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

inline constexpr int group_threads = 128;

/// The pages of a layer as a tensor map: bytes of a key, tokens, pages.
struct alignas(128) KeyMap {
  unsigned char bytes[128];
};

/// How a CTA is built. Stages: of the ring of tiles. CtasPerSm: CTAs that share an SM. Swizzled: keys are an operand in shared memory, brought there by
/// tensor copies, instead of registers. Together: query tokens of a product, 1 or 2. Resident: weights stay in registers, if there are at most two
/// query tokens.
template <int Stages, int CtasPerSm, bool Swizzled = false, int Together = 1, bool Resident = false>
struct LogitsShape {
  static constexpr int stages = Stages;
  static constexpr int ctas_per_sm = CtasPerSm;
  static constexpr bool swizzled = Swizzled;
  static constexpr int together = Together;
  static constexpr bool resident = Resident;
  static constexpr bool best = false;
  static constexpr int threads = group_threads + 32;
  static_assert(require_tuning<LogitsShape, (Stages <= 32)>());  // a lane of the producer sets up each
};

/// The same shape in a kernel that also fills LogitsArguments::group_best.
template <class Shape>
struct KeepBest : Shape {
  static constexpr bool best = true;
};

/// What the kernel asks of a page.
struct LogitsReader {
  static constexpr ReaderNeeds needs{.page_multiple = 16, .vector_bytes = 0, .least_tokens = 32, .most_tokens = 128};
};

/// Whether the bytes of a page are where the kernel looks for them: tiles and pages divide each other, keys of one field start the page, and scales
/// follow each key, or all keys, without padding.
template <class P>
constexpr bool in_order() {
  constexpr int key = P::template count_of<role::Value> * bits(P::template element_of<role::Value>) / 8;  // bytes
  constexpr auto pitch = P::template offset<role::Value>(1) - P::template offset<role::Value>(0);
  if constexpr (P::template count_of<role::Value> != P::dim || P::template offset<role::Value>(0) != 0) {
    return false;
  } else if constexpr (tile_tokens % P::tokens_per_page != 0 && P::tokens_per_page % tile_tokens != 0) {
    return false;
  } else if constexpr (P::template has<role::Scale>) {
    constexpr int scale = P::template count_of<role::Scale> * bits(P::template element_of<role::Scale>) / 8;
    constexpr auto scale_pitch = P::template offset<role::Scale>(1) - P::template offset<role::Scale>(0);
    return pitch == key ? P::template offset<role::Scale>(0) == pitch * P::tokens_per_page && scale_pitch == scale
                        : P::template offset<role::Scale>(0) == key && pitch == key + scale;
  } else {
    return pitch == key;
  }
}

template <class P, Element Query, int Heads, int NextN, class Shape>
struct LogitsPlan {
  static constexpr Element key = P::template element_of<role::Value>;
  static constexpr int next_n = NextN;
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
  // Keys as an operand in shared memory: planes of rows as wide as a swizzle. K in the order of memory, elsewhere in that of load_keys.
  static constexpr bool swizzled = Shape::swizzled && !interleaved && !fp4;
  static constexpr int width = key_row < 128 ? key_row : 128;
  static constexpr int plane_bytes = tile_tokens * width;
  static constexpr int columns = Heads / 2;  // accumulators of a thread and query token

  static constexpr int value_bytes = tile_tokens * key_pitch;
  static constexpr int tile_bytes = value_bytes + (scale_plane ? tile_tokens * scale_row : 0);
  static constexpr int stage_bytes = swizzled ? value_bytes : (tile_bytes + 127) / 128 * 128;
  static constexpr int scale_bytes = tile_tokens * scale_row;
  static constexpr int query_bytes = Heads * query_row;
  static constexpr int pages_per_tile = tokens < tile_tokens ? tile_tokens / tokens : 1;
  static constexpr int tiles_per_page = tokens > tile_tokens ? tokens / tile_tokens : 1;
  // One copy brings a whole tile where page and tile are the same bytes.
  static constexpr bool whole_page = tokens == tile_tokens && P::page_bytes == tile_bytes;

  static_assert(require_tuning<LogitsPlan, Heads == 32 || Heads == 64>());
  static_assert(require_tuning<LogitsPlan, in_order<P>()>());
  static_assert(require_tuning<LogitsPlan, blocks == (fp4 ? dim / 32 : key == Element::e4m3 ? 1 : 0) && (key == Element::e2m1 || key == Query)>());

  // Shared memory. Weights: each lane of a quad its heads, 16 bytes apart for the banks.
  static constexpr int weight_run = Heads + 16;
  static constexpr int queries_at = 0;
  static constexpr int stages_at = queries_at + NextN * query_bytes;
  static constexpr int scales_at = stages_at + Shape::stages * stage_bytes;  // if apart from the keys
  static constexpr int weights_at = scales_at + (swizzled ? Shape::stages * scale_bytes : 0);
  static constexpr int meta_at = weights_at + NextN * 4 * weight_run;
  static constexpr int full_at = meta_at + Shape::stages * 16;
  static constexpr int empty_at = full_at + Shape::stages * 8;
  static constexpr int visible_at = empty_at + Shape::stages * 8;
  static constexpr int codes_at = (visible_at + NextN * 4 + 15) / 16 * 16;
  static constexpr int shared_bytes = codes_at + (fp4 && fp8 ? 17 * 8 : 0);
  static_assert(require_tuning<LogitsPlan, (shared_bytes <= 227 * 1024 && NextN % Shape::together == 0)>());
  static_assert(require_tuning<LogitsPlan, (!swizzled || stages_at % (8 * width) == 0)>());
};

namespace detail {

using ptx::Words4;

template <class P, Element Query, int Heads, int NextN>
struct DefaultShape {
  static constexpr Element key = P::template element_of<role::Value>;
  static constexpr bool planar = P::template offset<role::Value>(1) * 8 == P::dim * bits(key);
  static constexpr bool lean = NextN == 1 && key == Element::e4m3;  // one product a tile: the cheapest start counts
  static constexpr bool swizzled = planar && key != Element::e2m1 && !lean;
  static constexpr int together = swizzled && NextN % 2 == 0 ? 2 : 1;
  // Two query tokens a product, or keys of 32 words a lane, need the registers of three CTAs an SM; bf16 tiles fill memory's queue with three, too.
  static constexpr int most = together == 2 || Query == Element::bf16 ? 3 : 4;
  template <int Stages, int Ctas>
  using Try = LogitsShape<Stages, Ctas, swizzled, together, NextN <= 2 && !lean>;
  template <int Stages>
  static constexpr int bytes = LogitsPlan<P, Query, Heads, NextN, Try<Stages, 1>>::shared_bytes;
  static constexpr int stage = bytes<2> - bytes<1>;
  static constexpr int fixed = bytes<1> - stage + 64;
  static constexpr int stages_at(int ctas) { return ((227 * 1024) / ctas - 1024 - fixed) / stage; }
  static constexpr int ctas = stages_at(most) >= 2 ? most : stages_at(3) >= 2 ? 3 : stages_at(2) >= 2 ? 2 : 1;
  // More tiles in flight than that only lengthen the queue before memory.
  static constexpr int flight = lean ? 8 : swizzled && Query == Element::bf16 ? 6 : swizzled ? 9 : 12;
  static constexpr int stages = stages_at(ctas) < flight / ctas ? stages_at(ctas) : flight / ctas;
  using type = Try<stages, ctas>;
};

}  // namespace detail

/// The shape that did best for these arguments.
template <class P, Element Query, int Heads, int NextN>
using DefaultLogitsShape = typename detail::DefaultShape<P, Query, Heads, NextN>::type;

#if KVIRE_SM90A
namespace detail {

template <class Plan, class Shape>
KVIRE_DEVICE KVIRE_INLINE void produce(const LogitsArguments& a, [[maybe_unused]] const KeyMap& map, const Guess<Plan>& guess, Share share, kstd::uint32_t shared,
                                       int lane) {
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
          if constexpr (Plan::swizzled) {
            constexpr int rows = tile_tokens / ids;
            const int first = (now.tile + t) % Plan::tiles_per_page * tile_tokens;  // token of the page
#pragma unroll
            for (int x = 0; x < Plan::key_row; x += Plan::width) {
              ptx::tensor_load(to + x / Plan::width * Plan::plane_bytes + i * rows * Plan::width, &map, x, first, id[i], full);
            }
            if constexpr (Plan::scaled) {
              ptx::bulk_load(shared + Plan::scales_at + stage * Plan::scale_bytes + i * rows * Plan::scale_row,
                             page + Plan::tokens * Plan::key_row + first * Plan::scale_row, rows * Plan::scale_row, full);
            }
          } else if constexpr (Plan::whole_page) {
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
    if constexpr (Plan::swizzled) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        // lane: the column within a core, then blocks of 16 bytes of k, then blocks of 8 columns
        const int at = i * group_threads + thread, r = at % 8, chunk = at / 8 % chunks, n = at / (8 * chunks);
        v[i] = ptx::load_global4(from + (Heads / 4 * (r / 2) + 2 * n + r % 2) * Plan::query_row + chunk * 16);
      }
#pragma unroll
      for (int i = 0; i < each; ++i) ptx::store_shared4(to + (i * group_threads + thread) / 8 * 128 + thread % 8 * 16, v[i]);
    } else {
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

/// Where this lane's part of a tile starts, bytes from the tile: row g of its warp, and of that the chunk it reads first.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t key_offset(int warp, int lane) {
  const int g = lane / 4, c = lane % 4;
  return (warp * 16 + g) * Plan::key_pitch + c * 16 + (!Plan::interleaved && Plan::steps > 2 && g % 2 != 0 ? 64 : 0);
}
/// This lane's part of the tile as operand A, from its key_offset on: rows g and g + 8 of its warp, k in the order that load_row gave the queries.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE void load_keys(kstd::uint32_t (&k)[Plan::steps][4], kstd::uint32_t from, bool odd) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const kstd::uint32_t row = from + half * 8 * Plan::key_pitch;
    if constexpr (Plan::interleaved) {
      // Rows of an odd number of words: single words meet few bank conflicts.
#pragma unroll
      for (int j = 0; j < Plan::steps; ++j) {
        const kstd::uint32_t word = row + 4 * (j / 2) * 16 + j % 2 * 8;
        k[j][half] = ptx::load_shared(word);
        k[j][half + 2] = ptx::load_shared(word + 4);
      }
    } else if constexpr (Plan::steps == 2) {  // 64-byte rows
      const Words4 x = ptx::load_shared4(row);
      k[0][half] = x.x;
      k[0][half + 2] = x.y;
      k[1][half] = x.z;
      k[1][half + 2] = x.w;
    } else {
#pragma unroll
      for (int pair = 0; pair < Plan::steps / 4; ++pair) {
        // Rows are a multiple of 128 bytes: neighbouring rows of one quarter-warp take the two 64-byte halves in opposite order, then swap.
        const Words4 x = ptx::load_shared4(row + pair * 128);
        const Words4 y = ptx::load_shared4(row + pair * 128 + (odd ? -64 : 64));
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
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE void load_keys(kstd::uint32_t (&k)[Plan::steps][4], kstd::uint32_t stage, int warp, int lane) {
  load_keys<Plan>(k, stage + key_offset<Plan>(warp, lane), lane / 4 % 2 != 0);
}

/// Starts the product of the tile in `k` with the queries `offset` bytes from `queries`, as many as d has columns for.
template <class Plan, int Columns>
KVIRE_DEVICE KVIRE_INLINE void start_product(float (&d)[Columns], kstd::uint32_t (&k)[Plan::steps][4], kstd::uint32_t queries, int offset) {
  // The operand complete before the fence, or the compiler adds fences of its own.
#pragma unroll
  for (int j = 0; j < Plan::steps; ++j) asm volatile("" : "+r"(k[j][0]), "+r"(k[j][1]), "+r"(k[j][2]), "+r"(k[j][3]));
  ptx::wgmma_fence();
#pragma unroll
  for (int j = 0; j < Plan::steps; ++j) {
    const kstd::uint64_t b = ptx::core_descriptor(queries, 128, 2 * Plan::steps * 128, offset + j * 256);
    if constexpr (Plan::fp8) {
      ptx::wgmma_e4m3(d, k[j], b, j != 0);
    } else {
      ptx::wgmma_bf16(d, k[j], b, j != 0);
    }
  }
  ptx::wgmma_commit();
}
/// The same of a swizzled tile in shared memory.
template <class Plan, int Columns>
KVIRE_DEVICE KVIRE_INLINE void start_product(float (&d)[Columns], const kstd::uint32_t& tile, kstd::uint32_t queries, int offset) {
  ptx::wgmma_fence();
#pragma unroll
  for (int j = 0; j < Plan::steps; ++j) {
    const kstd::uint64_t a = ptx::swizzled_descriptor<Plan::width>(tile, j * 32 / Plan::width * Plan::plane_bytes + j * 32 % Plan::width);
    const kstd::uint64_t b = ptx::core_descriptor(queries, 128, 2 * Plan::steps * 128, offset + j * 256);
    if constexpr (Plan::fp8) {
      ptx::wgmma_e4m3(d, a, b, j != 0);
    } else {
      ptx::wgmma_bf16(d, a, b, j != 0);
    }
  }
  ptx::wgmma_commit();
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

/// A quarter of the heads of a lane's two rows, to the sum of all heads of one of them, for lanes with even c the low one.
KVIRE_DEVICE KVIRE_INLINE float half_sum(float low, float high, int c) {
  return add_exact(c % 2 != 0 ? high : low, __shfl_xor_sync(~0U, c % 2 != 0 ? low : high, 1));
}

/// Writes a logit from the sum over the heads. `at`: row and query token; `out`: its logits; `seen`: the tokens that it sees; `mine`: whether this lane
/// writes it. Together: the query tokens of a warp's 16 tokens, lanes with c of 2 and 3 have the second.
template <class Plan, class Shape>
KVIRE_DEVICE KVIRE_INLINE void write_logit(const LogitsArguments& a, kstd::int64_t at, float* out, int token, int seen, float sum, float scale, bool missing, bool mine) {
  float logit = Plan::scaled ? mul_exact(sum, scale) : sum;
  if (missing) logit = -__int_as_float(0x7F800000);
  if (logit != logit) {
    logit = -__int_as_float(0x7F800000);
    if (mine && token < seen && a.nan_logits != nullptr) atomicAdd(a.nan_logits, 1ULL);
  }
  if (mine && token < seen) out[token] = logit;
  if constexpr (Shape::best) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const kstd::uint32_t key = token < seen && !missing ? order_key(logit) : 0U;
#pragma unroll
    for (int t = 0; t < Shape::together; ++t) {
      const bool of_t = Shape::together == 1 || lane % 4 / 2 == t;
      const kstd::uint32_t best = __reduce_max_sync(~0U, of_t ? key : 0U);
      if (lane == 2 * t && token < seen) a.group_best[at * ((a.logits_stride + 15) / 16) + token / 16] = best;  // lanes with the first token
    }
  }
}

/// Keeps a lane's number in its register: the assembler would compute it again at every use.
KVIRE_DEVICE KVIRE_INLINE int keep(int x, int lane) { return __shfl_sync(~0U, x, lane); }

/// The consumer warpgroup: all tiles of the share. `row`: whose queries are in shared memory.
///
/// What counts here is the number of instructions: while an ordinary one reads its operands, the tensor cores do not read theirs, so the time of a
/// tile is that of its products and of everything else, one after the other, however many warps there are.
template <class P, class Plan, int Heads, class Shape>
struct Consumer {
  static constexpr int columns = Plan::columns;
  static constexpr int next_n = Plan::next_n;
  static constexpr int together = Shape::together;
  static constexpr int products = next_n / together;  // of a tile
  static constexpr bool few = next_n <= 2;            // what belongs to a query token stays in registers
  static constexpr bool resident = Shape::resident && few;
  using Sums = float[columns * together];

  const LogitsArguments& a;
  int row;
  kstd::uint32_t shared;
  int thread;
  int lane = keep(thread % 32, thread);
  int c = lane & 3;
  int first = keep(thread / 32 * 16 + thread % 32 / 4, thread);  // row of a tile: this lane has a part of it and of the eighth behind
  int local = first + c % 2 * 8;                                 // the one that it finishes
  int key_at = keep(static_cast<int>(key_offset<Plan>(thread / 32, thread % 32)), thread);
  int stage = 0;
  kstd::uint32_t parity = 0;
  float held[resident ? next_n : 1][columns / 2];
  float* out[few ? products : 1];
  int visible[few ? products : 1];

  KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t weights(int q) const { return shared + Plan::weights_at + c * Plan::weight_run + q * 4 * Plan::weight_run; }
  KVIRE_DEVICE KVIRE_INLINE int token_of(int product) const { return product * together + (together == 2 ? c / 2 : 0); }
  KVIRE_DEVICE KVIRE_INLINE void take_row() {
#pragma unroll
    for (int i = 0; i < (few ? products : 1); ++i) {
      out[i] = a.logits + (static_cast<kstd::int64_t>(row) * next_n + token_of(i)) * a.logits_stride;
      visible[i] = static_cast<int>(ptx::load_shared(shared + Plan::visible_at + token_of(i) * 4));
    }
    if constexpr (resident) {
#pragma unroll
      for (int q = 0; q < next_n; ++q) load_weights<Plan>(held[q], weights(q));
    }
  }
  /// Sum over a quarter of the heads, of query token `q`, whose products are in d from column First on.
  template <int First, int Known>
  KVIRE_DEVICE KVIRE_INLINE float sum_token(const Sums& d, int q) const {
    float low, high;
    if constexpr (resident) {
      head_sums<Plan, First>(d, held[Known], low, high);
    } else {
      float w[columns / 2];
      load_weights<Plan>(w, weights(q));
      head_sums<Plan, First>(d, w, low, high);
    }
    return half_sum(low, high, c);
  }
  /// Sums and logits of a product, which is in d. Known: which one, if `few`.
  template <int Known>
  KVIRE_DEVICE KVIRE_INLINE void finish(const Sums& d, int product, int token, float scale, bool missing) {
    float sum = sum_token<0, Known * together>(d, product * together);
    if constexpr (together == 2) {  // lanes with c of 0 and 1 finish the first query token, the others the second
      const float second = sum_token<columns, Known * together + 1>(d, product * together + 1);
      sum = add_exact(c >= 2 ? second : sum, __shfl_xor_sync(~0U, c >= 2 ? sum : second, 2));
    } else {
      sum = add_exact(sum, __shfl_xor_sync(~0U, sum, 2));
    }
    const int seen = few ? visible[few ? Known : 0] : static_cast<int>(ptx::load_shared(shared + Plan::visible_at + token_of(product) * 4));
    float* to = few ? out[few ? Known : 0] : out[0] + product * together * a.logits_stride;
    write_logit<Plan, Shape>(a, static_cast<kstd::int64_t>(row) * next_n + token_of(product), to, token, seen, sum, scale, missing, together == 2 || c < 2);
  }
  template <class Keys>
  KVIRE_DEVICE KVIRE_INLINE void multiply(Sums& d, Keys& keys, int product) {
    start_product<Plan>(d, keys, shared + Plan::queries_at, product * together * Plan::query_bytes);
    ptx::wgmma_wait<0>();
    ptx::touch(d);
  }
  /// This lane reads a stage no more. All arrive: that one lane may speak for its warp is more than racecheck follows, and it costs no time.
  KVIRE_DEVICE KVIRE_INLINE void release(int which) { ptx::mbarrier_arrive(shared + Plan::empty_at + which * 8); }
  /// All of a tile. `keys`: its operand, in registers or the address in shared memory; `done` is called when nothing reads it there any more.
  template <class Keys, class Done>
  KVIRE_DEVICE KVIRE_INLINE void products_of(Keys& keys, int token, float scale, bool missing, Done&& done) {
    if constexpr (few) {
      Sums d;
      multiply(d, keys, 0);
      if (products == 1) done();
      finish<0>(d, 0, token, scale, missing);
      if constexpr (products == 2) {
        multiply(d, keys, 1);
        done();
        finish<1>(d, 1, token, scale, missing);
      }
    } else {
#pragma unroll 1
      for (int product = 0; product < products; ++product) {
        Sums d;
        multiply(d, keys, product);
        if (product == products - 1) done();
        finish<0>(d, product, token, scale, missing);
      }
    }
  }
  KVIRE_DEVICE KVIRE_INLINE void run() {
    take_row();
    for (;;) {
      ptx::mbarrier_wait(shared + Plan::full_at + stage * 8, parity);
      const Words4 meta = ptx::load_shared4(shared + Plan::meta_at + stage * 16);
      if (static_cast<int>(meta.x) != row) {
        if (static_cast<int>(meta.x) < 0) return;
        row = static_cast<int>(meta.x);
        ptx::named_barrier(1, group_threads);  // all warps are through with the old row's queries
        load_row<Plan, Heads>(a, row, shared, thread);
        ptx::named_barrier(1, group_threads);
        take_row();
      }
      const kstd::uint32_t tile = shared + Plan::stages_at + stage * Plan::stage_bytes;
      const int used = stage;
      if (++stage == Shape::stages) {
        stage = 0;
        parity ^= 1;
      }
      const bool missing = (meta.z >> (Plan::pages_per_tile > 1 ? local / (tile_tokens / Plan::pages_per_tile) : 0) & 1U) != 0;
      const int token = static_cast<int>(meta.y) + local;
      float scale = 1;
      if constexpr (Plan::swizzled) {
        if constexpr (Plan::scaled) scale = __uint_as_float(ptx::load_shared(shared + Plan::scales_at + used * Plan::scale_bytes + local * 4));
        products_of(tile, token, scale, missing, [&] { release(used); });
      } else {
        kstd::uint32_t keys[Plan::steps][4];
        [[maybe_unused]] bool lost[2] = {false, false};
        if constexpr (Plan::fp4) {
          scale = load_fp4_keys<Plan>(keys, lost, tile, shared + Plan::codes_at, first, c);
        } else {
          load_keys<Plan>(keys, tile + key_at, first % 2 != 0);
          if constexpr (Plan::scaled) {
            scale = __uint_as_float(ptx::load_shared(tile + (Plan::interleaved ? local * Plan::key_pitch + Plan::key_row : Plan::value_bytes + local * 4)));
          }
        }
        release(used);  // the tile is in registers
        products_of(keys, token, scale, missing, [] {});
        if constexpr (Plan::fp4 && Plan::fp8) {
          if (missing) lost[0] = lost[1] = false;
          exact_logits<P, Plan, Heads, Shape>(a, row, token - local + first / 16 * 16, lost, shared, lane);
        }
      }
    }
  }
};

}  // namespace detail
#endif  // KVIRE_SM90A

/// Starts nothing unless compiled for sm_90a. Grid: any number of CTAs; block: Shape::threads; dynamic shared memory: Plan::shared_bytes.
template <class P, Element Query, int Heads, int NextN, class Shape>
__global__ void __launch_bounds__(Shape::threads, Shape::ctas_per_sm) logits_kernel(const __grid_constant__ LogitsArguments a, const __grid_constant__ KeyMap map) {
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
    if constexpr (Plan::swizzled) ptx::prefetch_tensor_map(&map);
    if (lane < Shape::stages) {
      ptx::mbarrier_init(shared + Plan::full_at + lane * 8, 1);
      ptx::mbarrier_init(shared + Plan::empty_at + lane * 8, group_threads);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::named_barrier_arrive(2, Shape::threads);
    ptx::wait_for_earlier_grids();
    const detail::Guess<Plan> ids(a, lane, guess, begin - guess * width);
    const detail::Share share = detail::find_share<Plan>(a, lane, blockIdx.x, gridDim.x);
    detail::produce<Plan, Shape>(a, map, ids, share, shared, lane);
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
    detail::Consumer<P, Plan, Heads, Shape>{a, guess, shared, thread}.run();
  }
#else
  (void)a, (void)map;
  __trap();
#endif
}

namespace detail {

/// Asks the driver for the tensor map of a layer's keys. Host only; touches no memory of the device.
inline cudaError_t make_key_map(KeyMap& map, const LogitsArguments& a, int row_bytes, int width, int tokens) {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry) : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  static_assert(require_tuning<KeyMap, (sizeof(KeyMap) == sizeof(CUtensorMap) && alignof(KeyMap) >= alignof(CUtensorMap))>());
  const cuuint64_t extent[3] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(a.page_count > 0 ? a.page_count : 1)};
  const cuuint64_t stride[2] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(a.page_stride)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(width), static_cast<cuuint32_t>(tokens < tile_tokens ? tokens : tile_tokens), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result = encode(reinterpret_cast<CUtensorMap*>(&map), CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<kstd::byte*>(a.pages), extent, stride, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, width == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace detail

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
  KeyMap map{};
  if constexpr (Plan::swizzled) {
    if (const cudaError_t e = detail::make_key_map(map, a, Plan::key_row, Plan::width, Plan::tokens); e != cudaSuccess) return e;
  }
  return cudaLaunchKernelEx(&config, kernel, a, map);
}

}  // namespace sm90

KVIRE_NAMESPACE_END
