// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/store_encode.cuh>

/// How eight lanes write a row: the bytes of body::store for rows whose blocks are finite.

KVIRE_NAMESPACE_BEGIN

namespace detail::store {

#if KVIRE_CUDA_COMPILER

/// Where a row goes; no page: nowhere.
struct Place {
  kstd::byte* page = nullptr;
  int token = 0;
};

/// The scales of one row, gathered in registers and written at once.
template <LayoutPolicy P, bool = Stripes<P>::scaled>
struct Scales {
  static constexpr bool gathered = false;
};
template <LayoutPolicy P>
struct Scales<P, true> {
  using Split = Stripes<P>;
  static constexpr int index = P::template section_of<role::Scale>;
  using S = RowField<P, index>;
  static constexpr int block = P::Scaling::block;
  static constexpr int code_bits = bits(S::element);
  static constexpr int across = block < stripe ? stripe / block : 1;  // blocks of a stripe
  static constexpr int block_lanes = lanes / across;
  static constexpr bool gathered = across == 1 || (across <= 4 && code_bits == 8);
  // Padding right behind is written with them.
  static constexpr int pad = [] {
    if constexpr (index + 1 < P::section_count) {
      using Next = RowField<P, index + 1>;
      return Next::padding && Next::plane == S::plane ? Next::count : 0;
    } else {
      return 0;
    }
  }();
  static constexpr int bytes = S::count * code_bits / 8 + pad;
  kstd::uint32_t w[(bytes + 3) / 4] = {};

  /// Block `b` of those that this lane has a part of, ascending.
  __device__ void add(int b, kstd::uint32_t code) { w[b * code_bits / 32] |= code << (b * code_bits % 32); }
  /// Brings what the first lane of the row writes to it: the blocks of a stripe lie in neighbouring lanes, those of the next stripe behind them.
  __device__ void join() {
#pragma unroll
    for (int size = 1; size < across; size *= 2) {  // bytes that are in order already
      kstd::uint32_t joined[sizeof w / 4 + 1];
#pragma unroll
      for (int i = 0; i < (S::count / across * size + 3) / 4; ++i) {
        const kstd::uint32_t other = __shfl_xor_sync(0xFFFFFFFFU, w[i], block_lanes * size);
        joined[2 * i] = __byte_perm(w[i], other, size == 1 ? 0x5140 : 0x5410);
        joined[2 * i + 1] = __byte_perm(w[i], other, size == 1 ? 0x7362 : 0x7632);
      }
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof w / 4); ++i) w[i] = joined[i];
    }
  }
  __device__ void store(const Place& to) const {
    constexpr int alignment = static_cast<int>(power_of_two_divisor(kstd::int64_t(S::byte_alignment | bytes), kstd::int64_t(16)));
    __builtin_memcpy(__builtin_assume_aligned(to.page + S::offset(to.token), alignment), w, bytes);
  }
};

template <int N, class F>
__device__ void for_each_index(F&& f) {
  [&]<int... I>(kstd::integer_sequence<int, I...>) { (f(kstd::integral_constant<int, I>{}), ...); }
  (kstd::make_integer_sequence<int, N>{});
}

template <class F>
__device__ void write(const Place& to, int index, const kstd::uint32_t* words) {
  constexpr int bytes = chunk * bits(F::element) / 8;
  constexpr int alignment = static_cast<int>(power_of_two_divisor(kstd::int64_t(F::byte_alignment | bytes), kstd::int64_t(16)));
  __builtin_memcpy(__builtin_assume_aligned(to.page + F::offset(to.token) + kstd::int64_t(index) * bits(F::element) / 8, alignment), words, bytes);
}

/// Writes this lane's chunks of the scaled field of a row; true if the row has to be taken again.
template <LayoutPolicy P, class F, class C>
__device__ bool store_scaled(const C (&x)[Stripes<P>::count], const Place& to, int lane, const RowOptions& options, Scales<P>& scales) {
  using Codec = ScaleCodec<P>;
  using S = Scales<P>;
  constexpr int first = F::first / stripe;
  constexpr int down = Codec::block > stripe ? Codec::block / stripe : 1;  // stripes of a block
  bool again = false;
  for_each_index<F::count / (stripe * down)>([&](auto b) {
    kstd::uint32_t key = 0;
#pragma unroll
    for (int i = 0; i < down; ++i) key = max(key, x[first + b.value * down + i].largest());
#pragma unroll
    for (int distance = 1; distance < S::block_lanes; distance *= 2) key = max(key, __shfl_xor_sync(0xFFFFFFFFU, key, distance));
    const FastScale scale = finite_scale<P>(key);
    again = again || key >= infinity_bits || scale.extreme;
    if constexpr (S::gathered) {
      scales.add(b.value, scale.code);
    } else {
      if (to.page != nullptr && lane % S::block_lanes == 0) {
        store_codes<S::S::element>(to.page + S::S::offset(to.token), b.value * S::across + lane / S::block_lanes, {scale.code});
      }
    }
#pragma unroll
    for (int i = 0; i < down; ++i) {
      const int at = (b.value * down + i) * stripe + lane * chunk;
      kstd::uint32_t codes[2];
      if constexpr (F::element == Element::e4m3) {
        encode_e4m3(x[first + b.value * down + i], scale, codes);
      } else {
        codes[0] = encode_e2m1<P>(x[first + b.value * down + i], scale, options.ties == Ties::to_even);
      }
      if (to.page != nullptr) write<F>(to, at, codes);
    }
  });
  if constexpr (S::gathered) scales.join();
  return again;
}

/// Writes this lane's chunk of stripe S, of a field without scales; true if the row has to be taken again.
template <LayoutPolicy P, int S, class C>
__device__ bool store_plain(const C& x, const Place& to, int lane, const RowOptions& options) {
  using F = typename Stripes<P>::template Field<S>;
  (void)sizeof(rule::NumberFields<P, F::element>);
  const int at = S * stripe - F::first + lane * chunk;
  if constexpr (F::element == Element::bf16) {
    kstd::uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(C) == 16) {
        codes[i] = x.w[i];
      } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(codes[i]) : "f"(x.value(2 * i + 1)), "f"(x.value(2 * i)));
      }
    }
    if (to.page != nullptr) write<F>(to, at, codes);
    return x.largest() > infinity_bits;
  } else if constexpr (NumberElement<F::element>) {
    kstd::uint32_t codes[chunk];
#pragma unroll
    for (int i = 0; i < chunk; ++i) codes[i] = encode_element<F::element>(bits_of(x.value(i)), options.ties);
    constexpr int alignment = static_cast<int>(power_of_two_divisor(kstd::int64_t(F::byte_alignment | (chunk * bits(F::element) / 8)), kstd::int64_t(16)));
    if (to.page != nullptr) store_codes<F::element, chunk, alignment>(to.page + F::offset(to.token), at, codes);
  }
  return false;
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::store

KVIRE_NAMESPACE_END
