// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/layout/bundle.hpp>
#include <kvire/layout/policies.hpp>

KVIRE_NAMESPACE_BEGIN

/// DeepSeek-V3.2 (and GLM models with the same sparse attention): one latent and one index key per token in every layer, pages of 64.
namespace preset::deepseek_v3_2 {

/// 512 e4m3, 4 f32 scales (one per 128), 64 bf16 rope, token after token: 656 B.
template <int Tokens = 64>
struct Latent : PageLayout<Tokens, 1, Plane<Field<role::Nope, Element::e4m3, 512>, Field<role::Scale, Element::f32, 4>, Field<role::Rope, Element::bf16, 64>>> {
  using Scaling = ScaleRule<role::Nope, 128>;
  using Content = content::MlaLatent;
  static constexpr const char* name = "deepseek_v3_2::Latent";
};

struct IndexKeyFp8 : Fp8WithScale<64, 128, 128, content::RopeHead64> {
  static constexpr const char* name = "deepseek_v3_2::IndexKeyFp8";
};
struct IndexKeyBf16 : Bf16Contiguous<64, 128, content::RopeHead64> {
  static constexpr const char* name = "deepseek_v3_2::IndexKeyBf16";
};

static_assert(Latent<1>::page_bytes == 656 && Latent<>::page_bytes == 41'984);
static_assert(Latent<>::offset<role::Scale>(1) == 656 + 512 && Latent<>::offset<role::Rope>(0) == 528);
static_assert(IndexKeyFp8::page_bytes == 8'448 && IndexKeyBf16::page_bytes == 16'384);

struct Schedule {
  static constexpr int layers = 61;
  KVIRE_HD static constexpr int ratio(int) { return 1; }
};

template <class IndexKey>
struct Entries {
  struct MlaLatent : CacheEntry<Latent<64>, space::Full, Tokens<1>> {
    static constexpr const char* name = "latent";
  };
  struct IndexK : CacheEntry<IndexKey, space::Full, Tokens<1>> {
    static constexpr const char* name = "index_k";
  };
  using Bundle = CacheBundle<Schedule, MlaLatent, IndexK>;
};

/// The bundle; entries are members: `Model<IndexKeyFp8>::IndexK`.
template <class IndexKey = IndexKeyFp8>
struct Model : Entries<IndexKey>, Entries<IndexKey>::Bundle {};

}  // namespace preset::deepseek_v3_2

KVIRE_NAMESPACE_END
