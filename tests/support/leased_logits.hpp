// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

#include <string>
#include <utility>
#include <vector>

#include <kvire/kernel/sparse_logits.cuh>

#include "gpu.hpp"
#include "logits_case.hpp"

// The sparse-logits call on the CUDA backend, of a case in device memory.

namespace kvire_test {

/// What score bytes hold before a call.
inline constexpr std::uint8_t untouched_byte = 0x7D;

/// A list of blocks, [batch][max].
struct BlockList {
  int max = 0;
  std::vector<std::int32_t> entries;
};

template <class P>
class Leased {
 public:
  explicit Leased(const LogitsCase& inputs, BlockList list = {}) : c(inputs), blocks_(std::move(list)) {}

  std::int64_t stride() const { return blocks_.max > 0 ? std::int64_t(blocks_.max) * P::tokens_per_page : c.logits_stride; }
  std::int64_t words() const { return std::int64_t(c.batch) * c.next_n * stride(); }
  kvire::Stream<kvire::Cuda>& stream() { return stream_; }

  /// Score: float, or std::uint16_t for bf16 codes.
  template <class Score = float, class Tuned = kvire::DefaultTunedLogits>
  kvire::Status call(kvire::CudaSparseLogitsOptions options) {
    using namespace kvire;
    const ConstPageView<P, Cuda> pages{reinterpret_cast<const std::byte*>(memory_.data()), c.page_stride, c.pages};
    const ScoreTensor<3> scores = [&]() -> ScoreTensor<3> {
      if constexpr (sizeof(Score) == 2) {
        return ScoreTensor<3>::bf16({reinterpret_cast<std::uint16_t*>(scores_.data()), {c.batch, c.next_n, stride()}});
      } else {
        return Tensor<float, 3>{reinterpret_cast<float*>(scores_.data()), {c.batch, c.next_n, stride()}};
      }
    }();
    if (blocks_.max > 0) options.blocks = {list_.data(), {c.batch, blocks_.max}};
    return sparse_logits<P, Tuned>({queries_.data(), c.query_element, c.batch, c.next_n, c.heads, c.dim}, {weights_.data(), {c.batch, c.next_n, c.heads}},
                                   assume_ready(pages), {table_.data(), {c.batch, c.table_stride}},
                                   {lengths_.data(), {c.batch, c.lengths_per_query ? c.next_n : 1}}, scores, stream_, options);
  }
  void clear() {
    cuda_ok(cudaMemsetAsync(scores_.data(), untouched_byte, static_cast<std::size_t>(words()) * 4, stream_.native()));
  }
  template <class Score = float>
  std::vector<Score> read() {
    stream_.synchronize().value();
    std::vector<Score> scores(static_cast<std::size_t>(words()));
    cuda_ok(cudaMemcpy(scores.data(), scores_.data(), scores.size() * sizeof(Score), cudaMemcpyDeviceToHost));
    return scores;
  }
  /// The scores of one call, which the kernel of that name must have served.
  template <class Score = float, class Tuned = kvire::DefaultTunedLogits>
  std::vector<Score> run(kvire::CudaSparseLogitsOptions options, const std::string& by) {
    clear();
    kvire::KernelServed served;
    options.served = &served;
    call<Score, Tuned>(options).value();
    CHECK(std::string(served.name) == by);
    CHECK(served.tuned == (by != "plain sparse logits"));
    return read<Score>();
  }

  const LogitsCase& c;

 private:
  BlockList blocks_;
  DeviceArray<std::uint8_t> memory_{c.memory}, queries_{c.queries};
  DeviceArray<float> weights_{c.weights};
  DeviceArray<std::uint32_t> scores_{std::vector<std::uint32_t>(static_cast<std::size_t>(words()))};
  DeviceArray<std::int32_t> table_{c.table}, lengths_{c.lengths}, list_{blocks_.entries};
  kvire::Stream<kvire::Cuda> stream_ = kvire::Stream<kvire::Cuda>::make().value();
};

}  // namespace kvire_test
