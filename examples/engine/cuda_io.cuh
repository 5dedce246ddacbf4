// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <kvire/kernel/cuda_store.cuh>
#include <kvire/kernel/cuda_top_k.cuh>
#include <kvire/kernel/sparse_logits.cuh>

#include "batch.hpp"
#include "queries.hpp"
#include "tiers.hpp"

namespace engine {

/// Memory of the device or pinned memory of the host, kept and grown from step to step.
class CudaBuffer {
 public:
  explicit CudaBuffer(bool pinned) : pinned_(pinned) {}
  CudaBuffer(const CudaBuffer&) = delete;
  CudaBuffer& operator=(const CudaBuffer&) = delete;
  ~CudaBuffer() { (void)(pinned_ ? cudaFreeHost(memory_) : cudaFree(memory_)); }

  /// At least so many bytes; what was there is lost when it grows. Null if there is no memory.
  void* at_least(std::size_t bytes) {
    if (bytes > bytes_ || memory_ == nullptr) {
      (void)(pinned_ ? cudaFreeHost(memory_) : cudaFree(memory_));
      bytes_ = bytes + bytes / 2 + 256;
      const cudaError_t e = pinned_ ? cudaMallocHost(&memory_, bytes_) : cudaMalloc(&memory_, bytes_);
      if (e != cudaSuccess) memory_ = nullptr;
    }
    return memory_;
  }

 private:
  bool pinned_;
  void* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

/// How a forward pass reaches a cache in GPU memory. Store, logits and top-k are kvire's CUDA kernels under the step's leases, behind loads that
/// the copies of other streams land; the rest of the model computes on the host, on rows copied back under read leases. So everything that
/// touches the cache runs on the GPU, and the model's own arithmetic has the bits of the host engine.
template <class IndexKey>
class CudaStepIo {
 public:
  using Backend = kvire::Cuda;
  using Entries = kvire::preset::deepseek_v4::Flash<IndexKey>;

  CudaStepIo(Tiers<IndexKey, kvire::Cuda>& tiers, kvire::Step<kvire::Cuda> step, const Batch& batch, int top_k, int index_heads, kvire::KernelChoice kernel)
      : tiers_(&tiers), step_(std::move(step)), top_k_(top_k), index_heads_(index_heads), kernel_(kernel) {
    for (const Span& s : batch.spans) {
      for (std::int64_t b = s.start / page_raw_tokens; b * page_raw_tokens < s.end(); ++b) {
        full_.push_back(kvire::DevicePage(s.tables.full[static_cast<std::size_t>(b)]));
        window_.push_back(kvire::DevicePage(s.tables.window[static_cast<std::size_t>(b)]));
      }
      request_.push_back(kvire::DevicePage(s.tables.request_row));
    }
    counts_ = device<kvire::StoreCounts>("counts", 1);
    if (status_.ok()) check(cudaMemsetAsync(counts_, 0, sizeof *counts_, native()), "clearing counts");
  }

  /// A row of an entry, decoded from a copy of the entry's pages.
  template <class P>
  struct Reader {
    const std::byte* pages = nullptr;
    void row(std::int64_t slot, float* out) const {
      kvire::decode_row<P>(pages + slot / P::tokens_per_page * P::page_bytes, static_cast<int>(slot % P::tokens_per_page), out);
    }
  };

  template <class Entry>
  auto read(kvire::LayerId layer) {
    using Lease = kvire::ReadLease<typename Entry::policy, kvire::Cuda>;
    auto lease = step_.template read<Entry>(tiers_->device(), layer);
    keep(lease);
    return lease.ok() ? std::move(lease).value() : Lease();
  }

  template <class F, class... Leases>
  void run(F&& f, const Leases&... leases) {
    if (!status_.ok()) return;
    if constexpr (sizeof...(Leases) == 0) {
      f();
    } else {
      std::tuple<Reader<typename Leases::policy>...> readers;
      int n = 0;
      keep(kvire::launch(
          step_.stream(),
          [&](cudaStream_t, const auto&... views) { readers = std::tuple<Reader<typename Leases::policy>...>{copy_back(n++, views)...}; }, leases...));
      keep(step_.stream().synchronize());
      keep(step_.status());
      if (status_.ok()) std::apply(f, readers);
    }
  }

