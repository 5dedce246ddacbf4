// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <random>
#include <set>
#include <thread>

#include <kvire/exec/host/stream.hpp>
#include <kvire/pool/ledger.hpp>

using namespace kvire;
using namespace std::chrono_literals;

namespace {

using Ledger = PageLedger<DevicePage, Host>;
using Ref = PageRef<DevicePage>;

Ledger make(std::int64_t pages, const char* name = "index_k") { return Ledger::make(name, pages).value(); }

bool contains(const Error& error, const char* text) { return error.message.find(text) != std::string::npos; }

std::vector<DevicePage> ids_of(const std::vector<Ref>& refs) {
  std::vector<DevicePage> ids;
  for (const auto& r : refs) ids.push_back(r.id());
  return ids;
}

}  // namespace

// Ownership is in the object: what would release a page twice, or release somebody else's share, has no spelling.
template <class L, class R>
concept ReleasesByCopy = requires(L ledger, R& ref) { ledger.release(ref); };
static_assert(!ReleasesByCopy<Ledger, Ref> && !ReleasesByCopy<Ledger, const Ref>);
static_assert(std::is_nothrow_move_constructible_v<Ref> && std::is_copy_constructible_v<Ref>);
static_assert(!std::is_copy_constructible_v<Ledger::Hold> && std::is_nothrow_move_constructible_v<Ledger::Hold>);

TEST_CASE("ledger: pages are handed out once, the null page never, lowest first") {
  auto ledger = make(5);
  CHECK(ledger.capacity() == 4);
  std::set<std::int32_t> seen;
  std::vector<Ref> refs;
  for (int i = 0; i < 4; ++i) {
    refs.push_back(ledger.allocate().value());
    CHECK(refs.back().id().value == i + 1);
    seen.insert(refs.back().id().value);
  }
  CHECK(seen == std::set<std::int32_t>{1, 2, 3, 4});
  const auto none = ledger.allocate();
  REQUIRE_FALSE(none.ok());
  CHECK(none.error().code == ErrorCode::exhausted);
  CHECK(contains(none.error(), "pool index_k: 1 pages wanted, 0 free of 4, 0 draining"));
  refs.clear();
  CHECK(ledger.free_pages() == 4);
  for (std::int64_t pages : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{1}, std::int64_t{1} << 31}) {
    CHECK(Ledger::make("p", pages).error().code == ErrorCode::invalid_argument);
  }
}

TEST_CASE("ledger: many pages at once are all or none") {
  auto ledger = make(9);
  auto five = ledger.allocate(5).value();
  CHECK_FALSE(ledger.allocate(4).ok());
  CHECK(ledger.free_pages() == 3);
  CHECK(ledger.allocate(3).value().size() == 3);
  CHECK(ledger.allocate(0).value().empty());
  CHECK(ledger.allocate(-1).error().code == ErrorCode::invalid_argument);
  CHECK(ledger.allocate(std::int64_t{1} << 40).error().code == ErrorCode::exhausted);
}

TEST_CASE("ledger: a shared page lives until its last owner") {
  auto ledger = make(4);
  Ref a = ledger.allocate().value();
  const auto page = a.id();
  Ref b = a;
  Ref c = std::move(a);
  CHECK_FALSE(static_cast<bool>(a));  // NOLINT: moved from on purpose
  CHECK(ledger.owners(page) == 2);
  b.reset();
  CHECK(ledger.owners(page) == 1);
  CHECK(ledger.generation(page) == 0);
  const auto key = c.key();
  CHECK(ledger.is_current(key));
  c.reset();
  CHECK(ledger.owners(page) == 0);
  CHECK(ledger.generation(page) == 1);
  CHECK_FALSE(ledger.is_current(key));
  // the same id again, another generation: the key stays stale
  Ref d = ledger.allocate().value();
  CHECK(d.id() == page);
  CHECK_FALSE(ledger.is_current(key));
  const auto stale = ledger.share(key);
  REQUIRE_FALSE(stale.ok());
  CHECK(stale.error().code == ErrorCode::stale);
  CHECK(ledger.check(key).error().code == ErrorCode::stale);
  CHECK(ledger.share(d.key()).value().id() == page);
}

