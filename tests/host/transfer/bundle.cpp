// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <mutex>

#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/sync/gate.hpp>
#include <kvire/sync/host.hpp>
#include <kvire/transfer/bundle.hpp>
#include <tests/support/pages.hpp>

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::contains;
using kvire_test::fill;
using kvire_test::holds;

namespace {

using Model = preset::deepseek_v4::Flash<preset::deepseek_v4::IndexKeyBf16>;
constexpr int model_layers = 5;  // two of the window alone, then C4, C128, C4

DeviceBundlePool<Model, Host> make_device() {
  DeviceBundlePool<Model, Host>::Options options;
  options.pages.of<space::Full>() = 6;
  options.pages.of<space::Window>() = 4;
  options.pages.of<space::Request>() = 2;
  options.layers = model_layers;
  options.name = "gpu";
  return DeviceBundlePool<Model, Host>::make(options).value();
}

struct Setup {
  explicit Setup(std::shared_ptr<FaultHooks> faults = {})
      : host(mirror_of(device, counts(), {.arrangement = Arrangement::page_first}).value()),
        stream(Stream<Host>::make({.name = "copies", .faults = std::move(faults)}).value()) {
    fill_device(1);
  }
  static BundlePages<Model> counts() {
    BundlePages<Model> pages;
    for (auto& n : pages.count) n = 9;
    return pages;
  }
  void fill_device(std::uint32_t seed) {
    Model::for_each([&]<class Entry>() {
      std::uint32_t n = seed * 1000 + static_cast<std::uint32_t>(Model::index_of<Entry>()) * 10;
      for (const auto& pair : pages<typename Entry::space>()) fill(device.entry<Entry>(), pair, n++);
    });
  }
  template <class Space>
  std::vector<DevicePage> pages() const {
    return plan.of<Space>().second;
  }
  template <class Entry>
  bool device_holds(std::uint32_t seed) const {
    std::uint32_t n = seed * 1000 + static_cast<std::uint32_t>(Model::index_of<Entry>()) * 10;
    for (const auto page : pages<typename Entry::space>()) {
      if (!holds(device.entry<Entry>(), page, n++)) return false;
    }
    return true;
  }

  DeviceBundlePool<Model, Host> device = make_device();
  HostBundlePool<Model, Host> host;
  std::vector<PageRef<DevicePage>> full = device.allocate<space::Full>(2).value();
  std::vector<PageRef<DevicePage>> window = device.allocate<space::Window>(1).value();
  std::vector<PageRef<HostPage>> host_full = host.allocate<space::Full>(3).value();
  std::vector<PageRef<HostPage>> host_window = host.allocate<space::Window>(1).value();
  PagePlan<HostPage, DevicePage> full_pairs = kvire::plan(std::vector{host_full[1], host_full[2]}, full);
  BundlePlan<Model> plan{in_space<space::Full>(full_pairs), in_space<space::Window>(kvire::plan(host_window, window)), without<space::Request>()};
  Stream<Host> stream;
};

}  // namespace

TEST_CASE("bundle: every entry of every space goes and comes back, in one ticket") {
  Setup s;
  auto saved = backup(s.device, s.host, s.plan, s.stream, {.name = "save", .digest = true}).value();
  REQUIRE(saved.wait().ok());
  s.fill_device(2);
  auto loaded = load(s.host, s.device, s.plan, s.stream, {.name = "load", .digest = true}).value();
  REQUIRE(loaded.wait().ok());
  Model::for_each([&]<class Entry>() {
    CAPTURE(Entry::name);
    CHECK(s.device_holds<Entry>(1));
  });
  CHECK(loaded.source_digest() == saved.source_digest());

  // Counted by entry; no entry with pages and layers is absent.
  std::map<std::string, MovedCount> moved;
  for (const auto& count : loaded.moved()) moved[count.entry] = count;
  std::int64_t bytes = 0;
  Model::for_each([&]<class Entry>() {
    const auto pairs = static_cast<std::int64_t>(s.pages<typename Entry::space>().size());
    const std::int64_t slots = Entry::slots(model_layers);
    CAPTURE(Entry::name);
    REQUIRE(moved.count(Entry::name) == (pairs * slots > 0 ? 1u : 0u));
    if (pairs * slots == 0) return;
    CHECK(moved[Entry::name].pages == pairs * slots);
    CHECK(moved[Entry::name].copies == slots);
    CHECK(moved[Entry::name].bytes == pairs * slots * Entry::policy::page_bytes);
    bytes += moved[Entry::name].bytes;
  });
  CHECK(bytes == loaded.bytes());
  CHECK(bytes == 2 * Model::page_bytes<space::Full>(model_layers).count + Model::page_bytes<space::Window>(model_layers).count);
}

