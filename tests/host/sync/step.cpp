// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <functional>
#include <optional>
#include <thread>

#include <kvire/layout/policies.hpp>
#include <kvire/sync/gate.hpp>
#include <kvire/sync/host.hpp>
#include <kvire/transfer/migrate.hpp>
#include <tests/support/pages.hpp>

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::contains;
using kvire_test::fill;

namespace {

using Keys = Fp8WithScale<16, 64>;
constexpr int layers = 4;

/// One device page with stale bytes and one host page with the right ones.
struct Setup {
  explicit Setup(std::shared_ptr<FaultHooks> faults = {}) : loader(Stream<Host>::make({.name = "loader", .faults = std::move(faults)}).value()) {
    fill(device, page.id(), 1);
    fill(host, source.id(), 2);
  }
  auto pairs() const { return plan(std::vector{source}, std::vector{page}); }
  auto prepared() { return prepare_load(host, device, pairs(), {.name = "load"}).value(); }
  auto load_now() { return load(host, device, pairs(), loader, {.name = "load"}).value(); }

  DevicePool<Keys, Host> device = DevicePool<Keys, Host>::make({.layers = layers, .pages = 4}).value();
  HostPool<Keys, Host> host = mirror_of(device, 4).value();
  PageRef<DevicePage> page = device.allocate().value();
  PageRef<HostPage> source = host.allocate().value();
  Stream<Host> loader;
  Stream<Host> compute = Stream<Host>::make({.name = "compute"}).value();
  Gate<Host> gate{GateOptions{.name = "forward"}};
};

std::vector<std::byte> expected_page(std::uint32_t seed, int layer) {
  std::vector<std::byte> page(static_cast<std::size_t>(Keys::page_bytes));
  for (std::int64_t i = 0; i < Keys::page_bytes; ++i) page[static_cast<std::size_t>(i)] = kvire_test::pattern(seed, layer, i);
  return page;
}

// Each way to the bytes of a page, all through a lease.
using Accessor = std::function<void(const ReadLease<Keys, Host>&, std::int32_t, std::vector<std::byte>&, Stream<Host>&)>;
const std::array<std::pair<const char*, Accessor>, 4> accessors = {{
    {"page pointer",
     [](const auto& lease, std::int32_t page, std::vector<std::byte>& out, Stream<Host>& stream) {
       launch(stream, [page, &out](ConstPageView<Keys, Host> view) { std::memcpy(out.data(), view.page(page), out.size()); }, lease);
     }},
    {"typed view of values and scales",
     [](const auto& lease, std::int32_t page, std::vector<std::byte>& out, Stream<Host>& stream) {
       launch(
           stream,
           [page, &out](ConstPageView<Keys, Host> view) {
             const FieldView<Keys, role::Value> values(view);
             const FieldView<Keys, role::Scale> scales(view);
             for (int t = 0; t < Keys::tokens_per_page; ++t) {
               std::memcpy(out.data() + Keys::offset<role::Value>(t), values.row(page, t), static_cast<std::size_t>(values.bytes));
               std::memcpy(out.data() + Keys::offset<role::Scale>(t), scales.row(page, t), static_cast<std::size_t>(scales.bytes));
             }
           },
           lease);
     }},
    {"continuous gather",
     [](const auto& lease, std::int32_t page, std::vector<std::byte>& out, Stream<Host>& stream) { gather(lease, {page}, out.data(), stream); }},
    {"scales alone, the rest copied beside them",
     [](const auto& lease, std::int32_t page, std::vector<std::byte>& out, Stream<Host>& stream) {
       launch(stream, [page, &out](ConstPageView<Keys, Host> view) { std::memcpy(out.data(), view.page(page), Keys::offset<role::Scale>(0)); }, lease);
       launch(
           stream,
           [page, &out](ConstPageView<Keys, Host> view) {
             const FieldView<Keys, role::Scale> scales(view);
             std::memcpy(out.data() + Keys::offset<role::Scale>(0), scales.row(page, 0),
                         static_cast<std::size_t>(scales.bytes) * static_cast<std::size_t>(Keys::tokens_per_page));
           },
           lease);
     }},
}};

}  // namespace

