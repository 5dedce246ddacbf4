// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <chrono>
#include <random>
#include <vector>

#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/sync/cuda/lease.hpp>
#include <kvire/sync/gate.hpp>
#include <kvire/tier/tiered_cache.hpp>
#include <kvire/transfer/transfer.cuh>
#include <tests/support/cuda_pages.hpp>
#include <tests/support/device_array.hpp>

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::fill_page;
using kvire_test::has_page;
using kvire_test::small_run;

namespace {

using Model = preset::deepseek_v4::Flash<>;
using Cache = TieredCache<Model, Cuda>;
using Device = DeviceBundlePool<Model, Cuda>;
constexpr std::int64_t page = 256;
constexpr int layers = 4;

BundlePages<Model> counts(std::int64_t n) {
  BundlePages<Model> pages;
  pages.of<space::Full>() = n;
  pages.of<space::Window>() = n;
  pages.of<space::Request>() = n;
  return pages;
}

/// A tiered cache on the GPU; the content of a page follows from its prefix. What the device gives up is overwritten, so that nothing but a load brings it back.
struct Rig {
  Device device;
  HostBundlePool<Model, Cuda> host;
  Stream<Cuda> compute = Stream<Cuda>::make({.name = "compute"}).value();
  Stream<Cuda> loads = Stream<Cuda>::make({.name = "load"}).value();
  Stream<Cuda> stores = Stream<Cuda>::make({.name = "store"}).value();
  Gate<Cuda> gate;
  Cache cache;
  std::int32_t root;
  int wrong = 0;  ///< pages of a layer that had other bytes than their prefix says

  Rig(std::int64_t device_pages, std::int64_t host_pages, bool write_through)
      : device(Device::make({.pages = counts(device_pages + 1), .layers = layers, .fill_on_free = static_cast<unsigned char>(0xEE)}).value()),
        host(mirror_of(device, counts(host_pages + 1)).value()),
        cache(Cache::make({&device, &host, &loads, &stores}, {.window_tokens = 128, .write_through = write_through, .batch_pages = 3}).value()),
        root(cache.root({.model = "flash"})) {}

  template <class Entry>
  static std::uint32_t seed(const Hash128& name) {
    return static_cast<std::uint32_t>(name.low) * 8 + static_cast<std::uint32_t>(Model::index_of<Entry>());
  }

  /// Layer by layer, as a step does: the lease's stream waits for the layer's load, then its pages are looked at, those of a tail too. Error: of a load.
  Status read(const Cache::Held& held, const Cache::Pages& tail = {}, const Hash128& tail_name = {}) {
    auto step = gate.begin(held.loads, compute);
    REQUIRE_MESSAGE(step.ok(), step.error().message);
    std::vector<std::int32_t> path(static_cast<std::size_t>(held.prefix.pages()));
    cache.cache().path(held.prefix.node(), path);
    Status status;
    for (int layer = 0; layer < layers; ++layer) {
      Model::for_each([&]<class Entry>() {
        if (!Entry::owns(LayerId(layer)) || !status.ok()) return;
        auto lease = step.value().template read<Entry>(device, LayerId(layer));
        if (!lease.ok()) {
          status = lease.error();
          return;
        }
        (void)kernel_access::view(lease.value(), compute);
        REQUIRE(cudaStreamSynchronize(compute.native()) == cudaSuccess);
        const int space = Model::space_index<typename Entry::space>();
        const int slot = Entry::slot(LayerId(layer)).value;
        if (const auto& own = tail[static_cast<std::size_t>(space)]) wrong += has_page(device.template entry<Entry>(), own.id(), seed<Entry>(tail_name), slot, slot + 1) ? 0 : 1;
        constexpr bool in_pages = !std::is_same_v<typename Entry::space, space::Request>;  // request rows are empty where a page ends
        for (std::size_t i = 0; i < path.size(); ++i) {
          if (!in_pages || !cache.cache().needed(space, static_cast<std::int64_t>(path.size() - 1 - i))) continue;
          const DevicePage id = cache.cache().device(path[i], space).id();
          REQUIRE(!id.none());
          wrong += has_page(device.template entry<Entry>(), id, seed<Entry>(cache.cache().name(path[i])), slot, slot + 1) ? 0 : 1;
        }
      });
    }
    return status.ok() ? step.value().status() : status;
  }

