// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>

#include <kvire/tier/file_shape.hpp>
#include <kvire/transfer/migrate.hpp>

KVIRE_NAMESPACE_BEGIN

namespace rule {
template <class Stored, class Wanted, int StoredEntries, int WantedEntries, bool Same>
struct MigrateBundle {
  static_assert(Same,
                "kvire [tier.migrate-bundle]: a stored bundle migrates into one with the same entries in the same order: names, kinds, ratios, spaces and layers. "
                "An entry without a partner would be lost, or made up. Fix: name the bundle that wrote the records, or let them be misses.");
};
}  // namespace rule

namespace detail {

template <class A, class B>
constexpr bool same_entry(int layers) {
  bool same = equal_text(A::name, B::name) && A::kind::kind == B::kind::kind && A::kind::ratio == B::kind::ratio && equal_text(A::space::name, B::space::name);
  for (int i = 0; i < layers; ++i) same = same && A::owns(LayerId(i)) == B::owns(LayerId(i));
  return same;
}

template <class S, class... A, class T, class... B>
constexpr bool same_entries(const CacheBundle<S, A...>*, const CacheBundle<T, B...>*) {
  if constexpr (sizeof...(A) != sizeof...(B) || S::layers != T::layers) {
    return false;
  } else {
    return (same_entry<A, B>(S::layers) && ...);
  }
}

template <class Stored, class Wanted>
constexpr bool require_migrate_bundle() {
  (void)sizeof(rule::MigrateBundle<Stored, Wanted, Stored::entry_count, Wanted::entry_count,
                                   same_entries(static_cast<const Stored*>(nullptr), static_cast<const Wanted*>(nullptr))>);
  return true;
}

/// One page in its other layout; a page of the same layout as it is.
template <class From, class To>
void migrate_page(const std::byte* from, std::byte* to, const RowOptions& row) {
  if constexpr (same_layout<From, To>) {
    std::memcpy(to, from, static_cast<std::size_t>(To::page_bytes));
  } else {
    static_assert(require_migrate<From, To>());
    for (int token = 0; token < From::tokens_per_page; ++token) {
      float numbers[From::dim];
      decode_row<From>(from, token, numbers);
      encode_row<To>(numbers, to, token, row);
    }
  }
}

template <class Stored, class Wanted>
struct RecordMigration {
  const std::byte* record;
  const RecordShape& stored;
  const RecordShape& wanted;
  const std::vector<std::byte*>& pages;
  const RowOptions& row;

  template <class From, class To>
  void entry(int index) {
    std::size_t next = 0;
    for (std::size_t i = 0; i < wanted.sections.size(); ++i) {
      if (wanted.sections[i].pages == 0) continue;
      const RecordSection& section = stored.sections[i];
      for (std::int64_t slot = 0; slot < section.slots; ++slot) {
        for (std::int64_t page = 0; page < section.pages; ++page, ++next) {
          if (section.entry == index) migrate_page<typename From::policy, typename To::policy>(record + section.page_offset(slot, page), pages[next], row);
        }
      }
    }
  }
  template <class S, class... A, class T, class... B>
  void all(const CacheBundle<S, A...>*, const CacheBundle<T, B...>*) {
    int index = 0;
    (entry<A, B>(index++), ...);
  }
};

/// Fills `pages` (in the order of the record's sections that `wanted` has pages of) from a verified record of the bundle `Stored`.
template <class Stored, class Wanted>
void migrate_record(const std::byte* record, const RecordShape& stored, const RecordShape& wanted, const std::vector<std::byte*>& pages, const RowOptions& row) {
  RecordMigration<Stored, Wanted>{record, stored, wanted, pages, row}.all(static_cast<const Stored*>(nullptr), static_cast<const Wanted*>(nullptr));
}

}  // namespace detail

KVIRE_NAMESPACE_END
