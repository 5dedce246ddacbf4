// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/ints.hpp>

KVIRE_NAMESPACE_BEGIN

/// The order of pages and layers in one allocation. Both are ways to compute a base per layer and a page stride; reordering between
/// them is a legal transfer, since neither changes a page.
enum class Arrangement : unsigned char {
  layer_first,  ///< address = layer * pages * page_bytes + page * page_bytes
  page_first    ///< address = page * layers * page_bytes + layer * page_bytes
};

/// Bytes from the start of the allocation to page 0 of a layer, and from a page to the next of the same layer.
struct Strides {
  kstd::int64_t layer_bytes = 0;
  kstd::int64_t page_bytes = 0;

  KVIRE_HD constexpr kstd::int64_t offset(kstd::int64_t layer, kstd::int64_t page) const { return layer * layer_bytes + page * page_bytes; }
};

/// Strides of `layers` x `pages` pages of `page_bytes` bytes. Sizes are trusted here; pools check them with checked_mul.
KVIRE_HD constexpr Strides strides_of(Arrangement arrangement, kstd::int64_t layers, kstd::int64_t pages, kstd::int64_t page_bytes) {
  return arrangement == Arrangement::layer_first ? Strides{pages * page_bytes, page_bytes} : Strides{page_bytes, layers * page_bytes};
}

constexpr const char* name_of(Arrangement arrangement) { return arrangement == Arrangement::layer_first ? "layer_first" : "page_first"; }

KVIRE_NAMESPACE_END
