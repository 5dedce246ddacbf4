// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/ints.hpp>
#include <kvire/base/text.hpp>
#include <kvire/layout/scale_rule.hpp>

KVIRE_NAMESPACE_BEGIN

/// One section of a row: a field or declared padding. Offsets in bits from the start of the row, so that sub-byte fields are exact.
struct Section {
  const char* role = "pad";
  Element element = Element::u8;
  int count = 0;
  int plane = 0;
  kstd::int64_t row_offset_bits = 0;
  kstd::int64_t size_bits = 0;
  bool padding = false;
};

namespace detail {

template <class Role>
struct RoleName {
  static constexpr const char* value = Role::name;
};
template <>
struct RoleName<void> {
  static constexpr const char* value = "pad";
};

template <int SectionCount, int PlaneCount>
struct PageTable {
  Section sections[SectionCount] = {};
  kstd::int64_t plane_offset[PlaneCount] = {};
  kstd::int64_t row_bytes[PlaneCount] = {};
  kstd::int64_t used_bytes = 0;
  kstd::int64_t page_bytes = 0;
};

template <class Table, class... Parts>
constexpr void add_plane(Table& table, int& section, int plane, int tokens, Plane<Parts...>) {
  kstd::int64_t at = 0;
  ((table.sections[section++] = Section{RoleName<typename Parts::role>::value, Parts::element, Parts::count, plane, at, Parts::size_bits,
                                        Parts::is_padding},
    at += Parts::size_bits),
   ...);
  table.plane_offset[plane] = table.used_bytes;
  table.row_bytes[plane] = Plane<Parts...>::row_bytes;
  table.used_bytes += Plane<Parts...>::row_bytes * tokens;
}

template <int Tokens, int Multiple, class... Planes>
constexpr auto make_page_table() {
  PageTable<(Planes::part_count + ...), sizeof...(Planes)> table;
  int section = 0;
  int plane = 0;
  (add_plane(table, section, plane++, Tokens, Planes{}), ...);
  table.page_bytes = align_up<kstd::int64_t>(table.used_bytes, max_of(Multiple, 1));  // an illegal one has a rule of its own
  return table;
}

/// ";plane{value:e4m3*128};plane{scale:f32*1}": the planes as canonical forms have them.
template <class Out, class Table>
constexpr void write_planes(Out& out, const Table& table) {
  int plane = -1;
  for (const Section& s : table.sections) {
    out << (s.plane == plane ? "," : plane < 0 ? ";plane{" : "};plane{") << s.role << ":" << name_of(s.element) << "*" << s.count;
    plane = s.plane;
  }
  out << "}";
}

// What a policy without a name of its own is called, so that messages tell two of them apart.
template <int Tokens, class... Planes>
struct UnnamedLayout {
  template <class Out>
  static constexpr void to(Out& out) {
    out << "PageLayout(tokens=" << Tokens;
    write_planes(out, make_page_table<Tokens, 1, Planes...>());
    out << ")";
  }
};
template <int Tokens, class... Planes>
inline constexpr auto unnamed_layout = exact_text<UnnamedLayout<Tokens, Planes...>>();

// Index of the section with a role among the sections of all planes, by type and not by name; -1 if absent.
template <class Role, class... Parts>
constexpr int find_role(int base, Plane<Parts...>) {
  int at = base;
  int found = -1;
  ((found = kstd::is_same_v<typename Parts::role, Role> && found < 0 ? at : found, ++at), ...);
  return found;
}

}  // namespace detail

/// Base of every layout policy: a page is a sequence of planes, a plane is `Tokens` rows, a row is a sequence of fields and declared
/// padding; the page is padded to a multiple of `Multiple` bytes. A policy is a named empty struct that derives from this and may
/// redefine `name` (for messages; without one they spell out the planes), `Scaling` and `Content`:
///
///     struct MyKeys : kvire::PageLayout<64, 1, kvire::Plane<kvire::Field<kvire::role::Value, kvire::Element::bf16, 96>>> {
///       static constexpr const char* name = "MyKeys";
///     };
///
/// All members are static: a policy is used as a type, on the host and in kernels alike.
template <int Tokens, int Multiple, class... Planes>
struct PageLayout {
  using layout = PageLayout;
  using Scaling = NoScale;
  using Content = content::Plain;
  static constexpr const char* name = detail::unnamed_layout<Tokens, Planes...>.data;

