// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <map>
#include <random>
#include <vector>

#include <kvire/exec/host/event.hpp>
#include <kvire/pool/ledger.hpp>
#include <kvire/tier/prefix_cache.hpp>

using namespace kvire;

static_assert(EvictionPolicy<Lru> && EvictionPolicy<Lfu>);
static_assert(!EvictionPolicy<int>);

namespace {

/// A policy of the user's own: last in, first out.
struct Newest {
  static constexpr const char* name = "newest";
  std::uint64_t rank(std::uint32_t, std::uint64_t tick) const { return ~tick; }
  void evicted(std::uint64_t) {}
};
static_assert(EvictionPolicy<Newest>);

/// Single-page prefixes, used in the order given, in a cache of `capacity` device pages; the uses that hit.
template <class Policy>
std::vector<bool> hits(const std::vector<int>& uses, std::int64_t capacity) {
  auto ledger = PageLedger<DevicePage, Host>::make("device", capacity + 1).value();
  auto cache = PrefixCache<1, Policy>::make({.page_tokens = 1}).value();
  const std::int32_t root = cache.root({});
  std::vector<bool> out;
  for (const int use : uses) {
    const TokenId token[] = {use};
    const PrefixMatch match = cache.find(root, token);
    out.push_back(match.pages == 1);
    if (match.pages == 1) continue;
    auto page = ledger.allocate();
    if (!page.ok()) {
      cache.drop(cache.victim(0, CacheTier::device), 0, CacheTier::device);
      page = ledger.allocate();
    }
    auto ref = cache.acquire(match);
    typename PrefixCache<1, Policy>::Pages pages{std::move(page).value()};
    CHECK(cache.extend(ref, token, pages).ok());
  }
  return out;
}

std::vector<bool> flags(const char* text) {
  std::vector<bool> out;
  for (; *text != '\0'; ++text) out.push_back(*text == 'x');
  return out;
}

}  // namespace

TEST_CASE("eviction policies: what each gives up") {
  //                               room for 2: 1, 2 in; 1 again; 3 pushes one out
  CHECK(hits<Lru>({1, 2, 1, 3, 1, 2}, 2) == flags("..x.x."));
  CHECK(hits<Newest>({1, 2, 1, 3, 1, 2}, 2) != hits<Lru>({1, 2, 1, 3, 1, 2}, 2));
  // A scan passes through: the page that was used often stays, where LRU forgets it.
  CHECK(hits<Lru>({1, 1, 1, 2, 3, 4, 1}, 2) == flags(".xx...."));
  CHECK(hits<Lfu>({1, 1, 1, 2, 3, 4, 1}, 2) == flags(".xx...x"));
  // Aging: the favourite of yesterday is gone once others have been given up with as many uses.
  CHECK(hits<Lfu>({1, 1, 1, 2, 3, 4, 5, 6, 7, 1}, 2) == flags(".xx......."));
  // Among pages used as often the least recent goes first.
  CHECK(hits<Lfu>({1, 2, 3, 2, 1}, 2) == flags("...x."));
}

TEST_CASE("eviction policies: ranks only rise, and uses stop counting in time") {
  Lfu lfu;
  std::uint64_t before = 0;
  for (std::uint32_t uses = 1; uses < 100; ++uses) {
    const std::uint64_t rank = lfu.rank(uses, uses);
    CHECK(rank > before);
    before = rank;
    lfu.evicted(rank / 2);
  }
  CHECK(lfu.rank(1u << 16, 5) == lfu.rank(1u << 31, 5));
  lfu.evicted(~std::uint64_t(0));  // an age that cannot grow any more: least recently used from here on
  CHECK(lfu.rank(1, 7) < lfu.rank(1, 8));
}

TEST_CASE("policy queue: always the lowest rank of those that may go, as a sorted list says") {
  std::mt19937 random(11);
  detail::PolicyQueue<Lru> queue;
  std::map<std::int32_t, std::uint64_t> rank;
  std::map<std::int32_t, bool> may_go;
  std::uint64_t tick = 0;
  std::int64_t found = 0;
  for (int step = 0; step < 20000; ++step) {
    const auto node = static_cast<std::int32_t>(random() % 60);
    switch (random() % 5) {
      case 0:
        if (!queue.holds(node)) {
          rank[node] = ++tick;
          may_go[node] = true;
          queue.push(node, rank[node]);
        }
        break;
      case 1:
        if (queue.holds(node)) rank[node] = ++tick;  // used, without telling the queue
        break;
      case 2:
        if (queue.holds(node)) may_go[node] = random() % 2 == 0;
        break;
      case 3:
        if (queue.holds(node)) queue.remove(node);
        break;
      default: {
        std::int32_t expected = -1;
        for (const auto& [n, r] : rank) {
          if (queue.holds(n) && may_go[n] && (expected < 0 || r < rank[expected])) expected = n;
        }
        const std::int32_t got = queue.lowest([&](std::int32_t n) { return rank[n]; }, [&](std::int32_t n) { return may_go[n]; });
        CHECK(got == expected);
        found += got >= 0 ? 1 : 0;
        if (got >= 0 && random() % 2 == 0) queue.remove(got);
      }
    }
  }
  CHECK(found > 1000);
}
