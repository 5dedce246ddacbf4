// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include <kvire/kvire.hpp>
#include <kvire/tier/tiered_cache.hpp>

#include "workload.hpp"

namespace engine {

struct TraceSchedule {
  static constexpr int layers = 2;
};
struct TraceLatent : kvire::CacheEntry<kvire::Bf16Contiguous<4, 16>, kvire::space::Full, kvire::Tokens<128>> {
  static constexpr const char* name = "latent";
};
struct TraceIndexK : kvire::CacheEntry<kvire::Fp8WithScale<4, 32>, kvire::space::Full, kvire::Tokens<128>> {
  static constexpr const char* name = "index_k";
};
/// What a trace's blocks become: pages of 512 raw tokens and a few hundred bytes.
using TraceBundle = kvire::CacheBundle<TraceSchedule, TraceLatent, TraceIndexK>;

struct TieredRunResult {
  kvire::CacheCounters<TraceBundle::space_count> counters;
  std::int64_t wrong_pages = 0;  ///< hits, by entry and layer, whose bytes were not those of their prefix
  std::int64_t bytes_to_host = 0;
  std::int64_t bytes_to_device = 0;
};

/// The whole blocks of a trace through the tiered cache, with real pages under step, gate and leases: each page is written with bytes that follow from its
/// prefix, and each hit is read back.
class TieredRun {
 public:
  using Backend = kvire::Host;
  using Cache = kvire::TieredCache<TraceBundle, Backend>;

  /// `follow`: is called with what the cache does, requests numbered as in the trace.
  static kvire::Result<TieredRunResult> run(const std::vector<TraceRequest>& trace, std::int64_t device_pages, std::int64_t host_pages, kvire::CacheTrace follow = {}) {
    auto device = Device::make({.pages = {{device_pages + 1}}});
    if (!device) return device.error();
    auto host = kvire::mirror_of(device.value(), {{std::max<std::int64_t>(host_pages, 1) + 1}});
    if (!host) return host.error();
    auto compute = Stream::make({.name = "compute"}), loads = Stream::make({.name = "load"}), stores = Stream::make({.name = "store"});
    for (const auto* stream : {&compute, &loads, &stores}) {
      if (!stream->ok()) return stream->error();
    }
    const kvire::TieredPools<TraceBundle, Backend> pools{&device.value(), host_pages == 0 ? nullptr : &host.value(), &loads.value(), &stores.value()};
    auto cache = Cache::make(pools, {.batch_pages = 32});
    if (!cache) return cache.error();
    TieredRun state(device.value(), cache.value(), compute.value());
    cache.value().trace(std::move(follow));
    for (std::size_t i = 0; i < trace.size(); ++i) {
      cache.value().serve(static_cast<std::int64_t>(i));
      if (auto status = state.request(trace[i]); !status.ok()) return status.error();
    }
    cache.value().finish();
    return TieredRunResult{cache.value().counters(), state.wrong_, cache.value().stored().bytes(), cache.value().loaded().bytes()};
  }

 private:
  using Device = kvire::DeviceBundlePool<TraceBundle, Backend>;
  using Stream = kvire::Stream<Backend>;
  struct Page {
    std::int32_t id;
    std::uint64_t name;
  };
  using PageList = std::shared_ptr<std::vector<Page>>;

  TieredRun(Device& device, Cache& cache, Stream& compute) : device_(device), cache_(cache), compute_(compute), root_(cache.root({.model = "trace"})) {}

  static std::byte byte_of(std::uint64_t name, int entry, int slot, std::int64_t at) {
    return static_cast<std::byte>(mix(name + static_cast<std::uint64_t>(1000 * entry + slot)) >> (at % 8 * 8));
  }

