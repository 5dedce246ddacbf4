// SPDX-License-Identifier: Apache-2.0
// Gather of pages on disjoint inputs: one line of CSV a shape, with GB/s read and written and the share of the copy rate.
#include <benchmarks/support/device_timing.cuh>

#include <numeric>
#include <random>

#include <kvire/kernel/gather.cuh>
#include <kvire/layout/policies.hpp>

namespace {

using namespace kvire_bench;

template <class P>
void measure(const char* name, Timer& timer) {
  constexpr std::int32_t pool = 1 << 17;
  auto* pages = device_array<std::byte>(pool * P::page_bytes);
  auto* out = device_array<std::byte>(pool * P::page_bytes);
  auto* table = device_array<std::int32_t>(pool);
  auto* lengths = device_array<std::int32_t>(64);
  KVIRE_BENCH_CHECK(cudaMemset(pages, 0x5A, std::size_t(pool) * P::page_bytes));
  std::vector<std::int32_t> order(pool);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937{5});
  KVIRE_BENCH_CHECK(cudaMemcpy(table, order.data(), order.size() * 4, cudaMemcpyHostToDevice));
  struct Shape {
    int batch, tokens;
  };
  for (const Shape shape : {Shape{1, 4096}, Shape{1, 32768}, Shape{8, 32768}, Shape{16, 131072}}) {
    const std::vector<std::int32_t> host(64, shape.tokens);
    KVIRE_BENCH_CHECK(cudaMemcpy(lengths, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    const int max_pages = shape.tokens / P::tokens_per_page;
    const std::int64_t set = std::int64_t(shape.batch) * max_pages;
    const int launches = int(std::clamp<std::int64_t>(pool / set, 1, 48));
    const double us = timer.microseconds(launches, 9, [&](int i, cudaStream_t stream) {
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
      KVIRE_BENCH_CHECK(kvire::launch_gather<P>(args, nullptr, stream));
    });
    const double rate = 2.0 * double(set) * double(P::used_bytes) / us * 1e-3;
    std::printf("%s,%d,%d,%.2f,%.0f,%.1f\n", name, shape.batch, shape.tokens, us, rate, rate / copy_rate * 100);
  }
  for (void* p : {static_cast<void*>(pages), static_cast<void*>(out), static_cast<void*>(table), static_cast<void*>(lengths)}) KVIRE_BENCH_CHECK(cudaFree(p));
}

}  // namespace

int main() {
  Timer timer;
  std::printf("policy,batch,tokens,us,gb_per_s,percent_of_copy\n");
  measure<kvire::Fp8WithScale<64, 128>>("fp8", timer);
  measure<kvire::Bf16Contiguous<64, 128>>("bf16", timer);
  measure<kvire::Fp4WithScale<64, 128>>("fp4", timer);
  return 0;
}
