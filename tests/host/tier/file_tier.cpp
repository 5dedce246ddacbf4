// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include <kvire/tier/block_io_faults.hpp>
#include <tests/support/file_tier_case.hpp>

using namespace kvire;
using namespace kvire_test;
using namespace std::chrono_literals;

namespace {

using Host1 = SmallHost<SmallFp8>;
using Tier = FileTier<Host1::Model, Host>;

Tier open(const Folder& folder, std::int64_t budget = 1 << 20) {
  return Tier::make({.folder = folder.path, .budget = Bytes(budget), .workers = 2, .durable = false}).value();
}

/// Stores a record of one page of each space with content `seed`; waits.
Status put(Tier& tier, Host1& host, std::uint64_t key, std::uint32_t seed) {
  auto refs = host.allocate();
  host.fill(refs, seed);
  return tier.store(key_of(key), host.pool, std::move(refs)).wait(deadline_in(30s));
}
/// Loads it into fresh pages: success, a wrong content, or the error.
Status get(Tier& tier, Host1& host, std::uint64_t key, std::uint32_t seed) {
  auto refs = host.allocate();
  host.fill(refs, 99);
  auto status = tier.load(key_of(key), host.pool, refs).wait(deadline_in(30s));
  if (!status.ok()) return host.holds(refs, 99) ? status : Status(Error{ErrorCode::failed, "a failed load has written"});
  return host.holds(refs, seed) ? Status() : Status(Error{ErrorCode::failed, "wrong content"});
}
ErrorCode code(const Status& status) {
  REQUIRE_FALSE(status.ok());
  return status.error().code;
}

}  // namespace

TEST_CASE("file tier: a record comes back, to other pages, also after a restart") {
  Folder folder;
  Host1 host;
  const auto free = host.free_pages();
  {
    auto tier = open(folder);
    CHECK_FALSE(tier.contains(key_of(1)));
    CHECK(put(tier, host, 1, 5).ok());
    CHECK(put(tier, host, 2, 6).ok());
    CHECK(tier.contains(key_of(1)));
    CHECK(tier.find(key_of(1))->of<space::Full>() == 1);
    CHECK(get(tier, host, 1, 5).ok());
    CHECK(get(tier, host, 2, 6).ok());
    CHECK(code(get(tier, host, 3, 0)) == ErrorCode::stale);
    const auto stats = tier.stats();
    CHECK(stats.stored == 2);
    CHECK(stats.hits == 2);
    CHECK(stats.hit_tokens == 32);
    CHECK(stats.loads == 3);
    CHECK(stats.lost_for(RecordFault::absent) == 1);
    CHECK(stats.all_lost() == 1);
    CHECK(tier.records() == 2);
    CHECK(tier.bytes().count == 2 * tier.record_bytes(key_of(1), Host1::counts(1, 1)).count);
    CHECK(tier.bytes().count == folder.bytes());
  }
  auto tier = open(folder);
  CHECK(tier.stats().found_records == 2);
  CHECK(tier.bytes().count == folder.bytes());
  CHECK(get(tier, host, 1, 5).ok());
  CHECK(get(tier, host, 2, 6).ok());
  // Nothing keeps a page.
  CHECK(host.free_pages() == free);
}

TEST_CASE("file tier: a folder has one owner") {
  Folder folder;
  auto tier = open(folder);
  const auto second = Tier::make({.folder = folder.path, .budget = Bytes(1 << 20)});
  REQUIRE_FALSE(second.ok());
  CHECK(second.error().code == ErrorCode::busy);
  CHECK(contains(second.error().message, folder.path));
  CHECK_FALSE(Tier::make({.folder = "", .budget = Bytes(1 << 20)}).ok());
  CHECK_FALSE(Tier::make({.folder = folder.path, .budget = Bytes(0)}).ok());
  CHECK_FALSE(Tier::make({.folder = folder.path, .budget = Bytes(1 << 20)}, 4).ok());
  CHECK_FALSE(Tier::make({.folder = "/proc/no/such/folder", .budget = Bytes(1 << 20)}).ok());
}

