// SPDX-License-Identifier: Apache-2.0
// The selection step on the GPU: the same slots as logits and top-k one after the other, whichever kernels serve it, and as a sort of the logits.
#include <cstdlib>
#include <random>
#include <string>

#include <doctest/doctest.h>

#include <kvire/kernel/selection.cuh>
#include <kvire/layout/policies.hpp>
#include <tests/support/device_array.hpp>
#include <tests/support/key_case.hpp>
#include <tests/support/score_rows.hpp>

using namespace kvire;
using namespace kvire_test;

namespace {

int processors() {
  int n = 0;
  cuda_ok(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0));
  return n;
}

// By a sort of the logits, without a kernel.
template <class P>
std::vector<std::int32_t> sorted(const KeyCase<P>& c, const std::vector<float>& scores, int k, bool translate) {
  std::vector<std::int32_t> all;
  for (int r = 0; r < c.batch * c.next_n; ++r) {
    const int b = r / c.next_n, length = static_cast<int>(c.visible(b, r % c.next_n));
    const auto page = [&](int position) { return c.table[static_cast<std::size_t>(b * c.max_pages + position / P::tokens_per_page)]; };
    std::vector<char> masked;
    for (int i = 0; i < length; ++i) masked.push_back(page(i) < 0 || page(i) >= c.page_count);
    for (const auto i : expected(scores.data() + r * c.stride, length, k, false, masked)) {
      all.push_back(i < 0 || !translate ? i : page(i) * P::tokens_per_page + i % P::tokens_per_page);
    }
  }
  return all;
}

template <class P>
void check(int heads, int next_n, int max_pages, int k, Element element, bool tuned, KernelChoice kernel, std::mt19937& random) {
  auto stream = Stream<Cuda>::make().value();
  auto c = random_case<P>({.batch = 4, .next_n = next_n, .heads = heads, .max_pages = max_pages, .element = element, .per_query = next_n > 1, .holes_percent = 10}, random);
  c.stride = std::int64_t(max_pages) * P::tokens_per_page;
  const DeviceArray<std::byte> pages(c.pages), queries(c.queries);
  const DeviceArray<float> weights(c.weights), scores(std::vector<float>(static_cast<std::size_t>(c.batch * next_n * c.stride), untouched));
  const DeviceArray<std::int32_t> table(c.table), lengths(c.lengths);
  const auto slots = static_cast<std::size_t>(c.batch * next_n * k);
  const ConstPageView<P, Cuda> view{pages.data(), P::page_bytes, c.page_count};
  Queries q = c.query_view();
  q.data = queries.data();
  const Tensor<const float, 3> w{weights.data(), {c.batch, next_n, heads}};
  const Tensor<const std::int32_t, 2> pt{table.data(), {c.batch, max_pages}}, n{lengths.data(), {c.batch, c.per_query ? next_n : 1}};
  for (const bool translate : {false, true}) {
    const DeviceArray<std::int32_t> want(std::vector<std::int32_t>(slots, 12345)), got(std::vector<std::int32_t>(slots, 12345)), again(std::vector<std::int32_t>(slots, 12345));
    sparse_logits(q, w, assume_ready(view), pt, n, {scores.data(), {c.batch, next_n, c.stride}}, stream).value();
    CudaTopKOptions top;
    top.page_table = pt;
    top.tokens_per_page = P::tokens_per_page;
    top.pages = c.page_count;
    top.translate = translate;
    top_k(Tensor<const float, 3>{scores.data(), {c.batch, next_n, c.stride}}, n, Tensor<std::int32_t, 3>{want.data(), {c.batch, next_n, k}}, stream, top).value();
    CHECK(want.read() == sorted(c, scores.read(), k, translate));
    const std::int64_t bytes = selection_scratch_bytes(c.batch * next_n, c.stride);
    const DeviceArray<std::byte> scratch(std::vector<std::byte>(static_cast<std::size_t>(bytes), std::byte{0xEE}));
    KernelServed served;
    select_keys(q, w, assume_ready(view), pt, n, {got.data(), {c.batch, next_n, k}}, {scratch.data(), {bytes}}, stream, {.translate = translate, .kernel = kernel, .served = &served}).value();
    CHECK(got.read() == want.read());
    CHECK(served.tuned == tuned);
    // Without scores in memory: the same, or an error.
    const std::int64_t fused = fused_selection_bytes(c.batch, next_n, k, processors());
    const DeviceArray<std::byte> little(std::vector<std::byte>(static_cast<std::size_t>(fused), std::byte{0xEE}));
    const DeviceArray<std::int32_t> without(std::vector<std::int32_t>(slots, 12345));
    const auto select_without = [&](std::int64_t size) {
      return select_keys(q, w, assume_ready(view), pt, n, {without.data(), {c.batch, next_n, k}}, {little.data(), {size}}, stream,
                         {.translate = translate, .without_scores = true, .kernel = kernel});
    };
    const bool serves = tuned && k <= 1024;
    for (int run = 0; run < (serves ? 3 : 1); ++run) {
      const Status status = select_without(fused);
      CHECK(status.ok() == serves);
      if (serves) CHECK(without.read() == want.read());
    }
    CHECK(select_keys(q, w, assume_ready(view), pt, n, {without.data(), {c.batch, next_n, k}}, {scratch.data() + 4, {bytes - 4}}, stream, {.kernel = kernel})
              .error()
              .message.find("4 bytes beyond a multiple of 256") != std::string::npos);
    if (serves) CHECK(select_without(fused - 1).error().message.find(std::to_string(fused) + " are needed") != std::string::npos);
    const DeviceArray<float> kept(std::vector<float>(static_cast<std::size_t>(c.batch * next_n * c.stride), untouched));
    select_keys(q, w, assume_ready(view), pt, n, {again.data(), {c.batch, next_n, k}}, {scratch.data(), {bytes}}, stream,
                {.translate = translate, .scores = {kept.data(), {c.batch, next_n, c.stride}}, .kernel = kernel})
        .value();
    CHECK(again.read() == want.read());
    const auto a = kept.read(), b = scores.read();
    int differ = 0;
    for (std::size_t i = 0; i < a.size(); ++i) differ += bits_of(a[i]) != bits_of(b[i]);
    CHECK(differ == 0);
  }
}

}  // namespace

TEST_CASE("cuda selection: the slots of logits and top-k one after the other") {
  std::mt19937 random{5};
  const bool hopper = kvire::detail::device_code(0).hopper;
  const bool small = std::getenv("KVIRE_TEST_SMALL") != nullptr;
  const int pages = small ? 12 : 160;
  for (const KernelChoice kernel : {KernelChoice::automatic, KernelChoice::tuned}) {
    check<Fp8WithScale<64, 128>>(64, 1, pages, 512, Element::e4m3, hopper, kernel, random);
    check<Fp8WithScale<64, 128>>(64, 2, pages, 64, Element::e4m3, hopper, kernel, random);
    check<Bf16Contiguous<64, 128>>(64, 1, pages / 2, 1024, Element::bf16, hopper, kernel, random);
    check<Fp8WithScale<64, 128>>(64, 1, 40, 2000, Element::e4m3, hopper, kernel, random);  // more than the pair of kernels takes: logits and top-k
  }
  check<Fp8WithScale<64, 128>>(64, 1, small ? 12 : 300, 512, Element::e4m3, hopper, KernelChoice::automatic, random);
  check<Fp8WithScale<64, 128>>(3, 1, 12, 100, Element::e4m3, false, KernelChoice::automatic, random);  // heads that no tuned kernel is built for
}
