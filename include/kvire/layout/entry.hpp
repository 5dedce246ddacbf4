// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/ids.hpp>
#include <kvire/base/units.hpp>
#include <kvire/layout/require.hpp>

KVIRE_NAMESPACE_BEGIN

/// A page-id space: entries of one space are addressed by the same page ids and live and die together. A tag type with a `name`.
namespace space {
/// Pages that cover the whole context.
struct Full {
  static constexpr const char* name = "full";
};
/// Pages that cover the sliding window, and what is kept per window page.
struct Window {
  static constexpr const char* name = "window";
};
/// One "page" a request: rows that belong to a running request and not to any token.
struct Request {
  static constexpr const char* name = "request";
};
}  // namespace space

/// How a bundle's entry relates to tokens.
enum class EntryKind : unsigned char {
  tokens,       ///< one row per `ratio` raw tokens
  ring,         ///< rows reused in turn within a page of the space
  request_rows  ///< rows of a request
};

constexpr const char* name_of(EntryKind kind) {
  switch (kind) {
    case EntryKind::tokens: return "tokens";
    case EntryKind::ring: return "ring";
    case EntryKind::request_rows: return "request_rows";
  }
  return "unknown";
}

/// One row per `Ratio` raw tokens.
template <int Ratio>
struct Tokens {
  static constexpr EntryKind kind = EntryKind::tokens;
  static constexpr int ratio = Ratio;
};
/// Rows reused in turn: row = position % rows of the page's policy.
struct Ring {
  static constexpr EntryKind kind = EntryKind::ring;
  static constexpr int ratio = 0;
};
struct RequestRows {
  static constexpr EntryKind kind = EntryKind::request_rows;
  static constexpr int ratio = 0;
};

/// Owners of an entry: which layers of the model keep it.
struct AllLayers {
  KVIRE_HD static constexpr bool owns(int) { return true; }
};
/// The layers whose compression ratio, by the model's schedule, is `Ratio`.
template <class Schedule, int Ratio>
struct LayersOfRatio {
  KVIRE_HD static constexpr bool owns(int layer) { return Schedule::ratio(layer) == Ratio; }
};

/// One cache of a model: a policy, the page ids it goes by, how its rows relate to tokens, and the layers that own it. Derive a named struct
/// with a `name`; the struct is how pools, transfers and leases name the entry.
template <class P, class Space, class Kind, class Owners = AllLayers>
struct CacheEntry {
  using policy = P;
  using space = Space;
  using kind = Kind;
  static constexpr bool counts_tokens = Kind::kind == EntryKind::tokens;

  /// Raw tokens that one page of the space covers through this entry; 0 where rows are not tied to tokens.
  static constexpr int raw_tokens_per_page = Kind::ratio * P::tokens_per_page;

  KVIRE_HD static constexpr bool owns(LayerId layer) { return !layer.none() && Owners::owns(layer.value); }

  /// Layers that own the entry among the model's first `layers`.
  KVIRE_HD static constexpr int slots(int layers) {
    int n = 0;
    for (int i = 0; i < layers; ++i) n += Owners::owns(i) ? 1 : 0;
    return n;
  }

  /// Position of a model layer among the owners; none() if the layer does not own the entry.
  KVIRE_HD static constexpr EntrySlot slot(LayerId layer) { return owns(layer) ? EntrySlot(slots(layer.value)) : EntrySlot(); }

  /// Rows that the first `raw` tokens of a sequence have in this entry: the one conversion between raw and cached tokens.
  KVIRE_HD static constexpr CachedTokens cached(RawTokens raw) {
    static_assert(counts_tokens,
                  "kvire [layout.not-tokens]: only an entry of kind Tokens<ratio> has one row per so many tokens. A ring or request row is not a length. "
                  "Fix: take the ratio of the entry that holds the tokens, or index ring rows by position.");
    return CachedTokens(raw.count / (counts_tokens ? Kind::ratio : 1));
  }
};

KVIRE_NAMESPACE_END
