// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <thread>

#include <kvire/layout/policies.hpp>
#include <kvire/sync/gate.hpp>
#include <kvire/sync/host.hpp>
#include <kvire/transfer/transfer.hpp>
#include <tests/support/pages.hpp>

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::fill;
using kvire_test::holds;

namespace {
using Keys = Fp8WithScale<16, 64>;

std::uint32_t next(std::uint32_t& state) {
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  return state;
}
}  // namespace

TEST_CASE("transfer: sixty transfers aborted in every state, then a good one") {
  for (std::uint32_t seed = 1; seed <= 4; ++seed) {
    CAPTURE(seed);
    auto hold = CopyHold::make();
    std::atomic<int> copies{0};
    auto stream = Stream<Host>::make({.name = "copies", .faults = FaultHooks::make([&copies, hold](const CopyInfo&) {
                                        const int n = copies++;
                                        if (n == 40) return Fault::hold(hold);
                                        if (n % 5 == 1) return Fault::fail("device error");
                                        return n % 7 == 2 ? Fault::delay(200us) : Fault::none();
                                      })})
                      .value();
    auto device = DevicePool<Keys, Host>::make({.layers = 2, .pages = 140}).value();
    auto host = mirror_of(device, 70).value();
    auto sources = host.allocate(60).value();
    for (auto& p : sources) fill(host, p.id(), static_cast<std::uint32_t>(p.id().value));
    const auto free_at_start = device.free_pages();

    std::vector<PreparedTransfer<Host>> waiting;
    std::vector<Ticket<Host>> flying;
    std::vector<std::shared_ptr<LoadProgress<Host>>> watched;
    std::uint32_t random = seed;
    for (std::size_t i = 0; i < 60; ++i) {
      auto pages = device.allocate(2).value();
      const std::vector<HostPage> from{sources[i].id(), sources[(i + 7) % 60].id()};
      const std::vector<DevicePage> to{pages[0].id(), pages[1].id()};
      auto prepared = prepare_load(host, device, plan(from, to), {.name = "t" + std::to_string(i)}).value();
      watched.push_back(prepared.progress());
      switch (next(random) % 5) {
        case 0: break;                                             // dropped at once
        case 1: waiting.push_back(std::move(prepared)); break;     // never issued, dropped later
        case 2: (void)prepared.issue(stream).value(); break;       // in flight without an owner
        case 3: {                                                  // done or failed before it is aborted
          auto ticket = prepared.issue(stream).value();
          if (copies < 30) (void)ticket.wait(deadline_in(10s));
          break;
        }
        default: flying.push_back(prepared.issue(stream).value());
      }
      // Unknown ids and malformed plans in between.
      CHECK_FALSE(load(host, device, plan(std::vector{HostPage(69)}, std::vector{DevicePage(1)}), stream).ok());
      CHECK_FALSE(load(host, device, plan(from, std::vector{to[0]}), stream).ok());
    }
    std::thread aborter([&] { waiting.clear(); });
    flying.clear();
    aborter.join();
    hold->release();
    CHECK(stream.synchronize(deadline_in(30s)).ok());

    std::vector<EventState> ends;
    for (const auto& progress : watched) {
      ends.push_back(progress->done().query());
      CHECK(is_final(ends.back()));
      CHECK(progress->wait_all().ok() == (ends.back() == EventState::complete));
    }
    device.ledger().drain();
    CHECK(device.free_pages() == free_at_start);
    CHECK(device.draining_pages() == 0);
    CHECK(copies > 40);

    copies = 1000;  // 1000 % 5 == 0, 1000 % 7 == 6: nothing happens to it
    auto page = device.allocate().value();
    auto good = load(host, device, plan(std::vector{sources[3]}, std::vector{page}), stream, {.name = "good", .layers = {0, 1}}).value();
    CHECK(good.wait(deadline_in(10s)).ok());
    CHECK(holds(device, page.id(), static_cast<std::uint32_t>(sources[3].id().value), 0, 1));
    for (std::size_t i = 0; i < watched.size(); ++i) CHECK(watched[i]->done().query() == ends[i]);  // final is final
  }
}

TEST_CASE("transfer: what was complete before a deadline counts as complete") {
  auto stream = Stream<Host>::make().value();
  auto device = DevicePool<Keys, Host>::make({.layers = 1, .pages = 4}).value();
  auto host = mirror_of(device, 4).value();
  auto ticket = load(host, device, plan(host.allocate(1).value(), device.allocate(1).value()), stream).value();
  CHECK(stream.synchronize().ok());
  CHECK(ticket.wait(Clock::now() - 1s).ok());
  CHECK(ticket.progress()->wait(0, Clock::now() - 1s).ok());
}

