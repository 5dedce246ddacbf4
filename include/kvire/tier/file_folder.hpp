// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <mutex>

#include <kvire/base/sort.hpp>
#include <kvire/base/units.hpp>
#include <kvire/tier/block_io.hpp>
#include <kvire/tier/file_index.hpp>
#include <kvire/tier/file_stats.hpp>

KVIRE_NAMESPACE_BEGIN

template <BlockIo Io = PosixIo>
struct FileTierOptions {
  std::string folder = {};   ///< made if need be, but not what it is in: a disk that is not mounted is not replaced by a folder of that name
  Bytes budget = {};         ///< of the folder's records, temporary files included; never exceeded
  int workers = 4;           ///< threads that read, write and verify, 256 at most; each keeps memory for what it moves
  int batch = 8;             ///< records that one worker reads with one call, at most
  Bytes batch_bytes = Bytes(std::int64_t{32} << 20);  ///< and their bytes, at most (but for a single larger record): a worker keeps this much memory
  int queued_stores = 64;    ///< stores under way, at most: each keeps its pages owned
  bool durable = true;       ///< a store is done when it survives a loss of power; without it a crash of the system may cost records, never a wrong hit
  std::string name = "file tier";
  Io io = {};
};

/// Success, or invalid_argument with the option that is wrong.
template <BlockIo Io>
Status check_options(const FileTierOptions<Io>& options) {
  const auto bad = [&](const char* option, std::int64_t value, const std::string& bound) {
    return Error{ErrorCode::invalid_argument, options.name + ": " + option + " is " + std::to_string(value) + "; " + bound};
  };
  if (options.folder.empty()) return Error{ErrorCode::invalid_argument, options.name + ": no folder is named"};
  if (options.budget.count < record_alignment) return bad("budget", options.budget.count, "the smallest record has " + std::to_string(record_alignment) + " bytes");
  if (options.workers < 1 || options.workers > 256) return bad("workers", options.workers, "from 1 to 256 can be");
  if (options.batch < 1) return bad("batch", options.batch, "at least one record is read at once");
  if (options.batch_bytes.count < 1) return bad("batch_bytes", options.batch_bytes.count, "at least 1; a single larger record is read all the same");
  if (options.queued_stores < 1) return bad("queued_stores", options.queued_stores, "at least one store must be able to be under way");
  return {};
}

namespace detail {

/// The folder of a file tier and what is known of it: index, counts, removal of files. Thread-safe.
template <BlockIo Io>
class FileFolder {
 public:
  const FileTierOptions<Io>& options() const { return options_; }

  /// Pages by space of a record that is there.
  std::optional<RecordPages> find(const Hash128& id) const {
    std::lock_guard lock(mutex_);
    const auto* file = index_.find(id);
    return file == nullptr ? std::nullopt : std::optional(file->pages);
  }

  bool erase(const Hash128& id) {
    std::unique_lock lock(mutex_);
    const auto file = index_.erase(id);
    if (!file) return false;
    lock.unlock();
    remove({*file});
    return true;
  }

  Bytes bytes() const {
    std::lock_guard lock(mutex_);
    return Bytes(index_.bytes());
  }
  std::int64_t records() const {
    std::lock_guard lock(mutex_);
    return index_.records();
  }
  FileTierStats stats() const {
    std::lock_guard lock(mutex_);
    return stats_;
  }

 protected:
  FileFolder(FileTierOptions<Io> options, std::shared_ptr<void> folder_lock)
      : options_(std::move(options)), folder_lock_(std::move(folder_lock)), index_(options_.budget.count) {}

  // A handle: copies do the same.
  Io io() const { return options_.io; }
  std::string path(const RecordFile& file) const { return options_.folder + "/" + record_file_name(file.id, file.pages); }
  void lose(RecordFault fault, std::string what) {
    ++stats_.lost[static_cast<int>(fault)];
    stats_.last_lost[static_cast<int>(fault)] = std::move(what);
  }

  // The folder is the index: what has a record's name is one, whole or found out when it is read. Without a lock: nobody knows the tier yet.
  Status recover() {
    auto files = io().list(options_.folder);
    if (!files.ok()) return Error{files.error().code, options_.name + ": " + files.error().message};
    sort(files.value(), [](const FileInfo& a, const FileInfo& b) { return a.modified != b.modified ? a.modified < b.modified : a.name < b.name; });
    std::vector<RecordFile> surplus;
    for (const auto& info : files.value()) {
      auto name = parse_record_file_name(info.name);
      const auto dot = info.name.rfind('.');
      if (name) {
        if (auto twin = index_.add({name->first, std::move(name->second), info.bytes})) surplus.push_back(std::move(*twin));
      } else if (dot != std::string::npos && info.name.substr(dot) == ".tmp" && info.name.find(".kvire.") != std::string::npos) {
        ++stats_.found_temporaries;
        if (auto status = io().remove(options_.folder + "/" + info.name); !status.ok()) return status;
      } else if (info.name != "lock") {
        ++stats_.found_foreign;
      }
    }
    remove(surplus);
    stats_.found_records = index_.records();
    if (const auto victims = index_.reserve(0)) evict(*victims);
    return {};
  }

  // The caller has taken the files out of the index, and holds no lock.
  bool remove(const std::vector<RecordFile>& files) {
    bool all = true;
    for (const auto& file : files) {
      const bool gone = io().remove(path(file)).ok();
      std::lock_guard lock(mutex_);
      index_.removed(file, gone);
      stats_.removal_failures += gone ? 0 : 1;
      all = all && gone;
    }
    return all;
  }
  bool evict(const std::vector<RecordFile>& victims) {
    {
      std::lock_guard lock(mutex_);
      for (const auto& victim : victims) stats_.evicted_bytes += victim.bytes;
      stats_.evictions += static_cast<std::int64_t>(victims.size());
    }
    return remove(victims);
  }

  const FileTierOptions<Io> options_;
  const std::shared_ptr<void> folder_lock_;
  mutable std::mutex mutex_;  // of the index and the counts
  FileIndex index_;
  FileTierStats stats_;
};

}  // namespace detail

KVIRE_NAMESPACE_END
