// SPDX-License-Identifier: Apache-2.0
// Which of the three sparse-logits kernels a leased call queues, that it says so, and that they agree.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvire/kernel/sparse_logits.cuh>
#include <kvire/layout/policies.hpp>
#include <tests/support/device_array.hpp>
#include <tests/support/logits_case.hpp>

using namespace kvire;
using namespace kvire_test;

namespace {

constexpr float untouched = 123456.0F;

struct ScalesFirst : PageLayout<64, 1, Plane<Field<role::Scale, Element::f32, 1>>, Plane<Field<role::Value, Element::e4m3, 128>>> {
  using Scaling = ScaleRule<role::Value, 128>;
  static constexpr const char* name = "ScalesFirst";
};
struct PaddedScales : PageLayout<64, 1, Plane<Field<role::Value, Element::e4m3, 128>>, Plane<Field<role::Scale, Element::f32, 1>, Pad<4>>> {
  using Scaling = ScaleRule<role::Value, 128>;
  static constexpr const char* name = "PaddedScales";
};

bool hopper() {
  int major = 0, minor = 0;
  cuda_ok(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  cuda_ok(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
  return major == 9 && minor == 0;
}

/// The case's buffers in device memory, and calls on them.
template <class P>
struct Leased {
  const LogitsCase& c;
  DeviceArray<std::uint8_t> memory{c.memory}, queries{c.queries};
  DeviceArray<float> weights{c.weights}, scores{std::vector<float>(static_cast<std::size_t>(c.batch * c.next_n) * static_cast<std::size_t>(c.logits_stride), untouched)};
  DeviceArray<std::int32_t> table{c.table}, lengths{c.lengths};
  Stream<Cuda> stream = Stream<Cuda>::make().value();

  template <class Tuned = DefaultTunedLogits>
  Status call(CudaSparseLogitsOptions options) {
    const ConstPageView<P, Cuda> pages{reinterpret_cast<const std::byte*>(memory.data()), c.page_stride, c.pages};
    return sparse_logits<P, Tuned>({queries.data(), c.query_element, c.batch, c.next_n, c.heads, c.dim}, {weights.data(), {c.batch, c.next_n, c.heads}},
                                   assume_ready(pages), {table.data(), {c.batch, c.table_stride}}, {lengths.data(), {c.batch, 1}},
                                   {scores.data(), {c.batch, c.next_n, c.logits_stride}}, stream, options);
  }
  /// The scores after one call, which must have been served by the kernel of that name.
  template <class Tuned = DefaultTunedLogits>
  std::vector<float> run(CudaSparseLogitsOptions options, const std::string& by) {
    cuda_ok(cudaMemsetAsync(scores.data(), 0x7F, static_cast<std::size_t>(c.batch * c.next_n) * static_cast<std::size_t>(c.logits_stride) * 4, stream.native()));
    KernelServed served;
    options.served = &served;
    call<Tuned>(options).value();
    stream.synchronize().value();
    CHECK(std::string(served.name) == by);
    CHECK(served.tuned == (by != "plain sparse logits"));
    return scores.read();
  }
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
  Leased<P> leased{c};
  using Tuned = TunedLogits<64, NextN>;
  const auto plain = leased.template run<Tuned>({.kernel = KernelChoice::plain}, "plain sparse logits");
  const auto portable = leased.template run<Tuned>({.kernel = KernelChoice::tuned, .portable = true}, "sm_80 sparse logits");
  check_close<P>(c, portable, plain, tolerance);
  const auto best = leased.template run<Tuned>({}, hopper() ? "sm_90a sparse logits" : "sm_80 sparse logits");
  check_close<P>(c, best, plain, tolerance);
  // The same bits when launches overlap the ends of their predecessors, which write what they read.
  for (int i = 0; i < 20; ++i) {
    cuda_ok(cudaMemsetAsync(leased.scores.data(), 0x7F, plain.size() * 4, leased.stream.native()));
    for (int again = 0; again < 3; ++again) leased.template call<Tuned>({.overlap = true}).value();
    leased.stream.synchronize().value();
    const auto overlapped = leased.scores.read();
    REQUIRE(std::memcmp(overlapped.data(), best.data(), best.size() * 4) == 0);
  }
}

template <class P>
void check_plain_only(const char* why) {
  INFO(std::string(P::name) << ": " << why);
  const auto c = random_case<P>(4, {200, 3}, 1, 64, Element::e4m3);
  Leased<P> leased{c};
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
  Leased<Fp8WithScale<64, 128>> leased{c};
  const Status heads = leased.call({.kernel = KernelChoice::tuned});
  REQUIRE(!heads.ok());
  CHECK(heads.error().message.find("32 heads") != std::string::npos);
  const Status tokens = leased.call<TunedLogits<32, 2>>({.kernel = KernelChoice::tuned});
  REQUIRE(!tokens.ok());
  CHECK(tokens.error().message.find("1 tokens a row") != std::string::npos);
  leased.run<TunedLogits<32, 1>>({}, hopper() ? "sm_90a sparse logits" : "sm_80 sparse logits");
}
