// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/layout/bundle.hpp>
#include <kvire/layout/policies.hpp>

KVIRE_NAMESPACE_BEGIN

/// DeepSeek-V4: compressed latents (one per 4 or 128 raw tokens), index keys beside the C4 latents, a sliding window of raw latents, and
/// compressor states. Byte formats as SGLang's V4 pools store them.
namespace preset::deepseek_v4 {

/// 448 e4m3 + 64 bf16 rope a token, then 8 scale bytes a token (7 ue8m0, one per 64 values, and one never written). FlashMLA reads rows by
/// TMA, so the page is padded to a multiple of the row.
template <int Tokens>
struct Latent : PageLayout<Tokens, 576, Plane<Field<role::Nope, Element::e4m3, 448>, Field<role::Rope, Element::bf16, 64>>,
                           Plane<Field<role::Scale, Element::ue8m0, 7>, Pad<1>>> {
  using Scaling = ScaleRule<role::Nope, 64>;
  using Content = content::MlaLatent;
  static constexpr const char* name = "deepseek_v4::Latent";
};

using IndexKeyMeaning = content::RopeTail64Hadamard128;
struct IndexKeyFp8 : Fp8WithScale<64, 128, 128, IndexKeyMeaning> {
  static constexpr const char* name = "deepseek_v4::IndexKeyFp8";
};
struct IndexKeyBf16 : Bf16Contiguous<64, 128, IndexKeyMeaning> {
  static constexpr const char* name = "deepseek_v4::IndexKeyBf16";
};
struct IndexKeyFp4 : Fp4WithScale<64, 128, 32, IndexKeyMeaning> {
  static constexpr const char* name = "deepseek_v4::IndexKeyFp4";
};

/// State rows: kv and score, each with an overlap half where the ratio is 4. 8 rows a window page (C4), 128 rows a request (C128).
struct C4State : F32Rows<8, 4 * 512> {
  static constexpr const char* name = "deepseek_v4::C4State";
};
struct C4IndexState : F32Rows<8, 4 * 128> {
  static constexpr const char* name = "deepseek_v4::C4IndexState";
};
struct C128State : F32Rows<128, 2 * 512> {
  static constexpr const char* name = "deepseek_v4::C128State";
};

// Golden bytes of the deployed pools: a change here is a change of format.
static_assert(Latent<64>::page_bytes == 37'440 && Latent<2>::page_bytes == 1'728 && Latent<256>::page_bytes == 149'760);
static_assert(Latent<64>::offset<role::Scale>(6) == 36'912 && Latent<256>::offset<role::Scale>(1) == 147'464);
static_assert(IndexKeyFp8::page_bytes == 8'448 && IndexKeyFp8::offset<role::Scale>(2) == 8'200);
static_assert(IndexKeyBf16::page_bytes == 16'384 && IndexKeyFp4::page_bytes == 4'352);
static_assert(C4State::page_bytes == 65'536 && C4IndexState::page_bytes == 16'384 && C128State::page_bytes == 524'288);

/// Layers and compression ratios of V4-Flash without its MTP layer: 0, 0, then 4 and 128 in turn, ending with 4.
struct FlashSchedule {
  static constexpr int layers = 43;
  KVIRE_HD static constexpr int ratio(int layer) { return layer < 2 ? 0 : layer % 2 == 0 ? 4 : 128; }
};
/// V4-Pro as first published (the later Pro-0813 revision ends differently), without its MTP layer: 128, 128, then 4 and 128 in turn, ending with 4.
struct ProSchedule {
  static constexpr int layers = 61;
  KVIRE_HD static constexpr int ratio(int layer) { return layer > 0 && layer % 2 == 0 ? 4 : 128; }
};

/// The entries of one V4 model; `IndexKey` is the policy of the index keys, which engines choose apart from the latents.
template <class Schedule, class IndexKey>
struct Entries {
  struct C4Latent : CacheEntry<Latent<64>, space::Full, Tokens<4>, LayersOfRatio<Schedule, 4>> {
    static constexpr const char* name = "c4_latent";
  };
  struct IndexK : CacheEntry<IndexKey, space::Full, Tokens<4>, LayersOfRatio<Schedule, 4>> {
    static constexpr const char* name = "index_k";
  };
  struct C128Latent : CacheEntry<Latent<2>, space::Full, Tokens<128>, LayersOfRatio<Schedule, 128>> {
    static constexpr const char* name = "c128_latent";
  };
  struct WindowLatent : CacheEntry<Latent<256>, space::Window, Tokens<1>> {
    static constexpr const char* name = "window_latent";
  };
  struct C4AttentionState : CacheEntry<C4State, space::Window, Ring, LayersOfRatio<Schedule, 4>> {
    static constexpr const char* name = "c4_state";
  };
  struct C4IndexerState : CacheEntry<C4IndexState, space::Window, Ring, LayersOfRatio<Schedule, 4>> {
    static constexpr const char* name = "c4_index_state";
  };
  struct C128RequestState : CacheEntry<C128State, space::Request, RequestRows, LayersOfRatio<Schedule, 128>> {
    static constexpr const char* name = "c128_state";
  };
  using Bundle = CacheBundle<Schedule, C4Latent, IndexK, C128Latent, WindowLatent, C4AttentionState, C4IndexerState, C128RequestState>;
};

/// The bundles; entries are members: `Flash<IndexKeyBf16>::IndexK`. Named structs, so that messages stay short.
template <class IndexKey = IndexKeyFp8>
struct Flash : Entries<FlashSchedule, IndexKey>, Entries<FlashSchedule, IndexKey>::Bundle {};
template <class IndexKey = IndexKeyFp8>
struct Pro : Entries<ProSchedule, IndexKey>, Entries<ProSchedule, IndexKey>::Bundle {};

}  // namespace preset::deepseek_v4

KVIRE_NAMESPACE_END
