// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

// Timing of short kernels: one CUDA graph of many launches, each on its own inputs, L2 flushed before each replay; medians.

namespace kvire_bench {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define KVIRE_BENCH_CHECK(call) ::kvire_bench::check((call), #call)

/// What a large copy on the device reaches on an H200, GB/s read and written: what others are shares of.
inline constexpr double copy_rate = 4293;

template <class T>
T* device_array(std::int64_t n) {
  void* p = nullptr;
  KVIRE_BENCH_CHECK(cudaMalloc(&p, static_cast<std::size_t>(std::max<std::int64_t>(n, 1)) * sizeof(T)));
  return static_cast<T*>(p);
}

/// Any 64 bits to 32 well mixed ones.
__host__ __device__ inline std::uint32_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return static_cast<std::uint32_t>(x ^ (x >> 31));
}

class Timer {
 public:
  Timer() {
    KVIRE_BENCH_CHECK(cudaStreamCreate(&stream_));
    KVIRE_BENCH_CHECK(cudaEventCreate(&begin_));
    KVIRE_BENCH_CHECK(cudaEventCreate(&end_));
    flush_ = device_array<std::uint8_t>(flush_bytes);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  cudaStream_t stream() const { return stream_; }

  /// Median microseconds of one of `launches` calls launch(i, stream), captured as one graph.
  template <class Launch>
  double microseconds(int launches, int repeats, Launch&& launch) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    KVIRE_BENCH_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < launches; ++i) launch(i, stream_);
    KVIRE_BENCH_CHECK(cudaStreamEndCapture(stream_, &graph));
    KVIRE_BENCH_CHECK(cudaGraphInstantiate(&ready, graph, 0));
    std::vector<double> times;
    for (int r = -2; r < repeats; ++r) {
      KVIRE_BENCH_CHECK(cudaMemsetAsync(flush_, r & 255, flush_bytes, stream_));
      KVIRE_BENCH_CHECK(cudaEventRecord(begin_, stream_));
      KVIRE_BENCH_CHECK(cudaGraphLaunch(ready, stream_));
      KVIRE_BENCH_CHECK(cudaEventRecord(end_, stream_));
      KVIRE_BENCH_CHECK(cudaStreamSynchronize(stream_));
      float ms = 0;
      KVIRE_BENCH_CHECK(cudaEventElapsedTime(&ms, begin_, end_));
      if (r >= 0) times.push_back(static_cast<double>(ms) * 1000 / launches);
    }
    KVIRE_BENCH_CHECK(cudaGraphExecDestroy(ready));
    KVIRE_BENCH_CHECK(cudaGraphDestroy(graph));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

 private:
  static constexpr std::int64_t flush_bytes = 256LL << 20;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  std::uint8_t* flush_ = nullptr;
};

}  // namespace kvire_bench
