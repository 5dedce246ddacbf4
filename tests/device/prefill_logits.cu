// SPDX-License-Identifier: Apache-2.0
// Prefill logits on the GPU: the plain kernel's bits are the host's, the tuned kernel's those of the tuned decode.
#include <cstdio>
#include <random>

#include <doctest/doctest.h>

#include <kvire/kernel/prefill_logits.cuh>
#include <kvire/layout/policies.hpp>
#include <tests/support/gpu.hpp>
#include <tests/support/prefill_case.hpp>

using namespace kvire;
using namespace kvire_test;

namespace {

template <class Score>
struct Answer {
  std::vector<Score> scores;
  LogitsCounts counts;
  bool tuned = false;
};

template <class Score>
constexpr Score blank = [] {
  if constexpr (sizeof(Score) == 2) return Score{0xABCD};
  else return untouched;
}();

/// `paged`: through the page table, otherwise from contiguous keys.
template <class P, class Score = float>
Answer<Score> run(const PrefillCase<P>& c, KernelChoice kernel, bool paged) {
  auto stream = Stream<Cuda>::make().value();
  const DeviceArray<std::byte> pages(c.keys.pages), queries(c.keys.queries);
  const DeviceArray<float> weights(c.keys.weights);
  const DeviceArray<std::int32_t> table(c.keys.table), starts(c.starts), ends(c.keys.lengths);
  const DeviceArray<Score> scores(std::vector<Score>(static_cast<std::size_t>(c.rows() * c.keys.stride), blank<Score>));
  const DeviceCounts<LogitsCounts> counts;
  KernelServed served;
  CudaPrefillLogitsOptions options{.counts = counts.data(), .kernel = kernel, .served = &served};
  Queries q = c.queries();
  q.data = queries.data();
  auto w = c.weights();
  w.data = weights.data();
  auto from = c.starts_view(), to = c.ends_view();
  from.data = starts.data(), to.data = ends.data();
  const auto out = [&] {
    if constexpr (sizeof(Score) == 2) return ScoreTensor<2>::bf16({scores.data(), {c.rows(), c.keys.stride}});
    else return ScoreTensor<2>(Tensor<float, 2>{scores.data(), {c.rows(), c.keys.stride}});
  }();
  if (paged) {
    const ConstPageView<P, Cuda> view{pages.data(), P::page_bytes, c.keys.page_count};
    prefill_logits<P>(q, w, assume_ready(view), {table.data(), {c.keys.max_pages}}, from, to, out, stream, options).value();
    return {scores.read(), counts.value(), served.tuned};
  }
  const auto planes = c.planes();
  std::vector<DeviceArray<std::byte>*> owned;
  ContiguousKeys<P> keys;
  keys.tokens = c.longest();
  for (int i = 0; i < P::plane_count; ++i) {
    owned.push_back(new DeviceArray<std::byte>(planes[static_cast<std::size_t>(i)]));
    keys.planes[i] = owned.back()->data();
  }
  prefill_logits(q, w, keys, from, to, out, stream, options).value();
  Answer<Score> answer{scores.read(), counts.value(), served.tuned};
  for (auto* plane : owned) delete plane;
  return answer;
}

template <class Score>
int differing(const std::vector<Score>& a, const std::vector<Score>& b) {
  if (a.size() != b.size()) return -1;
  int n = 0;
  for (std::size_t i = 0; i < a.size(); ++i) n += std::memcmp(&a[i], &b[i], sizeof(Score)) != 0;
  return n;
}

template <class P>
void check_plain(Element element) {
  INFO(std::string(P::name));
  std::mt19937 random{3};
  for (int trial = 0; trial < (small_run() ? 2 : 6); ++trial) {
    const int holes = trial % 2 == 0 ? 0 : 30;
    const auto c = random_prefill<P>(1 + 5 * trial, 3, 4, element, holes, random);
    const auto want = decoded(c);
    CHECK(differing(run(c, KernelChoice::plain, true).scores, want.values) == 0);
    if (holes == 0) CHECK(differing(run(c, KernelChoice::plain, false).scores, want.values) == 0);
  }
}

/// The tuned kernel against float64, sentinels and counts; then contiguous and bf16 against that.
template <class P>
void check_tuned(Element element, double tolerance) {
  INFO(std::string(P::name) << " of " << P::tokens_per_page);
  std::mt19937 random{17};
  double worst = 0;
  for (int trial = 0; trial < (small_run() ? 2 : 12); ++trial) {
    const int holes = trial % 3 == 2 ? 20 : 0;
    const int rows = trial == 0 ? 1 : trial == 1 ? 8 : 1 + static_cast<int>(random() % 50);
    const int most_pages = (small_run() ? 300 : 2000) / P::tokens_per_page;
    const auto c = random_prefill<P>(rows, 64, 1 + static_cast<int>(random() % static_cast<unsigned>(most_pages)), element, holes, random);
    const auto got = run(c, KernelChoice::tuned, true);
    CHECK(got.tuned);
    const auto plain = run(c, KernelChoice::plain, true);
    CHECK(got.counts.bad_pages == plain.counts.bad_pages);
    CHECK(got.counts.nan_logits == 0);
    int wrong = 0;
    for (int row = 0; row < rows; ++row) {
      for (std::int64_t s = 0; s < c.keys.stride; ++s) {
        const float x = got.scores[static_cast<std::size_t>(row * c.keys.stride + s)];
        if (!c.sees(row, s)) {
          wrong += bits_of(x) != bits_of(untouched);
          continue;
        }
        const bool masked = bits_of(plain.scores[static_cast<std::size_t>(row * c.keys.stride + s)]) == (infinity_bits | sign_bit);
        wrong += masked != (bits_of(x) == (infinity_bits | sign_bit));
        if (masked || (s * 7 + row) % 61 != 0) continue;
        const Exact exact = exact_logit(c.keys, 0, row, s);
        const double error = std::fabs(static_cast<double>(x) - exact.logit) / exact.magnitude;
        wrong += !(error <= tolerance);
        worst = std::max(worst, error);
      }
    }
    CHECK(wrong == 0);
    const auto codes = run<P, std::uint16_t>(c, KernelChoice::tuned, true);
    int rounded = 0;
    for (std::size_t i = 0; i < codes.scores.size(); ++i) {
      rounded += codes.scores[i] != (bits_of(got.scores[i]) == bits_of(untouched) ? blank<std::uint16_t> : bf16_from_bits(bits_of(got.scores[i])));
    }
    CHECK(rounded == 0);
    if (holes == 0 && c.longest() > 0) CHECK(differing(run(c, KernelChoice::tuned, false).scores, got.scores) == 0);
  }
  std::printf("  %-24s of %3d tokens: largest error %.2e of the sum of magnitudes\n", P::name, P::tokens_per_page, worst);
}

/// Rows [first, first + rows) of a case, the rest of them gone.
template <class P>
PrefillCase<P> some_rows(const PrefillCase<P>& c, int first, int rows) {
  PrefillCase<P> out = c;
  const auto cut = [&](auto& v, std::size_t each) {
    v.erase(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(each) * first);
    v.resize(each * static_cast<std::size_t>(rows));
  };
  out.keys.next_n = rows;
  cut(out.keys.queries, static_cast<std::size_t>(c.keys.heads * P::dim * bits(c.keys.element) / 8));
  cut(out.keys.weights, static_cast<std::size_t>(c.keys.heads));
  cut(out.keys.lengths, 1);
  cut(out.starts, 1);
  return out;
}

}  // namespace

