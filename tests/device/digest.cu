// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include <kvire/layout/policies.hpp>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/sync/cuda/lease.hpp>
#include <kvire/sync/gate.hpp>
#include <kvire/sync/host.hpp>
#include <kvire/transfer/transfer.cuh>
#include <tests/support/cuda_pages.hpp>
#include <tests/support/held.hpp>

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::contains;

namespace {

constexpr int layers = 2;
constexpr std::int64_t moved = 3;

// Three pages with the bytes of page_pattern, and where they go. `skip` shifts the page ids.
template <class P, class Backend>
struct Sides {
  Sides(Arrangement on_device, Arrangement on_host, std::int64_t skip)
      : device(DevicePool<P, Backend>::make({.layers = layers, .pages = 12, .arrangement = on_device}).value()),
        host(mirror_of(device, 12, {.arrangement = on_host}).value()),
        skipped(device.allocate(skip).value()),
        pages(device.allocate(moved).value()),
        targets(host.allocate(moved).value()) {
    for (std::size_t i = 0; i < pages.size(); ++i) {
      for (int layer = 0; layer < layers; ++layer) {
        write(layer, i, 0, kvire_test::page_pattern<P>(static_cast<std::uint32_t>(i), layer));
      }
    }
  }
  void write(int layer, std::size_t page, std::int64_t at, const std::vector<std::byte>& bytes) {
    kvire_test::upload(pool_access::view(device, EntrySlot(layer)).page(pages[page].id().value) + at, bytes.data(), bytes.size());
  }
  auto page_plan() const { return plan(targets, pages); }
  // Tokens of the pages in an order of their own: some runs, some single ones, a whole page in order.
  auto token_plan() const {
    std::vector<HostSlot> to;
    std::vector<DeviceSlot> from;
    const auto add = [&](std::size_t page, int token) {
      to.push_back(slot_of<P>(targets[page].id(), token));
      from.push_back(slot_of<P>(pages[page].id(), token));
    };
    for (int t = P::tokens_per_page - 1; t > 0; --t) add(0, t);
    for (int t = 0; t < P::tokens_per_page; ++t) add(1, t);
    add(2, P::tokens_per_page - 1);
    return plan_tokens(to, from);
  }

  DevicePool<P, Backend> device;
  HostPool<P, Backend> host;
  std::vector<PageRef<DevicePage>> skipped;
  std::vector<PageRef<DevicePage>> pages;
  std::vector<PageRef<HostPage>> targets;
  Stream<Backend> stream = Stream<Backend>::make().value();
};

template <class P, class Backend, class Plan>
Digest backed_up(Sides<P, Backend>& sides, const Plan& what, TransferOptions<Backend> options = {}) {
  options.digest = true;
  auto ticket = backup(sides.device, sides.host, what, sides.stream, options).value();
  REQUIRE(ticket.wait(deadline_in(20s)).ok());
  CHECK(ticket.source_digest() == ticket.destination_digest());
  CHECK(ticket.source_digest() != Digest{});
  return ticket.source_digest();
}
template <class P, class Backend, class Plan>
Digest loaded(Sides<P, Backend>& sides, const Plan& what) {
  TransferOptions<Backend> options;
  options.digest = true;
  auto ticket = load(sides.host, sides.device, what, sides.stream, options).value();
  REQUIRE(ticket.wait(deadline_in(20s)).ok());
  CHECK(ticket.source_digest() == ticket.destination_digest());
  return ticket.destination_digest();
}

template <class P>
void check_policy() {
  CAPTURE(P::name);
  CAPTURE(P::page_bytes);
  Sides<P, Host> twin(Arrangement::layer_first, Arrangement::page_first, 0);
  Sides<P, Cuda> a(Arrangement::layer_first, Arrangement::page_first, 4);
  Sides<P, Cuda> b(Arrangement::page_first, Arrangement::layer_first, 1);
  const Digest pages = backed_up(twin, twin.page_plan());
  CHECK(backed_up(a, a.page_plan()) == pages);
  CHECK(backed_up(b, b.page_plan()) == pages);
  CHECK(loaded(a, a.page_plan()) == pages);
  TransferOptions<Cuda> engine;
  engine.engine.choice = EngineChoice::copy_engine;
  CHECK(backed_up(a, a.page_plan(), engine) == pages);
  engine.engine.choice = EngineChoice::sm_kernel;
  engine.engine.layer_events = false;
  CHECK(backed_up(a, a.page_plan(), engine) == pages);
  const Digest tokens = backed_up(twin, twin.token_plan());
  CHECK(tokens != pages);
  CHECK(backed_up(a, a.token_plan()) == tokens);
  CHECK(loaded(b, b.token_plan()) == loaded(twin, twin.token_plan()));
}

}  // namespace

