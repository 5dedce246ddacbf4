// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <kvire/codec/row.hpp>
#include <kvire/pool/cuda/memory.hpp>
#include <kvire/transfer/cuda/copy_list.hpp>
#include <kvire/transfer/cuda/options.hpp>
#include <kvire/transfer/cuda/scratch.hpp>
#include <kvire/transfer/host_engine.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// Tokens side by side on both sides and within one page each: moved together.
struct alignas(16) TokenRun {
  std::int32_t from_page = 0;
  std::int32_t to_page = 0;
  std::uint16_t from_token = 0;
  std::uint16_t to_token = 0;
  std::int32_t tokens = 0;
};

struct PageList;

/// Ids of a transfer in pinned memory, uploaded once for all layers that share them.
struct UploadedPages {
  const std::int32_t* from = nullptr;
  const std::int32_t* to = nullptr;
};

/// Queues pages that are not copied but written anew, in another layout (transfer/migrate.cuh).
using LaunchMigrate = Status (*)(Stream<Cuda>& stream, const PageList& list, UploadedPages ids, std::int64_t pages, const RowOptions& row, int blocks);

/// Queues one layer's token runs, `device_runs` being their address on the device. Defined where kernels are (transfer/copy_rows.cuh).
using LaunchRows = Status (*)(Stream<Cuda>& stream, const PageList& list, const TokenRun* device_runs, std::int64_t runs, std::int64_t tokens, int blocks);
template <class P>
struct RowLauncher {
  static Status launch(Stream<Cuda>& stream, const PageList& list, const TokenRun* device_runs, std::int64_t runs, std::int64_t tokens, int blocks);
};

/// Both sides of one layer, at addresses of the device.
struct PageList {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::int64_t to_stride = 0;
  std::int64_t from_stride = 0;
  std::int32_t to_pages = 0;
  std::int32_t from_pages = 0;
  std::int64_t page_bytes = 0;
};


template <>
struct TransferEngine<Cuda> {
  struct Piece {
    int position = 0;
    CopyInfo info;
    MovedCount count;
    PageList list;
    bool digest = false;
    std::shared_ptr<const CheckedIds<std::int32_t>> pages = {};  // whole pages
    std::shared_ptr<const std::vector<TokenRun>> runs = {};      // of a token plan, pages that come whole taken out
    std::int64_t run_tokens = 0;
    LaunchRows launch_rows = nullptr;
    LaunchMigrate launch_migrate = nullptr;
    RowOptions row = {};
  };

  template <class P>
  static void pages(Piece& piece, PageView<P, Cuda> to, ConstPageView<P, Cuda> from, std::shared_ptr<const CheckedIds<std::int32_t>> ids,
                    std::uint64_t digest) {
    const auto n = static_cast<std::int64_t>(ids->to.size());
    piece.count.granularity = Granularity::page;
    piece.count.engine = Engine::sm_kernel;
    piece.count.pages = n;
    piece.count.tokens = n * P::tokens_per_page;
    piece.count.bytes = n * P::page_bytes;
    piece.digest = digest != 0;
    piece.list = list_of(to, from);
    piece.pages = std::move(ids);
  }

  template <class P>
  static void rows(Piece& piece, PageView<P, Cuda> to, ConstPageView<P, Cuda> from, std::shared_ptr<const CheckedIds<std::int64_t>> ids,
                   std::uint64_t digest) {
    const auto n = static_cast<std::int64_t>(ids->to.size());
    piece.count.granularity = Granularity::token;
    piece.count.engine = Engine::sm_kernel;
    piece.count.tokens = n;
    piece.count.bytes = n * token_bytes<P>;
    piece.digest = digest != 0;
    piece.list = list_of(to, from);
    piece.list.page_bytes = P::used_bytes;  // tokens that fill a page leave its padding alone
    group_tokens(piece, *ids, P::tokens_per_page);
    piece.launch_rows = &RowLauncher<P>::launch;
  }

  /// Queues everything, with an event behind each layer (or one behind all of them). Errors before anything is queued leave the transfer as it was;
  /// a later one fails the layer it belongs to and all behind it.
  static Status issue(Stream<Cuda>& stream, const std::shared_ptr<TransferState>& state, const std::vector<TransferWait<Cuda>>& waits,
                      std::chrono::milliseconds limit, std::vector<Piece>& pieces, LoadProgress<Cuda>& progress, const EngineOptions<Cuda>& options);

 private:
  template <class P>
  static PageList list_of(PageView<P, Cuda> to, ConstPageView<P, Cuda> from) {
    return {to.base, from.base, to.page_stride, from.page_stride, to.pages, from.pages, P::page_bytes};
  }

  // Splits tokens, in the plan's order, into whole pages and runs within a page.
  static void group_tokens(Piece& piece, const CheckedIds<std::int64_t>& ids, std::int64_t tokens) {
    auto whole = std::make_shared<CheckedIds<std::int32_t>>();
    auto runs = std::make_shared<std::vector<TokenRun>>();
    const std::size_t n = ids.to.size();
    for (std::size_t i = 0; i < n;) {
      const std::int64_t a = ids.from[i];
      const std::int64_t b = ids.to[i];
      const std::int64_t room = tokens - std::max(a % tokens, b % tokens);
      std::int64_t run = 1;
      while (run < room && i + static_cast<std::size_t>(run) < n && ids.from[i + static_cast<std::size_t>(run)] == a + run &&
             ids.to[i + static_cast<std::size_t>(run)] == b + run) {
        ++run;
      }
      if (run == tokens) {
        whole->from.push_back(static_cast<std::int32_t>(a / tokens));
        whole->to.push_back(static_cast<std::int32_t>(b / tokens));
      } else {
        runs->push_back({static_cast<std::int32_t>(a / tokens), static_cast<std::int32_t>(b / tokens), static_cast<std::uint16_t>(a % tokens),
                         static_cast<std::uint16_t>(b % tokens), static_cast<std::int32_t>(run)});
        piece.run_tokens += run;
      }
      i += static_cast<std::size_t>(run);
    }
    if (!whole->to.empty()) piece.pages = std::move(whole);
    if (!runs->empty()) piece.runs = std::move(runs);
  }
};

/// Bytes that neighbouring pages put side by side on both sides, on average.
inline std::int64_t mean_run_bytes(const PageList& list, const CheckedIds<std::int32_t>& ids) {
  const std::size_t n = ids.to.size();
  if (n == 0) return 0;
  std::int64_t runs = 1;
  const bool dense = list.to_stride == list.page_bytes && list.from_stride == list.page_bytes;
  for (std::size_t i = 1; i < n; ++i) runs += !(dense && ids.from[i] == ids.from[i - 1] + 1 && ids.to[i] == ids.to[i - 1] + 1);
  return static_cast<std::int64_t>(n) * list.page_bytes / runs;
}

}  // namespace detail

KVIRE_NAMESPACE_END
