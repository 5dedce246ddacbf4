// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#if KVIRE_HAVE_XXHASH
#include <kvire/adapt/xxhash.hpp>
#endif
#if KVIRE_HAVE_LIBURING
#include <kvire/adapt/io_uring.hpp>
#endif
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/tier/file_tier.hpp>
#include <kvire/tier/prefix_namespace.hpp>

#include "prefix.hpp"
#include "replay.hpp"

namespace engine {

#if KVIRE_HAVE_XXHASH
using FileSum = kvire::adapt::Xxh3;
#else
using FileSum = kvire::Xxh64;
#endif
#if KVIRE_HAVE_LIBURING
using FileIo = kvire::adapt::UringIo;
#else
using FileIo = kvire::PosixIo;
#endif

/// Complete blocks in files: one record a block, its full page and, where there is one, its window page.
template <class IndexKey, class Backend>
class Files {
 public:
  using Entries = kvire::preset::deepseek_v4::Flash<IndexKey>;
  using Tier = kvire::FileTier<Entries, Backend, FileSum, FileIo>;
  using Pool = typename Tier::Pool;
  using Full = kvire::space::Full;
  using Window = kvire::space::Window;

  static kvire::Result<std::unique_ptr<Files>> make(const ReplaySettings& settings) {
    auto tier = Tier::make({.folder = settings.file_folder, .budget = kvire::Bytes(settings.file_bytes)}, settings.layers);
    if (!tier) return tier.error();
    const kvire::PrefixNamespace names{.model = settings.model_name, .layout = kvire::bundle_fingerprint128<Entries>};
    return std::unique_ptr<Files>(new Files(std::move(tier).value(), names.text()));
  }

  kvire::FileTierStats stats() const { return tier_.stats(); }

  /// Whether the page behind a prefix is in a file, and whether its window page is.
  std::optional<std::pair<bool, bool>> find(const kvire::Hash128& name, int depth) const {
    const auto pages = tier_.find(key(name, depth));
    if (!pages || pages->template of<Full>() == 0) return {};
    return std::pair(true, pages->template of<Window>() > 0);
  }

  /// Stores what the host has of a block. False: its pages are still being copied, or the tier is busy; to be asked again.
  bool store(const Block& block, const Pool& host) {
    if (!block.full.host) return true;
    kvire::BundleRefs<Entries, kvire::HostPage> refs;
    refs.template of<Full>().push_back(block.full.host);
    if (block.window.host) refs.template of<Window>().push_back(block.window.host);
    auto event = tier_.store(key(block.name, block.depth), host, std::move(refs));
    std::erase_if(storing_, [](const auto& e) { return kvire::is_final(e.query()); });
    const auto status = event.status();
    if (!status.ok()) return status.error().code != kvire::ErrorCode::busy;
    storing_.push_back(std::move(event));
    return true;
  }

  /// Reads blocks into host pages that the caller has allocated, all at once; waits. Returns how many did not arrive.
  struct Fetch {
    Block* block = nullptr;
    kvire::PageRef<kvire::HostPage> full, window;  ///< empty: not wanted
  };
  std::int64_t fetch(const std::vector<Fetch>& fetches, Pool& host) {
    std::vector<typename Tier::Wanted> wanted;
    for (const Fetch& f : fetches) {
      wanted.push_back({key(f.block->name, f.block->depth), {}});
      if (f.full) wanted.back().pages.template of<Full>().push_back(f.full);
      if (f.window) wanted.back().pages.template of<Window>().push_back(f.window);
    }
    const auto events = tier_.load(host, std::move(wanted));
    std::int64_t lost = 0;
    for (std::size_t i = 0; i < events.size(); ++i) {
      const bool arrived = events[i].wait().ok();
      lost += arrived ? 0 : 1;
      fetches[i].block->kept = arrived;
      // What did not arrive is nowhere: the block is computed again.
      const auto land = [&](Place& place, const kvire::PageRef<kvire::HostPage>& page) {
        if (!page) return;
        if (arrived) place.host = page;
        place.file = place.file && arrived;
      };
      land(fetches[i].block->full, fetches[i].full);
      land(fetches[i].block->window, fetches[i].window);
    }
    return lost;
  }

  void finish() {
    for (const auto& event : storing_) (void)event.wait();  // a store that fails costs a hit, no more
    storing_.clear();
  }

 private:
  Files(Tier tier, std::string names) : tier_(std::move(tier)), names_(std::move(names)) {}

  kvire::RecordKey key(const kvire::Hash128& name, int depth) const {
    return {.space = names_, .prefix = name, .first_token = std::int64_t{depth} * page_raw_tokens, .token_count = page_raw_tokens};
  }

  Tier tier_;
  std::string names_;
  std::vector<kvire::Event<kvire::Host>> storing_;
};

}  // namespace engine
