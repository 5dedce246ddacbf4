// SPDX-License-Identifier: Apache-2.0
// Pages whose first byte lies at or beyond 2^31 and 2^32: products of page and stride in 32 bits would read foreign bytes. The pool is
// address space of which only the named pages are ever touched.
#include <tests/support/key_case.hpp>

#include <sys/mman.h>

#include <doctest/doctest.h>

#include <algorithm>

#include <kvire/layout/policies.hpp>

using namespace kvire;
using namespace kvire_test;

namespace {

class SparseMemory {
 public:
  explicit SparseMemory(std::int64_t bytes) : bytes_(static_cast<std::size_t>(bytes)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  ~SparseMemory() {
    if (data_ != MAP_FAILED) munmap(data_, bytes_);
  }
  std::byte* data() const { return data_ == MAP_FAILED ? nullptr : static_cast<std::byte*>(data_); }

 private:
  std::size_t bytes_;
  void* data_;
};

// One row over the given pages of a pool; page i of the table holds keys of 1 + i. Pages where 32-bit products would land stay zero.
template <class P>
void check_pages(const std::vector<std::int32_t>& ids, std::int64_t page_stride) {
  const std::int32_t page_count = *std::max_element(ids.begin(), ids.end()) + 1;
  const SparseMemory memory(page_stride * page_count);
  if (memory.data() == nullptr) {
    MESSAGE("skipped: no address space for " << page_count << " pages of " << page_stride << " bytes");
    return;
  }
  const ConstPageView<P> view{memory.data(), page_stride, page_count};
  for (std::size_t i = 0; i < ids.size(); ++i) {
    float row[P::dim];
    std::fill_n(row, P::dim, static_cast<float>(i + 1));
    for (int t = 0; t < P::tokens_per_page; ++t) encode_row<P>(row, memory.data() + page_stride * ids[i], t);
  }
  const std::vector<float> query(P::dim, 1.0F), weight{1.0F};
  const auto pages = static_cast<std::int64_t>(ids.size());
  const std::vector<std::int32_t> length{static_cast<std::int32_t>(pages * P::tokens_per_page)};
  for (const SimdLevel level : levels()) {
    CAPTURE(name_of(level));
    std::vector<float> scores(static_cast<std::size_t>(length[0]), untouched);
    sparse_logits<P>({query.data(), Element::f32, 1, 1, 1, P::dim}, {weight.data(), {1, 1, 1}}, assume_ready(view), {ids.data(), {1, pages}},
                     {length.data(), {1, 1}}, {scores.data(), {1, 1, length[0]}}, test_stream(), {.level = level})
        .value();
    test_stream().synchronize().value();
    int wrong = 0;
    for (std::size_t s = 0; s < scores.size(); ++s) {
      const double want = P::dim * static_cast<double>(s / P::tokens_per_page + 1);
      wrong += !(std::fabs(scores[s] - want) <= 1e-5 * want);
    }
    CHECK(wrong == 0);
  }
}

}  // namespace

TEST_CASE("sparse logits: pages at 2^31 and 2^32 bytes") {
  using Bf16 = Bf16Contiguous<64, 128>;
  using Fp8 = Fp8WithScale<64, 128>;
  static_assert(page_start(Bf16::page_bytes, 131072) == std::int64_t{1} << 31);
  static_assert(page_start(Bf16::page_bytes, 262144) == std::int64_t{1} << 32);
  static_assert(page_start(Fp8::page_bytes, 254200) + Fp8::offset<role::Value>(16) == std::int64_t{1} << 31);
  static_assert(page_start(1039680, 2066) == 2147978880);
  static_assert(page_start(1435968, 4564) == 6553757952);
  SUBCASE("bf16") { check_pages<Bf16>({131071, 131072, 262144, 1}, Bf16::page_bytes); }
  SUBCASE("fp8") { check_pages<Fp8>({254200, 254201, 508401, 7}, Fp8::page_bytes); }
  SUBCASE("one tensor over many layers: strides far beyond a page") {
    check_pages<Fp8>({2066, 3}, 1039680);
    check_pages<Fp8>({4564, 3}, 1435968);
  }
}
