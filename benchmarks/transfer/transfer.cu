// SPDX-License-Identifier: Apache-2.0
// Transfers of random pages and tokens between pinned host memory and the device, against one contiguous memcpy of the same bytes; what they cost a
// memory-bound kernel beside them; both directions at once; pinned memory; the host's time to submit. Every result is verified before it is timed.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <benchmarks/support/device_timing.cuh>
#include <kvire/codec/row.hpp>
#include <kvire/kernel/sm90_sparse_logits.cuh>
#include <kvire/layout/policies.hpp>
#include <kvire/pool/mirror.hpp>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/transfer/migrate.cuh>
#include <kvire/transfer/submit.cuh>

using namespace kvire;

namespace {

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

__global__ void fill_words(std::uint32_t* p, std::int64_t n, std::uint32_t seed, std::uint32_t mask = ~0U) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    p[i] = kvire_bench::mix(static_cast<std::uint64_t>(i) * 2654435761U + seed) & mask;
  }
}

__global__ void wait_nanoseconds(unsigned wanted) {
  const unsigned begin = ptx::nanoseconds();
  while (ptx::nanoseconds() - begin < wanted) {
  }
}

enum class Start {
  idle,    // on an idle stream: the host's time to submit counts too, since the first event has passed by then
  queued,  // behind work of the same kind on the stream, a kernel or a copy: the GPU's own time
};

constexpr std::int64_t pool_bytes = std::int64_t{1280} << 20;

// The two pools as bytes, and lists of ids in pinned memory.
struct Machine {
  Stream<Cuda> copies = Stream<Cuda>::make({.name = "copies"}).value();
  Stream<Cuda> back = Stream<Cuda>::make({.name = "back"}).value();
  Stream<Cuda> compute = Stream<Cuda>::make({.name = "compute"}).value();
  PinnedMemory pinned;
  std::byte* host = nullptr;
  std::byte* device = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  std::mt19937 random{1};

  Machine() {
    // The second allocation is timed: the first also starts threads and the driver.
    pinned.deallocate(pinned.allocate(64 << 20, 256).value(), 64 << 20, 256);
    const double t = seconds();
    host = pinned.allocate(pool_bytes, 256).value();
    std::printf("pinned memory: %.1f ms/GiB with %d cores\n", (seconds() - t) * 1e3 / (static_cast<double>(pool_bytes) / (1 << 30)), process_threads().threads());
    device = DeviceMemory().allocate(pool_bytes, 256).value();
    KVIRE_BENCH_CHECK(cudaEventCreate(&begin));
    KVIRE_BENCH_CHECK(cudaEventCreate(&end));
    scramble(1);
  }

  void scramble(std::uint32_t seed) {
    const cudaStream_t s = copies.native();
    fill_words<<<264, 512, 0, s>>>(reinterpret_cast<std::uint32_t*>(device), pool_bytes / 4, seed);
    KVIRE_BENCH_CHECK(cudaMemcpyAsync(host, device, pool_bytes, cudaMemcpyDefault, s));
    fill_words<<<264, 512, 0, s>>>(reinterpret_cast<std::uint32_t*>(device), pool_bytes / 4, seed + 77);
    KVIRE_BENCH_CHECK(cudaStreamSynchronize(s));
  }

  template <class Work>
  double microseconds(int repeats, Work work, Start start = Start::idle) {
    return microseconds(repeats, work, [&] {
      if (start == Start::queued) wait_nanoseconds<<<1, 1, 0, copies.native()>>>(60000);
    });
  }
  template <class Work, class Before>
  double microseconds(int repeats, Work work, Before before) {
    std::vector<double> times;
    for (int r = -1; r < repeats; ++r) {
      before();
      KVIRE_BENCH_CHECK(cudaEventRecord(begin, copies.native()));
      work();
      KVIRE_BENCH_CHECK(cudaEventRecord(end, copies.native()));
      KVIRE_BENCH_CHECK(cudaStreamSynchronize(copies.native()));
      float ms = 0;
      KVIRE_BENCH_CHECK(cudaEventElapsedTime(&ms, begin, end));
      if (r >= 0) times.push_back(static_cast<double>(ms) * 1e3);
    }
    return median(times);
  }

