// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvire/kernel/gather.cuh>
#include <kvire/layout/policies.hpp>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/preset/deepseek_v4_1.hpp>
#include <tests/support/device_array.hpp>
#include <tests/support/far_pages.hpp>

using namespace kvire;
using namespace kvire_test;

namespace {

struct Case {
  std::vector<std::byte> pages;
  std::int64_t page_stride = 0;
  std::int32_t pool = 0;
  std::vector<std::int32_t> table, lengths;
  std::vector<std::int64_t> starts;  // none: rows of max_pages pages
  int max_pages = 0;
  std::int64_t rows = 0;  // of an output
  std::size_t shift = 0;  // of the outputs, bytes behind an aligned address
  int left_out = -1;      // a plane that nobody wants
};

template <class P>
Case random_case(unsigned seed) {
  std::mt19937 random{seed};
  Case c;
  const int batch = 1 + static_cast<int>(random() % 6);
  c.max_pages = 1 + static_cast<int>(random() % 8);
  c.pool = 1 + static_cast<std::int32_t>(random() % 40);
  c.page_stride = P::page_bytes + std::int64_t(random() % 2) * 16 * std::int64_t(random() % 4);
  c.pages.resize(std::size_t(c.pool) * std::size_t(c.page_stride));
  for (auto& b : c.pages) b = static_cast<std::byte>(random());
  const std::int32_t bad[] = {-1, -5, c.pool, 0x7FFFFFFF};
  for (int i = 0; i < batch * c.max_pages; ++i)
    c.table.push_back(random() % 8 == 0 ? bad[random() % 4] : static_cast<std::int32_t>(random() % unsigned(c.pool)));
  const bool packed = random() % 2 == 0;
  c.rows = packed ? 0 : std::int64_t(batch) * c.max_pages * P::tokens_per_page;
  for (int b = 0; b < batch; ++b) {
    const int most = c.max_pages * P::tokens_per_page;
    const unsigned kind = random() % 6;
    c.lengths.push_back(kind == 0   ? 0
                        : kind == 1 ? most
                        : kind == 2 ? static_cast<int>(random() % 4) % (most + 1)
                                    : static_cast<int>(random() % unsigned(most + 1)));
    if (packed) {
      c.rows += std::int64_t(random() % 3);  // gaps that nobody writes
      c.starts.push_back(c.rows);
      c.rows += c.lengths.back();
    }
  }
  constexpr std::size_t shifts[] = {0, 0, 1, 4, 16};
  c.shift = shifts[random() % 5];
  if (P::plane_count > 1 && random() % 4 == 0) c.left_out = static_cast<int>(random() % P::plane_count);
  return c;
}

struct Outcome {
  std::vector<std::vector<std::byte>> planes;
  GatherCounts counts;
};

template <class P>
Outcome blank(const Case& c) {
  Outcome out;
  for (int i = 0; i < P::plane_count; ++i) out.planes.emplace_back(c.shift + std::size_t(c.rows * P::table.row_bytes[i]) + 32, std::byte{0xA5});
  return out;
}

template <class P>
body::GatherArgs<P> arguments(const Case& c, const std::byte* pages, const std::int32_t* table, const std::int32_t* lengths, const std::int64_t* starts) {
  body::GatherArgs<P> args;
  args.pages = pages;
  args.page_stride = c.page_stride;
  args.page_count = c.pool;
  args.page_table = table;
  args.max_pages = c.max_pages;
  args.lengths = lengths;
  args.starts = c.starts.empty() ? nullptr : starts;
  args.batch = static_cast<int>(c.lengths.size());
  return args;
}

// The plainest version: row by row.
template <class P>
Outcome expected(const Case& c) {
  Outcome out = blank<P>(c);
  for (int b = 0; b < static_cast<int>(c.lengths.size()); ++b) {
    for (int t = 0; t < c.lengths[std::size_t(b)]; ++t) {
      const std::int32_t id = c.table[std::size_t(b * c.max_pages + t / P::tokens_per_page)];
      if (t % P::tokens_per_page == 0) ++(id < 0 ? out.counts.skipped : id >= c.pool ? out.counts.bad_pages : out.counts.pages);
      if (id < 0 || id >= c.pool) continue;
      const std::int64_t row = (c.starts.empty() ? std::int64_t(b) * c.max_pages * P::tokens_per_page : c.starts[std::size_t(b)]) + t;
      for (int i = 0; i < P::plane_count; ++i) {
        if (i == c.left_out) continue;
        const std::int64_t bytes = P::table.row_bytes[i];
        std::memcpy(out.planes[std::size_t(i)].data() + c.shift + row * bytes,
                    c.pages.data() + id * c.page_stride + P::table.plane_offset[i] + t % P::tokens_per_page * bytes, std::size_t(bytes));
      }
    }
  }
  return out;
}

template <class P>
Outcome on_host(const Case& c) {
  Outcome out = blank<P>(c);
  auto args = arguments<P>(c, c.pages.data(), c.table.data(), c.lengths.data(), c.starts.data());
  for (int i = 0; i < P::plane_count; ++i) args.planes[i] = i == c.left_out ? nullptr : out.planes[std::size_t(i)].data() + c.shift;
  for (std::size_t i = 0; i < c.table.size(); ++i) out.counts += body::gather<P>(HostGroup<32>{}, std::int64_t(i), args);
  return out;
}

template <class P>
Outcome on_device(const Case& c) {
  Outcome out = blank<P>(c);
  const DeviceArray<std::byte> pages(c.pages);
  const DeviceArray<std::int32_t> table(c.table), lengths(c.lengths);
  const DeviceArray<std::int64_t> starts(c.starts);
  const DeviceCounts<GatherCounts> counts;
  auto args = arguments<P>(c, pages.data(), table.data(), lengths.data(), starts.data());
  std::vector<std::unique_ptr<DeviceArray<std::byte>>> planes;
  for (int i = 0; i < P::plane_count; ++i) {
    planes.push_back(std::make_unique<DeviceArray<std::byte>>(out.planes[std::size_t(i)]));
    args.planes[i] = i == c.left_out ? nullptr : planes.back()->data() + c.shift;
  }
  cuda_ok(launch_gather<P>(args, counts.data(), nullptr));
  for (int i = 0; i < P::plane_count; ++i) out.planes[std::size_t(i)] = planes[std::size_t(i)]->read();
  out.counts = counts.value();
  return out;
}

bool same(const Outcome& a, const Outcome& b) { return a.planes == b.planes && std::memcmp(&a.counts, &b.counts, sizeof a.counts) == 0; }

template <class P>
void random_shapes(unsigned first, int shapes) {
  if (small_run()) shapes = 6;
  for (int i = 0; i < shapes; ++i) {
    const unsigned seed = first + static_cast<unsigned>(i);
    const auto c = random_case<P>(seed);
    const Outcome want = expected<P>(c);
    const bool host = same(on_host<P>(c), want);
    const bool device = same(on_device<P>(c), want);
    if (!host || !device) FAIL_CHECK(P::name << " seed " << seed << ": host " << host << ", device " << device);
  }
}

}  // namespace

