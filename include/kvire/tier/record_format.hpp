// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <optional>

#include <kvire/tier/checksum.hpp>
#include <kvire/tier/record.hpp>

KVIRE_NAMESPACE_BEGIN

/// Not text, and damaged by whatever translates line ends.
inline constexpr unsigned char record_magic[8] = {0x89, 'k', 'v', 'i', 'r', 'e', 0x0D, 0x0A};

/// What a record's header says (docs/file-tier.md has it byte by byte).
struct RecordHeader {
  RecordKey key = {};
  RecordShape shape = {};
  std::uint32_t checksum_id = 0;
};

/// Why a record is not what was asked for, with both sides in words.
struct RecordProblem {
  RecordFault fault = RecordFault::absent;
  std::string what = {};
};

namespace detail {

/// Numbers of the header, in the order of the format.
class RecordWriter {
 public:
  explicit RecordWriter(std::byte* at) : at_(at) {}
  RecordWriter& u32(std::int64_t value) { return put(static_cast<std::uint32_t>(value)); }
  RecordWriter& u64(std::int64_t value) { return put(static_cast<std::uint64_t>(value)); }
  RecordWriter& hash(const Hash128& value) { return put(value.high).put(value.low); }
  RecordWriter& text(const std::string& value) {
    std::memcpy(at_, value.data(), value.size());
    at_ += value.size();
    return *this;
  }
  template <class Int>
  RecordWriter& put(Int value) {
    store_little(at_, value);
    at_ += sizeof value;
    return *this;
  }

 private:
  std::byte* at_;
};

class RecordReader {
 public:
  explicit RecordReader(const std::byte* at) : at_(at) {}
  std::int32_t u32() { return static_cast<std::int32_t>(get<std::uint32_t>()); }
  std::int64_t u64() { return static_cast<std::int64_t>(get<std::uint64_t>()); }
  Hash128 hash() {
    const auto high = get<std::uint64_t>();
    return {high, get<std::uint64_t>()};
  }
  std::string text(std::int64_t size) {
    std::string out(static_cast<std::size_t>(size), '\0');
    std::memcpy(out.data(), at_, out.size());
    at_ += size;
    return out;
  }
  template <class Int>
  Int get() {
    const auto value = load_little<Int>(at_);
    at_ += sizeof value;
    return value;
  }

 private:
  const std::byte* at_;
};

/// Lines in which two descriptions differ, each pair below the other.
inline std::string differing_lines(const std::string& stored, const std::string& wanted) {
  std::string out;
  for (std::size_t a = 0, b = 0; a < stored.size() || b < wanted.size();) {
    const auto line = [](const std::string& text, std::size_t& at) {
      if (at >= text.size()) return std::string("(nothing)");
      const std::size_t end = min_of(text.find('\n', at), text.size());
      const std::size_t begin = at;
      at = end + 1;
      return text.substr(begin, end - begin);
    };
    const std::string left = line(stored, a);
    const std::string right = line(wanted, b);
    if (left != right) out += "\n  stored: " + left + "\n  wanted: " + right;
  }
  return out;
}

}  // namespace detail

/// Writes the header to `out` (shape.header_bytes(key) bytes). The sections are placed and have their checksums.
inline void write_record_header(std::byte* out, const RecordKey& key, const RecordShape& shape, std::uint32_t checksum_id) {
  const std::int64_t bytes = shape.header_bytes(key);
  std::memset(out, 0, static_cast<std::size_t>(bytes));
  std::memcpy(out, record_magic, sizeof record_magic);
  detail::RecordWriter w(out + sizeof record_magic);
  w.u32(record_version).u32(bytes).u64(shape.record_bytes()).hash(shape.layout).hash(key.prefix).u64(key.first_token).u64(key.token_count);
  w.u32(shape.layers).u32(checksum_id).u32(static_cast<std::int64_t>(shape.sections.size()));
  w.u32(static_cast<std::int64_t>(key.space.size())).u32(static_cast<std::int64_t>(shape.description.size())).u32(0);
  for (const auto& s : shape.sections) {
    w.hash(s.layout).u64(s.offset).u64(s.bytes).u64(s.page_bytes).put(s.checksum).u32(s.entry).u32(s.space).u32(s.slots).u32(s.pages);
  }
  w.text(key.space).text(shape.description);
  // Always XXH64: every reader can judge every header.
  detail::store_little(out + bytes - detail::record_checksum_bytes, Xxh64::of(out, bytes - detail::record_checksum_bytes));
}

