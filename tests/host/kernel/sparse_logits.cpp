// SPDX-License-Identifier: Apache-2.0
#include <tests/support/key_case.hpp>

#include <doctest/doctest.h>

#include <algorithm>

#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>

using namespace kvire;
using namespace kvire_test;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float minus_infinity = -infinity;

// On bits: compilers may be told that there are no infinities.
bool is(float a, float b) { return bits_of(a) == bits_of(b); }
auto count_of(const std::vector<float>& values, float x) {
  return std::count_if(values.begin(), values.end(), [&](float v) { return is(v, x); });
}
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Every position against float64, what lies beyond a query token's view against the sentinel, and every level against the plain body.
template <class P>
void check_case(const KeyCase<P>& c) {
  const Scores plain = run_logits(c, SimdLevel::plain, test_stream());
  int wrong = 0;
  std::int64_t bad_pages = 0;
  for (int b = 0; b < c.batch; ++b) {
    std::int64_t longest = 0;
    for (int n = 0; n < c.next_n; ++n) {
      longest = std::max(longest, c.visible(b, n));
      for (std::int64_t s = 0; s < c.stride; ++s) {
        const float score = plain.values[static_cast<std::size_t>((std::int64_t(b) * c.next_n + n) * c.stride + s)];
        if (s >= c.visible(b, n)) {
          wrong += score != untouched;
          continue;
        }
        const Exact exact = exact_logit(c, b, n, s);
        wrong += exact.masked ? !is(score, minus_infinity) : !(std::fabs(score - exact.logit) <= 1e-5 * exact.magnitude);
      }
    }
    for (std::int64_t p = 0; p * P::tokens_per_page < longest; ++p) bad_pages += c.table[static_cast<std::size_t>(b * c.max_pages + p)] >= c.page_count;
  }
  CHECK(wrong == 0);
  CHECK(plain.counts.bad_pages == bad_pages);
  CHECK(plain.counts.nan_logits == 0);
  for (const SimdLevel level : levels()) {
    CAPTURE(name_of(level));
    const Scores other = run_logits(c, level, test_stream());
    CHECK(same_bits(other.values, plain.values));
    CHECK(other.counts.bad_pages == plain.counts.bad_pages);
    CHECK(other.counts.nan_logits == 0);
  }
}

template <class P>
void check_random_shapes(int count) {
  std::mt19937 random(20260729);
  const Element elements[] = {Element::e4m3, Element::bf16, Element::f32};
  const int heads[] = {1, 3, 6, 8, 13, 16};
  for (int i = 0; i < count; ++i) {
    CAPTURE(i);
    check_case(random_case<P>({.batch = 1 + static_cast<int>(random() % 4),
                               .next_n = 1 + static_cast<int>(random() % 4),
                               .heads = heads[random() % 6],
                               .max_pages = 1 + static_cast<int>(random() % 3),
                               .element = elements[random() % 3],
                               .per_query = random() % 3 == 0,
                               .holes_percent = random() % 2 == 0 ? 25 : 0},
                              random));
  }
}

// A case of one row whose keys are given, page 0 unused.
template <class P>
KeyCase<P> one_row(int tokens, Element element = Element::f32) {
  KeyCase<P> c;
  c.element = element;
  c.max_pages = ceil_div(tokens, P::tokens_per_page);
  c.stride = std::int64_t(c.max_pages) * P::tokens_per_page;
  c.page_count = c.max_pages + 1;
  c.pages.assign(static_cast<std::size_t>(P::page_bytes * c.page_count), std::byte{0});
  c.queries.resize(std::size_t{4} * P::dim);
  for (int d = 0; d < P::dim; ++d) c.set_query(d, 1.0F);
  c.weights = {1.0F};
  for (int p = 0; p < c.max_pages; ++p) c.table.push_back(p + 1);
  c.lengths = {tokens};
  return c;
}

}  // namespace

