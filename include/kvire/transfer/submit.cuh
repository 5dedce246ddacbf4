// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvire/transfer/transfer.cuh>

KVIRE_NAMESPACE_BEGIN

/// Page ids in memory of the device, in step. They may be written by kernels queued earlier on the same stream.
struct DevicePageIds {
  const std::int32_t* host = nullptr;
  const std::int32_t* device = nullptr;
};

/// A way between pages of two pools for ids that only the device knows: which of the pages move is read by the kernel when it runs. Made once,
/// submitted often; submitting queues one launch a 48 layers, allocates nothing and waits for nothing, and works on a capturing stream too.
///
/// It owns the pages named to `make` as long as it lives: they cannot be handed out, and other transfers of them are refused as busy. After it
/// has gone they drain behind the last submission. Ids outside of both pools are skipped and counted in every build, -1 on either side and the null page as
/// a destination are skipped; that an id is one of the owned pages is the caller's to know. Not for several threads at once.
template <class P>
class PageMover {
 public:
  /// `blocks`: multiprocessors, 0: what the link needs. Errors: as for load.
  static Result<PageMover> make(HostPool<P, Cuda>& host, DevicePool<P, Cuda>& device, std::span<const PageRef<HostPage>> host_pages,
                                std::span<const PageRef<DevicePage>> device_pages, CopyDirection direction, Stream<Cuda>& stream, int blocks = 0) {
    const bool to_device = direction == CopyDirection::host_to_device;
    if (host.layers() != device.layers()) {
      return Error{ErrorCode::mismatch, "pools " + host.name() + " and " + device.name() + ": " + std::to_string(host.layers()) + " layers against " +
                                            std::to_string(device.layers())};
    }
    PageMover mover;
    mover.state_ = std::make_unique<State>();
    State& state = *mover.state_;
    state.to_device = to_device;
    state.shape = detail::CopyShape::of(Pace::full, !to_device, P::page_bytes);
    if (blocks > 0) state.shape.blocks = blocks;
    state.device = stream.device();
    const CopyInfo info{.entry = device.name().c_str(), .direction = direction};
    for (int layer = 0; layer < host.layers(); ++layer) {
      const auto h = pool_access::view(host, EntrySlot(layer));
      const auto d = pool_access::view(device, EntrySlot(layer));
      detail::CopyRequest request;
      request.list = to_device ? detail::PageList{d.base, h.base, d.page_stride, h.page_stride, d.pages, h.pages, P::page_bytes}
                               : detail::PageList{h.base, d.base, h.page_stride, d.page_stride, h.pages, d.pages, P::page_bytes};
      if (Status status = detail::on_device(request.list, info, stream.device(), "submit"); !status.ok()) return status.error();
      state.layers.push_back(request);
    }
    state.done = Event<Cuda>::make("submit");
    auto counter = detail::Scratch::make(sizeof(int));
    if (!counter.ok()) return counter.error();
    state.counter = std::move(counter).value();
    state.counter.busy_until(state.done);
    *reinterpret_cast<int*>(state.counter.host()) = 0;
    if (Status status = hold(host.ledger(), host_pages, to_device ? PageUse::backup : PageUse::load, state); !status.ok()) return status.error();
    if (Status status = hold(device.ledger(), device_pages, to_device ? PageUse::load : PageUse::backup, state); !status.ok()) return status.error();
    return Result<PageMover>(std::move(mover));
  }

  PageMover(PageMover&&) noexcept = default;
  PageMover& operator=(PageMover&&) noexcept = default;

  /// Queues the copy of `n` pairs in all layers. Errors of the launch; mismatch for a stream of another device.
  Status submit(DevicePageIds ids, std::int64_t n, Stream<Cuda>& stream) {
    State& state = *state_;
    if (stream.device() != state.device) return Error{ErrorCode::mismatch, "submit: the pools belong to device " + std::to_string(state.device)};
    state.used(stream);
    for (auto& layer : state.layers) {
      layer.ids = state.to_device ? detail::UploadedPages{ids.host, ids.device} : detail::UploadedPages{ids.device, ids.host};
      layer.pages = n;
    }
    if (n == 0) return {};
    return detail::launch_pages(stream, state.layers, !state.to_device, state.shape, reinterpret_cast<int*>(state.counter.device()));
  }

  /// Pairs skipped because an id was beyond its pool, each once a layer: complete when what was submitted has run.
  int bad_ids() const { return *reinterpret_cast<const volatile int*>(state_->counter.host()); }

 private:
  struct State {
    std::vector<detail::CopyRequest> layers;
    detail::CopyShape shape;
    bool to_device = true;
    int device = 0;
    detail::Scratch counter;  // in pinned memory, counted up by kernels
    Event<Cuda> done;
    std::vector<Stream<Cuda>> streams;
    std::vector<std::shared_ptr<void>> holds;

    void used(Stream<Cuda>& stream) {
      for (const auto& known : streams) {
        if (known.identity() == stream.identity()) return;
      }
      streams.push_back(stream.share());
    }
    ~State() {
      Status status;
      if (!streams.empty()) (void)(status = Stream<Cuda>::record_all(done, streams));
      if (streams.empty() || !status.ok()) (void)done.complete(status.ok() || status.error().code == ErrorCode::unsupported ? Status() : status);
    }
  };
  PageMover() = default;

  template <class PageId>
  static Status hold(PageLedger<PageId, Cuda>& ledger, std::span<const PageRef<PageId>> refs, PageUse use, State& state) {
    std::vector<PageId> ids;
    for (const auto& ref : refs) {
      if (ref.ledger() != ledger.identity()) {
        return Error{ErrorCode::mismatch, "pool " + ledger.name() + ": " + PageId::tag::name + " " + std::to_string(ref.id().value) + " to submit is " +
                                              (ref ? "a page of another pool" : "an empty reference")};
      }
      ids.push_back(ref.id());
    }
    auto hold = ledger.hold(ids, use, state.done);
    if (!hold.ok()) return hold.error();
    if (!writes(use)) {
      auto failed = ledger.failed_writes(hold.value().pages());
      if (!failed.empty()) return std::move(failed.front().error);
    }
    state.holds.push_back(std::make_shared<PageHold<PageId, Cuda>>(std::move(hold).value()));
    return {};
  }

  std::unique_ptr<State> state_;
};

KVIRE_NAMESPACE_END
