// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

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

/// The first counts[b] of each row of `misses`, [batch][n], from host slots to device slots. All warps of the grid work on neighbouring tokens.
template <class P, bool Aligned, int Threads>
__global__ void __launch_bounds__(Threads) fetch_misses_kernel(const PageList list, const body::TokenPlaces* misses, const kstd::int32_t* counts,
                                                               kstd::int32_t batch, kstd::int32_t n) {
  extern __shared__ kstd::int32_t ends[];  // [batch]: tokens of the rows up to and with each
  __shared__ typename BlockGroup<Threads>::Exchange exchange;
#if KVIRE_DEVICE_ARCH >= 900
  ptx::launch_dependents();
  ptx::wait_for_earlier_grids();
#endif
  kstd::int32_t total = 0;
  for (kstd::int32_t first = 0; first < batch; first += Threads) {
    const kstd::int32_t b = first + static_cast<kstd::int32_t>(threadIdx.x);
    const kstd::int32_t mine = b < batch ? counts[b] : 0;
    typename BlockGroup<Threads>::template Lanes<kstd::int32_t> before{mine};
    const kstd::int32_t here = scan_sum(BlockGroup<Threads>{&exchange}, before);
    if (b < batch) ends[b] = total + before.value + mine;
    total += here;
  }
  __syncthreads();
  // As many tokens at once as give every warp the same number of turns.
  const auto warps = static_cast<kstd::int32_t>(gridDim.x * (Threads / 32));
  const kstd::int32_t turns = ceil_div(total, warps * tokens_at_once<P>);
  if (turns == 0) return;
  const kstd::int32_t group = ceil_div(total, warps * turns);
  const auto lane = static_cast<kstd::int32_t>(threadIdx.x % 32);
  const auto warp = static_cast<kstd::int32_t>((blockIdx.x * Threads + threadIdx.x) / 32);
  for (kstd::int32_t first = warp * group; first < total; first += warps * group) {
    const kstd::int32_t count = min_of(total - first, group);
    TokenRun run;
    if (lane < count) {
      kstd::int32_t row = 0;
      for (kstd::int32_t end = batch - 1; row < end;) {
        const kstd::int32_t middle = (row + end) / 2;
        if (ends[middle] > first + lane) {
          end = middle;
        } else {
          row = middle + 1;
        }
      }
      const body::TokenPlaces at = misses[kstd::int64_t(row) * n + first + lane - (row == 0 ? 0 : ends[row - 1])];
      run.from_page = static_cast<kstd::int32_t>(at.host / P::tokens_per_page);
      run.from_token = static_cast<kstd::uint16_t>(at.host % P::tokens_per_page);
      run.to_page = static_cast<kstd::int32_t>(at.device / P::tokens_per_page);
      run.to_token = static_cast<kstd::uint16_t>(at.device % P::tokens_per_page);
    }
    copy_tokens<P, P::plane_count - 1, Aligned>(list, run, count);
  }
}

/// Queues the fetch behind launch_place_tokens. `overlap`: it starts while that ends.
template <class P, int Threads = fetch_threads>
cudaError_t launch_fetch_misses(const PageList& list, const body::TokenPlaces* misses, const kstd::int32_t* counts, kstd::int32_t batch, kstd::int32_t n, int blocks,
                                bool overlap, cudaStream_t stream) {
  const auto kernel = aligned(list) ? fetch_misses_kernel<P, true, Threads> : fetch_misses_kernel<P, false, Threads>;
  return launch_kernel(kernel, {blocks, Threads, static_cast<std::size_t>(batch) * sizeof(kstd::int32_t), overlap}, stream, list, misses, counts, batch, n);
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
    const std::int64_t need = place::shared_bytes(most_listed) + static_cast<std::int64_t>(sizeof(BlockGroup<place::threads>::Exchange));
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

  /// Whether kernels may start before earlier ones have ended.
  static bool hopper(const Stream<Cuda>& stream) {
    int major = 0;
    return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, stream.device()) == cudaSuccess && major >= 9;
  }

  template <class Slot, class Lease>
  static Status place(Stream<Cuda>& stream, const State& state, const body::PlaceTokensArgs<Slot>& args, const Lease& lease, HotCounts* counts) {
    return kvire::launch(
        stream,
        [&](cudaStream_t native, const auto&) -> Status {
          const cudaError_t e = launch_place_tokens(args, counts, hopper(stream), native);
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
    const cudaError_t e = hot::launch_fetch_misses<P>(list, args.misses, args.miss_counts, args.batch, args.n, hot::fetch_blocks, hopper(stream), stream.native());
    if (e == cudaSuccess) return {};
    (void)cudaMemsetAsync(state->records(info.layer), 0, static_cast<std::size_t>(state->layer_bytes()), stream.native());
    return stream.error(e, state->name() + ": fetching tokens");
  }

  template <class P>
  static Status save(Stream<Cuda>& stream, const State& state, const CopyInfo& info, const body::PlaceTokensArgs<std::int64_t>& args, const ReadLease<P, Cuda>& from,
                     const WriteLease<P, Cuda>& to, CopyCounts* counts) {
    const std::int64_t n = std::int64_t(args.batch) * args.n;
    if (n == 0) return {};
    auto go = ask_faults(stream, info);
    if (!go.ok()) return go.error();
    if (!go.value()) return {};
    auto* const places = reinterpret_cast<kstd::int64_t*>(state->misses());
    return kvire::launch(
        stream,
        [&](cudaStream_t native, const auto& source, const auto& target) -> Status {
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
