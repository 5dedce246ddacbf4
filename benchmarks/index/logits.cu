// SPDX-License-Identifier: Apache-2.0
// Paged sparse logits against reading the same pages once with the bulk copy engine (the floor), in the same run.
//   kvire_bench_cuda_index_logits [all | fp8 | bf16 | fp4 | ragged | scores | portable | profile] [file.csv]
#include <benchmarks/support/logits_inputs.cuh>
#include <benchmarks/support/page_reads.cuh>

#include <kvire/kernel/sm80_sparse_logits.cuh>
#include <kvire/kernel/sm90_sparse_logits.cuh>
#include <kvire/layout/policies.hpp>
#include <kvire/memory/cuda/l2.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <thread>

using namespace kvire;
using namespace kvire_bench;

namespace {

using Fp8 = Fp8WithScale<64, 128>;
using Bf16 = Bf16Contiguous<64, 128>;
using Fp4 = Fp4WithScale<64, 128>;

template <int Kind>
__global__ void fill_pages(std::uint8_t* pages, long long bytes, int page_bytes, int value_bytes) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i * 4 < bytes; i += stride) {
    const std::uint32_t r = mix(static_cast<std::uint64_t>(i) * 0x9E3779B97F4A7C15ULL + Kind);
    const int at = static_cast<int>(i * 4 % page_bytes);
    std::uint32_t v = r;
    if (at >= value_bytes) {
      v = Kind == 0 ? __float_as_uint(0.01F + static_cast<float>(r >> 8) * 1e-9F) : 0x78787878U + (r & 0x07070707U);
    } else if (Kind == 0) {
      v = r & 0xBFBFBFBFU;
    } else if (Kind == 1) {
      v = (r & 0x80FF80FFU) | 0x3F003F00U;
    }
    *reinterpret_cast<std::uint32_t*>(pages + i * 4) = v;
  }
}
__global__ void fill_queries(std::uint8_t* q, long long words, bool e4m3) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += stride) {
    const std::uint32_t r = mix(static_cast<std::uint64_t>(i) * 0xD1342543DE82EF95ULL + 99);
    reinterpret_cast<std::uint32_t*>(q)[i] = e4m3 ? (r & 0xBFBFBFBFU) : ((r & 0x80FF80FFU) | 0x3F003F00U);
  }
}

using Launch = cudaError_t (*)(const sm90::LogitsArguments&, int, cudaStream_t, bool);
struct Variant {
  const char* name;
  Launch launch;
  bool overlap = false;
  bool bf16 = false;  // scores
};

struct Shape {
  const char* name;
  std::vector<int> lengths;
};
std::vector<int> uniform(int batch, int length) { return std::vector<int>(static_cast<std::size_t>(batch), length); }

std::FILE* csv = nullptr;
bool all_right = true;

template <class P>
class Bench {
 public:
  static constexpr Element key = P::template element_of<role::Value>;
  static constexpr Element query = key == Element::bf16 ? Element::bf16 : Element::e4m3;
  static constexpr int heads = 64, dim = 128;

