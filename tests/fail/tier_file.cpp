// SPDX-License-Identifier: Apache-2.0
// Stored records of a bundle that has no partner for each entry.
// not under nvcc
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/tier/file_migrate.hpp>

using namespace kvire;
namespace v4 = preset::deepseek_v4;

// Another layout of the index keys, the same entries.
static_assert(detail::require_migrate_bundle<v4::Flash<v4::IndexKeyBf16>, v4::Flash<v4::IndexKeyFp8>>());

#if KVIRE_FAIL == 1  // expect: tier.migrate-bundle
// Another model: other layers own the entries.
constexpr bool same = detail::require_migrate_bundle<v4::Flash<>, v4::Pro<>>();
#elif KVIRE_FAIL == 2  // expect: tier.migrate-bundle
struct Schedule {
  static constexpr int layers = 2;
};
struct Latent : CacheEntry<Bf16Contiguous<64, 512>, space::Full, Tokens<1>> {
  static constexpr const char* name = "latent";
};
struct IndexK : CacheEntry<Bf16Contiguous<64, 128>, space::Full, Tokens<1>> {
  static constexpr const char* name = "index_k";
};
// From the time before the index keys were stored.
constexpr bool same = detail::require_migrate_bundle<CacheBundle<Schedule, Latent>, CacheBundle<Schedule, Latent, IndexK>>();
#endif
