// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <tests/support/golden.hpp>
#include <tests/support/key_case.hpp>
#include <tests/support/layouts.hpp>

using namespace kvire;
using namespace kvire_test;

namespace {

// On bits: compilers may be told that there are no infinities.
bool minus_infinity(double x) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &x, 8);
  return bits == 0xFFF0000000000000U;
}

// What the test needs of a policy; the rest is compiled once, for there are many.
struct Keys {
  std::int64_t page_bytes;
  int dim, tokens_per_page;
  std::vector<double> (*exact)(const std::byte* page, int token);
  Status (*score)(const std::byte* pages, std::int32_t count, const Queries&, kvire::Tensor<const float, 3> weights, kvire::Tensor<const std::int32_t, 2> table,
                  kvire::Tensor<const std::int32_t, 2> lengths, kvire::Tensor<float, 3> scores, SparseLogitsOptions);
};

template <class P>
Keys keys_of() {
  return {P::page_bytes, P::dim, P::tokens_per_page, exact_key<P>,
          [](const std::byte* pages, std::int32_t count, const Queries& queries, kvire::Tensor<const float, 3> weights, kvire::Tensor<const std::int32_t, 2> table,
             kvire::Tensor<const std::int32_t, 2> lengths, kvire::Tensor<float, 3> scores, SparseLogitsOptions options) {
            const ConstPageView<P> view{pages, P::page_bytes, count};
            return sparse_logits(queries, weights, assume_ready(view), table, lengths, scores, test_stream(), options);
          }};
}

void check_logits(const Safetensors& file, const Keys& keys) {
  const auto& pages = file.at("pages");
  const auto& query = file.at("query");
  REQUIRE(pages.shape.at(1) == keys.page_bytes);
  REQUIRE(query.shape.at(3) == keys.dim);
  const std::int64_t batch = query.shape.at(0), next_n = query.shape.at(1), heads = query.shape.at(2);
  const auto element = query.type == "BF16" ? Element::bf16 : query.type == "F32" ? Element::f32 : Element::e4m3;
  const auto q = [&](std::int64_t i) {
    const std::byte* p = query.bytes.data();
    const int at = static_cast<int>(i);
    if (element == Element::bf16) return decode_element<Element::bf16>(load_code<Element::bf16>(p, at));
    if (element == Element::f32) return decode_element<Element::f32>(load_code<Element::f32>(p, at));
    return decode_element<Element::e4m3>(load_code<Element::e4m3>(p, at));
  };
  const auto weights = file.at("weights").as<float>();
  const auto table = file.at("page_table").as<std::int32_t>();
  const std::int64_t max_pages = file.at("page_table").shape.at(1);
  const auto lengths = file.at("context_lens").as<std::int32_t>();
  const bool per_query = next_n > 1 && static_cast<std::int64_t>(lengths.size()) == batch * next_n;
  const std::int64_t stride = file.at("logits").shape.at(2);
  const auto expected = file.at("logits").as<double>();

  // Bounds, and which positions nobody may write.
  std::vector<double> bound(expected.size(), -1);
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t n = 0; n < next_n; ++n) {
      const std::int64_t row = b * next_n + n;
      const std::int64_t visible = per_query ? lengths[static_cast<std::size_t>(row)] : lengths[static_cast<std::size_t>(b)] - (next_n - 1 - n);
      for (std::int64_t s = 0; s < visible; ++s) {
        double& magnitude = bound[static_cast<std::size_t>(row * stride + s)];
        magnitude = 0;
        const std::int32_t id = table[static_cast<std::size_t>(b * max_pages + s / keys.tokens_per_page)];
        if (id < 0) continue;
        const auto key = keys.exact(pages.bytes.data() + keys.page_bytes * id, static_cast<int>(s % keys.tokens_per_page));
        for (std::int64_t h = 0; h < heads; ++h) {
          double terms = 0;
          for (int d = 0; d < keys.dim; ++d) terms += std::fabs(key[static_cast<std::size_t>(d)] * q((row * heads + h) * keys.dim + d));
          magnitude += std::fabs(weights[static_cast<std::size_t>(row * heads + h)]) * terms;
        }
      }
    }
  }
  CHECK(std::any_of(bound.begin(), bound.end(), [](double x) { return x > 0; }));

  for (const SimdLevel level : levels()) {
    CAPTURE(name_of(level));
    std::vector<float> scores(expected.size(), untouched);
    LogitsCounts counts;
    keys.score(pages.bytes.data(), static_cast<std::int32_t>(pages.shape.at(0)), {query.bytes.data(), element, batch, next_n, heads, keys.dim},
               {weights.data(), {batch, next_n, heads}}, {table.data(), {batch, max_pages}}, {lengths.data(), {batch, per_query ? next_n : 1}},
               {scores.data(), {batch, next_n, stride}}, {.counts = &counts, .level = level})
        .value();
    test_stream().synchronize().value();
    int wrong = 0;
    for (std::size_t i = 0; i < scores.size(); ++i) {
      if (bound[i] < 0) {
        // Beyond what the query token sees: the file has -inf there, the kernel leaves what it found.
        wrong += scores[i] != untouched || !minus_infinity(expected[i]);
      } else if (minus_infinity(expected[i])) {
        wrong += bits_of(scores[i]) != (infinity_bits | sign_bit);
      } else {
        wrong += !(std::fabs(scores[i] - expected[i]) <= 1e-5 * bound[i]);
      }
    }
    CHECK(wrong == 0);
    CHECK(counts.nan_logits == 0);
    CHECK(counts.bad_pages == 0);
  }
}

}  // namespace

TEST_CASE("golden: sparse logits against float64") {
  for_each_golden("logits_", [](const Safetensors& file) {
    const bool known = with_policy(file.meta("policy"), file.meta_int("page_tokens"), file.meta_int("dim"), [&](auto policy) {
      check_logits(file, keys_of<typename decltype(policy)::type>());
    });
    CHECK(known);
  });
}
