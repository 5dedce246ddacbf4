// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include <kvire/base/hash.hpp>
#include <kvire/transfer/digest.hpp>

KVIRE_NAMESPACE_BEGIN

/// A token of the model's vocabulary, as engines store them.
using TokenId = std::int32_t;

namespace detail {

/// Two accumulators that take the same words by different means. Every step is a bijection of the state, so that one word that differs always shows.
struct PrefixLane {
  std::uint64_t a = 0;
  std::uint64_t b = 0;

  constexpr void take(std::uint64_t word) {
    a = (a ^ word) * UINT64_C(0x9FB21C651E98DF25);
    a ^= a >> 32;
    b = (b + word) * UINT64_C(0xD6E8FEB86659FD93);
    b ^= b >> 29;
  }
};

constexpr PrefixLane prefix_lane(const Hash128& before, std::uint64_t lane) {
  return {mix64(before.high + UINT64_C(0x9E3779B97F4A7C15) * (2 * lane + 1)), mix64(before.low + UINT64_C(0x9E3779B97F4A7C15) * (2 * lane + 2))};
}

constexpr std::uint64_t token_pair(const TokenId* tokens) {
  return static_cast<std::uint32_t>(tokens[0]) | static_cast<std::uint64_t>(static_cast<std::uint32_t>(tokens[1])) << 32;
}

/// Four lanes side by side: the multiplications of one would wait for each other.
struct PrefixLanes {
  PrefixLane a, b, c, d;

  static constexpr PrefixLanes behind(const Hash128& before) { return {prefix_lane(before, 0), prefix_lane(before, 1), prefix_lane(before, 2), prefix_lane(before, 3)}; }
  static constexpr std::int64_t block = 8;

  constexpr void take_block(const TokenId* tokens) {
    a.take(token_pair(tokens));
    b.take(token_pair(tokens + 2));
    c.take(token_pair(tokens + 4));
    d.take(token_pair(tokens + 6));
  }
  /// The name of `count` tokens, of which `rest` holds those behind the last whole block.
  constexpr Hash128 name(const TokenId* rest, std::int64_t count) const {
    PrefixLane lanes[] = {a, b, c, d};
    for (std::int64_t i = 0; i < count % block; ++i) lanes[i % 4].take(static_cast<std::uint32_t>(rest[i]) | UINT64_C(1) << 32);
    Hash128 out{static_cast<std::uint64_t>(count), ~static_cast<std::uint64_t>(count)};
    for (const PrefixLane& lane : lanes) {
      out.high = mix64(out.high ^ lane.a) + lane.a;
      out.low = mix64(out.low ^ lane.b) + lane.b;
    }
    return {mix64(out.high), mix64(out.low)};
  }
};

}  // namespace detail

/// The name of a prefix, version 1: of `count` tokens behind the prefix (or namespace) named `before`. The same on every machine, so that it may
/// persist. `high` finds a page, `low` is the second digest that verifies it; they come from separate accumulators, so a collision of one says
/// nothing of the other. Against accidents: who must not guess a page's name gets a secret into the namespace's salt.
constexpr Hash128 prefix_hash(const Hash128& before, const TokenId* tokens, std::int64_t count) {
  auto lanes = detail::PrefixLanes::behind(before);
  std::int64_t i = 0;
  for (; count - i >= detail::PrefixLanes::block; i += detail::PrefixLanes::block) lanes.take_block(tokens + i);
  return lanes.name(tokens + i, count);
}

/// The names of all that the tokens begin with, in one pass: out[i] is prefix_hash of the first i + 1 tokens, for i below `count`.
constexpr void prefix_hashes(const Hash128& before, const TokenId* tokens, std::int64_t count, Hash128* out) {
  auto lanes = detail::PrefixLanes::behind(before);
  std::int64_t whole = 0;
  for (std::int64_t n = 1; n <= count; ++n) {
    if (n - whole == detail::PrefixLanes::block) {
      lanes.take_block(tokens + whole);
      whole = n;
    }
    out[n - 1] = lanes.name(tokens + whole, n);
  }
}

KVIRE_NAMESPACE_END
