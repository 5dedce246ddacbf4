// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include <kvire/layout/fingerprint.hpp>
#include <kvire/pool/view.hpp>

KVIRE_NAMESPACE_BEGIN

/// A checksum of what a transfer carries: the bytes of all fields, padding excluded, each keyed by where it belongs (entry, layer, position
/// in the plan, token, field) and not by where it lies. So it is the same on both sides, in every arrangement and for any page ids, and two
/// fields, tokens or layers that change places change it. Parts add up in any order. Against accidents, not against forgery.
struct Digest {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  KVIRE_HD constexpr Digest& operator+=(const Digest& other) {
    low += other.low;
    high += other.high;
    return *this;
  }
  friend bool operator==(const Digest&, const Digest&) = default;
};

namespace detail {

// Finaliser of splitmix64 (public domain, Vigna).
KVIRE_HD constexpr std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
  return x ^ (x >> 31);
}

/// Up to eight bytes as a little-endian number.
KVIRE_HD inline std::uint64_t digest_word(const std::byte* bytes, std::int64_t count) {
  std::uint64_t word = 0;
#if KVIRE_DEVICE_PASS
  // A device copies what it knows nothing of byte by byte.
  if (count >= 8 && reinterpret_cast<std::uintptr_t>(bytes) % 8 == 0) return *reinterpret_cast<const std::uint64_t*>(bytes);
#endif
  ::memcpy(&word, bytes, static_cast<std::size_t>(count < 8 ? count : 8));
  return word;
}

/// One field of one row. `key` says where the field belongs.
KVIRE_HD inline Digest digest_bytes(std::uint64_t key, const std::byte* bytes, std::int64_t count) {
  std::uint64_t a = mix64(key + UINT64_C(0x9E3779B97F4A7C15));
  std::uint64_t b = ~a;
  for (; count > 0; bytes += 8, count -= 8) {
    const std::uint64_t word = digest_word(bytes, count);
    a = (a ^ word) * UINT64_C(0x9FB21C651E98DF25);
    a ^= a >> 32;
    b = (b + word) * UINT64_C(0xD6E8FEB86659FD93);
    b ^= b >> 32;
  }
  return {mix64(a), mix64(b)};
}

/// Key of entry and layer; `entry` is a number that both sides give the entry.
constexpr std::uint64_t digest_key(std::uint64_t entry, int layer) { return mix64(entry ^ mix64(static_cast<std::uint64_t>(layer) + 1)); }

/// A number for a name.
constexpr std::uint64_t digest_name(const char* name) {
  std::uint64_t h = 0;
  for (; *name != '\0'; ++name) h = mix64(h + static_cast<unsigned char>(*name) + 1);
  return h;
}

template <class P, int S>
KVIRE_HD void digest_section(Digest& sum, std::uint64_t key, std::int64_t position, const std::byte* page, int token) {
  constexpr Section section = P::table.sections[S];
  if constexpr (!section.padding) {
    constexpr std::int64_t offset = P::table.plane_offset[section.plane] + section.row_offset_bits / 8;
    constexpr std::int64_t row = P::table.row_bytes[section.plane];
    const std::uint64_t field = mix64(key + mix64(static_cast<std::uint64_t>(position) * P::section_count + std::uint64_t(S)));
    sum += digest_bytes(field, page + offset + row * token, section.size_bits / 8);
  }
}

/// All fields of one row of a page; `position` is the row's place in the plan. The same on the host and in a kernel.
template <class P>
KVIRE_HD Digest digest_row(std::uint64_t key, std::int64_t position, const std::byte* page, int token) {
  Digest sum;
  [&]<int... S>(std::integer_sequence<int, S...>) {
    (digest_section<P, S>(sum, key, position, page, token), ...);
  }(std::make_integer_sequence<int, P::section_count>{});
  return sum;
}

}  // namespace detail

KVIRE_NAMESPACE_END
