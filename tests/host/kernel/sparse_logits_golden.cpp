// SPDX-License-Identifier: Apache-2.0
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

template <class P>
void check_logits(const Safetensors& file) {
  const auto& pages = file.at("pages");
  const auto& query = file.at("query");
  const auto& logits = file.at("logits");
  REQUIRE(pages.shape.at(1) == P::page_bytes);

  KeyCase<P> c;
  c.batch = static_cast<int>(query.shape.at(0));
  c.next_n = static_cast<int>(query.shape.at(1));
  c.heads = static_cast<int>(query.shape.at(2));
  c.element = query.type == "BF16" ? Element::bf16 : query.type == "F32" ? Element::f32 : Element::e4m3;
  c.page_count = static_cast<int>(pages.shape.at(0));
  c.pages = pages.bytes;
  c.queries = query.bytes;
  c.weights = file.at("weights").as<float>();
  c.table = file.at("page_table").as<std::int32_t>();
  c.max_pages = static_cast<int>(file.at("page_table").shape.at(1));
  c.lengths = file.at("context_lens").as<std::int32_t>();
  c.per_query = c.next_n > 1 && static_cast<int>(c.lengths.size()) == c.batch * c.next_n;
  c.stride = logits.shape.at(2);
  const auto expected = logits.as<double>();

  for (const SimdLevel level : levels()) {
    CAPTURE(name_of(level));
    const Scores out = run_logits(c, level, test_stream());
    int wrong = 0;
    std::int64_t scored = 0;
    for (int b = 0; b < c.batch; ++b) {
      for (int n = 0; n < c.next_n; ++n) {
        for (std::int64_t s = 0; s < c.stride; ++s) {
          const auto i = static_cast<std::size_t>((std::int64_t(b) * c.next_n + n) * c.stride + s);
          if (s < c.visible(b, n)) {
            ++scored;
            const Exact exact = exact_logit(c, b, n, s);
            wrong += exact.masked || minus_infinity(expected[i]) ? bits_of(out.values[i]) != (infinity_bits | sign_bit)
                                                                 : !(std::fabs(out.values[i] - expected[i]) <= 1e-5 * exact.magnitude);
          } else {
            // Nobody's: the file has -inf there, the kernel leaves what it found.
            wrong += out.values[i] != untouched || !minus_infinity(expected[i]);
          }
        }
      }
    }
    CHECK(wrong == 0);
    CHECK(scored > 0);
    CHECK(out.counts.nan_logits == 0);
    CHECK(out.counts.bad_pages == 0);
  }
}

}  // namespace

TEST_CASE("golden: sparse logits against float64") {
  for_each_golden("logits_", [](const Safetensors& file) {
    const bool known = with_policy(file.meta("policy"), file.meta_int("page_tokens"), file.meta_int("dim"), [&](auto policy) {
      check_logits<typename decltype(policy)::type>(file);
    });
    CHECK(known);
  });
}
