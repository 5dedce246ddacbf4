// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <tests/support/cache_rig.hpp>
#include <tests/support/file_tier_case.hpp>

// A tiered cache of the small model. The content of a page follows from its prefix, so that anybody can tell what it must be.

namespace kvire_test {

struct TierSizes {
  std::int64_t device = 9;  ///< pages of each space, the null page included
  std::int64_t host = 17;   ///< 0: no host tier
  kvire::TieredOptions options = {.window_tokens = 20};  ///< the next token looks back to two pages
};

template <class Policy = kvire::Lru, class Files = kvire::NoFiles>
class TierRig : public CacheRig<SmallModel<SmallFp8>, Policy, Files> {
  using Base = CacheRig<SmallModel<SmallFp8>, Policy, Files>;
  using Base::cache_, Base::compute_, Base::device_, Base::gate_, Base::host_, Base::root_;

 public:
  using Model = SmallModel<SmallFp8>;
  using typename Base::Cache, typename Base::Tokens;
  static constexpr std::int64_t page = 16;

  explicit TierRig(const TierSizes& sizes = {}, Files* files = nullptr)
      : Base(SmallSchedule::layers, sizes.device, sizes.host, sizes.options, files, "small") {}

  kvire::Stream<kvire::Host>& compute() { return compute_; }
  std::int64_t wrong_pages() const { return wrong_; }

  /// Inverts a bit of a page that the host has and nobody is copying; false if that is not so.
  bool flip_on_host(std::int32_t node) {
    constexpr int space = Model::space_index<kvire::space::Full>();
    if (!cache_.cache().has(node, space, kvire::CacheTier::host)) return false;
    for (int s = 0; s < Model::space_count; ++s) {
      if (cache_.cache().in_flight(node, s)) return false;  // a record is made of all spaces
    }
    kvire::pool_access::view(host_.template entry<SmallLatent>(), kvire::EntrySlot(1)).page(cache_.cache().host(node, space).id().value)[77] ^= std::byte{16};
    return true;
  }

