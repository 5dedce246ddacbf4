// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <chrono>
#include <vector>

#if KVIRE_HAVE_XXHASH
#include <kvire/adapt/xxhash.hpp>
#endif
#if KVIRE_HAVE_LIBURING
#include <kvire/adapt/io_uring.hpp>
#endif
#include <kvire/tier/block_io_faults.hpp>
#include <tests/support/file_tier_case.hpp>

using namespace kvire;
using namespace kvire_test;
using namespace std::chrono_literals;

namespace {

using Small = SmallHost<SmallFp8>;

[[maybe_unused]] std::vector<std::byte> bytes_of(std::size_t n) {
  std::vector<std::byte> bytes(n);
  for (std::size_t i = 0; i < n; ++i) bytes[i] = pattern(7, 0, static_cast<std::int64_t>(i));
  return bytes;
}

/// Stores, loads, and finds a flipped bit.
template <class Sum, class Io>
[[maybe_unused]] void round_trip(Io io) {
  Folder folder;
  Small host;
  FaultyIo<Io> faulty({}, io);
  auto tier = FileTier<Small::Model, Host, Sum, FaultyIo<Io>>::make({.folder = folder.path, .budget = Bytes(1 << 20), .workers = 2, .io = faulty}).value();
  std::vector<typename decltype(tier)::Wanted> wanted;
  std::vector<Small::Refs> refs;
  for (std::uint64_t k = 1; k <= 5; ++k) {
    refs.push_back(host.allocate(2, 1));
    host.fill(refs.back(), static_cast<std::uint32_t>(k));
    CHECK(tier.store(key_of(k), host.pool, refs.back()).wait(deadline_in(30s)).ok());
    host.fill(refs.back(), 99);
    wanted.push_back({key_of(k), refs.back()});
  }
  for (const auto& event : tier.load(host.pool, std::move(wanted))) CHECK(event.wait(deadline_in(30s)).ok());
  for (std::uint32_t k = 1; k <= 5; ++k) CHECK(host.holds(refs[k - 1], k));
  faulty.set([](IoCall call, const std::string&) { return call == IoCall::read ? IoFault::flip(9000) : IoFault::none(); });
  CHECK_FALSE(tier.load(key_of(2), host.pool, refs[1]).wait().ok());
  CHECK(tier.stats().lost_for(RecordFault::damaged_payload) == 1);
}

}  // namespace

#if KVIRE_HAVE_XXHASH
TEST_CASE("adapt xxhash: the tier's own XXH64 is the library's, at every length, and XXH3 has its published vectors") {
  const auto bytes = bytes_of(300);
  for (std::size_t n = 0; n <= bytes.size(); ++n) REQUIRE(Xxh64::of(bytes.data(), static_cast<std::int64_t>(n)) == XXH64(bytes.data(), n, 0));
  CHECK(adapt::Xxh3::of(bytes.data(), 0) == 0x2D06800538D394C2u);  // of no bytes, seed 0
  CHECK(adapt::Xxh3::of(bytes.data(), 300) != adapt::Xxh3::of(bytes.data(), 299));
  round_trip<adapt::Xxh3>(PosixIo());
}

TEST_CASE("adapt xxhash: records summed by another algorithm are unknown, not damaged") {
  Folder folder;
  Small host;
  auto refs = host.allocate();
  host.fill(refs, 1);
  {
    auto tier = FileTier<Small::Model, Host, adapt::Xxh3>::make({.folder = folder.path, .budget = Bytes(1 << 20)}).value();
    CHECK(tier.store(key_of(1), host.pool, refs).wait().ok());
    CHECK(tier.load(key_of(1), host.pool, refs).wait().ok());
  }
  auto tier = FileTier<Small::Model, Host>::make({.folder = folder.path, .budget = Bytes(1 << 20)}).value();
  CHECK_FALSE(tier.load(key_of(1), host.pool, refs).wait().ok());
  CHECK(tier.stats().lost_for(RecordFault::checksum_kind) == 1);
}
#endif

