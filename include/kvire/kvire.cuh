// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Everything of the CUDA backend, for nvcc: pools in GPU memory, pinned host pools, transfers, gates and kernels. Files that hold pools, tickets and
/// gates but launch nothing can do with the headers under cuda/.

#include <kvire/exec/cuda/stream.hpp>
#include <kvire/kernel/copy_pages.cuh>
#include <kvire/kernel/cuda_store.cuh>
#include <kvire/kernel/cuda_top_k.cuh>
#include <kvire/kernel/gather.cuh>
#include <kvire/kernel/move_tokens.cuh>
#include <kvire/kernel/prefill_logits.cuh>
#include <kvire/kernel/selection.cuh>
#include <kvire/kernel/sparse_logits.cuh>
#include <kvire/kvire.hpp>
#include <kvire/memory/cuda/device.hpp>
#include <kvire/memory/cuda/l2.hpp>
#include <kvire/memory/cuda/pinned.hpp>
#include <kvire/pool/cuda/memory.hpp>
#include <kvire/pool/cuda/verify.hpp>
#include <kvire/sync/cuda/lease.hpp>
#include <kvire/transfer/submit.cuh>
#include <kvire/transfer/transfer.cuh>
