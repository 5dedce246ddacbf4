// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <kvire/tier/checksum.hpp>
#include <tests/support/cache_rig.hpp>

// What a cache sees of a model whose every token depends on all that the tokens before it left: for each token, all rows that the next one looks back to
// are read, of every entry and layer, and the rows that it writes follow from them. One byte that does not come back changes every later output.

namespace kvire_test {

struct TailSizes {
  int layers = 3;
  std::int64_t device = 7;  ///< pages of each space, the null page included
  std::int64_t host = 0;    ///< 0: no host tier
  kvire::TieredOptions options = {};
};

template <class Bundle, class Files = kvire::NoFiles>
class TailRig : public CacheRig<Bundle, kvire::Lru, Files> {
  using Base = CacheRig<Bundle, kvire::Lru, Files>;
  using Base::cache_, Base::compute_, Base::device_, Base::gate_, Base::root_;

 public:
  using typename Base::Cache, typename Base::Tokens;
  static constexpr std::int64_t page = kvire::prefix_shape<Bundle>(1).page_tokens;

  struct Request {
    Tokens tokens;
    std::int64_t computed = 0;
    typename Cache::Held held = {};
    typename Cache::Pages pages = {};  ///< of the page under way

    std::span<const kvire::TokenId> tail() const { return std::span(tokens).subspan(0, static_cast<std::size_t>(computed)).last(static_cast<std::size_t>(computed % page)); }
  };

  explicit TailRig(const TailSizes& sizes, Files* files = nullptr)
      : Base(sizes.layers, sizes.device, sizes.host, sizes.options, files, "chain"), window_(sizes.options.window_tokens) {}

  /// Begins with what the cache has of the tokens, at most `most` of them.
  Request begin(Tokens tokens, std::int64_t most) {
    Request r{std::move(tokens)};
    const auto known = std::span<const kvire::TokenId>(r.tokens).first(static_cast<std::size_t>(most));
    r.held = cache_.acquire(root_, known);
    (void)cache_.resume(r.held, known.subspan(static_cast<std::size_t>(r.held.tokens)), r.pages);
    r.computed = r.held.tokens;
    return r;
  }
  /// Lets go of a request, and parks its tail.
  kvire::Status park(Request&& r) {
    Request gone = std::move(r);
    return gone.computed % page == 0 ? kvire::Status() : cache_.park(gone.held, gone.tail(), gone.pages);
  }

  /// Computes the next token, and publishes the page that it completes. The output depends on every row that the token can see, and on the token.
  std::uint64_t step(Request& r) {
    if (r.computed % page == 0) {
      kvire::detail::for_each_space<Bundle>([&]<class Space>(int s) { r.pages[static_cast<std::size_t>(s)] = cache_.template allocate<Space>().value(); });
    }
    const std::uint64_t output = kvire::detail::mix64(look(r) ^ static_cast<std::uint64_t>(r.tokens[static_cast<std::size_t>(r.computed)]));
    each_layer([&]<class Entry>(kvire::EntrySlot slot) {
      const Rows rows = written<Entry>(r.computed);
      const auto own = r.pages[space_of<Entry>()].id();
      auto lease = step_->write(device_.template entry<Entry>(), slot, std::span(&own, 1)).value();
      if (rows.first == rows.end) return;
      kvire::launch(compute_, [=](const auto& view) {
        std::uint64_t bits = output + 1000 * Bundle::template index_of<Entry>() + static_cast<std::uint64_t>(slot.value);
        std::byte* const row = view.page(own.value) + rows.first % row_count<Entry> * row_bytes<Entry>;
        for (std::int64_t i = 0; i < row_bytes<Entry>; ++i) row[i] = static_cast<std::byte>((bits = kvire::detail::mix64(bits + 1)) >> 56);
      }, lease);
    });
    (void)compute_.record("wrote").wait();
    if (++r.computed % page == 0) {
      const auto whole = std::span(r.tokens).subspan(static_cast<std::size_t>(r.computed - page), static_cast<std::size_t>(page));
      (void)cache_.publish(r.held, whole, std::span(&r.pages, 1));
      r.pages = {};
    }
    return output;
  }

