// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include <kvire/kernel/cuda/device_code.cuh>
#include <kvire/kernel/cuda/launch.cuh>
#include <kvire/kernel/move_tokens.cuh>
#include <kvire/kernel/place_tokens.cuh>
#include <kvire/pool/cuda/memory.hpp>
#include <kvire/tier/hot_set.hpp>
#include <kvire/transfer/transfer.cuh>

/// The hot set on the CUDA backend: a kernel that looks up, with a block for each row, and behind it one that fetches what is missing from pinned memory
/// on a few multiprocessors.

KVIRE_NAMESPACE_BEGIN

namespace detail::hot {

inline constexpr int fetch_threads = 512;
inline constexpr int fetch_blocks = 8;      // multiprocessors that single tokens keep the link busy with
inline constexpr std::int64_t most_rows = 8192;  // their sums fit shared memory

/// Tokens that a warp takes at a time at most: as many as its lanes have loads under way for.
template <class P>
inline constexpr int tokens_at_once = [] {
  kstd::int64_t vectors = 1;
  for (int plane = 0; plane < P::plane_count; ++plane) {
    const kstd::int64_t place = P::table.plane_offset[plane] | P::table.row_bytes[plane] | P::page_bytes;
    vectors = max_of(vectors, P::table.row_bytes[plane] / power_of_two_divisor(place, kstd::int64_t(16)));
  }
  return static_cast<int>(max_of<kstd::int64_t>(1, min_of<kstd::int64_t>(32, 256 / vectors)));
}();

#if KVIRE_CUDA_COMPILER

/// The order in which a block fetches its tokens.
struct FetchOrder {
  static constexpr int neighbours = 8;      ///< tokens of the list that go to the same block
  static constexpr int at_once = 8192;      ///< tokens that a block sorts at a time
  static constexpr int bins = 1024;         ///< of the host's addresses
  static constexpr int least_tokens = 512;  ///< of all blocks: fewer are under way all at once, whatever their order

