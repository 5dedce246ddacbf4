// SPDX-License-Identifier: Apache-2.0
// compiled for itself: it replaces operator new
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <map>
#include <new>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include <kvire/exec/host/event.hpp>
#include <kvire/pool/ledger.hpp>
#include <kvire/tier/prefix_cache.hpp>

using namespace kvire;

namespace {

using Ids = std::vector<TokenId>;
using Tier = CacheTier;

/// What a prefix cache must answer, told the same events: prefixes of whole pages and the tiers that have them.
struct Oracle {
  std::map<Ids, std::set<Tier>> copies;

  std::size_t longest(const Ids& tokens) const {
    std::size_t pages = 0;
    while (pages < tokens.size()) {
      const auto at = copies.find(Ids(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(pages) + 1));
      if (at == copies.end() || at->second.empty()) break;
      ++pages;
    }
    return pages;
  }
};

/// Random requests over a small alphabet, pages of one token, two tiers under pressure, copies that take time and fail.
template <class Policy>
class Storm {
 public:
  explicit Storm(unsigned seed) : random_(seed) {}

  void run(int steps) {
    for (int i = 0; i < steps; ++i) {
      switch (random_() % 6) {
        case 0: arrive(); break;
        case 1:
        case 2: grow(); break;
        case 3: finish(); break;
        case 4: land(); break;
        default: evict(); break;
      }
    }
    while (!running_.empty()) finish();
    while (!flying_.empty()) land();
    for (const Tier tier : {Tier::device, Tier::host}) {
      for (std::int32_t n = cache_.victim(0, tier); n >= 0; n = cache_.victim(0, tier)) drop(n, tier);
    }
    CHECK(cache_.pages() == 0);
    CHECK(device_.free_pages() == device_.capacity());
    CHECK(host_.free_pages() == host_.capacity());
    CHECK(hits_ > steps / 20);
    CHECK(landed_ > steps / 20);
  }

 private:
  using Cache = PrefixCache<1, Policy>;
  struct Request {
    Ids tokens;
    typename Cache::Ref ref;
  };
  struct Flight {
    std::int32_t node;
    Tier to;
  };

  Ids tokens_of(std::int32_t node) const {
    std::vector<std::int32_t> path(static_cast<std::size_t>(cache_.depth(node)));
    cache_.path(node, path);
    Ids tokens;
    for (const std::int32_t n : path) tokens.push_back(names_.at(n));
    return tokens;
  }

  PageRef<DevicePage> device_page() {
    for (;;) {
      if (auto page = device_.allocate()) return std::move(page).value();
      const std::int32_t node = cache_.victim(0, Tier::device);
      if (node < 0) return {};
      drop(node, Tier::device);
    }
  }
  PageRef<HostPage> host_page() {
    for (;;) {
      if (auto page = host_.allocate()) return std::move(page).value();
      const std::int32_t node = cache_.victim(0, Tier::host);
      if (node < 0) return {};
      drop(node, Tier::host);
    }
  }
  void drop(std::int32_t node, Tier tier) {
    CHECK(cache_.has(node, 0, tier));
    const Ids tokens = tokens_of(node);
    auto& copies = oracle_.copies[tokens];
    copies.erase(tier);
    if (copies.empty() || *copies.begin() > tier) {
      // It was the fastest copy: nobody uses it, and no longer prefix is on this tier or a faster one.
      CHECK(cache_.pins(node, 0) == 0);
      for (const auto& [other, where] : oracle_.copies) {
        if (where.empty() || other.size() <= tokens.size() || !std::equal(tokens.begin(), tokens.end(), other.begin())) continue;
        const std::int32_t below = ids_.at(other);
        const bool parent_holds = other.size() == tokens.size() + 1;
        if (parent_holds) CHECK((*where.begin() > tier || cache_.state(below, 0) == PageState::draining));
      }
    }
    cache_.drop(node, 0, tier);
  }

