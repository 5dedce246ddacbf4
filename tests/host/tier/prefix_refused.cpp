// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <kvire/exec/host/event.hpp>
#include <kvire/pool/ledger.hpp>
#include <kvire/tier/prefix_cache.hpp>

using namespace kvire;

namespace {

using Device = PageLedger<DevicePage, Host>;
using Cache = PrefixCache<2>;
using Ids = std::vector<TokenId>;

constexpr std::int64_t page = 16;

Ids text(int sequence, std::int64_t n) {
  Ids tokens(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = sequence * 1000 + static_cast<TokenId>(i);
  return tokens;
}
PrefixShape<2> shape() { return {.page_tokens = page, .spaces = {PrefixSpace{}, PrefixSpace{PrefixNeed::tail, 20}}}; }

/// A cache of two spaces with one published page, and a hold on it.
struct Bench {
  Device full = Device::make("full", 9).value();
  Device window = Device::make("window", 9).value();
  Cache cache = Cache::make(shape()).value();
  std::int32_t root = cache.root({.model = "m"});
  Cache::Ref held = cache.acquire(root);

  Bench() {
    auto pages = fresh();
    CHECK(cache.extend(held, text(1, page), pages).value() == Cache::Published::added);
  }
  Cache::Pages fresh() { return {full.allocate().value(), window.allocate().value()}; }

  /// The refusal's code, once it is sure that it has changed nothing.
  template <class Call>
  ErrorCode refused(Cache::Pages& pages, Call&& call) {
    const auto names = cache.pages();
    const auto node = held.node();
    const Cache::Pages before = pages;
    const auto status = call();
    REQUIRE_FALSE(status.ok());
    CHECK(status.error().message.find("prefix cache: ") == 0);
    CHECK(cache.pages() == names);
    CHECK(held.node() == node);
    for (std::size_t s = 0; s < 2; ++s) {
      CHECK(pages[s].id() == before[s].id());
      CHECK(pages[s].ledger() == before[s].ledger());
    }
    return status.error().code;
  }
  ErrorCode extend(Cache::Ref& at, Cache::Pages& pages, int sequence = 2) {
    return refused(pages, [&] { return cache.extend(at, text(sequence, page), pages); });
  }
  ErrorCode park(const Cache::Ref& at, Cache::Pages& pages) {
    return refused(pages, [&] { return cache.park(at, text(3, 5), pages); });
  }
};

}  // namespace

TEST_CASE("prefix cache: a hold that is empty, of another cache or of a tail is refused") {
  Bench b;
  auto pages = b.fresh();
  Cache::Ref none;
  CHECK(b.extend(none, pages) == ErrorCode::invalid_argument);
  CHECK(b.park(none, pages) == ErrorCode::invalid_argument);
  Bench other;
  CHECK(b.extend(other.held, pages) == ErrorCode::invalid_argument);
  CHECK(b.park(other.held, pages) == ErrorCode::invalid_argument);
  CHECK_FALSE(b.cache.advance(none, b.held.node()));
  CHECK_FALSE(b.cache.advance(other.held, b.held.node()));
  CHECK(other.cache.pages() == 1);

  auto tail = b.fresh();
  const auto parked = b.cache.park(b.held, text(4, 3), tail).value().tail;
  auto on_tail = b.cache.acquire(parked);
  CHECK(b.extend(on_tail, pages) == ErrorCode::invalid_argument);
  CHECK(b.park(on_tail, pages) == ErrorCode::invalid_argument);
  CHECK_FALSE(b.cache.advance(b.held, parked));
  CHECK_FALSE(b.cache.advance(b.held, b.root));
  CHECK(b.cache.know(parked, text(4, 3)) == -1);
  CHECK_FALSE(b.cache.resume(b.held.node(), pages));  // no tail
}

TEST_CASE("prefix cache: of a number that is no node's, nothing is there") {
  Bench b;
  const Ids tokens = text(1, page);
  Cache::Pages pages;
  for (const std::int32_t node : {-1, -2, 2, 999, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()}) {
    CAPTURE(node);
    const PrefixMatch match = b.cache.find(node, tokens);
    CHECK(match.node == -1);
    CHECK(match.pages == 0);
    const auto held = b.cache.acquire(node);
    CHECK_FALSE(held);
    CHECK(held.pages() == 0);
    CHECK(held.node() == -1);
    CHECK(b.cache.known(node, tokens) == -1);
    CHECK(b.cache.know(node, tokens) == -1);
    CHECK_FALSE(b.cache.resume(node, pages));
    CHECK_FALSE(b.cache.advance(b.held, node));
    CHECK(b.cache.depth(node) == 0);
    CHECK(b.cache.tails(node) == 0);
    CHECK(b.cache.parent(node) == -1);
    CHECK(b.cache.state(node, 0) == PageState::absent);
    CHECK_FALSE(b.cache.device(node, 0));
    std::vector<Hash128> names;
    b.cache.names_below(node, tokens, names);
    CHECK(names.empty());
  }
  CHECK_FALSE(b.cache.acquire(PrefixMatch{}));
  CHECK(b.cache.find(b.held.node(), tokens).node == -1);  // a node, but no root
  CHECK(b.cache.know(b.root, {}) == -1);
  CHECK(b.cache.know(b.root, text(1, page + 1)) == -1);
  CHECK(b.cache.pages() == 1);
  // A name that is gone is no node either.
  const std::int32_t gone = b.held.node();
  b.held = {};
  while (b.cache.victim(0, CacheTier::device) >= 0) b.cache.drop(b.cache.victim(0, CacheTier::device), 0, CacheTier::device);
  CHECK(b.cache.pages() == 0);
  CHECK_FALSE(b.cache.acquire(gone));
}

TEST_CASE("prefix cache: pages of another pool, or of another space's, are refused") {
  Bench b;
  auto stranger = Device::make("stranger", 60).value();
  Cache::Pages foreign{stranger.allocate().value(), b.window.allocate().value()};
  CHECK(b.extend(b.held, foreign) == ErrorCode::mismatch);
  CHECK(b.park(b.held, foreign) == ErrorCode::mismatch);
  Cache::Pages swapped{b.window.allocate().value(), b.full.allocate().value()};
  CHECK(b.extend(b.held, swapped) == ErrorCode::mismatch);
  CHECK(b.park(b.held, swapped) == ErrorCode::mismatch);
  // Nor two pools in one call, when the first page has still to decide.
  auto cache = Cache::make(shape()).value();
  auto at = cache.acquire(cache.root({.model = "m"}));
  std::vector<Cache::Pages> two{b.fresh(), {stranger.allocate().value(), b.window.allocate().value()}};
  const auto none = [](Cache::Published) {};
  CHECK(cache.extend(at, text(1, 2 * page), two, none).error().code == ErrorCode::mismatch);
  CHECK(cache.pages() == 0);
  // A cache that was told its pools takes no first page of another.
  cache.expect_pool(0, b.full);
  CHECK(cache.extend(at, text(1, page), two[1]).error().code == ErrorCode::mismatch);
  CHECK(cache.extend(at, text(1, page), two[0]).ok());
}

TEST_CASE("prefix cache: a device page stands for one page of tokens") {
  Bench b;
  Cache::Pages again{b.cache.device(b.held.node(), 0), b.window.allocate().value()};
  CHECK(b.extend(b.held, again) == ErrorCode::duplicate);
  CHECK(b.park(b.held, again) == ErrorCode::duplicate);
  // Twice in one call: none of the pages is added.
  std::vector<Cache::Pages> pages{b.fresh(), b.fresh(), b.fresh()};
  pages[2] = pages[0];
  int calls = 0;
  const auto status = b.cache.extend(b.held, text(5, 3 * page), pages, [&](Cache::Published) { ++calls; });
  CHECK(status.error().code == ErrorCode::duplicate);
  CHECK(calls == 0);
  CHECK(b.cache.pages() == 1);
  pages[2] = b.fresh();
  CHECK(b.cache.extend(b.held, text(5, 3 * page), pages, [&](Cache::Published) { ++calls; }).ok());
  CHECK(calls == 3);
  CHECK(b.held.pages() == 4);
  // The same tokens with the same page are no news.
  auto other = b.cache.acquire(b.root);
  Cache::Pages same{b.cache.device(b.cache.find(b.root, text(1, page)).node, 0), {}};
  CHECK(b.cache.extend(other, text(1, page), same).value() == Cache::Published::known);
  // When the cache has given a page up, who kept it may use it for other tokens.
  auto fresh = Cache::make(shape()).value();
  auto at = fresh.acquire(fresh.root({.model = "m"}));
  auto kept = b.fresh();
  auto first = kept;
  CHECK(fresh.extend(at, text(1, page), first).ok());
  at = {};
  for (const int s : {1, 0}) fresh.drop(fresh.victim(s, CacheTier::device), s, CacheTier::device);
  at = fresh.acquire(fresh.root({.model = "m"}));
  CHECK(fresh.extend(at, text(2, page), kept).ok());
}

TEST_CASE("prefix cache: what is in the cache is never owned alone") {
  Bench b;
  const DevicePage whole = b.cache.device(b.held.node(), 0).id();
  CHECK(b.full.owners(whole) == 2);
  CHECK_FALSE(b.full.hold(std::span(&whole, 1), PageUse::store, Event<Host>::make()).ok());
  // A tail neither, until somebody goes on from it.
  auto pages = b.fresh();
  const DevicePage part = pages[0].id();
  const auto tail = b.cache.park(b.held, text(3, 5), pages).value().tail;
  CHECK(b.full.owners(part) == 2);
  CHECK(b.cache.resume(tail, pages));
  CHECK(pages[0].id() == part);
  CHECK(b.full.owners(part) == 1);
  // All goes back.
  pages = {};
  b.held = {};
  for (const int s : {1, 0}) b.cache.drop(b.cache.victim(s, CacheTier::device), s, CacheTier::device);
  CHECK(b.full.free_pages() == b.full.capacity());
  CHECK(b.window.free_pages() == b.window.capacity());
}

TEST_CASE("prefix cache: a hold follows a cache that is moved, and is empty when it is gone") {
  Bench b;
  std::optional<Cache> moved(std::move(b.cache));
  CHECK(b.held);
  CHECK(b.held.pages() == 1);
  auto pages = b.fresh();
  CHECK(moved->extend(b.held, text(2, page), pages).value() == Cache::Published::added);
  CHECK(moved->pins(b.held.node(), 0) == 1);
  Cache::Ref second = moved->acquire(b.held.node());
  second = {};
  moved = Cache::make(shape()).value();  // by assignment: what was there goes
  CHECK_FALSE(b.held);
  CHECK(b.held.pages() == 0);
  CHECK(moved->extend(b.held, text(2, page), pages).error().code == ErrorCode::invalid_argument);
  auto last = moved->acquire(moved->root({.model = "m"}));
  moved.reset();
  CHECK_FALSE(last);
  CHECK(b.full.used_pages() == (pages[0] ? 1 : 0));
}

TEST_CASE("prefix cache: a rank that is none is no namespace, and pages beyond measure are no shape") {
  Bench b;
  for (const auto& part : {std::pair{7, 2}, {2, 2}, {-1, 2}, {0, 0}, {-1, 0}, {0, -1}}) {
    const std::int32_t rank = part.first;
    const std::int32_t ranks = part.second;
    CAPTURE(rank);
    CAPTURE(ranks);
    CHECK(b.cache.root({.model = "m", .rank = rank, .ranks = ranks}) == -1);
    CHECK(check_namespace({.model = "m", .rank = rank, .ranks = ranks}).error().code == ErrorCode::invalid_argument);
  }
  CHECK(check_namespace({.model = "m", .rank = 7, .ranks = 2}).error().message ==
        "prefix namespace 'm': rank 7 of 2; ranks count from 0, and one that holds all has rank 0 of 1");
  CHECK(b.cache.root({.model = "m", .rank = 1, .ranks = 2}) > 0);
  constexpr auto most = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t tokens : {most, most_page_tokens + 1, std::int64_t{0}, std::int64_t{-1}}) {
    CHECK(PrefixCache<1>::make({.page_tokens = tokens}).error().code == ErrorCode::invalid_argument);
  }
  CHECK(check_shape(PrefixShape<1>{.page_tokens = most_page_tokens}).ok());
  for (const std::int64_t tokens : {most, most_tail_tokens + 1, std::int64_t{0}, std::int64_t{-1}}) {
    auto wrong = shape();
    wrong.spaces[1].tail_tokens = tokens;
    CHECK(check_shape(wrong).error().code == ErrorCode::invalid_argument);
  }
}
