// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <kvire/exec/host/stream.hpp>

using namespace kvire;
using namespace std::chrono_literals;

TEST_CASE("stream: work runs in order, asynchronously") {
  auto stream = Stream<Host>::make({.name = "s"}).value();
  std::vector<int> order;
  auto gate = Event<Host>::make("gate");
  stream.wait(gate);
  for (int i = 0; i < 100; ++i) stream.launch([&order, i] { order.push_back(i); });
  auto event = stream.record();
  CHECK(event.query() == EventState::pending);  // nothing ran: the gate is closed
  CHECK_FALSE(stream.idle());
  gate.complete();
  CHECK(event.wait(deadline_in(10s)).ok());
  CHECK(event.query() == EventState::complete);
  REQUIRE(order.size() == 100);
  for (int i = 0; i < 100; ++i) CHECK(order[static_cast<std::size_t>(i)] == i);
}

TEST_CASE("stream: work may own what cannot be copied, and frees it on the worker") {
  auto stream = Stream<Host>::make().value();
  auto owned = std::make_unique<int>(7);
  int seen = 0;
  stream.launch([owned = std::move(owned), &seen] { seen = *owned; });
  CHECK(stream.synchronize().ok());
  CHECK(seen == 7);
}

TEST_CASE("stream: an event nobody recorded never passes") {
  auto event = Event<Host>::make("load of layer 2");
  const auto host = event.wait(deadline_in(20ms));
  REQUIRE_FALSE(host.ok());
  CHECK(host.error().code == ErrorCode::timeout);
  CHECK(host.error().message.find("never recorded") != std::string::npos);
  CHECK(host.error().message.find("load of layer 2") != std::string::npos);

  auto stream = Stream<Host>::make({.name = "compute", .faults = {}, .wait_limit = 20ms}).value();
  bool ran = false;
  stream.wait(event);
  stream.launch([&] { ran = true; });
  auto after = stream.record();
  const auto status = stream.synchronize();
  REQUIRE_FALSE(status.ok());
  CHECK(status.error().code == ErrorCode::timeout);
  CHECK_FALSE(ran);
  CHECK(after.query() == EventState::failed);

  CHECK_FALSE(Event<Host>().wait().ok());  // an empty handle fails at once
}

TEST_CASE("stream: a reader that arrives before the recording blocks and then sees the work") {
  auto loader = Stream<Host>::make({.name = "loader"}).value();
  auto reader = Stream<Host>::make({.name = "reader"}).value();
  auto event = Event<Host>::make();
  int value = 0;
  int seen = -1;
  reader.wait(event);
  reader.launch([&] { seen = value; });
  std::thread late([&] {
    std::this_thread::sleep_for(50ms);
    loader.launch([&] { value = 42; });
    CHECK(loader.record(event).ok());
  });
  CHECK(reader.synchronize(deadline_in(10s)).ok());
  late.join();
  CHECK(seen == 42);
  const auto again = loader.record(event);  // one-shot
  REQUIRE_FALSE(again.ok());
  CHECK(again.error().code == ErrorCode::duplicate);
}

TEST_CASE("event: the first final state stays") {
  auto event = Event<Host>::make();
  CHECK(event.complete(Error{ErrorCode::failed, "aborted"}));
  CHECK_FALSE(event.complete());
  CHECK(event.query() == EventState::failed);
  CHECK(event.wait().error().message == "aborted");
  CHECK(event.status().error().message == "aborted");
}

