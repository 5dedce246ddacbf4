// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <kvire/kernel/body/store.hpp>
#include <kvire/kernel/ptx/barrier.cuh>

/// Rows in stripes of 64 elements, and how eight lanes encode and write one: the bytes of body::store for rows whose blocks are finite.

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

/// e4m3 codes of two finite products; `a` in the low byte.
__device__ inline kstd::uint32_t e4m3_pair(float a, float b) {
#if KVIRE_SM89_UP
  unsigned short codes = 0;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(b), "f"(a));
  return codes;
#else
  return kstd::uint32_t(e4m3_from_f32(a)) | kstd::uint32_t(e4m3_from_f32(b)) << 8;
#endif
}

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

/// a / B rounded to nearest, for normal quotients: a correctly rounded reciprocal and two corrections, as the division of the GPU does it.
template <int B>
__device__ float divided(float a) {
  constexpr float b = B;
  constexpr float r = 1.0F / b;
  float q = mul_rn(a, r);
  q = fma_rn(fma_rn(-q, b, a), r, q);
  return fma_rn(fma_rn(-q, b, a), r, q);
}

/// 1 / a
__device__ inline float reciprocal(float a) {
  float r = 0;
  asm("rcp.rn.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}

struct FastScale {
  kstd::uint32_t code;
  float factor;   // what each element is multiplied by
  float divisor;  // scale_clamp: what it is divided by
  bool extreme;   // beyond what the short ways of this file are right for
};

/// ScaleCodec<P>::make of a finite amax.
template <LayoutPolicy P>
__device__ FastScale finite_scale(kstd::uint32_t key) {
  using Codec = ScaleCodec<P>;
  constexpr kstd::uint32_t floor = bits_of(1e-4F);
  constexpr bool e4m3 = Codec::value_element == Element::e4m3;
  if constexpr (P::Scaling::formula == ScaleFormula::scale_clamp) {
    const float s = fmaxf(divided<6>(float_of(key)), 0x1p-9F);
    const kstd::uint32_t code = e4m3_pair(s, 0.0F) & 0xFFU;  // not above 448
    const float stored = code < 8 ? static_cast<float>(code) * 0x1p-9F : float_of((code << 20) + ((127U - 7U) << 23));
    return {code, reciprocal(stored), stored, s > 448.0F};
  } else if constexpr (Codec::scale_element == Element::ue8m0) {
    // amax / 448 rounds to more than a power of two exactly if amax is more than 448 times it, and so for 6: the next f32 above is far enough.
    constexpr kstd::uint32_t beyond_one = e4m3 ? 0x1FFFFFU : 0x3FFFFFU;  // carries out of mantissas above that of 448 = 1.75 * 2^8, of 6 = 1.5 * 2^2
    constexpr int exponent = e4m3 ? 8 : 2;
    constexpr auto code_of = [](kstd::uint32_t bits) { return static_cast<int>((bits + beyond_one) >> 23) - exponent; };
    int code = code_of(P::Scaling::formula == ScaleFormula::amax_floor ? max(key, floor) : key);
    if constexpr (P::Scaling::formula == ScaleFormula::scale_floor) code = max(code, static_cast<int>(ue8m0_ceil_from_bits(floor)));
    return {static_cast<kstd::uint32_t>(code), float_of(static_cast<kstd::uint32_t>(254 - code) << 23), 1.0F, code > 239};
  } else if constexpr (Codec::scale_element == Element::f32 && P::Scaling::formula == ScaleFormula::amax_floor) {
    const float s = divided < e4m3 ? 448 : 6 > (float_of(max(key, floor)));
    return {bits_of(s), reciprocal(s), 1.0F, false};
  } else {
    const BlockScale s = Codec::make(key);
    return {s.code, s.factor, 1.0F, false};
  }
}

/// The e4m3 codes of a chunk in two words.
template <class C>
__device__ void encode_e4m3(const C& x, const FastScale& scale, kstd::uint32_t (&codes)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) y[j] = mul_rn(x.value(4 * i + j), scale.factor);
    codes[i] = e4m3_pair(y[0], y[1]) | e4m3_pair(y[2], y[3]) << 16;
  }
}

