// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <kvire/sync/host.hpp>
#include <kvire/tier/tiered_cache.hpp>

namespace kvire_test {

/// A tiered cache with all that is around it: pools, streams whose copies can be made to fail, a gate. What tests do with it is in the rigs built on this one.
template <class Bundle, class Policy = kvire::Lru, class Files = kvire::NoFiles>
class CacheRig {
 public:
  using Cache = kvire::TieredCache<Bundle, kvire::Host, Policy, Files>;
  using Tokens = std::vector<kvire::TokenId>;

  Cache& cache() { return cache_; }
  std::int32_t root() const { return root_; }
  kvire::FaultHooks& load_faults() { return *load_faults_; }
  kvire::FaultHooks& store_faults() { return *store_faults_; }
  auto& device() { return device_; }
  auto& host() { return host_; }
  /// Pages that are out of the ledgers of both pools.
  std::int64_t used_pages() {
    std::int64_t n = 0;
    for (int s = 0; s < Bundle::space_count; ++s) n += kvire::detail::ledger_of(device_, s).used_pages() + kvire::detail::ledger_of(host_, s).used_pages();
    return n;
  }

 protected:
  using Stream = kvire::Stream<kvire::Host>;

  /// `device`, `host`: pages of each space, the null page included; no host: 0.
  CacheRig(int layers, std::int64_t device, std::int64_t host, const kvire::TieredOptions& options, Files* files, std::string model)
      : device_(kvire::DeviceBundlePool<Bundle, kvire::Host>::make({.pages = counts(device), .layers = layers}).value()),
        host_(kvire::mirror_of(device_, counts(host == 0 ? 2 : host)).value()),
        cache_(Cache::make({.device = &device_, .host = host == 0 ? nullptr : &host_, .loads = &loads_, .stores = &stores_}, options, files).value()),
        root_(cache_.root({.model = std::move(model)})) {}
  ~CacheRig() = default;

  static kvire::BundlePages<Bundle> counts(std::int64_t n) {
    kvire::BundlePages<Bundle> pages;
    for (auto& count : pages.count) count = n;
    return pages;
  }

  kvire::DeviceBundlePool<Bundle, kvire::Host> device_;
  kvire::HostBundlePool<Bundle, kvire::Host> host_;
  std::shared_ptr<kvire::FaultHooks> load_faults_ = kvire::FaultHooks::make();
  std::shared_ptr<kvire::FaultHooks> store_faults_ = kvire::FaultHooks::make();
  kvire::Gate<kvire::Host> gate_;
  Stream compute_ = Stream::make({.name = "compute"}).value();
  Stream loads_ = Stream::make({.name = "load", .faults = load_faults_}).value();
  Stream stores_ = Stream::make({.name = "store", .faults = store_faults_}).value();
  Cache cache_;
  std::int32_t root_;
};

}  // namespace kvire_test
