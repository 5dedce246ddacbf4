// SPDX-License-Identifier: Apache-2.0
// The device computes the host's bits: arithmetic, conversions, and whole stores. Built with and without -use_fast_math, which must
// change nothing.
#include <kvire/kernel/body/move_tokens.hpp>
#include <kvire/kernel/body/store.hpp>
#include <kvire/kernel/cuda/warp_group.cuh>
#include <kvire/preset/deepseek_v3_2.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/preset/deepseek_v4_1.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

using namespace kvire;

namespace {

constexpr int results_per_item = 14;

KVIRE_HD void compute(std::uint32_t a_bits, std::uint32_t b_bits, std::uint32_t c_bits, std::uint32_t* r) {
  const float a = float_of(a_bits);
  const float b = float_of(b_bits);
  const float c = float_of(c_bits);
  r[0] = bits_of(mul_rn(a, b));
  r[1] = bits_of(add_rn(a, c));
  r[2] = bits_of(sub_rn(a, c));
  r[3] = bits_of(fma_rn(a, b, c));
  r[4] = bits_of(div_rn(a, b));
  r[5] = bits_of(sqrt_rn(a));
  r[6] = bits_of(max_rn(a, b));
  r[7] = e4m3_from_f32(a);
  r[8] = e2m1_from_f32(a, Ties::toward_zero) | e2m1_from_f32(a, Ties::to_even) << 4;
  r[9] = ue8m0_ceil_from_f32(a);
  r[10] = bf16_from_f32(a);
  r[11] = f16_from_f32(a);
  r[12] = bits_of(mul_rn(f32_from_e4m3(static_cast<std::uint8_t>(a_bits)), f32_from_ue8m0(static_cast<std::uint8_t>(b_bits))));
  r[13] = bits_of(mul_rn(f32_from_e2m1(static_cast<std::uint8_t>(a_bits)), f32_from_f16(static_cast<std::uint16_t>(b_bits))));
}

__global__ void compute_kernel(const std::uint32_t* in, std::uint32_t* out, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) compute(in[3 * i], in[3 * i + 1], in[3 * i + 2], out + results_per_item * i);
}

template <LayoutPolicy P>
__global__ void store_kernel(body::StoreArgs<P> args, std::int64_t n) {
  const std::int64_t item = blockIdx.x * 4 + WarpGroup::warp();
  if (item < n) body::store<P>(WarpGroup{}, item, args);
}

