// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvire/layout/policies.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/transfer/bundle.hpp>
#include <tests/support/pages.hpp>

using namespace kvire;
using kvire_test::contains;
using kvire_test::fill;
using kvire_test::holds;

namespace {
using P = preset::deepseek_v4::Latent<64>;  // has padding in its rows and behind them

/// Three pages that go to the host and come back to other places, with seals.
struct Trip {
  explicit Trip(Arrangement at_host = Arrangement::layer_first)
      : host(mirror_of(device, 9, {.arrangement = at_host}).value()),
        seals(PageSeals::make(host).value()),
        from(device.allocate(3).value()),
        there(host.allocate(3).value()),
        back(device.allocate(3).value()) {
    for (std::uint32_t i = 0; i < 3; ++i) fill(device, from[i].id(), i);
    for (const auto& page : back) fill(device, page.id(), 77);
  }
  Status out() { return backup(device, host, plan(there, from), stream, {.name = "out", .seals = seals}).value().wait(); }
  Ticket<Host> in() { return load(host, device, plan(there, back), stream, {.name = "in", .seals = seals}).value(); }
  std::byte& at_host(int layer, std::size_t page, std::int64_t at) { return pool_access::view(host, EntrySlot(layer)).page(there[page].id().value)[at]; }

  std::shared_ptr<FaultHooks> faults = FaultHooks::make();
  Stream<Host> stream = Stream<Host>::make({.name = "copies", .faults = faults}).value();
  DevicePool<P, Host> device = DevicePool<P, Host>::make({.layers = 2, .pages = 9}).value();
  HostPool<P, Host> host;
  std::shared_ptr<PageSeals> seals;
  std::vector<PageRef<DevicePage>> from;
  std::vector<PageRef<HostPage>> there;
  std::vector<PageRef<DevicePage>> back;
};
}  // namespace

TEST_CASE("seals: what went out whole comes back, in any arrangement, by other ids and in parts") {
  for (const auto arrangement : {Arrangement::layer_first, Arrangement::page_first}) {
    Trip trip(arrangement);
    CHECK(trip.out().ok());
    CHECK(trip.in().wait().ok());
    for (std::uint32_t i = 0; i < 3; ++i) CHECK(holds(trip.device, trip.back[i].id(), i));
    // The order of a plan does not matter, nor what else is in it.
    auto alone = load(trip.host, trip.device, plan(std::vector{trip.there[2].id()}, std::vector{trip.back[0].id()}), trip.stream, {.seals = trip.seals}).value();
    CHECK(alone.wait().ok());
    CHECK(trip.seals->bytes().count == 2 * 9 * 8);
  }
}

TEST_CASE("seals: any byte that changes on the host fails the load, at its layer") {
  Trip trip;
  CHECK(trip.out().ok());
  for (const std::int64_t at : {std::int64_t{0}, P::offset<role::Rope>(63), P::offset<role::Scale>(63) + 6, P::page_bytes - 1}) {
    trip.at_host(1, 2, at) ^= std::byte{1};
    const auto ticket = trip.in();
    const auto status = ticket.wait();
    REQUIRE_FALSE(status.ok());
    CHECK(status.error().code == ErrorCode::mismatch);
    CHECK(contains(status.error().message, "layer 1"));
    CHECK(contains(status.error().message, "host page " + std::to_string(trip.there[2].id().value)));
    CHECK(ticket.progress()->wait(0).ok());
    CHECK_FALSE(ticket.progress()->wait(1).ok());
    trip.at_host(1, 2, at) ^= std::byte{1};
    CHECK(trip.in().wait().ok());
  }
}