  std::vector<std::int32_t> ids(std::int64_t pages, std::int64_t n) {
    std::vector<std::int32_t> all(static_cast<std::size_t>(pages - 1));
    std::iota(all.begin(), all.end(), 1);
    std::shuffle(all.begin(), all.end(), random);
    all.resize(static_cast<std::size_t>(n));
    return all;
  }
};

// A list of random pages, ready to launch.
struct Pages {
  detail::CheckedIds<std::int32_t> ids;
  detail::Scratch scratch;
  detail::CopyRequest request;
  bool to_host = false;

  Pages(Machine& m, std::int64_t page, std::int64_t n, bool to_host_) : to_host(to_host_) {
    const std::int64_t pages = pool_bytes / page;
    ids.from = m.ids(pages, n);
    ids.to = m.ids(pages, n);
    const auto bytes = static_cast<std::size_t>(n) * 4;
    scratch = detail::Scratch::make(2 * bytes).value();
    std::memcpy(scratch.host(), ids.from.data(), bytes);
    std::memcpy(scratch.host() + bytes, ids.to.data(), bytes);
    const auto* list = reinterpret_cast<const std::int32_t*>(scratch.device());
    std::byte* const host = device_address(HostAddress{m.host}, "benchmark").value().value;
    request.list = {to_host ? host : m.device, to_host ? m.device : host, page, page, static_cast<std::int32_t>(pages), static_cast<std::int32_t>(pages), page};
    request.ids = {list, list + n};
    request.pages = n;
    request.known = &ids;
  }
  void launch(Stream<Cuda>& stream, const detail::CopyShape& shape) const { detail::launch_pages(stream, std::span(&request, 1), to_host, shape).value(); }
  void launch(Stream<Cuda>& stream) const { launch(stream, detail::CopyShape::of(Pace::full, to_host, request.list.page_bytes)); }

  bool right(const Machine& m) const {
    const auto page = static_cast<std::size_t>(request.list.page_bytes);
    std::vector<std::byte> bytes(page);
    const std::size_t step = std::max<std::size_t>(1, ids.to.size() / 61);
    for (std::size_t i = 0; i < ids.to.size(); i += step) {
      const std::byte* const on_device = m.device + static_cast<std::size_t>(to_host ? ids.from[i] : ids.to[i]) * page;
      const std::byte* const on_host = m.host + static_cast<std::size_t>(to_host ? ids.to[i] : ids.from[i]) * page;
      KVIRE_BENCH_CHECK(cudaMemcpy(bytes.data(), on_device, page, cudaMemcpyDefault));
      if (std::memcmp(bytes.data(), on_host, page) != 0) return false;
    }
    return true;
  }
};

double memcpy_time(Machine& m, std::int64_t bytes, bool to_host, int repeats, Start start = Start::idle) {
  const auto copy = [&](std::int64_t n) {
    KVIRE_BENCH_CHECK(cudaMemcpyAsync(to_host ? m.host : m.device, to_host ? m.device : m.host, static_cast<std::size_t>(n), cudaMemcpyDefault, m.copies.native()));
  };
  return m.microseconds(repeats, [&] { copy(bytes); }, [&] {
    if (start == Start::queued) copy(4 << 20);
  });
}

void pages_table(Machine& m) {
  std::printf(
      "\n| dir | page B | pages | one memcpy GB/s | kernel GB/s | %% of memcpy | queued: memcpy GB/s | kernel GB/s | %% of memcpy | SMs |\n|---|---|---|---|---|---|---|---|---|---|\n");
  std::uint32_t seed = 5;
  for (const std::int64_t page : {std::int64_t{1728}, std::int64_t{4352}, std::int64_t{8448}, std::int64_t{16384}, std::int64_t{37440}}) {
    for (const bool to_host : {false, true}) {
      m.scramble(seed += 100);
      for (const std::int64_t n : {256, 1024, 4096, 16384}) {
        if (n * page > pool_bytes - page) continue;
        const int repeats = n * page < (64 << 20) ? 15 : 7;
        const double one = memcpy_time(m, n * page, to_host, repeats);
        const double one_queued = memcpy_time(m, n * page, to_host, repeats, Start::queued);
        m.scramble(seed += 100);
        const Pages check(m, page, n, to_host);
        check.launch(m.copies);
        KVIRE_BENCH_CHECK(cudaStreamSynchronize(m.copies.native()));
        if (!check.right(m)) std::printf("WRONG\n");
        const double us = m.microseconds(repeats, [&] { check.launch(m.copies); });
        const double us_queued = m.microseconds(repeats, [&] { check.launch(m.copies); }, Start::queued);
        const double bytes = static_cast<double>(n * page);
        std::printf("| %s | %lld | %lld | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f | %d |\n", to_host ? "D2H" : "H2D", static_cast<long long>(page), static_cast<long long>(n),
                    bytes / one / 1e3, bytes / us / 1e3, 100 * one / us, bytes / one_queued / 1e3, bytes / us_queued / 1e3, 100 * one_queued / us_queued, detail::CopyShape::of(Pace::full, to_host, page).blocks);
        std::fflush(stdout);
      }
    }
  }
}

