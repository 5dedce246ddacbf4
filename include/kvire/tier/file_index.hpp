// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <kvire/exec/host/event.hpp>
#include <kvire/tier/record.hpp>

KVIRE_NAMESPACE_BEGIN

/// True if a record with pages `a` serves whoever asks for pages `b`.
inline bool covers(const RecordPages& a, const RecordPages& b) {
  for (std::size_t i = 0; i < b.size(); ++i) {
    if (b[i] != 0 && (i >= a.size() || a[i] != b[i])) return false;
  }
  return true;
}

/// Name of a record's file: its id, then its pages by space, as in `14c354d30e8259f80bd1c9f2a3b4c5d6-1.1.0.kvire`.
inline std::string record_file_name(const Hash128& id, const RecordPages& pages) {
  std::string name = hex_text(id).c_str();
  for (std::size_t i = 0; i < pages.size(); ++i) {
    name += i == 0 ? '-' : '.';
    name += std::to_string(pages[i]);
  }
  return name + ".kvire";
}

/// The reverse; nothing if it is not a record's name.
inline std::optional<std::pair<Hash128, RecordPages>> parse_record_file_name(const std::string& name) {
  constexpr std::size_t digits = 32;
  const std::string ending = ".kvire";
  if (name.size() < digits + 2 + ending.size() || name.compare(name.size() - ending.size(), ending.size(), ending) != 0) return {};
  Hash128 id;
  for (std::size_t i = 0; i < digits; ++i) {
    const char c = name[i];
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (digit < 0) return {};
    (i < 16 ? id.high : id.low) = (i < 16 ? id.high : id.low) << 4 | static_cast<std::uint64_t>(digit);
  }
  RecordPages pages;
  for (std::size_t at = digits; at < name.size() - ending.size();) {
    std::int32_t count = 0;
    std::size_t end = at + 1;
    for (; end < name.size() - ending.size() && name[end] >= '0' && name[end] <= '9' && count < 100'000'000; ++end) count = count * 10 + (name[end] - '0');
    if (end == at + 1) return {};
    pages.push_back(count);
    at = end;
  }
  if (record_file_name(id, pages) != name) return {};
  return std::pair(id, std::move(pages));
}

namespace detail {

struct HashOfId {
  std::size_t operator()(const Hash128& id) const { return static_cast<std::size_t>(id.high); }
};

/// A file of the tier.
struct RecordFile {
  Hash128 id = {};
  RecordPages pages = {};
  std::int64_t bytes = 0;
};

/// What is in the folder, in memory: which records, in the order of their last use, and how many bytes. The folder itself is the index that
/// persists: names are complete, and a file has its name only once all of it is there. Not thread-safe.
template <HostTag Backend>
class BasicFileIndex {
 public:
  explicit BasicFileIndex(std::int64_t budget) : budget_(budget) {}

  std::int64_t budget() const { return budget_; }
  /// On disk or about to be, those being removed included.
  std::int64_t bytes() const { return bytes_; }
  std::int64_t records() const { return static_cast<std::int64_t>(ready_.size()); }

  const RecordFile* find(const Hash128& id) const {
    const auto at = ready_.find(id);
    return at == ready_.end() ? nullptr : &at->second.file;
  }

  /// A record that is there, as the most recently used. One that it replaces is returned: its file is to be removed.
  std::optional<RecordFile> add(RecordFile file) {
    bytes_ += file.bytes;
    return insert(std::move(file));
  }

  /// A store that begins. Its event, which is another store's if one of these pages is under way (`fresh` is false then); an empty one if the
  /// name is not free: a store of other pages, or one that was erased, is under way, or a file of that name is being removed.
  Event<Backend> begin_store(const Hash128& id, const RecordPages& pages, bool& fresh) {
    const auto at = storing_.find(id);
    fresh = false;
    if (at == storing_.end() && leaving_ids_.count(id) > 0) return {};
    fresh = at == storing_.end();
    if (!fresh) return !at->second.erased && covers(at->second.pages, pages) ? at->second.event : Event<Backend>();
    Storing& storing = storing_[id];
    storing.pages = pages;
    storing.event = Event<Backend>::make("store of record " + std::string(hex_text(id).c_str()));
    storing.event.mark_recorded();
    return storing.event;
  }
  bool is_storing(const Hash128& id) const { return storing_.count(id) > 0; }
  std::int64_t storing() const { return static_cast<std::int64_t>(storing_.size()); }