TEST_CASE("step: no accessor sees a layer before its load, however long the loader is held") {
  for (const auto& accessor : accessors) {
    const auto& name = accessor.first;
    const auto& access = accessor.second;
    for (int layer = 0; layer < layers; ++layer) {
      CAPTURE(name);
      CAPTURE(layer);
      auto hold = CopyHold::make();
      Setup s(FaultHooks::make([hold, layer](const CopyInfo& info) { return info.layer == layer ? Fault::hold(hold) : Fault::none(); }));
      auto ticket = s.load_now();
      auto step = s.gate.begin({ticket}, s.compute).value();
      std::vector<std::byte> got(static_cast<std::size_t>(Keys::page_bytes), std::byte{0xEE});
      access(step.read(s.device, EntrySlot(layer)).value(), s.page.id().value, got, s.compute);
      REQUIRE(hold->wait_reached(deadline_in(10s)));
      std::this_thread::sleep_for(2ms);
      CHECK_FALSE(s.compute.idle());  // nothing was handed out
      hold->release();
      CHECK(s.compute.synchronize(deadline_in(10s)).ok());
      CHECK(got == expected_page(2, layer));
      CHECK(step.status().ok());
    }
  }
}

TEST_CASE("step: earlier layers are read while later ones are still under way") {
  auto hold = CopyHold::make();
  Setup s(FaultHooks::make([hold](const CopyInfo& info) { return info.layer == 2 ? Fault::hold(hold) : Fault::none(); }));
  auto ticket = s.load_now();
  auto step = s.gate.begin({ticket}, s.compute).value();
  std::vector<std::byte> got(static_cast<std::size_t>(Keys::page_bytes));
  for (int layer : {0, 1}) {
    gather(step.read(s.device, EntrySlot(layer)).value(), {s.page.id().value}, got.data(), s.compute);
    CHECK(s.compute.synchronize(deadline_in(10s)).ok());
    CHECK(got == expected_page(2, layer));
  }
  CHECK(ticket.state() == EventState::pending);
  hold->release();
  CHECK(ticket.wait(deadline_in(10s)).ok());
}

TEST_CASE("step: a lease used on another stream waits there too") {
  auto hold = CopyHold::make();
  Setup s(FaultHooks::make([hold](const CopyInfo&) { return Fault::hold(hold); }));
  auto other = Stream<Host>::make({.name = "other"}).value();
  auto ticket = s.load_now();
  auto step = s.gate.begin({ticket}, s.compute).value();
  std::vector<std::byte> got(static_cast<std::size_t>(Keys::page_bytes), std::byte{0xEE});
  gather(step.read(s.device, EntrySlot(1)).value(), {s.page.id().value}, got.data(), other);
  std::this_thread::sleep_for(5ms);
  CHECK_FALSE(other.idle());
  hold->release();
  CHECK(other.synchronize(deadline_in(10s)).ok());
  CHECK(got == expected_page(2, 1));
}

TEST_CASE("gate: a reader that comes before the loader blocks until the load is issued and done") {
  Setup s;
  auto prepared = s.prepared();
  auto progress = prepared.progress();
  std::atomic<bool> issued{false};
  Ticket<Host> ticket;
  std::thread loader([&] {
    std::this_thread::sleep_for(50ms);
    issued = true;
    ticket = prepared.issue(s.loader).value();
  });
  auto step = s.gate.begin({progress}, s.compute, deadline_in(10s)).value();
  CHECK(issued);
  std::vector<std::byte> got(static_cast<std::size_t>(Keys::page_bytes));
  gather(step.read(s.device, EntrySlot(0)).value(), {s.page.id().value}, got.data(), s.compute);
  CHECK(s.compute.synchronize(deadline_in(10s)).ok());
  CHECK(got == expected_page(2, 0));
  loader.join();
}

TEST_CASE("gate: what is never issued fails at the deadline and never passes") {
  Setup s;
  auto prepared = s.prepared();
  const auto step = s.gate.begin({prepared}, s.compute, deadline_in(20ms));
  REQUIRE_FALSE(step.ok());
  CHECK(step.error().code == ErrorCode::timeout);
  CHECK(contains(step.error().message, "forward"));
  CHECK(contains(step.error().message, "'load'"));
  CHECK(contains(step.error().message, "layer 0"));
  // The timeout proved nothing: the transfer can still be issued and named again.
  auto ticket = prepared.issue(s.loader).value();
  CHECK(s.gate.begin({ticket}, s.compute).ok());
}