template <class P>
void tokens_row(Machine& m, const char* name, bool whole, bool to_host, std::int64_t n, int blocks) {
  const std::int64_t pages = pool_bytes / P::page_bytes;
  constexpr std::int64_t tokens = P::tokens_per_page;
  detail::CheckedIds<std::int64_t> ids;
  if (whole) {
    const auto a = m.ids(pages, n / tokens);
    const auto b = m.ids(pages, n / tokens);
    for (std::size_t i = 0; i < a.size(); ++i) {
      for (std::int64_t t = 0; t < tokens; ++t) {
        ids.from.push_back(a[i] * tokens + t);
        ids.to.push_back(b[i] * tokens + t);
      }
    }
  } else {
    std::vector<std::int64_t> slots(static_cast<std::size_t>((pages - 1) * tokens));
    std::iota(slots.begin(), slots.end(), tokens);
    for (auto* side : {&ids.from, &ids.to}) {
      for (std::int64_t i = 0; i < n; ++i) std::swap(slots[static_cast<std::size_t>(i)], slots[static_cast<std::size_t>(i) + m.random() % (slots.size() - static_cast<std::size_t>(i))]);
      side->assign(slots.begin(), slots.begin() + n);
    }
  }
  std::byte* const host = device_address(HostAddress{m.host}, "benchmark").value().value;
  using Engine = detail::TransferEngine<Cuda>;
  Engine::Piece piece;
  piece.info.direction = to_host ? CopyDirection::device_to_host : CopyDirection::host_to_device;
  const auto shared = std::make_shared<detail::CheckedIds<std::int64_t>>(ids);
  const auto count = static_cast<std::int32_t>(pages);
  Engine::template rows<P>(piece, PageView<P, Cuda>{to_host ? host : m.device, P::page_bytes, count},
                           ConstPageView<P, Cuda>(to_host ? m.device : host, P::page_bytes, count), shared, 0);
  const double one = memcpy_time(m, n * detail::token_bytes<P>, to_host, 9);
  // Ids are in pinned memory, as a transfer puts them there; whole pages were taken out of the runs.
  const std::size_t run_bytes = piece.runs ? piece.runs->size() * sizeof(detail::TokenRun) : 0;
  const std::size_t page_bytes = piece.pages ? piece.pages->to.size() * 4 : 0;
  auto scratch = detail::Scratch::make(run_bytes + 2 * page_bytes + 16).value();
  detail::CopyRequest request{piece.list, {}, 0, nullptr};
  if (piece.runs) std::memcpy(scratch.host(), piece.runs->data(), run_bytes);
  if (piece.pages) {
    std::memcpy(scratch.host() + run_bytes, piece.pages->from.data(), page_bytes);
    std::memcpy(scratch.host() + run_bytes + page_bytes, piece.pages->to.data(), page_bytes);
    const auto* list = reinterpret_cast<const std::int32_t*>(scratch.device() + run_bytes);
    request.ids = {list, list + page_bytes / 4};
    request.pages = static_cast<std::int64_t>(page_bytes / 4);
    request.known = piece.pages.get();
  }
  const double us = m.microseconds(7, [&] {
    auto shape = detail::CopyShape::of(Pace::full, to_host, P::page_bytes);
    shape.blocks = blocks;
    if (piece.pages) detail::launch_pages(m.copies, std::span(&request, 1), to_host, shape).value();
    if (piece.runs) {
      piece.launch_rows(m.copies, piece.list, reinterpret_cast<const detail::TokenRun*>(scratch.device()), static_cast<std::int64_t>(piece.runs->size()), piece.run_tokens, blocks)
          .value();
    }
  });
  const double bytes = static_cast<double>(n * detail::token_bytes<P>);
  std::printf("| %s | %s, %lld B | %lld%s | %.1f | %.1f | %.1f | %d |\n", to_host ? "D2H" : "H2D", name, static_cast<long long>(detail::token_bytes<P>),
              static_cast<long long>(n), whole ? ", whole pages" : "", bytes / one / 1e3, bytes / us / 1e3, 100 * one / us, blocks);
  std::fflush(stdout);
}

