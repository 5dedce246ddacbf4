// SPDX-License-Identifier: Apache-2.0
#pragma once

// The body of replay_on_cuda(); included by the translation units that instantiate it.

#include <kvire/transfer/transfer.cuh>

#include "cuda_forward.cuh"
#include "replay.hpp"
#include "scheduler.hpp"

namespace engine {

template <class IndexKey>
kvire::Result<Replay> replay_on_cuda(const ReplaySettings& settings, const Model& model, const std::vector<Request>& requests, const ProgressCall& progress) {
  if (settings.damage != Damage::none) return kvire::Error{kvire::ErrorCode::unsupported, "damages are injected on the host backend only"};
  auto tiers = Tiers<IndexKey, kvire::Cuda>::make(settings);
  if (!tiers) return tiers.error();
  return Scheduler<IndexKey, CudaStepIo<IndexKey>>(model, *tiers.value(), requests, settings).run(progress);
}

}  // namespace engine
