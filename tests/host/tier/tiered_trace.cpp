// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include <kvire/tier/file_tier.hpp>
#include <tests/support/tier_case.hpp>

using namespace kvire;
using namespace kvire_test;
using namespace std::chrono_literals;

namespace {

using Files = FileTier<SmallModel<SmallFp8>, Host>;
using Rig = TierRig<Lru, Files>;
constexpr std::int64_t page = Rig::page;
constexpr int full = SmallModel<SmallFp8>::space_index<space::Full>();

Rig::Tokens text(int sequence, std::int64_t pages) { return Rig::text(sequence, pages * page); }

/// Everything that a cache did.
struct Story {
  explicit Story(Rig& rig) {
    rig.cache().trace([this](const CacheEvent& event) { events.push_back(event); });
  }
  std::vector<CacheEvent> of(CacheWork work, std::int64_t request, int space = -1) const {
    std::vector<CacheEvent> found;
    std::copy_if(events.begin(), events.end(), std::back_inserter(found),
                 [&](const CacheEvent& e) { return e.work == work && e.request == request && (space < 0 || e.space == space); });
    return found;
  }
  std::vector<CacheEvent> events;
};

}  // namespace

TEST_CASE("tiered cache, trace: one request through all tiers, and who took its pages") {
  Folder folder;
  auto files = Files::make({.folder = folder.path, .budget = Bytes(1 << 22), .workers = 1, .durable = false}, SmallSchedule::layers).value();
  Rig rig({5, 5, {.window_tokens = 20, .write_through = true, .room_limit = 5000ms}}, &files);
  Story story(rig);
  const auto settle = [&] { CHECK(rig.cache().finish(deadline_in(30s))); };

  rig.cache().serve(1);
  CHECK(rig.run(text(1, 3)).ok());
  settle();
  CHECK(story.of(CacheWork::lookup, 1).size() == 1);
  CHECK(story.of(CacheWork::hit, 1).empty());
  const auto missed = story.of(CacheWork::miss, 1);
  REQUIRE(missed.size() == 1);
  CHECK(missed[0].pages == 3);
  CHECK(missed[0].tokens == 3 * page);
  CHECK(std::string(missed[0].detail) == "unknown");
  const auto published = story.of(CacheWork::publish, 1);
  REQUIRE(published.size() == 3);
  const auto stored = story.of(CacheWork::store, 1, full);
  const auto written = story.of(CacheWork::write, 1, full);
  REQUIRE(stored.size() == 3);
  REQUIRE(written.size() == 3);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(stored[i].page == published[i].page);
    CHECK(stored[i].bytes > 0);
    CHECK(stored[i].tokens == page);
    CHECK(stored[i].tier == CacheTier::host);
    CHECK(written[i].tier == CacheTier::file);
    CHECK(stored[i].end_ns <= written[i].begin_ns);
  }

  // Another request needs the room, on the device and on the host.
  rig.cache().serve(2);
  CHECK(rig.run(text(2, 4)).ok());
  settle();
  const auto evicted = story.of(CacheWork::evict, 2, full);
  for (const auto& p : published) {
    CHECK(std::any_of(evicted.begin(), evicted.end(), [&](const CacheEvent& e) { return e.page == p.page && e.tier == CacheTier::device && *e.detail == '\0'; }));
    CHECK(std::any_of(evicted.begin(), evicted.end(), [&](const CacheEvent& e) { return e.page == p.page && e.tier == CacheTier::host; }));
  }

  // The first prompt again: from files to the host, from there to the device.
  rig.cache().serve(3);
  CHECK(rig.cache().prefetch(rig.root(), text(1, 3)) == 3);
  settle();
  CHECK(rig.run(text(1, 3)).ok());
  rig.cache().serve(-1);
  settle();
  const auto hits = story.of(CacheWork::hit, 3);
  const auto loaded = story.of(CacheWork::load, 3, full);
  const auto read = story.of(CacheWork::read, 3, full);
  REQUIRE(hits.size() == 3);
  REQUIRE(loaded.size() == 3);
  REQUIRE(read.size() == 3);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(hits[i].page == published[i].page);
    CHECK(hits[i].tier == CacheTier::host);
    CHECK(read[i].page == published[i].page);
    CHECK(loaded[i].page == published[i].page);
    CHECK(read[i].end_ns <= loaded[i].begin_ns);
    CHECK(loaded[i].begin_ns <= loaded[i].end_ns);
  }
  CHECK(story.of(CacheWork::miss, 3).empty());

  // Times are of transfers, not of pages.
  const auto& times = rig.cache().counters().times;
  const auto count = [&](CacheWork work) { return times[static_cast<int>(work)].count; };
  CHECK(count(CacheWork::lookup) == 3);
  CHECK(count(CacheWork::load) == 1);
  CHECK(count(CacheWork::read) == 3);
  CHECK(count(CacheWork::write) == 7);
  CHECK(times[static_cast<int>(CacheWork::load)].sum_ns > 0);
  CHECK(times[static_cast<int>(CacheWork::load)].sum_ns == loaded[0].end_ns - loaded[0].begin_ns);
}

TEST_CASE("tiered cache, trace: waiting, and a load that fails") {
  TierRig<> rig({3, 9, {.window_tokens = 20, .batch_pages = 1, .room_limit = 30'000ms}});
  std::vector<CacheEvent> events;
  rig.cache().trace([&](const CacheEvent& e) { events.push_back(e); });
  rig.cache().serve(7);
  rig.store_faults().set([](const CopyInfo&) { return Fault::delay(2000us); });
  CHECK(rig.run(text(1, 2)).ok());
  CHECK(rig.run(text(2, 2)).ok());
  const auto waited = std::count_if(events.begin(), events.end(), [](const CacheEvent& e) { return e.work == CacheWork::wait && e.request == 7 && e.begin_ns < e.end_ns; });
  CHECK(waited > 0);
  CHECK(rig.cache().counters().times[static_cast<int>(CacheWork::wait)].count == waited);
  CHECK(rig.cache().finish(deadline_in(30s)));
  rig.load_faults().set([](const CopyInfo&) { return Fault::fail(); });
  {
    const auto held = rig.cache().acquire(rig.root(), text(1, 2));
    CHECK_FALSE(rig.read(held).ok());
  }
  CHECK(rig.cache().finish(deadline_in(30s)));
  const auto failed = std::find_if(events.begin(), events.end(), [](const CacheEvent& e) { return e.work == CacheWork::load; });
  REQUIRE(failed != events.end());
  CHECK(std::string(failed->detail) == "failed");
  CHECK(failed->bytes == 0);
  // Nobody listens any more.
  rig.cache().trace({});
  const auto before = events.size();
  rig.load_faults().set({});
  CHECK(rig.run(text(1, 2)).ok());
  CHECK(events.size() == before);
}
