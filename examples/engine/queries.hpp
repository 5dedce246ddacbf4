// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include <kvire/codec/float_bits.hpp>
#include <kvire/preset/deepseek_v4.hpp>

#include "math.hpp"

namespace engine {

/// Index queries as the kernels take them. The keys' policy decides: fp8 keys meet fp8 queries, whose scale moves into the head's weight; the
/// others meet bf16 queries.
template <class IndexKey>
struct EncodedQueries {
  static constexpr bool fp8 = std::is_same_v<IndexKey, kvire::preset::deepseek_v4::IndexKeyFp8>;
  static constexpr kvire::Element element = fp8 ? kvire::Element::e4m3 : kvire::Element::bf16;
  static constexpr std::size_t bytes = index_dim * (fp8 ? 1 : 2);  ///< of one head's query

  std::vector<unsigned char> codes;
  std::vector<float> weights;

  EncodedQueries() = default;
  explicit EncodedQueries(std::size_t heads_in_all) { resize(heads_in_all); }
  void resize(std::size_t heads_in_all) {
    codes.resize(heads_in_all * bytes);
    weights.resize(heads_in_all);
  }

  /// The query of head `at`, [index_dim], and its weight.
  void set(std::size_t at, const float* q, float weight) {
    if constexpr (fp8) {
      float amax = 1e-4f;
      for (int d = 0; d < index_dim; ++d) amax = std::max(amax, std::fabs(q[d]));
      const float scale = amax / 448.0f;
      const float inverse = 1.0f / scale;
      for (int d = 0; d < index_dim; ++d) codes[at * bytes + static_cast<std::size_t>(d)] = kvire::e4m3_from_f32(q[d] * inverse);
      weights[at] = weight * scale;
    } else {
      for (int d = 0; d < index_dim; ++d) {
        const std::uint16_t code = kvire::bf16_from_f32(q[d]);
        std::memcpy(&codes[at * bytes + static_cast<std::size_t>(d) * 2], &code, sizeof code);
      }
      weights[at] = weight;
    }
  }
};

}  // namespace engine
