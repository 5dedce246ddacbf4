// SPDX-License-Identifier: Apache-2.0
// A hot set beside loads, backups and failures: when its slots may be read, and what becomes of tokens that did not arrive.
#include <kvire/tier/hot_set.hpp>

#include <doctest/doctest.h>

#include <cstring>

#include <kvire/kernel/store.hpp>
#include <kvire/pool/mirror.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/sync/gate.hpp>
#include <kvire/transfer/transfer.hpp>
#include <tests/support/pages.hpp>

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::contains;
using kvire_test::fill;
using kvire_test::pattern;

namespace {

using P = Fp8WithScale<4, 32>;
constexpr int layers = 2;

struct Rig {
  explicit Rig(int rows_, std::int64_t slots, std::int64_t most_listed, std::shared_ptr<FaultHooks> faults = {})
      : rows(rows_),
        stream(Stream<Host>::make({.name = "compute", .faults = std::move(faults)}).value()),
        owned(host.allocate(rows_ * pages).value()),
        hot(HotSet<P, Host>::make(host, {.rows = rows_, .slots = slots, .most_listed = most_listed, .name = "hot"}).value()) {
    for (const auto& page : owned) {
      fill(host, page.id(), static_cast<std::uint32_t>(page.id().value));
      table.push_back(page.id().value);
      ids.push_back(page.id());
    }
  }
  HotRows batch() const { return {{}, {table.data(), {rows, pages}}}; }
  Step<Host> step(std::initializer_list<Dependency<Host>> loads = {}) { return Gate<Host>().begin(loads, stream).value(); }

  /// Reads the tokens of a selection, a row's bytes each, in a kernel under the lease; empty if the kernel did not run.
  std::vector<std::byte> read(const Step<Host>& step, int layer, const std::vector<std::int32_t>& selected, Status* status = nullptr) {
    std::vector<std::int32_t> slots(selected.size(), -1);
    std::vector<std::byte> bytes;
    const std::int64_t k = static_cast<std::int64_t>(selected.size()) / rows;
    auto lease = hot.resolve(step, EntrySlot(layer), batch(), {selected.data(), {rows, 1, k}}, {slots.data(), {rows, 1, k}});
    if (lease.ok()) {
      launch(
          stream,
          [&](const auto& view) {
            for (const std::int32_t slot : slots) append_row(bytes, view, slot);
          },
          lease.value());
    }
    Status end = stream.synchronize();
    if (!lease.ok()) end = lease.error();
    if (status != nullptr) *status = end.ok() ? step.status() : end;
    return bytes;
  }
  /// The same from the pages.
  std::vector<std::byte> resident(int layer, const std::vector<std::int32_t>& selected) const {
    std::vector<std::byte> bytes;
    const std::size_t k = selected.size() / static_cast<std::size_t>(rows);
    for (std::size_t i = 0; i < selected.size(); ++i) {
      const auto t = selected[i];
      append_row(bytes, pool_access::const_view(host, EntrySlot(layer)), table[i / k * pages + static_cast<std::size_t>(t / P::tokens_per_page)] * P::tokens_per_page + t % P::tokens_per_page);
    }
    return bytes;
  }
  static void append_row(std::vector<std::byte>& to, ConstPageView<P, Host> view, std::int32_t slot) {
    for (int plane = 0; plane < P::plane_count; ++plane) {
      const std::byte* const row = view.page(slot / P::tokens_per_page) + P::table.plane_offset[plane] + P::table.row_bytes[plane] * (slot % P::tokens_per_page);
      to.insert(to.end(), row, row + P::table.row_bytes[plane]);
    }
  }

  static constexpr int pages = 4;
  int rows;
  Stream<Host> stream;
  HostPool<P, Host> host = HostPool<P, Host>::make({.layers = layers, .pages = 257, .name = "host"}).value();
  std::vector<PageRef<HostPage>> owned;
  std::vector<std::int32_t> table;
  std::vector<HostPage> ids;
  HotSet<P, Host> hot;
};

/// Encodes a token for each row, 0.25 * (row + 1) * scale in every element, and backs it up.
struct Written {
  std::vector<std::int32_t> positions;
  std::vector<std::int64_t> slots;
  std::vector<float> vectors;
  CopyCounts copied;

