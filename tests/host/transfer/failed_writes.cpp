// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <functional>
#include <optional>
#include <thread>

#include <kvire/layout/policies.hpp>
#include <kvire/sync/gate.hpp>
#include <kvire/sync/host.hpp>
#include <kvire/transfer/bundle.hpp>
#include <kvire/transfer/transfer.hpp>
#include <tests/support/pages.hpp>

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::contains;
using kvire_test::fill;
using kvire_test::holds;

namespace {

using Keys = Fp8WithScale<16, 64>;
constexpr int layers = 3;

/// Two pages on each side, and copies that fail at one layer as long as they are told to.
struct Setup {
  Setup() {
    for (auto& page : pages) fill(device, page.id(), 1);
    for (auto& source : sources) fill(host, source.id(), 2);
  }
  auto first() const { return plan(std::vector{sources[0]}, std::vector{pages[0]}); }
  auto both() const { return plan(sources, pages); }
  std::vector<DevicePage> first_page() const { return {pages[0].id()}; }
  /// A load of the first page that fails at layer 1, and is over.
  Ticket<Host> fail_load() {
    broken = 1;
    auto ticket = load(host, device, first(), copies, {.name = "restore"}).value();
    CHECK_FALSE(ticket.wait(deadline_in(10s)).ok());
    broken = -1;
    return ticket;
  }
  Status save() { return status_of(backup(device, host, plan(std::vector{other}, std::vector{pages[0]}), copies, {.name = "save"})); }
  Status read(int slot = 0) {
    auto step = gate.begin({}, compute).value();
    auto lease = step.read(device, EntrySlot(slot), first_page());
    return lease.ok() ? Status() : Status(lease.error());
  }
  Status unreadable() { return device.ledger().readable(pages[0].id()); }

  template <class T>
  static Status status_of(const Result<T>& result) {
    return result.ok() ? Status() : Status(result.error());
  }

  std::atomic<int> broken{-1};
  DevicePool<Keys, Host> device = DevicePool<Keys, Host>::make({.layers = layers, .pages = 5, .name = "gpu"}).value();
  HostPool<Keys, Host> host = mirror_of(device, 5).value();
  std::vector<PageRef<DevicePage>> pages = device.allocate(2).value();
  std::vector<PageRef<HostPage>> sources = host.allocate(2).value();
  PageRef<HostPage> other = host.allocate().value();
  Stream<Host> copies = Stream<Host>::make({.name = "copies", .faults = FaultHooks::make([this](const CopyInfo& info) {
                                              return info.layer == broken ? Fault::fail("device error") : Fault::none();
                                            })}).value();
  Stream<Host> compute = Stream<Host>::make({.name = "compute"}).value();
  Gate<Host> gate;
};

void refused(const Status& status, const char* work = "restore") {
  REQUIRE_FALSE(status.ok());
  CHECK(status.error().code == ErrorCode::failed);
  CHECK(contains(status.error().message, "pool gpu: device page 1 cannot be read"));
  CHECK(contains(status.error().message, work));
}

}  // namespace

TEST_CASE("failed load: whoever reads its pages later is told, whether or not the ticket lives") {
  for (const bool kept : {false, true}) {
    CAPTURE(kept);
    Setup s;
    std::optional<Ticket<Host>> ticket = s.fail_load();
    if (!kept) ticket.reset();
    refused(s.unreadable());
    refused(s.save());
    for (int slot = 0; slot < layers; ++slot) refused(s.read(slot));
    CHECK(contains(s.unreadable().error().message, "device error"));
    CHECK(s.device.ledger().readable(s.pages[1].id()).ok());  // not of the plan
    CHECK(s.host.ledger().readable(s.sources[0].id()).ok());  // only read
  }
}

TEST_CASE("failed load: a step that names it reads the layers that it brought") {
  Setup s;
  const auto ticket = s.fail_load();
  auto step = s.gate.begin({ticket}, s.compute).value();
  CHECK(step.read(s.device, EntrySlot(0), s.first_page()).ok());
  CHECK_FALSE(step.read(s.device, EntrySlot(1), s.first_page()).ok());
  CHECK_FALSE(step.read(s.device, EntrySlot(2), s.first_page()).ok());
}

