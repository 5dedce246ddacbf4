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
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/preset/deepseek_v4_1.hpp>
#include <tests/support/device_array.hpp>
#include <tests/support/far_pages.hpp>
#include <tests/support/same_page.hpp>
#include <tests/support/write_late.cuh>

using namespace kvire;
using namespace kvire_test;

namespace {

// Rows in host memory, stored by the host's body and by the device. Buffers are as the kernel sees them: rows `shift` elements behind an
// aligned address and `stride` apart, pages with a margin before, between and behind.
struct Case {
  bool bf16 = false;
  std::vector<std::uint32_t> rows;  // f32 bits
  std::int64_t stride = 0, shift = 0;
  std::vector<std::int64_t> slots;
  std::int32_t page_count = 0, first_page = 0;
  std::int64_t page_gap = 0;  // bytes behind each page
  RowOptions options;
  bool norm = false, weighted = false, hadamard = false, placed = false;  // placed: positions are given
  int rope_dims = 0;
  std::int64_t table_rows = 0;
  std::vector<float> weight, cos, sin;
  std::vector<std::int64_t> positions;
};

constexpr std::size_t margin = 256;  // bytes

template <class P>
body::StoreArgs<P> arguments(const Case& c, const void* rows, const std::int64_t* slots, std::byte* memory, const float* weight, const float* cos,
                             const float* sin, const std::int64_t* positions) {
  body::StoreArgs<P> args;
  args.rows = static_cast<const std::byte*>(rows) + c.shift * (c.bf16 ? 2 : 4);
  args.row_element = c.bf16 ? Element::bf16 : Element::f32;
  args.row_stride = c.stride;
  args.slots = slots;
  args.pages = memory + margin;
  args.page_stride = P::page_bytes + c.page_gap;
  args.page_count = c.page_count;
  args.first_page = c.first_page;
  args.options = c.options;
  args.prologue.norm = c.norm;
  args.prologue.weight = c.weighted ? weight : nullptr;
  args.prologue.rope_dims = c.rope_dims;
  args.prologue.table_rows = c.table_rows;
  args.prologue.cos = cos;
  args.prologue.sin = sin;
  args.prologue.positions = c.placed ? positions : nullptr;
  args.prologue.hadamard = c.hadamard;
  return args;
}

std::vector<std::uint16_t> codes_of(const Case& c) {
  std::vector<std::uint16_t> codes;
  for (const std::uint32_t x : c.rows) codes.push_back(static_cast<std::uint16_t>(x >> 16));  // NaNs with any payload among them
  return codes;
}

struct Outcome {
  std::vector<std::byte> memory;
  StoreCounts counts;
  bool operator==(const Outcome& o) const { return memory == o.memory && std::memcmp(&counts, &o.counts, sizeof counts) == 0; }
};

template <class P>
std::vector<std::byte> poisoned(const Case& c) {
  return std::vector<std::byte>(2 * margin + std::size_t(c.page_count) * std::size_t(P::page_bytes + c.page_gap), std::byte{0xFF});
}

template <class P>
Outcome on_host(const Case& c) {
  Outcome out{poisoned<P>(c), {}};
  const auto codes = codes_of(c);
  const void* rows = c.bf16 ? static_cast<const void*>(codes.data()) : c.rows.data();
  const auto args = arguments<P>(c, rows, c.slots.data(), out.memory.data(), c.weight.data(), c.cos.data(), c.sin.data(), c.positions.data());
  for (std::size_t i = 0; i < c.slots.size(); ++i) out.counts += body::store<P>(HostGroup<32>{}, std::int64_t(i), args);
  return out;
}

// What a case needs on the device, to be stored as a whole or in part.
template <class P>
class OnDevice {
 public:
  explicit OnDevice(const Case& c)
      : c_(c), rows_(c.rows), codes_(codes_of(c)), slots_(c.slots), weight_(c.weight), cos_(c.cos), sin_(c.sin), positions_(c.positions) {}

  // `n` rows from `first` on, into poisoned memory.
  Outcome run(std::size_t first, std::size_t n, bool counted = true, bool overlap = false) const {
    const DeviceArray<std::byte> memory(poisoned<P>(c_));
    const DeviceCounts<StoreCounts> counts;
    queue(memory.data(), first, n, counted ? counts.data() : nullptr, overlap);
    Outcome out{memory.read(), counts.value()};
    return out;
  }
  Outcome run(bool counted = true, bool overlap = false) const { return run(0, c_.slots.size(), counted, overlap); }

