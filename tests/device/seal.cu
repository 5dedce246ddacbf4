// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <vector>

#include <kvire/layout/policies.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/sync/gate.hpp>
#include <kvire/sync/cuda/lease.hpp>
#include <kvire/transfer/bundle.hpp>
#include <kvire/transfer/transfer.cuh>
#include <tests/support/cuda_pages.hpp>

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::contains;
using kvire_test::fill_page;
using kvire_test::has_page;

namespace {

constexpr int layers = 2;

/// Pages that go to the host and come back to other places, with seals.
template <class P>
struct Trip {
  explicit Trip(Arrangement at_host = Arrangement::layer_first, std::int64_t n = 3)
      : device(DevicePool<P, Cuda>::make({.layers = layers, .pages = 2 * n + 3}).value()),
        host(mirror_of(device, n + 2, {.arrangement = at_host}).value()),
        seals(PageSeals::make(host).value()),
        from(device.allocate(n).value()),
        there(host.allocate(n).value()),
        back(device.allocate(n).value()) {
    for (std::size_t i = 0; i < from.size(); ++i) fill_page(device, from[i].id(), static_cast<std::uint32_t>(i));
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);  // a copy from pageable memory may still be on its way
  }
  TransferOptions<Cuda> options(const char* name) const {
    TransferOptions<Cuda> o;
    o.name = name;
    o.seals = seals;
    o.engine = engine;
    return o;
  }
  Status out() { return backup(device, host, plan(there, from), stream, options("out")).value().wait(deadline_in(20s)); }
  Ticket<Cuda> in() { return load(host, device, plan(there, back), stream, options("in")).value(); }
  std::byte& at_host(int layer, std::size_t page, std::int64_t at) { return pool_access::view(host, EntrySlot(layer)).page(there[page].id().value)[at]; }

  EngineOptions<Cuda> engine = {};
  std::shared_ptr<FaultHooks> faults = FaultHooks::make();
  Stream<Cuda> stream = Stream<Cuda>::make({.name = "copies", .faults = faults}).value();
  DevicePool<P, Cuda> device;
  HostPool<P, Cuda> host;
  std::shared_ptr<PageSeals> seals;
  std::vector<PageRef<DevicePage>> from;
  std::vector<PageRef<HostPage>> there;
  std::vector<PageRef<DevicePage>> back;
};

template <class P>
void check_policy() {
  CAPTURE(P::name);
  for (const auto arrangement : {Arrangement::layer_first, Arrangement::page_first}) {
    for (const auto choice : {EngineChoice::automatic, EngineChoice::copy_engine, EngineChoice::sm_kernel}) {
      for (const bool layer_events : {true, false}) {
        Trip<P> trip(arrangement);
        trip.engine.choice = choice;
        trip.engine.layer_events = layer_events;
        CHECK(trip.out().ok());
        for (int layer = 0; layer < layers; ++layer) {
          const LayerSeals of = trip.seals->of(trip.host, EntrySlot(layer));
          for (std::size_t i = 0; i < trip.there.size(); ++i) {
            CHECK(of.of_page[static_cast<std::size_t>(trip.there[i].id().value)] == detail::seal_page(of.key, &trip.at_host(layer, i, 0), P::page_bytes));
          }
        }
        CHECK(trip.in().wait(deadline_in(20s)).ok());
        for (std::size_t i = 0; i < trip.back.size(); ++i) CHECK(has_page(trip.device, trip.back[i].id(), static_cast<std::uint32_t>(i)));
      }
    }
  }
}

}  // namespace

TEST_CASE("cuda seals: the host's numbers, and what went out whole comes back, by any engine") {
  check_policy<Fp8WithScale<64, 128>>();
  check_policy<Fp4WithScale<64, 128>>();
  check_policy<preset::deepseek_v4::Latent<64>>();
  check_policy<preset::deepseek_v4::Latent<2>>();
}

TEST_CASE("cuda seals: of no pages, and of no tokens with digests") {
  Trip<Fp8WithScale<64, 128>> trip;
  auto options = trip.options("nothing");
  for (const bool digest : {false, true}) {
    options.digest = digest;
    const auto none = plan(std::vector<HostPage>{}, std::vector<DevicePage>{});
    CHECK(backup(trip.device, trip.host, none, trip.stream, options).value().wait(deadline_in(20s)).ok());
    const auto ticket = load(trip.host, trip.device, none, trip.stream, options).value();
    CHECK(ticket.wait(deadline_in(20s)).ok());
    CHECK(ticket.moved().empty());
  }
  options.seals = nullptr;
  const auto no_tokens = plan_tokens(std::vector<HostSlot>{}, std::vector<DeviceSlot>{});
  CHECK(load(trip.host, trip.device, no_tokens, trip.stream, options).value().wait(deadline_in(20s)).ok());
}

