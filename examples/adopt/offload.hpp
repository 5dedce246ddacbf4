// SPDX-License-Identifier: Apache-2.0
#pragma once

// All that the other engine needs to write to gain a host tier whose layout cannot differ, loads that readers wait for layer by layer, and
// logits over its own memory.

#include <kvire/kvire.hpp>

#include "other_engine.hpp"

namespace offload {

using IndexK = kvire::preset::deepseek_v4::IndexKeyFp8;
using kvire::Host;
template <class T>
using Ids = std::vector<kvire::PageRef<T>>;

/// The engine's allocator goes on owning the pages; kvire adds one to a count while a transfer holds a page.
struct Owner {
  other::Allocator* allocator;
  int pages() const { return allocator->pages(); }
  int owners(std::int32_t page) const { return allocator->count(page); }
  void retain(std::int32_t page) { allocator->add(page, 1); }
  void release(std::int32_t page) { allocator->add(page, -1); }
};

struct Cache {
  explicit Cache(other::Engine& e) : engine(e) {}

  static kvire::DevicePool<IndexK, Host> adopt(other::Engine& e) {
    kvire::AdoptOptions options{.page_stride = e.stride, .pages = e.pages, .bytes_per_layer = e.stride * e.pages, .name = "other.index_k"};
    for (auto& layer : e.index_k) options.bases.push_back(layer.data());
    return kvire::adopt<IndexK>(std::move(options), Owner{&e.allocator}).value();
  }

  /// Backup behind what the engine's stream has queued; host pages follow the device pages' order.
  kvire::Ticket<Host> evict(const std::vector<kvire::HostPage>& to, const std::vector<kvire::DevicePage>& from) {
    const auto written = kvire::Event<Host>::make("engine stream");
    (void)written.mark_recorded();
    engine.stream.enqueue([written] { written.complete(); });
    return kvire::backup(device, host, kvire::plan(to, from), copies, {.after = {written}}).value();
  }
  kvire::Ticket<Host> restore(const std::vector<kvire::HostPage>& from, const std::vector<kvire::DevicePage>& to) {
    return kvire::load(host, device, kvire::plan(from, to), copies).value();
  }

  /// Index scores of one query per layer over the pages, behind the loads; [layers][tokens].
  std::vector<float> scores(std::initializer_list<kvire::Dependency<Host>> loads, const std::vector<float>& query, const std::vector<std::int32_t>& pages) {
    const std::int64_t tokens = static_cast<std::int64_t>(pages.size()) * IndexK::tokens_per_page;
    const std::int32_t length = static_cast<std::int32_t>(tokens);
    const float weight = 1;
    std::vector<float> out(static_cast<std::size_t>(device.layers() * tokens));
    auto step = kvire::Gate<Host>().begin(loads, kernels).value();
    for (int l = 0; l < device.layers(); ++l) {
      kvire::sparse_logits<IndexK>({query.data(), kvire::Element::f32, 1, 1, 1, IndexK::dim}, {&weight, {1, 1, 1}}, step.read(device, kvire::EntrySlot(l)).value(),
                                   {pages.data(), {1, tokens / IndexK::tokens_per_page}}, {&length, {1, 1}}, {out.data() + l * tokens, {1, 1, tokens}}, kernels)
          .value();
    }
    kernels.synchronize().value();
    step.status().value();
    return out;
  }

  other::Engine& engine;
  kvire::DevicePool<IndexK, Host> device = adopt(engine);
  kvire::HostPool<IndexK, Host> host = kvire::mirror_of(device, 16).value();
  kvire::Stream<Host> copies = kvire::Stream<Host>::make({.name = "copies"}).value();
  kvire::Stream<Host> kernels = kvire::Stream<Host>::make({.name = "kernels"}).value();
};

}  // namespace offload