  void queue(std::byte* memory, std::size_t first, std::size_t n, StoreCounts* counts, bool overlap = false) const {
    const void* rows = c_.bf16 ? static_cast<const void*>(codes_.data()) : rows_.data();
    auto args = arguments<P>(c_, rows, slots_.data() + first, memory, weight_.data(), cos_.data(), sin_.data(), positions_.data() + first);
    args.rows = static_cast<const std::byte*>(args.rows) + std::int64_t(first) * c_.stride * (c_.bf16 ? 2 : 4);
    cuda_ok(launch_store<P>(args, std::int64_t(n), counts, nullptr, overlap));
  }

 private:
  const Case& c_;
  DeviceArray<std::uint32_t> rows_;
  DeviceArray<std::uint16_t> codes_;
  DeviceArray<std::int64_t> slots_;
  DeviceArray<float> weight_, cos_, sin_;
  DeviceArray<std::int64_t> positions_;
};

// Rows of one kind each: ordinary numbers around 1, any exponent, one exponent (thousands of equal magnitudes and ties), integers; some with
// infinities, NaNs of any payload, zeros of either sign.
std::uint32_t number(std::mt19937& random, unsigned kind) {
  const auto r = static_cast<std::uint32_t>(random());
  switch (kind) {
    case 0: return (r & 0x807FFFFFU) | ((118 + random() % 12) << 23);
    case 1: return (r & 0x807FFFFFU) | (static_cast<std::uint32_t>(random() % 255) << 23);
    case 2: return (r & 0x80600000U) | 0x3F800000U;
    default: return bits_of(static_cast<float>(static_cast<int>(r % 25) - 12) * 0.25F);
  }
}

template <class P>
Case random_case(unsigned seed, std::int64_t n, bool prologue) {
  std::mt19937 random{seed};
  Case c;
  c.bf16 = random() % 2 == 0;
  c.shift = random() % 4 == 0 ? std::int64_t(random() % 4) : 0;
  c.stride = P::dim + (random() % 3 == 0 ? std::int64_t(random() % 3) * 8 : random() % 5 == 0 ? std::int64_t(random() % 9) : 0);
  c.first_page = static_cast<std::int32_t>(random() % 2);
  c.page_gap = random() % 2 == 0 ? 0 : std::int64_t(random() % 4) * 16;
  c.page_count = static_cast<std::int32_t>(n / P::tokens_per_page + 1 + std::int64_t(random() % 4));
  c.options.ties = random() % 3 == 0 ? Ties::to_even : Ties::toward_zero;
  c.options.bf16_round_trip = random() % 3 == 0;
  c.rows.assign(std::size_t(c.shift + n * c.stride), nan_bits);  // between rows too
  for (std::int64_t i = 0; i < n; ++i) {
    std::uint32_t* row = c.rows.data() + c.shift + i * c.stride;
    const unsigned kind = random() % 8 < 5 ? random() % 4 : 0;
    for (int j = 0; j < P::dim; ++j) row[j] = number(random, j % 7 == 0 ? 0 : kind) >> (c.bf16 ? 16 : 0) << (c.bf16 ? 16 : 0);
    if (random() % 12 == 0) row[random() % P::dim] = 0x7F810000U | (static_cast<std::uint32_t>(random()) & 0x807F0000U);
    if (random() % 16 == 0) row[random() % P::dim] = infinity_bits | (static_cast<std::uint32_t>(random()) & sign_bit);
    if (random() % 24 == 0) std::fill(row, row + P::dim, random() % 2 == 0 ? 0 : sign_bit);
  }
  std::vector<std::int64_t> places(std::size_t(c.page_count) * std::size_t(P::tokens_per_page));
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = std::int64_t(i);
  if (random() % 2 == 0) std::shuffle(places.begin(), places.end(), random);
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t bad[] = {-1, INT64_MIN, INT64_MAX, std::int64_t(places.size()), std::int64_t(places.size()) + std::int64_t(random() % 1000)};
    c.slots.push_back(random() % 16 == 0 ? bad[random() % 5] : places[std::size_t(i) % places.size()]);
  }
  if (!prologue) return c;
  c.norm = random() % 2 == 0;
  c.weighted = random() % 4 != 0;
  c.hadamard = random() % 2 == 0 && is_power_of_two(P::dim);
  c.rope_dims = random() % 3 == 0 ? 0 : random() % 3 == 0 ? 2 * static_cast<int>(random() % (P::dim / 2 + 1)) : std::min(64, P::dim);
  c.placed = random() % 3 != 0;
  c.table_rows = c.rope_dims == 0 ? 0 : c.placed ? 40 : std::max<std::int64_t>(n - 2, 1);
  const auto small = [&] { return static_cast<float>(random() % 2001) / 1000 - 1; };
  for (int i = 0; i < P::dim; ++i) c.weight.push_back(1 + small());
  for (std::int64_t i = 0; i < c.table_rows * (c.rope_dims / 2); ++i) c.cos.push_back(small()), c.sin.push_back(small());
  for (std::int64_t i = 0; i < n; ++i) c.positions.push_back(random() % 16 == 0 ? std::int64_t(random() % 2) * 41 - 1 : std::int64_t(random() % 40));
  return c;
}

