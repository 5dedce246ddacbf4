// SPDX-License-Identifier: Apache-2.0
// Listed blocks and bf16 scores on the GPU: the host's bits.
#include <random>

#include <doctest/doctest.h>

#include <kvire/kernel/sparse_logits.cuh>
#include <kvire/layout/policies.hpp>
#include <tests/support/device_array.hpp>
#include <tests/support/key_case.hpp>

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
