// SPDX-License-Identifier: Apache-2.0
// What looking up a page of a prefix costs, hashing and verifying included. The goal is a million page lookups a second on one core:
//
//     kvire_bench_prefix_benchmark [Google Benchmark options]
//
// 65,536 pages in prefixes of 64, looked up in random order: neither names nor tokens fit the caches. `pages` counts page lookups per second.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include <kvire/exec/host/event.hpp>
#include <kvire/pool/ledger.hpp>
#include <kvire/tier/prefix_cache.hpp>

namespace {

using namespace kvire;

constexpr std::int64_t prefixes = 1024;
constexpr std::int64_t pages_each = 64;

struct Filled {
  using Cache = PrefixCache<1, Lru>;
  PageLedger<DevicePage, Host> ledger = PageLedger<DevicePage, Host>::make("bench", prefixes * pages_each + 2).value();
  Cache cache;
  std::int32_t root;
  std::vector<std::vector<TokenId>> prompts{prefixes};

  Filled(std::int64_t page_tokens, bool keep_tokens)
      : cache(Cache::make({.page_tokens = page_tokens, .keep_tokens = keep_tokens}).value()), root(cache.root({.model = "bench"})) {
    std::mt19937 random(5);
    for (auto& prompt : prompts) {
      for (std::int64_t i = 0; i < pages_each * page_tokens; ++i) prompt.push_back(static_cast<TokenId>(random() % 130'000));
      auto ref = cache.acquire(root);
      for (std::int64_t p = 0; p < pages_each; ++p) extend(ref, prompt, p);
    }
  }
  void extend(Cache::Ref& ref, const std::vector<TokenId>& prompt, std::int64_t p) {
    Cache::Pages pages{ledger.allocate().value()};
    const auto page = static_cast<std::size_t>(cache.shape().page_tokens);
    (void)cache.extend(ref, std::span(prompt).subspan(static_cast<std::size_t>(p) * page, page), pages).value();
  }
};

void report(benchmark::State& state, std::int64_t pages) {
  state.counters["pages"] = benchmark::Counter(static_cast<double>(pages * state.iterations()), benchmark::Counter::kIsRate);
}

void hit(benchmark::State& state, std::int64_t page_tokens, bool keep_tokens, bool hold) {
  Filled filled(page_tokens, keep_tokens);
  std::vector<std::size_t> order(prefixes);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(9));
  std::size_t next = 0;
  for (auto _ : state) {
    const PrefixMatch match = filled.cache.find(filled.root, filled.prompts[order[next++ % order.size()]]);
    if (match.pages != pages_each) return state.SkipWithError("a page is missing");
    if (hold) benchmark::DoNotOptimize(filled.cache.acquire(match));
  }
  report(state, pages_each);
}
BENCHMARK_CAPTURE(hit, tokens_256, 256, true, false);
BENCHMARK_CAPTURE(hit, digest_256, 256, false, false);
BENCHMARK_CAPTURE(hit, tokens_512, 512, true, false);
BENCHMARK_CAPTURE(hit, tokens_64, 64, true, false);
BENCHMARK_CAPTURE(hit, tokens_256_and_hold, 256, true, true);

// A page that is not there yet: evict the least recent, name and publish another.
void replace(benchmark::State& state) {
  Filled filled(256, true);
  std::vector<TokenId> prompt(256);
  for (auto _ : state) {
    ++prompt[0];
    auto page = filled.ledger.allocate();
    if (!page.ok()) {
      filled.cache.drop(filled.cache.victim(0, CacheTier::device), 0, CacheTier::device);
      page = filled.ledger.allocate();
    }
    auto ref = filled.cache.acquire(filled.root);
    Filled::Cache::Pages pages{std::move(page).value()};
    benchmark::DoNotOptimize(filled.cache.extend(ref, prompt, pages));
  }
  report(state, 1);
}
BENCHMARK(replace);

}  // namespace

BENCHMARK_MAIN();
