// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>

#include <kvire/base/ints.hpp>

KVIRE_NAMESPACE_BEGIN

/// Durations in nanoseconds: how many, their sum, and how many were how long. Bounds are powers of four from a microsecond (2^10 ns) to 17 seconds.
struct TimeHistogram {
  static constexpr int buckets = 14;  ///< the last has no bound
  std::int64_t count = 0;
  std::int64_t sum_ns = 0;
  std::int64_t in[buckets] = {};      ///< durations up to bound_ns(i), and beyond the bound before

  static constexpr std::int64_t bound_ns(int bucket) { return std::int64_t{1} << (10 + 2 * bucket); }
  static constexpr int bucket_of(std::int64_t ns) {
    const auto bits = static_cast<std::int64_t>(std::bit_width(static_cast<std::uint64_t>(max_of<std::int64_t>(ns - 1, 0))));
    return static_cast<int>(min_of<std::int64_t>(max_of<std::int64_t>(bits - 9, 0) / 2, buckets - 1));
  }
  void add(std::int64_t ns) {
    ++count;
    sum_ns += ns;
    ++in[bucket_of(ns)];
  }
};

KVIRE_NAMESPACE_END
