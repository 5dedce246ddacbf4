// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <thread>

#include <kvire/layout/policies.hpp>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/transfer/submit.cuh>
#include <tests/support/cuda_pages.hpp>
#include <tests/support/held.hpp>

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::clean;
using kvire_test::contains;
using kvire_test::fill_page;
using kvire_test::has_page;
using kvire_test::holding_stream;
using kvire_test::MirroredPages;

namespace {

using Keys = Fp8WithScale<64, 128>;
using Options = TransferOptions<Cuda>;

template <class Id, class Ref>
std::vector<Id> ids(const std::vector<Ref>& refs) {
  std::vector<Id> out;
  for (const auto& ref : refs) out.push_back(ref.id());
  return out;
}

// Every page of both pools is filled, some move there and back, and every byte of both pools is looked at.
template <class P>
void check_pages(int layers, std::int64_t pages, std::int64_t moved, Arrangement device_arrangement, Arrangement host_arrangement, Options options) {
  CAPTURE(P::name);
  CAPTURE(P::page_bytes);
  CAPTURE(moved);
  auto stream = Stream<Cuda>::make({.name = "copies"}).value();
  auto device = DevicePool<P, Cuda>::make({.layers = layers, .pages = pages, .arrangement = device_arrangement}).value();
  auto host = mirror_of(device, pages + 3, {.arrangement = host_arrangement}).value();
  auto device_pages = device.allocate(pages - 1).value();
  auto host_pages = host.allocate(pages + 2).value();
  std::mt19937 random(static_cast<unsigned>(moved));
  std::shuffle(device_pages.begin(), device_pages.end(), random);
  std::shuffle(host_pages.begin(), host_pages.end(), random);
  for (auto& p : device_pages) fill_page(device, p.id(), 1000u + static_cast<unsigned>(p.id().value));
  for (auto& p : host_pages) fill_page(host, p.id(), 500000u + static_cast<unsigned>(p.id().value));
  auto to = ids<DevicePage>(device_pages);
  auto from = ids<HostPage>(host_pages);
  to.resize(static_cast<std::size_t>(moved));
  from.resize(static_cast<std::size_t>(moved));

  auto ticket = load(host, device, plan(from, to), stream, options).value();
  REQUIRE(ticket.wait(deadline_in(20s)).ok());
  CHECK(ticket.bytes() == layers * moved * P::page_bytes);
  const auto counts = ticket.moved();
  REQUIRE(counts.size() == (moved == 0 ? 1 : 1));
  CHECK(counts[0].engine == (options.engine.choice == EngineChoice::copy_engine ? Engine::copy_engine : Engine::sm_kernel));
  if (options.engine.choice == EngineChoice::sm_kernel) CHECK(counts[0].sms == (options.engine.blocks > 0 ? options.engine.blocks : 4));
  int wrong = 0;
  for (std::size_t i = 0; i < device_pages.size(); ++i) {
    const auto id = device_pages[i].id();
    wrong += !has_page(device, id, i < to.size() ? 500000u + static_cast<unsigned>(from[i].value) : 1000u + static_cast<unsigned>(id.value));
  }
  CHECK(wrong == 0);
  // Back, to other host pages.
  std::reverse(from.begin(), from.end());
  auto back = backup(device, host, plan(from, to), stream, options).value();
  REQUIRE(back.wait(deadline_in(20s)).ok());
  for (std::size_t i = 0; i < host_pages.size(); ++i) {
    const auto id = host_pages[i].id();
    const auto at = std::find(from.begin(), from.end(), id) - from.begin();
    const std::size_t mirror = from.size() - 1 - static_cast<std::size_t>(at);
    wrong += !has_page(host, id, static_cast<std::size_t>(at) < from.size() ? 500000u + static_cast<unsigned>(from[mirror].value) : 500000u + static_cast<unsigned>(id.value));
  }
  CHECK(wrong == 0);
  CHECK(clean());
}

template <class P>
void check_policy() {
  for (const auto choice : {EngineChoice::sm_kernel, EngineChoice::copy_engine}) {
    Options options;
    options.engine.choice = choice;
    check_pages<P>(2, 90, 70, Arrangement::layer_first, Arrangement::page_first, options);
    check_pages<P>(1, 40, 1, Arrangement::layer_first, Arrangement::layer_first, options);
    options.engine.layer_events = false;
    check_pages<P>(5, 40, 33, Arrangement::page_first, Arrangement::layer_first, options);
    options.engine.pace = Pace::gentle;
    options.engine.blocks = 2;
    check_pages<P>(3, 20, 7, Arrangement::layer_first, Arrangement::layer_first, options);
    options.engine.pace = Pace::apart;
    options.engine.blocks = 0;
    check_pages<P>(2, 90, 70, Arrangement::layer_first, Arrangement::page_first, options);
  }
}

}  // namespace

