// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/float_bits.hpp>
#include <kvire/kernel/logits_math.cuh>
#include <kvire/kernel/ptx/barrier.cuh>
#include <kvire/kernel/sm90_logits_plan.cuh>

KVIRE_NAMESPACE_BEGIN

/// Keys and queries as operands of warp-wide mma of 16-bit elements, for the portable logits kernel. `Plan`: sm80::LogitsPlan.
namespace sm80 {

using sm90::LogitsArguments;

namespace detail {

using ptx::Words4;
using sm90::detail::permute;

KVIRE_DEVICE KVIRE_INLINE void mma_f16(float (&d)[4], const kstd::uint32_t (&a)[4], kstd::uint32_t b0, kstd::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
KVIRE_DEVICE KVIRE_INLINE void mma_bf16(float (&d)[4], const kstd::uint32_t (&a)[4], kstd::uint32_t b0, kstd::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <class Plan>
KVIRE_DEVICE KVIRE_INLINE void multiply(float (&d)[4], const kstd::uint32_t (&a)[4], kstd::uint32_t b0, kstd::uint32_t b1) {
  if constexpr (Plan::f16) {
    mma_f16(d, a, b0, b1);
  } else {
    mma_bf16(d, a, b0, b1);
  }
}

/// Two weights that follow each other in shared memory.
KVIRE_DEVICE KVIRE_INLINE void load_weight_pair(float (&w)[2], kstd::uint32_t at) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(w[0]), "=f"(w[1]) : "r"(at) : "memory");
}

/// Four e4m3 codes as two pairs of f16; exact, NaN stays NaN.
KVIRE_DEVICE KVIRE_INLINE void f16_from_e4m3(kstd::uint32_t codes, kstd::uint32_t& low, kstd::uint32_t& high) {
#if KVIRE_SM89_UP
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}" : "=r"(low), "=r"(high) : "r"(codes));
#else
  kstd::uint32_t* const to[2] = {&low, &high};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const kstd::uint32_t spread = permute(codes, 0, half == 0 ? 0x1404 : 0x3424);  // codes to bytes 1 and 3
    const kstd::uint32_t bits = (spread & 0x80008000U) | ((spread & 0x7F007F00U) >> 1);
    kstd::uint32_t d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(bits), "r"(0x5C005C00U));  // times 2^8
    if ((spread & 0x7F00U) == 0x7F00U) d |= 0x7FFFU;
    if ((spread & 0x7F000000U) == 0x7F000000U) d |= 0x7FFF0000U;
    *to[half] = d;
  }
#endif
}
/// One e4m3 code as bf16; exact.
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t bf16_from_e4m3_code(kstd::uint32_t code) {
  const float x = f32_from_e4m3(static_cast<kstd::uint8_t>(code));
  return __float_as_uint(x) >> 16;
}

/// Queries of `row` as operand B, weights and visible lengths, by the whole CTA. Fragment (q, 8 heads, two k steps): 16 bytes a lane.
template <class Plan, int Heads>
KVIRE_DEVICE KVIRE_INLINE void load_row(const LogitsArguments& a, int row, kstd::uint32_t shared, int thread) {
  constexpr int per_chunk = Plan::fp8 ? 16 : 8;  // elements of 16 bytes of a query
  constexpr int chunks = Plan::dim / per_chunk;
  constexpr int all = Plan::next_n * Heads * chunks;
  const char* from = static_cast<const char*>(a.queries) + static_cast<kstd::int64_t>(row) * Plan::next_n * Plan::query_bytes;
#pragma unroll 2
  for (int at = thread; at < all; at += Plan::threads) {
    const int chunk = at % chunks, head = at / chunks % Heads, q = at / (chunks * Heads);
    const Words4 v = ptx::load_global4(from + static_cast<kstd::int64_t>(q * Heads + head) * Plan::query_row + chunk * 16);
    const kstd::uint32_t in[4] = {v.x, v.y, v.z, v.w};
    [[maybe_unused]] kstd::uint32_t pair[8];
    if constexpr (Plan::fp8 && Plan::f16) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f16_from_e4m3(in[i], pair[2 * i], pair[2 * i + 1]);
    }
    kstd::uint32_t code[per_chunk];  // 16-bit operands
#pragma unroll
    for (int i = 0; i < per_chunk; ++i) {
      if constexpr (!Plan::fp8) {
        code[i] = in[i / 2] >> i % 2 * 16 & 0xFFFFU;
      } else if constexpr (Plan::f16) {
        code[i] = pair[i / 2] >> i % 2 * 16 & 0xFFFFU;
      } else {
        code[i] = bf16_from_e4m3_code(in[i / 4] >> i % 4 * 8 & 0xFFU);
      }
    }
#pragma unroll
    for (int part = 0; part < per_chunk / 4; ++part) {
      int c, j, e[4];
      if constexpr (Plan::fp4) {
        // lane c owns elements c dim/4 and on; words of 8: pairs (r, r + 4)
        const int first = chunk * per_chunk + part / 2 * 8;
        c = first / (Plan::dim / 4);
        const int u = first % (Plan::dim / 4) / 8, r = part % 2 * 2;
        j = 2 * u + part % 2;
        const int base = part / 2 * 8;
        e[0] = base + r, e[1] = base + r + 4, e[2] = base + r + 1, e[3] = base + r + 5;
      } else {
        constexpr int key_chunk = Plan::f16 ? 16 : 8;  // elements of 16 bytes of a key
        c = chunk % 4;
        j = chunk / 4 * (key_chunk / 4) + part;
#pragma unroll
        for (int i = 0; i < 4; ++i) e[i] = part * 4 + i;
      }
      const kstd::uint32_t to = shared + (((q * (Heads / 8) + head / 8) * (Plan::steps / 2) + j / 2) * 32 + head % 8 * 4 + c) * 16 + j % 2 * 8;
      ptx::store_shared(to, code[e[0]] | code[e[1]] << 16);
      ptx::store_shared(to + 4, code[e[2]] | code[e[3]] << 16);
    }
  }
  for (int i = thread; i < Plan::next_n * Heads; i += Plan::threads) {
    const float w = __ldg(a.weights + static_cast<kstd::int64_t>(row) * Plan::next_n * Heads + i);
    ptx::store_shared(shared + Plan::weights_at + i * 4, __float_as_uint(sm90::detail::mul_exact(0.5F, w)));
  }
  if (thread < Plan::next_n) ptx::store_shared(shared + Plan::visible_at + thread * 4, static_cast<kstd::uint32_t>(sm90::detail::visible_tokens<Plan>(a, row, thread)));
}

