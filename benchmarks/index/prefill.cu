// SPDX-License-Identifier: Apache-2.0
// Prefill logits, fp8, 64 heads, dim 128: one line of CSV a shape. With the rate of a large fp8 matrix product on the same device as argument
// (TFLOP/s), the share of it too.
#include <benchmarks/support/logits_inputs.cuh>

#include <kvire/codec/float_bits.hpp>
#include <kvire/kernel/sm90_prefill_logits.cuh>
#include <kvire/layout/policies.hpp>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>

using namespace kvire;
using namespace kvire_bench;

namespace {

using Fp8 = Fp8WithScale<64, 128>;
constexpr int heads = 64, dim = 128;

// Codes of normal numbers that use e4m3's range as quantised keys and queries do.
__global__ void fill_codes(std::uint8_t* codes, long long n, std::uint32_t seed) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride) {
    const float u = (static_cast<float>(mix(static_cast<std::uint64_t>(i) * 2 + (static_cast<std::uint64_t>(seed) << 40))) + 0.5F) * 0x1p-32F;
    const float v = static_cast<float>(mix(static_cast<std::uint64_t>(i) * 2 + 1 + (static_cast<std::uint64_t>(seed) << 40))) * 0x1p-32F;
    codes[i] = e4m3_from_bits(bits_of(150.0F * sqrtf(-2.0F * logf(u)) * cospif(2 * v)));
  }
}
// Contiguous keys to pages: page p takes tile order[p].
__global__ void fill_pages(std::uint8_t* pages, const std::uint8_t* keys, const float* scales, const int* order) {
  const long long tile = order[blockIdx.x];
  std::uint8_t* page = pages + Fp8::page_bytes * blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < 64 * dim; i += static_cast<int>(blockDim.x)) page[i] = keys[tile * 64 * dim + i];
  for (int i = static_cast<int>(threadIdx.x); i < 64; i += static_cast<int>(blockDim.x)) reinterpret_cast<float*>(page + 64 * dim)[i] = scales[tile * 64 + i];
}

struct Problem {
  const char* name;
  int rows, keys;
  bool causal = false;  // the rows are the last of the keys
  bool paged = false;
  bool bf16 = false;
};

using Launch = cudaError_t (*)(const sm90::PrefillArguments&, int, cudaStream_t, bool);