TEST_CASE("file tier: spaces are asked for one by one, entries never") {
  Folder folder;
  Host1 host;
  auto tier = open(folder);
  {
    auto refs = host.allocate(2, 1);
    host.fill(refs, 3);
    CHECK(tier.store(key_of(1), host.pool, std::move(refs)).wait().ok());
  }
  // The leading space alone is read without what is behind it.
  auto full = host.allocate(2, 0);
  CHECK(tier.load(key_of(1), host.pool, full).wait().ok());
  CHECK(host.holds(full, 3));
  CHECK(tier.stats().hit_bytes == 4096 + 8192 + 4096);
  auto window = host.allocate(0, 1);
  CHECK(tier.load(key_of(1), host.pool, window).wait().ok());
  CHECK(host.holds(window, 3));
  // A record with more spaces replaces one with fewer, and serves both; one with fewer is there already.
  CHECK(tier.store(key_of(2), host.pool, full).wait().ok());
  CHECK(tier.find(key_of(2))->of<space::Window>() == 0);
  CHECK_FALSE(tier.load(key_of(2), host.pool, window).wait().ok());
  CHECK(tier.stats().lost_for(RecordFault::pages) == 1);
  {
    auto both = host.allocate(2, 1);
    host.fill(both, 4);
    CHECK(tier.store(key_of(2), host.pool, both).wait().ok());
  }
  CHECK(tier.find(key_of(2))->of<space::Window>() == 1);
  CHECK(tier.store(key_of(2), host.pool, full).wait().ok());
  CHECK(tier.find(key_of(2))->of<space::Window>() == 1);
  CHECK(tier.stats().stored == 3);
  CHECK(folder.records().size() == 2);
  CHECK(tier.load(key_of(2), host.pool, window).wait().ok());
  CHECK(host.holds(window, 4));
  CHECK(code(tier.store(key_of(3), host.pool, Host1::Refs{}).wait()) == ErrorCode::invalid_argument);
}

TEST_CASE("file tier: short, long, damaged and foreign files are misses, named, and make room for a new store") {
  Folder folder;
  Host1 host;
  // What may be wrong with the file of key 1, of the same bytes as that of key 2.
  const auto damage = [&](RecordFault fault, auto&& change) {
    CAPTURE(name_of(fault));
    auto tier = std::optional(open(folder));
    CHECK(put(*tier, host, 1, 5).ok());
    const std::string name = folder.records().front();
    CHECK(put(*tier, host, 2, 6).ok());
    auto records = folder.records();
    const std::string other = records.front() == name ? records.back() : records.front();
    tier.reset();
    auto bytes = folder.read(name);
    change(bytes, folder.read(other));
    folder.write(name, bytes);
    tier = open(folder);
    CHECK(tier->contains(key_of(1)));
    CHECK(code(get(*tier, host, 1, 5)) == ErrorCode::mismatch);
    const auto stats = tier->stats();
    CHECK(stats.lost_for(fault) == 1);
    CHECK(stats.all_lost() == 1);
    CHECK(contains(stats.last_lost[static_cast<int>(fault)], name));
    CHECK(contains(stats.last_lost[static_cast<int>(fault)], name_of(fault)));
    // Neither the worker nor its neighbour took harm, and the damaged one does not stand in the way.
    CHECK(get(*tier, host, 2, 6).ok());
    CHECK_FALSE(tier->contains(key_of(1)));
    CHECK(tier->bytes().count == folder.bytes());
    CHECK(put(*tier, host, 1, 7).ok());
    CHECK(get(*tier, host, 1, 7).ok());
    CHECK(tier->erase(key_of(1)));
    CHECK(tier->erase(key_of(2)));
    CHECK(folder.records().empty());
    CHECK(tier->bytes().count == 0);
  };
  using Bytes_ = std::vector<std::byte>;
  damage(RecordFault::short_file, [](Bytes_& b, const Bytes_&) { b.pop_back(); });
  damage(RecordFault::short_file, [](Bytes_& b, const Bytes_&) { b.clear(); });
  damage(RecordFault::short_file, [](Bytes_& b, const Bytes_&) { b.resize(4096); });
  damage(RecordFault::short_file, [](Bytes_& b, const Bytes_&) { b.resize(100); });
  damage(RecordFault::long_file, [](Bytes_& b, const Bytes_&) { b.push_back(std::byte{0}); });
  damage(RecordFault::long_file, [](Bytes_& b, const Bytes_&) { b.resize(b.size() + 8192); });
  damage(RecordFault::damaged_payload, [](Bytes_& b, const Bytes_&) { b[b.size() / 2] ^= std::byte{16}; });
  damage(RecordFault::damaged_header, [](Bytes_& b, const Bytes_&) { b[40] ^= std::byte{16}; });
  damage(RecordFault::not_a_record, [](Bytes_& b, const Bytes_&) { std::fill(b.begin(), b.end(), std::byte{0}); });
  damage(RecordFault::version, [](Bytes_& b, const Bytes_&) { b[8] = std::byte{0}; });
  damage(RecordFault::key, [](Bytes_& b, const Bytes_& other) { b = other; });
}

