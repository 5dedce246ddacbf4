// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <kvire/base/hash.hpp>
#include <kvire/base/ints.hpp>
#include <kvire/base/result.hpp>
#include <kvire/layout/fingerprint.hpp>

KVIRE_NAMESPACE_BEGIN

/// What a record is of. The layout is not in here: it is part of every record and of its name.
struct RecordKey {
  std::string space = {};         ///< canonical text of the namespace (model, adapter, tenant, rank as tagged fields); opaque here, stored and shown as it is: no secrets
  Hash128 prefix = {};            ///< digest of every token from the sequence's first to the record's last
  std::int64_t first_token = 0;   ///< raw tokens before the record
  std::int64_t token_count = 0;   ///< raw tokens that the record covers

  friend bool operator==(const RecordKey&, const RecordKey&) = default;
};

/// Bytes of a key's namespace, at most.
inline constexpr std::int64_t most_key_space_bytes = std::int64_t{1} << 20;

/// Success, or invalid_argument with the number that is wrong.
inline Status check_key(const RecordKey& key) {
  const auto bad = [](const std::string& what) { return Error{ErrorCode::invalid_argument, "record key: " + what}; };
  if (key.first_token < 0) return bad("first_token is " + std::to_string(key.first_token) + "; it counts the tokens before the record");
  if (key.token_count < 1 || key.token_count > INT64_MAX - key.first_token) {
    return bad("token_count is " + std::to_string(key.token_count) + "; a record covers at least one token, and ends below 2^63");
  }
  const auto bytes = static_cast<std::int64_t>(key.space.size());
  if (bytes > most_key_space_bytes) return bad("space has " + std::to_string(bytes) + " bytes; " + std::to_string(most_key_space_bytes) + " can be");
  return {};
}

/// Why a stored record gave no hit.
enum class RecordFault : unsigned char {
  absent,           ///< not there (any more)
  io_error,         ///< the system reported an error; the record is kept, a later try may work
  short_file,       ///< ends before the length that it states, or before its header does
  long_file,        ///< goes on after the length that it states
  not_a_record,     ///< does not start as records do
  version,          ///< a format of another version
  damaged_header,   ///< the header's checksum does not fit
  layout,           ///< another bundle, policy, order or number of layers
  key,              ///< other tokens, or another namespace
  pages,            ///< another number of pages than asked for
  checksum_kind,    ///< its payload was summed with an algorithm that this tier does not have
  damaged_payload,  ///< a payload's checksum does not fit
};
inline constexpr int record_fault_count = 12;

constexpr const char* name_of(RecordFault fault) {
  switch (fault) {
    case RecordFault::absent: return "absent";
    case RecordFault::io_error: return "io_error";
    case RecordFault::short_file: return "short_file";
    case RecordFault::long_file: return "long_file";
    case RecordFault::not_a_record: return "not_a_record";
    case RecordFault::version: return "version";
    case RecordFault::damaged_header: return "damaged_header";
    case RecordFault::layout: return "layout";
    case RecordFault::key: return "key";
    case RecordFault::pages: return "pages";
    case RecordFault::checksum_kind: return "checksum_kind";
    case RecordFault::damaged_payload: return "damaged_payload";
  }
  return "unknown";
}

/// Sections and the whole record start and end at multiples of this, so that files can be moved without the system's cache.
inline constexpr std::int64_t record_alignment = 4096;
inline constexpr std::uint32_t record_version = 1;

/// One entry of the bundle in a record: its pages, layer by layer of the entry, then zeros up to the alignment.
struct RecordSection {
  Hash128 layout = {};           ///< of the entry's policy
  std::int64_t offset = 0;       ///< from the start of the file
  std::int64_t bytes = 0;        ///< zeros at the end included
  std::int64_t page_bytes = 0;
  std::uint64_t checksum = 0;    ///< over `bytes`
  std::int32_t entry = 0;        ///< position in the bundle
  std::int32_t space = 0;        ///< position among the bundle's page-id spaces
  std::int32_t slots = 0;        ///< layers that own the entry
  std::int32_t pages = 0;        ///< page ids of the space in this record

  std::int64_t used_bytes() const { return page_bytes * slots * pages; }
  /// Where page `page` of layer slot `slot` starts.
  std::int64_t page_offset(std::int64_t slot, std::int64_t page) const { return offset + (slot * pages + page) * page_bytes; }

  friend bool operator==(const RecordSection&, const RecordSection&) = default;
};

/// Page ids of each space in a record, in the order of the bundle's spaces.
using RecordPages = std::vector<std::int32_t>;

/// What a layout says about a record, whatever it is of: the sections, spaces one after the other and within a space in the bundle's order,
/// so that a space's pages can be read without those of later spaces.
struct RecordShape {
  Hash128 layout = {};              ///< of the bundle
  std::int32_t layers = 0;          ///< of the model that were kept
  std::string description = {};     ///< one line an entry
  std::vector<RecordSection> sections = {};

  std::int64_t header_bytes(const RecordKey& key) const;
  /// Computes the sections' offsets and bytes from their pages; returns the record's bytes.
  std::int64_t place(const RecordKey& key) {
    std::int64_t at = header_bytes(key);
    for (auto& section : sections) {
      section.offset = at;
      section.bytes = align_up(section.used_bytes(), record_alignment);
      at += section.bytes;
    }
    return at;
  }
  std::int64_t record_bytes() const { return sections.empty() ? 0 : sections.back().offset + sections.back().bytes; }
  /// Pages of a space; 0 for a space that has none here.
  std::int32_t pages(std::int32_t space) const {
    for (const auto& section : sections) {
      if (section.space == space) return section.pages;
    }
    return 0;
  }
  RecordPages pages_by_space() const {
    RecordPages all;
    for (const auto& section : sections) {
      if (all.size() <= static_cast<std::size_t>(section.space)) all.resize(static_cast<std::size_t>(section.space) + 1);
      all[static_cast<std::size_t>(section.space)] = section.pages;
    }
    return all;
  }
  void set_pages(std::int32_t space, std::int32_t count) {
    for (auto& section : sections) section.pages = section.space == space ? count : section.pages;
  }
};

namespace detail {
inline constexpr std::int64_t record_fixed_bytes = 96;
inline constexpr std::int64_t record_section_bytes = 64;
inline constexpr std::int64_t record_checksum_bytes = 8;
}  // namespace detail

inline std::int64_t RecordShape::header_bytes(const RecordKey& key) const {
  return align_up(detail::record_fixed_bytes + detail::record_section_bytes * static_cast<std::int64_t>(sections.size()) +
                      static_cast<std::int64_t>(key.space.size() + description.size()) + detail::record_checksum_bytes,
                  record_alignment);
}

/// The 128 bits that name a record: the first half of the SHA-256 of `kvire.record/1;layout=...;layers=...;prefix=...;first=...;count=...;space=...`,
/// the namespace's text last. Records of different layouts have different names, so they live side by side.
inline Hash128 record_id(const RecordKey& key, const Hash128& layout, std::int32_t layers) {
  std::string text = "kvire.record/" + std::to_string(record_version) + ";layout=" + hex_text(layout).c_str() + ";layers=" + std::to_string(layers) +
                     ";prefix=" + hex_text(key.prefix).c_str() + ";first=" + std::to_string(key.first_token) +
                     ";count=" + std::to_string(key.token_count) + ";space=" + key.space;
  return hash_text(text.data(), static_cast<int>(text.size()));
}

KVIRE_NAMESPACE_END
