// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>

#include <kvire/kernel/move_tokens.hpp>
#include <kvire/kernel/prefill_logits.hpp>
#include <kvire/kernel/selection.hpp>
#include <kvire/layout/policies.hpp>
#include <kvire/sync/gate.hpp>
#include <tests/support/key_case.hpp>
#include <tests/support/pages.hpp>

using namespace kvire;
using kvire_test::contains;
using kvire_test::fill;

namespace {

using Keys = Bf16Contiguous<4, 16>;

// Three pages, of which a lease names the first two.
struct Setup {
  Setup() {
    for (const auto& page : pages) fill(pool, page.id(), 1);
  }
  auto lease() { return gate.begin({}, stream).value().read(pool, EntrySlot(0), std::span(pages).first(2)).value(); }
  std::int32_t id(std::size_t i) const { return pages[i].id().value; }

  DevicePool<Keys, Host> pool = DevicePool<Keys, Host>::make({.layers = 1, .pages = 8}).value();
  std::vector<PageRef<DevicePage>> pages = pool.allocate(3).value();
  Stream<Host> stream = Stream<Host>::make().value();
  Gate<Host> gate;
};

constexpr float infinity = std::numeric_limits<float>::infinity();

}  // namespace

TEST_CASE("read leases: logits and selections of pages that the lease does not name are -inf, unselected and counted") {
  Setup s;
  const std::vector<float> query(16, 0.0F), weight(1, 1.0F);  // every score is 0
  const std::vector<std::int32_t> table{s.id(0), s.id(2), null_page, s.id(1)}, lengths{16};
  const Queries queries{query.data(), Element::f32, 1, 1, 1, 16};
  std::vector<float> scores(16, 1.0F), want(16, 0.0F);
  std::fill_n(want.begin() + 4, 4, -infinity);
  LogitsCounts counts;
  sparse_logits(queries, {weight.data(), {1, 1, 1}}, s.lease(), {table.data(), {1, 4}}, {lengths.data(), {1, 1}}, ScoreTensor<3>(scores.data(), {1, 1, 16}), s.stream,
                {.counts = &counts})
      .value();
  s.stream.synchronize().value();
  CHECK(scores == want);
  CHECK(counts.bad_pages == 1);

  std::vector<std::int32_t> selected(16);
  LogitsCounts selection;
  select_keys(queries, {weight.data(), {1, 1, 1}}, s.lease(), {table.data(), {1, 4}}, {lengths.data(), {1, 1}}, {selected.data(), {1, 1, 16}}, s.stream,
              {.logits_counts = &selection})
      .value();
  s.stream.synchronize().value();
  CHECK(selected == std::vector<std::int32_t>{0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15, -1, -1, -1, -1});
  CHECK(selection.bad_pages == 1);

  std::vector<float> rows(16, 1.0F);
  const std::vector<std::int32_t> starts{0}, ends{16};
  LogitsCounts prompt;
  prefill_logits(queries, {weight.data(), {1, 1}}, s.lease(), {table.data(), {4}}, {starts.data(), {1}}, {ends.data(), {1}}, ScoreTensor<2>(rows.data(), {1, 16}), s.stream,
                 {.counts = &prompt})
      .value();
  s.stream.synchronize().value();
  CHECK(rows == want);
  CHECK(prompt.bad_pages == 1);
}

TEST_CASE("read leases: copies, moves and gathers of other pages are not made") {
  Setup s;
  auto other = DevicePool<Keys, Host>::make({.layers = 1, .pages = 8}).value();
  const auto to = other.allocate(2).value();
  for (const auto& page : to) fill(other, page.id(), 7);
  const std::vector<std::int32_t> from_ids{s.id(0), s.id(2)}, to_ids{to[0].id().value, to[1].id().value};
  {
    const auto target = s.gate.begin({}, s.stream).value().write(other, EntrySlot(0), to).value();
    CopyCounts counts;
    copy_pages<Keys>(from_ids.data(), s.lease(), to_ids.data(), target, 2, s.stream, &counts).value();
    s.stream.synchronize().value();
    CHECK(counts.bad_ids == 1);
    const std::vector<std::int64_t> from_slots{from_ids[0] * 4 + 1, from_ids[1] * 4 + 1}, to_slots{to_ids[0] * 4, to_ids[1] * 4};
    CopyCounts moved;
    move_tokens<Keys>(from_slots.data(), s.lease(), to_slots.data(), target, 2, s.stream, &moved).value();
    s.stream.synchronize().value();
    CHECK(moved.bad_ids == 1);
  }
  CHECK(*pool_access::view(other, EntrySlot(0)).page(to_ids[1]) == kvire_test::pattern(7, 0, 0));

  std::vector<std::byte> out(static_cast<std::size_t>(Keys::page_bytes));
  gather(s.lease(), {s.id(0)}, out.data(), s.stream);
  CHECK(s.stream.synchronize().ok());
  gather(s.lease(), {s.id(2)}, out.data(), s.stream);
  CHECK(contains(s.stream.synchronize().error().message, "none of those that the lease names"));
  auto stream = Stream<Host>::make().value();
  auto step = s.gate.begin({}, stream).value();
  const auto lease = step.read(s.pool, EntrySlot(0)).value();
  gather(lease, {-1}, nullptr, stream);
  CHECK(stream.synchronize().ok());
  gather(lease, {s.id(0)}, nullptr, stream);
  const Status nowhere = stream.synchronize();
  REQUIRE_FALSE(nowhere.ok());
  CHECK(nowhere.error().message.find("no memory to copy 1 pages to") != std::string::npos);
}

