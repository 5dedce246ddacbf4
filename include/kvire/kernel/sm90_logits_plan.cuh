// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/kept_scores.cuh>
#include <kvire/kernel/logits_arguments.cuh>
#include <kvire/kernel/tuning.hpp>
#include <kvire/layout/reader.hpp>

KVIRE_NAMESPACE_BEGIN

/// How tuned logits kernels for Hopper are built: what they ask of pages, what of them lies where in shared memory, and the shape that did best.
namespace sm90 {

inline constexpr int group_threads = 128;
inline constexpr int unit_threads = group_threads + 32;  // a consumer warpgroup and its producer warp

/// How a CTA is built. Stages: of the ring of tiles. CtasPerSm: CTAs that share an SM. Swizzled: keys are an operand in shared memory, brought there by
/// tensor copies, instead of registers. Together: query tokens of a product, 1 or 2. Resident: weights stay in registers, if there are at most two
/// query tokens. JoinedFrom: tiles a share from which what were CTAs that share an SM are units of one CTA, each with its own share and ring; 0: never.
/// Warp i of a CTA runs on scheduler i % 4 of its SM: the producers of units burden different schedulers, those of CTAs one and the same. But a CTA
/// of so many warps takes longer to start.
template <int Stages, int CtasPerSm, bool Swizzled = false, int Together = 1, bool Resident = false, int JoinedFrom = 0>
struct LogitsShape {
  static constexpr int stages = Stages;
  static constexpr int ctas_per_sm = CtasPerSm;
  static constexpr bool swizzled = Swizzled;
  static constexpr int together = Together;
  static constexpr bool resident = Resident;
  static constexpr int joined_from = JoinedFrom;
  static constexpr bool best = false;
  static constexpr bool candidates = false;
  static constexpr bool options = false;
  static_assert(require_tuning<LogitsShape, (Stages <= 32)>());  // a lane of the producer sets up each
};

/// The same shape in a kernel that also fills LogitsArguments::group_best.
template <class Shape>
struct KeepBest : Shape {
  static constexpr bool best = true;
  static_assert(require_tuning<KeepBest, !Shape::options>());
};

/// The same shape in a kernel that leaves what may still be selected in LogitsArguments::candidates, instead of rows of scores.
template <class Shape>
struct KeepCandidates : Shape {
  static constexpr bool candidates = true;
  static constexpr int joined_from = 0;  // a CTA has one list of candidates
  static_assert(require_tuning<KeepCandidates, !Shape::options>());
};

/// The same shape in a kernel that also takes lists of blocks and writes bf16 scores, which a few instructions a tile are the price of.
template <class Shape>
struct WithOptions : Shape {
  static constexpr bool options = true;
  static_assert(require_tuning<WithOptions, !Shape::best>());
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
  static constexpr bool options = Shape::options;
  static constexpr int dim = P::template count_of<role::Value>;
  static constexpr int tokens = P::tokens_per_page;
  static constexpr bool scaled = P::template has<role::Scale>;
  static constexpr bool fp8 = Query == Element::e4m3;
  static constexpr int query_row = dim * bits(Query) / 8;  // bytes
  static constexpr int key_row = dim * bits(key) / 8;
  static constexpr bool fp4 = key == Element::e2m1;
  static constexpr int fp4_depth = 26;  // binades below a token's largest scale that e5m2 operands hold e2m1 elements of
  static constexpr int fp4_codes = 33;  // depths 0 to 32
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
  // Keys as an operand in shared memory: planes of rows as wide as a swizzle, those of 8 tokens next to each other, so that one copy brings a tile nearly in
  // the order of memory. K in that order, elsewhere in that of load_keys.
  static constexpr bool swizzled = Shape::swizzled && !interleaved && !fp4;
  static constexpr int width = key_row < 128 ? key_row : 128;
  static constexpr int planes = key_row / width;
  static constexpr int plane_bytes = 8 * width;  // of 8 tokens
  static constexpr int columns = Heads / 2;  // accumulators of a thread and query token
  // Swizzled: queries, too, are brought by tensor copies, while the row before is under way if two rows' fit.
  static constexpr int query_width = query_row < 128 ? query_row : 128;
  static constexpr int query_plane_bytes = NextN * Heads * query_width;
  static constexpr int query_stages = swizzled && !Shape::candidates && NextN * Heads * query_row <= 16 * 1024 ? 2 : 1;

