// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/store_encode.cuh>

/// The prologue of a store on eight lanes a row, with the bits of the host's 32.

KVIRE_NAMESPACE_BEGIN

namespace detail::store {

#if KVIRE_CUDA_COMPILER

__device__ inline void load8(float (&x)[chunk], const float* p, bool vector) {
  if (vector) {
    const float4 a = *reinterpret_cast<const float4*>(p);
    const float4 b = reinterpret_cast<const float4*>(p)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  } else {
#pragma unroll
    for (int i = 0; i < chunk; ++i) x[i] = p[i];
  }
}

/// body::rms_norm on stripes: each of the host's 32 lanes sums its neighbours in ascending order, then the lanes in the host's tree.
template <LayoutPolicy P>
__device__ void rms_norm(float (&x)[Stripes<P>::count][chunk], int lane, const float* weight, float epsilon, bool vector) {
  constexpr int count = Stripes<P>::count;
  constexpr int run = Stripes<P>::host_elements;  // of one lane of the host
  constexpr int runs = run < chunk ? chunk / run : 1;
  constexpr int run_lanes = run > chunk ? run / chunk : 1;
  constexpr int padded = count <= 1 ? 1 : count <= 2 ? 2 : count <= 4 ? 4 : count <= 8 ? 8 : 16;
  float sums[padded] = {};
#pragma unroll
  for (int s = 0; s < count; ++s) {
    float part[runs] = {};
    if constexpr (run_lanes == 1) {
#pragma unroll
      for (int i = 0; i < chunk; ++i) part[i / run] = fma_rn(x[s][i], x[s][i], part[i / run]);
#pragma unroll
      for (int distance = 1; distance < runs; distance *= 2) {
#pragma unroll
        for (int i = 0; i < runs; i += 2 * distance) part[i] = add_rn(part[i], part[i + distance]);
      }
    } else {
#pragma unroll
      for (int turn = 0; turn < run_lanes; ++turn) {  // each lane goes on where the one before ended
        const float before = __shfl_up_sync(0xFFFFFFFFU, part[0], 1, run_lanes);
        float sum = turn == 0 ? 0.0F : before;
#pragma unroll
        for (int i = 0; i < chunk; ++i) sum = fma_rn(x[s][i], x[s][i], sum);
        if (lane % run_lanes == turn) part[0] = sum;
      }
      part[0] = __shfl_sync(0xFFFFFFFFU, part[0], run_lanes - 1, run_lanes);
    }
    sums[s] = part[0];
#pragma unroll
    for (int distance = run_lanes; distance < lanes; distance *= 2) sums[s] = add_rn(sums[s], __shfl_xor_sync(0xFFFFFFFFU, sums[s], distance));
  }
#pragma unroll
  for (int distance = 1; distance < padded; distance *= 2) {
#pragma unroll
    for (int s = 0; s < padded; s += 2 * distance) sums[s] = add_rn(sums[s], sums[s + distance]);
  }
  constexpr float dim = P::dim;
  const float mean = is_power_of_two(P::dim) ? mul_rn(sums[0], 1.0F / dim) : div_rn(sums[0], dim);
  const float factor = reciprocal(sqrt_rn(add_rn(mean, epsilon)));
#pragma unroll
  for (int s = 0; s < count; ++s) {
    float w[chunk];
    if (weight != nullptr) load8(w, weight + s * stripe + lane * chunk, vector);
#pragma unroll
    for (int i = 0; i < chunk; ++i) {
      x[s][i] = mul_rn(x[s][i], factor);
      if (weight != nullptr) x[s][i] = mul_rn(x[s][i], w[i]);
    }
  }
}

/// Cosines and sines of a lane's pairs of one stripe.
struct Angles {
  float cos[chunk / 2], sin[chunk / 2];