TEST_CASE("cuda digest: the host's number, for any arrangement, page ids, engine and granularity") {
  check_policy<Fp8WithScale<64, 128>>();
  check_policy<Bf16Contiguous<64, 128>>();
  check_policy<Fp4WithScale<64, 128>>();
  check_policy<preset::deepseek_v4::Latent<64>>();
  check_policy<preset::deepseek_v4::Latent<2>>();
  check_policy<preset::deepseek_v3_2::Latent<64>>();
  check_policy<F32Rows<3, 5>>();
}

TEST_CASE("cuda digest: padding does not count, any field and its place do") {
  using P = preset::deepseek_v4::Latent<64>;  // has padding in its rows and behind them
  Sides<P, Cuda> s(Arrangement::layer_first, Arrangement::layer_first, 0);
  const Digest digest = backed_up(s, s.page_plan());
  s.write(0, 1, P::page_bytes - 1, {std::byte{0x5A}});
  s.write(1, 2, P::offset<role::Scale>(5) + P::count_of<role::Scale>, {std::byte{0x5A}});
  CHECK(backed_up(s, s.page_plan()) == digest);
  for (const std::int64_t at : {P::offset<role::Nope>(0), P::offset<role::Rope>(63) + 127, P::offset<role::Scale>(63) + 6}) {
    const std::byte was = kvire_test::page_pattern<P>(2, 1)[static_cast<std::size_t>(at)];
    s.write(1, 2, at, {was ^ std::byte{1}});
    CHECK(backed_up(s, s.page_plan()) != digest);
    s.write(1, 2, at, {was});
  }
  CHECK(backed_up(s, s.page_plan()) == digest);
  auto swapped = s.pages;
  std::swap(swapped[0], swapped[1]);
  CHECK(backed_up(s, plan(s.targets, swapped)) != digest);
}

TEST_CASE("cuda digest: a copy that moved nothing and reported success is found, at its layer, and fails who reads it" * doctest::test_suite("held")) {
  using P = Fp8WithScale<64, 128>;
  Sides<P, Cuda> s(Arrangement::layer_first, Arrangement::layer_first, 0);
  REQUIRE(backup(s.device, s.host, s.page_plan(), s.stream).value().wait(deadline_in(20s)).ok());
  // What the device has is no longer what the host has.
  for (int layer = 0; layer < layers; ++layer) s.write(layer, 1, 7, {kvire_test::page_pattern<P>(1, layer)[7] ^ std::byte{1}});
  auto liar = Stream<Cuda>::make({.name = "liar", .faults = FaultHooks::make([](const CopyInfo& info) { return info.layer == 1 ? Fault::skip() : Fault::none(); })}).value();
  auto compute = Stream<Cuda>::make({.name = "compute"}).value();
  Gate<Cuda> gate;
  {
    auto blind = load(s.host, s.device, s.page_plan(), liar, {.layers = {1, 1}}).value();
    CHECK(blind.wait(deadline_in(20s)).ok());  // nobody can tell without
  }
  auto hold = CopyHold::make();
  CHECK(kvire_test::hold_stream(liar, hold).ok());
  auto ticket = load(s.host, s.device, s.page_plan(), liar, {.digest = true}).value();
  auto step = gate.begin({ticket}, compute).value();
  auto good = step.read(s.device, EntrySlot(0));
  auto bad = step.read(s.device, EntrySlot(1));
  CHECK(good.ok());
  CHECK(bad.ok());  // still under way
  CHECK(step.status().ok());
  hold->release();
  CHECK(compute.synchronize(deadline_in(20s)).ok());
  const auto status = ticket.wait(deadline_in(20s));
  REQUIRE_FALSE(status.ok());
  CHECK(status.error().code == ErrorCode::mismatch);
  CHECK(contains(status.error().message, "layer 1"));
  CHECK(ticket.source_digest() != ticket.destination_digest());
  CHECK(ticket.progress()->wait(0, deadline_in(20s)).ok());
  CHECK_FALSE(ticket.progress()->wait(1, deadline_in(20s)).ok());
  REQUIRE_FALSE(step.status().ok());
  CHECK(contains(step.status().error().message, "layer 1"));
  CHECK(ticket.bytes() == moved * P::page_bytes);  // layer 0 alone has arrived
}
