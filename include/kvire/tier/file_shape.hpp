// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/layout/bundle.hpp>
#include <kvire/tier/record.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// What records of a bundle look like when its model's first `layers` layers are kept; no pages yet.
template <class Bundle>
RecordShape record_shape(int layers) {
  RecordShape shape{.layout = bundle_fingerprint128<Bundle>, .layers = layers};
  for (int space = 0; space < Bundle::space_count; ++space) {
    Bundle::for_each([&]<class Entry>() {
      using P = typename Entry::policy;
      if (space != Bundle::template space_index<typename Entry::space>()) return;
      shape.sections.push_back({.layout = fingerprint128<P>,
                                .page_bytes = P::page_bytes,
                                .entry = Bundle::template index_of<Entry>(),
                                .space = space,
                                .slots = Entry::slots(layers)});
      constexpr auto page = canonical_text<P>();
      shape.description += std::string(Entry::name) + ":" + name_of(Entry::kind::kind) + "*" + std::to_string(Entry::kind::ratio) +
                           ";space=" + Entry::space::name + ";layers=" + std::to_string(Entry::slots(layers)) + ";" + page.c_str() + "\n";
    });
  }
  return shape;
}

}  // namespace detail

KVIRE_NAMESPACE_END
