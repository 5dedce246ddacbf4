// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/top_k.cuh>

/// Top-k of rows whose best score of each 16 neighbours is known already: what the logits kernel leaves on its way. The same selection as
/// body::top_k, bit for bit.
///
/// Order groups by (best score down, position up) and take k of them: no entry of another group can be selected, for each of the k holds an entry
/// that comes before it. So a floor that k groups or more reach is a floor of the k-th score, and only those groups' scores are read: 16 k
/// of them at most beside ties, whatever the distribution, and mostly little more than k that reach the floor themselves. Among those the cut is
/// found exactly, and what is not below it is written in order of position.

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

inline constexpr int group_size = 16;

struct GroupedParams {
  Params base;
  const u32* best = nullptr;      // [rows][group_stride]: order_key of the best of 16 neighbours that may be selected, 0 where there is none
  std::int64_t group_stride = 0;  // ceil(stride / 16)
};

#if KVIRE_CUDA_COMPILER

template <int Threads, int GroupItems, bool Paged>
struct GroupedBlock : Block<Threads, 8, true, false, Paged> {
  using Base = Block<Threads, 8, true, false, Paged>;
  using Base::capacity, Base::end, Base::hist, Base::lane, Base::list, Base::p, Base::passing, Base::row, Base::s, Base::scores, Base::tid, Base::warp;
  static constexpr u32 slack = 256;  // groups beyond k that are rather read than told apart
  const GroupedParams& grouped;

  // The floor: a key that at least k groups reach, or 1 if fewer hold anything. Starts after a barrier with a clear histogram, ends with one.
  __device__ u32 find_floor(const u32 (&keys)[GroupItems]) {
    u32 floor = 0, need = u32(p.args.k), above = 0;
    u64 span = u64(1) << 32;
    int shift = 32 - digit;
#pragma unroll 1
    for (;;) {
#pragma unroll
      for (int i = 0; i < GroupItems; ++i) {
        if (keys[i] != 0 && keys[i] >= floor && keys[i] - floor < span) atomicAdd(&hist[(keys[i] - floor) >> shift], 1U);
      }
      __syncthreads();
      const Found f = this->find(hist, need);
      this->clear(hist);
      if (f.all != 0) return 1;
      floor += f.bin << shift;
      above += f.above;
      if (above + f.count <= u32(p.args.k) + slack || shift == 0) return max(floor, 1U);
      need -= f.above;
      span = u64(1) << shift;
      shift = max(0, shift - digit);
      __syncthreads();
    }
  }

  // Room for `n` of each lane in a list that `counter` counts: where the lane's begin.
  __device__ u32 append(u32* counter, u32 n) {
    u32 up = n;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const u32 other = __shfl_up_sync(~0U, up, d);
      if (lane >= d) up += other;
    }
    u32 base = 0;
    if (lane == 31 && up != 0) base = atomicAdd(counter, up);
    return __shfl_sync(~0U, base, 31) + up - n;
  }

  __device__ void run() {
    row = blockIdx.x;
    scores = p.args.scores + std::int64_t(row) * p.args.stride;
    const u32* best = grouped.best + row * grouped.group_stride;
    u32 keys[GroupItems];
#pragma unroll
    for (int i = 0; i < GroupItems; ++i) keys[i] = i * Threads + tid < grouped.group_stride ? best[i * Threads + tid] : 0;
    const int length = end = this->visible();
    this->begin = 0;
    const int used = (length + group_size - 1) / group_size;
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < GroupItems; ++i) {
      keys[i] = i * Threads + tid < used ? keys[i] : 0;
      most = max(most, keys[i]);
    }
    this->clear(hist);
    if (tid == 0) {
      s.listed = 0;
      s.received = 0;
      s.counted = 0;
      s.emitted = 0;
      s.most = 0;
    }
    __syncthreads();
    most = __reduce_max_sync(~0U, most);
    if (lane == 0) atomicMax(&s.most, most);
    const u32 floor = find_floor(keys);
    u32* chosen = passing;  // groups that reach the floor
    u32 mine = 0;
#pragma unroll
    for (int i = 0; i < GroupItems; ++i) mine += keys[i] >= floor ? 1U : 0U;
    u32 slot = append(&s.received, mine);
