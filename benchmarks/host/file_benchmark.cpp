// SPDX-License-Identifier: Apache-2.0
//
// Reading records back from a file tier, beside fio on the same folder with the same block size (the whole record) in the same run. The pages are
// DeepSeek-V4-Flash's, 43 layers: of the full-KV space alone (about 1 MB a record) and with window and states (about 9 MB). A load includes
// verification and the copies into the pool's pages. The goal is 80 % of fio.
//
//   KVIRE_FILE_FOLDER   where (default: a folder under TMPDIR or the system's temporary folder)
//   KVIRE_FILE_BYTES    how much (default: 1 GiB)

#include <benchmark/benchmark.h>
#include <stdlib.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#if KVIRE_HAVE_XXHASH
#include <kvire/adapt/xxhash.hpp>
#endif
#if KVIRE_HAVE_LIBURING
#include <kvire/adapt/io_uring.hpp>
#endif
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/tier/file_tier.hpp>

namespace {

using namespace kvire;
using Model = preset::deepseek_v4::Flash<>;
using Pool = HostBundlePool<Model, Host>;
constexpr std::int64_t slots = 48;  // pages of the pool: loads under way

std::int64_t setting(const char* name, std::int64_t otherwise) { return std::getenv(name) != nullptr ? std::atoll(std::getenv(name)) : otherwise; }
std::string folder() {
  const char* named = std::getenv("KVIRE_FILE_FOLDER");
  const char* base = std::getenv("TMPDIR");
  return named != nullptr ? named : std::string(base != nullptr ? base : "/tmp") + "/kvire_file_benchmark";
}

RecordKey key_of(std::int64_t n) { return {.space = "benchmark", .prefix = {static_cast<std::uint64_t>(n), 1}, .first_token = 256 * n, .token_count = 256}; }

/// Bytes a second that fio reads in blocks of `block` from one file in the folder; 0 where there is no fio.
double fio(std::int64_t block, std::int64_t bytes, const char* engine, int jobs, int depth) {
  const std::string file = folder() + "/fio.data";
  const std::string command = "fio --name=read --filename=" + file + " --rw=randread --direct=1 --ioengine=" + engine + " --bs=" + std::to_string(block) +
                              " --size=" + std::to_string(bytes / block * block) + " --numjobs=" + std::to_string(jobs) + " --iodepth=" + std::to_string(depth) +
                              " --thread --group_reporting --time_based --runtime=1 --output-format=terse 2>/dev/null";
  std::FILE* pipe = popen(command.c_str(), "r");
  double rate = 0;
  char line[4096];
  while (pipe != nullptr && std::fgets(line, sizeof line, pipe) != nullptr) {
    // The seventh field of version 3 is the read bandwidth in KiB a second.
    const char* at = line;
    for (int field = 1; at != nullptr && field < 7; ++field) at = (at = std::strchr(at, ';')) != nullptr ? at + 1 : nullptr;
    if (at != nullptr && std::strncmp(line, "3;", 2) == 0) rate = std::atof(at) * 1024;
  }
  if (pipe != nullptr) pclose(pipe);
  return rate;
}

template <class Sum, class Io>
void read_back(benchmark::State& state) {
  const bool all = state.range(0) == 1;
  const auto workers = static_cast<int>(state.range(1));
  Pool::Options options;
  for (auto& n : options.pages.count) n = slots + 1;
  options.pages.template of<space::Request>() = 2;
  auto pool = Pool::make(options).value();
  BundlePages<Model> one;
  one.template of<space::Full>() = 1;
  one.template of<space::Window>() = all ? 1 : 0;
  const std::int64_t bytes = setting("KVIRE_FILE_BYTES", std::int64_t{1} << 30);

  auto tier = FileTier<Model, Host, Sum, Io>::make({.folder = folder(), .budget = Bytes(2 * bytes), .workers = workers, .queued_stores = slots, .durable = false}).value();
  const std::int64_t record = tier.record_bytes(key_of(0), one).count;
  const std::int64_t records = std::max<std::int64_t>(bytes / record, 2);
  std::vector<BundleRefs<Model, HostPage>> pages;
  for (std::int64_t i = 0; i < slots; ++i) pages.push_back(pool.allocate(one).value());
  for (std::int64_t i = 0; i < slots; ++i) {
    Model::for_each([&]<class Entry>() {
      for (const auto& ref : pages[static_cast<std::size_t>(i)].template of<typename Entry::space>()) {
        (void)pool.template entry<Entry>().fill_page(ref.id(), static_cast<unsigned char>(i + 1));
      }
    });
  }
  for (std::int64_t i = 0; i < records; i += slots) {
    std::vector<Event<Host>> events;
    for (std::int64_t j = i; j < std::min(records, i + slots); ++j) events.push_back(tier.store(key_of(j), pool, pages[static_cast<std::size_t>(j - i)]));
    for (const auto& event : events) event.wait().value();
  }
  std::vector<std::int64_t> order(static_cast<std::size_t>(records));
  for (std::int64_t i = 0; i < records; ++i) order[static_cast<std::size_t>(i)] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937_64(7));

