// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/std.hpp>

KVIRE_NAMESPACE_BEGIN

/// Arithmetic of tuned logits kernels, rounded as written whatever the compiler's flags.
namespace sm90::detail {

KVIRE_DEVICE KVIRE_INLINE float fma_exact(float a, float b, float c) {
  float d;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}
KVIRE_DEVICE KVIRE_INLINE float add_exact(float a, float b) {
  float d;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
KVIRE_DEVICE KVIRE_INLINE float mul_exact(float a, float b) {
  float d;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
/// 2 relu(x), exact: x + |x| goes to the wide FMA pipe, where max(x, 0) would go to the half-rate one.
KVIRE_DEVICE KVIRE_INLINE float twice_relu(float x) {
  float d;
  asm("{\n.reg .f32 m;\nabs.f32 m, %1;\nadd.rn.f32 %0, %1, m;\n}" : "=f"(d) : "f"(x));
  return d;
}
/// relu(x), NaN kept.
KVIRE_DEVICE KVIRE_INLINE float relu_max(float x) {
  float d;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(d) : "f"(x));
  return d;
}

/// The same number, of which nothing is computed before this point: what rare code needs of it would be kept in registers.
KVIRE_DEVICE KVIRE_INLINE int here(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// NaN becomes -inf and is counted, without a branch.
KVIRE_DEVICE KVIRE_INLINE void replace_nan(float& logit, unsigned& nans) {
  asm("{\n.reg .pred p;\nsetp.nan.f32 p, %1, %1;\n@p add.u32 %0, %0, 1;\nmax.f32 %1, %1, 0fFF800000;\n}" : "+r"(nans), "+f"(logit));
}

KVIRE_DEVICE KVIRE_INLINE void store_logit(float* to, float x) { *to = x; }
/// As bf16, to nearest, ties to even; x is no NaN.
KVIRE_DEVICE KVIRE_INLINE void store_logit(kstd::uint16_t* to, float x) {
  asm("{\n.reg .b16 h;\ncvt.rn.bf16.f32 h, %1;\nst.global.b16 [%0], h;\n}" ::"l"(to), "f"(x) : "memory");
}
/// The same with an L2 cache policy, as createpolicy makes them.
KVIRE_DEVICE KVIRE_INLINE void store_logit(float* to, float x, kstd::uint64_t policy) {
  asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" ::"l"(to), "f"(x), "l"(policy) : "memory");
}
KVIRE_DEVICE KVIRE_INLINE void store_logit(kstd::uint16_t* to, float x, kstd::uint64_t policy) {
  asm volatile("{\n.reg .b16 h;\ncvt.rn.bf16.f32 h, %1;\nst.global.L2::cache_hint.b16 [%0], h, %2;\n}" ::"l"(to), "f"(x), "l"(policy) : "memory");
}

/// Four bytes picked from the eight of low and high by the nibbles of `select`; from 8 on a byte of eight times the sign of the one that the lower bits pick.
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t permute(kstd::uint32_t low, kstd::uint32_t high, kstd::uint32_t select) {
  kstd::uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(select));
  return d;
}

}  // namespace sm90::detail

KVIRE_NAMESPACE_END