TEST_CASE("ledger: double, foreign, unknown and out-of-range frees are errors that name pool, id and bound") {
  auto ledger = make(5);
  const auto a = ledger.detach(ledger.allocate().value());
  CHECK(ledger.free_pages() == 3);
  CHECK(ledger.release(a).ok());
  const auto twice = ledger.release(a);
  REQUIRE_FALSE(twice.ok());
  CHECK(twice.error().code == ErrorCode::duplicate);
  CHECK(contains(twice.error(), "pool index_k: device page 1 is free already"));
  CHECK(ledger.free_pages() == 4);
  auto b = ledger.allocate().value();
  auto c = ledger.allocate().value();
  CHECK(b.id() != c.id());
  CHECK(ledger.free_pages() == 2);

  CHECK(contains(ledger.release(DevicePage(4)).error(), "device page 4 was never allocated"));
  CHECK(contains(ledger.release(DevicePage(5)).error(), "device page 5 is not below 5"));
  CHECK(ledger.release(DevicePage(5)).error().code == ErrorCode::out_of_range);
  CHECK(contains(ledger.release(DevicePage(-1)).error(), "device page -1 is negative"));
  CHECK(contains(ledger.release(DevicePage(0)).error(), "null page"));
  CHECK(contains(ledger.release(DevicePage(0x7FFFFFFF)).error(), "not below 5"));
  CHECK(contains(ledger.release(b.id()).error(), "owned by page references"));
  CHECK(ledger.owners(b.id()) == 1);

  auto other = make(5, "latent");
  auto foreign = other.allocate().value();
  const auto status = ledger.release(std::move(foreign));
  REQUIRE_FALSE(status.ok());
  CHECK(status.error().code == ErrorCode::mismatch);
  CHECK(contains(status.error(), "belongs to pool latent"));
  CHECK(other.free_pages() == 3);  // the refused reference still owns its page
  CHECK(ledger.release(std::move(b)).ok());
  CHECK_FALSE(ledger.release(std::move(b)).ok());  // NOLINT: empty now
}

TEST_CASE("ledger: a reference of another pool is not detached here: its id would name a page of this one") {
  auto mine = Ledger::make("mine", 4).value();
  auto other = Ledger::make("other", 4).value();
  const auto id = mine.detach(mine.allocate().value());
  auto theirs = other.allocate().value();
  REQUIRE(theirs.id() == id);
  CHECK(mine.detach(std::move(theirs)).none());
  CHECK(theirs.id() == id);
  CHECK(other.detach(std::move(theirs)) == id);
  CHECK(mine.release(id).ok());
  CHECK(other.release(id).ok());
}

TEST_CASE("ledger: a raw id can become a reference again, once") {
  auto ledger = make(4);
  const auto id = ledger.detach(ledger.allocate().value());
  CHECK(ledger.owners(id) == 1);
  {
    auto ref = ledger.attach(id).value();
    CHECK_FALSE(ledger.attach(id).ok());
    CHECK_FALSE(ledger.release(id).ok());
  }
  CHECK(ledger.free_pages() == 3);
  CHECK(ledger.detach(Ref()).none());
}

TEST_CASE("ledger: an id of a larger host pool is out of the device pool's range") {
  auto device = make(8, "device.index_k");
  auto status = device.check(DevicePage(11));
  REQUIRE_FALSE(status.ok());
  CHECK(status.error().code == ErrorCode::out_of_range);
  CHECK(contains(status.error(), "pool device.index_k: device page 11 is not below 8"));
  static_assert(!std::is_convertible_v<PageRef<HostPage>, PageRef<DevicePage>>);
}

