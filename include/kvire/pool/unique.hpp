// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include <kvire/base/sort.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// The ids of a list, each once and ascending, and one that the list names twice (-1: none).
template <class Int>
struct UniqueIds {
  std::vector<Int> ids;
  Int twice = -1;
};

/// For ids that are mostly in [0, bound): by a bitmap where that is cheaper than sorting, which is what checks of plans and leases would spend their time on.
template <class Int>
UniqueIds<Int> unique_ids(const std::vector<Int>& list, std::int64_t bound) {
  UniqueIds<Int> out;
  std::size_t ascending = 1;
  while (ascending < list.size() && list[ascending - 1] < list[ascending]) ++ascending;
  if (ascending >= list.size()) {
    out.ids = list;
    return out;
  }
  bool inside = true;
  for (const Int id : list) inside = inside && id >= 0 && id < bound;
  if (!inside || bound / 64 > 8 * static_cast<std::int64_t>(list.size())) {
    std::vector<Int> sorted = list;
    sort(sorted);
    for (const Int id : sorted) {
      if (out.ids.empty() || out.ids.back() != id) {
        out.ids.push_back(id);
      } else if (out.twice < 0) {
        out.twice = id;
      }
    }
    return out;
  }
  std::vector<std::uint64_t> seen(static_cast<std::size_t>(bound / 64 + 1));
  for (const Int id : list) {
    std::uint64_t& word = seen[static_cast<std::size_t>(id / 64)];
    const std::uint64_t bit = std::uint64_t(1) << (id % 64);
    if ((word & bit) != 0) out.twice = id;
    word |= bit;
  }
  out.ids.resize(list.size());
  std::size_t n = 0;
  for (std::size_t w = 0; w < seen.size(); ++w) {
    for (std::uint64_t word = seen[w]; word != 0; word &= word - 1) {
      out.ids[n++] = static_cast<Int>(static_cast<std::int64_t>(w) * 64 + std::countr_zero(word));
    }
  }
  out.ids.resize(n);
  return out;
}

}  // namespace detail

KVIRE_NAMESPACE_END