void tokens_table(Machine& m) {
  std::printf("\n| dir | token | tokens | one memcpy GB/s | kernel GB/s | %% of memcpy | SMs |\n|---|---|---|---|---|---|---|\n");
  for (const bool to_host : {false, true}) {
    tokens_row<Fp4WithScale<64, 128>>(m, "fp4 keys", false, to_host, 65536, 8);
    tokens_row<Fp8WithScale<64, 128>>(m, "fp8 keys", false, to_host, 65536, 8);
    tokens_row<Bf16Contiguous<64, 128>>(m, "bf16 keys", false, to_host, 65536, 8);
    tokens_row<preset::deepseek_v4::Latent<64>>(m, "V4 latent", false, to_host, 4096, 8);
    tokens_row<preset::deepseek_v4::Latent<64>>(m, "V4 latent", false, to_host, 65536, 8);
    tokens_row<preset::deepseek_v4::Latent<64>>(m, "V4 latent", false, to_host, 65536, 4);
    tokens_row<preset::deepseek_v4::Latent<64>>(m, "V4 latent", false, to_host, 65536, 16);
    tokens_row<preset::deepseek_v4::Latent<64>>(m, "V4 latent", true, to_host, 65536, 4);
    tokens_row<preset::deepseek_v3_2::Latent<64>>(m, "V3.2 latent", false, to_host, 65536, 8);
    tokens_row<Bf16Contiguous<64, 320>>(m, "640 B rows", false, to_host, 65536, 8);
  }
}

// The fp8 logits of 64 contexts of 32k tokens: bound by memory, on every multiprocessor, each with a fixed share of the work, so that the slowest decides.
class Logits {
 public:
  using P = Fp8WithScale<64, 128>;
  static constexpr std::int64_t pages_a_launch = 32768;

  explicit Logits(Machine& m) {
    constexpr std::int64_t bytes = std::int64_t{1100} << 20;
    constexpr int batch = 64;
    constexpr int width = static_cast<int>(pages_a_launch) / batch;
    constexpr std::uint32_t finite = 0x3F3F3F3F;  // of every format that bytes of a page may be in
    const auto words = [](std::int64_t n, std::uint32_t mask) {
      auto* const p = kvire_bench::device_array<std::uint32_t>(n);
      fill_words<<<264, 512>>>(p, n, 9, mask);
      return p;
    };
    const auto upload = [](const std::vector<std::int32_t>& v) {
      auto* const p = kvire_bench::device_array<std::int32_t>(static_cast<std::int64_t>(v.size()));
      KVIRE_BENCH_CHECK(cudaMemcpy(p, v.data(), v.size() * 4, cudaMemcpyHostToDevice));
      return p;
    };
    std::vector<std::int32_t> order(static_cast<std::size_t>(bytes / P::page_bytes));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), m.random);
    sets_ = static_cast<int>(order.size() / pages_a_launch);
    table_ = upload(order);
    arguments_.pages = reinterpret_cast<const std::byte*>(words(bytes / 4, finite));
    arguments_.page_stride = P::page_bytes;
    arguments_.page_count = static_cast<std::int32_t>(order.size());
    arguments_.batch = batch;
    arguments_.queries = words(batch * 64 * 128 / 4, finite);
    arguments_.weights = reinterpret_cast<const float*>(words(batch * 64, finite));
    arguments_.table_stride = arguments_.table_width = width;
    arguments_.lengths = upload(std::vector<std::int32_t>(batch, width * P::tokens_per_page));
    arguments_.logits = kvire_bench::device_array<float>(pages_a_launch * P::tokens_per_page);
    arguments_.logits_stride = width * P::tokens_per_page;
    KVIRE_BENCH_CHECK(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, m.compute.device()));
  }
  void launch(int i, cudaStream_t stream) {
    arguments_.page_table = table_ + i % sets_ * pages_a_launch;
    KVIRE_BENCH_CHECK((sm90::launch_logits<P, Element::e4m3, 64, 1>(arguments_, sms_, stream)));
  }

 private:
  sm90::LogitsArguments arguments_;
  std::int32_t* table_ = nullptr;
  int sets_ = 0;
  int sms_ = 0;
};

