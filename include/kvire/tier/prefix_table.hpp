// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <kvire/base/config.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// Node numbers by the hash of their name: open addressing, one or two cache lines a lookup, nothing allocated but when it grows. A name is
/// verified by the caller; this table may offer several nodes for one hash.
class PrefixTable {
 public:
  PrefixTable() : entries_(16) {}

  /// First node under the hash that `same(node)` accepts; -1 if there is none.
  template <class Same>
  std::int32_t find(std::uint64_t hash, Same&& same) const {
    const std::uint32_t key = key_of(hash);
    for (std::size_t at = key & mask();; at = (at + 1) & mask()) {
      const Entry& entry = entries_[at];
      if (entry.node < 0) return -1;
      if (entry.key == key && same(entry.node)) return entry.node;
    }
  }

  void insert(std::uint64_t hash, std::int32_t node) {
    if (2 * (count_ + 1) > entries_.size()) grow();
    place({key_of(hash), node});
    ++count_;
  }

  /// Requires that the node was inserted under the hash.
  void erase(std::uint64_t hash, std::int32_t node) {
    std::size_t hole = key_of(hash) & mask();
    while (entries_[hole].node != node) hole = (hole + 1) & mask();
    // What was pushed over the hole moves back, so that no lookup ends early.
    for (std::size_t at = (hole + 1) & mask(); entries_[at].node >= 0; at = (at + 1) & mask()) {
      const std::size_t home = entries_[at].key & mask();
      if (((at - home) & mask()) < ((at - hole) & mask())) continue;
      entries_[hole] = entries_[at];
      hole = at;
    }
    entries_[hole] = {};
    --count_;
  }

  std::size_t size() const { return count_; }

 private:
  struct Entry {
    std::uint32_t key = 0;  // the place at any size: growing needs no names
    std::int32_t node = -1;
  };
  static std::uint32_t key_of(std::uint64_t hash) { return static_cast<std::uint32_t>(hash >> 32); }
  std::size_t mask() const { return entries_.size() - 1; }

  void place(Entry entry) {
    std::size_t at = entry.key & mask();
    while (entries_[at].node >= 0) at = (at + 1) & mask();
    entries_[at] = entry;
  }
  void grow() {
    std::vector<Entry> old(2 * entries_.size());
    old.swap(entries_);
    for (const Entry& entry : old) {
      if (entry.node >= 0) place(entry);
    }
  }

  std::vector<Entry> entries_;  // a power of two
  std::size_t count_ = 0;
};

}  // namespace detail

KVIRE_NAMESPACE_END
