// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/kernel/sm90_logits_plan.cuh>

KVIRE_NAMESPACE_BEGIN

/// The queries of a row on their way to shared memory, with their weights and how many tokens each of them sees: by the warpgroup that multiplies by them, which
/// puts them into the order of its operands, or, for swizzled keys, by tensor copies of the producer warp.
namespace sm90::detail {

using ptx::Words4;

#if KVIRE_SM90A

/// Has the queries of a row brought to L2 by `count` threads.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE void prefetch_queries(const LogitsArguments& a, int row, int thread, int count) {
  constexpr int bytes = Plan::next_n * Plan::query_bytes;
  const char* queries = static_cast<const char*>(a.queries) + static_cast<kstd::int64_t>(row) * bytes;
  for (int i = thread * 128; i < bytes; i += count * 128) ptx::prefetch_l2(queries + i);
}

/// Brings the queries of `row` to shared memory, in the order the products want, and half of their weights; one warpgroup. `meanwhile`: called while
/// they are on their way.
template <class Plan, int Heads, class Meanwhile>
KVIRE_DEVICE KVIRE_INLINE void load_row(const LogitsArguments& a, int row, kstd::uint32_t shared, int thread, Meanwhile&& meanwhile) {
  constexpr int chunks = Plan::query_row / 16;
  constexpr int each = Heads * chunks / group_threads;
  const kstd::int64_t first = static_cast<kstd::int64_t>(row) * Plan::next_n;
  float w[(Plan::next_n * Heads + group_threads - 1) / group_threads];
#pragma unroll
  for (int i = 0; i * group_threads < Plan::next_n * Heads; ++i) {
    const int at = i * group_threads + thread;
    w[i] = at < Plan::next_n * Heads ? a.weights[first * Heads + at] : 0.0F;
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
    if (q == 0) meanwhile();
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int at = i * group_threads + thread;
      const int c = at % 4, r = at / 4 % 8, n = at / 32 % (Heads / 8), k = at / (4 * Heads);
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

/// The same by tensor copies, and the weights as they are, to a stage that is free; one warp. The map says in which order heads are. The stage is full when
/// announce_row has been called, too.
template <class Plan, int Heads>
KVIRE_DEVICE KVIRE_INLINE void bring_row(const LogitsArguments& a, const void* map, int row, kstd::uint32_t shared, int stage, int lane) {
  const kstd::uint32_t full = shared + Plan::query_full_at + stage * 8;
  const kstd::int64_t first = static_cast<kstd::int64_t>(row) * Plan::next_n;
  if (ptx::elect()) {
#pragma unroll 1
    for (int q = 0; q < Plan::next_n; ++q) {
#pragma unroll
      for (int x = 0; x < Plan::query_row; x += Plan::query_width) {
        ptx::tensor_load(shared + Plan::queries_at + stage * Plan::query_stage_bytes + x / Plan::query_width * Plan::query_plane_bytes + q * Heads * Plan::query_width, map, x, 0,
                         static_cast<int>(first) + q, full);
      }
    }
  }
  for (int i = lane; i < Plan::next_n * 4; i += 32) {  // bytes of a lane's heads: as many as there are heads
    ptx::bulk_load(shared + Plan::weights_at + stage * Plan::weight_stage_bytes + i * Plan::weight_run, a.weights + first * Heads + i * (Heads / 4), Heads, full);
  }
  __syncwarp();
}
/// Says whose queries a stage gets, and how much of the row they see.
template <class Plan, int Heads>
KVIRE_DEVICE KVIRE_INLINE void announce_row(const LogitsArguments& a, int row, kstd::uint32_t shared, int stage, int lane) {
  const kstd::uint32_t full = shared + Plan::query_full_at + stage * 8;
  for (int q = lane; q < Plan::next_n; q += 32) {
    ptx::store_shared(shared + Plan::visible_at + (stage * Plan::next_n + q) * 4, static_cast<kstd::uint32_t>(visible_tokens<Plan>(a, row, q)));
  }
  if (lane == 0) {
    ptx::store_shared(shared + Plan::rows_at + stage * 4, static_cast<kstd::uint32_t>(row));
    ptx::mbarrier_arrive_expect(full, Plan::query_stage_bytes + Plan::next_n * 4 * Heads);
  } else {
    ptx::mbarrier_arrive(full);
  }
  __syncwarp();
}

#endif  // KVIRE_SM90A
}  // namespace sm90::detail

KVIRE_NAMESPACE_END
