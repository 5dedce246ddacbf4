// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <kvire/kernel/body/store.hpp>
#include <kvire/kernel/cuda/sub_warp.cuh>
#include <kvire/kernel/cuda/warp_group.cuh>

/// The CUDA store: body::store on lanes of a warp, the bytes of the host twin.
///   - Rows with a prologue take a full warp each, so that reductions have the host's tree.
///   - Other rows take a part of a warp with about 16 elements a lane: 16-byte loads and stores, several rows under way in each warp, and for
///     e4m3 the conversion instruction. Rows with an infinity or a NaN leave that path for the plain encoder.

KVIRE_NAMESPACE_BEGIN

namespace detail::store {

// Lanes for a row without prologue: the fewest, up to a warp, that own at most 16 elements each.
template <LayoutPolicy P>
KVIRE_HD constexpr int lanes_per_row() {
  int lanes = 1;
  while (lanes < 32 && P::dim > lanes * 16) lanes *= 2;
  return lanes;
}

#if KVIRE_CUDA_COMPILER

// e4m3 codes of two finite products; `a` in the low byte.
__device__ inline kstd::uint32_t e4m3_pair(float a, float b) {
#if KVIRE_DEVICE_ARCH >= 890
  unsigned short codes = 0;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(b), "f"(a));
  return codes;
#else
  return kstd::uint32_t(e4m3_from_f32(a)) | kstd::uint32_t(e4m3_from_f32(b)) << 8;
#endif
}

template <LayoutPolicy P, class F>
KVIRE_HD constexpr bool is_converted() {
  if constexpr (F::scaled) return F::element == Element::e4m3 && P::Scaling::formula != ScaleFormula::scale_clamp;
  return false;
}

// body::detail::store_scaled for e4m3 codes of finite elements, two at a time.
template <LayoutPolicy P, class Split, class F, class G, class Pieces>
__device__ void store_converted(G g, const Pieces& pieces, kstd::byte* page, int token, const RowOptions& options) {
  using Codec = ScaleCodec<P>;
  using S = RowField<P, P::template section_of<role::Scale>>;
  constexpr int blocks = body::detail::lane_blocks<P, Split>;
  constexpr int run = Split::elements / blocks;
  typename G::template Lanes<body::detail::Keys<blocks>> keys;
  const int lane = g.lane();
  const bool owner = body::detail::owns<F, Split>(lane);
  float x[Split::elements];
  bool finite = true;
#pragma unroll
  for (int b = 0; b < blocks; ++b) {
    kstd::uint32_t key = 0;
#pragma unroll
    for (int i = 0; i < run; ++i) {
      const kstd::uint32_t bits = prepare_bits(bits_of(pieces.value.x[b * run + i]), options);
      x[b * run + i] = float_of(bits);
      key = max(key, abs_bits(bits));
    }
    keys.value.key[b] = owner ? key : 0;
    finite = finite && keys.value.key[b] < infinity_bits;
  }
  if (g.any(!finite)) {
    body::detail::store_scaled<P, Split, F>(g, pieces, page, token, options);
    return;
  }
  body::detail::share_keys<P, Split, F>(g, keys);
  if (!owner) return;
#pragma unroll
  for (int b = 0; b < blocks; ++b) {
    const BlockScale scale = Codec::make(keys.value.key[b]);
    const int index = lane * Split::elements - F::first + b * run;
    if (index % Codec::block == 0) store_codes<S::element>(page + S::offset(token), index / Codec::block, {scale.code});
    constexpr int alignment = static_cast<int>(power_of_two_divisor(kstd::int64_t(F::byte_alignment | run), kstd::int64_t(16)));
    if constexpr (alignment >= 4) {
      kstd::uint32_t words[run / 4];
#pragma unroll
      for (int i = 0; i < run / 4; ++i) {
        const float* y = x + b * run + i * 4;
        words[i] = e4m3_pair(mul_rn(y[0], scale.factor), mul_rn(y[1], scale.factor)) |
                   e4m3_pair(mul_rn(y[2], scale.factor), mul_rn(y[3], scale.factor)) << 16;
      }
      __builtin_memcpy(__builtin_assume_aligned(page + F::offset(token) + index, alignment), words, run);
    } else {
      kstd::uint32_t codes[run];
#pragma unroll
      for (int i = 0; i < run; ++i) codes[i] = e4m3_pair(mul_rn(x[b * run + i], scale.factor), 0.0F) & 0xFFU;
      store_codes<F::element, run, alignment>(page + F::offset(token), index, codes);
    }
  }
}