TEST_CASE("file tier: a record that goes between the look and the load is a miss of its own, and the others of the batch arrive") {
  Folder folder;
  Host1 host;
  auto tier = open(folder);
  std::vector<std::string> names;
  for (std::uint64_t k = 0; k < 5; ++k) {
    CHECK(put(tier, host, k, static_cast<std::uint32_t>(k + 1)).ok());
    for (const auto& name : folder.records()) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    }
  }
  CHECK(tier.contains(key_of(3)));
  REQUIRE(unlink((folder.path + "/" + names[3]).c_str()) == 0);
  std::vector<Tier::Wanted> wanted;
  std::vector<Host1::Refs> refs;
  for (std::uint64_t k = 0; k < 5; ++k) {
    refs.push_back(host.allocate());
    host.fill(refs.back(), 99);
    wanted.push_back({key_of(k), refs.back()});
  }
  const auto events = tier.load(host.pool, std::move(wanted));
  for (std::uint32_t k = 0; k < 5; ++k) {
    CHECK(events[k].wait().ok() == (k != 3));
    CHECK(host.holds(refs[k], k == 3 ? 99 : k + 1));  // all entries of a record, or none
  }
  CHECK(events[3].status().error().code == ErrorCode::stale);
  CHECK(tier.stats().lost_for(RecordFault::absent) == 1);
  CHECK_FALSE(tier.contains(key_of(3)));
  CHECK(tier.bytes().count == folder.bytes());
  // Pools of another depth are not this tier's.
  auto shallow = Host1::Pool::make({.pages = Host1::counts(2, 2), .layers = 2}).value();
  auto page = shallow.allocate(Host1::counts(1, 1)).value();
  CHECK(code(tier.load(key_of(0), shallow, page).wait()) == ErrorCode::invalid_argument);
  CHECK(code(tier.store(key_of(9), shallow, page).wait()) == ErrorCode::invalid_argument);
}

TEST_CASE("file tier: another layout in the same folder is another record, and the same name by force is refused with both layouts") {
  Folder folder;
  Host1 host;
  std::string name;
  {
    auto tier = open(folder);
    CHECK(put(tier, host, 1, 5).ok());
    name = folder.records().front();
  }
  using Bf16Host = SmallHost<SmallBf16>;
  Bf16Host other;
  auto tier = FileTier<Bf16Host::Model, Host>::make({.folder = folder.path, .budget = Bytes(1 << 20)}).value();
  CHECK(tier.records() == 1);
  CHECK_FALSE(tier.contains(key_of(1)));
  auto refs = other.allocate();
  other.fill(refs, 8);
  CHECK(tier.store(key_of(1), other.pool, refs).wait().ok());
  CHECK(tier.records() == 2);
  CHECK(tier.contains<Host1::Model>(key_of(1)));
  auto records = folder.records();
  folder.write(records.front() == name ? records.back() : records.front(), folder.read(name));
  other.fill(refs, 9);
  const auto refused = tier.load(key_of(1), other.pool, refs).wait();
  CHECK(code(refused) == ErrorCode::mismatch);
  CHECK(contains(refused.error().message, "stored: index_k:tokens*4;space=full;layers=2;kvire.page/1;tokens=4;plane{value:e4m3*32};plane{scale:f32*1}"));
  CHECK(contains(refused.error().message, "wanted: index_k:tokens*4;space=full;layers=2;kvire.page/1;tokens=4;plane{value:bf16*32}"));
  CHECK(other.holds(refs, 9));
  CHECK(tier.stats().lost_for(RecordFault::layout) == 1);
}

