// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include <kvire/kernel/cuda/launch.cuh>
#include <kvire/kernel/sm90_logits_operand.cuh>
#include <kvire/kernel/sm90_prefill_load.cuh>

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

#if KVIRE_SM90A
namespace detail {

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

}  // namespace detail
#endif  // KVIRE_SM90A

/// Traps unless compiled for sm_90a. Grid: any number of CTAs; block: Shape::threads; dynamic shared memory: Plan::shared_bytes.
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
