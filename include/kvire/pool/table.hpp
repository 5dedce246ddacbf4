// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <type_traits>

#include <kvire/memory/huge_page.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// A fixed array of plain values that all start as zero bytes. Large ones ask for huge pages: tables indexed by page id are visited at
/// random, and with small pages every visit would miss the address translation cache as well.
template <class T>
  requires(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>)
class Table {
 public:
  Table() = default;
  static Result<Table> make(std::int64_t size) {
    const std::int64_t bytes = size * static_cast<std::int64_t>(sizeof(T));
    const bool large = bytes >= HugePageMemory::huge_page;
    auto buffer = Buffer::make(large ? AnyResource(HugePageMemory{}) : AnyResource(HostMemory{}), bytes);
    if (!buffer.ok()) return buffer.error();
    Table table;
    table.buffer_ = std::move(buffer).value();
    table.size_ = size;
    if (!table.buffer_.zeroed()) std::memset(table.buffer_.data(), 0, static_cast<std::size_t>(bytes));
    return Result<Table>(std::move(table));
  }

  std::int64_t size() const { return size_; }
  T& operator[](std::int64_t i) { return reinterpret_cast<T*>(buffer_.data())[i]; }

 private:
  Buffer buffer_;
  std::int64_t size_ = 0;
};

/// What a ledger looks up by page id: made apart, since it can fail.
template <class PageIndex>
struct LedgerTables {
  // Eight bytes a page are touched when it is allocated and freed; the rest has a table of its own, which stays out of the cache.
  struct Life {
    std::uint32_t generation;
    std::uint32_t owners : 31;
    std::uint32_t held : 1;  // holds > 0
  };
  struct Rare {
    std::int32_t raw;
    std::int32_t holds;
  };

  Table<Life> lives;
  Table<Rare> rare;
  Table<PageIndex> free;

  static Result<LedgerTables> make(std::int64_t pages) {
    auto lives = Table<Life>::make(pages);
    auto rare = Table<Rare>::make(pages);
    auto free = Table<PageIndex>::make(pages);
    if (!lives.ok()) return lives.error();
    if (!rare.ok()) return rare.error();
    if (!free.ok()) return free.error();
    return LedgerTables{std::move(lives).value(), std::move(rare).value(), std::move(free).value()};
  }
};

}  // namespace detail

KVIRE_NAMESPACE_END
