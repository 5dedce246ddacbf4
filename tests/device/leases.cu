// SPDX-License-Identifier: Apache-2.0
// The kernels of the CUDA backend as an engine calls them: under leases, on a Stream<Cuda>, beside the same calls on the host backend.
#include <algorithm>
#include <random>
#include <string>

#include <doctest/doctest.h>

#include <kvire/kernel/copy_pages.cuh>
#include <kvire/kernel/cuda_store.cuh>
#include <kvire/kernel/cuda_top_k.cuh>
#include <kvire/kernel/move_tokens.cuh>
#include <kvire/kernel/sparse_logits.cuh>
#include <kvire/preset/deepseek_v4.hpp>
#include <tests/support/device_array.hpp>

using namespace kvire;
using kvire_test::DeviceArray;
using kvire_test::DeviceCounts;

namespace {

constexpr float untouched = 123456.0F;

template <class P, class Backend>
WriteLease<P, Backend> limited(PageView<P, Backend> view, std::vector<std::int32_t> pages) {
  auto state = std::make_shared<detail::LeaseState<Backend>>();
  state->any_page = false;
  state->pages = std::move(pages);
  return detail::LeaseMaker::make<WriteLease<P, Backend>>(view, state);
}

std::vector<float> numbers(std::size_t n, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& v : x) v = normal(random);
  return x;
}

// Keys are stored, scored and selected from on both backends.
template <class P>
void check_pipeline(int heads, Element element, KernelChoice choice, bool tuned) {
  INFO(std::string(P::name) << ", " << heads << " heads");
  std::mt19937 random{9};
  auto host_stream = Stream<Host>::make().value();
  auto stream = Stream<Cuda>::make().value();
  const std::int32_t pages = 40;
  constexpr int batch = 3, next_n = 2, max_pages = 8, k = 64;
  const std::vector<std::byte> before(static_cast<std::size_t>(pages * P::page_bytes), std::byte{0xA5});
  auto host_pages = before;
  const DeviceArray<std::byte> device_pages(before);
  const PageView<P, Host> host_view{host_pages.data(), P::page_bytes, pages};
  const PageView<P, Cuda> view{device_pages.data(), P::page_bytes, pages};

  // Stores: to covered pages, to others, and to no page at all.
  constexpr std::int64_t rows = 25 * P::tokens_per_page;
  const auto keys = numbers(rows * P::dim, random);
  std::vector<std::int64_t> slots;
  for (std::int64_t i = 0; i < rows; ++i) slots.push_back(P::tokens_per_page + i);
  std::shuffle(slots.begin(), slots.end(), random);
  slots[3] = -1, slots[4] = 2, slots[5] = std::int64_t(pages) * P::tokens_per_page, slots[6] = INT64_MAX;
  std::vector<std::int32_t> covered;
  for (std::int32_t page = 1; page < pages; ++page) {
    if (page % 9 != 4) covered.push_back(page);
  }
  const DeviceArray<float> device_keys(keys);
  const DeviceArray<std::int64_t> device_slots(slots);
  StoreCounts stored;
  const DeviceCounts<StoreCounts> device_stored;
  store<P>({keys.data(), rows}, slots.data(), limited(host_view, covered), host_stream, {.counts = &stored}).value();
  host_stream.synchronize().value();
  store<P>({device_keys.data(), rows}, device_slots.data(), limited(view, covered), stream, {.counts = device_stored.data()}).value();
  stream.synchronize().value();
  CHECK(device_pages.read() == host_pages);
  const StoreCounts got = device_stored.value();
  CHECK(got.stored == stored.stored);
  CHECK(got.skipped == stored.skipped);
  CHECK(got.null_page == stored.null_page);
  CHECK(got.bad_slots == stored.bad_slots);
  CHECK(stored.bad_slots > 2);

  // Logits.
  const std::int64_t stride = max_pages * P::tokens_per_page;
  const auto queries = numbers(static_cast<std::size_t>(batch * next_n * heads * P::dim), random);
  std::vector<std::byte> codes(queries.size() * 4);
  for (std::size_t i = 0; i < queries.size(); ++i) {
    if (element == Element::e4m3) codes[i] = std::byte{e4m3_from_f32(queries[i])};
    const std::uint16_t half = bf16_from_f32(queries[i]);
    if (element == Element::bf16) std::memcpy(codes.data() + i * 2, &half, 2);
    if (element == Element::f32) std::memcpy(codes.data() + i * 4, &queries[i], 4);
  }
  const auto weights = numbers(static_cast<std::size_t>(batch * next_n * heads), random);
  std::vector<std::int32_t> table;
  for (int i = 0; i < batch * max_pages; ++i) table.push_back(static_cast<std::int32_t>(1 + i));
  table[2] = -1, table[11] = pages;
  const std::vector<std::int32_t> lengths = {static_cast<std::int32_t>(stride), 3 * P::tokens_per_page + 5, 0};
  std::vector<float> scores(static_cast<std::size_t>(batch * next_n * stride), untouched);
  const DeviceArray<std::byte> device_codes(codes);
  const DeviceArray<float> device_weights(weights), device_scores(scores);
  const DeviceArray<std::int32_t> device_table(table), device_lengths(lengths);
  const DeviceCounts<LogitsCounts> device_scored;
  LogitsCounts scored;
  sparse_logits<P>({codes.data(), element, batch, next_n, heads, P::dim}, {weights.data(), {batch, next_n, heads}}, assume_ready(ConstPageView<P, Host>(host_view)),
                   {table.data(), {batch, max_pages}}, {lengths.data(), {batch, 1}}, {scores.data(), {batch, next_n, stride}}, host_stream, {.counts = &scored})
      .value();
  host_stream.synchronize().value();
  KernelServed served;
  sparse_logits<P>({device_codes.data(), element, batch, next_n, heads, P::dim}, {device_weights.data(), {batch, next_n, heads}},
                   assume_ready(ConstPageView<P, Cuda>(view)), {device_table.data(), {batch, max_pages}}, {device_lengths.data(), {batch, 1}},
                   {device_scores.data(), {batch, next_n, stride}}, stream, {.counts = device_scored.data(), .kernel = choice, .served = &served})
      .value();
  CHECK(served.tuned == tuned);
  stream.synchronize().value();
  const auto device = device_scores.read();
  int wrong = 0;
  double worst = 0;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    if (!served.tuned || std::abs(scores[i]) == untouched || !is_finite(scores[i])) {
      wrong += bits_of(scores[i]) != bits_of(device[i]);
    } else {
      worst = std::max(worst, std::abs(static_cast<double>(scores[i]) - device[i]));
    }
  }
  CHECK(wrong == 0);
  CHECK(worst < 0.05);
  CHECK(device_scored.value().bad_pages == scored.bad_pages);
  CHECK(device_scored.value().nan_logits == scored.nan_logits);
  CHECK(scored.bad_pages == 1);

  // Top-k of the device's scores, on both.
  for (const KernelChoice selection : {KernelChoice::automatic, KernelChoice::plain}) {
    for (const TopKOrder order : {TopKOrder::by_position, TopKOrder::by_score}) {
      std::vector<std::int32_t> selected(batch * next_n * k, 7);
      const DeviceArray<std::int32_t> device_selected(selected);
      top_k({device.data(), {batch, next_n, stride}}, {lengths.data(), {batch, 1}}, {selected.data(), {batch, next_n, k}}, host_stream,
            {.order = order, .page_table = {table.data(), {batch, max_pages}}, .tokens_per_page = P::tokens_per_page, .pages = pages})
          .value();
      host_stream.synchronize().value();
      KernelServed by;
      top_k<k>({device_scores.data(), {batch, next_n, stride}}, {device_lengths.data(), {batch, 1}}, {device_selected.data(), {batch, next_n, k}}, stream,
               {.order = order, .page_table = {device_table.data(), {batch, max_pages}}, .tokens_per_page = P::tokens_per_page, .pages = pages, .kernel = selection,
                .served = &by})
          .value();
      stream.synchronize().value();
      CHECK(by.tuned == (selection == KernelChoice::automatic));
      CHECK(device_selected.read() == selected);
    }
  }
}

}  // namespace

