// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <vector>

#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/tier/tiered_budget.hpp>
#include <tests/support/tier_case.hpp>

using namespace kvire;
using namespace kvire_test;
using namespace std::chrono_literals;

namespace {

using Rig = TierRig<>;
constexpr std::int64_t page = Rig::page;

Rig::Tokens text(int sequence, std::int64_t pages) { return Rig::text(sequence, pages * page); }

TierSizes sizes(std::int64_t device, std::int64_t host, bool write_through = false) {
  return {device + 1, host == 0 ? 0 : host + 1, {.window_tokens = 20, .write_through = write_through, .room_limit = 200ms}};
}
const TierCounters& on(const Rig& rig, CacheTier tier, int space = 0) {
  return const_cast<Rig&>(rig).cache().counters().tiers[static_cast<int>(tier)][space];
}

}  // namespace

TEST_CASE("tiered cache: under pressure pages go to the host, and come back with the same bytes") {
  Rig rig(sizes(4, 8));
  CHECK(rig.run(text(1, 4)).ok());
  CHECK(rig.run(text(2, 4)).ok());  // pushes the first out
  CHECK(on(rig, CacheTier::device).evicted_pages == 4);
  CHECK(on(rig, CacheTier::device).lost_pages == 0);
  CHECK(on(rig, CacheTier::host).arrived_pages == 4);
  CHECK(on(rig, CacheTier::host).arrived_bytes > 0);
  {
    auto held = rig.cache().acquire(rig.root(), text(1, 4));
    CHECK(held.tokens == 4 * page);
    CHECK(held.loads.size() == 1);  // one transfer for all
    CHECK(rig.read(held).ok());
  }
  CHECK(rig.wrong_pages() == 0);
  const auto& counters = rig.cache().counters();
  CHECK(counters.lookups == 3);
  CHECK(counters.looked_up_pages == 12);
  CHECK(counters.hit_pages == 4);
  CHECK(counters.hit_pages_on[1] == 4);
  CHECK(counters.hit_tokens == 4 * page);
  CHECK(counters.missed_pages[static_cast<int>(CacheMiss::unknown)] == 8);
  CHECK(counters.published_pages == 8);
  CHECK(rig.cache().finish());
  rig.cache().clear();
  CHECK(rig.used_pages() == 0);
  CHECK(rig.cache().cache().pages() == 0);
}

TEST_CASE("tiered cache: without a host tier pages are lost, and computed again") {
  Rig rig(sizes(4, 0));
  CHECK(rig.run(text(1, 4)).ok());
  CHECK(rig.run(text(2, 4)).ok());
  CHECK(on(rig, CacheTier::device).lost_pages == 4);
  CHECK(rig.run(text(1, 4)).ok());
  CHECK(rig.cache().counters().hit_pages == 0);
  CHECK(rig.wrong_pages() == 0);
}

TEST_CASE("tiered cache: a load that needs room evicts around its own source") {
  Rig rig(sizes(4, 4));
  CHECK(rig.run(text(1, 3)).ok());
  auto other = rig.run(text(2, 4)).value();  // three pages of the first go to the host
  CHECK(rig.cache().finish());
  // All of the device in use: nothing can be loaded, and nothing is lost by trying.
  {
    auto held = rig.cache().acquire(rig.root(), text(1, 3));
    CHECK(held.tokens == 0);
    CHECK(rig.cache().counters().missed_pages[static_cast<int>(CacheMiss::no_room)] == 3);
    CHECK(on(rig, CacheTier::device).refused_pages > 0);
    CHECK(rig.read(held).ok());
  }
  CHECK(rig.cache().cache().pages() == 7);
  other = {};
  // Now the four pages must leave for a host with one free page; the source of the load stays there.
  auto held = rig.cache().acquire(rig.root(), text(1, 3));
  CHECK(held.tokens == 3 * page);
  CHECK(rig.read(held).ok());
  CHECK(rig.wrong_pages() == 0);
}

