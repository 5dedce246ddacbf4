// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include <kvire/base/config.hpp>

/// The few algorithms on lists that the library needs: <algorithm> alone takes a fifth of the time in which <vector>, <string> and <thread>
/// are parsed.

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// Sorts a list; equal elements keep their order. A list in order already is only looked at.
template <class T, class Less>
void sort(std::vector<T>& list, Less less) {
  const std::size_t n = list.size();
  std::size_t sorted = 1;
  while (sorted < n && !less(list[sorted], list[sorted - 1])) ++sorted;
  if (sorted >= n) return;
  std::vector<T> merged(n);
  for (std::size_t width = 1; width < n; width *= 2) {
    for (std::size_t begin = 0; begin < n; begin += 2 * width) {
      const std::size_t middle = n - begin < width ? n : begin + width;
      const std::size_t end = n - middle < width ? n : middle + width;
      std::size_t a = begin;
      std::size_t b = middle;
      for (std::size_t to = begin; to < end; ++to) {
        const bool second = a == middle || (b != end && less(list[b], list[a]));
        merged[to] = std::move(list[second ? b : a]);
        second ? ++b : ++a;
      }
    }
    list.swap(merged);
  }
}
template <class T>
void sort(std::vector<T>& list) {
  sort(list, [](const T& a, const T& b) { return a < b; });
}

/// Index of the first element that is not below `value`, in an ascending list of `n` elements; n if there is none.
template <class T>
std::size_t lower_bound(const T* list, std::size_t n, const T& value) {
  std::size_t first = 0;
  while (n > 0) {
    const std::size_t half = n / 2;
    if (list[first + half] < value) {
      first += half + 1;
      n -= half + 1;
    } else {
      n = half;
    }
  }
  return first;
}

/// True if an ascending list has the value.
template <class T>
bool contains(const std::vector<T>& ascending, const T& value) {
  const std::size_t at = detail::lower_bound(ascending.data(), ascending.size(), value);
  return at < ascending.size() && ascending[at] == value;
}

}  // namespace detail

KVIRE_NAMESPACE_END
