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
    return table;
  }

  std::int64_t size() const { return size_; }
  T& operator[](std::int64_t i) { return reinterpret_cast<T*>(buffer_.data())[i]; }

 private:
  Buffer buffer_;
  std::int64_t size_ = 0;
};

}  // namespace detail

KVIRE_NAMESPACE_END
