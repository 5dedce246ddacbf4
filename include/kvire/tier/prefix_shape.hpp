// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include <kvire/base/result.hpp>
#include <kvire/layout/bundle.hpp>

KVIRE_NAMESPACE_BEGIN

/// What a page-id space asks of a prefix before somebody can go on behind it.
enum class PrefixNeed : unsigned char {
  every,  ///< all its pages
  tail,   ///< those that the next token looks back to
  never   ///< nothing at the end of a page: rows of a request, which only tails keep
};

struct PrefixSpace {
  PrefixNeed need = PrefixNeed::every;
  std::int64_t tail_tokens = 0;  ///< raw tokens that the next one looks back to, itself included; for `tail`
};

/// Pages as a prefix cache sees them. All spaces are cut into pages of the same raw tokens.
template <int Spaces>
struct PrefixShape {
  std::int64_t page_tokens = 0;   ///< raw tokens of a page
  std::int64_t group_tokens = 1;  ///< raw tokens that are compressed together: a page must hold whole groups, or a restart behind it would split one
  std::array<PrefixSpace, static_cast<std::size_t>(Spaces)> spaces = {};
  bool keep_tokens = true;  ///< verify by tokens (4 bytes each); otherwise by a second digest of 64 bits
};

namespace rule {
template <class Bundle, int FewestRawTokens, int MostRawTokens, bool Same>
struct PrefixPage {
  static_assert(Same,
                "kvire [tier.prefix-page]: all token entries of a bundle in a prefix cache cover the same raw tokens per page, whatever their space. A prefix that ends "
                "inside a page of one of them could not be restarted. Fix: choose tokens per page so that ratio * tokens agree, or write a PrefixShape of the spaces that do.");
};
}  // namespace rule

namespace detail {

constexpr std::int64_t common_multiple(std::int64_t a, std::int64_t b) {
  std::int64_t x = a;
  std::int64_t y = b;
  while (y != 0) {
    const std::int64_t rest = x % y;
    x = y;
    y = rest;
  }
  return a / x * b;
}

// Raw tokens per page of the token entries: the most, or the fewest.
template <class Bundle>
constexpr int raw_tokens_of_pages(bool most) {
  int n = 0;
  Bundle::for_each([&]<class Entry>() {
    constexpr int page = Entry::raw_tokens_per_page;
    if (Entry::counts_tokens && (n == 0 || (most ? page > n : page < n))) n = page;
  });
  return n;
}

}  // namespace detail

/// The shape of a bundle, spaces numbered as Bundle::space_index does. `window_tokens`: how far back the model's sliding window reaches, the token
/// itself included; it decides what is needed of space::Window. Pages of space::Request are empty at page ends: they stay with their request or go with its tail.
template <class Bundle>
constexpr PrefixShape<Bundle::space_count> prefix_shape(std::int64_t window_tokens = 0) {
  constexpr int fewest = detail::raw_tokens_of_pages<Bundle>(false);
  constexpr int most = detail::raw_tokens_of_pages<Bundle>(true);
  (void)sizeof(rule::PrefixPage<Bundle, fewest, most, fewest == most>);
  PrefixShape<Bundle::space_count> shape;
  shape.page_tokens = most;
  Bundle::for_each([&]<class Entry>() {
    if constexpr (Entry::counts_tokens) shape.group_tokens = detail::common_multiple(shape.group_tokens, Entry::kind::ratio);
  });
  if constexpr (Bundle::template space_index<space::Window>() >= 0) {
    shape.spaces[Bundle::template space_index<space::Window>()] = {PrefixNeed::tail, window_tokens};
  }
  if constexpr (Bundle::template space_index<space::Request>() >= 0) shape.spaces[Bundle::template space_index<space::Request>()] = {PrefixNeed::never, 0};
  return shape;
}

/// Raw tokens of a page, at most: 64 pages' tokens are kept in one piece of memory.
inline constexpr std::int64_t most_page_tokens = std::int64_t{1} << 20;
/// Raw tokens that a window looks back, at most: positions have 31 bits.
inline constexpr std::int64_t most_tail_tokens = (std::int64_t{1} << 31) - 1;

/// Success, or invalid_argument with the number that is wrong.
template <int Spaces>
Status check_shape(const PrefixShape<Spaces>& shape) {
  const auto bad = [](const std::string& what) { return Error{ErrorCode::invalid_argument, "prefix cache: " + what}; };
  if (shape.page_tokens < 1 || shape.page_tokens > most_page_tokens) {
    return bad("pages of " + std::to_string(shape.page_tokens) + " tokens; from 1 to " + std::to_string(most_page_tokens) + " can be");
  }
  if (shape.group_tokens < 1 || shape.page_tokens % shape.group_tokens != 0) {
    return bad("pages of " + std::to_string(shape.page_tokens) + " tokens do not hold whole groups of " + std::to_string(shape.group_tokens));
  }
  bool any = false;
  for (int s = 0; s < Spaces; ++s) {
    any = any || shape.spaces[s].need == PrefixNeed::every;
    if (shape.spaces[s].need == PrefixNeed::tail && (shape.spaces[s].tail_tokens < 1 || shape.spaces[s].tail_tokens > most_tail_tokens)) {
      return bad("space " + std::to_string(s) + " needs a tail of " + std::to_string(shape.spaces[s].tail_tokens) +
                 " tokens; from 1 to " + std::to_string(most_tail_tokens) + " can be (window_tokens of a bundle with space::Window)");
    }
  }
  if (!any) return bad("no space whose pages are all needed");
  return {};
}

KVIRE_NAMESPACE_END