  /// Reserves bytes: picks the least recently used records that must go first and that nobody is loading. Nothing if all of them are not enough.
  /// Files that others took out count until they are removed: nobody may write in their place before.
  std::optional<std::vector<RecordFile>> reserve(std::int64_t bytes) {
    std::vector<RecordFile> victims;
    std::int64_t after = bytes_ + bytes;
    for (auto it = recent_.rbegin(); after > budget_ && it != recent_.rend(); ++it) {
      const Ready& ready = ready_.at(*it);
      if (ready.loads > 0) continue;
      victims.push_back(ready.file);
      after -= ready.file.bytes;
    }
    if (after > budget_) return {};
    for (const auto& victim : victims) take(ready_.find(victim.id));
    bytes_ += bytes;
    return victims;
  }
  /// A file that was taken out has gone; if it would not go, its bytes stay counted.
  void removed(const RecordFile& file, bool gone) {
    if (gone) bytes_ -= file.bytes;
    leaving_ids_.erase(leaving_ids_.find(file.id));
  }
  /// A reservation that came to nothing.
  void unreserve(std::int64_t bytes) { bytes_ -= bytes; }

  /// A stored file has its name. False if its record was erased meanwhile: it is to be removed.
  bool finish_store(RecordFile file, std::optional<RecordFile>& replaced) {
    const auto at = storing_.find(file.id);
    const bool erased = at->second.erased;
    storing_.erase(at);
    if (erased) {
      leaving_ids_.insert(file.id);
    } else {
      replaced = insert(std::move(file));
    }
    return !erased;
  }
  void abort_store(const Hash128& id) { storing_.erase(id); }

  /// Pins a record against eviction and makes it the most recent; its serial for `end_load`. Nothing if it is not there.
  std::optional<std::pair<RecordFile, std::uint64_t>> begin_load(const Hash128& id) {
    const auto at = ready_.find(id);
    if (at == ready_.end()) return {};
    ++at->second.loads;
    recent_.splice(recent_.begin(), recent_, at->second.recent);
    return std::pair(at->second.file, at->second.serial);
  }
  /// True if `drop` and the record was still there: its file is to be removed.
  bool end_load(const Hash128& id, std::uint64_t serial, bool drop) {
    const auto at = ready_.find(id);
    if (at == ready_.end() || at->second.serial != serial) return false;
    --at->second.loads;
    if (drop) take(at);
    return drop;
  }

  /// Takes a record out. Its file, if it has one already; a store under way is removed when it ends.
  std::optional<RecordFile> erase(const Hash128& id) {
    if (const auto at = storing_.find(id); at != storing_.end()) at->second.erased = true;
    const auto at = ready_.find(id);
    if (at == ready_.end()) return {};
    RecordFile file = at->second.file;
    take(at);
    return file;
  }

 private:
  struct Ready {
    RecordFile file = {};
    std::list<Hash128>::iterator recent = {};
    std::uint64_t serial = 0;
    int loads = 0;
  };
  struct Storing {
    RecordPages pages = {};
    Event<Backend> event = {};
    bool erased = false;
  };
  using ReadyMap = std::unordered_map<Hash128, Ready, HashOfId>;

  std::optional<RecordFile> insert(RecordFile file) {
    std::optional<RecordFile> replaced;
    if (const auto at = ready_.find(file.id); at != ready_.end()) {
      replaced = at->second.file;
      take(at);
    }
    recent_.push_front(file.id);
    const Hash128 id = file.id;
    ready_[id] = {std::move(file), recent_.begin(), ++serial_, 0};
    return replaced;
  }
  void take(typename ReadyMap::iterator at) {
    leaving_ids_.insert(at->second.file.id);
    recent_.erase(at->second.recent);
    ready_.erase(at);
  }

  std::int64_t budget_;
  std::int64_t bytes_ = 0;
  std::unordered_multiset<Hash128, HashOfId> leaving_ids_;  // taken out and not yet removed
  std::uint64_t serial_ = 0;
  ReadyMap ready_;
  std::list<Hash128> recent_;  // most recent first
  std::unordered_map<Hash128, Storing, HashOfId> storing_;
};
using FileIndex = BasicFileIndex<Host>;

}  // namespace detail

KVIRE_NAMESPACE_END
