// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/layout/policies.hpp>

KVIRE_NAMESPACE_BEGIN

/// DeepSeek-V4.1 rows, for pages of compressed latents: 512 elements a token, in fp8 with 16 ue8m0 scales (528 B) or in fp4 with 32 e4m3
/// scales (288 B). Values first and scales behind them in the page, as in V4; the page is padded to what the readers' strides need.
namespace preset::deepseek_v4_1 {

template <int Tokens>
struct LatentFp8 : PageLayout<Tokens, 512, Plane<Field<role::Value, Element::e4m3, 512>>, Plane<Field<role::Scale, Element::ue8m0, 16>>> {
  using Scaling = ScaleRule<role::Value, 32, ScaleFormula::scale_floor>;
  using Content = content::MlaLatent;
  static constexpr const char* name = "deepseek_v4_1::LatentFp8";
};

template <int Tokens>
struct LatentFp4 : PageLayout<Tokens, 256, Plane<Field<role::Value, Element::e2m1, 512>>, Plane<Field<role::Scale, Element::e4m3, 32>>> {
  using Scaling = ScaleRule<role::Value, 16, ScaleFormula::scale_clamp>;
  using Content = content::MlaLatent;
  static constexpr const char* name = "deepseek_v4_1::LatentFp4";
};

static_assert(LatentFp8<64>::page_bytes == 33'792 && LatentFp8<2>::page_bytes == 1'536);
static_assert(LatentFp4<64>::page_bytes == 18'432 && LatentFp4<2>::page_bytes == 768);
static_assert(require_layout<LatentFp8<64>>() && require_layout<LatentFp4<64>>());

}  // namespace preset::deepseek_v4_1

KVIRE_NAMESPACE_END
