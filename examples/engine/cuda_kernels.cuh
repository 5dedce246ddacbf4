// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include <kvire/codec/row.hpp>
#include <kvire/pool/view.hpp>

#include "model.hpp"

/// The small kernels between the matrix products of the GPU's forward pass: a block a row (or a group, or a head of a row). Each adds in an order
/// that its own row decides, so that a row has the same bits in every batch, eager or from a graph. A row at position -1 pads a batch.
namespace engine::gpu {

using kvire::Cuda;

inline __device__ float warp_sum(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(~0U, x, distance);
  return x;
}

/// Sum over the block, in every thread.
template <int Threads>
__device__ float block_sum(float x) {
  __shared__ float parts[Threads / 32];
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < Threads / 32; ++i) sum += parts[i];
  return sum;
}
template <int Threads>
__device__ float block_max(float x) {
  __shared__ float parts[Threads / 32];
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(~0U, x, distance));
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float top = parts[0];
  for (int i = 1; i < Threads / 32; ++i) top = fmaxf(top, parts[i]);
  return top;
}

/// Element `d` of row `token` of a page, decoded.
template <class P>
__device__ float decode_at(const std::byte* page, int token, int d) {
  float x = 0;
  kvire::for_each_field<P>([&](auto field) {
    using F = decltype(field);
    if constexpr (F::logical) {
      if (d < F::first || d >= F::first + F::count) return;
      const std::uint32_t code = kvire::load_code<F::element>(page + F::offset(token), d - F::first);
      if constexpr (F::scaled) {
        using S = kvire::RowField<P, P::template section_of<kvire::role::Scale>>;
        x = kvire::ScaleCodec<P>::decode(code, kvire::load_code<S::element>(page + S::offset(token), (d - F::first) / kvire::ScaleCodec<P>::block));
      } else {
        x = kvire::decode_element<F::element>(code);
      }
    }
  });
  return x;
}

/// A block a row of `hidden_dim` threads.
inline __global__ void embed_kernel(const float* embedding, const std::int32_t* tokens, float* hidden) {
  hidden[blockIdx.x * hidden_dim + threadIdx.x] = embedding[static_cast<std::int64_t>(tokens[blockIdx.x]) * hidden_dim + threadIdx.x];
}
inline __global__ void add_kernel(const float* added, float* hidden) {
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * hidden_dim + threadIdx.x;
  hidden[at] += added[at];
}
/// The rows that logits are wanted of.
inline __global__ void take_rows_kernel(const float* hidden, const std::int32_t* rows, float* out) {
  const std::int32_t row = rows[blockIdx.x];
  out[blockIdx.x * hidden_dim + threadIdx.x] = row < 0 ? 0.0F : hidden[static_cast<std::int64_t>(row) * hidden_dim + threadIdx.x];
}

/// RMSNorm of `Dim` elements a block in shared memory, with a gain or none, and the rotary position of the last ones.
template <int Dim, int Threads>
__device__ void norm_and_turn(float (&x)[Dim], const float* gain, std::int64_t position, const float* cos, const float* sin) {
  float squares = 0;
  for (int d = static_cast<int>(threadIdx.x); d < Dim; d += Threads) squares = fmaf(x[d], x[d], squares);
  const float factor = 1.0F / sqrtf(block_sum<Threads>(squares) / static_cast<float>(Dim) + 1e-6F);
  for (int d = static_cast<int>(threadIdx.x); d < Dim; d += Threads) x[d] = x[d] * factor * (gain != nullptr ? gain[d] : 1.0F);
  __syncthreads();
  if (position < 0 || threadIdx.x >= rope_dim / 2) return;
  const int i = static_cast<int>(threadIdx.x);
  const float c = cos[position * (rope_dim / 2) + i];
  const float s = sin[position * (rope_dim / 2) + i];
  float* pair = x + Dim - rope_dim + 2 * i;
  const float a = pair[0];
  const float b = pair[1];
  pair[0] = a * c - b * s;
  pair[1] = a * s + b * c;
}

/// `per_row` vectors of each row; without positions nothing is turned. `out` may be `in`.
template <int Dim, int Threads = Dim < 128 ? Dim : 128>
__global__ void __launch_bounds__(Threads) norm_kernel(const float* in, float* out, const float* gain, const std::int64_t* positions, int per_row, const float* cos, const float* sin) {
  __shared__ float x[Dim];
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * Dim;
  for (int d = static_cast<int>(threadIdx.x); d < Dim; d += Threads) x[d] = in[at + d];
  __syncthreads();
  norm_and_turn<Dim, Threads>(x, gain, positions == nullptr ? -1 : positions[blockIdx.x / static_cast<unsigned>(per_row)], cos, sin);
  __syncthreads();
  for (int d = static_cast<int>(threadIdx.x); d < Dim; d += Threads) out[at + d] = x[d];
}