TEST_CASE("cuda transfer: every byte of every page, in every arrangement and by every engine") {
  check_policy<Keys>();
  check_policy<Bf16Contiguous<64, 128>>();
  check_policy<Fp4WithScale<64, 128>>();
  check_policy<preset::deepseek_v4::Latent<64>>();
  check_policy<preset::deepseek_v4::Latent<2>>();
  check_policy<preset::deepseek_v3_2::Latent<64>>();
  check_policy<F32Rows<3, 5>>();  // 60 bytes: no bulk copy can move these
}

TEST_CASE("cuda transfer: more layers than one launch describes") {
  Options options;
  options.engine.choice = EngineChoice::sm_kernel;
  options.engine.layer_events = false;
  check_pages<Fp4WithScale<16, 64>>(101, 12, 9, Arrangement::layer_first, Arrangement::page_first, options);
}

namespace {
// One step of the host's own row copy is the reference.
template <class P>
void check_tokens(bool whole, int blocks) {
  CAPTURE(P::name);
  constexpr int tokens = P::tokens_per_page;
  auto stream = Stream<Cuda>::make().value();
  auto device = DevicePool<P, Cuda>::make({.layers = 2, .pages = 40}).value();
  auto host = mirror_of(device, 50, {.arrangement = Arrangement::page_first}).value();
  auto device_pages = device.allocate(39).value();
  auto host_pages = host.allocate(49).value();
  for (auto& p : device_pages) fill_page(device, p.id(), 1000u + static_cast<unsigned>(p.id().value));
  for (auto& p : host_pages) fill_page(host, p.id(), 500000u + static_cast<unsigned>(p.id().value));
  std::mt19937 random(7);
  std::vector<HostSlot> from;
  std::vector<DeviceSlot> to;
  std::vector<int> first_to(39 * tokens);
  std::iota(first_to.begin(), first_to.end(), tokens);  // page 0 is the null page
  std::shuffle(first_to.begin(), first_to.end(), random);
  std::vector<int> first_from(49 * tokens);
  std::iota(first_from.begin(), first_from.end(), tokens);
  std::shuffle(first_from.begin(), first_from.end(), random);
  if (whole) {
    for (int page = 1; page < 20; ++page) {
      const int n = page % 3 == 0 && tokens > 1 ? tokens - 1 : tokens;  // some lack a token
      for (int t = 0; t < n; ++t) {
        from.push_back({(page + 17) * std::int64_t{tokens} + t});
        to.push_back({(21 - page) * std::int64_t{tokens} + t + (n < tokens ? 1 : 0)});
      }
    }
  } else {
    for (std::size_t i = 0; i < static_cast<std::size_t>(20 * tokens); ++i) {
      from.push_back({first_from[i]});
      to.push_back({first_to[i]});
    }
  }
  std::vector<std::vector<std::byte>> want;
  for (int layer = 0; layer < 2; ++layer) {
    for (int page = 1; page < 40; ++page) want.push_back(kvire_test::page_pattern<P>(1000u + static_cast<unsigned>(page), layer));
    for (std::size_t i = 0; i < from.size(); ++i) {
      const auto source = kvire_test::page_pattern<P>(500000u + static_cast<unsigned>(from[i].value / tokens), layer);
      auto& page = want[static_cast<std::size_t>(layer * 39 + to[i].value / tokens - 1)];
      [&]<int... I>(std::integer_sequence<int, I...>) {
        (std::memcpy(page.data() + P::template plane_offset<I>() + P::template row_bytes<I>() * (to[i].value % tokens),
                     source.data() + P::template plane_offset<I>() + P::template row_bytes<I>() * (from[i].value % tokens),
                     static_cast<std::size_t>(P::template row_bytes<I>())),
         ...);
      }(std::make_integer_sequence<int, P::plane_count>{});
    }
  }
  Options options;
  options.engine.blocks = blocks;
  auto ticket = load(host, device, plan_tokens(from, to), stream, options).value();
  REQUIRE(ticket.wait(deadline_in(20s)).ok());
  CHECK(ticket.moved()[0].tokens == static_cast<std::int64_t>(2 * from.size()));
  CHECK(ticket.moved()[0].granularity == Granularity::token);
  int wrong = 0;
  for (int layer = 0; layer < 2; ++layer) {
    for (int page = 1; page < 40; ++page) wrong += kvire_test::page_bytes(device, DevicePage(page), layer) != want[static_cast<std::size_t>(layer * 39 + page - 1)];
  }
  CHECK(wrong == 0);
  // Back to where they came from: nothing on the host changes.
  auto back = backup(device, host, plan_tokens(from, to), stream, options).value();
  REQUIRE(back.wait(deadline_in(20s)).ok());
  for (auto& p : host_pages) wrong += !has_page(host, p.id(), 500000u + static_cast<unsigned>(p.id().value));
  CHECK(wrong == 0);
  CHECK(clean());
}
}  // namespace

