// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/std.hpp>

KVIRE_NAMESPACE_BEGIN

/// A text built in a constant expression: what canonical forms are written in. Appending beyond the capacity is not a constant expression,
/// so an overlong text cannot be cut silently.
template <int Capacity>
struct Text {
  char data[Capacity + 1] = {};
  int size = 0;

  constexpr Text& operator<<(const char* s) {
    for (; *s != '\0'; ++s) data[size < Capacity ? size++ : overflow()] = *s;
    return *this;
  }
  template <int N>
  constexpr Text& operator<<(const Text<N>& other) {
    return *this << static_cast<const char*>(other.data);
  }
  constexpr Text& operator<<(kstd::int64_t n) {
    char digits[20] = {};
    int count = 0;
    const bool negative = n < 0;
    auto rest = negative ? kstd::uint64_t(0) - static_cast<kstd::uint64_t>(n) : static_cast<kstd::uint64_t>(n);
    do {
      digits[count++] = static_cast<char>('0' + rest % 10);
      rest /= 10;
    } while (rest != 0);
    if (negative) data[size < Capacity ? size++ : overflow()] = '-';
    while (count > 0) data[size < Capacity ? size++ : overflow()] = digits[--count];
    return *this;
  }
  constexpr Text& operator<<(int n) { return *this << static_cast<kstd::int64_t>(n); }

  constexpr const char* c_str() const { return data; }

 private:
  static int overflow() { return 0; }  // not constexpr on purpose
};

KVIRE_NAMESPACE_END
