// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/ids.hpp>
#include <kvire/transfer/cuda/copy_list.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

template <class Vector>
KVIRE_DEVICE inline void vector_copy(unsigned char* to, const unsigned char* from, int bytes) {
  constexpr int in_flight = 8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int n = bytes / static_cast<int>(sizeof(Vector));
  for (int first = lane; first < n; first += 32 * in_flight) {
    Vector value[in_flight];
#pragma unroll
    for (int j = 0; j < in_flight; ++j) {
      if (first + 32 * j < n) value[j] = reinterpret_cast<const Vector*>(from)[first + 32 * j];
    }
#pragma unroll
    for (int j = 0; j < in_flight; ++j) {
      if (first + 32 * j < n) reinterpret_cast<Vector*>(to)[first + 32 * j] = value[j];
    }
  }
}

/// Pages by ordinary loads and stores, a warp a chunk: for devices without bulk copies and for pages that are not made of 16-byte units.
template <int Capacity>
__global__ void __launch_bounds__(512) vector_copy_kernel(const __grid_constant__ CopyList<Capacity> list) {
  const int warps = static_cast<int>(gridDim.x * (blockDim.x / 32));
  const int total = list.piece[list.pieces - 1].end;
  int piece = 0;
  int start = 0;
  for (int item = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32); item < total; item += warps) {
    while (item >= list.piece[piece].end) start = list.piece[piece++].end;
    const CopyPiece& p = list.piece[piece];
    const int pair = (item - start) / p.chunks;
    const int chunk = (item - start) % p.chunks;
    const kstd::int32_t from_id = p.from_ids[pair];
    const kstd::int32_t to_id = p.to_ids[pair];
    if (from_id < 0 || to_id <= null_page) continue;
    if (from_id == null_page || from_id >= p.from_pages || to_id >= p.to_pages) {
      if (chunk == 0 && threadIdx.x % 32 == 0 && list.bad != nullptr) atomicAdd(list.bad, 1);
      continue;
    }
    const int begin = chunk * p.chunk_bytes;
    const int bytes = begin + p.chunk_bytes < p.page_bytes ? p.chunk_bytes : p.page_bytes - begin;
    if (bytes <= 0) continue;
    const unsigned char* from = p.from + p.from_stride * from_id + begin;
    unsigned char* to = p.to + p.to_stride * to_id + begin;
    const auto bits = reinterpret_cast<kstd::uintptr_t>(from) | reinterpret_cast<kstd::uintptr_t>(to) | static_cast<unsigned>(bytes);
    if (bits % 16 == 0) {
      vector_copy<uint4>(to, from, bytes);
    } else if (bits % 4 == 0) {
      vector_copy<unsigned>(to, from, bytes);
    } else {
      vector_copy<unsigned char>(to, from, bytes);
    }
  }
}

}  // namespace detail

KVIRE_NAMESPACE_END
