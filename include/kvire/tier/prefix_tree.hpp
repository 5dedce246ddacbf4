// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvire/tier/prefix_hash.hpp>
#include <kvire/tier/prefix_namespace.hpp>
#include <kvire/tier/prefix_table.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// The names of a prefix cache: a tree whose edges are pages of tokens, below one root a namespace. A node stands for the prefix from its root on, so
/// any page boundary can be where two prefixes part. An edge of fewer tokens than a page is a tail: nothing hangs on it. Knows nothing of where pages are.
class PrefixTree {
 public:
  /// `keep_tokens`: pages are verified by their tokens; otherwise by the second half of their name.
  PrefixTree(std::int64_t page_tokens, bool keep_tokens) : page_tokens_(page_tokens), keep_tokens_(keep_tokens) {}

  std::int64_t page_tokens() const { return page_tokens_; }
  /// Whether the number is a node's: neither made up nor that of a node that is gone (unless its number has been given to another).
  bool live(std::int32_t node) const { return node >= 0 && index(node) < nodes_.size() && at(node).depth >= 0; }
  /// Node numbers are below this.
  std::size_t slots() const { return nodes_.size(); }
  /// Nodes below roots.
  std::int64_t pages() const { return static_cast<std::int64_t>(table_.size()) - static_cast<std::int64_t>(namespaces_.size()); }

  /// The namespace's root, made at first sight and kept as long as the tree.
  std::int32_t root(const PrefixNamespace& names) {
    const Hash128 name = names.digest();
    const std::int32_t known = table_.find(name.high, [&](std::int32_t n) { return is_root(n) && namespaces_[index(~at(n).parent)] == names; });
    if (known >= 0) return known;
    const std::int32_t node = take();
    at(node) = {.name = name, .parent = ~static_cast<std::int32_t>(namespaces_.size())};
    namespaces_.push_back(names);
    table_.insert(name.high, node);
    return node;
  }

  Hash128 name_below(std::int32_t parent, std::span<const TokenId> tokens) const {
    return prefix_hash(at(parent).name, tokens.data(), static_cast<std::int64_t>(tokens.size()));
  }

  /// Of all that the tokens begin with: out[i] is the name of the first i + 1. Requires as many tokens.
  void names_below(std::int32_t parent, std::span<const TokenId> tokens, std::span<Hash128> out) const {
    prefix_hashes(at(parent).name, tokens.data(), static_cast<std::int64_t>(out.size()), out.data());
  }

  /// The node that continues `parent` by this name and exactly these tokens, or -1.
  std::int32_t child(std::int32_t parent, const Hash128& name, std::span<const TokenId> tokens) const {
    return table_.find(name.high, [&](std::int32_t n) {
      const Node& node = at(n);
      if (node.parent != parent || node.name.low != name.low || node.tail != tail_of(tokens)) return false;
      return !keep_tokens_ || std::memcmp(tokens_of(n), tokens.data(), tokens.size_bytes()) == 0;
    });
  }

  /// Requires that there is no such child, and no more tokens than a page.
  std::int32_t add(std::int32_t parent, const Hash128& name, std::span<const TokenId> tokens) {
    const std::int32_t node = take();
    at(node) = {name, parent, at(parent).depth + 1, 0, tail_of(tokens), 0};
    ++at(parent).children;
    at(parent).tails += at(node).tail > 0 ? 1 : 0;
    if (keep_tokens_) std::memcpy(tokens_of(node), tokens.data(), tokens.size_bytes());
    table_.insert(name.high, node);
    return node;
  }

  /// Requires a node without children that is no root.
  void remove(std::int32_t node) {
    table_.erase(at(node).name.high, node);
    Node& above = at(at(node).parent);
    --above.children;
    above.tails -= at(node).tail > 0 ? 1 : 0;
    at(node).depth = -1;
    free_.push_back(node);
  }

  bool is_root(std::int32_t node) const { return at(node).parent < 0; }
  /// Requires a node that is no root.
  std::int32_t parent(std::int32_t node) const { return at(node).parent; }
  std::int32_t children(std::int32_t node) const { return at(node).children; }
  /// Tokens of a node that is less than a page; 0 for a whole one.
  std::int32_t tail(std::int32_t node) const { return at(node).tail; }
  /// Children that are tails.
  std::int32_t tails(std::int32_t node) const { return at(node).tails; }
  /// Pages from the root to the node's end, an unfinished one included.
  std::int32_t depth(std::int32_t node) const { return at(node).depth; }
  const Hash128& name(std::int32_t node) const { return at(node).name; }
  /// The namespace that the node belongs to.
  const PrefixNamespace& names(std::int32_t node) const {
    while (!is_root(node)) node = at(node).parent;
    return namespaces_[index(~at(node).parent)];
  }

 private:
  struct Node {
    Hash128 name;
    std::int32_t parent = -1;  // of a root: ~ its number among the namespaces
    std::int32_t depth = 0;  // -1: no node
    std::int32_t children = 0;
    std::int32_t tail = 0;
    std::int32_t tails = 0;
  };
  static constexpr std::size_t block_nodes = 64;

  static std::size_t index(std::int32_t node) { return static_cast<std::size_t>(node); }
  Node& at(std::int32_t node) { return nodes_[index(node)]; }
  const Node& at(std::int32_t node) const { return nodes_[index(node)]; }
  std::int32_t tail_of(std::span<const TokenId> tokens) const {
    return static_cast<std::int64_t>(tokens.size()) == page_tokens_ ? 0 : static_cast<std::int32_t>(tokens.size());
  }
  TokenId* tokens_of(std::int32_t node) const {
    return tokens_[index(node) / block_nodes].get() + static_cast<std::int64_t>(index(node) % block_nodes) * page_tokens_;
  }

  std::int32_t take() {
    if (!free_.empty()) {
      const std::int32_t node = free_.back();
      free_.pop_back();
      return node;
    }
    const auto node = static_cast<std::int32_t>(nodes_.size());
    nodes_.emplace_back();
    if (keep_tokens_ && index(node) % block_nodes == 0) {
      tokens_.emplace_back(new TokenId[block_nodes * static_cast<std::size_t>(page_tokens_)]);
    }
    return node;
  }

  std::int64_t page_tokens_;
  bool keep_tokens_;
  std::vector<Node> nodes_;
  std::vector<std::int32_t> free_;
  std::vector<PrefixNamespace> namespaces_;
  std::vector<std::unique_ptr<TokenId[]>> tokens_;
  PrefixTable table_;
};

}  // namespace detail

KVIRE_NAMESPACE_END
