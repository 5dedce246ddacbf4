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

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::fill_page;
using kvire_test::has_page;

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
  pages.of<space::Request>() = 2;
  return pages;
}

/// A tiered cache on the GPU; the content of a page follows from its prefix.
struct Rig {
  Device device;
  HostBundlePool<Model, Cuda> host;
  Stream<Cuda> compute = Stream<Cuda>::make({.name = "compute"}).value();
  Stream<Cuda> loads = Stream<Cuda>::make({.name = "load"}).value();
  Stream<Cuda> stores = Stream<Cuda>::make({.name = "store"}).value();
  Gate<Cuda> gate;
  Cache cache;
  std::int32_t root;

  Rig(std::int64_t device_pages, std::int64_t host_pages, bool write_through)
      : device(Device::make({.pages = counts(device_pages + 1), .layers = layers}).value()),
        host(mirror_of(device, counts(host_pages + 1)).value()),
        cache(Cache::make({&device, &host, &loads, &stores}, {.window_tokens = 128, .write_through = write_through, .batch_pages = 3}).value()),
        root(cache.root({.model = "flash"})) {}

  template <class Entry>
  static std::uint32_t seed(const Hash128& name) {
    return static_cast<std::uint32_t>(name.low) * 8 + static_cast<std::uint32_t>(Model::index_of<Entry>());
  }

  /// Layer by layer, as a step does: the lease's stream waits for the layer's load, then its pages are looked at.
  void read(const Cache::Held& held) {
    auto step = gate.begin(held.loads, compute);
    REQUIRE_MESSAGE(step.ok(), step.error().message);
    std::vector<std::int32_t> path(static_cast<std::size_t>(held.prefix.pages()));
    cache.cache().path(held.prefix.node(), path);
    for (int layer = 0; layer < layers; ++layer) {
      Model::for_each([&]<class Entry>() {
        if (!Entry::owns(LayerId(layer)) || std::is_same_v<typename Entry::space, space::Request>) return;
        auto lease = step.value().template read<Entry>(device, LayerId(layer));
        REQUIRE_MESSAGE(lease.ok(), lease.error().message);
        (void)kernel_access::view(lease.value(), compute);
        REQUIRE(cudaStreamSynchronize(compute.native()) == cudaSuccess);
        const int space = Model::space_index<typename Entry::space>();
        const int slot = Entry::slot(LayerId(layer)).value;
        for (std::size_t i = 0; i < path.size(); ++i) {
          if (!cache.cache().needed(space, static_cast<std::int64_t>(path.size() - 1 - i))) continue;
          const DevicePage id = cache.cache().device(path[i], space).id();
          REQUIRE(!id.none());
          CHECK(has_page(device.template entry<Entry>(), id, seed<Entry>(cache.cache().name(path[i])), slot, slot + 1));
        }
      });
    }
    CHECK(step.value().status().ok());
  }

  /// A request: what is there is read, the rest made and published.
  Cache::Held run(const std::vector<TokenId>& tokens) {
    auto held = cache.acquire(root, tokens);
    read(held);
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
      rig.read(held);
    }
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
  CHECK(rig.cache.counters().hit_pages_on[0] > 0);
  CHECK(rig.cache.counters().hit_pages_on[1] > 0);
  CHECK(rig.cache.finish(deadline_in(20s)));
  rig.cache.clear();
  CHECK(rig.used() == 0);
}
