// SPDX-License-Identifier: Apache-2.0
// Page copies, token moves and migrations by the plain kernels: the host's bytes and counts, bad ids among good ones.
#include <algorithm>
#include <random>
#include <string>

#include <doctest/doctest.h>

#include <kvire/kernel/copy_pages.cuh>
#include <kvire/kernel/migrate.cuh>
#include <kvire/kernel/move_tokens.cuh>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/preset/deepseek_v4_1.hpp>
#include <tests/support/device_array.hpp>

using namespace kvire;
using namespace kvire_test;

namespace {

// Pages that lie `slack` bytes farther apart than they are long.
struct Pages {
  std::vector<std::byte> bytes;
  std::int64_t stride;
  std::int32_t count;
};

template <class P>
Pages blank(std::int32_t count, std::int64_t slack, std::byte fill) {
  return {std::vector<std::byte>(static_cast<std::size_t>(count * (P::page_bytes + slack)), fill), P::page_bytes + slack, count};
}

template <class P>
Pages random_bytes(std::int32_t count, std::int64_t slack, std::mt19937& random) {
  Pages pages = blank<P>(count, slack, std::byte{0});
  for (auto& b : pages.bytes) b = static_cast<std::byte>(random());
  return pages;
}

void expect(const CopyCounts& device, const CopyCounts& host) {
  CHECK(device.copied == host.copied);
  CHECK(device.skipped == host.skipped);
  CHECK(device.null_page == host.null_page);
  CHECK(device.bad_ids == host.bad_ids);
}

// Targets distinct, some of both lists no page at all.
template <class T>
void spoil(std::vector<T>& from, std::vector<T>& to, T from_end, T to_end, T null_end, std::mt19937& random) {
  for (std::size_t i = 0; i < from.size(); ++i) {
    switch (random() % 12) {
      case 0: from[i] = -1; break;
      case 1: to[i] = std::numeric_limits<T>::min(); break;
      case 2: from[i] = from_end; break;
      case 3: to[i] = std::numeric_limits<T>::max(); break;
      case 4: from[i] = static_cast<T>(null_end - 1); break;
      case 5: to[i] = 0; break;
      case 6: to[i] = to_end; break;
      default: break;
    }
  }
}

template <class T>
std::vector<T> shuffled(T first, T end, std::size_t n, std::mt19937& random) {
  std::vector<T> all;
  for (T i = first; i < end; ++i) all.push_back(i);
  std::shuffle(all.begin(), all.end(), random);
  all.resize(std::min(n, all.size()));
  return all;
}

template <class P>
void check_copy_and_move() {
  INFO(std::string(P::name) << " of " << P::tokens_per_page);
  std::mt19937 random{11};
  const std::int64_t slack = P::page_vector_bytes * 3;
  const std::int32_t many = P::page_bytes > 40'000 ? 9 : 60;
  const Pages from = random_bytes<P>(many, slack, random);
  const Pages to = blank<P>(many + 5, 0, std::byte{0xA5});
  const DeviceArray<std::byte> device_from(from.bytes);

  auto from_ids = shuffled<std::int32_t>(1, from.count, 200, random);
  auto to_ids = shuffled<std::int32_t>(1, to.count, from_ids.size(), random);
  spoil(from_ids, to_ids, from.count, to.count, 1, random);
  {
    auto host = to.bytes;
    body::CopyPagesArgs args{from.bytes.data(), from.stride, from.count, host.data(), to.stride, to.count, from_ids.data(), to_ids.data()};
    CopyCounts counts;
    const auto n = static_cast<std::int64_t>(from_ids.size());
    for (std::int64_t i = 0; i < n; ++i) counts += body::copy_pages<P>(HostGroup<32>{}, i, args);
    CHECK(counts.copied > 0);
    const DeviceArray<std::byte> device_to(to.bytes);
    const DeviceArray<std::int32_t> device_from_ids(from_ids), device_to_ids(to_ids);
    const DeviceCounts<CopyCounts> device_counts;
    args.from = device_from.data();
    args.to = device_to.data();
    args.from_ids = device_from_ids.data();
    args.to_ids = device_to_ids.data();
    cuda_ok(launch_copy_pages<P>(args, n, device_counts.data(), nullptr));
    CHECK(device_to.read() == host);
    expect(device_counts.value(), counts);
  }

  constexpr std::int64_t tokens = P::tokens_per_page;
  auto from_slots = shuffled<std::int64_t>(tokens, from.count * tokens, 500, random);
  auto to_slots = shuffled<std::int64_t>(tokens, to.count * tokens, from_slots.size(), random);
  spoil(from_slots, to_slots, from.count * tokens, to.count * tokens, tokens, random);
  {
    auto host = to.bytes;
    body::MoveTokensArgs args{from.bytes.data(), from.stride, from.count, host.data(), to.stride, to.count, from_slots.data(), to_slots.data()};
    CopyCounts counts;
    const auto n = static_cast<std::int64_t>(from_slots.size());
    for (std::int64_t i = 0; i < n; ++i) counts += body::move_tokens<P>(HostGroup<32>{}, i, args);
    CHECK(counts.copied > 0);
    const DeviceArray<std::byte> device_to(to.bytes);
    const DeviceArray<std::int64_t> device_from_slots(from_slots), device_to_slots(to_slots);
    const DeviceCounts<CopyCounts> device_counts;
    args.from = device_from.data();
    args.to = device_to.data();
    args.from_slots = device_from_slots.data();
    args.to_slots = device_to_slots.data();
    cuda_ok(launch_move_tokens<P>(args, n, device_counts.data(), nullptr));
    CHECK(device_to.read() == host);
    expect(device_counts.value(), counts);
  }
}

template <class From, class To>
void check_migrate() {
  INFO(std::string(From::name) << " to " << To::name);
  std::mt19937 random{5};
  const std::int32_t many = From::page_bytes > 20'000 ? 5 : 12;
  const Pages from = random_bytes<From>(many, 0, random);  // any bytes are codes, NaNs among them
  const Pages to = blank<To>(many + 2, To::page_vector_bytes, std::byte{0xA5});
  auto from_ids = shuffled<std::int32_t>(1, from.count, 200, random);
  auto to_ids = shuffled<std::int32_t>(1, to.count, from_ids.size(), random);
  if (many > 5) {
    from_ids[2] = -1, to_ids[3] = to.count, from_ids[4] = 0, to_ids[6] = 0x7FFFFFFF;
  }
  const DeviceArray<std::byte> device_from(from.bytes);
  const DeviceArray<std::int32_t> device_from_ids(from_ids), device_to_ids(to_ids);
  const auto n = static_cast<std::int64_t>(from_ids.size());
  for (const RowOptions row : {RowOptions{}, RowOptions{Ties::to_even, true}}) {
    auto host = to.bytes;
    auto plain = to.bytes;
    body::MigrateArgs args;
    args.pages = {from.bytes.data(), from.stride, from.count, host.data(), to.stride, to.count, from_ids.data(), to_ids.data()};
    args.row = row;
    CopyCounts counts;
    for (std::int64_t i = 0; i < n * From::tokens_per_page; ++i) counts += body::migrate<From, To>(HostGroup<32>{}, i, args);
    for (std::size_t i = 0; i < from_ids.size(); ++i) {
      const std::int64_t source = from_ids[i], target = to_ids[i];
      if (source <= 0 || source >= from.count || target <= 0 || target >= to.count) continue;
      for (int t = 0; t < From::tokens_per_page; ++t) {
        float x[From::dim];
        decode_row<From>(from.bytes.data() + source * from.stride, t, x);
        encode_row<To>(x, plain.data() + target * to.stride, t, row);
      }
    }
    CHECK(host == plain);
    const DeviceArray<std::byte> device_to(to.bytes);
    const DeviceCounts<CopyCounts> device_counts;
    args.pages.from = device_from.data();
    args.pages.to = device_to.data();
    args.pages.from_ids = device_from_ids.data();
    args.pages.to_ids = device_to_ids.data();
    cuda_ok(detail::launch_migrate<From, To>(args, n, device_counts.data(), nullptr));
    CHECK(device_to.read() == host);
    expect(device_counts.value(), counts);
    CHECK(counts.copied + counts.skipped + counts.null_page + counts.bad_ids == n);
  }
}

}  // namespace

