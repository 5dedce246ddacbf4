// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include <kvire/tier/block_io_faults.hpp>
#include <kvire/transfer/bundle.hpp>
#include <tests/support/file_tier_case.hpp>

using namespace kvire;
using namespace kvire_test;
using namespace std::chrono_literals;

namespace {

using Small = SmallHost<SmallFp8>;
using Io = FaultyIo<>;
using Tier = FileTier<Small::Model, Host, Xxh64, Io>;

struct Setup {
  explicit Setup(std::int64_t budget = 1 << 20, int workers = 2)
      : tier(Tier::make({.folder = folder.path, .budget = Bytes(budget), .workers = workers, .queued_stores = 4, .durable = false, .io = io}).value()) {}

  Event<Host> put(std::uint64_t key, std::uint32_t seed) {
    auto refs = host.allocate();
    host.fill(refs, seed);
    return tier.store(key_of(key), host.pool, std::move(refs));
  }
  Status get(std::uint64_t key, std::uint32_t seed) {
    auto refs = host.allocate();
    host.fill(refs, 99);
    auto status = tier.load(key_of(key), host.pool, refs).wait(deadline_in(30s));
    if (!status.ok()) return host.holds(refs, 99) ? status : Status(Error{ErrorCode::failed, "a failed load has written"});
    return host.holds(refs, seed) ? Status() : Status(Error{ErrorCode::failed, "wrong content"});
  }
  /// The next call of the kind meets the fault.
  void once(IoCall call, IoFault fault) {
    io.set([call, fault, done = false](IoCall c, const std::string&) mutable {
      if (done || c != call) return IoFault::none();
      done = true;
      return fault;
    });
  }

  Folder folder;
  Small host;
  Io io;
  Tier tier;
};

/// Counts what is in the folder, from before a byte is written until after it has gone.
struct CountingIo : Io {
  using Io::Io;
  void write(std::span<FileWrite> writes) {
    for (auto& w : writes) {
      {
        std::lock_guard lock(counts->mutex);
        counts->files[w.path] = w.bytes;
        std::int64_t sum = 0;
        for (const auto& [path, bytes] : counts->files) sum += bytes;
        counts->most = std::max(counts->most, sum);
      }
      Io::write(std::span(&w, 1));
    }
  }
  Status publish(const std::string& from, const std::string& to, bool durable) {
    std::lock_guard lock(counts->mutex);
    const auto status = Io::publish(from, to, durable);
    if (status.ok()) {
      counts->files[to] = counts->files[from];
      counts->files.erase(from);
    }
    return status;
  }
  Status remove(const std::string& path) {
    std::lock_guard lock(counts->mutex);
    const auto status = Io::remove(path);
    if (status.ok()) counts->files.erase(path);
    return status;
  }
  struct Counts {
    std::mutex mutex;
    std::map<std::string, std::int64_t> files;
    std::int64_t most = 0;
  };
  std::shared_ptr<Counts> counts = std::make_shared<Counts>();
};

}  // namespace

TEST_CASE("file faults: a read error is a miss that keeps the record, and the next try hits") {
  Setup s;
  REQUIRE(s.put(1, 5).wait().ok());
  for (const auto& fault : {IoFault::fail(), IoFault::cut(100), IoFault::cut(5000), IoFault::cut(0)}) {
    s.once(IoCall::read, fault);
    const auto lost = s.get(1, 5);
    REQUIRE_FALSE(lost.ok());
    CHECK(lost.error().code == ErrorCode::failed);
    CHECK(s.get(1, 5).ok());
  }
  CHECK(s.tier.stats().lost_for(RecordFault::io_error) == 4);
  CHECK(s.tier.stats().hits == 4);
}

TEST_CASE("file faults: a bit flipped on the way in or out is found") {
  Setup s;
  const auto bytes = s.tier.record_bytes(key_of(1), Small::counts(1, 1)).count;
  std::int64_t lost = 0;
  for (std::int64_t at = 0; at < bytes; at += 61) {
    REQUIRE(s.put(1, 5).wait().ok());
    s.once(IoCall::read, IoFault::flip(at));
    CHECK_FALSE(s.get(1, 5).ok());
    CHECK_FALSE(s.tier.contains(key_of(1)));
    s.once(IoCall::write, IoFault::flip(at));
    REQUIRE(s.put(1, 5).wait().ok());
    CHECK_FALSE(s.get(1, 5).ok());
    CHECK(s.tier.stats().all_lost() == (lost += 2));
  }
}

