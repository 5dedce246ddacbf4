// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

#include <kvire/memory/huge_page.hpp>
#include <kvire/tier/file_folder.hpp>
#include <kvire/tier/file_record.hpp>
#include <kvire/tier/file_seals.hpp>
#include <kvire/tier/file_workers.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// The folder, whatever the layouts of its records: FileTier knows these.
template <Checksum Sum, BlockIo Io>
class FileStore : public FileFolder<Io> {
 public:
  struct Store {
    RecordKey key = {};
    RecordShape shape = {};                    ///< placed
    std::vector<const std::byte*> pages = {};  ///< section by section, slot by slot
    std::shared_ptr<void> owner = {};          ///< of the pages; goes before the event completes
    RecordSeals seals = {};                    ///< compared before anything is written
  };
  struct Load {
    RecordKey key = {};
    RecordShape shape = {};  ///< with pages only in the spaces asked for
    MoveOnlyFunction<void(const std::byte* record, const RecordHeader&)> consume = {};  ///< called for a hit only
    std::shared_ptr<void> owner = {};
  };

  /// Errors: invalid_argument for an option; busy if another tier has the folder; exhausted if there is no thread to be had; what the system says
  /// about the folder.
  static Result<std::unique_ptr<FileStore>> make(FileTierOptions<Io> options) {
    if (Status ok = check_options(options); !ok.ok()) return ok.error();
    auto lock = options.io.lock(options.folder);
    if (!lock.ok()) return Error{lock.error().code, options.name + ": " + lock.error().message};
    auto store = std::unique_ptr<FileStore>(new FileStore(std::move(options), std::move(lock).value()));
    if (auto status = store->recover(); !status.ok()) return status.error();
    if (auto status = store->workers_.start(store->options_.name, store->options_.workers); !status.ok()) return status.error();
    return Result<std::unique_ptr<FileStore>>(std::move(store));
  }

  Event<Host> store(Store work) {
    const Hash128 id = record_id(work.key, work.shape.layout, work.shape.layers);
    const RecordPages pages = work.shape.pages_by_space();
    std::lock_guard lock(mutex_);
    ++stats_.stores;
    if (const auto* file = index_.find(id); file != nullptr && covers(file->pages, pages)) return done({});
    bool fresh = false;
    if (index_.storing() >= options_.queued_stores && !index_.is_storing(id)) {
      ++stats_.stores_refused;
      return done(Error{ErrorCode::busy, options_.name + ": " + std::to_string(options_.queued_stores) + " stores are under way"});
    }
    auto event = index_.begin_store(id, pages, fresh);
    if (fresh) {
      workers_.store([this, id, work = std::move(work), event](int worker) mutable { run_store(id, work, event, worker); });
    } else if (!event.valid()) {
      ++stats_.stores_refused;
      return done(Error{ErrorCode::busy, options_.name + ": another store, or the removal, of record " + hex_text(id).c_str() + " is under way"});
    }
    return event;
  }

  std::vector<Event<Host>> load(std::vector<Load> loads) {
    std::vector<Event<Host>> events;
    std::vector<Loading> batch;
    std::int64_t batch_bytes = 0;
    std::lock_guard lock(mutex_);
    for (auto& load : loads) {
      ++stats_.loads;
      const Hash128 id = record_id(load.key, load.shape.layout, load.shape.layers);
      auto found = index_.begin_load(id);
      if (!found) {
        lose(RecordFault::absent, "record " + std::string(hex_text(id).c_str()) + ": is not in the folder");
        events.push_back(done(Error{ErrorCode::stale, options_.name + ": record " + hex_text(id).c_str() + " is not there"}));
        continue;
      }
      events.push_back(Event<Host>::make("load of record " + std::string(hex_text(id).c_str())));
      events.back().mark_recorded();
      const std::int64_t bytes = bytes_to_read(load.shape, load.key, found->first.bytes);
      if (!batch.empty() && (batch.size() == static_cast<std::size_t>(options_.batch) || batch_bytes + bytes > options_.batch_bytes.count)) {
        post(std::exchange(batch, {}));
        batch_bytes = 0;
      }
      batch_bytes += bytes;
      batch.push_back({std::move(load), std::move(found->first), found->second, events.back(), bytes});
    }
    if (!batch.empty()) post(std::move(batch));
    return events;
  }