TEST_CASE("gate: a transfer dropped unissued fails the waiting step and gives its pages back") {
  Setup s;
  auto prepared = std::make_unique<PreparedTransfer<Host>>(s.prepared());
  auto progress = prepared->progress();
  CHECK(s.device.ledger().holds(s.page.id()) == 1);
  std::thread loader([&] {
    std::this_thread::sleep_for(20ms);
    prepared.reset();
  });
  const auto step = s.gate.begin({progress}, s.compute, deadline_in(10s));
  loader.join();
  REQUIRE_FALSE(step.ok());
  CHECK(step.error().code == ErrorCode::failed);
  CHECK(contains(step.error().message, "dropped before it was issued"));
  CHECK(s.device.ledger().holds(s.page.id()) == 0);
  CHECK(progress->done().query() == EventState::failed);
}

TEST_CASE("gate: an empty ticket is an error, an empty list is nothing to wait for") {
  Setup s;
  const Ticket<Host> none;
  CHECK(s.gate.begin({none}, s.compute).error().code == ErrorCode::invalid_argument);
  CHECK(s.gate.begin({}, s.compute).ok());
}

TEST_CASE("gate: a limit below nothing is refused, not taken for one that has passed") {
  Setup s;
  for (const GateOptions& options : {GateOptions{.issue_limit = -1ms}, GateOptions{.load_limit = -1ms}}) {
    const auto step = Gate<Host>(options).begin({}, s.compute);
    REQUIRE_FALSE(step.ok());
    CHECK(step.error().message == "gate 'gate': a limit is -1 ms, below 0");
  }
}

TEST_CASE("step: a load that fails at layer 2 lets layers 0 and 1 through and fails 2 and 3") {
  for (const bool known_before : {false, true}) {
    CAPTURE(known_before);
    auto hold = CopyHold::make();
    std::atomic<bool> broken{true};
    Setup s(FaultHooks::make([hold, &broken](const CopyInfo& info) {
      if (info.layer == 0) return Fault::hold(hold);
      return info.layer == 2 && broken ? Fault::fail("device error") : Fault::none();
    }));
    auto ticket = s.load_now();
    auto step = s.gate.begin({ticket}, s.compute).value();
    if (known_before) {
      hold->release();
      CHECK_FALSE(ticket.wait(deadline_in(10s)).ok());
    }
    std::vector<std::byte> got[layers];
    for (int layer = 0; layer < layers; ++layer) {
      got[layer].assign(static_cast<std::size_t>(Keys::page_bytes), std::byte{0xEE});
      const auto lease = step.read(s.device, EntrySlot(layer));
      CHECK(lease.ok() == (layer < 2 || !known_before));
      if (lease.ok()) gather(lease.value(), {s.page.id().value}, got[layer].data(), s.compute);
      if (!lease.ok()) CHECK(contains(lease.error().message, "device error"));
    }
    hold->release();
    CHECK(s.compute.synchronize(deadline_in(10s)).ok());  // the stream itself is fine: other steps may go on
    CHECK(got[0] == expected_page(2, 0));
    CHECK(got[1] == expected_page(2, 1));
    for (int layer : {2, 3}) CHECK(got[layer][0] == std::byte{0xEE});  // the kernels did nothing
    if (!known_before) {
      REQUIRE_FALSE(step.status().ok());
      CHECK(contains(step.status().error().message, "device error"));
    }
    CHECK_FALSE(ticket.wait(deadline_in(10s)).ok());
    CHECK(ticket.state() == EventState::failed);
    auto progress = ticket.progress();
    CHECK(progress->wait(0).ok());
    CHECK(progress->wait(1).ok());
    CHECK_FALSE(progress->wait(2).ok());
    CHECK_FALSE(progress->wait(3).ok());
    CHECK_FALSE(progress->wait_all().ok());

    broken = false;  // and again, on the same streams and pages
    auto retry = s.load_now();
    auto second = s.gate.begin({retry}, s.compute).value();
    gather(second.read(s.device, EntrySlot(3)).value(), {s.page.id().value}, got[3].data(), s.compute);
    CHECK(s.compute.synchronize(deadline_in(10s)).ok());
    CHECK(second.status().ok());
    CHECK(got[3] == expected_page(2, 3));
  }
}

