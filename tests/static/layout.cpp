// SPDX-License-Identifier: Apache-2.0
// What must come out the same under every compiler, at compile time: offsets beyond 2^31, fingerprints, proofs of the largest pages.
#include <kvire/layout.hpp>

using namespace kvire;

// Page 131,072 of bf16 index keys starts at exactly 2^31: the first byte that a signed 32-bit offset cannot reach.
constexpr Strides bf16_pages = strides_of(Arrangement::layer_first, 1, 131'073, Bf16Contiguous<64, 128>::page_bytes);
static_assert(bf16_pages.offset(0, 131'072) == std::int64_t(1) << 31);
static_assert(bf16_pages.offset(0, 131'071) + Bf16Contiguous<64, 128>::page_bytes == std::int64_t(1) << 31);
static_assert(bf16_pages.offset(0, 131'072) > 0);

// SHA-256 as a constant expression, against the checked-in baseline.
static_assert(fingerprint64<Fp8WithScale<64, 128>> == 0x14c354d30e8259f8);
static_assert(fingerprint64<Fp8WithScaleInterleaved<64, 128>> == 0x4abff37a9846c1ff);
static_assert(bundle_fingerprint64<preset::deepseek_v4::Flash<preset::deepseek_v4::IndexKeyFp8>> == 0x14a5b13f72a63551);

// The whole of a 256-token latent page is proven within every compiler's limits.
static_assert(require_layout<preset::deepseek_v4::Latent<256>>());
static_assert(require_layout<KvPages<256, 64, 128>>());

// What one page id costs over all entries of a shipped bundle; here and not beside the bundles, since a file that names a bundle checks it anyway.
namespace v3_2 = preset::deepseek_v3_2;
static_assert(v3_2::Model<>::require() && v3_2::Model<>::raw_tokens_per_page<space::Full>() == 64);
static_assert(v3_2::Model<>::page_bytes<space::Full>() == Bytes(61 * (41'984 + 8'448)));
namespace v4 = preset::deepseek_v4;
static_assert(v4::Flash<>::require() && v4::Pro<>::require());
static_assert(v4::Flash<>::raw_tokens_per_page<space::Full>() == 256 && v4::Flash<>::raw_tokens_per_page<space::Window>() == 256);
static_assert(v4::Flash<v4::IndexKeyFp8>::page_bytes<space::Full>() == Bytes(998'208));
static_assert(v4::Flash<v4::IndexKeyBf16>::page_bytes<space::Full>() == Bytes(1'164'864));
static_assert(v4::Flash<v4::IndexKeyFp4>::page_bytes<space::Full>() == Bytes(912'192));
static_assert(v4::Flash<>::page_bytes<space::Window>() == Bytes(6'439'680 + 1'720'320));
