// SPDX-License-Identifier: Apache-2.0
// The reference vectors of stores and prologues. Built with and without -use_fast_math, which must change no bit.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>

#include <doctest/doctest.h>

#include <kvire/kernel/store.cuh>
#include <kvire/preset/deepseek_v4.hpp>
#include <tests/support/device_array.hpp>
#include <tests/support/golden.hpp>
#include <tests/support/same_page.hpp>

using namespace kvire;
using namespace kvire_test;

namespace {

template <class P>
void check_golden(const Safetensors& file) {
  REQUIRE(P::page_bytes == file.meta_int("page_bytes"));
  const auto keys = file.at("keys").as<float>();
  const auto slots = file.at("slots").as<std::int64_t>();
  const auto expected = file.at("pages").as<std::byte>();
  std::vector<std::uint16_t> codes;
  for (const float k : keys) codes.push_back(bf16_from_f32(k));
  const DeviceArray<float> device_keys(keys);
  const DeviceArray<std::uint16_t> device_codes(codes);
  const DeviceArray<std::int64_t> device_slots(slots);
  for (const bool bf16 : {false, true}) {
    if (bf16 && file.meta("keys") != "bf16") continue;
    const DeviceArray<std::byte> pages(std::vector<std::byte>(expected.size(), static_cast<std::byte>(file.meta_int("fill"))));
    const DeviceCounts<StoreCounts> counts;
    body::StoreArgs<P> args;
    args.rows = bf16 ? static_cast<const void*>(device_codes.data()) : device_keys.data();
    args.row_element = bf16 ? Element::bf16 : Element::f32;
    args.slots = device_slots.data();
    args.pages = pages.data();
    args.page_stride = P::page_bytes;
    args.page_count = static_cast<std::int32_t>(expected.size() / P::page_bytes);
    args.first_page = 0;  // the vectors use page 0
    args.options.ties = file.meta("ties") == "even" ? Ties::to_even : Ties::toward_zero;
    args.options.bf16_round_trip = file.meta("policy") == "latent" && file.meta("round_trip") == "True";
    cuda_ok(launch_store<P>(args, static_cast<std::int64_t>(slots.size()), counts.data(), nullptr));
    CHECK(first_difference<P>(pages.read(), expected) == "");
    const StoreCounts stored = counts.value();
    CHECK(stored.stored + stored.skipped == static_cast<std::int64_t>(slots.size()));
  }
}

template <int Tokens>
bool check_policy(const std::string& policy, const Safetensors& file) {
  if (policy == "fp8") return check_golden<Fp8WithScale<Tokens, 128>>(file), true;
  if (policy == "bf16") return check_golden<Bf16Contiguous<Tokens, 128>>(file), true;
  if (policy == "fp4") return check_golden<Fp4WithScale<Tokens, 128>>(file), true;
  return false;
}

}  // namespace

TEST_CASE("cuda store: golden vectors under either kind of arithmetic flags") {
  for_each_golden("store_", [](const Safetensors& file) {
    const std::string policy = file.meta("policy");
    const int tokens = file.meta_int("page_tokens");
    if (policy == "latent" && tokens == 64) return check_golden<preset::deepseek_v4::Latent<64>>(file);
    if (policy == "latent" && tokens == 2) return check_golden<preset::deepseek_v4::Latent<2>>(file);
    REQUIRE(file.meta_int("dim") == 128);
    CHECK((tokens == 64 ? check_policy<64>(policy, file) : tokens == 16 && check_policy<16>(policy, file)));
  });
}

TEST_CASE("cuda store: golden prologue vectors against float64") {
  for_each_golden("prologue_", [](const Safetensors& file) {
    // Rows of f32 keep what the prologue makes as it is.
    using P = F32Rows<8, 128>;
    constexpr int dim = P::dim;
    REQUIRE(file.meta_int("dim") == dim);
    const auto x = file.at("x").as<float>();
    const auto rows = static_cast<std::int64_t>(x.size()) / dim;
    const DeviceArray<float> device_x(x), weight(file.at("weight").as<float>()), cos(file.at("cos").as<float>()), sin(file.at("sin").as<float>());
    std::vector<std::int64_t> slots;
    for (std::int64_t i = 0; i < rows; ++i) slots.push_back(P::tokens_per_page + i);
    const DeviceArray<std::int64_t> device_slots(slots);
    body::StoreArgs<P> args;
    args.rows = device_x.data();
    args.slots = device_slots.data();
    args.page_stride = P::page_bytes;
    args.page_count = static_cast<std::int32_t>(2 + rows / P::tokens_per_page);
    args.prologue.norm = true;
    args.prologue.epsilon = static_cast<float>(std::atof(file.meta("eps").c_str()));
    args.prologue.weight = weight.data();
    args.prologue.rope_dims = file.meta_int("rope");
    args.prologue.cos = cos.data();
    args.prologue.sin = sin.data();
    args.prologue.table_rows = rows;
    for (const bool hadamard : {false, true}) {
      const auto expected = file.at(hadamard ? "hadamard" : "normed_roped").as<double>();
      const DeviceArray<std::byte> pages(std::vector<std::byte>(static_cast<std::size_t>(args.page_count * P::page_bytes)));
      args.pages = pages.data();
      args.prologue.hadamard = hadamard;
      cuda_ok(launch_store<P>(args, rows, nullptr, nullptr));
      const auto bytes = pages.read();
      double worst = 0;
      for (std::int64_t row = 0; row < rows; ++row) {
        double size = 0;
        for (int i = 0; i < dim; ++i) size = std::max(size, std::abs(expected[static_cast<std::size_t>(row * dim + i)]));
        for (int i = 0; i < dim; ++i) {
          const std::int64_t page = slots[static_cast<std::size_t>(row)] / P::tokens_per_page;
          const auto token = static_cast<int>(slots[static_cast<std::size_t>(row)] % P::tokens_per_page);
          const std::byte* at = bytes.data() + page * P::page_bytes + P::template offset<role::State>(token);
          const double got = float_of(load_code<Element::f32>(at, i));
          const double error = std::abs(got - expected[static_cast<std::size_t>(row * dim + i)]);
          worst = std::max(worst, size > 0 ? error / size : error);
        }
      }
      CAPTURE(hadamard);
      CHECK(worst < (hadamard ? 2e-6 : 1e-6));
    }
  });
}
