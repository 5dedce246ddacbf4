// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <kvire/base/config.hpp>

KVIRE_NAMESPACE_BEGIN

/// What finds damage in a stored record. Against accidents, not against forgery.
///
/// | expression | result |
/// |---|---|
/// | `C::of(bytes, count)` | 64 bits over `count` bytes |
/// | `C::id` | number written into records: a reader with another checksum takes them for unknown, not for damaged. 1 to 999 are kvire's |
/// | `C::name` | for messages |
template <class C>
concept Checksum = requires(const std::byte* bytes, std::int64_t count) {
  { C::of(bytes, count) } -> std::same_as<std::uint64_t>;
  { C::id } -> std::convertible_to<std::uint32_t>;
  { C::name } -> std::convertible_to<const char*>;
};

namespace detail {

/// The integer that the bytes at `p` spell, least significant first, on any machine.
template <class Int>
Int load_little(const std::byte* p) {
  Int value{};
  std::memcpy(&value, p, sizeof value);
  if constexpr (std::endian::native == std::endian::big) {
    Int swapped{};
    for (std::size_t i = 0; i < sizeof value; ++i) swapped = static_cast<Int>((swapped << 8) | ((value >> (8 * i)) & 255));
    value = swapped;
  }
  return value;
}

template <class Int>
void store_little(std::byte* p, Int value) {
  for (std::size_t i = 0; i < sizeof value; ++i) p[i] = static_cast<std::byte>((value >> (8 * i)) & 255);
}

}  // namespace detail

/// XXH64 with seed 0, after its published specification (xxHash, "XXH64 algorithm overview"): four running lanes of 8 bytes, folded at the end.
/// Test vectors: "" ef46db3751d8e999, "a" d24ec4f1a98c6e5b, "abc" 44bc2cf5ad770999.
struct Xxh64 {
  static constexpr std::uint32_t id = 1;
  static constexpr const char* name = "XXH64";

  static std::uint64_t of(const std::byte* p, std::int64_t count) {
    const std::byte* const end = p + count;
    std::uint64_t h = p5;
    if (count >= 32) {
      std::uint64_t lane[4] = {p1 + p2, p2, 0, 0 - p1};
      for (; end - p >= 32; p += 32) {
        for (int i = 0; i < 4; ++i) lane[i] = round(lane[i], detail::load_little<std::uint64_t>(p + 8 * i));
      }
      h = std::rotl(lane[0], 1) + std::rotl(lane[1], 7) + std::rotl(lane[2], 12) + std::rotl(lane[3], 18);
      for (const std::uint64_t v : lane) h = (h ^ round(0, v)) * p1 + p4;
    }
    h += static_cast<std::uint64_t>(count);
    for (; end - p >= 8; p += 8) h = std::rotl(h ^ round(0, detail::load_little<std::uint64_t>(p)), 27) * p1 + p4;
    if (end - p >= 4) {
      h = std::rotl(h ^ (detail::load_little<std::uint32_t>(p) * p1), 23) * p2 + p3;
      p += 4;
    }
    for (; p != end; ++p) h = std::rotl(h ^ (static_cast<std::uint64_t>(*p) * p5), 11) * p1;
    h = (h ^ (h >> 33)) * p2;
    h = (h ^ (h >> 29)) * p3;
    return h ^ (h >> 32);
  }

 private:
  static constexpr std::uint64_t p1 = UINT64_C(0x9E3779B185EBCA87);
  static constexpr std::uint64_t p2 = UINT64_C(0xC2B2AE3D27D4EB4F);
  static constexpr std::uint64_t p3 = UINT64_C(0x165667B19E3779F9);
  static constexpr std::uint64_t p4 = UINT64_C(0x85EBCA77C2B2AE63);
  static constexpr std::uint64_t p5 = UINT64_C(0x27D4EB2F165667C5);

  static constexpr std::uint64_t round(std::uint64_t lane, std::uint64_t word) { return std::rotl(lane + word * p2, 31) * p1; }
};

KVIRE_NAMESPACE_END
