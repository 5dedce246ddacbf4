// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvire/preset/all.hpp>
#include <kvire/transfer/bundle.hpp>
#include <kvire/transfer/migrate.hpp>
#include <tests/support/pages.hpp>

using namespace kvire;
using kvire_test::fill;
using kvire_test::holds;
using kvire_test::snapshot;

// A plan between a host pool and a device pool means the same in either order: the types of its ids say which pool each is of.

namespace {

using Keys = Fp8WithScale<16, 64>;

struct Schedule {
  static constexpr int layers = 2;
};
struct Full : CacheEntry<Keys, space::Full, Tokens<1>> {
  static constexpr const char* name = "full";
};
struct Window : CacheEntry<Keys, space::Window, Ring> {
  static constexpr const char* name = "window";
};
using Model = CacheBundle<Schedule, Full, Window>;

/// Ids that do not agree: device pages 1 and 2 belong with host pages 41 and 42, which the device pool does not even have.
template <class P = Keys>
struct Far {
  DevicePool<P, Host> device = DevicePool<P, Host>::make({.layers = 2, .pages = 4, .name = "gpu"}).value();
  HostPool<P, Host> host = mirror_of(device, 64).value();
  Stream<Host> stream = Stream<Host>::make().value();
  std::vector<PageRef<HostPage>> others = host.allocate(40).value();
  std::vector<PageRef<HostPage>> saved = host.allocate(2).value();
  std::vector<PageRef<DevicePage>> pages = device.allocate(2).value();

  Far() {
    for (const auto& page : pages) fill(device, page.id(), static_cast<std::uint32_t>(page.id().value));
    for (const auto& page : others) fill(host, page.id(), 77);
    for (const auto& page : saved) fill(host, page.id(), 78);
  }
  void expect_there_and_back(const auto& moves) {
    REQUIRE(backup(device, host, moves, stream, {.digest = true}).value().wait().ok());
    CHECK(holds(host, HostPage(41), 1));
    CHECK(holds(host, HostPage(42), 2));
    for (const auto& page : others) CHECK(holds(host, page.id(), 77));
    for (const auto& page : pages) fill(device, page.id(), 99);
    REQUIRE(load(host, device, moves, stream, {.digest = true}).value().wait().ok());
    CHECK(holds(device, DevicePage(1), 1));
    CHECK(holds(device, DevicePage(2), 2));
    for (const auto& page : others) CHECK(holds(host, page.id(), 77));
  }
};

template <class PageId>
std::vector<PageId> ids(const std::vector<PageRef<PageId>>& refs) {
  std::vector<PageId> out;
  for (const auto& ref : refs) out.push_back(ref.id());
  return out;
}
template <class PageId>
std::vector<PageKey<PageId>> keys(const std::vector<PageRef<PageId>>& refs) {
  std::vector<PageKey<PageId>> out;
  for (const auto& ref : refs) out.push_back(ref.key());
  return out;
}
template <class P, class PageId>
std::vector<TokenSlot<PageId>> rows(const std::vector<PageRef<PageId>>& refs) {
  std::vector<TokenSlot<PageId>> out;
  for (const auto& ref : refs) {
    for (int t = 0; t < P::tokens_per_page; ++t) out.push_back(slot_of<P>(ref.id(), t));
  }
  return out;
}

}  // namespace

TEST_CASE("plan: owned pages, ids, keys and pairs, the device's side first or second") {
  Far s;
  s.expect_there_and_back(plan(s.pages, s.saved));
  s.expect_there_and_back(plan(s.saved, s.pages));
  s.expect_there_and_back(plan(ids(s.pages), ids(s.saved)));
  s.expect_there_and_back(plan(ids(s.saved), ids(s.pages)));
  s.expect_there_and_back(plan(keys(s.pages), keys(s.saved)));
  s.expect_there_and_back(plan({PagePair{DevicePage(1), HostPage(41)}, PagePair{DevicePage(2), HostPage(42)}}));
  s.expect_there_and_back(plan({PagePair{HostPage(42), DevicePage(2)}, PagePair{HostPage(41), DevicePage(1)}}));
}

TEST_CASE("plan: rows, the device's side first or second") {
  Far<F32Rows<8, 32>> s;  // rows that fill the page
  s.expect_there_and_back(plan_tokens(rows<F32Rows<8, 32>>(s.pages), rows<F32Rows<8, 32>>(s.saved)));
  s.expect_there_and_back(plan_tokens(rows<F32Rows<8, 32>>(s.saved), rows<F32Rows<8, 32>>(s.pages)));
}

