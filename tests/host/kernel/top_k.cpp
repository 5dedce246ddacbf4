// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <kvire/kernel/top_k.hpp>

using namespace kvire;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan_score = std::numeric_limits<float>::quiet_NaN();
constexpr float negative_nan = float_of(0xFFC00000U);
constexpr std::int32_t unwritten = 123456;

Stream<Host>& stream() {
  static auto s = Stream<Host>::make().value();
  return s;
}

struct Rows {
  int batch = 1, next_n = 1;
  std::int64_t stride = 0;
  std::vector<float> scores;
  std::vector<std::int32_t> lengths;
  Tensor<const float, 3> score_view() const { return {scores.data(), {batch, next_n, stride}}; }
  Tensor<const std::int32_t, 2> length_view() const { return {lengths.data(), {batch, static_cast<std::int64_t>(lengths.size()) / batch}}; }
};

Rows one_row(std::vector<float> scores, int length) {
  Rows r;
  r.stride = static_cast<std::int64_t>(scores.size());
  r.scores = std::move(scores);
  r.lengths = {length};
  return r;
}

std::vector<std::int32_t> select(const Rows& r, int k, TopKOptions options = {}) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(r.batch * r.next_n * k), unwritten);
  top_k(r.score_view(), r.length_view(), {out.data(), {r.batch, r.next_n, k}}, stream(), options).value();
  stream().synchronize().value();
  return out;
}

// Where a score stands among the others; -0 beside +0. On integers, so that the test holds under any floating-point flags and modes.
std::int64_t place(float x) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, &x, 4);
  const auto magnitude = static_cast<std::int64_t>(bits & 0x7FFFFFFFU);
  return (bits >> 31) != 0 ? -magnitude : magnitude;
}

// By a full sort, sharing nothing with the kernels.
std::vector<std::int32_t> sorted_answer(const Rows& r, int row, std::int64_t length, int k, TopKOrder order, const std::vector<bool>& masked = {}) {
  const float* scores = r.scores.data() + row * r.stride;
  std::vector<std::int32_t> all;
  for (std::int32_t i = 0; i < length; ++i) {
    if (!is_nan(scores[i]) && (masked.empty() || !masked[static_cast<std::size_t>(i)])) all.push_back(i);
  }
  std::stable_sort(all.begin(), all.end(), [&](auto a, auto b) { return place(scores[a]) > place(scores[b]); });
  if (static_cast<int>(all.size()) > k) all.resize(static_cast<std::size_t>(k));
  if (order == TopKOrder::by_position) std::sort(all.begin(), all.end());
  all.resize(static_cast<std::size_t>(k), -1);
  return all;
}

const SimdLevel both[] = {SimdLevel::plain, SimdLevel::baseline};

}  // namespace

TEST_CASE("top-k: random rows against a full sort") {
  std::mt19937 random(11);
  for (int round = 0; round < 150; ++round) {
    CAPTURE(round);
    Rows r;
    r.batch = 1 + static_cast<int>(random() % 4);
    r.next_n = 1 + static_cast<int>(random() % 4);
    r.stride = 1 + static_cast<int>(random() % 400);
    const bool per_query = random() % 2 == 0;
    for (int i = 0; i < r.batch * (per_query ? r.next_n : 1); ++i) r.lengths.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned>(r.stride + 1)));
    std::normal_distribution<float> normal;
    const auto kind = random() % 4;
    for (std::int64_t i = 0; i < r.batch * r.next_n * r.stride; ++i) {
      float x = normal(random);
      if (kind == 1) x = static_cast<float>(static_cast<int>(random() % 3)) - 1;                                 // many ties
      if (kind == 2) x = random() % 2 == 0 ? 0.0F : -0.0F;                                                       // one value
      if (kind == 3) x = float_of(static_cast<std::uint32_t>(random()));                                         // any bits: NaN, subnormals, infinities
      r.scores.push_back(x);
    }
    const int k = 1 + static_cast<int>(random() % 80);
    for (const SimdLevel level : both) {
      for (const TopKOrder order : {TopKOrder::by_position, TopKOrder::by_score}) {
        TopKCounts counts;
        const auto out = select(r, k, {.order = order, .counts = &counts, .level = level});
        std::int64_t nans = 0;
        for (int row = 0; row < r.batch * r.next_n; ++row) {
          const std::int64_t length = per_query ? r.lengths[static_cast<std::size_t>(row)]
                                                : std::max(0, r.lengths[static_cast<std::size_t>(row / r.next_n)] - (r.next_n - 1 - row % r.next_n));
          const auto want = sorted_answer(r, row, length, k, order);
          CHECK(std::equal(want.begin(), want.end(), out.begin() + row * k));
          for (std::int64_t i = 0; i < length; ++i) nans += is_nan(r.scores[static_cast<std::size_t>(row * r.stride + i)]);
        }
        CHECK(counts.nan_scores == nans);
      }
    }
  }
}

