// SPDX-License-Identifier: Apache-2.0
#include <tests/support/logits_device.cuh>
#include <tests/support/write_late.cuh>

using namespace kvire;
using namespace kvire_test;

using Fp8 = Fp8WithScale<64, 128>;
using Bf16 = Bf16Contiguous<64, 128>;
using Fp4 = Fp4WithScale<64, 128>;

// Every page size, head dim, number of heads and of query tokens of each format, in pairs rather than all together.
TEST_CASE("fp8 logits of random shapes agree with float64") {
  random_shapes<Fp8, Element::e4m3, 64, 1>(2e-4);
  random_shapes<Fp8, Element::e4m3, 64, 2>(2e-4);
  random_shapes<Fp8, Element::e4m3, 64, 3>(2e-4);
  random_shapes<Fp8, Element::e4m3, 64, 4>(2e-4);
  random_shapes<Fp8, Element::e4m3, 32, 5>(2e-4);
  random_shapes<Fp8, Element::e4m3, 64, 6>(2e-4);
  random_shapes<Fp8, Element::e4m3, 32, 1>(2e-4);
}

TEST_CASE("fp8 logits of other pages and keys agree with float64") {
  random_shapes<Fp8WithScale<32, 128>, Element::e4m3, 64, 1>(2e-4);
  random_shapes<Fp8WithScale<128, 128>, Element::e4m3, 64, 2>(2e-4);
  random_shapes<Fp8WithScale<64, 64>, Element::e4m3, 32, 4>(2e-4);
  random_shapes<Fp8WithScale<32, 64>, Element::e4m3, 64, 2>(2e-4);
  random_shapes<Fp8WithScale<128, 64>, Element::e4m3, 64, 1>(2e-4);
  random_shapes<Fp8WithScaleInterleaved<64, 128>, Element::e4m3, 64, 1>(2e-4);
  random_shapes<Fp8WithScaleInterleaved<32, 64>, Element::e4m3, 32, 2>(2e-4);
}

TEST_CASE("bf16 logits of random shapes agree with float64") {
  random_shapes<Bf16, Element::bf16, 64, 1>(1e-4);
  random_shapes<Bf16, Element::bf16, 64, 2>(1e-4);
  random_shapes<Bf16, Element::bf16, 32, 3>(1e-4);
  random_shapes<Bf16Contiguous<32, 128>, Element::bf16, 32, 1>(1e-4);
  random_shapes<Bf16Contiguous<128, 128>, Element::bf16, 64, 4>(1e-4);
  random_shapes<Bf16Contiguous<64, 64>, Element::bf16, 64, 1>(1e-4);
  random_shapes<Bf16Contiguous<128, 64>, Element::bf16, 64, 6>(1e-4);
  random_shapes<Bf16, Element::bf16, 64, 6>(1e-4);
}

TEST_CASE("fp4 logits of random shapes agree with float64") {
  random_shapes<Fp4, Element::e4m3, 64, 1>(2e-4);
  random_shapes<Fp4, Element::e4m3, 64, 2>(2e-4);
  random_shapes<Fp4WithScale<32, 128>, Element::e4m3, 32, 5>(2e-4);
  random_shapes<Fp4WithScale<128, 64>, Element::e4m3, 64, 1>(2e-4);
  random_shapes<Fp4, Element::bf16, 64, 1>(1e-4);
  random_shapes<Fp4WithScale<128, 128>, Element::bf16, 32, 2>(1e-4);
}

// Depths of blocks up to 59 binades: within an operand (26), behind it, and in between the two the end of the table of codes (32).
TEST_CASE("fp4 keys whose blocks span more binades than e5m2 has") {
  if (!hopper()) return;
  auto c = random_case<Fp4>(91, {500, 64, 1, 130}, 2, 64, Element::e4m3);
  std::mt19937 random(4);
  for (std::size_t at = 0; at < c.memory.size(); ++at) {
    const auto in_page = static_cast<std::int64_t>(at) % c.page_stride;
    if (in_page < Fp4::offset<role::Scale>(0) || in_page >= Fp4::page_bytes || c.memory[at] == 255) continue;
    const auto r = random() % 16;
    c.memory[at] = static_cast<std::uint8_t>(r == 0 ? 255 : r < 8 ? 80 + random() % 60 : 110 + random() % 10);
  }
  for (std::size_t i = 0; i < c.queries.size(); ++i)
    if (i % 128 < 32 && i / 128 % 3 == 0) c.queries[i] = 0;
  c.decode_queries();
  check_against_reference<Fp4>(c, run_case<Fp4, Element::e4m3, 64, 2>(c, multiprocessors()), 2e-4);
}

TEST_CASE("logits have the same bits on every run, over any number of SMs, and alone") {
  same_bits<Fp8, Element::e4m3, 64, 1>(20);
  same_bits<Fp8, Element::e4m3, 64, 2>(20);
  same_bits<Fp8, Element::e4m3, 64, 3>(20);
  same_bits<Bf16, Element::bf16, 64, 1>(20);
  same_bits<Fp4, Element::e4m3, 64, 1>(20);
}

