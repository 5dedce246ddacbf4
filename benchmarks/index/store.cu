// SPDX-License-Identifier: Apache-2.0
// Store of bf16 rows on disjoint rows and pages: one line of CSV a shape, with GB/s of rows read, bytes written and slots, and the share of
// the copy rate.
#include <benchmarks/support/device_timing.cuh>

#include <numeric>
#include <random>

#include <kvire/kernel/store.cuh>
#include <kvire/layout/policies.hpp>
#include <kvire/preset/deepseek_v4.hpp>

namespace {

using namespace kvire_bench;

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
void measure(const char* name, std::size_t rows_total, Timer& timer) {
  const auto pool = static_cast<std::int32_t>(rows_total / P::tokens_per_page);
  auto* rows = device_array<std::uint16_t>(std::int64_t(rows_total) * P::dim);
  auto* slots = device_array<std::int64_t>(std::int64_t(rows_total));
  auto* pages = device_array<std::byte>(pool * P::page_bytes);
  fill_bf16<<<2048, 256>>>(rows, rows_total * P::dim);
  KVIRE_BENCH_CHECK(cudaDeviceSynchronize());
  std::vector<std::int32_t> order(static_cast<std::size_t>(pool));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937{5});
  std::vector<std::int64_t> host(rows_total);
  for (std::size_t i = 0; i < rows_total; ++i) host[i] = std::int64_t(order[i / P::tokens_per_page]) * P::tokens_per_page + std::int64_t(i % P::tokens_per_page);
  KVIRE_BENCH_CHECK(cudaMemcpy(slots, host.data(), host.size() * 8, cudaMemcpyHostToDevice));
  std::int64_t row_bytes = 0;
  for (int s = 0; s < P::section_count; ++s) row_bytes += P::table.sections[s].count * bits(P::table.sections[s].element) / 8;
  for (const std::size_t n : {std::size_t(64), std::size_t(512), std::size_t(8192), std::size_t(65536), std::size_t(1) << 20}) {
    const int launches = int(std::clamp<std::size_t>(rows_total / n, 1, 48));
    const double us = timer.microseconds(launches, 9, [&](int i, cudaStream_t stream) {
      kvire::body::StoreArgs<P> args;
      args.rows = rows + std::size_t(i) * n * P::dim;
      args.row_element = kvire::Element::bf16;
      args.slots = slots + std::size_t(i) * n;
      args.pages = pages;
      args.page_stride = P::page_bytes;
      args.page_count = pool;
      args.first_page = 0;
      KVIRE_BENCH_CHECK(kvire::launch_store<P>(args, std::int64_t(n), nullptr, stream));
    });
    const double bytes = double(n) * double(P::dim * 2 + row_bytes + 8);
    const double rate = bytes / us * 1e-3;
    std::printf("%s,%zu,%.2f,%.0f,%.1f\n", name, n, us, rate, rate / copy_rate * 100);
  }
  for (void* p : {static_cast<void*>(rows), static_cast<void*>(slots), static_cast<void*>(pages)}) KVIRE_BENCH_CHECK(cudaFree(p));
}

}  // namespace

int main() {
  Timer timer;
  std::printf("policy,tokens,us,gb_per_s,percent_of_copy\n");
  measure<kvire::Fp8WithScale<64, 128>>("fp8", std::size_t(4) << 20, timer);
  measure<kvire::Bf16Contiguous<64, 128>>("bf16", std::size_t(4) << 20, timer);
  measure<kvire::Fp4WithScale<64, 128>>("fp4", std::size_t(4) << 20, timer);
  measure<kvire::preset::deepseek_v4::Latent<64>>("V4 latent", std::size_t(1) << 20, timer);
  return 0;
}