TEST_CASE("sparse logits: random shapes against float64, every level the same bits") {
  SUBCASE("fp8") { check_random_shapes<Fp8WithScale<64, 128>>(40); }
  SUBCASE("fp8 interleaved") { check_random_shapes<Fp8WithScaleInterleaved<16, 64>>(40); }
  SUBCASE("bf16") { check_random_shapes<Bf16Contiguous<32, 128>>(40); }
  SUBCASE("fp4") { check_random_shapes<Fp4WithScale<64, 128>>(40); }
  SUBCASE("pages of two tokens") { check_random_shapes<Bf16Contiguous<2, 64>>(60); }
  SUBCASE("several f32 scales a key") { check_random_shapes<Fp8WithScale<16, 128, 32>>(40); }
  SUBCASE("a dim that no vector divides") { check_random_shapes<Bf16Contiguous<8, 37>>(60); }
  SUBCASE("fields with and without scales") { check_random_shapes<preset::deepseek_v4::Latent<2>>(10); }
  SUBCASE("rows of three fields") { check_random_shapes<preset::deepseek_v3_2::Latent<4>>(8); }
}

TEST_CASE("sparse logits: a row depends on itself alone") {
  std::mt19937 random(3);
  using P = Fp8WithScale<64, 128>;
  const auto c = random_case<P>({.batch = 7, .next_n = 3, .heads = 10, .max_pages = 4, .element = Element::e4m3}, random);
  for (const SimdLevel level : levels()) {
    CAPTURE(name_of(level));
    const Scores all = run_logits(c, level, test_stream());
    for (int b = 0; b < c.batch; ++b) {
      // The row alone, in a wider table, one query token at a time.
      for (int n = 0; n < c.next_n; ++n) {
        KeyCase<P> one = c;
        one.batch = one.next_n = 1;
        one.lengths = {static_cast<std::int32_t>(c.visible(b, n))};
        one.table.assign(9, -1);
        std::copy_n(c.table.begin() + b * c.max_pages, c.max_pages, one.table.begin());
        one.max_pages = 9;
        one.stride = 9 * 64;
        const auto query = (b * c.next_n + n) * c.heads;
        one.weights.assign(c.weights.begin() + query, c.weights.begin() + query + c.heads);
        one.queries.assign(c.queries.begin() + query * P::dim, c.queries.begin() + (query + c.heads) * P::dim);
        const Scores alone = run_logits(one, level, test_stream());
        CHECK(std::memcmp(alone.values.data(), all.values.data() + (b * c.next_n + n) * c.stride, static_cast<std::size_t>(c.visible(b, n)) * 4) == 0);
      }
    }
  }
}

TEST_CASE("sparse logits: twenty runs, the same bits") {
  std::mt19937 random(4);
  const auto c = random_case<Fp4WithScale<64, 128>>({.batch = 5, .next_n = 2, .heads = 12, .max_pages = 5, .element = Element::bf16}, random);
  const Scores first = run_logits(c, best_level(), test_stream());
  for (int i = 0; i < 20; ++i) CHECK(same_bits(run_logits(c, best_level(), test_stream()).values, first.values));
}

TEST_CASE("sparse logits: no token beyond the length and no page beyond the last has influence") {
  std::mt19937 random(5);
  auto c = random_case<Fp8WithScale<64, 128>>({.batch = 6, .next_n = 2, .heads = 5, .max_pages = 3, .element = Element::bf16}, random);
  for (const SimdLevel level : levels()) {
    const Scores poisoned = run_logits(c, level, test_stream());
    auto other = c;
    // Page 0, pages that nobody owns, and tails of last pages: zero instead of 0xFF; page-table entries behind the last: garbage.
    std::vector<bool> used(static_cast<std::size_t>(c.page_count), false);
    for (int b = 0; b < c.batch; ++b) {
      const auto length = c.lengths[static_cast<std::size_t>(b)];
      for (int p = 0; p < c.max_pages; ++p) {
        auto& entry = other.table[static_cast<std::size_t>(b * c.max_pages + p)];
        if (p * 64 >= length) {
          entry = 0x7FFFFFFF;
          continue;
        }
        used[static_cast<std::size_t>(entry)] = true;
        for (int t = length - p * 64; t < 64; ++t) {
          if (t < 0) continue;
          std::memset(other.page(entry) + Fp8WithScale<64, 128>::offset<role::Value>(t), 0, 128);
          std::memset(other.page(entry) + Fp8WithScale<64, 128>::offset<role::Scale>(t), 0, 4);
        }
      }
    }
    for (int p = 0; p < c.page_count; ++p) {
      if (!used[static_cast<std::size_t>(p)]) std::memset(other.page(p), 0, Fp8WithScale<64, 128>::page_bytes);
    }
    const Scores clean = run_logits(other, level, test_stream());
    CHECK(same_bits(poisoned.values, clean.values));
    CHECK(clean.counts.bad_pages == 0);
  }
}

