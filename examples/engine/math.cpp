// SPDX-License-Identifier: Apache-2.0
#include "math.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <kvire/base/config.hpp>

namespace engine::math {
namespace {

constexpr int lanes = 16;
using Floats = float __attribute__((vector_size(lanes * sizeof(float))));
using Ints = std::int32_t __attribute__((vector_size(lanes * sizeof(float))));
// The same vectors at any address.
using LooseFloats = float __attribute__((vector_size(lanes * sizeof(float)), aligned(sizeof(float)), may_alias));

// Vectors travel by reference: passed by value, their calling convention would depend on the target.
KVIRE_INLINE void load(Floats& v, const float* p) { v = *reinterpret_cast<const LooseFloats*>(p); }
KVIRE_INLINE void store(float* p, const Floats& v) { *reinterpret_cast<LooseFloats*>(p) = v; }

KVIRE_INLINE float sum(const Floats& v) {
  float a[lanes];
  store(a, v);
  for (int half = lanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) a[i] += a[i + half];
  }
  return a[0];
}

// e^x for x <= 0 (Cephes' polynomial, about 2 ulp); below -87 it is 0.
KVIRE_INLINE void exponential(Floats& x) {
  const Floats zero = {};
  const Ints keep = x > zero - 87.0f;
  x = keep ? x : zero;
  const Floats magic = zero + 12582912.0f;
  const Floats shifted = x * 1.44269504f + magic;
  const Floats n = shifted - magic;
  const Floats r = x - n * 0.693359375f - n * -2.12194440e-4f;
  Floats p = zero + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  x = keep ? p * __builtin_bit_cast(Floats, power) : zero;
}

KVIRE_INLINE void project_tile_body(const Matrix& m, int strip, const float* x, std::ptrdiff_t x_stride, float* y, std::ptrdiff_t y_stride, int first,
                                    int rows) {
  // A short last tile repeats its last row, so that every row goes through the same instructions.
  const float* in[tile_rows];
  for (int r = 0; r < tile_rows; ++r) in[r] = x + std::min(first + r, rows - 1) * x_stride;
  const float* weights = m.packed.data() + static_cast<std::ptrdiff_t>(strip) * m.inputs * Matrix::strip;
  Floats a[tile_rows][2] = {};
  for (int k = 0; k < m.inputs; ++k, weights += Matrix::strip) {
    Floats w0, w1;
    load(w0, weights);
    load(w1, weights + lanes);
    for (int r = 0; r < tile_rows; ++r) {
      a[r][0] += in[r][k] * w0;
      a[r][1] += in[r][k] * w1;
    }
  }
  for (int r = 0; r < tile_rows && first + r < rows; ++r) {
    float* out = y + (first + r) * y_stride + strip * Matrix::strip;
    store(out, a[r][0]);
    store(out + lanes, a[r][1]);
  }
}

KVIRE_INLINE void attend_body(const float* q, const float* const* latents, int count, const float* sink, float scale, float* scratch, float* out) {
  for (int j = 0; j < count; ++j) {
    Floats a[heads][2] = {};
    for (int d = 0; d < latent_dim; d += 2 * lanes) {
      Floats k0, k1;
      load(k0, latents[j] + d);
      load(k1, latents[j] + d + lanes);
      for (int h = 0; h < heads; ++h) {
        Floats q0, q1;
        load(q0, q + h * latent_dim + d);
        load(q1, q + h * latent_dim + d + lanes);
        a[h][0] += q0 * k0;
        a[h][1] += q1 * k1;
      }
    }
    for (int h = 0; h < heads; ++h) {
      const Floats both = a[h][0] + a[h][1];
      scratch[h * count + j] = sum(both) * scale;
    }
  }
  for (int h = 0; h < heads; ++h) {
    float* p = scratch + h * count;
    float top = sink[h];
    for (int j = 0; j < count; ++j) top = std::max(top, p[j]);
    float total = 0;
    for (int j = 0; j <= count; j += lanes) {
      // One position past the end stands for the sink.
      float part[lanes];
      for (int i = 0; i < lanes; ++i) part[i] = j + i < count ? p[j + i] - top : j + i == count ? sink[h] - top : -1000.0f;
      Floats e;
      load(e, part);
      exponential(e);
      store(part, e);
      for (int i = 0; i < lanes && j + i < count; ++i) p[j + i] = part[i];
      for (int i = 0; i < lanes; ++i) total += part[i];
    }
    const float inverse = 1.0f / total;
    for (int j = 0; j < count; ++j) p[j] *= inverse;
  }
  constexpr int block = 4;
  for (int d = 0; d < latent_dim; d += block * lanes) {
    Floats a[heads][block] = {};
    for (int j = 0; j < count; ++j) {
      for (int b = 0; b < block; ++b) {
        Floats v;
        load(v, latents[j] + d + b * lanes);
        for (int h = 0; h < heads; ++h) a[h][b] += scratch[h * count + j] * v;
      }
    }
    for (int h = 0; h < heads; ++h) {
      for (int b = 0; b < block; ++b) store(out + h * latent_dim + d + b * lanes, a[h][b]);
    }
  }
}

KVIRE_INLINE void compress_body(const float* const* values, const float* const* scores, const float* bias, int count, int dims, float* out) {
  for (int d = 0; d < dims; d += lanes) {
    const Floats zero = {};
    Floats top = zero - 3e38f;
    for (int c = 0; c < count; ++c) {
      if (scores[c] == nullptr) continue;
      Floats s, b;
      load(s, scores[c] + d);
      load(b, bias + static_cast<std::ptrdiff_t>(c) * dims + d);
      s += b;
      top = s > top ? s : top;
    }
    Floats total = zero;
    Floats mixed = zero;
    for (int c = 0; c < count; ++c) {
      if (scores[c] == nullptr) continue;
      Floats s, b, v;
      load(s, scores[c] + d);
      load(b, bias + static_cast<std::ptrdiff_t>(c) * dims + d);
      load(v, values[c] + d);
      s = s + b - top;
      exponential(s);
      total += s;
      mixed += s * v;
    }
    const Floats result = mixed / total;
    store(out + d, result);
  }
}

KVIRE_INLINE void rms_norm_body(const float* x, const float* gain, int dims, float* out) {
  Floats squares = {};
  for (int d = 0; d < dims; d += lanes) {
    Floats v;
    load(v, x + d);
    squares += v * v;
  }
  const float factor = 1.0f / std::sqrt(sum(squares) / static_cast<float>(dims) + 1e-6f);
  for (int d = 0; d < dims; d += lanes) {
    Floats v, g = Floats{} + 1.0f;
    load(v, x + d);
    if (gain != nullptr) load(g, gain + d);
    const Floats scaled = v * factor * g;
    store(out + d, scaled);
  }
}

// One version a target of each body; the functions without a suffix pick one.
enum class Target { plain, avx2, avx512 };

Target target() {
#if KVIRE_X86_64
  static const Target chosen = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") ? Target::avx512
                               : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")                                             ? Target::avx2
                                                                                                                                             : Target::plain;
  return chosen;
#else
  return Target::plain;
#endif
}

#if KVIRE_X86_64
#define ENGINE_VERSIONS(name, parameters, arguments)                                                                   \
  void name##_plain parameters { name##_body arguments; }                                                              \
  __attribute__((target("avx2,fma"))) void name##_avx2 parameters { name##_body arguments; }                           \
  __attribute__((target("avx512f,avx512dq,avx512vl,avx2,fma"))) void name##_avx512 parameters { \
    name##_body arguments;                                                                                             \
  }                                                                                                                    \
  void name##_chosen parameters {                                                                                      \
    switch (target()) {                                                                                                \
      case Target::avx512: return name##_avx512 arguments;                                                             \
      case Target::avx2: return name##_avx2 arguments;                                                                 \
      case Target::plain: return name##_plain arguments;                                                               \
    }                                                                                                                  \
  }
