// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvire/transfer/stats.hpp>

using namespace kvire;

namespace {
MovedCount moved(std::int64_t bytes) {
  MovedCount count;
  count.entry = "keys";
  count.copies = 1;
  count.bytes = bytes;
  return count;
}
}  // namespace

TEST_CASE("stats: what arrives later is counted when the sums are asked, once") {
  TransferStats stats;
  stats.add(moved(1));
  std::int64_t here = 0;
  stats.follow([&here, told = std::int64_t(0)](std::vector<MovedCount>& arrived) mutable {
    for (; told < here; ++told) arrived.push_back(moved(100));
    return told == 3;
  });
  CHECK(stats.bytes() == 1);
  here = 2;
  CHECK(stats.bytes() == 201);
  CHECK(stats.bytes() == 201);
  here = 3;
  REQUIRE(stats.counts().size() == 1);
  CHECK(stats.counts()[0].bytes == 301);
  CHECK(stats.counts()[0].copies == 4);
}

TEST_CASE("stats: sums that nobody reads let go of what has arrived") {
  TransferStats stats;
  const auto kept = std::make_shared<int>(0);
  for (int i = 0; i < 100; ++i) {
    stats.follow([kept](std::vector<MovedCount>& arrived) {
      arrived.push_back(moved(5));
      return true;
    });
  }
  CHECK(kept.use_count() <= 2);
  CHECK(stats.bytes() == 500);
  CHECK(kept.use_count() == 1);
}
