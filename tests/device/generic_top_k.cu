// SPDX-License-Identifier: Apache-2.0
// The plain top-k kernel: the host body's selection, counts and order for any k, and the reference vectors.
#include <cmath>
#include <limits>
#include <random>

#include <doctest/doctest.h>

#include <kvire/kernel/generic_top_k.cuh>
#include <tests/support/device_array.hpp>
#include <tests/support/golden.hpp>

using namespace kvire;
using namespace kvire_test;

TEST_CASE("cuda plain top-k: the host's selection, whatever the k, the order, the lengths and the pages") {
  std::mt19937 random{3};
  std::normal_distribution<float> normal;
  for (int trial = 0; trial < 16; ++trial) {
    CAPTURE(trial);
    const int k = trial % 4 == 0 ? 1 : trial % 4 == 1 ? 64 : trial % 4 == 2 ? 500 : 3000;
    const int batch = 1 + trial % 3, next_n = 1 + trial % 2, tokens = trial % 5 == 0 ? 48 : 64, max_pages = 20;
    const std::int64_t stride = tokens * max_pages + trial;
    const auto rows = static_cast<std::size_t>(batch * next_n);
    std::vector<float> scores;
    for (std::size_t i = 0; i < rows * static_cast<std::size_t>(stride); ++i) {
      const auto r = random() % 64;
      scores.push_back(r == 0 ? std::numeric_limits<float>::quiet_NaN() : r == 1 ? -std::numeric_limits<float>::infinity() : r < 20 ? 0.5F : r == 20 ? -0.0F : normal(random));
    }
    std::vector<std::int32_t> lengths, table;
    for (int b = 0; b < batch; ++b) lengths.push_back(static_cast<std::int32_t>(trial == 7 ? 0 : trial == 8 ? 0x7FFFFFFF : trial == 9 ? -1 : static_cast<int>(random() % static_cast<unsigned>(stride))));
    for (int i = 0; i < batch * max_pages; ++i) table.push_back(static_cast<std::int32_t>(i % 7 == 3 ? -1 : i % 11 == 5 ? 1000 : i));
    std::vector<std::int32_t> selected(rows * static_cast<std::size_t>(k), 123456), scratch(selected);

    body::TopKArgs args;
    args.scores = scores.data();
    args.stride = stride;
    args.lengths = lengths.data();
    args.batch = batch;
    args.next_n = next_n;
    args.k = k;
    args.selected = selected.data();
    args.scratch = scratch.data();
    args.order = trial % 2 == 0 ? TopKOrder::by_position : TopKOrder::by_score;
    if (trial % 3 != 0) {
      args.page_table = table.data();
      args.max_pages = max_pages;
      args.tokens_per_page = tokens;
      args.page_count = 1000;
      args.translate = trial % 3 == 2;
    }
    const DeviceArray<std::int32_t> device_selected(selected), device_scratch(scratch), device_lengths(lengths), device_table(table);
    const DeviceArray<float> device_scores(scores);
    const DeviceCounts<TopKCounts> device_counts;
    TopKCounts counts;
    for (std::size_t row = 0; row < rows; ++row) counts += body::top_k(HostGroup<32>{}, static_cast<std::int64_t>(row), args);
    args.scores = device_scores.data();
    args.lengths = device_lengths.data();
    args.selected = device_selected.data();
    args.scratch = device_scratch.data();
    if (args.page_table != nullptr) args.page_table = device_table.data();
    cuda_ok(launch_generic_top_k(args, device_counts.data(), nullptr));
    CHECK(device_selected.read() == selected);
    CHECK(device_counts.value().nan_scores == counts.nan_scores);
    CHECK(device_counts.value().bad_pages == counts.bad_pages);
  }
  body::TopKArgs args;
  args.order = TopKOrder::by_score;
  CHECK(launch_generic_top_k(args, nullptr, nullptr) == cudaErrorInvalidValue);
}

TEST_CASE("cuda plain top-k: golden vectors") {
  for_each_golden("topk_", [](const Safetensors& file) {
    const auto want = file.at("indices").as<std::int32_t>();
    const DeviceArray<float> scores(file.at("scores").as<float>());
    const DeviceArray<std::int32_t> lengths(file.at("lens").as<std::int32_t>()), selected(std::vector<std::int32_t>(want.size(), 123456));
    body::TopKArgs args;
    args.scores = scores.data();
    args.stride = file.at("scores").shape[1];
    args.lengths = lengths.data();
    args.batch = static_cast<std::int32_t>(file.at("scores").shape[0]);
    args.k = file.meta_int("k");
    args.selected = selected.data();
    cuda_ok(launch_generic_top_k(args, nullptr, nullptr));
    CHECK(selected.read() == want);
  });
}