TEST_CASE("dropped load: its pages cannot be read, neither by what was prepared while it could still come") {
  Setup s;
  std::optional<PreparedTransfer<Host>> prepared = prepare_load(s.host, s.device, s.first(), {.name = "restore"}).value();
  auto saving = prepare_backup(s.device, s.host, plan(std::vector{s.other}, std::vector{s.pages[0]}), {.name = "save"}).value();
  prepared.reset();
  refused(Setup::status_of(saving.issue(s.copies)));
  refused(s.save());
  refused(s.read());
}

TEST_CASE("failed backup: the host's page cannot be loaded from") {
  Setup s;
  s.broken = 2;
  CHECK_FALSE(backup(s.device, s.host, s.first(), s.copies, {.name = "save"}).value().wait(deadline_in(10s)).ok());
  s.broken = -1;
  const auto ticket = load(s.host, s.device, s.first(), s.copies);
  REQUIRE_FALSE(ticket.ok());
  CHECK(contains(ticket.error().message, "pool host.gpu: host page 1 cannot be read: transfer 'save' failed to write it, and nothing has since"));
  CHECK(s.unreadable().ok());  // nothing of that load came to the device's page
  CHECK(backup(s.device, s.host, s.first(), s.copies).value().wait(deadline_in(10s)).ok());
  CHECK(load(s.host, s.device, s.first(), s.copies).ok());
}

TEST_CASE("failed load: a page is readable again when it has been wholly written, and while that is under way it is waited for") {
  const std::pair<const char*, std::function<bool(Setup&)>> ways[] = {
      {"the same load again", [](Setup& s) { return load(s.host, s.device, s.first(), s.copies).value().wait(deadline_in(10s)).ok(); }},
      {"a load of more", [](Setup& s) { return load(s.host, s.device, s.both(), s.copies).value().wait(deadline_in(10s)).ok(); }},
      {"from somewhere else",
       [](Setup& s) {
         auto mirror = mirror_of(s.device, 3).value();
         auto page = mirror.allocate(1).value();
         return load(mirror, s.device, plan(page, std::vector{s.pages[0]}), s.copies).value().wait(deadline_in(10s)).ok();
       }},
      {"the caller's word", [](Setup& s) { return s.device.ledger().assume_written(s.first_page()), true; }},
      {"freed and taken again",
       [](Setup& s) {
         s.pages[0].reset();
         s.pages[0] = s.device.allocate().value();
         return s.pages[0].id() == DevicePage(1);
       }},
  };
  for (const auto& [way, write] : ways) {
    const auto& name = way;  // CAPTURE is a lambda, and clang++ 14 takes no structured binding into one
    CAPTURE(name);
    Setup s;
    (void)s.fail_load();
    refused(s.unreadable());
    CHECK(write(s));
    CHECK(s.unreadable().ok());
    CHECK(s.read().ok());
    CHECK(s.save().ok());
  }

  // What waits for the repair shares its fate.
  for (const bool again : {false, true}) {
    CAPTURE(again);
    Setup s;
    (void)s.fail_load();
    auto hold = CopyHold::make();
    auto slow = Stream<Host>::make({.name = "slow", .faults = FaultHooks::make([hold, again](const CopyInfo&) {
                                      const std::atomic<bool> never{false};
                                      (void)hold->hold(never);
                                      return again ? Fault::fail("again") : Fault::none();
                                    })}).value();
    auto repair = load(s.host, s.device, s.first(), slow, {.name = "repair"}).value();
    CHECK(s.unreadable().ok());
    auto saved = backup(s.device, s.host, plan(std::vector{s.other}, std::vector{s.pages[0]}), s.copies).value();
    auto step = s.gate.begin({}, s.compute).value();
    bool ran = false;
    launch(s.compute, [&](auto) { ran = true; }, step.read(s.device, EntrySlot(0), s.first_page()).value());
    hold->release();
    CHECK(repair.wait(deadline_in(10s)).ok() == !again);
    CHECK(saved.wait(deadline_in(10s)).ok() == !again);
    CHECK(s.compute.synchronize(deadline_in(10s)).ok());
    CHECK(ran == !again);
    CHECK(s.unreadable().ok() == !again);
    if (again) refused(s.unreadable(), "restore");
  }
}

