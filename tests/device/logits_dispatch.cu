// SPDX-License-Identifier: Apache-2.0
// Which of the three sparse-logits kernels a leased call queues, that it says so, and that they agree.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvire/layout/policies.hpp>
#include <tests/support/leased_logits.hpp>

using namespace kvire;
using namespace kvire_test;

namespace {

struct ScalesFirst : PageLayout<64, 1, Plane<Field<role::Scale, Element::f32, 1>>, Plane<Field<role::Value, Element::e4m3, 128>>> {
  using Scaling = ScaleRule<role::Value, 128>;
  static constexpr const char* name = "ScalesFirst";
};
struct PaddedScales : PageLayout<64, 1, Plane<Field<role::Value, Element::e4m3, 128>>, Plane<Field<role::Scale, Element::f32, 1>, Pad<4>>> {
  using Scaling = ScaleRule<role::Value, 128>;
  static constexpr const char* name = "PaddedScales";
};

/// Within `tolerance` of the sum of magnitudes, or both -inf, or both untouched.
template <class P>
void check_close(const LogitsCase& c, const std::vector<float>& got, const std::vector<float>& want, double tolerance) {
  int wrong = 0;
  for (int row = 0; row < c.batch; ++row) {
    for (int q = 0; q < c.next_n; ++q) {
      for (int s = 0; s < c.logits_stride; ++s) {
        const auto at = static_cast<std::size_t>(row * c.next_n + q) * static_cast<std::size_t>(c.logits_stride) + static_cast<std::size_t>(s);
        double logit = 0, magnitude = 0;
        if (s < c.visible(row, q) && s % 7 == 0) reference_logit<P>(c, row, q, s, logit, magnitude);
        if (s < c.visible(row, q) && s % 7 == 0 && std::isfinite(logit)) {
          wrong += !(std::abs(static_cast<double>(got[at]) - want[at]) <= tolerance * magnitude);
        } else if (s >= c.visible(row, q) || (s % 7 == 0 && std::isinf(logit))) {
          wrong += bits_of(got[at]) != bits_of(want[at]);
        }
      }
    }
  }
  CHECK(wrong == 0);
}

template <class P, int NextN>
void check_kernels(Element element, double tolerance) {
  INFO(std::string(P::name) << ", " << NextN << " query tokens");
  const auto c = random_case<P>(3, {700, 64, 0, 1, 129}, NextN, 64, element);
  Leased<P> leased(c);
  using Tuned = TunedLogits<64, NextN>;
  const auto plain = leased.template run<float, Tuned>({.kernel = KernelChoice::plain}, "plain sparse logits");
  const auto portable = leased.template run<float, Tuned>({.kernel = KernelChoice::tuned, .portable = true}, "sm_80 sparse logits");
  check_close<P>(c, portable, plain, tolerance);
  const auto best = leased.template run<float, Tuned>({}, is_hopper() ? "sm_90a sparse logits" : "sm_80 sparse logits");
  check_close<P>(c, best, plain, tolerance);
  // The same bits when launches overlap the ends of their predecessors, which write what they read.
  for (int i = 0; i < 20; ++i) {
    leased.clear();
    for (int again = 0; again < 3; ++again) leased.template call<float, Tuned>({.overlap = true}).value();
    const auto overlapped = leased.read();
    REQUIRE(std::memcmp(overlapped.data(), best.data(), best.size() * 4) == 0);
  }
  // Nor do fewer multiprocessors.
  leased.clear();
  leased.template call<float, Tuned>({.multiprocessors = 3}).value();
  const auto few = leased.read();
  CHECK(std::memcmp(few.data(), best.data(), best.size() * 4) == 0);
}

template <class P>
void check_plain_only(const char* why) {
  INFO(std::string(P::name) << ": " << why);
  const auto c = random_case<P>(4, {200, 3}, 1, 64, Element::e4m3);
  Leased<P> leased(c);
  const auto scores = leased.run({}, "plain sparse logits");
  int wrong = 0;
  for (int row = 0; row < c.batch; ++row) {
    for (int s = 0; s < c.visible(row, 0); ++s) {
      double logit = 0, magnitude = 0;
      reference_logit<P>(c, row, 0, s, logit, magnitude);
      const float got = scores[static_cast<std::size_t>(row) * static_cast<std::size_t>(c.logits_stride) + static_cast<std::size_t>(s)];
      wrong += std::isinf(logit) ? !std::isinf(got) : !(std::abs(got - logit) <= 1e-5 * magnitude);
    }
  }
  CHECK(wrong == 0);
  const Status refused = leased.call({.kernel = KernelChoice::tuned});
  REQUIRE(!refused.ok());
  CHECK(refused.error().code == ErrorCode::unsupported);
}

}  // namespace

TEST_CASE("cuda logits: each kernel where it is asked for, and the best where none is") {
  check_kernels<Fp8WithScale<64, 128>, 1>(Element::e4m3, 2e-4);
  check_kernels<Fp8WithScale<64, 128>, 2>(Element::e4m3, 2e-4);
  check_kernels<Bf16Contiguous<32, 128>, 3>(Element::bf16, 1e-4);
  check_kernels<Fp4WithScale<64, 128>, 1>(Element::e4m3, 2e-4);
}

TEST_CASE("cuda logits: a page that only looks like one the tuned kernels read goes to the plain one") {
  check_plain_only<Fp8WithScale<48, 128>>("tiles of 64 tokens do not divide it");
  check_plain_only<Fp8WithScale<96, 128>>("tiles of 64 tokens do not divide it");
  check_plain_only<ScalesFirst>("values do not start the page");
  check_plain_only<PaddedScales>("scales are apart");
}

TEST_CASE("cuda logits: a call that no tuned kernel is built for says why") {
  const auto c = random_case<Fp8WithScale<64, 128>>(5, {70}, 1, 32, Element::e4m3);
  Leased<Fp8WithScale<64, 128>> leased(c);
  const Status heads = leased.call({.kernel = KernelChoice::tuned});
  REQUIRE(!heads.ok());
  CHECK(heads.error().message.find("32 heads") != std::string::npos);
  const Status tokens = leased.call<float, TunedLogits<32, 2>>({.kernel = KernelChoice::tuned});
  REQUIRE(!tokens.ok());
  CHECK(tokens.error().message.find("1 tokens a row") != std::string::npos);
  leased.run<float, TunedLogits<32, 1>>({}, is_hopper() ? "sm_90a sparse logits" : "sm_80 sparse logits");
}
