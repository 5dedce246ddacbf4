// SPDX-License-Identifier: Apache-2.0
// Listed blocks and bf16 scores on the GPU: from the plain kernel the host's bits, from tuned ones those of whole rows in f32.
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvire/kernel/sparse_logits.cuh>
#include <kvire/layout/policies.hpp>
#include <tests/support/device_array.hpp>
#include <tests/support/key_case.hpp>
#include <tests/support/leased_logits.hpp>

using namespace kvire;
using namespace kvire_test;

TEST_CASE("cuda logits of listed blocks, f32 and bf16, have the host's bits and counts") {
  using P = Fp8WithScale<16, 64>;
  std::mt19937 random{8};
  auto stream = Stream<Cuda>::make().value();
  for (int trial = 0; trial < 6; ++trial) {
    auto c = random_case<P>({.batch = 3, .next_n = 2, .heads = 3, .max_pages = 6, .element = Element::e4m3, .per_query = trial % 2 == 0, .holes_percent = 20}, random);
    constexpr int listed = 5;
    std::vector<std::int32_t> blocks;
    for (int i = 0; i < c.batch * listed; ++i) blocks.push_back(static_cast<std::int32_t>(random() % 8) - 1);
    const std::int64_t stride = listed * P::tokens_per_page;
    const auto words = static_cast<std::size_t>(c.batch * c.next_n * stride);
    std::vector<float> want(words, untouched);
    std::vector<std::uint16_t> want_codes(words, 0xABCD);
    LogitsCounts counts;
    sparse_logits(c.query_view(), c.weight_view(), assume_ready(c.view()), c.table_view(), c.length_view(), {want.data(), {c.batch, c.next_n, stride}}, test_stream(),
                  {.blocks = {blocks.data(), {c.batch, listed}}, .counts = &counts})
        .value();
    sparse_logits(c.query_view(), c.weight_view(), assume_ready(c.view()), c.table_view(), c.length_view(),
                  ScoreTensor<3>::bf16({want_codes.data(), {c.batch, c.next_n, stride}}), test_stream(), {.blocks = {blocks.data(), {c.batch, listed}}})
        .value();
    test_stream().synchronize().value();

    const DeviceArray<std::byte> pages(c.pages), queries(c.queries);
    const DeviceArray<float> weights(c.weights), scores(std::vector<float>(words, untouched));
    const DeviceArray<std::uint16_t> codes(std::vector<std::uint16_t>(words, 0xABCD));
    const DeviceArray<std::int32_t> table(c.table), lengths(c.lengths), list(blocks);
    const DeviceCounts<LogitsCounts> found;
    const ConstPageView<P, Cuda> view{pages.data(), P::page_bytes, c.page_count};
    Queries q = c.query_view();
    q.data = queries.data();
    const auto run = [&](const ScoreTensor<3>& out, LogitsCounts* count) {
      KernelServed served;
      sparse_logits(q, {weights.data(), {c.batch, c.next_n, c.heads}}, assume_ready(view), {table.data(), {c.batch, c.max_pages}},
                    {lengths.data(), {c.batch, c.per_query ? c.next_n : 1}}, out, stream,
                    {.counts = count, .served = &served, .blocks = {list.data(), {c.batch, listed}}})
          .value();
      CHECK_FALSE(served.tuned);
    };
    run({scores.data(), {c.batch, c.next_n, stride}}, found.data());
    run(ScoreTensor<3>::bf16({codes.data(), {c.batch, c.next_n, stride}}), nullptr);
    const auto got = scores.read();
    int differ = 0;
    for (std::size_t i = 0; i < words; ++i) differ += bits_of(got[i]) != bits_of(want[i]);
    CHECK(differ == 0);
    CHECK(codes.read() == want_codes);
    CHECK(found.value().nan_logits == counts.nan_logits);
    CHECK(found.value().bad_pages == counts.bad_pages);
  }
}

