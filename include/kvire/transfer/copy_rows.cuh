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

// One plane of single tokens: all vectors of all rows numbered through, several loads of a thread in flight.
template <class P, int Plane, int Bytes>
KVIRE_DEVICE inline void copy_plane(const PageList& list, const TokenRun* runs, kstd::int64_t n) {
  using Vector = typename VectorOf<Bytes>::type;
  constexpr kstd::int64_t row = P::template row_bytes<Plane>();
  constexpr kstd::int64_t offset = P::template plane_offset<Plane>();
  constexpr unsigned per_row = static_cast<unsigned>(row / Bytes);
  constexpr int in_flight = 6;
  const auto total = static_cast<kstd::uint64_t>(n) * per_row;
  const kstd::uint64_t threads = static_cast<kstd::uint64_t>(gridDim.x) * blockDim.x;
  for (kstd::uint64_t first = static_cast<kstd::uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; first < total; first += threads * in_flight) {
    Vector value[in_flight];
    kstd::int64_t to[in_flight];
#pragma unroll
    for (int j = 0; j < in_flight; ++j) {
      const kstd::uint64_t v = first + threads * static_cast<unsigned>(j);
      to[j] = -1;
      if (v >= total) continue;
      const TokenRun run = runs[v / per_row];
      const kstd::int64_t at = offset + static_cast<kstd::int64_t>(v % per_row) * Bytes;
      value[j] = *reinterpret_cast<const Vector*>(list.from + run.from / P::tokens_per_page * list.from_stride + run.from % P::tokens_per_page * row + at);
      to[j] = run.to / P::tokens_per_page * list.to_stride + run.to % P::tokens_per_page * row + at;
    }
#pragma unroll
    for (int j = 0; j < in_flight; ++j) {
      if (to[j] >= 0) *reinterpret_cast<Vector*>(list.to + to[j]) = value[j];
    }
  }
}

// One plane of runs: a warp a run, whose rows lie side by side.
template <class P, int Plane, int Bytes>
KVIRE_DEVICE inline void copy_plane_runs(const PageList& list, const TokenRun* runs, kstd::int64_t n) {
  using Vector = typename VectorOf<Bytes>::type;
  constexpr kstd::int64_t row = P::template row_bytes<Plane>();
  constexpr kstd::int64_t offset = P::template plane_offset<Plane>();
  constexpr int in_flight = 4;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const kstd::int64_t warps = static_cast<kstd::int64_t>(gridDim.x) * (blockDim.x / 32);
  for (kstd::int64_t i = (static_cast<kstd::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32; i < n; i += warps) {
    const TokenRun run = runs[i];
    const auto* from =
        reinterpret_cast<const Vector*>(list.from + run.from / P::tokens_per_page * list.from_stride + run.from % P::tokens_per_page * row + offset);
    auto* to = reinterpret_cast<Vector*>(list.to + run.to / P::tokens_per_page * list.to_stride + run.to % P::tokens_per_page * row + offset);
    const int vectors = static_cast<int>(run.tokens * row / Bytes);
    for (int first = lane; first < vectors; first += 32 * in_flight) {
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
}

/// Rows of every plane. The vector of a plane is as wide as its rows' places allow, which the policy knows, if pages start on 16 bytes.
template <class P, bool Single, bool Aligned>
__global__ void __launch_bounds__(512) copy_rows_kernel(const PageList list, const TokenRun* runs, kstd::int64_t n) {
  [&]<int... I>(kstd::integer_sequence<int, I...>) {
    if constexpr (Single) {
      (copy_plane<P, I, Aligned ? P::template row_vector_bytes<I> : 1>(list, runs, n), ...);
    } else {
      (copy_plane_runs<P, I, Aligned ? P::template row_vector_bytes<I> : 1>(list, runs, n), ...);
    }
  }(kstd::make_integer_sequence<int, P::plane_count>{});
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
