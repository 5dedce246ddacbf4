// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstdlib>
#include <vector>

#include <kvire/exec/host/event.hpp>
#include <kvire/layout/policies.hpp>
#include <kvire/pool/adopt.hpp>

using namespace kvire;

namespace {

using Planar = Fp8WithScale<64, 128>;
using Interleaved = Fp8WithScaleInterleaved<64, 128>;
using Bf16 = Bf16Contiguous<64, 128>;

bool contains(const Error& error, const std::string& text) { return error.message.find(text) != std::string::npos; }

struct alignas(64) Line {
  std::byte bytes[64];
};
// Somebody else's buffer.
struct Foreign {
  explicit Foreign(std::int64_t bytes) : lines(static_cast<std::size_t>(bytes / 64 + 1)) {}
  std::byte* at(std::int64_t offset) { return reinterpret_cast<std::byte*>(lines.data()) + offset; }
  std::vector<Line> lines;
};

}  // namespace

TEST_CASE("adopt: one buffer a layer, strides beyond the page, the policy by name") {
  constexpr std::int64_t stride = Planar::page_bytes + 64;
  Foreign a(8 * stride);
  Foreign b(8 * stride);
  auto pool = adopt<Planar, Host>({.bases = {a.at(0), b.at(0)}, .page_stride = stride, .pages = 8, .bytes_per_layer = 8 * stride, .name = "engine"}).value();
  static_assert(std::is_same_v<decltype(pool), DevicePool<Planar, Host>>);
  CHECK(pool.adopted());
  CHECK(pool.layers() == 2);
  CHECK(pool.page_stride() == stride);
  CHECK(pool.bytes().count == 0);
  CHECK(pool_access::view(pool, EntrySlot(1)).page(7) == b.at(7 * stride));
  CHECK(pool.allocate(7).value().size() == 7);
  CHECK_FALSE(pool.allocate(8).ok());
  // the same layout under the other name is another pool type: which one the bytes are only their owner knows
  Foreign c(8 * Interleaved::page_bytes);
  auto twin = adopt<Interleaved, Host>({.bases = {c.at(0)}, .page_stride = Interleaved::page_bytes, .pages = 8, .bytes_per_layer = 8 * 8'448}).value();
  static_assert(!std::is_same_v<decltype(pool), decltype(twin)>);
  CHECK(twin.name() == "adopted.Fp8WithScaleInterleaved");
}

TEST_CASE("adopt: all layers inside one page") {
  constexpr std::int64_t stride = 3 * Planar::page_bytes;
  Foreign unified(4 * stride);
  std::vector<std::byte*> bases;
  for (int layer = 0; layer < 3; ++layer) bases.push_back(unified.at(layer * Planar::page_bytes));
  // every layer's bytes end with its own last page
  auto pool = adopt<Planar, Host>({.bases = bases, .page_stride = stride, .pages = 4, .bytes_per_layer = 3 * stride + Planar::page_bytes}).value();
  CHECK(pool_access::view(pool, EntrySlot(2)).page(3) == unified.at(3 * stride + 2 * Planar::page_bytes));

  auto close = bases;
  close[1] -= 64;
  const auto overlap = adopt<Planar, Host>({.bases = close, .page_stride = stride, .pages = 4, .bytes_per_layer = 3 * stride + Planar::page_bytes});
  REQUIRE_FALSE(overlap.ok());
  CHECK(overlap.error().code == ErrorCode::duplicate);
  CHECK(contains(overlap.error(), "layers 0 and 1 overlap"));
  // a page of the one layer reaching into the next page of the other
  auto behind = bases;
  behind[2] += 64;
  CHECK(contains(adopt<Planar, Host>({.bases = behind, .page_stride = stride, .pages = 4, .bytes_per_layer = 3 * stride + Planar::page_bytes}).error(),
                 "layers 0 and 2 overlap"));
  CHECK(adopt<Planar, Host>({.bases = {unified.at(0), unified.at(0)}, .page_stride = stride, .pages = 4, .bytes_per_layer = 4 * stride}).error().code ==
        ErrorCode::duplicate);
}

TEST_CASE("adopt: pages that a pool has adopted are refused to another until it has gone, with what holds its pages") {
  Foreign memory(8 * Planar::page_bytes);
  const AdoptOptions all{.bases = {memory.at(0)}, .page_stride = 8'448, .pages = 8, .bytes_per_layer = 8 * 8'448, .name = "first"};
  auto second = all;
  second.name = "second";
  PageRef<DevicePage> ref;
  {
    auto pool = adopt<Planar, Host>(all).value();
    const auto refused = adopt<Interleaved, Host>(second);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::busy);
    CHECK(contains(refused.error(), "adopting second: pages of its layer 0 are pages of layer 0 of pool first"));
    CHECK(adopt<Planar, Host, HostSide>(second).error().code == ErrorCode::busy);
    auto moved = std::move(pool);
    CHECK_FALSE(adopt<Planar, Host>(second).ok());
    ref = moved.allocate().value();
  }
  CHECK_FALSE(adopt<Planar, Host>(second).ok());
  ref.reset();
  CHECK(adopt<Planar, Host>(second).ok());
}

TEST_CASE("adopt: a dropped transfer keeps the memory until it has ended, and no longer") {
  Foreign memory(8 * Planar::page_bytes);
  const AdoptOptions options{.bases = {memory.at(0)}, .page_stride = 8'448, .pages = 8, .bytes_per_layer = 8 * 8'448};
  const auto event = Event<Host>::make("transfer");
  {
    auto pool = adopt<Planar, Host>(options).value();
    const auto page = pool.allocate().value();
    const DevicePage ids[] = {page.id()};
    (void)pool.hold(ids, PageUse::load, event).value();
  }
  CHECK_FALSE(adopt<Planar, Host>(options).ok());
  event.complete();
  CHECK(adopt<Planar, Host>(options).ok());
}

TEST_CASE("adopt: pools side by side in one buffer, and every way to meet") {
  // Blocks of a bf16 page, 16,384 bytes, and an fp8 page, 8,448: a pool of each, from either order.
  constexpr std::int64_t block = Bf16::page_bytes + Planar::page_bytes;
  Foreign memory(4 * block);
  const auto in_blocks = [&](std::int64_t offset, std::int64_t page_bytes) {
    return AdoptOptions{.bases = {memory.at(offset)}, .page_stride = block, .pages = 4, .bytes_per_layer = 3 * block + page_bytes};
  };
  auto large = adopt<Bf16, Host>(in_blocks(0, Bf16::page_bytes)).value();
  CHECK(adopt<Planar, Host>(in_blocks(Bf16::page_bytes, Planar::page_bytes)).ok());
  CHECK_FALSE(adopt<Planar, Host>(in_blocks(Bf16::page_bytes - 16, Planar::page_bytes)).ok());
  CHECK_FALSE(adopt<Planar, Host>(in_blocks(64, Planar::page_bytes)).ok());
  // Another stride: fp8 pages of every other block.
  const auto every_other = [&](std::int64_t offset, std::int64_t pages) {
    return AdoptOptions{.bases = {memory.at(offset)}, .page_stride = 2 * block, .pages = pages, .bytes_per_layer = (pages - 1) * 2 * block + Planar::page_bytes};
  };
  CHECK(adopt<Planar, Host>(every_other(Bf16::page_bytes, 2)).ok());
  CHECK_FALSE(adopt<Planar, Host>(every_other(Bf16::page_bytes - 16, 2)).ok());
  auto late = every_other(Bf16::page_bytes, 2);
  late.page_stride = block + 16;  // the first page is apart, the second begins 16 bytes later in its block
  late.bytes_per_layer = block + 16 + Planar::page_bytes;
  CHECK_FALSE(adopt<Planar, Host>(late).ok());
}

TEST_CASE("adopt: what contradicts the policy is an error with both numbers") {
  Foreign memory(16 * Bf16::page_bytes);
  const AdoptOptions good{.bases = {memory.at(0)}, .page_stride = 8'448, .pages = 8, .bytes_per_layer = 8 * 8'448, .name = "t"};
  CHECK(adopt<Planar, Host>(good).ok());
  {
    auto o = good;
    o.bytes_per_layer = 8 * 8'448 - 4;
    const auto r = adopt<Planar, Host>(o);
    REQUIRE_FALSE(r.ok());
    CHECK(r.error().code == ErrorCode::mismatch);
    CHECK(contains(r.error(), "67580 bytes a layer"));
    CHECK(contains(r.error(), "67584"));
    o.bytes_per_layer = 8 * 8'448 + 4;
    CHECK(contains(adopt<Planar, Host>(o).error(), "67588"));
    o.bytes_per_layer = -1;
    CHECK_FALSE(adopt<Planar, Host>(o).ok());
  }
  // fp8 memory under the bf16 name and the other way round: the stride or the bytes disagree
  CHECK(contains(adopt<Bf16, Host>(good).error(), "page stride 8448 is below the page's 16384 bytes"));
  {
    auto o = good;
    o.page_stride = 8'448 + 4;
    o.bytes_per_layer = 8 * o.page_stride;
    CHECK(contains(adopt<Planar, Host>(o).error(), "page stride 8452 is not a multiple of 16"));
    o = good;
    o.bases = {memory.at(8)};
    CHECK(contains(adopt<Planar, Host>(o).error(), "8 bytes beyond a multiple of 16"));
    o.bases = {nullptr};
    CHECK(contains(adopt<Planar, Host>(o).error(), "layer 0 is null"));
    o.bases = {};
    CHECK(contains(adopt<Planar, Host>(o).error(), "no layer"));
    o = good;
    o.pages = 1;
    CHECK_FALSE(adopt<Planar, Host>(o).ok());
    o.pages = INT64_C(1) << 60;
    CHECK_FALSE(adopt<Planar, Host>(o).ok());
    o = good;
    o.page_stride = INT64_C(1) << 62;
    CHECK_FALSE(adopt<Planar, Host>(o).ok());
    o.page_stride = -8'448;
    CHECK_FALSE(adopt<Planar, Host>(o).ok());
  }
}

namespace {
struct EngineAllocator {
  std::shared_ptr<std::vector<int>> refs = std::make_shared<std::vector<int>>(8);
  int pages() const { return static_cast<int>(refs->size()); }
  int owners(std::int32_t page) const { return (*refs)[static_cast<std::size_t>(page)]; }
  void retain(std::int32_t page) { ++(*refs)[static_cast<std::size_t>(page)]; }
  void release(std::int32_t page) { --(*refs)[static_cast<std::size_t>(page)]; }
};
}  // namespace

TEST_CASE("adopt: another engine's allocator keeps owning the pages") {
  Foreign memory(8 * Planar::page_bytes);
  EngineAllocator engine;
  AdoptOptions options{.bases = {memory.at(0)}, .page_stride = 8'448, .pages = 8, .bytes_per_layer = 8 * 8'448, .name = "engine"};
  auto pool = adopt<Planar, Host>(options, engine).value();
  CHECK(pool.allocate().error().code == ErrorCode::unsupported);
  engine.retain(5);
  const auto event = Event<Host>::make();
  const DevicePage five[] = {DevicePage(5)};
  auto hold = pool.hold(five, PageUse::backup, event).value();
  CHECK(engine.owners(5) == 2);
  event.complete();
  hold = {};
  CHECK(engine.owners(5) == 1);

  options.pages = 4;
  options.bytes_per_layer = 4 * 8'448;
  const auto bound = adopt<Planar, Host>(options, engine);
  REQUIRE_FALSE(bound.ok());
  CHECK(contains(bound.error(), "its allocator has 8 pages, its memory 4"));
}

TEST_CASE("adopt: an allocator that has given page 0 away is refused, with a way out") {
  Foreign memory(8 * Planar::page_bytes);
  EngineAllocator engine;
  const AdoptOptions options{.bases = {memory.at(0)}, .page_stride = 8'448, .pages = 8, .bytes_per_layer = 8 * 8'448, .name = "engine"};
  engine.retain(0);
  engine.retain(0);
  const auto refused = adopt<Planar, Host>(options, engine);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::busy);
  CHECK(contains(refused.error(), "engine: its allocator has given page 0 to 2 owners"));
  CHECK(contains(refused.error(), "ids from 1"));
  CHECK(engine.owners(0) == 2);
  engine.release(0);
  engine.release(0);
  CHECK(adopt<Planar, Host>(options, engine).ok());
}

