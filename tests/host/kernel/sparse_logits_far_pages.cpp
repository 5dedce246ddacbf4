// SPDX-License-Identifier: Apache-2.0
// Pages whose first byte lies at or beyond 2^31 and 2^32: products of page and stride in 32 bits would read foreign bytes. The pool is
// address space of which only the named pages are ever touched.
#include <tests/support/key_case.hpp>
#include <tests/support/sparse_memory.hpp>

#include <doctest/doctest.h>

#include <algorithm>

#include <kvire/layout/policies.hpp>

using namespace kvire;
using namespace kvire_test;

namespace {

// One row over the given pages of a pool; page i of the table holds keys of 1 + i. Pages where 32-bit products would land stay zero.
template <class P>
void check_pages(const std::vector<std::int32_t>& ids, std::int64_t page_stride) {
  const std::int32_t page_count = *std::max_element(ids.begin(), ids.end()) + 1;
  const auto memory = BasicBuffer<SparseMemory>::make({}, page_stride * page_count);
  if (!memory.ok()) {
    MESSAGE("skipped: " << memory.error().message);
    return;
  }
  std::byte* const pages = memory.value().data();
  const ConstPageView<P> view{pages, page_stride, page_count};
  for (std::size_t i = 0; i < ids.size(); ++i) {
    float row[P::dim];
    std::fill_n(row, P::dim, static_cast<float>(i + 1));
    for (int t = 0; t < P::tokens_per_page; ++t) encode_row<P>(row, pages + page_stride * ids[i], t);
  }
  const std::vector<float> query(P::dim, 1.0F), weight{1.0F};
  const auto count = static_cast<std::int64_t>(ids.size());
  const std::vector<std::int32_t> length{static_cast<std::int32_t>(count * P::tokens_per_page)};
  for (const SimdLevel level : levels()) {
    CAPTURE(name_of(level));
    std::vector<float> scores(static_cast<std::size_t>(length[0]), untouched);
    sparse_logits<P>({query.data(), Element::f32, 1, 1, 1, P::dim}, {weight.data(), {1, 1, 1}}, assume_ready(view), {ids.data(), {1, count}},
                     {length.data(), {1, 1}}, {scores.data(), {1, 1, length[0]}}, test_stream(), {.level = level})
        .value();
    test_stream().synchronize().value();
    int wrong = 0;
    for (std::size_t s = 0; s < scores.size(); ++s) {
      const double want = P::dim * static_cast<double>(s / P::tokens_per_page + 1);
      wrong += !(std::fabs(scores[s] - want) <= 1e-5 * want);
    }
    CHECK(wrong == 0);
  }
}

}  // namespace

TEST_CASE("sparse logits: pages at 2^31 and 2^32 bytes") {
  using Bf16 = Bf16Contiguous<64, 128>;
  using Fp8 = Fp8WithScale<64, 128>;
  static_assert(page_start(Bf16::page_bytes, 131072) == std::int64_t{1} << 31);
  static_assert(page_start(Bf16::page_bytes, 262144) == std::int64_t{1} << 32);
  static_assert(page_start(Fp8::page_bytes, 254200) + Fp8::offset<role::Value>(16) == std::int64_t{1} << 31);
  static_assert(page_start(1039680, 2066) == 2147978880);
  static_assert(page_start(1435968, 4564) == 6553757952);
  SUBCASE("bf16") { check_pages<Bf16>({131071, 131072, 262144, 1}, Bf16::page_bytes); }
  SUBCASE("fp8") { check_pages<Fp8>({254200, 254201, 508401, 7}, Fp8::page_bytes); }
  SUBCASE("one tensor over many layers: strides far beyond a page") {
    check_pages<Fp8>({2066, 3}, 1039680);
    check_pages<Fp8>({4564, 3}, 1435968);
  }
}
