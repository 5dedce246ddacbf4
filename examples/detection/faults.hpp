// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdlib.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <kvire/kvire.hpp>
#include <kvire/layout/selector.hpp>
#include <kvire/tier/block_io_faults.hpp>
#include <kvire/tier/file_tier.hpp>
#include <kvire/tier/prefix_namespace.hpp>

// Faults of a running engine, each injected into fresh pools, streams and folders of the host backend.

namespace detection {

using namespace kvire;
using namespace std::chrono_literals;

struct Schedule {
  static constexpr int layers = 2;
};
struct Latent : CacheEntry<Bf16Contiguous<16, 32>, space::Full, Tokens<1>> {
  static constexpr const char* name = "latent";
};
template <class P>
struct IndexK : CacheEntry<P, space::Full, Tokens<4>> {
  static constexpr const char* name = "index_k";
};
using Fp8 = Fp8WithScale<4, 32>;
template <class P>
using ModelOf = CacheBundle<Schedule, Latent, IndexK<P>>;
using Model = ModelOf<Fp8>;
using WithoutIndex = CacheBundle<Schedule, Latent>;

/// What was refused, in words; success: nobody noticed.
using Verdict = Status;

struct Fault {
  const char* name;
  const char* check;  ///< which one is meant to notice
  ErrorCode code;     ///< how it says so: any other error is not its doing
  std::function<Verdict()> inject;
};

/// Device and host pools with a page on each side, filled.
struct Pools {
  explicit Pools(std::shared_ptr<FaultHooks> hooks = {}) : stream(Stream<Host>::make({.name = "copies", .faults = std::move(hooks), .wait_limit = 300ms}).value()) {
    for (const auto& ref : device_pages) {
      (void)device.entry<Latent>().fill_page(ref.id(), 1);
      (void)device.entry<IndexK<Fp8>>().fill_page(ref.id(), 2);
    }
  }
  BundlePlan<Model> moves() const { return BundlePlan<Model>(in_space<space::Full>(plan(host_pages, device_pages))); }
  Result<Ticket<Host>> save() { return backup(device, host, moves(), stream, {.name = "save"}); }
  Result<Ticket<Host>> restore() { return load(host, device, moves(), stream, {.name = "restore"}); }

  DeviceBundlePool<Model, Host> device = DeviceBundlePool<Model, Host>::make({.pages = {{4}}, .name = "gpu"}).value();
  HostBundlePool<Model, Host> host = mirror_of(device, {{4}}).value();
  std::vector<PageRef<DevicePage>> device_pages = device.allocate<space::Full>(2).value();
  std::vector<PageRef<HostPage>> host_pages = host.allocate<space::Full>(2).value();
  Gate<Host> gate{{.issue_limit = 100ms, .load_limit = 300ms}};
  Stream<Host> compute = Stream<Host>::make({.name = "compute", .wait_limit = 300ms}).value();
  Stream<Host> stream;
};

inline Verdict status_of(const auto& result) { return result.ok() ? Status() : Status(result.error()); }
inline Verdict missed(const char* what) { return Error{ErrorCode::failed, std::string("(set-up) ") + what}; }

/// A step that depends on `loads` and reads the latents of both layers: how it ended.
inline Verdict read_layers(Pools& p, std::span<const Dependency<Host>> loads) {
  auto step = p.gate.begin(loads, p.compute);
  if (!step.ok()) return step.error();
  for (int layer = 0; layer < 2; ++layer) {
    auto lease = step.value().read<Latent>(p.device, LayerId(layer));
    if (!lease.ok()) return lease.error();
    launch(p.compute, [](auto) {}, lease.value());
  }
  if (auto status = p.compute.synchronize(); !status.ok()) return status;
  return step.value().status();
}

/// A folder with one record of a page of `Bundle`.
template <class Bundle>
struct Stored {
  using Tier = FileTier<Bundle, Host, Xxh64, FaultyIo<>>;
  explicit Stored(std::string at = {}) : folder(std::move(at)) {
    if (folder.empty()) {
      char name[] = "/tmp/kvire_detection_XXXXXX";
      folder = mkdtemp(name);
      made = true;
    }
    open();
  }
  ~Stored() {
    tier.reset();
    if (made) (void)std::system(("rm -r '" + folder + "'").c_str());
  }
  void open() {
    tier.reset();
    tier.emplace(Tier::make({.folder = folder, .budget = Bytes(1 << 20), .workers = 1, .durable = false, .io = io}).value());
  }
  static RecordKey key(std::int32_t rank = 0) {
    const PrefixNamespace space{.model = "demo", .layout = bundle_fingerprint128<Bundle>, .rank = rank, .ranks = 2};
    return {.space = space.text(), .prefix = {7, 7}, .first_token = 0, .token_count = 16};
  }
  Status put(const RecordKey& k) { return tier->store(k, pool, {{pages}}).wait(); }
  Status get(const RecordKey& k) { return tier->load(k, pool, {{pages}}).wait(); }
  /// The file of the only record.
  std::string file() const {
    for (const auto& info : PosixIo().list(folder).value()) {
      if (parse_record_file_name(info.name)) return folder + "/" + info.name;
    }
    return {};
  }
  /// Rewrites it.
  void damage(const std::function<void(std::vector<std::byte>&)>& change) {
    std::vector<std::byte> bytes(1 << 20);
    FileRead read[1] = {{.path = file(), .data = bytes.data(), .bytes = 1 << 20}};
    PosixIo().read(read);
    bytes.resize(static_cast<std::size_t>(read[0].moved));
    change(bytes);
    (void)PosixIo().remove(read[0].path);
    FileWrite write[1] = {{.path = read[0].path, .data = bytes.data(), .bytes = static_cast<std::int64_t>(bytes.size()), .durable = false}};
    PosixIo().write(write);
  }

  std::string folder;
  bool made = false;
  FaultyIo<> io;
  HostBundlePool<Bundle, Host> pool = HostBundlePool<Bundle, Host>::make({.pages = {{4}}, .name = "host"}).value();
  std::vector<PageRef<HostPage>> pages = pool.template allocate<space::Full>(1).value();
  std::optional<Tier> tier;
};

/// Stores a record, damages its file, loads it.
inline Verdict damaged(const std::function<void(std::vector<std::byte>&)>& change) {
  Stored<Model> s;
  if (!s.put(s.key()).ok()) return missed("store");
  s.damage(change);
  return s.get(s.key());
}

std::vector<Fault> transfer_faults();
std::vector<Fault> tier_faults();
std::vector<Fault> file_faults();

}  // namespace detection