  Written(const Rig& rig, std::vector<std::int32_t> at, float scale) : positions(std::move(at)), slots(positions.size(), 77), vectors(positions.size() * P::dim) {
    CHECK(static_cast<int>(positions.size()) == rig.rows);
    for (std::size_t i = 0; i < vectors.size(); ++i) vectors[i] = 0.25F * static_cast<float>(i / P::dim + 1) * scale + static_cast<float>(i % 7);
  }
  Status append(Rig& rig, const Step<Host>& step, int layer) {
    auto lease = rig.hot.append(step, EntrySlot(layer), rig.batch(), {positions.data(), {rig.rows, 1}}, {slots.data(), {rig.rows, 1}});
    if (!lease.ok()) return lease.error();
    return store<P>({vectors.data(), rig.rows}, slots.data(), lease.value(), rig.stream);
  }
  Status backup(Rig& rig, const Step<Host>& step, int layer) {
    return rig.hot.backup(step, EntrySlot(layer), rig.batch(), {positions.data(), {rig.rows, 1}}, {slots.data(), {rig.rows, 1}}, rig.ids, &copied);
  }
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> page(static_cast<std::size_t>(P::page_bytes)), all;
    for (std::size_t i = 0; i < positions.size(); ++i) {
      encode_row<P>(vectors.data() + i * P::dim, page.data(), 0);
      Rig::append_row(all, ConstPageView<P, Host>(page.data(), P::page_bytes, 1), 0);
    }
    return all;
  }
};

}  // namespace

TEST_CASE("hot set: a step waits for the transfers that it names, layer by layer, and fails with them") {
  auto hold = CopyHold::make();
  int fail_at = -1;
  auto faults = FaultHooks::make([&](const CopyInfo& info) { return info.layer == fail_at ? Fault::fail("link down") : info.layer == 1 ? Fault::hold(hold) : Fault::none(); });
  Rig rig(2, 8, 4);
  auto loader = Stream<Host>::make({.name = "loader", .faults = faults}).value();
  auto device = DevicePool<P, Host>::make({.layers = layers, .pages = 9}).value();
  const auto staged = device.allocate(8).value();
  for (std::size_t i = 0; i < staged.size(); ++i) fill(device, staged[i].id(), 1000 + static_cast<std::uint32_t>(i));
  const std::vector<std::int32_t> selected = {0, 5, 9, 13, 15, 2, 3, 7};
  {
    // A prompt is backed up while its first decoding step begins.
    auto ticket = backup(device, rig.host, plan(rig.owned, staged), loader, {.name = "prompt"}).value();
    const auto step = rig.step({ticket});
    const auto first = rig.read(step, 0, selected);
    CHECK(first == rig.resident(0, selected));
    std::vector<std::int32_t> slots(8);
    auto lease = rig.hot.resolve(step, EntrySlot(1), rig.batch(), {selected.data(), {2, 1, 4}}, {slots.data(), {2, 1, 4}}).value();
    CHECK_FALSE(rig.stream.idle());
    CHECK(hold->wait_reached(deadline_in(5s)));
    hold->release();
    CHECK(rig.stream.synchronize().ok());
    CHECK(ticket.wait().ok());
    CHECK(rig.read(rig.step(), 1, selected) == rig.resident(1, selected));
    CHECK(rig.resident(1, {0, 0, 0, 0, 0, 0, 0, 0})[0] == pattern(1000, 1, 0));
  }
  {
    fail_at = 1;
    auto ticket = backup(device, rig.host, plan(rig.owned, staged), loader, {.name = "prompt"}).value();
    const auto step = rig.step({ticket});
    Status status;
    const std::vector<std::int32_t> others = {1, 4, 8, 12, 14, 1, 6, 10};
    CHECK_FALSE(rig.read(step, 0, others, &status).empty());
    CHECK(status.ok());
    CHECK(rig.read(step, 1, others, &status).empty());
    CHECK_FALSE(status.ok());
    CHECK(contains(status.error().message, "link down"));
    CHECK_FALSE(ticket.wait().ok());
    // Nothing is taken for held that was not fetched.
    fill(rig.host, rig.ids[0], 4321);
    CHECK(rig.read(rig.step(), 1, others) == rig.resident(1, others));
  }
}

