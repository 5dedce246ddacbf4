// SPDX-License-Identifier: Apache-2.0
// The selection step of a decode, fp8 keys, 64 heads, dim 128, k = 512, slots of pages: logits and top-k against reading the keys' pages once, in the same
// run. One line of CSV a shape; times in microseconds.
#include <benchmarks/support/page_reads.cuh>

#include <kvire/kernel/cuda_top_k.cuh>
#include <kvire/kernel/grouped_top_k.cuh>
#include <kvire/kernel/sm90_sparse_logits.cuh>
#include <kvire/layout/policies.hpp>

#include <cstring>
#include <numeric>
#include <random>

using namespace kvire;
using namespace kvire_bench;

namespace {

using Fp8 = Fp8WithScale<64, 128>;
constexpr int heads = 64, dim = 128, tokens = 64, k = 512;

__global__ void fill(std::uint8_t* pages, long long words) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += stride) {
    const std::uint32_t r = mix(static_cast<std::uint64_t>(i) * 0x9E3779B97F4A7C15ULL);
    const bool scale = static_cast<int>(i % (Fp8::page_bytes / 4)) >= tokens * dim / 4;
    reinterpret_cast<std::uint32_t*>(pages)[i] = scale ? __float_as_uint(0.01F + static_cast<float>(r >> 8) * 1e-9F) : r & 0xBFBFBFBFU;
  }
}
__global__ void fill_queries(std::uint32_t* q, long long words) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += stride) q[i] = mix(static_cast<std::uint64_t>(i) + (7ULL << 40)) & 0xBFBFBFBFU;
}
__global__ void fill_weights(float* w, long long n) {
  const long long stride = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += stride)
    w[i] = static_cast<float>(static_cast<int>(mix(static_cast<std::uint64_t>(i) + (9ULL << 40)))) * (1.0F / 2147483648.0F);
}

