// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <chrono>

#include <kvire/tier/file_tier.hpp>
#include <tests/support/tier_case.hpp>

using namespace kvire;
using namespace kvire_test;
using namespace std::chrono_literals;

namespace {

using Rig = TierRig<>;
constexpr std::int64_t page = Rig::page;

TierSizes sizes(std::int64_t device, std::int64_t host, bool seal = true) {
  TierSizes s{device + 1, host + 1, {.window_tokens = 20, .room_limit = 5000ms}};
  s.options.seal = seal;
  return s;
}
Rig::Tokens text(int sequence, std::int64_t pages) { return Rig::text(sequence, pages * page); }

/// The node of the n-th page of a text; the root for 0.
template <class R>
std::int32_t node_of(R& rig, const Rig::Tokens& tokens, std::int64_t pages) {
  std::int32_t node = rig.root();
  for (std::int64_t i = 0; i < pages; ++i) node = rig.cache().cache().known(node, std::span(tokens).subspan(static_cast<std::size_t>(i * page), static_cast<std::size_t>(page)));
  return node;
}
/// A text that only the host has.
template <class R>
void send_away(R& rig, const Rig::Tokens& tokens) {
  REQUIRE(rig.run(tokens).ok());
  rig.cache().make_room(100);
  REQUIRE(rig.cache().finish(deadline_in(30s)));
  REQUIRE(rig.cache().cache().state(node_of(rig, tokens, 1), 0) == PageState::host);
}

}  // namespace

TEST_CASE("tiered cache, seals: a page that changed on the host fails its load, is given up, and is computed again") {
  Rig rig(sizes(6, 8));
  const auto tokens = text(1, 4);
  send_away(rig, tokens);
  REQUIRE(rig.flip_on_host(node_of(rig, tokens, 3)));
  {
    const auto held = rig.cache().acquire(rig.root(), tokens);
    CHECK(held.tokens == 4 * page);
    const auto status = rig.read(held);
    REQUIRE_FALSE(status.ok());
    CHECK(status.error().code == ErrorCode::mismatch);
  }
  CHECK(rig.cache().finish(deadline_in(30s)));
  CHECK(rig.cache().counters().tiers[1][0].spoiled_pages == 4);  // nobody knows of which page: all of the load's
  CHECK(rig.cache().counters().tiers[0][0].failed_pages == 4);
  CHECK(rig.run(tokens).ok());
  CHECK(rig.cache().counters().published_pages == 8);
  CHECK(rig.wrong_pages() == 0);
  rig.cache().clear();
  CHECK(rig.used_pages() == 0);
}

TEST_CASE("tiered cache, seals: without them the same page is read as it is") {
  Rig rig(sizes(6, 8, false));
  const auto tokens = text(1, 4);
  send_away(rig, tokens);
  REQUIRE(rig.flip_on_host(node_of(rig, tokens, 3)));
  const auto held = rig.cache().acquire(rig.root(), tokens);
  CHECK(rig.read(held).ok());
  CHECK(rig.wrong_pages() == 1);
}

TEST_CASE("tiered cache, seals: copies that move nothing and report success, either way") {
  for (const bool to_host : {true, false}) {
    Rig rig(sizes(6, 8));
    const auto tokens = text(1, 4);
    auto& faults = to_host ? rig.store_faults() : rig.load_faults();
    if (to_host) faults.set([](const CopyInfo& info) { return info.layer == 2 ? Fault::skip() : Fault::none(); });
    send_away(rig, tokens);
    // Others' pages into the places on the device meanwhile.
    REQUIRE(rig.run(text(2, 4)).ok());
    faults.set({});
    if (!to_host) faults.set([](const CopyInfo& info) { return info.layer == 2 ? Fault::skip() : Fault::none(); });
    const auto held = rig.cache().acquire(rig.root(), tokens);
    CHECK(held.tokens == 4 * page);
    CHECK(rig.read(held).error().code == ErrorCode::mismatch);
    CHECK(rig.wrong_pages() == 0);
  }
}

TEST_CASE("tiered cache, seals: what changed on the host gets into no file, and what comes from one is sealed") {
  using Files = FileTier<SmallModel<SmallFp8>, Host>;
  using FileRig = TierRig<Lru, Files>;
  Folder folder;
  auto files = Files::make({.folder = folder.path, .budget = Bytes(1 << 20), .workers = 1, .durable = false}, SmallSchedule::layers).value();
  const auto tokens = text(1, 1);
  {
    FileRig rig(sizes(6, 8), &files);
    // The store to the host lies, and the record is made of what is there.
    rig.store_faults().set([](const CopyInfo& info) { return info.layer == 2 ? Fault::skip() : Fault::none(); });
    REQUIRE(rig.run(tokens).ok());
    rig.cache().make_room(100);
    CHECK(rig.cache().finish(deadline_in(30s)));
    CHECK(folder.records().empty());
    CHECK(rig.cache().counters().tiers[1][0].spoiled_pages == 1);
    CHECK(rig.cache().counters().tiers[2][0].failed_pages == 1);
    CHECK(rig.cache().acquire(rig.root(), tokens).tokens == 0);
    rig.store_faults().set({});
    REQUIRE(rig.run(tokens).ok());
    rig.cache().make_room(100);
    CHECK(rig.cache().finish(deadline_in(30s)));
    CHECK(folder.records().size() == 1);
  }
  FileRig rig(sizes(6, 8), &files);
  CHECK(rig.cache().prefetch(rig.root(), tokens) == 1);
  CHECK(rig.cache().finish(deadline_in(30s)));
  REQUIRE(rig.flip_on_host(node_of(rig, tokens, 1)));
  {
    const auto held = rig.cache().acquire(rig.root(), tokens);
    CHECK(held.tokens == page);
    CHECK(rig.read(held).error().code == ErrorCode::mismatch);
  }
  // The record is good: it is read anew.
  CHECK(rig.cache().finish(deadline_in(30s)));
  CHECK(rig.cache().prefetch(rig.root(), tokens) == 1);
  CHECK(rig.cache().finish(deadline_in(30s)));
  const auto held = rig.cache().acquire(rig.root(), tokens);
  CHECK(held.tokens == page);
  CHECK(rig.read(held).ok());
  CHECK(rig.wrong_pages() == 0);
}