  /// A request: what is there is read, the rest made and published.
  Cache::Held run(const std::vector<TokenId>& tokens) {
    auto held = cache.acquire(root, tokens);
    CHECK(read(held).ok());
    for (std::int64_t at = held.tokens; at + page <= static_cast<std::int64_t>(tokens.size()); at += page) {
      const auto piece = std::span(tokens).subspan(static_cast<std::size_t>(at), page);
      const Hash128 name = cache.cache().name_below(held.prefix.node(), piece);
      Cache::Pages pages;
      pages[Model::space_index<space::Full>()] = cache.allocate<space::Full>().value();
      pages[Model::space_index<space::Window>()] = cache.allocate<space::Window>().value();
      Model::for_each([&]<class Entry>() {
        if constexpr (!std::is_same_v<typename Entry::space, space::Request>) {
          fill_page(device.template entry<Entry>(), pages[Model::space_index<typename Entry::space>()].id(), seed<Entry>(name));
        }
      });
      REQUIRE(cudaDeviceSynchronize() == cudaSuccess);  // the bytes have arrived before anybody copies them
      REQUIRE(cache.publish(held, piece, std::span(&pages, 1)).ok());
    }
    return held;
  }

  /// A request stops behind a tail: its pages are as the last token left them, a page of its own in every space. They go to the host, and off the device.
  void stop(Cache::Held&& held, std::span<const TokenId> tail, Cache::Pages& pages) {
    const Cache::Held gone = std::move(held);
    const Hash128 name = cache.cache().name_below(gone.prefix.node(), tail);
    Model::for_each([&]<class Entry>() {
      auto& own = pages[Model::space_index<typename Entry::space>()];
      if (!own) own = cache.allocate<typename Entry::space>().value();
      fill_page(device.template entry<Entry>(), own.id(), seed<Entry>(name));
    });
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    REQUIRE(cache.park(gone, tail, pages).ok());
  }
  void evict() {
    cache.make_room(device.ledger<space::Full>().pages() - 1);
    REQUIRE(cache.finish(deadline_in(20s)));
  }
  /// The byte of a page, of either side, turned over.
  template <class Pool>
  static void flip(Pool& pool, typename Pool::page_id id, EntrySlot slot, std::int64_t at) {
    std::byte* const p = pool_access::view(pool, slot).page(id.value) + at;
    std::byte byte{};
    REQUIRE(cudaMemcpy(&byte, p, 1, cudaMemcpyDefault) == cudaSuccess);
    byte ^= std::byte{16};
    kvire_test::upload(p, &byte, 1);
  }

  std::int32_t used() {
    return device.ledger<space::Full>().used_pages() + device.ledger<space::Window>().used_pages() + host.ledger<space::Full>().used_pages() +
           host.ledger<space::Window>().used_pages();
  }
};

std::vector<TokenId> text(std::initializer_list<int> blocks) {
  std::vector<TokenId> tokens;
  for (const int block : blocks) {
    for (std::int64_t i = 0; i < page; ++i) tokens.push_back(block * 1000 + static_cast<TokenId>(i));
  }
  return tokens;
}

}  // namespace

TEST_CASE("cuda tiered cache: pages leave for pinned memory under pressure and come back behind the gate, byte for byte") {
  for (const bool write_through : {false, true}) {
    Rig rig(4, 12, write_through);
    (void)rig.run(text({1, 2, 3, 4}));
    (void)rig.run(text({5, 6, 7, 8}));
    {
      auto held = rig.cache.acquire(rig.root, text({1, 2, 3, 4}));
      CHECK(held.tokens == 4 * page);
      CHECK(held.loads.size() == 1);
      CHECK(rig.read(held).ok());
    }
    CHECK(rig.wrong == 0);
    CHECK(rig.cache.counters().hit_pages_on[1] == 4);
    CHECK(rig.cache.counters().tiers[0][0].lost_pages == 0);
    CHECK(rig.cache.loaded().bytes() > 0);
    CHECK(rig.cache.finish(deadline_in(20s)));
    rig.cache.clear();
    CHECK(rig.used() == 0);
  }
}

