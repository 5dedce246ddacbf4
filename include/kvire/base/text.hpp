// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/std.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

constexpr bool equal_text(const char* a, const char* b) {
  while (*a != '\0' && *a == *b) ++a, ++b;
  return *a == *b;
}

// What texts and their lengths append by, one character at a time (Out::put).
template <class Out>
struct TextAppend {
  constexpr Out& operator<<(const char* s) {
    for (; *s != '\0'; ++s) out().put(*s);
    return out();
  }
  constexpr Out& operator<<(kstd::int64_t n) {
    char digits[20] = {};
    int count = 0;
    const bool negative = n < 0;
    auto rest = negative ? kstd::uint64_t(0) - static_cast<kstd::uint64_t>(n) : static_cast<kstd::uint64_t>(n);
    do {
      digits[count++] = static_cast<char>('0' + rest % 10);
      rest /= 10;
    } while (rest != 0);
    if (negative) out().put('-');
    while (count > 0) out().put(digits[--count]);
    return out();
  }
  constexpr Out& operator<<(int n) { return *this << static_cast<kstd::int64_t>(n); }

 private:
  constexpr Out& out() { return static_cast<Out&>(*this); }
};

struct TextLength : TextAppend<TextLength> {
  int size = 0;
  constexpr void put(char) { ++size; }
};

}  // namespace detail

/// A text built in a constant expression: what canonical forms are written in. Appending beyond the capacity is not a constant expression,
/// so an overlong text cannot be cut silently; `exact_text` has the capacity that it needs.
template <int Capacity>
struct Text : detail::TextAppend<Text<Capacity>> {
  char data[Capacity + 1] = {};
  int size = 0;

  constexpr const char* c_str() const { return data; }
  constexpr void put(char c) { data[size < Capacity ? size++ : longer_than_its_capacity()] = c; }

 private:
  static int longer_than_its_capacity() { return 0; }  // not constexpr on purpose
};

/// The text that `Write::to(out)` appends, whatever its length: it is called twice, first to count.
template <class Write>
constexpr auto exact_text() {
  constexpr int size = [] {
    detail::TextLength length;
    Write::to(length);
    return length.size;
  }();
  Text<size> text;
  Write::to(text);
  return text;
}

KVIRE_NAMESPACE_END
