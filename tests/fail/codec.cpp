// SPDX-License-Identifier: Apache-2.0
// Codecs that must not compile.
// each rule alone
#include <kvire/codec/row.hpp>
#include <kvire/layout/policies.hpp>

using namespace kvire;

template void kvire::encode_row<Fp8WithScale<2, 64>>(const float*, std::byte*, int, RowOptions);

#if KVIRE_FAIL == 1  // expect: codec.scaled-elements
struct P : PageLayout<2, 1, Plane<Field<role::Value, Element::bf16, 64>>, Plane<Field<role::Scale, Element::f32, 2>>> {
  using Scaling = ScaleRule<role::Value, 32>;
};
inline void bad(const float* row, std::byte* page) { encode_row<P>(row, page, 0); }
#elif KVIRE_FAIL == 2  // expect: codec.number-fields
struct P : PageLayout<2, 1, Plane<Field<role::Value, Element::u8, 64>>> {};
inline void bad(const float* row, std::byte* page) { encode_row<P>(row, page, 0); }
#elif KVIRE_FAIL == 3  // expect: codec.scaled-elements
// The scale of a block of zeros, 2.2e-7, is 0 in e4m3.
struct P : PageLayout<2, 1, Plane<Field<role::Value, Element::e4m3, 64>>, Plane<Field<role::Scale, Element::e4m3, 2>>> {
  using Scaling = ScaleRule<role::Value, 32>;
};
inline void bad(const float* row, std::byte* page) { encode_row<P>(row, page, 0); }
#elif KVIRE_FAIL == 4  // expect: codec.readable-elements
// Integers with a scale, by a formula that nothing here computes.
struct P : PageLayout<2, 1, Plane<Field<role::Value, Element::u8, 64>>, Plane<Field<role::Scale, Element::bf16, 2>>> {
  using Scaling = ScaleRule<role::Value, 32>;
};
inline void bad(const std::byte* page, float* row) { decode_row<P>(page, 0, row); }
#endif