TEST_CASE("stream: a failure reaches everything behind it, and what is cleared runs again") {
  auto hooks = FaultHooks::make([](const CopyInfo& info) { return info.index == 2 ? Fault::fail("injected") : Fault::none(); });
  auto stream = Stream<Host>::make({.name = "loader", .faults = hooks}).value();
  int from[4] = {1, 2, 3, 4};
  int to[4] = {};
  std::vector<Event<Host>> events;
  std::atomic<int> reported{0};
  for (int layer = 0; layer < 4; ++layer) {
    stream.copy({.entry = "index_k", .layer = layer, .direction = CopyDirection::host_to_device}, &to[layer], &from[layer], sizeof(int),
                [&reported](const Status& s) { reported += s.ok() ? 1 : 100; });
    events.push_back(stream.record("layer " + std::to_string(layer)));
  }
  const auto status = stream.synchronize();
  REQUIRE_FALSE(status.ok());
  CHECK(status.error().message.find("index_k") != std::string::npos);
  CHECK(status.error().message.find("layer 2") != std::string::npos);
  CHECK(reported == 202);
  CHECK(events[0].query() == EventState::complete);
  CHECK(events[1].query() == EventState::complete);
  CHECK(events[2].query() == EventState::failed);
  CHECK(events[3].query() == EventState::failed);
  CHECK(to[1] == 2);
  CHECK(to[2] == 0);
  CHECK(to[3] == 0);
  // synchronize handed the error over: the retry runs
  stream.copy({}, &to[2], &from[2], sizeof(int));
  CHECK(stream.synchronize().ok());
  CHECK(to[2] == 3);
}

TEST_CASE("stream: a launched function can fail the stream; clear_failure starts afresh in order") {
  auto stream = Stream<Host>::make().value();
  stream.launch([]() -> Status { return Error{ErrorCode::out_of_range, "page 9"}; });
  auto failed = stream.record();
  stream.clear_failure();
  auto fine = stream.record();
  CHECK(fine.wait(deadline_in(10s)).ok());
  CHECK(failed.wait().error().code == ErrorCode::out_of_range);
  CHECK(stream.synchronize().ok());
}

TEST_CASE("stream: delay, hold, skip and drop") {
  auto hold = CopyHold::make();
  auto hooks = FaultHooks::make();
  int from = 5;
  int to = 0;
  SUBCASE("delay copies in the end") {
    hooks->set([](const CopyInfo&) { return Fault::delay(5ms); });
    auto stream = Stream<Host>::make({.faults = hooks}).value();
    stream.copy({}, &to, &from, sizeof to);
    CHECK(stream.synchronize().ok());
    CHECK(to == 5);
  }
  SUBCASE("hold keeps the copy open until released") {
    hooks->set([&](const CopyInfo& info) { return info.layer == 1 ? Fault::hold(hold) : Fault::none(); });
    auto stream = Stream<Host>::make({.faults = hooks}).value();
    stream.copy({.layer = 1}, &to, &from, sizeof to);
    auto event = stream.record();
    REQUIRE(hold->wait_reached(deadline_in(10s)));
    CHECK(event.query() == EventState::pending);
    CHECK(event.wait(deadline_in(5ms)).error().code == ErrorCode::timeout);
    hold->release();
    CHECK(event.wait(deadline_in(10s)).ok());
    CHECK(to == 5);
  }
  SUBCASE("skip reports success and moves nothing") {
    hooks->set([](const CopyInfo&) { return Fault::skip(); });
    auto stream = Stream<Host>::make({.faults = hooks}).value();
    stream.copy({}, &to, &from, sizeof to);
    CHECK(stream.synchronize().ok());
    CHECK(to == 0);
  }
  SUBCASE("drop never completes while the stream lives, and fails with it") {
    hooks->set([](const CopyInfo&) { return Fault::drop(); });
    Event<Host> event;
    {
      auto stream = Stream<Host>::make({.faults = hooks}).value();
      stream.copy({.entry = "latent"}, &to, &from, sizeof to);
      event = stream.record();
      CHECK(event.wait(deadline_in(20ms)).error().code == ErrorCode::timeout);
      CHECK(stream.synchronize(deadline_in(5ms)).error().code == ErrorCode::timeout);
    }
    CHECK(event.query() == EventState::failed);
    CHECK(event.status().error().message.find("dropped") != std::string::npos);
    CHECK(to == 0);
  }
  SUBCASE("a hold nobody releases ends with its stream") {
    hooks->set([&](const CopyInfo&) { return Fault::hold(hold); });
    Event<Host> event;
    {
      auto stream = Stream<Host>::make({.faults = hooks}).value();
      stream.copy({}, &to, &from, sizeof to);
      event = stream.record();
      REQUIRE(hold->wait_reached(deadline_in(10s)));
    }
    CHECK(event.query() == EventState::failed);
    CHECK(to == 0);
  }
}

