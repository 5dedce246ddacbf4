// SPDX-License-Identifier: Apache-2.0
// Pools whose bytes nobody named, and pools that must not exchange pages.
#include <kvire/exec/host/event.hpp>
#include <kvire/layout/policies.hpp>
#include <kvire/pool/adopt.hpp>
#include <kvire/pool/bundle_pool.hpp>
#include <kvire/preset/deepseek_v4.hpp>

using namespace kvire;
using Fp8 = Fp8WithScale<64, 128>;
using Bf16 = Bf16Contiguous<64, 128>;
using Model = preset::deepseek_v4::Flash<>;

static_assert(require_pool_policy<Fp8>() && require_same_policy<Fp8, Fp8>() && require_bundle<Model>());
static_assert(sizeof(PageView<Fp8, Host>) > 0 && sizeof(DeviceBundlePool<Model, Host>) > 0);
inline auto adopt_named(AdoptOptions options) { return adopt<Fp8, Host>(options); }

#if KVIRE_FAIL == 1  // expect: pool.not-a-policy
// A page described by its size.
struct Page {
  static constexpr long long page_bytes = 8448;
  char bytes[8448];
};
PageView<Page, Host> view;
#elif KVIRE_FAIL == 2  // expect: pool.not-a-policy
// The element type instead of the layout.
using Pool = DevicePool<float, Host>;
constexpr auto size = sizeof(Pool);
#elif KVIRE_FAIL == 3  // expect: pool.not-a-backend
struct Tpu {};
constexpr auto size = sizeof(DevicePool<Fp8, Tpu>);
#elif KVIRE_FAIL == 4  // expect: pool.same-policy
// The mirror restated by hand: fp8 pages behind a bf16 pool.
constexpr bool same = require_same_policy<Bf16, Fp8>();
#elif KVIRE_FAIL == 5  // expect: pool.same-policy
// Equal bytes, another order.
constexpr bool same = require_same_policy<Fp8, Fp8WithScaleInterleaved<64, 128>>();
#elif KVIRE_FAIL == 6  // expect: pool.adopt-needs-policy
inline void take(AdoptOptions options) { adopt(options); }
#elif KVIRE_FAIL == 7  // expect: pool.not-a-bundle
// One policy where the whole model's list is meant.
constexpr bool bundle = require_bundle<Fp8>();
#elif KVIRE_FAIL == 8  // expect: layout.no-such-space
struct Draft {
  static constexpr const char* name = "draft";
};
inline auto& of(DeviceBundlePool<Model, Host>& pool) { return pool.ledger<Draft>(); }
#endif
