// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <benchmarks/support/device_timing.cuh>

#include <kvire/kernel/ptx/barrier.cuh>

#include <cstddef>

// The floor of everything that reads pages: bringing them to shared memory once.

namespace kvire_bench {

inline constexpr int page_read_stages = 4;
template <int Bytes>
inline constexpr int page_read_shared = page_read_stages * (Bytes + 16);

/// Brings pages to shared memory and does nothing with them: one warp a CTA, ids prefetched.
template <int Bytes>
__global__ void __launch_bounds__(32) read_pages(const std::byte* pages, const int* ids, int count) {
#if KVIRE_SM90A
  using namespace kvire;
  constexpr int stages = page_read_stages;
  extern __shared__ __align__(128) unsigned char memory[];
  const std::uint32_t shared = ptx::shared_address(memory);
  const int lane = static_cast<int>(threadIdx.x);
  const std::uint32_t full = shared + stages * Bytes;
  if (lane == 0) {
    for (int i = 0; i < stages; ++i) ptx::mbarrier_init(full + i * 8, 1);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  const int begin = static_cast<int>(static_cast<long long>(count) * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(static_cast<long long>(count) * (blockIdx.x + 1) / gridDim.x);
  int now = begin + lane < end ? ids[begin + lane] : 0;
  int next = begin + 32 + lane < end ? ids[begin + 32 + lane] : 0;
  for (int i = begin; i < end; ++i) {
    const int k = i - begin;
    const int id = __shfl_sync(~0U, now, k % 32);
    if (k >= stages) ptx::mbarrier_wait(full + k % stages * 8, (k / stages - 1) & 1);
    if (lane == 0) {
      ptx::mbarrier_arrive_expect(full + k % stages * 8, Bytes);
      ptx::bulk_load(shared + k % stages * Bytes, pages + static_cast<long long>(id) * Bytes, Bytes, full + k % stages * 8);
    }
    if (k % 32 == 31) {
      now = next;
      next = i + 33 + lane < end ? ids[i + 33 + lane] : 0;
    }
  }
  for (int i = end - stages < begin ? begin : end - stages; i < end; ++i) ptx::mbarrier_wait(full + (i - begin) % stages * 8, ((i - begin) / stages) & 1);
#else
  (void)pages, (void)ids, (void)count;
  __trap();
#endif
}

/// Launches it over `count` pages on a device of `sms` multiprocessors.
template <int Bytes>
void launch_read_pages(const std::byte* pages, const int* ids, int count, int sms, cudaStream_t stream) {
  constexpr int shared = page_read_shared<Bytes>;
  KVIRE_BENCH_CHECK(cudaFuncSetAttribute(read_pages<Bytes>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  const int ctas = std::min(count, sms * std::min(4, 220000 / shared));
  read_pages<Bytes><<<static_cast<unsigned>(ctas), 32, static_cast<unsigned>(shared), stream>>>(pages, ids, count);
  KVIRE_BENCH_CHECK(cudaGetLastError());
}

}  // namespace kvire_bench