TEST_CASE("cuda copies and moves: the host's bytes and counts, whatever the policy") {
  check_copy_and_move<Fp8WithScale<64, 128>>();
  check_copy_and_move<Fp8WithScaleInterleaved<16, 128>>();
  check_copy_and_move<Bf16Contiguous<64, 128>>();
  check_copy_and_move<Fp4WithScale<64, 128>>();
  check_copy_and_move<preset::deepseek_v4::Latent<2>>();
  check_copy_and_move<preset::deepseek_v4::Latent<64>>();
  check_copy_and_move<preset::deepseek_v4::Latent<256>>();
  check_copy_and_move<preset::deepseek_v3_2::Latent<64>>();
  check_copy_and_move<preset::deepseek_v4_1::LatentFp8<64>>();
  check_copy_and_move<preset::deepseek_v4_1::LatentFp4<64>>();
}

TEST_CASE("cuda migrations: the host's bytes, between every pair of value formats") {
  check_migrate<Fp8WithScale<64, 128>, Bf16Contiguous<64, 128>>();
  check_migrate<Bf16Contiguous<64, 128>, Fp8WithScale<64, 128>>();
  check_migrate<Fp8WithScale<64, 128>, Fp8WithScaleInterleaved<64, 128>>();
  check_migrate<Fp8WithScaleInterleaved<64, 128>, Fp4WithScale<64, 128>>();
  check_migrate<Fp4WithScale<64, 128>, Bf16Contiguous<64, 128>>();
  check_migrate<preset::deepseek_v4_1::LatentFp8<64>, preset::deepseek_v4_1::LatentFp4<64>>();
  check_migrate<preset::deepseek_v4_1::LatentFp4<64>, preset::deepseek_v4_1::LatentFp8<64>>();
}
