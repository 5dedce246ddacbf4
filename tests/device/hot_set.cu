// SPDX-License-Identifier: Apache-2.0
// The hot set on the GPU against pinned memory: the slots of the host backend, the bytes of full residency.
#include <kvire/tier/hot_set.cuh>

#include <doctest/doctest.h>

#include <cstring>
#include <random>

#include <kvire/kernel/cuda_store.cuh>
#include <kvire/memory/cuda/pinned.hpp>
#include <kvire/pool/adopt.hpp>
#include <kvire/pool/mirror.hpp>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/sync/gate.hpp>
#include <tests/support/cuda_pages.hpp>
#include <tests/support/device_array.hpp>
#include <tests/support/hot_case.hpp>

using namespace kvire;
using kvire_test::contains;
using kvire_test::cuda_ok;
using kvire_test::DeviceArray;
using kvire_test::DeviceCounts;

namespace {

constexpr std::int32_t untouched = 123456;

/// The same requests on both backends.
template <class P>
struct Rig {
  Rig(int rows_, int pages_a_row, std::int64_t slots, std::int64_t most_listed, std::shared_ptr<FaultHooks> faults = {})
      : rows(rows_),
        max_pages(pages_a_row),
        stream(Stream<Cuda>::make({.name = "compute", .faults = std::move(faults)}).value()),
        pinned(HostPool<P, Cuda>::make({.layers = 2, .pages = 1 + rows_ * pages_a_row, .name = "pinned"}).value()),
        pages(HostPool<P, Host>::make({.layers = 2, .pages = 1 + rows_ * pages_a_row, .name = "pages"}).value()),
        owned(pinned.allocate(rows_ * pages_a_row).value()),
        hot(HotSet<P, Cuda>::make(pinned, {.rows = rows_, .slots = slots, .most_listed = most_listed, .name = "hot"}).value()),
        twin(HotSet<P, Host>::make(pages, {.rows = rows_, .slots = slots, .most_listed = most_listed, .name = "twin"}).value()),
        table(shuffled()),
        device_table(table) {
    for (const auto& page : owned) {
      kvire_test::fill_page(pinned, page.id(), static_cast<std::uint32_t>(page.id().value));
      for (int layer = 0; layer < 2; ++layer) {
        std::memcpy(pool_access::view(pages, EntrySlot(layer)).page(page.id().value), pool_access::view(pinned, EntrySlot(layer)).page(page.id().value),
                    static_cast<std::size_t>(P::page_bytes));
      }
    }
  }
  std::vector<std::int32_t> shuffled() const {
    std::vector<std::int32_t> ids;
    for (const auto& page : owned) ids.push_back(page.id().value);
    std::mt19937 random(7);
    std::shuffle(ids.begin(), ids.end(), random);
    return ids;
  }
  HotRows batch() const { return {{}, {device_table.data(), {rows, max_pages}}}; }
  Step<Cuda> step() { return Gate<Cuda>().begin({}, stream).value(); }

  /// The token's row in every plane, wherever it is.
  static std::vector<std::byte> row_of(const std::vector<std::byte>& page, std::int64_t token) {
    std::vector<std::byte> row;
    for (int plane = 0; plane < P::plane_count; ++plane) {
      const auto* const at = page.data() + P::table.plane_offset[plane] + P::table.row_bytes[plane] * token;
      row.insert(row.end(), at, at + P::table.row_bytes[plane]);
    }
    return row;
  }
  /// Slots whose bytes are not those of the token.
  int wrong(const std::vector<std::int32_t>& selected, const std::vector<std::int32_t>& slots, int layer) {
    std::vector<std::vector<std::byte>> of(static_cast<std::size_t>(hot.pool().pages()));
    for (std::int32_t page = 1; page < hot.pool().pages(); ++page) of[static_cast<std::size_t>(page)] = kvire_test::page_bytes(hot.pool(), DevicePage(page), layer);
    int n = 0;
    const std::size_t k = selected.size() / static_cast<std::size_t>(rows);
    for (std::size_t i = 0; i < selected.size(); ++i) {
      if (slots[i] < 0) continue;
      const std::int32_t page = table[i / k * static_cast<std::size_t>(max_pages) + static_cast<std::size_t>(selected[i] / P::tokens_per_page)];
      n += row_of(of[static_cast<std::size_t>(slots[i] / P::tokens_per_page)], slots[i] % P::tokens_per_page) !=
           row_of(kvire_test::page_bytes(pinned, HostPage(page), layer), selected[i] % P::tokens_per_page);
    }
    return n;
  }