/// The e2m1 codes of a chunk of bf16 numbers, from the low nibble on. Times 2^-14 they are f16 numbers in which e2m1's subnormal is a subnormal: the
/// two bits of e2m1's exponent and that of its mantissa are then neighbours, and rounding is an addition. Exact where it matters: bf16 numbers
/// of e2m1's range, times a power of two, have no more digits than f16. A quotient (scale_clamp) need not be exact, only on the right side of
/// each tie: eight digits divided by four are 2^-9 or more away from one, or on it; 2^-12 less brings those that are on it to its lower side.
template <LayoutPolicy P>
__device__ kstd::uint32_t encode_e2m1(const Chunk<Element::bf16>& x, const FastScale& scale, bool to_even) {
  constexpr bool divides = ScaleCodec<P>::divides;
  const float factor = mul_rn(scale.factor, divides ? 0x1p-14F - 0x1p-26F : 0x1p-14F);
  const kstd::uint32_t last = to_even ? 0x00010001U : 0;
  kstd::uint32_t v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    kstd::uint32_t h = 0;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h) : "f"(mul_rn(x.value(2 * i + 1), factor)), "f"(mul_rn(x.value(2 * i), factor)));
    v[i] = h + 0x00FF00FFU + ((h >> 9) & last);  // up beyond a half; a half itself where that makes the last digit even
  }
  // The high byte of each: sign, three zeros, the code, a digit that is done with.
  const kstd::uint32_t a = __byte_perm(v[0], v[1], 0x7351);
  const kstd::uint32_t b = __byte_perm(v[2], v[3], 0x7351);
  const kstd::uint32_t even = __byte_perm(a, b, 0x5410);
  const kstd::uint32_t odd = __byte_perm(a, b, 0x7632);
  const kstd::uint32_t codes = ((even >> 1) & 0x0F0F0F0FU) | ((odd << 3) & 0xF0F0F0F0U);
  const kstd::uint32_t signs = ((even >> 4) & 0x08080808U) | (odd & 0x80808080U);
  return codes | (signs & (codes + 0x77777777U));  // no sign on zero
}

/// The same of f32 numbers, in f32: times 2^-126, rounded upwards, so that what is above a tie stays above it. Ties toward zero.
template <LayoutPolicy P>
__device__ kstd::uint32_t encode_e2m1(const Chunk<Element::f32>& x, const FastScale& scale, bool) {
  kstd::uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < chunk; ++i) {
    float y = mul_rn(float_of(abs_bits(x.w[i])), scale.factor);
    if constexpr (ScaleCodec<P>::divides) y = fma_rn(fma_rn(-y, scale.divisor, float_of(abs_bits(x.w[i]))), scale.factor, y);
    asm("mul.rp.f32 %0, %1, %2;" : "=f"(y) : "f"(y), "f"(0x1p-126F));
    const kstd::uint32_t code = (bits_of(y) + 0x1FFFFFU) >> 22;
    codes |= (code | (code != 0 ? (x.w[i] >> 28) & 8U : 0)) << (4 * i);
  }
  return codes;
}

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

/// Where a row goes; no page: nowhere.
struct Place {
  kstd::byte* page = nullptr;
  int token = 0;
};

/// The scales of one row, gathered in registers and written at once.
template <LayoutPolicy P, bool = Stripes<P>::scaled>
struct Scales {
  static constexpr bool gathered = false;
};
template <LayoutPolicy P>
struct Scales<P, true> {
  using Split = Stripes<P>;
  static constexpr int index = P::template section_of<role::Scale>;
  using S = RowField<P, index>;
  static constexpr int block = P::Scaling::block;
  static constexpr int code_bits = bits(S::element);
  static constexpr int across = block < stripe ? stripe / block : 1;  // blocks of a stripe
  static constexpr int block_lanes = lanes / across;
  static constexpr bool gathered = across == 1 || (across <= 4 && code_bits == 8);
  // Padding right behind is written with them.
  static constexpr int pad = [] {
    if constexpr (index + 1 < P::section_count) {
      using Next = RowField<P, index + 1>;
      return Next::padding && Next::plane == S::plane ? Next::count : 0;
    } else {
      return 0;
    }
  }();
  static constexpr int bytes = S::count * code_bits / 8 + pad;
  kstd::uint32_t w[(bytes + 3) / 4] = {};

  /// Block `b` of those that this lane has a part of, ascending.
  __device__ void add(int b, kstd::uint32_t code) { w[b * code_bits / 32] |= code << (b * code_bits % 32); }
  /// Brings what the first lane of the row writes to it: the blocks of a stripe lie in neighbouring lanes, those of the next stripe behind them.
  __device__ void join() {
#pragma unroll
    for (int size = 1; size < across; size *= 2) {  // bytes that are in order already
      kstd::uint32_t joined[sizeof w / 4 + 1];
#pragma unroll
      for (int i = 0; i < (S::count / across * size + 3) / 4; ++i) {
        const kstd::uint32_t other = __shfl_xor_sync(0xFFFFFFFFU, w[i], block_lanes * size);
        joined[2 * i] = __byte_perm(w[i], other, size == 1 ? 0x5140 : 0x5410);
        joined[2 * i + 1] = __byte_perm(w[i], other, size == 1 ? 0x7362 : 0x7632);
      }
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof w / 4); ++i) w[i] = joined[i];
    }
  }
  __device__ void store(const Place& to) const {
    constexpr int alignment = static_cast<int>(power_of_two_divisor(kstd::int64_t(S::byte_alignment | bytes), kstd::int64_t(16)));
    __builtin_memcpy(__builtin_assume_aligned(to.page + S::offset(to.token), alignment), w, bytes);
  }
};

