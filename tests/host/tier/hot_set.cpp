// SPDX-License-Identifier: Apache-2.0
#include <kvire/tier/hot_set.hpp>

#include <doctest/doctest.h>

#include <cstring>
#include <numeric>
#include <set>

#include <kvire/codec/row.hpp>
#include <kvire/kernel/store.hpp>
#include <kvire/pool/mirror.hpp>
#include <kvire/preset/all.hpp>
#include <kvire/sync/gate.hpp>
#include <kvire/transfer/transfer.hpp>
#include <tests/support/hot_case.hpp>
#include <tests/support/pages.hpp>

using namespace kvire;
using kvire_test::contains;
using kvire_test::fill;
using kvire_test::HotModel;

namespace {

constexpr std::int32_t untouched = 123456;

/// Pages of some requests on the host, shuffled, and a hot set over them.
template <class P>
struct Rig {
  static constexpr int tokens_a_page = P::tokens_per_page;

  Rig(int rows_, int pages_a_row, std::int64_t slots, std::int64_t most_listed, int layers_ = 2, std::shared_ptr<FaultHooks> faults = {})
      : rows(rows_),
        max_pages(pages_a_row),
        layers(layers_),
        stream(Stream<Host>::make({.name = "compute", .faults = std::move(faults)}).value()),
        host(HostPool<P, Host>::make({.layers = layers_, .pages = 1 + rows_ * pages_a_row, .name = "host"}).value()),
        owned(host.allocate(rows_ * pages_a_row).value()),
        hot(HotSet<P, Host>::make(host, {.rows = rows_, .slots = slots, .most_listed = most_listed, .name = "hot"}).value()) {
    std::mt19937 random(7);
    for (const auto& page : owned) {
      fill(host, page.id(), static_cast<std::uint32_t>(page.id().value));
      table.push_back(page.id().value);
    }
    std::shuffle(table.begin(), table.end(), random);
  }

  HotRows batch() const { return {{}, {table.data(), {rows, max_pages}}}; }
  HotRows batch(const std::vector<std::int32_t>& ids, const std::vector<std::int32_t>& pages) const {
    const auto n = static_cast<std::int64_t>(ids.size());
    return {{ids.data(), {n}}, {pages.data(), {n, max_pages}}};
  }
  Step<Host> step(std::initializer_list<Dependency<Host>> loads = {}) { return Gate<Host>().begin(loads, stream).value(); }

  /// Slots of a selection, [rows][k], once the work has run.
  std::vector<std::int32_t> resolve(const std::vector<std::int32_t>& selected, int layer = 0, HotCounts* counts = nullptr) {
    std::vector<std::int32_t> slots(selected.size(), untouched);
    const std::int64_t k = static_cast<std::int64_t>(selected.size()) / rows;
    auto lease = hot.resolve(step(), EntrySlot(layer), batch(), {selected.data(), {rows, 1, k}}, {slots.data(), {rows, 1, k}}, counts);
    REQUIRE_MESSAGE(lease.ok(), lease.error().message);
    stream.synchronize().value();
    return slots;
  }

  /// True if the row behind each slot is, in every plane, the row that the host has of that token.
  bool right(const std::vector<std::int32_t>& selected, const std::vector<std::int32_t>& slots, int layer) const {
    const auto device = pool_access::const_view(hot.pool(), EntrySlot(layer));
    const auto source = pool_access::const_view(host, EntrySlot(layer));
    const std::size_t k = selected.size() / static_cast<std::size_t>(rows);
    for (std::size_t i = 0; i < selected.size(); ++i) {
      if (slots[i] < 0) continue;
      const std::int32_t page = table[i / k * static_cast<std::size_t>(max_pages) + static_cast<std::size_t>(selected[i] / tokens_a_page)];
      for (int plane = 0; plane < P::plane_count; ++plane) {
        const std::int64_t bytes = P::table.row_bytes[plane];
        const std::byte* const want = source.page(page) + P::table.plane_offset[plane] + bytes * (selected[i] % tokens_a_page);
        const std::byte* const got = device.page(slots[i] / tokens_a_page) + P::table.plane_offset[plane] + bytes * (slots[i] % tokens_a_page);
        if (std::memcmp(want, got, static_cast<std::size_t>(bytes)) != 0) return false;
      }
    }
    return true;
  }