  explicit Bench(Timer& timer) : timer_(timer) {
    pool_pages_ = static_cast<int>((9LL << 30) / P::page_bytes);
    pages_ = device_array<std::uint8_t>(static_cast<std::int64_t>(pool_pages_) * P::page_bytes);
    constexpr int kind = key == Element::e4m3 ? 0 : key == Element::bf16 ? 1 : 2;
    fill_pages<kind><<<1024, 256>>>(pages_, static_cast<long long>(pool_pages_) * P::page_bytes, static_cast<int>(P::page_bytes),
                                    P::tokens_per_page * dim * bits(key) / 8);
    KVIRE_BENCH_CHECK(cudaDeviceSynchronize());
    order_.resize(static_cast<std::size_t>(pool_pages_));
    for (std::size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<int>(i);
    std::mt19937 random(3);
    std::shuffle(order_.begin(), order_.end(), random);
    KVIRE_BENCH_CHECK(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, 0));
  }
  ~Bench() { cudaFree(pages_); }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  void run(const Shape& shape, int next_n, const std::vector<Variant>& variants, const char* format) {
    const int batch = static_cast<int>(shape.lengths.size());
    int width = 1;
    long long used = 0;
    for (const int n : shape.lengths) {
      const int p = (n + P::tokens_per_page - 1) / P::tokens_per_page;
      width = std::max(width, p);
      used += p;
    }
    const int launches = static_cast<int>(std::min<long long>(48, pool_pages_ / used));
    // inputs of all launches
    std::vector<int> table(static_cast<std::size_t>(launches) * static_cast<std::size_t>(batch) * static_cast<std::size_t>(width), -1);
    std::vector<int> flat;
    std::size_t next = 0;
    for (int l = 0; l < launches; ++l)
      for (int b = 0; b < batch; ++b)
        for (int p = 0; p * P::tokens_per_page < shape.lengths[static_cast<std::size_t>(b)]; ++p) {
          table[(static_cast<std::size_t>(l) * static_cast<std::size_t>(batch) + static_cast<std::size_t>(b)) * static_cast<std::size_t>(width) + static_cast<std::size_t>(p)] = order_[next];
          flat.push_back(order_[next++]);
        }
    std::vector<int> lengths;
    for (int l = 0; l < launches; ++l) lengths.insert(lengths.end(), shape.lengths.begin(), shape.lengths.end());
    const long long query_bytes = static_cast<long long>(batch) * next_n * heads * dim * bits(query) / 8;
    const long long stride = static_cast<long long>(width) * P::tokens_per_page;
    const long long out = static_cast<long long>(batch) * next_n * stride;
    Inputs inputs;
    int* d_table = inputs.upload(table);
    int* d_flat = inputs.upload(flat);
    int* d_lengths = inputs.upload(lengths);
    auto* d_queries = inputs.array<std::uint8_t>(query_bytes * launches);
    fill_queries<<<512, 256>>>(d_queries, query_bytes * launches / 4, query == Element::e4m3);
    auto* d_weights = inputs.array<float>(static_cast<std::int64_t>(batch) * next_n * heads * launches);
    fill_floats<<<64, 256>>>(d_weights, static_cast<std::int64_t>(batch) * next_n * heads * launches, -1, 1, 3);
    auto* d_out = inputs.array<float>(out);  // of all launches, as the scratch of an engine's layers
    if (!set_aside_l2(std::min<std::int64_t>(out * 4 * 11 / 10, 26 << 20)).ok()) std::printf("L2: as much as the scores need cannot be set aside\n");
    auto arguments = [&](int l, const Variant& v) {
      sm90::LogitsArguments a;
      a.pages = reinterpret_cast<const std::byte*>(pages_);
      a.page_stride = P::page_bytes;
      a.page_count = pool_pages_;
      a.batch = batch;
      a.queries = d_queries + query_bytes * l;
      a.weights = d_weights + static_cast<std::int64_t>(batch) * next_n * heads * l;
      a.page_table = d_table + static_cast<std::int64_t>(l) * batch * width;
      a.table_stride = a.table_width = width;
      a.lengths = d_lengths + static_cast<std::int64_t>(l) * batch;
      a.logits = d_out;
      a.logits_stride = stride;
      a.bf16 = v.bf16;
      return a;
    };
    const int repeats = 9;
    const double floor = timer_.microseconds(launches, repeats, [&](int l, cudaStream_t s) {
      launch_read_pages<static_cast<int>(P::page_bytes)>(reinterpret_cast<const std::byte*>(pages_), d_flat + used * l, static_cast<int>(used), sms_, s);
    });
    long long tokens = 0;
    for (const int n : shape.lengths) tokens += n;
    std::printf("%-5s %-12s n%d  floor %8.2f us (%6.0f GB/s)", format, shape.name, next_n, floor, static_cast<double>(used) * P::page_bytes / floor * 1e-3);
    for (const Variant& v : variants) {
      // After some 60 ms of several query tokens the card's clock falls: each measurement starts rested.
      if (next_n > 1) std::this_thread::sleep_for(std::chrono::milliseconds(250));
      KVIRE_BENCH_CHECK(cudaMemset(d_out, 0xFF, static_cast<std::size_t>(out) * 4));
      const double us = timer_.microseconds(launches, repeats, [&](int l, cudaStream_t s) { KVIRE_BENCH_CHECK(v.launch(arguments(l, v), sms_, s, v.overlap)); });
      const bool right = verify(arguments(launches - 1, v), shape, next_n);
      std::printf(" | %s %8.2f %5.1f%%%s", v.name, us, floor / us * 100, right ? "" : " WRONG");
      all_right = all_right && right;
      if (csv != nullptr) {
        std::fprintf(csv, "%s,%s,%s,%d,%lld,%.3f,%.3f,%.4f,%.0f,%.1f,%d\n", format, v.name, shape.name, next_n, tokens, floor, us, floor / us,
                     static_cast<double>(used) * P::page_bytes / us * 1e-3, 2e-6 * heads * dim * next_n * static_cast<double>(tokens) / us, right ? 1 : 0);
      }
    }
    std::printf("\n");
    std::fflush(stdout);
  }