  static constexpr int tokens_per_page = Tokens;
  static constexpr int page_multiple = Multiple;
  static constexpr int plane_count = sizeof...(Planes);
  static constexpr int section_count = (Planes::part_count + ... + 0);

  /// The whole geometry, for constant expressions; device code uses the functions below.
  static constexpr auto table = detail::make_page_table<Tokens, Multiple, Planes...>();

  static constexpr kstd::int64_t page_bytes = table.page_bytes;
  /// Bytes of the page that planes cover; the rest is declared page padding.
  static constexpr kstd::int64_t used_bytes = table.used_bytes;

  /// Index of the section that serves `Role`, or -1.
  template <class Role>
  static constexpr int section_of = [] {
    int found = -1;
    int base = 0;
    ((found = found >= 0 ? found : detail::find_role<Role>(base, Planes{}), base += Planes::part_count), ...);
    return found;
  }();

  template <class Role>
  static constexpr bool has = section_of<Role> >= 0;

  /// Elements of the role in one row; 0 if the policy does not have it.
  template <class Role>
  static constexpr int count_of = has<Role> ? table.sections[has<Role> ? section_of<Role> : 0].count : 0;

  /// Its element; of no meaning without `has<Role>`.
  template <class Role>
  static constexpr Element element_of = table.sections[has<Role> ? section_of<Role> : 0].element;

  /// Logical elements of one token: every field but the scales and padding.
  static constexpr int dim = [] {
    int n = 0;
    for (int s = 0; s < section_count; ++s) {
      if (!table.sections[s].padding && s != section_of<role::Scale>) n += table.sections[s].count;
    }
    return n;
  }();

  /// Byte offset, from the start of the page, of the first element of `Role` in row `token` (0 <= token < tokens_per_page).
  template <class Role>
  KVIRE_HD static constexpr kstd::int64_t offset(int token) {
    static_assert(has<Role>,
                  "kvire [layout.no-such-field]: a policy answers only for the fields it declares. The offset of an absent field would be "
                  "another field's bytes. Fix: ask for a role of this policy, or add the field to its planes.");
    constexpr kstd::int64_t start = section_start<section_of<Role>>;
    constexpr kstd::int64_t stride = section_stride<section_of<Role>>;
    return start + stride * token;
  }

  /// Byte offset of plane `I` from the start of the page.
  template <int I>
  KVIRE_HD static constexpr kstd::int64_t plane_offset() {
    constexpr kstd::int64_t value = table.plane_offset[I];
    return value;
  }

  /// Bytes of one row of plane `I`, padding included.
  template <int I>
  KVIRE_HD static constexpr kstd::int64_t row_bytes() {
    constexpr kstd::int64_t value = table.row_bytes[I];
    return value;
  }

  /// Widest power of two (at most 16 bytes) by which every row of plane `I` can be moved, whatever the page, if pages start on 16 bytes.
  template <int I>
  static constexpr int row_vector_bytes =
      static_cast<int>(power_of_two_divisor(table.plane_offset[I] | table.row_bytes[I] | table.page_bytes, kstd::int64_t(16)));

  /// The same for whole pages.
  static constexpr int page_vector_bytes = static_cast<int>(power_of_two_divisor(page_bytes, kstd::int64_t(16)));

 private:
  template <int S>
  static constexpr kstd::int64_t section_start =
      S < 0 ? 0 : table.plane_offset[table.sections[S < 0 ? 0 : S].plane] + table.sections[S < 0 ? 0 : S].row_offset_bits / 8;
  template <int S>
  static constexpr kstd::int64_t section_stride = S < 0 ? 0 : table.row_bytes[table.sections[S < 0 ? 0 : S].plane];
};

KVIRE_NAMESPACE_END