TEST_CASE("cuda leases: store, logits and top-k as on the host") {
  constexpr bool tuned = true;  // by the portable kernel where Hopper's cannot
  check_pipeline<Fp8WithScale<64, 128>>(64, Element::e4m3, KernelChoice::automatic, tuned);
  check_pipeline<Fp8WithScale<64, 128>>(64, Element::e4m3, KernelChoice::plain, false);
  check_pipeline<Fp8WithScale<64, 128>>(9, Element::f32, KernelChoice::automatic, false);
  check_pipeline<Bf16Contiguous<64, 128>>(64, Element::bf16, KernelChoice::automatic, tuned);
  check_pipeline<Fp8WithScaleInterleaved<16, 128>>(5, Element::bf16, KernelChoice::automatic, false);
}

TEST_CASE("cuda leases: a tuned kernel that cannot serve is refused with the reason") {
  using P = Fp8WithScale<16, 128>;
  auto stream = Stream<Cuda>::make().value();
  const DeviceArray<std::byte> memory(std::vector<std::byte>(static_cast<std::size_t>(64 * P::page_bytes)));
  const DeviceArray<float> numbers(std::vector<float>(4096)), scores(std::vector<float>(4096));
  const DeviceArray<std::int32_t> ids(std::vector<std::int32_t>(64));
  KernelServed served;
  const auto status = sparse_logits({memory.data(), Element::e4m3, 1, 1, 8, 128}, {numbers.data(), {1, 1, 8}}, assume_ready(ConstPageView<P, Cuda>{memory.data(), P::page_bytes, 64}),
                                    {ids.data(), {1, 2}}, {ids.data(), {1, 1}}, {scores.data(), {1, 1, 32}}, stream, {.kernel = KernelChoice::tuned, .served = &served});
  REQUIRE(!status.ok());
  CHECK(status.error().code == ErrorCode::unsupported);
  CHECK(status.error().message.find("16 tokens") != std::string::npos);
  CHECK(std::string(served.name) == "none");
  const auto selection = top_k({scores.data(), {1, 1, 4096}}, {ids.data(), {1, 1}}, {ids.data(), {1, 1, 2049}}, stream, {.kernel = KernelChoice::tuned});
  REQUIRE(!selection.ok());
  CHECK(selection.error().message.find("2049") != std::string::npos);
  CHECK(!copy_pages<P>(nullptr, assume_ready(ConstPageView<P, Cuda>{memory.data(), P::page_bytes, 64}), ids.data(),
                       assume_ready(PageView<P, Cuda>{memory.data(), P::page_bytes, 64}), 3, stream)
             .ok());
}

