// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/layout/fingerprint.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {
constexpr void append_section(Text<2048>& out, const Section& s) {
  out << s.role;
  if (s.padding) {
    out << " " << s.count << " B";
  } else {
    out << " " << name_of(s.element) << " x" << s.count;
  }
}
constexpr bool equal_text(const char* a, const char* b) {
  while (*a != '\0' && *a == *b) ++a, ++b;
  return *a == *b;
}
constexpr bool equal_section(const Section& a, const Section& b) {
  return a.plane == b.plane && a.element == b.element && a.count == b.count && a.padding == b.padding && equal_text(a.role, b.role);
}
}  // namespace detail

/// A page in words, one line a plane: bytes from the start of the page, bytes a row, sections in order. For people and messages.
template <class P>
constexpr Text<2048> describe() {
  Text<2048> out;
  out << P::name << ": " << P::tokens_per_page << " tokens, " << P::page_bytes << " B a page";
  for (int plane = 0; plane < P::plane_count; ++plane) {
    out << "\n  @" << P::table.plane_offset[plane] << "  " << P::table.row_bytes[plane] << " B a token: ";
    bool first = true;
    for (const Section& s : P::table.sections) {
      if (s.plane != plane) continue;
      out << (first ? "" : ", ");
      detail::append_section(out, s);
      first = false;
    }
  }
  if (P::page_bytes != P::used_bytes) out << "\n  @" << P::used_bytes << "  page padding " << (P::page_bytes - P::used_bytes) << " B";
  if constexpr (P::Scaling::formula != ScaleFormula::none) {
    out << "\n  scale: one per " << P::Scaling::block << " of " << P::Scaling::of::name << ", " << name_of(P::Scaling::formula);
  }
  out << "\n  content: " << P::Content::text;
  return out;
}

/// Index of the first section in which two policies differ, counted through all planes; the number of common sections if one merely has
/// more; -1 if the sections are the same (tokens per page, padding, scale rule or content may still differ).
template <class A, class B>
constexpr int first_difference() {
  constexpr int common = A::section_count < B::section_count ? A::section_count : B::section_count;
  for (int i = 0; i < common; ++i) {
    if (!detail::equal_section(A::table.sections[i], B::table.sections[i])) return i;
  }
  return A::section_count == B::section_count ? -1 : common;
}

/// Says where two policies part: the first differing section of each with its plane, or the first other difference. Empty if they are one layout.
template <class A, class B>
constexpr Text<2048> diff() {
  Text<2048> out;
  if (same_layout<A, B>) return out;
  out << A::name << " (" << A::page_bytes << " B a page) and " << B::name << " (" << B::page_bytes << " B a page) differ: ";
  constexpr int at = first_difference<A, B>();
  if constexpr (at >= 0) {
    out << "section " << at << " is ";
    if constexpr (at < A::section_count) {
      detail::append_section(out, A::table.sections[at]);
      out << " in plane " << A::table.sections[at].plane;
    } else {
      out << "absent";
    }
    out << " against ";
    if constexpr (at < B::section_count) {
      detail::append_section(out, B::table.sections[at]);
      out << " in plane " << B::table.sections[at].plane;
    } else {
      out << "absent";
    }
  } else if constexpr (A::tokens_per_page != B::tokens_per_page) {
    out << A::tokens_per_page << " against " << B::tokens_per_page << " tokens a page";
  } else if constexpr (A::page_bytes != B::page_bytes) {
    out << "page padding " << (A::page_bytes - A::used_bytes) << " against " << (B::page_bytes - B::used_bytes) << " B";
  } else if (!detail::equal_text(A::Content::text, B::Content::text)) {
    out << "content " << A::Content::text << " against " << B::Content::text;
  } else {
    out << "scale rule " << name_of(A::Scaling::formula) << " against " << name_of(B::Scaling::formula) << ", block " << A::Scaling::block << " against "
        << B::Scaling::block;
  }
  return out;
}

KVIRE_NAMESPACE_END