template <class P>
void check_twin(const Case& c, unsigned seed) {
  const Outcome want = on_host<P>(c);
  const OnDevice<P> device(c);
  const Outcome got = device.run();
  if (got == want) return;
  const auto at = std::mismatch(got.memory.begin(), got.memory.end(), want.memory.begin()).first - got.memory.begin() - std::ptrdiff_t(margin);
  const std::int64_t page_stride = P::page_bytes + c.page_gap;
  FAIL_CHECK(P::name << " seed " << seed << ", " << c.slots.size() << " rows of " << (c.bf16 ? "bf16" : "f32") << ", norm " << c.norm << ", RoPE "
                     << c.rope_dims << ", Hadamard " << c.hadamard << ", round trip " << c.options.bf16_round_trip << ": first difference in page "
                     << at / page_stride << ", byte " << at % page_stride << "; stored " << got.counts.stored << " of " << want.counts.stored);
}

template <class P>
void random_shapes(unsigned first, int shapes, std::int64_t most) {
  for (int i = 0; i < (small_run() ? std::min(shapes, 6) : shapes); ++i) {
    const unsigned seed = first + static_cast<unsigned>(i);
    const std::int64_t n = i % 16 == 0 ? std::int64_t(i / 16 % 4) : 1 + std::int64_t(std::mt19937{seed}() % std::uint64_t(most));
    check_twin<P>(random_case<P>(seed, n, i % 2 == 1), seed);
  }
}

// Slots of a random case with nothing dropped and no slot twice, so that parts may be stored one by one.
template <class P>
Case whole_case(unsigned seed, std::int64_t n, bool prologue) {
  Case c = random_case<P>(seed, n, prologue);
  c.first_page = 0;
  for (std::int64_t i = 0; i < n; ++i) c.slots[std::size_t(i)] = (i * 7 + 3) % n;
  if (c.rope_dims > 0) c.placed = true;
  for (auto& position : c.positions) position = position < 0 ? 0 : position % 40;
  if (c.rope_dims > 0 && c.table_rows < 40) c.rope_dims = 0;
  return c;
}

template <class P>
void same_bits(bool prologue) {
  INFO(std::string(P::name), " prologue ", prologue);
  const std::size_t n = small_run() ? 59 : 209;  // rows; no multiple of 7
  const Case c = whole_case<P>(90, std::int64_t(n), prologue);
  const OnDevice<P> device(c);
  const Outcome all = device.run();
  CHECK(all.counts.stored == std::int64_t(n));
  for (int run = 0; run < 20; ++run) CHECK(device.run(run % 2 == 0, run % 3 == 0).memory == all.memory);
  // Alone, and in batches of any size that start anywhere.
  for (const std::size_t part : {std::size_t(1), std::size_t(3), std::size_t(32), std::size_t(100)}) {
    const DeviceArray<std::byte> memory(poisoned<P>(c));
    for (std::size_t at = 0; at < n; at += part) {
      device.queue(memory.data(), at, std::min(part, n - at), nullptr);
      cuda_ok(cudaDeviceSynchronize());  // sanitizers keep memory for every launch under way
    }
    CHECK(memory.read() == all.memory);
  }
}

}  // namespace

