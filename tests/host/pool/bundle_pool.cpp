// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstring>
#include <thread>
#include <vector>

#include <kvire/exec/host/event.hpp>
#include <kvire/memory/counting.hpp>
#include <kvire/pool/bundle_pool.hpp>
#include <kvire/preset/deepseek_v4.hpp>

using namespace kvire;

namespace {

using Model = preset::deepseek_v4::Flash<>;
using Device = DeviceBundlePool<Model, Host>;

bool contains(const Error& error, const std::string& text) { return error.message.find(text) != std::string::npos; }

BundlePages<Model> pages(std::int64_t full, std::int64_t window, std::int64_t request) {
  BundlePages<Model> p;
  p.of<space::Full>() = full;
  p.of<space::Window>() = window;
  p.of<space::Request>() = request;
  return p;
}

}  // namespace

TEST_CASE("bundle pool: one pool an entry, one ledger a space, ids shared within a space") {
  auto pool = Device::make({.pages = pages(6, 4, 3), .layers = 6, .name = "dev"}).value();
  CHECK(pool.entry<Model::C4Latent>().layers() == 2);   // layers 2 and 4
  CHECK(pool.entry<Model::IndexK>().layers() == 2);
  CHECK(pool.entry<Model::C128Latent>().layers() == 2);  // 3 and 5
  CHECK(pool.entry<Model::WindowLatent>().layers() == 6);
  CHECK(pool.entry<Model::C128RequestState>().pages() == 3);
  CHECK(pool.entry<Model::IndexK>().name() == "dev.index_k");
  CHECK(pool.ledger<space::Full>() == pool.entry<Model::IndexK>().ledger());
  CHECK(pool.ledger<space::Full>() == pool.entry<Model::C128Latent>().ledger());
  CHECK_FALSE(pool.ledger<space::Full>() == pool.entry<Model::WindowLatent>().ledger());
  CHECK(pool.bytes() == pages(6, 4, 3).bytes(6));

  auto full = pool.allocate<space::Full>(2).value();
  CHECK(pool.entry<Model::IndexK>().free_pages() == 3);
  CHECK(pool.entry<Model::C4Latent>().free_pages() == 3);
  CHECK(pool.entry<Model::WindowLatent>().free_pages() == 3);
  // a hold through one entry keeps the page of all
  const auto event = Event<Host>::make();
  const DevicePage id[] = {full[0].id()};
  auto hold = pool.entry<Model::IndexK>().hold(id, PageUse::load, event).value();
  full.clear();
  CHECK(pool.entry<Model::C128Latent>().draining_pages() == 1);
  event.complete();
  hold = {};
  pool.drain();
  CHECK(pool.ledger<space::Full>().free_pages() == 5);
}

TEST_CASE("bundle pool: a bundle cut to its first layers keeps entries without owners, empty") {
  auto pool = Device::make({.pages = pages(3, 3, 2), .layers = 2}).value();
  CHECK(pool.entry<Model::IndexK>().layers() == 0);
  CHECK(pool.entry<Model::WindowLatent>().layers() == 2);
  CHECK(pool.bytes() == pages(3, 3, 2).bytes(2));
  CHECK(Device::make({.pages = pages(3, 3, 2), .layers = 44}).error().code == ErrorCode::invalid_argument);
  CHECK(Device::make({.pages = pages(3, 3, 2), .layers = 0}).error().code == ErrorCode::invalid_argument);
}

TEST_CASE("bundle pool: no space is left out") {
  const auto refused = Device::make({.pages = pages(6, 0, 3), .layers = 3, .name = "dev"});
  REQUIRE_FALSE(refused.ok());
  CHECK(contains(refused.error(), "pool dev.window: 0 pages"));
}

TEST_CASE("bundle pool: allocation over all spaces is all or none and leaves no trace") {
  auto pool = Device::make({.pages = pages(6, 4, 3), .layers = 3}).value();
  auto some = pool.allocate(pages(2, 1, 1)).value();
  CHECK(some.of<space::Full>().size() == 2);
  CHECK(some.of<space::Window>().size() == 1);
  const auto next = pool.ledger<space::Full>().allocate().value().id();
  const auto refused = pool.allocate(pages(3, 2, 2));  // one request page is left
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::exhausted);
  CHECK(contains(refused.error(), "device.request: 2 pages wanted, 1 free"));
  CHECK(pool.ledger<space::Full>().free_pages() == 3);
  CHECK(pool.ledger<space::Window>().free_pages() == 2);
  CHECK(pool.ledger<space::Request>().free_pages() == 1);
  CHECK(pool.ledger<space::Full>().allocate().value().id() == next);
  CHECK_FALSE(pool.allocate(pages(1, -1, 0)).ok());
  CHECK(pool.ledger<space::Full>().free_pages() == 3);
}

