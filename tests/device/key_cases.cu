// SPDX-License-Identifier: Apache-2.0
// What the tuned and the portable logits kernels do with keys, pages and batches at the edge; the plain kernel has the host's bits.
#include <limits>

#include <kvire/codec/row.hpp>
#include <tests/support/far_pages.hpp>
#include <tests/support/logits_device.cuh>

using namespace kvire;
using namespace kvire_test;

namespace {

using Fp8 = Fp8WithScale<64, 128>;
using Bf16 = Bf16Contiguous<64, 128>;
using Fp4 = Fp4WithScale<64, 128>;

constexpr int heads = 64;

// Calls f(query element, shape) for the kernels that read P.
template <class P, Element Query, class F>
void with_kernels(F&& f) {
  {
    INFO("portable kernel");
    f(Portable{});
  }
  if (!hopper()) return;
  INFO("Hopper kernel");
  f(sm90::DefaultLogitsShape<P, Query, heads, 1>{});
}

// One row of one page (page 1), every query 1, weights that sum to 1: a logit is the sum of its key.
template <class P>
LogitsCase one_page(int tokens, Element query) {
  LogitsCase c = random_case<P>(1, {tokens}, 1, heads, query);
  c.memory.assign(c.memory.size(), 0xFF);
  c.table[0] = 1;
  c.weights.assign(c.weights.size(), 1.0F / heads);
  for (std::size_t i = 0; i < c.query_numbers.size(); ++i) {
    if (query == Element::e4m3) {
      c.queries[i] = e4m3_from_f32(1);
    } else {
      const std::uint16_t one = bf16_from_f32(1);
      std::memcpy(&c.queries[i * 2], &one, 2);
    }
  }
  c.decode_queries();
  return c;
}

float score(const Outcome& outcome, std::size_t i) { return float_of(outcome.bits[i]); }

template <class P, Element Query>
void check_empty() {
  with_kernels<P, Query>([](auto shape) {
    for (const int batch : {1, 31, 32, 33}) {
      auto c = random_case<P>(6, std::vector<std::int32_t>(static_cast<std::size_t>(batch), 65), 1, heads, Query);
      const auto full = c.lengths;
      std::fill(c.lengths.begin(), c.lengths.end(), 0);
      const auto none = run_case<P, Query, heads, 1, decltype(shape)>(c, multiprocessors());
      CHECK(std::count(none.bits.begin(), none.bits.end(), sentinel) == static_cast<std::ptrdiff_t>(none.bits.size()));
      CHECK(none.bad_pages == 0);
      c.lengths[static_cast<std::size_t>(batch / 2)] = 65;
      const auto one = run_case<P, Query, heads, 1, decltype(shape)>(c, multiprocessors());
      CHECK(std::count(one.bits.begin(), one.bits.end(), sentinel) == static_cast<std::ptrdiff_t>(one.bits.size()) - 65);
      check_against_reference<P>(c, one, Query == Element::bf16 ? 1e-4 : 2e-4);
    }
  });
}

template <class P, Element Query>
void check_garbage() {
  // As it is made: page 0, pages of nobody, tails and the bytes between pages are 0xFF. And with all of that zero.
  auto c = random_case<P>(12, {200, 3, 64, 0, 700}, 1, heads, Query);
  auto clean = c;
  std::fill(clean.memory.begin(), clean.memory.end(), std::uint8_t{0});
  for (int row = 0; row < c.batch; ++row) {
    for (int t = 0; t < c.lengths[static_cast<std::size_t>(row)]; ++t) {
      const std::int32_t id = c.table[static_cast<std::size_t>(row * c.table_stride + t / P::tokens_per_page)];
      if (id < 0) continue;
      for (int s = 0; s < P::section_count; ++s) {
        const auto& section = P::table.sections[s];
        const std::int64_t at = c.page_stride * id + P::table.plane_offset[section.plane] + t % P::tokens_per_page * P::table.row_bytes[section.plane] +
                                section.row_offset_bits / 8;
        const auto bytes = static_cast<std::size_t>(section.count * bits(section.element) / 8);
        std::memcpy(&clean.memory[static_cast<std::size_t>(at)], &c.memory[static_cast<std::size_t>(at)], bytes);
      }
    }
  }
  with_kernels<P, Query>([&](auto shape) {
    const auto a = run_case<P, Query, heads, 1, decltype(shape)>(c, multiprocessors());
    const auto b = run_case<P, Query, heads, 1, decltype(shape)>(clean, multiprocessors());
    CHECK(a.bits == b.bits);
    CHECK(a.nan_logits == 0);
  });
}

template <class P, Element Query>
void check_special_keys() {
  auto c = one_page<P>(5, Query);
  float rows[5][P::dim] = {};
  rows[1][7] = std::numeric_limits<float>::infinity();
  std::fill_n(rows[2], P::dim, std::ldexp(1.0F, -140));
  rows[3][9] = float_of(nan_bits);
  rows[4][0] = 2.0F;
  for (int t = 0; t < 5; ++t) encode_row<P>(rows[t], reinterpret_cast<std::byte*>(c.memory.data() + c.page_stride), t);
  with_kernels<P, Query>([&](auto shape) {
    const auto out = run_case<P, Query, heads, 1, decltype(shape)>(c, multiprocessors());
    CHECK(score(out, 0) == 0.0F);
    CHECK(is_finite(score(out, 2)));
    CHECK(score(out, 3) == -std::numeric_limits<float>::infinity());
    CHECK(score(out, 4) == doctest::Approx(2.0).epsilon(0.1));
    CHECK(out.bits[5] == sentinel);
    CHECK(out.nan_logits == 1);
  });
}

// The pages of a small case in a pool of more than 4 GiB: the same bits.
template <class P, Element Query>
void check_far(const std::vector<std::int32_t>& ids) {
  const int n = static_cast<int>(ids.size());
  const auto c = random_case<P>(31, {n * P::tokens_per_page - 3}, 1, heads, Query);
  for (int p = 0; p < n; ++p) REQUIRE(c.table[static_cast<std::size_t>(p)] > 0);
  const FarPages<P> pool(*std::max_element(ids.begin(), ids.end()) + 1);
  if (!pool) return;
  auto far = c;
  far.page_stride = P::page_bytes;
  far.pages = pool.pages();
  for (std::size_t p = 0; p < ids.size(); ++p) {
    kvire_test::upload(pool.page(ids[p]), c.memory.data() + c.page_stride * c.table[p], P::page_bytes);
    far.table[p] = ids[p];
  }
  with_kernels<P, Query>([&](auto shape) {
    const auto near = run_case<P, Query, heads, 1, decltype(shape)>(c, multiprocessors());
    CHECK(run_case<P, Query, heads, 1, decltype(shape)>(far, pool.data(), multiprocessors()).bits == near.bits);
  });
}

}  // namespace

