// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvire/kernel/top_k.cuh>
#include <tests/support/device_rows.hpp>
#include <tests/support/golden.hpp>
#include <tests/support/gpu.hpp>

namespace {

using namespace kvire_test;

std::vector<kvire::TopKShape> shapes() {
  std::vector<kvire::TopKShape> all = {{1024, 4, 1}, {1024, 8, 1}};
  if (gpu_attribute(cudaDevAttrComputeCapabilityMajor) >= 9) {
    for (const int blocks : full() ? std::vector<int>{2, 4, 8, 16} : std::vector<int>{}) all.insert(all.end(), {{1024, 4, blocks}, {1024, 8, blocks}});
    if (!full()) all.insert(all.end(), {{1024, 8, 2}, {1024, 4, 16}});
  }
  return all;
}

std::string name(const kvire::TopKShape& s) {
  return std::to_string(s.threads) + "x" + std::to_string(s.items) + "x" + std::to_string(s.blocks);
}

std::vector<std::int32_t> select(const Rows& in, int k, const kvire::TopKShape& shape, bool by_score = false, kvire::TopKCounts* counted = nullptr) {
  const DeviceRows rows(in, k, by_score);
  const DeviceCounts<kvire::TopKCounts> counts;
  cuda_ok(kvire::launch_top_k(rows.args, counted != nullptr ? counts.data() : nullptr, nullptr, shape));
  if (counted != nullptr) *counted = counts.value();
  return rows.selected.read();
}

// Runs every shape; one message per failing row.
void compare_shapes(const Rows& in, int k, const std::string& what, bool by_score = false) {
  const auto want = expected(in, k, by_score);
  for (const auto& shape : shapes()) {
    const auto got = select(in, k, shape, by_score);
    for (int r = 0; r < in.rows; ++r) {
      int wrong = 0, at = -1;
      for (int i = 0; i < k; ++i) {
        if (got[std::size_t(r * k + i)] == want[std::size_t(r * k + i)]) continue;
        if (wrong++ == 0) at = i;
      }
      if (wrong == 0) continue;
      FAIL_CHECK(what << " " << name(shape) << " k " << k << " row " << r << " length " << in.lengths[std::size_t(r)] << ": " << wrong
                      << " slots differ, first " << at << ": " << got[std::size_t(r * k + at)] << " instead of " << want[std::size_t(r * k + at)]);
    }
  }
}

}  // namespace

TEST_CASE("cuda top-k: every shape, length and distribution against a sort") {
  const std::vector<int> lengths = full() ? std::vector<int>{1, 31, 511, 512, 513, 4000, 4096, 8320, 20001, 32768, 70001, 131072} : std::vector<int>{513, 4096, 20001};
  for (int kind = 0; kind < int(Kind::count); ++kind) {
    for (const int length : some(lengths, kind)) {
      const Rows in = make(Kind(kind), 2, length, unsigned(kind * 1000 + length));
      for (const int k : some({1, 512, 2048})) {
        compare_shapes(in, k, name(Kind(kind)));
      }
    }
  }
}

TEST_CASE("cuda top-k: a million scores") {
  if (!full()) return;
  for (int kind = 0; kind < int(Kind::count); ++kind) {
    const Rows in = make(Kind(kind), 1, 1 << 20, unsigned(kind));
    for (const int k : {512, 2048}) {
      compare_shapes(in, k, name(Kind(kind)));
    }
  }
}

TEST_CASE("cuda top-k: lengths from 0 to beyond k, ragged in one batch, in any alignment") {
  for (const int k : {1, 64, 512}) {
    for (const int extra : {0, 1, 2, 3}) {
      Rows in;
      in.rows = k + 3;
      in.stride = k + 4 + extra;
      std::mt19937 engine{unsigned(k)};
      std::normal_distribution<float> normal;
      for (int r = 0; r < in.rows; ++r) {
        in.lengths.push_back(std::min(r, k + 2));
        for (int i = 0; i < in.stride; ++i) in.scores.push_back(i < r ? normal(engine) : NAN);
      }
      compare_shapes(in, k, "ragged");
    }
  }
  Rows zero;
  zero.rows = 33;
  zero.stride = 64;
  zero.scores.assign(33 * 64, INFINITY);
  zero.lengths.assign(33, 0);
  compare_shapes(zero, 2048, "all empty");
  zero.lengths[17] = 63;
  compare_shapes(zero, 2048, "one not empty");
}

