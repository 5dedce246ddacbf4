// SPDX-License-Identifier: Apache-2.0
// Kernels of several streams that share pages.
#include <doctest/doctest.h>

#include <atomic>
#include <random>
#include <thread>

#include <kvire/layout/policies.hpp>
#include <kvire/sync/gate.hpp>
#include <kvire/sync/host.hpp>
#include <kvire/transfer/transfer.hpp>
#include <tests/support/pages.hpp>

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::contains;

namespace {

using Keys = Fp8WithScale<16, 64>;
using View = PageView<Keys, Host>;
using ConstView = ConstPageView<Keys, Host>;

/// Two pages of zeros, and streams of a prefill and a decode whose kernels can be made to stand still.
struct Setup {
  Setup() {
    for (const auto& page : owned) CHECK(device.fill_page(page.id(), 0).ok());
  }
  Step<Host> step(Stream<Host>& stream) { return Gate<Host>().begin({}, stream).value(); }
  std::vector<DevicePage> page(int i) const { return {owned[static_cast<std::size_t>(i)].id()}; }

  /// A kernel under a write lease that writes `value` once it is let go, queued on `on`; the lease has gone then.
  void write(const Step<Host>& step, int slot, int i, int value, Stream<Host>& on, bool held = false) {
    auto lease = step.write(device, EntrySlot(slot), page(i));
    REQUIRE(lease.ok());
    launch(
        on,
        [this, value, held, id = page(i)[0].value](const View& view) {
          if (held) kernel->hold(never);
          std::memset(view.page(id), value, Keys::page_bytes);
        },
        lease.value());
  }
  /// A kernel under a read lease: the first byte of the page as it sees it, -1 before.
  void read(const Step<Host>& step, int slot, int i, std::atomic<int>& seen, Stream<Host>& on, bool held = false) {
    auto lease = step.read(device, EntrySlot(slot), page(i));
    REQUIRE(lease.ok());
    launch(
        on,
        [this, &seen, held, id = page(i)[0].value](const ConstView& view) {
          if (held) kernel->hold(never);
          seen = static_cast<int>(view.page(id)[0]);
        },
        lease.value());
  }
  std::byte byte(int slot, int i) const { return pool_access::const_view(device, EntrySlot(slot)).page(page(i)[0].value)[0]; }

  std::shared_ptr<CopyHold> kernel = CopyHold::make();
  const std::atomic<bool> never{false};
  DevicePool<Keys, Host> device = DevicePool<Keys, Host>::make({.layers = 2, .pages = 3, .name = "gpu"}).value();
  std::vector<PageRef<DevicePage>> owned = device.allocate(2).value();
  Stream<Host> prefill = Stream<Host>::make({.name = "prefill"}).value();
  Stream<Host> decode = Stream<Host>::make({.name = "decode"}).value();
};

bool waits(Stream<Host>& stream) { return stream.synchronize(deadline_in(10ms)).error().code == ErrorCode::timeout; }
bool runs(Stream<Host>& stream) { return stream.synchronize(deadline_in(10s)).ok(); }

}  // namespace

TEST_CASE("leases: a reader that names its pages runs behind the kernel of another stream that writes them") {
  Setup s;
  const auto writing = s.step(s.prefill);
  const auto reading = s.step(s.decode);
  s.write(writing, 0, 0, 0x77, s.prefill, true);
  // Another page, and another slot, are none of it.
  std::atomic<int> others[2] = {-1, -1};
  s.read(reading, 0, 1, others[0], s.decode);
  s.read(reading, 1, 0, others[1], s.decode);
  CHECK(runs(s.decode));
  CHECK(others[0] == 0);
  CHECK(others[1] == 0);
  std::atomic<int> seen{-1};
  s.read(reading, 0, 0, seen, s.decode);
  CHECK(waits(s.decode));
  CHECK(seen == -1);
  s.kernel->release();
  CHECK(runs(s.decode));
  CHECK(seen == 0x77);
  CHECK(reading.status().ok());
}

TEST_CASE("leases: a writer runs behind kernels of other streams that write or read its pages, a reader not behind readers") {
  for (const bool reads : {false, true}) {
    CAPTURE(reads);
    Setup s;
    std::atomic<int> before{-1};
    if (reads) {
      s.read(s.step(s.prefill), 0, 0, before, s.prefill, true);
    } else {
      s.write(s.step(s.prefill), 0, 0, 0x77, s.prefill, true);
    }
    const auto step = s.step(s.decode);
    std::atomic<int> beside{-1};
    if (reads) {
      s.read(step, 0, 0, beside, s.decode);
      CHECK(runs(s.decode));
      CHECK(beside == 0);
    }
    s.write(step, 1, 0, 0x11, s.decode);
    s.write(step, 0, 1, 0x22, s.decode);
    CHECK(runs(s.decode));
    s.write(step, 0, 0, 0x33, s.decode);
    CHECK(waits(s.decode));
    s.kernel->release();
    CHECK(runs(s.decode));
    CHECK(runs(s.prefill));
    CHECK(s.byte(0, 0) == std::byte{0x33});
    CHECK(before == (reads ? 0 : -1));
    CHECK(step.status().ok());
  }
}

