// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/layout/field.hpp>

KVIRE_NAMESPACE_BEGIN

/// How a stored scale is made from the largest finite magnitude (amax) of its block. `max` is the largest code: 448 for e4m3, 6 for e2m1.
/// Sources: DeepGEMM and SGLang store kernels (the first), SGLang's V4.1 stores (the other two).
enum class ScaleFormula : unsigned char {
  none,
  amax_floor,   ///< s = max(amax, 1e-4) / max; code = rne(x * (1 / s))
  scale_floor,  ///< s = max(amax / max, 1e-4); code = rne(x * (1 / s))
  scale_clamp   ///< s = clamp(amax / max, 2^-9, 448) rounded to e4m3; code = rne(x / s)
};

constexpr const char* name_of(ScaleFormula formula) {
  switch (formula) {
    case ScaleFormula::none: return "none";
    case ScaleFormula::amax_floor: return "max(amax,1e-4)/max";
    case ScaleFormula::scale_floor: return "max(amax/max,1e-4)";
    case ScaleFormula::scale_clamp: return "clamp(amax/max,2^-9,448)";
  }
  return "unknown";
}

/// Each block of `Block` consecutive elements of the fields with role `Of` shares one element of role::Scale.
/// A ue8m0 scale is the power of two not below the formula's value; an f32 scale is the value itself.
template <class Of, int Block, ScaleFormula Formula = ScaleFormula::amax_floor>
struct ScaleRule {
  using of = Of;
  static constexpr int block = Block;  ///< elements per scale
  static constexpr ScaleFormula formula = Formula;
};

/// The elements are stored as they are.
struct NoScale {
  using of = void;
  static constexpr int block = 0;
  static constexpr ScaleFormula formula = ScaleFormula::none;
};

KVIRE_NAMESPACE_END
