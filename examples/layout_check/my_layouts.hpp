// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/layout.hpp>

/// The layouts of an imaginary engine: one of kvire's own under a name of its own, and one that kvire has never heard of.
namespace my {

/// Index keys as this engine stores them.
struct IndexKey : kvire::Fp8WithScale<64, 128> {
  static constexpr const char* name = "my::IndexKey";
};

/// A latent of 256 e4m3 values with a scale per 64 and a bf16 tail, the scales in front of the page.
struct Latent : kvire::PageLayout<32, 1, kvire::Plane<kvire::Field<kvire::role::Scale, kvire::Element::f32, 4>>,
                                  kvire::Plane<kvire::Field<kvire::role::Value, kvire::Element::e4m3, 256>,
                                               kvire::Field<kvire::role::Rope, kvire::Element::bf16, 64>>> {
  using Scaling = kvire::ScaleRule<kvire::role::Value, 64>;
  using Content = kvire::content::MlaLatent;
  static constexpr const char* name = "my::Latent";
};

}  // namespace my
