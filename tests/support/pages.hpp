// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <kvire/pool/mirror.hpp>

// Page bytes for tests of what moves them: every byte tells its layer, page and offset.

namespace kvire_test {

inline std::byte pattern(std::uint32_t seed, std::int64_t layer, std::int64_t at) {
  std::uint64_t x = static_cast<std::uint64_t>(seed) * 0x9E3779B97F4A7C15u + static_cast<std::uint64_t>(layer) * 0xD6E8FEB86659FD93u + static_cast<std::uint64_t>(at);
  x = (x ^ (x >> 31)) * 0xBF58476D1CE4E5B9u;
  return static_cast<std::byte>(x >> 56);
}

/// Fills a page in all layers.
template <class Pool>
void fill(Pool& pool, typename Pool::page_id page, std::uint32_t seed) {
  for (int layer = 0; layer < pool.layers(); ++layer) {
    std::byte* const bytes = kvire::pool_access::view(pool, kvire::EntrySlot(layer)).page(page.value);
    for (std::int64_t i = 0; i < Pool::policy::page_bytes; ++i) bytes[i] = pattern(seed, layer, i);
  }
}

/// True if `fill` made every byte of the page, in the layers [first, end).
template <class Pool>
bool holds(const Pool& pool, typename Pool::page_id page, std::uint32_t seed, int first = 0, int end = -1) {
  for (int layer = first; layer < (end < 0 ? pool.layers() : end); ++layer) {
    const std::byte* const bytes = kvire::pool_access::const_view(pool, kvire::EntrySlot(layer)).page(page.value);
    for (std::int64_t i = 0; i < Pool::policy::page_bytes; ++i) {
      if (bytes[i] != pattern(seed, layer, i)) return false;
    }
  }
  return true;
}

/// All bytes of the pool that any page has.
template <class Pool>
std::vector<std::byte> snapshot(const Pool& pool) {
  std::vector<std::byte> all;
  for (int layer = 0; layer < pool.layers(); ++layer) {
    const auto view = kvire::pool_access::const_view(pool, kvire::EntrySlot(layer));
    for (std::int32_t page = 0; page < pool.pages(); ++page) all.insert(all.end(), view.page(page), view.page(page) + Pool::policy::page_bytes);
  }
  return all;
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace kvire_test
