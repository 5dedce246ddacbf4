// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <kvire/codec/float_bits.hpp>
#include <kvire/layout/element.hpp>
#include <kvire/layout/field.hpp>

// Inputs of a paged sparse-logits call, and the float64 answer.

namespace kvire_test {

/// Heads, query tokens and table of one call; buffers in the kernels' own formats.
struct LogitsCase {
  int batch = 0, next_n = 1, heads = 64, dim = 128;
  int pages = 0, table_stride = 0;
  std::int64_t page_stride = 0;
  std::int64_t logits_stride = 0;
  bool lengths_per_query = false;
  kvire::Element query_element = kvire::Element::e4m3;
  std::vector<std::uint8_t> memory;   // the pages
  std::vector<std::uint8_t> queries;  // [batch][next_n][heads][dim]
  std::vector<float> weights;
  std::vector<std::int32_t> table;
  std::vector<std::int32_t> lengths;

  int visible(int row, int q) const {
    const int v = lengths_per_query ? lengths[static_cast<std::size_t>(row * next_n + q)] : lengths[static_cast<std::size_t>(row)] - (next_n - 1 - q);
    return v < 0 ? 0 : v;
  }
  int longest(int row) const {
    int most = 0;
    for (int q = 0; q < next_n; ++q) most = std::max(most, visible(row, q));
    return most;
  }
  std::vector<float> query_numbers;  // what `queries` stand for; filled by decode_queries
  void decode_queries() {
    const bool e4m3 = query_element == kvire::Element::e4m3;
    query_numbers.resize(queries.size() / (e4m3 ? 1 : 2));
    for (std::size_t i = 0; i < query_numbers.size(); ++i) {
      std::uint16_t code = 0;
      if (!e4m3) std::memcpy(&code, &queries[i * 2], 2);
      query_numbers[i] = e4m3 ? kvire::f32_from_e4m3(queries[i]) : kvire::f32_from_bf16(code);
    }
  }
};

/// One key as numbers, with its outer scale.
template <class P>
void key_numbers(const std::uint8_t* page, int token, std::vector<double>& key, double& scale) {
  using namespace kvire;
  constexpr Element e = P::template element_of<role::Value>;
  const std::uint8_t* row = page + P::template offset<role::Value>(token);
  scale = 1;
  for (int d = 0; d < P::dim; ++d) {
    if constexpr (e == Element::e4m3) {
      key[static_cast<std::size_t>(d)] = f32_from_e4m3(row[d]);
    } else if constexpr (e == Element::bf16) {
      std::uint16_t code = 0;
      std::memcpy(&code, row + 2 * d, 2);
      key[static_cast<std::size_t>(d)] = f32_from_bf16(code);
    } else {
      const std::uint8_t code = static_cast<std::uint8_t>(d % 2 != 0 ? row[d / 2] >> 4 : row[d / 2] & 15);
      const std::uint8_t block = page[P::template offset<role::Scale>(token) + d / (P::dim / P::template count_of<role::Scale>)];
      key[static_cast<std::size_t>(d)] = static_cast<double>(f32_from_e2m1(code)) * f32_from_ue8m0(block);
    }
  }
  if constexpr (e == Element::e4m3) {
    float s = 0;
    std::memcpy(&s, page + P::template offset<role::Scale>(token), 4);
    scale = s;
  }
}

/// logit and the sum of magnitudes |w| k_scale |q . k| terms it is made of.
template <class P>
void reference_logit(const LogitsCase& c, int row, int q, int token, double& logit, double& magnitude) {
  const std::int32_t id = c.table[static_cast<std::size_t>(row) * static_cast<std::size_t>(c.table_stride) + static_cast<std::size_t>(token / P::tokens_per_page)];
  logit = -std::numeric_limits<double>::infinity();
  magnitude = 0;
  if (id < 0 || id >= c.pages) return;
  std::vector<double> key(static_cast<std::size_t>(P::dim));
  double scale = 1;
  key_numbers<P>(c.memory.data() + c.page_stride * id, token % P::tokens_per_page, key, scale);
  logit = 0;
  for (int h = 0; h < c.heads; ++h) {
    const std::size_t head = static_cast<std::size_t>((row * c.next_n + q) * c.heads + h);
    double dot = 0, all = 0;
    for (int d = 0; d < c.dim; ++d) {
      const double term = static_cast<double>(c.query_numbers[head * static_cast<std::size_t>(c.dim) + static_cast<std::size_t>(d)]) * key[static_cast<std::size_t>(d)];
      dot += term;
      all += std::fabs(term);
    }
    logit += c.weights[head] * (dot > 0 || std::isnan(dot) ? dot : 0.0) * scale;
    magnitude += std::fabs(c.weights[head]) * all * std::fabs(scale);
  }
  if (std::isnan(logit)) logit = -std::numeric_limits<double>::infinity();
}

/// Writes `x` as key `token` of a page, by the policy's own value format; scales as random numbers where the format has them.
template <class P, class Random>
void random_key(std::uint8_t* page, int token, Random& random) {
  using namespace kvire;
  constexpr Element e = P::template element_of<role::Value>;
  std::uint8_t* row = page + P::template offset<role::Value>(token);
  std::normal_distribution<float> normal;
  for (int d = 0; d < P::dim; ++d) {
    const float x = normal(random);
    if constexpr (e == Element::e4m3) {
      row[d] = e4m3_from_f32(x * 100);
    } else if constexpr (e == Element::bf16) {
      const std::uint16_t code = bf16_from_f32(x);
      std::memcpy(row + 2 * d, &code, 2);
    } else {
      const auto code = static_cast<std::uint8_t>(random() & 15U);
      row[d / 2] = d % 2 != 0 ? static_cast<std::uint8_t>((row[d / 2] & 15) | (code << 4)) : code;
    }
  }
  if constexpr (P::template has<role::Scale>) {
    std::uint8_t* scale = page + P::template offset<role::Scale>(token);
    if constexpr (e == Element::e4m3) {
      const float s = std::exp(normal(random) - 4);
      std::memcpy(scale, &s, 4);
    } else {
      for (int b = 0; b < P::template count_of<role::Scale>; ++b) scale[b] = static_cast<std::uint8_t>(118 + random() % 9);
    }
  }
}

/// Random inputs: rows of the given lengths (the longest a query token sees), pages in random order, everything nobody owns 0xFF.
template <class P>
LogitsCase random_case(unsigned seed, std::vector<std::int32_t> lengths, int next_n, int heads, kvire::Element query_element) {
  std::mt19937 random(seed);
  LogitsCase c;
  c.batch = static_cast<int>(lengths.size());
  c.next_n = next_n;
  c.heads = heads;
  c.dim = P::dim;
  c.query_element = query_element;
  c.lengths = std::move(lengths);
  int longest = 1, total = 0;
  for (const int n : c.lengths) {
    longest = std::max(longest, n);
    total += (n + P::tokens_per_page - 1) / P::tokens_per_page;
  }
  c.table_stride = (longest + P::tokens_per_page - 1) / P::tokens_per_page + static_cast<int>(random() % 3);
  c.logits_stride = (static_cast<std::int64_t>(longest) + 63) / 4 * 4;
  c.pages = total + 8;
  c.page_stride = P::page_bytes + static_cast<std::int64_t>(random() % 2) * 64;
  c.memory.assign(static_cast<std::size_t>(c.page_stride * c.pages), 0xFF);
  std::vector<std::int32_t> order(static_cast<std::size_t>(c.pages - 1));
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i + 1);
  std::shuffle(order.begin(), order.end(), random);
  c.table.assign(static_cast<std::size_t>(c.batch) * static_cast<std::size_t>(c.table_stride), 0);
  std::size_t next = 0;
  for (int row = 0; row < c.batch; ++row) {
    const int n = c.lengths[static_cast<std::size_t>(row)];
    const int used = (n + P::tokens_per_page - 1) / P::tokens_per_page;
    for (int p = 0; p < c.table_stride; ++p) {
      auto& entry = c.table[static_cast<std::size_t>(row) * static_cast<std::size_t>(c.table_stride) + static_cast<std::size_t>(p)];
      if (p >= used) {
        entry = random() % 2 != 0 ? -1 : 0x7FFFFFFF;  // nobody may follow these
        continue;
      }
      if (random() % 50 == 0) {
        entry = -1;
        continue;
      }
      entry = order[next++];
      std::uint8_t* page = c.memory.data() + c.page_stride * entry;
      for (int t = 0; t < P::tokens_per_page && p * P::tokens_per_page + t < n; ++t) random_key<P>(page, t, random);
    }
  }
  const std::size_t heads_all = static_cast<std::size_t>(c.batch) * static_cast<std::size_t>(next_n) * static_cast<std::size_t>(heads);
  std::normal_distribution<float> normal;
  c.weights.resize(heads_all);
  for (float& w : c.weights) w = normal(random);
  const std::size_t elements = heads_all * static_cast<std::size_t>(c.dim);
  c.queries.resize(elements * (query_element == kvire::Element::e4m3 ? 1 : 2));
  for (std::size_t i = 0; i < elements; ++i) {
    const float x = normal(random);
    if (query_element == kvire::Element::e4m3) {
      c.queries[i] = kvire::e4m3_from_f32(x * 50);
    } else {
      const std::uint16_t code = kvire::bf16_from_f32(x);
      std::memcpy(&c.queries[i * 2], &code, 2);
    }
  }
  c.decode_queries();
  return c;
}

}  // namespace kvire_test