void beside(Machine& m, bool shapes) {
  constexpr int page = 8448;
  constexpr int launches = 140;
  Logits logits(m);
  std::vector<cudaEvent_t> marks(launches + 1);
  for (auto& mark : marks) KVIRE_BENCH_CHECK(cudaEventCreate(&mark));
  const auto compute = [&](int n) {
    KVIRE_BENCH_CHECK(cudaEventRecord(marks[0], m.compute.native()));
    for (int i = 0; i < n; ++i) {
      logits.launch(i, m.compute.native());
      KVIRE_BENCH_CHECK(cudaEventRecord(marks[static_cast<std::size_t>(i) + 1], m.compute.native()));
    }
  };
  const auto times = [&](int first, int last, float limit) {
    std::vector<double> all;
    for (int i = first; i < last; ++i) {
      float until = 0;
      float ms = 0;
      if (limit > 0) KVIRE_BENCH_CHECK(cudaEventElapsedTime(&until, m.begin, marks[static_cast<std::size_t>(i) + 1]));
      if (limit > 0 && until > limit) break;
      KVIRE_BENCH_CHECK(cudaEventElapsedTime(&ms, marks[static_cast<std::size_t>(i)], marks[static_cast<std::size_t>(i) + 1]));
      all.push_back(static_cast<double>(ms) * 1e3);
    }
    return median(all);
  };
  compute(launches);
  KVIRE_BENCH_CHECK(cudaDeviceSynchronize());
  const double alone = times(5, launches, 0);
  std::printf("\nfp8 logits of 64 x 32k: %.1f us alone, %.0f GB/s\n\n| beside it | its time, us | slowdown | transfer GB/s |\n|---|---|---|---|\n", alone,
              static_cast<double>(Logits::pages_a_launch) * page / alone / 1e3);
  constexpr std::int64_t n = 65536;
  const auto row = [&](const char* name, auto start) {
    KVIRE_BENCH_CHECK(cudaDeviceSynchronize());
    KVIRE_BENCH_CHECK(cudaEventRecord(m.begin, m.copies.native()));
    start();
    KVIRE_BENCH_CHECK(cudaEventRecord(m.end, m.copies.native()));
    compute(launches);
    KVIRE_BENCH_CHECK(cudaDeviceSynchronize());
    float ms = 0;
    KVIRE_BENCH_CHECK(cudaEventElapsedTime(&ms, m.begin, m.end));
    const double us = times(2, launches, ms);
    std::printf("| %s | %.1f | %.3f | %.1f |\n", name, us, us / alone, static_cast<double>(n) * page / ms / 1e6);
    std::fflush(stdout);
  };
  for (const bool to_host : {false, true}) {
    row(to_host ? "D2H, copy engine, contiguous" : "H2D, copy engine, contiguous", [&] {
      KVIRE_BENCH_CHECK(cudaMemcpyAsync(to_host ? m.host : m.device, to_host ? m.device : m.host, static_cast<std::size_t>(n * page), cudaMemcpyDefault, m.copies.native()));
    });
    const Pages list(m, page, n, to_host);
    row(to_host ? "D2H, kernel, random pages" : "H2D, kernel, random pages", [&] { list.launch(m.copies); });
    row(to_host ? "D2H, kernel, random pages, gentle" : "H2D, kernel, random pages, gentle", [&] { list.launch(m.copies, detail::CopyShape::of(Pace::gentle, to_host, page)); });
    if (!shapes) continue;
    // What the gentle shape was chosen from.
    for (const int blocks : {8, 16, 24, 33, 66}) {
      for (const std::int64_t chunk : {33, 66}) {
        for (const int slots : {2, 3, 4}) {
          for (const double rate : {0.0, 48.5, 49.5, 50.2}) {
            auto shape = detail::CopyShape::of(Pace::gentle, to_host, page);
            shape.blocks = blocks;
            shape.chunk_bytes = chunk * 128;
            shape.slots = slots;
            shape.gigabytes_per_second = rate;
            char name[120];
            std::snprintf(name, sizeof name, "%s, %d blocks, %d chunks of %d B each, at most %.1f GB/s", to_host ? "D2H" : "H2D", blocks, slots, static_cast<int>(chunk * 128), rate);
            row(name, [&] { list.launch(m.copies, shape); });
          }
        }
      }
    }
  }
}