TEST_CASE("ledger: freed pages drain while a transfer may still write them") {
  auto ledger = make(8);
  Ref before = ledger.allocate().value();
  auto owned = ledger.allocate(5).value();  // pages 2..6
  const auto pages = ids_of(owned);
  auto event = Event<Host>::make("load");
  auto hold = ledger.hold(pages, PageUse::load, event).value();
  CHECK(hold.pages().size() == 5);
  CHECK(ledger.holds(pages[0]) == 1);
  REQUIRE(ledger.in_flight(pages[0]).size() == 1);
  CHECK(ledger.in_flight(pages[0])[0].use == PageUse::load);
  CHECK(ledger.in_flight(before.id()).empty());

  const auto key = owned[0].key();
  owned.clear();  // the abort
  CHECK(ledger.draining_pages() == 5);
  CHECK(ledger.free_pages() == 1);
  CHECK_FALSE(ledger.is_current(key));
  // nobody's pages any more, and not free either
  CHECK(contains(ledger.hold(pages, PageUse::backup, event).error(), "device page 2 has no owner any more, and is free once the work that holds it has finished"));
  CHECK(contains(ledger.release(pages[0]).error(), "device page 2 has no owner any more"));

  bool completes = true;
  SUBCASE("ticket dropped while the copy runs") { hold = {}; }
  SUBCASE("ticket alive") {}
  SUBCASE("a failed copy has stopped too") {
    hold = {};
    completes = false;
  }
  const auto refused = ledger.allocate(6);
  REQUIRE_FALSE(refused.ok());
  CHECK(contains(refused.error(), "6 pages wanted, 1 free of 7, 5 draining"));
  CHECK(event.wait(deadline_in(1ms)).error().code == ErrorCode::timeout);
  CHECK_FALSE(ledger.allocate(6).ok());  // a timeout is no proof

  event.complete(completes ? Status() : Status(Error{ErrorCode::failed, "x"}));
  hold = {};
  auto again = ledger.allocate(6).value();
  std::set<std::int32_t> distinct;
  for (const auto& r : again) distinct.insert(r.id().value);
  CHECK(distinct.size() == 6);
  CHECK(ledger.free_pages() == 0);
  CHECK(ledger.draining_pages() == 0);
  again.clear();
  CHECK(ledger.free_pages() == 6);  // each came back exactly once
}

TEST_CASE("ledger: an unfinished transfer at the front does not keep others' pages") {
  auto ledger = make(4);
  Event<Host> events[3];
  for (auto& event : events) {
    event = Event<Host>::make();
    auto ref = ledger.allocate().value();
    const DevicePage id[] = {ref.id()};
    (void)ledger.hold(id, PageUse::load, event).value();  // dropped at once
  }
  CHECK(ledger.draining_pages() == 3);
  events[2].complete();
  auto last = ledger.allocate().value();
  CHECK(last.id().value == 3);
  events[0].complete();
  events[1].complete();
  ledger.drain();
  CHECK(ledger.free_pages() == 2);
  CHECK(ledger.draining_pages() == 0);
}

TEST_CASE("ledger: a hold refuses what nobody owns, all or none") {
  auto ledger = make(6);
  auto ref = ledger.allocate().value();
  const auto event = Event<Host>::make();
  for (int bad : {0, -1, 3, 6}) {
    const DevicePage pages[] = {ref.id(), DevicePage(bad)};
    CHECK_FALSE(ledger.hold(pages, PageUse::load, event).ok());
    CHECK(ledger.holds(ref.id()) == 0);
  }
  const DevicePage one[] = {ref.id()};
  auto a = ledger.hold(one, PageUse::backup, event).value();
  auto b = ledger.hold(one, PageUse::store, Event<Host>::make()).value();
  CHECK(ledger.in_flight(ref.id()).size() == 2);
  event.complete();
  CHECK(ledger.in_flight(ref.id()).size() == 1);  // final work is nothing to wait for
  CHECK(ledger.holds(ref.id()) == 2);
  b.event().complete();
}

namespace {
struct Tracked final : PageMemory {
  explicit Tracked(std::atomic<int>& a) : alive(a) { ++alive; }
  ~Tracked() override { --alive; }
  bool wants_freed() const override { return true; }
  void page_freed(std::int32_t page) override { freed.push_back(page); }
  std::atomic<int>& alive;
  std::vector<std::int32_t> freed;
};
}  // namespace

