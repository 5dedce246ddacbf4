// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/codec/arith.hpp>
#include <kvire/codec/element.hpp>
#include <kvire/layout/require.hpp>

KVIRE_NAMESPACE_BEGIN

namespace rule {
template <class P, Element Value, Element Scale, ScaleFormula Formula>
struct ScaledElements {
  static_assert((Value == Element::e4m3 || Value == Element::e2m1) && Scale != Element::u8 && Scale != Element::e2m1 &&
                    (Scale != Element::e4m3 || Formula == ScaleFormula::scale_clamp),
                "kvire [codec.scaled-elements]: a block scale multiplies e4m3 or e2m1 values and is f32, ue8m0, bf16, f16, or e4m3 by scale_clamp. In other pairs "
                "builds could disagree, or a small scale be stored as 0 and read as NaN. Fix: use one of these elements, or keep the "
                "scales in a field of a role of your own, without ScaleRule, for kernels of your own.");
};
}  // namespace rule

/// The scale of one block, in the three forms that a store needs.
struct BlockScale {
  kstd::uint32_t code;  ///< what is stored, in the low bits
  float factor;         ///< what each element is multiplied by (scale_clamp: divided by)
  bool is_nan;          ///< the block holds a NaN that its elements cannot express
};

/// The arithmetic of a policy's scale rule, bit for bit as deployed kernels do it:
///   amax_floor   s = max(amax, 1e-4) / max, stored; code = element(x * (1 / s')), s' the stored scale read back
///   scale_floor  s = max(amax / max, 1e-4)
///   scale_clamp  s = clamp(amax / max, 2^-9, 448); code = element(x / s')
/// amax is over the finite elements of the block. Infinities saturate, as does what the largest scale (f16: 65504) cannot reach. A NaN stores a NaN (e4m3), or turns the scale of its block into a
/// NaN and its codes into zero (e2m1, which has none). An all-zero block stores zeros under a finite scale.
template <LayoutPolicy P>
struct ScaleCodec {
  using Scaling = typename P::Scaling;
  static constexpr Element value_element = P::template element_of<typename Scaling::of>;
  static constexpr Element scale_element = P::template element_of<role::Scale>;
  static constexpr int block = Scaling::block;
  static constexpr int blocks = P::template count_of<role::Scale>;
  static constexpr bool divides = Scaling::formula == ScaleFormula::scale_clamp;
  static constexpr bool value_has_nan = value_element != Element::e2m1;

  /// Where a block's NaN outranks every finite magnitude.
  static constexpr kstd::uint32_t nan_key = 0xFFFFFFFFU;

  KVIRE_HD static constexpr float largest() {
    (void)sizeof(rule::ScaledElements<P, value_element, scale_element, Scaling::formula>);
    return value_element == Element::e4m3 ? 448.0F : 6.0F;
  }

  /// What an element contributes to its block's amax: unsigned integers whose maximum, in any order, is the amax with its NaN mark.
  KVIRE_HD static constexpr kstd::uint32_t amax_key(kstd::uint32_t bits) {
    const kstd::uint32_t a = abs_bits(bits);
    if (a < infinity_bits) return a;
    return !value_has_nan && a > infinity_bits ? nan_key : 0;
  }

  /// The scale of a block whose largest key is `key`.
  KVIRE_HD static constexpr BlockScale make(kstd::uint32_t key) {
    if (!value_has_nan && key == nan_key) return {nan_code<scale_element>, 0.0F, true};
    const float amax = float_of(key);
    float s = 0;
    if constexpr (Scaling::formula == ScaleFormula::amax_floor) {
      s = div_rn(max_rn(amax, 1e-4F), largest());
    } else if constexpr (Scaling::formula == ScaleFormula::scale_floor) {
      s = max_rn(div_rn(amax, largest()), 1e-4F);
    } else {
      s = max_rn(div_rn(amax, largest()), 0x1p-9F);
      if (order_key(s) > order_key(448.0F)) s = 448.0F;
    }
    if constexpr (scale_element == Element::f16) s = order_key(s) > order_key(65504.0F) ? 65504.0F : s;  // infinite otherwise, and its zeros NaN
    const kstd::uint32_t code = encode_element<scale_element>(bits_of(s));
    const float stored = decode_element<scale_element>(code);
    return {code, divides ? stored : div_rn(1.0F, stored), false};
  }

  /// The code of one element of a block.
  KVIRE_HD static constexpr kstd::uint32_t encode(kstd::uint32_t bits, const BlockScale& scale, Ties ties) {
    if (scale.is_nan) return 0;
    if (is_nan_bits(bits)) return encode_element<value_element>(bits, ties);  // arithmetic would lose its sign
    const float x = float_of(bits);
    return encode_element<value_element>(bits_of(divides ? div_rn(x, scale.factor) : mul_rn(x, scale.factor)), ties);
  }

  /// The number that a stored element and its stored scale stand for, rounded once.
  KVIRE_HD static constexpr float decode(kstd::uint32_t code, kstd::uint32_t scale_code) {
    return mul_rn(decode_element<value_element>(code), decode_element<scale_element>(scale_code));
  }
};

KVIRE_NAMESPACE_END
