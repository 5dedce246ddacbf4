// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/ints.hpp>

KVIRE_NAMESPACE_BEGIN

namespace body {

namespace detail {

// A device may be told early what a group is about to read.
KVIRE_HD inline void announce([[maybe_unused]] const void* address) {
#if KVIRE_DEVICE_PASS
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}
template <class G, class T>
KVIRE_HD void announce(G g, const T* from, kstd::int64_t n) {
  constexpr int line = 128 / sizeof(T);
  g.each([&](int lane) {
    for (kstd::int64_t i = kstd::int64_t(lane) * line; i < n; i += kstd::int64_t(G::size) * line) announce(from + i);
  });
}

// A value that other work may be about to write, for a hint: kept out of the first-level cache, where it would go stale.
KVIRE_HD inline kstd::int32_t peek(const kstd::int32_t* at) {
#if KVIRE_DEVICE_PASS
  return __ldcg(at);
#else
  return *at;
#endif
}

// On the host one thread plays all lanes, so a plain exchange will do.
KVIRE_HD inline kstd::int32_t exchange_if_equal(kstd::int32_t* at, kstd::int32_t expected, kstd::int32_t value) {
#if KVIRE_DEVICE_PASS
  return atomicCAS(at, expected, value);
#else
  const kstd::int32_t old = *at;
  if (old == expected) *at = value;
  return old;
#endif
}
KVIRE_HD inline void raise_to(kstd::int32_t* at, kstd::int32_t value) {
#if KVIRE_DEVICE_PASS
  atomicMax(at, value);
#else
  if (*at < value) *at = value;
#endif
}

}  // namespace detail

/// Working memory of a group: a hash table of the listed tokens, a quarter full (half, if they are many), and the order of those that miss.
struct PlaceScratch {
  kstd::int32_t* keys;    ///< [entries]: positions; -1: empty
  kstd::int32_t* values;  ///< [entries]: the token's slot in the row; before that `unplaced`, or -1 - the first place where it is listed
  kstd::int32_t* order;   ///< [n]: each listed token's entry, -1 without; then places in the list, of those that miss
  int bits;

  /// Entries are 2^bits.
  KVIRE_HD static constexpr int bits_for(kstd::int64_t n) {
    int bits = 1;
    while ((kstd::int64_t(1) << bits) < (n <= 2048 ? 4 : 2) * n) ++bits;
    return bits;
  }
  KVIRE_HD static constexpr kstd::int64_t words(kstd::int64_t n) { return (kstd::int64_t(2) << bits_for(n)) + n; }
  KVIRE_HD PlaceScratch(kstd::int32_t* memory, kstd::int64_t n)
      : keys(memory), values(memory + (kstd::int64_t(1) << bits_for(n))), order(memory + (kstd::int64_t(2) << bits_for(n))), bits(bits_for(n)) {}

  static constexpr kstd::int32_t unplaced = -0x7FFFFFFF;
  KVIRE_HD kstd::int64_t entries() const { return kstd::int64_t(1) << bits; }
  KVIRE_HD kstd::uint32_t next(kstd::uint32_t entry) const { return (entry + 1) & static_cast<kstd::uint32_t>(entries() - 1); }
  KVIRE_HD kstd::uint32_t home(kstd::int32_t position) const { return kstd::uint32_t(position) * 0x9E3779B1U >> (32 - bits); }
  KVIRE_HD kstd::int32_t find(kstd::int32_t position) const {
    for (kstd::uint32_t e = home(position);; e = next(e)) {
      if (keys[e] == position) return static_cast<kstd::int32_t>(e);
      if (keys[e] < 0) return -1;
    }
  }
  /// Returns the entry.
  KVIRE_HD kstd::int32_t insert(kstd::int32_t position) const {
    for (kstd::uint32_t e = home(position);; e = next(e)) {
      const kstd::int32_t there = detail::exchange_if_equal(keys + e, -1, position);
      if (there < 0) values[e] = unplaced;
      if (there < 0 || there == position) return static_cast<kstd::int32_t>(e);
    }
  }
};

}  // namespace body
KVIRE_NAMESPACE_END
