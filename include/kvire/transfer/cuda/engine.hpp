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

/// Tokens ordered by windows of the host's memory: what single tokens wait for is the translation of the host's addresses, and a device keeps those of
/// a few hundred MiB at hand (on an H200, random tokens of a GiB move at half the rate of the same tokens window by window).
inline void order_by_window(std::vector<TokenRun>& runs, std::int64_t host_stride, bool from_host) {
  constexpr int window_bits = 26;
  const auto window = [&](const TokenRun& run) { return static_cast<std::size_t>(host_stride * (from_host ? run.from_page : run.to_page) >> window_bits); };
  std::size_t windows = 0;
  for (const TokenRun& run : runs) windows = std::max(windows, window(run) + 1);
  if (windows < 2) return;
  std::vector<std::size_t> next(windows + 1);
  for (const TokenRun& run : runs) ++next[window(run) + 1];
  for (std::size_t i = 1; i <= windows; ++i) next[i] += next[i - 1];
  std::vector<TokenRun> ordered(runs.size());
  for (const TokenRun& run : runs) ordered[next[window(run)]++] = run;
  runs = std::move(ordered);
}

struct PageList;

/// What a digest kernel reads: rows of whole pages, or of token slots; ids in memory that the device reaches.
struct DigestRows {
  const std::byte* base = nullptr;  // page 0
  std::int64_t page_stride = 0;
  const std::int32_t* pages = nullptr;
  const std::int64_t* slots = nullptr;  // null: whole pages
  std::int64_t rows = 0;
  std::uint64_t key = 0;
};

/// Parts that a digest kernel leaves, one a block.
inline constexpr int digest_parts = 64;

/// Queues the digest of rows on the device, its parts written to `parts`. Defined where kernels are (transfer/digest.cuh).
using LaunchDigest = Status (*)(Stream<Cuda>& stream, const DigestRows& rows, Digest* parts);
template <class P>
struct DigestLauncher {
  static Status launch(Stream<Cuda>& stream, const DigestRows& rows, Digest* parts);
};

/// How one layer is checked: the host digests its own side of the transfer, a kernel the device's, to the same number.
struct PieceDigest {
  MoveOnlyFunction<Digest()> on_host = {};  // empty: no digest is asked for
  LaunchDigest launch = nullptr;
  DigestRows rows = {};                     // but for the ids, which are uploaded when the transfer is issued
  std::shared_ptr<const CheckedIds<std::int64_t>> slots = {};  // of a token plan; page plans have theirs in the piece

  explicit operator bool() const { return static_cast<bool>(on_host); }
};

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
    PieceDigest digest = {};
    PieceSeal seal = {};
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
    piece.list = list_of(to, from);
    if (digest != 0) {
      add_digest<P>(piece, to, from, n * P::tokens_per_page, digest, [ids, digest](ConstPageView<P, Host> view, bool source) {
        return digest_pages<P>(digest, view, source ? ids->from : ids->to);
      });
    }
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
    if (digest != 0) {
      add_digest<P>(piece, to, from, n, digest, [ids, digest](ConstPageView<P, Host> view, bool source) {
        return digest_slots<P>(digest, view, source ? ids->from : ids->to);
      });
      piece.digest.slots = ids;
    }
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

  // The transfer has one side on the host, by the pool's own address, and one on the device.
  template <class P, class OfRows>
  static void add_digest(Piece& piece, ConstPageView<P, Cuda> to, ConstPageView<P, Cuda> from, std::int64_t rows, std::uint64_t key, OfRows of_rows) {
    const bool from_host = piece.info.direction == CopyDirection::host_to_device;
    const ConstPageView<P, Cuda>& host = from_host ? from : to;
    const ConstPageView<P, Cuda>& device = from_host ? to : from;
    piece.digest.on_host = [of_rows, from_host, view = ConstPageView<P, Host>(host.base, host.page_stride, host.pages)] { return of_rows(view, from_host); };
    piece.digest.launch = &DigestLauncher<P>::launch;
    piece.digest.rows.base = device.base;
    piece.digest.rows.page_stride = device.page_stride;
    piece.digest.rows.rows = rows;
    piece.digest.rows.key = key;
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
    if (runs->empty()) return;
    const bool from_host = piece.info.direction == CopyDirection::host_to_device;
    order_by_window(*runs, from_host ? piece.list.from_stride : piece.list.to_stride, from_host);
    piece.runs = std::move(runs);
  }
};

}  // namespace detail

KVIRE_NAMESPACE_END