TEST_CASE("cuda transfer: tokens one by one, in runs, and whole pages of them") {
  for (const bool whole : {false, true}) {
    check_tokens<Keys>(whole, 0);
    check_tokens<preset::deepseek_v4::Latent<64>>(whole, 3);
    check_tokens<preset::deepseek_v3_2::Latent<16>>(whole, 0);
    check_tokens<Fp4WithScale<16, 64>>(whole, 1);
    check_tokens<preset::deepseek_v4::Latent<2>>(whole, 0);
  }
}

TEST_CASE("cuda transfer: single tokens all over a large host pool, there and back") {
  using Rows = Bf16Contiguous<64, 128>;
  constexpr std::int64_t host_pages = 9000;  // 147 MB: the list is ordered by windows of 64 MiB
  auto stream = Stream<Cuda>::make().value();
  auto device = DevicePool<Rows, Cuda>::make({.pages = 8}).value();
  auto host = mirror_of(device, host_pages).value();
  auto device_pages = device.allocate(7).value();
  auto pages = host.allocate(host_pages - 1).value();
  std::mt19937 random(3);
  std::shuffle(pages.begin(), pages.end(), random);
  std::vector<HostSlot> from;
  std::vector<DeviceSlot> to;
  for (int i = 0; i < 400; ++i) {
    fill_page(host, pages[static_cast<std::size_t>(i)].id(), static_cast<unsigned>(i));
    from.push_back(slot_of<Rows>(pages[static_cast<std::size_t>(i)].id(), i % 64));
    to.push_back(slot_of<Rows>(DevicePage(1 + i / 64), (i * 5) % 64));
  }
  REQUIRE(load(host, device, plan_tokens(from, to), stream).value().wait(deadline_in(10s)).ok());
  std::vector<HostSlot> back;
  for (int i = 0; i < 400; ++i) back.push_back(slot_of<Rows>(pages[static_cast<std::size_t>(8000 - i)].id(), i % 64));
  REQUIRE(backup(device, host, plan_tokens(back, to), stream).value().wait(deadline_in(10s)).ok());
  int wrong = 0;
  for (int i = 0; i < 400; ++i) {
    const auto row = [&](const HostSlot& slot) {
      return pool_access::const_view(host, EntrySlot(0)).page(slot.value / 64) + Rows::row_bytes<0>() * (slot.value % 64);
    };
    wrong += std::memcmp(row(from[static_cast<std::size_t>(i)]), row(back[static_cast<std::size_t>(i)]), static_cast<std::size_t>(Rows::row_bytes<0>())) != 0;
  }
  CHECK(wrong == 0);
  CHECK(clean());
}

