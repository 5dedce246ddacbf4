// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include <kvire/exec/host/event.hpp>
#include <kvire/exec/host/fault.hpp>
#include <kvire/exec/host/thread.hpp>

KVIRE_NAMESPACE_BEGIN

struct StreamOptions {
  std::string name = "stream";
  std::shared_ptr<FaultHooks> faults = {};            ///< none: copies simply run
  std::chrono::milliseconds wait_limit{30'000};       ///< how long a queued wait blocks before it fails with a timeout
};

/// An in-order asynchronous stream: one worker thread that runs what was queued, in order. All calls are safe from any thread and none waits
/// for the work, except `synchronize` and the destructor, which runs what is queued and joins (held and dropped copies fail at that point).
///
/// Failure. When work fails (a copy, a wait on a failed or never recorded event, a launched function that returns an error), the stream
/// keeps the first error and runs no further work: copies report the error, events recorded afterwards fail with it. So whatever depended
/// on the failed work fails too, instead of reading what never arrived. `synchronize()` hands the error to the host and clears it;
/// `clear_failure()` does the same in stream order, for independent work that follows on the same stream.
template <HostTag Backend>
class Stream<Backend> {
 public:
  using Done = MoveOnlyFunction<void(const Status&)>;

  /// Starts the worker thread. Errors: exhausted, if the system has no thread to give (see detail::start_thread); invalid_argument for a
  /// negative wait_limit.
  static Result<Stream> make(StreamOptions options = {}) {
    if (options.wait_limit.count() < 0) {
      return Error{ErrorCode::invalid_argument,
                   "stream '" + options.name + "': wait_limit is " + std::to_string(options.wait_limit.count()) + " ms, below 0"};
    }
    Stream stream;
    stream.state_ = std::make_shared<State>(std::move(options));
    auto worker = detail::start_thread("stream '" + stream.state_->options.name + "'", [state = stream.state_] { state->run(); });
    if (!worker.ok()) return worker.error();
    stream.state_->worker = std::move(worker).value();
    return Result<Stream>(std::move(stream));
  }

  Stream(Stream&&) noexcept = default;
  Stream& operator=(Stream&& other) noexcept {
    if (this != &other) {
      close();
      state_ = std::move(other.state_);
    }
    return *this;
  }
  ~Stream() { close(); }

  const std::string& name() const { return state_->options.name; }
  /// The same for all handles of one stream, different from every other stream alive.
  const void* identity() const { return state_.get(); }

  /// Queues a function. It may return Status, whose error fails the stream, or anything else, which is ignored.
  template <class F>
  void launch(F&& f) {
    state_->push([f = std::forward<F>(f)](State& state) mutable {
      if (state.error) return;
      if constexpr (std::is_same_v<std::invoke_result_t<std::decay_t<F>&>, Status>) {
        state.fail_if(f());
      } else {
        f();
      }
    });
  }

  /// Queues a copy of `bytes` bytes. Fault hooks see it first. `done`, if given, is called on the worker thread exactly once with what became
  /// of it. Source and destination must stay valid until then.
  void copy(CopyInfo info, void* to, const void* from, std::int64_t bytes, Done done = {}) {
    info.bytes = bytes;
    copy_with(
        info,
        [to, from, bytes] {
          if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
        },
        std::move(done));
  }

  /// The same with a function that moves the bytes (many pages, a relayout); it may return Status. `info.bytes` is the caller's.
  template <class F>
  void copy_with(CopyInfo info, F&& move, Done done = {}) {
    state_->push([info, move = std::forward<F>(move), done = std::move(done)](State& state) mutable {
      const Status status = state.run_copy(info, move);
      if (!state.error) state.fail_if(status);
      if (done) done(status);
    });
  }

  /// Records a new event behind everything queued so far.
  Event<Backend> record(std::string label = {}) {
    auto event = Event<Backend>::make(std::move(label));
    (void)record(event);
    return event;
  }

  /// Records an existing, unrecorded event. Error duplicate: it was recorded or completed already.
  Status record(const Event<Backend>& event) {
    if (!event.mark_recorded()) {
      return Error{ErrorCode::duplicate, "stream '" + name() + "': event '" + event.label() + "' is empty or was recorded before"};
    }
    state_->push([event](State& state) { event.complete(state.status()); });
    return {};
  }

  /// Makes later work wait for the event. A failed event, or one not final within `StreamOptions::wait_limit` (never recorded, for instance),
  /// fails the stream; it never passes.
  void wait(const Event<Backend>& event) {
    state_->push([event](State& state) {
      if (state.error) return;
      const Status status = event.wait(deadline_in(state.options.wait_limit));
      if (!status.ok()) {
        state.error = Error{status.error().code, "stream '" + state.options.name + "': " + status.error().message};
      }
    });
  }