TEST_CASE("plan: what is checked is checked of the side that it is of") {
  Far s;
  const auto host_before = snapshot(s.host);
  const auto refused = [&](const auto& moves, ErrorCode code, const char* words) {
    for (const bool to_host : {true, false}) {
      const auto got = to_host ? backup(s.device, s.host, moves, s.stream) : load(s.host, s.device, moves, s.stream);
      REQUIRE_FALSE(got.ok());
      CHECK(got.error().code == code);
      CAPTURE(got.error().message);
      CHECK(kvire_test::contains(got.error().message, words));
    }
  };
  refused(plan(std::vector{DevicePage(41)}, std::vector{HostPage(1)}), ErrorCode::out_of_range, "device page 41 is not below 4");
  refused(plan(std::vector{DevicePage(1)}, std::vector{HostPage(64)}), ErrorCode::out_of_range, "host page 64 is not below 64");
  refused(plan(std::vector{DevicePage(1), DevicePage(2)}, std::vector{HostPage(41)}), ErrorCode::mismatch, "1 host page");
  refused(plan(std::vector{DevicePage(1)}, std::vector{HostPage(43)}), ErrorCode::invalid_argument, "host page 43 was never allocated");
  auto stale = keys(s.pages);
  s.pages = s.device.allocate(1).value();
  s.pages = s.device.allocate(2).value();
  refused(plan(stale, keys(s.saved)), ErrorCode::stale, "was freed");
  refused(plan_tokens(std::vector{DeviceSlot{4 * 16}}, std::vector{HostSlot{41 * 16}}), ErrorCode::out_of_range, "pool gpu: token slot 64 is not below 64");
  CHECK(snapshot(s.host) == host_before);
}

TEST_CASE("plan: migrate takes either order between host and device; between two device pools the first side is the source") {
  using Bf16 = Bf16Contiguous<16, 64>;
  Far<Bf16> s;
  auto fp8 = HostPool<Keys, Host>::make({.layers = 2, .pages = 64}).value();
  auto there = fp8.allocate(60).value();
  const std::vector<HostPage> far{HostPage(51), HostPage(52)};
  for (const auto& page : there) fill(fp8, page.id(), 5);
  for (const auto& page : s.pages) (void)s.device.fill_page(page.id(), 0);
  REQUIRE(migrate(s.device, fp8, plan(far, ids(s.pages)), s.stream).value().wait().ok());
  const auto swapped = snapshot(fp8);
  for (const auto& page : there) CHECK(holds(fp8, page.id(), 5) == (page.id() != far[0] && page.id() != far[1]));
  for (const HostPage page : far) fill(fp8, page, 5);
  REQUIRE(migrate(s.device, fp8, plan(ids(s.pages), far), s.stream).value().wait().ok());
  CHECK(snapshot(fp8) == swapped);

  auto third = s.device.allocate().value();
  fill(s.device, third.id(), 33);
  REQUIRE(migrate(s.device, s.device, plan(std::vector{third}, std::vector{s.pages[0]}), s.stream).value().wait().ok());
  CHECK(holds(s.device, third.id(), 33));
}

TEST_CASE("plan: each space of a bundle in its own order") {
  auto device = DeviceBundlePool<Model, Host>::make({.pages = {{4, 4}}}).value();
  auto host = mirror_of(device, BundlePages<Model>{{64, 64}}).value();
  auto stream = Stream<Host>::make().value();
  auto full = device.allocate<space::Full>(2).value();
  auto window = device.allocate<space::Window>(2).value();
  auto others = host.allocate<space::Full>(40).value();
  auto saved_full = host.allocate<space::Full>(2).value();
  auto saved_window = host.allocate<space::Window>(2).value();
  const auto expect = [&](const BundlePlan<Model>& moves) {
    for (std::uint32_t i = 0; i < 2; ++i) {
      fill(device.entry<Full>(), full[i].id(), 10 + i);
      fill(device.entry<Window>(), window[i].id(), 20 + i);
    }
    for (const auto& page : others) fill(host.entry<Full>(), page.id(), 77);
    REQUIRE(backup(device, host, moves, stream).value().wait().ok());
    for (std::uint32_t i = 0; i < 2; ++i) {
      CHECK(holds(host.entry<Full>(), saved_full[i].id(), 10 + i));
      CHECK(holds(host.entry<Window>(), saved_window[i].id(), 20 + i));
      (void)device.entry<Full>().fill_page(full[i].id(), 0);
    }
    for (const auto& page : others) CHECK(holds(host.entry<Full>(), page.id(), 77));
    REQUIRE(load(host, device, moves, stream).value().wait().ok());
    for (std::uint32_t i = 0; i < 2; ++i) CHECK(holds(device.entry<Full>(), full[i].id(), 10 + i));
  };
  expect(BundlePlan<Model>(in_space<space::Full>(plan(full, saved_full)), in_space<space::Window>(plan(saved_window, window))));
  expect(BundlePlan<Model>(in_space<space::Window>(plan(keys(window), keys(saved_window))), in_space<space::Full>(plan(saved_full, full))));
}