TEST_CASE("transfer: a copy that never completes ends with its stream, and only then gives its pages back") {
  auto device = DevicePool<Keys, Host>::make({.layers = 1, .pages = 4}).value();
  auto host = mirror_of(device, 4).value();
  {
    auto stream = Stream<Host>::make({.name = "lossy", .faults = FaultHooks::make([](const CopyInfo&) { return Fault::drop(); })}).value();
    auto page = device.allocate().value();
    (void)load(host, device, plan(std::vector{host.allocate().value()}, std::vector{page}), stream).value();
    page.reset();
    std::this_thread::sleep_for(5ms);
    device.ledger().drain();
    CHECK(device.draining_pages() == 1);
  }
  device.ledger().drain();
  CHECK(device.draining_pages() == 0);
  CHECK(device.free_pages() == 3);
}

TEST_CASE("transfer: many threads load, back up, read and abort on the same pools") {
  constexpr int threads = 4;
  constexpr int rounds = 40;
  auto device = DevicePool<Keys, Host>::make({.layers = 3, .pages = 40}).value();
  auto host = mirror_of(device, 40, {.arrangement = Arrangement::page_first}).value();
  const auto device_free = device.free_pages();
  const auto host_free = host.free_pages();
  auto stats = std::make_shared<TransferStats>();
  Gate<Host> gate;
  std::atomic<int> wrong{0};
  std::atomic<int> done{0};
  std::vector<std::thread> workers;
  for (int w = 0; w < threads; ++w) {
    workers.emplace_back([&, w] {
      auto copies = Stream<Host>::make({.name = "copies " + std::to_string(w)}).value();
      auto compute = Stream<Host>::make({.name = "compute " + std::to_string(w)}).value();
      std::uint32_t random = 77 + static_cast<std::uint32_t>(w);
      for (int r = 0; r < rounds; ++r) {
        auto pages = device.allocate(2 + next(random) % 3);
        if (!pages.ok()) continue;  // others have them
        auto kept = host.allocate(static_cast<std::int64_t>(pages.value().size()));
        if (!kept.ok()) continue;
        const auto seed = next(random);
        std::vector<DevicePage> ids;
        for (auto& p : pages.value()) ids.push_back(p.id());
        {
          auto step = gate.begin({}, compute).value();
          for (int layer = 0; layer < 3; ++layer) {
            launch(
                compute,
                [ids, seed, layer](PageView<Keys, Host> view) {
                  for (const auto id : ids) {
                    for (std::int64_t i = 0; i < Keys::page_bytes; ++i) view.page(id.value)[i] = kvire_test::pattern(seed, layer, i);
                  }
                },
                step.write(device, EntrySlot(layer), ids).value());
          }
        }
        auto saved = backup(device, host, plan(kept.value(), pages.value()), copies, {.stats = stats}).value();
        if (next(random) % 4 == 0) continue;  // abort: pages, ticket and kernels are left to themselves
        pages.value().clear();
        auto again = device.allocate(static_cast<std::int64_t>(ids.size()));
        if (!again.ok()) continue;
        auto loaded = load(host, device, plan(kept.value(), again.value()), copies, {.stats = stats}).value();
        auto step = gate.begin({loaded}, compute).value();
        for (int layer = 0; layer < 3; ++layer) {
          launch(
              compute,
              [&wrong, seed, layer, id = again.value()[0].id().value](ConstPageView<Keys, Host> view) {
                for (std::int64_t i = 0; i < Keys::page_bytes; ++i) {
                  if (view.page(id)[i] != kvire_test::pattern(seed, layer, i)) ++wrong;
                }
              },
              step.read(device, EntrySlot(layer)).value());
        }
        if (!compute.synchronize(deadline_in(30s)).ok() || !step.status().ok()) ++wrong;
        ++done;
      }
      if (!compute.synchronize(deadline_in(30s)).ok() || !copies.synchronize(deadline_in(30s)).ok()) ++wrong;
    });
  }
  for (auto& worker : workers) worker.join();
  CHECK(wrong == 0);
  CHECK(done > 0);
  device.ledger().drain();
  host.ledger().drain();
  CHECK(device.free_pages() == device_free);
  CHECK(host.free_pages() == host_free);
  CHECK(stats->bytes() > 0);
}