TEST_CASE("adopt: a buffer with something behind its pages says what to leave out") {
  Foreign memory(9 * Planar::page_bytes);
  AdoptOptions o{.bases = {memory.at(0)}, .page_stride = 8'448, .pages = 4, .bytes_per_layer = 4 * 8'448 + 32, .name = "engine"};
  const auto refused = adopt<Planar, Host>(o);
  REQUIRE_FALSE(refused.ok());
  CHECK(contains(refused.error(), "33824 bytes a layer, but 4 pages 8448 bytes apart are 33792: leave what lies behind the last page out"));
  o.bytes_per_layer = 4 * 8'448 - 32;
  CHECK_FALSE(contains(adopt<Planar, Host>(o).error(), "leave"));
}

TEST_CASE("adopt: the owner's handle lives as long as the pool or its pages") {
  auto owner = std::make_shared<int>(1);
  std::weak_ptr<int> watch = owner;
  Foreign memory(2 * Planar::page_bytes);
  PageRef<DevicePage> ref;
  {
    auto pool = adopt<Planar, Host>({.bases = {memory.at(0)}, .page_stride = 8'448, .pages = 2, .bytes_per_layer = 2 * 8'448, .owner = std::move(owner)}).value();
    ref = pool.allocate().value();
  }
  CHECK_FALSE(watch.expired());
  ref.reset();
  CHECK(watch.expired());
}