  template <class Entry>
  void store(kvire::LayerId layer, const float* rows, const std::vector<std::int64_t>& slots, const KeyPrologue& prologue = {}) {
    using P = typename Entry::policy;
    if (!status_.ok() || slots.empty()) return;
    constexpr bool compressed_latent = std::is_same_v<Entry, typename Entries::C4Latent> || std::is_same_v<Entry, typename Entries::C128Latent>;
    using Space = typename Entry::space;
    const auto& pages = std::is_same_v<Space, kvire::space::Full> ? full_ : std::is_same_v<Space, kvire::space::Window> ? window_ : request_;
    auto lease = step_.template write<Entry>(tiers_->device(), layer, std::span<const kvire::DevicePage>(pages));
    if (!lease.ok()) return keep(lease);
    expected_ += std::count_if(slots.begin(), slots.end(), [](std::int64_t slot) { return slot >= 0; });
    kvire::StoreOptions options;
    options.row.bf16_round_trip = compressed_latent;
    options.counts = counts_;
    if (prologue.gain != nullptr) {
      // Row i takes row i of tables that hold this call's positions alone.
      constexpr std::size_t half = rope_dim / 2;
      std::vector<float> cos;
      std::vector<float> sin;
      for (const std::int64_t position : prologue.positions) {
        const auto at = static_cast<std::ptrdiff_t>(position) * static_cast<std::ptrdiff_t>(half);
        cos.insert(cos.end(), prologue.model->cos.begin() + at, prologue.model->cos.begin() + at + static_cast<std::ptrdiff_t>(half));
        sin.insert(sin.end(), prologue.model->sin.begin() + at, prologue.model->sin.begin() + at + static_cast<std::ptrdiff_t>(half));
      }
      options.prologue.norm = true;
      options.prologue.weight = upload("gain", prologue.gain, static_cast<std::size_t>(P::dim));
      options.prologue.rope_dims = rope_dim;
      options.prologue.cos = upload("cos", cos.data(), cos.size());
      options.prologue.sin = upload("sin", sin.data(), sin.size());
      options.prologue.table_rows = static_cast<std::int64_t>(prologue.positions.size());
      options.prologue.hadamard = true;
    }
    const float* device_rows = upload("rows", rows, slots.size() * static_cast<std::size_t>(P::dim));
    const std::int64_t* device_slots = upload("slots", slots.data(), slots.size());
    if (status_.ok()) keep(kvire::store<P>(kvire::Rows(device_rows, static_cast<std::int64_t>(slots.size())), device_slots, lease.value(), step_.stream(), options));
  }

  /// Every row of the step is a row of one call, so that one kernel serves prefill and decode.
  void select(kvire::LayerId layer, const float* q, const float* weights, const Batch& batch, std::int32_t* selected) {
    const auto keys = read<typename Entries::IndexK>(layer);
    if (!status_.ok()) return;
    const auto rows = static_cast<std::int64_t>(batch.tokens.size());
    const std::size_t heads_in_all = batch.tokens.size() * static_cast<std::size_t>(index_heads_);
    EncodedQueries<IndexKey> encoded(heads_in_all);
    kvire::parallel_for(static_cast<std::int64_t>(heads_in_all), 64, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) encoded.set(static_cast<std::size_t>(i), q + i * index_dim, weights[i]);
    });
    std::int64_t pages = 1;
    std::int64_t stride = 1;
    for (const Span& s : batch.spans) pages = std::max(pages, static_cast<std::int64_t>(s.tables.full.size()));
    std::vector<std::int32_t> table;
    std::vector<std::int32_t> lengths;
    for (const Span& s : batch.spans) {
      for (int r = 0; r < s.rows; ++r) {
        table.insert(table.end(), s.tables.full.begin(), s.tables.full.end());
        table.resize(table.size() + static_cast<std::size_t>(pages) - s.tables.full.size(), -1);
      }
    }
    for (const std::int64_t position : batch.positions) {
      lengths.push_back(static_cast<std::int32_t>(Entries::IndexK::cached(kvire::RawTokens(position + 1)).count));
      stride = std::max<std::int64_t>(stride, lengths.back());
    }
    const kvire::Queries queries{upload("queries", encoded.codes.data(), encoded.codes.size()), encoded.element, rows, 1, index_heads_, index_dim};
    const kvire::Tensor<const float, 3> head_weights{upload("weights", encoded.weights.data(), heads_in_all), {rows, 1, index_heads_}};
    const kvire::Tensor<const std::int32_t, 2> page_table{upload("table", table.data(), table.size()), {rows, pages}};
    const kvire::Tensor<const std::int32_t, 2> row_lengths{upload("lengths", lengths.data(), lengths.size()), {rows, 1}};
    const kvire::Tensor<float, 3> scores{device<float>("scores", static_cast<std::size_t>(rows * stride)), {rows, 1, stride}};
    const kvire::Tensor<std::int32_t, 3> out{device<std::int32_t>("selected", static_cast<std::size_t>(rows * top_k_)), {rows, 1, top_k_}};
    if (!status_.ok()) return;
    kvire::KernelServed served;
    keep(kvire::sparse_logits<IndexKey, kvire::TunedLogits<64, 1>>(queries, head_weights, keys, page_table, row_lengths, scores, step_.stream(),
                                                                   {.kernel = kernel_, .served = &served}));
    if (status_.ok()) ++tiers_->kernels()[served.name];
    keep(kvire::top_k(scores, row_lengths, out, step_.stream(), {.kernel = kernel_, .served = &served}));
    if (!status_.ok()) return;
    ++tiers_->kernels()[served.name];
    check(cudaMemcpyAsync(selected, out.data, static_cast<std::size_t>(rows * top_k_) * sizeof(std::int32_t), cudaMemcpyDeviceToHost, native()), "reading the selection");
    keep(step_.stream().synchronize());
  }

