// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <chrono>
#include <string>
#include <thread>

#include <kvire/tier/block_io_faults.hpp>
#include <kvire/tier/file_tier.hpp>
#include <tests/support/tier_case.hpp>

using namespace kvire;
using namespace kvire_test;
using namespace std::chrono_literals;

namespace {

using Files = FileTier<SmallModel<SmallFp8>, Host>;
using Rig = TierRig<Lru, Files>;
constexpr std::int64_t page = Rig::page;

Files open(const Folder& folder) { return Files::make({.folder = folder.path, .budget = Bytes(1 << 22), .workers = 2, .durable = false}, SmallSchedule::layers).value(); }
TierSizes sizes(std::int64_t device, std::int64_t host, bool write_through = true) {
  return {device + 1, host + 1, {.window_tokens = 20, .write_through = write_through, .room_limit = 5000ms}};
}
Rig::Tokens text(int sequence, std::int64_t pages) { return Rig::text(sequence, pages * page); }

/// Reads what files have of a prompt, and runs it.
Result<Rig::Cache::Held> restore(Rig& rig, const Rig::Tokens& tokens) {
  (void)rig.cache().prefetch(rig.root(), tokens);
  CHECK(rig.cache().finish(deadline_in(30s)));
  return rig.run(tokens);
}

}  // namespace

TEST_CASE("tiered cache with files: what the host gives up comes back from a file") {
  Folder folder;
  auto files = open(folder);
  Rig rig(sizes(4, 4), &files);
  for (int sequence = 1; sequence <= 3; ++sequence) {
    CHECK(rig.run(text(sequence, 4)).ok());
    CHECK(rig.cache().finish(deadline_in(30s)));
  }
  CHECK(folder.records().size() == 12);
  const auto& tiers = rig.cache().counters().tiers;
  CHECK(tiers[2][0].arrived_pages == 12);
  CHECK(tiers[1][0].lost_pages == 0);
  // Without asking for files first, a request computes.
  CHECK(rig.cache().acquire(rig.root(), text(1, 4)).tokens == 0);
  CHECK(rig.cache().counters().missed_pages[static_cast<int>(CacheMiss::not_there_yet)] == 4);
  CHECK(rig.cache().prefetch(rig.root(), text(1, 4)) == 4);
  CHECK(rig.cache().finish(deadline_in(30s)));
  {
    auto held = rig.cache().acquire(rig.root(), text(1, 4));
    CHECK(held.tokens == 4 * page);
    CHECK(rig.read(held).ok());
  }
  CHECK(rig.wrong_pages() == 0);
  CHECK(rig.cache().finish(deadline_in(30s)));
  rig.cache().clear();
  CHECK(rig.used_pages() == 0);
}

TEST_CASE("tiered cache with files: a record has all spaces of its page, also of one that comes to the host later") {
  Folder folder;
  {
    auto files = open(folder);
    Rig rig(sizes(4, 8, false), &files);
    CHECK(rig.run(text(1, 4)).ok());
    rig.store_faults().set([](const CopyInfo& info) { return std::string("window") == info.entry ? Fault::delay(5ms) : Fault::none(); });
    rig.cache().make_room(4);
    CHECK(rig.cache().finish(deadline_in(30s)));
  }
  auto files = open(folder);
  Rig rig(sizes(4, 8), &files);
  CHECK(restore(rig, text(1, 4)).ok());
  CHECK(rig.cache().counters().hit_pages == 4);
  CHECK(rig.wrong_pages() == 0);
}

TEST_CASE("tiered cache with files: another process finds the prefix, and only its own namespace's") {
  Folder folder;
  {
    auto files = open(folder);
    Rig rig(sizes(8, 8), &files);
    CHECK(rig.run(text(1, 5)).ok());
    CHECK(rig.cache().finish(deadline_in(30s)));
  }
  auto files = open(folder);
  Rig rig(sizes(8, 8), &files);
  CHECK(rig.cache().prefetch(rig.cache().root({.model = "another"}), text(1, 5)) == 0);
  CHECK(rig.cache().prefetch(rig.root(), text(2, 5)) == 0);
  CHECK(rig.cache().prefetch(rig.root(), text(1, 6)) == 5);
  CHECK(rig.cache().finish(deadline_in(30s)));
  auto held = rig.cache().acquire(rig.root(), text(1, 6));
  CHECK(held.tokens == 5 * page);
  CHECK(rig.read(held).ok());
  CHECK(rig.wrong_pages() == 0);
  CHECK(rig.cache().counters().hit_pages_on[1] == 5);
}

