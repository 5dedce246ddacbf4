// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <unistd.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <kvire/tier/file_tier.hpp>
#include <tests/support/file_tier_case.hpp>

using namespace kvire;
using namespace kvire_test;

namespace {

using Rows = SmallHost<>;
using Tier = FileTier<Rows::Model, Host>;

// Nothing: success.
std::optional<ErrorCode> code(const Status& status) { return status.ok() ? std::nullopt : std::optional(status.error().code); }
std::string refusal(const FileTierOptions<>& options) {
  const auto made = Tier::make(options, SmallSchedule::layers);
  return made.ok() ? std::string("ok") : made.error().code == ErrorCode::invalid_argument ? made.error().message : std::string("another code");
}

/// A tier with one record.
struct Bench {
  Folder folder;
  Rows host;
  Tier tier = Tier::make({.folder = folder.path, .budget = Bytes(1 << 20), .workers = 2, .durable = false}, SmallSchedule::layers).value();
  Rows::Refs stored = host.allocate();

  Bench() {
    host.fill(stored, 3);
    CHECK(tier.store(key_of(1), host.pool, stored).wait().ok());
  }
  std::optional<ErrorCode> store(Rows::Refs refs, const RecordKey& key = key_of(2)) { return code(tier.store(key, host.pool, std::move(refs)).wait()); }
  std::optional<ErrorCode> load(Rows::Refs refs, const RecordKey& key = key_of(1)) { return code(tier.load(key, host.pool, std::move(refs)).wait()); }
};

}  // namespace

TEST_CASE("file tier: keys that cover no tokens are refused, and never found") {
  Bench b;
  auto key = key_of(2);
  const auto with = [&](std::int64_t first, std::int64_t count) {
    key.first_token = first;
    key.token_count = count;
    return key;
  };
  constexpr auto most = std::numeric_limits<std::int64_t>::max();
  for (const auto& wrong : {with(-5, 16), with(0, -7), with(0, 0), with(16, most), with(most, 1)}) {
    CAPTURE(wrong.first_token);
    CAPTURE(wrong.token_count);
    CHECK(b.store(b.stored, wrong) == ErrorCode::invalid_argument);
    CHECK(b.load(b.host.allocate(), wrong) == ErrorCode::invalid_argument);
    CHECK_FALSE(b.tier.contains(wrong));
    CHECK_FALSE(b.tier.find(wrong).has_value());
    CHECK_FALSE(b.tier.erase(wrong));
  }
  key = key_of(2);
  key.space.assign(static_cast<std::size_t>(most_key_space_bytes) + 1, 'x');
  CHECK(b.store(b.stored, key) == ErrorCode::invalid_argument);
  CHECK(check_key(with(0, 1)).error().message.find("record key: space has 1048577 bytes") == 0);
  CHECK(b.tier.records() == 1);
}

TEST_CASE("file tier: pages of another pool or space, named twice, or that others own are refused") {
  Bench b;
  Rows other;
  CHECK(b.store(other.allocate()) == ErrorCode::invalid_argument);
  CHECK(b.load(other.allocate()) == ErrorCode::invalid_argument);
  Rows::Refs empty;
  empty.of<space::Full>().emplace_back();
  CHECK(b.store(empty) == ErrorCode::invalid_argument);
  auto swapped = b.host.allocate();
  std::swap(swapped.of<space::Full>(), swapped.of<space::Window>());
  CHECK(b.store(swapped) == ErrorCode::invalid_argument);
  CHECK(b.load(swapped) == ErrorCode::invalid_argument);
  auto twice = b.host.allocate();
  twice.of<space::Full>().push_back(twice.of<space::Full>().front());
  CHECK(b.store(twice) == ErrorCode::duplicate);
  CHECK(b.load(std::exchange(twice, {})) == ErrorCode::duplicate);

  // Seals are looked up by page: not by one that was refused.
  Rows larger(100);
  const auto seals = PageSeals::make(b.host.pool).value();
  const auto far = larger.allocate(90, 90);
  for (const auto& refs : {empty, far}) {
    CHECK(code(b.tier.store(key_of(2), b.host.pool, refs, seals).wait()) == ErrorCode::invalid_argument);
    CHECK(code(b.tier.load(key_of(1), b.host.pool, refs, seals).wait()) == ErrorCode::invalid_argument);
  }

  auto mine = b.host.allocate();
  b.host.fill(mine, 9);
  {
    const auto shared = mine;
    CHECK(b.load(mine) == ErrorCode::busy);
    CHECK(b.store(mine) == std::nullopt);  // which only reads
  }
  // One page for two records of one call: neither is written.
  std::vector<Tier::Wanted> wanted;
  for (int i = 0; i < 2; ++i) wanted.push_back({key_of(1), mine, {}});
  for (auto& event : b.tier.load(b.host.pool, std::move(wanted))) CHECK(code(event.wait()) == ErrorCode::busy);
  CHECK(b.host.holds(mine, 9));
  CHECK(b.load(mine) == std::nullopt);
  CHECK(b.host.holds(mine, 3));
}

TEST_CASE("file tier: options that mean nothing are refused by name, and parents are not made") {
  Folder folder;
  const auto options = [&] { return FileTierOptions<>{.folder = folder.path, .budget = Bytes(1 << 20), .durable = false}; };
  auto o = options();
  CHECK(refusal(o) == "ok");
  o.folder.clear();
  CHECK(refusal(o) == "file tier: no folder is named");
  for (const std::int64_t bytes : {std::int64_t{-5}, std::int64_t{0}, record_alignment - 1}) {
    o = options();
    o.budget = Bytes(bytes);
    CHECK(refusal(o).find("file tier: budget is " + std::to_string(bytes)) == 0);
  }
  const auto each = [&](int FileTierOptions<>::*option, const char* name, std::vector<int> values) {
    for (const int value : values) {
      o = options();
      o.*option = value;
      CHECK(refusal(o).find("file tier: " + std::string(name) + " is " + std::to_string(value)) == 0);
    }
  };
  each(&FileTierOptions<>::workers, "workers", {-1, 0, 257, 100'000});
  each(&FileTierOptions<>::batch, "batch", {-1, 0});
  each(&FileTierOptions<>::queued_stores, "queued_stores", {-1, 0});
  o = options();
  o.batch_bytes = Bytes(-1);
  CHECK(refusal(o).find("file tier: batch_bytes is -1") == 0);

  o = options();
  o.folder = folder.path + "/new";
  CHECK(refusal(o) == "ok");
  unlink((o.folder + "/lock").c_str());
  CHECK(rmdir(o.folder.c_str()) == 0);
  o.folder = folder.path + "/not/there";
  const auto made = Tier::make(o, SmallSchedule::layers);
  REQUIRE_FALSE(made.ok());
  CHECK(made.error().code == ErrorCode::failed);
  CHECK(made.error().message.find("making folder '" + o.folder) != std::string::npos);
  CHECK_FALSE(PosixIo().list(folder.path + "/not").ok());
}