TEST_CASE("tiered cache: a failed copy to the host leaves the page where it is") {
  Rig rig(sizes(4, 8));
  CHECK(rig.run(text(1, 4)).ok());
  rig.store_faults().set([](const CopyInfo& info) { return info.layer == 1 ? Fault::fail() : Fault::none(); });
  rig.cache().make_room(4);
  CHECK(rig.cache().finish());
  CHECK(on(rig, CacheTier::host).failed_pages == 4);
  CHECK(on(rig, CacheTier::device).evicted_pages == 0);
  rig.store_faults().set({});
  {
    auto held = rig.cache().acquire(rig.root(), text(1, 4));
    CHECK(held.tokens == 4 * page);
    CHECK(held.loads.empty());
    CHECK(rig.read(held).ok());
  }
  CHECK(rig.run(text(2, 4)).ok());  // the next try works
  CHECK(on(rig, CacheTier::device).lost_pages == 0);
  CHECK(rig.wrong_pages() == 0);
}

TEST_CASE("tiered cache: a failed load publishes nothing, says so to the step, and can be tried again") {
  Rig rig(sizes(4, 8));
  CHECK(rig.run(text(1, 4)).ok());
  CHECK(rig.run(text(2, 4)).ok());
  rig.load_faults().set([](const CopyInfo& info) { return info.layer == 2 ? Fault::fail("no link") : Fault::none(); });
  {
    auto held = rig.cache().acquire(rig.root(), text(1, 4));
    CHECK(held.tokens == 4 * page);
    const auto status = rig.read(held);
    REQUIRE_FALSE(status.ok());
    CHECK(contains(status.error().message, "no link"));
    CHECK_FALSE(Rig::Cache::check(held).ok());
  }
  rig.cache().poll();
  CHECK(on(rig, CacheTier::device).failed_pages == 4);
  rig.load_faults().set({});
  const auto before = rig.cache().counters().hit_pages_on[1];
  auto held = rig.cache().acquire(rig.root(), text(1, 4));
  CHECK(held.tokens == 4 * page);
  CHECK(rig.cache().counters().hit_pages_on[1] == before + 4);  // still on the host, and nowhere else
  CHECK(rig.read(held).ok());
  CHECK(rig.wrong_pages() == 0);
}

TEST_CASE("tiered cache: pages under a copy are neither handed out nor lost; who needs them keeps them") {
  Rig rig(sizes(4, 8));
  CHECK(rig.run(text(1, 4)).ok());
  const auto gate = CopyHold::make();
  rig.store_faults().set([gate](const CopyInfo&) { return Fault::hold(gate); });
  rig.cache().make_room(4);
  REQUIRE(gate->wait_reached(deadline_in(10s)));
  CHECK(rig.device_ledger<space::Full>().free_pages() == 0);
  const auto none = rig.cache().allocate<space::Full>();  // waits, and gives up
  REQUIRE_FALSE(none.ok());
  CHECK(none.error().code == ErrorCode::exhausted);
  CHECK(contains(none.error().message, "space full"));
  // A request for the same prefix finds it on the device, and it stays there when the copy has ended.
  auto held = rig.cache().acquire(rig.root(), text(1, 4));
  CHECK(held.tokens == 4 * page);
  CHECK(held.loads.empty());
  CHECK(rig.read(held).ok());
  gate->release();
  CHECK(rig.cache().finish());
  CHECK(on(rig, CacheTier::device).evicted_pages == 0);
  CHECK(rig.cache().cache().state(held.prefix.node(), 0) == PageState::device);
  CHECK(rig.wrong_pages() == 0);
}

TEST_CASE("tiered cache: two requests share one load") {
  Rig rig(sizes(8, 8));
  CHECK(rig.run(text(1, 4)).ok());
  rig.cache().make_room(8);
  CHECK(rig.cache().finish());
  const auto gate = CopyHold::make();
  rig.load_faults().set([gate](const CopyInfo&) { return Fault::hold(gate); });
  auto one = rig.cache().acquire(rig.root(), text(1, 4));
  auto two = rig.cache().acquire(rig.root(), text(1, 3));
  CHECK(one.loads.size() == 1);
  CHECK(two.loads.size() == 2);  // the same, and one of its own for a window page that the longer prefix does not need
  CHECK(rig.cache().counters().hit_pages_on[1] == 4 + 1);
  CHECK(rig.cache().counters().hit_pages_on[0] == 2);
  gate->release();
  CHECK(rig.read(two).ok());
  CHECK(rig.read(one).ok());
  CHECK(rig.wrong_pages() == 0);
}