TEST_CASE("hot set: tokens that could not be fetched fail the reader, and are fetched again") {
  int failures = 0;
  auto faults = FaultHooks::make([&](const CopyInfo& info) {
    CHECK(std::string(info.entry) == "hot");
    CHECK(info.direction == CopyDirection::host_to_device);
    return info.layer == 1 && failures-- > 0 ? Fault::fail("link down") : Fault::none();
  });
  Rig rig(2, 8, 4, faults);
  const std::vector<std::int32_t> selected = {0, 5, 9, 13, 15, 2, 3, 7};
  failures = 1;
  const auto step = rig.step();
  Status status;
  CHECK(rig.read(step, 0, selected, &status) == rig.resident(0, selected));
  CHECK(status.ok());
  CHECK(rig.read(step, 1, selected, &status).empty());
  CHECK(contains(status.error().message, "link down"));
  CHECK_FALSE(step.status().ok());
  CHECK(rig.read(rig.step(), 0, selected, &status) == rig.resident(0, selected));
  CHECK(rig.read(rig.step(), 1, selected, &status) == rig.resident(1, selected));
  CHECK(status.ok());
}

TEST_CASE("hot set: a token of each of 64 requests is backed up as that: 64 rows, not pages") {
  // 64 single tokens once went for a page, because that has as many.
  Rig rig(64, 4, 2);
  const auto before = kvire_test::snapshot(rig.host);
  std::vector<std::int32_t> positions;
  for (int row = 0; row < 64; ++row) positions.push_back(row % 16);
  Written written(rig, positions, 1);
  const auto step = rig.step();
  REQUIRE(written.append(rig, step, 0).ok());
  REQUIRE(written.backup(rig, step, 0).ok());
  CHECK(rig.stream.synchronize().ok());
  CHECK(written.copied.copied == 64);
  CHECK(rig.resident(0, positions) == written.bytes());
  const auto after = kvire_test::snapshot(rig.host);
  std::int64_t changed = 0;
  for (std::size_t i = 0; i < before.size(); ++i) changed += before[i] != after[i];
  CHECK(changed <= 64 * (P::table.row_bytes[0] + P::table.row_bytes[1]));
  // A hit, then evicted and fetched again.
  CHECK(rig.read(rig.step(), 0, positions) == written.bytes());
  for (int turn = 1; turn < 4; ++turn) {
    std::vector<std::int32_t> others;
    for (int row = 0; row < 64; ++row) others.insert(others.end(), {(row + 2 * turn) % 16, (row + 2 * turn + 1) % 16});
    CHECK(rig.read(rig.step(), 0, others) == rig.resident(0, others));
  }
  CHECK(rig.read(rig.step(), 0, positions) == written.bytes());
}

TEST_CASE("hot set: a token that is written again keeps its slot, and tokens without a page on the host get none") {
  Rig rig(2, 8, 4);
  Written first(rig, {3, 14}, 1);
  Written second(rig, {3, 16}, -1);
  const auto step = rig.step();
  REQUIRE(first.append(rig, step, 1).ok());
  REQUIRE(first.backup(rig, step, 1).ok());
  REQUIRE(second.append(rig, step, 1).ok());
  REQUIRE(second.backup(rig, step, 1).ok());
  CHECK(rig.stream.synchronize().ok());
  CHECK(first.slots[0] == rig.hot.row_slot(0));
  CHECK(second.slots[0] == first.slots[0]);
  CHECK(second.slots[1] == -1);
  CHECK(second.copied.copied == 1);
  CHECK(second.copied.skipped == 1);
  const auto bytes = second.bytes();
  CHECK(std::memcmp(rig.read(rig.step(), 1, {3, 14}).data(), bytes.data(), bytes.size() / 2) == 0);
}

