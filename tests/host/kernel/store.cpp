// SPDX-License-Identifier: Apache-2.0
#include <kvire/kernel/store.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <kvire/pool/pool.hpp>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/preset/deepseek_v4_1.hpp>
#include <kvire/sync/gate.hpp>

#include "tests/support/same_page.hpp"

using namespace kvire;

namespace {

constexpr std::byte fill{0xA5};

std::vector<float> random_rows(std::int64_t n, std::uint32_t seed) {
  std::vector<float> x;
  std::uint32_t s = seed;
  for (std::int64_t i = 0; i < n; ++i) {
    s = s * 1664525U + 1013904223U;
    const std::uint32_t exponent = 120 + (s >> 28);
    x.push_back(float_of((s & sign_bit) | (exponent << 23) | ((s * 2246822519U) >> 9)));
  }
  return x;
}

// Pages of one layer in plain memory, with room between them.
template <class P>
struct Memory {
  explicit Memory(std::int32_t n, std::int64_t gap = 0) : pages(n), stride(P::page_bytes + gap), bytes(static_cast<std::size_t>(stride * n), fill) {}
  PageView<P> view() { return {bytes.data(), stride, pages}; }
  std::int32_t pages;
  std::int64_t stride;
  std::vector<std::byte> bytes;
};

// Policies whose rows do not divide evenly over 32 lanes, or whose blocks do not fall on a power of two of lanes.
struct Odd : PageLayout<3, 1, Plane<Field<role::Value, Element::e4m3, 96>>, Plane<Field<role::Scale, Element::f32, 1>>> {
  using Scaling = ScaleRule<role::Value, 96>;
  static constexpr const char* name = "Odd";
};
struct Mixed : PageLayout<2, 1, Plane<Field<role::Nope, Element::e2m1, 66>, Pad<3>>, Plane<Field<role::Rope, Element::bf16, 10>>,
                          Plane<Field<role::Scale, Element::ue8m0, 3>>> {
  using Scaling = ScaleRule<role::Nope, 22>;
  static constexpr const char* name = "Mixed";
};
struct Small : Fp4WithScale<4, 8, 4> {
  static constexpr const char* name = "Small";
};

template <class P>
void check_group_equals_plain(RowOptions options) {
  INFO(std::string(P::name));
  const std::int64_t n = 2 * P::tokens_per_page;
  auto x = random_rows(n * P::dim, 11);
  for (std::size_t i = 0; i < x.size(); i += 97) x[i] = float_of(i % 3 == 0 ? nan_bits : i % 3 == 1 ? infinity_bits : 0x80000001U);
  std::vector<std::int64_t> slots;
  for (std::int64_t i = 0; i < n; ++i) slots.push_back(P::tokens_per_page + (i * 7 + 3) % n);
  Memory<P> plain(3, 48);
  Memory<P> group(3, 48);
  body::StoreArgs<P> args;
  args.rows = x.data();
  args.slots = slots.data();
  args.pages = group.bytes.data();
  args.page_stride = group.stride;
  args.page_count = 3;
  args.options = options;
  Memory<P> narrow(3, 48);
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t slot = slots[static_cast<std::size_t>(i)];
    encode_row<P>(x.data() + i * P::dim, plain.view().page(static_cast<std::int32_t>(slot / P::tokens_per_page)), static_cast<int>(slot % P::tokens_per_page), options);
    args.pages = group.bytes.data();
    CHECK(body::store(HostGroup<32>{}, i, args).stored == 1);
    args.pages = narrow.bytes.data();
    CHECK(body::store(HostGroup<4>{}, i, args).stored == 1);
  }
  CHECK(group.bytes == plain.bytes);
  CHECK(narrow.bytes == plain.bytes);
}

}  // namespace