TEST_CASE("sparse logits: batches of empty rows write nothing") {
  std::mt19937 random(6);
  for (const int batch : {1, 31, 32, 33}) {
    auto c = random_case<Bf16Contiguous<64, 64>>({.batch = batch, .heads = 2, .max_pages = 2}, random);
    std::fill(c.lengths.begin(), c.lengths.end(), 0);
    for (const SimdLevel level : levels()) {
      const Scores out = run_logits(c, level, test_stream());
      CHECK(count_of(out.values, untouched) == static_cast<std::ptrdiff_t>(out.values.size()));
    }
    // One row that is not empty, among empty ones.
    std::fill(c.table.begin(), c.table.end(), -1);
    c.lengths[static_cast<std::size_t>(batch / 2)] = 65;
    const Scores out = run_logits(c, best_level(), test_stream());
    CHECK(count_of(out.values, minus_infinity) == 65);
  }
}

// A page can be taken for one of another order and the same size: 64 tokens with distinct keys and scales tell.
TEST_CASE("sparse logits: planar and interleaved pages, each with its own reader, agree on all 64 tokens") {
  using Planar = Fp8WithScale<64, 128>;
  using Interleaved = Fp8WithScaleInterleaved<64, 128>;
  static_assert(Planar::page_bytes == Interleaved::page_bytes);
  auto planar = one_row<Planar>(64, Element::bf16);
  auto interleaved = one_row<Interleaved>(64, Element::bf16);
  for (int d = 0; d < 128; ++d) {
    planar.set_query(d, static_cast<float>(1 + d % 5));
    interleaved.set_query(d, static_cast<float>(1 + d % 5));
  }
  for (int t = 0; t < 64; ++t) {
    const float scale = std::ldexp(1.0F, -(t % 8));
    for (int d = 0; d < 128; ++d) {
      const auto code = std::byte(0x20 + (t + 3 * d) % 64);
      planar.page(1)[Planar::offset<role::Value>(t) + d] = code;
      interleaved.page(1)[Interleaved::offset<role::Value>(t) + d] = code;
    }
    std::memcpy(planar.page(1) + Planar::offset<role::Scale>(t), &scale, 4);
    std::memcpy(interleaved.page(1) + Interleaved::offset<role::Scale>(t), &scale, 4);
  }
  for (const SimdLevel level : levels()) {
    const Scores a = run_logits(planar, level, test_stream());
    const Scores b = run_logits(interleaved, level, test_stream());
    CHECK(same_bits(a.values, b.values));
    // The wrong reader: bytes of one order through the policy of the other.
    auto mistaken = interleaved;
    mistaken.pages = planar.pages;
    const Scores wrong = run_logits(mistaken, level, test_stream());
    int differ = 0;
    for (int t = 0; t < 64; ++t) {
      const Exact exact = exact_logit(planar, 0, 0, t);
      CHECK(std::fabs(a.values[static_cast<std::size_t>(t)] - exact.logit) <= 1e-5 * exact.magnitude);
      differ += !is(wrong.values[static_cast<std::size_t>(t)], a.values[static_cast<std::size_t>(t)]);
    }
    CHECK(differ == 64);
  }
}

TEST_CASE("sparse logits: garbage in page 0 and invalid positions change nothing") {
  using P = Fp8WithScale<64, 128>;
  KeyCase<P> c;
  c.batch = 4, c.max_pages = 2, c.stride = 128, c.page_count = 4, c.heads = 2;
  c.pages.assign(static_cast<std::size_t>(P::page_bytes * 4), std::byte{0xFF});
  c.queries.resize(std::size_t{4} * 4 * 2 * 128);
  for (int i = 0; i < 4 * 2 * 128; ++i) c.set_query(i, 0.25F);
  c.weights.assign(8, 0.5F);
  c.table = {2, -1, -1, -1, 0, 0, 0, 0};  // the last two rows are padding
  c.lengths = {3, 0, 0, 0};
  float row[128];
  for (int t = 0; t < 3; ++t) {
    for (int d = 0; d < 128; ++d) row[d] = static_cast<float>(t + 1);
    encode_row<P>(row, c.page(2), t);
  }
  for (const SimdLevel level : levels()) {
    std::memset(c.page(0), 0xFF, P::page_bytes);
    const Scores poisoned = run_logits(c, level, test_stream());
    std::memset(c.page(0), 0, P::page_bytes);
    CHECK(same_bits(run_logits(c, level, test_stream()).values, poisoned.values));
    CHECK(poisoned.values[0] == doctest::Approx(32.0));
    CHECK(poisoned.values[2] == doctest::Approx(96.0));
    CHECK(count_of(poisoned.values, untouched) == 4 * 128 - 3);
    CHECK(poisoned.counts.nan_logits == 0);
  }
}

