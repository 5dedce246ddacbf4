// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/std.hpp>

KVIRE_NAMESPACE_BEGIN

/// Pairs of f16 in a word. Integers of ten bits are subnormal f16, of which sums, and products with powers of two, are exact: the same as integer additions and
/// shifts, but of the pipe that takes twice as many. Nothing is flushed, whatever the compiler's flags.
namespace ptx {

/// Which halves of an operand an instruction takes.
enum class Halves { both, low, high };

template <Halves Taken>
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t halves(kstd::uint32_t x) {
  kstd::uint32_t d = x;
  if constexpr (Taken == Halves::low) asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(d) : "r"(x));
  if constexpr (Taken == Halves::high) asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(d) : "r"(x));
  return d;
}
/// The pair with that f16 in its lower half, and in its upper one.
KVIRE_HD constexpr kstd::uint32_t f16_pair(kstd::uint32_t low, kstd::uint32_t high) { return high << 16 | low; }

template <Halves Taken = Halves::both>
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t mul_f16x2(kstd::uint32_t a, kstd::uint32_t b) {
  kstd::uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(halves<Taken>(a)), "r"(b));
  return d;
}
/// Cut to [0, 1].
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t mul_saturated_f16x2(kstd::uint32_t a, kstd::uint32_t b) {
  kstd::uint32_t d;
  asm("mul.rn.sat.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
template <Halves Taken = Halves::both>
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t add_f16x2(kstd::uint32_t a, kstd::uint32_t b) {
  kstd::uint32_t d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(halves<Taken>(a)), "r"(b));
  return d;
}
KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t sub_f16x2(kstd::uint32_t a, kstd::uint32_t b) {
  kstd::uint32_t d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

}  // namespace ptx

KVIRE_NAMESPACE_END
