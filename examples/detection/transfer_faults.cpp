// SPDX-License-Identifier: Apache-2.0
#include "faults.hpp"

namespace detection {

namespace {

LayoutConfig fp8_config() { return config_of<Fp8WithScale<64, 128>>(); }
Verdict select(const LayoutConfig& config) {
  return select_layout(config, PolicyList<Fp8WithScale<64, 128>, Bf16Contiguous<64, 128>>{}, []<class>() -> Status { return {}; });
}

/// An engine's own tensor, one layer of four bf16 pages.
Verdict adopt_with(const std::function<void(AdoptOptions&)>& change) {
  using P = Bf16Contiguous<64, 128>;
  std::vector<std::byte> memory(5 * P::page_bytes + 256);
  std::byte* base = memory.data();
  while (reinterpret_cast<std::uintptr_t>(base) % 256 != 0) ++base;
  AdoptOptions options{.bases = {base}, .page_stride = P::page_bytes, .pages = 4, .bytes_per_layer = 4 * P::page_bytes, .name = "theirs"};
  change(options);
  return status_of(adopt<P, Host>(options));
}

std::shared_ptr<FaultHooks> failing_copies(CopyDirection direction) {
  return FaultHooks::make([direction](const CopyInfo& info) { return info.layer == 1 && info.direction == direction ? kvire::Fault::fail("injected") : kvire::Fault::none(); });
}

/// Restores pages under a fault of the copies of layer 1, through a step that reads both layers.
Verdict restored(kvire::Fault fault) {
  auto armed = std::make_shared<std::atomic<bool>>(false);
  auto hooks = FaultHooks::make([armed, fault](const CopyInfo& info) { return *armed && info.layer == 1 ? fault : kvire::Fault::none(); });
  Pools p(hooks);
  if (!p.save().value().wait().ok()) return missed("backup");
  for (const auto& ref : p.device_pages) (void)p.device.entry<Latent>().fill_page(ref.id(), 9);  // used by somebody else since
  *armed = true;
  const Dependency<Host> loads[] = {p.restore().value()};
  return read_layers(p, loads);
}

}  // namespace

std::vector<Fault> transfer_faults() {
  using K = kvire::Fault;
  return {
      {"dropped scale plane: fp8 without scales in the configuration", "selector", ErrorCode::unsupported,
       [] {
         auto c = fp8_config();
         c.scale_format = "none";
         c.scale_block = 0;
         return select(c);
       }},
      {"swapped interleave in the configuration", "selector", ErrorCode::unsupported,
       [] {
         auto c = fp8_config();
         c.placement = "interleaved";
         return select(c);
       }},
      {"half page: 32 tokens where 64 are compiled", "selector", ErrorCode::unsupported,
       [] {
         auto c = fp8_config();
         c.tokens_per_page = 32;
         return select(c);
       }},
      {"unstated field in the configuration", "selector", ErrorCode::invalid_argument,
       [] {
         auto c = fp8_config();
         c.scale_format.clear();
         return select(c);
       }},
      {"wrong shape: their fp8 tensor adopted as bf16", "adoption", ErrorCode::mismatch, [] { return adopt_with([](auto& o) { o.page_stride = Fp8WithScale<64, 128>::page_bytes; }); }},
      {"their tensor is shorter than its pages", "adoption", ErrorCode::mismatch, [] { return adopt_with([](auto& o) { o.bytes_per_layer -= 1; }); }},
      {"their tensor starts off alignment", "adoption", ErrorCode::mismatch, [] { return adopt_with([](auto& o) { o.bases[0] += 2; }); }},
      {"two layers given the same memory", "adoption", ErrorCode::duplicate, [] { return adopt_with([](auto& o) { o.bases.push_back(o.bases[0]); }); }},
      {"their tensor adopted by two pools at a time", "adoption", ErrorCode::busy,
       [] {
         std::optional<DevicePool<Bf16Contiguous<64, 128>, Host>> first;
         return adopt_with([&first](auto& o) {
           first = adopt<Bf16Contiguous<64, 128>, Host>(o).value();
           o.name = "theirs again";
         });
       }},
      {"page id beyond the pool", "transfer", ErrorCode::out_of_range,
       [] {
         Pools p;
         return status_of(backup(p.device, p.host, BundlePlan<Model>(in_space<space::Full>(plan(std::vector{HostPage(1)}, std::vector{DevicePage(4)}))), p.stream));
       }},
      {"more device pages than host pages in a plan", "transfer", ErrorCode::mismatch,
       [] {
         Pools p;
         return status_of(backup(p.device, p.host, BundlePlan<Model>(in_space<space::Full>(plan(std::vector{HostPage(1)}, std::vector{DevicePage(1), DevicePage(2)}))), p.stream));
       }},
      {"two sources for one page", "transfer", ErrorCode::duplicate,
       [] {
         Pools p;
         return status_of(backup(p.device, p.host, BundlePlan<Model>(in_space<space::Full>(plan(std::vector{HostPage(1), HostPage(1)}, std::vector{DevicePage(1), DevicePage(2)}))), p.stream));
       }},
      {"swapped sides: a plan between two device pools that begins with the destination", "transfer", ErrorCode::mismatch,
       [] {
         using Keys = DevicePool<Fp8, Host>;
         auto from = Keys::make({.layers = 1, .pages = 4, .name = "old"}).value();
         auto to = Keys::make({.layers = 1, .pages = 4, .name = "new"}).value();
         auto stream = Stream<Host>::make().value();
         const auto source = from.allocate(2).value();
         const auto destination = to.allocate(2).value();
         return status_of(migrate(from, to, plan(destination, source), stream));
       }},
      {"stale generation: the page was freed and taken again", "transfer", ErrorCode::stale,
       [] {
         Pools p;
         const std::vector<PageKey<DevicePage>> device{p.device_pages[0].key()};
         const std::vector<PageKey<HostPage>> host{p.host_pages[0].key()};
         p.device_pages.clear();
         p.device_pages = p.device.allocate<space::Full>(2).value();
         return status_of(backup(p.device, p.host, BundlePlan<Model>(in_space<space::Full>(plan(host, device))), p.stream));
       }},
      {"a page of a load that failed, backed up by somebody who knows nothing of the load", "transfer", ErrorCode::failed,
       [] {
         Pools p(failing_copies(CopyDirection::host_to_device));
         if (p.restore().value().wait().ok()) return missed("failure");
         return status_of(p.save());
       }},
      {"a page of a backup that failed, loaded from", "transfer", ErrorCode::failed,
       [] {
         Pools p(failing_copies(CopyDirection::device_to_host));
         if (p.save().value().wait().ok()) return missed("failure");
         return status_of(p.restore());
       }},
      {"a page that a step was to write and did not, since a load of the step failed", "transfer", ErrorCode::failed,
       [] {
         Pools p(failing_copies(CopyDirection::host_to_device));
         auto hold = CopyHold::make();
         p.stream.launch([hold, never = std::make_shared<std::atomic<bool>>(false)] { (void)hold->hold(*never); });
         auto own = p.device.allocate<space::Full>(1).value();
         const std::vector<DevicePage> page{own[0].id()};
         const Dependency<Host> loads[] = {p.restore().value()};
         {
           auto step = p.gate.begin(loads, p.compute).value();
           launch(p.compute, [](auto) {}, step.write<Latent>(p.device, LayerId(1), page).value());
         }
         hold->release();
         if (auto status = p.compute.synchronize(); !status.ok()) return missed("compute");
         return status_of(backup(p.device, p.host, BundlePlan<Model>(in_space<space::Full>(plan(std::vector{p.host_pages[0]}, own))), p.stream));
       }},
      {"early reuse: pages freed while a copy still writes them", "pool", ErrorCode::exhausted,
       [] {
         auto hold = CopyHold::make();
         Pools p(FaultHooks::make([hold](const CopyInfo&) { return K::hold(hold); }));
         auto ticket = p.restore();
         if (!ticket.ok()) return missed("load");
         p.device_pages.clear();
         ticket = Error{ErrorCode::failed, "aborted"};  // the ticket goes; the copy does not
         const auto page = p.device.allocate<space::Full>(2);  // 3 in all, 2 of them under the copy
         hold->release();
         return status_of(page);
       }},
      {"double free of a raw page id", "pool", ErrorCode::duplicate,
       [] {
         Pools p;
         auto& ledger = p.device.ledger<space::Full>();
         const DevicePage id = ledger.detach(std::move(p.device_pages[0]));
         if (!ledger.release(id).ok()) return missed("release");
         return ledger.release(id);
       }},
      {"unissued load: a step waits for a transfer that nobody queued", "gate", ErrorCode::timeout,
       [] {
         Pools p;
         auto prepared = prepare_load(p.host, p.device, p.moves()).value();
         return status_of(p.gate.begin({prepared}, p.compute));
       }},
      {"racing store: a kernel writes a page that another request shares", "gate", ErrorCode::busy,
       [] {
         Pools p;
         const auto sharer = p.device_pages[0];
         auto step = p.gate.begin({}, p.compute).value();
         const std::vector<DevicePage> pages{p.device_pages[0].id()};
         return status_of(step.write<Latent>(p.device, LayerId(0), pages));
       }},
      {"racing store: a kernel writes a page of a load that was not issued", "gate", ErrorCode::busy,
       [] {
         Pools p;
         auto prepared = prepare_load(p.host, p.device, p.moves()).value();
         auto step = p.gate.begin({}, p.compute).value();
         const std::vector<DevicePage> pages{p.device_pages[0].id()};
         return status_of(step.write<Latent>(p.device, LayerId(0), pages));
       }},
      {"a page of a load that was dropped, read by a step that does not name the load", "gate", ErrorCode::failed,
       [] {
         Pools p;
         { auto prepared = prepare_load(p.host, p.device, p.moves(), {.name = "restore"}).value(); }
         auto step = p.gate.begin({}, p.compute).value();
         const std::vector<DevicePage> pages{p.device_pages[0].id()};
         return status_of(step.read<Latent>(p.device, LayerId(0), pages));
       }},
      {"a layer that does not keep the entry", "gate", ErrorCode::out_of_range,
       [] {
         Pools p;
         auto step = p.gate.begin({}, p.compute).value();
         return status_of(step.read<Latent>(p.device, LayerId(2)));
       }},
      {"one layer's copy fails", "gate", ErrorCode::failed, [] { return restored(K::fail("injected")); }},
      {"one layer's copy never completes", "gate", ErrorCode::timeout, [] { return restored(K::drop()); }},
  };
}

}  // namespace detection