TEST_CASE("cuda gather: random shapes give the rows, counts and untouched bytes of the plain version and of the host twin") {
  random_shapes<Fp8WithScale<64, 128>>(1000, 400);
  random_shapes<Fp8WithScaleInterleaved<16, 128>>(2000, 300);
  random_shapes<Bf16Contiguous<64, 128>>(3000, 200);
  random_shapes<Fp4WithScale<64, 128>>(4000, 400);
  random_shapes<preset::deepseek_v4::Latent<64>>(5000, 100);
  random_shapes<preset::deepseek_v4::Latent<2>>(6000, 400);
  random_shapes<preset::deepseek_v3_2::Latent<64>>(7000, 100);
  random_shapes<preset::deepseek_v4_1::LatentFp4<2>>(8000, 300);
}

TEST_CASE("cuda gather: the same bytes on 20 runs, and of each row alone") {
  using P = Fp8WithScale<64, 128>;
  Case c = random_case<P>(77);
  const Outcome all = on_device<P>(c);
  for (int run = 0; run < 20; ++run) CHECK(same(on_device<P>(c), all));
  // The other rows' lengths are zero: what is left is this row's part, in the place it had.
  Outcome joined = blank<P>(c);
  for (std::size_t b = 0; b < c.lengths.size(); ++b) {
    Case one = c;
    for (std::size_t other = 0; other < c.lengths.size(); ++other) {
      if (other != b) one.lengths[other] = 0;
    }
    const Outcome alone = on_device<P>(one);
    joined.counts += alone.counts;
    for (std::size_t i = 0; i < joined.planes.size(); ++i) {
      for (std::size_t at = 0; at < joined.planes[i].size(); ++at) {
        if (alone.planes[i][at] != std::byte{0xA5}) joined.planes[i][at] = alone.planes[i][at];
      }
    }
  }
  CHECK(same(joined, all));
}

TEST_CASE("cuda gather: pages whose bytes lie beyond 2 GiB and 4 GiB") {
  using P = Bf16Contiguous<64, 128>;
  constexpr std::int32_t ids[] = {131071, 131072, 262144, 1};
  const FarPages<P> pool(262145);
  if (!pool) return;
  for (int i = 0; i < 4; ++i) cuda_ok(cudaMemset(pool.page(ids[i]), 0x30 + i, P::page_bytes));
  kvire_test::arrived();
  const DeviceArray<std::int32_t> table(std::vector<std::int32_t>(ids, ids + 4));
  const DeviceArray<std::int32_t> lengths(std::vector<std::int32_t>{4 * P::tokens_per_page});
  const DeviceArray<std::byte> out(std::vector<std::byte>(4 * std::size_t(P::page_bytes)));
  body::GatherArgs<P> args;
  args.pages = pool.data();
  args.page_stride = P::page_bytes;
  args.page_count = pool.pages();
  args.page_table = table.data();
  args.max_pages = 4;
  args.lengths = lengths.data();
  args.batch = 1;
  args.planes[0] = out.data();
  cuda_ok(launch_gather<P>(args, nullptr, nullptr));
  const auto got = out.read();
  for (int i = 0; i < 4; ++i) {
    CHECK(std::count(got.begin() + i * P::page_bytes, got.begin() + (i + 1) * P::page_bytes, static_cast<std::byte>(0x30 + i)) == P::page_bytes);
  }
}