template <LayoutPolicy P, class G, class Pieces>
__device__ void store_own_pieces(G g, const Pieces& pieces, kstd::byte* page, int token, const RowOptions& options) {
  using Split = body::RowSplit<P, G::size>;
  for_each_field<P>([&](auto field) {
    using F = decltype(field);
    if constexpr (is_converted<P, F>()) {
      store_converted<P, Split, F>(g, pieces, page, token, options);
    } else if constexpr (F::scaled) {
      body::detail::store_scaled<P, Split, F>(g, pieces, page, token, options);
    } else if constexpr (F::logical) {
      body::detail::store_plain<P, Split, F>(g, pieces, page, token, options);
    } else if constexpr (F::padding) {
      if (g.lane() == 0) kvire::detail::zero_padding<F>(page, token);
    }
  });
}

// Elements [0, N) from `first` on, 16 bytes at a time where the caller knows that this is aligned.
template <Element E, int N>
__device__ void load_piece(float (&x)[N], const void* rows, kstd::int64_t first, bool vector) {
  if constexpr (E == Element::bf16) {
    const auto* p = static_cast<const kstd::uint16_t*>(rows) + first;
    if (N % 8 == 0 && vector) {
#pragma unroll
      for (int i = 0; i < N / 8; ++i) {
        const uint4 v = __ldg(reinterpret_cast<const uint4*>(p) + i);
        const kstd::uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          x[i * 8 + j * 2] = float_of(w[j] << 16);
          x[i * 8 + j * 2 + 1] = float_of(w[j] & 0xFFFF0000U);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = f32_from_bf16(p[i]);
    }
  } else {
    const auto* p = static_cast<const float*>(rows) + first;
    if (N % 4 == 0 && vector) {
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {
        const float4 v = __ldg(reinterpret_cast<const float4*>(p) + i);
        x[i * 4] = v.x;
        x[i * 4 + 1] = v.y;
        x[i * 4 + 2] = v.z;
        x[i * 4 + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = p[i];
    }
  }
}

__device__ inline void add_counts(StoreCounts* counts, const StoreCounts& mine) {
  auto* to = reinterpret_cast<unsigned long long*>(counts);
  const kstd::int64_t values[] = {mine.stored, mine.skipped, mine.null_page, mine.bad_slots, mine.bad_positions};
  __shared__ unsigned long long sums[5];
  if (threadIdx.x < 5) sums[threadIdx.x] = 0;
  __syncthreads();
  for (int i = 0; i < 5; ++i) {
    if (values[i] != 0) atomicAdd(&sums[i], static_cast<unsigned long long>(values[i]));
  }
  __syncthreads();
  if (threadIdx.x < 5 && sums[threadIdx.x] != 0) atomicAdd(to + threadIdx.x, sums[threadIdx.x]);
}

inline constexpr int threads = 256;

// What becomes of a row without prologue.
template <LayoutPolicy P>
__device__ void sort_slot(const body::StoreArgs<P>& args, kstd::int64_t slot, StoreCounts& counts) {
  const kstd::int64_t id = slot / P::tokens_per_page;
  counts.skipped += slot < 0 ? 1 : 0;
  counts.bad_slots += id >= args.page_count ? 1 : 0;
  counts.null_page += slot >= 0 && id < args.first_page && id < args.page_count ? 1 : 0;
  counts.stored += slot >= 0 && id >= args.first_page && id < args.page_count ? 1 : 0;
}

// Each group takes `Rows` rows, a grid apart. Slots and rows are asked for together; what becomes of a row is decided once both are there.
template <LayoutPolicy P, Element E, int Rows>
__global__ __launch_bounds__(threads) void store_kernel(const __grid_constant__ body::StoreArgs<P> args, kstd::int64_t rows, bool vector, StoreCounts* counts) {
  constexpr int lanes = lanes_per_row<P>();
  using G = SubWarpGroup<lanes>;
  using Split = body::RowSplit<P, lanes>;
  const G g;
  const kstd::int64_t first = (kstd::int64_t(blockIdx.x) * threads + threadIdx.x) / lanes;
  const kstd::int64_t step = kstd::int64_t(gridDim.x) * threads / lanes;
  typename G::template Lanes<body::RowPiece<Split::elements>> pieces[Rows];
  kstd::int64_t slots[Rows];
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    const kstd::int64_t item = first + r * step;
    slots[r] = item < rows ? args.slots[item] : -1;
    if (item < rows && g.lane() < Split::lanes) {
      load_piece<E>(pieces[r].value.x, args.rows, item * args.row_stride + kstd::int64_t(g.lane()) * Split::elements, vector);
    }
  }
  RowOptions options = args.options;
  if constexpr (E == Element::bf16) options.bf16_round_trip = false;  // they are bf16 already
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    const kstd::int64_t id = slots[r] / P::tokens_per_page;
    if (slots[r] < 0 || id >= args.page_count || id < args.first_page) continue;
    store_own_pieces<P>(g, pieces[r], args.pages + args.page_stride * id, static_cast<int>(slots[r] % P::tokens_per_page), options);
  }
  if (counts != nullptr) {
    StoreCounts mine;
    for (int r = 0; r < Rows && g.lane() == 0; ++r) {
      if (first + r * step < rows) sort_slot(args, slots[r], mine);
    }
    add_counts(counts, mine);
  }
}

template <LayoutPolicy P>
__global__ __launch_bounds__(threads) void store_with_prologue_kernel(const __grid_constant__ body::StoreArgs<P> args, kstd::int64_t rows, StoreCounts* counts) {
  const kstd::int64_t item = (kstd::int64_t(blockIdx.x) * threads + threadIdx.x) / 32;
  StoreCounts mine;
  if (item < rows) mine = body::store<P>(WarpGroup{}, item, args);
  if (counts != nullptr) add_counts(counts, WarpGroup::lane() == 0 ? mine : StoreCounts{});
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::store

#if KVIRE_CUDA_COMPILER

/// Queues a store of `rows` rows; pointers in device memory, `counts` (or null) is added to. Captures; allocates nothing, waits for nothing.
template <LayoutPolicy P>
cudaError_t launch_store(const body::StoreArgs<P>& args, std::int64_t rows, StoreCounts* counts, cudaStream_t stream) {
  static_assert(require_layout<P>());
  if (rows <= 0) return rows == 0 ? cudaSuccess : cudaErrorInvalidValue;
  const bool warp_each = args.prologue.any() || (body::RowSplit<P, detail::store::lanes_per_row<P>()>::lanes == 1 && P::dim > 32);
  const int lanes = warp_each ? 32 : detail::store::lanes_per_row<P>();
  const bool pairs = !warp_each && rows >= 8192;
  const auto blocks = static_cast<unsigned>(ceil_div(rows * lanes, std::int64_t(detail::store::threads) * (pairs ? 2 : 1)));
  if (warp_each) {
    detail::store::store_with_prologue_kernel<P><<<blocks, detail::store::threads, 0, stream>>>(args, rows, counts);
  } else {
    const int element_bytes = bits(args.row_element) / 8;
    const bool vector = reinterpret_cast<std::uintptr_t>(args.rows) % 16 == 0 && args.row_stride * element_bytes % 16 == 0;
    const auto kernel = args.row_element == Element::bf16 ? (pairs ? detail::store::store_kernel<P, Element::bf16, 2> : detail::store::store_kernel<P, Element::bf16, 1>)
                                                          : (pairs ? detail::store::store_kernel<P, Element::f32, 2> : detail::store::store_kernel<P, Element::f32, 1>);
    kernel<<<blocks, detail::store::threads, 0, stream>>>(args, rows, vector, counts);
  }
  return cudaGetLastError();
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
