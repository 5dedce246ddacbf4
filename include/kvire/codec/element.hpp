// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/float_bits.hpp>
#include <kvire/layout/element.hpp>

#if !KVIRE_RTC  // NVRTC knows memcpy by itself
#include <cstring>
#endif

KVIRE_NAMESPACE_BEGIN

/// Elements that stand for real numbers; u8 is bytes that only their owner understands.
template <Element E>
concept NumberElement = E != Element::u8;

/// The code, in the low bits, that stores the f32 with these bits; nearest even where not told otherwise (ue8m0: upwards).
template <Element E>
  requires NumberElement<E>
KVIRE_HD constexpr kstd::uint32_t encode_element(kstd::uint32_t bits, [[maybe_unused]] Ties ties = Ties::toward_zero) {
  if constexpr (E == Element::e4m3) return e4m3_from_bits(bits);
  if constexpr (E == Element::e2m1) return e2m1_from_bits(bits, ties);
  if constexpr (E == Element::ue8m0) return ue8m0_ceil_from_bits(bits);
  if constexpr (E == Element::bf16) return bf16_from_bits(bits);
  if constexpr (E == Element::f16) return f16_from_bits(bits);
  return bits;
}

/// The number that a code stands for, exact.
template <Element E>
  requires NumberElement<E>
KVIRE_HD constexpr float decode_element(kstd::uint32_t code) {
  if constexpr (E == Element::e4m3) return f32_from_e4m3(static_cast<kstd::uint8_t>(code));
  if constexpr (E == Element::e2m1) return f32_from_e2m1(static_cast<kstd::uint8_t>(code));
  if constexpr (E == Element::ue8m0) return f32_from_ue8m0(static_cast<kstd::uint8_t>(code));
  if constexpr (E == Element::bf16) return f32_from_bf16(static_cast<kstd::uint16_t>(code));
  if constexpr (E == Element::f16) return f32_from_f16(static_cast<kstd::uint16_t>(code));
  return float_of(code);
}

/// The code of a NaN; requires an element that has one (all but e2m1).
template <Element E>
  requires(NumberElement<E> && E != Element::e2m1)
inline constexpr kstd::uint32_t nan_code = E == Element::ue8m0 ? 0xFFU : encode_element<E>(nan_bits);

/// Reads the code at `index` of a run of elements that starts at `p`, which is aligned for the element.
template <Element E>
KVIRE_HD kstd::uint32_t load_code(const kstd::byte* p, int index) {
  if constexpr (bits(E) == 4) {
    const auto pair = static_cast<kstd::uint32_t>(p[index >> 1]);
    return (index & 1) != 0 ? pair >> 4 : pair & 15U;
  } else if constexpr (bits(E) == 8) {
    return static_cast<kstd::uint32_t>(p[index]);
  } else if constexpr (bits(E) == 16) {
    kstd::uint16_t code = 0;
    ::memcpy(&code, __builtin_assume_aligned(p + 2 * static_cast<kstd::int64_t>(index), 2), 2);
    return code;
  } else {
    kstd::uint32_t code = 0;
    ::memcpy(&code, __builtin_assume_aligned(p + 4 * static_cast<kstd::int64_t>(index), 4), 4);
    return code;
  }
}

/// Writes `Count` codes at elements [index, index + Count) of a run that starts at `p`. Packed elements come in pairs: index and Count are
/// even. `Alignment` (bytes, a power of two) is what the first written byte is known to be aligned to: how wide the writes may be.
template <Element E, int Count, int Alignment = alignment(E)>
KVIRE_HD void store_codes(kstd::byte* p, int index, const kstd::uint32_t (&codes)[Count]) {
  constexpr int bytes = Count * bits(E) / 8;
  alignas(16) unsigned char packed[bytes];
  for (int i = 0; i < Count; ++i) {
    if constexpr (bits(E) == 4) {
      if (i % 2 == 0) packed[i / 2] = static_cast<unsigned char>(codes[i] | codes[i + 1] << 4);
    } else {
      for (int b = 0; b < bits(E) / 8; ++b) packed[i * (bits(E) / 8) + b] = static_cast<unsigned char>(codes[i] >> (8 * b));
    }
  }
  kstd::byte* to = p + static_cast<kstd::int64_t>(index) * bits(E) / 8;
  ::memcpy(__builtin_assume_aligned(to, Alignment), packed, bytes);
}

KVIRE_NAMESPACE_END
