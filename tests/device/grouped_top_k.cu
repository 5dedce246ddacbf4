// SPDX-License-Identifier: Apache-2.0
#include <string>

#include <kvire/kernel/grouped_top_k.cuh>
#include <tests/support/device_rows.hpp>

namespace {

using namespace kvire_test;

// What the logits kernel leaves for a grouped selection: garbage beyond the lengths.
std::vector<std::uint32_t> group_best(const Rows& in, const std::vector<std::vector<char>>& masked = {}) {
  const int groups = (in.stride + 15) / 16;
  std::vector<std::uint32_t> best(std::size_t(in.rows * groups), 0xEEEEEEEEU);
  for (int r = 0; r < in.rows; ++r) {
    for (int g = 0; g * 16 < in.lengths[std::size_t(r)]; ++g) {
      std::uint32_t& most = best[std::size_t(r * groups + g)];
      most = 0;
      for (int i = g * 16; i < std::min(g * 16 + 16, in.lengths[std::size_t(r)]); ++i) {
        const float x = in.scores[std::size_t(r) * std::size_t(in.stride) + std::size_t(i)];
        if (std::isnan(x) || (!masked.empty() && masked[std::size_t(r)][std::size_t(i)] != 0)) continue;
        most = std::max(most, kvire::order_key(x));
      }
    }
  }
  return best;
}

std::vector<std::int32_t> select_grouped(const Rows& in, int k, int blocks = 1, bool by_score = false) {
  const DeviceRows rows(in, k, by_score);
  const DeviceArray<std::uint32_t> best(group_best(in));
  cuda_ok(kvire::launch_grouped_top_k(rows.args, best.data(), nullptr, nullptr, true, blocks));
  return rows.selected.read();
}

}  // namespace

TEST_CASE("cuda grouped top-k: every length and distribution against a sort") {
  const std::vector<int> lengths = full() ? std::vector<int>{1, 31, 512, 513, 4000, 8192, 20001, 32768, 70001, 131068} : std::vector<int>{20001, 513, 40000};
  for (int kind = 0; kind < int(Kind::count); ++kind) {
    for (const int length : some(lengths, kind)) {
      const Rows in = make(Kind(kind), 2, length, unsigned(kind * 1000 + length));
      for (const int k : some({1, 512, 1024})) {
        const auto want = expected(in, k);
        for (const int blocks : {1, 2, 8}) {
          const std::string what = std::string(name(Kind(kind))) + " length " + std::to_string(length) + " k " + std::to_string(k) + " blocks " + std::to_string(blocks);
          CHECK_MESSAGE(select_grouped(in, k, blocks) == want, what);
          if (length == 20001) CHECK_MESSAGE(select_grouped(in, k, blocks, true) == expected(in, k, true), what << " by score");
        }
      }
    }
  }
}

TEST_CASE("cuda grouped top-k: what is selected stands side by side, and on every run the same is selected") {
  Rows in = make(Kind::normal, 2, 32768, 11);
  for (int i = 0; i < 2048; ++i) {
    in.scores[std::size_t(20000 + i)] += 6;
    in.scores[std::size_t(in.stride) + std::size_t(i % 600) * 16] += 9;  // one of each group
  }
  const auto want = expected(in, 512);
  for (int run = 0; run < (full() ? 20 : 3); ++run) {
    for (const int blocks : {1, 2, 4, 8}) CHECK_MESSAGE(select_grouped(in, 512, blocks) == want, "blocks " << blocks << " run " << run);
  }
}

TEST_CASE("cuda grouped top-k: ragged lengths, and pages that are -1 with slots for positions") {
  Rows in = make(Kind::normal, 40, 5000, 3);
  for (int r = 0; r < 40; ++r) in.lengths[std::size_t(r)] = r * r * 3;
  CHECK(select_grouped(in, 512) == expected(in, 512));

  const int tokens = 64, length = 20001, pages = (length + tokens - 1) / tokens;
  in = make(Kind::eighths, 2, length, 4);
  std::vector<std::int32_t> table;
  std::vector<std::vector<char>> masked(2, std::vector<char>(std::size_t(length)));
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < pages; ++i) {
      table.push_back(i % 5 == 2 ? -1 : (i * 7 + r) % 5000);
      for (int j = i * tokens; i % 5 == 2 && j < std::min(length, (i + 1) * tokens); ++j) masked[std::size_t(r)][std::size_t(j)] = 1;
    }
  }
  DeviceRows rows(in, 512);
  const DeviceArray<std::int32_t> page_table(table);
  const DeviceArray<std::uint32_t> best(group_best(in, masked));
  rows.args.page_table = page_table.data();
  rows.args.max_pages = pages;
  rows.args.tokens_per_page = tokens;
  rows.args.page_count = 5000;
  rows.args.translate = true;
  cuda_ok(kvire::launch_grouped_top_k(rows.args, best.data(), nullptr, nullptr, false));
  const auto got = rows.selected.read();
  for (int r = 0; r < 2; ++r) {
    auto want = expected(in.scores.data() + std::size_t(r) * std::size_t(in.stride), length, 512, false, masked[std::size_t(r)]);
    for (auto& i : want) i = i < 0 ? i : table[std::size_t(r * pages + i / tokens)] * tokens + i % tokens;
    CHECK(std::equal(want.begin(), want.end(), got.begin() + std::ptrdiff_t(r) * 512));
  }
}

