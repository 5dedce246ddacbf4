// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <kvire/base/ids.hpp>
#include <kvire/base/result.hpp>
#include <kvire/pool/spin_lock.hpp>
#include <kvire/pool/table.hpp>

KVIRE_NAMESPACE_BEGIN

/// Memory whose pages a ledger hands out. The ledger keeps it alive as long as anybody can still touch one of its pages.
class PageMemory {
 public:
  virtual ~PageMemory() = default;
  /// True if page_freed wants to be called.
  virtual bool wants_freed() const { return false; }
  /// A page has no owner and no transfer any more and is about to become allocatable (fill patterns). Called without locks held.
  virtual void page_freed(std::int32_t) {}
};

namespace detail {

/// The part of a ledger that does not depend on id types or backends: one record a page, a stack of free ids, and the count of everything
/// that points here (ledger handles, page references, holds). The last of those destroys it, and the memory with it.
template <class Lock>
class BasicLedgerCore {
 public:
  using Tables = LedgerTables<std::int32_t>;

  /// `external`: another allocator owns the pages; only holds are counted here and no page is ever handed out.
  BasicLedgerCore(std::string name, const char* id_name, Tables tables, bool external)
      : external_(external), pages_(static_cast<std::int32_t>(tables.lives.size())), name_(std::move(name)), id_name_(id_name), tables_(std::move(tables)) {
    if (external) return;
    // Lowest ids first, as a stack; page 0 is the null page and is never on it.
    for (std::int32_t page = pages_ - 1; page > null_page; --page) tables_.free[free_count_++] = page;
  }
  BasicLedgerCore(const BasicLedgerCore&) = delete;
  BasicLedgerCore& operator=(const BasicLedgerCore&) = delete;
  virtual ~BasicLedgerCore() = default;

  const std::string& name() const { return name_; }
  std::int32_t pages() const { return pages_; }
  bool external() const { return external_; }

  // Everything that points here.
  void anchor() {
    lock_.lock();
    ++anchors_;
    lock_.unlock();
  }
  void unanchor() {
    lock_.lock();
    const bool last = --anchors_ == 0;
    lock_.unlock();
    if (last) delete this;
  }

  /// Takes a free page for one new owner; -1 if there is none. The owner is an anchor.
  std::int32_t take() {
    lock_.lock();
    if (free_count_ == 0) {
      lock_.unlock();
      return -1;
    }
    const std::int32_t page = pop();
    ++anchors_;
    lock_.unlock();
    return page;
  }

  /// Takes `n` pages or none.
  bool take(std::int32_t n, std::int32_t* out) {
    lock_.lock();
    if (n > free_count_) {
      lock_.unlock();
      return false;
    }
    for (std::int32_t i = 0; i < n; ++i) out[i] = pop();
    anchors_ += n;
    lock_.unlock();
    return true;
  }

  /// One more owner of a page that has one.
  void add_owner(std::int32_t page) {
    lock_.lock();
    ++at(page).owners;
    ++anchors_;
    lock_.unlock();
  }

  /// One more owner, if the page is owned in this generation still.
  bool add_owner_if(std::int32_t page, std::uint32_t generation) {
    lock_.lock();
    const bool current = at(page).generation == generation && at(page).owners > 0;
    if (current) {
      ++at(page).owners;
      ++anchors_;
    }
    lock_.unlock();
    return current;
  }

  /// One owner less. The last one ends the generation; the page is free then unless transfers still hold it.
  void remove_owner(std::int32_t page) {
    lock_.lock();
    if (drop_owner(page)) make_free(page);
    const bool last = --anchors_ == 0;
    lock_.unlock();
    if (last) delete this;
  }

  /// Turns an owner's reference into a raw id, which must be given back with remove_raw. Raw ids do not keep the ledger alive.
  void to_raw(std::int32_t page) {
    lock_.lock();
    ++rare(page).raw;
    const bool last = --anchors_ == 0;
    lock_.unlock();
    if (last) delete this;
  }
  Status from_raw(std::int32_t page) { return raw(page, true); }
  Status remove_raw(std::int32_t page) { return raw(page, false); }

  /// Range of ids that can be owned.
  Status check_id(std::int32_t page) const {
    if (page > null_page && page < pages()) return {};
    if (page == null_page) return Error{ErrorCode::invalid_argument, prefix(page) + "is the null page, which nobody owns"};
    if (page < 0) return Error{ErrorCode::out_of_range, prefix(page) + "is negative"};
    return Error{ErrorCode::out_of_range, prefix(page) + "is not below " + std::to_string(pages())};
  }

  struct Record {
    std::uint32_t generation = 0;  // ended lives of the page
    std::int32_t owners = 0;       // references and raw ids
    std::int32_t raw = 0;          // those of the owners that are raw ids
    std::int32_t holds = 0;        // transfers that may touch the page
  };
  Record record(std::int32_t page) {
    lock_.lock();
    const Record copy{at(page).generation, static_cast<std::int32_t>(at(page).owners), rare(page).raw, rare(page).holds};
    lock_.unlock();
    return copy;
  }

  struct Counts {
    std::int32_t free = 0;
    std::int32_t draining = 0;  // without owners, but a transfer may still touch them
  };
  Counts counts() {
    lock_.lock();
    const Counts c{free_count_, draining_};
    lock_.unlock();
    return c;
  }

