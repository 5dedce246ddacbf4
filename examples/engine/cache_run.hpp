// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ctime>
#include <optional>
#include <span>
#include <vector>

#include <kvire/exec/host/event.hpp>
#include <kvire/pool/ledger.hpp>
#include <kvire/tier/prefix_cache.hpp>

#include "workload.hpp"

namespace engine {

/// When a page gets its copy on the host: when the device gives it up, or as soon as it is there.
enum class WriteMode { back, through };

struct CacheRunSizes {
  std::int64_t device_pages = 0;
  std::int64_t host_pages = 0;
  WriteMode write = WriteMode::back;
  bool keep_tokens = true;
};

/// Whole blocks of a trace that a cache of names and page ids had.
struct CacheRunCounts {
  std::int64_t full_blocks = 0;
  std::int64_t device_hits = 0;
  std::int64_t host_hits = 0;

  std::int64_t hits() const { return device_hits + host_hits; }
};

/// A prefix cache of 512-token pages over ledgers without memory behind them: which pages would be where, and nothing else.
template <class Policy>
class CacheRun {
 public:
  static kvire::Result<CacheRun> make(const CacheRunSizes& sizes) {
    kvire::PrefixShape<1> shape;
    shape.page_tokens = trace_block_tokens;
    shape.keep_tokens = sizes.keep_tokens;
    auto cache = Cache::make(shape);
    if (!cache) return cache.error();
    auto device = Device::make("device", sizes.device_pages + 1);
    if (!device) return device.error();
    std::optional<Host> host;
    if (sizes.host_pages > 0) {
      auto made = Host::make("host", sizes.host_pages + 1);
      if (!made) return made.error();
      host = std::move(made).value();
    }
    return CacheRun(sizes, std::move(cache).value(), std::move(device).value(), std::move(host));
  }

  /// One request: what of its whole blocks is there, then the rest as if computed.
  kvire::Status request(const TraceRequest& request, CacheRunCounts& counts) {
    const std::int64_t blocks = fill(request);
    const kvire::PrefixMatch match = cache_.find(root_, tokens_);
    counts.full_blocks += blocks;
    counts.device_hits += match.on[0];
    counts.host_hits += match.on[1];
    auto held = cache_.acquire(match);
    path_.resize(static_cast<std::size_t>(match.pages));
    cache_.path(match.node, path_);
    for (const std::int32_t node : path_) {
      if (!cache_.device(node, 0) && !promote(node)) return {};  // the rest stays where it is
    }
    for (std::int64_t b = match.pages; b < blocks; ++b) {
      typename Cache::Pages pages{device_page()};
      if (!pages[0]) break;  // everything else is in use
      auto added = cache_.extend(held, std::span(tokens_).subspan(static_cast<std::size_t>(b * trace_block_tokens), trace_block_tokens), pages);
      if (!added) return added.error();
      if (sizes_.write == WriteMode::through) store(held.node(), false);
    }
    return {};
  }

  /// Looks a request up, and nothing else. Returns the processor time that it took, in seconds: other work of the machine does not count.
  double lookup(const TraceRequest& request, CacheRunCounts& counts) {
    counts.full_blocks += fill(request);
    const std::clock_t start = std::clock();
    counts.device_hits += cache_.find(root_, tokens_).pages;
    return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  }

 private:
  using Cache = kvire::PrefixCache<1, Policy>;
  using Device = kvire::PageLedger<kvire::DevicePage, kvire::Host>;
  using Host = kvire::PageLedger<kvire::HostPage, kvire::Host>;
  using Tier = kvire::CacheTier;

  CacheRun(const CacheRunSizes& sizes, Cache cache, Device device, std::optional<Host> host)
      : sizes_(sizes), device_(std::move(device)), host_(std::move(host)), cache_(std::move(cache)), root_(cache_.root({})) {}

  // The tokens of the whole blocks.
  std::int64_t fill(const TraceRequest& request) {
    const std::int64_t blocks = request.input_length / trace_block_tokens;
    tokens_.resize(static_cast<std::size_t>(blocks * trace_block_tokens));
    for (std::size_t i = 0; i < tokens_.size(); ++i) {
      tokens_[i] = block_token(request.blocks[i / trace_block_tokens], static_cast<std::int64_t>(i % trace_block_tokens));
    }
    return blocks;
  }

  kvire::PageRef<kvire::DevicePage> device_page() {
    for (;;) {
      if (auto page = device_.allocate()) return std::move(page).value();
      const std::int32_t node = cache_.victim(0, Tier::device);
      if (node < 0) return {};
      if (cache_.has(node, 0, Tier::host) || !store(node, true)) cache_.drop(node, 0, Tier::device);
    }
  }
  kvire::PageRef<kvire::HostPage> host_page() {
    while (host_) {
      if (auto page = host_->allocate()) return std::move(page).value();
      const std::int32_t node = cache_.victim(0, Tier::host);
      if (node < 0) return {};
      cache_.drop(node, 0, Tier::host);
    }
    return {};
  }
  // A copy on the host, in place of the device's if that leaves.
  bool store(std::int32_t node, bool leave) {
    auto page = host_page();
    if (!page) return false;
    cache_.arrive(node, 0, std::move(page));
    if (leave) cache_.leave(node, 0);
    cache_.arrived(node, 0, Tier::host, true);
    return true;
  }
  bool promote(std::int32_t node) {
    auto page = device_page();
    if (!page) return false;
    cache_.arrive(node, 0, std::move(page));
    cache_.arrived(node, 0, Tier::device, true);
    return true;
  }

  CacheRunSizes sizes_;
  Device device_;
  std::optional<Host> host_;
  Cache cache_;
  std::int32_t root_;
  std::vector<kvire::TokenId> tokens_;
  std::vector<std::int32_t> path_;
};

}  // namespace engine
