// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include <kvire/exec/cuda/event.hpp>
#include <kvire/exec/function.hpp>
#include <kvire/exec/host/fault.hpp>

KVIRE_NAMESPACE_BEGIN

struct CudaStreamOptions {
  std::string name = "stream";
  int device = -1;                         ///< -1: the current one
  int priority = 0;                        ///< of a stream that is made: lower is sooner
  std::shared_ptr<FaultHooks> faults = {};  ///< for transfers queued here: fail and skip at once, delay and hold in stream order
};

/// An in-order CUDA stream that knows its device. Owns a non-blocking stream of its own (`make`) or borrows one (`adopt`). All calls are safe
/// from any thread, none but `synchronize` waits for the work, and none leaves an error behind in the runtime. What was queued on a stream of
/// its own still runs after the handle has gone.
template <>
class Stream<Cuda> {
 public:
  /// A new stream. Errors of the runtime.
  static Result<Stream> make(CudaStreamOptions options = {}) {
    if (options.device < 0) {
      auto device = current_device();
      if (!device.ok()) return device.error();
      options.device = device.value();
    }
    int devices = 0;
    if (const cudaError_t e = cudaGetDeviceCount(&devices); e != cudaSuccess) return detail::cuda_error(e, "stream '" + options.name + "'");
    if (options.device >= devices) {
      return Error{ErrorCode::out_of_range, "stream '" + options.name + "': device " + std::to_string(options.device) + " is not below " + std::to_string(devices)};
    }
    detail::DeviceScope scope(options.device);
    detail::RelaxedCapture relaxed;
    cudaStream_t native = nullptr;
    if (const cudaError_t e = cudaStreamCreateWithPriority(&native, cudaStreamNonBlocking, options.priority); e != cudaSuccess) {
      return detail::cuda_error(e, "stream '" + options.name + "' on device " + std::to_string(options.device));
    }
    return wrap(native, true, std::move(options));
  }

  /// Somebody else's stream, which must outlive this object and every lease used on it. `options.device` need not be given.
  /// Error mismatch: it is given and the stream belongs to another one.
  static Result<Stream> adopt(cudaStream_t native, CudaStreamOptions options = {}) {
    int device = 0;
    if (const cudaError_t e = cudaStreamGetDevice(native, &device); e != cudaSuccess) return detail::cuda_error(e, "adopting stream '" + options.name + "'");
    if (options.device >= 0 && options.device != device) {
      return Error{ErrorCode::mismatch, "stream '" + options.name + "' belongs to device " + std::to_string(device) + ", not " +
                                            std::to_string(options.device)};
    }
    options.device = device;
    return wrap(native, false, std::move(options));
  }

  Stream(Stream&&) noexcept = default;
  Stream& operator=(Stream&&) noexcept = default;

  const std::string& name() const { return state_->options.name; }
  int device() const { return state_->options.device; }
  cudaStream_t native() const { return state_->native; }
  const std::shared_ptr<FaultHooks>& faults() const { return state_->options.faults; }
  /// The same for all handles of one stream, different from every other stream of the process, past ones included.
  const void* identity() const { return state_->identity; }

