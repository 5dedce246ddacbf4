// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/layout/entry.hpp>
#include <kvire/layout/fingerprint.hpp>

KVIRE_NAMESPACE_BEGIN

namespace rule {
template <class Bundle, class Space, int FewestRawTokens, int MostRawTokens>
struct SameRawTokens {
  static_assert(FewestRawTokens == MostRawTokens,
                "kvire [layout.raw-tokens-per-page]: entries of kind tokens that share page ids must cover the same raw tokens per page. Otherwise one id names "
                "different tokens in two pools. Fix: change tokens_per_page so that ratio * tokens_per_page agree, or give one entry a space of its own.");
};
template <class Bundle, bool Unique>
struct EntryNames {
  static_assert(Unique,
                "kvire [layout.entry-names]: every entry of a bundle has a name of its own. A transfer, a message or a stored record could not tell two apart. "
                "Fix: rename one of them, or drop the duplicate.");
};
template <class Bundle, class Entry, int Ratio, int Slots, bool Kept>
struct EntryRows {
  static_assert(Kept,
                "kvire [layout.entry-rows]: an entry has rows: some layer of the model owns it, and one of kind Tokens<ratio> has a ratio of at least 1. "
                "Otherwise the model would run without that cache. Fix: correct the ratio or the entry's owners, or drop the entry.");
};
template <class Bundle, bool Unique>
struct SpaceNames {
  static_assert(Unique,
                "kvire [layout.space-names]: every page-id space of a bundle has a name of its own. Fingerprints name spaces, and could not tell entries that share "
                "page ids from entries that do not. Fix: rename one of the spaces, or let the entries share one.");
};
template <class Bundle, class Space, bool Used>
struct SpaceOfBundle {
  static_assert(Used,
                "kvire [layout.no-such-space]: a bundle answers only for the page-id spaces that its entries use. Pages of another space would belong to no entry. "
                "Fix: name a space of the bundle's entries, or add an entry that lives in this one.");
};
template <class Bundle, class Entry, bool Member>
struct EntryOfBundle {
  static_assert(Member,
                "kvire [layout.no-such-entry]: a bundle answers only for the entries in its list. An absent entry would be left out of every transfer. "
                "Fix: add the entry to the CacheBundle, or name one that it has.");
};
}  // namespace rule

namespace detail {

/// True if `Entry` is the first of `Entries` in its space.
template <class Entry, class... Entries>
constexpr bool first_of_space() {
  bool earlier = false;
  bool reached = false;
  ((reached = reached || kstd::is_same_v<Entry, Entries>, earlier = earlier || (!reached && kstd::is_same_v<typename Entry::space, typename Entries::space>)),
   ...);
  return !earlier;
}

}  // namespace detail

/// Everything a model keeps per token, window or request: a type list over which pools, mirrors, transfers and records fold, so that no
/// companion is forgotten. `Schedule` names the model's layers: `layers`, and `ratio(layer)` where owners ask for it.
template <class Schedule, class... Entries>
struct CacheBundle {
  using schedule = Schedule;
  static constexpr int layers = Schedule::layers;
  static constexpr int entry_count = sizeof...(Entries);

  /// Calls f.template operator()<Entry>() for each entry in order.
  template <class F>
  static constexpr void for_each(F&& f) {
    (f.template operator()<Entries>(), ...);
  }

  template <class Entry>
  static constexpr bool has = (kstd::is_same_v<Entry, Entries> || ...);

  template <class Entry>
  static constexpr int index_of() {
    (void)sizeof(rule::EntryOfBundle<CacheBundle, Entry, has<Entry>>);
    int index = 0;
    bool found = false;
    ((found = found || kstd::is_same_v<Entry, Entries>, index += found ? 0 : 1), ...);
    return index;
  }

  /// True for the first entry of each space: folding over those visits every space once.
  template <class Entry>
  static constexpr bool first_of_space = detail::first_of_space<Entry, Entries...>();

  static constexpr int space_count = (static_cast<int>(detail::first_of_space<Entries, Entries...>()) + ...);

  /// Position of a space among the distinct spaces, in order of first appearance; -1 if no entry uses it.
  template <class Space>
  static constexpr int space_index() {
    int index = 0;
    bool found = false;
    ((found = found || kstd::is_same_v<typename Entries::space, Space>, index += !found && detail::first_of_space<Entries, Entries...>() ? 1 : 0), ...);
    return found ? index : -1;
  }
  /// The same where the bundle must have the space.
  template <class Space>
  static constexpr int index_of_space() {
    (void)sizeof(rule::SpaceOfBundle<CacheBundle, Space, (space_index<Space>() >= 0)>);
    return space_index<Space>();
  }