  /// Pins pages for a transfer or a kernel: all or none. Pages must be owned; with `alone`, by one owner each. Both are looked at under the lock
  /// that the pin is taken under, so no owner comes in between. The pin is an anchor.
  Status pin(const std::int32_t* page, std::size_t n, bool alone) {
    for (std::size_t i = 0; i < n; ++i) {
      if (page[i] <= null_page || page[i] >= pages_) return check_id(page[i]);
    }
    // By local pointers: what is written here may be anything of this object, as far as a compiler knows.
    Tables::Life* const lives = &at(0);
    Tables::Rare* const rares = &rare(0);
    lock_.lock();
    for (std::size_t i = 0; i < n; ++i) {
      const auto owners = static_cast<std::int32_t>(lives[page[i]].owners);
      if (external_ || (alone ? owners == 1 : owners > 0)) continue;
      const Error error = owners == 0 ? not_owned(page[i]) : shared(page[i], owners);
      lock_.unlock();
      return error;
    }
    for (std::size_t i = 0; i < n; ++i) {
      ++rares[page[i]].holds;
      lives[page[i]].held = 1;
    }
    ++anchors_;
    lock_.unlock();
    return {};
  }

  /// Ends what `pin` began; pages whose owners have gone become free.
  void unpin(const std::int32_t* page, std::size_t n) {
    Tables::Life* const lives = &at(0);
    Tables::Rare* const rares = &rare(0);
    lock_.lock();
    for (std::size_t i = 0; i < n; ++i) {
      if (--rares[page[i]].holds > 0) continue;
      Tables::Life& life = lives[page[i]];
      const bool owned = life.owners > 0;  // read first: a word read behind a write of one of its bytes waits for the write to reach the cache
      life.held = 0;
      if (!owned && !external_) {
        --draining_;
        make_free(page[i]);
      }
    }
    const bool last = --anchors_ == 0;
    lock_.unlock();
    if (last) delete this;
  }

  /// Only while the ledger is being set up, before other threads know it.
  void attach(std::shared_ptr<PageMemory> memory) {
    wants_freed_ = wants_freed_ || memory->wants_freed();
    memories_.push_back({std::move(memory)});
  }

  Error shared(std::int32_t page, std::int32_t owners) const {
    return {ErrorCode::busy, prefix(page) + "has " + std::to_string(owners) + " owners: a write would change it under the others"};
  }

  std::string prefix(std::int32_t page) const { return "pool " + name_ + ": " + id_name_ + " " + std::to_string(page) + " "; }

 private:
  Tables::Life& at(std::int32_t page) { return tables_.lives[page]; }
  Tables::Rare& rare(std::int32_t page) { return tables_.rare[page]; }

  // The next free page, owned once. Under the lock.
  std::int32_t pop() {
    const std::int32_t page = tables_.free[--free_count_];
    at(page).owners = 1;
    // The stack ends up in random order, and every page's record would be a cache miss: ask for that of a page some steps ahead.
    constexpr std::int32_t ahead = 6;
    if (free_count_ > ahead) KVIRE_PREFETCH_WRITE(&at(tables_.free[free_count_ - ahead]));
    return page;
  }

  Error not_owned(std::int32_t page) {
    if (at(page).generation == 0) return {ErrorCode::invalid_argument, prefix(page) + "was never allocated by this pool; pages of an outside allocator are adopted with it"};
    if (at(page).held != 0) {
      return {ErrorCode::duplicate, prefix(page) + "has no owner any more, and is free once the work that holds it has finished: a double free, or a use after free"};
    }
    return {ErrorCode::duplicate, prefix(page) + "is free already: a double free, or a use after free"};
  }

  // True if the page is free now. Under the lock.
  bool drop_owner(std::int32_t page) {
    Tables::Life& life = at(page);
    if (--life.owners > 0) return false;
    ++life.generation;
    if (life.held == 0) return true;
    ++draining_;
    return false;
  }

  // Under the lock; releases it while memory is filled, when the page is neither owned nor on the stack and so nobody else's.
  void make_free(std::int32_t page) {
    if (wants_freed_) {
      lock_.unlock();
      for (const Attached& attached : memories_) attached.memory->page_freed(page);
      lock_.lock();
    }
    tables_.free[free_count_++] = page;
  }

  Status raw(std::int32_t page, bool to_reference) {
    if (auto ok = check_id(page); !ok.ok()) return ok;
    lock_.lock();
    if (rare(page).raw == 0) {
      const Error error = at(page).owners == 0 ? not_owned(page)
                                        : Error{ErrorCode::invalid_argument, prefix(page) + "is owned by page references, not by a raw id"};
      lock_.unlock();
      return error;
    }
    --rare(page).raw;
    if (to_reference) {
      ++anchors_;
    } else if (drop_owner(page)) {
      make_free(page);
    }
    lock_.unlock();
    return {};
  }

  Lock lock_;
  std::int64_t anchors_ = 0;
  std::int32_t draining_ = 0;
  std::int32_t free_count_ = 0;
  bool wants_freed_ = false;
  const bool external_;
  const std::int32_t pages_;
  std::string name_;
  const char* id_name_;
  Tables tables_;
  struct Attached {
    std::shared_ptr<PageMemory> memory;
  };
  std::vector<Attached> memories_;
};
using LedgerCore = BasicLedgerCore<SpinLock>;

}  // namespace detail

KVIRE_NAMESPACE_END
