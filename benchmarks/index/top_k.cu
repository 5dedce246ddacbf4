// SPDX-License-Identifier: Apache-2.0
// Times launch_top_k as one CUDA graph of launches on disjoint inputs with a cold L2: replay time / launches, median.
//   top_k            the default shape at every size
//   top_k shapes     every shape
// Prints microseconds and the multiple of one read of the rows at the copy rate.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <kvire/kernel/top_k.cuh>

namespace {

void check(cudaError_t error, int line) {
  if (error == cudaSuccess) return;
  std::printf("line %d: %s\n", line, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check(call, __LINE__)

__global__ void fill_normal(float* x, std::size_t n) {
  const std::size_t step = std::size_t(gridDim.x) * blockDim.x;
  for (std::size_t i = std::size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
    unsigned long long h = i * 0x9E3779B97F4A7C15ULL + 0x1234567;
    h ^= h >> 30;
    h *= 0xBF58476D1CE4E5B9ULL;
    h ^= h >> 27;
    h *= 0x94D049BB133111EBULL;
    h ^= h >> 31;
    const float u = float((unsigned(h) >> 8) + 1) * 0x1p-24F;
    const float v = float(unsigned(h >> 40)) * 0x1p-24F;
    x[i] = sqrtf(-2 * logf(u)) * cospif(2 * v);
  }
}

__global__ void fill_value(std::int32_t* x, std::int32_t value, std::size_t n) {
  const std::size_t i = std::size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) x[i] = value;
}

constexpr double copy_rate = 4293e9;  // bytes per second read + written

struct Bench {
  float* scores = nullptr;
  std::size_t floats = std::size_t(1) << 30;
  std::int32_t* lengths = nullptr;
  std::int32_t* selected = nullptr;
  std::size_t slots = std::size_t(64) << 20;
  char* flush = nullptr;
  cudaStream_t stream = nullptr;
  int processors = 0;

  Bench() {
    CHECK(cudaMalloc(&scores, floats * 4));
    CHECK(cudaMalloc(&lengths, 128 * 4));
    CHECK(cudaMalloc(&selected, slots * 4));
    CHECK(cudaMalloc(&flush, std::size_t(256) << 20));
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
    fill_normal<<<4096, 256, 0, stream>>>(scores, floats);
    CHECK(cudaGetLastError());
  }

  bool right(const kvire::body::TopKArgs& args, int row) {
    std::vector<float> x(static_cast<std::size_t>(args.stride));
    std::vector<std::int32_t> got(static_cast<std::size_t>(args.k));
    CHECK(cudaMemcpy(x.data(), args.scores + row * args.stride, x.size() * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(got.data(), args.selected + std::int64_t(row) * args.k, got.size() * 4, cudaMemcpyDeviceToHost));
    std::vector<std::int32_t> want(x.size());
    for (std::size_t i = 0; i < want.size(); ++i) want[i] = std::int32_t(i);
    std::nth_element(want.begin(), want.begin() + args.k - 1, want.end(),
                     [&](std::int32_t a, std::int32_t b) { return x[std::size_t(a)] > x[std::size_t(b)] || (x[std::size_t(a)] == x[std::size_t(b)] && a < b); });
    want.resize(got.size());
    std::sort(want.begin(), want.end());
    return want == got;
  }

  // Microseconds a launch; negative if the selection is wrong.
  double time(int columns, int batch, int k, const kvire::TopKShape& shape) {
    const std::size_t set = std::size_t(columns) * std::size_t(batch);
    const int launches = int(std::clamp<std::size_t>(floats / set, 1, 48));
    fill_value<<<1, 128, 0, stream>>>(lengths, columns, 128);
    CHECK(cudaMemsetAsync(selected, 0xEE, std::size_t(launches) * std::size_t(batch) * std::size_t(k) * 4, stream));
    kvire::body::TopKArgs args;
    args.stride = columns;
    args.lengths = lengths;
    args.batch = batch;
    args.k = k;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < launches; ++i) {
      args.scores = scores + std::size_t(i) * set;
      args.selected = selected + std::size_t(i) * std::size_t(batch) * std::size_t(k);
      CHECK(kvire::launch_top_k(args, nullptr, stream, shape));
    }
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int run = 0; run < 8; ++run) {
      CHECK(cudaMemsetAsync(flush, run, std::size_t(256) << 20, stream));
      CHECK(cudaEventRecord(begin, stream));
      CHECK(cudaGraphLaunch(exec, stream));
      CHECK(cudaEventRecord(end, stream));
      CHECK(cudaStreamSynchronize(stream));
      float ms = 0;
      CHECK(cudaEventElapsedTime(&ms, begin, end));
      if (run > 0) times.push_back(ms * 1000 / float(launches));
    }
    std::nth_element(times.begin(), times.begin() + 3, times.end());
    const bool ok = right(args, 0) && right(args, batch - 1);
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    return ok ? double(times[3]) : -double(times[3]);
  }
};

}  // namespace

int main(int argc, char** argv) {
  Bench bench;
  const bool shapes = argc > 1 && std::strcmp(argv[1], "shapes") == 0;
  for (const int columns : {4096, 32768, 131072, 1048576}) {
    for (const int batch : {1, 64, 128}) {
      const double once = double(columns) * batch * 4 / copy_rate * 1e6;
      std::vector<kvire::TopKShape> tried = {kvire::top_k_shape(batch, columns, bench.processors, true)};
      if (shapes) {
        for (const int blocks : {1, 2, 4, 8, 16}) {
          if (blocks > 1 && batch * blocks > 256) continue;
          if (columns / blocks < 4096) continue;
          tried.push_back({1024, 4, blocks});
          tried.push_back({1024, 8, blocks});
        }
      }
      for (std::size_t t = 0; t < tried.size(); ++t) {
        std::printf("%8d x %3d  %4dx%dx%-2d%s", columns, batch, tried[t].threads, tried[t].items, tried[t].blocks, t == 0 ? " *" : "  ");
        for (const int k : {512, 1024, 2048}) {
          const double us = bench.time(columns, batch, k, tried[t]);
          std::printf("  %8.2f (%5.1fx)%s", us < 0 ? -us : us, (us < 0 ? -us : us) / once, us < 0 ? " WRONG" : "");
        }
        std::printf("\n");
        std::fflush(stdout);
      }
    }
  }
  return 0;
}