TEST_CASE("bundle: all entries of a layer arrive before its event, and layers in order") {
  std::vector<std::pair<int, std::string>> order;
  auto s = std::make_unique<Setup>(FaultHooks::make([&order](const CopyInfo& info) {
    order.push_back({info.layer, info.entry});
    return Fault::none();
  }));
  auto ticket = load(s->host, s->device, s->plan, s->stream).value();
  CHECK(ticket.wait().ok());
  CHECK(ticket.progress()->layers() == model_layers);
  CHECK(s->stream.synchronize().ok());
  for (std::size_t i = 1; i < order.size(); ++i) CHECK(order[i - 1].first <= order[i].first);
  const auto has = [&](int layer, const char* entry) { return std::count(order.begin(), order.end(), std::pair<int, std::string>(layer, entry)) == 1; };
  CHECK(has(0, "window_latent"));
  CHECK_FALSE(has(0, "index_k"));
  CHECK(has(2, "index_k"));
  CHECK(has(2, "c4_latent"));
  CHECK(has(2, "c4_state"));
  CHECK(has(2, "c4_index_state"));
  CHECK(has(3, "c128_latent"));
  CHECK_FALSE(has(3, "index_k"));
  CHECK(has(4, "index_k"));
}

TEST_CASE("bundle: one entry of a layer that fails or is late stops all entries of that layer") {
  for (const bool fails : {true, false}) {
    auto hold = CopyHold::make();
    Setup s(FaultHooks::make([hold, fails](const CopyInfo& info) {
      if (info.layer != 2 || std::string(info.entry) != "index_k") return Fault::none();
      return fails ? Fault::fail("index key copy") : Fault::hold(hold);
    }));
    auto compute = Stream<Host>::make({.name = "compute"}).value();
    Gate<Host> gate;
    auto ticket = load(s.host, s.device, s.plan, s.stream, {.name = "bundle load"}).value();
    auto step = gate.begin({ticket}, compute).value();
    int ran = 0;
    const auto read_all = [&](int layer) {
      Model::for_each([&]<class Entry>() {
        if (!Entry::owns(LayerId(layer))) return;
        const auto lease = step.template read<Entry>(s.device, LayerId(layer));
        if (lease.ok()) launch(compute, [&ran](auto) { ++ran; }, lease.value());
      });
    };
    read_all(1);
    CHECK(compute.synchronize().ok());
    CHECK(ran == 1);
    read_all(2);
    if (fails) {
      CHECK(compute.synchronize().ok());
      CHECK(ran == 1);  // the latents of layer 2 as well: half a layer is no layer
      CHECK_FALSE(ticket.wait().ok());
      const auto known = step.read<Model::C4Latent>(s.device, LayerId(2));
      REQUIRE_FALSE(known.ok());
      CHECK(contains(known.error().message, "index key copy"));
      CHECK_FALSE(step.read<Model::WindowLatent>(s.device, LayerId(3)).ok());
      CHECK(step.read<Model::WindowLatent>(s.device, LayerId(1)).ok());
    } else {
      REQUIRE(hold->wait_reached(deadline_in(10s)));
      CHECK_FALSE(compute.idle());
      hold->release();
      CHECK(compute.synchronize().ok());
      CHECK(ran == 1 + 5);
      CHECK(step.status().ok());
    }
  }
}

TEST_CASE("bundle: layers find their slots, and a layer without the entry has none") {
  Setup s;
  auto compute = Stream<Host>::make().value();
  Gate<Host> gate;
  auto step = gate.begin({}, compute).value();
  CHECK(step.read<Model::IndexK>(s.device, LayerId(4)).ok());
  const auto none = step.read<Model::IndexK>(s.device, LayerId(3));
  REQUIRE_FALSE(none.ok());
  CHECK(none.error().code == ErrorCode::out_of_range);
  CHECK(contains(none.error().message, "gpu.index_k"));
  CHECK(contains(none.error().message, "layer 3 does not own"));
  const auto deep = step.read<Model::IndexK>(s.device, LayerId(6));
  REQUIRE_FALSE(deep.ok());
  CHECK(contains(deep.error().message, "layer 6 is not in 0 to 4"));
  CHECK_FALSE(step.read<Model::IndexK>(s.device, LayerId(-1)).ok());
  // The lease is of the right slot: layer 4 is the second that owns index keys.
  const std::vector<DevicePage> pages{s.full[0].id()};
  launch(
      compute, [id = pages[0].value](auto view) { view.page(id)[0] = std::byte{0x42}; }, step.write<Model::IndexK>(s.device, LayerId(4), pages).value());
  CHECK(compute.synchronize().ok());
  CHECK(pool_access::const_view(s.device.entry<Model::IndexK>(), EntrySlot(1)).page(pages[0].value)[0] == std::byte{0x42});
}

