// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include <benchmarks/support/device_timing.cuh>
#include <kvire/kernel/sm90_sparse_logits.cuh>
#include <kvire/layout/policies.hpp>
#include <kvire/transfer/transfer.cuh>

// What benchmarks of transfers share: two pools of bytes, lists of random pages and tokens ready to launch, and a memory-bound kernel beside them.

namespace kvire_bench {

using namespace kvire;

inline double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

static __global__ void fill_words(std::uint32_t* p, std::int64_t n, std::uint32_t seed, std::uint32_t mask = ~0U) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    p[i] = mix(static_cast<std::uint64_t>(i) * 2654435761U + seed) & mask;
  }
}

static __global__ void wait_nanoseconds(unsigned wanted) {
  const unsigned begin = ptx::nanoseconds();
  while (ptx::nanoseconds() - begin < wanted) {
  }
}

enum class Start {
  idle,    // on an idle stream: the host's time to submit counts too, since the first event has passed by then
  queued,  // behind work of the same kind on the stream, a kernel or a copy: the GPU's own time
};

inline constexpr std::int64_t pool_bytes = std::int64_t{1280} << 20;

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
struct RandomPages {
  detail::CheckedIds<std::int32_t> ids;
  detail::Scratch scratch;
  detail::CopyRequest request;
  bool to_host = false;

