// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <numeric>
#include <thread>
#include <vector>

#include <kvire/exec/host/parallel.hpp>

using namespace kvire;

TEST_CASE("parallel_for: every index once, cut by the grain alone") {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    CHECK(pool.threads() == threads);
    for (std::int64_t n : {0, 1, 7, 8, 9, 1000}) {
      for (std::int64_t grain : {0, 1, 8, 5000}) {
        std::vector<int> seen(static_cast<std::size_t>(n), 0);
        std::atomic<std::int64_t> cuts{0};
        pool.run(n, grain, [&](std::int64_t begin, std::int64_t end) {
          cuts += begin % std::max<std::int64_t>(grain, 1) == 0 ? 0 : 1000000;
          ++cuts;
          for (auto i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
        });
        for (int s : seen) REQUIRE(s == 1);
        CHECK(cuts == ceil_div(n, std::max<std::int64_t>(grain, 1)));
      }
    }
  }
}

TEST_CASE("parallel_for: a sum of floats does not depend on the count of threads") {
  constexpr std::int64_t n = 100003;
  std::vector<float> x(n);
  for (std::int64_t i = 0; i < n; ++i) x[static_cast<std::size_t>(i)] = 1.0f / static_cast<float>(i + 1);
  float first = 0;
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    std::vector<float> part(static_cast<std::size_t>(ceil_div<std::int64_t>(n, 64)), 0.0f);
    pool.run(n, 64, [&](std::int64_t begin, std::int64_t end) {
      for (auto i = begin; i < end; ++i) part[static_cast<std::size_t>(begin / 64)] += x[static_cast<std::size_t>(i)];
    });
    const float sum = std::accumulate(part.begin(), part.end(), 0.0f);
    if (threads == 1) first = sum;
    CHECK(sum == first);
  }
}

TEST_CASE("parallel_for: several callers at once, and from inside") {
  std::vector<std::thread> callers;
  std::atomic<std::int64_t> total{0};
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&] {
      for (int r = 0; r < 50; ++r) {
        parallel_for(64, 4, [&](std::int64_t begin, std::int64_t end) {
          parallel_for(end - begin, 1, [&](std::int64_t b, std::int64_t e) { total += e - b; });
        });
      }
    });
  }
  for (auto& c : callers) c.join();
  CHECK(total == 4 * 50 * 64);
}

TEST_CASE("thread pool: threads take part in the next call, awake or asleep") {
  ThreadPool pool(3);
  REQUIRE(pool.threads() == 3);
  for (int call = 0; call < 60; ++call) {
    if (call % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // far longer than they stay awake
    std::atomic<int> inside{0};
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    pool.run(3, 1, [&](std::int64_t, std::int64_t) {  // no chunk ends before all have begun
      ++inside;
      while (inside < 3 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    });
    REQUIRE(std::chrono::steady_clock::now() < end);
  }
}
