// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/layout/page.hpp>

KVIRE_NAMESPACE_BEGIN

/// A half-open run [first, first + size) of bits or bytes.
struct Extent {
  kstd::int64_t first = 0;
  kstd::int64_t size = 0;
};

/// True if the extents tile [0, total) with no gap and no overlap, in whatever order they come. Sorting and walking costs a handful of
/// steps a page; visiting every byte would exceed the constant-evaluation limits of clang and nvcc on 256-token pages.
template <int N>
constexpr bool tiles_exactly(const Extent (&extents)[N], kstd::int64_t total) {
  Extent sorted[N] = {};
  for (int i = 0; i < N; ++i) {
    int at = i;
    for (; at > 0 && extents[i].first < sorted[at - 1].first; --at) sorted[at] = sorted[at - 1];
    sorted[at] = extents[i];
  }
  kstd::int64_t end = 0;
  for (int i = 0; i < N; ++i) {
    if (sorted[i].first != end || sorted[i].size < 0) return false;
    end += sorted[i].size;
  }
  return end == total;
}

/// Every byte of a page belongs to exactly one field or to declared padding: planes and page padding tile the page, sections tile each row. Pages
/// are as large as the table says, which offsets and vector widths go by.
template <class P>
constexpr bool covers_exactly_once() {
  if (P::page_bytes != P::table.page_bytes) return false;
  Extent planes[P::plane_count + 1] = {};
  for (int i = 0; i < P::plane_count; ++i) planes[i] = {P::table.plane_offset[i], P::table.row_bytes[i] * P::tokens_per_page};
  planes[P::plane_count] = {P::used_bytes, P::page_bytes - P::used_bytes};
  if (!tiles_exactly(planes, P::page_bytes)) return false;
  for (int plane = 0; plane < P::plane_count; ++plane) {
    // Sections of other planes become empty extents at the row's end, so that one array size serves all planes.
    const kstd::int64_t row_bits = P::table.row_bytes[plane] * 8;
    Extent row[P::section_count] = {};
    for (int s = 0; s < P::section_count; ++s) {
      const Section& section = P::table.sections[s];
      row[s] = section.plane == plane ? Extent{section.row_offset_bits, section.size_bits} : Extent{row_bits, 0};
    }
    if (!tiles_exactly(row, row_bits)) return false;
  }
  return true;
}

/// Every field starts on a whole byte and every row fills whole bytes.
template <class P>
constexpr bool whole_bytes() {
  for (const Section& s : P::table.sections) {
    if (s.row_offset_bits % 8 != 0) return false;
  }
  kstd::int64_t row_bits[P::plane_count] = {};
  for (const Section& s : P::table.sections) row_bits[s.plane] += s.size_bits;
  for (int i = 0; i < P::plane_count; ++i) {
    if (row_bits[i] % 8 != 0) return false;
  }
  return true;
}

/// Index of the first section some row of which would be misaligned for its element, or -1. Pages are taken to start on 16 bytes or on the
/// largest power of two that divides the page, whichever is smaller.
template <class P>
constexpr int first_misaligned() {
  for (int i = 0; i < P::section_count; ++i) {
    const Section& s = P::table.sections[i];
    const kstd::int64_t all = P::page_bytes | P::table.plane_offset[s.plane] | P::table.row_bytes[s.plane] | (s.row_offset_bits / 8);
    if (!s.padding && all % alignment(s.element) != 0) return i;
  }
  return -1;
}

/// No role is served by two fields, so that asking for a role has one answer.
template <class P>
constexpr bool roles_are_unique() {
  for (int i = 0; i < P::section_count; ++i) {
    for (int j = i + 1; j < P::section_count; ++j) {
      const Section& a = P::table.sections[i];
      const Section& b = P::table.sections[j];
      if (!a.padding && !b.padding && detail::equal_text(a.role, b.role)) return false;
    }
  }
  return true;
}

template <class P>
constexpr bool counts_are_positive() {
  for (const Section& s : P::table.sections) {
    if (s.count <= 0) return false;
  }
  return P::tokens_per_page > 0 && P::page_multiple > 0;
}

/// Elements that the scale rule covers, and the elements its scales can cover: equal when every block has exactly one scale.
template <class P>
constexpr kstd::int64_t scaled_elements() {
  if constexpr (kstd::is_void_v<typename P::Scaling::of>) {
    return 0;
  } else {
    return P::template count_of<typename P::Scaling::of>;
  }
}
template <class P>
constexpr kstd::int64_t scale_capacity() {
  return static_cast<kstd::int64_t>(P::template count_of<role::Scale>) * P::Scaling::block;
}

/// A scale field has a rule that fills it, and a rule has a formula, a scale field and a field to scale.
template <class P>
constexpr bool scale_has_rule() {
  constexpr bool formula = P::Scaling::formula != ScaleFormula::none;
  if constexpr (kstd::is_void_v<typename P::Scaling::of>) {
    return !P::template has<role::Scale> && !formula;
  } else {
    return P::template has<role::Scale> && P::template has<typename P::Scaling::of> && formula;
  }
}

/// Calls f(first byte, bytes) for each contiguous run that rows [first, first + count) of a page occupy: one run a plane, or a single
/// one where the rows are the whole page (its padding included).
template <class P, class F>
KVIRE_HD constexpr void for_each_run(int first, int count, F&& f) {
  if (first == 0 && count == P::tokens_per_page) {
    f(kstd::int64_t(0), P::page_bytes);
    return;
  }
  [&]<int... I>(kstd::integer_sequence<int, I...>) {
    (f(P::template plane_offset<I>() + P::template row_bytes<I>() * first, P::template row_bytes<I>() * count), ...);
  }(kstd::make_integer_sequence<int, P::plane_count>{});
}

KVIRE_NAMESPACE_END
