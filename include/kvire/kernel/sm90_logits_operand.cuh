// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/kernel/ptx/wgmma.cuh>
#include <kvire/kernel/sm90_logits_plan.cuh>

KVIRE_NAMESPACE_BEGIN

/// Operands of the logits' products on Hopper, and the products.
///
/// Tokens are the rows of a product, heads its columns, so that the sum over the heads stays within four lanes. Dot products do not care about the
/// order of k, nor the head sum about the order of heads: the queries are laid out in shared memory so that each lane's operand is the 16 bytes
/// that it can read without bank conflicts, straight from the page as it lies in memory.
namespace sm90::detail {

using ptx::Words4;

#if KVIRE_SM90A

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
  if constexpr (Plan::fp8 && Plan::fp4) {
    ptx::wgmma_e5m2_e4m3(d, keys, b, step != 0);
  } else if constexpr (Plan::fp8) {
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
  for (int j = 0; j < Plan::steps; ++j) multiply_step<Plan>(d, k[j], queries.at(0) + j * 256 / 16, j);  // an addition to at(), of one instruction, not within it
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

#endif  // KVIRE_SM90A
}  // namespace sm90::detail

KVIRE_NAMESPACE_END