TEST_CASE("step: a read that names its pages waits for loads that the step did not name") {
  auto hold = CopyHold::make();
  Setup s(FaultHooks::make([hold](const CopyInfo&) { return Fault::hold(hold); }));
  const std::vector<DevicePage> pages{s.page.id()};
  {
    auto prepared = s.prepared();
    auto step = s.gate.begin({}, s.compute).value();
    const auto lease = step.read(s.device, EntrySlot(1), pages);
    REQUIRE_FALSE(lease.ok());
    CHECK(lease.error().code == ErrorCode::busy);
    CHECK(contains(lease.error().message, "has not been issued"));
  }
  auto ticket = s.load_now();
  auto step = s.gate.begin({}, s.compute).value();
  std::vector<std::byte> got(static_cast<std::size_t>(Keys::page_bytes), std::byte{0xEE});
  gather(step.read(s.device, EntrySlot(1), pages).value(), {s.page.id().value}, got.data(), s.compute);
  std::this_thread::sleep_for(5ms);
  CHECK_FALSE(s.compute.idle());
  hold->release();
  CHECK(s.compute.synchronize(deadline_in(10s)).ok());
  CHECK(got == expected_page(2, 1));
}

TEST_CASE("step: layers, pages and owners are checked before a lease exists") {
  Setup s;
  auto step = s.gate.begin({}, s.compute).value();
  for (int slot : {-1, layers, 1 << 30}) {
    const auto lease = step.read(s.device, EntrySlot(slot));
    REQUIRE_FALSE(lease.ok());
    CHECK(lease.error().code == ErrorCode::out_of_range);
    CHECK(contains(lease.error().message, std::to_string(slot)));
    CHECK(contains(lease.error().message, "not in 0 to 3"));
  }
  const auto write = [&](std::vector<DevicePage> pages) { return step.write(s.device, EntrySlot(0), pages); };
  CHECK(write({DevicePage(-1)}).error().code == ErrorCode::out_of_range);
  CHECK(write({DevicePage(4)}).error().code == ErrorCode::out_of_range);
  CHECK_FALSE(write({DevicePage(0)}).ok());  // the null page
  CHECK_FALSE(write({DevicePage(3)}).ok());  // nobody's
  CHECK(write({s.page.id()}).ok());

  const auto shared = s.page;
  const auto refused = write({s.page.id()});
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::busy);
  CHECK(contains(refused.error().message, "device page 1 has 2 owners"));
  CHECK(contains(refused.error().message, s.device.name()));
}

TEST_CASE("step: a write waits for a backup of its page, and a backup for a write") {
  auto hold = CopyHold::make();
  Setup s(FaultHooks::make([hold](const CopyInfo& info) { return info.layer == 0 ? Fault::hold(hold) : Fault::none(); }));
  const std::vector<DevicePage> pages{s.page.id()};
  auto saved = backup(s.device, s.host, s.pairs(), s.loader, {.name = "save"}).value();
  auto step = s.gate.begin({}, s.compute).value();
  const auto overwrite = [&](int layer, int value) {
    const auto lease = step.write(s.device, EntrySlot(layer), pages).value();
    launch(s.compute, [page = pages[0].value, value](PageView<Keys, Host> view) { std::memset(view.page(page), value, Keys::page_bytes); }, lease);
  };
  for (int layer = 0; layer < layers; ++layer) overwrite(layer, 0x5A);
  std::this_thread::sleep_for(5ms);
  CHECK(kvire_test::holds(s.device, s.page.id(), 1, 0, 1));  // not yet written
  hold->release();
  CHECK(s.compute.synchronize(deadline_in(10s)).ok());
  CHECK(saved.wait(deadline_in(10s)).ok());
  CHECK(kvire_test::holds(s.host, s.source.id(), 1));  // the bytes from before the writes
  CHECK_FALSE(kvire_test::holds(s.device, s.page.id(), 1, 0, 1));

  // The other way round: nobody names an event, the lease is what orders the backup.
  auto kernel = CopyHold::make();
  const std::atomic<bool> never{false};
  {
    const auto lease = step.write(s.device, EntrySlot(3), pages).value();
    launch(
        s.compute,
        [&, page = pages[0].value](PageView<Keys, Host> view) {
          kernel->hold(never);
          std::memset(view.page(page), 0x77, Keys::page_bytes);
        },
        lease);
  }
  auto again = backup(s.device, s.host, s.pairs(), s.loader, {.name = "save again"}).value();
  CHECK_FALSE(again.wait(deadline_in(10ms)).ok());
  kernel->release();
  CHECK(again.wait(deadline_in(10s)).ok());
  CHECK(pool_access::const_view(s.host, EntrySlot(3)).page(s.source.id().value)[0] == std::byte{0x77});
}