TEST_CASE("sparse logits: entries that name no page are not followed") {
  using P = Fp8WithScale<64, 128>;
  auto c = one_row<P>(5 * 64);
  float row[128];
  std::fill_n(row, 128, 1.0F);
  for (int t = 0; t < 64; ++t) encode_row<P>(row, c.page(2), t);
  c.table = {2, -1, c.page_count, 0x7FFFFFFF, std::numeric_limits<std::int32_t>::min()};
  for (const SimdLevel level : levels()) {
    const Scores out = run_logits(c, level, test_stream());
    for (std::size_t s = 0; s < 320; ++s) CHECK(is(out.values[s], s < 64 ? 128.0F : minus_infinity));
    CHECK(out.counts.bad_pages == 2);
    CHECK(out.counts.nan_logits == 0);
  }
}

TEST_CASE("sparse logits: a scale that is no power of two is used as it is stored") {
  using P = Fp8WithScale<64, 128>;
  auto c = one_row<P>(1, Element::e4m3);
  std::memset(c.page(1), 0x38, 128);
  const float scale = 3.0F;
  std::memcpy(c.page(1) + P::offset<role::Scale>(0), &scale, 4);
  for (const SimdLevel level : levels()) CHECK(run_logits(c, level, test_stream()).values[0] == 384.0F);
}

template <class P>
void check_special_keys() {
  auto c = one_row<P>(5);
  float rows[5][P::dim] = {};
  rows[1][7] = infinity;
  std::fill_n(rows[2], P::dim, std::ldexp(1.0F, -140));
  rows[3][9] = std::numeric_limits<float>::quiet_NaN();
  rows[4][0] = 2.0F;
  for (int t = 0; t < 5; ++t) encode_row<P>(rows[t], c.page(1), t);
  for (const SimdLevel level : levels()) {
    CAPTURE(name_of(level));
    const Scores out = run_logits(c, level, test_stream());
    CHECK(is(out.values[0], 0.0F));
    CHECK(is_finite(out.values[2]));
    CHECK(is(out.values[3], minus_infinity));
    CHECK(out.values[4] == doctest::Approx(2.0).epsilon(0.1));
    CHECK(out.counts.nan_logits == 1);
    CHECK(same_bits(out.values, run_logits(c, SimdLevel::plain, test_stream()).values));
  }
}

TEST_CASE("sparse logits: zero, infinite, tiny and NaN keys") {
  SUBCASE("fp8") { check_special_keys<Fp8WithScale<64, 128>>(); }
  SUBCASE("fp4") { check_special_keys<Fp4WithScale<64, 128>>(); }
  SUBCASE("bf16") { check_special_keys<Bf16Contiguous<64, 128>>(); }
  SUBCASE("fp8 with blocks") { check_special_keys<Fp8WithScale<64, 128, 64>>(); }
}