TEST_CASE("bundle: a space that the plan leaves out, or that has no pages this time, stays as it is") {
  Setup s;
  const auto untouched = kvire_test::snapshot(s.host.entry<Model::WindowLatent>());
  const BundlePlan<Model> only(without<space::Request>(), without<space::Window>(), in_space<space::Full>(s.full_pairs));
  CHECK(only.pages() == 2);
  CHECK(backup(s.device, s.host, only, s.stream).value().wait().ok());
  CHECK(kvire_test::snapshot(s.host.entry<Model::WindowLatent>()) == untouched);
  const PagePlan<HostPage, DevicePage> none;
  const BundlePlan<Model> empty(in_space<space::Full>(none), in_space<space::Window>(none), in_space<space::Request>(none));
  CHECK(backup(s.device, s.host, empty, s.stream).value().bytes() == 0);
  // A step that names the transfer does not fail with it there.
  Setup broken(FaultHooks::make([](const CopyInfo&) { return Fault::fail("device error"); }));
  const BundlePlan<Model> full(without<space::Request>(), without<space::Window>(), in_space<space::Full>(broken.full_pairs));
  auto ticket = load(broken.host, broken.device, full, broken.stream).value();
  CHECK_FALSE(ticket.wait().ok());
  auto compute = Stream<Host>::make().value();
  const auto step = Gate<Host>().begin({ticket}, compute).value();
  CHECK_FALSE(step.read<Model::IndexK>(broken.device, LayerId(2)).ok());
  CHECK(step.read<Model::WindowLatent>(broken.device, LayerId(2)).ok());
}

TEST_CASE("bundle: a bad id in any space moves nothing at all") {
  Setup s;
  CHECK(backup(s.device, s.host, s.plan, s.stream).value().wait().ok());
  const auto before = kvire_test::snapshot(s.host.entry<Model::C4Latent>());
  s.fill_device(5);
  const auto with_window = [&](PagePlan<HostPage, DevicePage> window) {
    return backup(s.device, s.host, BundlePlan<Model>(in_space<space::Full>(s.full_pairs), in_space<space::Window>(std::move(window)), without<space::Request>()),
                  s.stream);
  };
  auto bad = s.plan.of<space::Window>();
  bad.first.push_back(HostPage(2));
  const auto cut = with_window(bad);
  REQUIRE_FALSE(cut.ok());
  CHECK(cut.error().code == ErrorCode::mismatch);
  CHECK(contains(cut.error().message, "1 device pages with 2 host pages"));
  bad.second.push_back(DevicePage(9));
  const auto refused = with_window(bad);
  REQUIRE_FALSE(refused.ok());
  CHECK(contains(refused.error().message, "gpu.window: device page 9"));
  bad.second.back() = s.pages<space::Window>()[0];
  CHECK(contains(with_window(bad).error().message, "host.gpu.window: host page 2"));
  CHECK(s.stream.synchronize().ok());
  CHECK(kvire_test::snapshot(s.host.entry<Model::C4Latent>()) == before);
  CHECK(s.device.ledger<space::Full>().holds(s.full[0].id()) == 0);
}

TEST_CASE("bundle: entries of a space share holds, so none is reused before all have arrived") {
  auto hold = CopyHold::make();
  Setup s(FaultHooks::make([hold](const CopyInfo& info) { return std::string(info.entry) == "c4_index_state" ? Fault::hold(hold) : Fault::none(); }));
  auto ticket = load(s.host, s.device, s.plan, s.stream).value();
  REQUIRE(hold->wait_reached(deadline_in(10s)));
  s.full.clear();
  s.window.clear();
  ticket = {};
  CHECK(s.device.ledger<space::Full>().draining_pages() == 2);
  CHECK(s.device.ledger<space::Window>().draining_pages() == 1);
  hold->release();
  CHECK(s.stream.synchronize().ok());
  s.device.drain();
  CHECK(s.device.ledger<space::Full>().draining_pages() == 0);
  CHECK(s.device.ledger<space::Window>().free_pages() == 3);
}
