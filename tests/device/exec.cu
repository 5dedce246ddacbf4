// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <chrono>
#include <thread>

#include <kvire/exec/cuda/stream.hpp>
#include <tests/support/cuda_pages.hpp>
#include <tests/support/held.hpp>

using namespace kvire;
using namespace std::chrono_literals;
using kvire_test::clean;
using kvire_test::hold_stream;

TEST_CASE("cuda event: what nobody recorded is unrecorded, and waiting for it never passes") {
  auto stream = Stream<Cuda>::make({.name = "s"}).value();
  auto event = Event<Cuda>::make("layer 0");
  CHECK(event.query() == EventState::unrecorded);
  const Status timeout = event.wait(deadline_in(20ms));
  REQUIRE_FALSE(timeout.ok());
  CHECK(timeout.error().code == ErrorCode::timeout);
  CHECK(kvire_test::contains(timeout.error().message, "never recorded"));
  const Status wait = stream.wait(event);
  REQUIRE_FALSE(wait.ok());
  CHECK(wait.error().code == ErrorCode::busy);
  CHECK_FALSE(stream.wait(Event<Cuda>()).ok());
  CHECK(Event<Cuda>().wait().error().code == ErrorCode::invalid_argument);

  // A reader that comes first blocks until the loader has recorded it, and then until it is done.
  std::thread loader([&] {
    std::this_thread::sleep_for(50ms);
    CHECK(stream.launch([] { std::this_thread::sleep_for(20ms); }).ok());
    CHECK(stream.record(event).ok());
  });
  const auto begin = Clock::now();
  CHECK(event.wait(deadline_in(10s)).ok());
  CHECK(Clock::now() - begin >= 60ms);
  loader.join();
  CHECK(event.query() == EventState::complete);
  CHECK(stream.record(event).error().code == ErrorCode::duplicate);
  CHECK_FALSE(event.complete(Error{ErrorCode::failed, "late"}));
  CHECK(clean());
}

TEST_CASE("cuda event: by hand, with a known failure, on several streams" * doctest::test_suite("held")) {
  auto a = Stream<Cuda>::make({.name = "a"}).value();
  auto b = Stream<Cuda>::make({.name = "b"}).value();
  CHECK(a.identity() != b.identity());
  auto hand = Event<Cuda>::make("hand");
  CHECK(hand.complete(Error{ErrorCode::failed, "no"}));
  CHECK_FALSE(hand.complete());
  CHECK(hand.wait().error().message == "no");
  CHECK(a.wait(hand).error().message == "no");

  auto gate = CopyHold::make();
  CHECK(hold_stream(b, gate).ok());
  auto failing = Event<Cuda>::make("failing");
  CHECK(b.record(failing, Error{ErrorCode::failed, "layer 2"}).ok());
  // It has failed for good only when its work has stopped.
  CHECK(failing.query() == EventState::pending);
  CHECK_FALSE(failing.complete());
  Stream<Cuda> both[] = {a.share(), b.share()};
  auto joint = Event<Cuda>::make("joint");
  CHECK(Stream<Cuda>::record_all(joint, both).ok());
  CHECK(joint.query() == EventState::pending);
  CHECK_FALSE(b.idle());
  CHECK(b.synchronize(deadline_in(10ms)).error().code == ErrorCode::timeout);

  // Work of another stream behind it.
  std::atomic<int> ran{0};
  CHECK(a.wait(joint).ok());
  CHECK(a.launch([&] { ran = 1; }).ok());
  std::this_thread::sleep_for(20ms);
  CHECK(ran == 0);
  gate->release();
  CHECK(a.synchronize(deadline_in(10s)).ok());
  CHECK(ran == 1);
  CHECK(failing.status().error().message == "layer 2");  // by whoever asks first
  CHECK(failing.judged());
  CHECK_FALSE(joint.judged());
  CHECK(failing.wait(deadline_in(10s)).error().message == "layer 2");
  CHECK(failing.query() == EventState::failed);
  CHECK(joint.query() == EventState::complete);
  CHECK(clean());
}

TEST_CASE("cuda event: of several streams, of which some capture" * doctest::test_suite("held")) {
  auto a = Stream<Cuda>::make({.name = "a"}).value();
  auto b = Stream<Cuda>::make({.name = "b"}).value();
  auto c = Stream<Cuda>::make({.name = "c"}).value();
  for (const bool capturing_first : {false, true}) {
    auto gate = CopyHold::make();
    CHECK(hold_stream(a, gate).ok());
    REQUIRE(cudaStreamBeginCapture(b.native(), cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    Stream<Cuda> streams[] = {capturing_first ? b.share() : a.share(), capturing_first ? a.share() : b.share(), c.share()};
    auto joint = Event<Cuda>::make("joint");
    CHECK(Stream<Cuda>::record_all(joint, streams).ok());
    CHECK(joint.query() == EventState::pending);
    Stream<Cuda> captured[] = {b.share()};
    auto none = Event<Cuda>::make("none");
    CHECK(Stream<Cuda>::record_all(none, captured).error().code == ErrorCode::unsupported);
    CHECK(none.query() == EventState::unrecorded);
    CHECK(none.complete());
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(b.native(), &graph) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    CHECK(joint.query() == EventState::pending);
    gate->release();
    CHECK(joint.wait(deadline_in(10s)).ok());
  }
  CHECK(clean());
}

TEST_CASE("cuda stream: adopted, destroyed under its work, capturing" * doctest::test_suite("held")) {
  cudaStream_t native = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&native, cudaStreamNonBlocking) == cudaSuccess);
  auto one = Stream<Cuda>::adopt(native, {.name = "theirs"}).value();
  auto two = Stream<Cuda>::adopt(native).value();
  CHECK(one.identity() == two.identity());
  CHECK(one.device() == 0);
  CHECK(Stream<Cuda>::adopt(native, {.device = 7}).error().code == ErrorCode::mismatch);
  CHECK_FALSE(Stream<Cuda>::make({.device = 1000}).ok());

  std::atomic<int> ran{0};
  {
    auto own = Stream<Cuda>::make().value();
    CHECK(own.launch([&] {
               std::this_thread::sleep_for(10ms);
               ran = 1;
             }).ok());
    auto event = own.record("last");
    CHECK(one.wait(event).ok());
  }
  CHECK(one.synchronize(deadline_in(10s)).ok());
  CHECK(ran == 1);

  auto pending_on = Stream<Cuda>::make().value();
  auto gate = CopyHold::make();
  CHECK(hold_stream(pending_on, gate).ok());
  const auto pending = pending_on.record("pending");
  REQUIRE(cudaStreamBeginCapture(native, cudaStreamCaptureModeGlobal) == cudaSuccess);
  CHECK(one.capturing());
  CHECK(one.wait(pending).error().code == ErrorCode::unsupported);
  CHECK(one.record("captured").status().error().code == ErrorCode::unsupported);
  CHECK(one.synchronize().error().code == ErrorCode::unsupported);
  CHECK(pending.query() == EventState::pending);  // asking does not spoil the capture
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(native, &graph) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
  gate->release();
  CHECK(pending.wait(deadline_in(10s)).ok());
  CHECK(cudaStreamDestroy(native) == cudaSuccess);
  CHECK(clean());
}