TEST_CASE("step: a transfer on the step's own stream waits for kernels that its lease was taken to another stream for") {
  Setup s;
  auto other = Stream<Host>::make({.name = "other"}).value();
  const std::vector<DevicePage> pages{s.page.id()};
  const auto set = [page = pages[0].value](PageView<Keys, Host> view) { std::memset(view.page(page), 0x77, Keys::page_bytes); };
  auto kernel = CopyHold::make();
  const std::atomic<bool> never{false};
  auto step = s.gate.begin({}, s.compute).value();
  {
    const auto lease = step.write(s.device, EntrySlot(3), pages).value();
    launch(
        other,
        [&](PageView<Keys, Host> view) {
          kernel->hold(never);
          set(view);
        },
        lease);
  }
  auto saved = backup(s.device, s.host, s.pairs(), s.compute, {.name = "save"}).value();
  CHECK(saved.wait(deadline_in(10ms)).error().code == ErrorCode::timeout);
  kernel->release();
  CHECK(saved.wait(deadline_in(10s)).ok());
  CHECK(pool_access::const_view(s.host, EntrySlot(3)).page(s.source.id().value)[0] == std::byte{0x77});

  // The other way round there is no wait left to queue: the transfer has counted on the stream's order, so the kernel does not run.
  const auto lease = step.write(s.device, EntrySlot(0), pages).value();
  launch(s.compute, set, lease);
  CHECK(backup(s.device, s.host, s.pairs(), s.compute).value().wait(deadline_in(10s)).ok());
  CHECK(step.status().ok());
  fill(s.device, s.page.id(), 1);
  launch(other, set, lease);
  CHECK(other.synchronize(deadline_in(10s)).ok());
  CHECK(step.status().error().code == ErrorCode::busy);
  CHECK(contains(step.status().error().message, "stream 'other': a lease of another stream"));
  CHECK(kvire_test::holds(s.device, s.page.id(), 1));
}