TEST_CASE("kernel: a group stores the bytes of encode_row, whatever the policy") {
  for (const RowOptions options : {RowOptions{}, RowOptions{Ties::to_even, true}}) {
    check_group_equals_plain<Fp8WithScale<4, 128>>(options);
    check_group_equals_plain<Fp8WithScaleInterleaved<4, 128, 64>>(options);
    check_group_equals_plain<Bf16Contiguous<4, 64>>(options);
    check_group_equals_plain<Fp4WithScale<4, 512>>(options);
    check_group_equals_plain<preset::deepseek_v4::Latent<2>>(options);
    check_group_equals_plain<preset::deepseek_v3_2::Latent<4>>(options);
    check_group_equals_plain<preset::deepseek_v4_1::LatentFp8<2>>(options);
    check_group_equals_plain<preset::deepseek_v4_1::LatentFp4<2>>(options);
    check_group_equals_plain<F32Rows<2, 96>>(options);
    check_group_equals_plain<Odd>(options);
    check_group_equals_plain<Mixed>(options);
    check_group_equals_plain<Small>(options);
  }
}

TEST_CASE("kernel: bad slots are dropped and counted, the null page is never written") {
  using P = Fp8WithScale<4, 128>;
  Memory<P> memory(8);
  const auto before = memory.bytes;
  const auto x = random_rows(9 * 128, 5);
  //  page 2 token 1, padding, the null page twice, beyond the pool three times, INT64_MIN, page 7 token 3
  const std::vector<std::int64_t> slots = {9, -1, 0, 3, 32, 0x7FFFFFFF, INT64_MAX, INT64_MIN, 31};
  auto stream = Stream<Host>::make().value();
  StoreCounts counts;
  StoreOptions options;
  options.counts = &counts;
  REQUIRE(store<P>(Rows(x.data(), 9), slots.data(), assume_ready(memory.view()), stream, options).ok());
  REQUIRE(stream.synchronize().ok());
  CHECK(counts.stored == 2);
  CHECK(counts.skipped == 2);
  CHECK(counts.null_page == 2);
  CHECK(counts.bad_slots == 3);
  auto expected = before;
  encode_row<P>(x.data(), expected.data() + 2 * P::page_bytes, 1);
  encode_row<P>(x.data() + 8 * 128, expected.data() + 7 * P::page_bytes, 3);
  CHECK(memory.bytes == expected);
}

TEST_CASE("kernel: a store writes the pages of its lease and no others") {
  using P = Bf16Contiguous<4, 64>;
  auto pool = DevicePool<P, Host>::make({.layers = 1, .pages = 5, .name = "index_k"}).value();
  const auto page = pool.allocate().value();
  const auto other = pool.allocate().value();
  auto stream = Stream<Host>::make().value();
  auto step = Gate<Host>().begin({}, stream).value();
  const DevicePage mine[] = {page.id()};
  const auto lease = step.write(pool, EntrySlot(0), mine).value();
  const auto x = random_rows(2 * 64, 8);
  const std::vector<std::int64_t> slots = {page.id().value * 4 + 1, other.id().value * 4 + 1};
  StoreCounts counts;
  StoreOptions options;
  options.counts = &counts;
  REQUIRE(store<P>(Rows(x.data(), 2), slots.data(), lease, stream, options).ok());
  REQUIRE(stream.synchronize().ok());
  CHECK(step.status().ok());
  CHECK(counts.stored == 1);
  CHECK(counts.bad_slots == 1);
}

TEST_CASE("kernel: a store takes bf16 rows and rows with a stride") {
  using P = Fp4WithScale<4, 64>;
  const auto x = random_rows(6 * 80, 6);
  std::vector<std::uint16_t> codes;
  std::vector<float> rounded;
  for (const float v : x) {
    codes.push_back(bf16_from_f32(v));
    rounded.push_back(f32_from_bf16(codes.back()));
  }
  const std::vector<std::int64_t> slots = {4, 5, 6, 7, 8, 9};
  auto stream = Stream<Host>::make().value();
  Memory<P> a(3);
  Memory<P> b(3);
  REQUIRE(store<P>(Rows(codes.data(), 6, 80), slots.data(), assume_ready(a.view()), stream).ok());
  REQUIRE(store<P>(Rows(rounded.data(), 6, 80), slots.data(), assume_ready(b.view()), stream).ok());
  REQUIRE(stream.synchronize().ok());
  CHECK(a.bytes == b.bytes);
  std::vector<std::byte> expected(a.bytes.size(), fill);
  for (std::int64_t i = 0; i < 6; ++i) encode_row<P>(rounded.data() + 80 * i, expected.data() + (1 + i / 4) * P::page_bytes, static_cast<int>(i % 4));
  CHECK(a.bytes == expected);
}

