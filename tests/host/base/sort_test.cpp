// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include <kvire/base/sort.hpp>

using namespace kvire;

TEST_CASE("sort: as std::stable_sort, and lookups as in <algorithm>") {
  std::mt19937 random(7);
  for (const int n : {0, 1, 2, 3, 5, 17, 64, 1000}) {
    std::vector<std::pair<int, int>> list;
    for (int i = 0; i < n; ++i) list.emplace_back(static_cast<int>(random() % 50), i);
    auto expected = list;
    const auto by_first = [](const auto& a, const auto& b) { return a.first < b.first; };
    detail::sort(list, by_first);
    std::stable_sort(expected.begin(), expected.end(), by_first);
    CHECK(list == expected);

    std::vector<int> keys;
    for (const auto& pair : list) keys.push_back(pair.first);
    for (int key = -1; key <= 50; ++key) {
      CHECK(detail::contains(keys, key) == std::binary_search(keys.begin(), keys.end(), key));
      CHECK(static_cast<std::ptrdiff_t>(detail::lower_bound(keys.data(), keys.size(), key)) ==
            std::lower_bound(keys.begin(), keys.end(), key) - keys.begin());
    }
  }
}
