// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstring>

#include <kvire/base/config.hpp>
#include <kvire/exec/host/stream.hpp>
#include <kvire/layout/policies.hpp>
#include <kvire/memory/counting.hpp>
#include <kvire/memory/guarded.hpp>
#include <kvire/pool/mirror.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <tests/support/sparse_memory.hpp>

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::SparseMemory;

namespace {

using Fp8 = Fp8WithScale<64, 128>;
using Bf16 = Bf16Contiguous<64, 128>;
using Latent = preset::deepseek_v4::Latent<64>;

bool contains(const Error& error, const std::string& text) { return error.message.find(text) != std::string::npos; }

// A view is what crosses into kernels: plain, small, and of one policy and backend.
static_assert(std::is_trivially_copyable_v<PageView<Fp8, Host>> && sizeof(PageView<Fp8, Host>) == 24);
static_assert(std::is_trivially_copyable_v<ConstPageView<Fp8, Cuda>> && sizeof(ConstPageView<Fp8, Cuda>) == 24);
static_assert(std::is_convertible_v<PageView<Fp8, Host>, ConstPageView<Fp8, Host>>);
static_assert(!std::is_convertible_v<ConstPageView<Fp8, Host>, PageView<Fp8, Host>>);
static_assert(!std::is_convertible_v<PageView<Fp8, Host>, ConstPageView<Bf16, Host>>);
static_assert(!std::is_convertible_v<PageView<Fp8, Host>, ConstPageView<Fp8, Cuda>>);

// Page starts beyond 2^31, without any memory.
static_assert(page_start(Bf16::page_bytes, 131'072) == 2'147'483'648);
static_assert(page_start(Bf16::page_bytes, 262'144) == 4'294'967'296);
static_assert(page_start(Fp8::page_bytes, 254'201) == 2'147'490'048);
static_assert(page_start(Fp8::page_bytes, 254'200) + Fp8::offset<role::Value>(16) == 2'147'483'648);
static_assert(page_start(Fp4WithScale<64, 128>::page_bytes, 493'448) == 2'147'485'696);
static_assert(page_start(Latent::page_bytes, 57'359) == 2'147'520'960);
static_assert(page_start(1'039'680, 2'066) == 2'147'978'880);
static_assert(page_start(1'435'968, 4'564) == 6'553'757'952);

template <class P>
void fill_tokens(const PageView<P>& view, std::int32_t page, unsigned char value) {
  std::memset(view.page(page), value, static_cast<std::size_t>(P::page_bytes));
}

}  // namespace

TEST_CASE("pool: pages of all layers are apart, in both arrangements, zeroed and aligned") {
  for (auto arrangement : {Arrangement::layer_first, Arrangement::page_first}) {
    for (std::int64_t multiple : {1, 512}) {
      Guarded<HostMemory> guarded;
      {
        auto pool =
            DevicePool<Latent, Host>::make({.layers = 3, .pages = 5, .arrangement = arrangement, .page_multiple = multiple, .memory = guarded}).value();
        CHECK(pool.layers() == 3);
        CHECK(pool.pages() == 5);
        CHECK(pool.page_stride() >= Latent::page_bytes);
        CHECK(pool.page_stride() % multiple == 0);
        for (int layer = 0; layer < 3; ++layer) {
          const auto view = pool_access::view(pool, EntrySlot(layer));
          CHECK(view.page_stride == pool.page_stride());
          CHECK(view.page(4)[Latent::page_bytes - 1] == std::byte{0});
          for (int page = 0; page < 5; ++page) fill_tokens(view, page, static_cast<unsigned char>(layer * 16 + page));
        }
        for (int layer = 0; layer < 3; ++layer) {
          const auto view = pool_access::const_view(pool, EntrySlot(layer));
          for (int page = 0; page < 5; ++page) {
            for (std::int64_t i : {std::int64_t{0}, Latent::page_bytes - 1}) {
              CHECK(static_cast<int>(view.page(page)[i]) == layer * 16 + page);
            }
          }
        }
        CHECK(guarded.check().ok());
      }
    }
  }
}

TEST_CASE("pool: counts that make no pool are errors") {
  using Pool = DevicePool<Fp8, Host>;
  CHECK(Pool::make({.layers = 1, .pages = 0}).error().code == ErrorCode::invalid_argument);
  CHECK(Pool::make({.layers = 1, .pages = 1}).error().code == ErrorCode::invalid_argument);
  CHECK(Pool::make({.layers = 0, .pages = 4}).error().code == ErrorCode::invalid_argument);
  CHECK(Pool::make({.layers = -3, .pages = 4}).error().code == ErrorCode::invalid_argument);
  CHECK(contains(Pool::make({.layers = 1, .pages = 4, .arrangement = static_cast<Arrangement>(77)}).error(), "arrangement 77"));
  CHECK(Pool::make({.layers = 1, .pages = 4, .page_multiple = 0}).error().code == ErrorCode::invalid_argument);
  CHECK(contains(Pool::make({.layers = 2'000'000'000, .pages = 1 << 20, .name = "huge"}).error(), "pool huge"));
}

TEST_CASE("pool: more memory than there is: an error with the bytes wanted and available, and nothing is left behind") {
  Counting<HostMemory> counting({}, 100 * Fp8::page_bytes);
  auto device = DevicePool<Fp8, Host>::make({.layers = 2, .pages = 40, .name = "index_k", .memory = counting}).value();
  const auto refused = mirror_of(device, 40, {.memory = counting});
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::exhausted);
  CHECK(contains(refused.error(), "pool host.index_k"));
  CHECK(contains(refused.error(), std::to_string(80 * Fp8::page_bytes) + " bytes wanted, " + std::to_string(20 * Fp8::page_bytes) + " available"));
  CHECK(counting.counts().live_bytes == 80 * Fp8::page_bytes);
  CHECK(counting.counts().failures == 1);
  const auto beyond = DevicePool<Fp8, Host>::make({.layers = 1'000'000, .pages = 1 << 20});
  CHECK(contains(beyond.error(), "available"));
}

TEST_CASE("mirror: the host pool has the device pool's layout; nothing can say otherwise") {
  auto device = DevicePool<Bf16, Host>::make({.layers = 2, .pages = 4, .name = "index_k"}).value();
  auto host = mirror_of(device, 16).value();
  static_assert(std::is_same_v<decltype(host), HostPool<Bf16, Host>>);
  static_assert(std::is_same_v<decltype(host.allocate().value().id()), HostPage>);
  CHECK(host.layers() == 2);
  CHECK(host.pages() == 16);
  CHECK(host.page_stride() == Bf16::page_bytes);
  CHECK(host.name() == "host.index_k");
  auto turned = mirror_of(device, 16, {.arrangement = Arrangement::page_first, .name = "turned"}).value();
  CHECK(turned.arrangement() == Arrangement::page_first);
  CHECK(turned.page_stride() == 2 * Bf16::page_bytes);

  // All 64 tokens of two pages survive the way there and back to other pages: with a host page of the fp8 size 33 would.
  auto pages = device.allocate(3).value();
  auto spare = host.allocate(2).value();
  const auto d = pool_access::view(device, EntrySlot(0));
  const auto h = pool_access::view(host, EntrySlot(0));
  const DevicePage table[] = {pages[2].id(), pages[0].id()};
  for (int p = 0; p < 2; ++p) {
    for (int token = 0; token < 64; ++token) {
      std::memset(d.page(table[p].value) + Bf16::offset<role::Value>(token), p * 64 + token, 256);
    }
  }
  for (std::size_t p = 0; p < 2; ++p) std::memcpy(h.page(spare[p].id().value), d.page(table[p].value), Bf16::page_bytes);
  for (int page = 1; page < 4; ++page) fill_tokens(d, page, 0xFF);
  for (std::size_t p = 0; p < 2; ++p) std::memcpy(d.page(table[1 - p].value), h.page(spare[p].id().value), Bf16::page_bytes);
  for (int p = 0; p < 2; ++p) {
    for (int token = 0; token < 64; ++token) {
      const auto* row = d.page(table[1 - p].value) + Bf16::offset<role::Value>(token);
      CHECK(row[0] == static_cast<std::byte>(p * 64 + token));
      CHECK(row[255] == static_cast<std::byte>(p * 64 + token));
    }
  }
}

TEST_CASE("pool: page 131,072 of bf16 starts at 2^31 and has bytes of its own") {
  if (KVIRE_THREAD_SANITIZER) {
    MESSAGE("skipped: ThreadSanitizer touches four shadow bytes for each byte that is mapped");
    return;
  }
  auto pool = DevicePool<Bf16, Host>::make({.layers = 1, .pages = 131'073, .memory = AnyResource(SparseMemory{})}).value();
  CHECK(pool.bytes().count == 2'147'483'648 + 16'384);
  const auto view = pool_access::view(pool, EntrySlot(0));
  fill_tokens(view, 131'072, 0x5A);
  CHECK(view.page(131'072) - view.base == 2'147'483'648);
  CHECK(view.base[2'147'483'648] == std::byte{0x5A});
  for (int page : {0, 1, 65'536, 131'071}) CHECK(view.page(page)[Bf16::page_bytes - 1] == std::byte{0});

  auto wide = DevicePool<Bf16, Host>::make({.layers = 1, .pages = 262'145, .memory = AnyResource(SparseMemory{})}).value();
  const auto far = pool_access::view(wide, EntrySlot(0));
  fill_tokens(far, 262'144, 0x5A);
  CHECK(far.page(262'144) - far.base == 4'294'967'296);
  CHECK(far.base[0] == std::byte{0});  // no wrap modulo 2^32

  auto fp8 = DevicePool<Fp8, Host>::make({.layers = 1, .pages = 254'202, .memory = AnyResource(SparseMemory{})}).value();
  const auto keys = pool_access::view(fp8, EntrySlot(0));
  CHECK(keys.page(254'200) + Fp8::offset<role::Value>(16) - keys.base == 2'147'483'648);
  // layers inside the page: a stride of 2 layers
  auto turned =
      DevicePool<Bf16, Host>::make({.layers = 2, .pages = 65'537, .arrangement = Arrangement::page_first, .memory = AnyResource(SparseMemory{})}).value();
  const auto second = pool_access::view(turned, EntrySlot(1));
  fill_tokens(second, 65'536, 0x77);
  CHECK(second.page(65'536)[0] == std::byte{0x77});
  CHECK(pool_access::view(turned, EntrySlot(0)).page(65'536)[0] == std::byte{0});
}

TEST_CASE("pool: the null page is nobody's and ids outside the pool are nobody's") {
  auto pool = DevicePool<Fp8, Host>::make({.layers = 1, .pages = 4}).value();
  CHECK(pool.fill_page(DevicePage(0), 0xFF).ok());
  auto all = pool.allocate(3).value();
  for (const auto& ref : all) CHECK(ref.id().value != null_page);
  const auto view = pool_access::view(pool, EntrySlot(0));
  CHECK_FALSE(view.writable(0));
  CHECK_FALSE(view.writable(-1));
  CHECK_FALSE(view.writable(4));
  CHECK_FALSE(view.writable(0x7FFFFFFF));
  CHECK(view.writable(3));
  CHECK(pool.fill_page(DevicePage(4), 1).error().code == ErrorCode::out_of_range);
  CHECK(pool.fill_page(DevicePage(-1), 1).error().code == ErrorCode::out_of_range);
  for (int id : {-1, 0, 4, 0x7FFFFFFF}) {
    const DevicePage bad[] = {DevicePage(id)};
    CHECK_FALSE(pool.hold(bad, PageUse::load, Event<Host>::make()).ok());
  }
}

TEST_CASE("pool: freed pages carry the fill pattern, and a write after free is found") {
  auto pool = DevicePool<Fp8, Host>::make({.layers = 2, .pages = 4, .name = "index_k", .fill_on_free = 0xA5}).value();
  const auto view = pool_access::view(pool, EntrySlot(1));
  auto ref = pool.allocate().value();
  const auto id = ref.id();
  fill_tokens(view, id.value, 0x11);
  CHECK(pool.verify_free().ok());
  ref.reset();
  CHECK(view.page(id.value)[0] == std::byte{0xA5});
  CHECK(pool_access::view(pool, EntrySlot(0)).page(id.value)[Fp8::page_bytes - 1] == std::byte{0xA5});
  CHECK(pool.verify_free().ok());
  view.page(id.value)[8'200] = std::byte{0x3C};
  const auto found = pool.verify_free();
  REQUIRE_FALSE(found.ok());
  CHECK(contains(found.error(), "pool index_k: free page 1, layer 1: byte 8200 is 0x3C, expected 0xA5"));
  auto plain = DevicePool<Fp8, Host>::make({.layers = 1, .pages = 4}).value();
  CHECK(plain.verify_free().error().code == ErrorCode::unsupported);
}

TEST_CASE("pool: declared padding is zero, and a write into it is found") {
  auto pool = DevicePool<Latent, Host>::make({.layers = 1, .pages = 4, .name = "c4_latent"}).value();
  const auto page = pool.allocate().value();
  CHECK(pool.verify_padding(page.id()).ok());
  std::byte* bytes = pool_access::view(pool, EntrySlot(0)).page(page.id().value);
  for (int token = 0; token < 64; ++token) {
    std::memset(bytes + Latent::offset<role::Nope>(token), 0xEE, 576);
    std::memset(bytes + Latent::offset<role::Scale>(token), 0xEE, 7);
  }
  CHECK(pool.verify_padding(page.id()).ok());
  SUBCASE("beside the scales") { bytes[Latent::offset<role::Scale>(5) + 7] = std::byte{1}; }
  SUBCASE("at the end of the page") { bytes[Latent::page_bytes - 1] = std::byte{1}; }
  const auto found = pool.verify_padding(page.id());
  REQUIRE_FALSE(found.ok());
  CHECK(contains(found.error(), "pool c4_latent: padding of page 1, layer 0: byte "));
}

TEST_CASE("pool: an aborted load keeps its pages until the copy has stopped; nobody else's bytes change") {
  auto hold = CopyHold::make();
  auto hooks = FaultHooks::make([hold](const CopyInfo&) { return Fault::hold(hold); });
  auto loader = Stream<Host>::make({.name = "loader", .faults = hooks}).value();
  auto device = DevicePool<Fp8, Host>::make({.layers = 1, .pages = 8, .name = "index_k"}).value();
  auto host = mirror_of(device, 8).value();
  const auto d = pool_access::view(device, EntrySlot(0));
  auto source = host.allocate(5).value();
  for (const auto& s : source) fill_tokens(pool_access::view(host, EntrySlot(0)), s.id().value, 0x42);

  auto keep = device.allocate().value();       // page 1
  auto a = device.allocate(5).value();         // pages 2..6
  std::vector<DevicePage> ids;
  for (const auto& r : a) ids.push_back(r.id());
  auto event = Event<Host>::make("load of a");
  auto pages = device.hold(ids, PageUse::load, event).value();
  for (std::size_t i = 0; i < 5; ++i) {
    loader.copy({.entry = "index_k", .layer = 0, .direction = CopyDirection::host_to_device}, d.page(ids[i].value),
                pool_access::view(host, EntrySlot(0)).page(source[i].id().value), Fp8::page_bytes);
  }
  CHECK(loader.record(event).ok());
  REQUIRE(hold->wait_reached(deadline_in(10s)));

  a.clear();   // the abort: owners and ticket go while the copy is open
  pages = {};
  CHECK(contains(device.allocate(6).error(), "6 pages wanted, 1 free of 7, 5 draining"));
  auto b = device.allocate().value();  // the one page left
  fill_tokens(d, b.id().value, 0x99);
  CHECK_FALSE(event.wait(deadline_in(5ms)).ok());
  CHECK_FALSE(device.allocate().ok());

  hold->release();
  CHECK(event.wait(deadline_in(10s)).ok());
  auto c = device.allocate(5).value();
  CHECK(device.free_pages() == 0);
  CHECK(d.page(b.id().value)[0] == std::byte{0x99});
  CHECK(d.page(b.id().value)[Fp8::page_bytes - 1] == std::byte{0x99});
}

TEST_CASE("pool: a temporary host pool outlives the copies that read it") {
  auto hold = CopyHold::make();
  auto hooks = FaultHooks::make([hold](const CopyInfo&) { return Fault::hold(hold); });
  auto loader = Stream<Host>::make({.name = "loader", .faults = hooks}).value();
  Counting<HostMemory> counting;
  auto device = DevicePool<Fp8, Host>::make({.layers = 1, .pages = 5}).value();
  const auto d = pool_access::view(device, EntrySlot(0));
  auto to = device.allocate(3).value();
  for (int i = 0; i < 3; ++i) {
    auto host = mirror_of(device, 2, {.memory = AnyResource(counting)}).value();
    auto from = host.allocate().value();
    fill_tokens(pool_access::view(host, EntrySlot(0)), from.id().value, static_cast<unsigned char>(0x10 + i));
    const HostPage id[] = {from.id()};
    auto event = Event<Host>::make();
    auto source = host.hold(id, PageUse::load, event).value();
    loader.copy({.entry = "index_k"}, d.page(to[static_cast<std::size_t>(i)].id().value), pool_access::view(host, EntrySlot(0)).page(from.id().value),
                Fp8::page_bytes);
    CHECK(loader.record(event).ok());
  }  // pool, page and ticket destroyed; the copy has not begun
  CHECK(counting.counts().live_allocations == 3);
  for (int i = 0; i < 3; ++i) {
    auto other = HostPool<Fp8, Host>::make({.layers = 1, .pages = 2}).value();
    fill_tokens(pool_access::view(other, EntrySlot(0)), 1, 0x5A);
  }
  hold->release();
  CHECK(loader.synchronize().ok());
  for (int i = 0; i < 3; ++i) {
    CHECK(d.page(to[static_cast<std::size_t>(i)].id().value)[Fp8::page_bytes - 1] == static_cast<std::byte>(0x10 + i));
  }
  device.ledger().drain();
  CHECK(counting.counts().live_allocations == 0);
}

TEST_CASE("pool: pages under a load are not free to evict, and a load without room changes nothing") {
  auto host = HostPool<Fp8, Host>::make({.layers = 1, .pages = 5, .name = "host"}).value();
  auto device = DevicePool<Fp8, Host>::make({.layers = 1, .pages = 5, .name = "device"}).value();
  auto cached = host.allocate(4).value();
  auto busy = device.allocate(3).value();
  std::vector<HostPage> prefix = {cached[0].id(), cached[1].id(), cached[2].id()};
  auto event = Event<Host>::make();
  auto sources = host.hold(prefix, PageUse::load, event).value();
  CHECK(host.ledger().holds(prefix[0]) == 1);  // what an evictor asks
  CHECK(host.ledger().holds(cached[3].id()) == 0);
  CHECK(device.allocate(3).error().code == ErrorCode::exhausted);
  CHECK(device.free_pages() == 1);
  CHECK(host.free_pages() == 0);
  cached.clear();  // evicted against the rules: the bytes stay until the load is through
  CHECK(host.free_pages() == 1);
  CHECK(host.draining_pages() == 3);
  event.complete();
  sources = {};
  CHECK(host.free_pages() == 4);
}

namespace {
// Breaks what a resource promises: `offset` bytes beyond the alignment asked for, or no memory at all.
struct Careless {
  static constexpr bool zeroed = false;
  std::int64_t offset = -1;
  Result<std::byte*> allocate(std::int64_t bytes, std::int64_t alignment) {
    if (offset < 0) return static_cast<std::byte*>(nullptr);
    return HostMemory{}.allocate(bytes + alignment, alignment).value() + offset;
  }
  void deallocate(std::byte* p, std::int64_t bytes, std::int64_t alignment) { HostMemory{}.deallocate(p - offset, bytes + alignment, alignment); }
  std::string name() const { return "careless"; }
};
struct Refuses {
  static constexpr bool zeroed = true;
  Result<std::byte*> allocate(std::int64_t bytes, std::int64_t) { return Error{ErrorCode::exhausted, std::to_string(bytes) + " bytes"}; }
  void deallocate(std::byte*, std::int64_t, std::int64_t) {}
  std::string name() const { return "refuses"; }
};
}  // namespace

TEST_CASE("pool: a stride and memory that pages cannot be moved by are refused, with the numbers") {
  using P = Fp8WithScale<64, 128>;
  using Pool = DevicePool<P, Host>;
  const auto error = [](const Result<Pool>& result) { return result.ok() ? Error{} : result.error(); };
  const auto odd = Pool::make({.layers = 1, .pages = 4, .name = "p", .page_multiple = 7});
  CHECK(error(odd).message == "pool p: page multiple 7 makes a page stride of 8449, not a multiple of 16 bytes, by which pages are moved");
  CHECK(Pool::make({.layers = 1, .pages = 4, .page_multiple = 4096}).value().page_stride() == 12'288);
  for (const std::int64_t multiple : {INT64_C(0), INT64_C(-3), INT64_C(100'000'000)}) {
    CHECK(contains(error(Pool::make({.layers = 1, .pages = 4, .page_multiple = multiple})), std::to_string(multiple) + " is not in 1 to 33792"));
  }
  CHECK(contains(error(Pool::make({.layers = 1, .pages = 4, .memory = Careless{}})), "careless: a null pointer for 33792 bytes"));
  CHECK(contains(error(Pool::make({.layers = 1, .pages = 4, .memory = Careless{4}})), "careless: memory 4 bytes beyond a multiple of 256"));
  CHECK(Pool::make({.layers = 1, .pages = 4, .memory = Careless{0}}).ok());
}

TEST_CASE("pool: memory that is not to be had is refused before anything is set up for its pages") {
  using Pool = DevicePool<Fp8WithScale<64, 128>, Host>;
  // 43 GB of tables for 18 TB of pages: the tables alone would be refused, with another message.
  const auto huge = Pool::make({.layers = 1, .pages = INT64_C(0x7FFFFFFF), .name = "huge", .memory = Refuses{}});
  REQUIRE_FALSE(huge.ok());
  CHECK(huge.error().message == "pool huge: " + std::to_string(INT64_C(0x7FFFFFFF) * 8'448) + " bytes");
}

TEST_CASE("pool: padding of a page that does not exist") {
  auto pool = DevicePool<Latent, Host>::make({.layers = 1, .pages = 4, .name = "p"}).value();
  for (const std::int32_t page : {-1, 4, 100'000}) {
    const auto status = pool.verify_padding(DevicePage(page));
    REQUIRE_FALSE(status.ok());
    CHECK(status.error().code == ErrorCode::out_of_range);
    CHECK(contains(status.error(), "is not in 0 to 3"));
  }
  CHECK(pool.verify_padding(DevicePage(3)).ok());
}
