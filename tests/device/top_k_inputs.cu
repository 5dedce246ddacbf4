// SPDX-License-Identifier: Apache-2.0
// The tuned top-k kernels on what callers may give them besides plain rows: lengths of several query tokens, out of bounds or changed by the kernel before,
// pages of any size, and what is refused. What is expected is written out here, from the definition.
#include <functional>
#include <string>

#include <kvire/kernel/cuda_top_k.cuh>
#include <kvire/kernel/grouped_top_k.cuh>
#include <tests/support/device_rows.hpp>
#include <tests/support/gpu.hpp>
#include <tests/support/write_late.cuh>

namespace {

using namespace kvire_test;

struct TunedKernel {
  std::string name;
  int least, most;  // scores that a row has room for
  std::function<cudaError_t(const kvire::body::TopKArgs&, kvire::TopKCounts*, bool)> launch;
  int tokens = 1;  // a page has a multiple of so many
};

std::vector<TunedKernel> kernels() {
  std::vector<TunedKernel> all;
  const auto shaped = [&](const char* name, int least, int most, kvire::TopKShape shape) {
    all.push_back({name, least, most, [shape](const auto& args, auto* counts, bool overlap) { return kvire::launch_top_k(args, counts, nullptr, shape, overlap); }});
  };
  shaped("short", 0, 8192, {1024, 8, 1});
  shaped("streaming", 8193, 1 << 28, {1024, 8, 1});
  if (gpu_attribute(cudaDevAttrComputeCapabilityMajor) < 9) return all;
  shaped("streaming by clusters", 8193, 1 << 28, {1024, 4, 4});
  for (const int blocks : {2, 8}) {
    all.push_back({"held by " + std::to_string(blocks), 0, blocks * 16384, [blocks](const auto& args, auto* counts, bool overlap) { return kvire::launch_held_top_k(args, counts, nullptr, blocks, overlap); }, 4});
  }
  return all;
}

// Rows of several query tokens on pages.
struct Batch {
  int batch = 2, next_n = 1, stride = 0, tokens = 64, pages = 0;
  bool per_query = false;
  std::vector<float> scores;
  std::vector<std::int32_t> lengths, table;
  static constexpr int pool = 3000;

  Batch(int next_n_, bool per_query_, int stride_, int tokens_, std::mt19937& random) : next_n(next_n_), stride(stride_), tokens(tokens_), pages((stride + tokens - 1) / tokens), per_query(per_query_) {
    std::normal_distribution<float> normal;
    for (int i = 0; i < rows() * stride; ++i) scores.push_back(std::round(normal(random) * 64) / 64);
    for (int i = 0; i < batch * (per_query ? next_n : 1); ++i) lengths.push_back(int(random() % unsigned(stride + 1)));
    for (int i = 0; i < batch * pages; ++i) table.push_back(i % 9 == 4 ? -1 : i % 31 == 11 ? pool : int(random() % unsigned(pool)));
  }
  int rows() const { return batch * next_n; }
  // One length a request is what its last query token sees; each before sees one less.
  int visible(int row) const {
    const std::int64_t n = per_query ? lengths[std::size_t(row)] : std::int64_t(lengths[std::size_t(row / next_n)]) - (next_n - 1 - row % next_n);
    return int(std::clamp<std::int64_t>(n, 0, stride));
  }
  std::int32_t page(int row, int position) const { return table[std::size_t(row / next_n * pages + position / tokens)]; }
  std::vector<std::int32_t> expected(int k) const {
    std::vector<std::int32_t> all;
    for (int r = 0; r < rows(); ++r) {
      std::vector<char> masked(static_cast<std::size_t>(stride));
      for (int i = 0; i < stride; ++i) masked[std::size_t(i)] = page(r, i) < 0 || page(r, i) >= pool;
      auto row = kvire_test::expected(scores.data() + std::size_t(r) * std::size_t(stride), visible(r), k, false, masked);
      for (auto& i : row) i = i < 0 ? i : page(r, i) * tokens + i % tokens;
      all.insert(all.end(), row.begin(), row.end());
    }
    return all;
  }
  std::int64_t bad_pages() const {
    std::int64_t n = 0;
    for (int r = 0; r < rows(); ++r) {
      for (int i = 0; i < visible(r); i += tokens) n += page(r, i) >= pool ? 1 : 0;
    }
    return n;
  }
};

void check(const Batch& in, int k, const std::string& what) {
  const auto want = in.expected(k);
  const DeviceArray<float> scores(in.scores);
  const DeviceArray<std::int32_t> lengths(in.lengths), table(in.table);
  for (const auto& kernel : kernels()) {
    if (in.stride < kernel.least || in.stride > kernel.most || in.tokens % kernel.tokens != 0) continue;
    const DeviceArray<std::int32_t> selected(std::vector<std::int32_t>(want.size(), 123456));
    const DeviceCounts<kvire::TopKCounts> counts;
    kvire::body::TopKArgs args;
    args.scores = scores.data();
    args.stride = in.stride;
    args.lengths = lengths.data();
    args.lengths_per_query = in.per_query && in.next_n > 1;
    args.batch = in.batch;
    args.next_n = in.next_n;
    args.k = k;
    args.selected = selected.data();
    args.page_table = table.data();
    args.max_pages = in.pages;
    args.tokens_per_page = in.tokens;
    args.page_count = Batch::pool;
    args.translate = true;
    cuda_ok(kernel.launch(args, counts.data(), false));
    CHECK_MESSAGE(selected.read() == want, kernel.name << ": " << what);
    CHECK_MESSAGE(counts.value().bad_pages == in.bad_pages(), kernel.name << ": " << what);
  }
}

}  // namespace

