// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include <kvire/base/ints.hpp>
#include <kvire/transfer/cuda/engine.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// An unsigned word of so many bytes.
template <int Bytes>
struct VectorOf;
template <>
struct VectorOf<16> {
  using type = uint4;
};
template <>
struct VectorOf<8> {
  using type = uint2;
};
template <>
struct VectorOf<4> {
  using type = unsigned;
};
template <>
struct VectorOf<2> {
  using type = unsigned short;
};
template <>
struct VectorOf<1> {
  using type = unsigned char;
};

/// Tokens that a warp takes at a time: each lane fetches one run from the list, which lies in pinned memory.
inline constexpr int rows_at_once = 32;

// Planes `Plane` down to 0 of single tokens, a lane's token in `run`. All vectors of all rows are numbered through; small planes, such as scales, are loaded
// before the others are moved and stored behind them, so that their trip over the link costs nothing.
template <class P, int Plane, bool Aligned>
KVIRE_DEVICE inline void copy_tokens(const PageList& list, const TokenRun& run, int count) {
  if constexpr (Plane >= 0) {
    constexpr int bytes = Aligned ? P::template row_vector_bytes<Plane> : 1;
    using Vector = typename VectorOf<bytes>::type;
    constexpr kstd::int64_t row = P::template row_bytes<Plane>();
    constexpr kstd::int64_t offset = P::template plane_offset<Plane>();
    constexpr unsigned per_row = static_cast<unsigned>(row / bytes);
    constexpr int in_flight = per_row < 8 ? static_cast<int>(per_row) : 8;
    const unsigned lane = threadIdx.x % 32;
    const kstd::int64_t from = list.from_stride * run.from_page + row * run.from_token + offset;
    const kstd::int64_t to = list.to_stride * run.to_page + row * run.to_token + offset;
    const unsigned total = static_cast<unsigned>(count) * per_row;
    const auto load = [&](Vector (&value)[in_flight], kstd::int64_t (&at)[in_flight], unsigned first) {
#pragma unroll
      for (int j = 0; j < in_flight; ++j) {
        const unsigned v = first + lane + 32 * static_cast<unsigned>(j);
        const int token = static_cast<int>(v / per_row);
        const kstd::int64_t source = __shfl_sync(~0U, from, token) + v % per_row * bytes;
        at[j] = __shfl_sync(~0U, to, token) + v % per_row * bytes;
        if (v < total) value[j] = *reinterpret_cast<const Vector*>(list.from + source);
      }
    };
    const auto store = [&](const Vector (&value)[in_flight], const kstd::int64_t (&at)[in_flight], unsigned first) {
#pragma unroll
      for (int j = 0; j < in_flight; ++j) {
        if (first + lane + 32 * static_cast<unsigned>(j) < total) *reinterpret_cast<Vector*>(list.to + at[j]) = value[j];
      }
    };
    Vector value[in_flight];
    kstd::int64_t at[in_flight];
    if constexpr (per_row <= 8) {
      load(value, at, 0);
      copy_tokens<P, Plane - 1, Aligned>(list, run, count);
      store(value, at, 0);
    } else {
      for (unsigned first = 0; first < total; first += 32 * in_flight) {
        load(value, at, first);
        store(value, at, first);
      }
      copy_tokens<P, Plane - 1, Aligned>(list, run, count);
    }
  }
}

// One plane of a run, whose rows lie side by side, by a whole warp.
template <class P, int Plane, bool Aligned>
KVIRE_DEVICE inline void copy_run(const PageList& list, const TokenRun& run) {
  constexpr int bytes = Aligned ? P::template row_vector_bytes<Plane> : 1;
  using Vector = typename VectorOf<bytes>::type;
  constexpr kstd::int64_t row = P::template row_bytes<Plane>();
  constexpr kstd::int64_t offset = P::template plane_offset<Plane>();
  constexpr int in_flight = 4;
  const auto* from = reinterpret_cast<const Vector*>(list.from + list.from_stride * run.from_page + row * run.from_token + offset);
  auto* to = reinterpret_cast<Vector*>(list.to + list.to_stride * run.to_page + row * run.to_token + offset);
  const int vectors = static_cast<int>(run.tokens * row / bytes);
  for (int first = static_cast<int>(threadIdx.x) % 32; first < vectors; first += 32 * in_flight) {
    Vector value[in_flight];
#pragma unroll
    for (int j = 0; j < in_flight; ++j) {
      if (first + 32 * j < vectors) value[j] = from[first + 32 * j];
    }
#pragma unroll
    for (int j = 0; j < in_flight; ++j) {
      if (first + 32 * j < vectors) to[first + 32 * j] = value[j];
    }
  }
}

/// Rows of every plane, of single tokens or of runs. The vector of a plane is as wide as its rows' places allow, which the policy knows, if pages start
/// on 16 bytes.
template <class P, bool Single, bool Aligned>
__global__ void __launch_bounds__(512) copy_rows_kernel(const PageList list, const TokenRun* runs, kstd::int64_t n) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const kstd::int64_t warps = static_cast<kstd::int64_t>(gridDim.x) * (blockDim.x / 32);
  kstd::int64_t first = (static_cast<kstd::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32 * rows_at_once;
  TokenRun next = first + lane < n ? runs[first + lane] : TokenRun{};
  for (; first < n; first += warps * rows_at_once) {
    const TokenRun run = next;
    const kstd::int64_t ahead = first + warps * rows_at_once + lane;
    if (ahead < n) next = runs[ahead];
    const int count = static_cast<int>(n - first < rows_at_once ? n - first : rows_at_once);
    if constexpr (Single) {
      copy_tokens<P, P::plane_count - 1, Aligned>(list, run, count);
    } else {
      for (int i = 0; i < count; ++i) {
        TokenRun one;
        one.from_page = __shfl_sync(~0U, run.from_page, i);
        one.to_page = __shfl_sync(~0U, run.to_page, i);
        one.from_token = static_cast<unsigned short>(__shfl_sync(~0U, static_cast<int>(run.from_token), i));
        one.to_token = static_cast<unsigned short>(__shfl_sync(~0U, static_cast<int>(run.to_token), i));
        one.tokens = __shfl_sync(~0U, run.tokens, i);
        [&]<int... I>(kstd::integer_sequence<int, I...>) {
          (copy_run<P, I, Aligned>(list, one), ...);
        }(kstd::make_integer_sequence<int, P::plane_count>{});
      }
    }
  }
}

inline bool aligned(const PageList& list) {
  const auto bits = reinterpret_cast<std::uintptr_t>(list.from) | reinterpret_cast<std::uintptr_t>(list.to) | static_cast<std::uintptr_t>(list.from_stride) |
                    static_cast<std::uintptr_t>(list.to_stride);
  return bits % 16 == 0;
}

template <class P>
Status RowLauncher<P>::launch(Stream<Cuda>& stream, const PageList& list, const TokenRun* device_runs, std::int64_t runs, std::int64_t tokens, int blocks) {
  const auto kernel = runs == tokens ? (aligned(list) ? copy_rows_kernel<P, true, true> : copy_rows_kernel<P, true, false>)
                                     : (aligned(list) ? copy_rows_kernel<P, false, true> : copy_rows_kernel<P, false, false>);
  kernel<<<static_cast<unsigned>(blocks), 512, 0, stream.native()>>>(list, device_runs, runs);
  if (const cudaError_t e = cudaGetLastError(); e != cudaSuccess) return stream.error(e, "launching the copy of tokens");
  return {};
}

}  // namespace detail

KVIRE_NAMESPACE_END
