// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include <kvire/tier/file_tier.hpp>
#include <tests/support/tier_case.hpp>

using namespace kvire;
using namespace kvire_test;
using namespace std::chrono_literals;

namespace {

using Rig = TierRig<>;
using Tiered = Rig::Cache;
using Model = Rig::Model;
constexpr std::int64_t page = Rig::page;
constexpr std::size_t full = Model::space_index<space::Full>();
constexpr std::size_t window = Model::space_index<space::Window>();

Rig::Tokens text(int sequence, std::int64_t n) { return Rig::text(sequence, n); }

Tiered::Pages fresh(Rig& rig) {
  Tiered::Pages pages;
  pages[full] = rig.cache().allocate<space::Full>().value();
  pages[window] = rig.cache().allocate<space::Window>().value();
  return pages;
}

/// Publishes or parks what must be refused; the code, once it is sure that nothing has changed.
template <class Call>
ErrorCode refused(Rig& rig, const Tiered::Held& held, Call&& call) {
  const auto names = rig.cache().cache().pages();
  const auto tokens = held.tokens;
  const auto published = rig.cache().counters().published_pages;
  const Status status = call();
  REQUIRE_FALSE(status.ok());
  CHECK(status.error().message.find("tiered cache: prefix cache: ") == 0);
  CHECK(rig.cache().cache().pages() == names);
  CHECK(held.tokens == tokens);
  CHECK(rig.cache().counters().published_pages == published);
  CHECK(rig.cache().counters().parked_tails == 0);
  return status.error().code;
}
ErrorCode publish(Rig& rig, Tiered::Held& held, std::vector<Tiered::Pages> pages) {
  const auto tokens = text(7, page * static_cast<std::int64_t>(pages.size()));
  return refused(rig, held, [&] { return rig.cache().publish(held, tokens, pages); });
}
ErrorCode park(Rig& rig, const Tiered::Held& held, Tiered::Pages pages) {
  return refused(rig, held, [&] { return rig.cache().park(held, text(8, 5), pages); });
}

}  // namespace

TEST_CASE("tiered cache: what holds nothing of this cache is refused") {
  Rig rig, other;
  Tiered::Held none;
  auto foreign = other.cache().acquire(other.root(), text(1, page));
  for (Tiered::Held* held : {&none, &foreign}) {
    CHECK(publish(rig, *held, {fresh(rig)}) == ErrorCode::invalid_argument);
    CHECK(park(rig, *held, fresh(rig)) == ErrorCode::invalid_argument);
    Tiered::Pages pages;
    CHECK(rig.cache().resume(*held, text(8, 5), pages) == 0);
    CHECK_FALSE(pages[full]);
  }
  CHECK(Tiered::check(none).ok());
  for (const std::int32_t root : {-1, 999, std::numeric_limits<std::int32_t>::min()}) {
    auto held = rig.cache().acquire(root, text(1, 3 * page));
    CHECK_FALSE(held.prefix);
    CHECK(held.tokens == 0);
    CHECK(publish(rig, held, {fresh(rig)}) == ErrorCode::invalid_argument);
  }
  CHECK(rig.cache().root({.model = "m", .rank = 2, .ranks = 2}) == -1);
  CHECK(rig.cache().counters().lookups == 0);
  CHECK(rig.used_pages() == 0);
}

TEST_CASE("tiered cache: pages of another pool, of another space, or given twice are refused, and nothing is published") {
  for (const bool write_through : {false, true}) {
    Rig rig({.options = {.window_tokens = 20, .write_through = write_through}});
    auto stranger = DeviceBundlePool<Model, Host>::make({.pages = SmallHost<>::counts(60, 60), .layers = SmallSchedule::layers, .name = "stranger"}).value();
    auto held = rig.cache().acquire(rig.root(), {});
    // The first page would do: it is not published either.
    Tiered::Pages foreign = fresh(rig);
    foreign[full] = stranger.allocate<space::Full>(50).value().back();
    CHECK(publish(rig, held, {fresh(rig), foreign}) == ErrorCode::mismatch);
    CHECK(park(rig, held, foreign) == ErrorCode::mismatch);
    Tiered::Pages swapped = fresh(rig);
    std::swap(swapped[full], swapped[window]);
    CHECK(publish(rig, held, {fresh(rig), swapped}) == ErrorCode::mismatch);
    CHECK(park(rig, held, swapped) == ErrorCode::mismatch);
    const Tiered::Pages twice = fresh(rig);
    CHECK(publish(rig, held, {twice, twice}) == ErrorCode::duplicate);
    CHECK(publish(rig, held, {fresh(rig), {}}) == ErrorCode::invalid_argument);
    CHECK(held.prefix.pages() == 0);
  }
}

