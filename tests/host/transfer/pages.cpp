// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <thread>

#include <kvire/preset/all.hpp>
#include <kvire/sync/gate.hpp>
#include <kvire/sync/host.hpp>
#include <kvire/transfer/transfer.hpp>
#include <tests/support/pages.hpp>

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::contains;
using kvire_test::fill;
using kvire_test::holds;
using kvire_test::snapshot;

namespace {
using Keys = Fp8WithScale<16, 64>;
using Device = DevicePool<Keys, Host>;
using Mirror = HostPool<Keys, Host>;
Stream<Host> stream_with(FaultHooks::Decide decide) {
  return Stream<Host>::make({.name = "copies", .faults = FaultHooks::make(std::move(decide))}).value();
}
}  // namespace

TEST_CASE_TEMPLATE("transfer: every byte of every page comes back, in every arrangement", P, Fp8WithScale<64, 128>, Fp8WithScaleInterleaved<64, 128>,
                   Bf16Contiguous<64, 128>, Fp4WithScale<64, 128>, preset::deepseek_v4::Latent<64>, preset::deepseek_v4::Latent<2>,
                   preset::deepseek_v4::Latent<256>, preset::deepseek_v3_2::Latent<64>, F32Rows<8, 32>, KvPages<16, 2, 64>) {
  auto stream = Stream<Host>::make().value();
  for (const Arrangement on_device : {Arrangement::layer_first, Arrangement::page_first}) {
    for (const Arrangement on_host : {Arrangement::layer_first, Arrangement::page_first}) {
      auto device = DevicePool<P, Host>::make({.layers = 3, .pages = 5, .arrangement = on_device}).value();
      auto host = mirror_of(device, 7, {.arrangement = on_host}).value();
      auto pages = device.allocate(3).value();
      auto sources = host.allocate(5).value();
      // Not in step: device page 3 goes to host page 1, page 1 to page 5, page 2 to page 4.
      const std::vector<PagePair<HostPage, DevicePage>> pairs{
          {HostPage(1), DevicePage(3)}, {HostPage(5), DevicePage(1)}, {HostPage(4), DevicePage(2)}};
      for (auto& page : pages) fill(device, page.id(), static_cast<std::uint32_t>(page.id().value));
      auto saved = backup(device, host, plan(pairs), stream, {.digest = true}).value();
      REQUIRE(saved.wait(deadline_in(10s)).ok());
      CHECK(holds(host, HostPage(1), 3));
      CHECK(holds(host, HostPage(5), 1));
      CHECK(holds(host, HostPage(4), 2));
      for (auto& page : pages) fill(device, page.id(), 99);
      auto loaded = load(host, device, plan(pairs), stream, {.digest = true}).value();
      REQUIRE(loaded.wait(deadline_in(10s)).ok());
      for (auto& page : pages) CHECK(holds(device, page.id(), static_cast<std::uint32_t>(page.id().value)));
      CHECK(loaded.destination_digest() == saved.source_digest());
      REQUIRE(loaded.moved().size() == 1);
      const auto moved = loaded.moved()[0];
      CHECK(moved.copies == 3);
      CHECK(moved.pages == 9);
      CHECK(moved.tokens == 9 * P::tokens_per_page);
      CHECK(moved.bytes == 9 * P::page_bytes);
      CHECK(moved.engine == Engine::host_copy);
      CHECK(moved.granularity == Granularity::page);
      CHECK(loaded.bytes() == moved.bytes);
    }
  }
}

TEST_CASE("transfer: no token of a page is cut off (a mirror once held 33 of 64)") {
  using P = Bf16Contiguous<64, 128>;
  auto device = DevicePool<P, Host>::make({.layers = 1, .pages = 4}).value();
  auto host = mirror_of(device, 4).value();
  auto pages = device.allocate(3).value();
  auto sources = host.allocate(2).value();
  auto stream = Stream<Host>::make().value();
  const auto view = pool_access::view(device, EntrySlot(0));
  const auto value = [](int page, int token) { return static_cast<std::uint16_t>(page * 64 + token); };
  for (int page : {3, 1}) {
    for (int t = 0; t < 64; ++t) {
      const std::uint16_t v = value(page, t);
      for (int i = 0; i < 128; ++i) std::memcpy(view.page(page) + P::offset<role::Value>(t) + 2 * i, &v, 2);
    }
  }
  const auto table = plan(std::vector{sources[0].id(), sources[1].id()}, std::vector{DevicePage(3), DevicePage(1)});
  CHECK(backup(device, host, table, stream).value().wait().ok());
  for (int page : {3, 1}) std::memset(view.page(page), 0, P::page_bytes);
  CHECK(load(host, device, table, stream).value().wait().ok());
  for (int page : {3, 1}) {
    for (int t = 0; t < 64; ++t) {
      std::uint16_t v = 0;
      std::memcpy(&v, view.page(page) + P::offset<role::Value>(t) + 2 * 127, 2);
      CHECK(v == value(page, t));
    }
  }
}

