// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>
#include <queue>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace engine {

/// Hits of Belady's choice (1966) with `capacity` pages: of the pages held and the one just used, give up the one that is used again last. No
/// policy that must decide without the future does better page by page; prefix order is ignored, which can only help.
inline std::int64_t belady_hits(std::span<const std::uint64_t> uses, std::int64_t capacity) {
  constexpr std::size_t never = std::numeric_limits<std::size_t>::max();
  std::vector<std::size_t> next(uses.size());
  std::unordered_map<std::uint64_t, std::size_t> seen;
  for (std::size_t i = uses.size(); i-- > 0;) {
    const auto [at, first] = seen.try_emplace(uses[i], i);
    next[i] = first ? never : std::exchange(at->second, i);
  }
  std::unordered_map<std::uint64_t, std::size_t> held;  // page and its next use
  std::priority_queue<std::pair<std::size_t, std::uint64_t>> last;
  std::int64_t hits = 0;
  for (std::size_t i = 0; i < uses.size(); ++i) {
    hits += held.count(uses[i]) != 0 ? 1 : 0;
    held[uses[i]] = next[i];
    last.emplace(next[i], uses[i]);
    while (static_cast<std::int64_t>(held.size()) > capacity) {
      const auto [when, page] = last.top();
      last.pop();
      if (const auto at = held.find(page); at != held.end() && at->second == when) held.erase(at);
    }
  }
  return hits;
}

}  // namespace engine
