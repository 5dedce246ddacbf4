// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/cuda/launch.cuh>
#include <kvire/kernel/cuda/warp_group.cuh>
#include <kvire/kernel/store_prologue.cuh>
#include <kvire/kernel/store_write.cuh>

/// The CUDA store: the bytes of body::store, by two kernels.
///   - Rows that divide into stripes of 64 elements, each of one field, take eight lanes each: a lane owns eight elements of every stripe, so
///     that loads and stores of a stripe are side by side. They encode without the host's branches: a row with an infinity, a NaN or an extreme
///     scale is taken again by body::store. Prologues run on the same lanes, in the host's order.
///   - Other rows, and rows that do not start on 16 bytes, take a warp each, by body::store.

KVIRE_NAMESPACE_BEGIN

namespace detail::store {

#if KVIRE_CUDA_COMPILER

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

/// Where a row with this slot and position goes, counted.
template <LayoutPolicy P>
__device__ Place place_of(const body::StoreArgs<P>& args, kstd::int64_t slot, kstd::int64_t position, StoreCounts& counts) {
  const kstd::int64_t id = slot / P::tokens_per_page;
  if (slot < 0) {
    counts.skipped += 1;
  } else if (id >= args.page_count) {
    counts.bad_slots += 1;
  } else if (id < args.first_page) {
    counts.null_page += 1;
  } else if (position < 0) {
    counts.bad_positions += 1;
  } else {
    counts.stored += 1;
    return {args.pages + args.page_stride * id, static_cast<int>(slot % P::tokens_per_page)};
  }
  return {};
}

/// body::store of row `item`, by a warp: what the lanes of a row are not made for. A call for long rows, whose bodies take many registers; short
/// ones have none to spare for what a call keeps.
template <LayoutPolicy P>
__device__ __noinline__ void call_store(const body::StoreArgs<P>& args, kstd::int64_t item) {
  body::store<P>(WarpGroup{}, item, args);
}
template <LayoutPolicy P>
__device__ void store_again(const body::StoreArgs<P>& args, kstd::int64_t item) {
  if constexpr (Stripes<P>::each <= 2) {
    body::store<P>(WarpGroup{}, item, args);
  } else {
    call_store<P>(args, item);
  }
}

inline constexpr int threads = 256;

/// From here on a lane's two rows keep memory busier, and below them one is sooner there.
inline constexpr kstd::int64_t many_rows = 1 << 14;

/// Threads that a multiprocessor has room for; more in a launch bound is a warning of the assembler, and no bound.
inline constexpr int resident_threads = KVIRE_DEVICE_ARCH == 860 || KVIRE_DEVICE_ARCH == 870 || KVIRE_DEVICE_ARCH == 890 || KVIRE_DEVICE_ARCH >= 1200 ? 1536 : 2048;

/// Rows of eight lanes, and blocks of a multiprocessor that there must be registers for: enough bytes have to be under way.
template <int Rows, int Blocks>
struct Shape {
  static constexpr int rows = Rows, blocks = Blocks * threads <= resident_threads ? Blocks : resident_threads / threads;
  static constexpr int block_rows = threads / lanes * Rows;
};

template <LayoutPolicy P, Element E, bool WithPrologue, class Shape>
__global__ __launch_bounds__(threads, Shape::blocks) void store_kernel(const __grid_constant__ body::StoreArgs<P> args, kstd::int64_t rows, bool vector,
                                                                       StoreCounts* counts) {
  using Split = Stripes<P>;
  ptx::wait_for_earlier_grids();
  ptx::launch_dependents();
  constexpr int warp_rows = 32 / lanes;
  const int lane = static_cast<int>(threadIdx.x % lanes);
  // The rows of a warp are neighbours; those of the same lanes are warp_rows apart.
  const kstd::int64_t warp_first = kstd::int64_t(blockIdx.x) * Shape::block_rows + threadIdx.x / 32 * (warp_rows * Shape::rows);
  const kstd::int64_t first = warp_first + threadIdx.x % 32 / lanes;
  Chunk<E> raw[Shape::rows][Split::each] = {};
  const auto load = [&](int part) {
#pragma unroll
    for (int r = 0; r < Shape::rows; ++r) {
      const kstd::int64_t item = first + r * warp_rows;
#pragma unroll
      for (int s = 0; s < Split::each; ++s) {
        if (item < rows) raw[r][s].load(args.rows, item * args.row_stride + (part * Split::each + s) * stripe + lane * chunk);
      }
    }
  };
  kstd::int64_t slots[Shape::rows], positions[Shape::rows] = {};
#pragma unroll
  for (int r = 0; r < Shape::rows; ++r) {
    const kstd::int64_t item = first + r * warp_rows;
    slots[r] = item < rows ? args.slots[item] : -1;
    if constexpr (WithPrologue) {
      if (args.prologue.rope_dims > 0 && item < rows) positions[r] = args.prologue.position(item);
      if (args.prologue.rope_dims > 0 && positions[r] >= args.prologue.table_rows) positions[r] = -1;
    }
  }
  load(0);  // at once, whatever becomes of the rows
  StoreCounts mine;
  Place places[Shape::rows];
#pragma unroll
  for (int r = 0; r < Shape::rows; ++r) {
    if (first + r * warp_rows < rows) places[r] = place_of(args, slots[r], positions[r], mine);
  }
  unsigned again = 0;  // bit r: row r of this lane's
  for_each_index<Split::parts>([&](auto part) {
    if constexpr (decltype(part)::value > 0) load(part.value);
#pragma unroll
    for (int r = 0; r < Shape::rows; ++r) {
      const Place to = places[r];
      bool bad = false;
      Scales<P> scales;
      const auto encode = [&](auto& x) {
        if (args.options.bf16_round_trip) round_to_bf16(x);
        for_each_index<Split::each>([&](auto s) {
          constexpr int at = decltype(part)::value * Split::each + decltype(s)::value;
          using F = typename Split::template Field<at>;
          if constexpr (!F::scaled) {
            bad = store_plain<P, at>(x[decltype(s)::value], to, lane, args.options) || bad;
          } else if constexpr (at * stripe == F::first) {
            bad = store_scaled<P, F>(x, to, lane, args.options, scales) || bad;
          }
        });
      };
      if constexpr (WithPrologue) {
        Chunk<Element::f32> x[Split::count];
        apply_prologue<P>(raw[r], x, lane, args.prologue, positions[r] < 0 ? 0 : positions[r], vector);
        encode(x);
      } else {
        encode(raw[r]);
      }
      again |= bad && to.page != nullptr ? 1U << r : 0;
      if (decltype(part)::value == 0 && lane == 0 && to.page != nullptr) {
        for_each_index<P::section_count>([&](auto i) {
          using F = RowField<P, decltype(i)::value>;
          if constexpr (F::padding) kvire::detail::zero_padding<F>(to.page, to.token);
        });
        if constexpr (Scales<P>::gathered) scales.store(to);
      }
    }
  });
  if (__any_sync(0xFFFFFFFFU, again != 0)) {
#pragma unroll 1
    for (int r = 0; r < Shape::rows; ++r) {
      unsigned rows_again = __ballot_sync(0xFFFFFFFFU, (again >> r & 1U) != 0);
      while (rows_again != 0) {
        const int row = (__ffs(static_cast<int>(rows_again)) - 1) / lanes;
        rows_again &= ~(0xFFU << (row * lanes));
        __syncwarp();  // behind what was written above, in part wrongly
        store_again<P>(args, warp_first + r * warp_rows + row);
      }
    }
  }
  if (counts != nullptr) add_counts(counts, lane == 0 ? mine : StoreCounts{});
}

inline constexpr int plain_threads = 256;

template <LayoutPolicy P>
__global__ __launch_bounds__(plain_threads) void plain_store_kernel(const __grid_constant__ body::StoreArgs<P> args, kstd::int64_t rows, StoreCounts* counts) {
  ptx::launch_dependents();
  ptx::wait_for_earlier_grids();
  const kstd::int64_t item = (kstd::int64_t(blockIdx.x) * plain_threads + threadIdx.x) / 32;
  StoreCounts mine;
  if (item < rows) mine = body::store<P>(WarpGroup{}, item, args);
  if (counts != nullptr) add_counts(counts, WarpGroup::lane() == 0 ? mine : StoreCounts{});
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::store

#if KVIRE_CUDA_COMPILER

/// Queues a store of `rows` rows; pointers in device memory, `counts` (or null) is added to. Captures; allocates nothing, waits for nothing.
/// `overlap`: programmatic dependent launch, from sm_90 on. The kernel may then start while the stream's earlier one ends; it waits for that one
/// before it reads anything.
template <LayoutPolicy P>
cudaError_t launch_store(const body::StoreArgs<P>& args, std::int64_t rows, StoreCounts* counts, cudaStream_t stream, bool overlap = false) {
  static_assert(require_layout<P>());
  namespace ds = detail::store;
  using Split = ds::Stripes<P>;
  if (rows <= 0) return rows == 0 ? cudaSuccess : cudaErrorInvalidValue;
  if constexpr (Split::fits) {
    const bool bf16 = args.row_element == Element::bf16;
    const bool prologue = args.prologue.any();
    bool serves =
        reinterpret_cast<std::uintptr_t>(args.rows) % 16 == 0 && args.row_stride * bits(args.row_element) / 8 % 16 == 0 && (!prologue || Split::fits_prologue);
    if constexpr (Split::scaled) {
      using Codec = ScaleCodec<P>;
      if (Codec::value_element == Element::e2m1 && args.options.ties == Ties::to_even) serves = serves && bf16 && !prologue && !Codec::divides;
    }
    const Prologue& p = args.prologue;
    const auto address = [](const void* x) { return reinterpret_cast<std::uintptr_t>(x); };
    const bool vector = (address(p.weight) | address(p.cos) | address(p.sin)) % 16 == 0 && p.rope_dims % ds::chunk == 0;
    if (serves) {
      const auto go = [&](auto element, auto with_prologue) {
        constexpr Element E = decltype(element)::value;
        constexpr bool W = decltype(with_prologue)::value;
        constexpr int words = Split::each * (E == Element::bf16 && !W ? 4 : 8);  // registers of a row
        const auto shaped = [&](auto shape) {
          using S = decltype(shape);
          return detail::launch_kernel(&ds::store_kernel<P, E, W, S>, {ceil_div(rows, std::int64_t(S::block_rows)), ds::threads, 0, overlap}, stream, args, rows,
                                       vector, counts);
        };
        if constexpr (words <= 8) {
          if constexpr (Split::packed) {
            if (rows >= ds::many_rows) return shaped(ds::Shape<2, 5>{});
          }
          return shaped(ds::Shape < 1, Split::packed ? 6 : 8 > {});
        } else {
          return shaped(ds::Shape < 1, words <= 16 || (words <= 32 && Split::packed) ? 4 : words <= 32 ? 3 : 2 > {});
        }
      };
      using Bf16 = kstd::integral_constant<Element, Element::bf16>;
      using F32 = kstd::integral_constant<Element, Element::f32>;
      if constexpr (Split::fits_prologue) {
        if (prologue) return bf16 ? go(Bf16{}, kstd::true_type{}) : go(F32{}, kstd::true_type{});
      }
      return bf16 ? go(Bf16{}, kstd::false_type{}) : go(F32{}, kstd::false_type{});
    }
  }
  return detail::launch_kernel(&ds::plain_store_kernel<P>, {ceil_div(rows * 32, std::int64_t(ds::plain_threads)), ds::plain_threads, 0, overlap}, stream, args, rows,
                               counts);
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