  /// Memory that the workers keep for what they move.
  Bytes workspace() const { return Bytes(workspace_.load(std::memory_order_relaxed)); }

 private:
  struct Loading {
    Load load;
    RecordFile file;
    std::uint64_t serial;
    Event<Host> event;
    std::int64_t bytes;  // to read
  };

  using FileFolder<Io>::index_;
  using FileFolder<Io>::io;
  using FileFolder<Io>::lose;
  using FileFolder<Io>::mutex_;
  using FileFolder<Io>::options_;
  using FileFolder<Io>::path;
  using FileFolder<Io>::stats_;

  FileStore(FileTierOptions<Io> options, std::shared_ptr<void> folder_lock)
      : FileFolder<Io>(std::move(options), std::move(folder_lock)), staging_(static_cast<std::size_t>(options_.workers)) {}

  static Event<Host> done(const Status& status) {
    auto event = Event<Host>::make();
    event.complete(status);
    return event;
  }
  void post(std::vector<Loading> batch) {
    workers_.load([this, batch = std::move(batch)](int worker) mutable { run_load(batch, worker); });
  }

  // Memory of a worker for `bytes` bytes. Kept, because fresh pages would cost a fault each.
  Result<std::byte*> memory(int worker, std::int64_t bytes) {
    auto& buffer = staging_[static_cast<std::size_t>(worker)];
    if (buffer.bytes() < bytes) {
      workspace_ -= buffer.bytes();
      buffer = {};
      auto made = BasicBuffer<HugePageMemory>::make({}, align_up(bytes, HugePageMemory::huge_page), record_alignment);
      if (!made.ok()) return made.error();
      buffer = std::move(made).value();
      workspace_ += buffer.bytes();
    }
    return buffer.data();
  }

  void run_load(std::vector<Loading>& batch, int worker) {
    const auto start = Clock::now();
    std::int64_t bytes = 0;
    for (const auto& loading : batch) bytes += align_up(loading.bytes, record_alignment);
    std::vector<FileRead> reads(batch.size());
    auto buffer = memory(worker, max_of(bytes, record_alignment));
    if (buffer.ok()) {
      std::byte* at = buffer.value();
      for (std::size_t i = 0; i < batch.size(); ++i) {
        reads[i] = {.path = path(batch[i].file), .data = at, .bytes = align_up(batch[i].bytes, record_alignment)};
        at += reads[i].bytes;
      }
      io().read(reads);
    } else {
      for (auto& read : reads) read.status = buffer.error();
    }
    for (std::size_t i = 0; i < batch.size(); ++i) end_load(batch[i], reads[i], i + 1 == batch.size() ? start : Clock::time_point::max());
  }

  void end_load(Loading& loading, const FileRead& read, Clock::time_point start) {
    RecordHeader header;
    std::optional<RecordProblem> problem;
    if (!read.status.ok()) {
      problem = RecordProblem{read.absent ? RecordFault::absent : RecordFault::io_error, read.status.error().message};
    } else if (read.moved < min_of(read.bytes, read.file_bytes)) {
      problem = RecordProblem{RecordFault::io_error, std::to_string(read.moved) + " of " + std::to_string(read.file_bytes) + " bytes were read"};
    } else {
      problem = check_record<Sum>(read.data, read.moved, read.file_bytes, loading.load.key, loading.load.shape, header);
    }
    if (!problem) {
      loading.load.consume(read.data, header);
      io().touch(path(loading.file));  // so that the order of use survives a restart
    }
    loading.load = Load{.key = std::move(loading.load.key)};
    const bool keep = !problem || problem->fault == RecordFault::io_error || problem->fault == RecordFault::pages;
    Status status;
    bool remove_file = false;
    {
      std::lock_guard lock(mutex_);
      remove_file = index_.end_load(loading.file.id, loading.serial, !keep);
      if (start != Clock::time_point::max()) stats_.reads.add(since(start));
      if (problem) {
        const std::string what = "record " + record_file_name(loading.file.id, loading.file.pages) + ": " + name_of(problem->fault) + ": " + problem->what;
        lose(problem->fault, what);
        const bool gone = problem->fault == RecordFault::absent;
        status = Error{gone ? ErrorCode::stale : problem->fault == RecordFault::io_error ? ErrorCode::failed : ErrorCode::mismatch,
                       options_.name + ": " + what};
      } else {
        ++stats_.hits;
        stats_.hit_tokens += loading.load.key.token_count;
        stats_.hit_bytes += read.moved;
      }
    }
    // What is damaged makes room for a new store of the same record.
    if (remove_file) this->remove({loading.file});
    loading.event.complete(status);
  }