TEST_CASE("transfer: bad ids move no byte and are named with pool and bound") {
  auto device = Device::make({.layers = 2, .pages = 8, .name = "index_k"}).value();
  auto host = mirror_of(device, 16).value();
  auto pages = device.allocate(7).value();
  auto sources = host.allocate(12).value();
  for (auto& p : pages) fill(device, p.id(), 1);
  for (auto& p : sources) fill(host, p.id(), 2);
  auto stream = Stream<Host>::make().value();
  const auto device_before = snapshot(device);
  const auto host_before = snapshot(host);

  // What is right: host page 11 belongs to device page 2, and only to it.
  const auto refuse = [&](std::vector<HostPage> from, std::vector<DevicePage> to, ErrorCode code, std::initializer_list<const char*> words) {
    for (const bool is_load : {true, false}) {
      const auto got = is_load ? load(host, device, plan(from, to), stream) : backup(device, host, plan(from, to), stream);
      REQUIRE_FALSE(got.ok());
      CHECK(got.error().code == code);
      for (const char* word : words) {
        CAPTURE(got.error().message);
        CHECK(contains(got.error().message, word));
      }
    }
  };
  const HostPage h(3);
  refuse({h}, {DevicePage(11)}, ErrorCode::out_of_range, {"index_k", "device page 11", "not below 8"});  // a host id in the device's place
  refuse({h}, {DevicePage(-1)}, ErrorCode::out_of_range, {"index_k", "device page -1", "negative"});
  refuse({h}, {DevicePage(0x7FFFFFFF)}, ErrorCode::out_of_range, {"2147483647"});
  refuse({h}, {DevicePage(0)}, ErrorCode::invalid_argument, {"null page"});
  refuse({HostPage(16)}, {DevicePage(2)}, ErrorCode::out_of_range, {"host page 16", "not below 16"});
  refuse({HostPage(-7)}, {DevicePage(2)}, ErrorCode::out_of_range, {"host page -7"});
  refuse({HostPage(15)}, {DevicePage(2)}, ErrorCode::invalid_argument, {"host page 15", "never allocated"});
  // One bad id among good ones, as padded page tables have them.
  refuse({HostPage(1), HostPage(2), h, HostPage(4)}, {DevicePage(5), DevicePage(-1), DevicePage(7), DevicePage(-1)}, ErrorCode::out_of_range, {"negative"});
  refuse({h, HostPage(4)}, {DevicePage(2), DevicePage(-1)}, ErrorCode::out_of_range, {"negative"});
  // Lists of different lengths: 128 tokens are 2 pages, 129 are 3; 25,000 are 391 against 1.
  refuse({h, HostPage(4), HostPage(5)}, {DevicePage(1), DevicePage(2)}, ErrorCode::mismatch, {"index_k", "3 host pages", "2 device pages"});
  refuse(std::vector<HostPage>(391, h), {DevicePage(1)}, ErrorCode::mismatch, {"391 host pages", "1 device page"});
  // Destinations twice.
  CHECK(load(host, device, plan(std::vector{h, HostPage(4)}, std::vector{DevicePage(2), DevicePage(2)}), stream).error().code == ErrorCode::duplicate);
  CHECK(backup(device, host, plan(std::vector{h, h}, std::vector{DevicePage(2), DevicePage(3)}), stream).error().code == ErrorCode::duplicate);
  // A page that was freed, by id and by generation.
  const auto key = device.ledger().key(DevicePage(7));
  pages.pop_back();
  refuse({h}, {DevicePage(7)}, ErrorCode::duplicate, {"device page 7", "free"});
  pages.push_back(device.allocate().value());
  REQUIRE(pages.back().id() == DevicePage(7));
  const auto stale = load(host, device, plan(std::vector{host.ledger().key(h)}, std::vector{key}), stream);
  REQUIRE_FALSE(stale.ok());
  CHECK(stale.error().code == ErrorCode::stale);
  CHECK(contains(stale.error().message, "device page 7"));

  CHECK(stream.synchronize().ok());
  CHECK(snapshot(device) == device_before);
  CHECK(snapshot(host) == host_before);
  // No refusal left a hold behind, and other transfers go on; a source may repeat.
  for (auto& p : pages) CHECK(device.ledger().holds(p.id()) == 0);
  for (auto& p : sources) CHECK(host.ledger().holds(p.id()) == 0);
  CHECK(load(host, device, plan(std::vector{HostPage(11), HostPage(11)}, std::vector{DevicePage(2), DevicePage(7)}), stream).value().wait().ok());
  CHECK(holds(device, DevicePage(2), 2));
  CHECK(holds(device, DevicePage(7), 2));
}