TEST_CASE("cuda prefill logits: the plain kernel has the host's bits, whatever the policy") {
  check_plain<Fp8WithScale<64, 128>>(Element::e4m3);
  check_plain<Fp8WithScaleInterleaved<16, 64>>(Element::f32);
  check_plain<Bf16Contiguous<64, 128>>(Element::bf16);
  check_plain<Fp4WithScale<64, 128>>(Element::bf16);
}

TEST_CASE("cuda prefill logits: the tuned kernel agrees with float64") {
  if (!hopper()) return;
  check_tuned<Fp8WithScale<64, 128>>(Element::e4m3, 2e-4);
  check_tuned<Fp8WithScale<32, 128>>(Element::e4m3, 2e-4);
  check_tuned<Fp8WithScale<128, 128>>(Element::e4m3, 2e-4);
  check_tuned<Fp8WithScaleInterleaved<64, 128>>(Element::e4m3, 2e-4);
  check_tuned<Bf16Contiguous<64, 128>>(Element::bf16, 1e-4);
}

TEST_CASE("cuda prefill logits: a row has the bits of a decode, alone and among any others, on every run") {
  if (!hopper()) return;
  using P = Fp8WithScale<64, 128>;
  std::mt19937 random{23};
  auto c = random_prefill<P>(37, 64, small_run() ? 6 : 40, Element::e4m3, 0, random);
  const auto all = run(c, KernelChoice::tuned, true);
  for (int i = 0; i < (small_run() ? 2 : 20); ++i) CHECK(differing(run(c, KernelChoice::tuned, i % 2 == 0).scores, all.scores) == 0);
  for (const int first : {0, 1, 5, 20, 36}) {
    for (const int rows : {1, 3, 17}) {
      if (first + rows > c.rows()) continue;
      const auto part = run(some_rows(c, first, rows), KernelChoice::tuned, true);
      CHECK(std::memcmp(part.scores.data(), all.scores.data() + first * c.keys.stride, part.scores.size() * sizeof(float)) == 0);
    }
  }
  // each row as a decode of its own
  auto stream = Stream<Cuda>::make().value();
  const DeviceArray<std::byte> pages(c.keys.pages), queries(c.keys.queries);
  const DeviceArray<float> weights(c.keys.weights);
  std::vector<std::int32_t> tables;
  for (int row = 0; row < c.rows(); ++row) tables.insert(tables.end(), c.keys.table.begin(), c.keys.table.end());
  const DeviceArray<std::int32_t> table(tables), lengths(c.keys.lengths);
  const DeviceArray<float> scores(std::vector<float>(all.scores.size(), untouched));
  const ConstPageView<P, Cuda> view{pages.data(), P::page_bytes, c.keys.page_count};
  sparse_logits<P>({queries.data(), Element::e4m3, c.rows(), 1, 64, 128}, {weights.data(), {c.rows(), 1, 64}}, assume_ready(view), {table.data(), {c.rows(), c.keys.max_pages}},
                   {lengths.data(), {c.rows(), 1}}, {scores.data(), {c.rows(), 1, c.keys.stride}}, stream, {.kernel = KernelChoice::tuned})
      .value();
  const auto decode = scores.read();
  int differ = 0;
  for (int row = 0; row < c.rows(); ++row) {
    for (std::int64_t s = 0; s < c.keys.stride; ++s) {
      const auto at = static_cast<std::size_t>(row * c.keys.stride + s);
      if (c.sees(row, s)) differ += bits_of(decode[at]) != bits_of(all.scores[at]);
    }
  }
  CHECK(differ == 0);
}

