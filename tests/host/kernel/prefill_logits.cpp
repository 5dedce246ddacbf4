// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <kvire/layout/policies.hpp>
#include <tests/support/prefill_case.hpp>

using namespace kvire;
using namespace kvire_test;

namespace {

template <class P>
ContiguousKeys<P> contiguous(const std::vector<std::vector<std::byte>>& planes, std::int64_t tokens) {
  ContiguousKeys<P> keys;
  for (std::size_t i = 0; i < planes.size(); ++i) keys.planes[i] = planes[i].data();
  keys.tokens = tokens;
  return keys;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  int differ = 0;
  for (std::size_t i = 0; i < a.size(); ++i) differ += bits_of(a[i]) != bits_of(b[i]);
  return a.size() == b.size() && differ == 0;
}

template <class P>
void check_policy(Element element) {
  INFO(std::string(P::name));
  std::mt19937 random{31};
  for (int trial = 0; trial < 8; ++trial) {
    const int holes = trial % 2 == 0 ? 0 : 30;
    const auto c = random_prefill<P>(1 + trial * 2, 3, 4, element, holes, random);
    const Scores want = decoded(c);
    std::vector<float> got(want.values.size(), untouched);
    LogitsCounts counts;
    prefill_logits<P>(c.queries(), c.weights(), assume_ready(c.keys.view()), c.table(), c.starts_view(), c.ends_view(), {got.data(), {c.rows(), c.keys.stride}},
                      test_stream(), {.counts = &counts})
        .value();
    test_stream().synchronize().value();
    CHECK(same_bits(got, want.values));
    std::int64_t bad = 0;
    for (int row = 0; row < c.rows(); ++row) {
      for (int p = 0; p < c.keys.max_pages; ++p) {
        bool seen = false;
        for (int t = 0; t < P::tokens_per_page; ++t) seen = seen || c.sees(row, p * P::tokens_per_page + t);
        bad += seen && c.keys.table[static_cast<std::size_t>(p)] >= c.keys.page_count ? 1 : 0;
      }
    }
    CHECK(counts.bad_pages == bad);
    if (holes > 0) continue;

    const auto planes = c.planes();
    std::fill(got.begin(), got.end(), untouched);
    prefill_logits(c.queries(), c.weights(), contiguous<P>(planes, c.longest()), c.starts_view(), c.ends_view(), {got.data(), {c.rows(), c.keys.stride}}, test_stream()).value();
    test_stream().synchronize().value();
    CHECK(same_bits(got, want.values));

    std::vector<std::uint16_t> codes(got.size(), 0xABCD);
    prefill_logits(c.queries(), c.weights(), contiguous<P>(planes, c.longest()), c.starts_view(), c.ends_view(),
                   ScoreTensor<2>::bf16({codes.data(), {c.rows(), c.keys.stride}}), test_stream())
        .value();
    test_stream().synchronize().value();
    int wrong = 0;
    for (std::size_t i = 0; i < codes.size(); ++i) wrong += codes[i] != (got[i] == untouched ? 0xABCD : bf16_from_bits(bits_of(got[i])));
    CHECK(wrong == 0);
  }
}

}  // namespace

TEST_CASE("prefill logits: the bits of a decode of each row, within its range and nowhere else") {
  check_policy<Fp8WithScale<16, 64>>(Element::e4m3);
  check_policy<Fp8WithScaleInterleaved<16, 64>>(Element::f32);
  check_policy<Bf16Contiguous<16, 64>>(Element::bf16);
  check_policy<Fp4WithScale<16, 64>>(Element::bf16);
}