  template <class Space>
  auto& device_ledger() {
    return device_.template ledger<Space>();
  }
  template <class Space>
  auto& host_ledger() {
    return host_.template ledger<Space>();
  }
  /// `n` tokens of a sequence; sequences differ from their first token on.
  static Tokens text(int sequence, std::int64_t n) {
    Tokens tokens(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = sequence * 1000 + static_cast<kvire::TokenId>(i);
    return tokens;
  }

  /// What a step does with a held prefix, and a tail: a kernel a layer looks at every page that the next token needs, behind the layer's load. Pages with other
  /// bytes than their prefix says count as wrong. Error: of the gate, or of a load; what the step has seen does not count then.
  kvire::Status read(const typename Cache::Held& held, const typename Cache::Pages& tail = {}, const kvire::Hash128& tail_name = {}) {
    if (auto status = Cache::check(held); !status.ok()) return status;
    auto step = gate_.begin(held.loads, compute_);
    if (!step.ok()) return step.error();
    std::vector<std::int32_t> path(static_cast<std::size_t>(held.prefix.pages()));
    cache_.cache().path(held.prefix.node(), path);
    kvire::Status status;
    std::atomic<std::int64_t> wrong{0};
    Model::for_each([&]<class Entry>() {
      const int space = Model::template space_index<typename Entry::space>();
      std::vector<std::pair<std::int32_t, std::uint32_t>> wanted;
      for (std::size_t i = 0; i < path.size(); ++i) {
        if (!cache_.cache().needed(space, static_cast<std::int64_t>(path.size() - 1 - i))) continue;
        wanted.emplace_back(cache_.cache().device(path[i], space).id().value, seed<Entry>(path[i]));
      }
      if (const auto& own = tail[static_cast<std::size_t>(space)]) wanted.emplace_back(own.id().value, seed<Entry>(tail_name));
      auto& pool = device_.template entry<Entry>();
      for (int slot = 0; slot < pool.layers() && status.ok(); ++slot) {
        auto lease = step.value().read(pool, kvire::EntrySlot(slot));
        if (!lease.ok()) {
          status = lease.error();
          break;
        }
        kvire::launch(compute_, [&wrong, wanted, slot](const auto& view) { wrong += wrong_in<typename Entry::policy>(view, wanted, slot); }, lease.value());
      }
    });
    auto done = compute_.record("step").wait();
    for (const auto& result : {status, done, step.value().status()}) {
      if (!result.ok()) return result;
    }
    wrong_ += wrong;
    return {};
  }

  /// A request: the prefix that is there, read; the rest computed and published. The returned prefix ends behind its last whole page.
  kvire::Result<typename Cache::Held> run(const Tokens& tokens) {
    auto held = cache_.acquire(root_, tokens);
    if (auto status = read(held); !status.ok()) return status.error();
    for (std::int64_t at = held.tokens; at + page <= static_cast<std::int64_t>(tokens.size()); at += page) {
      auto status = compute(held, std::span(tokens).subspan(static_cast<std::size_t>(at), page));
      if (!status.ok()) return status.error();
    }
    return held;
  }

  /// One page of a request, made and published.
  kvire::Status compute(typename Cache::Held& held, std::span<const kvire::TokenId> tokens) {
    auto pages = make_pages(held, tokens);
    return pages.ok() ? cache_.publish(held, tokens, std::span(&pages.value(), 1)) : kvire::Status(pages.error());
  }

  /// A tail behind the prefix, made and parked.
  kvire::Status park(const typename Cache::Held& held, std::span<const kvire::TokenId> tokens) {
    auto pages = make_pages(held, tokens);
    return pages.ok() ? cache_.park(held, tokens, pages.value()) : kvire::Status(pages.error());
  }
  /// Goes on from a tail and reads all that it needs, as `read`. Returns the tail's tokens.
  kvire::Result<std::int64_t> resume(typename Cache::Held& held, std::span<const kvire::TokenId> tokens) {
    typename Cache::Pages pages;
    const std::int64_t size = cache_.resume(held, tokens, pages);
    const auto name = cache_.cache().name_below(held.prefix.node(), tokens.first(static_cast<std::size_t>(size)));
    if (auto status = read(held, pages, name); !status.ok()) return status.error();
    held.tokens -= size;  // nobody writes on
    return size;
  }

 private:
  kvire::Result<typename Cache::Pages> make_pages(const typename Cache::Held& held, std::span<const kvire::TokenId> tokens) {
    typename Cache::Pages pages;
    auto full = cache_.template allocate<kvire::space::Full>();
    if (!full.ok()) return full.error();
    auto window = cache_.template allocate<kvire::space::Window>();
    if (!window.ok()) return window.error();
    pages[Model::space_index<kvire::space::Full>()] = std::move(full).value();
    pages[Model::space_index<kvire::space::Window>()] = std::move(window).value();
    const auto name = cache_.cache().name_below(held.prefix.node(), tokens);
    Model::for_each([&]<class Entry>() {
      fill(device_.template entry<Entry>(), pages[Model::template space_index<typename Entry::space>()].id(), seed<Entry>(name));
    });
    return pages;
  }
  template <class Entry>
  static std::uint32_t seed(const kvire::Hash128& name) {
    return static_cast<std::uint32_t>(name.low) * 8 + static_cast<std::uint32_t>(Model::template index_of<Entry>());
  }
  template <class Entry>
  std::uint32_t seed(std::int32_t node) const {
    return seed<Entry>(cache_.cache().name(node));
  }
  template <class P, class View>
  static std::int64_t wrong_in(const View& view, const std::vector<std::pair<std::int32_t, std::uint32_t>>& wanted, int slot) {
    std::int64_t wrong = 0;
    for (const auto& [id, s] : wanted) {
      bool right = id > 0;
      for (std::int64_t i = 0; right && i < P::page_bytes; ++i) right = view.page(id)[i] == pattern(s, slot, i);
      wrong += right ? 0 : 1;
    }
    return wrong;
  }

  std::int64_t wrong_ = 0;
};

}  // namespace kvire_test
