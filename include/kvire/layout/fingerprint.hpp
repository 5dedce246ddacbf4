// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/hash.hpp>
#include <kvire/base/text.hpp>
#include <kvire/layout/require.hpp>

KVIRE_NAMESPACE_BEGIN

/// Version of the canonical form. A change of the form is a new version, never a new meaning of an old text.
inline constexpr int fingerprint_version = 1;

namespace detail {
template <class P>
struct CanonicalPage {
  template <class Out>
  static constexpr void to(Out& out) {
    out << "kvire.page/" << fingerprint_version << ";tokens=" << P::tokens_per_page;
    write_planes(out, P::table);
    out << ";pad=" << (P::page_bytes - P::used_bytes) << ";scale=";
    if constexpr (P::Scaling::formula == ScaleFormula::none) {
      out << "none";
    } else {
      out << P::Scaling::of::name << "/" << P::Scaling::block << ":" << name_of(P::Scaling::formula);
    }
    out << ";content=" << P::Content::text;
  }
};
}  // namespace detail

/// The canonical form of a policy: everything that decides what a byte of a page means, as one line of ASCII. Neither C++ names nor the
/// arrangement of pages take part. Example (Fp8WithScale<64, 128>):
///
///     kvire.page/1;tokens=64;plane{value:e4m3*128};plane{scale:f32*1};pad=0;scale=value/128:max(amax,1e-4)/max;content=plain
template <class P>
constexpr auto canonical_text() {
  return exact_text<detail::CanonicalPage<P>>();
}

/// A hash as 32 hex digits, most significant first.
constexpr Text<32> hex_text(const Hash128& hash) {
  Text<32> out;
  for (int i = 0; i < 32; ++i) {
    const kstd::uint64_t word = i < 16 ? hash.high : hash.low;
    out.put("0123456789abcdef"[(word >> (60 - 4 * (i % 16))) & 15]);
  }
  return out;
}

/// 128 bits for what persists: the first half of the SHA-256 of the canonical form.
template <class P>
inline constexpr Hash128 fingerprint128 = [] {
  static_assert(require_layout<P>());
  constexpr auto text = canonical_text<P>();
  return hash_text(text.data, text.size);
}();

/// 64 bits for types and messages: the first half of fingerprint128.
template <class P>
inline constexpr kstd::uint64_t fingerprint64 = fingerprint128<P>.high;

/// Two policies with equal bytes and equal meaning are one layout, whatever their C++ names.
template <class A, class B>
inline constexpr bool same_layout = fingerprint128<A> == fingerprint128<B>;
template <class A>
inline constexpr bool same_layout<A, A> = true;

KVIRE_NAMESPACE_END