TEST_CASE("cuda logits: batches of empty rows write nothing, one row among empty ones is scored") {
  check_empty<Fp8, Element::e4m3>();
  check_empty<Bf16, Element::bf16>();
  check_empty<Fp4, Element::e4m3>();
}

TEST_CASE("cuda logits: garbage in page 0, in pages of nobody and behind a length changes no bit") {
  check_garbage<Fp8, Element::e4m3>();
  check_garbage<Bf16, Element::bf16>();
  check_garbage<Fp4, Element::e4m3>();
}

TEST_CASE("cuda logits: a scale that is no power of two is used as it is stored") {
  auto c = one_page<Fp8>(64, Element::e4m3);
  std::uint8_t* page = c.memory.data() + c.page_stride;
  std::memset(page, 0x38, 64 * 128);  // ones
  for (int t = 0; t < 64; ++t) {
    const float scale = 3.0F + static_cast<float>(t % 3);
    std::memcpy(page + Fp8::offset<role::Scale>(t), &scale, 4);
  }
  with_kernels<Fp8, Element::e4m3>([&](auto shape) {
    const auto out = run_case<Fp8, Element::e4m3, heads, 1, decltype(shape)>(c, multiprocessors());
    for (std::size_t t = 0; t < 64; ++t) CHECK(score(out, t) == 128.0F * (3.0F + static_cast<float>(t % 3)));
  });
}

TEST_CASE("cuda logits: zero, infinite, tiny and NaN keys") {
  check_special_keys<Fp8, Element::e4m3>();
  check_special_keys<Bf16, Element::bf16>();
  check_special_keys<Fp4, Element::e4m3>();
}

TEST_CASE("cuda logits: scales of zero, infinity, NaN and the smallest exponent") {
  auto c = one_page<Fp8>(4, Element::e4m3);
  std::uint8_t* page = c.memory.data() + c.page_stride;
  std::memset(page, 0x38, 4 * 128);
  const float infinity = std::numeric_limits<float>::infinity();
  const float scales[4] = {0.0F, infinity, float_of(nan_bits), std::ldexp(1.0F, -149)};
  std::memcpy(page + Fp8::offset<role::Scale>(0), scales, sizeof scales);
  with_kernels<Fp8, Element::e4m3>([&](auto shape) {
    const auto out = run_case<Fp8, Element::e4m3, heads, 1, decltype(shape)>(c, multiprocessors());
    CHECK(score(out, 0) == 0.0F);
    CHECK(score(out, 1) == infinity);
    CHECK(score(out, 2) == -infinity);
    CHECK(out.bits[3] == bits_of(std::ldexp(1.0F, -142)));  // subnormals are kept
    CHECK(out.nan_logits == 1);
  });
}

TEST_CASE("cuda logits: pages whose bytes lie beyond 2 GiB and 4 GiB") {
  check_far<Fp8, Element::e4m3>({254200, 254201, 508401, 1});
  check_far<Bf16, Element::bf16>({131071, 131072, 262144, 1});
}
