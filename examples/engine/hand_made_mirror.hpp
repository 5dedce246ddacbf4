// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <vector>

#include "inject.hpp"

namespace engine {

/// The host side of the index keys as a real engine had it: sized and strided by the fp8 formula, restated by hand over raw bytes, for
/// device pages of whatever policy. Everything else goes the typed way. This is the one place where a layout is restated, and it lives here
/// to show what that does: the typed path has no size to get wrong.
template <class IndexKey>
class HandMadeMirror : public LosesBytes<IndexKey, IndexKeys<IndexKey>> {
  using Base = LosesBytes<IndexKey, IndexKeys<IndexKey>>;

 public:
  static constexpr std::int64_t token_bytes = 128 + 4;
  static constexpr std::int64_t page_bytes = 64 * token_bytes;

  void after_backup(Tiers<IndexKey>& tiers, const Moves<IndexKey>& moves) override {
    each(tiers, moves, [](std::byte* device, std::byte* host) { std::memcpy(host, device, page_bytes); });
  }
  void after_load(Tiers<IndexKey>& tiers, const Moves<IndexKey>& moves) override {
    Base::after_load(tiers, moves);  // the typed transfer's index keys do not count
    each(tiers, moves, [](std::byte* device, std::byte* host) { std::memcpy(device, host, page_bytes); });
  }

 private:
  template <class F>
  void each(Tiers<IndexKey>& tiers, const Moves<IndexKey>& moves, F&& copy) {
    using IndexK = typename kvire::preset::deepseek_v4::Flash<IndexKey>::IndexK;
    const int slots = tiers.template slots<IndexK>();
    rows_.resize(static_cast<std::size_t>(slots));
    for (int slot = 0; slot < slots; ++slot) {
      std::byte* const base = tiers.template raw_device<IndexK>(kvire::EntrySlot(slot)).page(0);
      std::vector<std::byte>& rows = rows_[static_cast<std::size_t>(slot)];
      rows.resize(static_cast<std::size_t>(tiers.host_pages() * page_bytes));
      const auto& pages = moves.template of<kvire::space::Full>();
      for (std::size_t i = 0; i < pages.first.size(); ++i) copy(base + pages.second[i].value * page_bytes, rows.data() + pages.first[i].value * page_bytes);
    }
  }

  std::vector<std::vector<std::byte>> rows_;  // a layer each
};

}  // namespace engine
