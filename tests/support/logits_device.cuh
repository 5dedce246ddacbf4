// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdio>
#include <type_traits>

#include <kvire/kernel/sm80_sparse_logits.cuh>
#include <kvire/kernel/sm90_sparse_logits.cuh>
#include <kvire/layout/policies.hpp>

#include "golden.hpp"
#include "gpu.hpp"
#include "logits_case.hpp"

// Runs a sparse-logits kernel on a case and compares it with float64.

namespace kvire_test {

using namespace kvire;

inline constexpr std::uint32_t sentinel = 0x7FC0DEAD;

/// In place of a shape: the kernel that runs on every GPU.
struct Portable {};

struct Outcome {
  std::vector<std::uint32_t> bits;
  unsigned long long bad_pages = 0;
  unsigned long long nan_logits = 0;
};

/// `pages`: the case's, in device memory.
template <class P, Element Query, int Heads, int NextN, class Shape = sm90::DefaultLogitsShape<P, Query, Heads, NextN>>
Outcome run_case(const LogitsCase& c, const std::byte* pages, int sms) {
  const DeviceArray<std::uint8_t> queries(c.queries);
  const DeviceArray<float> weights(c.weights);
  const DeviceArray<std::int32_t> table(c.table), lengths(c.lengths);
  const DeviceArray<std::uint32_t> logits(std::vector<std::uint32_t>(static_cast<std::size_t>(c.batch * c.next_n) * static_cast<std::size_t>(c.logits_stride), sentinel));
  const DeviceArray<unsigned long long> counts(std::vector<unsigned long long>(2, 0));
  sm90::LogitsArguments a;
  a.pages = pages;
  a.page_stride = c.page_stride;
  a.page_count = c.pages;
  a.batch = c.batch;
  a.queries = queries.data();
  a.weights = weights.data();
  a.page_table = table.data();
  a.table_stride = c.table_stride;
  a.table_width = c.table_stride;
  a.lengths = lengths.data();
  a.lengths_per_query = c.lengths_per_query;
  a.logits = reinterpret_cast<float*>(logits.data());
  a.logits_stride = c.logits_stride;
  a.bad_pages = counts.data();
  a.nan_logits = counts.data() + 1;
  cudaError_t launched = cudaSuccess;
  if constexpr (std::is_same_v<Shape, Portable>) {
    launched = sm80::launch_logits<P, Query, Heads, NextN>(a, sms, nullptr);
  } else {
    launched = sm90::launch_logits<P, Query, Heads, NextN, Shape>(a, sms, nullptr);
  }
  CHECK_MESSAGE(launched == cudaSuccess, cudaGetErrorString(launched));
  Outcome outcome;
  outcome.bits = logits.read();
  outcome.bad_pages = counts.read()[0];
  outcome.nan_logits = counts.read()[1];
  return outcome;
}

template <class P, Element Query, int Heads, int NextN, class Shape = sm90::DefaultLogitsShape<P, Query, Heads, NextN>>
Outcome run_case(const LogitsCase& c, int sms) {
  const DeviceArray<std::uint8_t> memory(c.memory);
  return run_case<P, Query, Heads, NextN, Shape>(c, reinterpret_cast<const std::byte*>(memory.data()), sms);
}

inline double worst_seen = 0;

/// Compares every written logit with float64 and every other word with the sentinel.
template <class P>
void check_against_reference(const LogitsCase& c, const Outcome& outcome, double tolerance, int sample = 1) {
  int wrong = 0;
  double worst = 0;
  for (int row = 0; row < c.batch; ++row) {
    for (int q = 0; q < c.next_n; ++q) {
      const std::uint32_t* bits = outcome.bits.data() + static_cast<std::int64_t>(row * c.next_n + q) * c.logits_stride;
      const int visible = c.visible(row, q);
      for (int s = 0; s < c.logits_stride; ++s) {
        if (s >= visible) {
          if (bits[s] != sentinel) ++wrong;
          continue;
        }
        if (sample > 1 && (s * 7 + row) % sample != 0 && s + 3 < visible) continue;
        float got = 0;
        std::memcpy(&got, bits + s, 4);
        double want = 0, magnitude = 0;
        reference_logit<P>(c, row, q, s, want, magnitude);
        if (std::isinf(want) ? !(std::isinf(got) && got < 0) : !(std::fabs(got - want) <= tolerance * magnitude)) {
          if (wrong++ < 4) std::printf("  row %d query %d token %d: %g, expected %g (magnitude %g)\n", row, q, s, static_cast<double>(got), want, magnitude);
        }
        if (!std::isinf(want) && magnitude > 0) worst = std::max(worst, std::fabs(got - want) / magnitude);
      }
    }
  }
  CHECK(wrong == 0);
  worst_seen = std::max(worst_seen, worst);
}

template <class P, Element Query, int Heads, int NextN, class Shape = sm90::DefaultLogitsShape<P, Query, Heads, NextN>>
void random_shapes(double tolerance) {
  if (!std::is_same_v<Shape, Portable> && !hopper()) return;
  const int sms = multiprocessors();
  worst_seen = 0;
  std::vector<std::vector<std::int32_t>> shapes = {{1}, {64}, {65}, {0, 0, 0}, {0, 130, 0, 1, 63, 0, 64, 200}, {1000}};
  if (!small_run()) shapes.insert(shapes.end(), {{5000, 3, 700, 64, 64, 128, 0, 2049}, {4096, 4096}});
  shapes.push_back(std::vector<std::int32_t>(small_run() ? 40 : 300, 70));
  unsigned seed = 1;
  for (const auto& lengths : shapes) {
    auto c = random_case<P>(seed++, lengths, NextN, Heads, Query);
    for (const int used : small_run() ? std::vector<int>{sms, 3} : std::vector<int>{sms, 1, 3}) check_against_reference<P>(c, run_case<P, Query, Heads, NextN, Shape>(c, used), tolerance, lengths.size() > 2 || lengths[0] > 500 ? 23 : 1);
  }
  for (int trial = 0; trial < (small_run() ? 3 : 60); ++trial) {
    std::mt19937 random(seed);
    std::vector<std::int32_t> lengths(1 + random() % 12);
    for (auto& n : lengths) n = random() % 4 == 0 ? static_cast<std::int32_t>(random() % 3) : static_cast<std::int32_t>(random() % (trial % 8 == 0 ? 2000 : 400));
    auto c = random_case<P>(seed++, lengths, NextN, Heads, Query);
    if (trial % 3 == 2 && NextN > 1) {
      c.lengths_per_query = true;
      c.lengths.clear();
      for (const int n : lengths)
        for (int q = 0; q < NextN; ++q) c.lengths.push_back(n == 0 ? 0 : static_cast<std::int32_t>(random() % static_cast<unsigned>(n + 1)));
    }
    check_against_reference<P>(c, run_case<P, Query, Heads, NextN, Shape>(c, trial % 2 == 0 ? sms : 1 + static_cast<int>(random() % 8)), tolerance, 97);
  }
  std::printf("  %-24s %d heads, %d query tokens: largest error %.2e of the sum of magnitudes\n", P::name, Heads, NextN, worst_seen);
}

template <class P, Element Query, int Heads, int NextN, class Shape = sm90::DefaultLogitsShape<P, Query, Heads, NextN>>
void same_bits(int runs) {
  if (!std::is_same_v<Shape, Portable> && !hopper()) return;
  const int sms = multiprocessors();
  const std::vector<std::int32_t> lengths = {700, 64, 5000, 1, 129, 2047, 0, 320};
  const auto c = random_case<P>(77, lengths, NextN, Heads, Query);
  const auto all = run_case<P, Query, Heads, NextN, Shape>(c, sms);
  for (int i = 0; i < runs; i += small_run() ? 5 : 1) CHECK(run_case<P, Query, Heads, NextN, Shape>(c, sms - i * 6).bits == all.bits);
  // each row alone, its pages' neighbours and tails poisoned differently
  for (int row = 0; row < c.batch; ++row) {
    LogitsCase one = c;
    one.batch = 1;
    one.lengths = {c.lengths[static_cast<std::size_t>(row)]};
    one.table.assign(c.table.begin() + row * c.table_stride, c.table.begin() + (row + 1) * c.table_stride);
    const std::size_t per_row = c.queries.size() / static_cast<std::size_t>(c.batch);
    one.queries.assign(c.queries.begin() + static_cast<std::ptrdiff_t>(per_row) * row, c.queries.begin() + static_cast<std::ptrdiff_t>(per_row) * (row + 1));
    const int w = NextN * Heads;
    one.weights.assign(c.weights.begin() + w * row, c.weights.begin() + w * (row + 1));
    const auto alone = run_case<P, Query, Heads, NextN, Shape>(one, sms);
    const std::int64_t n = NextN * c.logits_stride;
    CHECK(std::equal(alone.bits.begin(), alone.bits.end(), all.bits.begin() + row * n));
  }
}

inline LogitsCase golden_case(const Safetensors& file) {
  LogitsCase c;
  c.next_n = file.meta_int("next_n");
  c.heads = file.meta_int("heads");
  c.dim = file.meta_int("dim");
  c.query_element = file.meta("query") == "e4m3" ? Element::e4m3 : Element::bf16;
  c.memory = file.at("pages").as<std::uint8_t>();
  c.pages = static_cast<int>(file.at("pages").shape[0]);
  c.page_stride = file.at("pages").shape[1];
  c.queries = file.at("query").as<std::uint8_t>();
  c.weights = file.at("weights").as<float>();
  c.table = file.at("page_table").as<std::int32_t>();
  c.table_stride = static_cast<int>(file.at("page_table").shape[1]);
  c.lengths = file.at("context_lens").as<std::int32_t>();
  c.batch = static_cast<int>(c.lengths.size());
  c.logits_stride = file.at("logits").shape[2];
  c.decode_queries();
  return c;
}
template <class P, Element Query, int Heads, int NextN, class Shape = sm90::DefaultLogitsShape<P, Query, Heads, NextN>>
void golden_logits(const Safetensors& file, double tolerance) {
  const LogitsCase c = golden_case(file);
  REQUIRE(c.heads == Heads);
  REQUIRE(c.next_n == NextN);
  const auto outcome = run_case<P, Query, Heads, NextN, Shape>(c, multiprocessors());
  check_against_reference<P>(c, outcome, tolerance);
  const auto want = file.at("logits").as<double>();
  for (int row = 0; row < c.batch * c.next_n; ++row) {
    for (int s = 0; s < c.visible(row / c.next_n, row % c.next_n); ++s) {
      const auto at = static_cast<std::size_t>(row) * static_cast<std::size_t>(c.logits_stride) + static_cast<std::size_t>(s);
      double ours = 0, magnitude = 0;
      reference_logit<P>(c, row / c.next_n, row % c.next_n, s, ours, magnitude);
      float got = 0;
      std::memcpy(&got, &outcome.bits[at], 4);
      const bool close = std::isinf(want[at]) ? std::isinf(got) && got < 0 : std::fabs(got - want[at]) <= tolerance * magnitude;
      if (!close) CHECK_MESSAGE(close, "row " << row << " token " << s << ": " << got << ", golden " << want[at]);
    }
  }
}

}  // namespace kvire_test
