// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <random>
#include <thread>

#include <kvire/tier/block_io_faults.hpp>
#include <kvire/tier/file_tier.hpp>
#include <tests/support/tier_case.hpp>

using namespace kvire;
using namespace kvire_test;
using namespace std::chrono_literals;

namespace {

/// What a run has seen, beside what its cache has counted.
struct Seen {
  std::int64_t steps = 0;
  std::int64_t failed_reads = 0;
  std::int64_t flips = 0;
  std::int64_t wrong_pages = 0;
  std::int64_t lost_pages = 0;  ///< of both pools, that did not come back
  std::int64_t names = 0;       ///< that are left in the cache
  bool finished = false;
  std::int64_t stranger_moves = 0;
  CacheCounters<SmallModel<SmallFp8>::space_count> counters;
};

/// Random sessions on all tiers at once, with pressure and aborts, while copies are slow, fail, or report success and move nothing, bits flip in host memory
/// and somebody else takes pages from the same pools: every page that a step reads must have the bytes that its tokens say, and every page comes back at
/// the end. For one thread; several caches may share the files.
template <class Policy, class Files>
class Sessions {
 public:
  using Rig = TierRig<Policy, Files>;

  Sessions(unsigned seed, bool write_through, Files* files)
      : random_(seed), rig_({.device = 14, .host = 20, .options = {.window_tokens = 20, .write_through = write_through, .batch_pages = 3, .room_limit = 2000ms}}, files) {
    const auto faults = [this](unsigned salt) {
      return [this, random = std::mt19937(salt)](const CopyInfo&) mutable {
        const auto dice = random() % 200;
        if (dice < 2 && faults_) return Fault::fail();
        if (dice < 3 && faults_) return Fault::skip();
        if (dice < 10) return Fault::delay(std::chrono::microseconds(random() % 500));
        return Fault::none();
      };
    };
    rig_.load_faults().set(faults(seed * 2 + 1));
    rig_.store_faults().set(faults(seed * 2 + 2));
  }

  Seen run(std::chrono::steady_clock::time_point until, std::int64_t least_steps) {
    std::thread stranger([this] { strange(); });
    for (; seen_.steps < least_steps || std::chrono::steady_clock::now() < until; ++seen_.steps) step();
    stop_ = true;
    stranger.join();
    faults_ = false;
    running_.clear();
    seen_.finished = rig_.cache().finish(deadline_in(60s));
    rig_.cache().clear();
    seen_.lost_pages = rig_.used_pages();
    seen_.names = rig_.cache().cache().pages();
    seen_.wrong_pages += rig_.wrong_pages();
    seen_.counters = rig_.cache().counters();
    return seen_;
  }

 private:
  struct Session {
    typename Rig::Tokens tokens;
    typename Rig::Cache::Held held;
  };
  static constexpr std::int64_t page = Rig::page;

  // Conversations over few distinct pages, so that prefixes are shared and part everywhere.
  void extend(typename Rig::Tokens& tokens) {
    const auto more = Rig::text(1 + static_cast<int>(random_() % 3), page);
    tokens.insert(tokens.end(), more.begin(), more.end());
  }

