// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include <kvire/codec/row.hpp>
#include <kvire/kernel/sparse_logits.hpp>

// Inputs of host sparse logits by policy, and the answer in float64.

namespace kvire_test {

template <class P>
struct KeyCase {
  int batch = 1, next_n = 1, heads = 1, max_pages = 1;
  std::int64_t stride = 0;
  bool per_query = false;
  kvire::Element element = kvire::Element::f32;
  int page_count = 1;
  std::vector<std::byte> pages;  // nobody's pages are 0xFF
  std::vector<std::byte> queries;
  std::vector<float> weights;
  std::vector<std::int32_t> table, lengths;

  std::int64_t visible(int b, int n) const {
    if (per_query) return lengths[static_cast<std::size_t>(b * next_n + n)];
    return std::max(0, lengths[static_cast<std::size_t>(b)] - (next_n - 1 - n));
  }
  std::byte* page(int id) { return pages.data() + P::page_bytes * id; }
  const std::byte* page(int id) const { return pages.data() + P::page_bytes * id; }
  kvire::ConstPageView<P> view() const { return {pages.data(), P::page_bytes, page_count}; }

  float query(std::int64_t i) const {
    using namespace kvire;
    if (element == Element::e4m3) return decode_element<Element::e4m3>(load_code<Element::e4m3>(queries.data(), static_cast<int>(i)));
    if (element == Element::bf16) return decode_element<Element::bf16>(load_code<Element::bf16>(queries.data(), static_cast<int>(i)));
    return decode_element<Element::f32>(load_code<Element::f32>(queries.data(), static_cast<int>(i)));
  }
  void set_query(std::int64_t i, float x) {
    const std::uint32_t bits = kvire::bits_of(x);
    if (element == kvire::Element::e4m3) {
      queries[static_cast<std::size_t>(i)] = std::byte{kvire::e4m3_from_bits(bits)};
    } else if (element == kvire::Element::bf16) {
      const std::uint16_t code = kvire::bf16_from_bits(bits);
      std::memcpy(queries.data() + 2 * i, &code, 2);
    } else {
      std::memcpy(queries.data() + 4 * i, &x, 4);
    }
  }

