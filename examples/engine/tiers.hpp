// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <kvire/pool/bundle_pool.hpp>
#include <kvire/preset/deepseek_v4.hpp>
#include <kvire/sync/gate.hpp>
#include <kvire/sync/host.hpp>
#include <kvire/transfer/bundle.hpp>

#include "replay.hpp"
#include "tamper.hpp"

namespace engine {

/// The device pools and their mirror on the host, the streams, and the transfers between them. Moves of one scheduling round are collected
/// and issued as one transfer over all entries of the bundle.
template <class IndexKey, class Backend = kvire::Host>
class Tiers {
 public:
  using Entries = kvire::preset::deepseek_v4::Flash<IndexKey>;
  using Device = kvire::DeviceBundlePool<Entries, Backend>;
  using HostTier = kvire::HostBundlePool<Entries, Backend>;
  using Stream = kvire::Stream<Backend>;
  using DeviceRef = kvire::PageRef<kvire::DevicePage>;
  using HostRef = kvire::PageRef<kvire::HostPage>;

  static kvire::Result<std::unique_ptr<Tiers>> make(const ReplaySettings& sizes, std::unique_ptr<Tamper<IndexKey, Backend>> tamper) {
    using namespace kvire;
    typename Device::Options options;
    options.pages.template of<space::Full>() = sizes.device_pages;
    options.pages.template of<space::Window>() = sizes.device_pages;
    options.pages.template of<space::Request>() = sizes.sessions + 1;
    options.layers = sizes.layers;
    auto device = Device::make(options);
    if (!device.ok()) return device.error();
    if (sizes.null_page_fill) {
      Entries::for_each([&]<class Entry>() { (void)device.value().template entry<Entry>().fill_page(DevicePage(null_page), *sizes.null_page_fill); });
    }
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
    auto faults = FaultHooks::make();
    auto compute = Stream::make({.name = "compute"});
    auto loads = Stream::make({.name = "load", .faults = faults});
    auto backups = Stream::make({.name = "backup"});
    for (const auto* stream : {&compute, &loads, &backups}) {
      if (!stream->ok()) return stream->error();
    }
    return std::unique_ptr<Tiers>(new Tiers(sizes, std::move(device).value(), std::move(host), std::move(faults), std::move(compute).value(),
                                            std::move(loads).value(), std::move(backups).value(), std::move(tamper)));
  }

  Device& device() { return device_; }
  /// Requires host pages.
  HostTier& host() { return *host_; }
  std::int64_t host_pages() const { return sizes_.host_pages; }
  std::int64_t bytes_to_host() const { return to_host_->bytes(); }
  std::int64_t bytes_to_device() const { return to_device_->bytes(); }
  bool skips_gate() const { return tamper_ != nullptr && tamper_->skips_gate(); }

  /// Which kernels served the steps, and how often.
  std::map<std::string, std::int64_t>& kernels() { return kernels_; }
  /// Steps whose decoding sessions were served by a captured graph.
  std::int64_t graph_replays() const { return graph_replays_; }
  void count_graph_replay() { ++graph_replays_; }

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
  std::int64_t free_pages() {
    return device_.template ledger<Space>().free_pages();
  }

  /// Notes a page for the round's load. Both pages stay owned until the load holds them: whoever asked for it may give up before it is issued.
  template <class Space>
  void load(const HostRef& from, const DeviceRef& to) {
    loads_.template of<Space>().push_back({from.id(), to.id()});
    held_.push_back(from);
    held_device_.push_back(to);
  }
  /// Notes a page for the next backup; `issue_backups` follows before the references go.
  template <class Space>
  void backup(const HostRef& to, const DeviceRef& from) {
    backups_.template of<Space>().push_back({to.id(), from.id()});
  }

  /// Sends the noted pages to the host, asynchronously; the transfer owns them until it has read them.
  kvire::Status issue_backups() {
    if (backups_.empty()) return {};
    auto ticket = kvire::backup(device_, *host_, plan_of(backups_), backup_stream_, {.name = "backup", .stats = to_host_});
    if (!ticket.ok()) return ticket.error();
    under_way_.push_back(std::move(ticket).value());
    if (tamper_) {
      if (auto status = under_way_.back().wait(); !status.ok()) return status;
      tamper_->after_backup(*this, backups_);
    }
    backups_ = {};
    return {};
  }

