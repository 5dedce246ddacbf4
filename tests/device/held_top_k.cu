// SPDX-License-Identifier: Apache-2.0
#include <limits>
#include <random>
#include <string>

#include <kvire/kernel/held_top_k.cuh>
#include <tests/support/device_rows.hpp>
#include <tests/support/gpu.hpp>

namespace {

using namespace kvire_test;

std::vector<std::int32_t> select_held(const Rows& in, int k, int blocks, bool by_score = false) {
  const DeviceRows rows(in, k, by_score);
  cuda_ok(kvire::launch_held_top_k(rows.args, nullptr, nullptr, blocks, true));
  return rows.selected.read();
}

bool serves(const Rows& in, int k, int blocks) { return kvire::held_top_k_serves(DeviceRows(in, k).args, blocks); }

}  // namespace

TEST_CASE("cuda held top-k: every length and distribution against a sort") {
  const std::vector<int> lengths = full() ? std::vector<int>{1, 31, 512, 513, 4000, 8192, 20001, 32764, 60001, 131068} : std::vector<int>{20001, 513, 40000};
  for (int kind = 0; kind < int(Kind::count); ++kind) {
    for (const int length : some(lengths, kind)) {
      const Rows in = make(Kind(kind), 2, length, unsigned(kind * 1000 + length));
      for (const int k : some({1, 512, 2048})) {
        const auto want = expected(in, k);
        for (const int blocks : {2, 4, 8}) {
          if (!serves(in, k, blocks)) continue;
          const std::string what = std::string(name(Kind(kind))) + " length " + std::to_string(length) + " k " + std::to_string(k) + " blocks " + std::to_string(blocks);
          CHECK_MESSAGE(select_held(in, k, blocks) == want, what);
          if (length <= 20001) CHECK_MESSAGE(select_held(in, k, blocks, true) == expected(in, k, true), what << " by score");
        }
      }
    }
  }
}

TEST_CASE("cuda held top-k: what is selected stands in few places, or is one block's alone, and on every run the same is selected") {
  Rows in = make(Kind::normal, 4, 32764, 11);
  for (int i = 0; i < 32764; ++i) {
    const auto at = [&](int row) -> float& { return in.scores[std::size_t(row) * std::size_t(in.stride) + std::size_t(i)]; };
    if (i >= 20000 && i < 22048) at(0) += 6;
    if (i / 16 % 8 == 3) at(1) += 5;                         // one of eight blocks has nearly all of them
    if (i / 16 % 8 == 0 && i < 8000) at(2) = 50;             // more equal ones than are selected, all in the first
    if (i / 16 % 2 == 1) at(3) = i % 3 == 0 ? NAN : -2000;   // one of two blocks has few
  }
  for (const int k : some({64, 512, 2048})) {
    const auto want = expected(in, k);
    for (int run = 0; run < (full() ? 20 : 2); ++run) {
      for (const int blocks : {2, 4, 8}) CHECK_MESSAGE(select_held(in, k, blocks) == want, "k " << k << " blocks " << blocks << " run " << run);
    }
  }
}

TEST_CASE("cuda held top-k: the k-th is not where it is looked for first, many stand beside it, or blocks of a row have nothing") {
  constexpr int length = 32741;
  Rows in = make(Kind::normal, 6, length, 17);
  std::mt19937 random{23};
  for (int i = 0; i < length; ++i) {
    const auto at = [&](int row) -> float& { return in.scores[std::size_t(row) * std::size_t(in.stride) + std::size_t(i)]; };
    at(0) = i == 777 ? 1e30F : 1 + float(random() % (1U << 20)) * 0x1p-23F;           // beside one that is far above
    at(1) = i % 3 == 0 ? 1.0F : i % 7 == 0 ? 2.0F : at(1) - 10;                       // more equal ones than are selected
    if (i >= 32000) at(2) = 1000 + 50 * at(2);                                        // a part that lifts every guess: k - 741 come from below it
    at(3) = i < 1000 ? at(3) : i % 2 == 0 ? NAN : -std::numeric_limits<float>::infinity();
    at(4) = i % 2 == 0 ? 3.0F : float(random() % 2) - 1;                              // half of the row is equal, then -1, -0 and 0
    if (i % 256 < 3) at(5) = 100 + float(i % 5);                                      // 384 tied above the others
  }
  in.lengths = {length, length - 1, length - 2, length - 3, length, 4099};
  for (const int k : some({1, 63, 384, 512, 1024, 2048})) {
    for (const bool by_score : {false, true}) {
      const auto want = expected(in, k, by_score);
      for (const int blocks : {2, 4, 8}) CHECK_MESSAGE(select_held(in, k, blocks, by_score) == want, "k " << k << " blocks " << blocks << " by score " << by_score);
    }
  }
}

TEST_CASE("cuda held top-k: ragged lengths, NaN counted, pages that are -1 or bad, slots for positions") {
  Rows ragged = make(Kind::normal, 40, 25004, 3);
  for (int r = 0; r < 40; ++r) ragged.lengths[std::size_t(r)] = r * r * 16 + r % 5;
  for (const int blocks : {2, 8}) {
    CHECK(select_held(ragged, 512, blocks) == expected(ragged, 512));
  }
  Rows nan = make(Kind::normal, 2, 60001, 3);
  for (std::size_t i = 0; i < nan.scores.size(); i += 1001) nan.scores[i] = i % 2 == 0 ? NAN : -NAN;
  std::int64_t nans = 0;
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < 60001; ++i) nans += std::isnan(nan.scores[std::size_t(r * nan.stride + i)]) ? 1 : 0;
  }
  for (const int blocks : {4, 8}) {
    const DeviceRows rows(nan, 512);
    const DeviceCounts<kvire::TopKCounts> counts;
    cuda_ok(kvire::launch_held_top_k(rows.args, counts.data(), nullptr, blocks));
    CHECK(rows.selected.read() == expected(nan, 512));
    CHECK(counts.value().nan_scores == nans);
    CHECK(counts.value().bad_pages == 0);
  }
  for (const int length : {1000, 20000, 60001}) {
    const PagedRows in(make(Kind::normal, 2, length, 11));
    const std::int64_t bad = std::count(in.table.begin(), in.table.end(), 0x7FFFFFFF);
    for (const bool translate : {false, true}) {
      for (const int k : some({1, 512, 2048})) {
        const auto want = expected(in, k, translate);
        for (const int blocks : {2, 4, 8}) {
          const DeviceRows rows(in, k, translate);
          if (!kvire::held_top_k_serves(rows.args, blocks)) continue;
          const DeviceCounts<kvire::TopKCounts> counts;
          cuda_ok(kvire::launch_held_top_k(rows.args, counts.data(), nullptr, blocks));
          CHECK_MESSAGE(rows.selected.read() == want, "length " << length << " k " << k << " blocks " << blocks);
          CHECK(counts.value().bad_pages == bad);
        }
      }
    }
  }
}

TEST_CASE("cuda held top-k: refused and empty requests") {
  kvire::body::TopKArgs args;
  args.k = 2049;
  args.batch = 1;
  CHECK(kvire::launch_held_top_k(args, nullptr, nullptr, 8) == cudaErrorInvalidValue);
  args.k = 512;
  args.stride = 131076;
  CHECK(kvire::launch_held_top_k(args, nullptr, nullptr, 8) == cudaErrorInvalidValue);
  args.stride = 8192;
  CHECK(kvire::launch_held_top_k(args, nullptr, nullptr, 3) == cudaErrorInvalidValue);
  args.batch = 0;
  CHECK(kvire::launch_held_top_k(args, nullptr, nullptr, 8) == cudaSuccess);
}