template <LayoutPolicy P>
__global__ void move_kernel(body::MoveTokensArgs args, std::int64_t n) {
  const std::int64_t item = blockIdx.x * 4 + WarpGroup::warp();
  if (item < n) body::move_tokens<P>(WarpGroup{}, item, args);
}

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& host) : size_(host.size()) {
    REQUIRE(cudaMalloc(&data_, size_ * sizeof(T)) == cudaSuccess);
    REQUIRE(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
    REQUIRE(cudaStreamSynchronize(cudaStreamLegacy) == cudaSuccess);  // streams of their own do not wait for the copy
  }
  DeviceArray(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }
  T* data() const { return data_; }
  std::vector<T> host() const {
    std::vector<T> copy(size_);
    REQUIRE(cudaMemcpy(copy.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
    return copy;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

std::uint32_t next(std::uint64_t& state) {
  state = state * 6364136223846793005ULL + 1442695040888963407ULL;
  return static_cast<std::uint32_t>((state ^ (state >> 29)) >> 24);
}

// Every kind of number: subnormals, short mantissas, infinities and NaN among ordinary ones.
std::uint32_t pattern(std::uint64_t& state) {
  const std::uint32_t r = next(state);
  const std::uint32_t bits = next(state);
  static constexpr std::uint32_t special[] = {0, sign_bit, 1, 0x007FFFFFU, 0x00800000U, 0x7F7FFFFFU, infinity_bits, infinity_bits | sign_bit, 0x7FC00000U, 0xFFC00001U};
  switch (r % 8) {
    case 0: return special[(r >> 8) % 10];
    case 1: return bits & 0x80FFFFFFU;
    case 2: return bits & 0xFFC00000U;
    case 3: return bits;
    default: return (bits & 0x87FFFFFFU) | 0x38000000U;
  }
}

struct Mixed : PageLayout<2, 4, Plane<Field<role::Nope, Element::e2m1, 66>, Pad<3>>, Plane<Field<role::Rope, Element::bf16, 10>>,
                          Plane<Field<role::Scale, Element::ue8m0, 3>>> {
  using Scaling = ScaleRule<role::Nope, 22>;
  static constexpr const char* name = "Mixed";
};

template <class P>
void check_store(bool prologue, RowOptions options) {
  INFO(std::string(P::name));
  constexpr std::int64_t n = 101;
  constexpr std::int32_t pages = 1 + static_cast<std::int32_t>(ceil_div<std::int64_t>(n, P::tokens_per_page));
  std::uint64_t state = 17;
  std::vector<float> rows(n * P::dim);
  for (auto& x : rows) x = float_of(prologue ? (pattern(state) & 0x87FFFFFFU) | 0x38000000U : pattern(state) & (next(state) % 4 == 0 ? ~0U : 0xBFFFFFFFU));
  std::vector<std::int64_t> slots;
  for (std::int64_t i = 0; i < n; ++i) slots.push_back(i % 10 == 9 ? -1 : P::tokens_per_page + i);
  std::vector<float> weight(P::dim);
  std::vector<float> tables(static_cast<std::size_t>(n) * 64);
  for (auto& w : weight) w = float_of((pattern(state) & 0x80FFFFFFU) | 0x3F000000U);
  for (auto& t : tables) t = float_of((pattern(state) & 0x80FFFFFFU) | 0x3E000000U);
  std::vector<unsigned char> memory(static_cast<std::size_t>(pages * P::page_bytes), 0xA5);

  body::StoreArgs<P> args;
  args.page_stride = P::page_bytes;
  args.page_count = pages;
  args.options = options;
  if (prologue) {
    args.prologue.norm = true;
    args.prologue.rope_dims = P::dim >= 64 ? 64 : 0;
    args.prologue.table_rows = n;
    args.prologue.hadamard = is_power_of_two(P::dim);
  }
  DeviceArray<float> d_rows(rows);
  DeviceArray<std::int64_t> d_slots(slots);
  DeviceArray<float> d_weight(weight);
  DeviceArray<float> d_tables(tables);
  DeviceArray<unsigned char> d_memory(memory);

  args.rows = rows.data();
  args.slots = slots.data();
  args.prologue.weight = prologue ? weight.data() : nullptr;
  args.prologue.cos = tables.data();
  args.prologue.sin = tables.data() + tables.size() / 2;
  args.pages = reinterpret_cast<std::byte*>(memory.data());
  for (std::int64_t i = 0; i < n; ++i) body::store<P>(HostGroup<32>{}, i, args);

  args.rows = d_rows.data();
  args.slots = d_slots.data();
  args.prologue.weight = prologue ? d_weight.data() : nullptr;
  args.prologue.cos = d_tables.data();
  args.prologue.sin = d_tables.data() + tables.size() / 2;
  args.pages = reinterpret_cast<std::byte*>(d_memory.data());
  store_kernel<P><<<(n + 3) / 4, 128>>>(args, n);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(d_memory.host() == memory);

  // And moved: every token of the first page to the one behind, and back to where it was on the host.
  std::vector<std::int64_t> from;
  std::vector<std::int64_t> to;
  for (std::int64_t t = 0; t < P::tokens_per_page; ++t) {
    from.push_back(P::tokens_per_page + t);
    to.push_back(P::tokens_per_page + (t + 1) % P::tokens_per_page);
  }
  std::vector<unsigned char> moved(memory.size(), 0x5A);
  DeviceArray<unsigned char> d_moved(moved);
  DeviceArray<std::int64_t> d_from(from);
  DeviceArray<std::int64_t> d_to(to);
  body::MoveTokensArgs move{reinterpret_cast<std::byte*>(memory.data()), P::page_bytes, pages, reinterpret_cast<std::byte*>(moved.data()), P::page_bytes, pages,
                            from.data(), to.data()};
  for (std::int64_t i = 0; i < P::tokens_per_page; ++i) body::move_tokens<P>(HostGroup<32>{}, i, move);
  move.from = reinterpret_cast<std::byte*>(d_memory.data());
  move.to = reinterpret_cast<std::byte*>(d_moved.data());
  move.from_slots = d_from.data();
  move.to_slots = d_to.data();
  move_kernel<P><<<(P::tokens_per_page + 3) / 4, 128>>>(move, P::tokens_per_page);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(d_moved.host() == moved);
}

}  // namespace

TEST_CASE("device: arithmetic and conversions have the host's bits") {
  constexpr int n = 1 << 20;
  std::uint64_t state = 3;
  std::vector<std::uint32_t> in(3 * n);
  for (auto& x : in) x = pattern(state);
  // Near cancellations: c close to -a * b.
  for (int i = 0; i < n; i += 3) in[3 * i + 2] = soft::mul(in[3 * i], in[3 * i + 1]) ^ sign_bit ^ (next(state) & 1U);
  std::vector<std::uint32_t> out(static_cast<std::size_t>(results_per_item) * n);
  DeviceArray<std::uint32_t> d_in(in);
  DeviceArray<std::uint32_t> d_out(out);
  compute_kernel<<<n / 256, 256>>>(d_in.data(), d_out.data(), n);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  const auto device = d_out.host();
  int differ[results_per_item] = {};
  for (int i = 0; i < n; ++i) {
    std::uint32_t r[results_per_item];
    compute(in[3 * i], in[3 * i + 1], in[3 * i + 2], r);
    for (int k = 0; k < results_per_item; ++k) differ[k] += r[k] != device[static_cast<std::size_t>(results_per_item) * i + k];
  }
  for (int k = 0; k < results_per_item; ++k) {
    CAPTURE(k);
    CHECK(differ[k] == 0);
  }
}

TEST_CASE("device: a store and a move write the host's bytes") {
  for (const bool prologue : {false, true}) {
    for (const RowOptions options : {RowOptions{}, RowOptions{Ties::to_even, true}}) {
      check_store<Fp8WithScale<64, 128>>(prologue, options);
      check_store<Fp8WithScaleInterleaved<16, 128>>(prologue, options);
      check_store<Bf16Contiguous<64, 128>>(prologue, options);
      check_store<Fp4WithScale<64, 128>>(prologue, options);
      check_store<preset::deepseek_v4::Latent<64>>(prologue, options);
      check_store<preset::deepseek_v3_2::Latent<64>>(prologue, options);
      check_store<preset::deepseek_v4_1::LatentFp8<64>>(prologue, options);
      check_store<preset::deepseek_v4_1::LatentFp4<64>>(prologue, options);
      check_store<F32Rows<8, 96>>(prologue, options);
      check_store<Mixed>(prologue, options);
    }
  }
}
