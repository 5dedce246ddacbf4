// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/logits_math.cuh>
#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/kernel/ptx/wgmma.cuh>
#include <kvire/kernel/sm90_logits_plan.cuh>

KVIRE_NAMESPACE_BEGIN

/// Operands of the logits' products on Hopper and the sums behind them.
///
/// Tokens are the rows of a product, heads its columns, so that the sum over the heads stays within four lanes. Dot products do not care about the
/// order of k, nor the head sum about the order of heads: the queries are laid out in shared memory so that each lane's operand is the 16 bytes
/// that it can read without bank conflicts, straight from the page as it lies in memory.
namespace sm90::detail {

using ptx::Words4;

#if KVIRE_SM90A

/// Brings the queries of `row` to shared memory, in the order the products want, and half of their weights; one warpgroup.
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
        ptx::tensor_load5(shared + Plan::queries_at + stage * Plan::query_stage_bytes + x / Plan::query_width * Plan::query_plane_bytes + q * Heads * Plan::query_width, map, x,
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
  if constexpr (Plan::fp4) return (warp * 16 + g) * Plan::key_row + c * (Plan::key_row / 4);
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

/// The queries that start at `at` in shared memory as operand B.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE ptx::Descriptor query_operand(kstd::uint32_t at) {
  if constexpr (Plan::swizzled) return ptx::swizzled_descriptor<Plan::query_width>(at);
  return ptx::core_descriptor(at, 128, 2 * Plan::steps * 128);
}
template <class Plan, int Columns, class Keys>
KVIRE_DEVICE KVIRE_INLINE void multiply_step(float (&d)[Columns], const Keys& keys, kstd::uint64_t b, int step) {
  if constexpr (Plan::fp8) {
    ptx::wgmma_e4m3(d, keys, b, step != 0);
  } else {
    ptx::wgmma_bf16(d, keys, b, step != 0);
  }
}
/// Keys as operand A complete, before start_product's fence: otherwise the compiler adds fences of its own.
template <int Steps>
KVIRE_DEVICE KVIRE_INLINE void complete(kstd::uint32_t (&k)[Steps][4]) {
#pragma unroll
  for (int j = 0; j < Steps; ++j) asm volatile("" : "+r"(k[j][0]), "+r"(k[j][1]), "+r"(k[j][2]), "+r"(k[j][3]));
}
/// Starts the product of the tile in `k` with as many queries as d has columns for.
template <class Plan, int Columns>
KVIRE_DEVICE KVIRE_INLINE void start_product(float (&d)[Columns], const kstd::uint32_t (&k)[Plan::steps][4], ptx::Descriptor queries) {
  ptx::wgmma_fence();
#pragma unroll
  for (int j = 0; j < Plan::steps; ++j) multiply_step<Plan>(d, k[j], queries.at(j * 256), j);
  ptx::wgmma_commit();
}
/// The same of a swizzled tile in shared memory.
template <class Plan, int Columns>
KVIRE_DEVICE KVIRE_INLINE void start_product(float (&d)[Columns], ptx::Descriptor tile, ptx::Descriptor queries) {
  ptx::wgmma_fence();
#pragma unroll
  for (int j = 0; j < Plan::steps; ++j) {
    multiply_step<Plan>(d, tile.at(j * 32 / Plan::width * Plan::plane_bytes + j * 32 % Plan::width),
                        queries.at(j * 32 / Plan::query_width * Plan::query_plane_bytes + j * 32 % Plan::query_width), j);
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

#endif  // KVIRE_SM90A
}  // namespace sm90::detail

KVIRE_NAMESPACE_END
