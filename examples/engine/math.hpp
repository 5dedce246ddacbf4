// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

namespace engine {

inline constexpr int heads = 2;         ///< attention heads
inline constexpr int latent_dim = 512;  ///< 448 without and 64 with a rotary position
inline constexpr int rope_dim = 64;     ///< rotated dims, the last of a row
inline constexpr int index_dim = 128;

/// A matrix [inputs][outputs], packed in strips of 32 outputs; outputs are padded to whole strips.
struct Matrix {
  static constexpr int strip = 32;
  int inputs = 0;
  int outputs = 0;
  std::vector<float> packed;  ///< [outputs / strip][inputs][strip]
};

/// The arithmetic of the model. Every function computes one row (or a fixed tile of four rows, lane by lane) in one fixed order of
/// operations, whatever else is in the batch: the same row gives the same bits in every batch, chunk and order. The vector width is
/// chosen once, at run time, from what the machine has.
namespace math {

inline constexpr int tile_rows = 4;

/// y[row][strip * 32 + i] = sum over k of x[row][k] * m[k][..], k ascending, for the rows [first, first + 4) that are below `rows`.
void project_tile(const Matrix& m, int strip, const float* x, std::ptrdiff_t x_stride, float* y, std::ptrdiff_t y_stride, int first, int rows);

/// Attention of one row over `count` latents, keys and values in one: out[h] = sum softmax(scale * q[h] . latent) * latent.
/// `sink[h]` is one more score that has no value. `scratch` holds heads * count floats.
void attend(const float* q, const float* const* latents, int count, const float* sink, float scale, float* scratch, float* out);

/// out[d] = sum over candidates of softmax(score[c][d] + bias[c][d]) * value[c][d], for d < dims (a multiple of 16).
/// A null candidate takes no part. bias is [count][dims].
void compress(const float* const* values, const float* const* scores, const float* bias, int count, int dims, float* out);

/// x * rsqrt(mean(x^2) + 1e-6) * gain; gain may be null. dims is a multiple of 16; out may be x.
void rms_norm(const float* x, const float* gain, int dims, float* out);

/// Rotates the pairs (2i, 2i+1) of the last 64 dims by angles whose 32 cosines and sines are given.
void rope(float* x, int dims, const float* cos, const float* sin);

/// 128-point Hadamard transform in natural order, times 1/sqrt(128).
void hadamard128(float* x);

}  // namespace math
}  // namespace engine