TEST_CASE("tiered cache: who computes a page that is being loaded for another goes on with the loaded one, and waits for it") {
  Rig rig(sizes(8, 8));
  CHECK(rig.run(text(1, 2)).ok());
  rig.cache().make_room(8);
  CHECK(rig.cache().finish());
  const auto gate = CopyHold::make();
  rig.load_faults().set([gate](const CopyInfo&) { return Fault::hold(gate); });
  auto late = rig.cache().acquire(rig.root(), {});
  auto one = rig.cache().acquire(rig.root(), text(1, 2));
  const auto tokens = text(1, 1);
  CHECK(rig.compute(late, tokens).ok());
  CHECK(rig.cache().counters().shared_pages == 1);
  CHECK(late.loads.size() == 1);
  gate->release();
  CHECK(rig.read(late).ok());
  CHECK(rig.read(one).ok());
  CHECK(rig.wrong_pages() == 0);
}

TEST_CASE("tiered cache: written through, a page leaves the device at once") {
  Rig rig(sizes(4, 12, true));
  CHECK(rig.run(text(1, 4)).ok());
  CHECK(rig.cache().finish());
  CHECK(on(rig, CacheTier::host).arrived_pages == 4);
  const auto gate = CopyHold::make();
  rig.store_faults().set([gate](const CopyInfo&) { return Fault::hold(gate); });
  CHECK(rig.cache().allocate<space::Full>().ok());  // no copy stands in the way
  gate->release();
  CHECK(rig.run(text(2, 4)).ok());
  CHECK(rig.run(text(1, 4)).ok());
  CHECK(on(rig, CacheTier::device).lost_pages == 0);
  CHECK(rig.cache().counters().hit_pages == 4);
  CHECK(rig.wrong_pages() == 0);
}

TEST_CASE("tiered cache: without the window of its end a prefix is usable only as far as there is one") {
  Rig rig(sizes(8, 8));
  CHECK(rig.run(text(1, 6)).ok());
  // The window pages of the first four pages are not needed by anybody, so they are the first to go; then a shorter prompt cannot restart there.
  std::vector<PageRef<DevicePage>> taken;
  for (int i = 0; i < 8; ++i) {
    auto ref = rig.cache().allocate<space::Window>();
    if (ref.ok()) taken.push_back(std::move(ref).value());
  }
  CHECK(rig.cache().finish());
  taken.clear();
  auto held = rig.cache().acquire(rig.root(), text(1, 6));
  CHECK(held.tokens == 6 * page);  // its window came back from the host
  CHECK(rig.read(held).ok());
  CHECK(rig.wrong_pages() == 0);
}

TEST_CASE("tiered cache: what two requests compute at once is kept once") {
  Rig rig(sizes(8, 8));
  auto one = rig.cache().acquire(rig.root(), text(1, 2));
  auto two = rig.cache().acquire(rig.root(), text(1, 2));
  const auto tokens = text(1, 1);
  CHECK(rig.compute(one, tokens).ok());
  CHECK(rig.compute(two, tokens).ok());
  CHECK(rig.cache().counters().published_pages == 1);
  CHECK(rig.cache().counters().shared_pages == 1);
  CHECK(rig.device_ledger<space::Full>().used_pages() == 1);
  CHECK(rig.read(one).ok());
  CHECK(rig.read(two).ok());
  CHECK(rig.wrong_pages() == 0);
}

TEST_CASE("tiered cache: what cannot work is refused in words") {
  Rig rig;
  const auto refused = [](const Rig::Cache::Pools& pools, const char* text) {
    const auto made = Rig::Cache::make(pools, {.window_tokens = 20, .name = "mine"});
    REQUIRE_FALSE(made.ok());
    CHECK_MESSAGE(contains(made.error().message, text), made.error().message);
  };
  refused({}, "mine: no device pool");
  auto device = DeviceBundlePool<Rig::Model, Host>::make({.pages = {{4, 4}}, .layers = 2}).value();
  auto host = HostBundlePool<Rig::Model, Host>::make({.pages = {{4, 4}}, .layers = 3}).value();
  refused({.device = &device, .host = &host}, "no streams");
  refused({.device = &device, .host = &host, .loads = &rig.compute(), .stores = &rig.compute()}, "different layers");
  auto held = rig.cache().acquire(rig.root(), {});
  std::vector<Rig::Cache::Pages> pages(2);
  const auto status = rig.cache().publish(held, text(1, 1), pages);
  REQUIRE_FALSE(status.ok());
  CHECK(contains(status.error().message, "16 tokens are not 2 pages of 16"));
}