  void run_store(const Hash128& id, Store& work, const Event<Host>& event, int worker) {
    const auto start = Clock::now();
    RecordFile file{id, work.shape.pages_by_space(), work.shape.record_bytes()};
    const Status status = write_record(file, work, worker);
    work.owner.reset();
    std::vector<RecordFile> surplus;
    {
      std::lock_guard lock(mutex_);
      stats_.writes.add(since(start));
      if (status.ok()) {
        ++stats_.stored;
        stats_.stored_bytes += file.bytes;
        std::optional<RecordFile> replaced;
        if (!index_.finish_store(file, replaced)) surplus.push_back(file);
        if (replaced) surplus.push_back(std::move(*replaced));
      } else {
        index_.abort_store(id);
        ++(status.error().code == ErrorCode::exhausted ? stats_.stores_refused : stats_.store_failures);
      }
    }
    this->remove(surplus);
    event.complete(status);
  }

  // Makes room, writes under a temporary name, and gives the file its own. On failure nothing of it is left, in the folder or the budget.
  Status write_record(const RecordFile& file, Store& work, int worker) {
    std::unique_lock room(room_);
    std::unique_lock lock(mutex_);
    auto victims = index_.reserve(file.bytes);
    if (!victims) {
      return Error{ErrorCode::exhausted, options_.name + ": " + std::to_string(file.bytes) + " bytes for a record, and a budget of " +
                                             std::to_string(options_.budget.count) + " with " + std::to_string(index_.bytes()) + " in use"};
    }
    lock.unlock();
    FileWrite write{.path = path(file) + "." + std::to_string(++temporaries_) + ".tmp", .bytes = file.bytes, .durable = options_.durable};
    Status status;
    bool written = false;
    auto buffer = memory(worker, file.bytes);
    const bool evicted = this->evict(*victims);
    room.unlock();
    if (!evicted) {
      status = Error{ErrorCode::failed, options_.name + ": an evicted file could not be removed, so there is no room for another"};
    } else if (!buffer.ok()) {
      status = buffer.error();
    } else {
      build_record<Sum>(buffer.value(), work.key, work.shape, work.pages);
      status = work.seals.check(buffer.value(), work.shape);
      if (status.ok()) {
        write.data = buffer.value();
        io().write(std::span(&write, 1));
        written = true;
        status = write.status;
      }
      if (status.ok() && write.moved != file.bytes) {
        status = Error{ErrorCode::failed, write.path + ": " + std::to_string(write.moved) + " of " + std::to_string(file.bytes) + " bytes written"};
      }
      if (status.ok()) status = io().publish(write.path, path(file), options_.durable);
    }
    if (status.ok()) return status;
    // Its own name too: a folder that could not be synced may have it already.
    const bool gone = !written || (io().remove(write.path).ok() && io().remove(path(file)).ok());
    lock.lock();
    if (gone) index_.unreserve(file.bytes);
    stats_.removal_failures += gone ? 0 : 1;
    return Error{status.error().code, options_.name + ": " + status.error().message};
  }

  static std::int64_t since(Clock::time_point start) { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count(); }

  std::mutex room_;  // of who makes room: a second one would take more out for what the first has not removed yet
  std::atomic<std::int64_t> temporaries_{0};
  std::atomic<std::int64_t> workspace_{0};
  std::vector<BasicBuffer<HugePageMemory>> staging_;  // one a worker
  FileWorkers workers_;                               // last: ends before what its jobs refer to
};

}  // namespace detail

KVIRE_NAMESPACE_END