TEST_CASE("hot set: nothing reads a layer whose appended tokens were not backed up") {
  Rig rig(2, 8, 4);
  Written written(rig, {3, 14}, 1);
  const auto step = rig.step();
  REQUIRE(written.append(rig, step, 0).ok());
  Status status;
  CHECK(rig.read(step, 0, {3, 14}, &status).empty());
  CHECK(status.error().code == ErrorCode::busy);
  CHECK(contains(status.error().message, "hot: tokens were appended to layer 0 and not backed up"));
  CHECK(written.append(rig, step, 0).error().code == ErrorCode::busy);
  CHECK_FALSE(rig.read(rig.step(), 1, {3, 14}, &status).empty());
  // Pages that the caller does not name, or does not own, are not written.
  rig.ids = {rig.ids[0]};
  REQUIRE(written.backup(rig, step, 0).ok());
  CHECK(rig.stream.synchronize().ok());
  CHECK(written.copied.copied == 1);
  CHECK(written.copied.bad_ids == 1);
  rig.ids = {HostPage(256)};
  REQUIRE(written.append(rig, step, 0).ok());
  CHECK_FALSE(written.backup(rig, step, 0).ok());
  CHECK(rig.stream.synchronize().ok());
}

TEST_CASE("hot set: a backup of other than all appended tokens is refused, and they stay to be backed up") {
  Rig rig(2, 8, 4);
  Written written(rig, {3, 14}, 1);
  const auto step = rig.step();
  const auto before = kvire_test::snapshot(rig.host);
  CHECK(contains(written.backup(rig, step, 0).error().message, "hot: 2 tokens of layer 0 are backed up, but 0 were appended"));
  REQUIRE(written.append(rig, step, 0).ok());
  for (const std::int64_t batch : {0, 1}) {
    CAPTURE(batch);
    const HotRows rows{{}, {rig.table.data(), {batch, Rig::pages}}};
    const Tensor<const std::int32_t, 2> positions{written.positions.data(), {batch, 1}};
    const Tensor<const std::int64_t, 2> slots{written.slots.data(), {batch, 1}};
    for (const Status& part : {rig.hot.backup(step, EntrySlot(0), rows, positions, slots, rig.ids), rig.hot.backup(step, EntrySlot(0), rows, positions, slots)}) {
      REQUIRE_FALSE(part.ok());
      CHECK(part.error().code == ErrorCode::mismatch);
      CHECK(contains(part.error().message, "hot: " + std::to_string(batch) + " tokens of layer 0 are backed up, but 2 were appended"));
    }
  }
  Status status;
  CHECK(rig.read(step, 0, {3, 14}, &status).empty());
  CHECK(status.error().code == ErrorCode::busy);
  CHECK(kvire_test::snapshot(rig.host) == before);
  REQUIRE(written.backup(rig, step, 0).ok());
  CHECK(rig.stream.synchronize().ok());
  // Pushed out, and fetched again.
  CHECK(rig.read(rig.step(), 0, {0, 1, 4, 5, 0, 1, 4, 5}) == rig.resident(0, {0, 1, 4, 5, 0, 1, 4, 5}));
  CHECK(rig.read(rig.step(), 0, {8, 9, 10, 11, 8, 9, 10, 11}) == rig.resident(0, {8, 9, 10, 11, 8, 9, 10, 11}));
  CHECK(rig.read(rig.step(), 0, {3, 14}) == written.bytes());
}

