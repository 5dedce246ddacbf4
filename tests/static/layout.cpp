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