  /// A digest of all rows that the next token can see; 0 if a load that brings them has failed.
  std::uint64_t look(const Request& r) {
    if (!Cache::check(r.held).ok()) return 0;
    step_ = std::make_unique<kvire::Step<kvire::Host>>(gate_.begin(r.held.loads, compute_).value());
    std::uint64_t digest = 1;
    bool leased = true;
    each_layer([&]<class Entry>(kvire::EntrySlot slot) {
      auto lease = step_->read(device_.template entry<Entry>(), slot);
      leased = leased && lease.ok();  // the failure of a load that is known by now
      if (!lease.ok()) return;
      std::vector<std::pair<std::int32_t, std::int64_t>> places;  // page, row of it
      const Rows rows = visible<Entry>(r.computed);
      for (std::int64_t i = rows.first; i < rows.end; ++i) places.emplace_back(page_of<Entry>(r, i).value, i % row_count<Entry>);
      kvire::launch(compute_, [&digest, places = std::move(places)](const auto& view) {
        for (const auto& [id, row] : places) digest = kvire::detail::mix64(digest) ^ kvire::Xxh64::of(view.page(id) + row * row_bytes<Entry>, row_bytes<Entry>);
      }, lease.value());
    });
    const bool ok = compute_.record("looked").wait().ok() && step_->status().ok();
    return ok && leased ? digest : 0;
  }

  /// Turns over one bit of the last row of an entry that the next token can see, wherever it lies. False if there is none.
  template <class Entry>
  bool damage(const Request& r, kvire::EntrySlot slot, std::int64_t byte) {
    const Rows rows = visible<Entry>(r.computed);
    if (rows.first == rows.end) return false;
    const auto view = kvire::pool_access::view(device_.template entry<Entry>(), slot);
    view.page(page_of<Entry>(r, rows.end - 1).value)[(rows.end - 1) % row_count<Entry> * row_bytes<Entry> + byte % row_bytes<Entry>] ^= std::byte{16};
    return true;
  }
  template <class F>
  void each_layer(F&& f) {
    Bundle::for_each([&]<class Entry>() {
      for (int slot = 0; slot < device_.template entry<Entry>().layers(); ++slot) f.template operator()<Entry>(kvire::EntrySlot(slot));
    });
  }

 private:
  struct Rows {
    std::int64_t first = 0;
    std::int64_t end = 0;
  };

  template <class Entry>
  static constexpr std::int64_t row_count = Entry::policy::tokens_per_page;
  template <class Entry>
  static constexpr std::int64_t row_bytes = Entry::policy::page_bytes / row_count<Entry>;
  template <class Entry>
  static constexpr std::size_t space_of() {
    return static_cast<std::size_t>(Bundle::template space_index<typename Entry::space>());
  }

  // Rows of an entry, counted from the sequence's start, that the token at a position can see.
  template <class Entry>
  Rows visible(std::int64_t position) const {
    constexpr bool windowed = std::is_same_v<typename Entry::space, kvire::space::Window>;
    if constexpr (Entry::counts_tokens) {
      return {windowed ? std::max<std::int64_t>(0, position - window_ + 1) : 0, Entry::cached(kvire::RawTokens(position)).count};
    } else if constexpr (Entry::kind::kind == kvire::EntryKind::ring) {
      return {std::max<std::int64_t>(0, position - row_count<Entry> + 1), position};
    } else {
      return {position - position % row_count<Entry>, position};
    }
  }
  // The row that it writes: one, or none.
  template <class Entry>
  static Rows written(std::int64_t position) {
    if constexpr (Entry::counts_tokens) {
      return {Entry::cached(kvire::RawTokens(position)).count, Entry::cached(kvire::RawTokens(position + 1)).count};
    } else {
      return {position, position + 1};
    }
  }
  template <class Entry>
  kvire::DevicePage page_of(const Request& r, std::int64_t row) const {
    constexpr std::int64_t raw = Entry::counts_tokens ? Entry::kind::ratio : 1;
    const std::int64_t index = row * raw / page;
    const std::int64_t whole = r.held.prefix.pages();
    if (index >= whole) return r.pages[space_of<Entry>()].id();
    std::int32_t node = r.held.prefix.node();
    for (std::int64_t i = whole - 1; i > index; --i) node = cache_.cache().parent(node);
    return cache_.cache().device(node, static_cast<int>(space_of<Entry>())).id();
  }

  std::int64_t window_;
  std::unique_ptr<kvire::Step<kvire::Host>> step_;
};

}  // namespace kvire_test
