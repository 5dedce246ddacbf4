// SPDX-License-Identifier: Apache-2.0
// A program that has code for sm_80 alone, which the driver makes into code for this GPU: what newer GPUs have besides (clusters, bulk copies, kernels that
// start behind earlier ones) must not be counted on.
#include <doctest/doctest.h>

#include <kvire/kernel/cuda_top_k.cuh>
#include <kvire/layout/policies.hpp>
#include <kvire/transfer/submit.cuh>
#include <tests/support/cuda_pages.hpp>
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

TEST_CASE("cuda code for sm_80: pages are moved, by kernels that have no bulk copies") {
  using namespace std::chrono_literals;
  auto stream = Stream<Cuda>::make().value();
  MirroredPages<Fp8WithScale<64, 128>> pools(2, 9, 5);
  std::vector<HostPage> from;
  std::vector<DevicePage> to;
  for (std::size_t i = 0; i < 5; ++i) {
    from.push_back(pools.on_host[i].id());
    to.push_back(pools.on_device[4 - i].id());
    fill_page(pools.host, from[i], 100 + unsigned(i));
    fill_page(pools.device, to[i], 200);
  }
  TransferOptions<Cuda> options;
  options.engine.choice = EngineChoice::sm_kernel;
  REQUIRE(load(pools.host, pools.device, plan(from, to), stream, options).value().wait(deadline_in(20s)).ok());
  for (std::size_t i = 0; i < 5; ++i) CHECK(has_page(pools.device, to[i], 100 + unsigned(i)));
  std::reverse(from.begin(), from.end());
  REQUIRE(backup(pools.device, pools.host, plan(from, to), stream, options).value().wait(deadline_in(20s)).ok());
  for (std::size_t i = 0; i < 5; ++i) CHECK(has_page(pools.host, from[i], 100 + unsigned(i)));
}