  // They take turns, so that a busy machine or disk hits all of them; medians are compared.
  std::vector<double> ours, psync, uring;
  for (auto _ : state) {
    const auto start = Clock::now();
    // A window of loads under way, as requests ask for them.
    std::vector<Event<Host>> events(static_cast<std::size_t>(slots));
    for (std::size_t i = 0; i < order.size(); ++i) {
      auto& event = events[i % events.size()];
      if (event.valid()) event.wait().value();
      event = tier.load(key_of(order[i]), pool, pages[i % events.size()]);
    }
    for (const auto& event : events) {
      if (event.valid()) event.wait().value();
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    state.SetIterationTime(seconds);
    ours.push_back(static_cast<double>(records * record) / seconds);
    psync.push_back(fio(record, records * record, "psync", workers, 1));
    uring.push_back(fio(record, records * record, "io_uring", 1, 32));
  }
  const auto median = [](std::vector<double> list) {
    std::sort(list.begin(), list.end());
    return list[list.size() / 2];
  };
  const double fio_rate = std::max(median(psync), median(uring));
  state.counters["record_bytes"] = static_cast<double>(record);
  state.counters["tier_GB/s"] = median(ours) / 1e9;
  state.counters["fio_psync_GB/s"] = median(psync) / 1e9;
  state.counters["fio_uring_GB/s"] = median(uring) / 1e9;
  if (fio_rate > 0) state.counters["of_fio_%"] = 100 * median(ours) / fio_rate;
  for (std::int64_t i = 0; i < records; ++i) tier.erase(key_of(i));
  std::remove((folder() + "/fio.data").c_str());
}

// Spaces (0: full alone, 1: all), workers.
#define KVIRE_FILE_CASES Args({0, 4})->Args({1, 4})->UseManualTime()->Unit(benchmark::kMillisecond)->Iterations(5)
BENCHMARK(read_back<Xxh64, PosixIo>)->KVIRE_FILE_CASES;
#if KVIRE_HAVE_XXHASH
BENCHMARK(read_back<adapt::Xxh3, PosixIo>)->KVIRE_FILE_CASES;
#endif
#if KVIRE_HAVE_LIBURING && KVIRE_HAVE_XXHASH
BENCHMARK(read_back<adapt::Xxh3, adapt::UringIo>)->KVIRE_FILE_CASES;
#endif

void checksum(benchmark::State& state) {
  std::vector<std::byte> bytes(1 << 20);
  for (auto _ : state) benchmark::DoNotOptimize(Xxh64::of(bytes.data(), 1 << 20));
  state.SetBytesProcessed(state.iterations() << 20);
}
BENCHMARK(checksum);

}  // namespace

BENCHMARK_MAIN();