  /// Addresses are as many bins once they are shifted by so much.
  static int shift(const PageList& list) {
    int bits = 0;
    while (list.from_stride * list.from_pages >> bits >= bins) ++bits;
    return bits;
  }
};

/// The first counts[b] of each row of `misses`, [batch][n], from host slots to device slots. A block has every gridDim-th of the groups of neighbours and takes its
/// tokens in the order of the host's addresses, so that all blocks are in the same stretch of them: single tokens wait for the translation of these addresses.
template <class P, bool Aligned, int Threads>
__global__ void __launch_bounds__(Threads) fetch_misses_kernel(const PageList list, const body::TokenPlaces* misses, const kstd::int32_t* counts,
                                                               kstd::int32_t batch, kstd::int32_t n, int address_shift) {
  constexpr int each = FetchOrder::at_once / Threads;
  constexpr int bins_each = FetchOrder::bins / Threads;
  static_assert(sizeof(rule::KernelTuning<FetchOrder, (each * Threads == FetchOrder::at_once && bins_each * Threads == FetchOrder::bins)>) > 0);
  using Group = BlockGroup<Threads>;
  using Index = typename Group::template Lanes<kstd::int32_t>;
  extern __shared__ kstd::int32_t fetch_scratch[];
  __shared__ typename Group::Exchange exchange;
  __shared__ kstd::int32_t bins[FetchOrder::bins];
  kstd::int32_t* const order = fetch_scratch;                      // [at_once]: places in `misses`
  kstd::int32_t* const ends = fetch_scratch + FetchOrder::at_once;  // [batch]: tokens of the rows up to and with each
  const Group group{&exchange};
  const auto thread = static_cast<kstd::int32_t>(threadIdx.x);
  ptx::launch_dependents();
  ptx::wait_for_earlier_grids();
  kstd::int32_t total = 0;
  for (kstd::int32_t first = 0; first < batch; first += Threads) {
    const kstd::int32_t mine = first + thread < batch ? counts[first + thread] : 0;
    Index before{mine};
    const kstd::int32_t here = sync_any(group, before) ? scan_sum(group, before) : 0;
    if (first + thread < batch) ends[first + thread] = total + before.value + mine;
    total += here;
  }
  const auto blocks = static_cast<kstd::int32_t>(gridDim.x);
  const auto block = static_cast<kstd::int32_t>(blockIdx.x);
  constexpr kstd::int32_t side_by_side = FetchOrder::neighbours;
  const kstd::int32_t groups = ceil_div(total, side_by_side);
  const kstd::int32_t own = (groups + blocks - 1 - block) / blocks;
  if (own == 0) return;
  const bool last = (groups - 1) % blocks == block;  // of the groups, which may have less
  const kstd::int32_t mine = own * side_by_side - (last ? groups * side_by_side - total : 0);
  const bool sorted = total >= FetchOrder::least_tokens;
  for (kstd::int32_t done = 0; done < mine; done += FetchOrder::at_once) {
    const kstd::int32_t part = min_of(mine - done, kstd::int32_t(FetchOrder::at_once));
    for (int i = 0; i < bins_each; ++i) bins[thread + i * Threads] = 0;
    __syncthreads();
    kstd::int32_t place[each];
    kstd::int32_t rank[each];  // among those of its bin, and the bin
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const kstd::int32_t i = thread + j * Threads;
      if (i >= part) break;
      const kstd::int32_t token = ((done + i) / side_by_side * blocks + block) * side_by_side + (done + i) % side_by_side;
      kstd::int32_t row = 0;
      for (kstd::int32_t end = batch - 1; row < end;) {
        const kstd::int32_t middle = (row + end) / 2;
        if (ends[middle] > token) {
          end = middle;
        } else {
          row = middle + 1;
        }
      }
      place[j] = row * n + token - (row == 0 ? 0 : ends[row - 1]);
      if (!sorted) order[i] = place[j];
    }
    if (sorted) {
#pragma unroll
      for (int j = 0; j < each; ++j) {
        if (thread + j * Threads >= part) break;
        const auto bin = static_cast<kstd::int32_t>(list.from_stride * (misses[place[j]].host / P::tokens_per_page) >> address_shift);
        rank[j] = atomicAdd(bins + bin, 1) * FetchOrder::bins + bin;
      }
      __syncthreads();
      Index before{0};
      for (int i = 0; i < bins_each; ++i) before.value += bins[thread * bins_each + i];
      (void)scan_sum(group, before);
      for (int i = 0; i < bins_each; ++i) {
        const kstd::int32_t size = bins[thread * bins_each + i];
        bins[thread * bins_each + i] = before.value;
        before.value += size;
      }
      __syncthreads();
#pragma unroll
      for (int j = 0; j < each; ++j) {
        if (thread + j * Threads < part) order[bins[rank[j] % FetchOrder::bins] + rank[j] / FetchOrder::bins] = place[j];
      }
    }
    __syncthreads();
    // As many tokens at once as give every warp the same number of turns.
    constexpr kstd::int32_t warps = Threads / 32;
    const kstd::int32_t turns = ceil_div(part, warps * tokens_at_once<P>);
    const kstd::int32_t many = ceil_div(part, warps * turns);
    const kstd::int32_t lane = thread % 32;
    for (kstd::int32_t first = thread / 32 * many; first < part; first += warps * many) {
      const kstd::int32_t count = min_of(part - first, many);
      TokenRun run;
      if (lane < count) {
        const body::TokenPlaces at = misses[order[first + lane]];
        run.from_page = static_cast<kstd::int32_t>(at.host / P::tokens_per_page);
        run.from_token = static_cast<kstd::uint16_t>(at.host % P::tokens_per_page);
        run.to_page = static_cast<kstd::int32_t>(at.device / P::tokens_per_page);
        run.to_token = static_cast<kstd::uint16_t>(at.device % P::tokens_per_page);
      }
      copy_tokens<P, P::plane_count - 1, Aligned>(list, run, count);
    }
    __syncthreads();
  }
}

/// Queues the fetch behind launch_place_tokens. `overlap`: it starts while that ends.
template <class P, int Threads = fetch_threads>
cudaError_t launch_fetch_misses(const PageList& list, const body::TokenPlaces* misses, const kstd::int32_t* counts, kstd::int32_t batch, kstd::int32_t n, int blocks,
                                bool overlap, cudaStream_t stream) {
  const auto kernel = aligned(list) ? fetch_misses_kernel<P, true, Threads> : fetch_misses_kernel<P, false, Threads>;
  const auto bytes = (FetchOrder::at_once + static_cast<std::size_t>(batch)) * sizeof(kstd::int32_t);
  constexpr std::size_t always = 40 * 1024;  // beside the static part
  constexpr auto most = static_cast<int>((FetchOrder::at_once + most_rows) * sizeof(kstd::int32_t));
  if (bytes > always) {
    if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most); e != cudaSuccess) return e;
  }
  return launch_kernel(kernel, {blocks, Threads, bytes, overlap}, stream, list, misses, counts, batch, n, FetchOrder::shift(list));
}

/// Where the host has appended tokens, in the misses' memory: [batch * n].
template <class Slot>
__global__ void host_slots_kernel(const __grid_constant__ body::PlaceTokensArgs<Slot> args, kstd::int64_t* out) {
  const kstd::int64_t i = kstd::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < kstd::int64_t(args.batch) * args.n) out[i] = args.host_slot(i);
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::hot

#if KVIRE_CUDA_COMPILER

namespace detail {

template <>
struct HotSetEngine<Cuda> {
  using State = std::shared_ptr<HotSetState>;