TEST_CASE("sparse logits: scales of zero, infinity, NaN and the smallest exponent") {
  auto fp8 = one_row<Fp8WithScale<64, 64>>(4);
  std::memset(fp8.page(1), 0x38, 4 * 64);
  const float scales[4] = {0.0F, infinity, std::numeric_limits<float>::quiet_NaN(), std::ldexp(1.0F, -149)};
  std::memcpy(fp8.page(1) + Fp8WithScale<64, 64>::offset<role::Scale>(0), scales, sizeof(scales));
  auto fp4 = one_row<Fp4WithScale<64, 64>>(4);
  std::memset(fp4.page(1), 0x22, 4 * 32);  // ones
  const unsigned char codes[8] = {0, 0, 254, 254, 255, 255, 1, 1};
  std::memcpy(fp4.page(1) + Fp4WithScale<64, 64>::offset<role::Scale>(0), codes, sizeof(codes));
  for (const SimdLevel level : levels()) {
    CAPTURE(name_of(level));
    const Scores a = run_logits(fp8, level, test_stream());
    CHECK(is(a.values[0], 0.0F));
    CHECK(is(a.values[1], infinity));
    CHECK(is(a.values[2], minus_infinity));
    CHECK(is(a.values[3], std::ldexp(1.0F, -143)));  // subnormals are kept
    CHECK(a.counts.nan_logits == 1);
    const Scores b = run_logits(fp4, level, test_stream());
    CHECK(is(b.values[0], std::ldexp(1.0F, -121)));
    CHECK(is(b.values[1], infinity));  // 64 * 2^127
    CHECK(is(b.values[2], minus_infinity));
    CHECK(is(b.values[3], std::ldexp(1.0F, -120)));
    CHECK(b.counts.nan_logits == 1);
  }
}

TEST_CASE("sparse logits: products that a multiplication would round, underflow or overflow") {
  // Queries and keys chosen so that multiply-then-add differs from fma, or leaves the range: every level takes the exact way.
  using P = Bf16Contiguous<16, 64>;
  std::mt19937 random(9);
  for (const int exponent : {-126, -70, -61, 0, 61, 100}) {
    auto c = random_case<P>({.batch = 2, .heads = 5, .max_pages = 2, .element = Element::f32}, random);
    c.lengths = {32, 32};
    for (int b = 0; b < 2; ++b) {
      for (int p = 0; p < 2; ++p) {
        c.table[static_cast<std::size_t>(b * 2 + p)] = 1 + b * 2 + p;
        for (int t = 0; t < 16; ++t) {
          float row[64];
          for (float& x : row) x = std::ldexp(static_cast<float>(random() % 511) - 255.0F, exponent);
          encode_row<P>(row, c.page(1 + b * 2 + p), t);
        }
      }
    }
    for (int i = 0; i < 2 * 5 * 64; ++i) c.set_query(i, std::ldexp(static_cast<float>(random() % 4095) - 2047.0F, -exponent / 2));
    const Scores plain = run_logits(c, SimdLevel::plain, test_stream());
    for (const SimdLevel level : levels()) {
      CAPTURE(name_of(level));
      CHECK(same_bits(run_logits(c, level, test_stream()).values, plain.values));
    }
  }
}