  /// Waits for the step. Errors: the first refused lease or kernel, a load that failed, the stream's.
  kvire::Status finish() {
    kvire::StoreCounts counts;
    if (status_.ok()) check(cudaMemcpyAsync(&counts, counts_, sizeof counts, cudaMemcpyDeviceToHost, native()), "reading counts");
    keep(step_.stream().synchronize());
    keep(step_.status());
    keep(tiers_->finish_step());
    if (status_.ok() && counts.stored != expected_) {
      keep(kvire::Status(kvire::Error{kvire::ErrorCode::failed, std::to_string(counts.stored) + " rows were stored, " + std::to_string(expected_) +
                                                                    " should have been: a slot is not one of the step's pages"}));
    }
    return status_;
  }

 private:
  template <class T>
  void keep(const T& result) {
    if (!result.ok() && status_.ok()) status_ = result.error();
  }
  void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess) keep(kvire::Status(step_.stream().error(error, what)));
  }
  cudaStream_t native() { return step_.stream().native(); }

  static CudaBuffer& buffer(const std::string& name, bool pinned) {
    static std::map<std::string, std::unique_ptr<CudaBuffer>> all;
    auto& one = all[name];
    if (!one) one = std::make_unique<CudaBuffer>(pinned);
    return *one;
  }
  // A named buffer of the device. Work that reads its earlier contents has been queued on the same stream; when it must grow, it is waited for.
  template <class T>
  T* device(const char* name, std::size_t n) {
    auto* memory = static_cast<T*>(buffer(name, false).at_least(n * sizeof(T)));
    if (memory == nullptr) keep(kvire::Status(kvire::Error{kvire::ErrorCode::exhausted, std::to_string(n * sizeof(T)) + " bytes of device memory for " + name}));
    return memory;
  }
  template <class T>
  T* upload(const char* name, const T* from, std::size_t n) {
    T* memory = device<T>(name, n);
    if (memory != nullptr) check(cudaMemcpyAsync(memory, from, n * sizeof(T), cudaMemcpyHostToDevice, native()), "an upload");
    return memory;
  }

  template <class P>
  Reader<P> copy_back(int n, const kvire::ConstPageView<P, kvire::Cuda>& view) {
    const auto bytes = static_cast<std::size_t>(view.pages) * static_cast<std::size_t>(P::page_bytes);
    auto* memory = static_cast<std::byte*>(buffer("read " + std::to_string(n), true).at_least(bytes));
    if (memory == nullptr) {
      keep(kvire::Status(kvire::Error{kvire::ErrorCode::exhausted, std::to_string(bytes) + " bytes of pinned memory"}));
      return {};
    }
    check(cudaMemcpy2DAsync(memory, static_cast<std::size_t>(P::page_bytes), view.base, static_cast<std::size_t>(view.page_stride), static_cast<std::size_t>(P::page_bytes),
                            static_cast<std::size_t>(view.pages), cudaMemcpyDeviceToHost, native()),
          "reading pages back");
    return {memory};
  }

  Tiers<IndexKey, kvire::Cuda>* tiers_;
  kvire::Step<kvire::Cuda> step_;
  int top_k_;
  int index_heads_;
  kvire::KernelChoice kernel_;
  kvire::Status status_;
  std::vector<kvire::DevicePage> full_, window_, request_;  // pages that the step writes
  kvire::StoreCounts* counts_ = nullptr;
  std::int64_t expected_ = 0;
};

}  // namespace engine
