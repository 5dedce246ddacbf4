// SPDX-License-Identifier: Apache-2.0
// Random loads, backups, aborts and frees under delay, from two threads. Short here; KVIRE_SOAK_SECONDS makes it as long as wanted.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include <kvire/layout/policies.hpp>
#include <kvire/transfer/transfer.cuh>
#include <tests/support/cuda_pages.hpp>

using namespace kvire;
using namespace std::chrono_literals;

namespace {

using Keys = Fp4WithScale<16, 64>;

constexpr std::int64_t device_pages = 160;
constexpr std::int64_t host_pages = 200;

struct Counts {
  std::atomic<long> rounds{0}, transfers{0}, pages{0}, aborts{0}, injected{0}, late{0}, wrong_bytes{0};
};

// Bytes that are not those of `fill_page`.
template <class Pool>
long wrong_bytes(const Pool& pool, typename Pool::page_id page, std::uint32_t seed) {
  long wrong = 0;
  for (int layer = 0; layer < pool.layers(); ++layer) {
    const auto got = kvire_test::page_bytes(pool, page, layer);
    const auto want = kvire_test::page_pattern<Keys>(seed, layer);
    for (std::size_t i = 0; i < got.size(); ++i) wrong += got[i] != want[i];
  }
  return wrong;
}

// All tokens of the pages, in one order on both sides.
template <class Slot, class Refs>
std::vector<Slot> tokens_of(const Refs& pages, std::uint32_t order) {
  std::vector<Slot> slots;
  for (const auto& page : pages) {
    for (int t = 0; t < Keys::tokens_per_page; ++t) slots.push_back(slot_of<Keys>(page.id(), t));
  }
  std::mt19937 random(order);
  if (order != 0) std::shuffle(slots.begin(), slots.end(), random);
  return slots;
}

class Worker {
 public:
  Worker(DevicePool<Keys, Cuda>& device, HostPool<Keys, Cuda>& host, Counts& counts, unsigned number)
      : device_(device), host_(host), counts_(counts), random_(number), seed_(number << 28) {
    stream_ = std::make_unique<Stream<Cuda>>(Stream<Cuda>::make({.name = "worker", .faults = FaultHooks::make([number, n = 0U](const CopyInfo&) mutable {
                                                                   ++n;
                                                                   if (n % 11 == number) return Fault::delay(300us);
                                                                   return n % 17 == 3 ? Fault::fail("injected") : Fault::none();
                                                                 })})
                                                 .value());
  }
  ~Worker() { CHECK(stream_->synchronize(deadline_in(20s)).ok()); }

  void round() {
    ++counts_.rounds;
    const auto n = static_cast<std::int64_t>(random_() % 12 + 1);
    auto source = host_.allocate(n);
    auto target = device_.allocate(n);
    if (!source.ok() || !target.ok()) {
      std::this_thread::sleep_for(200us);
      return;
    }
    const std::uint32_t first = seed_ += 100;
    for (std::size_t i = 0; i < source.value().size(); ++i) kvire_test::fill_page(host_, source.value()[i].id(), first + static_cast<std::uint32_t>(i));
    TransferOptions<Cuda> options;
    options.engine.layer_events = random_() % 2 == 0;
    options.engine.pace = std::array{Pace::full, Pace::gentle, Pace::apart}[random_() % 3];
    options.engine.choice = random_() % 5 == 0 ? EngineChoice::copy_engine : EngineChoice::sm_kernel;
    const std::uint32_t order = random_() % 3 == 0 ? random_() % 1000 : 0;  // token by token
    ++counts_.transfers;
    auto ticket = (order != 0 ? load(host_, device_, plan_tokens(tokens_of<HostSlot>(source.value(), order), tokens_of<DeviceSlot>(target.value(), order)), *stream_, options)
                              : load(host_, device_, plan(source.value(), target.value()), *stream_, options))
                      .value();
    if (random_() % 4 == 0) {
      ++counts_.aborts;  // everything is dropped while the copy may be under way
      return;
    }
    if (random_() % 2 == 0) source.value().clear();  // evicted under the load
    if (!arrived(ticket)) return;
    auto saved = host_.allocate(n);
    if (!saved.ok()) return;
    ++counts_.transfers;
    auto back = backup(device_, host_, plan(saved.value(), target.value()), *stream_, options).value();
    if (random_() % 2 == 0) target.value().clear();
    if (!arrived(back)) return;
    for (std::size_t i = 0; i < saved.value().size(); ++i) {
      counts_.wrong_bytes += wrong_bytes(host_, saved.value()[i].id(), first + static_cast<std::uint32_t>(i));
      if (!target.value().empty()) counts_.wrong_bytes += wrong_bytes(device_, target.value()[i].id(), first + static_cast<std::uint32_t>(i));
    }
    counts_.pages += n;
  }

 private:
  bool arrived(const Ticket<Cuda>& ticket) {
    if (ticket.wait(deadline_in(20s)).ok()) return true;
    ++(ticket.state() == EventState::failed ? counts_.injected : counts_.late);
    return false;
  }

  DevicePool<Keys, Cuda>& device_;
  HostPool<Keys, Cuda>& host_;
  Counts& counts_;
  std::unique_ptr<Stream<Cuda>> stream_;
  std::mt19937 random_;
  std::uint32_t seed_;
};

}  // namespace

TEST_CASE("cuda soak: random loads, backups, aborts and frees under delay lose no page and no byte") {
  const char* const wanted = std::getenv("KVIRE_SOAK_SECONDS");
  const auto stop = Clock::now() + std::chrono::milliseconds(wanted != nullptr ? std::atoi(wanted) * 1000 : 1500);
  auto device = DevicePool<Keys, Cuda>::make({.layers = 2, .pages = device_pages}).value();
  auto host = mirror_of(device, host_pages, {.arrangement = Arrangement::page_first}).value();
  Counts counts;
  const auto work = [&](unsigned number) {
    Worker worker(device, host, counts, number);
    while (Clock::now() < stop) worker.round();
  };
  std::thread other(work, 2);
  work(1);
  other.join();
  device.ledger().drain();
  host.ledger().drain();
  const long lost = static_cast<long>(device_pages - 1 - device.free_pages() + host_pages - 1 - host.free_pages());
  std::printf("soak: %ld rounds, %ld transfers (%ld failed on purpose, %ld late), %ld aborts, %ld pages there and back, %ld pages lost, %ld wrong bytes\n",
              counts.rounds.load(), counts.transfers.load(), counts.injected.load(), counts.late.load(), counts.aborts.load(), counts.pages.load(), lost,
              counts.wrong_bytes.load());
  CHECK(counts.wrong_bytes == 0);
  CHECK(counts.late == 0);
  CHECK(counts.pages > 0);
  CHECK(lost == 0);
  CHECK(device.draining_pages() == 0);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
}