TEST_CASE("ledger: memory outlives its pool while references, holds or running transfers exist") {
  std::atomic<int> alive{0};
  Ref ref;
  Ledger::Hold hold;
  auto event = Event<Host>::make();
  {
    auto ledger = make(4);
    auto memory = std::make_shared<Tracked>(alive);
    ledger.attach_memory(memory);
    ref = ledger.allocate().value();
    const DevicePage one[] = {ref.id()};
    hold = ledger.hold(one, PageUse::load, event).value();
    auto copy = ledger;
    CHECK(copy == ledger);
  }
  CHECK(alive == 1);
  SUBCASE("finished before the ticket goes") {
    ref.reset();
    CHECK(alive == 1);
    event.complete();
    hold = {};
    CHECK(alive == 0);
  }
  SUBCASE("reference last") {
    event.complete();
    hold = {};
    CHECK(alive == 1);
    ref.reset();
    CHECK(alive == 0);
  }
  SUBCASE("ticket dropped while the copy runs, pool gone: kept until it has finished") {
    ref.reset();
    hold = {};
    (void)make(2);
    CHECK(alive == 1);
    event.complete();
    (void)make(2);
    CHECK(alive == 0);
  }
}

TEST_CASE("ledger: freed pages are reported once, before they can be allocated again") {
  std::atomic<int> alive{0};
  auto ledger = make(4);
  auto memory = std::make_shared<Tracked>(alive);
  ledger.attach_memory(memory);
  auto refs = ledger.allocate(2).value();
  auto event = Event<Host>::make();
  const DevicePage held[] = {refs[1].id()};
  auto hold = ledger.hold(held, PageUse::load, event).value();
  refs.clear();
  CHECK(memory->freed == std::vector<std::int32_t>{1});
  event.complete();
  hold = {};
  CHECK(memory->freed == std::vector<std::int32_t>{1, 2});
}

namespace {
struct Outside {
  std::shared_ptr<std::vector<std::atomic<int>>> counts;
  std::int32_t pages() const { return static_cast<std::int32_t>(counts->size()); }
  int owners(std::int32_t page) { return (*counts)[static_cast<std::size_t>(page)]; }
  void retain(std::int32_t page) { ++(*counts)[static_cast<std::size_t>(page)]; }
  void release(std::int32_t page) { --(*counts)[static_cast<std::size_t>(page)]; }
};
static_assert(OutsidePages<Outside> && !OutsidePages<int>);
}  // namespace

TEST_CASE("ledger: another engine's allocator owns the pages") {
  Outside outside{std::make_shared<std::vector<std::atomic<int>>>(8)};
  auto ledger = Ledger::over("engine", outside).value();
  CHECK(ledger.allocate().error().code == ErrorCode::unsupported);
  CHECK(ledger.allocate(2).error().code == ErrorCode::unsupported);
  outside.retain(3);
  auto event = Event<Host>::make();
  const DevicePage three[] = {DevicePage(3)};
  const DevicePage four[] = {DevicePage(4)};
  CHECK_FALSE(ledger.hold(four, PageUse::load, event).ok());
  auto hold = ledger.hold(three, PageUse::load, event).value();
  CHECK(outside.owners(3) == 2);
  // A key would be of a generation, which the other engine does not count: not "freed".
  CHECK(ledger.share(ledger.key(DevicePage(3))).error().code == ErrorCode::unsupported);
  CHECK(contains(ledger.check(ledger.key(DevicePage(3))).error(), "device page 3 is owned by an outside allocator"));
  outside.release(3);  // the engine's abort
  hold = {};
  CHECK(outside.owners(3) == 1);  // still kept by the running load
  CHECK(ledger.in_flight(DevicePage(3)).size() == 1);
  event.complete();
  ledger.drain();
  CHECK(outside.owners(3) == 0);
  CHECK(ledger.free_pages() == 0);
  CHECK(ledger.draining_pages() == 0);
}

TEST_CASE("ledger: a store needs pages of one owner, transfers and reads do not") {
  auto ledger = make(4);
  auto own = ledger.allocate().value();
  auto other = ledger.allocate().value();
  const DevicePage pages[] = {own.id(), other.id()};
  const auto event = Event<Host>::make();
  {
    const auto share = other;
    const auto refused = ledger.hold(pages, PageUse::store, event);
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code == ErrorCode::busy);
    CHECK(refused.error().message.find("device page 2 has 2 owners") != std::string::npos);
    CHECK(ledger.holds(own.id()) == 0);  // all or none
    for (const auto use : {PageUse::load, PageUse::backup, PageUse::read}) CHECK(ledger.hold(pages, use, event).ok());
  }
  auto hold = ledger.hold(pages, PageUse::store, event).value();
  const auto late = other;  // may join: it finds the store in flight
  CHECK(ledger.in_flight(late.id()).size() == 4);
  event.complete();
}

