// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <string>
#include <utility>
#include <vector>

#include <kvire/exec/host/event.hpp>
#include <kvire/pool/ledger.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/tier/prefix_cache.hpp>

using namespace kvire;

namespace {

using Device = PageLedger<DevicePage, Host>;
using HostTier = PageLedger<HostPage, Host>;
using Ids = std::vector<TokenId>;
using Tier = CacheTier;

constexpr std::int64_t page = 64;

bool contains(const Error& error, const std::string& text) { return error.message.find(text) != std::string::npos; }

// `n` tokens of a sequence; sequences differ from their first token on.
Ids text(int sequence, std::int64_t n) {
  Ids tokens(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = sequence * 100'000 + static_cast<TokenId>(i);
  return tokens;
}
Ids join(Ids a, const Ids& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// A cache of one space, with ledgers that have no memory.
struct Bench {
  using Cache = PrefixCache<1, Lru>;
  Device device = Device::make("device", 9).value();
  HostTier host = HostTier::make("host", 5).value();
  Cache cache = Cache::make({.page_tokens = page}).value();
  std::int32_t root = cache.root({.model = "m"});

  PrefixMatch find(const Ids& tokens) { return cache.find(root, tokens); }

  /// What a request does that computes all of its prompt.
  Cache::Ref run(const Ids& tokens) {
    const PrefixMatch match = find(tokens);
    Cache::Ref ref = cache.acquire(match);
    for (std::int64_t p = match.pages; (p + 1) * page <= static_cast<std::int64_t>(tokens.size()); ++p) CHECK(publish(ref, tokens, p) == Cache::Published::added);
    return ref;
  }
  Cache::Published publish(Cache::Ref& ref, const Ids& tokens, std::int64_t p) {
    Cache::Pages pages{device.allocate().value()};
    return cache.extend(ref, std::span(tokens).subspan(static_cast<std::size_t>(p * page), page), pages).value();
  }
  void to_host(std::int32_t node) {
    cache.arrive(node, 0, host.allocate().value());
    cache.leave(node, 0);
    cache.arrived(node, 0, Tier::host, true);
  }
};

}  // namespace

TEST_CASE("prefix cache: whole pages only, whatever the length") {
  Bench b;
  { auto ref = b.run(text(1, 64)); }
  CHECK(b.cache.pages() == 1);
  for (const int length : {0, 1, 63, 64, 65, 127, 128}) {
    const int hit = length < 64 ? 0 : 64;
    const PrefixMatch match = b.find(text(1, length));
    CAPTURE(length);
    CHECK(match.pages * page == hit);
    CHECK(match.on[0] == match.pages);
    CHECK(b.cache.depth(match.node) == match.pages);
  }
  { auto ref = b.run(text(2, 100)); }
  CHECK(b.find(text(2, 100)).pages == 1);
  CHECK(b.cache.pages() == 2);
  // A tail is refused, and nothing changes.
  auto ref = b.cache.acquire(b.root);
  const auto tail = text(3, 63);
  Bench::Cache::Pages pages{b.device.allocate().value()};
  const auto refused = b.cache.extend(ref, tail, pages);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::invalid_argument);
  CHECK(contains(refused.error(), "63 tokens are not one page of 64"));
  CHECK(pages[0]);
  pages[0].reset();
  CHECK_FALSE(b.cache.extend(ref, text(3, 64), pages).ok());
  CHECK(b.cache.pages() == 2);
}

TEST_CASE("prefix cache: prefixes part at any page boundary") {
  Bench b;
  const Ids base = text(1, 3 * page);
  { auto ref = b.run(base); }
  for (int pages = 0; pages < 3; ++pages) {
    Ids other(base.begin(), base.begin() + pages * page);
    other = join(std::move(other), text(2 + pages, page));
    CHECK(b.find(other).pages == pages);
    auto ref = b.run(other);
    CHECK(ref.pages() == pages + 1);
    CHECK(b.find(other).pages == pages + 1);
  }
  CHECK(b.cache.pages() == 6);
  CHECK(b.find(base).pages == 3);
  // Equal pages behind different prefixes are different pages.
  CHECK(b.find(join(text(9, page), Ids(base.begin() + page, base.end()))).pages == 0);
  CHECK(b.cache.find(b.cache.root({.model = "m", .adapter = "lora"}), base).pages == 0);
}

TEST_CASE("prefix cache: what a request holds is not evicted, and leaves go before their parents") {
  Bench b;
  const Ids base = text(1, 2 * page);
  const Ids longer = join(base, text(2, page));
  auto held = b.run(base);
  { auto ref = b.run(longer); }
  // Only the third page may go; then nothing until the request lets go.
  const std::int32_t third = b.cache.victim(0, Tier::device);
  REQUIRE(third >= 0);
  CHECK(b.cache.depth(third) == 3);
  b.cache.drop(third, 0, Tier::device);
  CHECK(b.find(longer).pages == 2);
  CHECK(b.cache.victim(0, Tier::device) == -1);
  CHECK(b.cache.pins(held.node(), 0) == 1);
  { const auto gone = std::move(held); }
  const std::int32_t second = b.cache.victim(0, Tier::device);
  CHECK(b.cache.depth(second) == 2);
  b.cache.drop(second, 0, Tier::device);
  b.cache.drop(b.cache.victim(0, Tier::device), 0, Tier::device);
  CHECK(b.cache.victim(0, Tier::device) == -1);
  CHECK(b.cache.pages() == 0);
  CHECK(b.device.free_pages() == b.device.capacity());
}

TEST_CASE("prefix cache: two requests that compute the same pages at once share the first one's") {
  Bench b;
  const Ids tokens = text(1, 2 * page);
  auto one = b.cache.acquire(b.find(tokens));
  auto two = b.cache.acquire(b.find(tokens));
  CHECK(b.publish(one, tokens, 0) == Bench::Cache::Published::added);
  Bench::Cache::Pages pages{b.device.allocate().value()};
  const DevicePage mine = pages[0].id();
  CHECK(b.cache.extend(two, std::span(tokens).first(page), pages).value() == Bench::Cache::Published::known);
  CHECK(pages[0].id() == mine);  // still the second one's
  CHECK(two.node() == one.node());
  CHECK(b.cache.device(two.node(), 0).id() != mine);
  CHECK(b.cache.pins(one.node(), 0) == 2);
  // The second is ahead now; the first joins behind it.
  pages[0].reset();
  CHECK(b.publish(two, tokens, 1) == Bench::Cache::Published::added);
  CHECK(b.publish(one, tokens, 1) == Bench::Cache::Published::known);
  CHECK(b.cache.pages() == 2);
  CHECK(b.device.used_pages() == 2);
}

TEST_CASE("prefix cache: states of a page on its way down and up") {
  Bench b;
  const Ids tokens = text(1, page);
  std::int32_t node = -1;
  {
    auto ref = b.run(tokens);
    node = ref.node();
  }
  CHECK(b.cache.state(node, 0) == PageState::device);
  // A failed copy leaves the device page in place.
  b.cache.arrive(node, 0, b.host.allocate().value());
  CHECK(b.cache.state(node, 0) == PageState::storing);
  CHECK(b.cache.victim(0, Tier::device) == -1);  // under copy
  b.cache.leave(node, 0);
  CHECK(b.cache.state(node, 0) == PageState::draining);
  b.cache.arrived(node, 0, Tier::host, false);
  CHECK(b.cache.state(node, 0) == PageState::device);
  CHECK(b.host.free_pages() == b.host.capacity());
  // A request that comes in between keeps the page.
  b.cache.arrive(node, 0, b.host.allocate().value());
  b.cache.leave(node, 0);
  CHECK(b.find(tokens).pages == 1);
  {
    auto ref = b.cache.acquire(b.find(tokens));
    CHECK(b.cache.state(node, 0) == PageState::storing);
    b.cache.arrived(node, 0, Tier::host, true);
    CHECK(b.cache.state(node, 0) == PageState::device);
    CHECK(b.cache.has(node, 0, Tier::host));
  }
  // A page with a copy below goes at once; its name stays.
  CHECK(b.cache.victim(0, Tier::device) == node);
  b.cache.drop(node, 0, Tier::device);
  CHECK(b.cache.state(node, 0) == PageState::host);
  CHECK(b.find(tokens).on[1] == 1);
  // A failed load publishes nothing, and the next one works.
  b.cache.arrive(node, 0, b.device.allocate().value());
  CHECK(b.cache.state(node, 0) == PageState::loading);
  CHECK(b.cache.victim(0, Tier::host) == -1);  // the source of a load
  b.cache.arrived(node, 0, Tier::device, false);
  CHECK(b.cache.state(node, 0) == PageState::host);
  CHECK(b.device.free_pages() == b.device.capacity());
  b.cache.arrive(node, 0, b.device.allocate().value());
  b.cache.arrived(node, 0, Tier::device, true);
  CHECK(b.cache.state(node, 0) == PageState::device);
  // On to a file.
  b.cache.drop(node, 0, Tier::device);
  b.cache.arrive_file(node, 0);
  CHECK(b.cache.state(node, 0) == PageState::storing);
  b.cache.arrived(node, 0, Tier::file, true);
  b.cache.drop(node, 0, Tier::host);
  CHECK(b.cache.state(node, 0) == PageState::file);
  CHECK(b.find(tokens).on[2] == 1);
  b.cache.arrive(node, 0, b.host.allocate().value());
  CHECK(b.cache.state(node, 0) == PageState::loading);
  b.cache.arrived(node, 0, Tier::host, false);
  b.cache.drop(node, 0, Tier::file);
  CHECK(b.cache.pages() == 0);
  CHECK(std::string(name_of(PageState::draining)) == "draining");
}

TEST_CASE("prefix cache: a whole chain drains, children first, and comes back in any state of it") {
  Bench b;
  const Ids tokens = text(1, 3 * page);
  { auto ref = b.run(tokens); }
  std::int32_t nodes[3];
  b.cache.path(b.find(tokens).node, nodes);
  for (int i = 3; i-- > 0;) {
    REQUIRE(b.cache.victim(0, Tier::device) == nodes[i]);  // the next goes as soon as its child is leaving
    b.cache.arrive(nodes[i], 0, b.host.allocate().value());
    b.cache.leave(nodes[i], 0);
  }
  CHECK(b.cache.victim(0, Tier::device) == -1);
  b.cache.arrived(nodes[0], 0, Tier::host, true);
  CHECK(b.find(tokens).pages == 3);
  auto ref = b.cache.acquire(b.find(tokens));
  CHECK(b.cache.state(nodes[0], 0) == PageState::host);
  CHECK(b.cache.state(nodes[1], 0) == PageState::storing);
  CHECK(b.cache.state(nodes[2], 0) == PageState::storing);
  CHECK(b.cache.victim(0, Tier::host) == -1);  // the held request is about to load it
  b.cache.arrived(nodes[2], 0, Tier::host, true);
  b.cache.arrived(nodes[1], 0, Tier::host, false);
  CHECK(b.cache.state(nodes[1], 0) == PageState::device);
  CHECK(b.cache.victim(0, Tier::host) == nodes[2]);  // a copy of what is on the device may go, held or not
}

TEST_CASE("prefix cache: a page gone from a middle is found again by name, and joined") {
  Bench b;
  const Ids tokens = text(1, 2 * page);
  { auto ref = b.run(tokens); }
  std::int32_t nodes[2];
  b.cache.path(b.find(tokens).node, nodes);
  // A file that cannot be read takes the first page; the second is still there, out of reach.
  b.to_host(nodes[1]);
  b.to_host(nodes[0]);
  b.cache.found_file(nodes[0], 0);
  b.cache.drop(nodes[0], 0, Tier::host);
  b.cache.drop(nodes[0], 0, Tier::file);
  CHECK(b.cache.state(nodes[0], 0) == PageState::absent);
  PrefixMatch match = b.find(tokens);
  CHECK(match.pages == 0);
  CHECK(match.forgotten);
  auto ref = b.cache.acquire(match);
  CHECK(b.publish(ref, tokens, 0) == Bench::Cache::Published::joined);
  match = b.find(tokens);
  CHECK(match.pages == 2);
  CHECK(match.on[0] == 1);
  CHECK(match.on[1] == 1);
  CHECK_FALSE(match.forgotten);
  // Computed again, although it was on the host: the copy there stays good.
  CHECK(b.publish(ref, tokens, 1) == Bench::Cache::Published::joined);
  CHECK(b.cache.has(nodes[1], 0, Tier::host));
  CHECK(b.find(tokens).on[0] == 2);
}

TEST_CASE("prefix cache: the usable prefix is the shortest over all spaces") {
  // Two spaces whose pages are all needed: index keys apart from the latents.
  using Cache = PrefixCache<2, Lru>;
  Device full = Device::make("full", 9).value();
  Device index = Device::make("index", 9).value();
  Cache cache = Cache::make({.page_tokens = page}).value();
  const std::int32_t root = cache.root({});
  const Ids tokens = text(1, 5 * page);
  std::int32_t nodes[5];
  {
    auto ref = cache.acquire(root);
    for (int p = 0; p < 5; ++p) {
      Cache::Pages pages{full.allocate().value(), index.allocate().value()};
      REQUIRE(cache.extend(ref, std::span(tokens).subspan(static_cast<std::size_t>(p) * page, page), pages).ok());
    }
    cache.path(ref.node(), nodes);
  }
  CHECK(cache.find(root, tokens).pages == 5);
  cache.drop(nodes[3], 1, Tier::device);  // the index keys of page 3 get lost
  const PrefixMatch match = cache.find(root, tokens);
  CHECK(match.pages == 3);
  CHECK(match.forgotten);
  // The rest can be evicted and comes back completely.
  for (const int space : {0, 1}) {
    for (std::int32_t node = cache.victim(space, Tier::device); node >= 0; node = cache.victim(space, Tier::device)) cache.drop(node, space, Tier::device);
  }
  CHECK(full.free_pages() == full.capacity());
  CHECK(index.free_pages() == index.capacity());
  CHECK(cache.pages() == 0);
}

TEST_CASE("prefix cache: a restart needs the window behind it, and only there") {
  using Cache = PrefixCache<2, Lru>;
  Cache::Shape shape{.page_tokens = page};
  shape.spaces[1] = {PrefixNeed::tail, 129};  // the next token and 128 before it: two pages
  Device full = Device::make("full", 9).value();
  Device window = Device::make("window", 9).value();
  Cache cache = Cache::make(shape).value();
  const std::int32_t root = cache.root({});
  const Ids tokens = text(1, 5 * page);
  auto ref = cache.acquire(root);
  std::vector<std::int32_t> nodes;
  for (int p = 0; p < 5; ++p) {
    Cache::Pages pages{full.allocate().value(), window.allocate().value()};
    REQUIRE(cache.extend(ref, std::span(tokens).subspan(static_cast<std::size_t>(p) * page, page), pages).ok());
    nodes.push_back(ref.node());
  }
  // The request has moved on: only the last two window pages are held, all of the full ones.
  for (int p = 0; p < 5; ++p) {
    CHECK(cache.pins(nodes[static_cast<std::size_t>(p)], 0) == 1);
    CHECK(cache.pins(nodes[static_cast<std::size_t>(p)], 1) == (p >= 3 ? 1 : 0));
  }
  CHECK(cache.victim(0, Tier::device) == -1);
  for (std::int32_t node = cache.victim(1, Tier::device); node >= 0; node = cache.victim(1, Tier::device)) cache.drop(node, 1, Tier::device);
  CHECK(window.used_pages() == 2);
  CHECK(cache.find(root, tokens).pages == 5);
  PrefixMatch match = cache.find(root, std::span(tokens).first(4 * page));
  CHECK(match.pages == 0);  // no two window pages behind any shorter prefix
  CHECK(match.cut == 4);
  // One that computes the window of the first pages again can restart there, and behind the first page at once.
  auto again = cache.acquire(root);
  for (int p = 0; p < 2; ++p) {
    Cache::Pages pages{full.allocate().value(), window.allocate().value()};
    CHECK(cache.extend(again, std::span(tokens).subspan(static_cast<std::size_t>(p) * page, page), pages).value() == Cache::Published::joined);
    CHECK(pages[0]);        // the full page was there
    CHECK_FALSE(pages[1]);  // the window page was not
    match = cache.find(root, std::span(tokens).first(static_cast<std::size_t>(p + 1) * page));
    CHECK(match.pages == p + 1);
  }
  // A slower window makes the page slower.
  again = {};
  HostTier host = HostTier::make("host", 5).value();
  cache.arrive(nodes[1], 1, host.allocate().value());
  cache.leave(nodes[1], 1);
  cache.arrived(nodes[1], 1, Tier::host, true);
  match = cache.find(root, std::span(tokens).first(2 * page));
  CHECK(match.on[0] == 1);
  CHECK(match.on[1] == 1);
  // With the last full page its window goes as well.
  ref = {};
  CHECK(window.used_pages() == 3);
  std::int32_t last = cache.victim(0, Tier::device);
  CHECK(last == nodes[4]);
  cache.drop(last, 0, Tier::device);
  CHECK(window.used_pages() == 2);
}

TEST_CASE("prefix cache: shapes that no bundle has are refused in words") {
  const auto refused = [](PrefixShape<2> shape, const std::string& text) {
    const auto made = PrefixCache<2>::make(shape);
    REQUIRE_FALSE(made.ok());
    CHECK(made.error().code == ErrorCode::invalid_argument);
    CHECK_MESSAGE(contains(made.error(), text), made.error().message);
  };
  refused({}, "pages of 0 tokens");
  refused({.page_tokens = 64, .group_tokens = 128}, "64 tokens do not hold whole groups of 128");
  PrefixShape<2> shape{.page_tokens = 256, .group_tokens = 128};
  CHECK(PrefixCache<2>::make(shape).ok());
  shape.spaces[1] = {PrefixNeed::tail, 0};
  refused(shape, "space 1 needs a tail of 0 tokens");
  shape.spaces[0].need = PrefixNeed::never;
  shape.spaces[1].need = PrefixNeed::never;
  refused(shape, "no space whose pages are all needed");
}

TEST_CASE("prefix cache: the shape of DeepSeek-V4") {
  using Flash = preset::deepseek_v4::Flash<>;
  constexpr auto shape = prefix_shape<Flash>(128);
  static_assert(shape.page_tokens == 256);
  static_assert(shape.group_tokens == 128);
  static_assert(shape.spaces[Flash::space_index<space::Full>()].need == PrefixNeed::every);
  static_assert(shape.spaces[Flash::space_index<space::Window>()].need == PrefixNeed::tail);
  static_assert(shape.spaces[Flash::space_index<space::Request>()].need == PrefixNeed::never);
  CHECK(PrefixCache<Flash::space_count>::make(shape).ok());
  CHECK_FALSE(PrefixCache<Flash::space_count>::make(prefix_shape<Flash>()).ok());  // a window of no size
}