  void arrive() {
    Request request;
    for (std::size_t n = random_() % 6; request.tokens.size() < n;) request.tokens.push_back(static_cast<TokenId>(random_() % 3));
    const PrefixMatch match = cache_.find(root_, request.tokens);
    CHECK(static_cast<std::size_t>(match.pages) == oracle_.longest(request.tokens));
    CHECK(match.on[0] + match.on[1] + match.on[2] == match.pages);
    hits_ += match.pages;
    request.ref = cache_.acquire(match);
    std::vector<std::int32_t> path(static_cast<std::size_t>(match.pages));
    cache_.path(match.node, path);
    for (const std::int32_t node : path) {
      CHECK(cache_.state(node, 0) != PageState::draining);
      if (cache_.device(node, 0)) continue;
      auto page = device_page();
      if (!page) break;
      if (cache_.state(node, 0) != PageState::host) continue;  // being stored or loaded
      cache_.arrive(node, 0, std::move(page));
      flying_.push_back({node, Tier::device});
    }
    if (running_.size() == 4) finish();
    running_.push_back(std::move(request));
  }
  void grow() {
    if (running_.empty()) return;
    Request& request = running_[random_() % running_.size()];
    if (request.tokens.size() == static_cast<std::size_t>(request.ref.pages())) request.tokens.push_back(static_cast<TokenId>(random_() % 3));
    const std::size_t next = static_cast<std::size_t>(request.ref.pages());
    typename Cache::Pages pages{device_page()};
    if (!pages[0]) return;
    const bool mine = cache_.extend(request.ref, std::span(request.tokens).subspan(next, 1), pages).value() != Cache::Published::known;
    CHECK(mine == !pages[0]);
    const Ids prefix(request.tokens.begin(), request.tokens.begin() + static_cast<std::ptrdiff_t>(next) + 1);
    names_[request.ref.node()] = request.tokens[next];
    ids_[prefix] = request.ref.node();
    if (mine) oracle_.copies[prefix].insert(Tier::device);
  }
  void finish() {
    if (running_.empty()) return;
    const std::size_t at = random_() % running_.size();
    std::swap(running_[at], running_.back());
    running_.pop_back();
  }
  void evict() {
    const std::int32_t node = cache_.victim(0, Tier::device);
    if (node < 0) return;
    if (cache_.has(node, 0, Tier::host)) return drop(node, Tier::device);
    auto page = host_page();
    if (!page || cache_.victim(0, Tier::device) != node) return;
    cache_.arrive(node, 0, std::move(page));
    if (random_() % 2 == 0) cache_.leave(node, 0);
    flying_.push_back({node, Tier::host});
  }
  void land() {
    if (flying_.empty()) return;
    const std::size_t at = random_() % flying_.size();
    const Flight flight = flying_[at];
    flying_[at] = flying_.back();
    flying_.pop_back();
    const bool ok = random_() % 4 != 0;
    const bool draining = cache_.state(flight.node, 0) == PageState::draining;
    auto& copies = oracle_.copies[tokens_of(flight.node)];
    if (ok) copies.insert(flight.to);
    if (ok && draining) copies.erase(Tier::device);
    cache_.arrived(flight.node, 0, flight.to, ok);
    landed_ += ok ? 1 : 0;
  }

  std::mt19937 random_;
  PageLedger<DevicePage, Host> device_ = PageLedger<DevicePage, Host>::make("device", 17).value();
  PageLedger<HostPage, Host> host_ = PageLedger<HostPage, Host>::make("host", 25).value();
  Cache cache_ = Cache::make({.page_tokens = 1}).value();
  std::int32_t root_ = cache_.root({});
  std::map<std::int32_t, TokenId> names_;  // last token of each node
  std::map<Ids, std::int32_t> ids_;
  Oracle oracle_;
  std::deque<Request> running_;
  std::vector<Flight> flying_;
  std::int64_t hits_ = 0, landed_ = 0;
};

thread_local std::int64_t allocations = 0;

}  // namespace

// Counted for the whole test program; used by one test. Not inlined: g++ would take malloc and free for mismatched. The nothrow one too, which
// standard algorithms call: what it gives comes back to the operator delete here.
[[gnu::noinline]] void* operator new(std::size_t size) {
  ++allocations;
  if (void* p = std::malloc(size == 0 ? 1 : size)) return p;
  std::abort();
}
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return operator new(size); }
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

TEST_CASE("prefix cache: random requests, evictions, loads and failures agree with a plain list, and every page comes back") {
  for (unsigned seed = 1; seed <= 6; ++seed) {
    CAPTURE(seed);
    Storm<Lru>(seed).run(4000);
    Storm<Lfu>(seed).run(4000);
  }
}

TEST_CASE("prefix cache: a hit allocates nothing") {
  auto ledger = PageLedger<DevicePage, Host>::make("device", 200).value();
  auto cache = PrefixCache<1, Lfu>::make({.page_tokens = 4}).value();
  const std::int32_t root = cache.root({});
  Ids tokens(400);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<TokenId>(i % 97);
  {
    auto ref = cache.acquire(root);
    for (std::size_t p = 0; p < 100; ++p) {
      PrefixCache<1, Lfu>::Pages pages{ledger.allocate().value()};
      REQUIRE(cache.extend(ref, std::span(tokens).subspan(4 * p, 4), pages).ok());
    }
  }
  std::vector<std::int32_t> path(100);
  const std::int64_t before = allocations;
  for (int i = 0; i < 10; ++i) {
    const PrefixMatch match = cache.find(root, tokens);
    const auto ref = cache.acquire(match);
    cache.path(match.node, path);
  }
  const std::int64_t after = allocations;
  CHECK(after == before);
  CHECK(cache.depth(path.back()) == 100);
  ::operator delete(::operator new(1));  // not a new-expression, which a compiler may leave out
  CHECK(allocations > before);  // they are counted
}
