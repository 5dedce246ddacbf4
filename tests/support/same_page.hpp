// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <kvire/codec/row.hpp>

namespace kvire_test {

/// Where two runs of pages differ first, or "". Bytes, except that one bf16 NaN is as good as another.
template <class P>
std::string first_difference(const std::vector<std::byte>& actual, const std::vector<std::byte>& expected) {
  if (actual.size() != expected.size()) return "sizes differ";
  std::vector<bool> excused(static_cast<std::size_t>(P::page_bytes));
  std::string found;
  for (std::size_t start = 0; start < actual.size() && found.empty(); start += static_cast<std::size_t>(P::page_bytes)) {
    excused.assign(excused.size(), false);
    // Written out, because nvcc warns where for_each_field, which kernels use too, calls a lambda of the host alone.
    const auto excuse = [&](auto field) {
      using F = decltype(field);
      if constexpr (F::logical && F::element == kvire::Element::bf16) {
        for (int token = 0; token < P::tokens_per_page; ++token) {
          for (int i = 0; i < F::count; ++i) {
            const auto at = static_cast<std::size_t>(F::offset(token)) + 2 * static_cast<std::size_t>(i);
            const auto code = [&](const std::vector<std::byte>& bytes) {
              return kvire::load_code<kvire::Element::bf16>(bytes.data() + start + at, 0);
            };
            if ((code(actual) & 0x7FFF) > 0x7F80 && (code(expected) & 0x7FFF) > 0x7F80) excused[at] = excused[at + 1] = true;
          }
        }
      }
    };
    [&]<int... I>(std::integer_sequence<int, I...>) { (excuse(kvire::RowField<P, I>{}), ...); }(std::make_integer_sequence<int, P::section_count>{});
    for (std::size_t i = 0; i < excused.size(); ++i) {
      if (actual[start + i] == expected[start + i] || excused[i]) continue;
      found = "page " + std::to_string(start / excused.size()) + ", byte " + std::to_string(i) + ": " +
              std::to_string(static_cast<int>(actual[start + i])) + ", expected " + std::to_string(static_cast<int>(expected[start + i]));
      break;
    }
  }
  return found;
}

}  // namespace kvire_test