TEST_CASE("top-k divides by numbers known before the launch: exactly, wherever a quotient begins") {
  // What it computes grows with n, so it is right everywhere if it is right where quotients begin and just before.
  constexpr std::int64_t end = std::int64_t(1) << 31;
  for (const std::int64_t d : {1, 2, 3, 5, 6, 7, 48, 63, 64, 65, 96, 1000, 4095, 4096, 4097, 65535, 1000003, (1 << 30) - 1, 1 << 30, (1 << 30) + 1, 0x7FFFFFFF}) {
    const auto by = kvire::detail::topk::Divisor::of(d);
    const std::int64_t quotients = (end - 1) / d + 1, some = 1 << 20;
    std::int64_t wrong = by(0x7FFFFFFF) == 0x7FFFFFFF / d ? 0 : 1;
    for (std::int64_t q = 0; q < quotients; ++q) {
      if (q == some) q = std::max(q, quotients - some);
      wrong += by(std::uint32_t(q * d)) != q ? 1 : 0;
      wrong += q > 0 && by(std::uint32_t(q * d - 1)) != q - 1 ? 1 : 0;
    }
    CHECK_MESSAGE(wrong == 0, "by " << d);
  }
}

TEST_CASE("cuda top-k: pages and query tokens of any number, each query token's length its own or one less than the next's") {
  std::mt19937 random{7};
  for (const int stride : some({2400, 20064})) {
    for (const int tokens : some({50, 48, 20, 64})) {
      for (const int next_n : {3, 2, 1}) {
        for (const bool per_query : {false, true}) {
          if (per_query && next_n == 1) continue;
          const Batch in(next_n, per_query, stride, tokens, random);
          for (const int k : some({37, 512})) {
            check(in, k, std::to_string(tokens) + " tokens a page, " + std::to_string(next_n) + (per_query ? " lengths" : " query tokens of one length") + ", k " + std::to_string(k));
          }
        }
      }
    }
  }
}

TEST_CASE("cuda top-k: lengths below 0 are none, and those beyond the row end with it") {
  std::mt19937 random{8};
  for (const int stride : some({2400, 20064})) {
    for (const int next_n : {1, 3}) {
      for (const bool per_query : {false, true}) {
        Batch in(next_n, per_query, stride, 48, random);
        for (const std::int32_t length : some({-1, 0, 1, 2, 0x7FFFFFFF, stride - 1, stride + 1, stride + 2, -0x7FFFFFFF - 1})) {
          in.lengths.assign(in.lengths.size(), length);
          in.lengths[0] = stride / 3;  // what is beside it stays as it is
          check(in, 64, "length " + std::to_string(length) + ", " + std::to_string(next_n) + (per_query ? " lengths" : " query tokens of one length"));
        }
      }
    }
  }
}

TEST_CASE("cuda top-k: with overlap it goes by lengths and scores that the kernel before it writes last") {
  for (const int stride : {4096, 20064}) {
    const Rows now = make(Kind::normal, 4, stride - 7, 1), before = make(Kind::normal, 4, stride - 7, 2);
    // Lengths before the scores, in one array.
    const auto words = [](const Rows& in, std::vector<std::int32_t> lengths) {
      std::vector<std::uint32_t> all;
      for (const auto n : lengths) all.push_back(std::uint32_t(n));
      for (const float x : in.scores) all.push_back(kvire::bits_of(x));
      return all;
    };
    Rows in = now;
    in.lengths = {stride / 2, stride - 8, 31, stride - 7};
    const std::vector<std::int32_t> stale = {stride - 9, 517, stride / 3, 0};  // longer, and shorter
    const DeviceArray<std::uint32_t> written(words(now, in.lengths));
    const auto want = expected(in, 512);
    for (const auto& kernel : kernels()) {
      if (in.stride < kernel.least || in.stride > kernel.most) continue;
      const DeviceArray<std::uint32_t> memory(words(before, stale));
      const DeviceArray<std::int32_t> selected(std::vector<std::int32_t>(want.size(), 123456));
      kvire::body::TopKArgs args;
      args.lengths = reinterpret_cast<const std::int32_t*>(memory.data());
      args.scores = reinterpret_cast<const float*>(memory.data() + 4);
      args.stride = in.stride;
      args.batch = 4;
      args.k = 512;
      args.selected = selected.data();
      cuda_ok(cudaDeviceSynchronize());
      write_late<<<1, 256>>>(written.data(), memory.data(), std::int64_t(4 + in.scores.size()));
      cuda_ok(kernel.launch(args, nullptr, gpu_attribute(cudaDevAttrComputeCapabilityMajor) >= 9));
      CHECK_MESSAGE(selected.read() == want, kernel.name << " stride " << in.stride);
    }
  }
}

