// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>

#include <kvire/base/ints.hpp>

KVIRE_NAMESPACE_BEGIN

/// Which page to give up: each page has a rank, set when it is used, and the lowest goes first. One policy object a tier and page-id space.
///
/// | expression | result |
/// |---|---|
/// | `p.rank(uses, tick)` | rank of a page used for the `uses`th time, at `tick` (ascending); never lower than at its last use |
/// | `p.evicted(rank)` | told of the rank of each page given up |
/// | `P::name` | text for tables |
///
/// Prefix order is not the policy's business: a page is asked for only when no other page of its tier hangs on it.
template <class P>
concept EvictionPolicy = std::copy_constructible<P> && requires(P p, const P& c, std::uint32_t uses, std::uint64_t tick) {
  { c.rank(uses, tick) } -> std::same_as<std::uint64_t>;
  { p.evicted(tick) };
  { P::name } -> std::convertible_to<const char*>;
};

/// Least recently used.
struct Lru {
  static constexpr const char* name = "lru";
  std::uint64_t rank(std::uint32_t, std::uint64_t tick) const { return tick; }
  void evicted(std::uint64_t) {}
};

/// Least frequently used with dynamic aging (LFU-DA: Arlitt et al., 2000): uses count on top of the age, which is the count of the last page given up,
/// so that yesterday's favourites fade. Among equals the least recent goes first.
class Lfu {
 public:
  static constexpr const char* name = "lfu-aging";
  std::uint64_t rank(std::uint32_t uses, std::uint64_t tick) const {
    // A page that everybody shares must not take longer to fade than this.
    constexpr std::uint64_t most_uses = 1 << 16;
    const std::uint64_t count = age_ + min_of<std::uint64_t>(uses, most_uses);
    return min_of(count, most_count) << tick_bits | (tick & ((UINT64_C(1) << tick_bits) - 1));
  }
  void evicted(std::uint64_t rank) { age_ = max_of(age_, rank >> tick_bits); }

 private:
  static constexpr int tick_bits = 40;
  static constexpr std::uint64_t most_count = (UINT64_C(1) << (64 - tick_bits)) - 1;
  std::uint64_t age_ = 0;
};

KVIRE_NAMESPACE_END