TEST_CASE("transfer: pools of different depth and layers out of range are refused") {
  auto device = Device::make({.layers = 2, .pages = 4}).value();
  auto deeper = HostPool<Keys, Host>::make({.layers = 3, .pages = 4}).value();
  auto stream = Stream<Host>::make().value();
  const auto got = load(deeper, device, plan(std::vector<HostPage>{}, std::vector<DevicePage>{}), stream);
  REQUIRE_FALSE(got.ok());
  CHECK(got.error().code == ErrorCode::mismatch);
  CHECK(contains(got.error().message, "3 layers against 2"));
  auto host = mirror_of(device, 4).value();
  for (const LayerRange range : {LayerRange{1, 2}, LayerRange{-1, 1}, LayerRange{3, 0}, LayerRange{3, -1}}) {
    CHECK(load(host, device, plan(std::vector<HostPage>{}, std::vector<DevicePage>{}), stream, {.layers = range}).error().code == ErrorCode::out_of_range);
  }
  // Nothing to move is legal, whatever is to be checked, and nothing is copied.
  auto broken = stream_with([](const CopyInfo&) { return Fault::fail(); });
  for (const bool checked : {false, true}) {
    const TransferOptions<Host> options{.digest = checked, .seals = checked ? PageSeals::make(host).value() : nullptr};
    const auto pages = load(host, device, plan(std::vector<HostPage>{}, std::vector<DevicePage>{}), broken, options).value();
    CHECK(pages.wait().ok());
    CHECK(pages.moved().empty());
    CHECK(backup(device, host, plan(std::vector<HostPage>{}, std::vector<DevicePage>{}), broken, options).value().wait().ok());
    const TransferOptions<Host> of_tokens{.digest = checked};
    CHECK(load(host, device, plan_tokens(std::vector<HostSlot>{}, std::vector<DeviceSlot>{}), broken, of_tokens).value().wait().ok());
  }
}

TEST_CASE("transfer: layers arrive in order, and only those asked for") {
  auto device = Device::make({.layers = 6, .pages = 4}).value();
  auto host = mirror_of(device, 4).value();
  auto page = device.allocate().value();
  auto source = host.allocate().value();
  fill(device, page.id(), 1);
  fill(host, source.id(), 2);
  std::vector<int> order;
  auto stream = stream_with([&order](const CopyInfo& info) {
    order.push_back(info.layer);
    return Fault::none();
  });
  auto ticket = load(host, device, plan(std::vector{source}, std::vector{page}), stream, {.layers = {2, 3}}).value();
  CHECK(ticket.wait().ok());
  CHECK(stream.synchronize().ok());
  CHECK(order == std::vector<int>{2, 3, 4});
  CHECK(holds(device, page.id(), 1, 0, 2));
  CHECK(holds(device, page.id(), 2, 2, 5));
  CHECK(holds(device, page.id(), 1, 5, 6));
  CHECK(ticket.progress()->layers() == 3);
}