TEST_CASE("top-k: thousands of equal scores") {
  std::vector<float> scores(8320, 0.0F);
  std::vector<std::int32_t> winners;
  for (int i = 0; i < 100; ++i) {
    winners.push_back((i * 4001) % 8320);
    scores[static_cast<std::size_t>(winners.back())] = 1.0F + static_cast<float>(i);
  }
  for (std::size_t i = 0; i < scores.size(); i += 2) {
    if (scores[i] == 0.0F) scores[i] = -0.0F;
  }
  const Rows r = one_row(scores, 8320);
  for (const SimdLevel level : both) {
    const auto out = select(r, 2048, {.level = level});
    CHECK(out == sorted_answer(r, 0, 8320, 2048, TopKOrder::by_position));
    for (const auto w : winners) CHECK(std::binary_search(out.begin(), out.end(), w));
    CHECK(std::adjacent_find(out.begin(), out.end(), std::greater_equal<>()) == out.end());
    CHECK(out.front() >= 0);
  }
}

TEST_CASE("top-k: distinct scores that share their upper bits, twenty runs") {
  for (const int n : {16384, 20480}) {
    std::vector<int> order(static_cast<std::size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(5));
    std::vector<float> scores;
    for (const int i : order) scores.push_back(1.0F + std::ldexp(static_cast<float>(i), -23));
    const Rows r = one_row(scores, n);
    for (int run = 0; run < 20; ++run) {
      const auto out = select(r, 2048);
      int wrong = 0;
      for (const auto i : out) wrong += order[static_cast<std::size_t>(i)] < n - 2048;
      CHECK(wrong == 0);
      CHECK(std::adjacent_find(out.begin(), out.end(), std::greater_equal<>()) == out.end());
    }
    CHECK(select(r, 2048, {.level = SimdLevel::plain}) == select(r, 2048));
  }
}

TEST_CASE("top-k: a million columns") {
  std::vector<float> scores(1 << 20);
  std::mt19937 random(6);
  for (float& x : scores) x = 1.0F + std::ldexp(static_cast<float>(random() % 4096), -23);
  const Rows r = one_row(scores, 1 << 20);
  CHECK(select(r, 2048) == sorted_answer(r, 0, 1 << 20, 2048, TopKOrder::by_position));
}

TEST_CASE("top-k: rows shorter than k list all, then -1") {
  std::vector<float> scores(64);
  for (std::size_t i = 0; i < 64; ++i) scores[i] = static_cast<float>(i * 37 % 64);
  for (const int k : {1, 2048, 2051}) {
    for (const int length : {64, 63, 1, 0}) {
      const Rows r = one_row(scores, length);
      for (const SimdLevel level : both) {
        const auto out = select(r, k, {.level = level});
        CHECK(out == sorted_answer(r, 0, length, k, TopKOrder::by_position));
        CHECK(std::count(out.begin(), out.end(), -1) == std::max(0, k - length));
      }
    }
  }
}