  /// Forgets a failure, in stream order.
  void clear_failure() {
    state_->push([](State& state) { state.error.reset(); });
  }

  /// The same if `condition()` holds when the stream gets there: a transfer forgets its own failure, not one from before it.
  template <class F>
  void clear_failure_if(F condition) {
    state_->push([condition = std::move(condition)](State& state) mutable {
      if (state.error && condition()) state.error.reset();
    });
  }

  /// Waits until everything queued so far has run. Returns, and clears, the stream's first failure. Error timeout: still running; a failure found
  /// later stays with the stream, as nobody has been told of it. Not for the stream's own work, which would wait for itself.
  Status synchronize(Deadline deadline = no_deadline) {
    const auto event = Event<Backend>::make("synchronize " + name());
    const auto answered = std::make_shared<std::atomic<bool>>(false);  // by the stream, or by the deadline: whichever comes first
    event.mark_recorded();
    state_->push([event, answered](State& state) {
      const bool heard = !answered->exchange(true);
      event.complete(state.status());
      if (heard) state.error.reset();
    });
    Status status = event.wait(deadline);
    if (!is_final(event.query()) && answered->exchange(true)) return event.wait();
    return status;
  }

  /// Keeps other threads from queueing anything for as long as the lock lives: for work that belongs together, such as a transfer, whose failure
  /// would otherwise end what another thread queued in its midst, and be forgotten before that is through.
  std::unique_lock<std::recursive_mutex> section() const { return std::unique_lock(state_->queueing); }

  /// True if nothing is queued or running.
  bool idle() const {
    std::lock_guard lock(state_->mutex);
    return state_->queue.empty() && !state_->running;
  }

 private:
  struct State {
    explicit State(StreamOptions o) : options(std::move(o)) {}

    using Task = MoveOnlyFunction<void(State&)>;

    void push(Task task) {
      std::lock_guard section(queueing);
      std::lock_guard lock(mutex);
      queue.push_back(std::move(task));
      changed.notify_all();
    }

    void run() {
      std::unique_lock lock(mutex);
      for (;;) {
        changed.wait(lock, [&] { return !queue.empty() || stopping.load(std::memory_order_acquire); });
        if (queue.empty()) return;
        {
          Task task = std::move(queue.front());
          queue.pop_front();
          running = true;
          lock.unlock();
          task(*this);
          // What the task captured (page holds, tickets) is destroyed before the next one runs and outside the lock.
        }
        lock.lock();
        running = false;
      }
    }

    template <class F>
    Status run_copy(CopyInfo info, F& move) {
      info.index = copies++;
      if (error) return *error;
      const Fault fault = options.faults ? options.faults->decide(info) : Fault::none();
      switch (fault.kind) {
        case Fault::Kind::none: break;
        case Fault::Kind::delay: std::this_thread::sleep_for(fault.time); break;
        case Fault::Kind::fail: return describe(info, fault.message);
        case Fault::Kind::skip: return {};
        case Fault::Kind::drop: {
          std::unique_lock lock(mutex);
          changed.wait(lock, [&] { return stopping.load(std::memory_order_acquire); });
          return describe(info, "was dropped");
        }
        case Fault::Kind::hold:
          if (fault.gate && !fault.gate->hold(stopping)) return describe(info, "was still held when the stream was destroyed");
          break;
      }
      if constexpr (std::is_same_v<std::invoke_result_t<F&>, Status>) {
        return move();
      } else {
        move();
        return {};
      }
    }

    Error describe(const CopyInfo& info, const std::string& what) const {
      return Error{ErrorCode::failed, "stream '" + options.name + "': copy " + std::to_string(info.index) + " of entry '" + info.entry +
                                          "', layer " + std::to_string(info.layer) + ", " + name_of(info.direction) + ": " + what};
    }

    Status status() const { return error ? Status(*error) : Status(); }
    void fail_if(const Status& status) {
      if (!status.ok()) error = status.error();
    }

    const StreamOptions options;
    std::recursive_mutex queueing;  // before `mutex`; never held while work runs
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Task> queue;
    bool running = false;
    std::atomic<bool> stopping{false};
    // Only the worker thread touches these.
    std::optional<Error> error;
    std::int64_t copies = 0;
    std::thread worker;
  };

  Stream() = default;

  void close() {
    if (!state_) return;
    {
      std::lock_guard lock(state_->mutex);
      state_->stopping.store(true, std::memory_order_release);
      state_->changed.notify_all();
    }
    // The last handle may die inside the stream's own work; the worker then ends by itself, keeping its state alive.
    if (state_->worker.get_id() == std::this_thread::get_id()) {
      state_->worker.detach();
    } else if (state_->worker.joinable()) {
      state_->worker.join();
    }
    state_.reset();
  }

  std::shared_ptr<State> state_;
};

KVIRE_NAMESPACE_END