  void step() {
    switch (random_() % 11) {
      case 0:
      case 1: begin(); break;
      case 2: end(); break;
      case 3: rig_.cache().make_room(static_cast<std::int64_t>(random_() % 4)); break;
      case 4: rig_.cache().poll(); break;
      case 5: read(); break;
      case 6: park(); break;
      case 7: resume(); break;
      case 8: flip(); break;
      default: grow(); break;
    }
  }
  void begin() {
    if (running_.size() == 3) end();
    Session session;
    for (auto n = random_() % 5; n > 0; --n) extend(session.tokens);
    if constexpr (Rig::Cache::has_files) {
      if (random_() % 2 == 0) (void)rig_.cache().prefetch(rig_.root(), session.tokens);
      if (random_() % 4 == 0) (void)rig_.cache().finish(deadline_in(60s));
    }
    session.held = rig_.cache().acquire(rig_.root(), session.tokens);
    running_.push_back(std::move(session));
    if (random_() % 8 == 0) running_.pop_back();  // aborted, with its load under way
  }
  void end() {
    if (!running_.empty()) running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(random_() % running_.size()));
  }
  // A load has failed: who depends on it begins anew.
  void drop(std::size_t at) {
    ++seen_.failed_reads;
    rig_.cache().poll();
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(at));
  }
  void read() {
    if (running_.empty()) return;
    const std::size_t at = random_() % running_.size();
    if (!rig_.read(running_[at].held).ok()) drop(at);
  }
  // What follows a prefix in the few texts that there are, at any length: less than a page of it.
  typename Rig::Tokens tail() { return Rig::text(1 + static_cast<int>(random_() % 3), 1 + static_cast<std::int64_t>(random_() % (page - 1))); }
  void park() {
    if (running_.empty()) return;
    const Session& session = running_[random_() % running_.size()];
    (void)rig_.park(session.held, tail());  // refused while its loads are under way
  }
  void resume() {
    if (running_.empty()) return;
    const std::size_t at = random_() % running_.size();
    if (!rig_.resume(running_[at].held, tail()).ok()) drop(at);
  }
  void grow() {
    if (running_.empty()) return;
    Session& session = running_[random_() % running_.size()];
    const std::int64_t whole = session.held.tokens;
    if (whole >= 6 * page) return;
    if (whole == static_cast<std::int64_t>(session.tokens.size())) extend(session.tokens);
    if (!rig_.read(session.held).ok()) return;  // what it continues from has not been loaded
    (void)rig_.compute(session.held, std::span(session.tokens).subspan(static_cast<std::size_t>(whole), page));
  }
  // A bit of a page on the host that nobody is copying.
  void flip() {
    if (random_() % 8 != 0) return;
    std::int32_t node = rig_.root();
    for (auto n = 1 + random_() % 4; n > 0; --n) {
      const std::int32_t next = rig_.cache().cache().known(node, Rig::text(1 + static_cast<int>(random_() % 3), page));
      if (next < 0) break;
      node = next;
    }
    if (node != rig_.root() && rig_.flip_on_host(node)) ++seen_.flips;
  }

  // Somebody who knows nothing of the cache: takes a page on both sides, moves it there and back, and looks at it.
  void strange() {
    using Keys = SmallIndexK<SmallFp8>;
    auto stream = Stream<Host>::make({.name = "stranger"}).value();
    for (std::uint32_t round = 0; !stop_; ++round) {
      auto on_device = rig_.template device_ledger<space::Full>().allocate();
      auto on_host = rig_.template host_ledger<space::Full>().allocate();
      if (on_device.ok() && on_host.ok()) {
        auto& pool = rig_.device().template entry<Keys>();
        auto& mirror = rig_.host().template entry<Keys>();
        fill(pool, on_device.value().id(), round);
        const auto moves = plan(std::vector{on_host.value().id()}, std::vector{on_device.value().id()});
        const bool out = backup(pool, mirror, moves, stream).value().wait(deadline_in(60s)).ok();
        fill(pool, on_device.value().id(), round + 1);
        const bool in = load(mirror, pool, moves, stream).value().wait(deadline_in(60s)).ok();
        if (!out || !in || !holds(pool, on_device.value().id(), round)) ++strange_pages_;
        ++strange_moves_;
      }
      on_device = Error{ErrorCode::failed, "given back"};
      on_host = Error{ErrorCode::failed, "given back"};
      std::this_thread::sleep_for(1ms);
    }
    seen_.wrong_pages += strange_pages_;
    seen_.stranger_moves = strange_moves_;
  }

  std::mt19937 random_;
  std::atomic<bool> faults_{true};
  std::atomic<bool> stop_{false};
  std::int64_t strange_pages_ = 0, strange_moves_ = 0;  // of the stranger's thread
  Rig rig_;
  std::deque<Session> running_;
  Seen seen_;
};

// A longer run on request: KVIRE_SOAK_SECONDS of each of four kinds.
std::chrono::steady_clock::time_point until() {
  const char* const seconds = std::getenv("KVIRE_SOAK_SECONDS");
  return std::chrono::steady_clock::now() + std::chrono::seconds(seconds == nullptr ? 0 : std::atoi(seconds));
}

