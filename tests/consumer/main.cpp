// SPDX-License-Identifier: Apache-2.0
// A consumer: uses the headers, links nothing of kvire's, and sees a wrong layout as another type.
#include <kvire/layout.hpp>

#include <cstdio>

struct IndexKey : kvire::Bf16Contiguous<64, 128> {
  static constexpr const char* name = "IndexKey";
};
static_assert(IndexKey::page_bytes == 16384);
static_assert(!kvire::same_layout<IndexKey, kvire::Fp8WithScale<64, 128>>);

int main() {
  std::printf("%s\n", kvire::describe<IndexKey>().c_str());
  return 0;
}