TEST_CASE("step: a lease and a transfer of its pages that meet on two threads never wait for each other") {
  Setup s;
  Gate<Host> gate{GateOptions{.load_limit = 5s}};
  const std::vector<DevicePage> pages{s.page.id()};
  constexpr int rounds = 1000;
  std::atomic<int> go{0};
  std::atomic<int> issued{0};
  std::atomic<int> lost{0};
  std::optional<PreparedTransfer<Host>> transfer;
  std::thread loader([&] {
    for (int round = 1; round <= rounds; ++round) {
      for (int spins = 0; go.load() < round; ++spins) {
        if (spins > 20'000) std::this_thread::yield();
      }
      auto ticket = transfer->issue(s.loader);
      if (!ticket.ok() || !ticket.value().wait(deadline_in(10s)).ok()) ++lost;
      transfer.reset();
      issued.store(round);
    }
  });
  for (int round = 1; round <= rounds; ++round) {
    transfer = prepare_backup(s.device, s.host, s.pairs(), {.wait_limit = 5s}).value();
    auto step = gate.begin({}, s.compute).value();
    go.store(round);
    for (volatile int work = 0; work < round % 200;) work = work + 1;
    {
      const auto lease = step.write(s.device, EntrySlot(0), pages);
      if (lease.ok()) launch(s.compute, [](PageView<Keys, Host>) {}, lease.value());
    }
    while (issued.load() < round) std::this_thread::yield();
    if (!s.compute.synchronize(deadline_in(10s)).ok() || !step.status().ok()) ++lost;
  }
  loader.join();
  CHECK(lost == 0);
}

TEST_CASE("step: a write waits for both sides of a transfer within one pool, whose failure it shares") {
  auto hold = CopyHold::make();
  Setup s;
  auto mover = Stream<Host>::make({.faults = FaultHooks::make([hold](const CopyInfo&) {
                                     const std::atomic<bool> never{false};
                                     hold->hold(never);
                                     return Fault::fail("lost");
                                   })}).value();
  auto other = s.device.allocate().value();
  auto moved = migrate(s.device, s.device, plan(std::vector{s.page}, std::vector{other}), mover).value();
  const std::vector<DevicePage> pages{s.page.id(), other.id()};
  auto step = s.gate.begin({}, s.compute).value();
  bool ran = false;
  launch(s.compute, [&](PageView<Keys, Host>) { ran = true; }, step.write(s.device, EntrySlot(0), pages).value());
  hold->release();
  CHECK(s.compute.synchronize(deadline_in(10s)).ok());
  CHECK_FALSE(moved.wait(deadline_in(10s)).ok());
  CHECK(contains(step.status().error().message, "lost"));
  CHECK_FALSE(ran);
}

TEST_CASE("step: a write to a page whose load was not issued is refused, one under way is waited for") {
  auto hold = CopyHold::make();
  Setup s(FaultHooks::make([hold](const CopyInfo&) { return Fault::hold(hold); }));
  const std::vector<DevicePage> pages{s.page.id()};
  auto prepared = s.prepared();
  auto step = s.gate.begin({}, s.compute).value();
  const auto refused = step.write(s.device, EntrySlot(0), pages);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::busy);
  CHECK(contains(refused.error().message, "has not been issued"));

  auto ticket = prepared.issue(s.loader).value();
  auto named = s.gate.begin({ticket}, s.compute).value();
  {
    const auto lease = named.write(s.device, EntrySlot(0), pages).value();
    launch(s.compute, [page = pages[0].value](PageView<Keys, Host> view) { view.page(page)[0] = std::byte{0x11}; }, lease);
  }
  hold->release();
  CHECK(s.compute.synchronize(deadline_in(10s)).ok());
  CHECK(ticket.wait(deadline_in(10s)).ok());
  const auto* const page = pool_access::const_view(s.device, EntrySlot(0)).page(pages[0].value);
  CHECK(page[0] == std::byte{0x11});                        // the write came last
  CHECK(page[1] == kvire_test::pattern(2, 0, 1));           // on top of the load
}

TEST_CASE("step: pages of a lease are not reused before its kernels have run, and their memory lives as long") {
  auto stream = Stream<Host>::make().value();
  auto gate_event = Event<Host>::make();
  std::byte seen{};
  {
    auto device = DevicePool<Keys, Host>::make({.layers = 1, .pages = 2}).value();
    auto page = device.allocate().value();
    const std::vector<DevicePage> pages{page.id()};
    Gate<Host> gate;
    auto step = gate.begin({}, stream).value();
    stream.wait(gate_event);
    launch(
        stream, [&seen, id = page.id().value](PageView<Keys, Host> view) { view.page(id)[5] = std::byte{9}, seen = view.page(id)[5]; },
        step.write(device, EntrySlot(0), pages).value());
    page.reset();
    CHECK(device.draining_pages() == 1);
    CHECK(device.allocate().error().code == ErrorCode::exhausted);
  }  // the pool itself goes
  gate_event.complete();
  CHECK(stream.synchronize(deadline_in(10s)).ok());
  CHECK(seen == std::byte{9});
}

TEST_CASE("leases: a write lease covers its own pages, assume_ready covers all") {
  Setup s;
  auto step = s.gate.begin({}, s.compute).value();
  const std::vector<DevicePage> pages{s.page.id()};
  const auto lease = step.write(s.device, EntrySlot(0), pages).value();
  CHECK(kernel_access::covers(lease, s.page.id().value));
  CHECK_FALSE(kernel_access::covers(lease, s.page.id().value + 1));
  const auto none = step.write(s.device, EntrySlot(0), std::span<const DevicePage>()).value();
  CHECK_FALSE(kernel_access::covers(none, s.page.id().value));
  const auto any = assume_ready(pool_access::view(s.device, EntrySlot(0)));
  CHECK(kernel_access::covers(any, 3));
  CHECK(kernel_access::ready(any));
}