void judge(const Seen& seen, std::int64_t files_hit = 0) {
  const auto& c = seen.counters;
  MESSAGE("soak: " << seen.steps << " steps, " << c.lookups << " lookups, pages hit on device " << c.hit_pages_on[0] << ", host " << c.hit_pages_on[1] << ", read from files "
                   << files_hit << "; tails resumed " << c.resumed_tails << "; evicted from device " << c.tiers[0][0].evicted_pages << ", host "
                   << c.tiers[1][0].evicted_pages << "; steps refused for a failed load " << seen.failed_reads << ", bits flipped " << seen.flips << ", pages found spoiled "
                   << c.tiers[1][0].spoiled_pages + c.tiers[1][1].spoiled_pages << "; the stranger moved " << seen.stranger_moves);
  CHECK(seen.wrong_pages == 0);
  CHECK(seen.finished);
  CHECK(seen.lost_pages == 0);
  CHECK(seen.names == 0);
  CHECK(c.hit_pages_on[0] > 0);
  CHECK(c.hit_pages_on[1] > 0);
  CHECK(c.tiers[0][0].evicted_pages > 0);
  CHECK(c.tiers[1][0].evicted_pages > 0);
  CHECK(seen.stranger_moves > 0);
}
// What two runs together must have met: one alone may be lucky.
void judge_both(const Seen& a, const Seen& b) {
  CHECK(a.counters.resumed_tails_on[0] + b.counters.resumed_tails_on[0] > 0);
  CHECK(a.counters.resumed_tails_on[1] + b.counters.resumed_tails_on[1] > 0);
  CHECK(a.failed_reads + b.failed_reads > 0);
  CHECK(a.counters.tiers[1][0].spoiled_pages + b.counters.tiers[1][0].spoiled_pages > 0);
}

}  // namespace

TEST_CASE("tiered cache soak: random sessions on device and host, copies slow, failing and lying") {
  const Seen back = Sessions<Lru, NoFiles>(1, false, nullptr).run(until(), 2500);
  const Seen through = Sessions<Lfu, NoFiles>(2, true, nullptr).run(until(), 2500);
  judge(back);
  judge(through);
  judge_both(back, through);
}

TEST_CASE("tiered cache soak: two caches over one file tier, whose files are slow, failing and damaged") {
  using Files = FileTier<SmallModel<SmallFp8>, Host, Xxh64, FaultyIo<>>;
  for (const bool write_through : {false, true}) {
    Folder folder;
    const FaultyIo<> io([random = std::mt19937(5)](IoCall call, const std::string&) mutable {
      const auto dice = random() % 64;
      if (call == IoCall::remove) return IoFault::none();  // a file that will not go is a test of its own
      if (dice < 1) return IoFault::fail();
      if (dice < 2) return IoFault::cut(5000);
      if (dice < 3) return IoFault::tear(8192);
      if (dice < 4) return IoFault::flip(static_cast<std::int64_t>(random() % 24576));
      if (dice < 12) return IoFault::slow(std::chrono::microseconds(random() % 2000));
      return IoFault::none();
    });
    constexpr Bytes budget(1 << 20);
    auto files = Files::make({.folder = folder.path, .budget = budget, .workers = 2, .durable = false, .io = io}, SmallSchedule::layers).value();
    const auto end = until();
    Seen other;
    std::thread second([&] { other = Sessions<Lfu, Files>(write_through ? 13u : 14u, write_through, &files).run(end, 3000); });
    const Seen seen = Sessions<Lru, Files>(write_through ? 3u : 4u, write_through, &files).run(end, 3000);
    second.join();
    const auto stats = files.stats();
    judge(seen, stats.hits);
    judge(other, stats.hits);
    judge_both(seen, other);
    CHECK(stats.hits > 0);
    CHECK(stats.hits + stats.all_lost() == stats.loads);
    CHECK(stats.all_lost() > 0);
    CHECK(stats.store_failures > 0);
    CHECK(folder.bytes() <= files.bytes().count);  // a torn file is smaller than what is counted for it
    CHECK(files.bytes() <= budget);
  }
}