TEST_CASE("cuda prefill logits: NaN keys score -inf and are counted, ranges beyond keys and scores are cut") {
  if (!hopper()) return;
  using P = Fp8WithScale<64, 128>;
  std::mt19937 random{29};
  auto c = random_prefill<P>(9, 64, 5, Element::e4m3, 0, random);
  while (c.longest() < 300) c = random_prefill<P>(9, 64, 5, Element::e4m3, 0, random);
  c.keys.lengths.assign(9, 300);
  c.starts.assign(9, 0);
  const std::int32_t id = c.keys.table[1];
  REQUIRE(id > 0);
  c.keys.page(id)[P::offset<role::Value>(3) + 7] = std::byte{0x7F};
  for (const KernelChoice kernel : {KernelChoice::plain, KernelChoice::tuned}) {
    const auto nan = run(c, kernel, true);
    CHECK(nan.counts.nan_logits == 9);
    for (int row = 0; row < 9; ++row) CHECK(bits_of(nan.scores[static_cast<std::size_t>(row * c.keys.stride + 67)]) == (infinity_bits | sign_bit));
  }
  auto far = c;
  far.keys.lengths.assign(9, 0x7FFFFFFF);
  far.starts.assign(9, -5);
  far.keys.stride = 310;
  const auto tuned = run(far, KernelChoice::tuned, true), plain = run(far, KernelChoice::plain, true);
  int differ = 0;
  for (std::size_t i = 0; i < tuned.scores.size(); ++i) differ += (bits_of(tuned.scores[i]) == bits_of(untouched)) != (bits_of(plain.scores[i]) == bits_of(untouched));
  CHECK(differ == 0);
}