TEST_CASE("cuda transfer: long runs go by the copy engine, short ones by a kernel, and the ticket says so") {
  auto stream = Stream<Cuda>::make().value();
  auto device = DevicePool<Keys, Cuda>::make({.pages = 200}).value();
  auto host = mirror_of(device, 200).value();
  auto d = device.allocate(199).value();
  auto h = host.allocate(199).value();
  std::vector<HostPage> from;
  std::vector<DevicePage> to;
  for (int i = 1; i <= 64; ++i) {
    from.push_back(HostPage(i));
    to.push_back(DevicePage(100 + i));
    fill_page(host, HostPage(i), static_cast<unsigned>(i));
  }
  auto run = load(host, device, plan(from, to), stream).value();
  REQUIRE(run.wait(deadline_in(10s)).ok());
  CHECK(run.moved()[0].engine == Engine::copy_engine);
  CHECK(run.moved()[0].sms == 0);
  std::swap(to[0], to[63]);
  for (int i = 1; i < 64; i += 2) std::swap(to[static_cast<std::size_t>(i)], to[static_cast<std::size_t>(i - 1)]);
  auto scattered = load(host, device, plan(from, to), stream).value();
  REQUIRE(scattered.wait(deadline_in(10s)).ok());
  CHECK(scattered.moved()[0].engine == Engine::sm_kernel);
  CHECK(scattered.moved()[0].sms == 4);
  for (std::size_t i = 0; i < 64; ++i) CHECK(has_page(device, to[i], static_cast<unsigned>(from[i].value)));
  CHECK(clean());
}

TEST_CASE("cuda transfer: bad ids are refused before a byte moves") {
  auto stream = Stream<Cuda>::make().value();
  auto device = DevicePool<Keys, Cuda>::make({.pages = 8, .name = "index_k"}).value();
  auto host = mirror_of(device, 16).value();
  auto d = device.allocate(7).value();
  auto h = host.allocate(15).value();
  // A host page's number in a device pool: 11 is legal on one side only.
  const auto out = load(host, device, plan(std::vector{HostPage(2)}, std::vector{DevicePage(11)}), stream);
  REQUIRE_FALSE(out.ok());
  CHECK(out.error().code == ErrorCode::out_of_range);
  CHECK(contains(out.error().message, "index_k"));
  CHECK(contains(out.error().message, "11 is not below 8"));
  CHECK(load(host, device, plan(std::vector{HostPage(11)}, std::vector{DevicePage(2)}), stream).ok());
  CHECK_FALSE(load(host, device, plan(std::vector{HostPage(-1)}, std::vector{DevicePage(2)}), stream).ok());
  CHECK_FALSE(load(host, device, plan(std::vector{HostPage(1)}, std::vector{DevicePage(0)}), stream).ok());
  CHECK_FALSE(load(host, device, plan(std::vector{HostPage(1), HostPage(2)}, std::vector{DevicePage(3), DevicePage(3)}), stream).ok());
  CHECK(stream.synchronize(deadline_in(10s)).ok());
  CHECK(clean());
}

TEST_CASE("cuda transfer: pages of an aborted load drain, and come back once when it has finished" * doctest::test_suite("held")) {
  auto hold = CopyHold::make();
  auto stream = holding_stream("copies", hold, [](const CopyInfo&) { return true; });
  auto device = DevicePool<Keys, Cuda>::make({.pages = 8}).value();
  auto host = mirror_of(device, 8).value();
  auto source = host.allocate(5).value();
  for (auto& p : source) fill_page(host, p.id(), 40u + static_cast<unsigned>(p.id().value));
  {
    auto target = device.allocate(5).value();
    auto ticket = load(host, device, plan(source, target), stream).value();
    REQUIRE(hold->wait_reached(deadline_in(10s)));
    CHECK(ticket.state() == EventState::pending);
    CHECK(ticket.wait(deadline_in(1ms)).error().code == ErrorCode::timeout);
    source.clear();
  }
  CHECK(device.draining_pages() == 5);
  CHECK(host.draining_pages() == 5);
  CHECK_FALSE(device.allocate(6).ok());
  auto others = device.allocate(2).value();
  for (auto& p : others) fill_page(device, p.id(), 90);
  hold->release();
  CHECK(stream.synchronize(deadline_in(10s)).ok());
  auto rest = device.allocate(5).value();
  CHECK(device.draining_pages() == 0);
  CHECK(device.free_pages() == 0);
  for (auto& p : others) CHECK(has_page(device, p.id(), 90));
  CHECK(clean());
}