TEST_CASE("seals: every bit of a small page counts") {
  using Small = Fp8WithScale<4, 36>;  // 160 bytes; and a page of odd bytes below
  std::vector<std::byte> page(static_cast<std::size_t>(Small::page_bytes));
  for (std::size_t i = 0; i < page.size(); ++i) page[i] = static_cast<std::byte>(i * 37);
  for (const std::int64_t bytes : {Small::page_bytes, Small::page_bytes - 3}) {
    const auto seal = detail::seal_page(5, page.data(), bytes);
    CHECK(seal != detail::seal_page(6, page.data(), bytes));
    std::int64_t missed = 0;
    for (std::size_t bit = 0; bit < 8 * static_cast<std::size_t>(bytes); ++bit) {
      page[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
      missed += detail::seal_page(5, page.data(), bytes) == seal ? 1 : 0;
      page[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    }
    CHECK(missed == 0);
    // As a block of threads adds it up.
    std::uint64_t sum = 0;
    for (std::int64_t thread = 0; thread < 7; ++thread) sum += detail::seal_part(5, page.data(), bytes, thread, 7);
    CHECK(detail::seal_of(sum) == seal);
  }
}

TEST_CASE("seals: pages or layers that changed places are found") {
  Trip trip;
  CHECK(trip.out().ok());
  const auto swap = [&](int layer, std::size_t page, int other_layer, std::size_t other_page) {
    for (std::int64_t at = 0; at < P::page_bytes; ++at) std::swap(trip.at_host(layer, page, at), trip.at_host(other_layer, other_page, at));
  };
  for (const auto& [other_layer, other_page] : {std::pair(0, std::size_t{1}), std::pair(1, std::size_t{0})}) {
    swap(0, 0, other_layer, other_page);
    CHECK(trip.in().wait().error().code == ErrorCode::mismatch);
    swap(0, 0, other_layer, other_page);
  }
  CHECK(trip.in().wait().ok());
}

TEST_CASE("seals: a copy that moved nothing and reported success is found on the way back") {
  const auto skip_layer_1 = [](const CopyInfo& info) { return info.layer == 1 ? Fault::skip() : Fault::none(); };
  Trip out;
  out.faults->set(skip_layer_1);
  CHECK(out.out().ok());
  out.faults->set({});
  CHECK(out.in().wait().error().code == ErrorCode::mismatch);
  Trip in;
  CHECK(in.out().ok());
  in.faults->set(skip_layer_1);
  CHECK(in.in().wait().error().code == ErrorCode::mismatch);
}

TEST_CASE("seals: pages that nobody sealed, seals of another pool, token plans and migrations are refused") {
  Trip trip;
  const auto unsealed = trip.in().wait();
  REQUIRE_FALSE(unsealed.ok());
  CHECK(contains(unsealed.error().message, "nothing was stored there"));
  Trip other;
  const auto foreign = load(trip.host, trip.device, plan(trip.there, trip.back), trip.stream, {.name = "in", .seals = other.seals});
  REQUIRE_FALSE(foreign.ok());
  CHECK(foreign.error().code == ErrorCode::mismatch);
  CHECK(contains(foreign.error().message, trip.host.name()));
  const std::vector<HostSlot> rows{slot_of<P>(trip.there[0].id(), 1)};
  const std::vector<DeviceSlot> to{slot_of<P>(trip.back[0].id(), 1)};
  const auto tokens = load(trip.host, trip.device, plan_tokens(rows, to), trip.stream, {.seals = trip.seals});
  REQUIRE_FALSE(tokens.ok());
  CHECK(tokens.error().code == ErrorCode::unsupported);
  CHECK(trip.device.free_pages() == 2);
  CHECK(trip.host.free_pages() == 5);
}

TEST_CASE("seals: of a pool that has gone are of no later one, wherever that lies") {
  auto device = DevicePool<P, Host>::make({.layers = 1, .pages = 4}).value();
  auto seals = PageSeals::make(mirror_of(device, 2).value()).value();
  for (int i = 0; i < 20; ++i) {
    auto later = mirror_of(device, 4).value();
    CHECK(seals->of(later, EntrySlot(0)).of_page.empty());
  }
}

namespace {
struct Schedule {
  static constexpr int layers = 2;
};
struct Keys : CacheEntry<Bf16Contiguous<16, 32>, space::Full, Tokens<1>> {
  static constexpr const char* name = "keys";
};
struct Twin : CacheEntry<Bf16Contiguous<16, 32>, space::Full, Tokens<1>> {
  static constexpr const char* name = "twin";
};
using Model = CacheBundle<Schedule, Keys, Twin>;
}  // namespace

TEST_CASE("seals: of a bundle, entries of one policy are told apart") {
  auto device = DeviceBundlePool<Model, Host>::make({.pages = {{4}}, .name = "gpu"}).value();
  auto host = mirror_of(device, {{4}}).value();
  auto seals = PageSeals::make(host).value();
  auto stream = Stream<Host>::make().value();
  auto pages = device.allocate<space::Full>(2).value();
  auto there = host.allocate<space::Full>(2).value();
  for (const auto& page : pages) {
    fill(device.entry<Keys>(), page.id(), 1);
    fill(device.entry<Twin>(), page.id(), 2);
  }
  const BundlePlan<Model> moves(in_space<space::Full>(plan(there, pages)));
  CHECK(backup(device, host, moves, stream, {.seals = seals}).value().wait().ok());
  CHECK(load(host, device, moves, stream, {.seals = seals}).value().wait().ok());
  fill(host.entry<Keys>(), there[0].id(), 2);
  fill(host.entry<Twin>(), there[0].id(), 1);
  CHECK(load(host, device, moves, stream, {.seals = seals}).value().wait().error().code == ErrorCode::mismatch);
  auto other = PageSeals::make(mirror_of(device, {{4}}).value()).value();
  CHECK(load(host, device, moves, stream, {.seals = other}).error().code == ErrorCode::mismatch);
}