  /// Waits for the oldest backup under way, so that its device pages become free. False if there is none.
  bool wait_for_backup() {
    if (under_way_.empty()) return false;
    const auto status = under_way_.front().wait();
    if (!status.ok() && failure_.ok()) failure_ = status;
    under_way_.pop_front();
    return true;
  }

  /// Issues the load of the noted pages and begins a step that depends on it: each layer's kernels wait, on their stream, for that layer.
  kvire::Result<kvire::Step<Backend>> begin() {
    if (!failure_.ok()) return failure_.error();
    if (loads_.empty()) return gate_.begin({}, compute_);
    if (skips_gate()) {
      hold_ = kvire::CopyHold::make();
      faults_->set([hold = hold_](const kvire::CopyInfo&) { return kvire::Fault::hold(hold); });
    }
    if (tamper_) tamper_->before_load(*this, loads_);
    auto ticket = kvire::load(*host_, device_, plan_of(loads_), load_stream_, {.name = "load", .stats = to_device_});
    if (!ticket.ok()) return ticket.error();
    loading_ = std::move(ticket).value();
    if (tamper_ && !skips_gate()) {
      if (auto status = loading_.wait(); !status.ok()) return status.error();
      tamper_->after_load(*this, loads_);
    }
    loads_ = {};
    held_.clear();
    held_device_.clear();
    return skips_gate() ? gate_.begin({}, compute_) : gate_.begin({loading_}, compute_);
  }

  /// Another step behind the loads of the present one, on a stream of the caller's.
  kvire::Result<kvire::Step<Backend>> begin_beside(Stream& stream) {
    return loading_ ? gate_.begin({loading_}, stream) : gate_.begin({}, stream);
  }

  /// After the step's kernels have run.
  kvire::Status finish_step() {
    if (hold_) {
      hold_->release();
      faults_->set({});
      hold_.reset();
    }
    kvire::Status status;
    if (loading_) status = loading_.wait();
    loading_ = {};
    if (tamper_) tamper_->after_step(*this);
    return status;
  }

  kvire::Status finish() {
    while (wait_for_backup()) {
    }
    return failure_;
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
  Tiers(const ReplaySettings& sizes, Device device, std::optional<HostTier> host, std::shared_ptr<kvire::FaultHooks> faults, Stream compute, Stream loads,
        Stream backups, std::unique_ptr<Tamper<IndexKey, Backend>> tamper)
      : sizes_(sizes),
        device_(std::move(device)),
        host_(std::move(host)),
        tamper_(std::move(tamper)),
        faults_(std::move(faults)),
        compute_(std::move(compute)),
        load_stream_(std::move(loads)),
        backup_stream_(std::move(backups)) {}

  static kvire::BundlePlan<Entries> plan_of(const Moves& moves) {
    const auto pages = [](const auto& pairs) {
      kvire::PagePlan<kvire::HostPage, kvire::DevicePage> plan;
      for (const auto& pair : pairs) {
        plan.first.push_back(pair.host);
        plan.second.push_back(pair.device);
      }
      return plan;
    };
    // Request rows stay with their session.
    return kvire::BundlePlan<Entries>(kvire::in_space<kvire::space::Full>(pages(moves.full)), kvire::in_space<kvire::space::Window>(pages(moves.window)),
                                      kvire::without<kvire::space::Request>());
  }

  const ReplaySettings sizes_;
  Device device_;
  std::optional<HostTier> host_;
  std::unique_ptr<Tamper<IndexKey, Backend>> tamper_;
  std::shared_ptr<kvire::FaultHooks> faults_;
  std::shared_ptr<kvire::CopyHold> hold_;
  std::shared_ptr<kvire::TransferStats> to_host_ = std::make_shared<kvire::TransferStats>();
  std::shared_ptr<kvire::TransferStats> to_device_ = std::make_shared<kvire::TransferStats>();
  kvire::Gate<Backend> gate_;
  Moves loads_, backups_;
  std::vector<HostRef> held_;
  std::vector<DeviceRef> held_device_;
  std::deque<kvire::Ticket<Backend>> under_way_;  // backups
  kvire::Ticket<Backend> loading_;
  kvire::Status failure_;
  std::map<std::string, std::int64_t> kernels_;
  std::int64_t graph_replays_ = 0;
  // Last: streams end before what their work refers to.
  Stream compute_, load_stream_, backup_stream_;
};

}  // namespace engine
