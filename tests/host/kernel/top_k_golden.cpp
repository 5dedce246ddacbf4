// SPDX-License-Identifier: Apache-2.0
#include <tests/support/golden.hpp>

#include <kvire/kernel/top_k.hpp>

using namespace kvire;
using namespace kvire_test;

TEST_CASE("golden: top-k selects exactly the expected positions") {
  auto stream = Stream<Host>::make().value();
  for_each_golden("topk_", [&](const Safetensors& file) {
    const auto scores = file.at("scores").as<float>();
    const auto lengths = file.at("lens").as<std::int32_t>();
    const auto expected = file.at("indices").as<std::int32_t>();
    const std::int64_t rows = file.at("indices").shape.at(0);
    const std::int64_t k = file.at("indices").shape.at(1);
    CHECK(k == file.meta_int("k"));
    for (const SimdLevel level : {SimdLevel::plain, best_level()}) {
      std::vector<std::int32_t> selected(static_cast<std::size_t>(rows * k), 123456);
      top_k({scores.data(), {rows, 1, file.at("scores").shape.at(1)}}, {lengths.data(), {rows, 1}}, {selected.data(), {rows, 1, k}}, stream, {.level = level}).value();
      stream.synchronize().value();
      CHECK(selected == expected);
    }
  });
}
