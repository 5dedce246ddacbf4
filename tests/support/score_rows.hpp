// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "device_array.hpp"

// Rows of scores of many distributions, and what a top-k of them must be.

namespace kvire_test {

// The selection in its plainest words: order by (score down, position up), take k, list by position or as ordered.
inline std::vector<std::int32_t> expected(const float* x, int length, int k, bool by_score = false, const std::vector<char>& masked = {}) {
  std::vector<std::int32_t> candidates;
  for (int i = 0; i < length; ++i) {
    if (!std::isnan(x[i]) && (masked.empty() || masked[std::size_t(i)] == 0)) candidates.push_back(i);
  }
  const auto better = [&](std::int32_t a, std::int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  const std::size_t n = std::min(candidates.size(), std::size_t(k));
  if (n < candidates.size()) std::nth_element(candidates.begin(), candidates.begin() + std::ptrdiff_t(n), candidates.end(), better);
  candidates.resize(n);
  if (by_score) {
    std::sort(candidates.begin(), candidates.end(), better);
  } else {
    std::sort(candidates.begin(), candidates.end());
  }
  candidates.resize(std::size_t(k), -1);
  return candidates;
}

struct Rows {
  int rows = 1;
  int stride = 0;
  std::vector<float> scores;
  std::vector<std::int32_t> lengths;
};

inline std::vector<std::int32_t> expected(const Rows& in, int k, bool by_score = false) {
  std::vector<std::int32_t> all;
  for (int r = 0; r < in.rows; ++r) {
    const auto row = expected(in.scores.data() + std::size_t(r) * std::size_t(in.stride), in.lengths[std::size_t(r)], k, by_score);
    all.insert(all.end(), row.begin(), row.end());
  }
  return all;
}

enum class Kind { normal, narrow, wide, eighths, mostly_zero, equal, ascending, descending, infinite, late_peak, subnormal, count };

inline const char* name(Kind kind) {
  const char* names[] = {"normal", "narrow", "wide", "eighths", "mostly zero", "equal", "ascending", "descending", "infinite", "late peak", "subnormal"};
  return names[int(kind)];
}

inline Rows make(Kind kind, int rows, int length, unsigned seed) {
  Rows in;
  in.rows = rows;
  in.stride = (length + 7) / 4 * 4;
  in.scores.resize(std::size_t(rows) * std::size_t(in.stride));
  in.lengths.assign(std::size_t(rows), length);
  std::mt19937 engine{seed};
  std::normal_distribution<float> normal;
  for (int r = 0; r < rows; ++r) {
    float* x = in.scores.data() + std::size_t(r) * std::size_t(in.stride);
    for (int i = 0; i < length; ++i) {
      const float n = normal(engine);
      switch (kind) {
        case Kind::narrow: x[i] = 100 + 0.01F * n; break;
        case Kind::wide: x[i] = 5000 + 200 * n; break;
        case Kind::eighths: x[i] = std::round(n * 8) / 8; break;
        case Kind::mostly_zero: x[i] = n < 1 ? (i % 2 == 0 ? 0.0F : -0.0F) : n; break;
        case Kind::equal: x[i] = -2.5F; break;
        case Kind::ascending: x[i] = -1000 + 0.001F * float(i); break;
        case Kind::descending: x[i] = 1000 - 0.001F * float(i); break;
        case Kind::infinite: x[i] = i % 3 == 0 ? -std::numeric_limits<float>::infinity() : i % 7 == 0 ? NAN : i % 97 == 0 ? INFINITY : -n; break;
        // Few above zero, and zeros of both signs: equal all of them where subnormal numbers are taken for zero.
        case Kind::subnormal: x[i] = std::round(3 * n) == 4 && i % 2 == 0 ? -0.0F : std::ldexp(std::round(3 * n) - 4, -149); break;
        case Kind::late_peak: x[i] = n + (i > length - length / 16 ? 8 : 0); break;
        default: x[i] = n;
      }
    }
    for (int i = length; i < in.stride; ++i) x[i] = i % 2 == 0 ? INFINITY : NAN;  // beyond the length: must not be read
  }
  return in;
}

/// Rows on pages of which some are none and some not of the pool: their positions are never selected.
struct PagedRows {
  static constexpr int tokens = 64;  // of a page
  static constexpr int pool = 5000;  // pages

  explicit PagedRows(Rows in) : rows(std::move(in)), pages((*std::max_element(rows.lengths.begin(), rows.lengths.end()) + tokens - 1) / tokens) {
    for (int r = 0; r < rows.rows; ++r) {
      for (int p = 0; p < pages; ++p) table.push_back(p % 5 == 2 ? -1 : p % 11 == 7 ? 0x7FFFFFFF : (p * 7 + r) % pool);
    }
  }
  std::int32_t page(int row, int position) const { return table[std::size_t(row * pages + position / tokens)]; }
  /// The rows with NaN where no page of the pool is.
  Rows candidates() const {
    Rows left = rows;
    for (int r = 0; r < left.rows; ++r) {
      for (int i = 0; i < left.lengths[std::size_t(r)]; ++i) {
        if (page(r, i) < 0 || page(r, i) >= pool) left.scores[std::size_t(r) * std::size_t(left.stride) + std::size_t(i)] = NAN;
      }
    }
    return left;
  }

  Rows rows;
  int pages;  // of a row
  std::vector<std::int32_t> table;
};

/// `translate`: slots of the pool in place of positions.
inline std::vector<std::int32_t> expected(const PagedRows& in, int k, bool translate) {
  auto want = expected(in.candidates(), k);
  for (std::size_t i = 0; translate && i < want.size(); ++i) {
    if (want[i] >= 0) want[i] = in.page(int(i) / k, want[i]) * PagedRows::tokens + want[i] % PagedRows::tokens;
  }
  return want;
}

inline bool full() { return !small_run(); }

/// What a test goes through: all of it, or one alone when small: the middle one, or the one whose turn it is in an outer loop.
inline std::vector<int> some(std::vector<int> all) {
  return full() ? all : std::vector<int>{all[all.size() / 2]};
}
inline std::vector<int> some(std::vector<int> all, int turn) {
  return full() ? all : std::vector<int>{all[std::size_t(turn) % all.size()]};
}

}  // namespace kvire_test
