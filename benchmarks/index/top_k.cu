// SPDX-License-Identifier: Apache-2.0
// Top-k of N(0,1) rows on disjoint inputs: one line of CSV for each row length, batch, shape and k, with the multiple of one read of the rows at the
// copy rate.
//   top_k            the kernel that top_k takes, at every size
//   top_k shapes     every shape of the streaming kernel, and every number of blocks that hold a row
#include <benchmarks/support/device_timing.cuh>

#include <cstring>
#include <string>

#include <kvire/kernel/cuda_top_k.cuh>

namespace {

using namespace kvire_bench;

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

struct Bench {
  static constexpr std::size_t floats = std::size_t(1) << 30, slots = std::size_t(64) << 20;
  Timer timer;
  float* scores = device_array<float>(floats);
  std::int32_t* lengths = device_array<std::int32_t>(128);
  std::int32_t* selected = device_array<std::int32_t>(slots);
  int processors = 0;

  Bench() {
    KVIRE_BENCH_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
    fill_normal<<<4096, 256>>>(scores, floats);
    KVIRE_BENCH_CHECK(cudaDeviceSynchronize());
  }

  bool right(const kvire::body::TopKArgs& args, int row) {
    std::vector<float> x(static_cast<std::size_t>(args.stride));
    std::vector<std::int32_t> got(static_cast<std::size_t>(args.k));
    KVIRE_BENCH_CHECK(cudaMemcpy(x.data(), args.scores + row * args.stride, x.size() * 4, cudaMemcpyDeviceToHost));
    KVIRE_BENCH_CHECK(cudaMemcpy(got.data(), args.selected + std::int64_t(row) * args.k, got.size() * 4, cudaMemcpyDeviceToHost));
    std::vector<std::int32_t> want(x.size());
    for (std::size_t i = 0; i < want.size(); ++i) want[i] = std::int32_t(i);
    std::nth_element(want.begin(), want.begin() + args.k - 1, want.end(),
                     [&](std::int32_t a, std::int32_t b) { return x[std::size_t(a)] > x[std::size_t(b)] || (x[std::size_t(a)] == x[std::size_t(b)] && a < b); });
    want.resize(got.size());
    std::sort(want.begin(), want.end());
    return want == got;
  }

  // Microseconds a launch launch(args, stream); negative if the selection is wrong.
  template <class Launch>
  double time(int columns, int batch, int k, Launch&& launch) {
    const std::size_t set = std::size_t(columns) * std::size_t(batch);
    const int launches = int(std::clamp<std::size_t>(floats / set, 1, 48));
    fill_value<<<1, 128>>>(lengths, columns, 128);
    KVIRE_BENCH_CHECK(cudaMemset(selected, 0xEE, std::size_t(launches) * std::size_t(batch) * std::size_t(k) * 4));
    kvire::body::TopKArgs args;
    args.stride = columns;
    args.lengths = lengths;
    args.batch = batch;
    args.k = k;
    const double us = timer.microseconds(launches, 7, [&](int i, cudaStream_t stream) {
      args.scores = scores + std::size_t(i) * set;
      args.selected = selected + std::size_t(i) * std::size_t(batch) * std::size_t(k);
      KVIRE_BENCH_CHECK(launch(args, stream));
    });
    const bool ok = right(args, 0) && right(args, batch - 1);
    return ok ? us : -us;
  }
};

}  // namespace

int main(int argc, char** argv) {
  Bench bench;
  std::printf("row,batch,shape,k,us,reads\n");
  const bool shapes = argc > 1 && std::strcmp(argv[1], "shapes") == 0;
  for (const int columns : {4096, 32768, 131072, 1048576}) {
    for (const int batch : {1, 64, 128}) {
      const double once = double(columns) * batch * 4 / copy_rate * 1e-3;
      const auto report = [&](const char* name, auto&& launch) {
        for (const int k : {512, 1024, 2048}) {
          const double us = bench.time(columns, batch, k, launch);
          std::printf("%d,%d,%s,%d,%.2f,%.1f%s\n", columns, batch, name, k, us < 0 ? -us : us, (us < 0 ? -us : us) / once, us < 0 ? ",WRONG" : "");
          std::fflush(stdout);
        }
      };
      report("default", [&](const kvire::body::TopKArgs& args, cudaStream_t stream) { return kvire::detail::queue_tuned_top_k(args, nullptr, stream, bench.processors, true, false); });
      if (!shapes) continue;
      for (const int blocks : {1, 2, 4, 8, 16}) {
        if (blocks > 1 && batch * blocks > 256) continue;
        kvire::body::TopKArgs args;
        args.k = 512;
        args.stride = columns;
        const std::string held = "held x" + std::to_string(blocks);
        if (kvire::held_top_k_serves(args, blocks)) {
          report(held.c_str(), [&](const kvire::body::TopKArgs& a, cudaStream_t stream) { return kvire::launch_held_top_k(a, nullptr, stream, blocks); });
        }
        if (columns / blocks < 4096) continue;
        for (const int items : {4, 8}) {
          const std::string name = "1024x" + std::to_string(items) + "x" + std::to_string(blocks);
          report(name.c_str(), [&](const kvire::body::TopKArgs& a, cudaStream_t stream) { return kvire::launch_top_k(a, nullptr, stream, {1024, items, blocks}); });
        }
      }
    }
  }
  return 0;
}