TEST_CASE("ledger: an outside page that only kvire holds may be stored to, one that the engine shares may not") {
  Outside outside{std::make_shared<std::vector<std::atomic<int>>>(4)};
  auto ledger = Ledger::over("engine", outside).value();
  outside.retain(3);
  const DevicePage three[] = {DevicePage(3)};
  const auto event = Event<Host>::make();
  auto load = ledger.hold(three, PageUse::load, event).value();
  auto first = ledger.hold(three, PageUse::store, event).value();
  CHECK(ledger.hold(three, PageUse::store, event).ok());
  outside.retain(3);
  const auto refused = ledger.hold(three, PageUse::store, event);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::busy);
  CHECK(refused.error().message.find("device page 3 has 2 owners") != std::string::npos);
  CHECK(ledger.holds(DevicePage(3)) == 3);
  CHECK(outside.owners(3) == 2 + 3);
  outside.release(3);
  CHECK(ledger.hold(three, PageUse::store, event).ok());
  event.complete();
  load = {};
  first = {};
  ledger.drain();
  CHECK(outside.owners(3) == 1);
}

TEST_CASE("ledger: threads share a page that others store to; a share that found no store meets none") {
  // `hold` looks at the owners and takes the pages in one step. Were it two, a share of the first page could fall between them, while the
  // owners of the others are looked at.
  auto ledger = make(257);
  const auto refs = ledger.allocate(256).value();
  const auto pages = ids_of(refs);
  const auto key = ledger.key(pages[0]);
  std::atomic<bool> done{false};
  std::atomic<int> stored{0};
  std::atomic<int> refused{0};
  std::thread writer([&] {
    while (!done) {
      const auto event = Event<Host>::make();
      auto hold = ledger.hold(pages, PageUse::store, event);
      hold.ok() ? ++stored : ++refused;
      event.complete();
    }
  });
  int alone = 0;
  bool met = false;
  const auto end = deadline_in(20s);
  while ((alone < 20'000 || stored < 5000 || refused < 5000) && !met && Clock::now() < end) {
    const auto share = ledger.share(key).value();
    if (ledger.holds(pages[0]) == 0) {
      ++alone;
      for (int look = 0; look < 200; ++look) met = met || ledger.holds(pages[0]) > 0;
    }
  }
  done = true;
  writer.join();
  CHECK_FALSE(met);
  CHECK(alone > 0);
  CHECK(stored > 0);
  CHECK(refused > 0);
}

TEST_CASE("ledger: threads allocate, share, hold and drop; every page comes back once") {
  auto ledger = make(65);
  std::vector<std::atomic<int>> owner(65);
  std::atomic<bool> clash{false};
  auto stream = Stream<Host>::make({.name = "copies"}).value();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      std::vector<std::vector<Ref>> mine;
      for (int round = 0; round < 3000; ++round) {
        auto got = ledger.allocate(1 + static_cast<int>(random() % 5));
        if (got.ok()) {
          for (auto& r : got.value()) {
            if (owner[static_cast<std::size_t>(r.id().value)].exchange(t + 1) != 0) clash = true;
          }
          mine.push_back(std::move(got).value());
        }
        if (!mine.empty() && random() % 3 == 0) {
          const auto ids = ids_of(mine.back());
          auto event = Event<Host>::make();
          auto hold = ledger.hold(ids, PageUse::load, event).value();
          (void)stream.record(event);
          auto copy = mine.back()[0];
        }
        if (mine.size() > 3 || (!got.ok() && !mine.empty())) {
          for (auto& r : mine.front()) owner[static_cast<std::size_t>(r.id().value)] = 0;
          mine.erase(mine.begin());
        }
      }
      for (auto& refs : mine) {
        for (auto& r : refs) owner[static_cast<std::size_t>(r.id().value)] = 0;
      }
    });
  }
  for (auto& t : threads) t.join();
  CHECK(stream.synchronize().ok());
  ledger.drain();
  CHECK_FALSE(clash);
  CHECK(ledger.free_pages() == 64);
  CHECK(ledger.draining_pages() == 0);
  CHECK(ledger.used_pages() == 0);
}

