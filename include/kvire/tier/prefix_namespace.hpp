// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include <kvire/base/hash.hpp>
#include <kvire/base/result.hpp>
#include <kvire/layout/fingerprint.hpp>

KVIRE_NAMESPACE_BEGIN

/// What must agree, beside the tokens, before a page may be shared. Compared field by field; nothing is joined, so "a" + "bc" is not "ab" + "c".
struct PrefixNamespace {
  std::string model = {};    ///< the weights: name and revision
  Hash128 layout = {};       ///< bundle_fingerprint128 of what the model keeps
  std::string adapter = {};  ///< of the weights (LoRA); empty: none
  std::string salt = {};     ///< of a tenant that shares with nobody else; a secret, where tenants must not guess each other's pages
  std::int32_t rank = 0;     ///< of `ranks` that hold different parts of a page; replicated pages have rank 0 of 1
  std::int32_t ranks = 1;

  friend bool operator==(const PrefixNamespace&, const PrefixNamespace&) = default;

  /// One line that two namespaces share only if they are equal: every text carries its length in bytes. For files and messages: instead of a salt it
  /// has the first half of the salt's SHA-256.
  std::string text() const { return line(salt.empty() ? salt : hex_text(hash(salt)).c_str()); }
  /// What the names of its pages start from. From the salt itself: who has read `text` cannot tell it.
  Hash128 digest() const { return hash(line(salt)); }

 private:
  static Hash128 hash(const std::string& text) { return hash_text(text.data(), static_cast<int>(text.size())); }
  std::string line(const std::string& salted) const {
    const auto field = [](const char* tag, const std::string& value) { return std::string(tag) + std::to_string(value.size()) + ":" + value; };
    return "kvire.prefix/1;" + field("model=", model) + ";layout=" + hex_text(layout).c_str() + ";" + field("adapter=", adapter) + ";" +
           field("salt=", salted) + ";rank=" + std::to_string(rank) + "/" + std::to_string(ranks);
  }
};

/// Success, or invalid_argument for a rank that is none of `ranks`.
inline Status check_namespace(const PrefixNamespace& names) {
  if (names.ranks >= 1 && names.rank >= 0 && names.rank < names.ranks) return {};
  return Error{ErrorCode::invalid_argument, "prefix namespace '" + names.model + "': rank " + std::to_string(names.rank) + " of " + std::to_string(names.ranks) +
                                                "; ranks count from 0, and one that holds all has rank 0 of 1"};
}

KVIRE_NAMESPACE_END