TEST_CASE("tier budget: pools and workspaces of a tier stay within one number of bytes") {
  using Flash = preset::deepseek_v4::Flash<>;
  const PageRatio ratios[Flash::space_count] = {{}, {1, 4, 2}, {0, 1, 9}};
  const Bytes budget(std::int64_t{4} << 30);
  const Bytes workspaces(std::int64_t{1} << 29);
  const auto pages = pages_within<Flash>(budget, workspaces, ratios).value();
  CHECK(pages.bytes() + workspaces <= budget);
  auto more = pages;
  more.of<space::Full>() += 4;
  more.of<space::Window>() += 1;
  CHECK(more.bytes() + workspaces > budget);  // and not much is left over
  const auto none = pages_within<Flash>(Bytes(1 << 20), Bytes(1 << 19), ratios);
  REQUIRE_FALSE(none.ok());
  CHECK(none.error().code == ErrorCode::exhausted);
  CHECK(contains(none.error().message, "1048576 bytes, 524288 of them for workspaces"));
  const auto refused = [&](Bytes kept, int layers) {
    const auto made = pages_within<Flash>(budget, kept, ratios, layers);
    return made.ok() || made.error().code != ErrorCode::invalid_argument ? std::string("another") : made.error().message;
  };
  CHECK(refused(Bytes(-1), 1) == "tier budget: workspaces is -1; it counts the bytes that are kept for other things");
  for (const int layers : {-1, 0, Flash::layers + 1}) {
    CHECK(refused(Bytes(0), layers) == "tier budget: layers is " + std::to_string(layers) + "; the model has " + std::to_string(Flash::layers));
  }
}

TEST_CASE("cache counters: a visitor sees every number with its labels") {
  Rig rig(sizes(4, 8));
  CHECK(rig.run(text(1, 4)).ok());
  CHECK(rig.run(text(2, 4)).ok());
  std::map<std::string, std::int64_t> seen;
  rig.cache().counters().visit([&](const char* name, const CounterLabel& label, std::int64_t value) {
    std::string key = name;
    if (label.tier != nullptr) key += std::string(" ") + label.tier;
    if (label.space >= 0) key += " " + std::to_string(label.space);
    if (label.reason != nullptr) key += std::string(" ") + label.reason;
    CHECK_MESSAGE(seen.emplace(key, value).second, key);
  });
  CHECK(seen["lookups"] == 2);
  CHECK(seen["missed_pages unknown"] == 8);
  CHECK(seen["tier_evicted_pages device 0"] == 4);
  CHECK(seen["tier_hit_pages host"] == 0);
  CHECK(seen.size() == 11 + cache_miss_count + cache_tiers * (2 + 7 * 2));
}