  std::int64_t rows, max_pages;
  Stream<Cuda> stream;
  Stream<Host> host_stream = Stream<Host>::make().value();
  HostPool<P, Cuda> pinned;
  HostPool<P, Host> pages;
  std::vector<PageRef<HostPage>> owned;
  HotSet<P, Cuda> hot;
  HotSet<P, Host> twin;
  std::vector<std::int32_t> table;
  DeviceArray<std::int32_t> device_table;
};

std::vector<std::int32_t> selections(std::mt19937& random, std::int64_t rows, int k, int tokens, int step) {
  std::vector<std::int32_t> all;
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto list = kvire_test::selection(random, k, tokens, step);
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

}  // namespace

TEST_CASE_TEMPLATE("cuda hot set: the host's slots and counts, and the bytes of full residency", P, preset::deepseek_v4::Latent<64>, preset::deepseek_v3_2::Latent<64>,
                   KvPages<16, 2, 32>, Fp8WithScale<4, 32>) {
  constexpr int rows = 3;
  const int pages = P::tokens_per_page == 64 ? 20 : 1200 / P::tokens_per_page;
  for (const auto& [slots, k] : std::vector<std::pair<std::int64_t, int>>{{24, 24}, {300, 128}, {1100, 1000}, {5000, 1500}}) {
    CAPTURE(slots);
    Rig<P> rig(rows, pages, slots, k);
    std::mt19937 random(static_cast<unsigned>(slots));
    HotCounts twin_counts;
    const DeviceCounts<HotCounts> counts;
    for (int step = 0; step < 12; ++step) {
      const int layer = step % 3 == 2 ? 1 : 0;
      auto selected = selections(random, rows, k, pages * P::tokens_per_page, step);
      if (step == 5) selected[3] = 0x7FFFFFFF;
      const DeviceArray<std::int32_t> list(selected), slots_out(std::vector<std::int32_t>(selected.size(), untouched));
      std::vector<std::int32_t> want(selected.size());
      const auto lease = rig.hot.resolve(rig.step(), EntrySlot(layer), rig.batch(), {list.data(), {rows, 1, k}}, {slots_out.data(), {rows, 1, k}}, counts.data());
      REQUIRE_MESSAGE(lease.ok(), lease.error().message);
      const auto host_step = Gate<Host>().begin({}, rig.host_stream).value();
      REQUIRE(rig.twin.resolve(host_step, EntrySlot(layer), {{}, {rig.table.data(), {rows, pages}}}, {selected.data(), {rows, 1, k}}, {want.data(), {rows, 1, k}}, &twin_counts).ok());
      rig.host_stream.synchronize().value();
      const auto got = slots_out.read();
      CHECK(got == want);
      if (step == 5) selected[3] = -1;
      CHECK(rig.wrong(selected, got, layer) == 0);
    }
    const HotCounts c = counts.value();
    CHECK(c.hits == twin_counts.hits);
    CHECK(c.misses == twin_counts.misses);
    CHECK(c.repeated == twin_counts.repeated);
    CHECK(c.skipped == twin_counts.skipped);
    CHECK(c.bad_positions == 1);
    CHECK(c.bad_pages == 0);
    CHECK(c.hits > 0);
  }
}

TEST_CASE("cuda hot set: garbage ids, rows that are not there or twice, padded rows") {
  using P = Fp8WithScale<4, 32>;
  Rig<P> rig(3, 2, 8, 4);
  std::vector<std::int32_t> table = rig.table;
  table[1] = -1;
  table[2] = 1 << 20;
  const DeviceArray<std::int32_t> pages(table), ids(std::vector<std::int32_t>{2, 2, 1});
  const std::vector<std::int32_t> selected = {5, -1, 3, 0x7FFFFFFF, 0, 1, 2, 3, 0, 4, 5, -5};
  const DeviceArray<std::int32_t> list(selected), slots(std::vector<std::int32_t>(12, untouched));
  const DeviceCounts<HotCounts> counts;
  const HotRows batch{{ids.data(), {3}}, {pages.data(), {3, 2}}};
  REQUIRE(rig.hot.resolve(rig.step(), EntrySlot(0), batch, {list.data(), {3, 1, 4}}, {slots.data(), {3, 1, 4}}, counts.data()).ok());
  const auto first = static_cast<std::int32_t>(rig.hot.row_slot(2));
  const auto last = static_cast<std::int32_t>(rig.hot.row_slot(1));
  CHECK(slots.read() == std::vector<std::int32_t>{-1, -1, first, -1, -1, -1, -1, -1, last, last + 1, last + 2, -1});
  const HotCounts c = counts.value();
  CHECK(c.bad_pages == 1);
  CHECK(c.bad_positions == 1);
  CHECK(c.bad_rows == 1);
  CHECK(c.skipped == 2);
  CHECK(c.misses == 4);
}

TEST_CASE("cuda hot set: look-ups and fetches captured in a graph go on from replay to replay") {
  using P = preset::deepseek_v4::Latent<64>;
  constexpr int rows = 4, pages = 12, k = 96;
  Rig<P> rig(rows, pages, 160, k);
  const DeviceArray<std::int32_t> list(std::vector<std::int32_t>(rows * k, -1)), slots(std::vector<std::int32_t>(rows * k, untouched));
  cuda_ok(cudaStreamBeginCapture(rig.stream.native(), cudaStreamCaptureModeThreadLocal));
  for (int layer = 0; layer < 2; ++layer) {
    REQUIRE(rig.hot.resolve(rig.step(), EntrySlot(layer), rig.batch(), {list.data(), {rows, 1, k}}, {slots.data(), {rows, 1, k}}).ok());
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  cuda_ok(cudaStreamEndCapture(rig.stream.native(), &graph));
  cuda_ok(cudaGraphInstantiate(&ready, graph, 0));
  std::mt19937 random(5);
  std::vector<kvire_test::HotModel> model(rows, kvire_test::HotModel(160));
  for (int replay = 0; replay < 10; ++replay) {
    const auto selected = selections(random, rows, k, pages * P::tokens_per_page, replay);
    kvire_test::upload(list.data(), selected.data(), selected.size() * 4);
    cuda_ok(cudaGraphLaunch(ready, rig.stream.native()));
    const auto got = slots.read();
    std::vector<std::int32_t> want;
    for (int row = 0; row < rows; ++row) {
      for (const std::int64_t slot : model[static_cast<std::size_t>(row)].place({selected.begin() + row * k, selected.begin() + (row + 1) * k}, [](std::int32_t) { return true; })) {
        want.push_back(static_cast<std::int32_t>(slot < 0 ? -1 : rig.hot.row_slot(row) + slot));
      }
    }
    CHECK(got == want);
    CHECK(rig.wrong(selected, got, 0) == 0);
    CHECK(rig.wrong(selected, got, 1) == 0);
  }
  cuda_ok(cudaGraphExecDestroy(ready));
  cuda_ok(cudaGraphDestroy(graph));
}

TEST_CASE("cuda hot set: over a device pool in pinned memory, whose pages transfers bring and take back") {
  using P = preset::deepseek_v4::Latent<64>;
  auto stream = Stream<Cuda>::make({.name = "copies"}).value();
  auto device = DevicePool<P, Cuda>::make({.layers = 1, .pages = 4, .name = "latents", .memory = PinnedMemory({.page_stride = P::page_bytes, .faults = {}})}).value();
  auto host = mirror_of(device, 4).value();
  const auto from = host.allocate(3).value();
  const auto to = device.allocate(3).value();
  std::vector<HostPage> host_ids;
  std::vector<DevicePage> device_ids;
  for (std::size_t i = 0; i < 3; ++i) {
    kvire_test::fill_page(host, from[i].id(), static_cast<std::uint32_t>(i));
    host_ids.push_back(from[i].id());
    device_ids.push_back(to[2 - i].id());
  }
  REQUIRE(load(host, device, plan(host_ids, device_ids), stream).value().wait().ok());
  const auto view = pool_access::view(device, EntrySlot(0));
  auto pages = adopt<P, Cuda, HostSide>({.bases = {view.base}, .page_stride = view.page_stride, .pages = 4, .bytes_per_layer = view.page_stride * 4}).value();
  auto hot = HotSet<P, Cuda>::make(pages, {.rows = 1, .slots = 64, .most_listed = 8}).value();
  const std::vector<std::int32_t> selected = {0, 63, 64, 100, 128, 191};
  const DeviceArray<std::int32_t> list(selected), slots(std::vector<std::int32_t>(6, untouched)), table(std::vector<std::int32_t>{to[2].id().value, to[1].id().value, to[0].id().value});
  REQUIRE(hot.resolve(Gate<Cuda>().begin({}, stream).value(), EntrySlot(0), {{}, {table.data(), {1, 3}}}, {list.data(), {1, 1, 6}}, {slots.data(), {1, 1, 6}}).ok());
  const auto got = slots.read();
  for (std::size_t i = 0; i < selected.size(); ++i) {
    REQUIRE(got[i] >= 64);
    CHECK(Rig<P>::row_of(kvire_test::page_bytes(hot.pool(), DevicePage(got[i] / 64), 0), got[i] % 64) ==
          Rig<P>::row_of(kvire_test::page_pattern<P>(static_cast<std::uint32_t>(selected[i] / 64), 0), selected[i] % 64));
  }
  for (const auto id : host_ids) kvire_test::fill_page(host, id, 77);
  REQUIRE(backup(device, host, plan(host_ids, device_ids), stream).value().wait().ok());
  for (std::size_t i = 0; i < 3; ++i) CHECK(kvire_test::has_page(host, host_ids[i], static_cast<std::uint32_t>(i)));
  // Memory of the host that no device knows is refused as before.
  auto plain = DevicePool<P, Cuda>::make({.layers = 1, .pages = 4, .name = "plain", .memory = HostMemory{}});
  if (plain.ok()) {
    const auto page = plain.value().allocate(1).value();
    const auto refused = load(host, plain.value(), plan(std::vector<HostPage>{host_ids[0]}, std::vector<DevicePage>{page[0].id()}), stream);
    REQUIRE_FALSE(refused.ok());
    CHECK(contains(refused.error().message, "the pool's memory to no device"));
  }
}

TEST_CASE("cuda hot set: a token of each of 64 requests goes to the host, leaves the device and comes back; a reset forgets slots, not tokens") {
  using P = preset::deepseek_v4::Latent<64>;
  constexpr int rows = 64;
  Rig<P> rig(rows, 1, 4, 2);
  std::vector<float> vectors(static_cast<std::size_t>(rows) * P::dim);
  for (std::size_t i = 0; i < vectors.size(); ++i) vectors[i] = 0.01F * static_cast<float>(i % 1013) - 4;
  std::vector<std::int32_t> positions(rows), others(rows * 2);
  std::vector<HostPage> ids;
  for (int row = 0; row < rows; ++row) {
    positions[static_cast<std::size_t>(row)] = row;
    if (row != 9) ids.push_back(HostPage(rig.table[static_cast<std::size_t>(row)]));
  }
  const DeviceArray<float> device_vectors(vectors);
  const DeviceArray<std::int32_t> where(positions);
  const DeviceArray<std::int64_t> slots(std::vector<std::int64_t>(rows, -7));
  const DeviceCounts<CopyCounts> copied;
  {
    const auto step = rig.step();
    const auto lease = rig.hot.append(step, EntrySlot(1), rig.batch(), {where.data(), {rows, 1}}, {slots.data(), {rows, 1}}).value();
    REQUIRE(store<P>({device_vectors.data(), rows}, slots.data(), lease, rig.stream).ok());
    const DeviceArray<std::int32_t> out(std::vector<std::int32_t>(rows, untouched));
    CHECK(rig.hot.resolve(step, EntrySlot(1), rig.batch(), {where.data(), {rows, 1, 1}}, {out.data(), {rows, 1, 1}}).error().code == ErrorCode::busy);
    REQUIRE(rig.hot.backup(step, EntrySlot(1), rig.batch(), {where.data(), {rows, 1}}, {slots.data(), {rows, 1}}, ids, copied.data()).ok());
    rig.stream.synchronize().value();
  }
  CHECK(copied.value().copied == rows - 1);
  CHECK(copied.value().bad_ids == 1);  // of the page that was not named
  const auto expect = [&](int row) {
    std::vector<std::byte> page(static_cast<std::size_t>(P::page_bytes));
    encode_row<P>(vectors.data() + static_cast<std::size_t>(row) * P::dim, page.data(), row);
    return Rig<P>::row_of(page, row);
  };
  int wrong = 0;
  for (int row = 0; row < rows; ++row) {
    if (row != 9) wrong += Rig<P>::row_of(kvire_test::page_bytes(rig.pinned, HostPage(rig.table[static_cast<std::size_t>(row)]), 1), row) != expect(row);
  }
  CHECK(wrong == 0);
  CHECK(Rig<P>::row_of(kvire_test::page_bytes(rig.pinned, HostPage(rig.table[9]), 1), 9) != expect(9));
  const auto resolve = [&](const std::vector<std::int32_t>& selected, std::int64_t k) {
    const DeviceArray<std::int32_t> list(selected), out(std::vector<std::int32_t>(selected.size(), untouched));
    REQUIRE(rig.hot.resolve(rig.step(), EntrySlot(1), rig.batch(), {list.data(), {rows, 1, k}}, {out.data(), {rows, 1, k}}).ok());
    const auto got = out.read();
    if (selected == positions) {
      std::vector<std::int32_t> without = selected;
      without[9] = -1;
      auto slots_without = got;
      slots_without[9] = -1;
      CHECK(rig.wrong(without, slots_without, 1) == 0);
    } else {
      CHECK(rig.wrong(selected, got, 1) == 0);
    }
  };
  resolve(positions, 1);
  for (int turn = 1; turn < 4; ++turn) {
    for (int row = 0; row < rows; ++row) {
      others[static_cast<std::size_t>(2 * row)] = (row + 2 * turn) % 64;
      others[static_cast<std::size_t>(2 * row + 1)] = (row + 2 * turn + 1) % 64;
    }
    resolve(others, 2);
  }
  resolve(positions, 1);
  REQUIRE(rig.hot.reset(std::vector<std::int32_t>{0, 63}, rig.stream).ok());
  resolve(positions, 1);
  REQUIRE(rig.hot.reset(rig.stream).ok());
  resolve(positions, 1);
  // Any page, as in a graph.
  {
    const auto step = rig.step();
    REQUIRE(rig.hot.append(step, EntrySlot(1), rig.batch(), {where.data(), {rows, 1}}, {slots.data(), {rows, 1}}).ok());
    REQUIRE(rig.hot.backup(step, EntrySlot(1), rig.batch(), {where.data(), {rows, 1}}, {slots.data(), {rows, 1}}, copied.data()).ok());
  }
  CHECK(copied.value().copied == 2 * rows - 1);
}

TEST_CASE("cuda hot set: a fetch or a backup that fails fails its step; after a backup nothing is read until a reset") {
  using P = preset::deepseek_v4::Latent<64>;
  constexpr int rows = 2;
  int failures = 1;
  auto faults = FaultHooks::make([&](const CopyInfo&) { return failures-- > 0 ? Fault::fail("link down") : Fault::none(); });
  Rig<P> rig(rows, 2, 64, 16, faults);
  const DeviceArray<std::int32_t> where(std::vector<std::int32_t>{3, 70}), out(std::vector<std::int32_t>(2, untouched));
  const DeviceArray<std::int64_t> slots(std::vector<std::int64_t>(2, -7));
  const auto resolve = [&](const Step<Cuda>& step) { return rig.hot.resolve(step, EntrySlot(0), rig.batch(), {where.data(), {rows, 1, 1}}, {out.data(), {rows, 1, 1}}); };
  {
    const auto step = rig.step();
    const auto lease = resolve(step);
    REQUIRE_FALSE(lease.ok());
    CHECK(contains(lease.error().message, "link down"));
    CHECK_FALSE(step.status().ok());
    CHECK(out.read()[0] == untouched);
  }
  CHECK(resolve(rig.step()).ok());
  CHECK(rig.wrong({3, 70}, out.read(), 0) == 0);
  failures = 1;
  {
    const auto step = rig.step();
    REQUIRE(rig.hot.append(step, EntrySlot(0), rig.batch(), {where.data(), {rows, 1}}, {slots.data(), {rows, 1}}).ok());
    CHECK_FALSE(rig.hot.backup(step, EntrySlot(0), rig.batch(), {where.data(), {rows, 1}}, {slots.data(), {rows, 1}}).ok());
    CHECK_FALSE(step.status().ok());
  }
  CHECK(contains(resolve(rig.step()).error().message, "the host lacks tokens"));
  REQUIRE(rig.hot.reset(rig.stream).ok());
  CHECK(resolve(rig.step()).ok());
  CHECK(rig.wrong({3, 70}, out.read(), 0) == 0);
}

TEST_CASE("cuda hot set: what a backup was to write and did not is refused to everybody, until it is written") {
  using P = preset::deepseek_v4::Latent<64>;
  constexpr int rows = 2;
  bool broken = true;
  auto faults = FaultHooks::make([&](const CopyInfo& info) { return broken && info.direction == CopyDirection::device_to_host ? Fault::fail("link down") : Fault::none(); });
  Rig<P> rig(rows, 2, 64, 16, faults);
  auto copies = Stream<Cuda>::make({.name = "copies"}).value();
  auto device = DevicePool<P, Cuda>::make({.layers = 2, .pages = 2}).value();
  const auto there = device.allocate(1).value();
  std::vector<HostPage> ids;
  for (const auto& page : rig.owned) ids.push_back(page.id());
  const auto reload = [&] {
    const auto ticket = load(rig.pinned, device, plan(std::vector{ids[0]}, std::vector{there[0].id()}), copies);
    return ticket.ok() && ticket.value().wait().ok();
  };
  const DeviceArray<std::int32_t> where(std::vector<std::int32_t>{3, 70});
  const DeviceArray<std::int64_t> slots(std::vector<std::int64_t>(2, -7));
  const auto save = [&] {
    const auto step = rig.step();
    REQUIRE(rig.hot.append(step, EntrySlot(0), rig.batch(), {where.data(), {rows, 1}}, {slots.data(), {rows, 1}}).ok());
    const Status saved = rig.hot.backup(step, EntrySlot(0), rig.batch(), {where.data(), {rows, 1}}, {slots.data(), {rows, 1}}, ids);
    rig.stream.synchronize().value();
    return saved.ok();
  };
  CHECK(reload());
  CHECK_FALSE(save());
  const Status refused = rig.pinned.ledger().readable(ids[0]);
  REQUIRE_FALSE(refused.ok());
  CHECK(contains(refused.error().message, "link down"));
  CHECK_FALSE(reload());
  broken = false;
  REQUIRE(rig.hot.reset(rig.stream).ok());
  CHECK(save());
  CHECK(rig.pinned.ledger().readable(ids[0]).ok());
  CHECK(reload());
}