#pragma unroll
    for (int i = 0; i < GroupItems; ++i) {
      if (keys[i] >= floor && slot < u32(bins)) chosen[slot++] = u32(i * Threads + tid);
    }
    __syncthreads();

    // Their scores that reach it, listed and counted by key.
    const u32 groups = s.received;
    const int shift = max(0, 32 - __clz(int(s.most - floor)) - digit);
    const float least = floor >= sign_bit ? float_of(floor - sign_bit) : floor > 0x00800000U ? float_of(sign_bit | (sign_bit - floor)) : float_of(0xFF800000U);
    const u32 quarters = min(groups, u32(bins)) * 4;
    constexpr int batch = 4;  // loads of a thread under way
#pragma unroll 1
    for (u32 base = u32(tid); base - u32(lane) < quarters; base += batch * Threads) {
      float4 v[batch];
      int first[batch];
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        const u32 i = base + u32(b * Threads);
        first[b] = i < quarters ? int(chosen[i / 4]) * group_size + int(i % 4) * 4 : end;
        v[b] = this->load4(first[b]);
      }
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        const float x[4] = {v[b].x, v[b].y, v[b].z, v[b].w};
        u32 mask = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) mask |= x[j] >= least ? 1U << j : 0U;
        if (first[b] + 4 > end) mask &= (1U << max(end - first[b], 0)) - 1;
        if (__any_sync(~0U, mask != 0) == 0) continue;
        u32 at = append(&s.listed, u32(__popc(mask)));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if ((mask >> j & 1U) == 0) continue;
          const u32 key = order_key(x[j]);
          const bool reached = key >= floor;  // where a build flushes subnormals, their comparison says yes to all
          if (reached) atomicAdd(&hist[(key - floor) >> shift], 1U);
          if (at < u32(capacity)) list[at] = reached ? entry_of(key, u32(first[b] + j)) : 0;
          ++at;
        }
      }
    }
    __syncthreads();
    u32 n = groups <= u32(bins) ? s.listed : u32(capacity) + 1;
    const u32 k = u32(p.args.k);
    u64 cut = u64(1) << position_bits;
    if (n > u32(capacity)) {
      // Many equal scores: the row is read again, as one whose sample misled.
      __syncthreads();  // everyone has seen how many there were
      this->stream_alone(length);
      n = s.listed;
      if (n > k) cut = this->select(n, n, k);
    } else if (n > k) {
      const Found last = this->find(hist, k);
      cut = u64(floor + (last.bin << shift)) << position_bits;
      const u64 span = u64(1) << (shift + position_bits);
      if (last.count <= by_counting && last.count != k - last.above) {
#pragma unroll 1
        for (u32 i = u32(tid); i < n; i += Threads) {
          if (list[i] - cut < span) this->candidates[atomicAdd(&s.counted, 1U)] = list[i];
        }
        __syncthreads();
        const u64 found = warp == 0 ? this->rank_candidates(k - last.above, last.count) : 0;
        if (tid == 0) s.cut = found;
        __syncthreads();
        cut = s.cut;
      } else if (last.count != k - last.above) {
        this->clear(hist);
        __syncthreads();
        cut = this->refine(n, n, cut, span, k - last.above);
      }
    }
    __syncthreads();
    if (p.args.order == TopKOrder::by_score) {
      u64* ranked = reinterpret_cast<u64*>(hist);
      for (u32 i = u32(tid); i < n; i += Threads) {
        if (list[i] >= cut) ranked[atomicAdd(&s.emitted, 1U)] = list[i];
      }
      this->emit_by_score();
    } else {
      emit(n, cut, length);
    }
    if (p.counts != nullptr) this->count_pages(length);
  }

  // Writes the positions of what is not below the cut, ascending: by way of a bit for each position.
  __device__ void emit(u32 n, u64 cut, int length) {
    u32* bit = hist;  // 32 * bins positions
    this->clear(hist);
    __syncthreads();
#pragma unroll 1
    for (u32 i = u32(tid); i < n; i += Threads) {
      const u32 position = position_of(list[i]);
      if (list[i] >= cut) atomicOr(&bit[position / 32], 1U << (position & 31U));
    }
    __syncthreads();
    const int words = (length + 31) / 32;
    const int each = (words + Threads - 1) / Threads;
    const int first = tid * each;
    u32 mine = 0;
#pragma unroll 1
    for (int w = first; w < min(first + each, words); ++w) mine += u32(__popc(bit[w]));
    u32 slot = this->exclusive_scan(mine);
    if (tid == Threads - 1) s.emitted = slot + mine;
#pragma unroll 1
    for (int w = first; w < min(first + each, words); ++w) {
      for (u32 rest = bit[w]; rest != 0; rest &= rest - 1) this->out()[slot++] = this->listed_as(w * 32 + __ffs(int(rest)) - 1);
    }
    if (n >= u32(p.args.k)) return;
    __syncthreads();
    for (int j = int(s.emitted) + tid; j < p.args.k; j += Threads) this->out()[j] = -1;
  }
};