template <int N, class F>
__device__ void for_each_index(F&& f) {
  [&]<int... I>(kstd::integer_sequence<int, I...>) { (f(kstd::integral_constant<int, I>{}), ...); }
  (kstd::make_integer_sequence<int, N>{});
}

template <class F>
__device__ void write(const Place& to, int index, const kstd::uint32_t* words) {
  constexpr int bytes = chunk * bits(F::element) / 8;
  constexpr int alignment = static_cast<int>(power_of_two_divisor(kstd::int64_t(F::byte_alignment | bytes), kstd::int64_t(16)));
  __builtin_memcpy(__builtin_assume_aligned(to.page + F::offset(to.token) + kstd::int64_t(index) * bits(F::element) / 8, alignment), words, bytes);
}

/// Writes this lane's chunks of the scaled field of a row; true if the row has to be taken again.
template <LayoutPolicy P, class F, class C>
__device__ bool store_scaled(const C (&x)[Stripes<P>::count], const Place& to, int lane, const RowOptions& options, Scales<P>& scales) {
  using Codec = ScaleCodec<P>;
  using S = Scales<P>;
  constexpr int first = F::first / stripe;
  constexpr int down = Codec::block > stripe ? Codec::block / stripe : 1;  // stripes of a block
  bool again = false;
  for_each_index<F::count / (stripe * down)>([&](auto b) {
    kstd::uint32_t key = 0;
#pragma unroll
    for (int i = 0; i < down; ++i) key = max(key, x[first + b.value * down + i].largest());
#pragma unroll
    for (int distance = 1; distance < S::block_lanes; distance *= 2) key = max(key, __shfl_xor_sync(0xFFFFFFFFU, key, distance));
    const FastScale scale = finite_scale<P>(key);
    again = again || key >= infinity_bits || scale.extreme;
    if constexpr (S::gathered) {
      scales.add(b.value, scale.code);
    } else {
      if (to.page != nullptr && lane % S::block_lanes == 0) {
        store_codes<S::S::element>(to.page + S::S::offset(to.token), b.value * S::across + lane / S::block_lanes, {scale.code});
      }
    }
#pragma unroll
    for (int i = 0; i < down; ++i) {
      const int at = (b.value * down + i) * stripe + lane * chunk;
      kstd::uint32_t codes[2];
      if constexpr (F::element == Element::e4m3) {
        encode_e4m3(x[first + b.value * down + i], scale, codes);
      } else {
        codes[0] = encode_e2m1<P>(x[first + b.value * down + i], scale, options.ties == Ties::to_even);
      }
      if (to.page != nullptr) write<F>(to, at, codes);
    }
  });
  if constexpr (S::gathered) scales.join();
  return again;
}

/// Writes this lane's chunk of stripe S, of a field without scales; true if the row has to be taken again.
template <LayoutPolicy P, int S, class C>
__device__ bool store_plain(const C& x, const Place& to, int lane, const RowOptions& options) {
  using F = typename Stripes<P>::template Field<S>;
  (void)sizeof(rule::NumberFields<P, F::element>);
  const int at = S * stripe - F::first + lane * chunk;
  if constexpr (F::element == Element::bf16) {
    kstd::uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(C) == 16) {
        codes[i] = x.w[i];
      } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(codes[i]) : "f"(x.value(2 * i + 1)), "f"(x.value(2 * i)));
      }
    }
    if (to.page != nullptr) write<F>(to, at, codes);
    return x.largest() > infinity_bits;
  } else {
    kstd::uint32_t codes[chunk];
#pragma unroll
    for (int i = 0; i < chunk; ++i) codes[i] = encode_element<F::element>(bits_of(x.value(i)), options.ties);
    constexpr int alignment = static_cast<int>(power_of_two_divisor(kstd::int64_t(F::byte_alignment | (chunk * bits(F::element) / 8)), kstd::int64_t(16)));
    if (to.page != nullptr) store_codes<F::element, chunk, alignment>(to.page + F::offset(to.token), at, codes);
    return false;
  }
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::store

KVIRE_NAMESPACE_END