TEST_CASE("top-k: k = 0 and other arguments out of bounds are errors that name value and bound") {
  std::vector<float> scores(8);
  std::vector<std::int32_t> lengths{8}, out(4), table{1, 2};
  const auto message = [&](Tensor<const float, 3> s, Tensor<const std::int32_t, 2> l, Tensor<std::int32_t, 3> o, TopKOptions options = {}) {
    const Status status = top_k(s, l, o, stream(), options);
    return status.ok() ? std::string() : status.error().message;
  };
  const Tensor<const float, 3> s{scores.data(), {1, 1, 8}};
  const Tensor<const std::int32_t, 2> l{lengths.data(), {1, 1}};
  CHECK(message(s, l, {out.data(), {1, 1, 0}}) == "top_k: k is 0, below 1");
  CHECK(message(s, l, {out.data(), {2, 1, 2}}) == "top_k: selected is [2][1][2], scores need [1][1][2]");
  CHECK(message(s, l, {nullptr, {1, 1, 2}}) == "top_k: selected has 2 elements and no memory");
  CHECK(message(s, {lengths.data(), {2, 1}}, {out.data(), {1, 1, 2}}) == "top_k: lengths is [2][1], one a row needs [1][1] and one a query token 1 of them");
  CHECK(message(s, l, {out.data(), {1, 1, 2}}, {.translate = true}) == "top_k: translate needs a page table");
  CHECK(message(s, l, {out.data(), {1, 1, 2}}, {.page_table = {table.data(), {1, 2}}, .tokens_per_page = 2}) ==
        "top_k: lengths[0] is 8, above the 4 tokens of a page-table row");
  CHECK(message(s, l, {out.data(), {1, 1, 2}}, {.page_table = {table.data(), {1, 2}}}) == "top_k: tokens_per_page is 0, below 1");
  lengths[0] = 9;
  CHECK(message(s, l, {out.data(), {1, 1, 2}}) == "top_k: lengths[0] is 9, above the 8 scores of a row");
  lengths[0] = -1;
  CHECK(message(s, l, {out.data(), {1, 1, 2}}) == "top_k: lengths[0] is -1, below 0");
  CHECK(!top_k<512>(s, l, {out.data(), {1, 1, 4}}, stream()).ok());
}

TEST_CASE("top-k: -inf may be selected, NaN never; the tail is not read") {
  std::vector<float> scores(128, infinity);
  for (std::size_t i = 0; i < 100; ++i) scores[i] = i % 10 == 3 ? static_cast<float>(i) : -infinity;
  for (const SimdLevel level : both) {
    TopKCounts counts;
    const auto out = select(one_row(scores, 100), 64, {.counts = &counts, .level = level});
    CHECK(out == sorted_answer(one_row(scores, 100), 0, 100, 64, TopKOrder::by_position));
    CHECK(out.back() < 100);
    for (int i = 3; i < 100; i += 10) CHECK(std::binary_search(out.begin(), out.end(), i));
    CHECK(counts.nan_scores == 0);

    const Rows nans = one_row(std::vector<float>(128, nan_score), 100);
    CHECK(select(nans, 64, {.counts = &counts, .level = level}) == std::vector<std::int32_t>(64, -1));
    CHECK(counts.nan_scores == 100);

    // One NaN where the k-th place is.
    std::vector<float> one(100);
    for (std::size_t i = 0; i < 100; ++i) one[i] = static_cast<float>(100 - i);
    one[63] = negative_nan;
    auto want = std::vector<std::int32_t>(64);
    std::iota(want.begin(), want.end(), 0);
    want[63] = 64;
    CHECK(select(one_row(one, 100), 64, {.level = level}) == want);
  }
  // Whatever lies behind the length: the same answer.
  for (const float tail : {infinity, nan_score, 0.0F, -infinity}) {
    auto other = scores;
    std::fill(other.begin() + 100, other.end(), tail);
    CHECK(select(one_row(other, 100), 64) == select(one_row(scores, 100), 64));
  }
}

TEST_CASE("top-k: positions on a -1 page are never selected, others that score -inf may be") {
  Rows r = one_row(std::vector<float>(32, -infinity), 30);
  r.scores[9] = 1.0F;
  const std::vector<std::int32_t> table{4, -1, 7, 90, 2, -5, 0, 3};  // pages of 4 tokens; 90 is beyond the pool
  std::vector<bool> masked(32, false);
  for (std::size_t i = 0; i < 32; ++i) masked[i] = i / 4 == 1 || i / 4 == 3 || i / 4 == 5;
  for (const SimdLevel level : both) {
    for (const TopKOrder order : {TopKOrder::by_position, TopKOrder::by_score}) {
      TopKCounts counts;
      TopKOptions options{.order = order, .page_table = {table.data(), {1, 8}}, .tokens_per_page = 4, .pages = 90, .counts = &counts, .level = level};
      CHECK(select(r, 7, options) == sorted_answer(r, 0, 30, 7, order, masked));
      CHECK(counts.bad_pages == 1);
      const auto all = select(r, 32, options);
      CHECK(all == sorted_answer(r, 0, 30, 32, order, masked));
      CHECK(std::count(all.begin(), all.end(), -1) == 32 - 18);

      options.translate = true;
      const auto slots = select(r, 32, options);
      for (std::size_t j = 0; j < 32; ++j) {
        CHECK(slots[j] == (all[j] < 0 ? -1 : table[static_cast<std::size_t>(all[j] / 4)] * 4 + all[j] % 4));
      }
    }
  }
}