class Bench {
 public:
  explicit Bench(double gemm) : gemm_(gemm) { KVIRE_BENCH_CHECK(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, 0)); }

  void run(const Problem& p, Launch launch, const char* variant) {
    Inputs inputs;
    auto* queries = inputs.array<std::uint8_t>(std::int64_t(p.rows) * heads * dim);
    auto* weights = inputs.array<float>(std::int64_t(p.rows) * heads);
    auto* keys = inputs.array<std::uint8_t>(std::int64_t(p.keys) * dim);
    auto* scales = inputs.array<float>(p.keys);
    auto* logits = inputs.array<std::uint8_t>(std::int64_t(p.rows) * p.keys * (p.bf16 ? 2 : 4));
    fill_codes<<<1024, 256>>>(queries, std::int64_t(p.rows) * heads * dim, 1);
    fill_codes<<<1024, 256>>>(keys, std::int64_t(p.keys) * dim, 2);
    fill_floats<<<256, 256>>>(weights, std::int64_t(p.rows) * heads, -1, 1, 3);
    fill_floats<<<256, 256>>>(scales, p.keys, 0.001F, 0.02F, 4);
    KVIRE_BENCH_CHECK(cudaMemset(logits, 0xFF, static_cast<std::size_t>(p.rows) * static_cast<std::size_t>(p.keys) * (p.bf16 ? 2 : 4)));

    std::vector<int> starts(static_cast<std::size_t>(p.rows), 0), ends(starts.size(), p.keys);
    for (int r = 0; p.causal && r < p.rows; ++r) ends[static_cast<std::size_t>(r)] = p.keys - p.rows + r + 1;
    int *d_starts = inputs.upload(starts), *d_ends = inputs.upload(ends);
    sm90::PrefillArguments a;
    a.keys = reinterpret_cast<const std::byte*>(keys);
    a.scales = reinterpret_cast<const std::byte*>(scales);
    a.key_count = p.keys;
    a.queries = queries;
    a.weights = weights;
    a.starts = d_starts;
    a.ends = d_ends;
    a.rows = p.rows;
    a.logits = logits;
    a.logits_stride = p.keys;
    if (p.paged) {
      const int n = p.keys / 64;
      std::vector<int> order(static_cast<std::size_t>(n)), table(order.size());
      std::iota(order.begin(), order.end(), 0);
      std::mt19937 random(5);
      std::shuffle(order.begin(), order.end(), random);
      for (int i = 0; i < n; ++i) table[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])] = i;
      auto* pages = inputs.array<std::uint8_t>(std::int64_t(n) * Fp8::page_bytes);
      fill_pages<<<static_cast<unsigned>(n), 256>>>(pages, keys, scales, inputs.upload(order));
      a.keys = reinterpret_cast<const std::byte*>(pages);
      a.page_table = inputs.upload(table);
      a.page_stride = Fp8::page_bytes;
      a.page_count = n;
    }
    KVIRE_BENCH_CHECK(cudaDeviceSynchronize());

    const double us = timer_.microseconds(1, 9, [&](int, cudaStream_t s) { KVIRE_BENCH_CHECK(launch(a, sms_, s, false)); });
    double flop = 0;
    for (std::size_t r = 0; r < starts.size(); ++r) flop += 2.0 * heads * dim * (ends[r] - starts[r]);
    const double rate = flop / us * 1e-6;
    std::printf("%s,%s,%d,%d,%.1f,%.0f", p.name, variant, p.rows, p.keys, us, rate);
    if (gemm_ > 0) std::printf(",%.1f", rate / gemm_ * 100);
    std::printf("%s\n", right(p, queries, weights, keys, scales, logits, ends) ? "" : ",WRONG");
    std::fflush(stdout);
  }

 private:
  /// 64 sampled logits against float64, and one beyond a row's end.
  static bool right(const Problem& p, const std::uint8_t* queries, const float* weights, const std::uint8_t* keys, const float* scales, const std::uint8_t* logits,
                    const std::vector<int>& ends) {
    std::mt19937 random(11);
    for (int i = 0; i < 64; ++i) {
      const auto row = static_cast<std::int64_t>(random() % static_cast<unsigned>(p.rows));
      const int end = ends[static_cast<std::size_t>(row)];
      const auto token = static_cast<std::int64_t>(random() % static_cast<unsigned>(end));
      const auto q = fetch(queries + row * heads * dim, heads * dim), k = fetch(keys + token * dim, dim);
      const auto w = fetch(weights + row * heads, heads);
      const auto want = exact_logit(w, dim, fetch(scales + token, 1)[0], [&](int h, int d) { return double(f32_from_e4m3(q[static_cast<std::size_t>(h * dim + d)])); },
                                    [&](int d) { return double(f32_from_e4m3(k[static_cast<std::size_t>(d)])); });
      const std::int64_t at = row * p.keys + token;
      const double got = p.bf16 ? f32_from_bf16(fetch(reinterpret_cast<const std::uint16_t*>(logits) + at, 1)[0]) : fetch(reinterpret_cast<const float*>(logits) + at, 1)[0];
      if (!(std::fabs(got - want.logit) <= 2e-4 * want.magnitude + (p.bf16 ? std::fabs(want.logit) / 256 : 0))) return false;
      if (end < p.keys && !p.bf16 && fetch(reinterpret_cast<const std::uint32_t*>(logits) + row * p.keys + end, 1)[0] != 0xFFFFFFFFU) return false;
    }
    return true;
  }

  Timer timer_;
  int sms_ = 0;
  double gemm_;
};

template <class Score = float>
constexpr Launch launch = sm90::launch_prefill_logits<Fp8, Element::e4m3, heads, Score>;

}  // namespace

int main(int argc, char** argv) {
  Bench bench(argc > 1 ? std::atof(argv[1]) : 0);
  std::printf("shape,variant,rows,keys,us,tflops%s\n", argc > 1 ? ",percent_of_matrix_product" : "");
  bench.run({"full", 2048, 32768}, launch<>, "f32");
  bench.run({"full", 512, 131072}, launch<>, "f32");
  bench.run({"full", 2048, 131072}, launch<>, "f32");
  bench.run({"full", 8192, 8192}, launch<>, "f32");
  bench.run({"causal", 2048, 32768, true}, launch<>, "f32");
  bench.run({"causal", 8192, 8192, true}, launch<>, "f32");
  bench.run({"paged", 2048, 32768, false, true}, launch<>, "f32");
  bench.run({"full", 2048, 32768, false, false, true}, launch<std::uint16_t>, "bf16");
  return 0;
}