TEST_CASE("kernel: what cannot be stored is refused before anything is queued") {
  using P = Fp8WithScale<4, 96>;
  Memory<P> memory(2);
  const auto lease = assume_ready(memory.view());
  auto stream = Stream<Host>::make().value();
  const std::vector<float> x(96, 1.0F);
  const std::vector<std::int64_t> slots = {4};
  StoreOptions options;
  CHECK(!store<P>(Rows(x.data(), 1, 64), slots.data(), lease, stream, options).ok());
  CHECK(!store<P>(Rows(x.data(), 1), nullptr, lease, stream, options).ok());
  CHECK(!store<P>(Rows(x.data(), -1), slots.data(), lease, stream, options).ok());
  options.prologue.hadamard = true;
  const Status hadamard = store<P>(Rows(x.data(), 1), slots.data(), lease, stream, options);
  REQUIRE(!hadamard.ok());
  CHECK(hadamard.error().message.find("96") != std::string::npos);
  options.prologue = {};
  options.prologue.rope_dims = 98;
  CHECK(!store<P>(Rows(x.data(), 1), slots.data(), lease, stream, options).ok());
  options.prologue.rope_dims = 64;
  CHECK(!store<P>(Rows(x.data(), 1), slots.data(), lease, stream, options).ok());
  options.prologue = {};
  options.prologue.norm = true;
  for (const float epsilon : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -1e-9F, -1e9F}) {
    options.prologue.epsilon = epsilon;
    const Status status = store<P>(Rows(x.data(), 1), slots.data(), lease, stream, options);
    REQUIRE(!status.ok());
    CHECK(status.error().message.find("RMSNorm epsilon") != std::string::npos);
  }
  const auto* off = reinterpret_cast<const float*>(reinterpret_cast<std::uintptr_t>(x.data()) + 2);
  CHECK(!store<P>(Rows(off, 1), slots.data(), lease, stream).ok());
  CHECK(!store<P>(Rows(x.data(), INT64_MAX), slots.data(), lease, stream).ok());
  CHECK(store<P>(Rows(x.data(), 0), nullptr, lease, stream).ok());
  REQUIRE(stream.synchronize().ok());
  CHECK(memory.bytes == std::vector<std::byte>(memory.bytes.size(), fill));
}