TEST_CASE("cuda transfer: sources dropped right after submit, and a host pool destroyed under its tickets" * doctest::test_suite("held")) {
  auto hold = CopyHold::make();
  auto stream = holding_stream("copies", hold, [](const CopyInfo&) { return true; });
  auto device = DevicePool<Keys, Cuda>::make({.pages = 8}).value();
  auto target = device.allocate(3).value();
  std::vector<Ticket<Cuda>> tickets;
  {
    auto host = mirror_of(device, 4).value();
    for (int i = 0; i < 3; ++i) {
      auto source = host.allocate(1).value();
      fill_page(host, source[0].id(), 70u + static_cast<unsigned>(i));
      tickets.push_back(load(host, device, plan(source, std::vector{target[static_cast<std::size_t>(i)]}), stream).value());
    }
    // All three are draining: nobody can fill them with 0x5A now.
    CHECK_FALSE(host.allocate().ok());
  }
  hold->release();
  for (auto& ticket : tickets) CHECK(ticket.wait(deadline_in(10s)).ok());
  for (int i = 0; i < 3; ++i) CHECK(has_page(device, target[static_cast<std::size_t>(i)].id(), 70u + static_cast<unsigned>(i)));
  CHECK(clean());
}

TEST_CASE("cuda transfer: a failure at layer 2 fails layers 2 and 3, and trying again works") {
  auto faults = FaultHooks::make([](const CopyInfo& info) { return info.layer == 2 ? Fault::fail("device error") : Fault::none(); });
  auto stream = Stream<Cuda>::make({.name = "copies", .faults = faults}).value();
  MirroredPages<Keys> pools(4, 8, 3);
  auto& [device, host, source, target] = pools;
  for (std::size_t i = 0; i < 3; ++i) {
    fill_page(host, source[i].id(), 11u + static_cast<unsigned>(i));
    fill_page(device, target[i].id(), 5);
  }
  auto ticket = load(host, device, plan(source, target), stream).value();
  const auto progress = ticket.progress();
  CHECK(progress->wait(0, deadline_in(10s)).ok());
  CHECK(progress->wait(1, deadline_in(10s)).ok());
  CHECK(contains(progress->wait(2).error().message, "device error"));
  CHECK_FALSE(progress->wait(3).ok());
  CHECK_FALSE(progress->wait_all().ok());
  CHECK_FALSE(ticket.wait(deadline_in(10s)).ok());
  CHECK(ticket.state() == EventState::failed);
  CHECK(has_page(device, target[0].id(), 11, 0, 2));
  CHECK(has_page(device, target[0].id(), 5, 2, 4));
  faults->set({});
  auto again = load(host, device, plan(source, target), stream).value();
  CHECK(again.wait(deadline_in(10s)).ok());
  for (std::size_t i = 0; i < 3; ++i) CHECK(has_page(device, target[i].id(), 11u + static_cast<unsigned>(i)));
  CHECK(clean());
}

TEST_CASE("cuda transfer: a host page under a load is not handed out, and transfers of one page follow each other" * doctest::test_suite("held")) {
  auto hold = CopyHold::make();
  auto slow = holding_stream("slow", hold);
  auto fast = Stream<Cuda>::make({.name = "fast"}).value();
  MirroredPages<Keys> pools(1, 4, 3);
  auto& [device, host, source, target] = pools;
  for (std::size_t i = 0; i < 3; ++i) fill_page(host, source[i].id(), 21u + static_cast<unsigned>(i));
  auto loading = load(host, device, plan(source, target), slow).value();
  const auto page = source[0].id();
  CHECK(host.ledger().holds(page) == 1);
  source.clear();  // evicted by an unwise cache
  CHECK_FALSE(host.allocate().ok());
  // A backup of the loaded pages on another stream waits for the load.
  auto other = mirror_of(device, 4).value();
  auto copy = other.allocate(3).value();
  auto back = backup(device, other, plan(copy, target), fast).value();
  std::this_thread::sleep_for(20ms);
  CHECK(back.state() == EventState::pending);
  hold->release();
  CHECK(back.wait(deadline_in(10s)).ok());
  for (std::size_t i = 0; i < 3; ++i) CHECK(has_page(other, copy[i].id(), 21u + static_cast<unsigned>(i)));
  CHECK(loading.wait(deadline_in(10s)).ok());
  CHECK_FALSE(host.allocate().ok());  // the ticket still has them
  { const auto gone = std::move(loading); }
  CHECK(host.allocate(3).ok());
  CHECK(clean());
}

