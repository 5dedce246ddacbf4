// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <kvire/tier/block_io_faults.hpp>
#include <kvire/tier/file_tier.hpp>
#include <tests/support/tier_case.hpp>

using namespace kvire;
using namespace kvire_test;
using namespace std::chrono_literals;

// What a tiered cache gives up while room is on its way: nothing that it need not.

namespace {

using Rig = TierRig<>;
constexpr std::int64_t page = Rig::page;

TierSizes sizes(std::int64_t device, std::int64_t host, std::chrono::milliseconds room_limit, bool write_through = false) {
  return {device + 1, host == 0 ? 0 : host + 1, {.window_tokens = 20, .write_through = write_through, .room_limit = room_limit}};
}
Rig::Tokens text(int sequence, std::int64_t pages) { return Rig::text(sequence, pages * page); }

template <class R>
const TierCounters& on(R& rig, CacheTier tier) {
  return rig.cache().counters().tiers[static_cast<int>(tier)][0];
}

/// A kernel that runs until it is told to end.
class LongKernel {
 public:
  /// It reads the pages of a prefix, of which nobody else has a hold when this returns.
  LongKernel(Rig& rig, const Rig::Tokens& tokens) : step_(gate_.begin({}, rig.compute()).value()) {
    const auto held = rig.cache().acquire(rig.root(), tokens);
    std::vector<std::int32_t> path(static_cast<std::size_t>(held.prefix.pages()));
    rig.cache().cache().path(held.prefix.node(), path);
    std::vector<DevicePage> pages;
    for (const std::int32_t node : path) pages.push_back(rig.cache().cache().device(node, 0).id());
    auto lease = step_.read(rig.device().entry<SmallLatent>(), EntrySlot(0), std::span<const DevicePage>(pages)).value();
    launch(rig.compute(), [this](const auto&) {
      while (!ended_) std::this_thread::yield();
    }, lease);
  }
  ~LongKernel() {
    end();
    (void)step_.stream().synchronize();
  }
  void end() { ended_ = true; }

 private:
  std::atomic<bool> ended_{false};
  Gate<Host> gate_;
  Step<Host> step_;
};

/// Ends a kernel as soon as a page drains for it.
std::thread end_when_draining(Rig& rig, LongKernel& kernel) {
  return std::thread([&] {
    while (rig.device_ledger<space::Full>().draining_pages() == 0) std::this_thread::yield();
    kernel.end();
  });
}

}  // namespace

