// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <optional>

#include <kvire/tier/record_format.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// Bytes from a record's start that hold all pages of the spaces asked for: those of later spaces need not be read. `file_bytes` if a space in
/// between is not asked for, so that nobody knows where the later ones begin.
inline std::int64_t bytes_to_read(RecordShape wanted, const RecordKey& key, std::int64_t file_bytes) {
  std::int64_t end = wanted.header_bytes(key);
  bool gap = false;
  wanted.place(key);
  for (const auto& section : wanted.sections) {
    if (section.pages == 0) {
      gap = true;
    } else if (gap) {
      return file_bytes;
    } else {
      end = section.offset + section.bytes;
    }
  }
  return min_of(end, file_bytes);
}

/// Puts a record together in `out` (shape.record_bytes() bytes): pages, zeros between sections, checksums, header.
template <Checksum Sum>
void build_record(std::byte* out, const RecordKey& key, RecordShape shape, const std::vector<const std::byte*>& pages) {
  std::size_t next = 0;
  for (auto& section : shape.sections) {
    for (std::int64_t slot = 0; slot < section.slots; ++slot) {
      for (std::int64_t page = 0; page < section.pages; ++page) {
        std::memcpy(out + section.page_offset(slot, page), pages[next++], static_cast<std::size_t>(section.page_bytes));
      }
    }
    std::memset(out + section.offset + section.used_bytes(), 0, static_cast<std::size_t>(section.bytes - section.used_bytes()));
    section.checksum = Sum::of(out + section.offset, section.bytes);
  }
  write_record_header(out, key, shape, Sum::id);
}

/// Judges a record of which the first `moved` of `file_bytes` bytes are in `in`. Nothing if the pages asked for are there, and right.
template <Checksum Sum>
std::optional<RecordProblem> check_record(const std::byte* in, std::int64_t moved, std::int64_t file_bytes, const RecordKey& key, const RecordShape& wanted,
                                          RecordHeader& header) {
  if (auto problem = read_record_header(in, moved, file_bytes, header)) return problem;
  if (auto problem = match_record(header, key, wanted)) return problem;
  if (header.checksum_id != Sum::id) {
    return RecordProblem{RecordFault::checksum_kind, "payload summed with algorithm " + std::to_string(header.checksum_id) + ", algorithm " +
                                                         std::to_string(Sum::id) + " (" + Sum::name + ") is used here"};
  }
  for (std::size_t i = 0; i < wanted.sections.size(); ++i) {
    const auto& section = header.shape.sections[i];
    if (wanted.sections[i].pages == 0) continue;
    if (section.offset + section.bytes > moved) {
      return RecordProblem{RecordFault::io_error, "only " + std::to_string(moved) + " of " + std::to_string(file_bytes) + " bytes were read"};
    }
    if (section.bytes > 0 && Sum::of(in + section.offset, section.bytes) != section.checksum) {
      return RecordProblem{RecordFault::damaged_payload, "entry " + std::to_string(section.entry) + ", " + std::to_string(section.bytes) +
                                                             " bytes: the " + Sum::name + " checksum does not fit"};
    }
  }
  return {};
}

}  // namespace detail

KVIRE_NAMESPACE_END