 private:
  /// 24 sampled logits against float64.
  bool verify(const sm90::LogitsArguments& a, const Shape& shape, int next_n) const {
    std::mt19937 random(11);
    for (int i = 0; i < 24; ++i) {
      const auto row = static_cast<long long>(random() % shape.lengths.size());
      const int q = static_cast<int>(random() % static_cast<unsigned>(next_n));
      const int visible = shape.lengths[static_cast<std::size_t>(row)] - (next_n - 1 - q);
      if (visible <= 0) continue;
      const int token = static_cast<int>(random() % static_cast<unsigned>(visible));
      const auto id = fetch(a.page_table + row * a.table_stride + token / P::tokens_per_page, 1)[0];
      const auto page = fetch(reinterpret_cast<const std::uint8_t*>(a.pages + a.page_stride * id), static_cast<std::size_t>(P::page_bytes));
      const std::size_t query_bytes = heads * dim * bits(query) / 8;
      const auto queries = fetch(static_cast<const std::uint8_t*>(a.queries) + static_cast<std::size_t>(row * next_n + q) * query_bytes, query_bytes);
      const auto weights = fetch(a.weights + (row * next_n + q) * heads, heads);
      const auto at = (row * next_n + q) * a.logits_stride + token;
      const float got = a.bf16 ? f32_from_bf16(fetch(static_cast<const std::uint16_t*>(a.logits) + at, 1)[0]) : fetch(static_cast<const float*>(a.logits) + at, 1)[0];
      const int t = token % P::tokens_per_page;
      float scale = 1;
      if constexpr (key == Element::e4m3) std::memcpy(&scale, &page[static_cast<std::size_t>(P::template offset<role::Scale>(t))], 4);
      const auto want = exact_logit(weights, dim, scale, [&](int h, int d) { return number(queries.data(), h * dim + d, query); },
                                    [&](int d) { return key_number(page.data(), t, d); });
      if (!(std::fabs(want.logit - got) <= (key == Element::bf16 ? 1e-4 : 2e-4) * want.magnitude + (a.bf16 ? 0x1p-8 * std::fabs(want.logit) : 0))) return false;
    }
    return true;
  }
  static double number(const std::uint8_t* p, int i, Element e) {
    if (e == Element::e4m3) return f32_from_e4m3(p[i]);
    std::uint16_t code = 0;
    std::memcpy(&code, p + 2 * i, 2);
    return f32_from_bf16(code);
  }
  static double key_number(const std::uint8_t* page, int t, int d) {
    const std::uint8_t* row = page + P::template offset<role::Value>(t);
    if constexpr (key == Element::e2m1) {
      const auto code = static_cast<std::uint8_t>(d % 2 != 0 ? row[d / 2] >> 4 : row[d / 2] & 15);
      return static_cast<double>(f32_from_e2m1(code)) * f32_from_ue8m0(page[P::template offset<role::Scale>(t) + d / 32]);
    } else {
      return number(row, d, key);
    }
  }

  Timer& timer_;
  std::uint8_t* pages_ = nullptr;
  int pool_pages_ = 0;
  int sms_ = 0;
  std::vector<int> order_;
};

template <class P, int NextN>
Variant usual(const char* name, bool overlap = false) {
  return {name, &sm90::launch_logits<P, Bench<P>::query, 64, NextN>, overlap};
}

/// The kernel that also writes bf16 scores.
template <class P, int NextN>
Variant with_options(const char* name, bool bf16) {
  return {name, &sm90::launch_logits<P, Bench<P>::query, 64, NextN, sm90::WithOptions<sm90::DefaultLogitsShape<P, Bench<P>::query, 64, NextN>>>, false, bf16};
}
template <class P, int NextN>
void run_scores(Bench<P>& bench, const std::vector<Shape>& shapes, const char* format) {
  for (const Shape& s : shapes) bench.run(s, NextN, {usual<P, NextN>("f32"), with_options<P, NextN>("f32 by options", false), with_options<P, NextN>("bf16", true)}, format);
}