TEST_CASE("cuda top-k: thousands of ties, and distinct scores that share one bin") {
  Rows ties = make(Kind::equal, 1, 8320, 1);
  for (int i = 0; i < 8320; ++i) ties.scores[std::size_t(i)] = i % 83 == 7 && i / 83 < 100 ? 1.0F + float(i) : 0.0F;
  compare_shapes(ties, 2048, "ties");
  for (float& x : ties.scores) x = x > 0 ? 1.0F + x / 16384 : x;  // another span of keys: the last digit is narrower than the others
  compare_shapes(ties, 2048, "ties");
  for (const int n : full() ? std::vector<int>{16384, 20480, 1 << 20} : std::vector<int>{20480}) {
    Rows one = make(Kind::equal, 1, n, 1);
    std::vector<int> order(static_cast<std::size_t>(n));
    for (int i = 0; i < n; ++i) order[std::size_t(i)] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(9));
    for (int i = 0; i < n; ++i) one.scores[std::size_t(i)] = 1.0F + float(order[std::size_t(i)]) * 0x1p-23F;
    compare_shapes(one, 2048, "one bin");
  }
}

TEST_CASE("cuda top-k of short rows: whatever the sample that the bins are guessed by") {
  std::mt19937 random{7};
  std::normal_distribution<float> normal;
  // Where the sample is taken: eight runs of 16 scores.
  const auto sampled = [](int i, int length) { return i / std::max(1, length / 8 & ~3) < 8 && i % std::max(1, length / 8 & ~3) < 16; };
  struct Case {
    const char* name;
    std::function<float(int i, int length, int k)> score;
  };
  const auto tie = [](int of, int i, int k) {  // k - 10 distinct ones, `of` that are equal, and far below what is left; in no order
    const int rank = i * 2731 % 8191;
    return rank < k - 10 ? 2 + float(rank) * 0x1p-13F : rank < k - 10 + of ? 1.0F : -float(rank);
  };
  const std::vector<Case> cases = {
      {"ties at the cut", [&](int, int, int) { return float(random() % 3); }},
      {"as many ties as one warp ranks", [&](int i, int, int k) { return tie(32, i, k); }},
      {"one tie more", [&](int i, int, int k) { return tie(33, i, k); }},
      {"neighbouring floats below a stray one", [&](int i, int, int) { return i == 77 ? 1e30F : 1 + float(random() % 4096) * 0x1p-23F; }},
      {"forty binades", [&](int, int, int) { return std::ldexp(normal(random), int(random() % 80) - 40); }},
      {"two clusters", [&](int i, int, int) { return (i % 8 == 0 ? 100 : -100) + 0.01F * normal(random); }},
      {"the whole range of floats", [&](int, int, int) { return normal(random) * 1e38F; }},
      {"a sample of NaN", [&](int i, int length, int) { return sampled(i, length) ? NAN : normal(random); }},
      {"a sample of infinities", [&](int i, int length, int) { return sampled(i, length) ? (i % 2 == 0 ? INFINITY : -INFINITY) : normal(random); }},
      {"a sample of one number, above all", [&](int i, int length, int) { return sampled(i, length) ? 5.0F : normal(random); }},
      {"a sample of one number, below all", [&](int i, int length, int) { return sampled(i, length) ? -5.0F : normal(random); }},
      {"few that may be selected", [&](int i, int, int) { return i % 5 == 0 ? normal(random) : NAN; }},
      {"few above -inf", [&](int i, int, int) { return i % 50 == 0 ? normal(random) : -INFINITY; }},
  };
  for (const auto& c : cases) {
    for (const int length : some({1500, 4095, 4096, 8192}, int(&c - cases.data()))) {
      // In a row that has room for more a kernel for longer rows meets them.
      for (const int stride : full() ? std::vector<int>{(length + 3) / 4 * 4, length + 5, 16384} : std::vector<int>{(length + 3) / 4 * 4, 16384}) {
        for (const int k : some({1, 100, 512, 2048}, length)) {
          Rows in;
          in.stride = stride;
          in.lengths = {length};
          for (int i = 0; i < stride; ++i) in.scores.push_back(i < length ? c.score(i, length, k) : i % 2 == 0 ? INFINITY : NAN);
          compare_shapes(in, k, c.name);
        }
      }
    }
  }
}