#else
#define ENGINE_VERSIONS(name, parameters, arguments) \
  void name##_chosen parameters { name##_body arguments; }
#endif

ENGINE_VERSIONS(project_tile,
                (const Matrix& m, int strip, const float* x, std::ptrdiff_t x_stride, float* y, std::ptrdiff_t y_stride, int first, int rows),
                (m, strip, x, x_stride, y, y_stride, first, rows))
ENGINE_VERSIONS(attend, (const float* q, const float* const* latents, int count, const float* sink, float scale, float* scratch, float* out),
                (q, latents, count, sink, scale, scratch, out))
ENGINE_VERSIONS(compress, (const float* const* values, const float* const* scores, const float* bias, int count, int dims, float* out),
                (values, scores, bias, count, dims, out))
ENGINE_VERSIONS(rms_norm, (const float* x, const float* gain, int dims, float* out), (x, gain, dims, out))

}  // namespace

void project_tile(const Matrix& m, int strip, const float* x, std::ptrdiff_t x_stride, float* y, std::ptrdiff_t y_stride, int first, int rows) {
  project_tile_chosen(m, strip, x, x_stride, y, y_stride, first, rows);
}
void attend(const float* q, const float* const* latents, int count, const float* sink, float scale, float* scratch, float* out) {
  attend_chosen(q, latents, count, sink, scale, scratch, out);
}
void compress(const float* const* values, const float* const* scores, const float* bias, int count, int dims, float* out) {
  compress_chosen(values, scores, bias, count, dims, out);
}
void rms_norm(const float* x, const float* gain, int dims, float* out) { rms_norm_chosen(x, gain, dims, out); }

void rope(float* x, int dims, const float* cos, const float* sin) {
  float* tail = x + dims - rope_dim;
  for (int i = 0; i < rope_dim; i += 2) {
    const float a = tail[i];
    const float b = tail[i + 1];
    tail[i] = a * cos[i / 2] - b * sin[i / 2];
    tail[i + 1] = a * sin[i / 2] + b * cos[i / 2];
  }
}

void hadamard128(float* x) {
  for (int half = 1; half < index_dim; half *= 2) {
    for (int base = 0; base < index_dim; base += 2 * half) {
      for (int i = base; i < base + half; ++i) {
        const float a = x[i];
        const float b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
  for (int i = 0; i < index_dim; ++i) x[i] *= 0.08838834764831845f;
}

}  // namespace engine::math
