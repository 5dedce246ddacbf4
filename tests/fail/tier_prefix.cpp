// SPDX-License-Identifier: Apache-2.0
// Bundles that a prefix cache cannot serve, that must not compile.
#include <kvire/layout/policies.hpp>
#include <kvire/tier/prefix_shape.hpp>

using namespace kvire;

struct Schedule {
  static constexpr int layers = 2;
};
struct Latent : CacheEntry<Bf16Contiguous<64, 512>, space::Full, Tokens<4>> {
  static constexpr const char* name = "latent";
};
template <int PageTokens>
struct Window : CacheEntry<Bf16Contiguous<PageTokens, 512>, space::Window, Tokens<1>> {
  static constexpr const char* name = "window";
};

static_assert(prefix_shape<CacheBundle<Schedule, Latent, Window<256>>>(128).page_tokens == 256);

#if KVIRE_FAIL == 1  // expect: tier.prefix-page
// A window of pages that end inside those of the latents.
constexpr auto shape = prefix_shape<CacheBundle<Schedule, Latent, Window<64>>>(128);
#endif