TEST_CASE("cuda top-k: NaN is never selected and counted, -inf may be") {
  Rows in;
  in.rows = 3;
  in.stride = 128;
  in.lengths = {100, 100, 100};
  in.scores.assign(3 * 128, INFINITY);
  for (int i = 0; i < 100; ++i) {
    in.scores[std::size_t(i)] = i % 10 == 3 ? float(i) : -INFINITY;
    in.scores[std::size_t(128 + i)] = i % 2 == 0 ? NAN : -NAN;
    in.scores[std::size_t(256 + i)] = i == 63 ? NAN : float(-i);
  }
  for (const auto& shape : shapes()) {
    kvire::TopKCounts counts;
    CHECK_MESSAGE(select(in, 64, shape, false, &counts) == expected(in, 64), name(shape));
    CHECK(counts.nan_scores == 101);
    CHECK(counts.bad_pages == 0);
  }
  Rows longer = make(Kind::normal, 2, 100000, 3);
  for (std::size_t i = 0; i < longer.scores.size(); i += 1001) longer.scores[i] = i % 2 == 0 ? NAN : -NAN;
  std::int64_t nans = 0;
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < 100000; ++i) nans += std::isnan(longer.scores[std::size_t(r * longer.stride + i)]) ? 1 : 0;
  }
  const auto want = expected(longer, 2048);
  for (const auto& shape : shapes()) {
    kvire::TopKCounts counts;
    CHECK_MESSAGE(select(longer, 2048, shape, false, &counts) == want, name(shape));
    CHECK(counts.nan_scores == nans);
  }
}

TEST_CASE("cuda top-k: by score") {
  for (const Kind kind : {Kind::normal, Kind::eighths, Kind::infinite}) {
    for (const int length : {300, 4096, 50001}) {
      const Rows in = make(kind, 2, length, 5);
      for (const int k : some({1, 500, 2048})) {
        compare_shapes(in, k, "by score", true);
      }
    }
  }
}

TEST_CASE("cuda top-k: pages that are -1 or bad are never selected; positions become slots") {
  for (const int length : {1000, 8000, 50000}) {
    const PagedRows in(make(Kind::normal, 2, length, 11));
    const std::int64_t bad = std::count(in.table.begin(), in.table.end(), 0x7FFFFFFF);
    for (const bool translate : {false, true}) {
      for (const int k : some({1, 512, 2048})) {
        const auto want = expected(in, k, translate);
        for (const auto& shape : shapes()) {
          const DeviceRows rows(in, k, translate);
          const DeviceCounts<kvire::TopKCounts> counts;
          cuda_ok(kvire::launch_top_k(rows.args, counts.data(), nullptr, shape));
          CHECK_MESSAGE(rows.selected.read() == want, name(shape) << " length " << length << " k " << k);
          CHECK(counts.value().bad_pages == bad);
        }
      }
    }
  }
}

TEST_CASE("cuda top-k: the same on 20 runs, alone and in any batch") {
  const Rows one = make(Kind::eighths, 1, 40000, 21);
  Rows batch = make(Kind::normal, 40, 40000, 22);
  for (const int r : {0, 13, 39}) std::copy(one.scores.begin(), one.scores.end(), batch.scores.begin() + std::ptrdiff_t(r) * batch.stride);
  const auto want = expected(one.scores.data(), 40000, 2048);
  for (const auto& shape : shapes()) {
    for (int run = 0; run < (full() ? 20 : 5); ++run) CHECK(select(one, 2048, shape) == want);
    const auto all = select(batch, 2048, shape);
    for (const int r : {0, 13, 39}) CHECK(std::equal(want.begin(), want.end(), all.begin() + std::ptrdiff_t(r) * 2048));
  }
}

TEST_CASE("cuda top-k: refused and empty requests") {
  kvire::body::TopKArgs args;
  args.k = 2049;
  args.batch = 1;
  CHECK(kvire::launch_top_k(args, nullptr, nullptr, {}) == cudaErrorInvalidValue);
  args.k = 0;
  CHECK(kvire::launch_top_k(args, nullptr, nullptr, {}) == cudaSuccess);
}

TEST_CASE("cuda top-k: golden vectors") {
  kvire_test::for_each_golden("topk_", [](const kvire_test::Safetensors& file) {
    Rows in;
    in.rows = int(file.at("scores").shape[0]);
    in.stride = int(file.at("scores").shape[1]);
    in.scores = file.at("scores").as<float>();
    in.lengths = file.at("lens").as<std::int32_t>();
    const int k = file.meta_int("k");
    const auto want = file.at("indices").as<std::int32_t>();
    for (const auto& shape : shapes()) CHECK_MESSAGE(select(in, k, shape) == want, name(shape));
  });
}
