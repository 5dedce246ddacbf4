// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <kvire/kernel/cuda/launch.cuh>
#include <kvire/kernel/sm90_logits_consumer.cuh>
#include <kvire/kernel/sm90_logits_producer.cuh>

KVIRE_NAMESPACE_BEGIN

/// Paged sparse logits for Hopper: logit[b,t,s] = k_scale[s] * sum over heads of w[b,t,h] * relu(q[b,t,h] . k[s]).
///
/// How it works. The pages of all rows, cut into tiles of 64 tokens, form one list; each CTA, or each unit of a CTA, takes a contiguous share of it, found
/// from the lengths inside the kernel. One warp brings tiles to shared memory by bulk copies through a ring of mbarriers; a warpgroup multiplies each tile by the queries
/// and writes 64 logits for each query token. A tile is an operand in shared memory, brought there by tensor copies with a swizzle, or goes to registers
/// (and frees its stage at once); then no tensor map is needed, so any page stride that is a multiple of 16 bytes will do.
///
/// This header is the kernel and its launch. Its parts, in the order of a tile's way: logits_tile_scheduler (which tiles are a CTA's), logits_page_walk (on which
/// pages they are), sm90_logits_producer (to shared memory), sm90_logits_pipeline (who waits for whom), sm90_logits_operand and fp4_operand (to registers, and the
/// product), sm90_logits_consumer (the loop over them), sm90_logits_epilogue (from the product to the logits), fp4_exact_logits (what
/// operands do not hold). sm90_logits_plan says what lies where.
namespace sm90 {

namespace detail {

/// Registers of a thread: those that the warps of Shape::ctas_per_sm CTAs on a scheduler have, 16 Ki in all. Where CTAs are joined, 1 Ki of them are left to a warp
/// of another kernel: a block of a transfer with one on each scheduler fits beside them.
template <class Shape>
inline constexpr int most_registers = [] {
  constexpr int warps = (Shape::ctas_per_sm * unit_threads / 32 + 3) / 4;
  constexpr int most = (most_units<Shape> > 1 ? 15 : 16) * 1024 / (warps * 32);
  return most > 255 ? 255 : most / 8 * 8;
}();

}  // namespace detail

/// Traps unless compiled for sm_90a. Grid: any number of CTAs; block: unit_threads; dynamic shared memory: Plan::shared_bytes. If Shape::joined_from
/// is not 0, also up to Shape::ctas_per_sm times as many threads, with Plan::unit_pitch more shared memory for each further unit.
template <class P, Element Query, int Heads, int NextN, class Shape>
__global__ void __maxnreg__(detail::most_registers<Shape>)
    logits_kernel(const __grid_constant__ LogitsArguments a, const __grid_constant__ TensorMap keys, const __grid_constant__ TensorMap queries) {
#if KVIRE_SM90A
  using Plan = LogitsPlan<P, Query, Heads, NextN, Shape>;
  extern __shared__ __align__(1024) unsigned char memory[];
  constexpr int group_warps = group_threads / 32, most = detail::most_units<Shape>;
  const int units = most > 1 ? static_cast<int>(blockDim.x) / unit_threads : 1;
  const int warp = __shfl_sync(~0U, static_cast<int>(threadIdx.x) / 32, 0);
  const bool produces = warp >= units * group_warps;
  const int unit = most == 1 ? 0 : produces ? warp - units * group_warps : warp / group_warps;
  const int thread = static_cast<int>(threadIdx.x) - unit * group_threads, lane = thread % 32;  // of a consumer
  const unsigned index = static_cast<unsigned>(unit) * gridDim.x + blockIdx.x, count = static_cast<unsigned>(units) * gridDim.x;  // of the share
  const kstd::uint32_t shared = detail::keep(ptx::shared_address(memory) + unit * Plan::unit_pitch, lane);
  constexpr bool selected_from = Shape::candidates;  // by a kernel that reads the lengths as soon as it starts
  if constexpr (!selected_from) ptx::launch_dependents();
  // Where this CTA's share would start were all rows as long as the table is wide: what lies there is read while the lengths are on their way.
  const int width = detail::tiles_of(detail::most_scores<Plan>(a));
  int begin, size;
  detail::split(static_cast<unsigned>(width) * static_cast<unsigned>(a.batch), index, count, begin, size);
  const int guess = begin / width < a.batch ? begin / width : 0;

  if (produces) {
    if constexpr (Plan::swizzled) {
      ptx::prefetch_tensor_map(&keys);
      ptx::prefetch_tensor_map(&queries);
    }
    detail::init_pipeline<Plan, Shape>(shared, lane);
    detail::unit_barrier<most>(unit, 2, unit_threads, false);
    detail::LaneRows<Plan> rows(a, lane);
    ptx::wait_for_earlier_grids();
    if constexpr (selected_from) ptx::launch_dependents();
    rows.ask();
    const detail::Guess<Plan> ids(a, lane, guess, begin - guess * width);
    detail::Producer<Plan, Heads, Shape> producer{a, keys, queries, shared, lane};
    if constexpr (Plan::swizzled) detail::bring_row<Plan, Heads>(a, &queries, guess, shared, 0, lane);
    detail::Walk<Plan> walk(a, lane, true, guess);
    producer.run(ids, walk, detail::find_share<Plan>(a, rows, lane, index, count));
  } else {
    ptx::wait_for_earlier_grids();
    if constexpr (selected_from) ptx::launch_dependents();
    // Warms L2: the whole page table, line by line over all CTAs.
    const kstd::int64_t lines = (a.table_stride * a.batch * 4 + 127) / 128;
    const kstd::int64_t line = static_cast<kstd::int64_t>(index) * group_threads + thread;
    if (line < lines) ptx::prefetch_l2(reinterpret_cast<const char*>(a.page_table) + line * 128);
    if constexpr (Plan::fp4 && Plan::fp8) {
      if (thread < Plan::fp4_codes) detail::make_codes<Plan>(shared + Plan::codes_at, thread);
    }
    detail::Share share;
    const auto find = [&] {
      detail::LaneRows<Plan> rows(a, lane);
      rows.ask();
      share = detail::find_share<Plan>(a, rows, lane, index, count);
    };
    if constexpr (Plan::swizzled) {
      find();
    } else {
      detail::load_row<Plan, Heads>(a, guess, shared, thread, find);
      // Where lengths differ; each thread writes where it has written.
      if (share.tiles > 0 && share.row != guess) detail::load_row<Plan, Heads>(a, share.row, shared, thread, [] {});
    }
    detail::unit_barrier<most>(unit, 2, unit_threads);
    if (share.tiles == 0) return;
    if constexpr (Shape::candidates) {
      auto& kept = *reinterpret_cast<detail::KeptScoresMemory<Plan::kept, NextN>*>(memory + Plan::kept_at);
      detail::Consumer<P, Plan, Heads, Shape>{{a, share.row, shared, thread, {a.candidates, kept, a.candidates.whole(share.each), thread}}, unit}.run(share.tiles);
    } else {
      detail::Consumer<P, Plan, Heads, Shape>{{a, share.row, shared, thread, {}}, unit}.run(share.tiles);
    }
  }
#else
  (void)a, (void)keys, (void)queries;
  __trap();
#endif
}

namespace detail {

/// Tiles that the table, or the lists of blocks, have room for.
template <class P>
kstd::int64_t most_tiles(const LogitsArguments& a) {
  const kstd::int64_t scores = (a.blocks != nullptr ? a.max_blocks : a.table_width) * P::tokens_per_page;  // of a row, at most
  return a.batch * ((scores + tile_tokens - 1) / tile_tokens);
}

}  // namespace detail

/// Whether there are KeepCandidates kernels of these pages: not of fp4 keys, some of whose scores are mended when they have been written.
template <class P, int NextN>
constexpr bool keeps_candidates() {
  return NextN <= 2 && P::template element_of<role::Value> != Element::e2m1;
}

/// Shares that launch_logits makes, one for a CTA or for a unit of joined ones: at most `sms` times Shape::ctas_per_sm; fewer where the table cannot hold
/// as many tiles.
template <class P, class Shape>
kstd::int64_t logits_ctas(const LogitsArguments& a, int sms) {
  const kstd::int64_t most = detail::most_tiles<P>(a);
  const kstd::int64_t fits = static_cast<kstd::int64_t>(sms) * Shape::ctas_per_sm;
  return most < fits ? most : fits;
}

/// Launches the kernel on `stream` with at most `sms` times Shape::ctas_per_sm CTAs, fewer where the table cannot hold as many tiles, or, from
/// Shape::joined_from tiles a share on, with `sms` of Shape::ctas_per_sm units each.
/// `overlap`: programmatic dependent launch. The kernel may then start while the stream's earlier kernel ends; it waits for that one before
/// it reads anything.
template <class P, Element Query, int Heads, int NextN, class Shape = DefaultLogitsShape<P, Query, Heads, NextN>>
cudaError_t launch_logits(const LogitsArguments& a, int sms, cudaStream_t stream, bool overlap = false) {
  static_assert(require_reader<P, LogitsReader>());
  using Plan = LogitsPlan<P, Query, Heads, NextN, Shape>;
  auto* kernel = &logits_kernel<P, Query, Heads, NextN, Shape>;
  const kstd::int64_t tiles = detail::most_tiles<P>(a);
  if (tiles <= 0 || a.logits_stride <= 0) return cudaSuccess;
  if (!Shape::options && (a.bf16 || a.blocks != nullptr)) return cudaErrorInvalidValue;
  kstd::int64_t ctas = logits_ctas<P, Shape>(a, sms);
  int units = 1;
  if (detail::most_units<Shape> > 1 && tiles >= ctas * Shape::joined_from) {
    units = detail::most_units<Shape>;
    ctas = sms;
  }
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Plan::most_shared_bytes);
  if (error != cudaSuccess) return error;
  TensorMap keys{}, queries{};
  if constexpr (Plan::swizzled) {
    if (const cudaError_t e = detail::make_key_map<Plan>(keys, a); e != cudaSuccess) return e;
    if (const cudaError_t e = detail::make_query_map<Plan, Heads>(queries, a); e != cudaSuccess) return e;
  }
  const auto shared_bytes = static_cast<std::size_t>((units - 1) * Plan::unit_pitch + Plan::shared_bytes);
  return kvire::detail::launch_kernel(kernel, {ctas, units * unit_threads, shared_bytes, overlap}, stream, a, keys, queries);
}

}  // namespace sm90

KVIRE_NAMESPACE_END