#if KVIRE_HAVE_LIBURING
TEST_CASE("adapt io_uring: records come back, through many pieces a file and more pieces than the ring holds") {
  adapt::UringIo io(4, 4096);
  MESSAGE("io: " << io.name());
  round_trip<Xxh64>(io);
}

TEST_CASE("adapt io_uring: files that are absent, short, long and unaligned are reported as by PosixIo") {
  Folder folder;
  adapt::UringIo uring(4, 4096);
  for (const std::size_t n : {0, 1, 4095, 4096, 4097, 50'000}) folder.write("f" + std::to_string(n), bytes_of(n));
  std::vector<std::byte> memory(2 * 65536 + 8192);
  std::byte* aligned = memory.data();
  while (reinterpret_cast<std::uintptr_t>(aligned) % 4096 != 0) ++aligned;
  for (const std::int64_t bytes : {4096, 8192, 65536, 100}) {
    for (const std::size_t n : {0, 1, 4095, 4096, 4097, 50'000, 7}) {
      CAPTURE(n);
      CAPTURE(bytes);
      FileRead a[1] = {{.path = folder.path + "/f" + std::to_string(n), .data = aligned, .bytes = bytes}};
      FileRead b[1] = {{.path = a[0].path, .data = aligned + 65536, .bytes = bytes}};
      uring.read(a);
      PosixIo().read(b);
      CHECK(a[0].status.ok() == b[0].status.ok());
      CHECK(a[0].absent == b[0].absent);
      CHECK(a[0].absent == (n == 7));
      CHECK(a[0].file_bytes == b[0].file_bytes);
      CHECK(a[0].moved == b[0].moved);
      CHECK(std::equal(aligned, aligned + a[0].moved, aligned + 65536));
      CHECK(std::equal(aligned, aligned + a[0].moved, bytes_of(n).begin()));
    }
  }
  FileWrite w[1] = {{.path = folder.path + "/new", .data = aligned, .bytes = 65536}};
  uring.write(w);
  CHECK(w[0].status.ok());
  CHECK(w[0].moved == 65536);
  CHECK(folder.read("new").size() == 65536);
  FileWrite again[1] = {{.path = folder.path + "/new", .data = aligned, .bytes = 4096}};
  uring.write(again);
  CHECK_FALSE(again[0].status.ok());
}

TEST_CASE("adapt io_uring: what is refused around the system's cache goes through it, written as well as read") {
  struct Probe : adapt::UringIo {
    Probe() : UringIo(4, 4096) {}
    int move(int file, std::byte* data, std::int64_t bytes, bool write) const {
      auto ring = shared_->take();
      std::vector<Piece> pieces;
      split(pieces, file, data, bytes, 0);
      run(*ring, pieces, write);
      shared_->put(std::move(ring));
      for (const Piece& p : pieces) {
        if (p.error != 0) return p.error;
      }
      return 0;
    }
  };
  const Probe io;
  Folder folder;
  auto bytes = bytes_of(10'000);
  std::vector<std::byte> back(bytes.size());
  const auto open = [&](int flags) { return detail::FileHandle(::open((folder.path + "/file").c_str(), flags | detail::direct_flag, 0644)); };
  const auto out = open(O_WRONLY | O_CREAT);
  if (!io.works() || !out || ::pwrite(out.get(), bytes.data() + 1, 5000, 0) >= 0) {
    MESSAGE("skipped: no io_uring, or a file system that refuses nothing");
    return;
  }
  REQUIRE(io.move(out.get(), bytes.data() + 1, 9999, true) == 0);
  CHECK(std::equal(bytes.begin() + 1, bytes.end(), folder.read("file").begin()));
  const auto in = open(O_RDONLY);
  REQUIRE(io.move(in.get(), back.data() + 1, 9999, false) == 0);
  CHECK(std::equal(bytes.begin() + 1, bytes.end(), back.begin() + 1));
}
#endif

