// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <memory>
#include <type_traits>

#include "replay.hpp"
#include "tiers.hpp"

namespace engine {

/// A run of bytes within a page.
struct ByteRange {
  std::int64_t first = 0;
  std::int64_t size = 0;
};

/// Calls f.template operator()<Entry>() for every entry.
template <class IndexKey, class F>
void for_each_entry(F&& f) {
  kvire::preset::deepseek_v4::Flash<IndexKey>::for_each(std::forward<F>(f));
}

/// Undoes a load for some bytes of the pages: they keep what they held before, as if the transfer had left them out.
/// `Lost::ranges<Entry>()` names the bytes.
template <class IndexKey, class Lost>
class LosesBytes : public Tamper<IndexKey> {
 public:
  void before_load(Tiers<IndexKey>& tiers, const Moves<IndexKey>& moves) override {
    kept_.clear();
    visit(tiers, moves, [&](std::byte* at, std::int64_t size) { kept_.insert(kept_.end(), at, at + size); });
  }
  void after_load(Tiers<IndexKey>& tiers, const Moves<IndexKey>& moves) override {
    const std::byte* from = kept_.data();
    visit(tiers, moves, [&](std::byte* at, std::int64_t size) {
      std::memcpy(at, from, static_cast<std::size_t>(size));
      from += size;
    });
  }

 private:
  template <class F>
  static void visit(Tiers<IndexKey>& tiers, const Moves<IndexKey>& moves, F&& f) {
    for_each_entry<IndexKey>([&]<class Entry>() {
      const std::vector<ByteRange> ranges = Lost::template ranges<Entry>();
      if (ranges.empty()) return;
      for (int slot = 0; slot < tiers.template slots<Entry>(); ++slot) {
        const auto view = tiers.template raw_device<Entry>(kvire::EntrySlot(slot));
        for (const auto page : moves.template of<typename Entry::space>().second) {
          for (const ByteRange& range : ranges) f(view.page(page.value) + range.first, range.size);
        }
      }
    });
  }

  std::vector<std::byte> kept_;
};

/// The second half of each page, as when a transfer takes the page for half as large.
struct SecondHalf {
  template <class Entry>
  static std::vector<ByteRange> ranges() {
    constexpr std::int64_t bytes = Entry::policy::page_bytes;
    return {{bytes / 2, bytes - bytes / 2}};
  }
};

/// The scales, as when only the values are copied.
struct Scales {
  template <class Entry>
  static std::vector<ByteRange> ranges() {
    using P = typename Entry::policy;
    std::vector<ByteRange> found;
    if constexpr (P::template has<kvire::role::Scale>) {
      constexpr std::int64_t size = P::template count_of<kvire::role::Scale> * kvire::bits(P::template element_of<kvire::role::Scale>) / 8;
      for (int token = 0; token < P::tokens_per_page; ++token) found.push_back({P::template offset<kvire::role::Scale>(token), size});
    }
    return found;
  }
};

/// The index keys, as when the transfer's list of pools forgets one.
template <class IndexKey>
struct IndexKeys {
  template <class Entry>
  static std::vector<ByteRange> ranges() {
    using Wanted = typename kvire::preset::deepseek_v4::Flash<IndexKey>::IndexK;
    return std::is_same_v<Entry, Wanted> ? std::vector<ByteRange>{{0, Entry::policy::page_bytes}} : std::vector<ByteRange>{};
  }
};

/// The compressor states.
struct States {
  template <class Entry>
  static std::vector<ByteRange> ranges() {
    return !Entry::counts_tokens ? std::vector<ByteRange>{{0, Entry::policy::page_bytes}} : std::vector<ByteRange>{};
  }
};

/// Loads each layer's pages from the next layer's.
template <class IndexKey>
class WrongLayer : public Tamper<IndexKey> {
 public:
  void after_load(Tiers<IndexKey>& tiers, const Moves<IndexKey>& moves) override {
    for_each_entry<IndexKey>([&]<class Entry>() {
      const int slots = tiers.template slots<Entry>();
      for (int slot = 0; slot < slots; ++slot) {
        const auto to = tiers.template raw_device<Entry>(kvire::EntrySlot(slot));
        const auto from = tiers.template raw_host<Entry>(kvire::EntrySlot((slot + 1) % slots));
        const auto& pages = moves.template of<typename Entry::space>();
        for (std::size_t i = 0; i < pages.first.size(); ++i) {
          std::memcpy(to.page(pages.second[i].value), from.page(pages.first[i].value), static_cast<std::size_t>(Entry::policy::page_bytes));
        }
      }
    });
  }
};

/// Lets a backup read its device page only when the host page is asked for again: by then the device page belongs to somebody else.
template <class IndexKey>
class EarlyReuse : public Tamper<IndexKey> {
 public:
  void after_backup(Tiers<IndexKey>&, const Moves<IndexKey>& moves) override { late_.push_back(moves); }

  void before_load(Tiers<IndexKey>& tiers, const Moves<IndexKey>& loads) override {
    for_each_entry<IndexKey>([&]<class Entry>() {
      using Space = typename Entry::space;
      for (int slot = 0; slot < tiers.template slots<Entry>(); ++slot) {
        const auto from = tiers.template raw_device<Entry>(kvire::EntrySlot(slot));
        const auto to = tiers.template raw_host<Entry>(kvire::EntrySlot(slot));
        for (const auto load : loads.template of<Space>().first) {
          for (const Moves<IndexKey>& moves : late_) {
            const auto& pages = moves.template of<Space>();
            for (std::size_t i = 0; i < pages.first.size(); ++i) {
              if (pages.first[i] == load) std::memcpy(to.page(load.value), from.page(pages.second[i].value), static_cast<std::size_t>(Entry::policy::page_bytes));
            }
          }
        }
      }
    });
  }

 private:
  std::vector<Moves<IndexKey>> late_;
};

template <class IndexKey>
class SkipGate : public Tamper<IndexKey> {
 public:
  bool skips_gate() const override { return true; }
};

/// What does the damage; null for none.
template <class IndexKey>
std::unique_ptr<Tamper<IndexKey>> make_damage(Damage damage) {
  switch (damage) {
    case Damage::none: return nullptr;
    case Damage::skip_gate: return std::make_unique<SkipGate<IndexKey>>();
    case Damage::half_page: return std::make_unique<LosesBytes<IndexKey, SecondHalf>>();
    case Damage::drop_scale: return std::make_unique<LosesBytes<IndexKey, Scales>>();
    case Damage::drop_index: return std::make_unique<LosesBytes<IndexKey, IndexKeys<IndexKey>>>();
    case Damage::early_reuse: return std::make_unique<EarlyReuse<IndexKey>>();
    case Damage::wrong_layer: return std::make_unique<WrongLayer<IndexKey>>();
    case Damage::stale_state: return std::make_unique<LosesBytes<IndexKey, States>>();
    case Damage::hand_made_mirror: break;
  }
  return nullptr;
}

}  // namespace engine
