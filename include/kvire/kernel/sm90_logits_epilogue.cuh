// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include <kvire/kernel/sm90_logits_pipeline.cuh>

KVIRE_NAMESPACE_BEGIN

/// The epilogue of a product: from accumulators, a dot product for each token and head, to the logits in memory, or in the list of candidates. The relu is weighted and
/// summed over the heads, a quarter of them in each lane of four, the key's scale multiplies the sum, and one of the four writes it.
namespace sm90::detail {

using ptx::Words4;

#if KVIRE_SM90A

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

/// A quarter of the heads of a lane's two rows, to the sum of all heads of one of them, for odd lanes the high one.
KVIRE_DEVICE KVIRE_INLINE float half_sum(float low, float high, bool odd) {
  return add_exact(odd ? high : low, __shfl_xor_sync(~0U, odd ? low : high, 1));
}

struct Nothing {};

/// Where a tile stands in its row.
struct TilePlace {
  int token;          // index of the score that this lane finishes; plain: of the tile's first one
  unsigned position;  // in the row, of the same; sm90::detail::nowhere and more where there is no page
  float missing;      // plain: what is added to a logit, -0, or -inf where there is no page
};

/// Whether in any lane `bits` is not 0 or x is NaN.
KVIRE_DEVICE KVIRE_INLINE bool any_rare(kstd::uint32_t bits, float x) {
  kstd::uint32_t any;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %1, 0;\nsetp.nan.or.f32 p, %2, %2, p;\nvote.sync.any.pred p, p, 0xFFFFFFFF;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(any)
               : "r"(bits), "f"(x));
  return any != 0;
}

/// What a lane of the consumer warpgroup keeps of the row under way, and the end of a product.
template <class Plan, class Shape>
struct Epilogue {
  static constexpr int columns = Plan::columns;
  static constexpr int next_n = Plan::next_n;
  static constexpr int together = Shape::together;
  static constexpr int products = next_n / together;  // of a tile
  static constexpr bool few = next_n <= 2;            // what belongs to a query token stays in registers
  static constexpr bool resident = Shape::resident && few;
  // Nothing but logits is wanted, of tiles on one page each: addresses and bounds are those of a lane's first token, a missing page is an addend, and NaN is looked for
  // behind the tile. Some instructions fewer, which fp4 keys gain by and others do not.
  static constexpr bool plain = Plan::fp4 && few && Plan::pages_per_tile == 1 && !Plan::options && !Shape::best && !Shape::candidates;
  using Sums = float[columns * together];

  const LogitsArguments& a;
  int row;
  kstd::uint32_t shared;
  int thread;
  [[no_unique_address]] std::conditional_t<Shape::candidates, KeptScores<Plan::kept, next_n>, Nothing> kept;
  int lane = keep(thread % 32, thread);
  int c = lane & 3;
  int odd = keep(c % 2, thread);
  int first = keep(thread / 32 * 16 + thread % 32 / 4, thread);  // row of a tile: this lane has a part of it and of the eighth behind
  int local = first + c % 2 * 8;                                 // the one that it finishes
  unsigned nans = 0;  // logits that this lane finished and that were NaN
  Ring<Shape::stages> tiles{0};      // both rings of the pipeline, as this lane sees them
  Ring<Plan::query_stages> rows{0};  // swizzled
  float held[resident ? next_n : 1][columns / 2];
  char* out[few ? products : 1];  // plain: from this lane's first token on
  int visible[few ? products : 1];
  float written[plain ? products : 1];  // plain: this lane's logits of the tile under way

  KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t weights(int q, int quarter) const {
    return shared + Plan::weights_at + rows.stage * Plan::weight_stage_bytes + quarter * Plan::weight_run + q * 4 * Plan::weight_run;
  }
  /// Tokens of the row that query token q sees.
  KVIRE_DEVICE KVIRE_INLINE int seen_by(int q) const { return static_cast<int>(ptx::load_shared(shared + Plan::visible_at + (rows.stage * next_n + q) * 4)); }
  /// Whether this lane writes what it finishes.
  KVIRE_DEVICE KVIRE_INLINE bool mine() const { return together == 2 || c < 2; }
  KVIRE_DEVICE KVIRE_INLINE int token_of(int product) const { return product * together + (together == 2 ? c / 2 : 0); }
  KVIRE_DEVICE KVIRE_INLINE int score_shift() const { return Plan::options && a.bf16 ? 1 : 2; }
  KVIRE_DEVICE KVIRE_INLINE void take_row() {
#pragma unroll
    for (int i = 0; i < (few ? products : 1); ++i) {
      out[i] = static_cast<char*>(a.logits) + (((static_cast<kstd::int64_t>(row) * next_n + token_of(i)) * a.logits_stride) << score_shift());
      visible[i] = seen_by(token_of(i));
      if constexpr (plain) {  // in terms of a tile's first token; a lane that writes nothing sees nothing
        out[i] += here(local) * 4;
        visible[i] = mine() ? visible[i] - here(local) : 0;
      }
    }
    if constexpr (resident) {
#pragma unroll
      for (int q = 0; q < next_n; ++q) {
        load_weights<Plan>(held[q], weights(q, here(c)));
        if constexpr (Plan::swizzled) {
#pragma unroll
          for (float& w : held[q]) w = mul_exact(0.5F, w);
        }
      }
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
      load_weights<Plan>(w, weights(q, c));
      head_sums<Plan, First>(d, w, low, high);
    }
    return half_sum(low, high, odd != 0);
  }
  /// Writes a logit from the sum over the heads. `product`: of which query tokens; `to`: their scores; `seen`: the tokens that this lane's one sees;
  /// `token`: index of the score; `position`: of the key. Together: of a warp's 16 keys, lanes with c of 2 and 3 write those of the second query token.
  KVIRE_DEVICE KVIRE_INLINE void write(int product, char* to, int seen, int token, unsigned position, float sum, float scale) {
    const bool there = position < static_cast<unsigned>(seen);
    if constexpr (Plan::swizzled && !resident) sum = mul_exact(0.5F, sum);  // of 2 relu
    float logit = Plan::scaled ? mul_exact(sum, scale) : sum;
    if (!there) logit = -__int_as_float(0x7F800000);
    replace_nan(logit, nans);
    if constexpr (Shape::candidates) {
      if (mine() && token < seen) kept.put(token_of(product), token, there ? logit : float_of(nan_bits));
      return;
    }
    if (mine() && token < (listed<Plan>(a) ? listed_scores<Plan>(a) : seen)) {
      if (Plan::options && a.bf16) {
        store_logit(reinterpret_cast<kstd::uint16_t*>(to) + token, logit, a.score_policy);
      } else {
        store_logit(reinterpret_cast<float*>(to) + token, logit, a.score_policy);
      }
    }
    if constexpr (Shape::best) {
      const kstd::uint32_t key = there ? order_key(logit) : 0U;
#pragma unroll
      for (int t = 0; t < together; ++t) {
        const bool of_t = together == 1 || c / 2 == t;
        const kstd::uint32_t best = __reduce_max_sync(~0U, of_t ? key : 0U);
        if (lane == 2 * t && token < seen) {  // lanes with the first token
          const kstd::int64_t at = static_cast<kstd::int64_t>(row) * next_n + token_of(product);
          a.group_best[at * ((a.logits_stride + 15) / 16) + token / 16] = best;
        }
      }
    }
  }
  /// Sums and logits of a product, which is in d. Known: which one, if `few`.
  template <int Known>
  KVIRE_DEVICE KVIRE_INLINE void finish(const Sums& d, int product, const TilePlace& tile, float scale) {
    float sum = sum_token<0, Known * together>(d, product * together);
    if constexpr (together == 2) {  // lanes with c of 0 and 1 finish the first query token, the others the second
      const float second = sum_token<columns, Known * together + 1>(d, product * together + 1);
      sum = add_exact(c >= 2 ? second : sum, __shfl_xor_sync(~0U, c >= 2 ? sum : second, 2));
    } else {
      sum = add_exact(sum, __shfl_xor_sync(~0U, sum, 2));
    }
    if constexpr (plain) {
      written[Known] = fma_exact(sum, scale, tile.missing);
      if (tile.token < visible[Known]) store_logit(reinterpret_cast<float*>(out[Known]) + tile.token, written[Known], a.score_policy);
    } else {
      const int seen = few ? visible[few ? Known : 0] : seen_by(token_of(product));
      char* to = few ? out[few ? Known : 0] : out[0] + (product * together * a.logits_stride << score_shift());
      write(product, to, seen, tile.token, tile.position, sum, scale);
    }
  }
  /// Plain: whether any lane's logits of the tile, or `bits`, want a look.
  KVIRE_DEVICE KVIRE_INLINE bool any_rare_of_tile(kstd::uint32_t bits) const {
    return any_rare(bits, products == 2 ? add_exact(written[0], written[products - 1]) : written[0]);
  }
  /// Plain: NaN becomes -inf, and is counted where there is a page.
  KVIRE_DEVICE KVIRE_INLINE void replace_nans(int token, bool on_page) {
#pragma unroll
    for (int i = 0; i < products; ++i) {
      if (token >= visible[i] || !is_nan_bits(__float_as_uint(written[i]))) continue;
      store_logit(reinterpret_cast<float*>(out[i]) + token, -__int_as_float(0x7F800000), a.score_policy);
      nans += on_page ? 1 : 0;
    }
  }
};

#endif  // KVIRE_SM90A
}  // namespace sm90::detail

KVIRE_NAMESPACE_END