/// Index queries as the logits kernels take them, a block a head: norm, rotary position, Hadamard transform, codes. The scale of fp8 codes moves
/// into the head's weight (EncodedQueries does the same on the host).
template <bool Fp8>
__global__ void __launch_bounds__(index_dim) index_query_kernel(const float* in, const float* head_weights, int weight_stride, int heads_of_row, const std::int64_t* positions, const float* cos,
                                                                const float* sin, unsigned char* codes, float* weights) {
  __shared__ float x[index_dim];
  const std::int64_t at = blockIdx.x;
  const std::int64_t row = at / heads_of_row;
  const int d = static_cast<int>(threadIdx.x);
  x[d] = in[at * index_dim + d];
  __syncthreads();
  norm_and_turn<index_dim, index_dim>(x, nullptr, positions[row], cos, sin);
  __syncthreads();
  for (int half = 1; half < index_dim; half *= 2) {
    const float mine = x[d];
    const float other = x[d ^ half];
    __syncthreads();
    x[d] = (d & half) == 0 ? mine + other : other - mine;
    __syncthreads();
  }
  const float value = x[d] * 0.08838834764831845F;
  const float weight = head_weights[row * weight_stride + at % heads_of_row];
  if constexpr (Fp8) {
    const float scale = block_max<index_dim>(fmaxf(1e-4F, fabsf(value))) / 448.0F;
    codes[at * index_dim + d] = kvire::e4m3_from_f32(value * (1.0F / scale));
    if (d == 0) weights[at] = weight * scale;
  } else {
    reinterpret_cast<std::uint16_t*>(codes)[at * index_dim + d] = kvire::bf16_from_f32(value);
    if (d == 0) weights[at] = weight;
  }
}

/// Where a candidate of a compressed row is: a row of this step, a slot of a state page (numbered down from first_slot), or nowhere.
inline constexpr std::int64_t no_candidate = -1;
inline constexpr std::int64_t first_slot = -2;

/// Softmax over the candidates of each group, dim by dim (math::compress). A block a group; a state row is laid out as `Compressor` says.
template <class P>
__global__ void compress_kernel(kvire::ConstPageView<P, Cuda> pages, const float* states, const std::int64_t* candidates, int count, const float* bias, int ratio, int dims, float* out) {
  constexpr int width = P::dim;
  const std::int64_t* const mine = candidates + static_cast<std::int64_t>(blockIdx.x) * count;
  const bool overlaps = ratio == 4;
  for (int d = static_cast<int>(threadIdx.x); d < dims; d += static_cast<int>(blockDim.x)) {
    const auto row_of = [&](int k) -> const float* {
      const std::int64_t at = mine[k];
      if (at >= 0) return states + at * width;
      if (at == no_candidate) return nullptr;
      const std::int64_t slot = first_slot - at;
      return reinterpret_cast<const float*>(pages.page(static_cast<std::int32_t>(slot / P::tokens_per_page)) +
                                            P::template offset<kvire::role::State>(static_cast<int>(slot % P::tokens_per_page)));
    };
    const auto part_of = [&](int k) { return overlaps && k >= ratio ? dims + d : d; };
    const int scores = overlaps ? 2 * dims : dims;
    float top = -3e38F;
    for (int k = 0; k < count; ++k) {
      if (const float* row = row_of(k)) top = fmaxf(top, row[scores + part_of(k)] + bias[k * dims + d]);
    }
    float total = 0;
    float mixed = 0;
    for (int k = 0; k < count; ++k) {
      const float* row = row_of(k);
      if (row == nullptr) continue;
      const float e = expf(row[scores + part_of(k)] + bias[k * dims + d] - top);
      total += e;
      mixed = fmaf(e, row[part_of(k)], mixed);
    }
    out[static_cast<std::int64_t>(blockIdx.x) * dims + d] = total > 0 ? mixed / total : 0.0F;
  }
}

/// What a row attends to before its window.
enum class Compressed { none, selected, all };

struct AttendArgs {
  const float* q = nullptr;  ///< [rows][heads][latent]
  float* out = nullptr;      ///< the same
  const std::int64_t* positions = nullptr;
  const std::int32_t* table = nullptr;  ///< [rows][pages] of the full space
  std::int64_t pages = 0;
  const std::int32_t* window_table = nullptr;  ///< [rows][2]: the page before the row's own, and its own
  const std::int32_t* selected = nullptr;      ///< [rows][top_k], ascending, then -1
  const std::int32_t* hot_slots = nullptr;     ///< [hot][top_k]: where the first `hot` rows find what they selected
  std::int64_t hot = 0;
  int top_k = 0;
  int most = 0;  ///< latents a row attends to, at most
  int ratio = 0;
  float sink[heads] = {};
  float scale = 0;
};