TEST_CASE("leases: a kernel that did not write its pages fails their readers on other streams, and lets writers go on") {
  Setup s;
  const auto writing = s.step(s.prefill);
  {
    auto lease = writing.write(s.device, EntrySlot(0), s.page(0)).value();
    launch(
        s.prefill,
        [&](const View&) -> Status {
          s.kernel->hold(s.never);
          return Error{ErrorCode::failed, "bad kernel"};
        },
        lease);
  }
  const auto reading = s.step(s.decode);
  std::atomic<int> seen{-1};
  s.read(reading, 0, 0, seen, s.decode);
  const auto again = s.step(s.decode);
  s.write(again, 0, 0, 0x55, s.decode);
  CHECK(waits(s.decode));
  s.kernel->release();
  CHECK(runs(s.decode));
  CHECK(seen == -1);
  REQUIRE_FALSE(reading.status().ok());
  CHECK(contains(reading.status().error().message, "pool gpu: store of device page 1"));
  CHECK(again.status().ok());
  CHECK(s.byte(0, 0) == std::byte{0x55});
  CHECK_FALSE(s.prefill.synchronize(deadline_in(10s)).ok());
}

TEST_CASE("leases: those of one stream are in its order, and wait for one another only where they leave it") {
  Setup s;
  const auto step = s.step(s.prefill);
  {
    // Both alive: a wait for either would never end.
    const auto writer = step.write(s.device, EntrySlot(0), s.page(0)).value();
    const auto reader = step.read(s.device, EntrySlot(0), s.page(0)).value();
    const auto again = step.write(s.device, EntrySlot(0), s.page(0)).value();
    launch(s.prefill, [id = s.page(0)[0].value](const View& view) { view.page(id)[0] = std::byte{0x44}; }, again);
    CHECK(runs(s.prefill));
    // The order of its stream has been counted on since.
    launch(s.decode, [](const View&) {}, writer);
    CHECK(runs(s.decode));
    CHECK(step.status().error().code == ErrorCode::busy);
    CHECK(contains(step.status().error().message, "stream 'decode': a lease of another stream, on which other work on its pages was queued since"));
  }
  // A reader that is taken to another stream is there behind the writer that it follows on its own.
  const auto next = s.step(s.prefill);
  s.write(next, 0, 0, 0x66, s.prefill, true);
  std::atomic<int> seen{-1};
  s.read(next, 0, 0, seen, s.decode);
  CHECK(waits(s.decode));
  s.kernel->release();
  CHECK(runs(s.decode));
  CHECK(seen == 0x66);
  CHECK(next.status().ok());
  // And one of its own stream behind a writer that was taken to another.
  s.kernel = CopyHold::make();
  s.write(next, 0, 0, 0x67, s.decode, true);
  s.read(next, 0, 0, seen, s.prefill);
  CHECK(waits(s.prefill));
  s.kernel->release();
  CHECK(runs(s.prefill));
  CHECK(seen == 0x67);
  CHECK(next.status().ok());
}

TEST_CASE("leases: two threads that write and read the same pages on streams of their own never meet in one") {
  Setup s;
  constexpr int rounds = 300;
  std::atomic<int> torn{0};
  std::atomic<int> lost{0};
  const auto work = [&](Stream<Host>& stream, unsigned seed) {
    std::mt19937 random(seed);
    const std::vector<DevicePage> both{s.page(0)[0], s.page(1)[0]};
    for (int round = 0; round < rounds; ++round) {
      const auto pages = random() % 3 == 0 ? both : s.page(static_cast<int>(random() % 2));
      const EntrySlot slot(static_cast<int>(random() % 2));
      const auto step = s.step(stream);
      if (random() % 2 == 0) {
        const auto lease = step.write(s.device, slot, pages);
        lost += !lease.ok();
        if (lease.ok()) launch(stream, [=](const View& view) { for (const auto page : pages) std::memset(view.page(page.value), round & 0xFF, Keys::page_bytes); }, lease.value());
      } else {
        const auto lease = step.read(s.device, slot, pages);
        lost += !lease.ok();
        if (!lease.ok()) continue;
        launch(
            stream,
            [=, &torn](const ConstView& view) {
              for (const auto page : pages) {
                const std::byte* const bytes = view.page(page.value);
                for (std::int64_t i = 1; i < Keys::page_bytes; ++i) torn += bytes[i] != bytes[0];
              }
            },
            lease.value());
      }
      if (random() % 16 == 0) lost += !runs(stream) || !step.status().ok();
    }
    lost += !runs(stream);
  };
  std::thread other([&] { work(s.decode, 1); });
  work(s.prefill, 2);
  other.join();
  CHECK(torn == 0);
  CHECK(lost == 0);
}
