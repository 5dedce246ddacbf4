// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvire/tier/policy.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// Candidates for eviction, lowest rank first: a binary heap of node numbers. Uses are not reported to it: ranks only rise, so a rank that is out of
/// date is found, and mended, when it comes to the top. A lookup that hits therefore does not touch the queue.
template <EvictionPolicy Policy>
class PolicyQueue {
 public:
  explicit PolicyQueue(Policy policy = Policy()) : policy_(std::move(policy)) {}

  const Policy& policy() const { return policy_; }
  bool holds(std::int32_t node) const { return static_cast<std::size_t>(node) < position_.size() && position_[index(node)] >= 0; }

  /// Adds a node that is not there.
  void push(std::int32_t node, std::uint64_t rank) {
    if (position_.size() <= index(node)) position_.resize(index(node) + 1, -1);
    heap_.push_back({rank, node});
    up(heap_.size() - 1);
  }
  void remove(std::int32_t node) {
    const auto at = static_cast<std::size_t>(position_[index(node)]);
    position_[index(node)] = -1;
    const Entry last = heap_.back();
    heap_.pop_back();
    if (at == heap_.size()) return;
    heap_[at] = last;
    down(at);
    up(static_cast<std::size_t>(position_[index(last.node)]));
  }

  /// The node of lowest rank that may go, or -1; it stays in the queue. `rank(node)` is the rank of its last use; nodes for which `may_go` is
  /// false leave the queue, and whoever makes them eligible again pushes them again.
  template <class Rank, class MayGo>
  std::int32_t lowest(Rank&& rank, MayGo&& may_go) {
    while (!heap_.empty()) {
      Entry& top = heap_.front();
      const std::int32_t node = top.node;
      if (!may_go(node)) {
        remove(node);
      } else if (const std::uint64_t now = rank(node); now != top.rank) {
        top.rank = now;
        down(0);
      } else {
        return node;
      }
    }
    return -1;
  }
  void evicted(std::uint64_t rank) { policy_.evicted(rank); }

 private:
  struct Entry {
    std::uint64_t rank;
    std::int32_t node;
  };
  static std::size_t index(std::int32_t node) { return static_cast<std::size_t>(node); }

  void put(std::size_t at, const Entry& entry) {
    heap_[at] = entry;
    position_[index(entry.node)] = static_cast<std::int32_t>(at);
  }
  void up(std::size_t at) {
    const Entry entry = heap_[at];
    for (; at > 0 && entry.rank < heap_[(at - 1) / 2].rank; at = (at - 1) / 2) put(at, heap_[(at - 1) / 2]);
    put(at, entry);
  }
  void down(std::size_t at) {
    const Entry entry = heap_[at];
    for (std::size_t child = 2 * at + 1; child < heap_.size(); child = 2 * at + 1) {
      if (child + 1 < heap_.size() && heap_[child + 1].rank < heap_[child].rank) ++child;
      if (entry.rank <= heap_[child].rank) break;
      put(at, heap_[child]);
      at = child;
    }
    put(at, entry);
  }

  Policy policy_;
  std::vector<Entry> heap_;
  std::vector<std::int32_t> position_;  // of each node in the heap; -1: not there
};

}  // namespace detail

KVIRE_NAMESPACE_END