namespace {

constexpr int full = Rig::Model::space_index<space::Full>();
constexpr int window = Rig::Model::space_index<space::Window>();

// Device pages for one page of tokens, of which the kernel has not run that was to write one of them.
template <class Space>
Rig::Cache::Pages unwritten_pages(Rig& rig) {
  Rig::Cache::Pages pages;
  pages[full] = rig.cache().allocate<space::Full>().value();
  pages[window] = rig.cache().allocate<space::Window>().value();
  const std::vector<DevicePage> unwritten{pages[static_cast<std::size_t>(Rig::Model::space_index<Space>())].id()};
  const auto kernel = Event<Host>::make("kernel");
  (void)rig.device_ledger<Space>().hold(unwritten, PageUse::store, kernel).value();
  kernel.complete(Error{ErrorCode::failed, "did not run"});
  CHECK_FALSE(rig.device_ledger<Space>().readable(unwritten[0]).ok());
  return pages;
}
// The first page of a text that was computed, and a second that was published and never written.
template <class Space>
Rig::Cache::Held with_unwritten_page(Rig& rig) {
  auto request = rig.run(text(1, 1)).value();
  const auto tokens = text(1, 2);
  auto pages = unwritten_pages<Space>(rig);
  CHECK(rig.cache().publish(request, std::span(tokens).subspan(page), std::span(&pages, 1)).ok());
  return request;
}
std::int64_t missed_unwritten(Rig& rig) { return rig.cache().counters().missed_pages[static_cast<int>(CacheMiss::not_written)]; }

template <class Space>
void check_unwritten_is_a_miss() {
  Rig rig(sizes(8, 0));
  (void)with_unwritten_page<Space>(rig);
  {
    auto held = rig.cache().acquire(rig.root(), text(1, 2));
    CHECK(held.tokens == page);
    CHECK(rig.read(held).ok());
  }
  CHECK(missed_unwritten(rig) == 1);
  CHECK(rig.cache().counters().hit_pages == 1);
  CHECK(on(rig, CacheTier::device, Rig::Model::space_index<Space>()).lost_pages == 1);
  // Computed anew, it is the cache's, and a hit like any other.
  CHECK(rig.run(text(1, 2)).ok());
  auto held = rig.cache().acquire(rig.root(), text(1, 2));
  CHECK(held.tokens == 2 * page);
  CHECK(rig.read(held).ok());
  CHECK(missed_unwritten(rig) == 1);
  // The other space's page of the first try stayed, where the pages of this one are needed for a window only.
  if (std::is_same_v<Space, space::Full>) CHECK(rig.wrong_pages() == 0);
}

}  // namespace

TEST_CASE("tiered cache: a page that work has failed to write is a miss, and makes room for one that is computed anew") {
  check_unwritten_is_a_miss<space::Full>();
  check_unwritten_is_a_miss<space::Window>();
}

TEST_CASE("tiered cache: a page that work has failed to write stays with who holds it") {
  Rig rig(sizes(8, 8));
  auto request = with_unwritten_page<space::Full>(rig);
  CHECK(rig.cache().acquire(rig.root(), text(1, 2)).tokens == page);
  CHECK(missed_unwritten(rig) == 1);
  CHECK(on(rig, CacheTier::device, full).lost_pages == 0);
  // The step was repeated: it can be read.
  const std::vector<DevicePage> written{rig.cache().cache().device(request.prefix.node(), full).id()};
  rig.device_ledger<space::Full>().assume_written(written);
  CHECK(rig.cache().acquire(rig.root(), text(1, 2)).tokens == 2 * page);
  CHECK(missed_unwritten(rig) == 1);
}

TEST_CASE("tiered cache: who computes a page anew puts it in the place of one that was never written, also where somebody holds that") {
  Rig rig(sizes(8, 8, true));
  auto one = with_unwritten_page<space::Full>(rig);
  auto two = rig.cache().acquire(rig.root(), text(1, 2));
  REQUIRE(two.tokens == page);
  const auto tokens = text(1, 2);
  const auto publish = [&](Rig::Cache::Pages& pages) { return rig.cache().publish(two, std::span(tokens).subspan(page), std::span(&pages, 1)).ok(); };
  const auto at = [&](int space) { return rig.cache().cache().device(one.prefix.node(), space).id(); };
  const auto bad = at(full), of_window = at(window);
  SUBCASE("a page that is good") {
    Rig::Cache::Pages pages;
    pages[full] = rig.cache().allocate<space::Full>().value();
    pages[window] = rig.cache().allocate<space::Window>().value();
    const auto good = pages[full].id();
    CHECK(publish(pages));
    CHECK(two.prefix.node() == one.prefix.node());
    CHECK_FALSE(pages[full]);
    CHECK(pages[window]);  // the one that is there is as good
    CHECK(at(full) == good);
    CHECK(at(window) == of_window);
    CHECK(rig.device_ledger<space::Full>().readable(at(full)).ok());
    CHECK(rig.device_ledger<space::Full>().owners(bad) == 0);
    CHECK(rig.cache().counters().published_pages == 3);
    CHECK(rig.cache().finish(deadline_in(30s)));
    CHECK(rig.cache().cache().has(one.prefix.node(), full, CacheTier::host));
    CHECK(rig.cache().acquire(rig.root(), tokens).tokens == 2 * page);
  }
  SUBCASE("another that is not written either") {
    auto pages = unwritten_pages<space::Full>(rig);
    CHECK(publish(pages));
    CHECK(pages[full]);
    CHECK(at(full) == bad);
    CHECK(rig.cache().counters().shared_pages == 1);
  }
  one = {};
  two = {};
  CHECK(rig.cache().finish(deadline_in(30s)));
  rig.cache().clear();
  CHECK(rig.used_pages() == 0);
}

