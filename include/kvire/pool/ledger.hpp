// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include <kvire/pool/flight.hpp>
#include <kvire/pool/page_ref.hpp>

KVIRE_NAMESPACE_BEGIN

/// Pages that a transfer (or a storing kernel) may touch: what a ticket owns beside its event. While the event is not final the pages are
/// not handed out again, whatever becomes of their owners and of this object: the destructor never waits, it leaves the pages draining and
/// the ledger takes them back after the event is final. A timeout is not final. Move-only. Keeps the pool's memory alive.
template <class PageId, class Backend>
class PageHold {
 public:
  PageHold() = default;
  PageHold(PageHold&& other) noexcept : state_(std::exchange(other.state_, nullptr)), flight_(std::exchange(other.flight_, nullptr)) {}
  PageHold& operator=(PageHold other) noexcept {
    std::swap(state_, other.state_);
    std::swap(flight_, other.flight_);
    return *this;
  }
  ~PageHold() {
    if (state_ != nullptr) state_->drop(flight_);
  }

  explicit operator bool() const { return state_ != nullptr; }
  /// The event that proves the pages untouched. Requires a hold.
  const Event<Backend>& event() const { return flight_->work.event; }
  PageUse use() const { return flight_->work.use; }
  /// The pages' ids, ascending.
  std::span<const std::int32_t> pages() const { return flight_ == nullptr ? std::span<const std::int32_t>() : std::span(flight_->pages); }

 private:
  template <class, class>
  friend class PageLedger;
  PageHold(detail::LedgerState<Backend>* state, detail::Flight<Backend>* flight) : state_(state), flight_(flight) {}

  detail::LedgerState<Backend>* state_ = nullptr;
  detail::Flight<Backend>* flight_ = nullptr;
};

/// Who owns the pages of one page-id space: a shared handle, thread-safe, O(1) a page. Ids are 1 to pages() - 1; page 0 is the null page.
///
/// A page is *free*, *owned* (page references, raw ids) or *draining* (no owner any more, but a transfer may still touch it). Destroying the
/// last handle, or the pool around it, while references or holds are alive frees nothing under them: memory goes with the last of them, or,
/// if a dropped transfer is still running by then, at the next operation that makes, drops or drains a ledger after it has finished.
template <class PageId, class Backend>
class PageLedger {
 public:
  using page_id = PageId;
  using Ref = PageRef<PageId>;
  using Hold = PageHold<PageId, Backend>;

  /// Whether a ledger may have so many pages. Error invalid_argument.
  static Status check_pages(const std::string& name, std::int64_t pages) {
    if (pages >= 2 && pages <= INT64_C(0x7FFFFFFF)) return {};
    return Error{ErrorCode::invalid_argument, "pool " + name + ": " + std::to_string(pages) +
                                                  " pages; a pool has the null page and at least one other, and ids below 2147483647"};
  }
  /// `pages` counts the null page: ids are below it. Errors: invalid_argument if there is no other; exhausted if 20 bytes a page are not to be had.
  static Result<PageLedger> make(std::string name, std::int64_t pages) {
    if (auto ok = check_pages(name, pages); !ok.ok()) return ok.error();
    auto tables = State::Tables::make(pages);
    if (!tables.ok()) return no_tables(name, tables.error());
    return PageLedger(new State(std::move(name), PageId::tag::name, std::move(tables).value(), false));
  }

  /// A ledger over pages that another engine's allocator owns: holds, leases and transfers work, `allocate` is refused. The allocator is
  /// copied in; pass a handle or std::ref-like wrapper if it is not one.
  template <OutsidePages Allocator>
  static Result<PageLedger> over(std::string name, Allocator allocator) {
    struct Outside final : State::OutsideOwner {
      explicit Outside(Allocator a) : allocator(std::move(a)) {}
      std::int32_t owners(std::int32_t page) override { return static_cast<std::int32_t>(allocator.owners(page)); }
      void retain(std::int32_t page) override { allocator.retain(page); }
      void release(std::int32_t page) override { allocator.release(page); }
      Allocator allocator;
    };
    const std::int64_t pages = allocator.pages();
    if (auto ok = check_pages(name, pages); !ok.ok()) return ok.error();
    auto tables = State::Tables::make(pages);
    if (!tables.ok()) return no_tables(name, tables.error());
    auto* state = new State(std::move(name), PageId::tag::name, std::move(tables).value(), true);
    state->outside = std::make_unique<Outside>(std::move(allocator));
    return PageLedger(state);
  }

