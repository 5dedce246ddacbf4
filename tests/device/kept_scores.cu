// SPDX-License-Identifier: Apache-2.0
// A selection from slots: scores of every distribution take the way of the logits kernel's through KeptScores, without that kernel.
#include <string>

#include <kvire/kernel/grouped_top_k.cuh>
#include <kvire/kernel/kept_scores.cuh>
#include <tests/support/device_array.hpp>
#include <tests/support/score_rows.hpp>

namespace {

using kvire::body::TopKArgs;
using kvire::sm90::CandidateSlots;
using namespace kvire_test;

struct Feed {
  const float* scores;
  const std::int32_t* lengths;
  int stride, rows, masked;  // positions that are this modulo 97 are on no page
  CandidateSlots slots;
};

// As the logits kernel deals tiles: the rows' tiles form one list, each CTA takes its share.
template <int Buffer>
__global__ void __launch_bounds__(128) keep(const Feed f) {
  using Kept = kvire::sm90::detail::KeptScores<Buffer, 1>;
  extern __shared__ __align__(16) unsigned char memory[];
  const int thread = static_cast<int>(threadIdx.x);
  int all = 0;
  for (int r = 0; r < f.rows; ++r) all += (f.lengths[r] + 63) / 64;
  const int ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
  const int each = all / ctas, more = all - each * ctas;
  int tile = each * cta + min(cta, more), left = each + (cta < more ? 1 : 0), row = 0;
  while (row < f.rows && tile >= (f.lengths[row] + 63) / 64) tile -= (f.lengths[row++] + 63) / 64;
  Kept kept(f.slots, *reinterpret_cast<typename Kept::Memory*>(memory), f.slots.whole(each), thread);
  while (left > 0) {
    const int length = f.lengths[row], part = min(left, (length + 63) / 64 - tile);
    const auto seen = [&](int) { return length; };
    if (part > 0) {
      kept.begin(tile * 64);
      for (int t = tile; t < tile + part; ++t) {
        if (kept.full()) kept.flush(false, 0, seen);
        kept.next_tile();
        const int token = t * 64 + thread / 2;
        if (thread % 2 == 0 && token < length) {
          const float x = f.scores[static_cast<std::int64_t>(row) * f.stride + token];
          kept.put(0, token, token % 97 == f.masked ? kvire::float_of(kvire::nan_bits) : x);
        }
      }
      kept.flush(true, cta + row, seen);
    }
    left -= part;
    tile = 0;
    ++row;
  }
}

template <int Buffer>
std::vector<std::int32_t> select(const Rows& in, int k, int ctas, bool by_score = false, int masked = -1, int blocks = 1) {
  const DeviceArray<float> scores(in.scores);
  const DeviceArray<std::int32_t> lengths(in.lengths);
  const DeviceArray<std::int32_t> selected(std::vector<std::int32_t>(std::size_t(in.rows) * std::size_t(k), 123456));
  const auto slots = CandidateSlots::slots(in.rows, 1, ctas);
  const DeviceArray<std::byte> memory(std::vector<std::byte>(std::size_t(CandidateSlots::bytes(slots, k)), std::byte{0xEE}));
  const Feed feed{scores.data(), lengths.data(), in.stride, in.rows, masked, CandidateSlots::at(memory.data(), slots, k)};
  constexpr int bytes = sizeof(typename kvire::sm90::detail::KeptScores<Buffer, 1>::Memory);
  cuda_ok(cudaFuncSetAttribute(keep<Buffer>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  keep<Buffer><<<static_cast<unsigned>(ctas), 128, bytes>>>(feed);
  cuda_ok(cudaGetLastError());
  TopKArgs args;
  args.stride = in.stride;
  args.lengths = lengths.data();
  args.batch = in.rows;
  args.k = k;
  args.selected = selected.data();
  args.order = by_score ? kvire::TopKOrder::by_score : kvire::TopKOrder::by_position;
  cuda_ok(kvire::launch_slot_top_k(args, feed.slots, ctas, nullptr, nullptr, false, blocks));
  return selected.read();
}

}  // namespace

TEST_CASE("cuda kept scores: every length and distribution against a sort, whole shares and pruned ones") {
  const std::vector<int> lengths = full() ? std::vector<int>{1, 31, 512, 513, 4000, 20001, 32768, 70001, 131072} : std::vector<int>{513, 20001};
  for (int kind = 0; kind < int(Kind::count); ++kind) {
    for (const int length : some(lengths, kind)) {
      const Rows in = make(Kind(kind), 2, length, unsigned(kind * 1000 + length));
      for (const int k : some({1, 512, 1024})) {
        const auto want = expected(in, k);
        for (const int ctas : {1, 3, 20, 528}) {
          if (2 * length / ctas >= 0xF000) continue;  // parts of that many positions are not served
          const std::string what = std::string(name(Kind(kind))) + " length " + std::to_string(length) + " k " + std::to_string(k) + " ctas " + std::to_string(ctas);
          CHECK_MESSAGE(select<4096>(in, k, ctas) == want, what);
          if (ctas == 20) CHECK_MESSAGE(select<4096>(in, k, ctas, false, -1, 4) == want, what << ", four blocks");
          if (k != 1) CHECK_MESSAGE(select<2048>(in, k, ctas) == want, what << ", small buffer");
        }
        if (length == 20001) CHECK_MESSAGE(select<4096>(in, k, 20, true) == expected(in, k, true), std::string(name(Kind(kind))) << " by score");
      }
    }
  }
}

TEST_CASE("cuda kept scores: ragged lengths, positions on no page, the same on every run") {
  Rows in = make(Kind::normal, 40, 5000, 3);
  for (int r = 0; r < 40; ++r) in.lengths[std::size_t(r)] = r * r * 3;
  for (const int ctas : {7, 60, 528}) CHECK(select<4096>(in, 512, ctas) == expected(in, 512));

  in = make(Kind::eighths, 3, 30001, 4);
  std::vector<std::int32_t> want;
  std::vector<char> masked(30001);
  for (std::size_t i = 0; i < masked.size(); ++i) masked[i] = i % 97 == 5 ? 1 : 0;
  for (int r = 0; r < 3; ++r) {
    const auto row = expected(in.scores.data() + std::size_t(r) * std::size_t(in.stride), 30001, 512, false, masked);
    want.insert(want.end(), row.begin(), row.end());
  }
  for (int run = 0; run < 20; ++run) CHECK(select<4096>(in, 512, run % 2 == 0 ? 9 : 528, false, 5) == want);
}
