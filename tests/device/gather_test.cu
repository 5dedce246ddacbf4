// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvire/kernel/gather.cuh>
#include <kvire/layout/policies.hpp>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>

using namespace kvire;

namespace {

void check(cudaError_t error) { REQUIRE_MESSAGE(error == cudaSuccess, cudaGetErrorString(error)); }

// An array on the device, `shift` bytes behind an aligned address.
template <class T>
class Device {
 public:
  explicit Device(const std::vector<T>& v, std::size_t shift = 0) : n_(v.size()), shift_(shift) {
    check(cudaMalloc(&p_, n_ * sizeof(T) + shift + 1));
    check(cudaMemcpy(get(), v.data(), n_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() { cudaFree(p_); }
  T* get() { return reinterpret_cast<T*>(p_ + shift_); }
  std::vector<T> read() {
    std::vector<T> v(n_);
    check(cudaMemcpy(v.data(), get(), n_ * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }

 private:
  char* p_ = nullptr;
  std::size_t n_, shift_;
};

template <class P>
void check_policy(std::size_t shift, bool packed) {
  INFO(std::string(P::name), " shift ", shift, " packed ", packed);
  constexpr int batch = 5;
  constexpr int max_pages = 7;
  constexpr std::int32_t pool = 40;
  std::mt19937 engine{3};
  std::vector<std::byte> pages(std::size_t(pool) * P::page_bytes);
  for (auto& b : pages) b = static_cast<std::byte>(engine());
  std::vector<std::int32_t> table;
  for (int i = 0; i < batch * max_pages; ++i) table.push_back(i % 9 == 4 ? -1 : i % 11 == 6 ? 0x7FFFFFFF : static_cast<std::int32_t>(engine() % pool));
  const std::vector<std::int32_t> lengths = {0, 1, 3 * P::tokens_per_page, max_pages * P::tokens_per_page, 2 * P::tokens_per_page + 3};
  std::vector<std::int64_t> starts(batch);
  std::int64_t rows = packed ? 0 : std::int64_t(batch) * max_pages * P::tokens_per_page;
  for (int b = 0; packed && b < batch; ++b) {
    starts[std::size_t(b)] = rows;
    rows += lengths[std::size_t(b)];
  }
  std::vector<std::vector<std::byte>> want, got;
  for (int i = 0; i < P::plane_count; ++i) want.emplace_back(std::size_t(rows * P::table.row_bytes[i]), std::byte{0xA5});

  body::GatherArgs<P> args;
  args.pages = pages.data();
  args.page_stride = P::page_bytes;
  args.page_count = pool;
  args.page_table = table.data();
  args.max_pages = max_pages;
  args.lengths = lengths.data();
  args.starts = packed ? starts.data() : nullptr;
  args.batch = batch;
  got = want;
  GatherCounts host;
  for (int i = 0; i < P::plane_count; ++i) args.planes[i] = got[std::size_t(i)].data();
  for (int i = 0; i < batch * max_pages; ++i) host += body::gather<P>(HostGroup<32>{}, i, args);
  // The plainest version: row by row.
  std::int64_t bad = 0, skipped = 0, gathered = 0;
  for (int b = 0; b < batch; ++b) {
    for (int t = 0; t < lengths[std::size_t(b)]; ++t) {
      const std::int32_t id = table[std::size_t(b * max_pages + t / P::tokens_per_page)];
      if (t % P::tokens_per_page == 0) (id < 0 ? skipped : id >= pool ? bad : gathered)++;
      if (id < 0 || id >= pool) continue;
      const std::int64_t row = (packed ? starts[std::size_t(b)] : std::int64_t(b) * max_pages * P::tokens_per_page) + t;
      for (int i = 0; i < P::plane_count; ++i) {
        const std::int64_t bytes = P::table.row_bytes[i];
        std::memcpy(want[std::size_t(i)].data() + row * bytes, pages.data() + id * P::page_bytes + P::table.plane_offset[i] + t % P::tokens_per_page * bytes, std::size_t(bytes));
      }
    }
  }
  CHECK(host.pages == gathered);
  CHECK(host.skipped == skipped);
  CHECK(host.bad_pages == bad);
  CHECK(got == want);

  Device<std::byte> device_pages(pages);
  Device<std::int32_t> device_table(table), device_lengths(lengths);
  Device<std::int64_t> device_starts(starts);
  Device<GatherCounts> counts(std::vector<GatherCounts>(1));
  std::vector<Device<std::byte>*> planes;
  args.pages = device_pages.get();
  args.page_table = device_table.get();
  args.lengths = device_lengths.get();
  args.starts = packed ? device_starts.get() : nullptr;
  for (int i = 0; i < P::plane_count; ++i) {
    planes.push_back(new Device<std::byte>(std::vector<std::byte>(want[std::size_t(i)].size(), std::byte{0xA5}), shift));
    args.planes[i] = planes.back()->get();
  }
  check(launch_gather<P>(args, counts.get(), nullptr));
  check(cudaDeviceSynchronize());
  for (int i = 0; i < P::plane_count; ++i) {
    CHECK(planes[std::size_t(i)]->read() == want[std::size_t(i)]);
    delete planes[std::size_t(i)];
  }
  const GatherCounts device = counts.read()[0];
  CHECK(std::memcmp(&device, &host, sizeof host) == 0);
}

}  // namespace

TEST_CASE("cuda gather: rows, counts and untouched bytes of the plain version and the host twin") {
  for (const std::size_t shift : {0, 1, 4}) {
    for (const bool packed : {false, true}) {
      check_policy<Fp8WithScale<64, 128>>(shift, packed);
      check_policy<Fp8WithScaleInterleaved<16, 128>>(shift, packed);
      check_policy<Bf16Contiguous<64, 128>>(shift, packed);
      check_policy<Fp4WithScale<64, 128>>(shift, packed);
      check_policy<preset::deepseek_v4::Latent<64>>(shift, packed);
      check_policy<preset::deepseek_v3_2::Latent<64>>(shift, packed);
    }
  }
}
