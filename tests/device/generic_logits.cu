// SPDX-License-Identifier: Apache-2.0
// The plain sparse-logits kernel: the host's bits for every policy, and the reference vectors.
#include <algorithm>
#include <random>
#include <string>

#include <doctest/doctest.h>

#include <kvire/kernel/generic_sparse_logits.cuh>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/preset/deepseek_v4_1.hpp>
#include <tests/support/device_array.hpp>
#include <tests/support/golden.hpp>
#include <tests/support/key_case.hpp>

using namespace kvire;
using namespace kvire_test;

namespace {

struct Answer {
  std::vector<float> scores;
  LogitsCounts counts;
};

template <class P>
body::SparseLogitsArgs args_of(const KeyCase<P>& c) {
  body::SparseLogitsArgs args;
  args.pages = c.pages.data();
  args.page_stride = P::page_bytes;
  args.page_count = c.page_count;
  args.queries = c.queries.data();
  args.query_element = c.element;
  args.weights = c.weights.data();
  args.page_table = c.table.data();
  args.lengths = c.lengths.data();
  args.lengths_per_query = c.per_query;
  args.stride = c.stride;
  args.max_pages = c.max_pages;
  args.batch = c.batch;
  args.next_n = c.next_n;
  args.heads = c.heads;
  return args;
}

template <class P>
std::vector<float> blank(const KeyCase<P>& c) {
  return std::vector<float>(static_cast<std::size_t>(c.batch * c.next_n * c.stride), untouched);
}

template <class P>
Answer on_host(const KeyCase<P>& c) {
  Answer answer{blank(c), {}};
  auto args = args_of(c);
  args.scores = answer.scores.data();
  for (std::int64_t item = 0; item < c.batch * std::int64_t(c.max_pages); ++item) answer.counts += body::sparse_logits<P>(HostGroup<32>{}, item, args);
  return answer;
}

template <class P>
Answer on_device(const KeyCase<P>& c) {
  const DeviceArray<std::byte> pages(c.pages), queries(c.queries);
  const DeviceArray<float> weights(c.weights), scores(blank(c));
  const DeviceArray<std::int32_t> table(c.table), lengths(c.lengths);
  const DeviceCounts<LogitsCounts> counts;
  auto args = args_of(c);
  args.pages = pages.data();
  args.queries = queries.data();
  args.weights = weights.data();
  args.page_table = table.data();
  args.lengths = lengths.data();
  args.scores = scores.data();
  cuda_ok(launch_generic_sparse_logits<P>(args, counts.data(), nullptr));
  return {scores.read(), counts.value()};
}

template <class P>
void check_same(const KeyCase<P>& c) {
  const Answer host = on_host(c);
  const Answer device = on_device(c);
  int differ = 0;
  for (std::size_t i = 0; i < host.scores.size(); ++i) differ += bits_of(host.scores[i]) != bits_of(device.scores[i]);
  CHECK(differ == 0);
  CHECK(device.counts.nan_logits == host.counts.nan_logits);
  CHECK(device.counts.bad_pages == host.counts.bad_pages);
}

template <class P>
void check_policy() {
  INFO(std::string(P::name) << " of " << P::tokens_per_page);
  std::mt19937 random{7};
  const int trials = small_run() ? 2 : P::dim > 128 ? 6 : 12;
  for (int trial = 0; trial < trials; ++trial) {
    CaseShape shape;
    shape.batch = 1 + trial % 3;
    shape.next_n = 1 + trial % 4;
    shape.heads = P::dim > 128 ? 3 : 5;
    shape.max_pages = P::tokens_per_page > 64 ? 1 : P::tokens_per_page < 16 ? 20 : 3;
    shape.element = trial % 3 == 0 ? Element::e4m3 : trial % 3 == 1 ? Element::bf16 : Element::f32;
    shape.per_query = trial % 4 == 3;
    shape.holes_percent = trial % 2 == 0 ? 30 : 0;
    auto c = random_case<P>(shape, random);
    if (trial == 1) c.pages[static_cast<std::size_t>(P::page_bytes * std::max(0, c.table[0]) + 5)] = std::byte{0x7F};
    if (trial == 2) c.set_query(3, float_of(infinity_bits));
    if (trial == 3) c.weights[0] = float_of(nan_bits);
    check_same(c);
    if (trial == 4) {  // beyond the page table and the scores: cut there, not followed
      c.lengths.assign(c.lengths.size(), 0x7FFFFFFF);
      check_same(c);
      c.lengths.assign(c.lengths.size(), -5);
      check_same(c);
    }
  }
}

template <class P>
void check_golden(const Safetensors& file) {
  KeyCase<P> c;
  const auto& query = file.at("query");
  c.batch = static_cast<int>(query.shape.at(0)), c.next_n = static_cast<int>(query.shape.at(1)), c.heads = static_cast<int>(query.shape.at(2));
  c.element = query.type == "BF16" ? Element::bf16 : Element::e4m3;
  c.queries = query.bytes;
  c.pages = file.at("pages").bytes;
  c.page_count = static_cast<int>(file.at("pages").shape.at(0));
  c.weights = file.at("weights").as<float>();
  c.table = file.at("page_table").as<std::int32_t>();
  c.max_pages = static_cast<int>(file.at("page_table").shape.at(1));
  c.lengths = file.at("context_lens").as<std::int32_t>();
  c.stride = file.at("logits").shape.at(2);
  const auto expected = file.at("logits").as<double>();
  const Answer device = on_device(c);
  int wrong = 0;
  int compared = 0;
  for (int b = 0; b < c.batch; ++b) {
    for (int n = 0; n < c.next_n; ++n) {
      for (std::int64_t s = 0; s < c.stride; ++s) {
        const auto at = static_cast<std::size_t>((std::int64_t(b) * c.next_n + n) * c.stride + s);
        if (s >= c.visible(b, n)) {
          wrong += bits_of(device.scores[at]) != bits_of(untouched);
          continue;
        }
        const Exact exact = exact_logit(c, b, n, s);
        // The scale of a whole key is part of the magnitude; exact_key has applied it.
        if (exact.masked) {
          wrong += bits_of(device.scores[at]) != (infinity_bits | sign_bit);
        } else {
          ++compared;
          wrong += !(std::abs(static_cast<double>(device.scores[at]) - expected[at]) <= 1e-5 * exact.magnitude);
        }
      }
    }
  }
  CHECK(compared > 0);
  CHECK(wrong == 0);
  CHECK(device.counts.nan_logits == 0);
  CHECK(device.counts.bad_pages == 0);
  check_same(c);
}

}  // namespace

