// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <random>

#include <kvire/tier/file_tier.hpp>
#include <tests/support/tier_case.hpp>

using namespace kvire;
using namespace kvire_test;
using namespace std::chrono_literals;

namespace {

/// Random sessions on all tiers at once, with pressure, aborts, and copies that are slow or fail: every page that a step reads must have the bytes that
/// its prefix says, and every page comes back at the end.
template <class Policy, class Files>
class Sessions {
 public:
  using Rig = TierRig<Policy, Files>;

  Sessions(unsigned seed, bool write_through, Files* files)
      : random_(seed), rig_({.device = 14, .host = 20, .options = {.window_tokens = 20, .write_through = write_through, .batch_pages = 3, .room_limit = 2000ms}}, files) {
    const auto faults = [this](unsigned salt) {
      return [this, random = std::mt19937(salt)](const CopyInfo&) mutable {
        const auto dice = random() % 100;
        if (dice < 1 && faults_) return Fault::fail();
        if (dice < 5) return Fault::delay(std::chrono::microseconds(random() % 500));
        return Fault::none();
      };
    };
    rig_.load_faults().set(faults(seed * 2 + 1));
    rig_.store_faults().set(faults(seed * 2 + 2));
  }

  void run(std::chrono::steady_clock::time_point until, std::int64_t least_steps) {
    for (std::int64_t i = 0; i < least_steps || std::chrono::steady_clock::now() < until; ++i) step();
    faults_ = false;
    running_.clear();
    CHECK(rig_.cache().finish(deadline_in(60s)));
    rig_.cache().clear();
    CHECK(rig_.used_pages() == 0);
    CHECK(rig_.cache().cache().pages() == 0);
    CHECK(rig_.wrong_pages() == 0);
    const auto& counters = rig_.cache().counters();
    MESSAGE("sessions: " << counters.lookups << " lookups, pages hit on device " << counters.hit_pages_on[0] << ", host " << counters.hit_pages_on[1]
                         << ", tails " << counters.resumed_tails_on[0] << " and " << counters.resumed_tails_on[1] << ", loads failed " << failed_reads_ << ", pages to host " << counters.tiers[1][0].arrived_pages << ", files " << counters.tiers[2][0].arrived_pages);
    CHECK(counters.hit_pages_on[0] > 0);
    CHECK(counters.hit_pages_on[1] > 0);
    CHECK(counters.resumed_tails_on[0] > 0);
    CHECK(counters.resumed_tails_on[1] > 0);
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
    switch (random_() % 10) {
      case 0:
      case 1: begin(); break;
      case 2: end(); break;
      case 3: rig_.cache().make_room(static_cast<std::int64_t>(random_() % 4)); break;
      case 4: rig_.cache().poll(); break;
      case 5: read(); break;
      case 6: park(); break;
      case 7: resume(); break;
      default: grow(); break;
    }
  }
  void begin() {
    if (running_.size() == 3) end();
    Session session;
    for (auto n = random_() % 5; n > 0; --n) extend(session.tokens);
    if constexpr (Rig::Cache::has_files) {
      if (random_() % 2 == 0) (void)rig_.cache().prefetch(rig_.root(), session.tokens);
      if (random_() % 4 == 0) CHECK(rig_.cache().finish(deadline_in(60s)));
    }
    session.held = rig_.cache().acquire(rig_.root(), session.tokens);
    running_.push_back(std::move(session));
    if (random_() % 8 == 0) running_.pop_back();  // aborted, with its load under way
  }
  void end() {
    if (!running_.empty()) running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(random_() % running_.size()));
  }
  void read() {
    if (running_.empty()) return;
    const std::size_t at = random_() % running_.size();
    if (rig_.read(running_[at].held).ok()) return;
    // A load has failed: who depends on it begins anew.
    ++failed_reads_;
    rig_.cache().poll();
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(at));
  }
  // What follows a prefix in the few texts that there are: less than a page of it.
  typename Rig::Tokens tail() { return Rig::text(1 + static_cast<int>(random_() % 2), 3 + 6 * static_cast<std::int64_t>(random_() % 3)); }
  void park() {
    if (running_.empty()) return;
    const Session& session = running_[random_() % running_.size()];
    (void)rig_.park(session.held, tail());
  }
  void resume() {
    if (running_.empty()) return;
    const std::size_t at = random_() % running_.size();
    if (rig_.resume(running_[at].held, tail()).ok()) return;
    ++failed_reads_;
    rig_.cache().poll();
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(at));
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

  std::mt19937 random_;
  std::atomic<bool> faults_{true};
  Rig rig_;
  std::deque<Session> running_;
  std::int64_t failed_reads_ = 0;
};

// A longer run on request: KVIRE_SOAK_SECONDS of each kind.
std::chrono::steady_clock::time_point until() {
  const char* const seconds = std::getenv("KVIRE_SOAK_SECONDS");
  return std::chrono::steady_clock::now() + std::chrono::seconds(seconds == nullptr ? 0 : std::atoi(seconds));
}

}  // namespace

TEST_CASE("tiered cache soak: random sessions on device and host, copies slow and failing") {
  Sessions<Lru, NoFiles>(1, false, nullptr).run(until(), 1000);
  Sessions<Lfu, NoFiles>(2, true, nullptr).run(until(), 1000);
}

TEST_CASE("tiered cache soak: the same with files") {
  using Files = FileTier<SmallModel<SmallFp8>, Host>;
  for (const bool write_through : {false, true}) {
    Folder folder;
    auto files = Files::make({.folder = folder.path, .budget = Bytes(1 << 20), .workers = 2, .durable = false}, SmallSchedule::layers).value();
    Sessions<Lru, Files>(write_through ? 3u : 4u, write_through, &files).run(until(), 800);
  }
}
