// SPDX-License-Identifier: Apache-2.0
// Kernels of the CUDA backend on pages that they cannot read, or may not write, that must not compile.
// each rule alone
#include <kvire/kernel/copy_pages.cuh>
#include <kvire/kernel/cuda_store.cuh>
#include <kvire/kernel/prefill_logits.cuh>
#include <kvire/kernel/selection.cuh>
#include <kvire/layout/policies.hpp>

using namespace kvire;

using Keys = Bf16Contiguous<16, 32>;
using OneSize = TunedLogits<64, 1>;
// Integers with a scale, which only their owner understands.
template <int Tokens>
struct Int8 : PageLayout<Tokens, 1, Plane<Field<role::Value, Element::u8, 128>>, Plane<Field<role::Scale, Element::bf16, 1>>> {
  using Scaling = ScaleRule<role::Value, 128>;
};

Status good(const ReadLease<Keys, Cuda>& lease, const ContiguousKeys<Keys>& keys, Stream<Cuda>& stream) {
  if (Status status = prefill_logits({}, {}, lease, {}, {}, {}, {}, stream); !status.ok()) return status;
  if (Status status = prefill_logits({}, {}, keys, {}, {}, {}, stream); !status.ok()) return status;
  return select_keys<Keys, OneSize>({}, {}, lease, {}, {}, {}, {}, stream);
}
Status good(WriteLease<Keys, Cuda> lease, Stream<Cuda>& stream) {
  return store<Keys>(Rows(static_cast<const float*>(nullptr), 0), nullptr, lease, stream);
}

#if KVIRE_FAIL == 1  // expect: codec.readable-elements
Status bad(const ReadLease<Int8<16>, Cuda>& lease, Stream<Cuda>& stream) { return sparse_logits({}, {}, lease, {}, {}, {}, stream); }
#elif KVIRE_FAIL == 2  // expect: codec.readable-elements
Status bad(const ReadLease<Int8<32>, Cuda>& lease, Stream<Cuda>& stream) { return prefill_logits({}, {}, lease, {}, {}, {}, {}, stream); }
#elif KVIRE_FAIL == 3  // expect: codec.readable-elements
Status bad(const ContiguousKeys<Int8<48>>& keys, Stream<Cuda>& stream) { return prefill_logits({}, {}, keys, {}, {}, {}, stream); }
#elif KVIRE_FAIL == 4  // expect: codec.readable-elements
Status bad(const ReadLease<Int8<64>, Cuda>& lease, Stream<Cuda>& stream) { return select_keys({}, {}, lease, {}, {}, {}, {}, stream); }
#elif KVIRE_FAIL == 5  // expect: codec.readable-elements
// The launch alone, which takes pointers.
cudaError_t bad(cudaStream_t stream) { return launch_generic_sparse_logits<Int8<80>>({}, nullptr, stream); }
#elif KVIRE_FAIL == 6  // expect: codec.readable-elements
cudaError_t bad(cudaStream_t stream) { return launch_generic_prefill_logits<Int8<96>>({}, nullptr, stream); }
#elif KVIRE_FAIL == 7  // expect: sync.read-only
Status bad(ReadLease<Bf16Contiguous<16, 64>, Cuda> lease, Stream<Cuda>& stream) {
  return store<Bf16Contiguous<16, 64>>(Rows(static_cast<const float*>(nullptr), 0), nullptr, lease, stream);
}
#elif KVIRE_FAIL == 8  // expect: sync.read-only
Status bad(ReadLease<Bf16Contiguous<16, 96>, Cuda> lease, Stream<Cuda>& stream) {
  return copy_pages<Bf16Contiguous<16, 96>>(nullptr, lease, nullptr, lease, 0, stream);
}
#endif
