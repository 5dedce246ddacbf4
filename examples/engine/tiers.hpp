// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#if KVIRE_HAVE_XXHASH
#include <kvire/adapt/xxhash.hpp>
#endif
#if KVIRE_HAVE_LIBURING
#include <kvire/adapt/io_uring.hpp>
#endif
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/sync/host.hpp>
#include <kvire/tier/file_tier.hpp>
#include <kvire/tier/tiered_cache.hpp>

#include "replay.hpp"
#include "tamper.hpp"

namespace engine {

#if KVIRE_HAVE_XXHASH
using FileSum = kvire::adapt::Xxh3;
#else
using FileSum = kvire::Xxh64;
#endif
#if KVIRE_HAVE_LIBURING
using FileIo = kvire::adapt::UringIo;
#else
using FileIo = kvire::PosixIo;
#endif

/// The device pools, their mirror on the host, the file tier, the streams between them, and the cache that decides which pages are where.
template <class IndexKey, class Backend = kvire::Host>
class Tiers {
 public:
  using Entries = kvire::preset::deepseek_v4::Flash<IndexKey>;
  using Device = kvire::DeviceBundlePool<Entries, Backend>;
  using HostTier = kvire::HostBundlePool<Entries, Backend>;
  using FileTier = kvire::FileTier<Entries, Backend, FileSum, FileIo>;
  using Cache = kvire::TieredCache<Entries, Backend, kvire::Lru, FileTier>;
  using Held = typename Cache::Held;
  using Pages = typename Cache::Pages;
  using Dependencies = std::vector<kvire::Dependency<Backend>>;
  using Stream = kvire::Stream<Backend>;
  static constexpr int full = Entries::template space_index<kvire::space::Full>();
  static constexpr int window = Entries::template space_index<kvire::space::Window>();
  static constexpr int request = Entries::template space_index<kvire::space::Request>();

  static kvire::Result<std::unique_ptr<Tiers>> make(const ReplaySettings& sizes, std::unique_ptr<Tamper<IndexKey, Backend>> tamper = nullptr) {
    typename Device::Options options{.pages = pages(sizes.device_pages, sizes.sessions + reserve(sizes) + 1), .layers = sizes.layers};
    // What decoding sessions read through the slots of a hot set lives where the host's pages do.
    using Latent = typename Entries::C4Latent;
    if (sizes.hot_slots > 0) options.template memory_of<Latent>() = kvire::BackendMemory<Backend, kvire::HostSide>::resource(Latent::policy::page_bytes);
    auto device = Device::make(std::move(options));
    if (!device.ok()) return device.error();
    if (sizes.null_page_fill) {
      Entries::for_each([&]<class Entry>() { (void)device.value().template entry<Entry>().fill_page(kvire::DevicePage(kvire::null_page), *sizes.null_page_fill); });
    }
    std::optional<HostTier> host;
    if (sizes.host_pages > 0) {
      // Rows of parked tails: of every session, and as many of tails that nobody has come back to.
      auto mirror = kvire::mirror_of(device.value(), pages(sizes.host_pages, 2 * sizes.sessions + 1));
      if (!mirror.ok()) return mirror.error();
      host = std::move(mirror).value();
    }
    std::optional<FileTier> files;
    if (!sizes.file_folder.empty()) {
      if (!host) return kvire::Error{kvire::ErrorCode::invalid_argument, "a file tier needs a host tier, through which its pages go"};
      auto made = FileTier::make({.folder = sizes.file_folder, .budget = kvire::Bytes(sizes.file_bytes)}, sizes.layers);
      if (!made.ok()) return made.error();
      files = std::move(made).value();
    }
    auto faults = kvire::FaultHooks::make();
    auto compute = Stream::make({.name = "compute"});
    auto loads = Stream::make({.name = "load", .faults = faults});
    auto stores = Stream::make({.name = "store"});
    for (const auto* stream : {&compute, &loads, &stores}) {
      if (!stream->ok()) return stream->error();
    }
    auto tiers = std::unique_ptr<Tiers>(new Tiers(sizes, std::move(device).value(), std::move(host), std::move(files), std::move(faults), std::move(tamper),
                                                  std::move(compute).value(), std::move(loads).value(), std::move(stores).value()));
    if (auto status = tiers->open(); !status.ok()) return status.error();
    return kvire::Result<std::unique_ptr<Tiers>>(std::move(tiers));
  }

  Device& device() { return device_; }
  Cache& cache() { return *cache_; }
  std::int64_t host_pages() const { return sizes_.host_pages; }
  bool has_files() const { return files_.has_value(); }
  kvire::FileTierStats file_stats() const { return files_ ? files_->stats() : kvire::FileTierStats(); }
  /// Whether a page of the full space came back from the host. One that is about to be computed did not.
  bool loaded(kvire::DevicePage page) const { return loaded_[static_cast<std::size_t>(page.value)]; }
  void computed(kvire::DevicePage page) { loaded_[static_cast<std::size_t>(page.value)] = false; }
  bool skips_gate() const { return tamper_ != nullptr && tamper_->skips_gate(); }

  /// Which kernels served the steps, and how often.
  std::map<std::string, std::int64_t>& kernels() { return kernels_; }
  /// Steps whose decoding sessions were served by a captured graph.
  std::int64_t graph_replays() const { return graph_replays_; }
  void count_graph_replay() { ++graph_replays_; }

