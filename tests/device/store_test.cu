// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvire/kernel/store.cuh>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <tests/support/golden.hpp>
#include <tests/support/layouts.hpp>
#include <tests/support/same_page.hpp>

using namespace kvire;

namespace {

void check(cudaError_t error) { REQUIRE_MESSAGE(error == cudaSuccess, cudaGetErrorString(error)); }

// An array on the device.
template <class T>
class Device {
 public:
  explicit Device(const std::vector<T>& v) : n_(v.size()) {
    check(cudaMalloc(&p_, n_ * sizeof(T) + 1));
    check(cudaMemcpy(p_, v.data(), n_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() { cudaFree(p_); }
  T* get() { return p_; }
  std::vector<T> read() {
    std::vector<T> v(n_);
    check(cudaMemcpy(v.data(), p_, n_ * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
  }

 private:
  T* p_ = nullptr;
  std::size_t n_;
};

// Rows in host memory, stored by the host's body and by the device.
struct Case {
  std::vector<float> rows;
  bool bf16 = false;
  std::vector<std::int64_t> slots;
  std::int32_t page_count = 0;
  std::int32_t first_page = 0;
  RowOptions options;
  Prologue prologue;
};

template <class T>
std::vector<T> copy(const T* p, std::size_t n) {
  return p == nullptr ? std::vector<T>{} : std::vector<T>(p, p + n);
}

template <class P>
std::vector<std::byte> on_host(const Case& c, std::vector<std::byte> pages, StoreCounts& counts) {
  std::vector<std::uint16_t> codes;
  if (c.bf16) {
    for (const float x : c.rows) codes.push_back(bf16_from_f32(x));
  }
  body::StoreArgs<P> args;
  args.rows = c.bf16 ? static_cast<const void*>(codes.data()) : c.rows.data();
  args.row_element = c.bf16 ? Element::bf16 : Element::f32;
  args.slots = c.slots.data();
  args.pages = pages.data();
  args.page_stride = P::page_bytes;
  args.page_count = c.page_count;
  args.first_page = c.first_page;
  args.options = c.options;
  args.prologue = c.prologue;
  for (std::size_t i = 0; i < c.slots.size(); ++i) counts += body::store<P>(HostGroup<32>{}, std::int64_t(i), args);
  return pages;
}

template <class P>
std::vector<std::byte> on_device(const Case& c, const std::vector<std::byte>& before, StoreCounts& counts, bool counted = true) {
  std::vector<std::uint16_t> codes;
  if (c.bf16) {
    for (const float x : c.rows) codes.push_back(bf16_from_f32(x));
  }
  Device<float> rows(c.rows);
  Device<std::uint16_t> code_rows(codes);
  Device<std::int64_t> slots(c.slots);
  Device<std::byte> pages(before);
  const auto turns = std::size_t(c.prologue.table_rows * (c.prologue.rope_dims / 2));
  Device<float> weight(copy(c.prologue.weight, std::size_t(P::dim))), cos(copy(c.prologue.cos, turns)), sin(copy(c.prologue.sin, turns));
  Device<std::int64_t> positions(copy(c.prologue.positions, c.slots.size()));
  Device<StoreCounts> sums(std::vector<StoreCounts>(1));
  body::StoreArgs<P> args;
  args.rows = c.bf16 ? static_cast<const void*>(code_rows.get()) : rows.get();
  args.row_element = c.bf16 ? Element::bf16 : Element::f32;
  args.slots = slots.get();
  args.pages = pages.get();
  args.page_stride = P::page_bytes;
  args.page_count = c.page_count;
  args.first_page = c.first_page;
  args.options = c.options;
  args.prologue = c.prologue;
  args.prologue.weight = c.prologue.weight != nullptr ? weight.get() : nullptr;
  args.prologue.cos = cos.get();
  args.prologue.sin = sin.get();
  args.prologue.positions = c.prologue.positions != nullptr ? positions.get() : nullptr;
  check(launch_store<P>(args, std::int64_t(c.slots.size()), counted ? sums.get() : nullptr, nullptr));
  check(cudaDeviceSynchronize());
  counts = sums.read()[0];
  return pages.read();
}

// Random bit patterns of every exponent, some rows with infinities and NaNs, slots in random order with padding among them.
template <class P>
Case random_case(std::int64_t n, unsigned seed, bool any_exponent) {
  Case c;
  std::mt19937 engine{seed};
  c.page_count = static_cast<std::int32_t>(n / P::tokens_per_page + 3);
  c.first_page = 1;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t exponent = any_exponent ? engine() % 255 : 118 + engine() % 16;
    for (int j = 0; j < P::dim; ++j) {
      const std::uint32_t e = j % 7 == 0 ? exponent / 2 : exponent;
      c.rows.push_back(float_of((engine() & 0x807FFFFFU) | (e << 23)));
    }
    if (i % 13 == 5) c.rows[std::size_t(i * P::dim + engine() % P::dim)] = float_of(nan_bits | (engine() & sign_bit));
    if (i % 17 == 3) c.rows[std::size_t(i * P::dim + engine() % P::dim)] = float_of(infinity_bits | (engine() & sign_bit));
    if (i % 29 == 1) std::fill(c.rows.end() - P::dim, c.rows.end(), i % 2 == 0 ? 0.0F : -0.0F);
    c.slots.push_back(P::tokens_per_page + i);
  }
  std::shuffle(c.slots.begin(), c.slots.end(), engine);
  for (std::size_t i = 7; i < c.slots.size(); i += 23) c.slots[i] = i % 4 == 0 ? -1 : i % 4 == 1 ? std::int64_t(i % P::tokens_per_page) : i % 4 == 2 ? INT64_MAX : INT64_MIN;
  return c;
}

template <class P>
void check_twin(Case c) {
  INFO(std::string(P::name));
  const std::vector<std::byte> before(std::size_t(c.page_count) * P::page_bytes, std::byte{0xA5});
  for (const bool bf16 : {false, true}) {
    c.bf16 = bf16;
    StoreCounts want, got;
    const auto host = on_host<P>(c, before, want);
    const auto device = on_device<P>(c, before, got);
    CHECK(kvire_test::first_difference<P>(device, host) == "");
    CHECK(device == host);
    CHECK(std::memcmp(&want, &got, sizeof want) == 0);
    CHECK(on_device<P>(c, before, got, false) == host);
  }
}

template <class P>
void check_policy() {
  for (const RowOptions options : {RowOptions{}, RowOptions{Ties::to_even, true}}) {
    for (const bool any : {false, true}) {
      Case c = random_case<P>(700, any ? 3 : 4, any);
      c.options = options;
      check_twin<P>(c);
    }
  }
}

template <class P>
void check_prologue() {
  Case c = random_case<P>(300, 6, false);
  std::mt19937 engine{8};
  std::vector<float> weight, cos, sin;
  std::vector<std::int64_t> positions;
  for (int i = 0; i < P::dim; ++i) weight.push_back(float(engine() % 1000) / 500);
  for (int i = 0; i < 400 * 32; ++i) {
    cos.push_back(float(engine() % 2001) / 1000 - 1);
    sin.push_back(float(engine() % 2001) / 1000 - 1);
  }
  for (std::size_t i = 0; i < c.slots.size(); ++i) positions.push_back(i % 31 == 2 ? 400 : i % 37 == 4 ? -1 : std::int64_t(engine() % 400));
  for (int parts = 1; parts < 8; ++parts) {
    c.prologue = {};
    c.prologue.norm = (parts & 1) != 0;
    c.prologue.weight = parts % 3 == 0 ? nullptr : weight.data();
    c.prologue.rope_dims = (parts & 2) != 0 ? 64 : 0;
    c.prologue.table_rows = (parts & 2) != 0 ? 400 : 0;
    c.prologue.cos = cos.data();
    c.prologue.sin = sin.data();
    c.prologue.positions = positions.data();
    c.prologue.hadamard = (parts & 4) != 0;
    check_twin<P>(c);
  }
}

}  // namespace

TEST_CASE("cuda store: the bytes and counts of the host twin") {
  check_policy<Fp8WithScale<64, 128>>();
  check_policy<Fp8WithScaleInterleaved<16, 128>>();
  check_policy<Bf16Contiguous<64, 128>>();
  check_policy<Fp4WithScale<64, 128>>();
  check_policy<preset::deepseek_v4::Latent<64>>();
  check_policy<preset::deepseek_v3_2::Latent<64>>();
}

TEST_CASE("cuda store: norm, RoPE and Hadamard give the host's bits") {
  check_prologue<Fp8WithScale<64, 128>>();
  check_prologue<Bf16Contiguous<64, 128>>();
}

TEST_CASE("cuda store: golden vectors, bit for bit") {
  kvire_test::for_each_golden("store_", [](const kvire_test::Safetensors& file) {
    const bool known = kvire_test::with_policy(file.meta("policy"), file.meta_int("page_tokens"), file.meta_int("dim"), [&](auto policy) {
      using P = typename decltype(policy)::type;
      Case c;
      c.rows = file.at("keys").as<float>();
      c.slots = file.at("slots").as<std::int64_t>();
      const auto expected = file.at("pages").as<std::byte>();
      c.page_count = static_cast<std::int32_t>(expected.size() / P::page_bytes);
      c.options.ties = file.meta("ties") == "even" ? Ties::to_even : Ties::toward_zero;
      c.options.bf16_round_trip = file.meta("policy") == "latent" && file.meta("round_trip") == "True";
      const std::vector<std::byte> before(expected.size(), static_cast<std::byte>(file.meta_int("fill")));
      StoreCounts counts;
      CHECK(kvire_test::first_difference<P>(on_device<P>(c, before, counts), expected) == "");
      CHECK(counts.stored + counts.skipped == static_cast<std::int64_t>(c.slots.size()));
      if (file.meta("keys") == "bf16") {
        c.bf16 = true;
        CHECK(kvire_test::first_difference<P>(on_device<P>(c, before, counts), expected) == "");
      }
    });
    CHECK(known);
  });
}
