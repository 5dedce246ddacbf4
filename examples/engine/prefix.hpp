// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include <kvire/base/ids.hpp>
#include <kvire/pool/page_ref.hpp>
#include <kvire/tier/prefix_hash.hpp>

#include "batch.hpp"

namespace engine {

/// Where one page of a block is: on the device, on the host, in a file, in several of these or nowhere any more.
struct Place {
  kvire::PageRef<kvire::DevicePage> device;
  kvire::PageRef<kvire::HostPage> host;
  int users = 0;           ///< active sessions that need it on the device
  bool from_host = false;  ///< the device page was filled by a load
  bool leaving = false;    ///< on its way to the host in the present round
  bool file = false;       ///< the file tier had it when it was asked

  bool anywhere() const { return device || host || file; }
};

/// 256 raw tokens of some sequence and what the cache keeps of them: a page id of the full space and one of the window space.
/// Complete blocks of prompts are shared through the index and never written again; all others belong to one session.
struct Block {
  std::shared_ptr<Block> parent;
  int depth = 0;
  std::uint64_t hash = 0;  ///< of the whole prefix
  std::vector<int> tokens;
  Place full;
  Place window;
  std::uint64_t used_at = 0;
  bool indexed = false;
  bool asked = false;          ///< the file tier has been asked for it
  bool kept = false;           ///< the file tier has it, or has been given it
  kvire::Hash128 name = {};    ///< of the whole prefix, for the file tier; of indexed blocks
};

/// The name of the prefix that ends with these tokens behind `parent` (null: the empty prefix).
inline kvire::Hash128 prefix_name(const Block* parent, const int* tokens) {
  return kvire::prefix_hash(parent != nullptr ? parent->name : kvire::Hash128(), tokens, page_raw_tokens);
}

using Blocks = std::vector<std::shared_ptr<Block>>;

/// Complete blocks by the hash of their whole prefix, verified against the tokens. A block whose pages are all gone stays as a name, so that
/// its descendants find it again once somebody has computed it anew.
class PrefixIndex {
 public:
  /// The indexed block that continues `parent` (null: the empty prefix) with these tokens, or null.
  std::shared_ptr<Block> find(const std::shared_ptr<Block>& parent, const int* tokens) const {
    const auto [first, last] = blocks_.equal_range(hash(parent.get(), tokens));
    for (auto at = first; at != last; ++at) {
      const Block& block = *at->second;
      if (block.parent == parent && std::equal(block.tokens.begin(), block.tokens.end(), tokens)) return at->second;
    }
    return nullptr;
  }

  void insert(const std::shared_ptr<Block>& block, const int* tokens) {
    block->tokens.assign(tokens, tokens + page_raw_tokens);
    block->hash = hash(block->parent.get(), tokens);
    block->name = prefix_name(block->parent.get(), tokens);
    block->indexed = true;
    blocks_.emplace(block->hash, block);
  }

 private:
  static std::uint64_t hash(const Block* parent, const int* tokens) {
    std::uint64_t h = parent != nullptr ? parent->hash : 0;
    for (int i = 0; i < page_raw_tokens; ++i) h = mix(h ^ static_cast<std::uint64_t>(tokens[i]));
    return h;
  }

  std::unordered_multimap<std::uint64_t, std::shared_ptr<Block>> blocks_;
};

/// First block whose window page a session needs that has computed `computed` tokens: the next row looks back over the window.
inline std::size_t first_window_block(std::int64_t computed) {
  return static_cast<std::size_t>(std::max<std::int64_t>(0, computed - window_tokens + 1) / page_raw_tokens);
}

}  // namespace engine