void both(Machine& m) {
  constexpr std::int64_t page = 8448;
  constexpr std::int64_t n = 65536;
  Pages in(m, page, n, false);
  Pages out(m, page, n, true);
  std::printf("\n| both directions at once | sum GB/s | in, until its end | out, until its end |\n|---|---|---|---|\n");
  cudaEvent_t marks[4];
  for (auto& mark : marks) KVIRE_BENCH_CHECK(cudaEventCreate(&mark));
  const auto run = [&](const char* name, auto first, auto second) {
    std::vector<double> sum;
    std::vector<double> rates[2];
    for (int r = 0; r < 3; ++r) {
      KVIRE_BENCH_CHECK(cudaDeviceSynchronize());
      const double t = seconds();
      KVIRE_BENCH_CHECK(cudaEventRecord(marks[0], m.copies.native()));
      first();
      KVIRE_BENCH_CHECK(cudaEventRecord(marks[1], m.copies.native()));
      KVIRE_BENCH_CHECK(cudaEventRecord(marks[2], m.back.native()));
      second();
      KVIRE_BENCH_CHECK(cudaEventRecord(marks[3], m.back.native()));
      KVIRE_BENCH_CHECK(cudaDeviceSynchronize());
      const auto bytes = static_cast<double>(n * page);
      sum.push_back(2.0 * bytes / (seconds() - t) / 1e9);
      for (int i = 0; i < 2; ++i) {
        float ms = 0;
        KVIRE_BENCH_CHECK(cudaEventElapsedTime(&ms, marks[2 * i], marks[2 * i + 1]));
        rates[i].push_back(bytes / ms / 1e6);
      }
    }
    std::printf("| %s | %.1f | %.1f | %.1f |\n", name, median(sum), median(rates[0]), median(rates[1]));
  };
  const auto engine = [&](Stream<Cuda>& s, bool to_host) {
    const auto half = static_cast<std::size_t>(pool_bytes / 2);
    std::byte* const h = m.host + (to_host ? half : 0);
    std::byte* const d = m.device + (to_host ? half : 0);
    KVIRE_BENCH_CHECK(cudaMemcpyAsync(to_host ? h : d, to_host ? d : h, static_cast<std::size_t>(n * page), cudaMemcpyDefault, s.native()));
  };
  run("copy engines, contiguous", [&] { engine(m.copies, false); }, [&] { engine(m.back, true); });
  run("kernels, random pages", [&] { in.launch(m.copies); }, [&] { out.launch(m.back); });
  const auto gentle = detail::CopyShape::of(Pace::gentle, true, page);
  run("kernels, random pages, backup gentle", [&] { in.launch(m.copies); }, [&] { out.launch(m.back, gentle); });
  run("copy engine in, kernel out", [&] { engine(m.copies, false); }, [&] { out.launch(m.back); });
  run("copy engine in, kernel out gentle", [&] { engine(m.copies, false); }, [&] { out.launch(m.back, gentle); });
  run("kernel in, copy engine out", [&] { in.launch(m.copies); }, [&] { engine(m.back, true); });
  for (const double rate : {38.0, 40.0, 42.0}) {
    auto paced = detail::CopyShape::of(Pace::full, true, page);
    paced.gigabytes_per_second = rate;
    run(("kernels, random pages, backup at " + std::to_string(static_cast<int>(rate)) + " GB/s at most").c_str(), [&] { in.launch(m.copies); }, [&] { out.launch(m.back, paced); });
    auto slow = gentle;
    slow.gigabytes_per_second = rate;
    run(("kernels, random pages, gentle backup at " + std::to_string(static_cast<int>(rate)) + " GB/s at most").c_str(), [&] { in.launch(m.copies); }, [&] { out.launch(m.back, slow); });
  }
}

