// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

#include <kvire/exec/host/fault.hpp>
#include <kvire/tier/block_io.hpp>

KVIRE_NAMESPACE_BEGIN

/// What happens to one read or write of a file instead of simply happening.
struct IoFault {
  enum class Kind : unsigned char {
    none,
    fail,  ///< the bytes move, and an error is reported: nobody may count on either
    cut,   ///< only the first `at` bytes move, and the count says so
    tear,  ///< only the first `at` bytes of a write arrive, and success is reported: what a lying disk or a lost write-back leaves
    flip,  ///< the lowest bit of byte `at` arrives inverted
  };
  Kind kind = Kind::none;
  std::int64_t at = 0;
  std::chrono::microseconds delay{0};     ///< first
  std::shared_ptr<CopyHold> hold = {};    ///< after the delay: until it is released

  static IoFault none() { return {}; }
  static IoFault fail() { return {.kind = Kind::fail}; }
  static IoFault cut(std::int64_t at) { return {.kind = Kind::cut, .at = at}; }
  static IoFault tear(std::int64_t at) { return {.kind = Kind::tear, .at = at}; }
  static IoFault flip(std::int64_t at) { return {.kind = Kind::flip, .at = at}; }
  static IoFault slow(std::chrono::microseconds delay) { return {.delay = delay}; }
  static IoFault held(std::shared_ptr<CopyHold> hold) { return {.hold = std::move(hold)}; }
};

enum class IoCall : unsigned char { read, write, publish, remove };

/// Another BlockIo that is slow, fails, cuts and damages as told. The callable runs on the tier's workers, one call at a time. `publish` and
/// `remove` can be slow, held or fail (without effect).
template <BlockIo Io = PosixIo>
class FaultyIo {
 public:
  using Decide = MoveOnlyFunction<IoFault(IoCall, const std::string& path)>;

  FaultyIo() : FaultyIo(Decide()) {}
  explicit FaultyIo(Decide decide, Io io = {}) : io_(std::move(io)), shared_(std::make_shared<Shared>()) { set(std::move(decide)); }

  /// Replaces the decision from the next call on; an empty one means no faults.
  void set(Decide decide) {
    std::lock_guard lock(shared_->mutex);
    shared_->decide = std::move(decide);
  }

  std::string name() const { return "faulty " + io_.name(); }

  void read(std::span<FileRead> reads) {
    for (auto& r : reads) {
      const IoFault fault = begin(IoCall::read, r.path);
      io_.read(std::span(&r, 1));
      if (fault.kind == IoFault::Kind::cut || fault.kind == IoFault::Kind::tear) r.moved = min_of(r.moved, fault.at);
      if (fault.kind == IoFault::Kind::flip && fault.at < r.moved) r.data[fault.at] ^= std::byte{1};
      if (fault.kind == IoFault::Kind::fail) r.status = injected(r.path);
    }
  }

  void write(std::span<FileWrite> writes) {
    for (auto& w : writes) {
      const IoFault fault = begin(IoCall::write, w.path);
      FileWrite inner = w;
      std::vector<std::byte> copy;
      if (fault.kind == IoFault::Kind::cut || fault.kind == IoFault::Kind::tear) inner.bytes = min_of(inner.bytes, fault.at);
      if (fault.kind == IoFault::Kind::flip && fault.at < w.bytes) {
        copy.assign(w.data, w.data + w.bytes);
        copy[static_cast<std::size_t>(fault.at)] ^= std::byte{1};
        inner.data = copy.data();
      }
      io_.write(std::span(&inner, 1));
      w.status = fault.kind == IoFault::Kind::fail ? injected(w.path) : inner.status;
      w.moved = fault.kind == IoFault::Kind::tear ? w.bytes : inner.moved;
    }
  }

  Status publish(const std::string& from, const std::string& to, bool durable) {
    return begin(IoCall::publish, to).kind == IoFault::Kind::fail ? injected(to) : io_.publish(from, to, durable);
  }
  Status remove(const std::string& path) {
    return begin(IoCall::remove, path).kind == IoFault::Kind::fail ? injected(path) : io_.remove(path);
  }
  void touch(const std::string& path) { io_.touch(path); }
  Result<std::vector<FileInfo>> list(const std::string& folder) { return io_.list(folder); }
  Result<std::shared_ptr<void>> lock(const std::string& folder) { return io_.lock(folder); }

 private:
  struct Shared {
    std::mutex mutex;
    Decide decide;
  };

  IoFault begin(IoCall call, const std::string& path) {
    IoFault fault;
    {
      std::lock_guard lock(shared_->mutex);
      if (shared_->decide) fault = shared_->decide(call, path);
    }
    if (fault.delay.count() > 0) std::this_thread::sleep_for(fault.delay);
    const std::atomic<bool> never{false};
    if (fault.hold) (void)fault.hold->hold(never);
    return fault;
  }
  static Status injected(const std::string& path) { return Error{ErrorCode::failed, "injected failure of '" + path + "'"}; }

  Io io_;
  std::shared_ptr<Shared> shared_;
};

KVIRE_NAMESPACE_END
