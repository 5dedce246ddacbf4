// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <string>
#include <string_view>
#include <vector>

#include <kvire/tier/file_record.hpp>
#include <tests/support/file_tier_case.hpp>

using namespace kvire;
using kvire_test::contains;
using kvire_test::key_of;
using kvire_test::pattern;

namespace {

std::uint64_t sum(std::string_view text) { return Xxh64::of(reinterpret_cast<const std::byte*>(text.data()), static_cast<std::int64_t>(text.size())); }

using Model = kvire_test::SmallModel<kvire_test::SmallFp8>;

RecordShape shape_of(int full, int window) {
  auto shape = detail::record_shape<Model>(Model::layers);
  shape.set_pages(0, full);
  shape.set_pages(1, window);
  return shape;
}

struct Record {
  explicit Record(RecordKey k = key_of(7), int full = 2, int window = 1) : key(std::move(k)), shape(shape_of(full, window)) {
    bytes.resize(static_cast<std::size_t>(shape.place(key)));
    std::vector<std::vector<std::byte>> pages;
    std::vector<const std::byte*> pointers;
    for (const auto& section : shape.sections) {
      for (int i = 0; i < section.slots * section.pages; ++i) {
        pages.emplace_back(static_cast<std::size_t>(section.page_bytes));
        for (std::size_t at = 0; at < pages.back().size(); ++at) pages.back()[at] = pattern(static_cast<std::uint32_t>(pages.size()), 0, static_cast<std::int64_t>(at));
        pointers.push_back(pages.back().data());
      }
    }
    detail::build_record<Xxh64>(bytes.data(), key, shape, pointers);
  }
  std::optional<RecordProblem> check(const std::vector<std::byte>& in, const RecordShape& wanted) const {
    RecordHeader header;
    const auto size = static_cast<std::int64_t>(in.size());
    return detail::check_record<Xxh64>(in.data(), size, size, key, wanted, header);
  }
  RecordKey key;
  RecordShape shape;
  std::vector<std::byte> bytes;
};

void seal(std::vector<std::byte>& bytes) {
  detail::store_little(bytes.data() + record_alignment - 8, Xxh64::of(bytes.data(), record_alignment - 8));
}

}  // namespace

TEST_CASE("file record: XXH64 gives the published vectors, over every path of its loop") {
  CHECK(sum("") == 0xef46db3751d8e999u);
  CHECK(sum("a") == 0xd24ec4f1a98c6e5bu);
  CHECK(sum("abc") == 0x44bc2cf5ad770999u);
  // 4 bytes, 8 bytes, a full round of 32 and all of them (from libxxhash 0.8).
  CHECK(sum("abcd") == 0xde0327b0d25d92ccu);
  CHECK(sum("0123456789abcdef0123456789ABCDEF") == 0x98d3056e7ebaa6feu);
  CHECK(sum("0123456789abcdef0123456789ABCDEF0123456789xyz") == 0x54e84e9bea0ed772u);
}

TEST_CASE("file record: the format is little-endian, aligned and as the document says") {
  const Record r;
  const auto* p = r.bytes.data();
  CHECK(std::string(reinterpret_cast<const char*>(p), 8) == "\x89kvire\r\n");
  CHECK(static_cast<int>(p[8]) == 1);
  CHECK(static_cast<int>(p[9]) + static_cast<int>(p[10]) + static_cast<int>(p[11]) == 0);
  CHECK(detail::load_little<std::uint32_t>(p + 12) == 4096);
  CHECK(detail::load_little<std::uint64_t>(p + 16) == r.bytes.size());
  CHECK(detail::load_little<std::uint64_t>(p + 24) == bundle_fingerprint128<Model>.high);
  CHECK(detail::load_little<std::uint64_t>(p + 32) == bundle_fingerprint128<Model>.low);
  CHECK(detail::load_little<std::uint64_t>(p + 40) == r.key.prefix.high);
  CHECK(detail::load_little<std::uint64_t>(p + 56) == static_cast<std::uint64_t>(r.key.first_token));
  CHECK(detail::load_little<std::uint64_t>(p + 64) == 16);
  CHECK(detail::load_little<std::uint32_t>(p + 72) == 3);
  CHECK(detail::load_little<std::uint32_t>(p + 76) == 1);
  CHECK(detail::load_little<std::uint32_t>(p + 80) == 3);
  // The second section: index keys, 2 layers x 2 pages of 4 tokens x (32 + 4) bytes, in one block behind the latents' two.
  const auto* s = p + 96 + 64;
  CHECK(detail::load_little<std::uint64_t>(s) == fingerprint128<kvire_test::SmallFp8>.high);
  CHECK(detail::load_little<std::uint64_t>(s + 16) == 4096 + 8192);
  CHECK(detail::load_little<std::uint64_t>(s + 24) == 4096);
  CHECK(detail::load_little<std::uint64_t>(s + 32) == 144);
  CHECK(detail::load_little<std::uint32_t>(s + 48) == 1);
  CHECK(detail::load_little<std::uint32_t>(s + 52) == 0);
  CHECK(detail::load_little<std::uint32_t>(s + 56) == 2);
  CHECK(detail::load_little<std::uint32_t>(s + 60) == 2);
  const std::string text(reinterpret_cast<const char*>(p + 96 + 3 * 64), 600);
  CHECK(contains(text, r.key.space));
  CHECK(contains(text, "index_k:tokens*4;space=full;layers=2;kvire.page/1;tokens=4;plane{value:e4m3*32};plane{scale:f32*1}"));
  for (const auto& section : r.shape.sections) CHECK(section.offset % record_alignment == 0);
  CHECK(r.bytes.size() % record_alignment == 0);
}