  kvire::Status request(const TraceRequest& request) {
    const std::int64_t blocks = request.input_length / trace_block_tokens;
    std::vector<kvire::TokenId> tokens(static_cast<std::size_t>(blocks * trace_block_tokens));
    for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = block_token(request.blocks[i / trace_block_tokens], static_cast<std::int64_t>(i % trace_block_tokens));
    auto held = cache_.acquire(root_, tokens);
    auto step = gate_.begin(held.loads, compute_);
    if (!step) return step.error();
    if (auto status = read(step.value(), held); !status.ok()) return status;
    const auto rest = std::span(tokens).subspan(static_cast<std::size_t>(held.tokens));
    if (auto status = write(step.value(), held, rest); !status.ok()) return status;
    cache_.make_room(32);
    if (auto status = compute_.record("step").wait(); !status.ok()) return status;  // kernels use the held pages
    return step.value().status();
  }

  kvire::Status read(const kvire::Step<Backend>& step, const Cache::Held& held) {
    std::vector<std::int32_t> path(static_cast<std::size_t>(held.prefix.pages()));
    cache_.cache().path(held.prefix.node(), path);
    auto pages = std::make_shared<std::vector<Page>>();
    for (const std::int32_t node : path) pages->push_back({cache_.cache().device(node, 0).id().value, cache_.cache().name(node).low});
    return each_layer([&]<class Entry>(kvire::EntrySlot slot) -> kvire::Status {
      auto lease = step.read(device_.template entry<Entry>(), slot);
      if (!lease) return lease.error();
      kvire::launch(compute_, [this, pages, slot](const auto& view) {
        for (const auto& [id, name] : *pages) {
          bool right = true;
          for (std::int64_t i = 0; i < Entry::policy::page_bytes; ++i) right = right && view.page(id)[i] == byte_of(name, TraceBundle::index_of<Entry>(), slot.value, i);
          wrong_ += right ? 0 : 1;
        }
      }, lease.value());
      return {};
    });
  }

  // What the device has no room for is not cached.
  kvire::Status write(const kvire::Step<Backend>& step, Cache::Held& held, std::span<const kvire::TokenId> tokens) {
    std::vector<Cache::Pages> refs;
    std::vector<kvire::DevicePage> ids;
    auto pages = std::make_shared<std::vector<Page>>();
    kvire::Hash128 name = cache_.cache().name(held.prefix.node());
    for (std::int64_t at = 0; at < static_cast<std::int64_t>(tokens.size()); at += trace_block_tokens) {
      auto page = cache_.allocate<kvire::space::Full>();
      if (!page) break;
      name = kvire::prefix_hash(name, tokens.data() + at, trace_block_tokens);
      ids.push_back(page.value().id());
      pages->push_back({page.value().id().value, name.low});
      refs.push_back({std::move(page).value()});
    }
    auto status = each_layer([&]<class Entry>(kvire::EntrySlot slot) -> kvire::Status {
      auto lease = step.write(device_.template entry<Entry>(), slot, ids);
      if (!lease) return lease.error();
      kvire::launch(compute_, [pages, slot](const auto& view) {
        for (const auto& [id, page_name] : *pages) {
          for (std::int64_t i = 0; i < Entry::policy::page_bytes; ++i) view.page(id)[i] = byte_of(page_name, TraceBundle::index_of<Entry>(), slot.value, i);
        }
      }, lease.value());
      return {};
    });
    if (!status.ok()) return status;
    return cache_.publish(held, tokens.first(refs.size() * trace_block_tokens), refs);
  }

  template <class F>
  kvire::Status each_layer(F&& f) {
    kvire::Status status;
    TraceBundle::for_each([&]<class Entry>() {
      for (int slot = 0; slot < TraceSchedule::layers && status.ok(); ++slot) status = f.template operator()<Entry>(kvire::EntrySlot(slot));
    });
    return status;
  }

  Device& device_;
  Cache& cache_;
  Stream& compute_;
  kvire::Gate<Backend> gate_;
  std::int32_t root_;
  std::atomic<std::int64_t> wrong_{0};
};

}  // namespace engine
