// SPDX-License-Identifier: Apache-2.0
#include <tests/support/logits_device.cuh>

using namespace kvire;
using namespace kvire_test;

using Fp8 = Fp8WithScale<64, 128>;
using Bf16 = Bf16Contiguous<64, 128>;
using Fp4 = Fp4WithScale<64, 128>;

TEST_CASE("portable logits agree with float64") {
  random_shapes<Fp8, Element::e4m3, 64, 1, Portable>(2e-4);
  random_shapes<Fp8, Element::e4m3, 64, 2, Portable>(2e-4);
  random_shapes<Fp8WithScale<32, 128>, Element::e4m3, 32, 1, Portable>(2e-4);
  random_shapes<Fp8WithScale<128, 64>, Element::e4m3, 64, 1, Portable>(2e-4);
  random_shapes<Bf16, Element::bf16, 64, 1, Portable>(1e-4);
  random_shapes<Bf16, Element::bf16, 64, 2, Portable>(1e-4);
  random_shapes<Bf16Contiguous<128, 64>, Element::bf16, 32, 1, Portable>(1e-4);
  random_shapes<Fp4, Element::e4m3, 64, 1, Portable>(2e-4);
  random_shapes<Fp4, Element::bf16, 64, 1, Portable>(1e-4);
  random_shapes<Fp4WithScale<64, 64>, Element::bf16, 64, 1, Portable>(1e-4);
}

TEST_CASE("portable logits have the same bits on every run, over any number of SMs, and alone") {
  same_bits<Fp8, Element::e4m3, 64, 1, Portable>(20);
  same_bits<Bf16, Element::bf16, 64, 2, Portable>(20);
}

TEST_CASE("portable logits: ids beyond the pool are skipped and counted, NaN keys score -inf and are counted") {
  auto c = random_case<Fp8>(5, {300, 100}, 1, 64, Element::e4m3);
  c.table[1] = c.pages;
  c.table[2] = 0x7FFFFFFF;
  for (const int page : {0, 1}) {  // tiles that are in hand together
    const std::int32_t id = c.table[static_cast<std::size_t>(c.table_stride + page)];
    REQUIRE(id > 0);
    for (const int token : {5, 14}) c.memory[static_cast<std::size_t>(c.page_stride * id + token * 128 + 3)] = 0x7F;  // of row 1
  }
  for (const int sms : {multiprocessors(), 1}) {
    const auto outcome = run_case<Fp8, Element::e4m3, 64, 1, Portable>(c, sms);
    check_against_reference<Fp8>(c, outcome, 2e-4);
    CHECK(outcome.bad_pages == 2);
    CHECK(outcome.nan_logits == 4);
  }
}

TEST_CASE("golden logits by the portable kernel") {
  for_each_golden("logits_fp8_h64", [](const Safetensors& f) { golden_logits<Fp8, Element::e4m3, 64, 1, Portable>(f, 2e-4); });
  for_each_golden("logits_fp8_h32_n2", [](const Safetensors& f) { golden_logits<Fp8, Element::e4m3, 32, 2, Portable>(f, 2e-4); });
  for_each_golden("logits_bf16_h64", [](const Safetensors& f) { golden_logits<Bf16, Element::bf16, 64, 1, Portable>(f, 1e-4); });
  for_each_golden("logits_bf16_h32_n2", [](const Safetensors& f) { golden_logits<Bf16, Element::bf16, 32, 2, Portable>(f, 1e-4); });
  for_each_golden("logits_fp4_qe4m3_h64", [](const Safetensors& f) { golden_logits<Fp4, Element::e4m3, 64, 1, Portable>(f, 2e-4); });
  for_each_golden("logits_fp4_h64", [](const Safetensors& f) { golden_logits<Fp4, Element::bf16, 64, 1, Portable>(f, 1e-4); });
}
