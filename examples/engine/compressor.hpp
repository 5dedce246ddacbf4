// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <kvire/exec/host/parallel.hpp>

#include "batch.hpp"

namespace engine {

/// Compresses the groups that a step completes, into out[group][dims]. Candidates of the same step come from the activation, earlier ones from
/// the state pages: fp32 on both sides, so the bits are the same. Ratio 4 has eight candidates, four of the group before (through the overlap
/// half of their rows) and four of its own; ratio 128 has its own.
template <class StateEntry, class Reader>
void compress(const Compressor& c, int ratio, const Batch& batch, const std::vector<Group>& groups, const std::vector<float>& states, const Reader& reader,
              std::vector<float>& out) {
  const int count = ratio == 4 ? 2 * ratio : ratio;
  const std::size_t dims = static_cast<std::size_t>(c.dims);
  const std::size_t width = static_cast<std::size_t>(c.width);
  kvire::parallel_for(static_cast<std::int64_t>(groups.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> earlier;
    std::vector<const float*> values(static_cast<std::size_t>(count));
    std::vector<const float*> scores(static_cast<std::size_t>(count));
    for (std::int64_t i = begin; i < end; ++i) {
      const Group& group = groups[static_cast<std::size_t>(i)];
      const Span& s = batch.spans[static_cast<std::size_t>(group.span)];
      earlier.resize(static_cast<std::size_t>(count) * width);
      for (int k = 0; k < count; ++k) {
        const bool overlap = ratio == 4 && k < ratio;
        const std::int64_t position = group.index * ratio + k - (count - ratio);
        const float* row = nullptr;
        if (position >= s.start) {
          row = &states[static_cast<std::size_t>(s.first_row + position - s.start) * width];
        } else if (position >= 0) {
          float* copy = &earlier[static_cast<std::size_t>(k) * width];
          reader.row(state_slot<StateEntry>(s.tables, position), copy);
          row = copy;
        }
        const std::size_t half = ratio == 4 ? 2 * dims : dims;  // where the scores start
        const std::size_t part = ratio == 4 && !overlap ? dims : 0;
        values[static_cast<std::size_t>(k)] = row == nullptr ? nullptr : row + part;
        scores[static_cast<std::size_t>(k)] = row == nullptr ? nullptr : row + half + part;
      }
      math::compress(values.data(), scores.data(), c.bias.data(), count, c.dims, &out[static_cast<std::size_t>(i) * dims]);
    }
  });
}

}  // namespace engine