TEST_CASE("tiered cache: a tail that is parked anew takes the place of one that was never written") {
  Rig rig(sizes(8, 0));
  auto held = rig.run(text(1, 1)).value();
  const auto tail = Rig::text(1, page + 5);
  auto pages = unwritten_pages<space::Full>(rig);
  CHECK(rig.cache().park(held, std::span(tail).subspan(page), pages).ok());
  CHECK(rig.park(held, std::span(tail).subspan(page)).ok());
  CHECK(rig.cache().counters().parked_tails == 2);
  CHECK(rig.resume(held, std::span(tail).subspan(page)).value() == 5);
  CHECK(rig.wrong_pages() == 0);
}

TEST_CASE("tiered cache: a tail that work has failed to write is not resumed") {
  Rig rig(sizes(8, 0));
  auto held = rig.run(text(1, 1)).value();
  const auto tail = Rig::text(1, page + 5);
  auto pages = unwritten_pages<space::Full>(rig);
  CHECK(rig.cache().park(held, std::span(tail).subspan(page), pages).ok());
  CHECK(rig.cache().resume(held, std::span(tail).subspan(page), pages) == 0);
  CHECK(rig.cache().counters().missed_tails == 1);
  CHECK(held.tokens == page);
  CHECK(rig.park(held, std::span(tail).subspan(page)).ok());
  CHECK(rig.resume(held, std::span(tail).subspan(page)).value() == 5);
  CHECK(rig.wrong_pages() == 0);
}

TEST_CASE("tiered cache: a page that nothing has written is given up instead of copied, and hinders nobody") {
  Rig rig(sizes(4, 8));
  const auto tokens = text(1, 2);
  (void)with_unwritten_page<space::Full>(rig);

  CHECK(rig.run(text(2, 4)).ok());
  CHECK(on(rig, CacheTier::device, full).lost_pages == 1);
  CHECK(on(rig, CacheTier::host, full).failed_pages == 2);  // with the other of their batch
  CHECK(on(rig, CacheTier::host, full).arrived_pages == 1);
  auto held = rig.cache().acquire(rig.root(), tokens);
  CHECK(held.tokens == page);
  CHECK(rig.read(held).ok());
  CHECK(rig.wrong_pages() == 0);
}

TEST_CASE("tiered cache: a request waits for room as long as it may, once, whatever it tries") {
  auto s = sizes(5, 12);
  s.options.room_limit = 500ms;
  Rig rig(s);
  CHECK(rig.run(text(1, 4)).ok());
  rig.cache().make_room(5);
  CHECK(rig.cache().finish());
  const auto held = rig.cache().acquire(rig.root(), text(1, 4));
  CHECK(rig.read(held).ok());
  CHECK(rig.run(text(2, 1)).ok());
  const auto gate = CopyHold::make();
  rig.store_faults().set([gate](const CopyInfo&) { return Fault::hold(gate); });
  rig.cache().make_room(1);
  REQUIRE(gate->wait_reached(deadline_in(10s)));
  const auto one = rig.cache().allocate<space::Window>(), two = rig.cache().allocate<space::Window>();
  REQUIRE(two.ok());
  // Three pages need a window page that is only on the host, and so does one.
  std::vector<CacheEvent> waits;
  rig.cache().trace([&](const CacheEvent& e) {
    if (e.work == CacheWork::wait) waits.push_back(e);
  });
  CHECK(rig.cache().acquire(rig.root(), text(1, 3)).tokens == 0);
  CHECK(waits.size() == 2);
  CHECK(std::count_if(waits.begin(), waits.end(), [](const CacheEvent& e) { return e.end_ns - e.begin_ns > 250'000'000; }) == 1);
  gate->release();
  CHECK(rig.cache().finish());
}