  std::int64_t rows, max_pages;
  int layers;
  Stream<Host> stream;
  HostPool<P, Host> host;
  std::vector<PageRef<HostPage>> owned;
  std::vector<std::int32_t> table;
  HotSet<P, Host> hot;
};

using Keys = Fp8WithScale<4, 32>;

/// Of one row, without the row's first slot.
std::vector<std::int64_t> within(const std::vector<std::int32_t>& slots, std::int64_t first) {
  std::vector<std::int64_t> out;
  for (const std::int32_t slot : slots) out.push_back(slot < 0 ? slot : slot - first);
  return out;
}

}  // namespace

TEST_CASE("hot set: hits stay where they are, misses take the slots that were unused for longest, in order") {
  Rig<Keys> rig(1, 8, 4, 4, 1);
  const auto first = rig.hot.row_slot(0);
  CHECK(first == Keys::tokens_per_page);
  using Slots = std::vector<std::int64_t>;
  CHECK(within(rig.resolve({9, 3}), first) == Slots{0, 1});
  CHECK(within(rig.resolve({5}), first) == Slots{2});
  CHECK(within(rig.resolve({3, 30}), first) == Slots{1, 3});
  CHECK(within(rig.resolve({6, 3}), first) == Slots{0, 1});        // 9 was the oldest
  CHECK(within(rig.resolve({5, 6, 9, 3}), first) == Slots{2, 0, 3, 1});  // 30 was not listed, though used after 5
  CHECK(within(rig.resolve({20, 21, 22, 23}), first) == Slots{0, 1, 2, 3});
  CHECK(within(rig.resolve({23, 7, 7, 20}), first) == Slots{3, 1, 1, 0});
}

TEST_CASE("hot set: -1 stays -1 and garbage is counted, on short lists and long ones, and no slot keeps what it held") {
  // A top-k row {5, -1, 7, -1}, a pool of 8 tokens, an output that held 123,456.
  for (const std::int64_t slots : {4, 8}) {
    Rig<Keys> rig(1, 2, slots, 4, 1);
    HotCounts counts;
    CHECK(within(rig.resolve({5, -1, 7, -1}, 0, &counts), rig.hot.row_slot(0)) == std::vector<std::int64_t>{0, -1, 1, -1});
    CHECK(counts.skipped == 2);
    CHECK(counts.misses == 2);
    CHECK(within(rig.resolve({0x7FFFFFFF, 8, 7, -0x7FFFFFFF - 1}, 0, &counts), rig.hot.row_slot(0)) == std::vector<std::int64_t>{-1, -1, 1, -1});
    CHECK(counts.bad_positions == 2);
    CHECK(counts.skipped == 3);
    CHECK(counts.hits == 1);
    CHECK(rig.resolve({-1, -1, -1, -1}) == std::vector<std::int32_t>(4, -1));
    // All slots taken and given up again.
    CHECK(rig.right({0, 1, 2, 3}, rig.resolve({0, 1, 2, 3}), 0));
    CHECK(rig.right({4, 5, 6, 7}, rig.resolve({4, 5, 6, 7}), 0));
    CHECK(within(rig.resolve({5, -1, 7, -1}), rig.hot.row_slot(0))[1] == -1);
  }
}