TEST_CASE("cuda seals: more pages than blocks, and each one's bytes count") {
  using P = Fp8WithScale<64, 128>;
  Trip<P> trip(Arrangement::layer_first, 300);
  CHECK(trip.out().ok());
  CHECK(trip.in().wait(deadline_in(20s)).ok());
  for (const std::size_t page : {std::size_t{0}, std::size_t{127}, std::size_t{128}, std::size_t{299}}) {
    for (const std::int64_t at : {std::int64_t{0}, P::page_bytes / 2 + 1, P::page_bytes - 1}) {
      trip.at_host(1, page, at) ^= std::byte{64};
      const auto ticket = trip.in();
      const auto status = ticket.wait(deadline_in(20s));
      REQUIRE_FALSE(status.ok());
      CHECK(status.error().code == ErrorCode::mismatch);
      CHECK(contains(status.error().message, "layer 1, host page " + std::to_string(trip.there[page].id().value)));
      CHECK(ticket.progress()->wait(0, deadline_in(20s)).ok());
      CHECK_FALSE(ticket.progress()->wait(1, deadline_in(20s)).ok());
      trip.at_host(1, page, at) ^= std::byte{64};
    }
  }
  CHECK(trip.in().wait(deadline_in(20s)).ok());
}

TEST_CASE("cuda seals: a copy that moved nothing and reported success is found on the way back") {
  using P = Fp8WithScale<64, 128>;
  const auto skip_layer_1 = [](const CopyInfo& info) { return info.layer == 1 ? Fault::skip() : Fault::none(); };
  Trip<P> out;
  out.faults->set(skip_layer_1);
  CHECK(out.out().ok());
  out.faults->set({});
  CHECK(out.in().wait(deadline_in(20s)).error().code == ErrorCode::mismatch);
  Trip<P> in;
  CHECK(in.out().ok());
  in.faults->set(skip_layer_1);
  CHECK(in.in().wait(deadline_in(20s)).error().code == ErrorCode::mismatch);
  // A transfer that fails seals and judges only what it has done.
  Trip<P> failing;
  failing.faults->set([](const CopyInfo& info) { return info.layer == 1 ? Fault::fail() : Fault::none(); });
  CHECK(failing.out().error().code == ErrorCode::failed);
  failing.faults->set({});
  CHECK(failing.out().ok());
  CHECK(failing.in().wait(deadline_in(20s)).ok());
}

TEST_CASE("cuda seals: what follows on the stream waits for the seals of pages that it writes") {
  using P = Fp8WithScale<64, 128>;
  Trip<P> trip(Arrangement::layer_first, 300);
  for (int round = 0; round < 4; ++round) {
    // Out, and at once others' pages into the places that were just read.
    auto out = backup(trip.device, trip.host, plan(trip.there, trip.from), trip.stream, trip.options("out")).value();
    auto over = load(trip.host, trip.device, plan(std::vector{trip.there[1].id()}, std::vector{trip.from[0].id()}), trip.stream).value();
    CHECK(out.wait(deadline_in(20s)).ok());
    CHECK(over.wait(deadline_in(20s)).ok());
    CHECK(trip.in().wait(deadline_in(20s)).ok());
    fill_page(trip.device, trip.from[0].id(), 0);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  }
}

TEST_CASE("cuda seals: of a whole bundle, beside digests") {
  using Model = preset::deepseek_v4::Flash<>;
  constexpr int model_layers = 6;
  BundlePages<Model> counts;
  counts.of<space::Full>() = 7;
  counts.of<space::Window>() = 5;
  counts.of<space::Request>() = 2;
  auto device = DeviceBundlePool<Model, Cuda>::make({.pages = counts, .layers = model_layers}).value();
  auto host = mirror_of(device, counts).value();
  auto seals = PageSeals::make(host).value();
  auto stream = Stream<Cuda>::make({.name = "copies"}).value();
  const auto full = device.allocate<space::Full>(3).value();
  const auto window = device.allocate<space::Window>(2).value();
  const auto full_host = host.allocate<space::Full>(3).value();
  const auto window_host = host.allocate<space::Window>(2).value();
  Model::for_each([&]<class Entry>() {
    std::uint32_t seed = 10 * static_cast<std::uint32_t>(Model::index_of<Entry>());
    if constexpr (std::is_same_v<typename Entry::space, space::Full>) {
      for (const auto& page : full) fill_page(device.entry<Entry>(), page.id(), seed++);
    }
    if constexpr (std::is_same_v<typename Entry::space, space::Window>) {
      for (const auto& page : window) fill_page(device.entry<Entry>(), page.id(), seed++);
    }
  });
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  const BundlePlan<Model> moves(in_space<space::Full>(plan(full_host, full)), in_space<space::Window>(plan(window_host, window)), without<space::Request>());
  CHECK(backup(device, host, moves, stream, {.digest = true, .seals = seals}).value().wait(deadline_in(20s)).ok());
  CHECK(load(host, device, moves, stream, {.digest = true, .seals = seals}).value().wait(deadline_in(20s)).ok());
  auto& keys = host.entry<Model::IndexK>();
  pool_access::view(keys, EntrySlot(1)).page(full_host[2].id().value)[100] ^= std::byte{1};
  const auto status = load(host, device, moves, stream, {.digest = true, .seals = seals}).value().wait(deadline_in(20s));
  REQUIRE_FALSE(status.ok());
  CHECK(contains(status.error().message, "seal of entry"));
}