TEST_CASE("cuda leases: copies and moves keep to the pages of a write lease, however many") {
  using P = preset::deepseek_v4::Latent<2>;
  std::mt19937 random{2};
  auto host_stream = Stream<Host>::make().value();
  auto stream = Stream<Cuda>::make().value();
  constexpr std::int32_t pages = 4000;
  std::vector<std::byte> from(static_cast<std::size_t>(pages * P::page_bytes));
  for (auto& b : from) b = static_cast<std::byte>(random());
  const std::vector<std::byte> before(from.size(), std::byte{0xA5});
  const DeviceArray<std::byte> device_from(from);
  const ConstPageView<P, Host> source{from.data(), P::page_bytes, pages};
  const ConstPageView<P, Cuda> device_source{device_from.data(), P::page_bytes, pages};
  std::vector<std::int32_t> from_ids, to_ids, all;
  for (std::int32_t i = -3; i < pages + 3; ++i) from_ids.push_back(i);
  to_ids = from_ids;
  std::shuffle(to_ids.begin(), to_ids.end(), random);
  std::vector<std::int64_t> from_slots, to_slots;
  for (std::int64_t i = -3; i < pages * P::tokens_per_page + 3; ++i) from_slots.push_back(i);
  to_slots = from_slots;
  std::shuffle(to_slots.begin(), to_slots.end(), random);
  const DeviceArray<std::int32_t> device_from_ids(from_ids), device_to_ids(to_ids);
  const DeviceArray<std::int64_t> device_from_slots(from_slots), device_to_slots(to_slots);
  for (std::int32_t i = 1; i < pages; ++i) all.push_back(i);
  std::shuffle(all.begin(), all.end(), random);
  for (const int covered : {0, 1, 960, 961, 3000}) {
    CAPTURE(covered);
    std::vector<std::int32_t> limit(all.begin(), all.begin() + covered);
    std::sort(limit.begin(), limit.end());
    for (const bool tokens : {false, true}) {
      CAPTURE(tokens);
      auto to = before;
      const DeviceArray<std::byte> device_to(before);
      CopyCounts counts;
      const DeviceCounts<CopyCounts> device_counts;
      const auto lease = limited(PageView<P, Host>{to.data(), P::page_bytes, pages}, limit);
      const auto device_lease = limited(PageView<P, Cuda>{device_to.data(), P::page_bytes, pages}, limit);
      const auto n = static_cast<std::int64_t>(tokens ? from_slots.size() : from_ids.size());
      if (tokens) {
        move_tokens<P>(from_slots.data(), assume_ready(source), to_slots.data(), lease, n, host_stream, &counts).value();
        move_tokens<P>(device_from_slots.data(), assume_ready(device_source), device_to_slots.data(), device_lease, n, stream, device_counts.data()).value();
      } else {
        copy_pages<P>(from_ids.data(), assume_ready(source), to_ids.data(), lease, n, host_stream, &counts).value();
        copy_pages<P>(device_from_ids.data(), assume_ready(device_source), device_to_ids.data(), device_lease, n, stream, device_counts.data()).value();
      }
      host_stream.synchronize().value();
      stream.synchronize().value();
      CHECK(device_to.read() == to);
      CHECK(device_counts.value().copied == counts.copied);
      CHECK(device_counts.value().bad_ids == counts.bad_ids);
      CHECK(device_counts.value().null_page == counts.null_page);
      CHECK(device_counts.value().skipped == counts.skipped);
      CHECK(counts.copied <= covered * (tokens ? P::tokens_per_page : 1));
    }
  }
}