namespace {

/// Rows with bad ids, a length beyond the page table, and for fp4 blocks that e4m3 operands lose.
template <class P, int NextN>
LogitsCase hard_case(Element query) {
  auto c = random_case<P>(17, {700, 64, 0, 1, 129, 2048}, NextN, 64, query);
  c.table[1] = c.pages;
  c.table[static_cast<std::size_t>(5 * c.table_stride + 2)] = 0x7FFFFFFF;
  c.lengths[5] += 3000;
  if (NextN > 1) {
    c.lengths_per_query = true;
    const std::vector<std::int32_t> rows = c.lengths;
    c.lengths.clear();
    for (std::size_t row = 0; row < rows.size(); ++row)
      for (int q = 0; q < NextN; ++q) c.lengths.push_back(std::max(0, rows[row] - 70 * ((q + static_cast<int>(row)) % NextN)));
  }
  if constexpr (P::template element_of<role::Value> == Element::e2m1) {
    std::mt19937 random(4);
    for (std::size_t at = 0; at < c.memory.size(); ++at) {
      const auto in_page = static_cast<std::int64_t>(at) % c.page_stride;
      if (in_page >= P::template offset<role::Scale>(0) && in_page < P::page_bytes && c.memory[at] != 255 && random() % 3 == 0) c.memory[at] = static_cast<std::uint8_t>(80 + random() % 60);
    }
  }
  return c;
}

template <class P, int NextN>
void check_options(Element query, CudaSparseLogitsOptions options, const std::string& by) {
  INFO(std::string(P::name) << " of " << P::tokens_per_page << " tokens, " << NextN << " query tokens, " << by);
  using Tuned = TunedLogits<64, NextN>;
  constexpr float infinity = std::numeric_limits<float>::infinity();
  constexpr auto untouched_code = static_cast<std::uint16_t>(untouched_byte * 0x101);
  constexpr std::uint32_t untouched_bits = untouched_byte * 0x1010101U;
  const auto c = hard_case<P, NextN>(query);
  const DeviceCounts<LogitsCounts> counts, plain_counts;
  options.counts = counts.data();

  Leased<P> whole(c);
  const auto scores = whole.template run<float, Tuned>(options, by);
  whole.template run<float, Tuned>({.counts = plain_counts.data(), .kernel = KernelChoice::plain}, "plain sparse logits");
  CHECK(counts.value().bad_pages == plain_counts.value().bad_pages);
  CHECK(counts.value().nan_logits == plain_counts.value().nan_logits);
  CHECK(counts.value().bad_pages > 0);
  const auto codes = whole.template run<std::uint16_t, Tuned>(options, by);
  int wrong = 0;
  for (std::size_t i = 0; i < scores.size(); ++i)
    wrong += codes[i] != (bits_of(scores[i]) == untouched_bits ? untouched_code : bf16_from_bits(bits_of(scores[i])));
  CHECK(wrong == 0);

  // Blocks in any order, some twice, some nowhere, and an odd number of them.
  BlockList list{11, {}};
  std::mt19937 random(6);
  for (int i = 0; i < c.batch * list.max; ++i) list.entries.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned>(c.table_stride + 3)) - 1);
  list.entries[3] = 0x7FFFFFFF;
  list.entries[5] = 1;  // where the id is a bad one
  Leased<P> some(c, list);
  const auto before = counts.value(), plain_before = plain_counts.value();
  const auto listed = some.template run<float, Tuned>(options, by);
  const auto plain = some.template run<float, Tuned>({.counts = plain_counts.data(), .kernel = KernelChoice::plain}, "plain sparse logits");
  CHECK(counts.value().bad_pages - before.bad_pages == plain_counts.value().bad_pages - plain_before.bad_pages);
  CHECK(counts.value().nan_logits - before.nan_logits == plain_counts.value().nan_logits - plain_before.nan_logits);
  CHECK(counts.value().bad_pages > before.bad_pages);
  const auto listed_codes = some.template run<std::uint16_t, Tuned>(options, by);
  int other = 0, other_codes = 0, infinite = 0;
  for (int row = 0; row < c.batch; ++row) {
    for (int q = 0; q < NextN; ++q) {
      for (std::int64_t i = 0; i < some.stride(); ++i) {
        const std::int64_t entry = list.entries[static_cast<std::size_t>(row * list.max + i / P::tokens_per_page)];
        const std::int64_t position = entry * P::tokens_per_page + i % P::tokens_per_page;
        const bool seen = entry >= 0 && entry < c.table_stride && position < c.visible(row, q);
        const auto at = static_cast<std::size_t>((row * NextN + q) * some.stride() + i);
        const float want = seen && position < c.logits_stride ? scores[static_cast<std::size_t>((row * NextN + q) * c.logits_stride + position)] : -infinity;
        if (!seen || position < c.logits_stride) other += bits_of(listed[at]) != bits_of(want);
        other_codes += listed_codes[at] != bf16_from_bits(bits_of(listed[at]));
        infinite += (listed[at] == -infinity) != (plain[at] == -infinity);
      }
    }
  }
  CHECK(other == 0);
  CHECK(other_codes == 0);
  CHECK(infinite == 0);
}

template <class P, int NextN>
void check_tuned_options(Element query) {
  if (is_hopper()) check_options<P, NextN>(query, {.kernel = KernelChoice::tuned}, "sm_90a sparse logits");
  check_options<P, NextN>(query, {.kernel = KernelChoice::tuned, .portable = true}, "sm_80 sparse logits");
}

}  // namespace

TEST_CASE("cuda logits by tuned kernels: listed blocks and bf16 scores have the bits of whole rows in f32") {
  check_tuned_options<Fp8WithScale<64, 128>, 1>(Element::e4m3);
  check_tuned_options<Fp8WithScale<64, 128>, 2>(Element::e4m3);
  check_tuned_options<Fp8WithScale<32, 128>, 3>(Element::e4m3);
  check_tuned_options<Fp8WithScale<128, 64>, 2>(Element::e4m3);
  check_tuned_options<Bf16Contiguous<64, 128>, 1>(Element::bf16);
  check_tuned_options<Bf16Contiguous<32, 128>, 2>(Element::bf16);
  check_tuned_options<Fp4WithScale<64, 128>, 1>(Element::e4m3);
}