  kvire::Queries query_view() const { return {queries.data(), element, batch, next_n, heads, P::dim}; }
  kvire::Tensor<const float, 3> weight_view() const { return {weights.data(), {batch, next_n, heads}}; }
  kvire::Tensor<const std::int32_t, 2> table_view() const { return {table.data(), {batch, max_pages}}; }
  kvire::Tensor<const std::int32_t, 2> length_view() const { return {lengths.data(), {batch, per_query ? next_n : 1}}; }
};

/// What scores hold before a kernel runs.
inline constexpr float untouched = 123456.0F;

struct Scores {
  std::vector<float> values;
  kvire::LogitsCounts counts;
};

template <class P>
Scores run_logits(const KeyCase<P>& c, kvire::SimdLevel level, kvire::Stream<kvire::Host>& stream) {
  Scores out;
  out.values.assign(static_cast<std::size_t>(c.batch * c.next_n * c.stride), untouched);
  const kvire::Tensor<float, 3> scores{out.values.data(), {c.batch, c.next_n, c.stride}};
  kvire::sparse_logits<P>(c.query_view(), c.weight_view(), kvire::assume_ready(c.view()), c.table_view(), c.length_view(), scores, stream,
                          {.counts = &out.counts, .level = level})
      .value();
  stream.synchronize().value();
  return out;
}

inline kvire::Stream<kvire::Host>& test_stream() {
  static auto stream = kvire::Stream<kvire::Host>::make().value();
  return stream;
}

inline std::vector<kvire::SimdLevel> levels() {
  std::vector<kvire::SimdLevel> out;
  for (const auto level : {kvire::SimdLevel::plain, kvire::SimdLevel::baseline, kvire::SimdLevel::avx2, kvire::SimdLevel::avx512}) {
    if (kvire::supports(level)) out.push_back(level);
  }
  return out;
}

/// The key of one token in float64, scales applied.
template <class P>
std::vector<double> exact_key(const std::byte* page, int token) {
  std::vector<double> key(P::dim);
  // Written out, because nvcc warns where for_each_field, which kernels use too, calls a lambda of the host alone.
  const auto decode = [&](auto field) {
    using F = decltype(field);
    if constexpr (F::logical) {
      for (int i = 0; i < F::count; ++i) {
        key[static_cast<std::size_t>(F::first + i)] = kvire::decode_element<F::element>(kvire::load_code<F::element>(page + F::offset(token), i));
      }
    }
  };
  [&]<int... I>(std::integer_sequence<int, I...>) { (decode(kvire::RowField<P, I>{}), ...); }(std::make_integer_sequence<int, P::section_count>{});
  if constexpr (P::template has<kvire::role::Scale>) {
    using F = kvire::RowField<P, P::template section_of<typename P::Scaling::of>>;
    using S = kvire::RowField<P, P::template section_of<kvire::role::Scale>>;
    for (int i = 0; i < F::count; ++i) {
      key[static_cast<std::size_t>(F::first + i)] *=
          kvire::decode_element<S::element>(kvire::load_code<S::element>(page + S::offset(token), i / P::Scaling::block));
    }
  }
  return key;
}

struct Exact {
  double logit = 0;
  double magnitude = 0;  // sum |w| * sum |q.k| terms: what tolerances are relative to
  bool masked = false;   // no page: -inf
};

template <class P>
Exact exact_logit(const KeyCase<P>& c, int b, int n, std::int64_t position) {
  Exact out;
  const std::int32_t id = c.table[static_cast<std::size_t>(b * c.max_pages + position / P::tokens_per_page)];
  if (id < 0 || id >= c.page_count) return {0, 0, true};
  const auto key = exact_key<P>(c.page(id), static_cast<int>(position % P::tokens_per_page));
  for (int h = 0; h < c.heads; ++h) {
    const std::int64_t head = (std::int64_t(b) * c.next_n + n) * c.heads + h;
    double dot = 0;
    double terms = 0;
    for (int d = 0; d < P::dim; ++d) {
      const double term = key[static_cast<std::size_t>(d)] * c.query(head * P::dim + d);
      dot += term;
      terms += std::fabs(term);
    }
    const double w = c.weights[static_cast<std::size_t>(head)];
    out.logit += w * std::max(dot, 0.0);
    out.magnitude += std::fabs(w) * terms;
  }
  return out;
}

struct CaseShape {
  int batch = 2, next_n = 1, heads = 4, max_pages = 3;
  kvire::Element element = kvire::Element::f32;
  bool per_query = false;
  int holes_percent = 0;  // page-table entries that are -1 or beyond the pool
};

/// Random keys in random pages; the rest of the pool is poisoned.
template <class P>
KeyCase<P> random_case(const CaseShape& shape, std::mt19937& random) {
  KeyCase<P> c;
  c.batch = shape.batch, c.next_n = shape.next_n, c.heads = shape.heads, c.max_pages = shape.max_pages;
  c.element = shape.element, c.per_query = shape.per_query;
  c.stride = std::int64_t(c.max_pages) * P::tokens_per_page + static_cast<int>(random() % 5);
  c.page_count = c.batch * c.max_pages * 2 + 3;
  c.pages.assign(static_cast<std::size_t>(P::page_bytes * c.page_count), std::byte{0xFF});
  std::normal_distribution<float> normal;
  const std::size_t queries = static_cast<std::size_t>(c.batch * c.next_n * c.heads) * P::dim;
  c.queries.resize(queries * 4);
  for (std::size_t i = 0; i < queries; ++i) c.set_query(static_cast<std::int64_t>(i), normal(random));
  for (int i = 0; i < c.batch * c.next_n * c.heads; ++i) c.weights.push_back(normal(random));

  std::vector<std::int32_t> ids;
  for (int i = 1; i < c.page_count; ++i) ids.push_back(i);
  std::shuffle(ids.begin(), ids.end(), random);
  const int most = c.max_pages * P::tokens_per_page;
  for (int b = 0; b < c.batch; ++b) {
    int longest = 0;
    for (int n = 0; n < (c.per_query ? c.next_n : 1); ++n) {
      int length = static_cast<int>(random() % static_cast<unsigned>(most + 1));
      if (random() % 8 == 0) length = 0;
      if (random() % 8 == 0) length = most;
      c.lengths.push_back(length);
      longest = std::max(longest, length);
    }
    for (int p = 0; p < c.max_pages; ++p) {
      const int tokens = std::min(P::tokens_per_page, longest - p * P::tokens_per_page);
      std::int32_t id = -1;
      if (tokens > 0) {
        id = ids.back();
        ids.pop_back();
        for (int t = 0; t < tokens; ++t) {
          float row[P::dim];
          for (float& x : row) x = normal(random);
          kvire::encode_row<P>(row, c.page(id), t);
        }
        if (static_cast<int>(random() % 100) < shape.holes_percent) id = random() % 2 == 0 ? -1 : random() % 2 == 0 ? c.page_count : 0x7FFFFFFF;
      }
      c.table.push_back(id);
    }
  }
  return c;
}

}  // namespace kvire_test