template <class P, int NextN>
Variant portable(const char* name) {
  return {name, [](const sm90::LogitsArguments& a, int sms, cudaStream_t s, bool) { return sm80::launch_logits<P, Bench<P>::query, 64, NextN>(a, sms, s); }};
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  if (argc > 2) {
    csv = std::fopen(argv[2], "w");
    if (csv == nullptr) return std::fprintf(stderr, "cannot write %s\n", argv[2]), 1;
    std::fprintf(csv, "keys,kernel,shape,query_tokens,tokens,floor_us,us,share_of_floor,gb_per_s,tflops,right\n");
  }
  const auto wanted = [&](const char* set) { return what == "all" || what == set; };
  Timer timer;
  std::vector<Shape> shapes;
  for (const int batch : {1, 8, 64}) {
    for (const int k : {4, 32, 128}) shapes.push_back({nullptr, uniform(batch, k * 1024)});
  }
  shapes.push_back({nullptr, uniform(128, 4096)});
  shapes.push_back({nullptr, uniform(128, 32768)});
  std::vector<std::string> names;
  for (const Shape& s : shapes) names.push_back(std::to_string(s.lengths.size()) + " x " + std::to_string(s.lengths[0] / 1024) + "k");
  for (std::size_t i = 0; i < shapes.size(); ++i) shapes[i].name = names[i].c_str();
  std::vector<Shape> ragged;
  {
    std::mt19937 random(5);
    auto between = [&](int n, int low, int high) {
      std::vector<int> v;
      for (int i = 0; i < n; ++i) v.push_back(low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1)));
      return v;
    };
    ragged.push_back({"64 of 1-66k", between(64, 1024, 66 * 1024)});
    auto one = uniform(64, 4096);
    one[17] = 131072;
    ragged.push_back({"128k + 63x4k", one});
    ragged.push_back({"64 of 1-8k", between(64, 1024, 8192)});
    ragged.push_back({"8 of .1-4k", between(8, 100, 4096)});
  }
  const Shape big{"64 x 32k", uniform(64, 32768)};
  if (wanted("fp8") || wanted("ragged")) {
    Bench<Fp8> bench(timer);
    const std::vector<Variant> one = {usual<Fp8, 1>("hopper"), usual<Fp8, 1>("hopper overlap", true)};
    const std::vector<Variant> two = {usual<Fp8, 2>("hopper"), usual<Fp8, 2>("hopper overlap", true)};
    if (wanted("fp8")) {
      for (const Shape& s : shapes) bench.run(s, 1, one, "fp8");
      for (const Shape& s : shapes) bench.run(s, 2, two, "fp8");
    }
    if (wanted("ragged")) {
      for (const Shape& s : ragged) bench.run(s, 1, one, "fp8");
    }
  }
  if (what == "profile") {  // two launches worth a profiler's look
    Bench<Fp8> bench(timer);
    bench.run(big, 2, {usual<Fp8, 2>("hopper")}, "fp8");
    bench.run(big, 1, {usual<Fp8, 1>("hopper")}, "fp8");
  }
  if (wanted("bf16")) {
    Bench<Bf16> bench(timer);
    for (const Shape& s : shapes) bench.run(s, 1, {usual<Bf16, 1>("hopper"), usual<Bf16, 1>("hopper overlap", true)}, "bf16");
    for (const Shape& s : shapes) bench.run(s, 2, {usual<Bf16, 2>("hopper"), usual<Bf16, 2>("hopper overlap", true)}, "bf16");
  }
  if (wanted("fp4")) {
    Bench<Fp4> bench(timer);
    for (const Shape& s : shapes) bench.run(s, 1, {usual<Fp4, 1>("hopper"), usual<Fp4, 1>("hopper overlap", true)}, "fp4");
  }
  if (wanted("scores")) {
    Bench<Fp8> fp8(timer);
    run_scores<Fp8, 1>(fp8, shapes, "fp8");
    run_scores<Fp8, 2>(fp8, shapes, "fp8");
    Bench<Bf16> bf16(timer);
    run_scores<Bf16, 1>(bf16, shapes, "bf16");
    run_scores<Bf16, 2>(bf16, shapes, "bf16");
  }
  if (wanted("portable")) {
    for (const Shape& s : {shapes[0], big}) {
      Bench<Fp8>(timer).run(s, 1, {portable<Fp8, 1>("portable")}, "fp8");
      Bench<Bf16>(timer).run(s, 1, {portable<Bf16, 1>("portable")}, "bf16");
      Bench<Fp4>(timer).run(s, 1, {portable<Fp4, 1>("portable")}, "fp4");
    }
    Bench<Fp8>(timer).run(big, 2, {portable<Fp8, 2>("portable")}, "fp8");
  }
  if (csv != nullptr) std::fclose(csv);
  return all_right ? 0 : 1;
}