  PageLedger(const PageLedger& other) : state_(other.state_) { state_->add_handle(); }
  PageLedger(PageLedger&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}
  PageLedger& operator=(PageLedger other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~PageLedger() {
    if (state_ != nullptr) state_->remove_handle();
  }

  const std::string& name() const { return state_->name(); }
  std::int32_t pages() const { return state_->pages(); }
  /// See PageRef::ledger.
  const void* identity() const { return static_cast<const detail::LedgerCore*>(state_); }

  // --- owning ---

  /// One page. Error exhausted (with the counts) if none is free, after looking for transfers that have finished.
  Result<Ref> allocate() {
    if (state_->any_dropped()) state_->poll(false);
    std::int32_t page = state_->take();
    if (page < 0) {
      state_->poll(true);
      page = state_->take();
      if (page < 0) return exhausted(1);
    }
    return Ref(state_, page);
  }

  /// `n` pages or none.
  Result<std::vector<Ref>> allocate(std::int64_t n) {
    if (n < 0) return Error{ErrorCode::invalid_argument, "pool " + name() + ": cannot allocate " + std::to_string(n) + " pages"};
    if (n >= pages()) return exhausted(n);
    if (state_->any_dropped()) state_->poll(false);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(n));
    const auto count = static_cast<std::int32_t>(n);
    if (!state_->take(count, ids.data())) {
      state_->poll(true);
      if (!state_->take(count, ids.data())) return exhausted(n);
    }
    std::vector<Ref> refs;
    refs.reserve(ids.size());
    for (std::int32_t page : ids) refs.push_back(Ref(state_, page));
    return refs;
  }

  /// A share of the page that a key names. Error stale if that page has been freed since (even if the id is in use again); unsupported, here and
  /// in `check` and transfers, for pages of an outside allocator.
  Result<Ref> share(PageKey<PageId> key) {
    if (auto ok = state_->check_id(key.page.value); !ok.ok()) return ok.error();
    if (!state_->add_owner_if(key.page.value, key.generation)) return stale(key);
    return Ref(state_, key.page.value);
  }

  /// True if the page is owned in the key's generation.
  bool is_current(PageKey<PageId> key) const {
    if (!state_->check_id(key.page.value).ok()) return false;
    const auto record = state_->record(key.page.value);
    return record.owners > 0 && record.generation == key.generation;
  }

  /// Success if the key is current; otherwise the error (out_of_range, invalid_argument or stale).
  Status check(PageKey<PageId> key) const {
    if (auto ok = state_->check_id(key.page.value); !ok.ok()) return ok;
    return is_current(key) ? Status() : Status(stale(key));
  }

  /// Success if the page is one that somebody owns.
  Status check(PageId page) const {
    if (auto ok = state_->check_id(page.value); !ok.ok()) return ok;
    if (owners(page) > 0) return {};
    return Error{ErrorCode::invalid_argument, state_->prefix(page.value) + "is not allocated"};
  }

  /// Gives up one share. Error mismatch, and the reference stays as it is, if it is a page of another pool.
  Status release(Ref&& ref) {
    if (ref.core_ != state_) {
      return Error{ErrorCode::mismatch, "pool " + name() + ": " + PageId::tag::name + " " + std::to_string(ref.id().value) + " belongs to " +
                                            (ref ? "pool " + ref.core_->name() : std::string("no pool"))};
    }
    ref.reset();
    return {};
  }

  /// Takes ownership out of a reference, for tables of plain ids. The id must come back through `release(PageId)` or `attach`. none() for an
  /// empty reference, and for a page of another pool, whose reference stays as it is.
  PageId detach(Ref&& ref) {
    if (!ref || ref.core_ != state_) return PageId();
    const PageId page = std::exchange(ref.page_, PageId());
    std::exchange(ref.core_, nullptr)->to_raw(page.value);
    return page;
  }
  /// A reference that takes over a detached id's ownership. Errors as `release(PageId)`.
  Result<Ref> attach(PageId page) {
    if (auto ok = state_->from_raw(page.value); !ok.ok()) return ok.error();
    return Ref(state_, page.value);
  }
  /// Gives up a detached id. Errors: out_of_range; invalid_argument for the null page, a page that was never allocated or one that only
  /// references own; duplicate for a page that is free already.
  Status release(PageId page) { return state_->remove_raw(page.value); }

  // --- transfers ---

  /// Pins owned pages, all or none, until the work's event is final, and registers the work so that later writers can wait for it. The event may still be
  /// unrecorded. If it fails, pages that it was to write cannot be read until they are freed, or written after all (see failed_writes). Errors: out_of_range,
  /// invalid_argument, duplicate as for ids in `release`; invalid_argument for an empty event; busy, for PageUse::store and InFlight::alone, if a page has further owners. An
  /// owner that joins later finds the hold.
  Result<Hold> hold(std::span<const PageId> pages, InFlight<Backend> work) { return hold(sorted(pages), std::move(work)); }
  /// The same by ids, which ascend. Error invalid_argument if they do not.
  Result<Hold> hold(std::vector<std::int32_t> ids, InFlight<Backend> work) {
    const auto refused = [this](const std::string& why) { return Error{ErrorCode::invalid_argument, "pool " + name() + ": a hold " + why}; };
    if (!work.event.valid()) return refused("with an empty event would never end");
    for (std::size_t i = 1; i < ids.size(); ++i) {
      if (ids[i] < ids[i - 1]) return refused("of ids that do not ascend would not be found: " + std::to_string(ids[i]) + " is behind " + std::to_string(ids[i - 1]));
    }
    auto flight = state_->begin(std::move(ids), std::move(work));
    if (!flight.ok()) return flight.error();
    return Hold(state_, flight.value());
  }
  Result<Hold> hold(std::span<const PageId> pages, PageUse use, Event<Backend> event) { return hold(pages, InFlight<Backend>{use, std::move(event)}); }