TEST_CASE("hot set: pages of the table that are not there, rows that are not there or twice") {
  Rig<Keys> rig(3, 2, 4, 4, 1);
  std::vector<std::int32_t> pages = rig.table;
  pages[1] = -1;                  // row 0, tokens 4 to 7
  pages[2] = null_page;           // tokens 0 to 3 of the second row
  pages[3] = rig.host.pages();    // and 4 to 7
  const std::vector<std::int32_t> ids = {2, 1, 0, 2, 3, -1};
  pages.insert(pages.end(), rig.table.begin(), rig.table.end());
  const std::vector<std::int32_t> selected = {0, 4, 4, 1, 0, 4, 5, -1, 3, 3, 3, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
  std::vector<std::int32_t> slots(selected.size(), untouched);
  HotCounts counts;
  // Six rows do not fit a set of three; rows beyond it do.
  CHECK(rig.hot.resolve(rig.step(), EntrySlot(0), rig.batch(ids, pages), {selected.data(), {6, 1, 4}}, {slots.data(), {6, 1, 4}}).error().code == ErrorCode::out_of_range);
  const auto some = [&](std::vector<std::int32_t> rows, std::size_t from) {
    std::vector<std::int32_t> t(pages.begin() + static_cast<std::ptrdiff_t>(from * 2), pages.end());
    t.resize(rows.size() * 2);
    CHECK(rig.hot.resolve(rig.step(), EntrySlot(0), rig.batch(rows, t), {selected.data() + from * 4, {static_cast<std::int64_t>(rows.size()), 1, 4}},
                          {slots.data() + from * 4, {static_cast<std::int64_t>(rows.size()), 1, 4}}, &counts).ok());
    rig.stream.synchronize().value();
  };
  some({2, 1, 0}, 0);
  const auto row_slot = [&](std::int64_t row, std::int64_t slot) { return static_cast<std::int32_t>(rig.hot.row_slot(row) + slot); };
  CHECK(std::vector(slots.begin(), slots.begin() + 12) ==
        std::vector<std::int32_t>{row_slot(2, 0), -1, -1, row_slot(2, 1), -1, -1, -1, -1, row_slot(0, 0), row_slot(0, 0), row_slot(0, 0), row_slot(0, 0)});
  CHECK(counts.bad_pages == 4);  // tokens 4; 0, 4 and 5
  CHECK(counts.repeated == 1 + 3);
  CHECK(counts.misses == 3);
  some({2, 2, -1}, 3);
  CHECK(counts.bad_rows == 1);
  CHECK(counts.skipped == 1 + 4);
  CHECK(slots[12] == row_slot(2, 0));
  CHECK(std::count(slots.begin() + 16, slots.end(), -1) == 8);
  some({3}, 3);
  CHECK(counts.bad_rows == 2);
  CHECK(std::count(slots.begin() + 12, slots.begin() + 16, -1) == 4);
  some({-7}, 3);
  CHECK(counts.skipped == 1 + 8);
  // A token that is held does not need its page any more.
  const std::vector<std::int32_t> gone(2, -1), last = {2}, list = {1, 0};
  CHECK(rig.hot.resolve(rig.step(), EntrySlot(0), rig.batch(last, gone), {list.data(), {1, 1, 2}}, {slots.data(), {1, 1, 2}}).ok());
  rig.stream.synchronize().value();
  CHECK(slots[0] == row_slot(2, 1));
  CHECK(slots[1] == row_slot(2, 0));
}

TEST_CASE_TEMPLATE("hot set: random selections get the documented slots, and the bytes of full residency", P, preset::deepseek_v4::Latent<64>,
                   preset::deepseek_v4::Latent<2>, preset::deepseek_v3_2::Latent<64>, KvPages<16, 2, 32>, Fp8WithScale<64, 128>, Fp8WithScaleInterleaved<64, 128>,
                   Bf16Contiguous<1, 320>, Fp4WithScale<64, 128>) {
  constexpr int rows = 3, layers = 2, k = 24;
  const int pages = P::tokens_per_page >= 64 ? 3 : 200 / P::tokens_per_page;
  for (const std::int64_t slots : {24, 31, 70, 512}) {
    CAPTURE(slots);
    Rig<P> rig(rows, pages, slots, k, layers);
    std::vector<HotModel> model(rows * layers, HotModel(slots));
    HotCounts counts;
    std::mt19937 random(static_cast<unsigned>(slots));
    for (int step = 0; step < 25; ++step) {
      const int layer = step % 3 == 2 ? 1 : 0;
      std::vector<std::int32_t> selected;
      std::vector<std::int32_t> want;
      for (int row = 0; row < rows; ++row) {
        const auto list = kvire_test::selection(random, k, pages * P::tokens_per_page, step);
        selected.insert(selected.end(), list.begin(), list.end());
        for (const std::int64_t slot : model[static_cast<std::size_t>(row * layers + layer)].place(list, [](std::int32_t) { return true; })) {
          want.push_back(static_cast<std::int32_t>(slot < 0 ? -1 : rig.hot.row_slot(row) + slot));
        }
      }
      const auto got = rig.resolve(selected, layer, &counts);
      CHECK(got == want);
      CHECK(rig.right(selected, got, layer));
    }
    std::int64_t hits = 0, misses = 0;
    for (const auto& m : model) hits += m.hits, misses += m.misses;
    CHECK(counts.hits == hits);
    CHECK(counts.misses == misses);
    CHECK(hits > 0);
    CHECK(counts.hits + counts.misses + counts.repeated + counts.skipped == 25 * rows * k);
  }
}

TEST_CASE("hot set: attention through the slots gives the bits of attention over the pages") {
  using P = preset::deepseek_v4::Latent<64>;
  constexpr int rows = 2, k = 40, pages = 3;
  auto rig = Rig<P>(rows, pages, 48, k, 1);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  // Rows that mean something, written by the store kernel.
  std::vector<float> vectors(static_cast<std::size_t>(rig.table.size()) * P::tokens_per_page * P::dim);
  for (float& x : vectors) x = normal(random);
  std::vector<std::int64_t> slots(vectors.size() / P::dim);
  std::iota(slots.begin(), slots.end(), P::tokens_per_page);
  store<P>({vectors.data(), static_cast<std::int64_t>(slots.size())}, slots.data(), assume_ready(pool_access::view(rig.host, EntrySlot(0))), rig.stream).value();
  rig.stream.synchronize().value();
  std::vector<float> query(P::dim);
  for (float& x : query) x = normal(random);
  // Scores of the listed tokens, and the sum weighted by them, in the order of the list.
  const auto attend = [&](ConstPageView<P, Host> view, const std::vector<std::int64_t>& of) {
    std::vector<float> out(P::dim);
    float row[P::dim];
    for (const std::int64_t slot : of) {
      if (slot < 0) continue;
      decode_row<P>(view.page(static_cast<std::int32_t>(slot / P::tokens_per_page)), static_cast<int>(slot % P::tokens_per_page), row);
      float score = 0;
      for (int d = 0; d < P::dim; ++d) score += row[d] * query[static_cast<std::size_t>(d)];
      for (int d = 0; d < P::dim; ++d) out[static_cast<std::size_t>(d)] += score * row[d];
    }
    return out;
  };
  for (int step = 0; step < 30; ++step) {
    std::vector<std::int32_t> selected;
    for (int row = 0; row < rows; ++row) {
      const auto list = kvire_test::selection(random, k, pages * P::tokens_per_page, step);
      selected.insert(selected.end(), list.begin(), list.end());
    }
    std::vector<std::int32_t> slots32(selected.size());
    auto lease = rig.hot.resolve(rig.step(), EntrySlot(0), rig.batch(), {selected.data(), {rows, 1, k}}, {slots32.data(), {rows, 1, k}}).value();
    std::vector<std::vector<float>> got(rows);
    launch(
        rig.stream,
        [&](const auto& view) {
          for (int row = 0; row < rows; ++row) got[static_cast<std::size_t>(row)] = attend(view, {slots32.begin() + row * k, slots32.begin() + (row + 1) * k});
        },
        lease);
    rig.stream.synchronize().value();
    for (int row = 0; row < rows; ++row) {
      std::vector<std::int64_t> resident;
      for (int i = row * k; i < (row + 1) * k; ++i) {
        const std::int32_t t = selected[static_cast<std::size_t>(i)];
        resident.push_back(t < 0 ? -1 : rig.table[static_cast<std::size_t>(row * pages + t / P::tokens_per_page)] * std::int64_t(P::tokens_per_page) + t % P::tokens_per_page);
      }
      const auto want = attend(pool_access::const_view(rig.host, EntrySlot(0)), resident);
      CHECK(std::memcmp(want.data(), got[static_cast<std::size_t>(row)].data(), want.size() * sizeof(float)) == 0);
    }
  }
}

TEST_CASE("hot set: patterns made against it: every token in one place of the table, one token more than slots, all new in every step") {
  constexpr int k = 64;
  Rig<Keys> rig(1, 40000, k, k, 1);
  HotModel model(k);
  const auto check = [&](const std::vector<std::int32_t>& list) {
    std::vector<std::int64_t> got = within(rig.resolve(list), rig.hot.row_slot(0));
    CHECK(got == model.place(list, [](std::int32_t) { return true; }));
    CHECK(rig.right(list, rig.resolve(list), 0));
    (void)model.place(list, [](std::int32_t) { return true; });
  };
  std::vector<std::int32_t> memory(static_cast<std::size_t>(body::PlaceScratch::words(k)));
  const body::PlaceScratch hash(memory.data(), k);
  std::vector<std::int32_t> same;
  for (std::int32_t t = 0; t < 160000 && same.size() < 3 * k; ++t) {
    if (hash.home(t) == hash.home(77)) same.push_back(t);
  }
  REQUIRE(same.size() == 3 * k);
  for (int i = 0; i < 3; ++i) check({same.begin() + i * k, same.begin() + (i + 1) * k});
  std::vector<std::int32_t> list(k);
  for (int step = 0; step < 8; ++step) {
    for (int i = 0; i < k; ++i) list[static_cast<std::size_t>(i)] = (step * k + i) % (k + 1);  // least recently used is worst here
    check(list);
  }
  for (int step = 0; step < 4; ++step) {
    std::iota(list.begin(), list.end(), 1000 + step * k);
    check(list);
  }
  CHECK(rig.resolve(std::vector<std::int32_t>(k, 5)) == std::vector<std::int32_t>(k, rig.resolve({5})[0]));
}

TEST_CASE("hot set: the same slots from a group of any size") {
  constexpr int slots = 200, n = 96, tokens = 4096;
  const auto run = [&](auto group) {
    std::vector<std::uint32_t> record(static_cast<std::size_t>(body::HotRecord::words(slots)));
    std::vector<std::int32_t> table(tokens / 16), scratch(static_cast<std::size_t>(body::PlaceScratch::words(n)));
    std::iota(table.begin(), table.end(), 1);
    std::vector<std::int32_t> out(n), all;
    std::vector<body::TokenPlaces> misses(n);
    std::int32_t count = 0;
    std::mt19937 random(11);
    for (int step = 0; step < 40; ++step) {
      const auto list = kvire_test::selection(random, n, tokens + 50, step);
      body::PlaceTokensArgs<std::int32_t> args{record.data(), 1, slots, slots, 16, nullptr, list.data(), 1, n, table.data(), tokens / 16, tokens / 16 + 1 - step, out.data(), misses.data(), &count};
      const auto counts = body::place_tokens(group, 0, args, body::PlaceScratch(scratch.data(), n));
      all.insert(all.end(), out.begin(), out.end());
      for (int i = 0; i < count; ++i) {
        all.push_back(static_cast<std::int32_t>(misses[static_cast<std::size_t>(i)].host));
        all.push_back(static_cast<std::int32_t>(misses[static_cast<std::size_t>(i)].device));
      }
      for (const std::int64_t c : {counts.hits, counts.misses, counts.repeated, counts.skipped, counts.bad_positions, counts.bad_pages}) all.push_back(static_cast<std::int32_t>(c));
    }
    for (const std::uint32_t word : record) all.push_back(static_cast<std::int32_t>(word));
    return all;
  };
  const auto one = run(HostGroup<1>{});
  CHECK(run(HostGroup<32>{}) == one);
  CHECK(run(HostGroup<256>{}) == one);
}

TEST_CASE("hot set: a row that was reset is as good as new, others stay as they are") {
  Rig<Keys> rig(2, 8, 8, 6);
  std::mt19937 random(2);
  std::vector<std::vector<std::int32_t>> lists;
  for (int i = 0; i < 6; ++i) {
    auto list = kvire_test::selection(random, 6, 32, i);
    const auto other = kvire_test::selection(random, 6, 32, i);
    list.insert(list.end(), other.begin(), other.end());
    lists.push_back(list);
  }
  std::vector<std::vector<std::int32_t>> before;
  for (int layer = 0; layer < 2; ++layer) {
    for (const auto& list : lists) before.push_back(rig.resolve(list, layer));
  }
  CHECK(rig.hot.reset(std::vector<std::int32_t>{1}, rig.stream).ok());
  std::size_t at = 0;
  HotCounts counts;
  for (int layer = 0; layer < 2; ++layer) {
    CHECK(rig.resolve({lists.back()}, layer, &counts) != before[0]);
    CHECK(rig.hot.reset(std::vector<std::int32_t>{1}, rig.stream).ok());
    for (const auto& list : lists) {
      const auto slots = rig.resolve(list, layer);
      CHECK(std::equal(slots.begin() + 6, slots.end(), before[at++].begin() + 6));
    }
  }
  CHECK(counts.hits >= 2);  // of row 0, whose last list was this one
  const auto refused = rig.hot.reset(std::vector<std::int32_t>{0, 2}, rig.stream);
  CHECK(refused.error().code == ErrorCode::out_of_range);
  CHECK(contains(refused.error().message, "hot: row 2 is not in 0 to 1"));
}

TEST_CASE("hot set: what cannot work is refused by name and number, and nothing is queued") {
  using Hot = HotSet<Keys, Host>;
  auto host = HostPool<Keys, Host>::make({.layers = 2, .pages = 9}).value();
  const auto refuse = [&](HotSetOptions options, const char* words) {
    options.name = "hot";
    const auto made = Hot::make(host, options);
    REQUIRE_FALSE(made.ok());
    CAPTURE(made.error().message);
    CHECK(contains(made.error().message, words));
  };
  refuse({.rows = 2, .slots = 511, .most_listed = 512}, "511 slots a row have no place for the 512 tokens that a call may list");
  refuse({.rows = 0, .slots = 512, .most_listed = 512}, "rows is 0, below 1");
  refuse({.rows = 1, .slots = 512, .most_listed = 0}, "most_listed is 0");
  refuse({.rows = 1, .slots = 1 << 20, .most_listed = 8193}, "most_listed is 8193, above 8192");
  refuse({.rows = 1 << 20, .slots = 1 << 12, .most_listed = 1}, "more than 32 bits can number");
}

TEST_CASE("hot set: calls of the wrong shape, layer or stream are refused") {
  Rig<Keys> rig(2, 2, 8, 6);
  auto& hot = rig.hot;
  std::vector<std::int32_t> selected(64), slots(64);
  const auto code = [&](EntrySlot layer, Tensor<const std::int32_t, 3> in, Tensor<std::int32_t, 3> out, HotRows rows) {
    const auto lease = hot.resolve(rig.step(), layer, rows, in, out);
    return lease.ok() ? "" : lease.error().message;
  };
  const Tensor<const std::int32_t, 3> in{selected.data(), {2, 1, 4}};
  const Tensor<std::int32_t, 3> out{slots.data(), {2, 1, 4}};
  CHECK(contains(code(EntrySlot(2), in, out, rig.batch()), "hot: layer is 2, above 1"));
  CHECK(contains(code(EntrySlot(-1), in, out, rig.batch()), "layer is -1"));
  CHECK(contains(code(EntrySlot(0), in, {slots.data(), {2, 1, 5}}, rig.batch()), "slots is [2][1][5], the selections need [2][1][4]"));
  CHECK(contains(code(EntrySlot(0), {selected.data(), {2, 2, 4}}, {slots.data(), {2, 2, 4}}, rig.batch()), "tokens listed a row is 8, above 6"));
  CHECK(contains(code(EntrySlot(0), {selected.data(), {3, 1, 4}}, {slots.data(), {3, 1, 4}}, rig.batch()), "batch is 3, above 2"));
  CHECK(contains(code(EntrySlot(0), {selected.data(), {1, 1, 4}}, {slots.data(), {1, 1, 4}}, rig.batch()), "host_pages is [2][2]"));
  CHECK(contains(code(EntrySlot(0), {nullptr, {2, 1, 4}}, out, rig.batch()), "no memory"));
  CHECK(code(EntrySlot(0), {selected.data(), {2, 2, 3}}, {slots.data(), {2, 2, 3}}, rig.batch()).empty());
  CHECK(code(EntrySlot(0), {nullptr, {0, 1, 3}}, {nullptr, {0, 1, 3}}, {{}, {nullptr, {0, 2}}}).empty());
  auto other = Stream<Host>::make({.name = "other"}).value();
  const auto step = Gate<Host>().begin({}, other).value();
  const auto lease = hot.resolve(step, EntrySlot(0), rig.batch(), in, out);
  REQUIRE_FALSE(lease.ok());
  CHECK(lease.error().code == ErrorCode::mismatch);
  CHECK(contains(lease.error().message, "'other'"));
  CHECK(rig.stream.synchronize().ok());
}

TEST_CASE("hot set: two query tokens of a row share its slots") {
  Rig<Keys> rig(2, 8, 8, 8, 1);
  const std::vector<std::int32_t> selected = {1, 2, 3, 4, 3, 4, 5, -1, 9, 9, 9, 9, 9, 8, 7, 6};
  std::vector<std::int32_t> slots(16, untouched);
  HotCounts counts;
  REQUIRE(rig.hot.resolve(rig.step(), EntrySlot(0), rig.batch(), {selected.data(), {2, 2, 4}}, {slots.data(), {2, 2, 4}}, &counts).ok());
  rig.stream.synchronize().value();
  CHECK(counts.misses == 5 + 4);
  CHECK(counts.repeated == 2 + 4);
  CHECK(slots[2] == slots[4]);
  CHECK(rig.right(selected, slots, 0));
}