  static Status check(const std::string& name, std::int64_t rows, std::int64_t most_listed) {
    if (rows > hot::most_rows) return Error{ErrorCode::unsupported, name + ": rows is " + std::to_string(rows) + ", above " + std::to_string(hot::most_rows)};
    int device = 0;
    int most = 0;
    if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return cuda_error(e, name);
    if (const cudaError_t e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device); e != cudaSuccess) return cuda_error(e, name);
    const std::int64_t need = place::shared_bytes(most_listed) + place::static_bytes;
    if (need <= most) return {};
    return Error{ErrorCode::unsupported, name + ": to look up " + std::to_string(most_listed) + " tokens takes " + std::to_string(need) + " bytes of shared memory, a block of device " +
                                             std::to_string(device) + " has " + std::to_string(most)};
  }

  static Status clear(Stream<Cuda>& stream, const State& state, std::int64_t row) {
    DeviceScope scope(stream.device());
    const auto pitch = static_cast<std::size_t>(state->layer_bytes());
    std::byte* const from = state->records(0) + (row < 0 ? 0 : row) * state->row_bytes();
    const auto width = row < 0 ? pitch : static_cast<std::size_t>(state->row_bytes());
    const cudaError_t e = cudaMemset2DAsync(from, pitch, 0, width, static_cast<std::size_t>(state->layers()), stream.native());
    return e == cudaSuccess ? Status() : Status(stream.error(e, state->name() + ": emptying slots"));
  }

  template <class Slot, class Lease>
  static Status place(Stream<Cuda>& stream, const State& state, const body::PlaceTokensArgs<Slot>& args, const Lease& lease, HotCounts* counts) {
    return kvire::launch(
        stream,
        [&](cudaStream_t native, const auto&) -> Status {
          const cudaError_t e = launch_place_tokens(args, counts, device_code(stream.device()).overlap, native);
          return e == cudaSuccess ? Status() : Status(stream.error(e, state->name() + ": looking up tokens"));
        },
        lease);
  }

  template <class P>
  static Status fetch(Stream<Cuda>& stream, const State& state, const CopyInfo& info, const body::PlaceTokensArgs<std::int32_t>& args, PageView<P, Cuda> to,
                      const ReadLease<P, Cuda>& from, const ReadLease<P, Cuda>& reader, HotCounts* counts) {
    if (args.batch == 0 || args.n == 0) return {};
    const auto source = kernel_access::view(from, stream);
    PageList list{to.base, source.base, to.page_stride, source.page_stride, to.pages, source.pages, P::page_bytes};
    if (Status status = on_device(list, info, stream.device(), state->name()); !status.ok()) return status;
    auto go = ask_faults(stream, info);
    if (!go.ok()) return go.error();
    if (Status status = place(stream, state, args, reader, counts); !status.ok()) return status;
    if (!go.value() || !kernel_access::ready(reader)) return {};
    DeviceScope scope(stream.device());
    const cudaError_t e = hot::launch_fetch_misses<P>(list, args.misses, args.miss_counts, args.batch, args.n, hot::fetch_blocks, device_code(stream.device()).overlap, stream.native());
    if (e == cudaSuccess) return {};
    (void)cudaMemsetAsync(state->records(info.layer), 0, static_cast<std::size_t>(state->layer_bytes()), stream.native());
    return stream.error(e, state->name() + ": fetching tokens");
  }

  template <class P>
  static Status save(Stream<Cuda>& stream, const State& state, const CopyInfo& info, const body::PlaceTokensArgs<std::int64_t>& args, const ReadLease<P, Cuda>& from,
                     const WriteLease<P, Cuda>& to, CopyCounts* counts) {
    const std::int64_t n = std::int64_t(args.batch) * args.n;
    if (n == 0) return {};
    auto* const places = reinterpret_cast<kstd::int64_t*>(state->misses());
    return kvire::launch(
        stream,
        [&](cudaStream_t native, const auto& source, const auto& target) -> Status {
          auto go = ask_faults(stream, info);
          if (!go.ok()) return go.error();
          if (!go.value()) return {};
          auto address = device_address(HostAddress{target.base}, state->name());
          if (!address.ok()) return address.error();
          constexpr unsigned threads = 128;
          hot::host_slots_kernel<std::int64_t><<<static_cast<unsigned>(ceil_div(n, std::int64_t(threads))), threads, 0, native>>>(args, places);
          const cudaError_t e = with_limit(static_cast<const kstd::int64_t*>(places), n, P::tokens_per_page, to, target.pages, native, [&](const kstd::int64_t* slots) {
            return launch_move_tokens<P>({source.base, source.page_stride, source.pages, address.value().value, target.page_stride, target.pages, args.out, slots}, n, counts, native);
          });
          return e == cudaSuccess ? Status() : Status(stream.error(e, state->name() + ": backing up tokens"));
        },
        from, to);
  }
};

}  // namespace detail

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
