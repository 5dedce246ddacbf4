// SPDX-License-Identifier: Apache-2.0
// What handing out a page costs, at a million pages. The goal is 20 ns for allocating one and 20 ns for freeing one, uncontended:
//
//     kvire_bench_pool_benchmark [Google Benchmark options]
//
// `each` is the time per operation, where a run of pages allocated and freed again counts as two operations a page.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include <kvire/exec/host/event.hpp>
#include <kvire/pool/ledger.hpp>

namespace {

using namespace kvire;
using Ledger = PageLedger<DevicePage, Host>;
using Ref = PageRef<DevicePage>;

constexpr std::int64_t million = 1'000'000;

Ledger make_ledger() { return Ledger::make("bench", million + 1).value(); }

void report(benchmark::State& state, double operations) {
  state.counters["each"] =
      benchmark::Counter(operations * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

void allocate_and_free_one(benchmark::State& state) {
  auto ledger = make_ledger();
  for (auto _ : state) {
    auto ref = ledger.allocate().value();
    benchmark::DoNotOptimize(ref);
  }
  report(state, 2);
}
BENCHMARK(allocate_and_free_one);

void allocate_all_one_by_one(benchmark::State& state) {
  auto ledger = make_ledger();
  std::vector<Ref> refs;
  refs.reserve(million);
  for (auto _ : state) {
    for (std::int64_t i = 0; i < million; ++i) refs.push_back(ledger.allocate().value());
    state.PauseTiming();
    refs.clear();
    state.ResumeTiming();
  }
  report(state, million);
}
BENCHMARK(allocate_all_one_by_one)->Unit(benchmark::kMillisecond);

void free_all(benchmark::State& state, bool shuffled) {
  auto ledger = make_ledger();
  std::mt19937 random(7);
  for (auto _ : state) {
    state.PauseTiming();
    auto refs = ledger.allocate(million).value();
    if (shuffled) std::shuffle(refs.begin(), refs.end(), random);
    state.ResumeTiming();
    refs.clear();
  }
  report(state, million);
}
BENCHMARK_CAPTURE(free_all, in_order, false)->Unit(benchmark::kMillisecond);
// One cache miss a page: records of a million pages do not fit the second-level cache.
BENCHMARK_CAPTURE(free_all, shuffled, true)->Unit(benchmark::kMillisecond);

// The free stack in random order, as a long-running engine has it.
void allocate_all_shuffled(benchmark::State& state) {
  auto ledger = make_ledger();
  std::mt19937 random(7);
  std::vector<Ref> refs = ledger.allocate(million).value();
  for (auto _ : state) {
    state.PauseTiming();
    std::shuffle(refs.begin(), refs.end(), random);
    refs.clear();
    state.ResumeTiming();
    for (std::int64_t i = 0; i < million; ++i) refs.push_back(ledger.allocate().value());
  }
  report(state, million);
}
BENCHMARK(allocate_all_shuffled)->Unit(benchmark::kMillisecond);

void allocate_and_free_run(benchmark::State& state) {
  auto ledger = make_ledger();
  const std::int64_t n = state.range(0);
  for (auto _ : state) {
    auto refs = ledger.allocate(n).value();
    benchmark::DoNotOptimize(refs.data());
  }
  report(state, 2 * static_cast<double>(n));
}
BENCHMARK(allocate_and_free_run)->Arg(16)->Arg(1024);

void share_one(benchmark::State& state) {
  auto ledger = make_ledger();
  auto ref = ledger.allocate().value();
  for (auto _ : state) {
    auto copy = ref;
    benchmark::DoNotOptimize(copy);
  }
  report(state, 2);
}
BENCHMARK(share_one);

void hold_run(benchmark::State& state) {
  auto ledger = make_ledger();
  const std::int64_t n = state.range(0);
  auto refs = ledger.allocate(n).value();
  std::vector<DevicePage> ids;
  for (const auto& ref : refs) ids.push_back(ref.id());
  auto event = Event<Host>::make();
  event.complete();
  for (auto _ : state) {
    auto hold = ledger.hold(ids, PageUse::load, event).value();
    benchmark::DoNotOptimize(hold);
  }
  report(state, static_cast<double>(n));
}
BENCHMARK(hold_run)->Arg(16)->Arg(1024);

// Two threads on one ledger: not the goal's case, but no cliff either.
void contended(benchmark::State& state) {
  static std::unique_ptr<Ledger> ledger;
  if (state.thread_index() == 0) ledger = std::make_unique<Ledger>(make_ledger());
  for (auto _ : state) {
    auto ref = ledger->allocate().value();
    benchmark::DoNotOptimize(ref);
  }
  report(state, 2);
}
BENCHMARK(contended)->Threads(2)->UseRealTime();

}  // namespace

BENCHMARK_MAIN();