TEST_CASE("file record: cut at any byte or with any byte changed it is a miss, with the reason") {
  const Record r;
  REQUIRE_FALSE(r.check(r.bytes, r.shape).has_value());
  const auto size = static_cast<std::int64_t>(r.bytes.size());
  RecordHeader header;
  for (std::int64_t cut = 0; cut < size; ++cut) {
    const auto problem = detail::check_record<Xxh64>(r.bytes.data(), cut, cut, r.key, r.shape, header);
    REQUIRE(problem.has_value());
    REQUIRE(problem->fault == RecordFault::short_file);
  }
  auto longer = r.bytes;
  longer.push_back(std::byte{0});
  CHECK(r.check(longer, r.shape)->fault == RecordFault::long_file);
  auto damaged = r.bytes;
  for (std::size_t at = 0; at < damaged.size(); ++at) {
    const auto bit = static_cast<std::byte>(1u << (at % 8));
    damaged[at] ^= bit;
    const auto problem = r.check(damaged, r.shape);
    REQUIRE(problem.has_value());
    const auto expected = at < 8 ? RecordFault::not_a_record : at < 12 ? RecordFault::version : at < 4096 ? RecordFault::damaged_header : RecordFault::damaged_payload;
    // A changed header length may also point beyond the file.
    if (at < 12 || at >= 16) REQUIRE(problem->fault == expected);
    damaged[at] ^= bit;
  }
}

TEST_CASE("file record: a sealed header that lies is refused all the same") {
  const Record r;
  const auto forged = [&](std::size_t at, std::uint64_t value, std::size_t bytes) {
    auto copy = r.bytes;
    for (std::size_t i = 0; i < bytes; ++i) copy[at + i] = static_cast<std::byte>((value >> (8 * i)) & 255);
    seal(copy);
    const auto problem = r.check(copy, r.shape);
    REQUIRE(problem.has_value());
    return problem->fault;
  };
  CHECK(forged(8, 2, 4) == RecordFault::version);
  CHECK(forged(16, UINT64_C(1) << 63, 8) != RecordFault::absent);
  CHECK(forged(16, 0, 8) == RecordFault::long_file);
  CHECK(forged(76, 2, 4) == RecordFault::checksum_kind);
  CHECK(forged(80, 0xFFFFFFFFu, 4) == RecordFault::damaged_header);
  CHECK(forged(84, 0xFFFFFFFFu, 4) == RecordFault::damaged_header);
  CHECK(forged(88, 0x7FFFFFFFu, 4) == RecordFault::damaged_header);
  CHECK(forged(96 + 16, 0, 8) == RecordFault::damaged_header);                          // a section over the header
  CHECK(forged(96 + 32, 0xFFFFFFFFFFFFFFFFu, 8) == RecordFault::damaged_header);        // page bytes of -1
  CHECK(forged(96 + 60, 0x7FFFFFFFu, 4) == RecordFault::damaged_header);                // more pages than bytes
  CHECK(forged(96, 1, 8) == RecordFault::layout);
  CHECK(forged(24, 1, 8) == RecordFault::layout);
  CHECK(forged(72, 2, 4) == RecordFault::layout);
  CHECK(forged(40, 1, 8) == RecordFault::key);
  CHECK(forged(56, 17, 8) == RecordFault::key);
  CHECK(forged(56, 0x7FFFFFFFFFFFFFFFu, 8) == RecordFault::damaged_header);             // an end beyond 2^63
  CHECK(forged(64, 0, 8) == RecordFault::damaged_header);
}