TEST_CASE("file faults: a store that fails anywhere leaves nothing, and one that was cut without a word is found") {
  Setup s;
  const auto free = s.host.free_pages();
  for (const auto call : {IoCall::write, IoCall::publish}) {
    s.once(call, IoFault::fail());
    CHECK_FALSE(s.put(1, 5).wait().ok());
    CHECK_FALSE(s.tier.contains(key_of(1)));
    CHECK(s.tier.bytes().count == 0);
    CHECK(s.folder.bytes() == 0);
  }
  s.once(IoCall::write, IoFault::cut(4097));
  CHECK_FALSE(s.put(1, 5).wait().ok());
  CHECK(s.folder.bytes() == 0);
  for (const std::int64_t at : {0, 8, 4096, 8192, 12288}) {
    s.once(IoCall::write, IoFault::tear(at));
    REQUIRE(s.put(1, 5).wait().ok());
    CHECK_FALSE(s.get(1, 5).ok());
    CHECK(s.folder.bytes() == 0);
  }
  CHECK(s.tier.stats().store_failures == 3);
  CHECK(s.tier.stats().lost_for(RecordFault::short_file) == 5);
  REQUIRE(s.put(1, 6).wait().ok());
  CHECK(s.get(1, 6).ok());
  CHECK(s.host.free_pages() == free);
}

TEST_CASE("file faults: files that cannot be removed stay counted, and no store goes beyond the budget") {
  const auto record = Setup().tier.record_bytes(key_of(1), Small::counts(1, 1)).count;
  Setup s(2 * record);
  REQUIRE(s.put(1, 5).wait().ok());
  REQUIRE(s.put(2, 5).wait().ok());
  s.io.set([](IoCall call, const std::string&) { return call == IoCall::remove ? IoFault::fail() : IoFault::none(); });
  CHECK_FALSE(s.put(3, 5).wait().ok());
  CHECK(s.tier.bytes().count == 2 * record);
  CHECK(s.folder.bytes() == 2 * record);
  s.io.set({});
  CHECK(s.put(3, 5).wait().ok());
  CHECK(s.folder.bytes() == 2 * record);  // one lost for good, one evicted for the new one
  CHECK(s.tier.records() == 1);
  CHECK(s.tier.stats().removal_failures == 1);
}

TEST_CASE("file faults: while a disk hangs nobody waits for it, loads overtake stores, and the queue has an end") {
  auto hold = CopyHold::make();
  Setup s(1 << 20, 1);
  REQUIRE(s.put(1, 5).wait().ok());
  REQUIRE(s.put(2, 6).wait().ok());
  std::vector<std::string> order;
  s.io.set([&, hold](IoCall call, const std::string&) {
    if (call == IoCall::write) order.push_back("write");
    if (call == IoCall::read) order.push_back("read");
    return call == IoCall::write && order.size() == 1 ? IoFault::held(hold) : IoFault::none();
  });
  auto hanging = s.put(3, 7);
  REQUIRE(hold->wait_reached(deadline_in(30s)));
  auto queued = s.put(4, 7);
  auto third = s.put(5, 7);
  auto fourth = s.put(6, 7);
  const auto refused = s.put(7, 7).wait();
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::busy);
  auto refs = s.host.allocate();
  auto load = s.tier.load(key_of(1), s.host.pool, refs);
  // The same store again, and a wait with an end.
  CHECK(s.put(4, 7) == queued);
  CHECK(hanging.wait(deadline_in(10ms)).error().code == ErrorCode::timeout);
  CHECK_FALSE(is_final(load.query()));
  CHECK_FALSE(s.tier.contains(key_of(3)));
  // Erased while it is being written: gone when it ends.
  CHECK_FALSE(s.tier.erase(key_of(3)));
  hold->release();
  for (const auto& event : {hanging, queued, third, fourth, load}) CHECK(event.wait(deadline_in(30s)).ok());
  CHECK(s.host.holds(refs, 5));
  CHECK_FALSE(s.tier.contains(key_of(3)));
  CHECK(s.tier.records() == 5);
  CHECK(s.tier.bytes().count == s.folder.bytes());
  s.io.set({});
  CHECK(order == std::vector<std::string>{"write", "read", "write", "write", "write"});
}

TEST_CASE("file faults: a record that is being loaded is not evicted") {
  const auto record = Setup().tier.record_bytes(key_of(1), Small::counts(1, 1)).count;
  auto hold = CopyHold::make();
  Setup s(record, 2);
  REQUIRE(s.put(1, 5).wait().ok());
  s.io.set([hold](IoCall call, const std::string&) { return call == IoCall::read ? IoFault::held(hold) : IoFault::none(); });
  auto refs = s.host.allocate();
  auto load = s.tier.load(key_of(1), s.host.pool, refs);
  REQUIRE(hold->wait_reached(deadline_in(30s)));
  const auto full = s.put(2, 6).wait();
  REQUIRE_FALSE(full.ok());
  CHECK(full.error().code == ErrorCode::exhausted);
  hold->release();
  CHECK(load.wait().ok());
  CHECK(s.host.holds(refs, 5));
  CHECK(s.put(2, 6).wait().ok());
  CHECK(s.tier.records() == 1);
}