TEST_CASE("bundle pool: threads that allocate over all spaces never keep half of what they asked for") {
  auto pool = Device::make({.pages = pages(9, 6, 4), .layers = 3}).value();
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 2000; ++round) {
        auto got = pool.allocate(pages(1 + (round + t) % 4, 1 + round % 3, 1 + t % 2));
        if (got.ok() && round % 5 == 0) std::this_thread::yield();
      }
    });
  }
  for (auto& t : threads) t.join();
  CHECK(pool.ledger<space::Full>().free_pages() == 8);
  CHECK(pool.ledger<space::Window>().free_pages() == 5);
  CHECK(pool.ledger<space::Request>().free_pages() == 3);
}

TEST_CASE("bundle pool: a budget counts every entry and is never exceeded") {
  constexpr PageRatio ratios[Model::space_count] = {{}, {1, 10, 2}, {1, 100, 2}};
  for (std::int64_t budget : {30'000'000, 33'333'333, 40'000'000}) {
    const auto fit = pages_in_budget<Model>(Bytes(budget), ratios, 4);
    CHECK(fit.of<space::Full>() >= 2);
    Counting<HostMemory> counting;
    {
      auto pool = Device::make({.pages = fit, .layers = 4, .budget = Bytes(budget), .memory = AnyResource(counting)}).value();
      CHECK(counting.counts().live_bytes == pool.bytes().count);
      CHECK(counting.counts().live_bytes <= budget);
      auto more = fit;
      ++more.of<space::Full>();
      if (more.bytes(4).count > budget) {
        const auto refused = Device::make({.pages = more, .layers = 4, .budget = Bytes(budget), .memory = AnyResource(counting)});
        CHECK(refused.error().code == ErrorCode::exhausted);
        CHECK(contains(refused.error(), std::to_string(budget)));
      }
    }
    CHECK(counting.counts().live_bytes == 0);
  }
  CHECK(pages_in<Fp8WithScale<64, 128>>(Bytes(1 << 20)).count == 124);
  CHECK(pages_in<Bf16Contiguous<64, 128>>(Bytes(1 << 20)).count == 64);
  CHECK(pages_in<Fp4WithScale<64, 128>>(Bytes(1 << 20)).count == 240);
}

TEST_CASE("bundle pool: one entry's pages in memory of its own") {
  Counting<HostMemory> all, own;
  {
    Device::Options options{.pages = pages(6, 4, 3), .layers = 4, .memory = AnyResource(all)};
    options.memory_of<Model::C4Latent>() = AnyResource(own);
    auto pool = Device::make(options).value();
    CHECK(own.counts().live_bytes == pool.entry<Model::C4Latent>().bytes().count);
    CHECK(all.counts().live_bytes == pool.bytes().count - own.counts().live_bytes);
  }
  CHECK(own.counts().live_bytes + all.counts().live_bytes == 0);
}

TEST_CASE("bundle pool: memory that runs out midway leaves nothing allocated") {
  Counting<HostMemory> counting({}, pages(6, 4, 3).bytes(4).count - 1);
  const auto refused = Device::make({.pages = pages(6, 4, 3), .layers = 4, .memory = AnyResource(counting)});
  REQUIRE_FALSE(refused.ok());
  CHECK(contains(refused.error(), "bytes wanted"));
  CHECK(counting.counts().live_bytes == 0);
}

namespace {
struct Refuses {
  static constexpr bool zeroed = false;
  Result<std::byte*> allocate(std::int64_t bytes, std::int64_t) { return Error{ErrorCode::exhausted, std::to_string(bytes) + " bytes"}; }
  void deallocate(std::byte*, std::int64_t, std::int64_t) {}
  std::string name() const { return "refuses"; }
};
}  // namespace

TEST_CASE("bundle pool: memory that is not to be had is refused before anything is set up for its pages") {
  // 43 GB of tables: the tables alone would be refused, with another message.
  const auto huge = Device::make({.pages = pages(INT64_C(0x7FFFFFFF), 4, 4), .layers = 3, .name = "huge", .memory = Refuses{}});
  REQUIRE_FALSE(huge.ok());
  CHECK(huge.error().message == "pool huge.c4_latent: " + std::to_string(INT64_C(0x7FFFFFFF) * 37'440) + " bytes");
}

TEST_CASE("bundle pool: its mirror covers every entry with the same layouts and layers") {
  auto device = Device::make({.pages = pages(4, 3, 2), .layers = 5, .name = "dev"}).value();
  auto host = mirror_of(device, pages(9, 5, 2), {.arrangement = Arrangement::page_first}).value();
  static_assert(std::is_same_v<decltype(host), HostBundlePool<Model, Host>>);
  int entries = 0;
  Model::for_each([&]<class Entry>() {
    ++entries;
    static_assert(std::is_same_v<typename std::decay_t<decltype(host.template entry<Entry>())>::policy, typename Entry::policy>);
    CHECK(host.entry<Entry>().layers() == device.entry<Entry>().layers());
  });
  CHECK(entries == Model::entry_count);
  CHECK(host.ledger<space::Full>().pages() == 9);
  CHECK(host.name() == "host.dev");
}