  /// `first`: of the lane's elements of the stripe, among the `rope_dims` last ones; below 0 are those that are not turned.
  __device__ void load(const float* cosines, const float* sines, int first, bool vector) {
    if (first <= -chunk) return;
    if (vector) {
      const float4 a = *reinterpret_cast<const float4*>(cosines + first / 2);
      const float4 b = *reinterpret_cast<const float4*>(sines + first / 2);
      cos[0] = a.x, cos[1] = a.y, cos[2] = a.z, cos[3] = a.w;
      sin[0] = b.x, sin[1] = b.y, sin[2] = b.z, sin[3] = b.w;
    } else {
#pragma unroll
      for (int i = 0; i < chunk / 2; ++i) {
        if (first + 2 * i >= 0) cos[i] = cosines[first / 2 + i], sin[i] = sines[first / 2 + i];
      }
    }
  }
  __device__ void turn(float (&x)[chunk], int first) const {
#pragma unroll
    for (int i = 0; i < chunk / 2; ++i) {
      if (first + 2 * i < 0) continue;
      const float a = x[2 * i];
      const float b = x[2 * i + 1];
      x[2 * i] = sub_rn(mul_rn(a, cos[i]), mul_rn(b, sin[i]));
      x[2 * i + 1] = add_rn(mul_rn(a, sin[i]), mul_rn(b, cos[i]));
    }
  }
};

__device__ inline void butterfly(float& a, float& b) {
  const float sum = add_rn(a, b);
  b = sub_rn(a, b);
  a = sum;
}

/// body::hadamard on stripes.
template <int Count>
__device__ void hadamard(float (&x)[Count][chunk], int lane) {
#pragma unroll
  for (int s = 0; s < Count; ++s) {
#pragma unroll
    for (int distance = 1; distance < chunk; distance *= 2) {
#pragma unroll
      for (int i = 0; i < chunk; ++i) {
        if ((i & distance) == 0) butterfly(x[s][i], x[s][i + distance]);
      }
    }
#pragma unroll
    for (int distance = 1; distance < lanes; distance *= 2) {
#pragma unroll
      for (int i = 0; i < chunk; ++i) {
        const float other = __shfl_xor_sync(0xFFFFFFFFU, x[s][i], distance);
        x[s][i] = (lane & distance) != 0 ? sub_rn(other, x[s][i]) : add_rn(x[s][i], other);
      }
    }
  }
#pragma unroll
  for (int distance = 1; distance < Count; distance *= 2) {
#pragma unroll
    for (int s = 0; s < Count; ++s) {
      if ((s & distance) != 0) continue;
#pragma unroll
      for (int i = 0; i < chunk; ++i) butterfly(x[s][i], x[s + distance][i]);
    }
  }
  constexpr float factor = div_rn(1.0F, sqrt_rn(static_cast<float>(Count * stripe)));
#pragma unroll
  for (int s = 0; s < Count; ++s) {
#pragma unroll
    for (int i = 0; i < chunk; ++i) x[s][i] = mul_rn(x[s][i], factor);
  }
}

/// body::apply_prologue on the stripes of one row, which takes row `position` of the tables.
template <LayoutPolicy P, class C>
__device__ void apply_prologue(const C (&raw)[Stripes<P>::count], Chunk<Element::f32> (&out)[Stripes<P>::count], int lane, const Prologue& prologue,
                               kstd::int64_t position, bool vector) {
  constexpr int count = Stripes<P>::count;
  const float* cos = prologue.cos + position * (prologue.rope_dims / 2);
  const float* sin = prologue.sin + position * (prologue.rope_dims / 2);
  const auto first = [&](int s) { return (s - count) * stripe + lane * chunk + prologue.rope_dims; };
  Angles last;  // asked for before the norm, which takes as long
  if (prologue.rope_dims > 0) last.load(cos, sin, first(count - 1), vector);
  float x[count][chunk];
#pragma unroll
  for (int s = 0; s < count; ++s) {
#pragma unroll
    for (int i = 0; i < chunk; ++i) x[s][i] = raw[s].value(i);
  }
  if (prologue.norm) rms_norm<P>(x, lane, prologue.weight, prologue.epsilon, vector);
  if (prologue.rope_dims > 0) {
#pragma unroll
    for (int s = 0; s < count - 1; ++s) {
      if (first(s) <= -chunk) continue;
      Angles angles;
      angles.load(cos, sin, first(s), vector);
      angles.turn(x[s], first(s));
    }
    last.turn(x[count - 1], first(count - 1));
  }
  if constexpr (is_power_of_two(count)) {
    if (prologue.hadamard) hadamard<count>(x, lane);
  }
#pragma unroll
  for (int s = 0; s < count; ++s) {
#pragma unroll
    for (int i = 0; i < chunk; ++i) out[s].w[i] = bits_of(x[s][i]);
  }
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::store

KVIRE_NAMESPACE_END