TEST_CASE("transfer: an aborted transfer keeps its pages until its copies have stopped") {
  // A holds pages 2 to 6 of 8 with a stalled copy and is aborted; B wants six pages.
  auto hold = CopyHold::make();
  auto stream = stream_with([hold](const CopyInfo&) { return Fault::hold(hold); });
  auto device = Device::make({.layers = 1, .pages = 8}).value();
  auto host = mirror_of(device, 8).value();
  auto first = device.allocate().value();
  auto a = device.allocate(5).value();
  REQUIRE(a.front().id() == DevicePage(2));
  REQUIRE(a.back().id() == DevicePage(6));
  auto sources = host.allocate(5).value();
  for (auto& p : sources) fill(host, p.id(), 7);
  {
    auto ticket = load(host, device, plan(sources, a), stream).value();
    REQUIRE(hold->wait_reached(deadline_in(10s)));
    first.reset();
    a.clear();
    CHECK(ticket.wait(deadline_in(5ms)).error().code == ErrorCode::timeout);  // proves nothing
    CHECK(device.draining_pages() == 5);
  }  // abort: ticket, pages and all; returns at once
  CHECK(device.draining_pages() == 5);
  CHECK(device.free_pages() == 2);
  CHECK(device.allocate(6).error().code == ErrorCode::exhausted);
  auto b = device.allocate(2).value();
  for (auto& p : b) {
    CHECK((p.id().value < 2 || p.id().value > 6));
    fill(device, p.id(), 42);
  }
  hold->release();
  CHECK(stream.synchronize().ok());
  auto rest = device.allocate(5).value();  // exactly once
  CHECK(device.draining_pages() == 0);
  CHECK(device.free_pages() == 0);
  CHECK(device.allocate().error().code == ErrorCode::exhausted);
  for (auto& p : b) CHECK(holds(device, p.id(), 42));
}

TEST_CASE("transfer: sources destroyed right after the call are still the ones that arrive") {
  auto hold = CopyHold::make();
  auto stream = stream_with([hold](const CopyInfo&) { return Fault::hold(hold); });
  auto device = Device::make({.layers = 2, .pages = 8}).value();
  auto pages = device.allocate(3).value();
  std::vector<Ticket<Host>> tickets;
  for (std::uint32_t i = 0; i < 3; ++i) {
    auto host = mirror_of(device, 3).value();
    auto source = host.allocate().value();
    fill(host, source.id(), 10 + i);
    auto ticket = load(host, device, plan(std::vector{source}, std::vector{pages[i]}), stream).value();
    if (i != 1) tickets.push_back(std::move(ticket));  // and one without a ticket
  }
  // Whatever memory is handed out now must not be theirs.
  auto next = mirror_of(device, 16).value();
  auto overwritten = next.allocate(15).value();
  for (auto& p : overwritten) CHECK(next.fill_page(p.id(), 0x5A).ok());
  hold->release();
  CHECK(stream.synchronize().ok());
  for (std::uint32_t i = 0; i < 3; ++i) CHECK(holds(device, pages[i].id(), 10 + i));
}

TEST_CASE("transfer: destroying the destination pool under a transfer is safe") {
  auto hold = CopyHold::make();
  auto stream = stream_with([hold](const CopyInfo&) { return Fault::hold(hold); });
  Ticket<Host> ticket;
  {
    auto device = Device::make({.layers = 1, .pages = 4}).value();
    auto host = mirror_of(device, 4).value();
    ticket = load(host, device, plan(host.allocate(2).value(), device.allocate(2).value()), stream).value();
  }
  hold->release();
  CHECK(ticket.wait().ok());
}

TEST_CASE("transfer: a host page under a load is not evictable, and a failed backup loses nothing") {
  // Four host pages, all in use; three free device pages are wanted and one is there.
  auto hold = CopyHold::make();
  auto broken = std::make_shared<std::atomic<bool>>(false);
  auto stream = stream_with([hold, broken](const CopyInfo&) { return *broken ? Fault::fail("no") : Fault::hold(hold); });
  auto device = Device::make({.layers = 2, .pages = 5}).value();
  auto host = mirror_of(device, 5).value();
  auto cached = device.allocate(3).value();
  auto prefix = host.allocate(4).value();
  for (auto& p : cached) fill(device, p.id(), static_cast<std::uint32_t>(p.id().value));
  for (auto& p : prefix) fill(host, p.id(), 20 + static_cast<std::uint32_t>(p.id().value));
  CHECK(device.allocate(3).error().code == ErrorCode::exhausted);  // no space, and nothing was taken
  CHECK(device.free_pages() == 1);

  // Evicting device pages needs host pages, and there are none: the device keeps its copies.
  CHECK(host.allocate().error().code == ErrorCode::exhausted);
  for (auto& p : cached) CHECK(holds(device, p.id(), static_cast<std::uint32_t>(p.id().value)));

  // Two device pages are given up without a copy; the load then fits.
  cached.resize(1);
  auto target = device.allocate(3).value();
  const std::vector<HostPage> three{prefix[0].id(), prefix[1].id(), prefix[2].id()};
  std::vector<DevicePage> to;
  for (auto& p : target) to.push_back(p.id());
  auto ticket = load(host, device, plan(three, to), stream).value();
  REQUIRE(hold->wait_reached(deadline_in(10s)));
  // The host side is evicted under pressure meanwhile: its pages drain, they are not reused.
  for (const HostPage page : three) CHECK(host.ledger().holds(page) == 1);
  prefix.erase(prefix.begin(), prefix.begin() + 3);
  CHECK(host.allocate().error().code == ErrorCode::exhausted);
  CHECK(host.draining_pages() == 3);
  hold->release();
  CHECK(ticket.wait().ok());
  for (std::size_t i = 0; i < 3; ++i) CHECK(holds(device, to[i], 20 + static_cast<std::uint32_t>(three[i].value)));
  ticket = {};
  CHECK(host.allocate(3).value().size() == 3);

  *broken = true;
  const auto id = cached[0].id();
  auto room = host.allocate().value();
  auto failed = backup(device, host, plan(std::vector{room}, std::vector{cached[0]}), stream).value();
  CHECK_FALSE(failed.wait().ok());
  CHECK(holds(device, id, static_cast<std::uint32_t>(id.value)));  // still there, still right
  CHECK(failed.bytes() == 0);
}

