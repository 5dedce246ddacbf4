// SPDX-License-Identifier: Apache-2.0
//
// Transfers of the host backend against memcpy of the same bytes in the same run: one block of memory by one thread, and by all cores. The
// pages are scattered, and the time of a transfer includes plan checks, holds, the stream and the events. The goal is 80 % of memcpy for pages.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include <kvire/pool/mirror.hpp>
#include <kvire/preset/all.hpp>
#include <kvire/transfer/transfer.hpp>

namespace {

using namespace kvire;

using Fp8 = Fp8WithScale<64, 128>;
using Bf16 = Bf16Contiguous<64, 128>;
using Fp4 = Fp4WithScale<64, 128>;
using Latent = preset::deepseek_v4::Latent<64>;
using Row656 = preset::deepseek_v3_2::Latent<64>;
struct Row640 : PageLayout<64, 1, Plane<Field<role::Value, Element::e4m3, 640>>> {
  static constexpr const char* name = "Row640";
};

template <class P>
struct Setup {
  Setup(int layers, std::int64_t n)
      : device(DevicePool<P, Host>::make({.layers = layers, .pages = n + 1}).value()), host(mirror_of(device, n + 1).value()) {
    pages = device.allocate(n).value();
    sources = host.allocate(n).value();
    std::vector<std::int32_t> order(static_cast<std::size_t>(n));
    std::iota(order.begin(), order.end(), 1);
    std::mt19937 random(7);
    std::shuffle(order.begin(), order.end(), random);
    for (const auto id : order) to.push_back(DevicePage(id));
    std::shuffle(order.begin(), order.end(), random);
    for (const auto id : order) from.push_back(HostPage(id));
    for (auto& p : pages) (void)device.fill_page(p.id(), 1);  // touch
    for (auto& p : sources) (void)host.fill_page(p.id(), 2);
  }
  DevicePool<P, Host> device;
  HostPool<P, Host> host;
  std::vector<PageRef<DevicePage>> pages;
  std::vector<PageRef<HostPage>> sources;
  std::vector<HostPage> from;
  std::vector<DevicePage> to;
  Stream<Host> stream = Stream<Host>::make().value();
};

/// The shortest time of each contender; they take turns, so that a busy machine hits all of them.
class Best {
 public:
  template <class F>
  void run(F f) {
    const auto start = Clock::now();
    f();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    best_ = best_ == 0 ? seconds : std::min(best_, seconds);
  }
  double rate(std::int64_t bytes) const { return static_cast<double>(bytes) / best_ / 1e9; }

 private:
  double best_ = 0;
};

/// One block of the same size, copied by one thread and by all.
class Block {
 public:
  explicit Block(std::int64_t bytes) : from_(static_cast<std::size_t>(bytes), std::byte{1}), to_(static_cast<std::size_t>(bytes), std::byte{2}) {}
  void copy() {
    one_.run([&] { std::memcpy(to_.data(), from_.data(), to_.size()); });
    all_.run([&] {
      const auto bytes = static_cast<std::int64_t>(to_.size());
      parallel_for(bytes, bytes / process_threads().threads() + 1, [&](std::int64_t a, std::int64_t b) {
        std::memcpy(to_.data() + a, from_.data() + a, static_cast<std::size_t>(b - a));
      });
    });
    benchmark::ClobberMemory();
  }
  void report(benchmark::State& state, const Best& transfer) const {
    const auto bytes = static_cast<std::int64_t>(to_.size());
    state.counters["transfer_GB/s"] = transfer.rate(bytes);
    state.counters["memcpy_GB/s"] = one_.rate(bytes);
    state.counters["memcpy_all_cores_GB/s"] = all_.rate(bytes);
    state.counters["of_memcpy_%"] = 100 * transfer.rate(bytes) / one_.rate(bytes);
    state.counters["of_all_cores_%"] = 100 * transfer.rate(bytes) / all_.rate(bytes);
  }

 private:
  std::vector<std::byte> from_, to_;
  Best one_, all_;
};

template <class P>
void pages(benchmark::State& state) {
  Setup<P> s(static_cast<int>(state.range(0)), state.range(1));
  Block block(state.range(0) * state.range(1) * P::page_bytes);
  Best best;
  for (auto _ : state) {
    best.run([&] { load(s.host, s.device, plan(s.from, s.to), s.stream).value().wait().value(); });
    block.copy();
  }
  block.report(state, best);
}

// The same with seals: what the check of what arrived costs.
template <class P>
void sealed_pages(benchmark::State& state) {
  Setup<P> s(static_cast<int>(state.range(0)), state.range(1));
  auto seals = PageSeals::make(s.host).value();
  Best with, without;
  for (auto _ : state) {
    backup(s.device, s.host, plan(s.from, s.to), s.stream, {.seals = seals}).value().wait().value();
    with.run([&] { load(s.host, s.device, plan(s.from, s.to), s.stream, {.seals = seals}).value().wait().value(); });
    without.run([&] { load(s.host, s.device, plan(s.from, s.to), s.stream).value().wait().value(); });
  }
  const std::int64_t bytes = state.range(0) * state.range(1) * P::page_bytes;
  state.counters["transfer_GB/s"] = without.rate(bytes);
  state.counters["sealed_GB/s"] = with.rate(bytes);
  state.counters["longer_by_%"] = 100 * (without.rate(bytes) / with.rate(bytes) - 1);
}

template <class P>
void rows(benchmark::State& state) {
  Setup<P> s(1, state.range(0) / P::tokens_per_page);
  std::vector<HostSlot> from;
  std::vector<DeviceSlot> to;
  for (std::int64_t i = 0; i < state.range(0); ++i) {
    const auto page = static_cast<std::size_t>(i) % s.from.size();  // neighbours of the plan are of different pages
    const auto token = static_cast<int>(static_cast<std::size_t>(i) / s.from.size());
    from.push_back(slot_of<P>(s.from[page], token));
    to.push_back(slot_of<P>(s.to[page], token));
  }
  Block block(state.range(0) * (P::used_bytes / P::tokens_per_page));
  Best best;
  for (auto _ : state) {
    best.run([&] { load(s.host, s.device, plan_tokens(from, to), s.stream).value().wait().value(); });
    block.copy();
  }
  block.report(state, best);
}

// Layers, pages.
BENCHMARK(pages<Fp8>)->Args({1, 4096})->Args({61, 128})->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(pages<Bf16>)->Args({1, 4096})->Args({61, 128})->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(pages<Fp4>)->Args({1, 4096})->Args({61, 128})->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(pages<Latent>)->Args({1, 2048})->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(sealed_pages<Fp8>)->Args({1, 4096})->Args({61, 128})->UseRealTime()->Unit(benchmark::kMillisecond);
// Tokens.
BENCHMARK(rows<Row640>)->Arg(65536)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(rows<Row656>)->Arg(65536)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace

BENCHMARK_MAIN();
