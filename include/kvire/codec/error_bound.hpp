// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/row.hpp>

KVIRE_NAMESPACE_BEGIN

/// How far decode(encode(x)) may be from a finite x:
///     |decoded - x| <= max(relative * |x|, in_scales * scale, absolute)
/// with `scale` the stored scale of x's block (0 where there is none). Holds for elements that do not saturate by their format's range:
/// |x| below the largest bf16 or f16, an unscaled |x| of at most 448 (e4m3) or 6 (e2m1), a block amax of at most 6 * 448 under scale_clamp and of
/// 448 * 65504 (e4m3) or 6 * 65504 (e2m1) with scales in f16.
struct ErrorBound {
  float relative = 0;
  float in_scales = 0;
  float absolute = 0;
};

/// The bound of an element without a scale. Half a unit in the last place where the format is normal, half its smallest step below.
constexpr ErrorBound error_bound(Element element) {
  switch (element) {
    case Element::e4m3: return {0x1p-4F, 0, 0x1p-10F};
    case Element::e2m1: return {0.25F, 0, 0.25F};
    case Element::ue8m0: return {1.0F, 0, 0x1p-127F};  // upwards, by less than a factor of two
    case Element::bf16: return {0x1p-8F, 0, 0x1p-134F};
    case Element::f16: return {0x1p-11F, 0, 0x1p-25F};
    case Element::u8:
    case Element::f32: break;
  }
  return {};
}

/// The bound of the field that serves `Role`. A scaled element has the bound of its element in units of its scale, plus what the f32
/// roundings of scale, reciprocal, product and decoding add (below 2^-20). A scale that is rounded down makes the largest elements saturate: under
/// scale_clamp by up to a third, where it is subnormal in e4m3; by up to a ninth where f16 holds that of e4m3 elements, which may be as small
/// as four of its steps. A bf16 round trip adds bf16's own error.
template <LayoutPolicy P, class Role>
constexpr ErrorBound error_bound(RowOptions options = {}) {
  ErrorBound bound = error_bound(P::template element_of<Role>);
  if constexpr (kstd::is_same_v<Role, typename P::Scaling::of>) {
    const bool small_in_f16 = P::Scaling::formula == ScaleFormula::amax_floor && P::template element_of<Role> == Element::e4m3 &&
                              P::template element_of<role::Scale> == Element::f16;
    if (P::Scaling::formula == ScaleFormula::scale_clamp) bound.relative = 1.0F / 3;
    if (small_in_f16) bound.relative = 1.0F / 9;
    bound = {bound.relative + 0x1p-20F, bound.absolute * (1 + 0x1p-20F), 0};
  }
  if (options.bf16_round_trip) {
    const ErrorBound trip = error_bound(Element::bf16);
    bound.relative += trip.relative * (1 + bound.relative);
    bound.in_scales *= 1 + trip.relative;
    bound.absolute = bound.absolute > trip.absolute ? 2 * bound.absolute : 2 * trip.absolute;
  }
  return bound;
}

KVIRE_NAMESPACE_END
