// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <kvire/kernel/logits_page_walk.cuh>
#include <kvire/kernel/sm80_logits_operand.cuh>

KVIRE_NAMESPACE_BEGIN

/// Paged sparse logits for every GPU from sm_80 on: the same arithmetic and the same cut into tiles as the Hopper kernel, but keys go straight
/// from global memory to registers, a tile or two ahead, and products are warp-wide mma of 16-bit elements. fp8 keys become f16, fp4 keys bf16;
/// both are exact. Planar pages only.
namespace sm80 {

using sm90::tile_tokens;

/// What the kernel asks of a page: rows that can be read 16 bytes at a time.
struct LogitsReader {
  static constexpr ReaderNeeds needs{.page_multiple = 16, .vector_bytes = 0, .least_tokens = 32, .most_tokens = 128};
};

template <class P, Element Query, int Heads, int NextN, int Tiles, int Ctas>
struct LogitsPlan : sm90::LogitsPlan<P, Query, Heads, NextN, sm90::LogitsShape<2, 1>> {
  using Base = sm90::LogitsPlan<P, Query, Heads, NextN, sm90::LogitsShape<2, 1>>;
  static constexpr bool f16 = Base::key == Element::e4m3;  // operand elements; otherwise bf16
  static constexpr int steps = Base::dim / 16;
  static constexpr int tiles = Tiles;  // in hand at a time
  static constexpr bool options = true;
  static constexpr int raw = Base::key_row / 16;                     // words of a lane and key
  static constexpr int threads = 128;
  static constexpr int ctas_per_sm = Ctas;
  static constexpr int fragments = NextN * Heads * Base::dim * 2;
  static constexpr int weights_at = fragments;
  static constexpr int visible_at = weights_at + NextN * Heads * 4;
  static constexpr int shared_bytes = visible_at + (NextN + 3) / 4 * 16;
  static_assert(require_tuning<LogitsPlan, Tiles == 1 || Tiles == 2>());
  static_assert(require_tuning<LogitsPlan, !Base::interleaved && (Base::fp4 || Base::fp8 == (Base::key == Element::e4m3))>());
};

namespace detail {

/// Tiles of one row that follow each other.
template <class Plan>
struct Step {
  int row = 0;
  int token = 0;  // index of the first tile's first score
  int tiles = 0;
  int id[Plan::tiles];             // page of a warp's 16 tokens, where there is one
  unsigned position[Plan::tiles];  // the first of them in the row; sm90::detail::nowhere and more where there is none

  KVIRE_DEVICE KVIRE_INLINE Step() {
#pragma unroll
    for (int i = 0; i < Plan::tiles; ++i) {
      id[i] = -1;
      position[i] = sm90::detail::nowhere;
    }
  }
};

/// Steps through the share, `Plan::tiles` tiles of one row at a time; every warp of the CTA in the same steps.
template <class Plan>
struct Cursor {
  sm90::detail::Walk<Plan> walk;
  sm90::detail::Segment<Plan> now, next;
  bool more, after;
  int t = 0;