// Joined: as Alone, but its CTAs are joined whatever the number of tiles.
template <class P, int NextN, class Alone, class Joined>
void check_joined() {
  for (const std::vector<std::int32_t>& lengths : {std::vector<std::int32_t>{700, 64, 0, 1, 2047, 130}, {65}, std::vector<std::int32_t>(40, 70)}) {
    const auto c = random_case<P>(78, lengths, NextN, 64, Element::e4m3);
    for (const int sms : {1, 2, multiprocessors()}) {
      const auto joined = run_case<P, Element::e4m3, 64, NextN, Joined>(c, sms);
      CHECK(joined.bits == run_case<P, Element::e4m3, 64, NextN, Alone>(c, sms).bits);
      check_against_reference<P>(c, joined, 2e-4, 7);
    }
  }
}

TEST_CASE("logits by joined CTAs have the bits of those by CTAs of one unit, also where units have nothing to do") {
  if (!hopper()) return;
  check_joined<Fp4, 1, sm90::LogitsShape<3, 4, false, 1, true>, sm90::LogitsShape<3, 4, false, 1, true, 1>>();
  check_joined<Fp8, 2, sm90::LogitsShape<3, 3, true, 2, true>, sm90::LogitsShape<3, 3, true, 2, true, 1>>();
}

TEST_CASE("ids beyond the pool are skipped and counted, NaN keys score -inf and are counted") {
  if (!hopper()) return;
  auto c = random_case<Fp8>(5, {300, 100}, 1, 64, Element::e4m3);
  c.table[1] = c.pages;
  c.table[2] = 0x7FFFFFFF;
  const std::int32_t id = c.table[static_cast<std::size_t>(c.table_stride)];
  REQUIRE(id > 0);
  c.memory[static_cast<std::size_t>(c.page_stride * id + 5 * 128 + 3)] = 0x7F;  // token 5 of row 1
  const auto outcome = run_case<Fp8, Element::e4m3, 64, 1>(c, multiprocessors());
  check_against_reference<Fp8>(c, outcome, 2e-4);
  CHECK(outcome.bad_pages == 2);
  CHECK(outcome.nan_logits == 1);
}

/// The kernel before, which the logits kernel overlaps, writes all that it reads but the pages, and long after it may start.
template <class P, Element Query, int NextN>
void check_late_inputs() {
  if (!hopper()) return;
  const auto c = random_case<P>(17, {700, 64, 0, 2047, 130, 1}, NextN, 64, Query);
  const auto want = run_case<P, Query, 64, NextN>(c, multiprocessors());
  std::vector<std::uint32_t> words;
  const auto put = [&](const auto& from) {
    const std::size_t at = words.size(), bytes = from.size() * sizeof(from[0]);
    words.resize(at + (bytes + 15) / 16 * 4);
    std::memcpy(words.data() + at, from.data(), bytes);
    return at;
  };
  const auto table = put(c.table), lengths = put(c.lengths), queries = put(c.queries), weights = put(c.weights);
  const DeviceArray<std::uint8_t> pages(c.memory);
  const DeviceArray<std::uint32_t> written(words), inputs(std::vector<std::uint32_t>(words.size(), 0));
  const DeviceArray<std::uint32_t> logits(std::vector<std::uint32_t>(want.bits.size(), sentinel));
  sm90::LogitsArguments a;
  a.pages = reinterpret_cast<const std::byte*>(pages.data());
  a.page_stride = c.page_stride;
  a.page_count = c.pages;
  a.batch = c.batch;
  a.queries = inputs.data() + queries;
  a.weights = reinterpret_cast<const float*>(inputs.data() + weights);
  a.page_table = reinterpret_cast<const std::int32_t*>(inputs.data() + table);
  a.table_stride = a.table_width = c.table_stride;
  a.lengths = reinterpret_cast<const std::int32_t*>(inputs.data() + lengths);
  a.logits = logits.data();
  a.logits_stride = c.logits_stride;
  write_late<<<1, 256>>>(written.data(), inputs.data(), static_cast<std::int64_t>(words.size()));
  cuda_ok(sm90::launch_logits<P, Query, 64, NextN>(a, multiprocessors(), nullptr, true));
  CHECK(logits.read() == want.bits);
}

TEST_CASE("logits: with overlap they go by what the kernel before them writes last") {
  check_late_inputs<Fp8, Element::e4m3, 1>();
  check_late_inputs<Fp8, Element::e4m3, 2>();
  check_late_inputs<Bf16, Element::bf16, 1>();
  check_late_inputs<Fp4, Element::e4m3, 1>();
}

TEST_CASE("golden logits on the GPU") {
  if (!hopper()) return;
  for_each_golden("logits_fp8_h64", [](const Safetensors& f) { golden_logits<Fp8, Element::e4m3, 64, 1>(f, 2e-4); });
  for_each_golden("logits_fp8_h32_n2", [](const Safetensors& f) { golden_logits<Fp8, Element::e4m3, 32, 2>(f, 2e-4); });
  for_each_golden("logits_bf16_h64", [](const Safetensors& f) { golden_logits<Bf16, Element::bf16, 64, 1>(f, 1e-4); });
  for_each_golden("logits_bf16_h32_n2", [](const Safetensors& f) { golden_logits<Bf16, Element::bf16, 32, 2>(f, 1e-4); });
  for_each_golden("logits_fp4_qe4m3_h64", [](const Safetensors& f) { golden_logits<Fp4, Element::e4m3, 64, 1>(f, 2e-4); });
  for_each_golden("logits_fp4_h64", [](const Safetensors& f) { golden_logits<Fp4, Element::bf16, 64, 1>(f, 1e-4); });
  for_each_golden("logits_fp4_h32_n2", [](const Safetensors& f) { golden_logits<Fp4, Element::bf16, 32, 2>(f, 1e-4); });
}
