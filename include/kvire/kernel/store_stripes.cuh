// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <kvire/kernel/body/store.hpp>
#include <kvire/kernel/ptx/barrier.cuh>

/// How a row divides into stripes of 64 elements, and what a lane holds of one: eight neighbouring elements, a chunk.

KVIRE_NAMESPACE_BEGIN

namespace detail::store {

inline constexpr int lanes = 8;               // of a row
inline constexpr int chunk = 8;               // elements
inline constexpr int stripe = lanes * chunk;  // elements: what the lanes of a row own side by side

/// How a row of P divides into stripes.
template <LayoutPolicy P>
struct Stripes {
  static constexpr bool scaled = P::Scaling::formula != ScaleFormula::none;
  static constexpr int count = P::dim / stripe;
  static constexpr int parts = count <= 9 ? 1 : count / 8;  // of a row, one after the other, so that they fit into registers
  static constexpr int each = count / parts;

  template <int S>
  static constexpr int section = [] {
    int first = 0;
    for (int i = 0; i < P::section_count; ++i) {
      if (P::table.sections[i].padding || i == P::template section_of<role::Scale>) continue;
      if (S * stripe < first + P::table.sections[i].count) return i;
      first += P::table.sections[i].count;
    }
    return -1;
  }();
  template <int S>
  using Field = RowField<P, section<S>>;

  static constexpr bool fits = [] {
    bool fits = P::dim % stripe == 0 && each * parts == count;
    for (int i = 0; i < P::section_count; ++i) {
      const auto& s = P::table.sections[i];
      if (!s.padding && i != P::template section_of<role::Scale>) fits = fits && s.count % stripe == 0;
    }
    if constexpr (scaled) {
      constexpr Element value = P::template element_of<typename P::Scaling::of>;
      constexpr int block = P::Scaling::block;
      fits = fits && parts == 1 && (block % stripe == 0 || (block >= chunk && stripe % block == 0));
      constexpr bool clamped = P::Scaling::formula == ScaleFormula::scale_clamp;
      fits = fits && (!clamped || (value == Element::e2m1 && P::template element_of<role::Scale> == Element::e4m3));
    }
    return fits;
  }();

  /// e2m1 values: more instructions for fewer bytes.
  static constexpr bool packed = [] {
    if constexpr (scaled) {
      return P::template element_of<typename P::Scaling::of> == Element::e2m1;
    } else {
      return false;
    }
  }();

  /// Whether the sums of a norm can be taken in the order of the host's 32 lanes.
  static constexpr int host_elements = body::RowSplit<P, 32>::elements;
  static constexpr bool fits_prologue = fits && parts == 1 && is_power_of_two(host_elements) && host_elements <= stripe;
};

#if KVIRE_CUDA_COMPILER

/// Eight neighbouring elements of a row in one lane.
template <Element E>
struct Chunk;

template <>
struct Chunk<Element::bf16> {
  kstd::uint32_t w[4];

  __device__ void load(const void* rows, kstd::int64_t first) {
    const ptx::Words4 v = ptx::load_global4(static_cast<const kstd::uint16_t*>(rows) + first);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  }
  __device__ float value(int i) const { return float_of(i % 2 == 0 ? w[i / 2] << 16 : w[i / 2] & 0xFFFF0000U); }
  /// The largest magnitude, as bits of an f32: above infinity's if there is a NaN.
  __device__ kstd::uint32_t largest() const {
    constexpr kstd::uint32_t abs = 0x7FFF7FFFU;
    const kstd::uint32_t m = __vmaxu2(__vmaxu2(w[0] & abs, w[1] & abs), __vmaxu2(w[2] & abs, w[3] & abs));
    return max(m << 16, m & 0xFFFF0000U);
  }
};

template <>
struct Chunk<Element::f32> {
  kstd::uint32_t w[8];

  __device__ void load(const void* rows, kstd::int64_t first) {
    const float* p = static_cast<const float*>(rows) + first;
    const ptx::Words4 a = ptx::load_global4(p);
    const ptx::Words4 b = ptx::load_global4(p + 4);
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w;
    w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
  }
  __device__ float value(int i) const { return float_of(w[i]); }
  __device__ kstd::uint32_t largest() const {
    kstd::uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < chunk; ++i) m = max(m, abs_bits(w[i]));
    return m;
  }
};

template <int N>
__device__ void round_to_bf16(Chunk<Element::bf16> (&)[N]) {}
template <int N>
__device__ void round_to_bf16(Chunk<Element::f32> (&x)[N]) {
#pragma unroll
  for (int s = 0; s < N; ++s) {
#pragma unroll
    for (int i = 0; i < chunk; ++i) x[s].w[i] = kstd::uint32_t(bf16_from_bits(x[s].w[i])) << 16;
  }
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::store

KVIRE_NAMESPACE_END