TEST_CASE("cuda transfer: a prepared one is waited for until issued; dropped, it fails; captured, it is refused") {
  auto stream = Stream<Cuda>::make().value();
  MirroredPages<Keys> pools(4, 4, 1);
  auto& [device, host, source, target] = pools;
  fill_page(host, source[0].id(), 3);
  auto prepared = prepare_load(host, device, plan(source, target), Options{.name = "late"}).value();
  const auto progress = prepared.progress();
  std::thread loader([&] {
    std::this_thread::sleep_for(50ms);
    auto ticket = prepared.issue(stream).value();
    CHECK(ticket.wait(deadline_in(10s)).ok());
  });
  CHECK(progress->wait(0, deadline_in(10s)).ok());
  loader.join();
  CHECK(has_page(device, target[0].id(), 3));

  auto dropped = prepare_load(host, device, plan(source, target), Options{.name = "never"}).value();
  const auto watched = dropped.progress();
  { const auto gone = std::move(dropped); }
  CHECK_FALSE(watched->wait(0, deadline_in(10s)).ok());
  CHECK(watched->done().query() == EventState::failed);

  REQUIRE(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeRelaxed) == cudaSuccess);
  const auto captured = load(host, device, plan(source, target), stream);
  REQUIRE_FALSE(captured.ok());
  CHECK(captured.error().code == ErrorCode::unsupported);
  cudaGraph_t graph = nullptr;
  REQUIRE(cudaStreamEndCapture(stream.native(), &graph) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);

  // Memory that the device cannot reach.
  auto pageable = mirror_of(device, 4, {.memory = AnyResource(HostMemory{})}).value();
  auto bad = pageable.allocate(1).value();
  const auto refused = load(pageable, device, plan(bad, target), stream);
  REQUIRE_FALSE(refused.ok());
  CHECK(contains(refused.error().message, "not pinned"));
  CHECK(clean());
}

TEST_CASE("cuda submit: references of another pool and sources that cannot be read are refused, as in a load") {
  auto failing = Stream<Cuda>::make({.faults = FaultHooks::make([](const CopyInfo&) { return Fault::fail("lost"); })}).value();
  auto stream = Stream<Cuda>::make().value();
  auto device = DevicePool<Keys, Cuda>::make({.pages = 4, .name = "gpu"}).value();
  auto other = DevicePool<Keys, Cuda>::make({.pages = 4}).value();
  auto host = mirror_of(device, 4).value();
  auto h = host.allocate(1).value();
  auto d = device.allocate(1).value();
  auto foreign = other.allocate(1).value();
  const auto make = [&](const std::vector<PageRef<DevicePage>>& pages, CopyDirection direction) {
    const auto mover = PageMover<Keys>::make(host, device, h, pages, direction, stream);
    return mover.ok() ? Status() : Status(mover.error());
  };
  for (const auto direction : {CopyDirection::host_to_device, CopyDirection::device_to_host}) {
    const Status refused = make(foreign, direction);
    CHECK(refused.error().code == ErrorCode::mismatch);
    CHECK(contains(refused.error().message, "pool gpu: device page 1 to submit is a page of another pool"));
    CHECK(contains(make(std::vector<PageRef<DevicePage>>(1), direction).error().message, "to submit is an empty reference"));
    CHECK(make(d, direction).ok());
  }
  CHECK_FALSE(load(host, device, plan(h, d), failing).value().wait(deadline_in(10s)).ok());
  CHECK(contains(make(d, CopyDirection::device_to_host).error().message, "pool gpu: device page 1 cannot be read"));
  CHECK(make(d, CopyDirection::host_to_device).ok());
  CHECK(clean());
}

