// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

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

  KVIRE_DEVICE KVIRE_INLINE Cursor(const LogitsArguments& a, int lane, sm90::detail::Share share, int warp) : walk(a, lane, share, warp == 0) {
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
  const sm90::detail::Share share = sm90::detail::find_share<Plan>(a, lane, blockIdx.x, gridDim.x);
  detail::Cursor<Plan> cursor(a, lane, share, warp);

  detail::RawKeys<Plan> raw[Plan::tiles];
  detail::Step<Plan> step = cursor.step(warp);
  const auto load = [&] {
#pragma unroll
    for (int i = 0; i < Plan::tiles; ++i) detail::load_raw<P, Plan>(raw[i], a, step.id[i], static_cast<int>(step.position[i] % Plan::tokens), lane);
  };
  load();
  int held = -1;  // the row whose queries are in shared memory
  while (step.tiles > 0) {
    if (step.row != held) {
      __syncthreads();
      detail::load_row<Plan, Heads>(a, step.row, shared, thread);
      __syncthreads();
      held = step.row;
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
      float low[Plan::tiles][2] = {}, high[Plan::tiles][2] = {};
#pragma unroll 1
      for (int n = 0; n < Heads / 8; n += 2) {  // 16 heads at a time: products of several tiles and heads hide each other's latency
        float d[2][Plan::tiles][4] = {};
#pragma unroll
        for (int j = 0; j < Plan::steps; j += 2) {
          detail::Words4 b[2];
#pragma unroll
          for (int m = 0; m < 2; ++m) b[m] = ptx::load_shared4(shared + (((q * (Heads / 8) + n + m) * (Plan::steps / 2) + j / 2) * 32 + lane) * 16);
#pragma unroll
          for (int i = 0; i < Plan::tiles; ++i) {
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              detail::multiply<Plan>(d[m][i], keys[i][j], b[m].x, b[m].y);
            }
          }
#pragma unroll
          for (int i = 0; i < Plan::tiles; ++i) {
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              detail::multiply<Plan>(d[m][i], keys[i][j + 1], b[m].z, b[m].w);
            }
          }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          float w0, w1;
          asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(w0), "=f"(w1) : "r"(shared + Plan::weights_at + (q * Heads + (n + m) * 8 + 2 * c) * 4) : "memory");
#pragma unroll
          for (int i = 0; i < Plan::tiles; ++i) {
            low[i][0] = sm90::detail::fma_exact(sm90::detail::twice_relu(d[m][i][0]), w0, low[i][0]);
            low[i][1] = sm90::detail::fma_exact(sm90::detail::twice_relu(d[m][i][1]), w1, low[i][1]);
            high[i][0] = sm90::detail::fma_exact(sm90::detail::twice_relu(d[m][i][2]), w0, high[i][0]);
            high[i][1] = sm90::detail::fma_exact(sm90::detail::twice_relu(d[m][i][3]), w1, high[i][1]);
          }
        }
      }
      const int visible = static_cast<int>(ptx::load_shared(shared + Plan::visible_at + q * 4));
#pragma unroll
      for (int i = 0; i < Plan::tiles; ++i) {
        const float l = sm90::detail::add_exact(low[i][0], low[i][1]), h = sm90::detail::add_exact(high[i][0], high[i][1]);
        float sum = sm90::detail::add_exact(c % 2 != 0 ? h : l, __shfl_xor_sync(~0U, c % 2 != 0 ? l : h, 1));
        sum = sm90::detail::add_exact(sum, __shfl_xor_sync(~0U, sum, 2));
        const int mine = at.token + i * tile_tokens + local;
        if (c >= 2 || i >= at.tiles || mine >= (sm90::detail::listed<Plan>(a) ? sm90::detail::listed_scores<Plan>(a) : visible)) continue;
        float logit = Plan::scaled ? sm90::detail::mul_exact(sum, factor[i]) : sum;
        if (at.position[i] + local % 16 >= static_cast<unsigned>(visible)) logit = -__int_as_float(0x7F800000);
        if (logit != logit) {
          logit = -__int_as_float(0x7F800000);
          if (a.nan_logits != nullptr) atomicAdd(a.nan_logits, 1ULL);
        }
        sm90::detail::store_score<Plan>(a, (static_cast<kstd::int64_t>(held) * NextN + q) * a.logits_stride + mine, logit);
      }
    }
  }
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