  /// Raw tokens that a page of the space covers; 0 if no entry of kind tokens lives there.
  template <class Space>
  static constexpr int raw_tokens_per_page() {
    int n = 0;
    ((n = Entries::counts_tokens && kstd::is_same_v<typename Entries::space, Space> ? Entries::raw_tokens_per_page : n), ...);
    return n;
  }

  /// Bytes of one page id of `Space` over all its entries and their owners among the model's first `model_layers` layers.
  template <class Space>
  static constexpr Bytes page_bytes(int model_layers = layers) {
    kstd::int64_t n = 0;
    ((n += kstd::is_same_v<typename Entries::space, Space> ? Entries::policy::page_bytes * Entries::slots(model_layers) : 0), ...);
    return Bytes(n);
  }

  /// Bytes per raw token of the entries of `Space`, exact where the page bytes divide (they are doubles of integers below 2^53). For spaces that
  /// cover raw tokens.
  template <class Space>
    requires(raw_tokens_per_page<Space>() > 0)
  static constexpr double bytes_per_raw_token(int model_layers = layers) {
    return static_cast<double>(page_bytes<Space>(model_layers).count) / raw_tokens_per_page<Space>();
  }

 private:
  template <class Space>
  static constexpr int extreme_raw_tokens(bool want_most) {
    int value = 0;
    ((value = Entries::counts_tokens && kstd::is_same_v<typename Entries::space, Space> &&
                      (value == 0 || (want_most ? Entries::raw_tokens_per_page > value : Entries::raw_tokens_per_page < value))
                  ? Entries::raw_tokens_per_page
                  : value),
     ...);
    return value;
  }
  static constexpr bool entry_names_are_unique() {
    const char* const names[] = {Entries::name...};
    return equal_names_are_one(names, [](int i) { return i; });
  }
  static constexpr bool space_names_are_unique() {
    const char* const names[] = {Entries::space::name...};
    const int spaces[] = {space_index<typename Entries::space>()...};
    return equal_names_are_one(names, [&](int i) { return spaces[i]; });
  }
  template <class Thing>
  static constexpr bool equal_names_are_one(const char* const (&names)[entry_count], Thing thing) {
    for (int i = 0; i < entry_count; ++i) {
      for (int j = i + 1; j < entry_count; ++j) {
        if (thing(i) != thing(j) && detail::equal_text(names[i], names[j])) return false;
      }
    }
    return true;
  }

 public:
  /// Checks every rule of the bundle and of its policies.
  static constexpr bool require() {
    ((void)require_layout<typename Entries::policy>(), ...);
    (void)sizeof(rule::EntryNames<CacheBundle, entry_names_are_unique()>);
    (void)sizeof(rule::SpaceNames<CacheBundle, space_names_are_unique()>);
    ((void)sizeof(rule::EntryRows<CacheBundle, Entries, Entries::kind::ratio, Entries::slots(layers),
                                  (Entries::slots(layers) > 0 && (!Entries::counts_tokens || Entries::kind::ratio > 0))>),
     ...);
    ((void)sizeof(rule::SameRawTokens<CacheBundle, typename Entries::space, extreme_raw_tokens<typename Entries::space>(false),
                                      extreme_raw_tokens<typename Entries::space>(true)>),
     ...);
    return true;
  }
};

namespace detail {
template <class Bundle>
struct CanonicalBundle {
  template <class Out>
  static constexpr void to(Out& out) {
    out << "kvire.bundle/" << fingerprint_version << ";layers=" << Bundle::layers;
    Bundle::for_each([&]<class Entry>() {
      out << ";entry{" << Entry::name << ":" << name_of(Entry::kind::kind) << "*" << Entry::kind::ratio << ";space=" << Entry::space::name << ";layers=";
      bool first = true;
      for (int layer = 0; layer < Bundle::layers; ++layer) {
        if (!Entry::owns(LayerId(layer))) continue;
        out << (first ? "" : ",") << layer;
        first = false;
      }
      out << ";page=" << hex_text(fingerprint128<typename Entry::policy>).c_str() << "}";
    });
  }
};
}  // namespace detail

/// Canonical form of a bundle: each entry's name, kind, ratio, space, owning layers and the fingerprint of its policy.
template <class Bundle>
constexpr auto canonical_bundle_text() {
  return exact_text<detail::CanonicalBundle<Bundle>>();
}

template <class Bundle>
inline constexpr Hash128 bundle_fingerprint128 = [] {
  static_assert(Bundle::require());
  constexpr auto text = canonical_bundle_text<Bundle>();
  return hash_text(text.data, text.size);
}();

template <class Bundle>
inline constexpr kstd::uint64_t bundle_fingerprint64 = bundle_fingerprint128<Bundle>.high;

KVIRE_NAMESPACE_END
