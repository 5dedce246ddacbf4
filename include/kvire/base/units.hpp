// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/require.hpp>

KVIRE_NAMESPACE_BEGIN

/// A count of one kind of thing. Different kinds do not convert, add or compare: a length in raw tokens cannot reach a kernel that counts
/// cached tokens. Always 64 bits.
template <class Tag>
struct Quantity {
  kstd::int64_t count = 0;

  constexpr Quantity() = default;
  KVIRE_HD constexpr explicit Quantity(kstd::int64_t n) : count(n) {}

  /// Refused with a reason: it exists so that the compiler says which two units were confused.
  template <class Other>
  KVIRE_HD constexpr Quantity(Quantity<Other>) {
    (void)sizeof(rule::SameUnit<Other, Tag>);
  }

  KVIRE_HD constexpr Quantity& operator+=(Quantity b) {
    count += b.count;
    return *this;
  }
  KVIRE_HD constexpr Quantity& operator-=(Quantity b) {
    count -= b.count;
    return *this;
  }
  KVIRE_HD friend constexpr Quantity operator+(Quantity a, Quantity b) { return Quantity(a.count + b.count); }
  KVIRE_HD friend constexpr Quantity operator-(Quantity a, Quantity b) { return Quantity(a.count - b.count); }
  KVIRE_HD friend constexpr Quantity operator*(Quantity a, kstd::int64_t n) { return Quantity(a.count * n); }
  KVIRE_HD friend constexpr bool operator==(Quantity a, Quantity b) { return a.count == b.count; }
  KVIRE_HD friend constexpr bool operator!=(Quantity a, Quantity b) { return a.count != b.count; }
  KVIRE_HD friend constexpr bool operator<(Quantity a, Quantity b) { return a.count < b.count; }
  KVIRE_HD friend constexpr bool operator<=(Quantity a, Quantity b) { return a.count <= b.count; }
  KVIRE_HD friend constexpr bool operator>(Quantity a, Quantity b) { return a.count > b.count; }
  KVIRE_HD friend constexpr bool operator>=(Quantity a, Quantity b) { return a.count >= b.count; }
};

namespace detail {
struct RawTokensTag;
struct CachedTokensTag;
struct BytesTag;
struct ElementsTag;
struct PagesTag;
}  // namespace detail

/// Tokens of the sequence, as the model reads them.
using RawTokens = Quantity<detail::RawTokensTag>;
/// Entries of one cache: one per `ratio` raw tokens. What kernels call a length. Converted only by an entry's ratio (layout/bundle.hpp).
using CachedTokens = Quantity<detail::CachedTokensTag>;
using Bytes = Quantity<detail::BytesTag>;
using Elements = Quantity<detail::ElementsTag>;
using Pages = Quantity<detail::PagesTag>;

KVIRE_NAMESPACE_END
