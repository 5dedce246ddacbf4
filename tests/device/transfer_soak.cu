// SPDX-License-Identifier: Apache-2.0
// Random loads, backups, aborts and frees under delay, from two threads. Short here; KVIRE_SOAK_SECONDS makes it as long as wanted.
#include <doctest/doctest.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>

#include <kvire/layout/policies.hpp>
#include <kvire/transfer/transfer.cuh>
#include <tests/support/cuda_pages.hpp>

using namespace kvire;
using namespace std::chrono_literals;

namespace {
using Keys = Fp4WithScale<16, 64>;

}  // namespace

TEST_CASE("cuda soak: random loads, backups, aborts and frees under delay lose no page and no byte") {
  const char* const wanted = std::getenv("KVIRE_SOAK_SECONDS");
  const auto stop = Clock::now() + std::chrono::milliseconds(wanted != nullptr ? std::atoi(wanted) * 1000 : 1500);
  auto device = DevicePool<Keys, Cuda>::make({.layers = 2, .pages = 160}).value();
  auto host = mirror_of(device, 200, {.arrangement = Arrangement::page_first}).value();
  std::atomic<long> moved{0};
  std::atomic<long> aborted{0};
  std::atomic<int> wrong{0};
  const auto worker = [&](unsigned number) {
    std::mt19937 random(number);
    auto delays = FaultHooks::make([number, n = 0](const CopyInfo&) mutable {
      ++n;
      if (n % 11 == static_cast<int>(number)) return Fault::delay(300us);
      return n % 17 == 3 ? Fault::fail("injected") : Fault::none();
    });
    auto stream = Stream<Cuda>::make({.name = "worker", .faults = delays}).value();
    std::uint32_t seed = number * 1000000;
    while (Clock::now() < stop) {
      const auto n = static_cast<std::int64_t>(random() % 12 + 1);
      auto source = host.allocate(n);
      auto target = device.allocate(n);
      if (!source.ok() || !target.ok()) {
        std::this_thread::sleep_for(200us);
        continue;
      }
      const std::uint32_t first = seed += 100;
      for (std::size_t i = 0; i < source.value().size(); ++i) kvire_test::fill_page(host, source.value()[i].id(), first + static_cast<std::uint32_t>(i));
      TransferOptions<Cuda> options;
      options.engine.layer_events = random() % 2 == 0;
      options.engine.pace = random() % 2 == 0 ? Pace::full : Pace::gentle;
      options.engine.choice = random() % 5 == 0 ? EngineChoice::copy_engine : EngineChoice::sm_kernel;
      auto ticket = load(host, device, plan(source.value(), target.value()), stream, options).value();
      if (random() % 4 == 0) {
        // Aborted: everything is dropped while the copy may be under way.
        ++aborted;
        continue;
      }
      if (random() % 2 == 0) source.value().clear();  // evicted under the load
      if (!ticket.wait(deadline_in(20s)).ok()) {
        if (ticket.state() != EventState::failed) ++wrong;
        continue;
      }
      auto saved = host.allocate(n);
      if (!saved.ok()) continue;
      auto back = backup(device, host, plan(saved.value(), target.value()), stream, options).value();
      target.value().clear();
      if (!back.wait(deadline_in(20s)).ok()) continue;
      for (std::size_t i = 0; i < saved.value().size(); ++i) wrong += !kvire_test::has_page(host, saved.value()[i].id(), first + static_cast<std::uint32_t>(i));
      moved += n;
    }
    (void)stream.synchronize(deadline_in(20s));
  };
  std::thread other([&] { worker(2); });
  worker(1);
  other.join();
  CHECK(wrong == 0);
  CHECK(moved > 0);
  MESSAGE("pages there and back: ", moved.load(), ", loads aborted: ", aborted.load());
  device.ledger().drain();
  host.ledger().drain();
  CHECK(device.free_pages() == 159);
  CHECK(device.draining_pages() == 0);
  CHECK(host.free_pages() == 199);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
}