TEST_CASE("top-k: a page whose slots exceed 32 bits is not translated but counted") {
  const Rows r = one_row({1.0F, 2.0F, 3.0F, 4.0F}, 4);
  const std::vector<std::int32_t> table{0x3FFFFFFE, 0x3FFFFFFF};
  for (const SimdLevel level : both) {
    TopKCounts counts;
    const auto out = select(r, 3, {.page_table = {table.data(), {1, 2}}, .tokens_per_page = 2, .translate = true, .counts = &counts, .level = level});
    CHECK(out == std::vector<std::int32_t>{0x7FFFFFFC, 0x7FFFFFFD, -1});
    CHECK(counts.bad_pages == 1);
  }
}

TEST_CASE("top-k: empty batches and rows") {
  for (const int batch : {1, 31, 32, 33}) {
    Rows r;
    r.batch = batch;
    r.stride = 8;
    r.scores.assign(static_cast<std::size_t>(batch) * 8, 1.0F);
    r.lengths.assign(static_cast<std::size_t>(batch), 0);
    for (const SimdLevel level : both) CHECK(select(r, 5, {.level = level}) == std::vector<std::int32_t>(static_cast<std::size_t>(batch) * 5, -1));
  }
  CHECK(top_k({}, {}, {nullptr, {0, 0, 1}}, stream()).ok() == false);
  CHECK(top_k({nullptr, {0, 1, 4}}, {nullptr, {0, 1}}, {nullptr, {0, 1, 2}}, stream()).ok());
}

namespace {

template <int Size>
std::vector<std::int32_t> select_with_group(const Rows& r, int k, TopKOrder order) {
  std::vector<std::int32_t> out(static_cast<std::size_t>(r.batch * r.next_n * k), unwritten), scratch(out.size());
  auto args = check_top_k(r.score_view(), r.length_view(), {out.data(), {r.batch, r.next_n, k}}, {.order = order}).value();
  args.scratch = scratch.data();
  for (std::int64_t row = 0; row < r.batch * r.next_n; ++row) (void)body::top_k(HostGroup<Size>{}, row, args);
  return out;
}

}  // namespace

TEST_CASE("top-k: the body gives the same answer with any group") {
  std::mt19937 random(21);
  for (int round = 0; round < 30; ++round) {
    Rows r = one_row(std::vector<float>(200), static_cast<int>(random() % 201));
    for (float& x : r.scores) x = static_cast<float>(random() % (round < 10 ? 3 : 1000));
    const int k = 1 + static_cast<int>(random() % 90);
    for (const TopKOrder order : {TopKOrder::by_position, TopKOrder::by_score}) {
      const auto want = sorted_answer(r, 0, r.lengths[0], k, order);
      CHECK(select_with_group<1>(r, k, order) == want);
      CHECK(select_with_group<8>(r, k, order) == want);
      CHECK(select_with_group<32>(r, k, order) == want);
    }
  }
}

TEST_CASE("tensor: a count of elements that does not fit is not a number of elements") {
  CHECK(Tensor<const float, 2>{nullptr, {3, 4}}.elements() == 12);
  CHECK(Tensor<const float, 2>{nullptr, {INT64_C(1) << 62, 4}}.elements() == -1);
  CHECK(Tensor<const float, 2>{nullptr, {-3, 4}}.elements() == -1);
  CHECK(Tensor<const float, 3>{nullptr, {INT64_C(1) << 62, 4, 0}}.elements() == 0);
}

TEST_CASE("top_k: a stride below nothing, an order that is none and scores that cannot be counted are named") {
  float x[4] = {};
  std::int32_t length[1] = {1};
  std::int32_t out[1] = {};
  const auto error = [&](std::int64_t rows, std::int64_t stride, TopKOrder order) {
    const auto checked = check_top_k({x, {1, rows, stride}}, {length, {1, 1}}, {out, {1, rows, 1}}, {.order = order});
    return checked.ok() ? std::string("accepted") : checked.error().message;
  };
  CHECK(error(1, 4, TopKOrder::by_score) == "accepted");
  CHECK(error(1, -5, TopKOrder::by_score) == "top_k: scores.extent[2] is -5, below 0");
  CHECK(error(1, 4, static_cast<TopKOrder>(9)) == "top_k: order 9 is none of TopKOrder");
  CHECK(error(4, INT64_C(1) << 62, TopKOrder::by_score) == "top_k: scores is [1][4][4611686018427387904], which is more than 63 bits can count");
}