TEST_CASE("cuda submit: ids that only the device knows, bad ones skipped and counted, eager and in a graph") {
  auto stream = Stream<Cuda>::make().value();
  auto device = DevicePool<Keys, Cuda>::make({.layers = 2, .pages = 8}).value();
  auto host = mirror_of(device, 16).value();
  auto d = device.allocate(7).value();
  auto h = host.allocate(15).value();
  for (auto& p : h) fill_page(host, p.id(), 30u + static_cast<unsigned>(p.id().value));
  for (auto& p : d) fill_page(device, p.id(), 5);
  // -1 and the null page are padding; 0x7FFFFFFF, 16 and 8 are beyond the pools.
  const std::vector<std::int32_t> from{5, -1, 7, 0x7FFFFFFF, 9, 3, 16, 2};
  const std::vector<std::int32_t> to{2, 3, -1, 4, 0, 0x7FFFFFFF, 5, 8};
  std::int32_t* lists = nullptr;
  REQUIRE(cudaMalloc(&lists, 64) == cudaSuccess);
  kvire_test::upload(lists, from.data(), 32);
  kvire_test::upload(lists + 8, to.data(), 32);
  {
    auto mover = PageMover<Keys>::make(host, device, h, d, CopyDirection::host_to_device, stream).value();
    CHECK(load(host, device, plan(std::vector{HostPage(1)}, std::vector{DevicePage(1)}), stream).error().code == ErrorCode::busy);
    CHECK(mover.submit({lists, lists + 8}, 8, stream).ok());
    CHECK(stream.synchronize(deadline_in(10s)).ok());
    CHECK(mover.bad_ids() == 2 * 4);
    CHECK(has_page(device, DevicePage(2), 35));
    for (int page : {1, 3, 4, 5, 6, 7}) CHECK(has_page(device, DevicePage(page), 5));
    CHECK(kvire_test::page_bytes(device, DevicePage(0), 0) == std::vector<std::byte>(static_cast<std::size_t>(Keys::page_bytes)));
    // The same launch in a graph, with other ids at each replay.
    REQUIRE(cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(mover.submit({lists, lists + 8}, 8, stream).ok());
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamEndCapture(stream.native(), &graph) == cudaSuccess);
    cudaGraphExec_t ready = nullptr;
    REQUIRE(cudaGraphInstantiate(&ready, graph, 0) == cudaSuccess);
    for (int round = 1; round < 4; ++round) {
      const std::vector<std::int32_t> again(8, round);
      kvire_test::upload(lists, again.data(), 32);
      const std::vector<std::int32_t> there{-1, -1, 2 + round, -1, -1, -1, -1, -1};
      kvire_test::upload(lists + 8, there.data(), 32);
      REQUIRE(cudaGraphLaunch(ready, stream.native()) == cudaSuccess);
      CHECK(stream.synchronize(deadline_in(10s)).ok());
      CHECK(has_page(device, DevicePage(2 + round), 30u + static_cast<unsigned>(round)));
    }
    CHECK(mover.bad_ids() == 2 * 4);
    CHECK(cudaGraphExecDestroy(ready) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    d.clear();
    h.clear();
    CHECK(device.draining_pages() == 7);
  }
  CHECK(stream.synchronize(deadline_in(10s)).ok());
  CHECK(device.allocate(7).ok());
  CHECK(host.allocate(15).ok());
  REQUIRE(cudaFree(lists) == cudaSuccess);
  CHECK(clean());
}

TEST_CASE("cuda transfer: page 131,072 of 16 KiB lies beyond 2 GiB") {
  using Wide = Bf16Contiguous<64, 128>;
  auto stream = Stream<Cuda>::make().value();
  auto device = DevicePool<Wide, Cuda>::make({.pages = 131073}).value();
  auto host = mirror_of(device, 3).value();
  auto pages = device.allocate(131072).value();
  auto h = host.allocate(2).value();
  fill_page(host, HostPage(1), 9);
  CHECK(load(host, device, plan(std::vector{HostPage(1)}, std::vector{DevicePage(131072)}), stream).value().wait(deadline_in(10s)).ok());
  CHECK(has_page(device, DevicePage(131072), 9));
  CHECK(backup(device, host, plan(std::vector{HostPage(2)}, std::vector{DevicePage(131072)}), stream).value().wait(deadline_in(10s)).ok());
  CHECK(has_page(host, HostPage(2), 9));
  CHECK(clean());
}