/// Attention of one row over its latents, keys and values in one, read from their pages, or from the slots `hot` of a hot set (math::attend). A block a row;
/// shared memory for heads * most scores.
template <class WindowPolicy, class Policy, Compressed Kind>
__global__ void __launch_bounds__(256) attend_kernel(AttendArgs args, kvire::ConstPageView<WindowPolicy, Cuda> window, kvire::ConstPageView<Policy, Cuda> latents,
                                                     kvire::ConstPageView<Policy, Cuda> hot) {
  constexpr int threads = 256;
  extern __shared__ float scores[];
  __shared__ float q[heads * latent_dim];
  const std::int64_t r = blockIdx.x;
  const std::int64_t position = args.positions[r];
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < heads * latent_dim; i += threads) q[i] = args.q[r * heads * latent_dim + i];
  __syncthreads();

  const std::int64_t in_window = position + 1 < window_tokens ? position + 1 : window_tokens;
  int compressed = 0;
  if constexpr (Kind == Compressed::selected) {
    const std::int64_t length = (position + 1) / args.ratio;
    compressed = static_cast<int>(length < args.top_k ? length : args.top_k);
  } else if constexpr (Kind == Compressed::all) {
    compressed = static_cast<int>((position + 1) / args.ratio);
  }
  const int count = compressed + static_cast<int>(in_window);

  // f(page, token) with the page's own policy.
  const auto with_latent = [&](int j, auto in_compressed, auto in_raw) {
    if constexpr (Kind != Compressed::none) {
      if (Kind == Compressed::selected && j < compressed && r < args.hot) {
        const std::int32_t slot = max(args.hot_slots[r * args.top_k + j], 0);  // a step with a latent that has none fails
        in_compressed(hot.page(slot / Policy::tokens_per_page), slot % Policy::tokens_per_page);
        return;
      }
      if (j < compressed) {
        const std::int32_t index = Kind == Compressed::selected ? args.selected[r * args.top_k + j] : j;
        in_compressed(latents.page(args.table[r * args.pages + index / Policy::tokens_per_page]), index % Policy::tokens_per_page);
        return;
      }
    }
    const std::int64_t p = position - in_window + 1 + (j - compressed);
    const std::int64_t back = position / page_raw_tokens - p / page_raw_tokens;  // 0 or 1
    in_raw(window.page(args.window_table[r * 2 + 1 - back]), static_cast<int>(p % page_raw_tokens));
  };

  for (int j = thread / 32; j < count; j += threads / 32) {
    float dot[heads] = {};
    const auto score = [&]<class P>(P*, const std::byte* page, int token) {
      for (int d = thread % 32; d < latent_dim; d += 32) {
        const float v = decode_at<P>(page, token, d);
        for (int h = 0; h < heads; ++h) dot[h] = fmaf(q[h * latent_dim + d], v, dot[h]);
      }
    };
    with_latent(
        j, [&](const std::byte* page, int token) { score(static_cast<Policy*>(nullptr), page, token); },
        [&](const std::byte* page, int token) { score(static_cast<WindowPolicy*>(nullptr), page, token); });
    for (int h = 0; h < heads; ++h) {
      const float sum = warp_sum(dot[h]);
      if (thread % 32 == 0) scores[h * args.most + j] = sum * args.scale;
    }
  }
  __syncthreads();
  for (int h = 0; h < heads; ++h) {
    float* const p = scores + h * args.most;
    float top = args.sink[h];
    for (int j = thread; j < count; j += threads) top = fmaxf(top, p[j]);
    top = block_max<threads>(top);
    float total = 0;
    for (int j = thread; j < count; j += threads) {
      p[j] = expf(p[j] - top);
      total += p[j];
    }
    total = block_sum<threads>(total) + expf(args.sink[h] - top);
    for (int j = thread; j < count; j += threads) p[j] /= total;
  }
  __syncthreads();
  float mixed[heads][latent_dim / threads] = {};
  for (int j = 0; j < count; ++j) {
    const auto mix = [&]<class P>(P*, const std::byte* page, int token) {
      for (int i = 0; i < latent_dim / threads; ++i) {
        const float v = decode_at<P>(page, token, thread + i * threads);
        for (int h = 0; h < heads; ++h) mixed[h][i] = fmaf(scores[h * args.most + j], v, mixed[h][i]);
      }
    };
    with_latent(
        j, [&](const std::byte* page, int token) { mix(static_cast<Policy*>(nullptr), page, token); },
        [&](const std::byte* page, int token) { mix(static_cast<WindowPolicy*>(nullptr), page, token); });
  }
  for (int h = 0; h < heads; ++h) {
    for (int i = 0; i < latent_dim / threads; ++i) args.out[(r * heads + h) * latent_dim + thread + i * threads] = mixed[h][i];
  }
}

}  // namespace engine::gpu
