// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <chrono>
#include <map>
#include <random>

#include <kvire/preset/deepseek_v4.hpp>
#include <tests/support/file_tier_case.hpp>
#include <tests/support/tail_case.hpp>

using namespace kvire;
using namespace kvire_test;
using namespace std::chrono_literals;

namespace {

struct TailSchedule {
  static constexpr int layers = 3;
  static constexpr int ratio(int layer) { return layer == 0 ? 0 : layer == 1 ? 4 : 8; }
};
struct TailLatent : CacheEntry<Bf16Contiguous<4, 16>, space::Full, Tokens<4>, LayersOfRatio<TailSchedule, 4>> {
  static constexpr const char* name = "latent";
};
struct TailCoarse : CacheEntry<Fp8WithScale<2, 16>, space::Full, Tokens<8>, LayersOfRatio<TailSchedule, 8>> {
  static constexpr const char* name = "coarse";
};
struct TailWindow : CacheEntry<Bf16Contiguous<16, 8>, space::Window, Tokens<1>> {
  static constexpr const char* name = "window";
};
struct TailRing : CacheEntry<F32Rows<4, 8>, space::Window, Ring, LayersOfRatio<TailSchedule, 4>> {
  static constexpr const char* name = "ring";
};
struct TailRows : CacheEntry<F32Rows<8, 8>, space::Request, RequestRows, LayersOfRatio<TailSchedule, 8>> {
  static constexpr const char* name = "rows";
};
/// Every kind of entry there is, pages of 16 raw tokens.
using Small = CacheBundle<TailSchedule, TailLatent, TailCoarse, TailWindow, TailRing, TailRows>;
using Flash = preset::deepseek_v4::Flash<>;

template <class Bundle>
TailSizes sizes(std::int64_t device, std::int64_t host) {
  const bool small = std::is_same_v<Bundle, Small>;
  return {small ? 3 : 4, device + 1, host == 0 ? 0 : host + 1, {.window_tokens = small ? 20 : 128, .room_limit = 5000ms}};
}
std::vector<TokenId> text(int sequence, std::int64_t n) {
  std::vector<TokenId> tokens(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = sequence * 1000 + static_cast<TokenId>(i);
  return tokens;
}
std::vector<TokenId> join(std::vector<TokenId> a, std::int64_t keep, const std::vector<TokenId>& b) {
  a.resize(static_cast<std::size_t>(keep));
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

/// The outputs of a run that nothing interrupts, on a cache without other tiers.
template <class Bundle>
std::vector<std::uint64_t> uncached(const std::vector<TokenId>& tokens) {
  TailRig<Bundle> rig(sizes<Bundle>(static_cast<std::int64_t>(tokens.size()) / TailRig<Bundle>::page + 2, 0));
  auto request = rig.begin(tokens, 0);
  std::vector<std::uint64_t> outputs;
  for (std::size_t i = 0; i < tokens.size(); ++i) outputs.push_back(rig.step(request));
  return outputs;
}

/// Computes the next token; whether its output is the expected one.
template <class Rig>
bool goes_on(Rig& rig, typename Rig::Request& request, const std::vector<std::uint64_t>& expected) {
  const auto at = static_cast<std::size_t>(request.computed);
  return rig.step(request) == expected[at];
}

/// Parks a request after each of its tokens and goes on from what has been on every tier since.
template <class Bundle>
void every_length(std::int64_t pages, std::int64_t from) {
  using Files = FileTier<Bundle, Host>;
  using Rig = TailRig<Bundle, Files>;
  const auto tokens = text(1, pages * Rig::page + 3);
  const auto expected = uncached<Bundle>(tokens);
  const auto total = static_cast<std::int64_t>(tokens.size());
  Folder folder;
  auto size = sizes<Bundle>(pages + 2, pages + 2);
  auto files = Files::make({.folder = folder.path, .budget = Bytes(std::int64_t{1} << 31), .workers = 1, .durable = false}, size.layers).value();
  Rig rig(size, &files);
  auto request = rig.begin(tokens, 0);
  while (request.computed < from) REQUIRE(goes_on(rig, request, expected));
  for (std::int64_t length = from; length < total; ++length) {
    CAPTURE(length);
    REQUIRE(rig.park(std::move(request)).ok());
    request = {};
    REQUIRE(rig.cache().finish(deadline_in(60s)));  // its last load may not have been taken note of
    rig.cache().make_room(pages + 2);
    REQUIRE(rig.cache().finish(deadline_in(60s)));
    rig.cache().clear();  // device and host
    REQUIRE(rig.used_pages() == 0);
    (void)rig.cache().prefetch(rig.root(), std::span(tokens).first(static_cast<std::size_t>(length)));
    REQUIRE(rig.cache().finish(deadline_in(60s)));
    request = rig.begin(tokens, length);
    REQUIRE(request.computed == length);
    REQUIRE(goes_on(rig, request, expected));
  }
  const auto& counters = rig.cache().counters();
  const std::int64_t ends = (total - 1) / Rig::page - (from - 1) / Rig::page;  // lengths without a tail
  CHECK(counters.parked_tails == total - from - ends);
  CHECK(counters.resumed_tails == counters.parked_tails);
  CHECK(counters.resumed_tails_on[1] == counters.resumed_tails);
  CHECK(counters.missed_tails == 0);
  CHECK(files.stats().all_lost() == 0);
}

}  // namespace

TEST_CASE("tails: a request goes on bit for bit from every length of a page, through host and files") {
  every_length<Small>(3, 1);
  every_length<Flash>(2, Flash::raw_tokens_per_page<space::Full>() - 2);
}

TEST_CASE("tails: one byte that comes back wrong is seen, whatever the entry and layer") {
  const auto every_entry = []<class Bundle>(std::int64_t length) {
    TailRig<Bundle> rig(sizes<Bundle>(4, 4));
    const auto tokens = text(1, length + 1);
    auto request = rig.begin(tokens, 0);
    while (request.computed < length) (void)rig.step(request);
    const auto expected = rig.look(request);
    REQUIRE(rig.park(std::move(request)).ok());
    rig.cache().make_room(4);
    REQUIRE(rig.cache().finish());
    request = rig.begin(tokens, length);
    REQUIRE(request.computed == length);
    CHECK(rig.look(request) == expected);
    rig.each_layer([&]<class Entry>(EntrySlot slot) {
      for (const std::int64_t byte : {0, 1, 62, 100'003}) {
        CAPTURE(Entry::name);
        REQUIRE(rig.template damage<Entry>(request, slot, byte));
        CHECK(rig.look(request) != expected);
        REQUIRE(rig.template damage<Entry>(request, slot, byte));
      }
    });
    CHECK(rig.look(request) == expected);
  };
  every_entry.operator()<Small>(16 + 13);
  every_entry.operator()<Flash>(256 + 131);
}

TEST_CASE("tails: random requests pause at random lengths and go on bit for bit, under pressure") {
  TailRig<Small> rig(sizes<Small>(6, 10));
  std::mt19937 random(5);
  std::vector<std::vector<TokenId>> texts;
  std::vector<std::vector<std::uint64_t>> outputs;
  for (int i = 0; i < 6; ++i) {
    texts.push_back(i < 3 ? text(i, 60) : join(texts[static_cast<std::size_t>(i - 3)], 10 + 15 * (i - 3), text(i, 30)));
    outputs.push_back(uncached<Small>(texts.back()));
  }
  std::int64_t mid_page = 0;
  for (int turn = 0; turn < 600; ++turn) {
    const auto which = random() % texts.size();
    const auto most = static_cast<std::int64_t>(random() % texts[which].size());
    auto request = rig.begin(texts[which], most);
    REQUIRE(request.computed <= most);
    mid_page += request.computed % 16 == 0 ? 0 : 1;
    for (auto n = random() % 12; n > 0 && request.computed < static_cast<std::int64_t>(texts[which].size()); --n) {
      REQUIRE(goes_on(rig, request, outputs[which]));
    }
    if (random() % 8 != 0) {
      REQUIRE(rig.park(std::move(request)).ok());  // its loads may be under way, if it took no step
    }
    if (random() % 4 == 0) rig.cache().make_room(static_cast<std::int64_t>(random() % 6));
  }
  CHECK(mid_page > 100);
  CHECK(rig.cache().counters().resumed_tails == mid_page);
  CHECK(rig.cache().counters().resumed_tails_on[0] > 0);
  CHECK(rig.cache().counters().resumed_tails_on[1] > 0);
  CHECK(rig.cache().finish());
  rig.cache().clear();
  CHECK(rig.used_pages() == 0);
  CHECK(rig.cache().cache().pages() == 0);
}

TEST_CASE("tails: two requests that go on from one tail write pages of their own") {
  TailRig<Small> rig(sizes<Small>(8, 8));
  const auto base = text(1, 27);
  const auto one = join(base, 27, text(2, 20));
  const auto two = join(base, 27, text(3, 20));
  const auto expected_one = uncached<Small>(one);
  const auto expected_two = uncached<Small>(two);
  auto request = rig.begin(base, 0);
  while (request.computed < 27) (void)rig.step(request);
  REQUIRE(rig.park(std::move(request)).ok());
  rig.cache().make_room(8);
  REQUIRE(rig.cache().finish());
  auto a = rig.begin(one, 30);
  auto b = rig.begin(two, 30);
  REQUIRE(a.computed == 27);
  REQUIRE(b.computed == 27);
  for (std::size_t s = 0; s < a.pages.size(); ++s) CHECK(a.pages[s].id() != b.pages[s].id());
  while (a.computed < 47) {
    CHECK(goes_on(rig, a, expected_one));
    CHECK(goes_on(rig, b, expected_two));
  }
  // Only the device has this one: the first takes it, the second computes.
  REQUIRE(rig.park(std::move(a)).ok());
  a = rig.begin(one, 47);
  CHECK(a.computed == 47);
  CHECK(rig.cache().counters().resumed_tails_on[0] == 1);
  CHECK(rig.begin(one, 47).computed == 32);
}

TEST_CASE("tails: only exactly its tokens, and the longest there is") {
  TailRig<Small> rig(sizes<Small>(12, 0));
  const auto base = text(1, 40);
  for (const std::int64_t length : {5, 16 + 3, 16 + 7, 16 + 12}) {
    auto request = rig.begin(base, length);
    while (request.computed < length) (void)rig.step(request);
    REQUIRE(rig.park(std::move(request)).ok());
    CHECK(rig.cache().cache().pages() == (length > 16 ? 2 : 1));  // what was resumed on the way has gone on to be this one
    CHECK(rig.begin(base, length - 1).computed < length - 1);
  }
  CHECK(rig.begin(base, 16 + 11).computed == 16);
  CHECK(rig.begin(join(base, 16 + 11, text(2, 5)), 16 + 12).computed == 16);  // the last token differs
  CHECK(rig.begin(join(text(2, 16), 16, std::vector<TokenId>(base.begin() + 16, base.end())), 30).computed == 0);  // another prefix
  auto longer = rig.begin(base, 40);
  CHECK(longer.computed == 16 + 12);
  // Two lengths at once: the longer one is taken.
  auto shorter = rig.begin(base, 16);
  while (shorter.computed < 16 + 4) (void)rig.step(shorter);
  REQUIRE(rig.park(std::move(longer)).ok());
  REQUIRE(rig.park(std::move(shorter)).ok());
  CHECK(rig.begin(base, 40).computed == 16 + 12);
  CHECK(rig.begin(base, 40).computed == 16 + 4);
  CHECK(rig.cache().cache().tails(rig.root()) == 0);
}

TEST_CASE("tails: all spaces or none") {
  const auto tokens = text(1, 30);
  const auto parked = [&](TailRig<Small>& rig) {
    auto request = rig.begin(tokens, 0);
    while (request.computed < 25) (void)rig.step(request);
    return rig.park(std::move(request)).ok();
  };
  SUBCASE("a store that fails leaves it where it is") {
    TailRig<Small> rig(sizes<Small>(4, 4));
    REQUIRE(parked(rig));
    rig.store_faults().set([](const CopyInfo& info) { return std::string(info.entry) == "rows" ? Fault::fail() : Fault::none(); });
    rig.cache().make_room(4);
    CHECK(rig.cache().finish());
    CHECK(rig.cache().counters().tiers[1][2].failed_pages == 1);
    CHECK(rig.cache().counters().tiers[0][2].evicted_pages == 0);
    const auto request = rig.begin(tokens, 29);
    CHECK(request.computed == 25);
    CHECK(rig.cache().counters().resumed_tails_on[0] == 1);
  }
  SUBCASE("a load that fails voids the request, and the next one tries again") {
    TailRig<Small> rig(sizes<Small>(4, 4));
    REQUIRE(parked(rig));
    rig.cache().make_room(4);
    CHECK(rig.cache().finish());
    rig.load_faults().set([](const CopyInfo& info) { return std::string(info.entry) == "ring" ? Fault::fail("no link") : Fault::none(); });
    {
      auto request = rig.begin(tokens, 25);
      CHECK(request.computed == 25);
      CHECK(rig.look(request) == 0);
      const auto refused = rig.park(std::move(request));
      REQUIRE_FALSE(refused.ok());
      CHECK(refused.error().message.find("no link") != std::string::npos);
    }
    CHECK(rig.cache().finish());  // the failure of the page before was known to its readers while the tail's load was on its way
    rig.load_faults().set({});
    auto request = rig.begin(tokens, 25);
    CHECK(request.computed == 25);
    CHECK(goes_on(rig, request, uncached<Small>(tokens)));
    CHECK(rig.cache().counters().tiers[0][2].failed_pages == 1);
  }
  SUBCASE("without room on the host for one space it is lost whole") {
    // The rows of a tail of another request have the host's only place, and are in use there: they are being loaded.
    TailRig<Small> rig(sizes<Small>(4, 1));
    const auto other = text(2, 5);
    auto first = rig.begin(other, 0);
    while (first.computed < 4) (void)rig.step(first);
    REQUIRE(rig.park(std::move(first)).ok());
    rig.cache().make_room(4);
    CHECK(rig.cache().finish());
    REQUIRE(parked(rig));
    rig.cache().make_room(4);  // the host gives up the older tail, whole, and has room for one page of each space
    CHECK(rig.cache().finish());
    CHECK(rig.cache().cache().tails(rig.cache().cache().known(rig.root(), std::span(tokens).first(16))) == 1);  // what leaves may bring room for it
    rig.cache().make_room(4);  // it has not: behind the tail's pages nothing on the host may go
    CHECK(rig.cache().finish());
    const auto& tiers = rig.cache().counters().tiers;
    for (int s = 0; s < 3; ++s) {
      CAPTURE(s);
      CHECK(rig.cache().cache().held_pages(s) == 0);
      CHECK(tiers[0][s].lost_pages + tiers[1][s].lost_pages >= 1);
    }
    CHECK(rig.begin(other, 4).computed == 0);
    auto request = rig.begin(tokens, 25);
    CHECK(request.computed % 16 == 0);
    const auto expected = uncached<Small>(tokens);
    while (request.computed < 30) CHECK(goes_on(rig, request, expected));
    CHECK(rig.cache().finish());
    request = {};
    rig.cache().clear();
    CHECK(rig.used_pages() == 0);
  }
  SUBCASE("nothing is taken where one space has no page for it") {
    TailRig<Small> rig(sizes<Small>(4, 4));
    REQUIRE(parked(rig));
    rig.cache().make_room(4);
    CHECK(rig.cache().finish());
    std::vector<PageRef<DevicePage>> rows;
    for (auto page = rig.cache().allocate<space::Request>(); page.ok(); page = rig.cache().allocate<space::Request>()) rows.push_back(std::move(page).value());
    CHECK(rig.begin(tokens, 25).computed == 16);
    CHECK(rig.cache().counters().missed_tails == 1);
    rows.clear();
    CHECK(rig.begin(tokens, 25).computed == 25);
  }
}

TEST_CASE("tails: one that is parked while it is being loaded is there when its load has arrived, and not if that fails") {
  for (const bool fails : {false, true}) {
    CAPTURE(fails);
    TailRig<Small> rig(sizes<Small>(4, 4));
    const auto tokens = text(1, 30);
    const auto expected = uncached<Small>(tokens);
    auto request = rig.begin(tokens, 0);
    while (request.computed < 25) (void)rig.step(request);
    REQUIRE(rig.park(std::move(request)).ok());
    rig.cache().make_room(4);
    CHECK(rig.cache().finish());
    const auto gate = CopyHold::make();
    rig.load_faults().set([gate, fails](const CopyInfo& info) { return fails && info.layer == 2 ? Fault::fail() : Fault::hold(gate); });
    REQUIRE(rig.park(rig.begin(tokens, 25)).ok());
    const auto tail = rig.cache().cache().known(rig.cache().acquire(rig.root(), tokens).prefix.node(), std::span(tokens).subspan(16, 9));
    REQUIRE(tail >= 0);
    for (int s = 0; s < 3; ++s) CHECK(rig.cache().cache().state(tail, s) == PageState::loading);
    gate->release();
    CHECK(rig.cache().finish());
    for (int s = 0; s < 3; ++s) CHECK(rig.cache().cache().state(tail, s) == (fails ? PageState::host : PageState::device));
    rig.load_faults().set({});
    request = rig.begin(tokens, 25);
    CHECK(request.computed == 25);
    CHECK(rig.cache().counters().resumed_tails_on[fails ? 1 : 0] == (fails ? 2 : 1));
    CHECK(goes_on(rig, request, expected));
  }
}

TEST_CASE("tails: what is no tail is refused in words, and changes nothing") {
  TailRig<Small> rig(sizes<Small>(4, 0));
  auto request = rig.begin(text(1, 40), 0);
  while (request.computed < 20) (void)rig.step(request);
  const auto tokens = text(1, 40);
  const auto refused = [&](std::size_t n, const char* words) {
    const auto status = rig.cache().park(request.held, std::span(tokens).first(n), request.pages);
    REQUIRE_FALSE(status.ok());
    CHECK(status.error().code == ErrorCode::invalid_argument);
    CHECK_MESSAGE(status.error().message.find(words) != std::string::npos, status.error().message);
  };
  refused(0, "a tail of 0 tokens, of pages of 16");
  refused(16, "a tail of 16 tokens, of pages of 16");
  auto row = std::move(request.pages[2]);
  refused(4, "without its part in space 2");
  CHECK(rig.cache().cache().pages() == 1);
  CHECK(request.pages[0]);
  request.pages[2] = std::move(row);
  CHECK(rig.park(std::move(request)).ok());
  CHECK(rig.cache().cache().pages() == 2);
}

TEST_CASE("tails: an equal one is kept once") {
  TailRig<Small> rig(sizes<Small>(8, 0));
  const auto tokens = text(1, 10);
  auto a = rig.begin(tokens, 0);
  auto b = rig.begin(tokens, 0);
  while (a.computed < 6) (void)rig.step(a);
  while (b.computed < 6) (void)rig.step(b);
  CHECK(rig.park(std::move(a)).ok());
  CHECK(rig.park(std::move(b)).ok());
  CHECK(rig.cache().counters().parked_tails == 1);
  CHECK(rig.cache().counters().shared_tails == 1);
  CHECK(rig.used_pages() == 3);
}
