// SPDX-License-Identifier: Apache-2.0
#include "math.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <kvire/base/config.hpp>

namespace engine::math {
namespace {

// The vectors of each target: a wider one than its registers would live in memory.
template <int Lanes>
struct Vectors;
#define ENGINE_VECTORS(lanes)                                                                                             \
  template <>                                                                                                             \
  struct Vectors<lanes> {                                                                                                 \
    using Floats = float __attribute__((vector_size(lanes * sizeof(float))));                                             \
    using Ints = std::int32_t __attribute__((vector_size(lanes * sizeof(float))));                                        \
    /* The same at any address. */                                                                                        \
    using Loose = float __attribute__((vector_size(lanes * sizeof(float)), aligned(sizeof(float)), may_alias));           \
  };
ENGINE_VECTORS(4)
ENGINE_VECTORS(8)
ENGINE_VECTORS(16)
#undef ENGINE_VECTORS
template <int L>
using Floats = typename Vectors<L>::Floats;

// Vectors travel by reference: passed by value, their calling convention would depend on the target.
template <int L>
KVIRE_INLINE void load(Floats<L>& v, const float* p) {
  v = *reinterpret_cast<const typename Vectors<L>::Loose*>(p);
}
template <int L>
KVIRE_INLINE void store(float* p, const Floats<L>& v) {
  *reinterpret_cast<typename Vectors<L>::Loose*>(p) = v;
}

template <int L>
KVIRE_INLINE float sum(const Floats<L>& v) {
  float a[L];
  store<L>(a, v);
  for (int half = L / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) a[i] += a[i + half];
  }
  return a[0];
}

// e^x for x <= 0 (Cephes' polynomial, about 2 ulp); below -87 it is 0.
template <int L>
KVIRE_INLINE void exponential(Floats<L>& x) {
  const Floats<L> zero = {};
  const typename Vectors<L>::Ints keep = x > zero - 87.0f;
  x = keep ? x : zero;
  const Floats<L> magic = zero + 12582912.0f;
  const Floats<L> shifted = x * 1.44269504f + magic;
  const Floats<L> n = shifted - magic;
  const Floats<L> r = x - n * 0.693359375f - n * -2.12194440e-4f;
  Floats<L> p = zero + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const typename Vectors<L>::Ints power = (__builtin_convertvector(n, typename Vectors<L>::Ints) + 127) << 23;
  x = keep ? p * __builtin_bit_cast(Floats<L>, power) : zero;
}

template <int L>
KVIRE_INLINE void project_tile_body(const Matrix& m, int strip, const float* x, std::ptrdiff_t x_stride, float* y, std::ptrdiff_t y_stride, int first,
                                    int rows) {
  // A short last tile repeats its last row, so that every row goes through the same instructions.
  const float* in[tile_rows];
  for (int r = 0; r < tile_rows; ++r) in[r] = x + std::min(first + r, rows - 1) * x_stride;
  const float* strip_weights = m.packed.data() + static_cast<std::ptrdiff_t>(strip) * m.inputs * Matrix::strip;
  for (int column = 0; column < Matrix::strip; column += 2 * L) {
    const float* weights = strip_weights + column;
    Floats<L> a[tile_rows][2] = {};
    for (int k = 0; k < m.inputs; ++k, weights += Matrix::strip) {
      Floats<L> w0, w1;
      load<L>(w0, weights);
      load<L>(w1, weights + L);
      for (int r = 0; r < tile_rows; ++r) {
        a[r][0] += in[r][k] * w0;
        a[r][1] += in[r][k] * w1;
      }
    }
    for (int r = 0; r < tile_rows && first + r < rows; ++r) {
      float* out = y + (first + r) * y_stride + strip * Matrix::strip + column;
      store<L>(out, a[r][0]);
      store<L>(out + L, a[r][1]);
    }
  }
}

template <int L>
KVIRE_INLINE void attend_body(const float* q, const float* const* latents, int count, const float* sink, float scale, float* scratch, float* out) {
  for (int j = 0; j < count; ++j) {
    Floats<L> a[heads][2] = {};
    for (int d = 0; d < latent_dim; d += 2 * L) {
      Floats<L> k0, k1;
      load<L>(k0, latents[j] + d);
      load<L>(k1, latents[j] + d + L);
      for (int h = 0; h < heads; ++h) {
        Floats<L> q0, q1;
        load<L>(q0, q + h * latent_dim + d);
        load<L>(q1, q + h * latent_dim + d + L);
        a[h][0] += q0 * k0;
        a[h][1] += q1 * k1;
      }
    }
    for (int h = 0; h < heads; ++h) {
      const Floats<L> both = a[h][0] + a[h][1];
      scratch[h * count + j] = sum<L>(both) * scale;
    }
  }
  for (int h = 0; h < heads; ++h) {
    float* p = scratch + h * count;
    float top = sink[h];
    for (int j = 0; j < count; ++j) top = std::max(top, p[j]);
    float total = 0;
    for (int j = 0; j <= count; j += L) {
      // One position past the end stands for the sink.
      float part[L];
      for (int i = 0; i < L; ++i) part[i] = j + i < count ? p[j + i] - top : j + i == count ? sink[h] - top : -1000.0f;
      Floats<L> e;
      load<L>(e, part);
      exponential<L>(e);
      store<L>(part, e);
      for (int i = 0; i < L && j + i < count; ++i) p[j + i] = part[i];
      for (int i = 0; i < L; ++i) total += part[i];
    }
    const float inverse = 1.0f / total;
    for (int j = 0; j < count; ++j) p[j] *= inverse;
  }
  constexpr int block = 4;
  for (int d = 0; d < latent_dim; d += block * L) {
    Floats<L> a[heads][block] = {};
    for (int j = 0; j < count; ++j) {
      for (int b = 0; b < block; ++b) {
        Floats<L> v;
        load<L>(v, latents[j] + d + b * L);
        for (int h = 0; h < heads; ++h) a[h][b] += scratch[h * count + j] * v;
      }
    }
    for (int h = 0; h < heads; ++h) {
      for (int b = 0; b < block; ++b) store<L>(out + h * latent_dim + d + b * L, a[h][b]);
    }
  }
}

template <int L>
KVIRE_INLINE void compress_body(const float* const* values, const float* const* scores, const float* bias, int count, int dims, float* out) {
  for (int d = 0; d < dims; d += L) {
    const Floats<L> zero = {};
    Floats<L> top = zero - 3e38f;
    for (int c = 0; c < count; ++c) {
      if (scores[c] == nullptr) continue;
      Floats<L> s, b;
      load<L>(s, scores[c] + d);
      load<L>(b, bias + static_cast<std::ptrdiff_t>(c) * dims + d);
      s += b;
      top = s > top ? s : top;
    }
    Floats<L> total = zero;
    Floats<L> mixed = zero;
    for (int c = 0; c < count; ++c) {
      if (scores[c] == nullptr) continue;
      Floats<L> s, b, v;
      load<L>(s, scores[c] + d);
      load<L>(b, bias + static_cast<std::ptrdiff_t>(c) * dims + d);
      load<L>(v, values[c] + d);
      s = s + b - top;
      exponential<L>(s);
      total += s;
      mixed += s * v;
    }
    const Floats<L> result = mixed / total;
    store<L>(out + d, result);
  }
}

template <int L>
KVIRE_INLINE void rms_norm_body(const float* x, const float* gain, int dims, float* out) {
  Floats<L> squares = {};
  for (int d = 0; d < dims; d += L) {
    Floats<L> v;
    load<L>(v, x + d);
    squares += v * v;
  }
  const float factor = 1.0f / std::sqrt(sum<L>(squares) / static_cast<float>(dims) + 1e-6f);
  for (int d = 0; d < dims; d += L) {
    Floats<L> v, g = Floats<L>{} + 1.0f;
    load<L>(v, x + d);
    if (gain != nullptr) load<L>(g, gain + d);
    const Floats<L> scaled = v * factor * g;
    store<L>(out + d, scaled);
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
  void name##_plain parameters { name##_body<4> arguments; }                                                           \
  __attribute__((target("avx2,fma"))) void name##_avx2 parameters { name##_body<8> arguments; }                        \
  __attribute__((target("avx512f,avx512dq,avx512vl,avx2,fma"))) void name##_avx512 parameters { \
    name##_body<16> arguments;                                                                                         \
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
  void name##_chosen parameters { name##_body<4> arguments; }
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
