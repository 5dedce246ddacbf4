// SPDX-License-Identifier: Apache-2.0
// Times launch_gather as one CUDA graph of launches on disjoint pages with a cold L2. Prints microseconds, GB/s read and written, and the
// share of the copy rate.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include <kvire/kernel/gather.cuh>
#include <kvire/layout/policies.hpp>

namespace {

void check(cudaError_t error, int line) {
  if (error == cudaSuccess) return;
  std::printf("line %d: %s\n", line, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check(call, __LINE__)

constexpr double copy_rate = 4293e9;  // bytes per second read + written

template <class P>
void measure(const char* name, cudaStream_t stream, char* flush) {
  constexpr std::int32_t pool = 1 << 17;
  std::byte* pages = nullptr;
  std::byte* out = nullptr;
  std::int32_t *table = nullptr, *lengths = nullptr;
  CHECK(cudaMalloc(&pages, std::size_t(pool) * P::page_bytes));
  CHECK(cudaMalloc(&out, std::size_t(pool) * P::page_bytes));
  CHECK(cudaMalloc(&table, std::size_t(pool) * 4));
  CHECK(cudaMalloc(&lengths, 64 * 4));
  CHECK(cudaMemset(pages, 0x5A, std::size_t(pool) * P::page_bytes));
  std::vector<std::int32_t> order(pool);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937{5});
  CHECK(cudaMemcpy(table, order.data(), order.size() * 4, cudaMemcpyHostToDevice));
  struct Shape {
    int batch, tokens;
  };
  for (const Shape shape : {Shape{1, 4096}, Shape{1, 32768}, Shape{8, 32768}, Shape{16, 131072}}) {
    const std::vector<std::int32_t> host(64, shape.tokens);
    CHECK(cudaMemcpy(lengths, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    const int max_pages = shape.tokens / P::tokens_per_page;
    const std::int64_t set = std::int64_t(shape.batch) * max_pages;
    const int launches = int(std::clamp<std::int64_t>(pool / set, 1, 48));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < launches; ++i) {
      kvire::body::GatherArgs<P> args;
      args.pages = pages;
      args.page_stride = P::page_bytes;
      args.page_count = pool;
      args.page_table = table + i * set;
      args.max_pages = max_pages;
      args.lengths = lengths;
      args.batch = shape.batch;
      std::byte* to = out + i * set * P::page_bytes;
      for (int plane = 0; plane < P::plane_count; ++plane) args.planes[plane] = to + set * P::table.plane_offset[plane];
      CHECK(kvire::launch_gather<P>(args, nullptr, stream));
    }
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int run = 0; run < 10; ++run) {
      CHECK(cudaMemsetAsync(flush, run, std::size_t(256) << 20, stream));
      CHECK(cudaEventRecord(begin, stream));
      CHECK(cudaGraphLaunch(exec, stream));
      CHECK(cudaEventRecord(end, stream));
      CHECK(cudaStreamSynchronize(stream));
      float ms = 0;
      CHECK(cudaEventElapsedTime(&ms, begin, end));
      if (run > 0) times.push_back(ms * 1000 / float(launches));
    }
    std::nth_element(times.begin(), times.begin() + 4, times.end());
    const double rate = 2.0 * double(set) * double(P::used_bytes) / (double(times[4]) * 1e-6);
    std::printf("%-6s %3d x %6d tokens  %8.2f us  %7.0f GB/s  %3.0f%% of copy\n", name, shape.batch, shape.tokens, double(times[4]), rate / 1e9, rate / copy_rate * 100);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
  }
  CHECK(cudaFree(pages));
  CHECK(cudaFree(out));
  CHECK(cudaFree(table));
  CHECK(cudaFree(lengths));
}

}  // namespace

int main() {
  cudaStream_t stream = nullptr;
  char* flush = nullptr;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaMalloc(&flush, std::size_t(256) << 20));
  measure<kvire::Fp8WithScale<64, 128>>("fp8", stream, flush);
  measure<kvire::Bf16Contiguous<64, 128>>("bf16", stream, flush);
  measure<kvire::Fp4WithScale<64, 128>>("fp4", stream, flush);
  return 0;
}
