// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <kvire/pool/bundle_pool.hpp>
#include <kvire/tier/record.hpp>
#include <kvire/transfer/seal.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// The seals of the host pages that make a record, in its order: section by section, slot by slot. Without seals it has nothing to do.
class RecordSeals {
 public:
  /// `shape`: with its pages. Error invalid_argument for seals of another pool.
  template <class Bundle, class Backend>
  static Result<RecordSeals> make(const HostBundlePool<Bundle, Backend>& pool, const BundleRefs<Bundle, HostPage>& refs, const RecordShape& shape,
                                  std::shared_ptr<PageSeals> table) {
    RecordSeals seals;
    if (!table) return seals;
    bool foreign = false;
    for (const RecordSection& section : shape.sections) {
      Bundle::for_each([&]<class Entry>() {
        if (section.entry != Bundle::template index_of<Entry>()) return;
        for (int slot = 0; slot < section.slots; ++slot) {
          const LayerSeals layer = table->of(pool.template entry<Entry>(), EntrySlot(slot));
          for (const auto& ref : refs.template of<typename Entry::space>()) {
            if (!layer.of_page.empty()) seals.pages_.push_back({&layer.of_page[static_cast<std::size_t>(ref.id().value)], layer.key, ref.id().value});
          }
          if (layer.of_page.empty()) foreign = true;
        }
      });
    }
    if (foreign) return Error{ErrorCode::invalid_argument, "the seals are not of pool " + pool.name()};
    seals.table_ = std::move(table);
    return seals;
  }

  explicit operator bool() const { return table_ != nullptr; }
  /// Seals page number `i` of the record.
  void set(std::size_t i, const std::byte* bytes, std::int64_t page_bytes) const { *pages_[i].seal = seal_page(pages_[i].key, bytes, page_bytes); }

  /// Whether the pages in `record` are what their seals say. Error mismatch.
  Status check(const std::byte* record, const RecordShape& shape) const {
    if (!table_) return {};
    std::size_t next = 0;
    for (const RecordSection& section : shape.sections) {
      for (std::int64_t slot = 0; slot < section.slots; ++slot) {
        for (std::int64_t page = 0; page < section.pages; ++page, ++next) {
          if (seal_page(pages_[next].key, record + section.page_offset(slot, page), section.page_bytes) == *pages_[next].seal) continue;
          return Error{ErrorCode::mismatch, "seal of entry " + std::to_string(section.entry) + ", slot " + std::to_string(slot) + ", host page " +
                                                std::to_string(pages_[next].page) + ": its bytes are not those that were stored there"};
        }
      }
    }
    return {};
  }

 private:
  struct Sealed {
    std::uint64_t* seal;
    std::uint64_t key;
    std::int32_t page;
  };
  std::shared_ptr<PageSeals> table_;
  std::vector<Sealed> pages_;
};

}  // namespace detail

KVIRE_NAMESPACE_END