TEST_CASE("cuda plain logits: the host's bits, counts and untouched words, whatever the policy") {
  check_policy<Fp8WithScale<64, 128>>();
  check_policy<Fp8WithScaleInterleaved<16, 128>>();
  check_policy<Bf16Contiguous<64, 128>>();
  check_policy<Fp4WithScale<64, 128>>();
  check_policy<preset::deepseek_v4::Latent<2>>();
  check_policy<preset::deepseek_v4::Latent<64>>();
  check_policy<preset::deepseek_v4::Latent<256>>();
  check_policy<preset::deepseek_v3_2::Latent<64>>();
  check_policy<preset::deepseek_v4_1::LatentFp8<64>>();
  check_policy<preset::deepseek_v4_1::LatentFp4<64>>();
}

TEST_CASE("cuda plain logits: golden vectors") {
  for_each_golden("logits_", [](const Safetensors& file) {
    REQUIRE(file.meta_int("page_tokens") == 64);
    REQUIRE(file.meta_int("dim") == 128);
    const std::string policy = file.meta("policy");
    if (policy == "fp8") return check_golden<Fp8WithScale<64, 128>>(file);
    if (policy == "bf16") return check_golden<Bf16Contiguous<64, 128>>(file);
    if (policy == "fp4") return check_golden<Fp4WithScale<64, 128>>(file);
    FAIL("no such policy");
  });
}
