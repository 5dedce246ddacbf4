// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <thread>

#include <kvire/exec/host/stream.hpp>
#include <kvire/sync/progress.hpp>
#include <tests/support/pages.hpp>

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::contains;

namespace {
std::shared_ptr<LoadProgress<Host>> progress_of(int layers) {
  std::vector<std::int32_t> labels;
  for (int i = 0; i < layers; ++i) labels.push_back(10 + i);
  return std::make_shared<LoadProgress<Host>>("load of session 3", labels, Event<Host>::make("done"));
}
}  // namespace

TEST_CASE("progress: a wait on what was never issued does not pass, and says what it waited for") {
  auto progress = progress_of(4);
  const auto status = progress->wait(1, deadline_in(20ms));
  REQUIRE_FALSE(status.ok());
  CHECK(status.error().code == ErrorCode::timeout);
  CHECK(contains(status.error().message, "load of session 3"));
  CHECK(contains(status.error().message, "layer 11"));

  progress->issued(0, Event<Host>::make());
  const auto issue = progress->wait_issued(deadline_in(20ms));
  REQUIRE_FALSE(issue.ok());
  CHECK(issue.error().code == ErrorCode::timeout);
  CHECK(contains(issue.error().message, "layer 11"));  // the first that is missing
}

TEST_CASE("progress: issued is not arrived") {
  auto progress = progress_of(1);
  auto event = Event<Host>::make();
  event.mark_recorded();
  progress->issued(0, event);
  CHECK(progress->wait_issued(deadline_in(1s)).ok());
  CHECK(progress->wait(0, deadline_in(20ms)).error().code == ErrorCode::timeout);
  event.complete();
  CHECK(progress->wait(0).ok());
  CHECK(progress->known(0).ok());
}

TEST_CASE("progress: a failure fails its own and all later layers, whatever they say afterwards") {
  auto progress = progress_of(4);
  for (int i = 0; i < 4; ++i) {
    auto event = Event<Host>::make();
    event.complete();
    progress->issued(i, event);
  }
  progress->fail(2, Error{ErrorCode::failed, "device error 719"});
  CHECK(progress->wait(0).ok());
  CHECK(progress->wait(1).ok());
  for (int i : {2, 3}) {
    const auto status = progress->wait(i);
    REQUIRE_FALSE(status.ok());
    CHECK(status.error().code == ErrorCode::failed);
    CHECK(contains(status.error().message, "device error 719"));
    CHECK(contains(status.error().message, "layer 1" + std::to_string(i)));
    CHECK_FALSE(progress->known(i).ok());
  }
  CHECK_FALSE(progress->wait_all().ok());
  CHECK(progress->wait_issued(deadline_in(1s)).ok());  // earlier layers may still be used

  // A late success changes nothing, a failure further up changes nothing below it.
  auto late = Event<Host>::make();
  late.complete();
  progress->issued(3, late);
  CHECK_FALSE(progress->wait(3).ok());
  progress->fail(3, Error{ErrorCode::failed, "later"});
  CHECK(contains(progress->wait(3).error().message, "719"));
  progress->fail(1, Error{ErrorCode::failed, "earlier"});
  CHECK(progress->wait(0).ok());
  CHECK_FALSE(progress->wait(1).ok());
}

TEST_CASE("progress: an asynchronous failure is seen through the event") {
  auto progress = progress_of(2);
  auto event = Event<Host>::make();
  event.mark_recorded();
  progress->issued(0, event);
  CHECK(progress->known(0).ok());
  event.complete(Error{ErrorCode::failed, "copy failed"});
  CHECK_FALSE(progress->known(0).ok());
  CHECK_FALSE(progress->wait(0).ok());
}

TEST_CASE("progress: dropped without being issued wakes and fails every waiter") {
  auto progress = progress_of(4);
  std::atomic<int> failed{0};
  std::vector<std::thread> waiters;
  for (int i = 0; i < 4; ++i) {
    waiters.emplace_back([&, i] {
      if (!progress->wait(i, deadline_in(10s)).ok()) ++failed;
    });
  }
  waiters.emplace_back([&] {
    if (!progress->wait_issued(deadline_in(10s)).ok()) ++failed;
  });
  std::this_thread::sleep_for(10ms);
  progress->drop();
  for (auto& waiter : waiters) waiter.join();
  CHECK(failed == 5);
  CHECK(contains(progress->wait(0).error().message, "dropped before it was issued"));

  auto issued = progress_of(1);
  auto event = Event<Host>::make();
  event.complete();
  issued->issued(0, event);
  issued->drop();  // too late: everything was issued
  CHECK(issued->wait(0).ok());
}

TEST_CASE("progress: each pool's slots have their own positions") {
  auto progress = progress_of(3);
  auto a = std::make_shared<int>();
  auto b = std::make_shared<int>();
  progress->extent().cover(a, {0, 1, 2});
  progress->extent().cover(b, {-1, 2});
  CHECK(progress->position(a.get(), 1) == 1);
  CHECK(progress->position(b.get(), 0) == -1);
  CHECK(progress->position(b.get(), 1) == 2);
  CHECK(progress->position(b.get(), 2) == -1);
  CHECK(progress->position(b.get(), -1) == -1);
  CHECK(progress->position(nullptr, 0) == -1);
  // Another pool may get the address of one that has gone.
  const void* const address = a.get();
  a.reset();
  CHECK(progress->position(address, 1) == -1);
}