TEST_CASE("transfer: a failure at layer 2 stops there, counts what arrived and leaves the stream usable") {
  auto broken = std::make_shared<std::atomic<bool>>(true);
  auto stream = stream_with([broken](const CopyInfo& info) { return info.layer == 2 && *broken ? Fault::fail("device error") : Fault::none(); });
  auto device = Device::make({.layers = 4, .pages = 4}).value();
  auto host = mirror_of(device, 4).value();
  auto pages = device.allocate(2).value();
  auto sources = host.allocate(2).value();
  for (auto& p : pages) fill(device, p.id(), 1);
  for (auto& p : sources) fill(host, p.id(), 2);
  auto ticket = load(host, device, plan(sources, pages), stream).value();
  const auto status = ticket.wait();
  REQUIRE_FALSE(status.ok());
  CHECK(contains(status.error().message, "device error"));
  CHECK(contains(status.error().message, "layer 2"));
  CHECK(contains(status.error().message, device.name()));
  CHECK(ticket.state() == EventState::failed);
  CHECK(holds(device, pages[0].id(), 2, 0, 2));
  CHECK(holds(device, pages[0].id(), 1, 2, 4));  // nothing arrives behind a failure
  CHECK(ticket.bytes() == 2 * 2 * Keys::page_bytes);
  *broken = false;
  auto retry = load(host, device, plan(sources, pages), stream).value();  // same stream, without clearing anything
  CHECK(retry.wait().ok());
  for (auto& p : pages) CHECK(holds(device, p.id(), 2));
  CHECK(ticket.state() == EventState::failed);  // for good
}

TEST_CASE("transfer: a failure from before it on the same stream stays visible there") {
  auto stream = Stream<Host>::make().value();
  auto device = Device::make({.layers = 1, .pages = 4}).value();
  auto host = mirror_of(device, 4).value();
  stream.launch([]() -> Status { return Error{ErrorCode::failed, "the producer failed"}; });
  auto ticket = backup(device, host, plan(host.allocate(1).value(), device.allocate(1).value()), stream).value();
  const auto status = ticket.wait();
  REQUIRE_FALSE(status.ok());
  CHECK(contains(status.error().message, "the producer failed"));
  CHECK_FALSE(stream.synchronize().ok());
  CHECK(stream.synchronize().ok());
}

TEST_CASE("transfer: waits for the producer's event, and fails with it") {
  for (const bool good : {true, false}) {
    auto stream = Stream<Host>::make().value();
    auto device = Device::make({.layers = 1, .pages = 4}).value();
    auto host = mirror_of(device, 4).value();
    auto page = device.allocate().value();
    auto target = host.allocate().value();
    auto produced = Event<Host>::make("store of step 7");
    auto ticket = backup(device, host, plan(std::vector{target}, std::vector{page}), stream, {.after = {produced}}).value();
    CHECK(ticket.wait(deadline_in(5ms)).error().code == ErrorCode::timeout);
    fill(device, page.id(), 5);
    if (good) {
      produced.complete();
    } else {
      produced.complete(Error{ErrorCode::failed, "kernel error"});
    }
    CHECK(ticket.wait().ok() == good);
    CHECK(holds(host, target.id(), 5) == good);
    CHECK(stream.synchronize().ok());
  }
  auto device = Device::make({.layers = 1, .pages = 4}).value();
  auto host = mirror_of(device, 4).value();
  auto stream = Stream<Host>::make().value();
  const auto empty = backup(device, host, plan(std::vector<HostPage>{}, std::vector<DevicePage>{}), stream, {.after = {Event<Host>()}});
  CHECK(empty.error().code == ErrorCode::invalid_argument);
}

