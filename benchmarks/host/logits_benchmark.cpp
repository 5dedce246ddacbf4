// SPDX-License-Identifier: Apache-2.0
// Host sparse logits beside OpenBLAS sgemm with the same multiplications, in turns, on the same cores and the same instruction set.
//
//     kvire_bench_logits_benchmark [--level=avx512|avx2|baseline] [Google Benchmark options]
//
// sgemm gets the keys decoded to f32 beforehand and leaves relu, weights and scales out: what it takes is a bound, not the same work.
// OpenBLAS chooses its kernels when it is loaded, so the program restarts itself with OPENBLAS_CORETYPE set to match the level.

#include <benchmark/benchmark.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <kvire/kernel/sparse_logits.hpp>
#include <kvire/layout/policies.hpp>

#ifdef KVIRE_HAVE_BLAS
extern "C" {
// The Fortran name, which every BLAS has.
void sgemm_(const char* trans_a, const char* trans_b, const int* m, const int* n, const int* k, const float* alpha, const float* a, const int* lda,
            const float* b, const int* ldb, const float* beta, float* c, const int* ldc);
char* openblas_get_corename(void) __attribute__((weak));
}
#endif

namespace {

using namespace kvire;

constexpr int heads = 64;
constexpr int dim = 128;
SimdLevel level = best_level();

// Threads that a contender left spinning for work would take the cores of the next, so each starts when the program's threads have all gone to
// sleep: those of OpenBLAS may take more than 100 ms.
void let_threads_sleep() {
  std::clock_t used = 0;  // by all threads
  do {
    used = std::clock();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  } while (std::clock() - used > CLOCKS_PER_SEC / 1000);
}

// Warms up until the system has spread the threads over the cores, which takes several of the scheduler's ticks: engines call these in a loop.
double seconds_of(const auto& f) {
  using Clock = std::chrono::steady_clock;
  let_threads_sleep();
  for (const auto warm = Clock::now() + std::chrono::milliseconds(40); Clock::now() < warm;) f();
  const auto start = Clock::now();
  f();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}

double best(const std::vector<double>& x) { return *std::min_element(x.begin(), x.end()); }

template <class P>
void logits(benchmark::State& state) {
  const int batch = static_cast<int>(state.range(0));
  const int context = static_cast<int>(state.range(1));
  const int pages_a_row = context / P::tokens_per_page;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;

  std::vector<std::byte> pages(static_cast<std::size_t>(P::page_bytes * (batch * pages_a_row + 1)));
  std::vector<float> keys(static_cast<std::size_t>(batch) * static_cast<std::size_t>(context) * dim);
  std::vector<std::int32_t> table(static_cast<std::size_t>(batch * pages_a_row));
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int32_t>(i + 1);
  std::shuffle(table.begin(), table.end(), random);
  std::vector<float> noise(4099);
  for (float& x : noise) x = normal(random);
  for (std::size_t i = 0; i < keys.size() / dim; ++i) {
    float row[dim];
    for (int d = 0; d < dim; ++d) row[d] = noise[(i * 131 + static_cast<std::size_t>(d) * 7) % noise.size()];
    std::byte* page = pages.data() + P::page_bytes * table[i / P::tokens_per_page];
    encode_row<P>(row, page, static_cast<int>(i % P::tokens_per_page));
    decode_row<P>(page, static_cast<int>(i % P::tokens_per_page), keys.data() + i * dim);
  }
  std::vector<std::uint16_t> queries(static_cast<std::size_t>(batch * heads) * dim);
  std::vector<float> queries_f32(queries.size());
  for (std::size_t i = 0; i < queries.size(); ++i) {
    queries[i] = bf16_from_f32(normal(random));
    queries_f32[i] = f32_from_bf16(queries[i]);
  }
  std::vector<float> weights(static_cast<std::size_t>(batch * heads));
  for (float& x : weights) x = normal(random);
  const std::vector<std::int32_t> lengths(static_cast<std::size_t>(batch), context);
  std::vector<float> scores(static_cast<std::size_t>(batch) * static_cast<std::size_t>(context));

  const auto args = [&] {
    auto checked = check_sparse_logits(P::name, dim, P::tokens_per_page, {queries.data(), Element::bf16, batch, 1, heads, dim},
                                       {weights.data(), {batch, 1, heads}}, {table.data(), {batch, pages_a_row}}, {lengths.data(), {batch, 1}},
                                       {scores.data(), {batch, 1, context}}, level)
                       .value();
    checked.pages = pages.data();
    checked.page_stride = P::page_bytes;
    checked.page_count = batch * pages_a_row + 1;
    return checked;
  }();
  const auto run = [&] {
    LogitsCounts counts;
    simd::SparseLogits(args, simd::key_format<P>(level), level).run(counts).value();
    benchmark::DoNotOptimize(scores.data());
  };
#ifdef KVIRE_HAVE_BLAS
  std::vector<float> products(static_cast<std::size_t>(heads) * static_cast<std::size_t>(context));
  // Either product may be the faster one to ask for: tokens by heads, or heads by tokens.
  const auto sgemm = [&](bool tokens_first) {
    for (int b = 0; b < batch; ++b) {
      const float* k = keys.data() + static_cast<std::size_t>(b) * static_cast<std::size_t>(context) * dim;
      const float* q = queries_f32.data() + static_cast<std::size_t>(b) * heads * dim;
      const int m = tokens_first ? heads : context;
      const int n = tokens_first ? context : heads;
      const float one = 1.0F;
      const float zero = 0.0F;
      sgemm_("T", "N", &m, &n, &dim, &one, tokens_first ? q : k, &dim, tokens_first ? k : q, &dim, &zero, products.data(), &m);
    }
    benchmark::DoNotOptimize(products.data());
  };
#endif

  std::vector<double> ours, tokens_first, heads_first;
  // In changing order: whoever interrupts at regular times hits all alike.
  int turn = 0;
  for (auto _ : state) {
    for (int i = 0; i < 3; ++i) {
      switch ((turn + i) % 3) {
        case 0: ours.push_back(seconds_of(run)); break;
#ifdef KVIRE_HAVE_BLAS
        case 1: tokens_first.push_back(seconds_of([&] { sgemm(true); })); break;
        case 2: heads_first.push_back(seconds_of([&] { sgemm(false); })); break;
#endif
        default: break;
      }
    }
    ++turn;
    state.SetIterationTime(ours.back());
  }
  const double flops = 2.0 * batch * context * heads * dim;
  state.counters["logits_ms"] = median(ours) * 1e3;
  state.counters["logits_gflops"] = flops / median(ours) * 1e-9;
  if (!tokens_first.empty()) {
    const double theirs = std::min(median(tokens_first), median(heads_first));
    state.counters["sgemm_ms"] = theirs * 1e3;
    state.counters["sgemm_gflops"] = flops / theirs * 1e-9;
    state.counters["ratio"] = median(ours) / theirs;
    // Of the quickest runs: what is left when other programs keep the cores busy.
    state.counters["ratio_of_best"] = best(ours) / std::min(best(tokens_first), best(heads_first));
  }
}

void shapes(benchmark::internal::Benchmark* b) {
  for (const int batch : {1, 4, 8}) {
    for (const int context : {4096, 16384, 32768}) b->Args({batch, context});
  }
  b->ArgNames({"batch", "context"})->UseManualTime()->Unit(benchmark::kMillisecond)->Iterations(9);
}

BENCHMARK(logits<Bf16Contiguous<64, dim>>)->Apply(shapes);
BENCHMARK(logits<Fp8WithScale<64, dim>>)->Apply(shapes);
BENCHMARK(logits<Fp4WithScale<64, dim>>)->Apply(shapes);

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    for (const SimdLevel l : {SimdLevel::baseline, SimdLevel::avx2, SimdLevel::avx512}) {
      if (std::string(argv[i]) == std::string("--level=") + name_of(l)) level = l;
    }
  }
  if (!supports(level)) {
    std::fprintf(stderr, "this processor has no %s\n", name_of(level));
    return 1;
  }
  const char* core = level == SimdLevel::avx512 ? "SkylakeX" : level == SimdLevel::avx2 ? "Haswell" : "Nehalem";
  const char* set = std::getenv("OPENBLAS_CORETYPE");
  if (set == nullptr || std::strcmp(set, core) != 0) {
    setenv("OPENBLAS_CORETYPE", core, 1);
    execv("/proc/self/exe", argv);
  }
  argc = static_cast<int>(std::remove_if(argv + 1, argv + argc, [](const char* a) { return std::strncmp(a, "--level=", 8) == 0; }) - argv);
#ifdef KVIRE_HAVE_BLAS
  std::printf("level %s, sgemm kernels for %s\n", name_of(level), openblas_get_corename != nullptr ? openblas_get_corename() : "an unknown processor");
#else
  std::printf("level %s; sgemm skipped: built without a BLAS\n", name_of(level));
#endif
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