  /// Begins a step that depends on loads: each layer's kernels wait, on their stream, for that layer. Evicts ahead of need, so that the copies run
  /// while the step computes.
  kvire::Result<kvire::Step<Backend>> begin(Dependencies loads) {
    cache_->make_room(reserve(sizes_));
    loads_ = std::move(loads);
    return begin_beside(compute_);
  }
  /// Another step behind the loads of the present one, on a stream of the caller's.
  kvire::Result<kvire::Step<Backend>> begin_beside(Stream& stream) {
    return skips_gate() ? gate_.begin({}, stream) : gate_.begin(std::span<const kvire::Dependency<Backend>>(loads_), stream);
  }

  /// After the step's kernels have run.
  kvire::Status finish_step() {
    if (hold_) {
      hold_->release();
      faults_->set({});
      hold_.reset();
    }
    for (const auto& load : loads_) {
      if (auto status = load.progress()->done().wait(); !status.ok()) return status;
    }
    loads_.clear();
    if (tamper_) tamper_->after_step(*this);
    return {};
  }

  /// Layers of an entry.
  template <class Entry>
  int slots() const {
    return Entry::slots(sizes_.layers);
  }
  /// Bytes past the gate, for what damages them on purpose.
  template <class Entry>
  auto raw_device(kvire::EntrySlot slot) {
    return kvire::pool_access::view(device_.template entry<Entry>(), slot);
  }
  template <class Entry>
  auto raw_host(kvire::EntrySlot slot) {
    return kvire::pool_access::view(host_->template entry<Entry>(), slot);
  }

 private:
  Tiers(const ReplaySettings& sizes, Device device, std::optional<HostTier> host, std::optional<FileTier> files, std::shared_ptr<kvire::FaultHooks> faults,
        std::unique_ptr<Tamper<IndexKey, Backend>> tamper, Stream compute, Stream loads, Stream stores)
      : sizes_(sizes),
        device_(std::move(device)),
        host_(std::move(host)),
        files_(std::move(files)),
        tamper_(std::move(tamper)),
        faults_(std::move(faults)),
        compute_(std::move(compute)),
        load_stream_(std::move(loads)),
        store_stream_(std::move(stores)) {}

  static std::int64_t reserve(const ReplaySettings& sizes) { return std::min<std::int64_t>(4, sizes.device_pages / 8); }
  static kvire::BundlePages<Entries> pages(std::int64_t tokens, std::int64_t rows) {
    kvire::BundlePages<Entries> pages;
    pages.template of<kvire::space::Full>() = tokens;
    pages.template of<kvire::space::Window>() = tokens;
    pages.template of<kvire::space::Request>() = rows;
    return pages;
  }

  kvire::Status open() {
    kvire::TieredOptions options{.window_tokens = window_tokens, .write_through = has_files(), .batch_pages = 4, .name = "cache"};
    options.seal = !tamper_;  // the replay is to see damage by its answers
    if (skips_gate()) options.room_limit = std::chrono::milliseconds(10);  // loads are held until the step has ended: nobody may wait for them
    auto cache = Cache::make({&device_, host_ ? &*host_ : nullptr, &load_stream_, &store_stream_}, options, files_ ? &*files_ : nullptr);
    if (!cache.ok()) return cache.error();
    cache_.emplace(std::move(cache).value());
    cache_->watch({.before = [this](kvire::CacheTier to, const auto& plan) { before(to, plan); },
                   .issued = [this](kvire::CacheTier to, const auto& plan, const auto& ticket) { issued(to, plan, ticket); }});
    return {};
  }
  using Plan = kvire::BundlePlan<Entries>;
  void before(kvire::CacheTier to, const Plan& plan) {
    if (!tamper_ || to != kvire::CacheTier::device) return;
    if (skips_gate() && !hold_) {
      hold_ = kvire::CopyHold::make();
      faults_->set([hold = hold_](const kvire::CopyInfo&) { return kvire::Fault::hold(hold); });
    }
    tamper_->before_load(*this, plan);
  }
  void issued(kvire::CacheTier to, const Plan& plan, const kvire::Ticket<Backend>& ticket) {
    const bool load = to == kvire::CacheTier::device;
    for (const auto page : plan.template of<kvire::space::Full>().second) loaded_[static_cast<std::size_t>(page.value)] = load || loaded(page);
    if (!tamper_ || (load && skips_gate()) || !ticket.wait().ok()) return;
    load ? tamper_->after_load(*this, plan) : tamper_->after_backup(*this, plan);
  }

  const ReplaySettings sizes_;
  Device device_;
  std::optional<HostTier> host_;
  std::optional<FileTier> files_;
  std::unique_ptr<Tamper<IndexKey, Backend>> tamper_;
  std::shared_ptr<kvire::FaultHooks> faults_;
  std::shared_ptr<kvire::CopyHold> hold_;
  kvire::Gate<Backend> gate_;
  std::optional<Cache> cache_;
  std::vector<bool> loaded_ = std::vector<bool>(static_cast<std::size_t>(sizes_.device_pages));
  Dependencies loads_;  // of the present step
  std::map<std::string, std::int64_t> kernels_;
  std::int64_t graph_replays_ = 0;
  // Last: streams end before what their work refers to.
  Stream compute_, load_stream_, store_stream_;
};

}  // namespace engine