TEST_CASE("hot set: tokens that were appended and whose rows are reset before their backup are waited for no more") {
  Rig rig(3, 8, 4);
  Written written(rig, {3, 14, 9}, 1);
  const auto step = rig.step();
  const std::vector<std::int32_t> first = {1, 0};
  const auto append = [&](const std::vector<std::int32_t>& rows) {
    const HotRows batch{{rows.data(), {static_cast<std::int64_t>(rows.size())}}, {rig.table.data(), {2, Rig::pages}}};
    return rig.hot.append(step, EntrySlot(0), batch, {written.positions.data(), {2, 1}}, {written.slots.data(), {2, 1}});
  };
  const auto reset = [&](std::vector<std::int32_t> rows) { CHECK(rig.hot.reset(rows, rig.stream).ok()); };
  Status status;
  // Rows 0 and 1: a batch that names none.
  REQUIRE(append({}).ok());
  reset({0, 2});
  CHECK(rig.read(step, 0, {3, 14, 9}, &status).empty());
  CHECK(status.error().code == ErrorCode::busy);
  reset({1});
  CHECK(rig.read(step, 0, {3, 14, 9}, &status) == rig.resident(0, {3, 14, 9}));
  CHECK(status.ok());
  REQUIRE(written.append(rig, step, 0).ok());
  reset({2, 1, 0});
  REQUIRE(written.append(rig, step, 0).ok());
  REQUIRE(written.backup(rig, step, 0).ok());
  CHECK(rig.read(step, 0, {3, 14, 9}, &status) == written.bytes());
  // Ids in memory that kernels read: the host does not know which rows they are.
  REQUIRE(append(first).ok());
  reset(first);
  CHECK(rig.read(step, 0, {3, 14, 9}, &status).empty());
  CHECK(contains(status.error().message, "back up the lists of the append, or reset all rows"));
  reset({2});
  CHECK(rig.read(step, 0, {3, 14, 9}, &status) == written.bytes());
  // What was not reset is backed up, with what was: it goes nowhere that is not named.
  REQUIRE(written.append(rig, step, 0).ok());
  reset({0});
  rig.ids = {rig.ids[Rig::pages + 3], rig.ids[2 * Rig::pages + 2]};
  REQUIRE(written.backup(rig, step, 0).ok());
  CHECK(rig.stream.synchronize().ok());
  CHECK(written.copied.copied == 3 + 2);
  CHECK(written.copied.bad_ids == 1);
  CHECK(rig.read(step, 0, {3, 14, 9}, &status) == written.bytes());
}

TEST_CASE("hot set: after a backup that failed nothing is read until a reset, and the tokens are written again") {
  bool fail = true;
  auto faults = FaultHooks::make([&](const CopyInfo& info) { return fail && info.direction == CopyDirection::device_to_host ? Fault::fail("link down") : Fault::none(); });
  Rig rig(2, 8, 4, faults);
  Written written(rig, {3, 14}, 1);
  {
    const auto step = rig.step();
    REQUIRE(written.append(rig, step, 0).ok());
    REQUIRE(written.backup(rig, step, 0).ok());
    Status status;
    CHECK(rig.read(step, 0, {3, 14}, &status).empty());  // of the same step
    CHECK(contains(status.error().message, "link down"));
    CHECK_FALSE(step.status().ok());
  }
  fail = false;
  Status status;
  for (int layer = 0; layer < layers; ++layer) {
    CHECK(rig.read(rig.step(), layer, {3, 14}, &status).empty());
    CHECK(status.error().code == ErrorCode::failed);
    CHECK(contains(status.error().message, "hot: the host lacks tokens, so nothing is read until a reset"));
  }
  CHECK_FALSE(written.append(rig, rig.step(), 0).ok());
  CHECK(rig.hot.reset(std::vector<std::int32_t>{0, 1}, rig.stream).ok());  // of rows: the host still lacks the tokens
  CHECK_FALSE(written.append(rig, rig.step(), 0).ok());
  CHECK(rig.hot.reset(rig.stream).ok());
  const auto step = rig.step();
  REQUIRE(written.append(rig, step, 0).ok());
  REQUIRE(written.backup(rig, step, 0).ok());
  CHECK(rig.read(step, 0, {3, 14}, &status) == written.bytes());
  CHECK(rig.resident(0, {3, 14}) == written.bytes());
}