TEST_CASE("cuda tiered cache: random prompts that share prefixes, on both tiers") {
  std::mt19937 random(5);
  Rig rig(7, 10, false);
  for (int i = 0; i < 60; ++i) {
    std::vector<TokenId> tokens;
    for (auto n = 1 + random() % 4; n > 0; --n) {
      const auto more = text({static_cast<int>(random() % 3)});
      tokens.insert(tokens.end(), more.begin(), more.end());
    }
    auto held = rig.run(tokens);
    rig.cache.make_room(static_cast<std::int64_t>(random() % 3));
  }
  CHECK(rig.wrong == 0);
  CHECK(rig.cache.counters().hit_pages_on[0] > 0);
  CHECK(rig.cache.counters().hit_pages_on[1] > 0);
  CHECK(rig.cache.finish(deadline_in(20s)));
  rig.cache.clear();
  CHECK(rig.used() == 0);
}

TEST_CASE("cuda tails: a request that stops after any token of a page goes on from exactly there, byte for byte") {
  Rig rig(3, 4, false);
  const auto tokens = text({1, 2});
  auto held = rig.run(text({1}));
  Cache::Pages pages;
  std::int64_t tails = 0;
  for (std::int64_t length = 1; length < page; length += small_run() ? 50 : 1, ++tails) {
    CAPTURE(length);
    const auto tail = std::span<const TokenId>(tokens).subspan(page, static_cast<std::size_t>(length));
    rig.stop(std::move(held), tail, pages);
    pages = {};
    rig.evict();
    held = rig.cache.acquire(rig.root, std::span(tokens).first(static_cast<std::size_t>(page + length)));
    REQUIRE(held.tokens == page);
    REQUIRE(rig.cache.resume(held, tail, pages) == length);
    REQUIRE(held.tokens == page + length);
    REQUIRE(rig.read(held, pages, rig.cache.cache().name_below(held.prefix.node(), tail)).ok());
    REQUIRE(rig.wrong == 0);
  }
  CHECK(rig.cache.counters().parked_tails == tails);
  CHECK(rig.cache.counters().resumed_tails_on[1] == tails);
  CHECK(rig.cache.counters().missed_tails == 0);
  held = {};
  pages = {};
  CHECK(rig.cache.finish(deadline_in(20s)));
  rig.cache.clear();
  CHECK(rig.used() == 0);
}

TEST_CASE("cuda tails: a byte that is wrong is seen, on the device by whoever looks, on the host by its seal, whatever the entry and layer") {
  Rig rig(3, 4, false);
  const auto tokens = text({1, 2});
  const auto tail = std::span<const TokenId>(tokens).subspan(page, 131);
  (void)rig.run(text({1}));
  for (int layer = small_run() ? 2 : 0; layer < layers; ++layer) {
    Model::for_each([&]<class Entry>() {
      if (!Entry::owns(LayerId(layer))) return;
      CAPTURE(Entry::name);
      CAPTURE(layer);
      const EntrySlot slot = Entry::slot(LayerId(layer));
      const auto space = static_cast<std::size_t>(Model::space_index<typename Entry::space>());
      const auto begin = [&] { return rig.cache.acquire(rig.root, std::span(tokens).first(static_cast<std::size_t>(page))); };
      auto held = begin();
      REQUIRE(held.tokens == page);
      const Hash128 name = rig.cache.cache().name_below(held.prefix.node(), tail);
      Cache::Pages pages;
      rig.stop(std::move(held), tail, pages);
      pages = {};
      rig.evict();
      held = begin();
      REQUIRE(rig.cache.resume(held, tail, pages) == 131);
      CHECK(rig.read(held, pages, name).ok());
      CHECK(rig.wrong == 0);
      Rig::flip(rig.device.template entry<Entry>(), pages[space].id(), slot, Entry::policy::page_bytes - 1);
      CHECK(rig.read(held, pages, name).ok());
      CHECK(rig.wrong == 1);
      rig.wrong = 0;
      // Again, and this time on the host.
      rig.stop(std::move(held), tail, pages);
      pages = {};
      rig.evict();
      held = begin();
      const std::int32_t node = rig.cache.cache().known(held.prefix.node(), tail);
      REQUIRE(rig.cache.cache().has(node, static_cast<int>(space), CacheTier::host));
      Rig::flip(rig.host.template entry<Entry>(), rig.cache.cache().host(node, static_cast<int>(space)).id(), slot, 0);
      REQUIRE(rig.cache.resume(held, tail, pages) == 131);
      const Status status = rig.read(held, pages, name);
      REQUIRE_FALSE(status.ok());
      CHECK(status.error().code == ErrorCode::mismatch);
      rig.wrong = 0;  // a step looks at pages before the verdict
      held = {};
      pages = {};
      REQUIRE(rig.cache.finish(deadline_in(20s)));
    });
  }
}
