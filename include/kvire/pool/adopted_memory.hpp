// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <kvire/base/ints.hpp>
#include <kvire/base/result.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// Pages of one layer, as bytes: `pages` runs of `page_bytes`, each `stride`, which is no less, behind the one before.
struct PageRuns {
  std::uintptr_t base = 0;
  std::int64_t stride = 0;
  std::int64_t pages = 0;
  std::int64_t page_bytes = 0;

  std::uintptr_t page(std::int64_t i) const { return base + static_cast<std::uintptr_t>(stride) * static_cast<std::uintptr_t>(i); }
  std::uintptr_t end(std::int64_t i) const { return page(i) + static_cast<std::uintptr_t>(page_bytes); }
};

/// Whether a byte is of a page of either. O(1) for one stride, otherwise O(pages).
inline bool pages_meet(const PageRuns& a, const PageRuns& b) {
  const PageRuns& low = a.base <= b.base ? a : b;
  const PageRuns& high = a.base <= b.base ? b : a;
  // With one stride the pages of both lie to each other as the first of the higher ones lies to the lower ones.
  const std::int64_t looks = a.stride == b.stride ? 1 : high.pages;
  for (std::int64_t i = 0; i < looks && high.page(i) < low.end(low.pages - 1); ++i) {
    // Of the lower pages that begin before the end of this one, the last reaches furthest.
    const auto before = (high.end(i) - 1 - low.base) / static_cast<std::uintptr_t>(low.stride);
    const auto last = min_of(static_cast<std::uintptr_t>(low.pages - 1), before);
    if (high.page(i) < low.end(static_cast<std::int64_t>(last))) return true;
  }
  return false;
}

/// The memory that pools of this process have adopted: none of it twice at a time. A claim lasts as long as somebody holds it.
class AdoptedMemory {
 public:
  /// Also keeps `owner` alive. Error busy, with both pools and layers, if a page shares a byte with one that is claimed.
  static Result<std::shared_ptr<void>> claim(std::string name, std::vector<PageRuns> layers, std::shared_ptr<void> owner) {
    AdoptedMemory& all = get();
    std::lock_guard lock(all.mutex_);
    for (const Claim* other : all.claims_) {
      for (std::size_t i = 0; i < layers.size(); ++i) {
        for (std::size_t j = 0; j < other->layers.size(); ++j) {
          if (pages_meet(layers[i], other->layers[j])) return taken(name, i, other->name, j);
        }
      }
    }
    auto claim = std::make_shared<Claim>(std::move(name), std::move(layers), std::move(owner));
    all.claims_.push_back(claim.get());
    return Result<std::shared_ptr<void>>(std::move(claim));
  }

 private:
  struct Claim {
    Claim(std::string n, std::vector<PageRuns> l, std::shared_ptr<void> o) : name(std::move(n)), layers(std::move(l)), owner(std::move(o)) {}
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;
    ~Claim() {
      std::lock_guard lock(get().mutex_);
      std::erase(get().claims_, this);
    }
    std::string name;
    std::vector<PageRuns> layers;
    std::shared_ptr<void> owner;  // goes when the lock has been left
  };

  static Error taken(const std::string& name, std::size_t layer, const std::string& other, std::size_t other_layer) {
    return {ErrorCode::busy, "adopting " + name + ": pages of its layer " + std::to_string(layer) + " are pages of layer " + std::to_string(other_layer) + " of pool " +
                                 other + ", which has adopted them. Each of two pools would give them out, and wait for its own transfers alone. Use one pool for both, or "
                                 "let the first go, with its page references and tickets"};
  }

  // Never destroyed: a pool may be a static of any file.
  static AdoptedMemory& get() {
    static auto* all = new AdoptedMemory;
    return *all;
  }

  std::mutex mutex_;
  std::vector<const Claim*> claims_;
};

}  // namespace detail

KVIRE_NAMESPACE_END
