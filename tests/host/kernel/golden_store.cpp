// SPDX-License-Identifier: Apache-2.0
#include <kvire/kernel/body/store.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/support/golden.hpp"
#include "tests/support/layouts.hpp"
#include "tests/support/same_page.hpp"

using namespace kvire;

TEST_CASE("kernel: golden store vectors through the store body, bit for bit") {
  kvire_test::for_each_golden("store_", [](const kvire_test::Safetensors& file) {
    const int tokens = file.meta_int("page_tokens");
    const bool known = kvire_test::with_policy(file.meta("policy"), tokens, file.meta_int("dim"), [&](auto policy) {
      using P = typename decltype(policy)::type;
      REQUIRE(P::page_bytes == file.meta_int("page_bytes"));
      const auto keys = file.at("keys").as<float>();
      const auto slots = file.at("slots").as<std::int64_t>();
      const auto expected = file.at("pages").as<std::byte>();
      const auto fill = static_cast<std::byte>(file.meta_int("fill"));
      std::vector<std::byte> pages(expected.size(), fill);

      body::StoreArgs<P> args;
      args.rows = keys.data();
      args.slots = slots.data();
      args.pages = pages.data();
      args.page_stride = P::page_bytes;
      args.page_count = static_cast<std::int32_t>(pages.size() / P::page_bytes);
      args.first_page = 0;  // the vectors use page 0
      args.options.ties = file.meta("ties") == "even" ? Ties::to_even : Ties::toward_zero;
      args.options.bf16_round_trip = file.meta("policy") == "latent" && file.meta("round_trip") == "True";
      const auto run = [&](std::vector<std::byte>& to) {
        to.assign(expected.size(), fill);
        args.pages = to.data();
        StoreCounts counts;
        for (std::size_t i = 0; i < slots.size(); ++i) counts += body::store(HostGroup<32>{}, static_cast<std::int64_t>(i), args);
        CHECK(counts.stored + counts.skipped == static_cast<std::int64_t>(slots.size()));
      };
      run(pages);
      CHECK(kvire_test::first_difference<P>(pages, expected) == "");

      if (file.meta("keys") == "bf16") {
        std::vector<std::uint16_t> codes;
        for (const float k : keys) codes.push_back(bf16_from_f32(k));
        args.rows = codes.data();
        args.row_element = Element::bf16;
        run(pages);
        CHECK(kvire_test::first_difference<P>(pages, expected) == "");
      }
    });
    CHECK(known);
  });
}

namespace {
template <int Dim>
void check_prologue(const kvire_test::Safetensors& file) {
  using Split = body::RowSplit<F32Rows<1, Dim>, 32>;
  const auto x = file.at("x").as<float>();
  const auto weight = file.at("weight").as<float>();
  const auto cos = file.at("cos").as<float>();
  const auto sin = file.at("sin").as<float>();
  const auto turned = file.at("normed_roped").as<double>();
  const auto transformed = file.at("hadamard").as<double>();
  Prologue prologue;
  prologue.norm = true;
  prologue.epsilon = static_cast<float>(std::atof(file.meta("eps").c_str()));
  prologue.weight = weight.data();
  prologue.rope_dims = file.meta_int("rope");
  prologue.cos = cos.data();
  prologue.sin = sin.data();
  double worst[2] = {};
  for (const bool hadamard : {false, true}) {
    prologue.hadamard = hadamard;
    const auto& expected = hadamard ? transformed : turned;
    for (std::int64_t row = 0; row < static_cast<std::int64_t>(x.size()) / Dim; ++row) {
      HostGroup<32> g;
      HostGroup<32>::Lanes<body::RowPiece<Split::elements>> pieces{};
      g.each([&](int lane) {
        for (int i = 0; i < Split::elements; ++i) pieces[lane].x[i] = x[static_cast<std::size_t>(row * Dim + lane * Split::elements + i)];
      });
      body::apply_prologue<Split>(g, pieces, prologue, row);
      double size = 0;
      for (int i = 0; i < Dim; ++i) size = std::max(size, std::abs(expected[static_cast<std::size_t>(row * Dim + i)]));
      for (int i = 0; i < Dim; ++i) {
        const double error = std::abs(static_cast<double>(pieces[i / Split::elements].x[i % Split::elements]) - expected[static_cast<std::size_t>(row * Dim + i)]);
        worst[hadamard] = std::max(worst[hadamard], size > 0 ? error / size : error);
      }
    }
  }
  MESSAGE("largest error relative to the row's largest element: " << worst[0] << " before, " << worst[1] << " after the Hadamard");
  CHECK(worst[0] < 1e-6);
  CHECK(worst[1] < 2e-6);
}
}  // namespace

TEST_CASE("kernel: golden prologue vectors against float64") {
  kvire_test::for_each_golden("prologue_", [](const kvire_test::Safetensors& file) {
    switch (file.meta_int("dim")) {
      case 64: return check_prologue<64>(file);
      case 128: return check_prologue<128>(file);
      case 512: return check_prologue<512>(file);
      default: FAIL("no such dim");
    }
  });
}
