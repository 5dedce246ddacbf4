// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/layout/bundle.hpp>
#include <kvire/layout/describe.hpp>

/// What `kvire_add_layout_check` generates code for: a project states the bytes and the fingerprint of its layouts once more, outside the
/// code that defines them, so that a change of format cannot pass unseen.

KVIRE_NAMESPACE_BEGIN

namespace rule {
template <class T, kstd::int64_t Bytes, kstd::int64_t StatedBytes>
struct ExpectedBytes {
  static_assert(Bytes == StatedBytes,
                "kvire [layout.expected-bytes]: a layout has the bytes that this project's layout check states. Pages that a peer or a file "
                "already holds are cut as stated. Fix: undo the change of the layout, or state the new bytes and drop the old pages.");
};
/// A number by its hex digits, so that compilers print it as baselines have it.
template <char... Digits>
struct Hex;
template <class T, class Fingerprint, class StatedFingerprint>
struct ExpectedFingerprint {
  static_assert(kstd::is_same_v<Fingerprint, StatedFingerprint>,
                "kvire [layout.expected-fingerprint]: a layout has the fingerprint that this project's layout check states. Equal bytes in another order "
                "or with another meaning would be read as garbage. Fix: undo the change of the layout, or state the new fingerprint and drop the old pages.");
};
}  // namespace rule

namespace detail {
constexpr char hex_digit(kstd::uint64_t number, int place) { return "0123456789abcdef"[(number >> (60 - 4 * place)) & 15]; }
template <kstd::uint64_t Number, int... Place>
rule::Hex<hex_digit(Number, Place)...> hex(kstd::integer_sequence<int, Place...>);
}  // namespace detail

/// Bytes of one page: of a policy, or of one page id in each space of a bundle, added up.
template <class T>
constexpr kstd::int64_t layout_bytes() {
  if constexpr (requires { T::entry_count; }) {
    kstd::int64_t n = 0;
    T::for_each([&]<class Entry>() {
      if (T::template first_of_space<Entry>) n += T::template page_bytes<typename Entry::space>().count;
    });
    return n;
  } else {
    return T::page_bytes;
  }
}

/// The 64-bit fingerprint of a policy or of a bundle.
template <class T>
constexpr kstd::uint64_t layout_fingerprint() {
  if constexpr (requires { T::entry_count; }) {
    return bundle_fingerprint64<T>;
  } else {
    return fingerprint64<T>;
  }
}

/// Runs every proof of a policy or a bundle.
template <class T>
constexpr bool require_expected() {
  if constexpr (requires { T::entry_count; }) {
    return T::require();
  } else {
    return require_layout<T>();
  }
}

/// The same, and the page's bytes are those stated.
template <class T, kstd::int64_t StatedBytes>
constexpr bool require_expected() {
  (void)sizeof(rule::ExpectedBytes<T, layout_bytes<T>(), StatedBytes>);
  return require_expected<T>();
}

/// The same, and the 64-bit fingerprint is the one stated.
template <class T, kstd::int64_t StatedBytes, kstd::uint64_t StatedFingerprint>
constexpr bool require_expected() {
  using Places = kstd::make_integer_sequence<int, 16>;
  (void)sizeof(rule::ExpectedFingerprint<T, decltype(detail::hex<layout_fingerprint<T>()>(Places{})), decltype(detail::hex<StatedFingerprint>(Places{}))>);
  return require_expected<T, StatedBytes>();
}

/// A line of a baseline file, without the type's name: "<bytes> <16 hex digits>".
template <class T>
constexpr Text<64> baseline_numbers() {
  Text<64> out;
  out << layout_bytes<T>() << " ";
  for (int place = 0; place < 16; ++place) out.put(detail::hex_digit(layout_fingerprint<T>(), place));
  return out;
}

KVIRE_NAMESPACE_END