  /// Owners of a page: references and raw ids. 0 for a page that is free or draining, or no page at all.
  std::int32_t owners(PageId page) const {
    if (!state_->check_id(page.value).ok()) return 0;
    return state_->outside ? state_->outside->owners(page.value) : state_->record(page.value).owners;
  }
  /// Transfers that hold a page, finished ones whose ticket is alive included. A page with holds must not be evicted.
  std::int32_t holds(PageId page) const { return state_->check_id(page.value).ok() ? state_->record(page.value).holds : 0; }
  /// Work on the page that is not final: what a writer has to wait for.
  std::vector<InFlight<Backend>> in_flight(PageId page) const { return state_->in_flight(page.value); }
  /// The same for many pages (ids, ascending): each piece of work once, with the first of the pages that it touches, in the order they were held.
  std::vector<std::pair<std::int32_t, InFlight<Backend>>> in_flight(std::span<const std::int32_t> pages) const { return state_->in_flight(pages); }

  /// Which of the pages (ids, ascending) cannot be read, because a load or a store that was to write them has failed or was dropped: each piece of work
  /// once, with the first of the pages. They can be when they have been freed, or when a transfer has written all that was to be written; behind a kernel
  /// that did not run, also when one has run under a lease of the same slot. A page that such work is on its way to is not among them: it is waited for.
  /// `reader`: the place of a transfer that is to read them, which work that was prepared later does not concern; 0: of whoever comes now.
  std::vector<FailedWrite<Backend>> failed_writes(std::span<const std::int32_t> pages, std::int64_t reader = 0) const {
    return state_->failed_writes(pages, reader);
  }
  /// False if `failed_writes` would name no page of the ledger: one look instead of one a page.
  bool any_failed_writes() const { return state_->any_failed_writes(); }
  /// Success if the page can be read, as far as transfers and leases say. Error failed: names pool, page, and the work that failed.
  Status readable(PageId page) const {
    auto failed = failed_writes(std::span(&page.value, 1));
    return failed.empty() ? Status() : Status(std::move(failed.front().error));
  }
  /// The caller's word that failed work is made good: all of these pages has been written by other means, or an outside allocator has given them to
  /// somebody new, of which the ledger cannot know.
  void assume_written(std::span<const PageId> pages) { state_->assume_written(sorted(pages)); }

  // --- counts ---

  /// Lives that the page has ended; 0 for an id out of range.
  std::uint32_t generation(PageId page) const { return state_->check_id(page.value).ok() ? state_->record(page.value).generation : 0; }
  PageKey<PageId> key(PageId page) const { return {page, generation(page)}; }
  std::int32_t free_pages() const { return state_->counts().free; }
  std::int32_t draining_pages() const { return state_->counts().draining; }
  /// Pages that can be allocated at all.
  std::int32_t capacity() const { return state_->external() ? 0 : pages() - 1; }
  std::int32_t used_pages() const {
    const auto counts = state_->counts();
    return capacity() - counts.free - counts.draining;
  }

  /// Takes back the pages of dropped transfers that have finished. `allocate` does so by itself.
  void drain() {
    state_->poll(true);
    detail::LedgerState<Backend>::sweep_orphans();
  }

  /// Keeps memory alive with the ledger, and tells it of freed pages. Only before other threads know the ledger.
  void attach_memory(std::shared_ptr<PageMemory> memory) { state_->attach(std::move(memory)); }

  friend bool operator==(const PageLedger& a, const PageLedger& b) { return a.state_ == b.state_; }

 private:
  using State = detail::LedgerState<Backend>;
  explicit PageLedger(State* state) : state_(state) {
    state_->add_handle();
    State::sweep_orphans();
  }

  static std::vector<std::int32_t> sorted(std::span<const PageId> pages) {
    std::vector<std::int32_t> ids;
    ids.reserve(pages.size());
    for (const PageId page : pages) ids.push_back(page.value);
    detail::sort(ids);
    return ids;
  }
  static Error no_tables(const std::string& name, const Error& error) { return {error.code, "pool " + name + ", page ledger: " + error.message}; }
  Error exhausted(std::int64_t n) const {
    if (state_->external()) return {ErrorCode::unsupported, "pool " + name() + ": its pages are allocated by their owner, not by the pool"};
    const auto counts = state_->counts();
    return {ErrorCode::exhausted, "pool " + name() + ": " + std::to_string(n) + " pages wanted, " + std::to_string(counts.free) + " free of " +
                                      std::to_string(capacity()) + ", " + std::to_string(counts.draining) + " draining"};
  }
  Error stale(PageKey<PageId> key) const {
    if (state_->external()) {
      return {ErrorCode::unsupported, state_->prefix(key.page.value) + "is owned by an outside allocator, which has no generations that a key could be of"};
    }
    return {ErrorCode::stale, state_->prefix(key.page.value) + "was freed: generation " + std::to_string(key.generation) + " has passed, now " +
                                  std::to_string(generation(key.page))};
  }

  State* state_;
};

KVIRE_NAMESPACE_END
