// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <kvire/base/sort.hpp>

KVIRE_NAMESPACE_BEGIN

/// What a piece of work touches of its pages: entry slots of the pools that share the page ids, and there whole pages or single rows. Pools and ledgers
/// are known by address, and a pool that has gone by none. Filled before it is shared.
class PageExtent {
 public:
  PageExtent() = default;
  /// One slot of one pool, as of a lease.
  PageExtent(const void* pool, int slot) : pool_(pool), slot_(slot) {}

  /// Says which position each slot of a pool has in the order of the work; -1 for slots that it does not touch. `memory`: of the pool. `written_in`: its
  /// ledger if its pages are written; null: they are only read.
  void cover(const std::shared_ptr<const void>& memory, std::vector<int> position_of_slot, const void* written_in = nullptr) {
    covers_.push_back({memory.get(), memory, written_in, std::move(position_of_slot)});
  }
  /// Of what is written, only these rows: page * rows of a page + row, ascending.
  void limit(std::vector<std::int64_t> rows, std::int64_t rows_of_a_page) {
    rows_ = std::move(rows);
    rows_of_a_page_ = rows_of_a_page;
  }

  /// Position of a pool's slot, or -1 if the work does not touch it.
  int position(const void* pool, int slot) const {
    for (const Cover& cover : covers_) {
      if (cover.pool == pool && !cover.memory.expired() && slot >= 0 && static_cast<std::size_t>(slot) < cover.position_of_slot.size()) {
        return cover.position_of_slot[static_cast<std::size_t>(slot)];
      }
    }
    return -1;
  }

  /// Of a lease: whether it is one on this slot.
  bool is(const void* pool, int slot) const { return pool == pool_ && slot == slot_; }

  /// Whether this writes, of pages of the ledger, every slot that `other` writes.
  bool writes_slots_of(const PageExtent& other, const void* ledger) const {
    if (other.pool_ != nullptr && !writes(other.pool_, other.slot_)) return false;
    for (const Cover& cover : other.covers_) {
      for (std::size_t slot = 0; cover.written_in == ledger && slot < cover.position_of_slot.size(); ++slot) {
        if (cover.position_of_slot[slot] >= 0 && !writes(cover.pool, static_cast<int>(slot))) return false;
      }
    }
    return true;
  }
  /// Whether this writes every row of a page that `other` writes.
  bool writes_rows_of(const PageExtent& other, std::int32_t page) const {
    if (rows_of_a_page_ == 0) return true;
    if (other.rows_of_a_page_ != rows_of_a_page_) return false;
    const std::int64_t end = (std::int64_t{page} + 1) * rows_of_a_page_;
    for (std::size_t i = detail::lower_bound(other.rows_.data(), other.rows_.size(), end - rows_of_a_page_); i < other.rows_.size() && other.rows_[i] < end; ++i) {
      if (!detail::contains(rows_, other.rows_[i])) return false;
    }
    return true;
  }

 private:
  struct Cover {
    const void* pool;
    std::weak_ptr<const void> memory;  // work may be known for longer than its pools, and a later pool lie at the same address
    const void* written_in;
    std::vector<int> position_of_slot;
  };

  bool writes(const void* pool, int slot) const {
    if (pool == pool_) return slot == slot_;
    for (const Cover& cover : covers_) {
      if (cover.pool != pool || cover.written_in == nullptr || static_cast<std::size_t>(slot) >= cover.position_of_slot.size()) continue;
      if (cover.position_of_slot[static_cast<std::size_t>(slot)] >= 0) return true;
    }
    return false;
  }

  const void* pool_ = nullptr;
  int slot_ = -1;
  std::vector<Cover> covers_;
  std::vector<std::int64_t> rows_;
  std::int64_t rows_of_a_page_ = 0;  // 0: whole pages
};

KVIRE_NAMESPACE_END
