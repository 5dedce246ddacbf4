// SPDX-License-Identifier: Apache-2.0
#include <kvire/kernel/copy_pages.hpp>
#include <kvire/kernel/move_tokens.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvire/codec/row.hpp>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>

using namespace kvire;

namespace {

template <class P>
struct Memory {
  Memory(std::int32_t n, std::int64_t gap, unsigned seed) : pages(n), stride(P::page_bytes + gap), bytes(static_cast<std::size_t>(stride * n)) {
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>((i * 2654435761U + seed) >> 13);
  }
  PageView<P> view() { return {bytes.data(), stride, pages}; }
  std::int32_t pages;
  std::int64_t stride;
  std::vector<std::byte> bytes;
};

template <class P>
void check_copy() {
  Memory<P> from(6, 0, 1);
  Memory<P> to(5, 64, 2);
  auto expected = to.bytes;
  const std::vector<std::int32_t> from_ids = {5, -1, 3, 0, 2, 6, 1, 1};
  const std::vector<std::int32_t> to_ids = {1, 2, 4, 2, 0, 2, 0x7FFFFFFF, -7};
  for (const int i : {0, 2}) {
    for (std::int64_t b = 0; b < P::page_bytes; ++b) {
      expected[static_cast<std::size_t>(to_ids[static_cast<std::size_t>(i)] * to.stride + b)] =
          from.bytes[static_cast<std::size_t>(from_ids[static_cast<std::size_t>(i)] * from.stride + b)];
    }
  }
  auto group = to;
  CopyCounts counts;
  auto stream = Stream<Host>::make().value();
  REQUIRE(copy_pages<P>(from_ids.data(), assume_ready(ConstPageView<P>(from.view())), to_ids.data(), assume_ready(to.view()), 8, stream, &counts).ok());
  REQUIRE(stream.synchronize().ok());
  INFO(std::string(P::name));
  CHECK(to.bytes == expected);
  CHECK(counts.copied == 2);
  CHECK(counts.skipped == 2);
  CHECK(counts.null_page == 2);
  CHECK(counts.bad_ids == 2);
  // The body as a warp would run it.
  const body::CopyPagesArgs args{from.bytes.data(), from.stride, 6, group.bytes.data(), group.stride, 5, from_ids.data(), to_ids.data()};
  CopyCounts again;
  for (std::int64_t i = 0; i < 8; ++i) again += body::copy_pages<P>(HostGroup<32>{}, i, args);
  CHECK(group.bytes == expected);
  CHECK(again.copied == 2);
}

template <class P>
void check_move() {
  Memory<P> from(3, 0, 3);
  Memory<P> to(3, 16, 4);
  auto expected = to.bytes;
  constexpr std::int64_t t = P::tokens_per_page;
  const std::vector<std::int64_t> from_slots = {t, 2 * t + 1, -1, 3 * t, t, 0};
  const std::vector<std::int64_t> to_slots = {2 * t + 1, t, t, t, 3 * t, t + 1};
  // What a move is, byte for byte: the rows of both tokens, plane after plane.
  for (const std::size_t i : {0U, 1U}) {
    for (int plane = 0; plane < P::plane_count; ++plane) {
      for (std::int64_t b = 0; b < P::table.row_bytes[plane]; ++b) {
        const auto at = [&](const auto& memory, std::int64_t slot) {
          return static_cast<std::size_t>(memory.stride * (slot / t) + P::table.plane_offset[plane] + P::table.row_bytes[plane] * (slot % t) + b);
        };
        expected[at(to, to_slots[i])] = from.bytes[at(from, from_slots[i])];
      }
    }
  }
  auto group = to;
  CopyCounts counts;
  auto stream = Stream<Host>::make().value();
  REQUIRE(move_tokens<P>(from_slots.data(), assume_ready(from.view()), to_slots.data(), assume_ready(to.view()), 6, stream, &counts).ok());
  REQUIRE(stream.synchronize().ok());
  INFO(std::string(P::name));
  CHECK(to.bytes == expected);
  CHECK(counts.copied == 2);
  CHECK(counts.skipped == 1);
  CHECK(counts.bad_ids == 2);
  CHECK(counts.null_page == 1);
  const body::MoveTokensArgs args{from.bytes.data(), from.stride, 3, group.bytes.data(), group.stride, 3, from_slots.data(), to_slots.data()};
  for (std::int64_t i = 0; i < 6; ++i) body::move_tokens<P>(HostGroup<32>{}, i, args);
  CHECK(group.bytes == expected);
}

struct OddRows : PageLayout<3, 1, Plane<Field<role::Value, Element::e4m3, 7>>, Plane<Field<role::Nope, Element::e4m3, 13>>> {
  static constexpr const char* name = "OddRows";
};

}  // namespace

TEST_CASE("kernel: pages are copied whole, between strides, and nothing else is") {
  check_copy<Fp8WithScale<4, 128>>();
  check_copy<Bf16Contiguous<4, 64>>();
  check_copy<preset::deepseek_v4::Latent<2>>();
  check_copy<preset::deepseek_v3_2::Latent<2>>();
  check_copy<OddRows>();
}

TEST_CASE("kernel: tokens move with their rows in every plane, and nothing else does") {
  check_move<Fp8WithScale<4, 128>>();
  check_move<Fp8WithScaleInterleaved<4, 128>>();
  check_move<Fp4WithScale<4, 128>>();
  check_move<preset::deepseek_v4::Latent<2>>();
  check_move<preset::deepseek_v4::Latent<64>>();
  check_move<OddRows>();
}

TEST_CASE("kernel: lists without memory are refused") {
  using P = Bf16Contiguous<4, 64>;
  Memory<P> memory(2, 0, 0);
  auto stream = Stream<Host>::make().value();
  const auto lease = assume_ready(memory.view());
  CHECK(!copy_pages<P>(nullptr, lease, nullptr, lease, 1, stream).ok());
  CHECK(!copy_pages<P>(nullptr, lease, nullptr, lease, -1, stream).ok());
  CHECK(copy_pages<P>(nullptr, lease, nullptr, lease, 0, stream).ok());
  CHECK(!move_tokens<P>(nullptr, lease, nullptr, lease, 1, stream).ok());
  CHECK(stream.synchronize().ok());
}