TEST_CASE("kernel: the prologue norms, turns and transforms") {
  constexpr int dim = 64;
  using P = F32Rows<2, dim>;
  const auto x = random_rows(2 * dim, 9);
  std::vector<float> weight;
  for (int i = 0; i < dim; ++i) weight.push_back(0.5F + 0.01F * static_cast<float>(i));
  // Table row 3 turns pair k by an angle of which cosine and sine are 0.6 and 0.8; row 2 by none.
  std::vector<float> cos(4 * 8, 1.0F);
  std::vector<float> sin(4 * 8, 0.0F);
  for (int k = 0; k < 8; ++k) {
    cos[static_cast<std::size_t>(24 + k)] = 0.6F;
    sin[static_cast<std::size_t>(24 + k)] = 0.8F;
  }
  const std::vector<std::int64_t> positions = {3, 2};
  const std::vector<std::int64_t> slots = {2, 3};
  StoreOptions options;
  options.prologue.norm = true;
  options.prologue.weight = weight.data();
  options.prologue.rope_dims = 16;
  options.prologue.cos = cos.data();
  options.prologue.sin = sin.data();
  options.prologue.positions = positions.data();
  options.prologue.table_rows = 4;
  options.prologue.hadamard = true;
  Memory<P> memory(2);
  auto stream = Stream<Host>::make().value();
  REQUIRE(store<P>(Rows(x.data(), 2), slots.data(), assume_ready(memory.view()), stream, options).ok());
  REQUIRE(stream.synchronize().ok());

  for (int row = 0; row < 2; ++row) {
    double y[dim];
    double squares = 0;
    for (int i = 0; i < dim; ++i) squares += double(x[static_cast<std::size_t>(row * dim + i)]) * double(x[static_cast<std::size_t>(row * dim + i)]);
    for (int i = 0; i < dim; ++i) {
      y[i] = double(x[static_cast<std::size_t>(row * dim + i)]) / std::sqrt(squares / dim + 1e-6) * double(weight[static_cast<std::size_t>(i)]);
    }
    if (row == 0) {
      for (int i = dim - 16; i < dim; i += 2) {
        const double a = y[i];
        const double b = y[i + 1];
        y[i] = 0.6 * a - 0.8 * b;
        y[i + 1] = 0.8 * a + 0.6 * b;
      }
    }
    std::vector<float> stored(dim);
    decode_row<P>(memory.view().page(1), row, stored.data());
    for (int i = 0; i < dim; ++i) {
      double sum = 0;
      for (int j = 0; j < dim; ++j) {
        bool odd = false;
        for (int bits = i & j; bits != 0; bits &= bits - 1) odd = !odd;
        sum += odd ? -y[j] : y[j];
      }
      CHECK(std::abs(sum / 8 - double(stored[static_cast<std::size_t>(i)])) < 1e-5);
    }
  }
}

TEST_CASE("kernel: a position that the RoPE tables do not have is dropped and counted") {
  using P = Bf16Contiguous<4, 64>;
  const auto x = random_rows(3 * 64, 4);
  const std::vector<float> table(2 * 32, 1.0F);
  const std::vector<std::int64_t> positions = {1, 2, -1};
  const std::vector<std::int64_t> slots = {4, 5, 6};
  StoreCounts counts;
  StoreOptions options;
  options.counts = &counts;
  options.prologue.rope_dims = 64;
  options.prologue.cos = table.data();
  options.prologue.sin = table.data();
  options.prologue.positions = positions.data();
  options.prologue.table_rows = 2;
  Memory<P> memory(2);
  auto stream = Stream<Host>::make().value();
  REQUIRE(store<P>(Rows(x.data(), 3), slots.data(), assume_ready(memory.view()), stream, options).ok());
  REQUIRE(stream.synchronize().ok());
  CHECK(counts.stored == 1);
  CHECK(counts.bad_positions == 2);
  CHECK(memory.bytes[static_cast<std::size_t>(P::page_bytes) + 128] == fill);
}

TEST_CASE("kernel: a row's bytes do not depend on the rows beside it") {
  using P = preset::deepseek_v4::Latent<64>;
  const std::int64_t n = 200;
  const auto x = random_rows(n * P::dim, 21);
  std::vector<std::int64_t> slots;
  for (std::int64_t i = 0; i < n; ++i) slots.push_back(64 + i);
  auto stream = Stream<Host>::make().value();
  Memory<P> together(5);
  Memory<P> apart(5);
  StoreOptions options;
  options.prologue.norm = true;
  options.prologue.hadamard = true;
  REQUIRE(store<P>(Rows(x.data(), n), slots.data(), assume_ready(together.view()), stream, options).ok());
  for (std::int64_t i = n - 1; i >= 0; --i) {
    REQUIRE(store<P>(Rows(x.data() + i * P::dim, 1), slots.data() + i, assume_ready(apart.view()), stream, options).ok());
  }
  REQUIRE(stream.synchronize().ok());
  CHECK(together.bytes == apart.bytes);
}