TEST_CASE("hot set: a transfer of a host page runs before or behind the backup of its token, never within") {
  Rig rig(1, 8, 4);
  auto loader = Stream<Host>::make({.name = "loader"}).value();
  auto device = DevicePool<P, Host>::make({.layers = layers, .pages = 5}).value();
  const auto copy = device.allocate(4).value();
  Written written(rig, {6}, 1);
  std::atomic<bool> go{false};
  rig.stream.launch([&] {
    while (!go) std::this_thread::sleep_for(1ms);
  });
  {
    const auto step = rig.step();
    REQUIRE(written.append(rig, step, 0).ok());
    REQUIRE(written.backup(rig, step, 0).ok());
  }
  auto ticket = load(rig.host, device, plan(rig.owned, copy), loader).value();
  CHECK_FALSE(ticket.wait(deadline_in(20ms)).ok());
  go = true;
  CHECK(ticket.wait(deadline_in(5s)).ok());
  std::vector<std::byte> row;
  Rig::append_row(row, pool_access::const_view(device, EntrySlot(0)), copy[1].id().value * P::tokens_per_page + 2);
  CHECK(row == written.bytes());
  CHECK(rig.stream.synchronize().ok());
}

TEST_CASE("hot set: what a backup was to write and did not is refused to everybody, until it is written") {
  enum class Broken { none, copy, step, stream };
  for (const Broken broken : {Broken::copy, Broken::step, Broken::stream}) {
    CAPTURE(static_cast<int>(broken));
    std::atomic<Broken> now{broken};
    auto hold = CopyHold::make();  // a step that is known to have failed queues nothing
    const std::atomic<bool> never{false};
    auto faults = FaultHooks::make([&](const CopyInfo& info) {
      if (now != (std::string(info.entry) == "hot" ? Broken::copy : Broken::step)) return Fault::none();
      if (now == Broken::step) (void)hold->hold(never);
      return Fault::fail("link down");
    });
    Rig rig(2, 8, 4, faults);
    auto copies = Stream<Host>::make({.name = "copies", .faults = faults}).value();
    auto device = DevicePool<P, Host>::make({.layers = layers, .pages = 3}).value();
    const auto there = device.allocate(2).value();
    const auto other = rig.host.allocate(1).value();
    fill(device, there[0].id(), 1);
    const auto reload = [&] { return load(rig.host, device, plan(std::vector{rig.ids[0]}, std::vector{there[1].id()}), copies); };
    Written written(rig, {3, 14}, 1);
    {
      const auto saved = backup(device, rig.host, plan(std::vector{other[0].id()}, std::vector{there[0].id()}), copies).value();
      const auto step = rig.step({saved});
      REQUIRE(written.append(rig, step, 0).ok());
      if (broken == Broken::stream) rig.stream.launch([]() -> Status { return Error{ErrorCode::failed, "bad kernel"}; });
      REQUIRE(written.backup(rig, step, 0).ok());
      hold->release();
      CHECK(rig.stream.synchronize(deadline_in(10s)).ok() == (broken == Broken::step));
      CHECK_FALSE(step.status().ok());
    }
    const Status refused = rig.host.ledger().readable(rig.ids[0]);
    REQUIRE_FALSE(refused.ok());
    CHECK(contains(refused.error().message, broken == Broken::stream ? "bad kernel" : "link down"));
    CHECK_FALSE(reload().ok());
    now = Broken::none;
    REQUIRE(rig.hot.reset(rig.stream).ok());
    const auto step = rig.step();
    REQUIRE(written.append(rig, step, 0).ok());
    REQUIRE(written.backup(rig, step, 0).ok());
    CHECK(rig.stream.synchronize(deadline_in(10s)).ok());
    CHECK(rig.host.ledger().readable(rig.ids[0]).ok());
    CHECK(reload().value().wait(deadline_in(10s)).ok());
  }
}
