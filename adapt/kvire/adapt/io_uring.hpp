// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <liburing.h>

#include <deque>
#include <memory>
#include <mutex>

#include <kvire/tier/block_io.hpp>

KVIRE_NAMESPACE_BEGIN

namespace adapt {

/// Reads and writes through io_uring (liburing 2.2 or newer): all pieces of all files of a batch are under way at once. Where the system refuses
/// io_uring, as many containers do, it works as PosixIo; `name()` says so. Link kvire::liburing.
class UringIo {
 public:
  UringIo() : UringIo(32, std::int64_t{1} << 20) {}
  /// `depth`: pieces of `piece_bytes` bytes under way at once, of each worker.
  UringIo(unsigned depth, std::int64_t piece_bytes) : shared_(std::make_shared<Shared>()) {
    shared_->depth = depth;
    shared_->piece_bytes = align_up(max_of<std::int64_t>(piece_bytes, 1), record_alignment);
    shared_->put(shared_->take());
  }

  /// False if the system refuses io_uring.
  bool works() const { return shared_->works; }
  std::string name() const { return works() ? "io_uring" : "posix (io_uring is refused here)"; }

  void read(std::span<FileRead> reads) const {
    auto ring = shared_->take();
    if (!ring) return PosixIo().read(reads);
    std::vector<Piece> pieces;
    std::vector<detail::FileHandle> files;
    for (auto& r : reads) {
      std::int64_t wanted = 0;
      files.push_back(detail::begin_read(r, wanted));
      if (files.back()) split(pieces, files.back().get(), r.data, wanted, files.size() - 1);
    }
    run(*ring, pieces, false);
    for (std::size_t i = 0, at = 0; i < reads.size(); ++i) {
      if (files[i]) collect(pieces, at, i, reads[i].moved, reads[i].status, "reading", reads[i].path);
    }
    shared_->put(std::move(ring));
  }

  void write(std::span<FileWrite> writes) const {
    auto ring = shared_->take();
    if (!ring) return PosixIo().write(writes);
    std::vector<Piece> pieces;
    std::vector<detail::FileHandle> files;
    for (auto& w : writes) {
      files.push_back(detail::begin_write(w));
      if (files.back()) split(pieces, files.back().get(), const_cast<std::byte*>(w.data), w.bytes, files.size() - 1);
    }
    run(*ring, pieces, true);
    for (std::size_t i = 0, at = 0; i < writes.size(); ++i) {
      if (!files[i]) continue;
      collect(pieces, at, i, writes[i].moved, writes[i].status, "writing", writes[i].path);
      if (writes[i].status.ok()) detail::end_write(writes[i], files[i]);
    }
    shared_->put(std::move(ring));
  }

  Status publish(const std::string& from, const std::string& to, bool durable) const { return PosixIo().publish(from, to, durable); }
  Status remove(const std::string& path) const { return PosixIo().remove(path); }
  void touch(const std::string& path) const { PosixIo().touch(path); }
  Result<std::vector<FileInfo>> list(const std::string& folder) const { return PosixIo().list(folder); }
  Result<std::shared_ptr<void>> lock(const std::string& folder) const { return PosixIo().lock(folder); }

 protected:  // for tests, which hand it files that refuse
  struct Ring {
    ~Ring() {
      if (open) io_uring_queue_exit(&ring);
    }
    io_uring ring = {};
    bool open = false;
  };
  // One ring a worker that is inside: they are kept, since making one costs more than a read.
  struct Shared {
    std::unique_ptr<Ring> take() {
      {
        std::lock_guard lock(mutex);
        if (!works) return {};
        if (!rings.empty()) {
          auto ring = std::move(rings.back());
          rings.pop_back();
          return ring;
        }
      }
      auto ring = std::make_unique<Ring>();
      ring->open = io_uring_queue_init(depth, &ring->ring, 0) == 0;
      if (ring->open) return ring;
      std::lock_guard lock(mutex);
      works = !rings.empty();
      return {};
    }
    void put(std::unique_ptr<Ring> ring) {
      std::lock_guard lock(mutex);
      if (ring) rings.push_back(std::move(ring));
    }
    std::mutex mutex;
    std::vector<std::unique_ptr<Ring>> rings;
    unsigned depth = 0;
    std::int64_t piece_bytes = 0;
    bool works = true;
  };
  struct Piece {
    int file = -1;
    std::byte* data = nullptr;
    std::int64_t offset = 0;
    std::int64_t bytes = 0;
    std::size_t owner = 0;
    std::int64_t moved = 0;
    int error = 0;
  };

