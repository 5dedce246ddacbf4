// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvire/kernel/cuda_store.cuh>
#include <kvire/kernel/cuda_top_k.cuh>
#include <kvire/kernel/sparse_logits.cuh>
#include <kvire/tier/hot_set.cuh>

#include "cuda_step.cuh"
#include "hot_latents.hpp"
#include "tiers.hpp"

namespace engine {

/// How a forward pass reaches a cache in GPU memory: the leases of one step, behind loads that the copies of other streams land.
template <class IndexKey>
class CudaStepIo {
 public:
  using Backend = kvire::Cuda;
  using Entries = kvire::preset::deepseek_v4::Flash<IndexKey>;
  using Device = typename Tiers<IndexKey, kvire::Cuda>::Device;
  template <class Entry>
  using ReadLease = kvire::ReadLease<typename Entry::policy, kvire::Cuda>;
  template <class Entry>
  using WriteLease = kvire::WriteLease<typename Entry::policy, kvire::Cuda>;

  /// What the kernels of a step count, on the device.
  struct Counts {
    kvire::StoreCounts stored;
    kvire::HotCounts hot;
  };

  /// What stays from step to step.
  struct Shared {
    std::unique_ptr<gpu::DeviceModel> model;
    HotLatents<IndexKey, kvire::Cuda> hot;
    kvire::HotCounts& hot_counts() { return hot.hot_counts(); }
    gpu::CudaBuffer staging{true};  ///< inputs, logits and counts on the host
    gpu::CudaBuffer inputs, activations, counts;
    /// The pass of one token of each of a few sessions, captured once; its memory is its own, since the graph holds the addresses.
    ///
    /// The graph waits in front of each layer for that layer's event. Before a replay the events are recorded on a stream of their own, each
    /// behind the loads of its layer; after it that stream waits for the replay, so the next one's events come behind it.
    struct Captured {
      gpu::CudaBuffer staging{true};
      gpu::CudaBuffer inputs, activations;
      std::optional<kvire::Stream<kvire::Cuda>> gates;
      std::vector<cudaEvent_t> layers;
      cudaEvent_t replayed = nullptr;
      cudaGraphExec_t graph = nullptr;
      std::map<std::string, std::int64_t> kernels;  ///< that one replay runs

      ~Captured() {
        if (graph != nullptr) (void)cudaGraphExecDestroy(graph);
        for (cudaEvent_t event : layers) (void)cudaEventDestroy(event);
        if (replayed != nullptr) (void)cudaEventDestroy(replayed);
      }
    } captured;
  };

  CudaStepIo(Tiers<IndexKey, kvire::Cuda>& tiers, kvire::Step<kvire::Cuda> step, const Batch& batch, const ReplaySettings& settings, int index_heads, Shared& shared)
      : shared(shared), settings(settings), index_heads(index_heads), tiers_(&tiers), step_(std::move(step)) {
    for (const Span& s : batch.spans) {
      for (std::int64_t b = s.start / page_raw_tokens; b * page_raw_tokens < s.end(); ++b) {
        full_.push_back(kvire::DevicePage(s.tables.full[static_cast<std::size_t>(b)]));
        window_.push_back(kvire::DevicePage(s.tables.window[static_cast<std::size_t>(b)]));
      }
      request_.push_back(kvire::DevicePage(s.tables.request_row));
    }
    keep(shared.counts.at_least(sizeof(Counts), "memory for counts"));
    if (status_.ok()) check(cudaMemsetAsync(shared.counts.data(), 0, sizeof(Counts), native()), "clearing counts");
    if (status_.ok()) keep(shared.hot.open(*tiers_, settings));
    if (status_.ok()) keep(shared.hot.begin(batch, stream()));
  }

  Shared& shared;
  const ReplaySettings& settings;
  const int index_heads;

  const kvire::Status& status() const { return status_; }
  bool ok() const { return status_.ok(); }
  kvire::Stream<kvire::Cuda>& stream() { return step_.stream(); }
  cudaStream_t native() { return step_.stream().native(); }
  const kvire::Step<kvire::Cuda>& step() const { return step_; }
  kvire::StoreCounts* counts() { return &reinterpret_cast<Counts*>(shared.counts.data())->stored; }
  kvire::HotCounts* hot_counts() { return &reinterpret_cast<Counts*>(shared.counts.data())->hot; }
  std::map<std::string, std::int64_t>& kernels() { return tiers_->kernels(); }
  void count_graph_replay() { tiers_->count_graph_replay(); }