TEST_CASE("file tier: records of an older layout migrate when asked to") {
  Folder folder;
  using Bf16Host = SmallHost<SmallBf16>;
  Bf16Host old;
  Host1 host;
  auto refs = old.allocate();
  old.fill(refs, 1);
  // Numbers, not patterns: index keys of layer slot 1, token 2.
  float numbers[32];
  for (int i = 0; i < 32; ++i) numbers[i] = static_cast<float>(i - 16) * 0.25f;
  auto& keys = old.pool.entry<SmallIndexK<SmallBf16>>();
  for (int slot = 0; slot < 2; ++slot) {
    for (int token = 0; token < 4; ++token) encode_row<SmallBf16>(numbers, pool_access::view(keys, EntrySlot(slot)).page(refs.of<space::Full>()[0].id().value), token);
  }
  {
    auto tier = FileTier<Bf16Host::Model, Host>::make({.folder = folder.path, .budget = Bytes(1 << 20)}).value();
    CHECK(tier.store(key_of(1), old.pool, refs).wait().ok());
  }
  auto tier = open(folder);
  auto mine = host.allocate();
  CHECK_FALSE(tier.load(key_of(1), host.pool, mine).wait().ok());
  REQUIRE(tier.migrate<Bf16Host::Model>(key_of(1), host.pool, mine).wait().ok());
  const auto page = mine.of<space::Full>()[0].id().value;
  float decoded[32];
  decode_row<SmallFp8>(pool_access::const_view(host.pool.entry<SmallIndexK<SmallFp8>>(), EntrySlot(1)).page(page), 2, decoded);
  for (int i = 0; i < 32; ++i) CHECK(decoded[i] == doctest::Approx(numbers[i]).epsilon(0.07));
  // Entries of the same layout arrive byte for byte.
  CHECK(holds(host.pool.entry<SmallLatent>(), mine.of<space::Full>()[0].id(), 100));
  CHECK(holds(host.pool.entry<SmallWindow>(), mine.of<space::Window>()[0].id(), 120));
  CHECK(tier.store(key_of(1), host.pool, mine).wait().ok());
  CHECK(tier.erase<Bf16Host::Model>(key_of(1)));
  CHECK(tier.records() == 1);
  CHECK(tier.load(key_of(1), host.pool, mine).wait().ok());
}

TEST_CASE("file tier: the least recently used go, the budget holds, and the order survives a restart") {
  Folder folder;
  Host1 host;
  std::int64_t record = 0;
  {
    auto tier = open(folder);
    record = tier.record_bytes(key_of(1), Host1::counts(1, 1)).count;
  }
  {
    auto tier = open(folder, 3 * record + 100);
    for (std::uint64_t k = 1; k <= 3; ++k) {
      CHECK(put(tier, host, k, 5).ok());
      std::this_thread::sleep_for(5ms);  // apart on the file system's clock
    }
    CHECK(get(tier, host, 1, 5).ok());
    CHECK(put(tier, host, 4, 5).ok());
    CHECK_FALSE(tier.contains(key_of(2)));
    for (const std::uint64_t k : {1, 3, 4}) CHECK(tier.contains(key_of(k)));
    CHECK(folder.bytes() == 3 * record);
    CHECK(tier.stats().evictions == 1);
    CHECK(tier.stats().evicted_bytes == record);
    // Larger than all of it: refused, and nothing is evicted for it.
    auto refs = host.allocate(8, 8);
    CHECK(code(tier.store(key_of(9), host.pool, std::move(refs)).wait()) == ErrorCode::exhausted);
    CHECK(tier.records() == 3);
    CHECK(tier.stats().stores_refused == 1);
  }
  // A smaller budget: 3 is the oldest, since 1 was loaded.
  auto tier = open(folder, 2 * record);
  CHECK_FALSE(tier.contains(key_of(3)));
  CHECK(tier.contains(key_of(1)));
  CHECK(tier.contains(key_of(4)));
  CHECK(folder.bytes() == 2 * record);
}

