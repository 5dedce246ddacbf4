// SPDX-License-Identifier: Apache-2.0
#include "replay_cuda_body.cuh"

template kvire::Result<engine::Replay> engine::replay_on_cuda<kvire::preset::deepseek_v4::IndexKeyFp4>(const ReplaySettings&, const Model&, const std::vector<Request>&,
                                                                                                     const ProgressCall&);
