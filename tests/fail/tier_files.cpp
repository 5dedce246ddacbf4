// SPDX-License-Identifier: Apache-2.0
// Tiers below the host that a tiered cache cannot use, that must not compile.
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/tier/tiered_cache.hpp>

using namespace kvire;

// A file tier of the user's own, of one bundle.
template <class Bundle>
struct Shelf {
  Event<Host> store(const RecordKey&, const HostBundlePool<Bundle, Host>&, BundleRefs<Bundle, HostPage>, std::shared_ptr<PageSeals>);
  Event<Host> load(const RecordKey&, HostBundlePool<Bundle, Host>&, BundleRefs<Bundle, HostPage>, std::shared_ptr<PageSeals>);
  std::optional<BundlePages<Bundle>> find(const RecordKey&) const;
  int layers() const;
};

using Fp8 = preset::deepseek_v4::Flash<>;
using Bf16 = preset::deepseek_v4::Flash<preset::deepseek_v4::IndexKeyBf16>;

static_assert(TieredCache<Fp8, Host, Lru, Shelf<Fp8>>::has_files);
static_assert(!TieredCache<Fp8, Host>::has_files);

#if KVIRE_FAIL == 1  // expect: tier.page-files
// Files of the same model with index keys of another layout.
static_assert(TieredCache<Fp8, Host, Lru, Shelf<Bf16>>::has_files);
#elif KVIRE_FAIL == 2  // expect: tier.page-files
// Something that is no tier.
static_assert(TieredCache<Fp8, Host, Lru, int>::has_files);
#endif