TEST_CASE("tiered cache, room: a page that running work reads is waited for, and no other is given up meanwhile") {
  for (const std::int64_t host : {0, 8}) {
    Rig rig(sizes(4, host, 30'000ms, true));
    REQUIRE(rig.run(text(1, 4)).ok());
    REQUIRE(rig.cache().finish(deadline_in(30s)));
    LongKernel kernel(rig, text(1, 4));
    auto end = end_when_draining(rig, kernel);
    CHECK(rig.cache().allocate<space::Full>().ok());
    end.join();
    CHECK(on(rig, CacheTier::device).evicted_pages == 1);
    CHECK(on(rig, CacheTier::device).lost_pages == (host == 0 ? 1 : 0));
    CHECK(rig.cache().acquire(rig.root(), text(1, 3)).tokens == 3 * page);
  }
}

TEST_CASE("tiered cache, room: who does not wait for running work gets no page, and empties no cache") {
  Rig rig(sizes(4, 0, 0ms));
  REQUIRE(rig.run(text(1, 4)).ok());
  LongKernel kernel(rig, text(1, 4));
  for (int i = 0; i < 3; ++i) {
    const auto none = rig.cache().allocate<space::Full>();
    REQUIRE_FALSE(none.ok());
    CHECK(none.error().code == ErrorCode::exhausted);
    CHECK_MESSAGE(contains(none.error().message, "1 draining"), none.error().message);
  }
  CHECK(on(rig, CacheTier::device).lost_pages == 1);
  // Ahead of need as well: what drains is on its way.
  rig.cache().make_room(2);
  rig.cache().make_room(2);
  CHECK(on(rig, CacheTier::device).lost_pages == 2);
  kernel.end();
  (void)rig.compute().synchronize();
  CHECK(rig.cache().allocate<space::Full>().ok());
  CHECK(on(rig, CacheTier::device).lost_pages == 2);
}

TEST_CASE("tiered cache, room: a page that is free at once goes before running work is waited for, and only one goes") {
  Rig rig(sizes(4, 0, 0ms));
  REQUIRE(rig.run(text(2, 3)).ok());
  REQUIRE(rig.run(text(1, 1)).ok());
  const LongKernel kernel(rig, text(1, 1));
  CHECK(rig.cache().allocate<space::Full>().ok());
  CHECK(on(rig, CacheTier::device).lost_pages == 1);
  CHECK(rig.cache().acquire(rig.root(), text(1, 1)).tokens == page);
  CHECK(rig.cache().acquire(rig.root(), text(2, 2)).tokens == 2 * page);
}

TEST_CASE("tiered cache, room: what the host cannot take is not lost while other pages leave for it") {
  for (const bool ahead : {false, true}) {
    Rig rig(sizes(8, 4, 0ms));
    REQUIRE(rig.run(text(1, 8)).ok());
    const auto gate = CopyHold::make();
    rig.store_faults().set([gate](const CopyInfo&) { return Fault::hold(gate); });
    if (ahead) {
      rig.cache().make_room(8);
    } else {
      CHECK_FALSE(rig.cache().allocate<space::Full>().ok());
    }
    CHECK(on(rig, CacheTier::device).lost_pages == 0);
    gate->release();
    CHECK(rig.cache().finish(deadline_in(30s)));
    CHECK(on(rig, CacheTier::device).evicted_pages == 4);
    CHECK(rig.cache().allocate<space::Full>().ok());
    CHECK(on(rig, CacheTier::device).lost_pages == 0);
    auto held = rig.cache().acquire(rig.root(), text(1, 8));
    CHECK(held.tokens == 8 * page);
    CHECK(rig.read(held).ok());
    CHECK(rig.wrong_pages() == 0);
  }
}

TEST_CASE("tiered cache, room: one allocation waits for the first copy, and loses nothing") {
  Rig rig(sizes(8, 4, 30'000ms));
  REQUIRE(rig.run(text(1, 8)).ok());
  rig.store_faults().set([](const CopyInfo&) { return Fault::delay(1ms); });
  CHECK(rig.cache().allocate<space::Full>().ok());
  CHECK(on(rig, CacheTier::device).lost_pages == 0);
  CHECK(rig.cache().acquire(rig.root(), text(1, 8)).tokens == 8 * page);
}

TEST_CASE("tiered cache, room: pages that leave already are enough: no more are sent after them") {
  Rig rig(sizes(8, 8, 0ms));
  REQUIRE(rig.run(text(1, 8)).ok());
  const auto gate = CopyHold::make();
  rig.store_faults().set([gate](const CopyInfo&) { return Fault::hold(gate); });
  rig.cache().make_room(1);
  for (int i = 0; i < 3; ++i) CHECK_FALSE(rig.cache().allocate<space::Full>().ok());
  gate->release();
  CHECK(rig.cache().finish(deadline_in(30s)));
  CHECK(on(rig, CacheTier::host).arrived_pages == 1);
  CHECK(rig.cache().allocate<space::Full>().ok());
}

TEST_CASE("tiered cache, room: written through, a page without a copy waits for the host to have room") {
  Rig rig(sizes(8, 4, 0ms, true));
  const auto gate = CopyHold::make();
  rig.store_faults().set([gate](const CopyInfo&) { return Fault::hold(gate); });
  REQUIRE(rig.run(text(1, 8)).ok());  // the host has room for four of them
  CHECK_FALSE(rig.cache().allocate<space::Full>().ok());
  CHECK(on(rig, CacheTier::device).lost_pages == 0);
  gate->release();
  CHECK(rig.cache().finish(deadline_in(30s)));
  (void)rig.cache().allocate<space::Full>();
  CHECK(rig.cache().finish(deadline_in(30s)));
  CHECK(on(rig, CacheTier::device).lost_pages == 0);
  CHECK(rig.cache().acquire(rig.root(), text(1, 8)).tokens == 8 * page);
}

TEST_CASE("tiered cache, room: what the host cannot take is not lost while its pages are on their way to files") {
  using Files = FileTier<SmallModel<SmallFp8>, Host, Xxh64, FaultyIo<>>;
  Folder folder;
  const auto disk = CopyHold::make();
  const FaultyIo<> io([disk](IoCall call, const std::string&) { return call == IoCall::write ? IoFault::held(disk) : IoFault::none(); });
  auto files = Files::make({.folder = folder.path, .budget = Bytes(1 << 22), .workers = 1, .durable = false, .io = io}, SmallSchedule::layers).value();
  TierRig<Lru, Files> rig(sizes(8, 4, 0ms), &files);
  REQUIRE(rig.run(text(1, 8)).ok());
  rig.cache().make_room(4);
  while (rig.device_ledger<space::Full>().free_pages() < 4) {
    rig.cache().poll();
    std::this_thread::yield();
  }
  std::vector<PageRef<DevicePage>> taken;
  for (int i = 0; i < 4; ++i) taken.push_back(rig.cache().allocate<space::Full>().value());
  CHECK_FALSE(rig.cache().allocate<space::Full>().ok());
  CHECK(on(rig, CacheTier::device).lost_pages == 0);
  disk->release();
  CHECK(rig.cache().finish(deadline_in(30s)));
  (void)rig.cache().allocate<space::Full>();
  CHECK(rig.cache().finish(deadline_in(30s)));
  CHECK(rig.cache().allocate<space::Full>().ok());
  CHECK(on(rig, CacheTier::device).lost_pages == 0);
  CHECK(on(rig, CacheTier::host).lost_pages == 0);
}

TEST_CASE("tiered cache, room: copies that always fail are tried twice, later once, and then one page goes without") {
  Rig rig(sizes(4, 8, 30'000ms));
  REQUIRE(rig.run(text(1, 4)).ok());
  rig.store_faults().set([](const CopyInfo&) { return Fault::fail("no link"); });
  const auto one = rig.cache().allocate<space::Full>();
  CHECK(one.ok());
  CHECK(on(rig, CacheTier::device).lost_pages == 1);
  CHECK(on(rig, CacheTier::host).failed_pages == 2 * 4);
  CHECK(rig.cache().allocate<space::Full>().ok());
  CHECK(on(rig, CacheTier::device).lost_pages == 2);
  CHECK(on(rig, CacheTier::host).failed_pages == 2 * 4 + 3);
  CHECK(rig.cache().acquire(rig.root(), text(1, 2)).tokens == 2 * page);
}

TEST_CASE("tiered cache, room: a copy that fails once is made again, and nothing is lost") {
  Rig rig(sizes(4, 8, 30'000ms));
  REQUIRE(rig.run(text(1, 4)).ok());
  rig.store_faults().set([](const CopyInfo& info) { return info.index == 0 ? Fault::fail("no link") : Fault::none(); });
  CHECK(rig.cache().allocate<space::Full>().ok());
  CHECK(on(rig, CacheTier::device).lost_pages == 0);
  CHECK(on(rig, CacheTier::host).failed_pages == 4);
  CHECK(rig.cache().acquire(rig.root(), text(1, 4)).tokens == 4 * page);
}

TEST_CASE("tiered cache, room: who gets no page learns of the copies that failed") {
  Rig rig(sizes(4, 8, 30'000ms, true));
  rig.store_faults().set([](const CopyInfo&) { return Fault::fail("no link"); });
  const auto held = rig.run(text(1, 4)).value();
  CHECK(rig.cache().finish(deadline_in(30s)));
  const auto none = rig.cache().allocate<space::Full>();
  REQUIRE_FALSE(none.ok());
  CHECK(none.error().code == ErrorCode::exhausted);
  CHECK_MESSAGE(contains(none.error().message, "of 4, 0 are leaving for the host, 0 draining, the others in use"), none.error().message);
  CHECK_MESSAGE(contains(none.error().message, "no link"), none.error().message);
}