TEST_CASE("failed load: a part of the page is not the page") {
  const std::pair<const char*, std::function<bool(Setup&)>> parts[] = {
      {"some layers", [](Setup& s) { return load(s.host, s.device, s.first(), s.copies, {.layers = {1, 2}}).value().wait(deadline_in(10s)).ok(); }},
      {"some tokens",
       [](Setup& s) {
         return load(s.host, s.device, plan_tokens(std::vector{slot_of<Keys>(s.sources[0].id(), 3)}, std::vector{slot_of<Keys>(s.pages[0].id(), 3)}), s.copies)
             .value()
             .wait(deadline_in(10s))
             .ok();
       }},
      {"another page", [](Setup& s) { return load(s.host, s.device, plan(std::vector{s.sources[1]}, std::vector{s.pages[1]}), s.copies).value().wait(deadline_in(10s)).ok(); }},
      {"a kernel",
       [](Setup& s) {
         auto step = s.gate.begin({}, s.compute).value();
         for (int slot = 0; slot < layers; ++slot) launch(s.compute, [](auto) {}, step.write(s.device, EntrySlot(slot), s.first_page()).value());
         return s.compute.synchronize(deadline_in(10s)).ok();
       }},
  };
  for (const auto& [way, write] : parts) {
    const auto& name = way;  // CAPTURE is a lambda, and clang++ 14 takes no structured binding into one
    CAPTURE(name);
    Setup s;
    (void)s.fail_load();
    CHECK(write(s));
    refused(s.unreadable());
  }
}

TEST_CASE("failed load: of some layers or tokens, the same again is enough") {
  Setup s;
  s.broken = 1;
  const LayerRange range{1, 1};
  CHECK_FALSE(load(s.host, s.device, s.first(), s.copies, {.name = "restore", .layers = range}).value().wait(deadline_in(10s)).ok());
  s.broken = -1;
  refused(s.unreadable());
  CHECK(load(s.host, s.device, s.first(), s.copies, {.layers = range}).value().wait(deadline_in(10s)).ok());
  CHECK(s.unreadable().ok());

  const auto tokens = [&](int first, int n) {
    std::vector<HostSlot> from;
    std::vector<DeviceSlot> to;
    for (int i = first; i < first + n; ++i) {
      from.push_back(slot_of<Keys>(s.sources[0].id(), i));
      to.push_back(slot_of<Keys>(s.pages[0].id(), i));
    }
    return load(s.host, s.device, plan_tokens(from, to), s.copies, {.name = "restore"}).value().wait(deadline_in(10s)).ok();
  };
  s.broken = 1;
  CHECK_FALSE(tokens(4, 3));
  s.broken = -1;
  refused(s.unreadable());
  CHECK(tokens(4, 2));
  refused(s.unreadable());
  CHECK(tokens(2, 8));
  CHECK(s.unreadable().ok());
}

TEST_CASE("failed load: what was refused at once, before anybody knew of it, changes nothing") {
  Setup s;
  // At the plan's check, and when it is to be issued.
  CHECK_FALSE(load(s.host, s.device, plan(std::vector{s.sources[0], s.sources[0]}, std::vector{s.pages[0], s.pages[0]}), s.copies).ok());
  CHECK_FALSE(load(s.host, s.device, plan(std::vector{HostPage(4)}, s.first_page()), s.copies).ok());
  CHECK_FALSE(load(s.host, s.device, s.first(), s.copies, {.wait_limit = -1ms}).ok());
  // For its seals: of tokens, and of another pool.
  auto seals = PageSeals::make(s.host).value();
  const auto tokens = plan_tokens(std::vector{slot_of<Keys>(s.sources[0].id(), 1)}, std::vector{slot_of<Keys>(s.pages[0].id(), 1)});
  CHECK_FALSE(load(s.host, s.device, tokens, s.copies, {.seals = seals}).ok());
  auto other = HostPool<Keys, Host>::make({.layers = layers, .pages = 5}).value();
  CHECK_FALSE(load(s.host, s.device, s.first(), s.copies, {.seals = PageSeals::make(other).value()}).ok());
  CHECK_FALSE(backup(s.device, s.host, s.first(), s.copies, {.seals = PageSeals::make(other).value()}).ok());
  CHECK(s.host.ledger().readable(s.sources[0].id()).ok());
  CHECK(s.unreadable().ok());
  CHECK(s.save().ok());
}

