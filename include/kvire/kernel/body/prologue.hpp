// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/body/row_split.hpp>

KVIRE_NAMESPACE_BEGIN

/// What happens to a row before it is encoded, in this order, each part optional; f32 throughout, in a fixed order of operations.
/// Plain values, to be passed by value to a kernel. Source: the fused index-key store of SGLang's DeepSeek-V4 kernels.
struct Prologue {
  /// RMSNorm over all dims: x * (1 / sqrt(mean(x^2) + epsilon)) * weight.
  bool norm = false;
  float epsilon = 1e-6F;          ///< finite, not below 0
  const float* weight = nullptr;  ///< [dim]; none: ones

  /// RoPE on the last `rope_dims` dims, in interleaved pairs: (a, b) -> (a cos - b sin, a sin + b cos).
  int rope_dims = 0;                       ///< even; 0: none
  const float* cos = nullptr;              ///< [table_rows][rope_dims / 2]
  const float* sin = nullptr;              ///< the same
  const kstd::int64_t* positions = nullptr;  ///< [rows] the table row of each row; none: row i takes table row i
  kstd::int64_t table_rows = 0;

  /// Hadamard transform over all dims (a power of two) in Sylvester's order, times 1 / sqrt(dim).
  bool hadamard = false;

  KVIRE_HD constexpr bool any() const { return norm || rope_dims > 0 || hadamard; }

  /// Table row of row `item`; not in [0, table_rows) for a position that the tables do not have.
  KVIRE_HD kstd::int64_t position(kstd::int64_t item) const { return positions != nullptr ? positions[item] : item; }
};

namespace body {

/// x * (1 / sqrt(mean(x^2) + epsilon)) * weight. Each lane sums its squares in ascending order, the group adds the lanes in its fixed tree.
template <class Split, LaneGroup G, class Pieces>
KVIRE_HD void rms_norm(G g, Pieces& pieces, const float* weight, float epsilon) {
  typename G::template Lanes<float> sum;
  g.each([&](int lane) {
    float s = 0;
    if (lane < Split::lanes) {
      for (int i = 0; i < Split::elements; ++i) s = fma_rn(pieces[lane].x[i], pieces[lane].x[i], s);
    }
    sum[lane] = s;
  });
  reduce_sum(g, sum);
  const float mean = div_rn(sum[0], static_cast<float>(Split::dim));
  const float factor = div_rn(1.0F, sqrt_rn(add_rn(mean, epsilon)));
  g.each([&](int lane) {
    if (lane >= Split::lanes) return;
    for (int i = 0; i < Split::elements; ++i) {
      const float x = mul_rn(pieces[lane].x[i], factor);
      pieces[lane].x[i] = weight != nullptr ? mul_rn(x, weight[lane * Split::elements + i]) : x;
    }
  });
}

/// Turns the pairs of the last `rope_dims` dims by the angles whose cosines and sines are given, rope_dims / 2 of each.
template <class Split, LaneGroup G, class Pieces>
KVIRE_HD void rope(G g, Pieces& pieces, int rope_dims, const float* cos, const float* sin) {
  g.each([&](int lane) {
    if (lane >= Split::lanes) return;
    for (int i = 0; i + 1 < Split::elements; i += 2) {
      const int pair = lane * Split::elements + i - (Split::dim - rope_dims);
      if (pair < 0) continue;
      const float a = pieces[lane].x[i];
      const float b = pieces[lane].x[i + 1];
      const float c = cos[pair / 2];
      const float s = sin[pair / 2];
      pieces[lane].x[i] = sub_rn(mul_rn(a, c), mul_rn(b, s));
      pieces[lane].x[i + 1] = add_rn(mul_rn(a, s), mul_rn(b, c));
    }
  });
}

/// Butterflies at distance 1, 2, 4 ... dim / 2: within lanes first, then between them; then times 1 / sqrt(dim), rounded once.
template <class Split, LaneGroup G, class Pieces>
KVIRE_HD void hadamard(G g, Pieces& pieces) {
  g.each([&](int lane) {
    if (lane >= Split::lanes) return;
    for (int distance = 1; distance < Split::elements; distance *= 2) {
      for (int i = 0; i < Split::elements; ++i) {
        if ((i & distance) != 0) continue;
        const float a = pieces[lane].x[i];
        const float b = pieces[lane].x[i + distance];
        pieces[lane].x[i] = add_rn(a, b);
        pieces[lane].x[i + distance] = sub_rn(a, b);
      }
    }
  });
  for (int distance = 1; distance < Split::lanes; distance *= 2) {
    for (int i = 0; i < Split::elements; ++i) {
      typename G::template Lanes<float> own;
      g.each([&](int lane) { own[lane] = pieces[lane].x[i]; });
      const auto other = g.shuffle_xor(own, distance);
      g.each([&](int lane) { pieces[lane].x[i] = (lane & distance) != 0 ? sub_rn(other[lane], own[lane]) : add_rn(own[lane], other[lane]); });
    }
  }
  constexpr float factor = div_rn(1.0F, sqrt_rn(static_cast<float>(Split::dim)));
  g.each([&](int lane) {
    for (int i = 0; i < Split::elements; ++i) pieces[lane].x[i] = mul_rn(pieces[lane].x[i], factor);
  });
}

/// The whole prologue of row `item`, whose elements the lanes hold. Requires a position within the tables if there is RoPE, rope_dims not above
/// dim, and a power-of-two dim if there is a Hadamard.
template <class Split, LaneGroup G, class Pieces>
KVIRE_HD void apply_prologue(G g, Pieces& pieces, const Prologue& prologue, kstd::int64_t item) {
  if (prologue.norm) rms_norm<Split>(g, pieces, prologue.weight, prologue.epsilon);
  if (prologue.rope_dims > 0) {
    const kstd::int64_t at = prologue.position(item) * (prologue.rope_dims / 2);
    rope<Split>(g, pieces, prologue.rope_dims, prologue.cos + at, prologue.sin + at);
  }
  if constexpr (is_power_of_two(Split::dim)) {
    if (prologue.hadamard) hadamard<Split>(g, pieces);
  }
}

}  // namespace body
KVIRE_NAMESPACE_END