TEST_CASE("kernels: extents beyond every bound and arrays off alignment are refused in words") {
  Setup s;
  std::vector<float> query(17), weight(2), scores(17);
  std::vector<std::int32_t> table(2), lengths{4}, starts{0}, ends{4}, selected(1), blocks(1);
  const auto off = [](auto* p) { return reinterpret_cast<decltype(p)>(reinterpret_cast<std::uintptr_t>(p) + 1); };
  const std::int64_t most = INT64_MAX;
  const Queries queries{query.data(), Element::f32, 1, 1, 1, 16};
  const auto logits = [&](const Queries& q, Tensor<const float, 3> w, Tensor<const std::int32_t, 2> t, const ScoreTensor<3>& out, Tensor<const std::int32_t, 2> listed = {}) {
    const Status status = sparse_logits(q, w, s.lease(), t, {lengths.data(), {1, 1}}, out, s.stream, {.blocks = listed});
    return status.ok() ? std::string() : status.error().message;
  };
  const Tensor<const float, 3> weights{weight.data(), {1, 1, 1}};
  const Tensor<const std::int32_t, 2> pages{table.data(), {1, 1}};
  const ScoreTensor<3> out(scores.data(), {1, 1, 4});
  CHECK(logits(queries, weights, pages, out) == "");
  CHECK(logits(queries, weights, pages, out, {blocks.data(), {1, most}}) == "sparse_logits: blocks.extent[1] is 9223372036854775807, above 536870911");
  CHECK(logits(queries, weights, {table.data(), {1, most}}, out) == "sparse_logits: page_table.extent[1] is 9223372036854775807, above 2147483647");
  CHECK(logits({query.data(), Element::f32, 0x7FFFFFFF, 0x7FFFFFFF, 0x7FFFFFFF, 16}, weights, pages, out) ==
        "sparse_logits: queries are more elements than 63 bits can count");
  CHECK(logits({nullptr, Element::f32, 1, 1, 1, 16}, weights, pages, out) == "sparse_logits: queries has 16 elements and no memory");
  CHECK(logits(queries, weights, pages, ScoreTensor<3>()) == "sparse_logits: scores is not given, queries need [1][1][0]");
  CHECK(logits({off(query.data()), Element::f32, 1, 1, 1, 16}, weights, pages, out) ==
        "sparse_logits: queries is 1 bytes beyond a multiple of 4, the bytes of its element");
  CHECK(logits({off(query.data()), Element::bf16, 1, 1, 1, 16}, weights, pages, out) ==
        "sparse_logits: queries is 1 bytes beyond a multiple of 2, the bytes of its element");
  CHECK(logits({off(query.data()), Element::e4m3, 1, 1, 1, 16}, weights, pages, out) == "");
  CHECK(logits(queries, {off(weight.data()), {1, 1, 1}}, pages, out) == "sparse_logits: weights is 1 bytes beyond a multiple of 4, the bytes of its element");
  CHECK(logits(queries, weights, {off(table.data()), {1, 1}}, out) == "sparse_logits: page_table is 1 bytes beyond a multiple of 4, the bytes of its element");
  CHECK(logits(queries, weights, pages, ScoreTensor<3>(off(scores.data()), {1, 1, 4})) ==
        "sparse_logits: scores is 1 bytes beyond a multiple of 4, the bytes of its element");

  const auto select = [&](std::int64_t table_pages) {
    const Status status = select_keys(queries, weights, s.lease(), {table.data(), {1, table_pages}}, {lengths.data(), {1, 1}}, {selected.data(), {1, 1, 1}}, s.stream);
    return status.ok() ? std::string() : status.error().message;
  };
  CHECK(select(most) == "sparse_logits: page_table.extent[1] is 9223372036854775807, above 2147483647");
  CHECK(select(-1) == "sparse_logits: page_table.extent[1] is -1, below 0");

  const auto prompt = [&](std::int64_t table_pages) {
    const Status status = prefill_logits(queries, {weight.data(), {1, 1}}, s.lease(), {table.data(), {table_pages}}, {starts.data(), {1}}, {ends.data(), {1}},
                                         ScoreTensor<2>(scores.data(), {1, 4}), s.stream);
    return status.ok() ? std::string() : status.error().message;
  };
  CHECK(prompt(1) == "");
  CHECK(prompt(-3) == "prefill_logits: page_table.extent[0] is -3, below 0");
  CHECK(prompt(most) == "prefill_logits: page_table.extent[0] is 9223372036854775807, above 536870911");
  s.stream.synchronize().value();
}
