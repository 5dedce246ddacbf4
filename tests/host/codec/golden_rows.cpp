// SPDX-License-Identifier: Apache-2.0
#include <kvire/codec/row.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/support/golden.hpp"
#include "tests/support/layouts.hpp"
#include "tests/support/same_page.hpp"

TEST_CASE("codec: golden store vectors through encode_row, bit for bit") {
  kvire_test::for_each_golden("store_", [](const kvire_test::Safetensors& file) {
    const int tokens = file.meta_int("page_tokens");
    const int dim = file.meta_int("dim");
    const bool known = kvire_test::with_policy(file.meta("policy"), tokens, dim, [&](auto policy) {
      using P = typename decltype(policy)::type;
      REQUIRE(P::page_bytes == file.meta_int("page_bytes"));
      const auto keys = file.at("keys").as<float>();
      const auto slots = file.at("slots").as<std::int64_t>();
      const auto expected = file.at("pages").as<std::byte>();
      std::vector<std::byte> pages(expected.size(), static_cast<std::byte>(file.meta_int("fill")));
      kvire::RowOptions options;
      options.ties = file.meta("ties") == "even" ? kvire::Ties::to_even : kvire::Ties::toward_zero;
      options.bf16_round_trip = file.meta("policy") == "latent" && file.meta("round_trip") == "True";
      for (std::size_t i = 0; i < slots.size(); ++i) {
        if (slots[i] < 0) continue;
        std::byte* page = pages.data() + slots[i] / tokens * P::page_bytes;
        kvire::encode_row<P>(keys.data() + i * P::dim, page, static_cast<int>(slots[i] % tokens), options);
      }
      CHECK(kvire_test::first_difference<P>(pages, expected) == "");
    });
    CHECK(known);
  });
}