TEST_CASE("file faults: many threads, slow and failing files, a small budget: no wrong content, no page kept, never over the budget") {
  const auto record = Setup().tier.record_bytes(key_of(1), Small::counts(1, 1)).count;
  Folder folder;
  Small host(64);
  const auto free = host.free_pages();
  std::atomic<std::int64_t> hits{0};
  std::atomic<std::int64_t> wrong{0};
  CountingIo io([record, random = std::mt19937(3)](IoCall call, const std::string&) mutable {
    const auto dice = random() % 64;
    if (call == IoCall::remove) return IoFault::none();  // a file that will not go is a test of its own
    if (dice < 3) return IoFault::fail();
    if (dice < 5) return IoFault::cut(5000);
    if (dice < 7) return IoFault::flip(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(record)));
    if (dice < 16) return IoFault::slow(std::chrono::microseconds(random() % 500));
    return IoFault::none();
  });
  {
    using Counted = FileTier<Small::Model, Host, Xxh64, CountingIo>;
    auto tier = Counted::make({.folder = folder.path, .budget = Bytes(6 * record), .workers = 3, .durable = false, .io = io}).value();
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(t);
        for (int i = 0; i < 150; ++i) {
          const std::uint64_t key = random() % 12;
          const auto seed = static_cast<std::uint32_t>(key + 1);
          auto refs = host.allocate();
          if (random() % 16 == 0) {
            tier.erase(key_of(key));
          } else if (random() % 2 == 0) {
            host.fill(refs, seed);
            (void)tier.store(key_of(key), host.pool, refs).wait(deadline_in(60s));
          } else {
            host.fill(refs, 99);
            const bool hit = tier.load(key_of(key), host.pool, refs).wait(deadline_in(60s)).ok();
            hits += hit ? 1 : 0;
            wrong += host.holds(refs, hit ? seed : 99) ? 0 : 1;
          }
        }
      });
    }
    for (auto& thread : threads) thread.join();
    const auto stats = tier.stats();
    CHECK(stats.hits == hits.load());
    CHECK(stats.hits + stats.all_lost() == stats.loads);
    CHECK(stats.evictions > 0);
    CHECK(tier.bytes().count == folder.bytes());
  }
  CHECK(io.counts->most <= 6 * record);
  CHECK(io.counts->most > 4 * record);
  CHECK(wrong.load() == 0);
  CHECK(hits.load() > 20);
  CHECK(host.free_pages() == free);
}

TEST_CASE("file faults: with seals, a page that changed on the host is not written, and one that is read is sealed") {
  Setup s;
  using Model = Small::Model;
  auto seals = PageSeals::make(s.host.pool).value();
  auto device = DeviceBundlePool<Model, Host>::make({.pages = Small::counts(3, 3), .layers = SmallSchedule::layers}).value();
  auto stream = Stream<Host>::make().value();
  const auto on_device = device.allocate(Small::counts(1, 1)).value();
  const auto moves = [&](const Small::Refs& on_host) {
    return BundlePlan<Model>(in_space<space::Full>(plan(on_host.of<space::Full>(), on_device.of<space::Full>())),
                             in_space<space::Window>(plan(on_host.of<space::Window>(), on_device.of<space::Window>())));
  };
  const auto byte = [&](const Small::Refs& refs) -> std::byte& {
    return pool_access::view(s.host.pool.entry<SmallWindow>(), EntrySlot(2)).page(refs.of<space::Window>()[0].id().value)[9];
  };
  auto refs = s.host.allocate();
  REQUIRE(backup(device, s.host.pool, moves(refs), stream, {.seals = seals}).value().wait().ok());
  byte(refs) ^= std::byte{32};
  const auto refused = s.tier.store(key_of(1), s.host.pool, refs, seals).wait();
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::mismatch);
  CHECK(s.folder.bytes() == 0);
  CHECK(s.tier.bytes().count == 0);
  byte(refs) ^= std::byte{32};
  CHECK(s.tier.store(key_of(1), s.host.pool, refs, seals).wait().ok());
  // From the record to other host pages, and from there to the device.
  auto others = s.host.allocate();
  CHECK(s.tier.load(key_of(1), s.host.pool, others, seals).wait().ok());
  CHECK(load(s.host.pool, device, moves(others), stream, {.seals = seals}).value().wait().ok());
  byte(others) ^= std::byte{32};
  CHECK(load(s.host.pool, device, moves(others), stream, {.seals = seals}).value().wait().error().code == ErrorCode::mismatch);
  // Seals of another pool are of no use.
  Small another;
  CHECK(s.tier.store(key_of(2), another.pool, another.allocate(), seals).wait().error().code == ErrorCode::invalid_argument);
}
