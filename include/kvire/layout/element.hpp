// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/std.hpp>

KVIRE_NAMESPACE_BEGIN

/// What one stored number is. Formats: OCP 8-bit floating point (e4m3), OCP microscaling (e2m1, ue8m0), IEEE 754 (f16, f32), bfloat16.
enum class Element : unsigned char { u8, e4m3, e2m1, ue8m0, bf16, f16, f32 };

/// Width in bits; e2m1 is the one sub-byte element: element 2i is the low nibble of byte i, element 2i+1 the high one.
KVIRE_HD constexpr int bits(Element element) {
  switch (element) {
    case Element::e2m1: return 4;
    case Element::u8:
    case Element::e4m3:
    case Element::ue8m0: return 8;
    case Element::bf16:
    case Element::f16: return 16;
    case Element::f32: return 32;
  }
  return 0;
}

/// Bytes that a single element must be aligned to; a packed element needs 1.
KVIRE_HD constexpr int alignment(Element element) { return bits(element) < 8 ? 1 : bits(element) / 8; }

/// Name as canonical forms and configurations spell it.
constexpr const char* name_of(Element element) {
  switch (element) {
    case Element::u8: return "u8";
    case Element::e4m3: return "e4m3";
    case Element::e2m1: return "e2m1";
    case Element::ue8m0: return "ue8m0";
    case Element::bf16: return "bf16";
    case Element::f16: return "f16";
    case Element::f32: return "f32";
  }
  return "unknown";
}

KVIRE_NAMESPACE_END