TEST_CASE("cuda store: random shapes write the host twin's bytes and nothing else, and count as it does") {
  random_shapes<Fp8WithScale<64, 128>>(1000, 800, 150);
  random_shapes<Fp8WithScaleInterleaved<16, 128>>(2000, 300, 150);
  random_shapes<Bf16Contiguous<64, 128>>(3000, 300, 150);
  random_shapes<Fp4WithScale<64, 128>>(4000, 800, 150);
  random_shapes<preset::deepseek_v4::Latent<64>>(5000, 500, 60);
  random_shapes<preset::deepseek_v3_2::Latent<64>>(6000, 300, 60);
  random_shapes<preset::deepseek_v4_1::LatentFp8<64>>(7000, 300, 60);
  random_shapes<preset::deepseek_v4_1::LatentFp4<2>>(8000, 500, 60);
  random_shapes<Fp8WithScale<16, 256, 64>>(9000, 100, 60);
  random_shapes<F32Rows<8, 96>>(10000, 100, 60);
}

TEST_CASE("cuda store: rows of several parts") { random_shapes<KvPages<16, 8, 128>>(11000, 40, 30); }

TEST_CASE("cuda store: the same bytes on every run, alone and in any batch") {
  for (const bool prologue : {false, true}) {
    same_bits<Fp8WithScale<64, 128>>(prologue);
    same_bits<Fp4WithScale<64, 128>>(prologue);
    same_bits<preset::deepseek_v4::Latent<64>>(prologue);
    same_bits<preset::deepseek_v3_2::Latent<64>>(prologue);
  }
}

TEST_CASE("cuda store: with overlap it reads what the kernel before it writes last") {
  using P = Fp8WithScale<64, 128>;
  for (const int shift : {0, 1}) {  // the kernel for aligned rows, and the one for all others
    CAPTURE(shift);
    Case c = whole_case<P>(90, 59, false);
    c.bf16 = false;
    c.stride = P::dim;
    c.shift = shift;
    c.rows.resize(std::size_t(shift + 59 * P::dim));
    const Outcome want = on_host<P>(c);
    const DeviceArray<std::uint32_t> rows(std::vector<std::uint32_t>(c.rows.size(), nan_bits)), written(c.rows);
    const DeviceArray<std::int64_t> slots(c.slots);
    const DeviceArray<std::byte> memory(poisoned<P>(c));
    const auto args = arguments<P>(c, rows.data(), slots.data(), memory.data(), nullptr, nullptr, nullptr, nullptr);
    write_late<<<1, 256>>>(written.data(), rows.data(), std::int64_t(c.rows.size()));
    cuda_ok(launch_store<P>(args, std::int64_t(c.slots.size()), nullptr, nullptr, true));
    CHECK(memory.read() == want.memory);
  }
}

TEST_CASE("cuda store: a page whose bytes lie beyond 2 GiB and 4 GiB") {
  // Three pages of one pool, as far from page 0 as bf16 pages of a large pool are.
  using P = Bf16Contiguous<64, 128>;
  constexpr std::int32_t pages[] = {1, 131072, 262144};
  const FarPages<P> pool(pages[2] + 1);
  if (!pool) return;
  for (const auto page : pages) cuda_ok(cudaMemset(pool.page(page), 0xFF, P::page_bytes));
  kvire_test::arrived();
  std::vector<std::uint16_t> rows(3 * P::dim);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::uint16_t>(0x3F80 + i);
  std::vector<std::int64_t> slots;
  for (const auto page : pages) slots.push_back(std::int64_t(page) * P::tokens_per_page + 63);
  const DeviceArray<std::uint16_t> device_rows(rows);
  const DeviceArray<std::int64_t> device_slots(slots);
  body::StoreArgs<P> args;
  args.rows = device_rows.data();
  args.row_element = Element::bf16;
  args.slots = device_slots.data();
  args.pages = pool.data();
  args.page_stride = P::page_bytes;
  args.page_count = pool.pages();
  cuda_ok(launch_store<P>(args, 3, nullptr, nullptr));
  for (std::size_t i = 0; i < 3; ++i) {
    std::vector<std::uint16_t> got(64 * P::dim);
    cuda_ok(cudaMemcpy(got.data(), pool.page(pages[i]), P::page_bytes, cudaMemcpyDeviceToHost));
    CHECK(std::equal(got.end() - P::dim, got.end(), rows.begin() + std::ptrdiff_t(i) * P::dim));
    CHECK(std::count(got.begin(), got.end() - P::dim, std::uint16_t(0xFFFF)) == 63 * P::dim);
  }
}