TEST_CASE("gather: -1 is left out, an id beyond the pool fails the stream and never reads") {
  Setup s;
  auto step = s.gate.begin({}, s.compute).value();
  const auto lease = step.read(s.device, EntrySlot(0)).value();
  std::vector<std::byte> got(static_cast<std::size_t>(Keys::page_bytes) * 2, std::byte{0xEE});
  gather(lease, {-1, s.page.id().value}, got.data(), s.compute);
  CHECK(s.compute.synchronize().ok());
  CHECK(got[0] == std::byte{0xEE});
  CHECK(got[static_cast<std::size_t>(Keys::page_bytes)] == kvire_test::pattern(1, 0, 0));
  gather(lease, {0x7FFFFFFF}, got.data(), s.compute);
  const auto status = s.compute.synchronize();
  REQUIRE_FALSE(status.ok());
  CHECK(contains(status.error().message, "2147483647 is not below 4"));
}

TEST_CASE("leases: a kernel that is given an empty lease fails the stream and does not run") {
  auto stream = Stream<Host>::make().value();
  bool ran = false;
  launch(stream, [&](ConstPageView<Keys, Host>) { ran = true; }, ReadLease<Keys, Host>());
  const Status status = stream.synchronize();
  REQUIRE_FALSE(status.ok());
  CHECK(status.error().code == ErrorCode::invalid_argument);
  CHECK(contains(status.error().message, "empty lease"));
  CHECK_FALSE(ran);
  CHECK_FALSE(kernel_access::covers(WriteLease<Keys, Host>(), 1));
}

TEST_CASE("leases: by page references as by ids") {
  Setup s;
  auto step = s.gate.begin({}, s.compute).value();
  const auto pages = s.device.allocate(2).value();
  {
    const auto written = step.write(s.device, EntrySlot(0), pages);
    REQUIRE(written.ok());
    CHECK(kernel_access::covers(written.value(), pages[1].id().value));
    CHECK_FALSE(kernel_access::covers(written.value(), s.page.id().value));
  }
  const auto ref = step.read(s.device, EntrySlot(0), pages);
  REQUIRE(ref.ok());
  CHECK(s.device.ledger().holds(pages[0].id()) == 1);
  const auto none = step.read(s.device, EntrySlot(0), std::vector<PageRef<DevicePage>>(1));
  REQUIRE_FALSE(none.ok());
  CHECK(none.error().code == ErrorCode::out_of_range);
}

TEST_CASE("step failure: no lock is held while what is watched is asked") {
  detail::StepFailure failure;
  std::atomic<bool> through{false};
  std::thread other;
  failure.watch([&] {
    if (other.joinable()) return Status();
    other = std::thread([&] {
      failure.watch([] { return Status(); });
      through = true;
    });
    const Deadline deadline = deadline_in(10s);
    while (!through && Clock::now() < deadline) std::this_thread::yield();
    CHECK(through);
    return Status();
  });
  CHECK(failure.status().ok());
  other.join();
}

TEST_CASE("step failure: what is watched may ask, under a lock of its own, what was watched before") {
  detail::StepFailure failure;
  std::mutex load;
  std::mutex lease;
  std::mutex copy;
  std::atomic<bool> lost{false};
  failure.watch([&] {
    std::lock_guard lock(load);
    return Status();
  });
  // As the verdicts of events ask: the end of a lease, and a copy that waited for it and that the step reads.
  const auto ask_lease = [&, watched = failure.watched()] {
    std::lock_guard lock(lease);
    return failure.known(watched);
  };
  const auto ask_copy = [&] {
    std::lock_guard lock(copy);
    const Status status = ask_lease();
    return lost ? Status(Error{ErrorCode::failed, "lost"}) : status;
  };
  failure.watch(ask_copy);
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 1000; ++round) CHECK((i == 0 ? failure.status() : i == 1 ? ask_copy() : ask_lease()).ok());
    });
  }
  for (auto& thread : threads) thread.join();
  lost = true;
  CHECK(ask_lease().ok());
  CHECK(failure.status().error().message == "lost");
  CHECK(failure.known(1).ok());
  lost = false;
  CHECK_FALSE(failure.status().ok());  // for good
}