// Eight layers in one launch, from and to pools that lie layer by layer or page by page.
void reorder_table(Machine& m) {
  constexpr std::int64_t layers = 8;
  std::printf("\n| dir | page B | pages x layers | same arrangement GB/s | page first on the host GB/s | %% of it |\n|---|---|---|---|---|---|\n");
  for (const std::int64_t page : {std::int64_t{8448}, std::int64_t{16384}}) {
    for (const bool to_host : {false, true}) {
      const std::int64_t pages = pool_bytes / page / layers;
      const std::int64_t n = 2048;
      Pages list(m, page, n, to_host);
      list.ids.from = m.ids(pages, n);
      list.ids.to = m.ids(pages, n);
      std::memcpy(list.scratch.host(), list.ids.from.data(), n * 4);
      std::memcpy(list.scratch.host() + n * 4, list.ids.to.data(), n * 4);
      const auto time = [&](bool page_first) {
        std::vector<detail::CopyRequest> requests;
        for (std::int64_t layer = 0; layer < layers; ++layer) {
          auto request = list.request;
          request.list.from_pages = request.list.to_pages = static_cast<std::int32_t>(pages);
          const std::int64_t host = layer * (page_first ? page : pages * page);
          const std::int64_t device = layer * pages * page;
          request.list.from += to_host ? device : host;
          request.list.to += to_host ? host : device;
          if (page_first) (to_host ? request.list.to_stride : request.list.from_stride) = layers * page;
          requests.push_back(request);
        }
        return m.microseconds(9, [&] { detail::launch_pages(m.copies, requests, to_host, detail::CopyShape::of(Pace::full, to_host, page)).value(); });
      };
      const double same = time(false);
      const double other = time(true);
      const auto bytes = static_cast<double>(n * layers * page);
      std::printf("| %s | %lld | %lld x %lld | %.1f | %.1f | %.1f |\n", to_host ? "D2H" : "H2D", static_cast<long long>(page), static_cast<long long>(n), static_cast<long long>(layers),
                  bytes / same / 1e3, bytes / other / 1e3, 100 * same / other);
    }
  }
}

// Pages rewritten on their way, against the plain copy of as many pages of the layout that crosses the link.
template <class From, class To>
void migrate_row(Machine& m, bool to_host) {
  constexpr std::int64_t n = 8192;
  const std::int64_t on_link = to_host ? To::page_bytes : From::page_bytes;
  const int blocks = detail::PieceQueue::migrate_blocks(to_host);
  const Pages plain(m, on_link, n, to_host);
  const double copy = m.microseconds(7, [&] { plain.launch(m.copies); });
  const Pages pages(m, std::max(From::page_bytes, To::page_bytes), n, to_host);
  auto list = pages.request.list;
  list.from_stride = From::page_bytes;
  list.to_stride = To::page_bytes;
  list.page_bytes = To::page_bytes;
  const auto launch = [&] { detail::launch_migrate_pages<From, To>(m.copies, list, pages.request.ids, n, {}, blocks).value(); };
  m.scramble(static_cast<std::uint32_t>(on_link));
  launch();
  KVIRE_BENCH_CHECK(cudaStreamSynchronize(m.copies.native()));
  int wrong = 0;
  std::vector<std::byte> from(static_cast<std::size_t>(From::page_bytes));
  std::vector<std::byte> to(static_cast<std::size_t>(To::page_bytes));
  std::vector<std::byte> want(to.size());
  for (std::size_t i = 0; i < static_cast<std::size_t>(n); i += 127) {
    const auto from_at = static_cast<std::size_t>(pages.ids.from[i]) * from.size();
    const auto to_at = static_cast<std::size_t>(pages.ids.to[i]) * to.size();
    KVIRE_BENCH_CHECK(cudaMemcpy(from.data(), (to_host ? m.device : m.host) + from_at, from.size(), cudaMemcpyDefault));
    KVIRE_BENCH_CHECK(cudaMemcpy(to.data(), (to_host ? m.host : m.device) + to_at, to.size(), cudaMemcpyDefault));
    for (int t = 0; t < From::tokens_per_page; ++t) {
      float x[From::dim];
      decode_row<From>(from.data(), t, x);
      encode_row<To>(x, want.data(), t);
    }
    wrong += want != to;
  }
  const double us = m.microseconds(7, launch);
  const auto bytes = static_cast<double>(n * on_link);
  std::printf("| %s | %s | %s | %d | %.1f | %.1f | %.1f%s |\n", to_host ? "D2H" : "H2D", From::name, To::name, blocks, bytes / copy / 1e3, bytes / us / 1e3, 100 * copy / us,
              wrong > 0 ? " WRONG" : "");
  std::fflush(stdout);
}