TEST_CASE("sparse logits: arguments out of bounds are errors that name value and bound, and nothing is queued") {
  using P = Fp8WithScale<64, 128>;
  std::mt19937 random(8);
  const auto good = random_case<P>({.batch = 2, .next_n = 2, .heads = 3, .max_pages = 2, .element = Element::bf16}, random);
  std::vector<float> out(static_cast<std::size_t>(4 * good.stride), untouched);
  const auto message = [&](const KeyCase<P>& c, auto&& change) {
    Queries queries = c.query_view();
    auto weights = c.weight_view();
    auto table = c.table_view();
    auto lengths = c.length_view();
    Tensor<float, 3> scores{out.data(), {2, 2, c.stride}};
    change(queries, weights, table, lengths, scores);
    const Status status = sparse_logits(queries, weights, assume_ready(c.view()), table, lengths, scores, test_stream());
    return status.ok() ? std::string() : status.error().message;
  };
  CHECK(message(good, [](auto&, auto&, auto&, auto&, auto&) {}) == "");
  test_stream().synchronize().value();
  std::fill(out.begin(), out.end(), untouched);

  CHECK(message(good, [](auto& q, auto&, auto&, auto&, auto&) { q.dim = 64; }) == "sparse_logits: queries have dim 64, keys of Fp8WithScale have 128");
  CHECK(message(good, [](auto& q, auto&, auto&, auto&, auto&) { q.element = Element::f16; }) == "sparse_logits: queries are f16, not e4m3, bf16 or f32");
  CHECK(message(good, [](auto& q, auto&, auto&, auto&, auto&) { q.data = nullptr; }) == "sparse_logits: queries has 1536 elements and no memory");
  CHECK(message(good, [](auto& q, auto&, auto&, auto&, auto&) { q.next_n = 0; }) == "sparse_logits: queries.next_n is 0, below 1");
  CHECK(message(good, [](auto& q, auto&, auto&, auto&, auto&) { q.heads = 0; }) == "sparse_logits: queries.heads is 0, below 1");
  CHECK(message(good, [](auto&, auto& w, auto&, auto&, auto&) { w.extent[2] = 4; }) == "sparse_logits: weights is [2][2][4], queries need [2][2][3]");
  CHECK(message(good, [](auto&, auto&, auto& t, auto&, auto&) { t.extent[0] = 1; }) == "sparse_logits: page_table is [1][2], queries need [2][2]");
  CHECK(message(good, [](auto&, auto&, auto&, auto& l, auto&) { l.extent[1] = 3; }) ==
        "sparse_logits: lengths is [2][3], one a row needs [2][1] and one a query token 2 of them");
  CHECK(message(good, [](auto&, auto&, auto&, auto&, auto& s) { s.extent[1] = 1; }).find("sparse_logits: scores is [2][1][") == 0);
  auto c = good;
  c.lengths = {129, 5};
  CHECK(message(c, [](auto&, auto&, auto&, auto&, auto&) {}) == "sparse_logits: lengths[0] is 129, above the 128 tokens of a page-table row");
  c.lengths = {100, 5};
  CHECK(message(c, [](auto&, auto&, auto&, auto&, auto& s) { s.extent[2] = 99; }) == "sparse_logits: lengths[0] is 100, above the 99 scores of a row");
  c.lengths = {4, -2};
  CHECK(message(c, [](auto&, auto&, auto&, auto&, auto&) {}) == "sparse_logits: lengths[1] is -2, below 0");
  test_stream().synchronize().value();
  CHECK(count_of(out, untouched) == static_cast<std::ptrdiff_t>(out.size()));

  // An empty batch is no error.
  CHECK(sparse_logits({nullptr, Element::f32, 0, 1, 4, 128}, {nullptr, {0, 1, 4}}, assume_ready(good.view()), {nullptr, {0, 2}}, {nullptr, {0, 1}},
                      {nullptr, {0, 1, 8}}, test_stream())
            .ok());
}

TEST_CASE("sparse logits: the lengths that were checked are the ones used") {
  using P = Bf16Contiguous<16, 64>;
  auto stream = Stream<Host>::make().value();
  std::mt19937 random(12);
  auto c = random_case<P>({.batch = 3, .heads = 2, .max_pages = 4}, random);
  const Scores before = run_logits(c, best_level(), test_stream());
  std::vector<float> out(before.values.size(), untouched);
  const auto gate = Event<Host>::make();
  stream.launch([&] { return gate.wait(deadline_in(std::chrono::seconds(30))); });
  sparse_logits(c.query_view(), c.weight_view(), assume_ready(c.view()), c.table_view(), c.length_view(), {out.data(), {3, 1, c.stride}}, stream).value();
  std::fill(c.lengths.begin(), c.lengths.end(), 1 << 30);
  gate.complete({});
  stream.synchronize().value();
  CHECK(same_bits(out, before.values));
}

TEST_CASE("sparse logits: the body gives the same bits and counts with any group") {
  using P = Fp8WithScale<16, 64>;
  std::mt19937 random(22);
  const auto c = random_case<P>({.batch = 3, .next_n = 2, .heads = 5, .max_pages = 4, .element = Element::bf16, .holes_percent = 30}, random);
  const Scores plain = run_logits(c, SimdLevel::plain, test_stream());
  std::vector<float> out(plain.values.size(), untouched);
  auto args = check_sparse_logits(P::name, P::dim, P::tokens_per_page, c.query_view(), c.weight_view(), c.table_view(), c.length_view(),
                                  {out.data(), {c.batch, c.next_n, c.stride}}, SimdLevel::plain)
                  .value();
  args.pages = c.pages.data();
  args.page_stride = P::page_bytes;
  args.page_count = c.page_count;
  std::int64_t bad_pages = 0;
  for (std::int64_t item = 0; item < c.batch * c.max_pages; ++item) bad_pages += body::sparse_logits<P>(HostGroup<32>{}, item, args).bad_pages;
  CHECK(same_bits(out, plain.values));
  CHECK(bad_pages == plain.counts.bad_pages);
}
