// SPDX-License-Identifier: Apache-2.0
// Times launch_store of bf16 rows as one CUDA graph of launches on disjoint rows and pages with a cold L2. Prints microseconds, GB/s of rows
// read, bytes written and slots, and the share of the copy rate.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include <kvire/kernel/store.cuh>
#include <kvire/layout/policies.hpp>
#include <kvire/preset/deepseek_v4.hpp>

namespace {

void check(cudaError_t error, int line) {
  if (error == cudaSuccess) return;
  std::printf("line %d: %s\n", line, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check(call, __LINE__)

constexpr double copy_rate = 4293e9;  // bytes per second read + written

__global__ void fill_bf16(std::uint16_t* x, std::size_t n) {
  const std::size_t step = std::size_t(gridDim.x) * blockDim.x;
  for (std::size_t i = std::size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
    unsigned h = unsigned(i) * 2654435761U + unsigned(i >> 32);
    h ^= h >> 15;
    h *= 2246822519U;
    h ^= h >> 13;
    x[i] = static_cast<std::uint16_t>((h & 0x807FU) | ((118 + (h >> 16) % 12) << 7));
  }
}

template <class P>
void measure(const char* name, std::size_t rows_total, cudaStream_t stream, char* flush) {
  std::uint16_t* rows = nullptr;
  std::int64_t* slots = nullptr;
  std::byte* pages = nullptr;
  const auto pool = static_cast<std::int32_t>(rows_total / P::tokens_per_page);
  CHECK(cudaMalloc(&rows, rows_total * P::dim * 2));
  CHECK(cudaMalloc(&slots, rows_total * 8));
  CHECK(cudaMalloc(&pages, std::size_t(pool) * P::page_bytes));
  fill_bf16<<<2048, 256, 0, stream>>>(rows, rows_total * P::dim);
  CHECK(cudaGetLastError());
  std::vector<std::int32_t> order(static_cast<std::size_t>(pool));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937{5});
  std::vector<std::int64_t> host(rows_total);
  for (std::size_t i = 0; i < rows_total; ++i) host[i] = std::int64_t(order[i / P::tokens_per_page]) * P::tokens_per_page + std::int64_t(i % P::tokens_per_page);
  CHECK(cudaMemcpy(slots, host.data(), host.size() * 8, cudaMemcpyHostToDevice));
  std::int64_t row_bytes = 0;
  for (int s = 0; s < P::section_count; ++s) row_bytes += P::table.sections[s].count * bits(P::table.sections[s].element) / 8;
  for (const std::size_t n : {std::size_t(64), std::size_t(512), std::size_t(8192), std::size_t(65536), std::size_t(1) << 20}) {
    const int launches = int(std::clamp<std::size_t>(rows_total / n, 1, 48));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < launches; ++i) {
      kvire::body::StoreArgs<P> args;
      args.rows = rows + std::size_t(i) * n * P::dim;
      args.row_element = kvire::Element::bf16;
      args.slots = slots + std::size_t(i) * n;
      args.pages = pages;
      args.page_stride = P::page_bytes;
      args.page_count = pool;
      args.first_page = 0;
      CHECK(kvire::launch_store<P>(args, std::int64_t(n), nullptr, stream));
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
    const double bytes = double(n) * double(P::dim * 2 + row_bytes + 8);
    const double rate = bytes / (double(times[4]) * 1e-6);
    std::printf("%-14s %8zu tokens  %8.2f us  %7.0f GB/s  %3.0f%% of copy\n", name, n, double(times[4]), rate / 1e9, rate / copy_rate * 100);
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
  }
  CHECK(cudaFree(rows));
  CHECK(cudaFree(slots));
  CHECK(cudaFree(pages));
}

}  // namespace

int main() {
  cudaStream_t stream = nullptr;
  char* flush = nullptr;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaMalloc(&flush, std::size_t(256) << 20));
  measure<kvire::Fp8WithScale<64, 128>>("fp8", std::size_t(4) << 20, stream, flush);
  measure<kvire::Bf16Contiguous<64, 128>>("bf16", std::size_t(4) << 20, stream, flush);
  measure<kvire::Fp4WithScale<64, 128>>("fp4", std::size_t(4) << 20, stream, flush);
  measure<kvire::preset::deepseek_v4::Latent<64>>("V4 latent", std::size_t(1) << 20, stream, flush);
  return 0;
}
