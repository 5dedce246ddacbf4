// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/pool/ledger_core.hpp>

KVIRE_NAMESPACE_BEGIN

template <class PageId, class Backend>
class PageLedger;

/// A page at a point in its history: what an index (a prefix cache, a table) may keep without owning the page. When the last owner goes, the
/// generation passes and the key is stale, even if the same id is allocated again.
template <class PageId>
struct PageKey {
  PageId page;
  std::uint32_t generation = 0;
  friend bool operator==(const PageKey&, const PageKey&) = default;
};

/// Counted ownership of one page. Copying shares the page; the destructor gives up the share. A page that nobody owns and no transfer holds
/// is free. Ownership is in the object: a reference that was released
/// is empty, and releasing it again is an error. Keeps the pool's memory alive. As thread-safe as shared_ptr.
template <class PageId>
class PageRef {
 public:
  PageRef() = default;
  PageRef(const PageRef& other) : core_(other.core_), page_(other.page_) {
    if (core_ != nullptr) core_->add_owner(page_.value);
  }
  PageRef(PageRef&& other) noexcept : core_(std::exchange(other.core_, nullptr)), page_(std::exchange(other.page_, PageId())) {}
  PageRef& operator=(PageRef other) noexcept {
    std::swap(core_, other.core_);
    std::swap(page_, other.page_);
    return *this;
  }
  // Inlined whatever the compiler thinks: most references that end have been moved from.
  KVIRE_INLINE ~PageRef() {
    if (core_ != nullptr) core_->remove_owner(page_.value);
  }

  /// The page's id; none() for an empty reference.
  PageId id() const { return page_; }
  explicit operator bool() const { return core_ != nullptr; }
  /// Which ledger the page is of: equal to PageLedger::identity() of that one; null for an empty reference. To compare, not to use.
  const void* ledger() const { return core_; }
  /// Requires a page.
  PageKey<PageId> key() const { return {page_, core_->record(page_.value).generation}; }
  void reset() { *this = PageRef(); }

 private:
  template <class, class>
  friend class PageLedger;
  PageRef(detail::LedgerCore* core, std::int32_t page) : core_(core), page_(page) {}

  detail::LedgerCore* core_ = nullptr;
  PageId page_;
};

KVIRE_NAMESPACE_END