namespace {
// Says which pages are free, from outside: a page must be reported before it can be allocated again.
struct FreeBoard final : PageMemory {
  std::vector<std::atomic<int>> reported = std::vector<std::atomic<int>>(17);
  std::atomic<bool> clash{false};
  bool wants_freed() const override { return true; }
  void page_freed(std::int32_t page) override {
    if (reported[static_cast<std::size_t>(page)].exchange(1) != 0) clash = true;
  }
};
}  // namespace

TEST_CASE("ledger: threads share, detach and free pages whose memory is filled on free") {
  auto ledger = make(17);
  auto board = std::make_shared<FreeBoard>();
  for (std::size_t page = 1; page < 17; ++page) board->reported[page] = 1;
  ledger.attach_memory(board);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int round = 0; round < 4000; ++round) {
        auto got = ledger.allocate();
        if (!got.ok()) continue;
        Ref ref = std::move(got).value();
        const auto key = ref.key();
        if (board->reported[static_cast<std::size_t>(ref.id().value)].exchange(0) != 1) board->clash = true;
        std::vector<Ref> shares(random() % 3, ref);
        if (random() % 4 == 0) {
          const DevicePage id[] = {ref.id()};
          auto event = Event<Host>::make();
          auto hold = ledger.hold(id, PageUse::read, event).value();
          ref.reset();
          shares.clear();
          if (ledger.is_current(key)) board->clash = true;
          event.complete();
        } else if (random() % 2 == 0) {
          shares.clear();
          const auto id = ledger.detach(std::move(ref));
          if (!ledger.release(id).ok()) board->clash = true;
        }
      }
    });
  }
  for (auto& t : threads) t.join();
  ledger.drain();
  CHECK_FALSE(board->clash);
  CHECK(ledger.free_pages() == 16);
}

TEST_CASE("ledger: pools die while their transfers run, on several threads") {
  std::atomic<int> alive{0};
  auto stream = Stream<Host>::make().value();
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < 300; ++round) {
        auto ledger = make(8);
        ledger.attach_memory(std::make_shared<Tracked>(alive));
        auto refs = ledger.allocate(3).value();
        auto event = Event<Host>::make();
        auto hold = ledger.hold(ids_of(refs), PageUse::load, event).value();
        stream.launch([] { std::this_thread::yield(); });
        (void)stream.record(event);
      }
    });
  }
  for (auto& t : threads) t.join();
  CHECK(stream.synchronize().ok());
  (void)make(2);
  CHECK(alive == 0);
}

TEST_CASE("ledger: a hold by ids that do not ascend is refused: nobody would find it") {
  auto ledger = make(6);
  const auto refs = ledger.allocate(4).value();
  const auto event = Event<Host>::make();
  const auto hold = [&](std::vector<std::int32_t> ids) { return ledger.hold(std::move(ids), InFlight<Host>{PageUse::load, event}); };
  const auto refused = hold({1, 3, 2});
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::invalid_argument);
  CHECK(refused.error().message.find("2 is behind 3") != std::string::npos);
  for (const auto& ref : refs) CHECK(ledger.holds(ref.id()) == 0);
  const auto held = hold({1, 1, 3}).value();
  CHECK(ledger.in_flight(DevicePage(1)).size() == 1);
  CHECK(ledger.in_flight(DevicePage(3)).size() == 1);
  CHECK(event.complete());
}

TEST_CASE("ledger: a hold with an empty event is refused: its page would drain for ever") {
  auto ledger = make(4);
  auto ref = ledger.allocate().value();
  const DevicePage one[] = {ref.id()};
  const auto refused = ledger.hold(one, PageUse::read, Event<Host>());
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::invalid_argument);
  CHECK(ledger.holds(ref.id()) == 0);
}
