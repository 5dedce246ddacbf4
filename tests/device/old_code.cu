// SPDX-License-Identifier: Apache-2.0
// A program that has code for sm_80 alone, which the driver makes into code for this GPU: what newer GPUs have besides (clusters, kernels that start
// behind earlier ones) must not be counted on.
#include <doctest/doctest.h>

#include <kvire/kernel/cuda_top_k.cuh>
#include <tests/support/device_rows.hpp>

using namespace kvire;
using namespace kvire_test;

TEST_CASE("cuda code for sm_80: the selection of long rows, which newer code gives to clusters") {
  const auto code = kvire::detail::device_code(0);
  CHECK(code.portable);
  CHECK(!code.hopper);
  CHECK(!code.overlap);
  auto stream = Stream<Cuda>::make().value();
  for (const int rows : {1, 3}) {
    const Rows in = make(Kind::normal, rows, 131072, unsigned(rows));
    const DeviceRows device(in, 512);
    const auto& args = device.args;
    CudaTopKOptions options;
    options.kernel = KernelChoice::tuned;
    options.overlap = true;
    top_k({args.scores, {rows, 1, args.stride}}, {args.lengths, {rows, 1}}, Tensor<std::int32_t, 3>{args.selected, {rows, 1, args.k}}, stream, options).value();
    CHECK(device.selected.read() == expected(in, 512));
  }
}