TEST_CASE("transfer: transfers of one page order themselves, on any streams") {
  auto hold = CopyHold::make();
  auto slow = stream_with([hold](const CopyInfo&) { return Fault::hold(hold); });
  auto fast = Stream<Host>::make({.name = "fast"}).value();
  auto device = Device::make({.layers = 2, .pages = 4}).value();
  auto host = mirror_of(device, 4).value();
  auto pages = device.allocate(2).value();
  auto kept = host.allocate().value();
  fill(device, pages[0].id(), 1);
  fill(device, pages[1].id(), 9);
  // A hit on a page that is still being written to the host.
  auto saved = backup(device, host, plan(std::vector{kept.id()}, std::vector{pages[0].id()}), slow).value();
  auto hit = load(host, device, plan(std::vector{kept.id()}, std::vector{pages[1].id()}), fast).value();
  // And the source of the backup is overwritten.
  auto other = host.allocate().value();
  fill(host, other.id(), 3);
  auto overwrite = load(host, device, plan(std::vector{other.id()}, std::vector{pages[0].id()}), fast).value();
  CHECK(hit.wait(deadline_in(10ms)).error().code == ErrorCode::timeout);
  CHECK(overwrite.state() == EventState::pending);
  hold->release();
  CHECK(hit.wait().ok());
  CHECK(overwrite.wait().ok());
  CHECK(holds(host, kept.id(), 1));
  CHECK(holds(device, pages[1].id(), 1));
  CHECK(holds(device, pages[0].id(), 3));
}

TEST_CASE("transfer: issue is refused behind an unissued transfer of the same pages, and may be tried again") {
  auto stream = Stream<Host>::make().value();
  auto device = Device::make({.layers = 1, .pages = 4}).value();
  auto host = mirror_of(device, 4).value();
  auto page = device.allocate().value();
  auto source = host.allocate().value();
  fill(device, page.id(), 1);
  const auto pairs = plan(std::vector{source}, std::vector{page});
  auto save = prepare_backup(device, host, pairs, {.name = "save"}).value();
  auto restore = prepare_load(host, device, pairs, {.name = "restore"}).value();
  const auto early = restore.issue(stream);
  REQUIRE_FALSE(early.ok());
  CHECK(early.error().code == ErrorCode::busy);
  CHECK(contains(early.error().message, "save"));
  CHECK(contains(early.error().message, "has not been issued"));
  restore = {};  // dropped: no hindrance to the backup
  auto saved = save.issue(stream).value();
  CHECK(save.issue(stream).error().code == ErrorCode::invalid_argument);
  CHECK(load(host, device, pairs, stream).value().wait().ok());
  CHECK(holds(host, source.id(), 1));
}

TEST_CASE("transfer: of two that are prepared, the earlier may go, and the later waits for it") {
  auto stream = Stream<Host>::make().value();
  auto other = Stream<Host>::make().value();
  auto device = Device::make({.layers = 1, .pages = 5}).value();
  auto host = mirror_of(device, 5).value();
  auto pages = device.allocate(2).value();
  auto kept = host.allocate(2).value();
  fill(device, pages[0].id(), 1);
  fill(host, kept[1].id(), 2);
  // Page 0 goes out to `kept[0]`, and `kept[1]` comes into page 0.
  auto out = prepare_backup(device, host, plan(std::vector{kept[0]}, std::vector{pages[0]}), {.name = "out"}).value();
  auto in = prepare_load(host, device, plan(std::vector{kept[1]}, std::vector{pages[0]}), {.name = "in"}).value();
  CHECK(in.issue(other).error().code == ErrorCode::busy);
  auto gone = out.issue(stream);
  REQUIRE_MESSAGE(gone.ok(), gone.error().message);
  auto came = in.issue(other);
  REQUIRE_MESSAGE(came.ok(), came.error().message);
  CHECK(came.value().wait(deadline_in(10s)).ok());
  CHECK(gone.value().wait(deadline_in(10s)).ok());
  CHECK(holds(host, kept[0].id(), 1));
  CHECK(holds(device, pages[0].id(), 2));
}