TEST_CASE("file tier: what a crash leaves is removed, what is not the tier's is left alone") {
  Folder folder;
  Host1 host;
  {
    auto tier = open(folder);
    CHECK(put(tier, host, 1, 5).ok());
  }
  const std::string name = folder.records().front();
  folder.write(name + ".7.tmp", std::vector<std::byte>(100));
  folder.write("notes.txt", std::vector<std::byte>(10));
  folder.write("other.tmp", std::vector<std::byte>(10));
  // The same record with fewer pages, as a crash between naming the new file and removing the old one leaves it.
  folder.write(name.substr(0, 32) + "-1.0.kvire", std::vector<std::byte>(8192));
  auto tier = open(folder);
  CHECK(tier.stats().found_temporaries == 1);
  CHECK(tier.stats().found_foreign == 2);
  CHECK(tier.stats().found_records == 1);
  CHECK(folder.records().size() == 1);
  CHECK(folder.files().size() == 4);
}

TEST_CASE("file tier: a batch has an event for each record, in order, and pages under transfer are refused") {
  Folder folder;
  Host1 host;
  auto tier = open(folder);
  for (std::uint64_t k = 1; k <= 5; ++k) CHECK(put(tier, host, k, static_cast<std::uint32_t>(k)).ok());
  std::vector<Tier::Wanted> wanted;
  std::vector<Host1::Refs> refs;
  for (const std::uint64_t k : {4, 77, 2, 5}) {
    refs.push_back(host.allocate());
    wanted.push_back({key_of(k), refs.back()});
  }
  const auto events = tier.load(host.pool, std::move(wanted));
  REQUIRE(events.size() == 4);
  CHECK(events[0].wait().ok());
  CHECK(code(events[1].wait()) == ErrorCode::stale);
  CHECK(events[2].wait().ok());
  CHECK(events[3].wait().ok());
  CHECK(host.holds(refs[0], 4));
  CHECK(host.holds(refs[2], 2));
  CHECK(host.holds(refs[3], 5));

  auto event = Event<Host>::make("transfer");
  const std::vector<HostPage> page{refs[0].of<space::Full>()[0].id()};
  auto reads = host.pool.ledger<space::Full>().hold(page, PageUse::backup, event).value();
  CHECK(tier.store(key_of(6), host.pool, refs[0]).wait().ok());  // readers do not disturb each other
  const auto busy = tier.load(key_of(1), host.pool, refs[0]).wait();
  CHECK(code(busy) == ErrorCode::busy);
  CHECK(contains(busy.error().message, "is under a backup"));
  event.complete();
  CHECK(tier.load(key_of(1), host.pool, refs[0]).wait().ok());
  auto filling = Event<Host>::make("transfer");
  auto writes = host.pool.ledger<space::Full>().hold(page, PageUse::load, filling).value();
  CHECK(code(tier.store(key_of(7), host.pool, refs[0]).wait()) == ErrorCode::busy);
  filling.complete();
}

TEST_CASE("file tier: what a key's namespace may be long can be loaded again") {
  Folder folder;
  Host1 host;
  auto tier = open(folder, 4 << 20);
  auto refs = host.allocate();
  auto key = key_of(1);
  for (const std::int64_t bytes : {std::int64_t{0}, most_key_space_bytes - record_alignment, most_key_space_bytes}) {
    CAPTURE(bytes);
    key.space.assign(static_cast<std::size_t>(bytes), 'x');
    host.fill(refs, 5);
    CHECK(tier.store(key, host.pool, refs).wait(deadline_in(30s)).ok());
    host.fill(refs, 99);
    CHECK(tier.load(key, host.pool, refs).wait(deadline_in(30s)).ok());
    CHECK(host.holds(refs, 5));
  }
}

TEST_CASE("file tier: what it makes is its owner's alone to read") {
  const mode_t before = umask(0);
  Folder inner;  // that the tier makes
  rmdir(inner.path.c_str());
  Host1 host;
  auto tier = Tier::make({.folder = inner.path, .budget = Bytes(1 << 20), .workers = 1, .durable = false}).value();
  CHECK(put(tier, host, 1, 5).ok());
  umask(before);
  const auto others = [](const std::string& path) {
    struct stat info = {};
    REQUIRE(stat(path.c_str(), &info) == 0);
    return static_cast<int>(info.st_mode & 077);
  };
  CHECK(others(inner.path) == 0);
  CHECK(inner.files().size() == 2);  // a record, and the lock
  for (const auto& name : inner.files()) CHECK(others(inner.path + "/" + name) == 0);
}
