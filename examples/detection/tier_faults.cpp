// SPDX-License-Identifier: Apache-2.0
#include <kvire/tier/tiered_cache.hpp>

#include "faults.hpp"

namespace detection {

namespace {

/// A tiered cache with room for one prompt on the device.
struct Tiered {
  using Cache = TieredCache<Model, Host>;

  Tiered() : root(cache.root({.model = "demo"})) {}

  /// The prompt's only page is computed, published, and evicted to the host. Somebody else uses its place on the device then.
  Status send_away() {
    auto held = cache.acquire(root, tokens);
    auto page = cache.allocate<space::Full>();
    if (!page.ok()) return page.error();
    const DevicePage id = page.value().id();
    fill(id, 3);
    Cache::Pages pages{std::move(page).value()};
    if (Status status = cache.publish(held, tokens, std::span(&pages, 1)); !status.ok()) return status;
    node = held.prefix.node();
    held = {};
    cache.make_room(1);
    if (!cache.finish(deadline_in(10s)) || !cache.cache().has(node, 0, CacheTier::host)) return missed("eviction");
    fill(id, 9);
    return {};
  }
  /// A step that reads the prompt's page again.
  Verdict come_back() {
    auto held = cache.acquire(root, tokens);
    if (held.tokens == 0) return missed("hit");
    return read_layers(p, held.loads);
  }
  void fill(DevicePage id, unsigned char value) {
    (void)p.device.entry<Latent>().fill_page(id, value);
    (void)p.device.entry<IndexK<Fp8>>().fill_page(id, value);
  }
  void flip_on_host() { pool_access::view(p.host.entry<IndexK<Fp8>>(), EntrySlot(1)).page(cache.cache().host(node, 0).id().value)[5] ^= std::byte{4}; }

  std::shared_ptr<FaultHooks> hooks = FaultHooks::make();
  Pools p{hooks};
  Cache cache = Cache::make({.device = &p.device, .host = &p.host, .loads = &p.stream, .stores = &p.stream}).value();
  std::int32_t root;
  std::int32_t node = -1;
  std::vector<TokenId> tokens = std::vector<TokenId>(16, 7);
};

kvire::Fault skip_layer_1(const CopyInfo& info) { return info.layer == 1 ? kvire::Fault::skip() : kvire::Fault::none(); }

}  // namespace

std::vector<Fault> tier_faults() {
  return {
      {"a copy from the host reports success and moved nothing", "tiered cache", ErrorCode::mismatch,
       [] {
         Tiered t;
         if (!t.send_away().ok()) return missed("eviction");
         t.hooks->set(skip_layer_1);
         return t.come_back();
       }},
      {"a copy to the host reports success and moved nothing", "tiered cache", ErrorCode::mismatch,
       [] {
         Tiered t;
         t.hooks->set(skip_layer_1);
         if (!t.send_away().ok()) return missed("eviction");
         t.hooks->set({});
         return t.come_back();
       }},
      {"flipped bit in host memory between backup and load", "tiered cache", ErrorCode::mismatch,
       [] {
         Tiered t;
         if (!t.send_away().ok()) return missed("eviction");
         t.flip_on_host();
         return t.come_back();
       }},
      {"flipped bit in host memory before a record is made of it", "file tier", ErrorCode::mismatch,
       [] {
         Stored<Model> s;
         auto seals = PageSeals::make(s.pool).value();
         DeviceBundlePool<Model, Host> device = DeviceBundlePool<Model, Host>::make({.pages = {{4}}, .name = "gpu"}).value();
         auto stream = Stream<Host>::make().value();
         const auto from = device.allocate<space::Full>(1).value();
         const BundlePlan<Model> moves(in_space<space::Full>(plan(s.pages, from)));
         if (!backup(device, s.pool, moves, stream, {.seals = seals}).value().wait().ok()) return missed("backup");
         pool_access::view(s.pool.entry<IndexK<Fp8>>(), EntrySlot(1)).page(s.pages[0].id().value)[5] ^= std::byte{4};
         return s.tier->store(s.key(), s.pool, {{s.pages}}, seals).wait();
       }},
  };
}

}  // namespace detection