TEST_CASE("transfer: a plan of references is refused by another pool, which owns a page of the same id") {
  auto stream = Stream<Host>::make().value();
  auto device = Device::make({.layers = 1, .pages = 4}).value();
  auto other = Device::make({.layers = 1, .pages = 4, .name = "other"}).value();
  auto host = mirror_of(device, 4).value();
  auto source = host.allocate(1).value();
  auto mine = device.allocate(1).value();
  auto theirs = other.allocate(1).value();
  REQUIRE(mine[0].id() == theirs[0].id());
  fill(other, theirs[0].id(), 7);
  const auto refused = load(host, other, plan(source, mine), stream);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::mismatch);
  CHECK(contains(refused.error().message, "pool other: device page 1 of the plan is a page of another pool"));
  CHECK(holds(other, theirs[0].id(), 7));
  CHECK(contains(load(host, other, plan(source, std::vector<PageRef<DevicePage>>(1)), stream).error().message, "empty reference"));
  CHECK(load(host, other, plan(source, theirs), stream).value().wait(deadline_in(10s)).ok());
}

TEST_CASE("transfer: a load whose source page failed to be written fails too") {
  auto stream = stream_with([](const CopyInfo& info) { return info.direction == CopyDirection::device_to_host ? Fault::fail("lost") : Fault::none(); });
  auto hold_stream = Stream<Host>::make().value();
  auto device = Device::make({.layers = 1, .pages = 4}).value();
  auto host = mirror_of(device, 4).value();
  auto pages = device.allocate(2).value();
  auto kept = host.allocate().value();
  auto never = Event<Host>::make("producer");
  auto saved = backup(device, host, plan(std::vector{kept.id()}, std::vector{pages[0].id()}), stream, {.after = {never}}).value();
  auto hit = load(host, device, plan(std::vector{kept.id()}, std::vector{pages[1].id()}), hold_stream).value();
  never.complete();
  CHECK_FALSE(saved.wait().ok());
  const auto status = hit.wait();
  REQUIRE_FALSE(status.ok());
  CHECK(contains(status.error().message, "lost"));
}

TEST_CASE("transfer: a page whose load fails is not written back over the good copy that it came from") {
  auto lossy = stream_with([](const CopyInfo& info) { return info.direction == CopyDirection::host_to_device ? Fault::fail("lost") : Fault::none(); });
  auto other = Stream<Host>::make().value();
  for (Stream<Host>* stream : {&lossy, &other}) {
    auto device = Device::make({.layers = 1, .pages = 4}).value();
    auto host = mirror_of(device, 4).value();
    auto page = device.allocate().value();
    auto kept = host.allocate().value();
    fill(host, kept.id(), 1);
    fill(device, page.id(), 9);
    const auto pairs = plan(std::vector{kept}, std::vector{page});
    auto producer = Event<Host>::make("producer");
    auto in = load(host, device, pairs, lossy, {.after = {producer}}).value();
    auto out = backup(device, host, pairs, *stream).value();  // its destination need only wait for the load, its source needs it
    producer.complete();
    CHECK_FALSE(in.wait(deadline_in(10s)).ok());
    CHECK(contains(out.wait(deadline_in(10s)).error().message, "lost"));
    CHECK(holds(host, kept.id(), 1));
  }
}

TEST_CASE("transfer: one that fails on another thread, on the same stream, ends nothing in the midst of this one") {
  constexpr int layers = 4'000;
  using Row = Bf16Contiguous<1, 16>;
  auto deep = DevicePool<Row, Host>::make({.layers = layers, .pages = 2, .name = "deep"}).value();
  auto flat = DevicePool<Row, Host>::make({.layers = 1, .pages = 2, .name = "flat"}).value();
  auto deep_host = mirror_of(deep, 2).value();
  auto flat_host = mirror_of(flat, 2).value();
  const auto deep_pages = std::pair(deep_host.allocate(1).value(), deep.allocate(1).value());
  const auto flat_pages = std::pair(flat_host.allocate(1).value(), flat.allocate(1).value());
  auto stream = stream_with([](const CopyInfo& info) { return std::string(info.entry) == "flat" ? Fault::fail("lost") : Fault::none(); });
  for (std::uint32_t round = 1; round <= 5; ++round) {
    fill(deep_host, deep_pages.first[0].id(), round);
    auto transfer = prepare_load(deep_host, deep, plan(deep_pages.first, deep_pages.second)).value();
    std::thread other([&, progress = transfer.progress()] {
      while (progress->state(0) == LayerState::unissued) std::this_thread::yield();
      const auto failing = load(flat_host, flat, plan(flat_pages.first, flat_pages.second), stream);
      CHECK_FALSE(failing.value().wait(deadline_in(10s)).ok());
    });
    CHECK(transfer.issue(stream).value().wait(deadline_in(10s)).ok());
    CHECK(holds(deep, deep_pages.second[0].id(), round));
    other.join();
  }
}

