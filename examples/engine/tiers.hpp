// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include <kvire/pool/bundle_pool.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/sync/gate.hpp>
#include <kvire/sync/host.hpp>

#include "tamper.hpp"

namespace engine {

struct TierSizes {
  int model_layers = 0;
  std::int64_t device_pages = 0;
  std::int64_t host_pages = 0;
  int sessions = 0;
};

/// The device pools and their mirror on the host, the streams, and the transfers between them. Moves of one scheduling round are collected
/// and issued as one transfer over all entries of the bundle.
template <class IndexKey>
class Tiers {
 public:
  using Entries = kvire::preset::deepseek_v4::Flash<IndexKey>;
  using Device = kvire::DeviceBundlePool<Entries, kvire::Host>;
  using HostTier = kvire::HostBundlePool<Entries, kvire::Host>;
  using Stream = kvire::Stream<kvire::Host>;
  using DeviceRef = kvire::PageRef<kvire::DevicePage>;
  using HostRef = kvire::PageRef<kvire::HostPage>;

  static kvire::Result<std::unique_ptr<Tiers>> make(const TierSizes& sizes, std::unique_ptr<Tamper<IndexKey>> tamper) {
    using namespace kvire;
    typename Device::Options options;
    options.pages.template of<space::Full>() = sizes.device_pages;
    options.pages.template of<space::Window>() = sizes.device_pages;
    options.pages.template of<space::Request>() = sizes.sessions + 1;
    options.layers = sizes.model_layers;
    auto device = Device::make(options);
    if (!device.ok()) return device.error();
    std::optional<HostTier> host;
    if (sizes.host_pages > 0) {
      BundlePages<Entries> pages;
      pages.template of<space::Full>() = sizes.host_pages;
      pages.template of<space::Window>() = sizes.host_pages;
      pages.template of<space::Request>() = 2;  // request rows stay with their session and are never moved
      auto mirror = mirror_of(device.value(), pages);
      if (!mirror.ok()) return mirror.error();
      host = std::move(mirror).value();
    }
    auto compute = Stream::make({.name = "compute"});
    if (!compute.ok()) return compute.error();
    return std::unique_ptr<Tiers>(new Tiers(sizes, std::move(device).value(), std::move(host), std::move(compute).value(), std::move(tamper)));
  }

  Device& device() { return device_; }
  std::int64_t host_pages() const { return sizes_.host_pages; }
  std::int64_t bytes_to_host() const { return bytes_to_host_; }
  std::int64_t bytes_to_device() const { return bytes_to_device_; }
  bool skips_gate() const { return tamper_ != nullptr && tamper_->skips_gate(); }

  /// A page, or an empty reference if there is none.
  template <class Space>
  DeviceRef allocate() {
    auto page = device_.template ledger<Space>().allocate();
    return page.ok() ? std::move(page).value() : DeviceRef();
  }
  template <class Space>
  HostRef allocate_host() {
    auto page = host_->template ledger<Space>().allocate();
    return page.ok() ? std::move(page).value() : HostRef();
  }

  template <class Space>
  void load(const HostRef& from, const DeviceRef& to) {
    loads_.template of<Space>().push_back({from.id(), to.id()});
    held_.push_back(from);
  }
  template <class Space>
  void backup(const HostRef& to, const DeviceRef& from) {
    backups_.template of<Space>().push_back({to.id(), from.id()});
    held_.push_back(to);
  }
  void issue_backups() {
    if (backups_.empty()) return;
    copy(backups_, false);
    if (tamper_) tamper_->after_backup(*this, backups_);
    backups_ = {};
  }
  bool wait_for_backup() { return false; }

  kvire::Result<kvire::Step<kvire::Host>> begin() {
    if (!loads_.empty()) {
      if (tamper_) tamper_->before_load(*this, loads_);
      copy(loads_, true);
      if (tamper_) tamper_->after_load(*this, loads_);
      loads_ = {};
    }
    held_.clear();
    return gate_.begin({}, compute_);
  }

  void finish_step() {
    if (tamper_) tamper_->after_step(*this);
  }
  kvire::Status finish() { return {}; }

  /// Layers of an entry.
  template <class Entry>
  int slots() const {
    return Entry::slots(sizes_.model_layers);
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
  Tiers(const TierSizes& sizes, Device device, std::optional<HostTier> host, Stream compute, std::unique_ptr<Tamper<IndexKey>> tamper)
      : sizes_(sizes), device_(std::move(device)), host_(std::move(host)), tamper_(std::move(tamper)), compute_(std::move(compute)) {}

  void copy(const Moves& moves, bool to_device) {
    Entries::for_each([&]<class Entry>() {
      if constexpr (!std::is_same_v<typename Entry::space, kvire::space::Request>) {
        for (int s = 0; s < slots<Entry>(); ++s) {
          const auto d = raw_device<Entry>(kvire::EntrySlot(s));
          const auto h = raw_host<Entry>(kvire::EntrySlot(s));
          for (const auto& p : moves.template of<typename Entry::space>()) {
            std::byte* a = d.page(p.device.value);
            std::byte* b = h.page(p.host.value);
            std::memcpy(to_device ? a : b, to_device ? b : a, Entry::policy::page_bytes);
            (to_device ? bytes_to_device_ : bytes_to_host_) += Entry::policy::page_bytes;
          }
        }
      }
    });
  }

  const TierSizes sizes_;
  Device device_;
  std::optional<HostTier> host_;
  std::unique_ptr<Tamper<IndexKey>> tamper_;
  kvire::Gate<kvire::Host> gate_;
  Moves loads_, backups_;
  std::vector<HostRef> held_;
  std::int64_t bytes_to_host_ = 0, bytes_to_device_ = 0;
  Stream compute_;  // last: it ends before what its work refers to
};

}  // namespace engine