  static constexpr int value_bytes = tile_tokens * key_pitch;
  static constexpr int tile_bytes = value_bytes + (scale_plane ? tile_tokens * scale_row : 0);
  static constexpr int stage_bytes = swizzled ? value_bytes : (tile_bytes + 127) / 128 * 128;
  static constexpr int scale_bytes = tile_tokens * scale_row;
  static constexpr int query_bytes = Heads * query_row;
  static constexpr int query_stage_bytes = NextN * query_bytes;
  static constexpr int pages_per_tile = tokens < tile_tokens ? tile_tokens / tokens : 1;
  static constexpr int tiles_per_page = tokens > tile_tokens ? tokens / tile_tokens : 1;
  // One copy brings a whole tile where page and tile are the same bytes.
  static constexpr bool whole_page = tokens == tile_tokens && P::page_bytes == tile_bytes;

  static_assert(require_tuning<LogitsPlan, Heads == 32 || Heads == 64>());
  static_assert(require_tuning<LogitsPlan, in_order<P>()>());
  static_assert(require_tuning<LogitsPlan, blocks == (fp4 ? dim / 32 : key == Element::e4m3 ? 1 : 0) && (key == Element::e2m1 || key == Query)>());

  // Shared memory. Weights: each lane of a quad its heads, 16 bytes apart for the banks.
  static constexpr int weight_run = Heads + 16;
  static constexpr int weight_stage_bytes = NextN * 4 * weight_run;
  static constexpr int queries_at = 0;
  static constexpr int stages_at = queries_at + query_stages * query_stage_bytes;
  static constexpr int scales_at = stages_at + Shape::stages * stage_bytes;  // if apart from the keys
  static constexpr int weights_at = scales_at + (swizzled ? Shape::stages * scale_bytes : 0);
  static constexpr int meta_at = weights_at + query_stages * weight_stage_bytes;
  static constexpr int full_at = meta_at + Shape::stages * 16;
  static constexpr int empty_at = full_at + Shape::stages * 8;
  static constexpr int query_full_at = empty_at + Shape::stages * 8;
  static constexpr int query_empty_at = query_full_at + (swizzled ? query_stages * 8 : 0);
  static constexpr int visible_at = query_empty_at + (swizzled ? query_stages * 8 : 0);
  static constexpr int rows_at = visible_at + query_stages * NextN * 4;  // swizzled: whose queries a stage has
  static constexpr int codes_at = (rows_at + (swizzled ? query_stages * 4 : 0) + 15) / 16 * 16;
  static constexpr int own_bytes = codes_at + (fp4 && fp8 ? fp4_codes * 8 : 0);
  // KeepCandidates: scores of a query token that a CTA holds before it prunes them.
  static constexpr int kept_at = (own_bytes + 15) / 16 * 16;
  static constexpr int kept = [] {
    for (int n = 4096; n > 1536; n -= 512) {
      if (kept_at + detail::kept_scores_bytes(n, NextN) <= 227 * 1024 / Shape::ctas_per_sm - 1024) return n;
    }
    return 1536;
  }();
  static constexpr int shared_bytes = Shape::candidates ? kept_at + detail::kept_scores_bytes(kept, NextN) : own_bytes;
  static constexpr int unit_pitch = (shared_bytes + 1023) / 1024 * 1024;  // from a unit's to the next
  static constexpr int most_shared_bytes = Shape::joined_from > 0 ? (Shape::ctas_per_sm - 1) * unit_pitch + shared_bytes : shared_bytes;
  static_assert(require_tuning<LogitsPlan, (most_shared_bytes <= 227 * 1024 && NextN % Shape::together == 0)>());
  static_assert(require_tuning<LogitsPlan, (!swizzled || stages_at % (8 * width) == 0)>());
};

namespace detail {

template <class P, Element Query, int Heads, int NextN>
struct DefaultShape {
  static constexpr Element key = P::template element_of<role::Value>;
  static constexpr bool planar = P::template offset<role::Value>(1) * 8 == P::dim * bits(key);
  static constexpr bool lean = NextN == 1 && key == Element::e4m3;  // one product a tile: the cheapest start counts
  static constexpr bool swizzled = planar && key != Element::e2m1 && !lean;
  static constexpr int together = swizzled && NextN % 2 == 0 ? 2 : 1;
  // Two query tokens, or keys of 32 words a lane, need the registers of three CTAs an SM; bf16 tiles fill memory's queue with three, too.
  static constexpr int most = together == 2 || Query == Element::bf16 || (key == Element::e2m1 && NextN == 2) ? 3 : 4;
  // Where a tile takes longer than memory, and not for a few tiles a share.
  static constexpr int joined_from = key == Element::e2m1 ? 6 : key == Element::e4m3 && together == 2 ? 64 : 0;
  template <int Stages, int Ctas>
  using Try = LogitsShape<Stages, Ctas, swizzled, together, NextN <= 2 && !lean, joined_from>;
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

}  // namespace sm90

KVIRE_NAMESPACE_END