TEST_CASE("transfer: one that is refused for a destination named twice leaves no page held") {
  auto device = Device::make({.layers = 1, .pages = 4}).value();
  auto host = mirror_of(device, 4).value();
  auto page = device.allocate().value();
  auto kept = host.allocate().value();
  const auto refused = prepare_backup(device, host, plan(std::vector{kept.id(), kept.id()}, std::vector{page.id(), page.id()}));
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::duplicate);
  CHECK(host.ledger().holds(kept.id()) == 0);
  kept.reset();
  CHECK(host.draining_pages() == 0);
  CHECK(host.free_pages() == 3);
}

TEST_CASE("transfer: many scattered pages are one batch a layer, to the byte") {
  using P = Fp4WithScale<64, 128>;
  auto device = DevicePool<P, Host>::make({.layers = 2, .pages = 601}).value();
  auto host = mirror_of(device, 601, {.arrangement = Arrangement::page_first}).value();
  auto pages = device.allocate(600).value();
  auto sources = host.allocate(600).value();
  std::vector<HostPage> from;
  std::vector<DevicePage> to;
  for (std::size_t i = 0; i < 600; ++i) {
    from.push_back(sources[i].id());
    to.push_back(pages[i * 7 % 600].id());
    fill(host, from.back(), static_cast<std::uint32_t>(from.back().value));
  }
  auto stream = Stream<Host>::make().value();
  auto stats = std::make_shared<TransferStats>();
  auto ticket = load(host, device, plan(from, to), stream, {.stats = stats}).value();
  CHECK(ticket.wait().ok());
  bool exact = true;
  for (std::size_t i = 0; i < 600; ++i) exact = exact && holds(device, to[i], static_cast<std::uint32_t>(from[i].value));
  CHECK(exact);
  CHECK(ticket.moved()[0].copies == 2);
  CHECK(stats->bytes() == 2 * 600 * P::page_bytes);
  auto again = load(host, device, plan(from, to), stream, {.stats = stats}).value();
  CHECK(again.wait().ok());
  CHECK(stats->bytes() == 4 * 600 * P::page_bytes);
  CHECK(stats->counts().size() == 1);
}

TEST_CASE("transfer: an empty ticket answers, and numbers that mean nothing are refused") {
  auto stream = Stream<Host>::make().value();
  auto device = Device::make({.layers = 3, .pages = 4, .name = "d"}).value();
  auto host = mirror_of(device, 4).value();
  auto page = device.allocate(1).value();
  auto source = host.allocate(1).value();
  const auto pairs = plan(source, page);
  for (const LayerRange range : {LayerRange{INT32_MIN, -1}, LayerRange{0, -7}, LayerRange{1, 3}, LayerRange{4, -1}, LayerRange{0, INT32_MAX}}) {
    const auto refused = load(host, device, pairs, stream, {.layers = range});
    REQUIRE_FALSE(refused.ok());
    CHECK(contains(refused.error().message, std::to_string(range.count) + " layers from " + std::to_string(range.first) + " of 3"));
  }
  CHECK(contains(load(host, device, pairs, stream, {.wait_limit = -5ms}).error().message, "wait_limit is -5 ms, below 0"));
  auto ticket = load(host, device, pairs, stream, {.wait_limit = std::chrono::milliseconds::max()}).value();
  const auto moved = std::move(ticket);
  CHECK(moved.wait(deadline_in(std::chrono::milliseconds::max())).ok());
  const Ticket<Host> made;
  for (const Ticket<Host>* one : {&made, static_cast<const Ticket<Host>*>(&ticket)}) {
    const Ticket<Host>& empty = *one;
    CHECK_FALSE(static_cast<bool>(empty));
    CHECK(empty.wait().error().code == ErrorCode::invalid_argument);
    CHECK(empty.state() == EventState::unrecorded);
    CHECK_FALSE(empty.event().valid());
    CHECK(empty.name().empty());
    CHECK(empty.moved().empty());
    CHECK(empty.bytes() == 0);
    CHECK(empty.source_digest() == empty.destination_digest());
  }
}
