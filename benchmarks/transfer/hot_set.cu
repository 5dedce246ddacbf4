// SPDX-License-Identifier: Apache-2.0
// The sparse hot set: 64 rows of 128k tokens in pinned memory, 2,048 selected a row and step, against the time that the library's token move needs for
// the same missed tokens; hits alone; other sizes and policies. Every result is verified before it is timed.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <benchmarks/support/device_timing.cuh>
#include <kvire/pool/mirror.hpp>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/sync/gate.hpp>
#include <kvire/tier/hot_set.cuh>

using namespace kvire;

namespace {

constexpr int tokens = 1 << 17;  // of a row

__global__ void fill_words(std::uint32_t* p, std::int64_t n, std::uint32_t seed) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += static_cast<std::int64_t>(gridDim.x) * blockDim.x) {
    p[i] = kvire_bench::mix(static_cast<std::uint64_t>(i) * 2654435761U + seed);
  }
}
__global__ void wait_nanoseconds(unsigned wanted) {
  const unsigned begin = ptx::nanoseconds();
  while (ptx::nanoseconds() - begin < wanted) {
  }
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

template <class P>
struct Bench {
  static constexpr std::int64_t pages_a_row = tokens / P::tokens_per_page;

  explicit Bench(int rows_) : rows(rows_), host(HostPool<P, Cuda>::make({.layers = 1, .pages = 1 + rows_ * pages_a_row}).value()) {
    const auto view = pool_access::view(host, EntrySlot(0));
    const std::int64_t bytes = view.page_stride * view.pages;
    constexpr std::int64_t part = std::int64_t{256} << 20;
    auto* const staging = kvire_bench::device_array<std::uint32_t>(part / 4);
    for (std::int64_t at = 0; at < bytes; at += part) {
      fill_words<<<264, 512, 0, stream.native()>>>(staging, part / 4, static_cast<std::uint32_t>(at >> 20));
      KVIRE_BENCH_CHECK(cudaMemcpyAsync(view.base + at, staging, static_cast<std::size_t>(std::min(part, bytes - at)), cudaMemcpyDefault, stream.native()));
    }
    KVIRE_BENCH_CHECK(cudaStreamSynchronize(stream.native()));
    KVIRE_BENCH_CHECK(cudaFree(staging));
    KVIRE_BENCH_CHECK(cudaEventCreate(&begin));
    KVIRE_BENCH_CHECK(cudaEventCreate(&end));
    flush = kvire_bench::device_array<std::uint8_t>(flush_bytes);
  }

  void table(bool scattered) {
    pages.resize(static_cast<std::size_t>(rows * pages_a_row));
    std::iota(pages.begin(), pages.end(), 1);
    if (scattered) std::shuffle(pages.begin(), pages.end(), random);
    if (device_pages == nullptr) device_pages = kvire_bench::device_array<std::int32_t>(rows * pages_a_row);
    KVIRE_BENCH_CHECK(cudaMemcpy(device_pages, pages.data(), pages.size() * 4, cudaMemcpyHostToDevice));
  }

  /// Microseconds from event to event, behind other work of the stream, with a cold L2.
  template <class Work>
  double microseconds(Work&& work) {
    KVIRE_BENCH_CHECK(cudaMemsetAsync(flush, 1, flush_bytes, stream.native()));
    wait_nanoseconds<<<1, 1, 0, stream.native()>>>(60000);
    KVIRE_BENCH_CHECK(cudaEventRecord(begin, stream.native()));
    work();
    KVIRE_BENCH_CHECK(cudaEventRecord(end, stream.native()));
    KVIRE_BENCH_CHECK(cudaStreamSynchronize(stream.native()));
    float ms = 0;
    KVIRE_BENCH_CHECK(cudaEventElapsedTime(&ms, begin, end));
    return static_cast<double>(ms) * 1e3;
  }

  /// The library's token move of the same tokens: its own order, its own number of multiprocessors.
  double token_move(const std::vector<std::int64_t>& from, const std::vector<std::int64_t>& to, const DevicePool<P, Cuda>& pool) {
    auto ids = std::make_shared<detail::CheckedIds<std::int64_t>>();
    ids->from = from;
    ids->to = to;
    typename detail::TransferEngine<Cuda>::Piece piece;
    piece.info.direction = CopyDirection::host_to_device;
    auto target = pool_access::const_view(pool, EntrySlot(0));
    const auto source = pool_access::const_view(host, EntrySlot(0));
    auto* const base = device_address(HostAddress{const_cast<std::byte*>(source.base)}, "benchmark").value().value;
    detail::TransferEngine<Cuda>::template rows<P>(piece, PageView<P, Cuda>{const_cast<std::byte*>(target.base), target.page_stride, target.pages},
                                                   ConstPageView<P, Cuda>(base, source.page_stride, source.pages), ids, 0);
    if (!piece.runs) return 0;
    const std::size_t bytes = piece.runs->size() * sizeof(detail::TokenRun);
    auto scratch = detail::Scratch::make(bytes).value();
    std::memcpy(scratch.host(), piece.runs->data(), bytes);
    return microseconds([&] {
      piece.launch_rows(stream, piece.list, reinterpret_cast<const detail::TokenRun*>(scratch.device()), static_cast<std::int64_t>(piece.runs->size()), piece.run_tokens, 8).value();
    });
  }

  double memcpy_time(std::int64_t bytes) {
    if (bytes == 0) return 0;
    return microseconds([&] {
      KVIRE_BENCH_CHECK(cudaMemcpyAsync(flush, pool_access::const_view(host, EntrySlot(0)).base, static_cast<std::size_t>(std::min(bytes, flush_bytes)), cudaMemcpyDefault, stream.native()));
    });
  }

  /// `hit_percent` of each selection are taken from the selection before, the rest are new.
  void run(const char* what, int batch, int k, std::int64_t slots, int hit_percent, int steps = 12) {
    auto hot = HotSet<P, Cuda>::make(host, {.rows = batch, .slots = slots, .most_listed = k}).value();
    const int fresh = k * (100 - hit_percent) / 100;
    std::vector<std::vector<std::int32_t>> order(static_cast<std::size_t>(batch));
    for (auto& all : order) {
      all.resize(tokens);
      std::iota(all.begin(), all.end(), 0);
      std::shuffle(all.begin(), all.end(), random);
    }
    std::vector<std::int32_t> selected(static_cast<std::size_t>(batch * k)), out(selected.size());
    auto* const list = kvire_bench::device_array<std::int32_t>(batch * k);
    auto* const out_slots = kvire_bench::device_array<std::int32_t>(batch * k);
    auto* const counts = kvire_bench::device_array<HotCounts>(1);
    const HotRows rows_of{{}, {device_pages, {batch, pages_a_row}}};
    const auto resolve = [&] {
      const auto step = Gate<Cuda>().begin({}, stream).value();
      (void)hot.resolve(step, EntrySlot(0), rows_of, {list, {batch, 1, k}}, {out_slots, {batch, 1, k}}, counts).value();
    };
    std::vector<double> times, moves, copies;
    double misses_a_step = 0;
    for (int step = -2; step < steps; ++step) {
      std::vector<std::int64_t> from;
      std::vector<std::int64_t> to;
      for (int row = 0; row < batch; ++row) {
        auto& all = order[static_cast<std::size_t>(row)];
        const auto mine = selected.begin() + static_cast<std::ptrdiff_t>(row) * k;
        if (step == -2) {
          std::copy(all.end() - k, all.end(), mine);
          all.resize(all.size() - static_cast<std::size_t>(k));
        } else {
          std::shuffle(mine, mine + k, random);
          std::copy(all.end() - fresh, all.end(), mine);
          all.resize(all.size() - static_cast<std::size_t>(fresh));
          // What the token move is timed with: as many other tokens, whose translations nobody has asked for lately.
          for (int i = 0; i < fresh; ++i) {
            const auto t = static_cast<std::int32_t>(random() % tokens);
            from.push_back(std::int64_t(pages[static_cast<std::size_t>(row * pages_a_row + t / P::tokens_per_page)]) * P::tokens_per_page + t % P::tokens_per_page);
            to.push_back(hot.row_slot(row) + i);
          }
        }
        std::sort(mine, mine + k);
      }
      KVIRE_BENCH_CHECK(cudaMemcpy(list, selected.data(), selected.size() * 4, cudaMemcpyHostToDevice));
      KVIRE_BENCH_CHECK(cudaMemset(counts, 0, sizeof(HotCounts)));
      const double us = microseconds(resolve);
      HotCounts c;
      KVIRE_BENCH_CHECK(cudaMemcpy(&c, counts, sizeof c, cudaMemcpyDeviceToHost));
      KVIRE_BENCH_CHECK(cudaMemcpy(out.data(), out_slots, out.size() * 4, cudaMemcpyDeviceToHost));
      if (step < 0 || step % 4 == 0) verify(hot, batch, k, selected, out);
      if (step < 0) continue;
      misses_a_step = static_cast<double>(c.misses);
      if (c.misses != std::int64_t(fresh) * batch) std::printf("MISSES %lld, not %lld\n", static_cast<long long>(c.misses), static_cast<long long>(fresh) * batch);
      times.push_back(us);
      // Into a pool of the same shape, so that the set stays what it is.
      if (fresh > 0 && spare == nullptr) spare = std::make_unique<DevicePool<P, Cuda>>(DevicePool<P, Cuda>::make({.layers = 1, .pages = hot.pool().pages()}).value());
      if (fresh > 0 && spare->pages() < hot.pool().pages()) *spare = DevicePool<P, Cuda>::make({.layers = 1, .pages = hot.pool().pages()}).value();
      if (fresh > 0) moves.push_back(token_move(from, to, *spare));
      copies.push_back(memcpy_time(static_cast<std::int64_t>(from.size()) * detail::token_bytes<P>));
    }
    const double bytes = misses_a_step * static_cast<double>(detail::token_bytes<P>);
    const double move = median(moves);
    std::printf("| %s | %d x %d | %lld | %.0f | %.2f | %.1f | %.1f | %.2f | %.1f | %.1f |\n", what, batch, k, static_cast<long long>(slots), misses_a_step, bytes / 1e6, median(times),
                move, move > 0 ? median(times) / move : 0, move > 0 ? bytes / move / 1e3 : 0, bytes > 0 ? bytes / median(copies) / 1e3 : 0);
    std::fflush(stdout);
    for (void* p : {static_cast<void*>(list), static_cast<void*>(out_slots), static_cast<void*>(counts)}) KVIRE_BENCH_CHECK(cudaFree(p));
  }

  void verify(const HotSet<P, Cuda>& hot, int batch, int k, const std::vector<std::int32_t>& selected, const std::vector<std::int32_t>& out) {
    const auto slots = pool_access::const_view(hot.pool(), EntrySlot(0));
    const auto source = pool_access::const_view(host, EntrySlot(0));
    std::vector<std::byte> page(static_cast<std::size_t>(P::page_bytes));
    int wrong = 0;
    for (int i = 0; i < 300; ++i) {
      const std::size_t at = random() % selected.size();
      const std::int32_t t = selected[at];
      const std::int32_t row = static_cast<std::int32_t>(at / static_cast<std::size_t>(k));
      const std::byte* const from = source.page(pages[static_cast<std::size_t>(row * pages_a_row + t / P::tokens_per_page)]);
      KVIRE_BENCH_CHECK(cudaMemcpy(page.data(), slots.page(out[at] / P::tokens_per_page), page.size(), cudaMemcpyDefault));
      for (int plane = 0; plane < P::plane_count; ++plane) {
        const auto bytes = P::table.row_bytes[plane];
        wrong += std::memcmp(page.data() + P::table.plane_offset[plane] + bytes * (out[at] % P::tokens_per_page),
                             from + P::table.plane_offset[plane] + bytes * (t % P::tokens_per_page), static_cast<std::size_t>(bytes)) != 0;
      }
    }
    if (wrong > 0) std::printf("WRONG: %d rows of 300 (%d rows a batch)\n", wrong, batch);
  }

  static constexpr std::int64_t flush_bytes = std::int64_t{256} << 20;
  int rows;
  Stream<Cuda> stream = Stream<Cuda>::make({.name = "compute"}).value();
  HostPool<P, Cuda> host;
  std::vector<std::int32_t> pages;
  std::int32_t* device_pages = nullptr;
  std::unique_ptr<DevicePool<P, Cuda>> spare;
  std::uint8_t* flush = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  std::mt19937 random{1};
};

// Selections that hit, of many layers in one graph as in a step of a decode: what a layer adds.
void hits(int batch, int k, int slots) {
  using P = preset::deepseek_v4::Latent<64>;
  constexpr int layers = 21;
  constexpr std::int64_t max_pages = tokens / P::tokens_per_page;
  auto stream = Stream<Cuda>::make({.name = "compute"}).value();
  auto host = HostPool<P, Cuda>::make({.layers = layers, .pages = 1 + max_pages}).value();
  auto hot = HotSet<P, Cuda>::make(host, {.rows = batch, .slots = slots, .most_listed = k}).value();
  std::vector<std::int32_t> table;
  for (int row = 0; row < batch; ++row) {
    for (std::int32_t page = 1; page <= max_pages; ++page) table.push_back(page);
  }
  const std::int64_t listed = std::int64_t(batch) * k;
  auto* const pages = kvire_bench::device_array<std::int32_t>(static_cast<std::int64_t>(table.size()));
  auto* const list = kvire_bench::device_array<std::int32_t>(layers * listed);
  auto* const out = kvire_bench::device_array<std::int32_t>(layers * listed);
  KVIRE_BENCH_CHECK(cudaMemcpy(pages, table.data(), table.size() * 4, cudaMemcpyHostToDevice));
  const auto resolve = [&] {
    const auto step = Gate<Cuda>().begin({}, stream).value();
    for (int layer = 0; layer < layers; ++layer) {
      (void)hot.resolve(step, EntrySlot(layer), {{}, {pages, {batch, max_pages}}}, {list + layer * listed, {batch, 1, k}}, {out + layer * listed, {batch, 1, k}}).value();
    }
  };
  std::mt19937 random{2};
  for (int round = 0; round < 3; ++round) {
    std::vector<std::int32_t> selected;
    for (std::int64_t i = 0; i < layers * listed; ++i) {
      selected.push_back(static_cast<std::int32_t>(i % k * (tokens / k) + random() % (tokens / static_cast<unsigned>(k))));
    }
    KVIRE_BENCH_CHECK(cudaMemcpy(list, selected.data(), selected.size() * 4, cudaMemcpyHostToDevice));
    resolve();
    KVIRE_BENCH_CHECK(cudaStreamSynchronize(stream.native()));
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  KVIRE_BENCH_CHECK(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal));
  resolve();
  KVIRE_BENCH_CHECK(cudaStreamEndCapture(stream.native(), &graph));
  KVIRE_BENCH_CHECK(cudaGraphInstantiate(&ready, graph, 0));
  cudaEvent_t begin = nullptr, end = nullptr;
  KVIRE_BENCH_CHECK(cudaEventCreate(&begin));
  KVIRE_BENCH_CHECK(cudaEventCreate(&end));
  constexpr std::int64_t flush_bytes = std::int64_t{256} << 20;
  auto* const flush = kvire_bench::device_array<std::uint8_t>(flush_bytes);
  std::vector<double> times;
  for (int i = 0; i < 11; ++i) {
    KVIRE_BENCH_CHECK(cudaMemsetAsync(flush, i, flush_bytes, stream.native()));
    KVIRE_BENCH_CHECK(cudaEventRecord(begin, stream.native()));
    KVIRE_BENCH_CHECK(cudaGraphLaunch(ready, stream.native()));
    KVIRE_BENCH_CHECK(cudaEventRecord(end, stream.native()));
    KVIRE_BENCH_CHECK(cudaStreamSynchronize(stream.native()));
    float ms = 0;
    KVIRE_BENCH_CHECK(cudaEventElapsedTime(&ms, begin, end));
    times.push_back(static_cast<double>(ms) * 1e3 / layers);
  }
  std::printf("| %d x %d | %d | %.1f |\n", batch, k, slots, median(times));
  std::fflush(stdout);
  KVIRE_BENCH_CHECK(cudaGraphExecDestroy(ready));
  KVIRE_BENCH_CHECK(cudaGraphDestroy(graph));
  for (void* p : {static_cast<void*>(pages), static_cast<void*>(list), static_cast<void*>(out), static_cast<void*>(flush)}) KVIRE_BENCH_CHECK(cudaFree(p));
}

void heading() {
  std::printf("\n| host pages | rows x selected | slots a row | misses | MB | resolve us | token move of as many us | ratio | its GB/s | memcpy GB/s |\n"
              "|---|---|---|---|---|---|---|---|---|---|\n");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  std::printf("\n| rows x selected, all hit | slots a row | us a layer |\n|---|---|---|\n");
  hits(64, 2048, 4096);
  hits(64, 2048, 8192);
  if (what != "short") hits(64, 512, 4096);
  if (what != "short") hits(1, 2048, 4096);
  hits(1, 512, 1024);
  const auto start = std::chrono::steady_clock::now();
  {
    Bench<preset::deepseek_v4::Latent<64>> bench(64);
    std::printf("V4 latents, rows of %d tokens (%.1f s to start)\n", tokens, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    heading();
    for (const bool scattered : {false, true}) {
      bench.table(scattered);
      const char* const name = scattered ? "scattered" : "in order";
      bench.run(name, 64, 2048, 4096, 90);
      bench.run(name, 64, 2048, 4096, 99);
      bench.run(name, 64, 2048, 4096, 50, 6);
      bench.run(name, 8, 2048, 4096, 90);
      bench.run(name, 1, 2048, 4096, 90);
      if (what == "short") continue;
      bench.run(name, 64, 2048, 8192, 90);
      if (!scattered) bench.run(name, 64, 2048, 2048, 90);
      bench.run(name, 8, 2048, 4096, 99);
      bench.run(name, 8, 2048, 4096, 50);
      if (!scattered) bench.run(name, 64, 512, 4096, 90);
      if (!scattered) bench.run(name, 1, 512, 1024, 90);
    }
  }
  if (what == "short") return 0;
  std::printf("\nV3.2 latents");
  Bench<preset::deepseek_v3_2::Latent<64>> bench(64);
  bench.table(false);
  heading();
  bench.run("in order", 64, 2048, 4096, 90);
  bench.run("in order", 8, 2048, 4096, 90);
  return 0;
}
