// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/layout/fingerprint.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {
template <class Out>
constexpr void append_section(Out& out, const Section& s) {
  out << s.role;
  if (s.padding) {
    out << " " << s.count << " B";
  } else {
    out << " " << name_of(s.element) << " x" << s.count;
  }
}
constexpr bool equal_section(const Section& a, const Section& b) {
  return a.plane == b.plane && a.element == b.element && a.count == b.count && a.padding == b.padding && equal_text(a.role, b.role);
}

template <class P>
struct Description {
  template <class Out>
  static constexpr void to(Out& out) {
    out << P::name << ": " << P::tokens_per_page << " tokens, " << P::page_bytes << " B a page";
    for (int plane = 0; plane < P::plane_count; ++plane) {
      out << "\n  @" << P::table.plane_offset[plane] << "  " << P::table.row_bytes[plane] << " B a token: ";
      bool first = true;
      for (const Section& s : P::table.sections) {
        if (s.plane != plane) continue;
        out << (first ? "" : ", ");
        append_section(out, s);
        first = false;
      }
    }
    if (P::page_bytes != P::used_bytes) out << "\n  @" << P::used_bytes << "  page padding " << (P::page_bytes - P::used_bytes) << " B";
    if constexpr (P::Scaling::formula != ScaleFormula::none) {
      out << "\n  scale: one per " << P::Scaling::block << " of " << P::Scaling::of::name << ", " << name_of(P::Scaling::formula);
    }
    out << "\n  content: " << P::Content::text;
  }
};
}  // namespace detail

/// A page in words, one line a plane: bytes from the start of the page, bytes a row, sections in order. For people and messages.
template <class P>
constexpr auto describe() {
  return exact_text<detail::Description<P>>();
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

namespace detail {
template <class P>
constexpr const char* scaled_role() {
  if constexpr (kstd::is_void_v<typename P::Scaling::of>) {
    return "nothing";
  } else {
    return P::Scaling::of::name;
  }
}

template <class A, class B>
struct Difference {
  template <class Out>
  static constexpr void to(Out& out) {
    if (same_layout<A, B>) return;
    out << A::name << " (" << A::page_bytes << " B a page) and " << B::name << " (" << B::page_bytes << " B a page) differ: ";
    constexpr int at = first_difference<A, B>();
    if constexpr (at >= 0) {
      out << "section " << at << " is ";
      section<A, at>(out);
      out << " against ";
      section<B, at>(out);
    } else if constexpr (A::tokens_per_page != B::tokens_per_page) {
      out << A::tokens_per_page << " against " << B::tokens_per_page << " tokens a page";
    } else if constexpr (A::page_bytes != B::page_bytes) {
      out << "page padding " << (A::page_bytes - A::used_bytes) << " against " << (B::page_bytes - B::used_bytes) << " B";
    } else if (!equal_text(A::Content::text, B::Content::text)) {
      out << "content " << A::Content::text << " against " << B::Content::text;
    } else {
      scale_rule<A>(out << "scale rule ");
      scale_rule<B>(out << " against ");
    }
  }

 private:
  template <class P, int At, class Out>
  static constexpr void section(Out& out) {
    if constexpr (At < P::section_count) {
      append_section(out, P::table.sections[At]);
      out << " in plane " << P::table.sections[At].plane;
    } else {
      out << "absent";
    }
  }
  template <class P, class Out>
  static constexpr void scale_rule(Out& out) {
    out << name_of(P::Scaling::formula) << " per " << P::Scaling::block << " of " << scaled_role<P>();
  }
};
}  // namespace detail

/// Says where two policies part: the first differing section of each with its plane, or the first other difference. Empty if they are one layout.
template <class A, class B>
constexpr auto diff() {
  return exact_text<detail::Difference<A, B>>();
}

KVIRE_NAMESPACE_END
