// SPDX-License-Identifier: Apache-2.0
#pragma once

// The body of replay_on_cuda(); included by the translation units that instantiate it.

#include <kvire/transfer/transfer.cuh>

#include "cache.hpp"
#include "cuda_forward.cuh"
#include "replay.hpp"
#include "scheduler.hpp"

namespace engine {

template <class IndexKey>
kvire::Result<Replay> replay_on_cuda(const ReplaySettings& settings, const Model& model, const std::vector<Request>& requests, const ProgressCall& progress) {
  if (settings.damage != Damage::none) return kvire::Error{kvire::ErrorCode::unsupported, "damages are injected on the host backend only"};
  using GpuCache = Cache<IndexKey, CudaStepIo<IndexKey>>;
  auto cache = GpuCache::make(settings, model.index_heads);
  if (!cache) return cache.error();
  return Scheduler<GpuCache>(model, *cache.value(), requests, settings).run(progress);
}

}  // namespace engine