  void split(std::vector<Piece>& pieces, int file, std::byte* data, std::int64_t bytes, std::size_t owner) const {
    for (std::int64_t at = 0; at < bytes; at += shared_->piece_bytes) {
      pieces.push_back({.file = file, .data = data + at, .offset = at, .bytes = min_of(shared_->piece_bytes, bytes - at), .owner = owner});
    }
  }

  void run(Ring& ring, std::vector<Piece>& pieces, bool write) const {
    std::deque<std::size_t> waiting;
    for (std::size_t i = 0; i < pieces.size(); ++i) waiting.push_back(i);
    unsigned under_way = 0;
    while (!waiting.empty() || under_way > 0) {
      while (!waiting.empty() && under_way < shared_->depth) {
        io_uring_sqe* const entry = io_uring_get_sqe(&ring.ring);
        if (entry == nullptr) break;
        Piece& p = pieces[waiting.front()];
        const auto bytes = static_cast<unsigned>(p.bytes - p.moved);
        const auto offset = static_cast<__u64>(p.offset + p.moved);
        write ? io_uring_prep_write(entry, p.file, p.data + p.moved, bytes, offset) : io_uring_prep_read(entry, p.file, p.data + p.moved, bytes, offset);
        io_uring_sqe_set_data64(entry, waiting.front());
        waiting.pop_front();
        ++under_way;
      }
      // What was submitted writes into the caller's memory: it is waited for whatever happens.
      (void)io_uring_submit_and_wait(&ring.ring, 1);
      io_uring_cqe* done = nullptr;
      while (io_uring_peek_cqe(&ring.ring, &done) == 0) {
        const auto index = static_cast<std::size_t>(io_uring_cqe_get_data64(done));
        const int result = done->res;
        io_uring_cqe_seen(&ring.ring, done);
        --under_way;
        Piece& p = pieces[index];
        if (result > 0) p.moved += result;
        if (result < 0 && result != -EINTR && result != -EAGAIN) p.error = -result;
        if (p.error == EINVAL) finish_slowly(p, write);
        if (result != 0 && p.error == 0 && p.moved < p.bytes) waiting.push_back(index);
      }
    }
  }

  // What is refused around the system's cache goes through it.
  static void finish_slowly(Piece& p, bool write) {
    const bool ok = detail::move_all(p.file, p.bytes, p.moved, [&](std::int64_t at) {
      const auto rest = static_cast<std::size_t>(p.bytes - at);
      return write ? ::pwrite(p.file, p.data + at, rest, p.offset + at) : ::pread(p.file, p.data + at, rest, p.offset + at);
    });
    p.error = ok ? 0 : errno;
    p.bytes = p.moved;
  }

  // Bytes up to the first gap, and the first error, of the pieces of one file.
  static void collect(const std::vector<Piece>& pieces, std::size_t& at, std::size_t owner, std::int64_t& moved, Status& status, const char* what,
                      const std::string& path) {
    bool whole = true;
    for (; at < pieces.size() && pieces[at].owner == owner; ++at) {
      const Piece& p = pieces[at];
      if (p.error != 0 && status.ok()) {
        errno = p.error;
        status = detail::system_error(what, path);
      }
      if (whole) moved += p.moved;
      whole = whole && p.moved == p.bytes;
    }
  }

  std::shared_ptr<Shared> shared_;
};

}  // namespace adapt

KVIRE_NAMESPACE_END
