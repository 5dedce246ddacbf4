// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/require.hpp>

KVIRE_NAMESPACE_BEGIN

/// An index into one space. Ids of different spaces do not convert or compare: a host page id cannot address a device pool.
/// 32 bits as engines store them; every product with a stride is formed in 64 bits.
template <class Tag>
struct Id {
  using tag = Tag;
  kstd::int32_t value = -1;

  constexpr Id() = default;
  KVIRE_HD constexpr explicit Id(kstd::int32_t v) : value(v) {}

  /// Refused with a reason: a wider number does not become an id unseen.
  template <class Number>
    requires(kstd::is_arithmetic_v<Number> && (!kstd::is_integral_v<Number> || sizeof(Number) > sizeof(kstd::int32_t)))
  KVIRE_HD constexpr explicit Id(Number) {
    (void)sizeof(rule::IdWidth<Tag, Number, !kstd::is_arithmetic_v<Number>>);
  }

  /// Refused with a reason: it exists so that the compiler says which two spaces were confused.
  template <class Other>
  KVIRE_HD constexpr Id(Id<Other>) {
    (void)sizeof(rule::SameIdSpace<Other, Tag>);
  }

  /// Negative ids mean "no page" (padding of a page table) and are skipped by every kernel and transfer.
  KVIRE_HD constexpr bool none() const { return value < 0; }

  KVIRE_HD friend constexpr bool operator==(Id a, Id b) { return a.value == b.value; }
  KVIRE_HD friend constexpr bool operator!=(Id a, Id b) { return a.value != b.value; }
  KVIRE_HD friend constexpr bool operator<(Id a, Id b) { return a.value < b.value; }
};

namespace detail {
struct DevicePageTag {
  static constexpr const char* name = "device page";
};
struct HostPageTag {
  static constexpr const char* name = "host page";
};
struct LayerTag {
  static constexpr const char* name = "layer";
};
struct EntrySlotTag {
  static constexpr const char* name = "entry slot";
};
}  // namespace detail

using DevicePage = Id<detail::DevicePageTag>;
using HostPage = Id<detail::HostPageTag>;
/// A layer of the model, counted from the model's first.
using LayerId = Id<detail::LayerTag>;
/// A layer of one cache entry: the position of a model layer among the layers that own the entry.
using EntrySlot = Id<detail::EntrySlotTag>;

/// Page 0 of every pool is the null page: padding rows point at it, nothing owns it, kernels drop writes to it.
inline constexpr kstd::int32_t null_page = 0;

KVIRE_NAMESPACE_END