  RandomPages(Machine& m, std::int64_t page, std::int64_t n, bool to_host_) : to_host(to_host_) {
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
  void launch(Stream<Cuda>& stream, const detail::CopyShape& shape) const {
    detail::CopyRequest mine = request;
    mine.known = &ids;  // the list may have moved
    detail::launch_pages(stream, std::span(&mine, 1), to_host, shape).value();
  }
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

// Random tokens of one layer, ready to launch; `whole`: pages of them, token after token.
template <class P>
struct RandomTokens {
  detail::TransferEngine<Cuda>::Piece piece;
  std::shared_ptr<detail::CheckedIds<std::int64_t>> ids = std::make_shared<detail::CheckedIds<std::int64_t>>();
  detail::Scratch scratch;
  detail::CopyRequest request;  // pages that came whole
  bool to_host = false;

  RandomTokens(Machine& m, std::int64_t n, bool to_host_, bool whole = false) : to_host(to_host_) {
    const std::int64_t pages = pool_bytes / P::page_bytes;
    constexpr std::int64_t tokens = P::tokens_per_page;
    if (whole) {
      for (auto* side : {&ids->from, &ids->to}) {
        for (const std::int32_t page : m.ids(pages, n / tokens)) {
          for (std::int64_t t = 0; t < tokens; ++t) side->push_back(page * tokens + t);
        }
      }
    } else {
      std::vector<std::int64_t> slots(static_cast<std::size_t>((pages - 1) * tokens));
      std::iota(slots.begin(), slots.end(), tokens);
      for (auto* side : {&ids->from, &ids->to}) {
        for (std::int64_t i = 0; i < n; ++i) std::swap(slots[static_cast<std::size_t>(i)], slots[static_cast<std::size_t>(i) + m.random() % (slots.size() - static_cast<std::size_t>(i))]);
        side->assign(slots.begin(), slots.begin() + n);
      }
    }
    std::byte* const host = device_address(HostAddress{m.host}, "benchmark").value().value;
    piece.info.direction = to_host ? CopyDirection::device_to_host : CopyDirection::host_to_device;
    const auto count = static_cast<std::int32_t>(pages);
    detail::TransferEngine<Cuda>::rows<P>(piece, PageView<P, Cuda>{to_host ? host : m.device, P::page_bytes, count},
                                          ConstPageView<P, Cuda>(to_host ? m.device : host, P::page_bytes, count), ids, 0);
    // Ids are in pinned memory, as a transfer puts them there; whole pages were taken out of the runs.
    const std::size_t run_bytes = piece.runs ? piece.runs->size() * sizeof(detail::TokenRun) : 0;
    const std::size_t page_bytes = piece.pages ? piece.pages->to.size() * 4 : 0;
    scratch = detail::Scratch::make(run_bytes + 2 * page_bytes + 16).value();
    if (piece.runs) std::memcpy(scratch.host(), piece.runs->data(), run_bytes);
    if (!piece.pages) return;
    std::memcpy(scratch.host() + run_bytes, piece.pages->from.data(), page_bytes);
    std::memcpy(scratch.host() + run_bytes + page_bytes, piece.pages->to.data(), page_bytes);
    const auto* list = reinterpret_cast<const std::int32_t*>(scratch.device() + run_bytes);
    request = {piece.list, {list, list + page_bytes / 4}, static_cast<std::int64_t>(page_bytes / 4), piece.pages.get()};
  }

  void launch(Stream<Cuda>& stream, int blocks = 8) const {
    if (piece.pages) {
      auto shape = detail::CopyShape::of(Pace::full, to_host, P::page_bytes);
      shape.blocks = blocks;
      detail::launch_pages(stream, std::span(&request, 1), to_host, shape).value();
    }
    if (piece.runs) {
      piece.launch_rows(stream, piece.list, reinterpret_cast<const detail::TokenRun*>(scratch.device()), static_cast<std::int64_t>(piece.runs->size()), piece.run_tokens, blocks).value();
    }
  }

  bool right(const Machine& m) const {
    const std::size_t step = std::max<std::size_t>(1, ids->to.size() / 61);
    bool same = true;
    for (std::size_t i = 0; i < ids->to.size(); i += step) {
      const std::int64_t at[] = {to_host ? ids->from[i] : ids->to[i], to_host ? ids->to[i] : ids->from[i]};
      [&]<int... Plane>(std::integer_sequence<int, Plane...>) { ((same = same && same_row<Plane>(m, at[0], at[1])), ...); }(std::make_integer_sequence<int, P::plane_count>{});
    }
    return same;
  }

 private:
  template <int Plane>
  static bool same_row(const Machine& m, std::int64_t on_device, std::int64_t on_host) {
    const auto at = [](std::int64_t slot) {
      constexpr std::int64_t tokens = P::tokens_per_page;
      return slot / tokens * P::page_bytes + P::template plane_offset<Plane>() + P::template row_bytes<Plane>() * (slot % tokens);
    };
    std::vector<std::byte> bytes(static_cast<std::size_t>(P::template row_bytes<Plane>()));
    KVIRE_BENCH_CHECK(cudaMemcpy(bytes.data(), m.device + at(on_device), bytes.size(), cudaMemcpyDefault));
    return std::memcmp(bytes.data(), m.host + at(on_host), bytes.size()) == 0;
  }
};

inline double memcpy_time(Machine& m, std::int64_t bytes, bool to_host, int repeats, Start start = Start::idle) {
  const auto copy = [&](std::int64_t n) {
    KVIRE_BENCH_CHECK(cudaMemcpyAsync(to_host ? m.host : m.device, to_host ? m.device : m.host, static_cast<std::size_t>(n), cudaMemcpyDefault, m.copies.native()));
  };
  return m.microseconds(repeats, [&] { copy(bytes); }, [&] {
    if (start == Start::queued) copy(4 << 20);
  });
}

/// One contiguous copy within a half of the pools that belongs to its direction.
inline void memcpy_half(Machine& m, Stream<Cuda>& stream, std::int64_t bytes, bool to_host) {
  const std::int64_t half = to_host ? pool_bytes / 2 : 0;
  KVIRE_BENCH_CHECK(cudaMemcpyAsync((to_host ? m.host : m.device) + half, (to_host ? m.device : m.host) + half, static_cast<std::size_t>(bytes), cudaMemcpyDefault, stream.native()));
}

/// Median microseconds until both have ended, `first` queueing on m.copies and `second` on m.back; they start together, when both are queued.
template <class First, class Second>
double together(Machine& m, int repeats, First first, Second second) {
  cudaEvent_t back = nullptr;
  KVIRE_BENCH_CHECK(cudaEventCreateWithFlags(&back, cudaEventDisableTiming));
  std::vector<double> times;
  for (int r = -1; r < repeats; ++r) {
    wait_nanoseconds<<<1, 1, 0, m.copies.native()>>>(100000);
    KVIRE_BENCH_CHECK(cudaEventRecord(m.begin, m.copies.native()));
    KVIRE_BENCH_CHECK(cudaStreamWaitEvent(m.back.native(), m.begin));
    first();
    second();
    KVIRE_BENCH_CHECK(cudaEventRecord(back, m.back.native()));
    KVIRE_BENCH_CHECK(cudaStreamWaitEvent(m.copies.native(), back));
    KVIRE_BENCH_CHECK(cudaEventRecord(m.end, m.copies.native()));
    KVIRE_BENCH_CHECK(cudaStreamSynchronize(m.copies.native()));
    float ms = 0;
    KVIRE_BENCH_CHECK(cudaEventElapsedTime(&ms, m.begin, m.end));
    if (r >= 0) times.push_back(static_cast<double>(ms) * 1e3);
  }
  KVIRE_BENCH_CHECK(cudaEventDestroy(back));
  return median(times);
}

// The logits of 64 contexts of 32k tokens: bound by memory (fp8, one query token), on every multiprocessor, each with a fixed share of the work, so that the
// slowest decides. Those of two query tokens, and of fp4 keys, are CTAs that have a multiprocessor each.
template <class Keys = Fp8WithScale<64, 128>, int QueryTokens = 1, class Shape = sm90::DefaultLogitsShape<Keys, Element::e4m3, 64, QueryTokens>>
class Logits {
 public:
  using P = Keys;
  static constexpr int query_tokens = QueryTokens;
  static constexpr std::int64_t pages_a_launch = 32768;

  explicit Logits(Machine& m) {
    constexpr std::int64_t bytes = std::int64_t{1100} << 20;
    constexpr int batch = 64;
    constexpr int width = static_cast<int>(pages_a_launch) / batch;
    constexpr std::uint32_t finite = 0x3F3F3F3F;  // of every format that bytes of a page may be in
    constexpr std::uint32_t near = P::template element_of<role::Value> == Element::e2m1 ? 0x07070707 : finite;  // scales of fp4 keys are, mostly
    const auto words = [](std::int64_t n, std::uint32_t mask) {
      auto* const p = device_array<std::uint32_t>(n);
      fill_words<<<264, 512>>>(p, n, 9, mask);
      return p;
    };
    const auto upload = [](const std::vector<std::int32_t>& v) {
      auto* const p = device_array<std::int32_t>(static_cast<std::int64_t>(v.size()));
      KVIRE_BENCH_CHECK(cudaMemcpy(p, v.data(), v.size() * 4, cudaMemcpyHostToDevice));
      return p;
    };
    std::vector<std::int32_t> order(static_cast<std::size_t>(bytes / P::page_bytes));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), m.random);
    sets_ = static_cast<int>(order.size() / pages_a_launch);
    table_ = upload(order);
    arguments_.pages = reinterpret_cast<const std::byte*>(words(bytes / 4, near));
    arguments_.page_stride = P::page_bytes;
    arguments_.page_count = static_cast<std::int32_t>(order.size());
    arguments_.batch = batch;
    arguments_.queries = words(QueryTokens * batch * 64 * 128 / 4, finite);
    arguments_.weights = reinterpret_cast<const float*>(words(QueryTokens * batch * 64, finite));
    arguments_.table_stride = arguments_.table_width = width;
    arguments_.lengths = upload(std::vector<std::int32_t>(batch, width * P::tokens_per_page));
    arguments_.logits = device_array<float>(QueryTokens * pages_a_launch * P::tokens_per_page);
    arguments_.logits_stride = width * P::tokens_per_page;
    KVIRE_BENCH_CHECK(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, m.compute.device()));
  }
  /// Multiprocessors that the kernel takes: all, unless told otherwise.
  void sms(int n) { sms_ = n; }
  void launch(int i, cudaStream_t stream) {
    arguments_.page_table = table_ + i % sets_ * pages_a_launch;
    KVIRE_BENCH_CHECK((sm90::launch_logits<P, Element::e4m3, 64, QueryTokens, Shape>(arguments_, sms_, stream)));
  }

 private:
  sm90::LogitsArguments arguments_;
  std::int32_t* table_ = nullptr;
  int sets_ = 0;
  int sms_ = 0;
};

