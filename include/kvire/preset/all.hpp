// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/layout/policies.hpp>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/preset/deepseek_v4_1.hpp>

KVIRE_NAMESPACE_BEGIN

/// Every shipped layout and bundle, for tests, drawings and benchmarks.
namespace preset {

/// Calls f.template operator()<Policy>("the name a user writes") for each shipped policy.
template <class F>
constexpr void for_each_policy(F&& f) {
  f.template operator()<Fp8WithScale<64, 128>>("Fp8WithScale<64, 128>");
  f.template operator()<Fp8WithScaleInterleaved<64, 128>>("Fp8WithScaleInterleaved<64, 128>");
  f.template operator()<Bf16Contiguous<64, 128>>("Bf16Contiguous<64, 128>");
  f.template operator()<Fp4WithScale<64, 128>>("Fp4WithScale<64, 128>");
  f.template operator()<KvPages<16, 8, 128>>("KvPages<16, 8, 128>");
  f.template operator()<deepseek_v3_2::Latent<64>>("preset::deepseek_v3_2::Latent<64>");
  f.template operator()<deepseek_v3_2::IndexKeyFp8>("preset::deepseek_v3_2::IndexKeyFp8");
  f.template operator()<deepseek_v3_2::IndexKeyBf16>("preset::deepseek_v3_2::IndexKeyBf16");
  f.template operator()<deepseek_v4::Latent<64>>("preset::deepseek_v4::Latent<64>");
  f.template operator()<deepseek_v4::Latent<2>>("preset::deepseek_v4::Latent<2>");
  f.template operator()<deepseek_v4::Latent<256>>("preset::deepseek_v4::Latent<256>");
  f.template operator()<deepseek_v4::IndexKeyFp8>("preset::deepseek_v4::IndexKeyFp8");
  f.template operator()<deepseek_v4::IndexKeyBf16>("preset::deepseek_v4::IndexKeyBf16");
  f.template operator()<deepseek_v4::IndexKeyFp4>("preset::deepseek_v4::IndexKeyFp4");
  f.template operator()<deepseek_v4::C4State>("preset::deepseek_v4::C4State");
  f.template operator()<deepseek_v4::C4IndexState>("preset::deepseek_v4::C4IndexState");
  f.template operator()<deepseek_v4::C128State>("preset::deepseek_v4::C128State");
  f.template operator()<deepseek_v4_1::LatentFp8<64>>("preset::deepseek_v4_1::LatentFp8<64>");
  f.template operator()<deepseek_v4_1::LatentFp8<2>>("preset::deepseek_v4_1::LatentFp8<2>");
  f.template operator()<deepseek_v4_1::LatentFp4<64>>("preset::deepseek_v4_1::LatentFp4<64>");
  f.template operator()<deepseek_v4_1::LatentFp4<2>>("preset::deepseek_v4_1::LatentFp4<2>");
}

/// The same for each shipped bundle.
template <class F>
constexpr void for_each_bundle(F&& f) {
  f.template operator()<deepseek_v3_2::Model<deepseek_v3_2::IndexKeyFp8>>("preset::deepseek_v3_2::Model<IndexKeyFp8>");
  f.template operator()<deepseek_v3_2::Model<deepseek_v3_2::IndexKeyBf16>>("preset::deepseek_v3_2::Model<IndexKeyBf16>");
  f.template operator()<deepseek_v4::Flash<deepseek_v4::IndexKeyFp8>>("preset::deepseek_v4::Flash<IndexKeyFp8>");
  f.template operator()<deepseek_v4::Flash<deepseek_v4::IndexKeyBf16>>("preset::deepseek_v4::Flash<IndexKeyBf16>");
  f.template operator()<deepseek_v4::Flash<deepseek_v4::IndexKeyFp4>>("preset::deepseek_v4::Flash<IndexKeyFp4>");
  f.template operator()<deepseek_v4::Pro<deepseek_v4::IndexKeyFp8>>("preset::deepseek_v4::Pro<IndexKeyFp8>");
  f.template operator()<deepseek_v4::Pro<deepseek_v4::IndexKeyBf16>>("preset::deepseek_v4::Pro<IndexKeyBf16>");
  f.template operator()<deepseek_v4::Pro<deepseek_v4::IndexKeyFp4>>("preset::deepseek_v4::Pro<IndexKeyFp4>");
}

}  // namespace preset

KVIRE_NAMESPACE_END
