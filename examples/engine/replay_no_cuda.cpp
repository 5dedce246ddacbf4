// SPDX-License-Identifier: Apache-2.0
#include "replay.hpp"

// In the place of replay_cuda_*.cu where there is no CUDA compiler.

namespace engine {

template <class IndexKey>
kvire::Result<Replay> replay_on_cuda(const ReplaySettings&, const Model&, const std::vector<Request>&, const ProgressCall&) {
  return kvire::Error{kvire::ErrorCode::unsupported, "this engine was built without CUDA"};
}

#define ENGINE_WITHOUT_CUDA(IndexKey)                                                                                                 \
  template kvire::Result<Replay> replay_on_cuda<kvire::preset::deepseek_v4::IndexKey>(const ReplaySettings&, const Model&,             \
                                                                                      const std::vector<Request>&, const ProgressCall&);
ENGINE_WITHOUT_CUDA(IndexKeyFp8)
ENGINE_WITHOUT_CUDA(IndexKeyBf16)
ENGINE_WITHOUT_CUDA(IndexKeyFp4)
#undef ENGINE_WITHOUT_CUDA

}  // namespace engine