TEST_CASE("failed load: a page that was given back meanwhile is its next owner's, without a past") {
  Setup s;
  s.broken = 0;
  auto hold = CopyHold::make();
  auto slow = Stream<Host>::make({.name = "slow", .faults = FaultHooks::make([hold](const CopyInfo&) {
                                    const std::atomic<bool> never{false};
                                    (void)hold->hold(never);
                                    return Fault::fail("late");
                                  })}).value();
  auto ticket = load(s.host, s.device, s.both(), slow, {.name = "restore"}).value();
  s.pages[0].reset();
  hold->release();
  CHECK_FALSE(ticket.wait(deadline_in(10s)).ok());
  CHECK_FALSE(s.device.ledger().readable(DevicePage(2)).ok());
  ticket = {};
  s.pages[0] = s.device.allocate().value();
  REQUIRE(s.pages[0].id() == DevicePage(1));
  CHECK(s.unreadable().ok());
  CHECK_FALSE(s.device.ledger().readable(DevicePage(2)).ok());
}

TEST_CASE("failed step: pages that its kernels did not write cannot be read, until the step is repeated") {
  for (const bool stream_failed : {false, true}) {
    CAPTURE(stream_failed);
    Setup s;
    const std::vector<DevicePage> own{s.pages[1].id()};
    const auto store = [&](Step<Host> step, int slot) {
      launch(s.compute, [](PageView<Keys, Host> view) { std::memset(view.page(2), 7, Keys::page_bytes); }, step.write(s.device, EntrySlot(slot), own).value());
    };
    const auto unreadable = [&] { return s.device.ledger().readable(own[0]); };
    auto hold = CopyHold::make();
    const std::atomic<bool> never{false};
    auto slow = Stream<Host>::make({.name = "slow", .faults = FaultHooks::make([&](const CopyInfo& info) {
                                      if (info.layer != 1) return Fault::none();
                                      (void)hold->hold(never);
                                      return Fault::fail("device error");
                                    })}).value();
    auto ticket = load(s.host, s.device, s.first(), slow, {.name = "restore"}).value();
    {
      auto step = s.gate.begin({ticket}, s.compute).value();
      store(step, 0);
      if (stream_failed) s.compute.launch([]() -> Status { return Error{ErrorCode::failed, "bad kernel"}; });
      store(step, 2);
    }
    if (!stream_failed) CHECK(unreadable().ok());  // that is not known yet
    hold->release();
    CHECK(s.compute.synchronize(deadline_in(10s)).ok() != stream_failed);
    REQUIRE_FALSE(unreadable().ok());
    CHECK(contains(unreadable().error().message, "pool gpu: device page 2 cannot be read: lease failed to write it, and nothing has since"));
    CHECK(contains(unreadable().error().message, stream_failed ? "did not run" : "device error"));
    CHECK_FALSE(backup(s.device, s.host, plan(std::vector{s.sources[1]}, std::vector{s.pages[1]}), s.copies).ok());

    auto again = s.gate.begin({}, s.compute).value();
    (void)again.write(s.device, EntrySlot(2), own).value();  // a lease without a kernel writes nothing
    store(again, 1);                                         // nor does another layer's
    CHECK(s.compute.synchronize(deadline_in(10s)).ok());
    CHECK_FALSE(unreadable().ok());
    store(again, 2);
    CHECK(s.compute.synchronize(deadline_in(10s)).ok());
    CHECK(unreadable().ok());
    CHECK(backup(s.device, s.host, plan(std::vector{s.sources[1]}, std::vector{s.pages[1]}), s.copies).value().wait(deadline_in(10s)).ok());
  }
}