TEST_CASE("stream: many threads queue into streams that wait for each other") {
  auto a = Stream<Host>::make({.name = "a"}).value();
  auto b = Stream<Host>::make({.name = "b"}).value();
  constexpr int threads = 4;
  constexpr int rounds = 200;
  std::vector<int> cells(threads * rounds, 0);
  std::vector<int> sums(threads * rounds, 0);
  std::vector<std::thread> pushers;
  for (int t = 0; t < threads; ++t) {
    pushers.emplace_back([&, t] {
      for (int r = 0; r < rounds; ++r) {
        const auto i = static_cast<std::size_t>(t * rounds + r);
        a.launch([&cells, i] { cells[i] = static_cast<int>(i) + 1; });
        auto done = a.record();
        b.wait(done);
        b.launch([&sums, &cells, i] { sums[i] = cells[i]; });
      }
    });
  }
  for (auto& p : pushers) p.join();
  CHECK(b.synchronize(deadline_in(60s)).ok());
  for (std::size_t i = 0; i < sums.size(); ++i) REQUIRE(sums[i] == static_cast<int>(i) + 1);
}

TEST_CASE("stream: a failure that comes after synchronize gave up is still there for the next one") {
  auto stream = Stream<Host>::make().value();
  auto hold = CopyHold::make();
  const std::atomic<bool> never{false};
  stream.launch([&]() -> Status {
    hold->hold(never);
    return Error{ErrorCode::failed, "late"};
  });
  CHECK(stream.synchronize(deadline_in(5ms)).error().code == ErrorCode::timeout);
  hold->release();
  bool ran = false;
  stream.launch([&] { ran = true; });
  CHECK(stream.synchronize(deadline_in(10s)).error().message == "late");
  CHECK_FALSE(ran);
  CHECK(stream.synchronize(deadline_in(10s)).ok());  // told once
}

TEST_CASE("stream: nothing of another thread is queued into a section") {
  auto stream = Stream<Host>::make().value();
  std::vector<int> order;
  std::optional section(stream.section());
  stream.launch([&] { order.push_back(1); });
  std::thread other([&] { stream.launch([&] { order.push_back(3); }); });
  std::this_thread::sleep_for(5ms);
  stream.launch([&] { order.push_back(2); });
  section.reset();
  other.join();
  CHECK(stream.synchronize(deadline_in(10s)).ok());
  CHECK(order == std::vector{1, 2, 3});
}

TEST_CASE("stream: destroyed inside its own work") {
  auto done = Event<Host>::make();
  {
    auto stream = std::make_unique<Stream<Host>>(Stream<Host>::make().value());
    auto* raw = stream.get();
    raw->launch([stream = std::move(stream), done]() mutable {
      stream.reset();
      done.complete();
    });
  }
  CHECK(done.wait(deadline_in(10s)).ok());
}

TEST_CASE("stream: a wait limit below nothing is refused") {
  const auto negative = Stream<Host>::make({.name = "s", .wait_limit = -1ms});
  REQUIRE_FALSE(negative.ok());
  CHECK(negative.error().message == "stream 's': wait_limit is -1 ms, below 0");
}

#if KVIRE_EXCEPTIONS
TEST_CASE("threads: a system that has none to give is an error, not the end of the process") {
  // Fails as std::thread does, and where it does.
  struct Refused {
    Refused() = default;
    Refused(const Refused&) { throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again)); }
    void operator()() const {}
  };
  const Refused refused;
  const auto thread = detail::start_thread("stream 's'", refused);
  REQUIRE_FALSE(thread.ok());
  CHECK(thread.error().code == ErrorCode::exhausted);
  CHECK(thread.error().message.find("stream 's': no thread to be had: ") == 0);
}
#endif

TEST_CASE("deadlines: beyond the clock is without end, below nothing is now") {
  CHECK(deadline_in(std::chrono::milliseconds::max()) == no_deadline);
  CHECK(deadline_in(std::chrono::hours::max()) == no_deadline);
  CHECK(deadline_in(std::chrono::milliseconds::min()) < Clock::now() + 1s);
  const Deadline soon = deadline_in(10s);
  CHECK(soon > Clock::now() + 5s);
  CHECK(soon < Clock::now() + 11s);
}
