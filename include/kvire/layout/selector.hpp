// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>
#include <string>

#include <kvire/base/result.hpp>
#include <kvire/layout/require.hpp>

KVIRE_NAMESPACE_BEGIN

/// A layout as a configuration from outside names it. Every field must be given: an empty text or a zero is an error, never a default.
struct LayoutConfig {
  std::string element;       ///< of the values, as name_of(Element) spells it: "e4m3", "bf16", "e2m1" ...
  int tokens_per_page = 0;
  int dim = 0;               ///< logical elements a token
  std::string scale_format;  ///< element of the scales, or "none"
  int scale_block = -1;      ///< elements a scale; 0 with "none"
  std::string placement;     ///< "planar", "interleaved"; "contiguous" where there is no scale
};

/// The policies that a program is compiled for.
template <class... Policies>
struct PolicyList {};

/// The configuration that names a policy. The value element is that of the scaled field, or of the first field.
template <class P>
LayoutConfig config_of() {
  LayoutConfig config;
  config.tokens_per_page = P::tokens_per_page;
  config.dim = P::dim;
  if constexpr (P::Scaling::formula == ScaleFormula::none) {
    for (const Section& section : P::table.sections) {
      if (!section.padding && config.element.empty()) config.element = name_of(section.element);
    }
    config.scale_format = "none";
    config.scale_block = 0;
    config.placement = "contiguous";
  } else {
    using Of = typename P::Scaling::of;
    config.element = name_of(P::template element_of<Of>);
    config.scale_format = name_of(P::template element_of<role::Scale>);
    config.scale_block = P::Scaling::block;
    constexpr bool apart = P::table.sections[P::template section_of<Of>].plane != P::table.sections[P::template section_of<role::Scale>].plane;
    config.placement = apart ? "planar" : "interleaved";
  }
  return config;
}

namespace detail {

/// A text from outside as a message may show it: control bytes as \x1b, and no more than its beginning.
inline std::string shown(const std::string& text) {
  constexpr std::size_t most = 64;
  std::string out;
  for (const char c : text.substr(0, most)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7F) {
      out += c;
    } else {
      out += {'\\', 'x', "0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]};
    }
  }
  return text.size() > most ? out + "... (" + std::to_string(text.size()) + " bytes)" : out;
}

inline std::string text_of(const LayoutConfig& c) {
  return shown(c.element) + ", " + std::to_string(c.tokens_per_page) + " tokens a page, dim " + std::to_string(c.dim) + ", scale " + shown(c.scale_format) + " per " +
         std::to_string(c.scale_block) + ", " + shown(c.placement);
}

/// For messages: what words a field may hold, if `text` is none of them.
inline std::string spelled(const char* field, const std::string& text, const std::initializer_list<const char*>& words) {
  std::string list;
  for (const char* word : words) {
    if (text == word) return {};
    list += std::string(list.empty() ? "" : ", ") + word;
  }
  return std::string("\n") + field + " is one of: " + list;
}
inline std::string spellings(const LayoutConfig& c) {
  using enum Element;
  return spelled("element", c.element, {name_of(f32), name_of(f16), name_of(bf16), name_of(e4m3), name_of(e2m1), name_of(u8)}) +
         spelled("scale_format", c.scale_format, {"none", name_of(f32), name_of(f16), name_of(bf16), name_of(ue8m0), name_of(e4m3)}) +
         spelled("placement", c.placement, {"planar", "interleaved", "contiguous"});
}

struct ConfigDifference {
  int count = 0;
  std::string text;
  void add(bool differs, const char* field, const std::string& wanted, const std::string& compiled) {
    if (!differs) return;
    ++count;
    text += std::string(text.empty() ? "" : ", ") + field + " " + shown(wanted) + " against " + compiled;
  }
};

inline ConfigDifference difference(const LayoutConfig& wanted, const LayoutConfig& compiled) {
  ConfigDifference d;
  const auto number = [](int n) { return std::to_string(n); };
  d.add(wanted.element != compiled.element, "element", wanted.element, compiled.element);
  d.add(wanted.tokens_per_page != compiled.tokens_per_page, "tokens_per_page", number(wanted.tokens_per_page), number(compiled.tokens_per_page));
  d.add(wanted.dim != compiled.dim, "dim", number(wanted.dim), number(compiled.dim));
  d.add(wanted.scale_format != compiled.scale_format, "scale_format", wanted.scale_format, compiled.scale_format);
  d.add(wanted.scale_block != compiled.scale_block, "scale_block", number(wanted.scale_block), number(compiled.scale_block));
  d.add(wanted.placement != compiled.placement, "placement", wanted.placement, compiled.placement);
  return d;
}

inline Status require_complete(const LayoutConfig& c) {
  const auto negative = [](const char* field, int value) {
    return Error{ErrorCode::invalid_argument, std::string("layout configuration: ") + field + " is " + std::to_string(value) + ", below 0"};
  };
  const auto missing = [](const char* field) { return Error{ErrorCode::invalid_argument, std::string("layout configuration: ") + field + " is not given; nothing defaults"}; };
  if (c.element.empty()) return missing("element");
  if (c.tokens_per_page < 0) return negative("tokens_per_page", c.tokens_per_page);
  if (c.dim < 0) return negative("dim", c.dim);
  if (c.scale_block < -1) return negative("scale_block", c.scale_block);
  if (c.tokens_per_page <= 0) return missing("tokens_per_page");
  if (c.dim <= 0) return missing("dim");
  if (c.scale_format.empty()) return missing("scale_format");
  if (c.scale_block < 0) return missing("scale_block");
  if (c.placement.empty()) return missing("placement");
  return {};
}

}  // namespace detail

/// Calls f.template operator()<Policy>() for the one compiled policy that the configuration names and returns its Status. Never guesses.
/// Errors: unsupported, listing, nearest first, the compiled policies that differ in the fewest fields, and in what, and the words of a field that has another; duplicate, listing them,
/// if the configuration names several (it says nothing about padding, content or order of fields).
template <class... Policies, class F>
Status select_layout(const LayoutConfig& config, PolicyList<Policies...>, F&& f) {
  if (Status complete = detail::require_complete(config); !complete) return complete;
  Status status;
  int found = 0;
  int fewest = 7;
  std::string near;
  std::string named;
  const auto visit = [&]<class P>() {
    const detail::ConfigDifference d = detail::difference(config, config_of<P>());
    if (d.count == 0) {
      ++found;
      named += std::string("\n  ") + P::name + ", " + std::to_string(P::page_bytes) + " bytes a page, content " + P::Content::text;
      return;
    }
    if (d.count < fewest) near.clear();
    if (d.count <= fewest) near += std::string("\n  ") + P::name + " differs in " + d.text;
    fewest = d.count < fewest ? d.count : fewest;
  };
  (visit.template operator()<Policies>(), ...);
  if (found > 1) {
    return Error{ErrorCode::duplicate, "more than one compiled layout is: " + detail::text_of(config) + named + "\ncompile a list with one of them"};
  }
  if (found == 1) {
    const auto call = [&]<class P>() {
      if (detail::difference(config, config_of<P>()).count == 0) status = f.template operator()<P>();
    };
    (call.template operator()<Policies>(), ...);
    return status;
  }
  return Error{ErrorCode::unsupported, "no compiled layout is: " + detail::text_of(config) + (near.empty() ? "\n  (no policy is compiled in)" : "; nearest:" + near) + detail::spellings(config)};
}

KVIRE_NAMESPACE_END