  KVIRE_DEVICE KVIRE_INLINE Cursor(const LogitsArguments& a, int lane, sm90::detail::Share share, int warp) : walk(a, lane, warp == 0, share.tiles > 0 ? share.row : 0) {
    walk.start(share);
    more = walk.next(now);
    walk.check(now);
    after = more && walk.next(next);
  }
  /// The next tiles as far as this warp's 16 tokens of each are concerned; none if `tiles` is 0.
  KVIRE_DEVICE KVIRE_INLINE Step<Plan> step(int warp) {
    Step<Plan> s;
    if (!more) return s;
    constexpr int rows = tile_tokens / Plan::pages_per_tile;  // of a tile on one page
    s.row = now.row;
    s.token = (now.tile + t) * tile_tokens;
    s.tiles = now.tiles - t < Plan::tiles ? now.tiles - t : Plan::tiles;
#pragma unroll
    for (int i = 0; i < Plan::tiles; ++i) {
#pragma unroll
      for (int p = 0; p < Plan::pages_per_tile; ++p) {
        const int from = t + i < 32 ? t + i : 31;
        const int id = __shfl_sync(~0U, now.id[p], from);
        const unsigned position = __shfl_sync(~0U, now.position[p], from);
        if (i < s.tiles && warp * 16 / rows == p) {
          s.id[i] = id;
          s.position[i] = position + warp * 16 % rows;
        }
      }
    }
    t += Plan::tiles;
    if (t >= now.tiles) {
      t = 0;
      now = next;
      more = after;
      if (more) walk.check(now);
      after = more && walk.next(next);
    }
    return s;
  }
};

/// Weighted relu sums of query token `q` over the heads that this lane has, for rows g and g + 8 of each tile in `keys`; two heads of each eight.
///
/// 16 heads at a time: products of several tiles and heads hide each other's latency, and the sums of one group stand among the products of the next.
template <class Plan, int Heads>
KVIRE_DEVICE KVIRE_INLINE void head_sums(float (&low)[Plan::tiles], float (&high)[Plan::tiles], const kstd::uint32_t (&keys)[Plan::tiles][Plan::steps][4],
                                         kstd::uint32_t shared, int q, int lane) {
  constexpr int groups = Heads / 16, pairs = 2 * Plan::tiles, parts = Plan::steps / 2;
  const kstd::uint32_t queries = shared + (q * (Heads / 8) * parts * 32 + lane) * 16;
  const kstd::uint32_t weights = shared + Plan::weights_at + (q * Heads + lane % 4 * 2) * 4;
  float sum[Plan::tiles][4] = {};
  float d[2][pairs][4];  // of this group of heads and of the last one: tile i, 8 heads m at m * tiles + i
  float w[2][2][2];
#pragma unroll
  for (int n = 0; n <= groups; ++n) {
    float(&products)[pairs][4] = d[n % 2];
    if (n < groups) {
#pragma unroll
      for (int m = 0; m < 2; ++m) load_weight_pair(w[n % 2][m], weights + (2 * n + m) * 32);
#pragma unroll
      for (int p = 0; p < pairs; ++p) products[p][0] = products[p][1] = products[p][2] = products[p][3] = 0;
    }
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      if (n < groups) {
        Words4 b[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) b[m] = ptx::load_shared4(queries + ((2 * n + m) * parts + part) * 512);
#pragma unroll
        for (int i = 0; i < Plan::tiles; ++i) {
#pragma unroll
          for (int m = 0; m < 2; ++m) multiply<Plan>(products[m * Plan::tiles + i], keys[i][2 * part], b[m].x, b[m].y);
        }
#pragma unroll
        for (int i = 0; i < Plan::tiles; ++i) {
#pragma unroll
          for (int m = 0; m < 2; ++m) multiply<Plan>(products[m * Plan::tiles + i], keys[i][2 * part + 1], b[m].z, b[m].w);
        }
      }
      if (n > 0) {
#pragma unroll
        for (int p = part * pairs / parts; p < (part + 1) * pairs / parts; ++p) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& s = sum[p % Plan::tiles][e];
            s = sm90::detail::fma_exact(sm90::detail::twice_relu(d[(n + 1) % 2][p][e]), w[(n + 1) % 2][p / Plan::tiles][e % 2], s);
          }
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Plan::tiles; ++i) {
    low[i] = sm90::detail::add_exact(sum[i][0], sum[i][1]);
    high[i] = sm90::detail::add_exact(sum[i][2], sum[i][3]);
  }
}

}  // namespace detail

/// Grid: any number of CTAs; block: 128 threads; dynamic shared memory: Plan::shared_bytes.
template <class P, Element Query, int Heads, int NextN, int Tiles, int Ctas>
__global__ void __launch_bounds__(128, Ctas) logits_kernel(const __grid_constant__ LogitsArguments a) {
#if KVIRE_DEVICE_ARCH >= 800
  using Plan = LogitsPlan<P, Query, Heads, NextN, Tiles, Ctas>;
  extern __shared__ __align__(128) unsigned char memory[];
  const kstd::uint32_t shared = ptx::shared_address(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32, lane = thread % 32, c = lane % 4;
  const int local = warp * 16 + lane / 4 + c % 2 * 8;  // the token of a tile that this lane finishes
  sm90::detail::LaneRows<Plan> rows(a, lane);
  rows.ask();
  const sm90::detail::Share share = sm90::detail::find_share<Plan>(a, rows, lane, blockIdx.x, gridDim.x);
  detail::Cursor<Plan> cursor(a, lane, share, warp);

  detail::RawKeys<Plan> raw[Plan::tiles] = {};
  detail::Step<Plan> step = cursor.step(warp);
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < Plan::tiles; ++i) detail::load_raw<P, Plan>(raw[i], a, step.id[i], step.position[i] % Plan::tokens, lane);
  };
  load();
  int held = -1;  // the row whose queries are in shared memory
  char* out = nullptr;  // its scores
  const int shift = a.bf16 ? 1 : 2;
  unsigned nans = 0;  // logits that this lane finished and that were NaN
  while (step.tiles > 0) {
    if (step.row != held) {
      __syncthreads();
      detail::load_row<Plan, Heads>(a, step.row, shared, sm90::detail::here(thread));
      __syncthreads();
      held = step.row;
      out = static_cast<char*>(a.logits) + (static_cast<kstd::int64_t>(held) * NextN * a.logits_stride << shift);
    }
    kstd::uint32_t keys[Plan::tiles][Plan::steps][4];
    float factor[Plan::tiles];
#pragma unroll
    for (int i = 0; i < Plan::tiles; ++i) factor[i] = detail::make_operand<Plan>(keys[i], raw[i], lane);
    const detail::Step<Plan> at = step;
    step = cursor.step(warp);
    if (step.tiles > 0) load();
#pragma unroll 1
    for (int q = 0; q < NextN; ++q) {
      float low[Plan::tiles], high[Plan::tiles];  // of a quarter of the heads, for the keys of rows g and g + 8
      detail::head_sums<Plan, Heads>(low, high, keys, shared, q, lane);
      const int visible = static_cast<int>(ptx::load_shared(shared + Plan::visible_at + q * 4));
      // Of a quad, lanes with c of 0 and 1 finish the first tile and the others, if there is one, the second.
      const int mine = Plan::tiles == 2 ? c / 2 : 0;
      float l = low[0], h = high[0];
      if constexpr (Plan::tiles == 2) {
        l = sm90::detail::add_exact(mine == 0 ? l : low[1], __shfl_xor_sync(~0U, mine == 0 ? low[1] : l, 2));
        h = sm90::detail::add_exact(mine == 0 ? h : high[1], __shfl_xor_sync(~0U, mine == 0 ? high[1] : h, 2));
      }
      float logit = sm90::detail::add_exact(c % 2 != 0 ? h : l, __shfl_xor_sync(~0U, c % 2 != 0 ? l : h, 1));
      if constexpr (Plan::tiles == 1) logit = sm90::detail::add_exact(logit, __shfl_xor_sync(~0U, logit, 2));
      const int token = at.token + mine * tile_tokens + local;
      const bool writes = mine < at.tiles && (Plan::tiles == 2 || c < 2) && token < (sm90::detail::listed<Plan>(a) ? sm90::detail::listed_scores<Plan>(a) : visible);
      if constexpr (Plan::scaled) logit = sm90::detail::mul_exact(logit, Plan::tiles == 2 && mine != 0 ? factor[Plan::tiles - 1] : factor[0]);
      const unsigned position = Plan::tiles == 2 && mine != 0 ? at.position[Plan::tiles - 1] : at.position[0];
      if (!writes || position + local % 16 >= static_cast<unsigned>(visible)) logit = -__int_as_float(0x7F800000);
      sm90::detail::replace_nan(logit, nans);
      char* to = out + (q * a.logits_stride << shift);
      if (!writes) continue;
      if (a.bf16) {
        sm90::detail::store_logit(reinterpret_cast<kstd::uint16_t*>(to) + token, logit, a.score_policy);
      } else {
        sm90::detail::store_logit(reinterpret_cast<float*>(to) + token, logit, a.score_policy);
      }
    }
  }
  if (nans != 0 && a.nan_logits != nullptr) atomicAdd(a.nan_logits, static_cast<unsigned long long>(nans));
#else
  (void)a;
  __trap();
#endif
}

