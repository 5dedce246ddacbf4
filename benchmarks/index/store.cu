// SPDX-License-Identifier: Apache-2.0
// Store of bf16 rows on disjoint rows and pages: one line of CSV a shape, with GB/s of rows read, bytes written and slots, and the share of
// the copy rate; as a plain launch and by programmatic dependent launch. A prologue's tables (read from caches for the most part) do not count.
#include <benchmarks/support/device_timing.cuh>

#include <numeric>
#include <random>

#include <kvire/kernel/store.cuh>
#include <kvire/layout/policies.hpp>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/preset/deepseek_v4_1.hpp>

namespace {

using namespace kvire_bench;

constexpr int positions = 65536;  // rows of the RoPE tables
constexpr int rope_dims = 64;

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

enum class With { nothing, norm_rope, norm_rope_hadamard };

template <class P>
void measure(const char* name, std::size_t rows_total, Timer& timer, std::initializer_list<With> prologues) {
  const auto pool = static_cast<std::int32_t>(rows_total / P::tokens_per_page);
  auto* rows = device_array<std::uint16_t>(std::int64_t(rows_total) * P::dim);
  auto* slots = device_array<std::int64_t>(std::int64_t(rows_total));
  auto* places = device_array<std::int64_t>(std::int64_t(rows_total));
  auto* pages = device_array<std::byte>(pool * P::page_bytes);
  auto* table = device_array<float>(std::int64_t(positions) * (rope_dims / 2) + P::dim);
  fill_bf16<<<2048, 256>>>(rows, rows_total * P::dim);
  KVIRE_BENCH_CHECK(cudaMemset(table, 0x3F, (std::size_t(positions) * (rope_dims / 2) + P::dim) * 4));  // 0.75
  KVIRE_BENCH_CHECK(cudaDeviceSynchronize());
  std::vector<std::int32_t> order(static_cast<std::size_t>(pool));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937{5});
  std::vector<std::int64_t> host(rows_total);
  for (std::size_t i = 0; i < rows_total; ++i)
    host[i] = std::int64_t(order[i / P::tokens_per_page]) * P::tokens_per_page + std::int64_t(i % P::tokens_per_page);
  KVIRE_BENCH_CHECK(cudaMemcpy(slots, host.data(), host.size() * 8, cudaMemcpyHostToDevice));
  for (std::size_t i = 0; i < rows_total; ++i) host[i] = std::int64_t(i % positions);
  KVIRE_BENCH_CHECK(cudaMemcpy(places, host.data(), host.size() * 8, cudaMemcpyHostToDevice));
  std::int64_t row_bytes = 0;
  for (int s = 0; s < P::section_count; ++s) row_bytes += P::table.sections[s].count * bits(P::table.sections[s].element) / 8;
  for (const With with : prologues) {
    for (const std::size_t n : {std::size_t(64), std::size_t(512), std::size_t(8192), std::size_t(65536), std::size_t(1) << 20}) {
      const int launches = int(std::clamp<std::size_t>(rows_total / n, 1, 48));
      const auto time = [&](bool overlap) {
        return timer.microseconds(launches, 9, [&](int i, cudaStream_t stream) {
          kvire::body::StoreArgs<P> args;
          args.rows = rows + std::size_t(i) * n * P::dim;
          args.row_element = kvire::Element::bf16;
          args.slots = slots + std::size_t(i) * n;
          args.pages = pages;
          args.page_stride = P::page_bytes;
          args.page_count = pool;
          args.first_page = 0;
          if (with != With::nothing) {
            args.prologue.norm = true;
            args.prologue.weight = table;
            args.prologue.rope_dims = rope_dims;
            args.prologue.cos = table;
            args.prologue.sin = table;
            args.prologue.positions = places + std::size_t(i) * n;
            args.prologue.table_rows = positions;
            args.prologue.hadamard = with == With::norm_rope_hadamard;
          }
          KVIRE_BENCH_CHECK(kvire::launch_store<P>(args, std::int64_t(n), nullptr, stream, overlap));
        });
      };
      const double us = time(false);
      const double overlapped = time(true);
      const double bytes = double(n) * double(P::dim * 2 + row_bytes + (with == With::nothing ? 8 : 16));
      const double rate = bytes / us * 1e-3;
      const char* text = with == With::nothing ? "none" : with == With::norm_rope ? "norm+rope" : "norm+rope+hadamard";
      std::printf("%s,%s,%zu,%.2f,%.0f,%.1f,%.2f,%.1f\n", name, text, n, us, rate, rate / copy_rate * 100, overlapped,
                  bytes / overlapped * 1e-3 / copy_rate * 100);
    }
  }
  for (void* p : {static_cast<void*>(rows), static_cast<void*>(slots), static_cast<void*>(places), static_cast<void*>(pages), static_cast<void*>(table)}) {
    KVIRE_BENCH_CHECK(cudaFree(p));
  }
}

}  // namespace

int main() {
  using enum With;
  Timer timer;
  std::printf("policy,prologue,tokens,us,gb_per_s,percent_of_copy,us_overlap,percent_overlap\n");
  measure<kvire::Fp8WithScale<64, 128>>("fp8", std::size_t(4) << 20, timer, {nothing, norm_rope, norm_rope_hadamard});
  measure<kvire::Bf16Contiguous<64, 128>>("bf16", std::size_t(4) << 20, timer, {nothing, norm_rope_hadamard});
  measure<kvire::Fp4WithScale<64, 128>>("fp4", std::size_t(4) << 20, timer, {nothing, norm_rope_hadamard});
  measure<kvire::preset::deepseek_v4::Latent<64>>("V4 latent", std::size_t(1) << 20, timer, {nothing, norm_rope});
  measure<kvire::preset::deepseek_v3_2::Latent<64>>("V3.2 latent", std::size_t(1) << 20, timer, {nothing});
  measure<kvire::preset::deepseek_v4_1::LatentFp8<64>>("V4.1 fp8 latent", std::size_t(1) << 20, timer, {nothing, norm_rope});
  measure<kvire::preset::deepseek_v4_1::LatentFp4<64>>("V4.1 fp4 latent", std::size_t(1) << 20, timer, {nothing, norm_rope});
  return 0;
}