TEST_CASE("cuda top-k: what the kernels of aligned rows refuse, and that top_k takes it nevertheless") {
  const Rows in = make(Kind::normal, 2, 20057, 5);
  const DeviceRows rows(in, 512);
  const DeviceArray<std::int32_t> table(std::vector<std::int32_t>(2 * 1002, 1));
  const auto refused = [&](const char* what, auto change) {
    auto args = rows.args;
    change(args);
    CAPTURE(what);
    CHECK_FALSE(kvire::held_top_k_serves(args, 8));
    CHECK(kvire::launch_held_top_k(args, nullptr, nullptr, 8) == cudaErrorInvalidValue);
    CHECK_FALSE(kvire::grouped_top_k_serves(args));
    CHECK(kvire::launch_grouped_top_k(args, nullptr, nullptr, nullptr, false) == cudaErrorInvalidValue);
  };
  REQUIRE(kvire::held_top_k_serves(rows.args, 8));
  REQUIRE(kvire::grouped_top_k_serves(rows.args));
  refused("rows that start off 16 bytes", [](auto& a) { a.stride -= 2; });
  refused("scores off 16 bytes", [](auto& a) { ++a.scores; });
  refused("no k", [](auto& a) { a.k = 0; });
  refused("a large k", [](auto& a) { a.k = 2049; });
  refused("long rows", [](auto& a) { a.stride = 131076; });
  refused("pages of 50", [&](auto& a) { a.page_table = table.data(), a.max_pages = 402, a.tokens_per_page = 50; });
  for (const int blocks : {-1, 0, 1, 3, 5, 16}) {
    CHECK_FALSE(kvire::held_top_k_serves(rows.args, blocks));
    CHECK(kvire::launch_held_top_k(rows.args, nullptr, nullptr, blocks) == cudaErrorInvalidValue);
  }
  {
    auto args = rows.args;
    args.stride = 65540;
    CHECK_FALSE(kvire::held_top_k_serves(args, 2));
    args.stride = 20004;
    args.page_table = table.data();
    args.tokens_per_page = 20;  // a multiple of 4, but not of 16
    CHECK(kvire::held_top_k_serves(args, 8));
    CHECK_FALSE(kvire::grouped_top_k_serves(args));
  }

  auto stream = kvire::Stream<kvire::Cuda>::make().value();
  for (const int shift : {0, 1}) {
    for (const int stride : {20002, 20004}) {
      const DeviceArray<std::int32_t> lengths(std::vector<std::int32_t>{stride - 3}), selected(std::vector<std::int32_t>(512, 123456));
      kvire::top_k({rows.scores.data() + shift, {1, 1, stride}}, {lengths.data(), {1, 1}}, kvire::Tensor<std::int32_t, 3>{selected.data(), {1, 1, 512}}, stream).value();
      CHECK_MESSAGE(selected.read() == expected(in.scores.data() + shift, stride - 3, 512), "shift " << shift << " stride " << stride);
    }
  }
  const Rows even = make(Kind::normal, 2, 20000, 6);
  std::vector<std::int32_t> holes(2 * 401, 1);
  std::vector<char> masked(20000);
  for (int r = 0; r < 2; ++r) {
    for (int p = 3; p < 401; p += 7) holes[std::size_t(r * 401 + p)] = -1;
  }
  for (int i = 0; i < 20000; ++i) masked[std::size_t(i)] = i / 50 % 7 == 3;
  const DeviceRows device(even, 512);
  const DeviceArray<std::int32_t> pages(holes);
  kvire::CudaTopKOptions options;
  options.page_table = {pages.data(), {2, 401}};
  options.tokens_per_page = 50;
  kvire::top_k({device.scores.data(), {2, 1, even.stride}}, {device.lengths.data(), {2, 1}}, kvire::Tensor<std::int32_t, 3>{device.selected.data(), {2, 1, 512}}, stream, options).value();
  const auto got = device.selected.read();
  for (int r = 0; r < 2; ++r) {
    const auto want = expected(even.scores.data() + std::size_t(r) * std::size_t(even.stride), 20000, 512, false, masked);
    CHECK(std::equal(want.begin(), want.end(), got.begin() + std::ptrdiff_t(r) * 512));
  }
}