TEST_CASE("tiered cache with files: a damaged record is a miss, the prefix before it is a hit") {
  Folder folder;
  {
    auto files = open(folder);
    Rig rig(sizes(8, 8), &files);
    CHECK(rig.run(text(1, 5)).ok());
    CHECK(rig.cache().finish(deadline_in(30s)));
  }
  // One bit in each record: then every page is computed again, and stored again.
  for (const auto& name : folder.records()) {
    auto bytes = folder.read(name);
    bytes[bytes.size() / 2] ^= std::byte{4};
    folder.write(name, bytes);
  }
  auto files = open(folder);
  Rig rig(sizes(8, 8), &files);
  CHECK(restore(rig, text(1, 5)).ok());
  CHECK(rig.cache().counters().hit_pages == 0);
  CHECK(rig.cache().counters().tiers[1][0].failed_pages == 5);
  CHECK(rig.wrong_pages() == 0);
  CHECK(rig.cache().finish(deadline_in(30s)));
  rig.cache().clear();
  CHECK(restore(rig, text(1, 5)).ok());
  CHECK(rig.cache().counters().hit_pages == 5);
  CHECK(rig.wrong_pages() == 0);
}

TEST_CASE("tiered cache with files: a tenant's salt keeps its pages apart, and gets into no file and no message") {
  const PrefixNamespace tenant{.model = "small", .salt = "tenant 7 secret"};
  const auto tokens = text(1, 2);
  Folder folder;
  {
    auto files = open(folder);
    Rig rig(sizes(8, 8), &files);
    auto held = rig.cache().acquire(rig.cache().root(tenant), {});
    for (std::size_t at = 0; at < tokens.size(); at += page) CHECK(rig.compute(held, std::span(tokens).subspan(at, page)).ok());
    CHECK(rig.cache().finish(deadline_in(30s)));
  }
  const auto names = folder.records();
  REQUIRE(names.size() == 2);
  for (const auto& name : names) {
    const auto bytes = folder.read(name);
    const std::string in_file(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    CHECK(contains(in_file, "model=5:small"));
    CHECK_FALSE(contains(in_file, tenant.salt));
  }
  folder.write(names[0], folder.read(names[1]));
  auto files = open(folder);
  Rig rig(sizes(8, 8), &files);
  CHECK(rig.cache().prefetch(rig.root(), tokens) == 0);
  CHECK(rig.cache().prefetch(rig.cache().root(tenant), tokens) == 2);
  CHECK(rig.cache().finish(deadline_in(30s)));
  const auto lost = files.stats().last_lost[static_cast<int>(RecordFault::key)];
  CHECK(contains(lost, "model=5:small"));
  CHECK_FALSE(contains(lost, tenant.salt));
}

TEST_CASE("tiered cache with files: what a full queue refuses is stored once it has room, also where others have filled it") {
  using Held = FileTier<SmallModel<SmallFp8>, Host, Xxh64, FaultyIo<>>;
  Folder folder;
  const auto disk = CopyHold::make();
  const FaultyIo<> io([disk](IoCall call, const std::string&) { return call == IoCall::write ? IoFault::held(disk) : IoFault::none(); });
  auto files = Held::make({.folder = folder.path, .budget = Bytes(1 << 22), .workers = 1, .queued_stores = 2, .durable = false, .io = io}, SmallSchedule::layers).value();
  TierRig<Lru, Held> one(sizes(8, 8), &files), other(sizes(8, 8), &files);
  const auto to_host = [](auto& rig, int sequence) {
    REQUIRE(rig.run(text(sequence, 8)).ok());
    while (rig.cache().counters().tiers[1][0].arrived_pages < 8) {
      rig.cache().poll();
      std::this_thread::yield();
    }
  };
  to_host(one, 1);
  to_host(other, 2);
  CHECK(files.stats().stores_refused > 0);
  CHECK_FALSE(other.cache().finish(deadline_in(1ms)));  // none of its own is under way
  disk->release();
  CHECK(other.cache().finish(deadline_in(30s)));
  CHECK(one.cache().finish(deadline_in(30s)));
  CHECK(folder.records().size() == 16);
  for (auto* rig : {&one, &other}) {
    CHECK(rig->cache().counters().tiers[2][0].arrived_pages == 8);
    CHECK(rig->cache().counters().tiers[2][0].failed_pages == 0);
    rig->cache().clear();
    CHECK(rig->used_pages() == 0);
  }
}

TEST_CASE("tiered cache with files: a page that waits for its store may go, and another that comes in its place is stored as what it is") {
  using Held = FileTier<SmallModel<SmallFp8>, Host, Xxh64, FaultyIo<>>;
  Folder folder;
  const auto disk = CopyHold::make();
  const FaultyIo<> io([disk](IoCall call, const std::string&) { return call == IoCall::write ? IoFault::held(disk) : IoFault::none(); });
  auto files = Held::make({.folder = folder.path, .budget = Bytes(1 << 22), .workers = 1, .queued_stores = 1, .durable = false, .io = io}, SmallSchedule::layers).value();
  {
    TierRig<Lru, Held> rig(sizes(8, 8), &files);
    for (const int sequence : {1, 2}) {
      REQUIRE(rig.run(text(sequence, 4)).ok());
      while (rig.cache().counters().tiers[1][0].arrived_pages < 4 * sequence) {
        rig.cache().poll();
        std::this_thread::yield();
      }
      rig.cache().clear();  // all but what is being stored
    }
    disk->release();
    CHECK(rig.cache().finish(deadline_in(30s)));
    CHECK(rig.cache().counters().tiers[2][0].failed_pages == 0);
  }
  TierRig<Lru, Held> rig(sizes(8, 8), &files);
  for (const int sequence : {1, 2}) {
    (void)rig.cache().prefetch(rig.root(), text(sequence, 4));
    CHECK(rig.cache().finish(deadline_in(30s)));
    CHECK(rig.run(text(sequence, 4)).ok());
  }
  CHECK(rig.wrong_pages() == 0);
}

TEST_CASE("tiered cache with files: a page that never left the faster tiers outlives its record there") {
  Folder folder;
  auto files = Files::make({.folder = folder.path, .budget = Bytes(1 << 18), .durable = false}, SmallSchedule::layers).value();
  Rig rig(sizes(8, 8), &files);
  const auto run = [&](int sequence) {
    CHECK(rig.run(text(sequence, 1)).ok());
    CHECK(rig.cache().finish(deadline_in(30s)));
  };
  // Page 0 is used all the time, by nobody from its record, which is the oldest: it goes.
  for (int i = 0; i <= 40; ++i) {
    run(i);
    run(0);
  }
  const auto room = static_cast<int>(folder.records().size());
  REQUIRE(room < 40);
  REQUIRE(room > 12);
  for (int i = 41; i <= 60; ++i) run(i);
  CHECK(rig.cache().counters().tiers[2][0].arrived_pages > 61);  // page 0 once more, when the device gave it up
  CHECK(rig.cache().prefetch(rig.root(), text(0, 1)) == 1);
  CHECK(rig.cache().finish(deadline_in(30s)));
  CHECK(rig.cache().acquire(rig.root(), text(0, 1)).tokens == page);
  CHECK(rig.wrong_pages() == 0);
}

TEST_CASE("tiered cache with files: pages whose records have gone are lost, and counted, when the host gives them up") {
  Folder folder;
  auto files = Files::make({.folder = folder.path, .budget = Bytes(1 << 16), .durable = false}, SmallSchedule::layers).value();
  Rig rig(sizes(2, 8), &files);
  for (int i = 0; i < 40; ++i) {
    CHECK(rig.run(text(i, 1)).ok());
    CHECK(rig.cache().finish(deadline_in(30s)));
  }
  const auto records = static_cast<std::int64_t>(folder.records().size());
  REQUIRE(records < 8);  // of those that the host has
  const std::int64_t lost = rig.cache().counters().tiers[1][0].lost_pages;
  CHECK(lost == 40 - 8);
  CHECK(rig.cache().cache().pages() == 40 - lost);  // no name of what is nowhere
  CHECK(rig.wrong_pages() == 0);
}
