// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/row.hpp>
#include <kvire/kernel/group.hpp>

KVIRE_NAMESPACE_BEGIN
namespace body {

namespace detail {

// Elements a lane owns: the least even number, not below dim / lanes, with which no lane straddles two fields and lanes and scale blocks
// nest. All of the row where there is none.
template <LayoutPolicy P>
constexpr int elements_per_lane(int lanes) {
  const int least = ceil_div(P::dim, lanes);
  for (int e = least + least % 2; e < P::dim; e += 2) {
    bool fits = P::dim % e == 0;
    for (int s = 0; s < P::section_count; ++s) {
      if (!P::table.sections[s].padding && s != P::template section_of<role::Scale>) fits = fits && P::table.sections[s].count % e == 0;
    }
    if constexpr (P::Scaling::formula != ScaleFormula::none) fits = fits && (P::Scaling::block % e == 0 || e % P::Scaling::block == 0);
    if (fits) return e;
  }
  return P::dim;
}

}  // namespace detail

/// How a group divides the P::dim elements of a row: lane l owns elements [l * elements, (l + 1) * elements), lanes from `lanes` on own none.
template <LayoutPolicy P, int GroupSize>
struct RowSplit {
  static constexpr int dim = P::dim;
  static constexpr int elements = detail::elements_per_lane<P>(GroupSize);
  static constexpr int lanes = dim / elements;
};

/// What one lane owns of a row.
template <int Elements>
struct RowPiece {
  float x[Elements];
};

}  // namespace body
KVIRE_NAMESPACE_END
