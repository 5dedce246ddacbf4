// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "files.hpp"
#include "prefix.hpp"
#include "replay.hpp"
#include "step_io.hpp"
#include "tamper.hpp"
#include "tiers.hpp"

namespace engine {

/// Decides which pages are where. Blocks that active sessions use stay on the device; the others are evicted, least recently used first,
/// to the host tier, whose own least recently used pages make room. With a file tier, blocks go to the host and on to a file as soon as they are
/// complete. `Tiers` and `Files` move the bytes.
template <class IndexKey, class Io = StepIo<IndexKey>>
class Cache {
 public:
  using Entries = kvire::preset::deepseek_v4::Flash<IndexKey>;
  using StepIo = Io;
  using Backend = typename Io::Backend;
  using Full = kvire::space::Full;
  using Window = kvire::space::Window;

  static kvire::Result<std::unique_ptr<Cache>> make(const ReplaySettings& options, int index_heads, std::unique_ptr<Tamper<IndexKey, Backend>> tamper = nullptr) {
    auto tiers = Tiers<IndexKey, Backend>::make(options, std::move(tamper));
    if (!tiers) return tiers.error();
    std::unique_ptr<BlockFiles> files;
    if (!options.file_folder.empty()) {
      if (options.host_pages == 0) return kvire::Error{kvire::ErrorCode::invalid_argument, "a file tier needs a host tier, through which its pages go"};
      auto made = BlockFiles::make(options);
      if (!made) return made.error();
      files = std::move(made).value();
    }
    return std::unique_ptr<Cache>(new Cache(options, index_heads, std::move(tiers).value(), std::move(files)));
  }

  PrefixIndex& index() { return index_; }

  /// The block that continues `parent` with these tokens, from the index or else from a file; null if there is none.
  std::shared_ptr<Block> find(const std::shared_ptr<Block>& parent, const int* tokens) {
    auto block = index_.find(parent, tokens);
    if (!files_ || (block && (block->asked || (block->full.anywhere() && block->window.anywhere())))) return block;
    const int depth = parent ? parent->depth + 1 : 0;
    const auto there = files_->find(prefix_name(parent.get(), tokens), depth);
    if (there && !block) {
      block = std::make_shared<Block>();
      block->parent = parent;
      block->depth = depth;
      index_.insert(block, tokens);
      blocks_.push_back(block);
    }
    if (block) {
      block->asked = true;
      block->full.file = there && there->first;
      block->window.file = there && there->second;
      block->kept = block->kept || there;
    }
    return block;
  }

  /// A block of the index is complete: with a file tier, it goes there, by way of the host.
  void keep(const std::shared_ptr<Block>& block) {
    if (!files_ || block->kept) return;
    block->kept = true;
    keep_on_host<Full>(*block);
    keep_on_host<Window>(*block);
    if (auto status = tiers_->issue_backups(); !status.ok() && failure_.ok()) failure_ = status;
    to_store_.push_back(block);
  }

  /// Grows when blocks turn out not to come back from files: what was to be acquired may be shorter now, and worth another try.
  std::int64_t lost_blocks() const { return lost_blocks_; }

  /// Of the file tier, if there is one.
  kvire::FileTierStats file_stats() const { return files_ ? files_->stats() : kvire::FileTierStats(); }
  Tiers<IndexKey, Backend>& tiers() { return *tiers_; }
  std::int64_t usable_pages() const { return options_.device_pages - 1; }
  std::int64_t bytes_to_host() const { return tiers_->bytes_to_host(); }
  std::int64_t bytes_to_device() const { return tiers_->bytes_to_device(); }

  /// Full-space pages that are free or could be freed.
  std::int64_t available_pages() {
    std::int64_t used = 0;
    each_block([&](Block& b) { used += b.full.device && b.full.users > 0 ? 1 : 0; });
    return usable_pages() - used;
  }

