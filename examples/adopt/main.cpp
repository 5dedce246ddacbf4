// SPDX-License-Identifier: Apache-2.0
// Another engine sends pages of its index-key cache to a host tier, reuses them, loads them back to other page ids, and scores them where
// they are now: the scores must be the same bits.
#include <algorithm>
#include <cstdio>

#include "offload.hpp"

int main() {
  other::Engine engine;
  offload::Cache cache(engine);

  const int count = 4;
  std::vector<std::int32_t> table;
  std::vector<kvire::DevicePage> device_pages;
  for (int i = 0; i < count; ++i) {
    const int page = engine.allocator.take();
    table.push_back(page);
    device_pages.push_back(kvire::DevicePage(page));
    for (int layer = 0; layer < engine.layers; ++layer) engine.write_keys(layer, page, static_cast<unsigned>(i + 1));
  }
  auto host_refs = cache.host.allocate(count).value();
  std::vector<kvire::HostPage> host_pages;
  for (const auto& ref : host_refs) host_pages.push_back(ref.id());

  // The backup waits for the engine's stream; the scores are taken once it has landed.
  cache.evict(host_pages, device_pages).wait().value();
  const std::vector<float> query(offload::IndexK::dim, 0.5f);
  const std::vector<float> before = cache.scores({}, query, table);

  // Other tokens move into the freed pages, the evicted ones come back elsewhere.
  std::vector<int> taken;
  for (const int page : table) engine.allocator.add(page, -1);
  for (int i = 0; i < count + 3; ++i) {
    taken.push_back(engine.allocator.take());
    for (int layer = 0; layer < engine.layers; ++layer) engine.write_keys(layer, taken.back(), 1000u + static_cast<unsigned>(i));
  }
  std::vector<std::int32_t> new_table;
  std::vector<kvire::DevicePage> new_pages;
  for (int i = 0; i < count; ++i) {
    new_table.push_back(engine.allocator.take());
    new_pages.push_back(kvire::DevicePage(new_table.back()));
  }
  const auto load = cache.restore(host_pages, new_pages);
  const std::vector<float> after = cache.scores({load}, query, new_table);

  const bool same = before == after && std::any_of(before.begin(), before.end(), [](float s) { return s > 0; });
  std::printf("%d pages of %d layers went to the host and came back to other ids: %zu scores %s\n", count, engine.layers, after.size(),
              same ? "equal to the bit" : "DIFFER");
  return same ? 0 : 1;
}
