// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include <kvire/exec/host/parallel.hpp>

#include "math.hpp"

namespace engine {

/// Calls f(row) for each of `n` rows, on all cores.
template <class F>
void each_row(std::int64_t n, F&& f) {
  kvire::parallel_for(n, 16, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) f(static_cast<std::size_t>(r));
  });
}

/// A matrix and where its product goes, [rows][matrix outputs].
struct Projection {
  const Matrix* matrix;
  float* out;
};

/// All projections of one input, [rows][inputs]: strip by strip over all rows, so that the weights of a strip stay in the nearest cache.
inline void project(const float* x, int inputs, int rows, std::initializer_list<Projection> list) {
  for (const Projection& p : list) {
    const Matrix& m = *p.matrix;
    const int strips = m.outputs / Matrix::strip;
    const std::int64_t work = std::int64_t(rows) * m.inputs * Matrix::strip;
    kvire::parallel_for(strips, std::max<std::int64_t>(1, 200'000 / std::max<std::int64_t>(1, work)), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t s = begin; s < end; ++s) {
        for (int r = 0; r < rows; r += math::tile_rows) math::project_tile(m, static_cast<int>(s), x, inputs, p.out, m.outputs, r, rows);
      }
    });
  }
}

}  // namespace engine
