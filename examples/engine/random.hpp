// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace engine {

/// splitmix64 (Steele, Lea, Flood 2014): the same numbers on every machine, unlike the distributions of <random>.
constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class Random {
 public:
  constexpr explicit Random(std::uint64_t seed) : state_(mix(seed)) {}
  constexpr std::uint64_t next() { return mix(state_++); }
  /// Uniform in [0, bound).
  constexpr std::uint64_t below(std::uint64_t bound) { return next() % bound; }
  /// Uniform in [-1, 1), a multiple of 2^-23.
  constexpr float symmetric() { return static_cast<float>(static_cast<std::int32_t>(next() >> 40) - (1 << 23)) * 0x1p-23f; }

 private:
  std::uint64_t state_;
};

}  // namespace engine