void migrate_table(Machine& m) {
  using Fp8 = Fp8WithScale<64, 128>;
  using Interleaved = Fp8WithScaleInterleaved<64, 128>;
  using Bf16 = Bf16Contiguous<64, 128>;
  using Fp4 = Fp4WithScale<64, 128>;
  std::printf("\n| dir | from | to | blocks | plain copy over the link GB/s | migrate GB/s | %% of it |\n|---|---|---|---|---|---|---|\n");
  for (const bool to_host : {false, true}) {
    migrate_row<Bf16, Fp8>(m, to_host);
    migrate_row<Fp8, Bf16>(m, to_host);
    migrate_row<Fp8, Interleaved>(m, to_host);
    migrate_row<Bf16, Fp4>(m, to_host);
    migrate_row<Fp4, Fp8>(m, to_host);
  }
}

void submit(Machine& m) {
  for (const bool to_host : {false, true}) {
    const Pages one(m, 8448, 1, to_host);
    std::printf("%s one page of 8448 B, event to event: kernel %.1f us, memcpy %.1f us\n", to_host ? "D2H" : "H2D", m.microseconds(31, [&] { one.launch(m.copies); }),
                memcpy_time(m, 8448, to_host, 31));
  }
  using P = Fp8WithScale<64, 128>;
  auto device = DevicePool<P, Cuda>::make({.pages = 2049}).value();
  auto host = mirror_of(device, 2049).value();
  auto d = device.allocate(1024).value();
  auto h = host.allocate(1024).value();
  auto* lists = kvire_bench::device_array<std::int32_t>(2048);
  const auto a = m.ids(1025, 1024);
  const auto b = m.ids(1025, 1024);
  KVIRE_BENCH_CHECK(cudaMemcpy(lists, a.data(), 4096, cudaMemcpyHostToDevice));
  KVIRE_BENCH_CHECK(cudaMemcpy(lists + 1024, b.data(), 4096, cudaMemcpyHostToDevice));
  auto mover = PageMover<P>::make(host, device, h, d, true, m.copies).value();
  std::vector<double> all;
  for (int r = 0; r < 60; ++r) {
    const double t = seconds();
    mover.submit({lists, lists + 1024}, 1024, m.copies).value();
    if (r >= 10) all.push_back((seconds() - t) * 1e6);
    if (r % 10 == 9) KVIRE_BENCH_CHECK(cudaStreamSynchronize(m.copies.native()));
  }
  KVIRE_BENCH_CHECK(cudaStreamSynchronize(m.copies.native()));
  std::printf("\nsubmit, 1,024 pages, ids on the device: %.1f us of host time\n", median(all));
  std::vector<double> plans;
  for (int r = 0; r < 20; ++r) {
    mover = PageMover<P>::make(host, device, {}, {}, true, m.copies).value();
    const double t = seconds();
    auto ticket = load(host, device, plan(h, d), m.copies).value();
    plans.push_back((seconds() - t) * 1e6);
    ticket.wait().value();
  }
  std::printf("load, 1,024 pages by a checked plan with a ticket: %.1f us of host time\n", median(plans));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  cudaDeviceProp properties{};
  KVIRE_BENCH_CHECK(cudaGetDeviceProperties(&properties, 0));
  int driver = 0;
  int runtime = 0;
  KVIRE_BENCH_CHECK(cudaDriverGetVersion(&driver));
  KVIRE_BENCH_CHECK(cudaRuntimeGetVersion(&runtime));
  std::printf("%s, driver for CUDA %d, runtime %d\n", properties.name, driver, runtime);
  Machine m;
  if (what == "all" || what == "pages") pages_table(m);
  if (what == "all" || what == "tokens") tokens_table(m);
  if (what == "all" || what == "reorder") reorder_table(m);
  if (what == "all" || what == "migrate") migrate_table(m);
  if (what == "all" || what == "beside" || what == "beside_shapes") beside(m, what == "beside_shapes");
  if (what == "all" || what == "both") both(m);
  if (what == "all" || what == "submit") submit(m);
  return 0;
}
