// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <kvire/pool/page_ref.hpp>
#include <kvire/tier/prefix_hash.hpp>

#include "request.hpp"

namespace engine {

// A request without prompt starts from token 0, so that there is a row to decode from.
inline std::vector<kvire::TokenId> first_tokens(const Request& r) { return r.prompt.empty() ? std::vector<kvire::TokenId>{0} : r.prompt; }
inline std::int64_t total_tokens(const Request& r) { return static_cast<std::int64_t>(first_tokens(r).size()) + r.output_tokens; }

/// A request under way. While it is paused it has no pages: what it has computed is the cache's.
template <class Tiers>
struct Session {
  std::size_t request = 0;
  std::int32_t root = -1;
  std::vector<kvire::TokenId> known;  // prompt and decoded tokens
  std::int64_t computed = 0;          // rows in the cache
  typename Tiers::Held held;          // whole pages; of an active session
  std::vector<typename Tiers::Pages> own;  // pages behind them, which nobody else has
  kvire::PageRef<kvire::DevicePage> row;
  int decoded = 0;
  bool active = false;
  int pause_left = 0;
  int rows = 0;  // of the present step

  std::span<const kvire::TokenId> tokens(std::int64_t first, std::int64_t end) const {
    return std::span(known).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(end - first));
  }
  void leave() {
    held = {};
    own.clear();
    row.reset();
    active = false;
  }
};

}  // namespace engine