TEST_CASE("cuda seals: a step that writes behind a load, and reads what a transfer made of that" * doctest::test_suite("held")) {
  using P = Fp8WithScale<64, 128>;
  for (const bool changed : {false, true}) {
    for (const bool step_first : {false, true}) {
      Trip<P> trip;
      auto compute = Stream<Cuda>::make({.name = "compute"}).value();
      auto other = Stream<Cuda>::make({.name = "other"}).value();
      auto spare = trip.host.allocate(1).value();
      auto own = trip.device.allocate(1).value();
      CHECK(trip.out().ok());
      if (changed) trip.at_host(0, 0, 5) ^= std::byte{1};
      auto hold = CopyHold::make();
      const std::atomic<bool> never{false};
      REQUIRE(trip.stream.launch([&] { (void)hold->hold(never); }).ok());
      const auto ticket = trip.in();
      Gate<Cuda> gate;
      auto step = gate.begin({ticket}, compute).value();
      {
        auto keys = step.read(trip.device, EntrySlot(0)).value();
        auto mine = step.write(trip.device, EntrySlot(0), own).value();
        CHECK(launch(compute, [](cudaStream_t, auto, auto) {}, keys, mine).ok());
      }
      auto copied = backup(trip.device, trip.host, plan(spare, own), other, {.name = "save"});
      CHECK(step.read(trip.host, EntrySlot(0), spare).ok());
      hold->release();
      REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
      REQUIRE(copied.ok());
      // Each asks the others, and all have the same answer whoever is asked first.
      if (step_first) CHECK(step.status().ok() != changed);
      CHECK(copied.value().wait(deadline_in(20s)).ok() != changed);
      CHECK(step.status().ok() != changed);
      CHECK(trip.host.ledger().readable(spare[0].id()).ok() != changed);
    }
  }
}

TEST_CASE("cuda seals: what has read the pages before the verdict fails with it, and who comes later is refused" * doctest::test_suite("held")) {
  using P = Fp8WithScale<64, 128>;
  Trip<P> trip;
  auto compute = Stream<Cuda>::make({.name = "compute"}).value();
  auto spare = trip.host.allocate(1).value();
  auto own = trip.device.allocate(1).value();
  const std::vector<DevicePage> pages{own[0].id()};
  CHECK(trip.out().ok());
  trip.at_host(0, 0, 5) ^= std::byte{1};
  // Everything is queued before the load has begun.
  auto hold = CopyHold::make();
  const std::atomic<bool> never{false};
  REQUIRE(trip.stream.launch([&] { (void)hold->hold(never); }).ok());
  const auto ticket = trip.in();
  const auto save = [&](const std::vector<PageRef<DevicePage>>& from) { return backup(trip.device, trip.host, plan(spare, from), trip.stream, {.name = "save"}); };
  auto copied = save({trip.back[0]});
  Gate<Cuda> gate;
  auto step = gate.begin({ticket}, compute);
  if (step.ok()) {
    auto keys = step.value().read(trip.device, EntrySlot(0));
    auto mine = step.value().write(trip.device, EntrySlot(0), pages);
    CHECK(keys.ok());
    CHECK(mine.ok());
    if (keys.ok() && mine.ok()) CHECK(launch(compute, [](cudaStream_t, auto, auto) {}, keys.value(), mine.value()).ok());
  }
  hold->release();
  CHECK(compute.synchronize(deadline_in(20s)).ok());
  REQUIRE(copied.ok());
  REQUIRE(step.ok());
  CHECK(copied.value().wait(deadline_in(20s)).error().code == ErrorCode::mismatch);
  CHECK(ticket.wait(deadline_in(20s)).error().code == ErrorCode::mismatch);
  CHECK(step.value().status().error().code == ErrorCode::mismatch);

  for (const DevicePage page : {trip.back[0].id(), trip.back[2].id(), own[0].id()}) CHECK_FALSE(trip.device.ledger().readable(page).ok());
  CHECK(contains(trip.device.ledger().readable(trip.back[0].id()).error().message, "transfer 'in' failed to write it"));
  CHECK_FALSE(trip.host.ledger().readable(spare[0].id()).ok());
  CHECK_FALSE(save({trip.back[0]}).ok());
  CHECK_FALSE(save(own).ok());
  trip.at_host(0, 0, 5) ^= std::byte{1};
  CHECK(trip.in().wait(deadline_in(20s)).ok());
  auto again = save({trip.back[0]});
  REQUIRE(again.ok());
  CHECK(again.value().wait(deadline_in(20s)).ok());
  CHECK(trip.host.ledger().readable(spare[0].id()).ok());
}