namespace {
struct Schedule {
  static constexpr int layers = 2;
};
struct Latent : CacheEntry<Bf16Contiguous<16, 32>, space::Full, Tokens<1>> {
  static constexpr const char* name = "latent";
};
struct IndexKeys : CacheEntry<Fp8WithScale<4, 32>, space::Full, Tokens<4>> {
  static constexpr const char* name = "index_k";
};
struct Window : CacheEntry<Bf16Contiguous<16, 32>, space::Window, Tokens<1>> {
  static constexpr const char* name = "window";
};
using Model = CacheBundle<Schedule, Latent, IndexKeys, Window>;
}  // namespace

TEST_CASE("failed load: of a bundle, one entry does not make its page readable again, one space does") {
  std::atomic<bool> broken{true};
  auto copies = Stream<Host>::make({.faults = FaultHooks::make([&](const CopyInfo& info) { return broken && info.layer == 1 ? Fault::fail("device error") : Fault::none(); })}).value();
  auto device = DeviceBundlePool<Model, Host>::make({.pages = {{4, 4}}, .name = "gpu"}).value();
  auto host = mirror_of(device, {{4, 4}}).value();
  auto to = device.allocate({{1, 1}}).value();
  auto from = host.allocate({{1, 1}}).value();
  const auto full = plan(from.of<space::Full>(), to.of<space::Full>());
  const auto window = plan(from.of<space::Window>(), to.of<space::Window>());
  CHECK_FALSE(load(host, device, BundlePlan<Model>(in_space<space::Full>(full), in_space<space::Window>(window)), copies).value().wait(deadline_in(10s)).ok());
  broken = false;
  const auto readable = [](auto& ledger) { return ledger.readable(DevicePage(1)).ok(); };
  CHECK_FALSE(readable(device.ledger<space::Full>()));
  CHECK_FALSE(readable(device.ledger<space::Window>()));
  CHECK(load(host.entry<Latent>(), device.entry<Latent>(), full, copies).value().wait(deadline_in(10s)).ok());
  CHECK_FALSE(readable(device.ledger<space::Full>()));
  CHECK(load(host.entry<Window>(), device.entry<Window>(), window, copies).value().wait(deadline_in(10s)).ok());
  CHECK(readable(device.ledger<space::Window>()));
  CHECK_FALSE(readable(device.ledger<space::Full>()));
  CHECK(load(host, device, BundlePlan<Model>(in_space<space::Full>(full), without<space::Window>()), copies).value().wait(deadline_in(10s)).ok());
  CHECK(readable(device.ledger<space::Full>()));
}

TEST_CASE("failed kernel: whether its pages can be read is asked by one thread while another prepares to load them") {
  auto compute = Stream<Host>::make().value();
  auto device = DeviceBundlePool<Model, Host>::make({.pages = {{4, 4}}, .name = "gpu"}).value();
  auto host = mirror_of(device, {{4, 4}}).value();
  auto to = device.allocate({{1, 0}}).value();
  auto from = host.allocate({{1, 0}}).value();
  const auto full = plan(from.of<space::Full>(), to.of<space::Full>());
  {
    const auto step = Gate<Host>().begin({}, compute).value();
    const auto lease = step.write<Latent>(device, LayerId(0), to.of<space::Full>()).value();
    launch(compute, [](const auto&) -> Status { return Error{ErrorCode::failed, "bad kernel"}; }, lease);
  }
  CHECK_FALSE(compute.synchronize(deadline_in(10s)).ok());
  const auto race = [&](const auto& prepare) {
    std::atomic<int> asked{0};
    std::atomic<bool> stop{false};
    std::thread reader([&] {
      for (; !stop; ++asked) (void)device.ledger<space::Full>().readable(DevicePage(1));
    });
    for (int round = 0; round < 2000 || asked < 1000; ++round) prepare().value().withdraw();
    stop = true;
    reader.join();
    CHECK_FALSE(device.ledger<space::Full>().readable(DevicePage(1)).ok());
  };
  race([&] { return prepare_load(host.entry<Latent>(), device.entry<Latent>(), full); });
  race([&] { return prepare_load(host, device, BundlePlan<Model>(in_space<space::Full>(full), without<space::Window>())); });
}
