// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/config.hpp>

#if KVIRE_X86_64

#include <kvire/codec/float_bits.hpp>

/// The few vector operations that host kernels need, over the compiler's vector types: <immintrin.h> alone takes longer to parse than the
/// whole library. Products and sums are explicit fma builtins, comparisons are on integers: no floating-point flag changes a bit.

KVIRE_NAMESPACE_BEGIN
namespace simd {

using F4 = float __attribute__((vector_size(16)));
using F8 = float __attribute__((vector_size(32)));
using F16 = float __attribute__((vector_size(64)));
using I4 = kstd::int32_t __attribute__((vector_size(16)));
using U4 = kstd::uint32_t __attribute__((vector_size(16)));
using D2 = double __attribute__((vector_size(16)));
using F2 = float __attribute__((vector_size(8)));
using L2 = kstd::uint64_t __attribute__((vector_size(16)));
using SignedBytes16 = char __attribute__((vector_size(16)));
using Bytes16 = kstd::uint8_t __attribute__((vector_size(16)));
using I8 = kstd::int32_t __attribute__((vector_size(32)));
using I16 = kstd::int32_t __attribute__((vector_size(64)));
using U8 = kstd::uint32_t __attribute__((vector_size(32)));
using L4 = kstd::uint64_t __attribute__((vector_size(32)));

using Halves8 = kstd::uint16_t __attribute__((vector_size(16)));

inline constexpr auto minus_infinity = static_cast<kstd::int32_t>(infinity_bits | sign_bit);

// Memory is aligned to its elements only: vectors are copied out of it and into it, which is one instruction.
KVIRE_INLINE F4 load4(const void* p) {
  F4 x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}

KVIRE_INLINE void store4(float* p, F4 x) { __builtin_memcpy(p, &x, sizeof(x)); }
KVIRE_INLINE F4 all4(float x) { return F4{x, x, x, x}; }
/// Lane I in all lanes.
template <int I>
KVIRE_INLINE F4 lane4(F4 x) {
  return reinterpret_cast<F4>(__builtin_shufflevector(reinterpret_cast<I4>(x), reinterpret_cast<I4>(x), I, I, I, I));
}
/// body::relu of each lane.
KVIRE_INLINE F4 relu4(F4 x) {
  const I4 bits = reinterpret_cast<I4>(x);
  return reinterpret_cast<F4>(bits & (bits > minus_infinity));
}
KVIRE_INLINE D2 low_doubles(F4 x) { return __builtin_convertvector(__builtin_shufflevector(x, x, 0, 1), D2); }
KVIRE_INLINE D2 high_doubles(F4 x) { return __builtin_convertvector(__builtin_shufflevector(x, x, 2, 3), D2); }
KVIRE_INLINE F4 floats_of(D2 low, D2 high) {
  return __builtin_shufflevector(__builtin_convertvector(low, F2), __builtin_convertvector(high, F2), 0, 1, 2, 3);
}
/// Transposes 4 rows of 4 floats.
KVIRE_INLINE void transpose4(const float* from, kstd::int64_t from_stride, float* to, kstd::int64_t to_stride) {
  const F4 a0 = load4(from), a1 = load4(from + from_stride), a2 = load4(from + 2 * from_stride), a3 = load4(from + 3 * from_stride);
  const F4 b0 = __builtin_shufflevector(a0, a1, 0, 4, 1, 5), b1 = __builtin_shufflevector(a2, a3, 0, 4, 1, 5);
  const F4 b2 = __builtin_shufflevector(a0, a1, 2, 6, 3, 7), b3 = __builtin_shufflevector(a2, a3, 2, 6, 3, 7);
  store4(to, __builtin_shufflevector(b0, b1, 0, 1, 4, 5));
  store4(to + to_stride, __builtin_shufflevector(b0, b1, 2, 3, 6, 7));
  store4(to + 2 * to_stride, __builtin_shufflevector(b2, b3, 0, 1, 4, 5));
  store4(to + 3 * to_stride, __builtin_shufflevector(b2, b3, 2, 3, 6, 7));
}

KVIRE_TARGET_AVX2 KVIRE_INLINE F8 load8(const void* p) {
  F8 x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
KVIRE_TARGET_AVX2 KVIRE_INLINE void store8(float* p, F8 x) { __builtin_memcpy(p, &x, sizeof(x)); }
KVIRE_TARGET_AVX2 KVIRE_INLINE F8 all8(float x) { return F8{x, x, x, x, x, x, x, x}; }
KVIRE_TARGET_AVX2 KVIRE_INLINE F8 fma8(F8 a, F8 b, F8 c) { return __builtin_ia32_vfmaddps256(a, b, c); }
/// body::relu of each lane.
KVIRE_TARGET_AVX2 KVIRE_INLINE F8 relu8(F8 x) {
  const I8 bits = reinterpret_cast<I8>(x);
  return reinterpret_cast<F8>(bits & (bits > minus_infinity));
}

KVIRE_TARGET_AVX512 KVIRE_INLINE F16 load16(const void* p) {
  F16 x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
KVIRE_TARGET_AVX512 KVIRE_INLINE void store16(float* p, F16 x) { __builtin_memcpy(p, &x, sizeof(x)); }
KVIRE_TARGET_AVX512 KVIRE_INLINE F16 all16(float x) { return F16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
KVIRE_TARGET_AVX512 KVIRE_INLINE F16 fma16(F16 a, F16 b, F16 c) {
  return __builtin_ia32_vfmaddps512_mask(a, b, c, static_cast<short>(-1), 4);
}
KVIRE_TARGET_AVX512 KVIRE_INLINE F16 relu16(F16 x) {
  const I16 bits = reinterpret_cast<I16>(x);
  return reinterpret_cast<F16>(bits & (bits > minus_infinity));
}

/// Transposes 8 rows of 8 floats.
KVIRE_TARGET_AVX2 KVIRE_INLINE void transpose8(const float* from, kstd::int64_t from_stride, float* to, kstd::int64_t to_stride) {
  const F8 a0 = load8(from), a1 = load8(from + from_stride), a2 = load8(from + 2 * from_stride), a3 = load8(from + 3 * from_stride);
  from += 4 * from_stride;
  const F8 a4 = load8(from), a5 = load8(from + from_stride), a6 = load8(from + 2 * from_stride), a7 = load8(from + 3 * from_stride);
  const F8 b0 = __builtin_shufflevector(a0, a1, 0, 8, 1, 9, 4, 12, 5, 13), b1 = __builtin_shufflevector(a0, a1, 2, 10, 3, 11, 6, 14, 7, 15);
  const F8 b2 = __builtin_shufflevector(a2, a3, 0, 8, 1, 9, 4, 12, 5, 13), b3 = __builtin_shufflevector(a2, a3, 2, 10, 3, 11, 6, 14, 7, 15);
  const F8 b4 = __builtin_shufflevector(a4, a5, 0, 8, 1, 9, 4, 12, 5, 13), b5 = __builtin_shufflevector(a4, a5, 2, 10, 3, 11, 6, 14, 7, 15);
  const F8 b6 = __builtin_shufflevector(a6, a7, 0, 8, 1, 9, 4, 12, 5, 13), b7 = __builtin_shufflevector(a6, a7, 2, 10, 3, 11, 6, 14, 7, 15);
  const F8 c0 = __builtin_shufflevector(b0, b2, 0, 1, 8, 9, 4, 5, 12, 13), c1 = __builtin_shufflevector(b0, b2, 2, 3, 10, 11, 6, 7, 14, 15);
  const F8 c2 = __builtin_shufflevector(b1, b3, 0, 1, 8, 9, 4, 5, 12, 13), c3 = __builtin_shufflevector(b1, b3, 2, 3, 10, 11, 6, 7, 14, 15);
  const F8 c4 = __builtin_shufflevector(b4, b6, 0, 1, 8, 9, 4, 5, 12, 13), c5 = __builtin_shufflevector(b4, b6, 2, 3, 10, 11, 6, 7, 14, 15);
  const F8 c6 = __builtin_shufflevector(b5, b7, 0, 1, 8, 9, 4, 5, 12, 13), c7 = __builtin_shufflevector(b5, b7, 2, 3, 10, 11, 6, 7, 14, 15);
  store8(to, __builtin_shufflevector(c0, c4, 0, 1, 2, 3, 8, 9, 10, 11));
  store8(to + to_stride, __builtin_shufflevector(c1, c5, 0, 1, 2, 3, 8, 9, 10, 11));
  store8(to + 2 * to_stride, __builtin_shufflevector(c2, c6, 0, 1, 2, 3, 8, 9, 10, 11));
  store8(to + 3 * to_stride, __builtin_shufflevector(c3, c7, 0, 1, 2, 3, 8, 9, 10, 11));
  to += 4 * to_stride;
  store8(to, __builtin_shufflevector(c0, c4, 4, 5, 6, 7, 12, 13, 14, 15));
  store8(to + to_stride, __builtin_shufflevector(c1, c5, 4, 5, 6, 7, 12, 13, 14, 15));
  store8(to + 2 * to_stride, __builtin_shufflevector(c2, c6, 4, 5, 6, 7, 12, 13, 14, 15));
  store8(to + 3 * to_stride, __builtin_shufflevector(c3, c7, 4, 5, 6, 7, 12, 13, 14, 15));
}

}  // namespace simd
KVIRE_NAMESPACE_END

#endif