// Times that kernel, launched again and again, while something else runs.
template <class Kernel = Logits<>>
class Beside {
 public:
  static constexpr int launches = 140;

  explicit Beside(Machine& m) : m_(m), logits_(m), marks_(launches + 1) {
    for (auto& mark : marks_) KVIRE_BENCH_CHECK(cudaEventCreate(&mark));
    KVIRE_BENCH_CHECK(cudaDeviceGetAttribute(&all_sms_, cudaDevAttrMultiProcessorCount, m.compute.device()));
    compute(launches);
    KVIRE_BENCH_CHECK(cudaDeviceSynchronize());
    alone_ = times(5, launches, 0);
  }
  double alone() const { return alone_; }

  struct Row {
    double us = 0;  // of the kernel, for those that ended while `work` ran
    double ms = 0;  // of `work`
  };
  /// `work` queues on m.copies; both start together, when all of it is queued.
  /// `sms`: multiprocessors that the kernel takes.
  template <class Work>
  Row run(int n, Work work, int sms = 1 << 20) {
    logits_.sms(std::min(sms, all_sms_));
    KVIRE_BENCH_CHECK(cudaDeviceSynchronize());
    wait_nanoseconds<<<1, 1, 0, m_.copies.native()>>>(8000000);
    KVIRE_BENCH_CHECK(cudaEventRecord(m_.begin, m_.copies.native()));
    work();
    KVIRE_BENCH_CHECK(cudaEventRecord(m_.end, m_.copies.native()));
    KVIRE_BENCH_CHECK(cudaStreamWaitEvent(m_.compute.native(), m_.begin));
    compute(n);
    KVIRE_BENCH_CHECK(cudaDeviceSynchronize());
    float ms = 0;
    KVIRE_BENCH_CHECK(cudaEventElapsedTime(&ms, m_.begin, m_.end));
    return {times(2, n, ms), static_cast<double>(ms)};
  }
  /// Multiprocessors of the device, but for so many.
  int all_but(int free) const { return all_sms_ - free; }

 private:
  void compute(int n) {
    KVIRE_BENCH_CHECK(cudaEventRecord(marks_[0], m_.compute.native()));
    for (int i = 0; i < n; ++i) {
      logits_.launch(i, m_.compute.native());
      KVIRE_BENCH_CHECK(cudaEventRecord(marks_[static_cast<std::size_t>(i) + 1], m_.compute.native()));
    }
  }
  double times(int first, int last, float limit) {
    std::vector<double> all;
    for (int i = first; i < last; ++i) {
      float until = 0;
      float ms = 0;
      if (limit > 0) KVIRE_BENCH_CHECK(cudaEventElapsedTime(&until, m_.begin, marks_[static_cast<std::size_t>(i) + 1]));
      if (limit > 0 && until > limit) break;
      KVIRE_BENCH_CHECK(cudaEventElapsedTime(&ms, marks_[static_cast<std::size_t>(i)], marks_[static_cast<std::size_t>(i) + 1]));
      all.push_back(static_cast<double>(ms) * 1e3);
    }
    return median(all);
  }

  Machine& m_;
  Kernel logits_;
  std::vector<cudaEvent_t> marks_;
  int all_sms_ = 0;
  double alone_ = 0;
};

}  // namespace kvire_bench