TEST_CASE("tiered cache: nobody gets a write lease for a page that is published") {
  Rig rig;
  auto held = rig.run(text(1, page)).value();
  const std::vector<DevicePage> published{rig.cache().cache().device(held.prefix.node(), full).id()};
  const Gate<Host> gate;
  auto step = gate.begin({}, rig.compute()).value();
  auto& pool = rig.device().entry<SmallLatent>();
  const auto lease = step.write(pool, EntrySlot(0), published);
  REQUIRE_FALSE(lease.ok());
  CHECK(lease.error().code == ErrorCode::busy);
  held = {};
  CHECK_FALSE(step.write(pool, EntrySlot(0), published).ok());
}

TEST_CASE("tiered cache: options that mean nothing are refused by name") {
  Rig rig;
  Stream<Host> stream = Stream<Host>::make().value();
  const auto message = [&](const TieredOptions& options) {
    const auto made = Tiered::make({&rig.device(), &rig.host(), &stream, &stream}, options);
    return made.ok() ? std::string("ok") : made.error().code == ErrorCode::invalid_argument ? made.error().message : std::string("another code");
  };
  CHECK(message({.window_tokens = 20}) == "ok");
  CHECK(message({.window_tokens = 20, .room_limit = 0ms}) == "ok");
  CHECK(message({.window_tokens = -4}).find("tiered cache: window_tokens is -4") == 0);
  CHECK(message({.window_tokens = 0}).find("prefix cache: space 1 needs a tail of 0 tokens") == 0);
  CHECK(message({.window_tokens = std::numeric_limits<std::int64_t>::max()}).find("prefix cache: space 1 needs a tail of") == 0);
  CHECK(message({.window_tokens = 20, .batch_pages = -3}).find("tiered cache: batch_pages is -3") == 0);
  CHECK(message({.window_tokens = 20, .batch_pages = 0}).find("tiered cache: batch_pages is 0") == 0);
  CHECK(message({.window_tokens = 20, .room_limit = -1ms}).find("tiered cache: room_limit in ms is -1") == 0);
  rig.cache().make_room(-5);
  rig.cache().make_room(std::numeric_limits<std::int64_t>::max());
}

TEST_CASE("tiered cache: files of another number of layers than the pools are refused, with both numbers") {
  using Files = FileTier<Model, Host>;
  TierRig<Lru, Files> rig;
  Stream<Host> stream = Stream<Host>::make().value();
  for (const int layers : {SmallSchedule::layers - 1, SmallSchedule::layers}) {
    Folder folder;
    auto files = Files::make({.folder = folder.path, .budget = Bytes(1 << 20), .workers = 1, .durable = false}, layers).value();
    const auto made = TieredCache<Model, Host, Lru, Files>::make({&rig.device(), &rig.host(), &stream, &stream}, {.window_tokens = 20}, &files);
    REQUIRE(made.ok() == (layers == SmallSchedule::layers));
    if (made.ok()) continue;
    CHECK(made.error().code == ErrorCode::invalid_argument);
    CHECK_MESSAGE(contains(made.error().message, "tiered cache: files of 2 layers, pools of 3"), made.error().message);
  }
}

namespace {

/// A tier that has nothing, and stores nothing.
struct Refusing {
  int layers() const { return SmallSchedule::layers; }
  Event<Host> refuse() {
    auto event = Event<Host>::make();
    event.complete(Error{ErrorCode::mismatch, "another reason"});
    ++refused;
    return event;
  }
  Event<Host> store(const RecordKey&, HostBundlePool<Model, Host>&, BundleRefs<Model, HostPage>, std::shared_ptr<PageSeals>) { return refuse(); }
  Event<Host> load(const RecordKey&, HostBundlePool<Model, Host>&, BundleRefs<Model, HostPage>, std::shared_ptr<PageSeals>) { return refuse(); }
  std::optional<BundlePages<Model>> find(const RecordKey&) { return {}; }
  int refused = 0;
};

}  // namespace

TEST_CASE("tiered cache: without seals no store says that the host's pages are spoiled") {
  Refusing files;
  TierRig<Lru, Refusing> rig({.options = {.window_tokens = 20, .write_through = true, .seal = false}}, &files);
  REQUIRE(rig.run(text(1, 2 * page)).ok());
  CHECK(rig.cache().finish(deadline_in(30s)));
  CHECK(files.refused == 2);
  CHECK(rig.cache().counters().tiers[1][0].spoiled_pages == 0);
  CHECK(rig.cache().counters().tiers[2][0].failed_pages == 2);
  CHECK(rig.host_ledger<space::Full>().used_pages() == 2);
}