class Bench {
 public:
  Bench() {
    KVIRE_BENCH_CHECK(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, 0));
    pool_ = static_cast<int>((9LL << 30) / Fp8::page_bytes);
    pages_ = device_array<std::byte>(pool_ * Fp8::page_bytes);
    fill<<<2048, 256>>>(reinterpret_cast<std::uint8_t*>(pages_), pool_ * Fp8::page_bytes / 4);
    KVIRE_BENCH_CHECK(cudaDeviceSynchronize());
  }

  void run(int batch, int length) {
    const int width = length / tokens;
    const int used = batch * width;
    const int launches = std::min(48, pool_ / used);
    std::vector<int> table(static_cast<std::size_t>(launches) * static_cast<std::size_t>(used));
    std::vector<int> order(static_cast<std::size_t>(pool_));
    std::iota(order.begin(), order.end(), 0);
    std::mt19937 random(3);
    std::shuffle(order.begin(), order.end(), random);
    std::copy(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(table.size()), table.begin());
    const std::int64_t rows = std::int64_t(batch) * launches, query_bytes = std::int64_t(batch) * heads * dim;
    auto* d_table = device_array<int>(static_cast<std::int64_t>(table.size()));
    auto* d_lengths = device_array<int>(rows);
    auto* d_queries = device_array<std::uint8_t>(query_bytes * launches);
    auto* d_weights = device_array<float>(rows * heads);
    auto* d_scores = device_array<float>(std::int64_t(batch) * length);  // of all launches, as the scratch of an engine's layers
    auto* d_best = device_array<std::uint32_t>(std::int64_t(batch) * length / 16);
    auto* d_selected = device_array<int>(rows * k);
    const std::vector<int> lengths(static_cast<std::size_t>(rows), length);
    KVIRE_BENCH_CHECK(cudaMemcpy(d_table, table.data(), table.size() * 4, cudaMemcpyHostToDevice));
    KVIRE_BENCH_CHECK(cudaMemcpy(d_lengths, lengths.data(), lengths.size() * 4, cudaMemcpyHostToDevice));
    fill_queries<<<512, 256>>>(reinterpret_cast<std::uint32_t*>(d_queries), query_bytes * launches / 4);
    fill_weights<<<64, 256>>>(d_weights, rows * heads);
    KVIRE_BENCH_CHECK(cudaDeviceSynchronize());

    const auto logits_arguments = [&](int l) {
      sm90::LogitsArguments a;
      a.pages = pages_;
      a.page_stride = Fp8::page_bytes;
      a.page_count = pool_;
      a.batch = batch;
      a.queries = d_queries + query_bytes * l;
      a.weights = d_weights + std::int64_t(batch) * heads * l;
      a.page_table = d_table + std::int64_t(l) * used;
      a.table_stride = a.table_width = width;
      a.lengths = d_lengths + std::int64_t(l) * batch;
      a.logits = d_scores;
      a.logits_stride = length;
      a.group_best = d_best;
      return a;
    };
    const auto top_k_arguments = [&](int l) {
      body::TopKArgs a;
      a.scores = d_scores;
      a.stride = length;
      a.lengths = d_lengths + std::int64_t(l) * batch;
      a.batch = batch;
      a.k = k;
      a.selected = d_selected + std::int64_t(l) * batch * k;
      a.page_table = d_table + std::int64_t(l) * used;
      a.max_pages = width;
      a.tokens_per_page = tokens;
      a.page_count = pool_;
      a.translate = true;
      return a;
    };
    using Shape = sm90::DefaultLogitsShape<Fp8, Element::e4m3, heads, 1>;
    const auto logits = [&](int l, cudaStream_t s) { KVIRE_BENCH_CHECK((sm90::launch_logits<Fp8, Element::e4m3, heads, 1>(logits_arguments(l), sms_, s, true))); };
    const auto best = [&](int l, cudaStream_t s) {
      KVIRE_BENCH_CHECK((sm90::launch_logits<Fp8, Element::e4m3, heads, 1, sm90::KeepBest<Shape>>(logits_arguments(l), sms_, s, true)));
    };
    const auto two = [&](int l, cudaStream_t s) {
      logits(l, s);
      KVIRE_BENCH_CHECK(detail::queue_tuned_top_k(top_k_arguments(l), nullptr, s, sms_, true, true));
    };
    const auto floor = timer_.microseconds(launches, 9, [&](int l, cudaStream_t s) { launch_read_pages<Fp8::page_bytes>(pages_, d_table + std::int64_t(l) * used, used, sms_, s); });
    const auto us_logits = timer_.microseconds(launches, 9, logits);
    const auto us_best = timer_.microseconds(launches, 9, best);
    const auto us_two = timer_.microseconds(launches, 9, two);
    std::vector<int> want(static_cast<std::size_t>(rows * k)), got(want.size());
    KVIRE_BENCH_CHECK(cudaMemcpy(want.data(), d_selected, want.size() * 4, cudaMemcpyDeviceToHost));

    using Kept = sm90::KeepCandidates<Shape>;
    const auto ctas = sm90::logits_ctas<Fp8, Kept>(logits_arguments(0), sms_);
    const std::int64_t slots = sm90::CandidateSlots::slots(batch, 1, ctas), slot_bytes = sm90::CandidateSlots::bytes(slots, k);
    auto* d_slots = device_array<std::byte>(slot_bytes * launches);
    const auto slots_of = [&](int l) { return sm90::CandidateSlots::at(d_slots + slot_bytes * l, slots, k); };
    const auto kept = [&](int l, cudaStream_t s) {
      auto a = logits_arguments(l);
      a.candidates = slots_of(l);
      KVIRE_BENCH_CHECK((sm90::launch_logits<Fp8, Element::e4m3, heads, 1, Kept>(a, sms_, s, true)));
    };
    const double us_kept = timer_.microseconds(launches, 9, kept);
    const int blocks = grouped_top_k_blocks(batch, sms_);
    bool same = true;
    const auto time = [&](auto&& launch) {  // and see whether the same is selected
      KVIRE_BENCH_CHECK(cudaMemset(d_selected, 0xEE, want.size() * 4));
      KVIRE_BENCH_CHECK(cudaMemset(d_scores, 0xEE, static_cast<std::size_t>(batch) * static_cast<std::size_t>(length) * 4));
      const double us = timer_.microseconds(launches, 9, launch);
      KVIRE_BENCH_CHECK(cudaMemcpy(got.data(), d_selected, got.size() * 4, cudaMemcpyDeviceToHost));
      same = same && got == want;
      return us;
    };
    const double us_pair = time([&](int l, cudaStream_t s) {
      best(l, s);
      KVIRE_BENCH_CHECK(launch_grouped_top_k(top_k_arguments(l), logits_arguments(l).group_best, nullptr, s, true, blocks));
    });
    const double us_fused = time([&](int l, cudaStream_t s) {
      kept(l, s);
      KVIRE_BENCH_CHECK(launch_slot_top_k(top_k_arguments(l), slots_of(l), static_cast<int>(ctas), nullptr, s, true, blocks, true));
    });
    std::printf("%d,%d,%.2f,%.2f,%.2f,%.2f,%.2f,%.2f,%.2f,%.2f,%.2f,%.2f%s\n", batch, length, floor, us_logits, us_best, us_kept, us_two, us_pair, us_fused, us_two / floor, us_pair / floor,
                us_fused / floor, same ? "" : ",WRONG");
    std::fflush(stdout);
    cudaFree(d_slots);
    for (void* p : {static_cast<void*>(d_table), static_cast<void*>(d_lengths), static_cast<void*>(d_queries), static_cast<void*>(d_weights), static_cast<void*>(d_scores),
                    static_cast<void*>(d_best), static_cast<void*>(d_selected)})
      cudaFree(p);
  }

 private:
  Timer timer_;
  int sms_ = 0, pool_ = 0;
  std::byte* pages_ = nullptr;
};

}  // namespace

int main() {
  Bench bench;
  std::printf("batch,tokens,page_reads,logits,logits_with_group_best,logits_with_slots,two_steps,kept_scores,fused,two_steps_over_reads,kept_scores_over_reads,fused_over_reads\n");
  for (const int batch : {1, 8, 64}) {
    for (const int length : {4096, 32768, 131072}) bench.run(batch, length);
  }
  return 0;
}