TEST_CASE("file record: what it is asked for decides") {
  const Record r;
  // Only the leading space: neither read beyond it nor judged by what is there.
  auto full = shape_of(2, 0);
  const std::int64_t bytes = detail::bytes_to_read(full, r.key, static_cast<std::int64_t>(r.bytes.size()));
  CHECK(bytes == r.shape.sections[2].offset);
  auto damaged = r.bytes;
  damaged.back() ^= std::byte{1};
  RecordHeader header;
  CHECK_FALSE(detail::check_record<Xxh64>(damaged.data(), bytes, static_cast<std::int64_t>(damaged.size()), r.key, full, header).has_value());
  // Only a later space: all of it is read, since the count of the first is unknown.
  CHECK(detail::bytes_to_read(shape_of(0, 1), r.key, static_cast<std::int64_t>(r.bytes.size())) == static_cast<std::int64_t>(r.bytes.size()));
  CHECK_FALSE(r.check(r.bytes, shape_of(0, 1)).has_value());
  CHECK(r.check(r.bytes, shape_of(1, 1))->fault == RecordFault::pages);
  CHECK(contains(r.check(r.bytes, shape_of(1, 1))->what, "2 pages are stored, 1 are wanted"));
  Record other;
  other.key.space = "model=m;rank=1/2";
  const auto foreign = other.check(other.bytes, other.shape);
  CHECK(foreign->fault == RecordFault::key);
  CHECK(contains(foreign->what, "rank=0/1"));
  CHECK(contains(foreign->what, "rank=1/2"));
  // Another layout of the same bytes: both sides in words, the entry that differs only.
  using Interleaved = kvire_test::SmallModel<Fp8WithScaleInterleaved<4, 32>>;
  auto interleaved = detail::record_shape<Interleaved>(Interleaved::layers);
  CHECK(interleaved.sections[1].page_bytes == r.shape.sections[1].page_bytes);
  const auto layout = r.check(r.bytes, interleaved);
  CHECK(layout->fault == RecordFault::layout);
  CHECK(contains(layout->what, "stored: index_k:tokens*4;space=full;layers=2;kvire.page/1;tokens=4;plane{value:e4m3*32};plane{scale:f32*1}"));
  CHECK(contains(layout->what, "wanted: index_k:tokens*4;space=full;layers=2;kvire.page/1;tokens=4;plane{value:e4m3*32,scale:f32*1}"));
  CHECK_FALSE(contains(layout->what, "latent:"));
  CHECK(record_id(r.key, r.shape.layout, 3) != record_id(r.key, interleaved.layout, 3));
}

TEST_CASE("file record: names round trip, and nothing else is taken for one") {
  const Hash128 id{0x0123456789abcdefu, 0xfedcba9876543210u};
  const RecordPages pages{1, 12, 0};
  CHECK(covers({1, 2}, {1, 0}));
  const std::string name = record_file_name(id, pages);
  CHECK(name == "0123456789abcdeffedcba9876543210-1.12.0.kvire");
  const auto parsed = parse_record_file_name(name);
  REQUIRE(parsed.has_value());
  CHECK(parsed->first == id);
  CHECK(parsed->second == pages);
  for (const char* bad : {"", "lock", ".kvire", "0123456789abcdeffedcba9876543210.kvire", "0123456789abcdeffedcba9876543210-.kvire",
                          "0123456789ABCDEFfedcba9876543210-1.kvire", "0123456789abcdeffedcba9876543210-01.kvire", "0123456789abcdeffedcba9876543210-1..2.kvire",
                          "0123456789abcdeffedcba9876543210-1.kvire.4.tmp", "0123456789abcdeffedcba9876543210-99999999999.kvire"}) {
    CAPTURE(bad);
    CHECK_FALSE(parse_record_file_name(bad).has_value());
  }
}
