// SPDX-License-Identifier: Apache-2.0
// A layout of your own: 96-dim keys in fp8 with one power-of-two scale per 32 elements behind each row, 48 tokens a page. Codec, pools, mirror
// and every check follow from the struct.
#include <cmath>
#include <cstdio>
#include <vector>

#include <kvire/codec/row.hpp>
#include <kvire/exec/host/stream.hpp>
#include <kvire/layout.hpp>
#include <kvire/pool/mirror.hpp>

struct MyKeys : kvire::PageLayout<48, 256,  // tokens a page; page bytes are a multiple of 256
                                  kvire::Plane<kvire::Field<kvire::role::Value, kvire::Element::e4m3, 96>,
                                               kvire::Field<kvire::role::Scale, kvire::Element::ue8m0, 3>, kvire::Pad<1>>> {
  static constexpr const char* name = "MyKeys";
  using Scaling = kvire::ScaleRule<kvire::role::Value, 32>;  // one scale per 32 values
};
static_assert(kvire::require_layout<MyKeys>());  // a gap, an overlap, a misaligned or missing scale would not compile
static_assert(MyKeys::page_bytes == 4864);       // 48 * 100, padded to 19 * 256

int main() {
  std::printf("%s\n\nfingerprint %016llx\n", kvire::describe<MyKeys>().c_str(), static_cast<unsigned long long>(kvire::fingerprint64<MyKeys>));

  std::vector<std::byte> page(static_cast<std::size_t>(MyKeys::page_bytes));
  float key[MyKeys::dim];
  float back[MyKeys::dim];
  for (int i = 0; i < MyKeys::dim; ++i) key[i] = std::sin(0.37f * static_cast<float>(i));
  kvire::encode_row<MyKeys>(key, page.data(), 5);
  kvire::decode_row<MyKeys>(page.data(), 5, back);
  float worst = 0;
  for (int i = 0; i < MyKeys::dim; ++i) worst = std::fmax(worst, std::fabs(back[i] - key[i]));
  std::printf("largest error of a row stored and read back: %.4f\n", static_cast<double>(worst));

  auto device = kvire::DevicePool<MyKeys, kvire::Host>::make({.layers = 2, .pages = 16, .name = "my_keys"}).value();
  auto mirror = kvire::mirror_of(device, 64).value();  // no element type, no size: they follow from the device pool
  std::printf("device pool %lld B, mirror %lld B\n", static_cast<long long>(device.bytes().count), static_cast<long long>(mirror.bytes().count));
  return worst < 0.07f ? 0 : 1;
}