template <class P>
inline constexpr int default_tiles = P::template element_of<role::Value> == Element::bf16 ? 1 : 2;
template <class P>
inline constexpr int default_ctas = P::template element_of<role::Value> == Element::bf16 ? 3 : 2;

/// Dynamic shared memory of a CTA of the default shape, bytes.
template <class P, Element Query, int Heads, int NextN>
inline constexpr int shared_bytes = LogitsPlan<P, Query, Heads, NextN, default_tiles<P>, default_ctas<P>>::shared_bytes;

/// Launches the kernel on `stream`, with at most `sms` times Ctas CTAs. Tiles: of 64 tokens, in hand at a time; Ctas: that share an SM.
template <class P, Element Query, int Heads, int NextN, int Tiles = default_tiles<P>, int Ctas = default_ctas<P>>
cudaError_t launch_logits(const LogitsArguments& a, int sms, cudaStream_t stream) {
  static_assert(require_reader<P, LogitsReader>());
  using Plan = LogitsPlan<P, Query, Heads, NextN, Tiles, Ctas>;
  auto* kernel = &logits_kernel<P, Query, Heads, NextN, Tiles, Ctas>;
  const kstd::int64_t scores = (a.blocks != nullptr ? a.max_blocks : a.table_width) * Plan::tokens;  // of a row, at most
  if (a.batch <= 0 || scores <= 0 || a.logits_stride <= 0) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Plan::shared_bytes);
  if (error != cudaSuccess) return error;
  const kstd::int64_t most = a.batch * ((scores + tile_tokens - 1) / tile_tokens);
  const kstd::int64_t fits = static_cast<kstd::int64_t>(sms) * Plan::ctas_per_sm;
  kernel<<<static_cast<unsigned>(most < fits ? most : fits), Plan::threads, Plan::shared_bytes, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace sm80

KVIRE_NAMESPACE_END