/// A lane's part of 16 keys, as they lie in memory: rows g and g + 8 of the warp's.
template <class Plan>
struct RawKeys {
  kstd::uint32_t word[2][Plan::raw];
  kstd::uint32_t scale[2];  // fp8: of the token this lane finishes, in [0]; fp4: the block's of each row
};

/// Leaves the lane's part as it was where there is no page: no query token sees those keys.
template <class P, class Plan>
KVIRE_DEVICE KVIRE_INLINE void load_raw(RawKeys<Plan>& k, const LogitsArguments& a, int id, unsigned token, int lane) {
  if (id < 0) return;
  const unsigned g = static_cast<unsigned>(lane) / 4, c = static_cast<unsigned>(lane) % 4;
  const kstd::byte* page = a.pages + a.page_stride * static_cast<unsigned>(id);
  const kstd::byte* key = page + ((token + g) * Plan::key_row + c * (Plan::raw == 2 ? 8 : 16));  // one address, the rest are constant distances
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const kstd::byte* row = key + half * 8 * Plan::key_row;
    if constexpr (Plan::raw == 2) {
      asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(k.word[half][0]), "=r"(k.word[half][1]) : "l"(row));
    } else {
#pragma unroll
      for (int i = 0; i < Plan::raw / 4; ++i) {
        const Words4 v = ptx::load_global4(row + 64 * i);
        k.word[half][4 * i] = v.x;
        k.word[half][4 * i + 1] = v.y;
        k.word[half][4 * i + 2] = v.z;
        k.word[half][4 * i + 3] = v.w;
      }
    }
  }
  if constexpr (Plan::scaled) {
    const kstd::byte* scales = page + P::template offset<role::Scale>(0);
    if constexpr (Plan::fp4) {
      const kstd::byte* scale = scales + ((token + g) * Plan::scale_row + c * Plan::blocks / 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) k.scale[half] = static_cast<kstd::uint32_t>(__ldg(reinterpret_cast<const unsigned char*>(scale + half * 8 * Plan::scale_row)));
    } else {
      k.scale[0] = __ldg(reinterpret_cast<const unsigned*>(scales + (token + g + c % 2 * 8) * Plan::scale_row));
    }
  }
}

/// Operand A from raw keys; returns the factor of the token this lane finishes.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE float make_operand(kstd::uint32_t (&m)[Plan::steps][4], const RawKeys<Plan>& k, int lane) {
  if constexpr (Plan::key == Element::bf16) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < Plan::steps; ++j) {
        m[j][half] = k.word[half][2 * j];
        m[j][half + 2] = k.word[half][2 * j + 1];
      }
    }
    return 1;
  } else if constexpr (Plan::key == Element::e4m3) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < Plan::steps; ++j) f16_from_e4m3(k.word[half][j], m[j][half], m[j][half + 2]);
    }
    return __uint_as_float(k.scale[0]);
  } else {
    kstd::uint32_t most[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      most[half] = k.scale[half] == 255 ? 0 : k.scale[half];
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) {
        const kstd::uint32_t other = __shfl_xor_sync(~0U, most[half], mask);
        most[half] = other > most[half] ? other : most[half];
      }
      const int biased = 253 + static_cast<int>(k.scale[half]) - static_cast<int>(most[half]);
      kstd::uint32_t factor = biased < 1 ? 0 : static_cast<kstd::uint32_t>(biased) << 7;
      if (k.scale[half] == 255) factor = 0x7FC0;
      factor |= factor << 16;
#pragma unroll
      for (int u = 0; u < Plan::raw; ++u) {
        const kstd::uint32_t w = k.word[half][u];
        const kstd::uint32_t pairs[4] = {(w << 6 & 0x01C001C0U) | (w << 12 & 0x80008000U), (w << 2 & 0x01C001C0U) | (w << 8 & 0x80008000U),
                                         (w >> 2 & 0x01C001C0U) | (w << 4 & 0x80008000U), (w >> 6 & 0x01C001C0U) | (w & 0x80008000U)};
#pragma unroll
        for (int r = 0; r < 4; ++r) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(m[2 * u + r / 2][half + 2 * (r % 2)]) : "r"(pairs[r]), "r"(factor), "r"(0x80008000U));
      }
    }
    const kstd::uint32_t top = lane % 2 != 0 ? most[1] : most[0];
    return __uint_as_float(top > 0 ? top << 23 : 0x400000U);
  }
}

}  // namespace detail
}  // namespace sm80

KVIRE_NAMESPACE_END