  /// The step's rows that stores must have written by its end.
  void expect_stored(std::int64_t rows) { expected_ += rows; }

  template <class T>
  void keep(const T& result) {
    if (!result.ok() && status_.ok()) status_ = result.error();
  }
  void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) keep(kvire::Status(step_.stream().error(error, what)));
  }

  /// Permission to read a layer of an entry: kernels with it run behind the loads of that layer that the step depends on.
  template <class Entry>
  ReadLease<Entry> read(kvire::LayerId layer) {
    auto lease = step_.template read<Entry>(tiers_->device(), layer);
    keep(lease);
    return lease.ok() ? std::move(lease).value() : kvire::assume_ready(kvire::ConstPageView<typename Entry::policy, kvire::Cuda>());
  }
  /// Permission to write the step's own pages.
  template <class Entry>
  WriteLease<Entry> write(kvire::LayerId layer) {
    auto lease = step_.template write<Entry>(tiers_->device(), layer, std::span<const kvire::DevicePage>(pages<Entry>()));
    keep(lease);
    return lease.ok() ? std::move(lease).value() : kvire::assume_ready(kvire::PageView<typename Entry::policy, kvire::Cuda>());
  }
  /// The leases of everything that a replayed graph touches are of a step on the stream that opens its gates.
  kvire::Result<kvire::Step<kvire::Cuda>> begin_beside(kvire::Stream<kvire::Cuda>& stream) { return tiers_->begin_beside(stream); }
  template <class Entry, class F>
  void with_leases(kvire::Step<kvire::Cuda>& step, kvire::LayerId layer, F&& f) {
    auto read = step.template read<Entry>(tiers_->device(), layer);
    keep(read);
    if (read.ok()) f(std::move(read).value());
    auto write = step.template write<Entry>(tiers_->device(), layer, std::span<const kvire::DevicePage>(pages<Entry>()));
    keep(write);
    if (write.ok()) f(std::move(write).value());
  }
  /// The pages of a layer for a graph that is captured.
  template <class Entry>
  kvire::PageView<typename Entry::policy, kvire::Cuda> captured_view(kvire::LayerId layer) {
    return tiers_->template raw_device<Entry>(Entry::slot(layer));
  }

  /// Waits for the step. Errors: the first refused lease or kernel, a load that failed, the stream's.
  kvire::Status finish() {
    Counts counted;
    if (ok()) check(cudaMemcpyAsync(&counted, counts(), sizeof counted, cudaMemcpyDeviceToHost, native()), "reading counts");
    keep(step_.stream().synchronize());
    keep(step_.status());
    keep(tiers_->finish_step());
    if (ok() && counted.stored.stored != expected_) {
      keep(kvire::Status(kvire::Error{kvire::ErrorCode::failed, std::to_string(counted.stored.stored) + " rows were stored, " + std::to_string(expected_) +
                                                                    " should have been: a slot is not one of the step's pages"}));
    }
    if (const std::int64_t lost = counted.hot.bad_positions + counted.hot.bad_pages + counted.hot.bad_rows; ok() && lost > 0) {
      keep(kvire::Status(kvire::Error{kvire::ErrorCode::failed, std::to_string(lost) + " of the latents that decoding sessions selected were not to be had by the hot set"}));
    }
    shared.hot_counts() += counted.hot;
    return status_;
  }

 private:
  // Of the entry's space, that the step writes.
  template <class Entry>
  const std::vector<kvire::DevicePage>& pages() const {
    using Space = typename Entry::space;
    return std::is_same_v<Space, kvire::space::Full> ? full_ : std::is_same_v<Space, kvire::space::Window> ? window_ : request_;
  }

  Tiers<IndexKey, kvire::Cuda>* tiers_;
  kvire::Step<kvire::Cuda> step_;
  kvire::Status status_;
  std::vector<kvire::DevicePage> full_, window_, request_;  // pages that the step writes
  std::int64_t expected_ = 0;
};

}  // namespace engine