  /// Brings blocks to the device and keeps them there: every full page, and window pages from `first_window` on. All or nothing.
  bool acquire(const Blocks& blocks, std::size_t first_window) {
    ++clock_;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      blocks[i]->used_at = clock_;
      ++blocks[i]->full.users;
      if (i >= first_window) ++blocks[i]->window.users;
    }
    if (files_) fetch(blocks, first_window);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      if (bring<Full>(blocks[i]->full) && (i < first_window || bring<Window>(blocks[i]->window))) continue;
      release(blocks, first_window);
      return false;
    }
    return true;
  }

  /// The reverse; pages stay where they are until somebody needs the room.
  void release(const Blocks& blocks, std::size_t first_window) {
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      blocks[i]->used_at = clock_;
      --blocks[i]->full.users;
      if (i >= first_window) --blocks[i]->window.users;
    }
  }

  /// Window pages of blocks [first, end) are not needed any more.
  void release_windows(const Blocks& blocks, std::size_t first, std::size_t end) {
    for (std::size_t i = first; i < end; ++i) {
      if (--blocks[i]->window.users == 0 && !blocks[i]->indexed) blocks[i]->window = {};
    }
  }

  /// Device pages for a new block, with one user.
  bool extend(const std::shared_ptr<Block>& block) {
    auto full = take<Full>();
    if (!full) return false;
    auto window = take<Window>();
    if (!window) return false;
    block->full.device = std::move(full);
    block->window.device = std::move(window);
    block->full.users = block->window.users = 1;
    block->used_at = ++clock_;
    blocks_.push_back(block);
    return true;
  }

  /// Merges a block into the one that the index has for the same tokens: its pages fill what that one lacks on the device, its users move.
  void join(Block& known, Block& block) {
    for (const auto place : {&Block::full, &Block::window}) {
      Place& to = known.*place;
      Place& from = block.*place;
      if (!to.device && from.device) to.device = std::move(from.device);
      to.users += from.users;
      from = {};
    }
    known.used_at = clock_;
  }

  /// A session is about to write the block's pages: copies of them on the host are out of date from now on.
  void will_write(Block& block) {
    block.full.host = {};
    block.window.host = {};
  }

  kvire::PageRef<kvire::DevicePage> request_row() { return tiers_->template allocate<kvire::space::Request>(); }

  /// Issues the loads that acquire() asked for and begins a step that depends on them.
  kvire::Result<StepIo> begin(const Batch& batch) {
    keep_reserve<Full>();
    keep_reserve<Window>();
    store_what_is_ready();
    if (!failure_.ok()) return failure_.error();
    auto step = tiers_->begin();
    if (!step) return step.error();
    return StepIo(*tiers_, std::move(step).value(), batch, options_, index_heads_, shared_);
  }

  /// Waits for everything under way.
  kvire::Status finish() {
    auto status = tiers_->finish();
    while (!to_store_.empty()) {
      store_what_is_ready();
      if (files_) files_->finish();
    }
    return status;
  }

 private:
  using BlockFiles = Files<IndexKey, Backend>;

  Cache(const ReplaySettings& options, int index_heads, std::unique_ptr<Tiers<IndexKey, Backend>> tiers, std::unique_ptr<BlockFiles> files)
      : options_(options), index_heads_(index_heads), tiers_(std::move(tiers)), files_(std::move(files)) {}

  template <class Space>
  static Place& place(Block& block) {
    if constexpr (std::is_same_v<Space, Full>) {
      return block.full;
    } else {
      return block.window;
    }
  }

  template <class F>
  void each_block(F&& f) {
    std::erase_if(blocks_, [](const auto& weak) { return weak.expired(); });
    for (const auto& weak : blocks_) f(*weak.lock());
  }

  template <class Space>
  void keep_on_host(Block& block) {
    Place& p = place<Space>(block);
    if (p.device && !p.host && (p.host = take_host<Space>(block.used_at))) tiers_->template backup<Space>(p.host, p.device);
  }

  void store_what_is_ready() {
    std::erase_if(to_store_, [&](const auto& weak) {
      const auto block = weak.lock();
      return !block || files_->store(*block, tiers_->host());
    });
  }

  // Reads what is in files alone to the host. What finds no room there, or turns out lost, is nowhere from now on.
  void fetch(const Blocks& blocks, std::size_t first_window) {
    std::vector<typename BlockFiles::Fetch> fetches;
    const auto room = [&]<class Space>(Block& block) {
      Place& p = place<Space>(block);
      if (p.device || p.host || !p.file) return kvire::PageRef<kvire::HostPage>();
      auto page = take_host<Space>(clock_);
      p.file = static_cast<bool>(page);
      lost_blocks_ += page ? 0 : 1;
      return page;
    };
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      typename BlockFiles::Fetch f{blocks[i].get(), room.template operator()<Full>(*blocks[i]), {}};
      if (i >= first_window) f.window = room.template operator()<Window>(*blocks[i]);
      if (f.full || f.window) fetches.push_back(std::move(f));
    }
    if (!fetches.empty()) lost_blocks_ += files_->fetch(fetches, tiers_->host());
  }

  template <class Space>
  bool bring(Place& place) {
    if (place.device) return true;
    if (!place.host) return false;
    auto page = take<Space>();
    if (!page) return false;
    tiers_->template load<Space>(place.host, page);
    place.device = std::move(page);
    place.from_host = true;
    return true;
  }

  // A device page, evicting others if need be; empty if all are in use.
  template <class Space>
  kvire::PageRef<kvire::DevicePage> take() {
    for (;;) {
      if (auto page = tiers_->template allocate<Space>()) return page;
      if (!tiers_->wait_for_backup() && !evict<Space>()) return {};
    }
  }

  // Evicts ahead of need, so that the copies run while the step computes.
  template <class Space>
  void keep_reserve() {
    if (tiers_->template free_pages<Space>() < std::min<std::int64_t>(4, options_.device_pages / 8)) evict<Space>();
  }

  // Blocks with a page of the space on a side that nobody needs, least recently used first, children before their parents.
  template <class Space, class Wanted>
  std::vector<Block*> least_recent(std::size_t count, Wanted&& wanted) {
    std::vector<Block*> found;
    each_block([&](Block& b) {
      if (wanted(place<Space>(b))) found.push_back(&b);
    });
    const auto older = [](const Block* a, const Block* b) { return a->used_at != b->used_at ? a->used_at < b->used_at : a->depth > b->depth; };
    const auto end = found.begin() + static_cast<std::ptrdiff_t>(std::min(count, found.size()));
    std::partial_sort(found.begin(), end, found.end(), older);
    found.erase(end, found.end());
    return found;
  }

  // Sends a few device pages to the host tier in one transfer and gives them up. Pages that the host has already, or has no room for, are
  // given up at once.
  template <class Space>
  bool evict() {
    constexpr std::size_t batch = 4;
    const auto victims = least_recent<Space>(batch, [&](const Place& p) { return p.device && p.users == 0; });
    for (Block* block : victims) {
      Place& p = place<Space>(*block);
      p.leaving = true;
      if (!p.host && (p.host = take_host<Space>(block->used_at))) tiers_->template backup<Space>(p.host, p.device);
    }
    if (auto status = tiers_->issue_backups(); !status.ok() && failure_.ok()) failure_ = status;
    for (Block* block : victims) {
      place<Space>(*block).device = {};
      place<Space>(*block).from_host = place<Space>(*block).leaving = false;
    }
    return !victims.empty();
  }

  // A host page for a block last used at `used_at`; if the tier is full, one that has been unused for longer is dropped.
  template <class Space>
  kvire::PageRef<kvire::HostPage> take_host(std::uint64_t used_at) {
    if (options_.host_pages == 0) return {};
    for (;;) {
      if (auto page = tiers_->template allocate_host<Space>()) return page;
      const auto victims = least_recent<Space>(1, [](const Place& p) { return p.host && p.users == 0 && !p.leaving; });
      if (victims.empty() || victims.front()->used_at > used_at) return {};
      place<Space>(*victims.front()).host = {};
    }
  }

  const ReplaySettings options_;
  const int index_heads_;
  std::unique_ptr<Tiers<IndexKey, Backend>> tiers_;
  typename Io::Shared shared_;  // what steps hand on to each other
  std::unique_ptr<BlockFiles> files_;  // none: no file tier
  std::vector<std::weak_ptr<Block>> to_store_;
  std::int64_t lost_blocks_ = 0;
  PrefixIndex index_;
  std::vector<std::weak_ptr<Block>> blocks_;
  std::uint64_t clock_ = 0;
  kvire::Status failure_;
};

}  // namespace engine
