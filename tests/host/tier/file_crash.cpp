// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <random>
#include <thread>

#include <tests/support/file_tier_case.hpp>

using namespace kvire;
using namespace kvire_test;
using namespace std::chrono_literals;

namespace {

using Small = SmallHost<SmallFp8>;
using Tier = FileTier<Small::Model, Host>;
constexpr const char* variable = "KVIRE_TEST_FILE_TIER_FOLDER";
constexpr std::uint64_t keys = 24;
constexpr std::int64_t budget = 12 * 16'384;  // half of the keys

Tier open(const std::string& folder) { return Tier::make({.folder = folder, .budget = Bytes(budget), .workers = 2}).value(); }

}  // namespace

// Runs in a process of its own, until it is killed.
TEST_CASE("file crash: the child that stores and erases without end" * doctest::skip()) {
  const char* folder = getenv(variable);
  if (folder == nullptr) return;
  Small host(64);
  auto tier = open(folder);
  std::mt19937 random(static_cast<unsigned>(getpid()));
  for (;;) {
    std::vector<Event<Host>> events;
    for (int i = 0; i < 8; ++i) {
      const std::uint64_t key = random() % keys;
      if (random() % 4 == 0) tier.erase(key_of(key));
      auto refs = host.allocate();
      host.fill(refs, static_cast<std::uint32_t>(key + 1));
      events.push_back(tier.store(key_of(key), host.pool, std::move(refs)));
    }
    for (const auto& event : events) (void)event.wait();
  }
}

TEST_CASE("file crash: killed at random moments, the folder has whole records only and serves the next process") {
  Folder folder;
  std::mt19937 random(11);
  std::int64_t hits = 0;
  std::int64_t temporaries = 0;
  setenv(variable, folder.path.c_str(), 1);
  for (int round = 0; round < 12; ++round) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      // A fresh process: threads of this one do not exist there.
      execl("/proc/self/exe", "kvire_tests", "--test-case=file crash: the child*", "--no-skip", "--quiet", static_cast<char*>(nullptr));
      _exit(127);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(60 + random() % 200));
    kill(child, SIGKILL);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(WIFSIGNALED(status));  // else the child could not do its work
    CHECK(folder.bytes() <= budget);

    Small host;
    auto tier = open(folder.path);
    temporaries += tier.stats().found_temporaries;
    CHECK(tier.bytes().count == folder.bytes());
    for (std::uint64_t key = 0; key < keys; ++key) {
      auto refs = host.allocate();
      const bool there = tier.contains(key_of(key));
      const auto loaded = tier.load(key_of(key), host.pool, refs).wait();
      CHECK(loaded.ok() == there);
      if (loaded.ok()) CHECK(host.holds(refs, static_cast<std::uint32_t>(key + 1)));
      hits += loaded.ok() ? 1 : 0;
    }
    CHECK(tier.stats().all_lost() == tier.stats().lost_for(RecordFault::absent));
  }
  unsetenv(variable);
  CHECK(hits > 0);
  MESSAGE(hits << " hits after 12 kills, " << temporaries << " temporary files found");
}
