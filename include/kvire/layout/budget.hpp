// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/ints.hpp>
#include <kvire/layout/bundle.hpp>

KVIRE_NAMESPACE_BEGIN

/// Pages of one policy over `layers` layers that a budget holds; never more bytes than the budget.
template <class P>
constexpr Pages pages_in(Bytes budget, int layers = 1) {
  return Pages(budget.count < 0 || layers <= 0 ? 0 : budget.count / P::page_bytes / layers);
}

/// Pages of each space of a bundle, in the order of Bundle::space_index.
template <class Bundle>
struct BundlePages {
  kstd::int64_t count[Bundle::space_count] = {};

  template <class Space>
  constexpr kstd::int64_t& of() {
    return count[Bundle::template index_of_space<Space>()];
  }
  template <class Space>
  constexpr kstd::int64_t of() const {
    return count[Bundle::template index_of_space<Space>()];
  }

  /// Bytes of all pages of all spaces, over the model's first `layers` layers. The largest number there is where they do not fit 63 bits;
  /// a negative count is taken for 0.
  constexpr Bytes bytes(int layers = Bundle::layers) const {
    kstd::int64_t n = 0;
    Bundle::template for_each([&]<class Entry>() {
      const kstd::int64_t pages = max_of(count[Bundle::template space_index<typename Entry::space>()], kstd::int64_t(0));
      n = checked_add(n, checked_mul(Entry::policy::page_bytes * Entry::slots(layers), pages));
    });
    return Bytes(n < 0 ? INT64_C(0x7FFFFFFFFFFFFFFF) : n);
  }
};

/// Pages of a space per page of the leading space: numerator / denominator, rounded up, and at least `minimum`. The largest number there is
/// where that does not fit 63 bits, or the ratio is none (a numerator below 0, a denominator below 1): no budget holds so many.
struct PageRatio {
  kstd::int64_t numerator = 1;
  kstd::int64_t denominator = 1;
  kstd::int64_t minimum = 1;

  constexpr kstd::int64_t apply(kstd::int64_t leading) const {
    const kstd::int64_t product = checked_mul(leading, numerator);
    if (product < 0 || denominator < 1) return INT64_C(0x7FFFFFFFFFFFFFFF);
    return max_of(ceil_div(product, denominator), minimum);
  }
};

/// Pages of every space for `leading` pages of the first space; `ratios[i]` belongs to space i, and that of space 0 is not used.
template <class Bundle>
constexpr BundlePages<Bundle> pages_for(kstd::int64_t leading, const PageRatio (&ratios)[Bundle::space_count]) {
  BundlePages<Bundle> pages;
  for (int i = 0; i < Bundle::space_count; ++i) pages.count[i] = i == 0 ? leading : ratios[i].apply(leading);
  return pages;
}

/// The most pages whose bytes, summed over all spaces and entries, stay within the budget. All counts are 0 if not even one leading page fits,
/// or `layers` is none of the model's.
template <class Bundle>
constexpr BundlePages<Bundle> pages_in_budget(Bytes budget, const PageRatio (&ratios)[Bundle::space_count], int layers = Bundle::layers) {
  if (layers < 1 || layers > Bundle::layers) return {};
  kstd::int64_t low = 0;
  kstd::int64_t high = INT64_C(1) << 31;  // page ids are 32 bits
  while (high - low > 1) {
    const kstd::int64_t middle = low + (high - low) / 2;
    (pages_for<Bundle>(middle, ratios).bytes(layers) <= budget ? low : high) = middle;
  }
  return low == 0 ? BundlePages<Bundle>{} : pages_for<Bundle>(low, ratios);
}

KVIRE_NAMESPACE_END
