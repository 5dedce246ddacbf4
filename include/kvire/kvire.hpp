// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Everything that a bare host compiler builds, except tiers and transports: layouts and presets, codecs, memory, pools, steps, kernels on
/// the host backend, transfers.

#include <kvire/layout.hpp>
#include <kvire/layout/selector.hpp>

#include <kvire/codec/error_bound.hpp>
#include <kvire/codec/row.hpp>

#include <kvire/exec/host/parallel.hpp>
#include <kvire/exec/host/stream.hpp>

#include <kvire/memory/counting.hpp>
#include <kvire/memory/guarded.hpp>
#include <kvire/memory/host.hpp>
#include <kvire/memory/huge_page.hpp>

#include <kvire/pool/adopt.hpp>
#include <kvire/pool/bundle_pool.hpp>
#include <kvire/pool/mirror.hpp>

#include <kvire/sync/gate.hpp>
#include <kvire/sync/host.hpp>

#include <kvire/kernel/copy_pages.hpp>
#include <kvire/kernel/move_tokens.hpp>
#include <kvire/kernel/prefill_logits.hpp>
#include <kvire/kernel/selection.hpp>
#include <kvire/kernel/sparse_logits.hpp>
#include <kvire/kernel/store.hpp>
#include <kvire/kernel/top_k.hpp>

#include <kvire/transfer/bundle.hpp>
#include <kvire/transfer/migrate.hpp>
#include <kvire/transfer/transfer.hpp>