TEST_CASE("prefill logits: ranges out of bounds are errors that name value and bound") {
  using P = Bf16Contiguous<16, 64>;
  std::mt19937 random{5};
  auto c = random_prefill<P>(2, 3, 2, Element::f32, 0, random);
  c.keys.lengths = {32, 20};
  c.starts = {0, 3};
  std::vector<float> out(static_cast<std::size_t>(2 * c.keys.stride), untouched);
  const auto message = [&](std::int64_t stride, std::int64_t pages) {
    const Status status = prefill_logits<P>(c.queries(), c.weights(), assume_ready(c.keys.view()), {c.keys.table.data(), {pages}}, c.starts_view(), c.ends_view(),
                                            {out.data(), {2, stride}}, test_stream());
    return status.ok() ? std::string() : status.error().message;
  };
  CHECK(message(31, 2) == "prefill_logits: ends[0] is 32, above the 31 scores of a row");
  CHECK(message(32, 1) == "prefill_logits: ends[0] is 32, above the 16 keys");
  c.starts = {0, -3};
  CHECK(message(32, 2) == "prefill_logits: starts[1] is -3, below 0");
  c.starts = {40, 30};
  c.keys.lengths = {39, 30};
  CHECK(message(32, 2) == "");  // empty ranges, wherever they are
  const ContiguousKeys<P> none{{nullptr}, 8};
  const Status status = prefill_logits(c.queries(), c.weights(), none, c.starts_view(), c.ends_view(), {out.data(), {2, 32}}, test_stream());
  CHECK(status.error().message == "prefill_logits: keys have 8 tokens and no memory for plane 0");
  test_stream().synchronize().value();
  CHECK(std::count(out.begin(), out.end(), untouched) == static_cast<std::ptrdiff_t>(out.size()));
}

TEST_CASE("sparse logits: bf16 scores are the f32 scores, rounded") {
  using P = Fp8WithScale<16, 64>;
  std::mt19937 random{6};
  const auto c = random_case<P>({.batch = 3, .next_n = 2, .heads = 5, .max_pages = 4, .element = Element::bf16, .holes_percent = 20}, random);
  for (const SimdLevel level : levels()) {
    const Scores exact = run_logits(c, level, test_stream());
    std::vector<std::uint16_t> codes(exact.values.size(), 0xABCD);
    sparse_logits(c.query_view(), c.weight_view(), assume_ready(c.view()), c.table_view(), c.length_view(),
                  ScoreTensor<3>::bf16({codes.data(), {c.batch, c.next_n, c.stride}}), test_stream(), {.level = level})
        .value();
    test_stream().synchronize().value();
    int wrong = 0;
    for (std::size_t i = 0; i < codes.size(); ++i) wrong += codes[i] != (exact.values[i] == untouched ? 0xABCD : bf16_from_bits(bits_of(exact.values[i])));
    CHECK(wrong == 0);
  }
}

TEST_CASE("sparse logits: listed blocks score as the same positions of the whole row, -inf where unseen") {
  using P = Fp8WithScale<16, 64>;
  std::mt19937 random{8};
  for (int trial = 0; trial < 6; ++trial) {
    const auto c = random_case<P>({.batch = 3, .next_n = 2, .heads = 3, .max_pages = 6, .element = Element::e4m3, .per_query = trial % 2 == 0, .holes_percent = 20}, random);
    const Scores whole = run_logits(c, best_level(), test_stream());
    constexpr int listed = 4;
    std::vector<std::int32_t> blocks;
    for (int i = 0; i < c.batch * listed; ++i) blocks.push_back(static_cast<std::int32_t>(random() % 8) - 1);  // -1 to max_pages
    const std::int64_t stride = listed * P::tokens_per_page;
    std::vector<float> got(static_cast<std::size_t>(c.batch * c.next_n * stride), untouched);
    LogitsCounts counts;
    sparse_logits(c.query_view(), c.weight_view(), assume_ready(c.view()), c.table_view(), c.length_view(), {got.data(), {c.batch, c.next_n, stride}}, test_stream(),
                  {.blocks = {blocks.data(), {c.batch, listed}}, .counts = &counts})
        .value();
    test_stream().synchronize().value();
    int wrong = 0;
    for (int b = 0; b < c.batch; ++b) {
      for (int n = 0; n < c.next_n; ++n) {
        for (std::int64_t i = 0; i < stride; ++i) {
          const std::int64_t position = blocks[static_cast<std::size_t>(b * listed + i / P::tokens_per_page)] * std::int64_t(P::tokens_per_page) + i % P::tokens_per_page;
          const bool seen = position >= 0 && position < c.visible(b, n);
          const float want = seen ? whole.values[static_cast<std::size_t>((b * c.next_n + n) * c.stride + position)] : float_of(infinity_bits | sign_bit);
          wrong += bits_of(got[static_cast<std::size_t>((b * c.next_n + n) * stride + i)]) != bits_of(want);
        }
      }
    }
    CHECK(wrong == 0);
  }
}