/// Reads a header from the first `available` bytes of a file of `file_bytes` bytes. Trusts nothing: what it returns is inside the file, and
/// its sections lie where their pages put them.
inline std::optional<RecordProblem> read_record_header(const std::byte* in, std::int64_t available, std::int64_t file_bytes, RecordHeader& header) {
  const auto problem = [](RecordFault fault, std::string what) { return RecordProblem{fault, std::move(what)}; };
  const auto cut = [&](std::int64_t wanted) {
    return problem(RecordFault::short_file, std::to_string(file_bytes) + " bytes, at least " + std::to_string(wanted) + " expected");
  };
  const std::int64_t magic_bytes = sizeof record_magic;
  if (std::memcmp(in, record_magic, static_cast<std::size_t>(min_of(available, magic_bytes))) != 0) {
    return problem(RecordFault::not_a_record, "does not start with a record's magic bytes");
  }
  if (available < record_alignment) return cut(record_alignment);
  detail::RecordReader r(in + magic_bytes);
  const auto version = r.get<std::uint32_t>();
  if (version != record_version) {
    return problem(RecordFault::version, "version " + std::to_string(version) + ", version " + std::to_string(record_version) + " is read here");
  }
  const std::int64_t bytes = r.get<std::uint32_t>();
  if (bytes < record_alignment || bytes % record_alignment != 0) {
    return problem(RecordFault::damaged_header, "a header of " + std::to_string(bytes) + " bytes");
  }
  if (available < bytes) return cut(bytes);
  const std::byte* const sum = in + bytes - detail::record_checksum_bytes;
  if (detail::load_little<std::uint64_t>(sum) != Xxh64::of(in, bytes - detail::record_checksum_bytes)) {
    return problem(RecordFault::damaged_header, "the header's checksum does not fit");
  }
  const std::int64_t record_bytes = r.u64();
  if (file_bytes < record_bytes) return cut(record_bytes);
  if (file_bytes > record_bytes) {
    return problem(RecordFault::long_file, std::to_string(file_bytes) + " bytes, " + std::to_string(record_bytes) + " expected");
  }
  header.shape.layout = r.hash();
  header.key.prefix = r.hash();
  header.key.first_token = r.u64();
  header.key.token_count = r.u64();
  header.shape.layers = r.u32();
  header.checksum_id = r.get<std::uint32_t>();
  const std::int64_t sections = r.get<std::uint32_t>();
  const std::int64_t space_bytes = r.get<std::uint32_t>();
  const std::int64_t description_bytes = r.get<std::uint32_t>();
  (void)r.u32();
  if (sections > bytes / detail::record_section_bytes || detail::record_fixed_bytes + sections * detail::record_section_bytes + space_bytes +
                                                                 description_bytes + detail::record_checksum_bytes > bytes) {
    return problem(RecordFault::damaged_header, "its texts and sections exceed the header");
  }
  header.shape.sections.resize(static_cast<std::size_t>(sections));
  for (auto& s : header.shape.sections) {
    s.layout = r.hash();
    s.offset = r.u64();
    s.bytes = r.u64();
    s.page_bytes = r.u64();
    s.checksum = r.get<std::uint64_t>();
    s.entry = r.u32();
    s.space = r.u32();
    s.slots = r.u32();
    s.pages = r.u32();
    const std::int64_t used = checked_mul(checked_mul(s.page_bytes, s.slots), s.pages);
    if (used < 0 || s.pages < 0 || s.slots < 0 || used > record_bytes) return problem(RecordFault::damaged_header, "a section larger than the record");
  }
  header.key.space = r.text(space_bytes);
  header.shape.description = r.text(description_bytes);
  if (Status ok = check_key(header.key); !ok.ok()) return problem(RecordFault::damaged_header, ok.error().message);
  RecordShape placed = header.shape;
  placed.place(header.key);
  if (placed.sections != header.shape.sections || placed.header_bytes(header.key) != bytes || max_of(bytes, placed.record_bytes()) != record_bytes) {
    return problem(RecordFault::damaged_header, "its sections do not follow one another");
  }
  return {};
}

/// Compares a header with what was asked for; spaces without pages in `wanted` are not asked for. The message shows both sides.
inline std::optional<RecordProblem> match_record(const RecordHeader& header, const RecordKey& key, const RecordShape& wanted) {
  const RecordShape& stored = header.shape;
  bool same = stored.layout == wanted.layout && stored.layers == wanted.layers && stored.sections.size() == wanted.sections.size();
  for (std::size_t i = 0; same && i < wanted.sections.size(); ++i) {
    RecordSection a = stored.sections[i];
    const RecordSection& b = wanted.sections[i];
    same = a.layout == b.layout && a.page_bytes == b.page_bytes && a.entry == b.entry && a.space == b.space && a.slots == b.slots;
  }
  if (!same) {
    return RecordProblem{RecordFault::layout, std::string("layout ") + hex_text(stored.layout).c_str() + " of " + std::to_string(stored.layers) +
                                                  " layers is stored, " + hex_text(wanted.layout).c_str() + " of " + std::to_string(wanted.layers) +
                                                  " is wanted" + detail::differing_lines(stored.description, wanted.description)};
  }
  if (header.key != key) {
    const auto words = [](const RecordKey& k) {
      return std::string("tokens ") + std::to_string(k.first_token) + " to " + std::to_string(k.first_token + k.token_count) + " of prefix " +
             hex_text(k.prefix).c_str() + " in '" + k.space + "'";
    };
    return RecordProblem{RecordFault::key, words(header.key) + " are stored, " + words(key) + " are wanted"};
  }
  for (std::size_t i = 0; i < wanted.sections.size(); ++i) {
    const auto& a = stored.sections[i];
    const auto& b = wanted.sections[i];
    if (b.pages != 0 && a.pages != b.pages) {
      return RecordProblem{RecordFault::pages, "space " + std::to_string(b.space) + ": " + std::to_string(a.pages) + " pages are stored, " +
                                                   std::to_string(b.pages) + " are wanted"};
    }
  }
  return {};
}

KVIRE_NAMESPACE_END