  /// True while work queued here goes into a graph instead of running.
  bool capturing() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    (void)cudaStreamIsCapturing(native(), &status);
    return status != cudaStreamCaptureStatusNone;
  }

  /// Queues a function of the host, which must not call CUDA; work queued later waits for it. Errors of the runtime.
  template <class F>
  Status launch(F&& f) {
    using Function = MoveOnlyFunction<void()>;
    auto function = std::make_unique<Function>(std::forward<F>(f));
    const auto run = [](void* p) {
      std::unique_ptr<Function> owned(static_cast<Function*>(p));
      (*owned)();
    };
    if (const cudaError_t e = cudaLaunchHostFunc(native(), run, function.get()); e != cudaSuccess) return error(e, "queueing a host function");
    (void)function.release();
    return {};
  }

  /// Records a new event behind everything queued so far. If that fails the event has failed already.
  Event<Cuda> record(std::string label = {}) {
    auto event = Event<Cuda>::make(std::move(label));
    if (Status status = record(event); !status.ok()) (void)event.complete(status);
    return event;
  }

  /// Records an existing, unrecorded event. With `known`, the failure of the work that it stands for, the event fails when that work has ended.
  /// With a `verdict`, that is asked when it has ended, by whoever asks the event first, and its error is the event's. Streams that wait for the
  /// event do not wait for the verdict.
  /// Errors: duplicate, if it was recorded or completed before; unsupported, on a capturing stream (what is captured has not run, and an event
  /// of a graph cannot be asked); those of the runtime.
  Status record(const Event<Cuda>& event, const Status& known = {}, MoveOnlyFunction<Status()> verdict = {}) {
    return record_all(event, std::span(this, 1), known, std::move(verdict));
  }

  /// Makes an event stand for the work queued so far on several streams of one device, but for those that capture. `known`, `verdict` and errors as for
  /// one; unsupported, if all of them capture. Errors of the runtime fail the event instead once it stands for some of the streams: when their work has ended.
  template <class Streams>
  static Status record_all(const Event<Cuda>& event, Streams&& streams, const Status& known = {}, MoveOnlyFunction<Status()> verdict = {}) {
    if (!event.valid()) return Error{ErrorCode::duplicate, "an empty event cannot be recorded"};
    auto& state = *event.state_;
    std::lock_guard lock(state.mutex);
    if (state.state.load(std::memory_order_acquire) != EventState::unrecorded) return Error{ErrorCode::duplicate, "event '" + event.label() + "' was recorded before"};
    Status captured;
    Status failed;
    for (Stream& stream : streams) {
      Status status = stream.mark(state);
      if (!status.ok()) (void)((status.error().code == ErrorCode::unsupported ? captured : failed) = std::move(status));
    }
    if (state.marks.empty()) return failed.ok() ? captured : failed;
    if (const Status& error = known.ok() ? failed : known; !error.ok()) state.error = error.error();
    state.verdict = std::move(verdict);
    state.state.store(EventState::pending, std::memory_order_release);
    state.changed.notify_all();
    return {};
  }

  /// Makes later work wait for the event. Never passes on what was not recorded: error busy then; mismatch for an event of another device;
  /// the event's failure if it has failed; unsupported on a capturing stream unless the event is complete.
  Status wait(const Event<Cuda>& event) {
    if (!event.valid()) return Error{ErrorCode::invalid_argument, "stream '" + name() + "': waiting on an empty event: it stands for no work"};
    switch (event.query()) {
      case EventState::complete: return {};
      case EventState::failed: return event.status();
      case EventState::unrecorded:
        return Error{ErrorCode::busy, "stream '" + name() + "': event '" + event.label() + "' was never recorded: there is nothing to wait for yet"};
      case EventState::pending: break;
    }
    std::lock_guard lock(event.state_->mutex);
    if (event.state_->marks.empty()) {
      return Error{ErrorCode::busy, "stream '" + name() + "': event '" + event.label() + "' is completed by hand, which a CUDA stream cannot wait for"};
    }
    if (event.device() != device()) {
      return Error{ErrorCode::mismatch, "stream '" + name() + "' of device " + std::to_string(device()) + ": event '" + event.label() +
                                            "' belongs to device " + std::to_string(event.device())};
    }
    if (capturing()) {
      return Error{ErrorCode::unsupported, "stream '" + name() + "' is capturing: event '" + event.label() +
                                               "' is pending, and a replay would not wait for it; wait before the capture"};
    }
    for (cudaEvent_t mark : event.state_->marks) {
      if (const cudaError_t e = cudaStreamWaitEvent(native(), mark, 0); e != cudaSuccess) return error(e, "waiting for event '" + event.label() + "'");
    }
    return {};
  }

  /// Blocks until everything queued so far has run. Error timeout: still running; otherwise the runtime's.
  Status synchronize(Deadline deadline = no_deadline) {
    if (capturing()) return Error{ErrorCode::unsupported, "stream '" + name() + "' is capturing: nothing queued on it runs"};
    return record("synchronize " + name()).wait(deadline);
  }

  /// True if nothing is queued or running.
  bool idle() const {
    detail::RelaxedCapture relaxed;
    const cudaError_t e = cudaStreamQuery(native());
    if (e != cudaSuccess && cudaPeekAtLastError() == e) (void)cudaGetLastError();
    return e == cudaSuccess;
  }

  /// Another handle of the same stream: keeps a stream that is owned alive.
  Stream share() const { return Stream(state_); }

  /// A second stream for work that goes beside this one's, made at the first call and the same at every later one. Nothing orders the two but events.
  /// Errors of the runtime.
  Result<Stream> companion() {
    std::lock_guard lock(state_->mutex);
    if (!state_->companion) {
      auto made = make({.name = name() + ", beside", .device = device(), .priority = state_->options.priority});
      if (!made.ok()) return made.error();
      state_->companion = made.value().state_;
    }
    return Stream(state_->companion);
  }

  Error error(cudaError_t e, const std::string& what) const {
    return detail::cuda_error(e, "stream '" + name() + "' of device " + std::to_string(device()) + ": " + what);
  }

 private:
  struct State {
    cudaStream_t native = nullptr;
    bool owned = false;
    const void* identity = nullptr;
    CudaStreamOptions options;
    std::mutex mutex;
    std::shared_ptr<State> companion;
    ~State() {
      detail::RelaxedCapture relaxed;
      if (owned) (void)cudaStreamDestroy(native);  // its work runs on
    }
  };
  explicit Stream(std::shared_ptr<State> state) : state_(std::move(state)) {}

  static Result<Stream> wrap(cudaStream_t native, bool owned, CudaStreamOptions options) {
    auto state = std::make_shared<State>();
    state->native = native;
    state->owned = owned;
    state->options = std::move(options);
    unsigned long long id = 0;
    if (const cudaError_t e = cudaStreamGetId(native, &id); e != cudaSuccess) return detail::cuda_error(e, "identity of stream '" + state->options.name + "'");
    state->identity = reinterpret_cast<const void*>(static_cast<std::uintptr_t>(id) * 2 + 1);
    return Result<Stream>(Stream(std::move(state)));
  }

  // What is queued so far, into an event that is locked and unrecorded. `unsupported` only where it captures.
  Status mark(Event<Cuda>::State& state) {
    if (capturing()) {
      return Error{ErrorCode::unsupported, "stream '" + name() + "' is capturing: event '" + state.label + "' would stand for work that has not run"};
    }
    auto native_event = detail::EventCache::get().take(device());
    if (!native_event.ok()) return native_event.error();
    if (const cudaError_t e = cudaEventRecord(native_event.value(), native()); e != cudaSuccess) {
      detail::EventCache::get().give(device(), native_event.value());
      return error(e, "recording event '" + state.label + "'");
    }
    state.device.store(device(), std::memory_order_release);
    state.marks.push_back(native_event.value());
    return {};
  }

  std::shared_ptr<State> state_;
};

KVIRE_NAMESPACE_END