template <int Threads, int GroupItems, bool Paged>
__global__ __launch_bounds__(Threads, 1) void grouped_top_k_kernel(const __grid_constant__ GroupedParams p) {
#if KVIRE_DEVICE_ARCH >= 900
  ptx::launch_dependents();
  ptx::wait_for_earlier_grids();
#endif
  extern __shared__ __align__(16) unsigned char dynamic[];
  __shared__ Scratch scratch;
  u32* hist = reinterpret_cast<u32*>(dynamic);
  u32* passing = hist + bins;
  u64* list = reinterpret_cast<u64*>(passing + bins);
  GroupedBlock<Threads, GroupItems, Paged> block{
      {p.base, scratch, hist, passing, list, reinterpret_cast<u64*>(passing), int(threadIdx.x), int(threadIdx.x & 31U), int(threadIdx.x >> 5)}, p};
  block.run();
}

template <int Threads, int GroupItems, bool Paged>
cudaError_t launch_grouped(const GroupedParams& p, std::int64_t rows, cudaStream_t stream, bool overlap) {
  using B = GroupedBlock<Threads, GroupItems, Paged>;
  auto* kernel = grouped_top_k_kernel<Threads, GroupItems, Paged>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(B::shared_bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(rows));
  config.blockDim = dim3(Threads);
  config.dynamicSmemBytes = B::shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p);
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

#if KVIRE_CUDA_COMPILER

/// Whether launch_grouped_top_k serves a selection: k up to 1,024, rows of up to 128 Ki positions and 16 positions or a multiple a page.
inline bool grouped_top_k_serves(const body::TopKArgs& args) {
  const bool whole = args.page_table == nullptr || (args.tokens_per_page % detail::topk::group_size == 0 &&
                                                    (!args.translate || args.page_count <= 0x7FFFFFFF / args.tokens_per_page));
  return args.k >= 1 && args.k <= 1024 && args.stride <= 8192 * detail::topk::group_size && args.stride % 4 == 0 && whole;
}

/// Exact, deterministic top-k by the best of each 16 scores: `best` is [rows][ceil(stride / 16)], order_key of the best score that may be selected of
/// positions 16 i to 16 i + 15 (those that are seen and lie on a page), 0 where there is none; what it holds beyond a row's length is not used.
/// NaN scores must be none of these. `counts` (device memory, or null): bad pages are added to it. `overlap`: programmatic dependent launch; the
/// kernel waits for the stream's earlier one before it reads. Captures into graphs; allocates nothing, waits for nothing.
template <int Threads = 1024>
cudaError_t launch_grouped_top_k(const body::TopKArgs& args, const kstd::uint32_t* best, TopKCounts* counts, cudaStream_t stream, bool overlap) {
  const std::int64_t rows = std::int64_t(args.batch) * args.next_n;
  if (!grouped_top_k_serves(args)) return cudaErrorInvalidValue;
  if (rows == 0) return cudaSuccess;
  detail::topk::GroupedParams p;
  p.base.args = args;
  p.base.counts = reinterpret_cast<detail::topk::u64*>(counts);
  p.base.vector_loads = reinterpret_cast<std::uintptr_t>(args.scores) % 16 == 0;
  for (int bit = 0; bit < 31; ++bit) {
    if (args.tokens_per_page == 1 << bit) p.base.page_shift = bit;
  }
  p.best = best;
  p.group_stride = (args.stride + detail::topk::group_size - 1) / detail::topk::group_size;
  const bool paged = args.page_table != nullptr;
  constexpr int few = 2048 / Threads;
  if (p.group_stride <= 2048) {
    return paged ? detail::topk::launch_grouped<Threads, few, true>(p, rows, stream, overlap) : detail::topk::launch_grouped<Threads, few, false>(p, rows, stream, overlap);
  }
  return paged ? detail::topk::launch_grouped<Threads, 4 * few, true>(p, rows, stream, overlap)
               : detail::topk::launch_grouped<Threads, 4 * few, false>(p, rows, stream, overlap);
}

#endif  // KVIRE_CUDA_COMPILER

KVIRE_NAMESPACE_END