TEST_CASE("adopt: the allocator's count of our own holds is no other owner, finished ones with a live handle included") {
  Foreign memory(8 * Planar::page_bytes);
  EngineAllocator engine;
  auto pool = adopt<Planar, Host>({.bases = {memory.at(0)}, .page_stride = 8'448, .pages = 8, .bytes_per_layer = 8 * 8'448, .name = "engine"}, engine).value();
  engine.retain(3);
  const DevicePage three[] = {DevicePage(3)};
  const auto saved = Event<Host>::make();
  auto backup = pool.hold(three, PageUse::backup, saved).value();
  saved.complete();
  auto layer0 = pool.hold(three, PageUse::store, Event<Host>::make()).value();
  CHECK(pool.hold(three, PageUse::store, Event<Host>::make()).ok());
  engine.retain(3);  // a second sequence of the engine
  const auto shared = pool.hold(three, PageUse::store, Event<Host>::make());
  REQUIRE_FALSE(shared.ok());
  CHECK(contains(shared.error(), "has 2 owners"));
}

TEST_CASE("adopt: descriptions that no memory fits, with their numbers") {
  Foreign memory(8 * Planar::page_bytes);
  AdoptOptions o{.bases = {memory.at(0)}, .page_stride = INT64_C(1) << 62, .pages = 8, .bytes_per_layer = 8 * 8'448, .name = "engine"};
  CHECK(contains(adopt<Planar, Host>(o).error(), "8 pages 4611686018427387904 bytes apart do not fit 63 bits"));
  o.page_stride = 8'448;
  o.bases = {reinterpret_cast<std::byte*>(~std::uintptr_t(255))};
  CHECK(contains(adopt<Planar, Host>(o).error(), "67584 bytes from the base of layer 0 on reach beyond the address space"));
  o.bases = {memory.at(0), memory.at(64)};
  CHECK(contains(adopt<Planar, Host>(o).error(), "layers 0 and 1 overlap: their bases are 64 bytes apart, pages of 8448 bytes every 8448"));
}
