// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <kvire/exec/host/stream.hpp>
#include <kvire/transfer/host_copy.hpp>
#include <kvire/transfer/seal.hpp>
#include <kvire/transfer/ticket.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// How a backend queues transfers. `Piece` is one entry of one layer.
template <class Backend>
struct TransferEngine;

/// The digests of both sides of a copy differ.
inline Error digest_error(const std::string& entry, int layer) {
  return {ErrorCode::mismatch, "digest of entry '" + entry + "', layer " + std::to_string(layer) + ": what arrived is not what was sent"};
}

/// Earlier work on the pages of a transfer.
template <class Backend>
struct TransferWait {
  Event<Backend> event;
  bool may_fail = false;  ///< only its end matters; otherwise its failure is the transfer's
};

/// Ids of one side each, in step and checked: pages, or token slots.
template <class Index>
struct CheckedIds {
  std::vector<Index> from;
  std::vector<Index> to;
};

template <HostTag Backend>
struct TransferEngine<Backend> {
  struct Piece {
    int position = 0;
    CopyInfo info;
    MovedCount count;
    MoveOnlyFunction<void(bool streaming)> move;
    MoveOnlyFunction<Digest()> source = {};       // with digests only
    MoveOnlyFunction<Digest()> destination = {};
    PieceSeal seal = {};                          // with seals only
    MoveOnlyFunction<Status()> settle = {};
  };

  template <class P>
  static void pages(Piece& piece, PageView<P, Backend> to, ConstPageView<P, Backend> from, std::shared_ptr<const CheckedIds<std::int32_t>> ids,
                    std::uint64_t digest) {
    const auto n = static_cast<std::int64_t>(ids->to.size());
    piece.count.granularity = Granularity::page;
    piece.count.pages = n;
    piece.count.tokens = n * P::tokens_per_page;
    piece.count.bytes = n * P::page_bytes;
    piece.move = [to, from, ids](bool streaming) { copy_pages<P>(to, ids->to, from, ids->from, streaming); };
    if (piece.seal) {
      auto found = std::make_shared<std::vector<std::uint64_t>>();
      piece.move = [to, from, ids, seal = piece.seal, found](bool streaming) {
        *found = copy_sealed_pages<P>(to, ids->to, from, ids->from, seal.layer, seal.store, streaming);
      };
      piece.settle = [to, from, ids, seal = piece.seal, found, entry = piece.count.entry, layer = piece.info.layer] {
        // A copy that did not take place has not looked at its pages either.
        if (found->empty() && seal.store) *found = seal_pages(seal.layer, from, P::page_bytes, ids->from);
        if (found->empty()) *found = seal_pages(seal.layer, ConstPageView<P, Backend>(to), P::page_bytes, ids->to);
        return seal.settle(*found, entry, layer);
      };
    }
    if (digest == 0) return;
    piece.source = [from, ids, digest] { return digest_pages<P>(digest, from, ids->from); };
    piece.destination = [to, ids, digest] { return digest_pages<P>(digest, ConstPageView<P, Backend>(to), ids->to); };
  }

  template <class P>
  static void rows(Piece& piece, PageView<P, Backend> to, ConstPageView<P, Backend> from, std::shared_ptr<const CheckedIds<std::int64_t>> ids,
                   std::uint64_t digest) {
    const auto n = static_cast<std::int64_t>(ids->to.size());
    piece.count.granularity = Granularity::token;
    piece.count.tokens = n;
    piece.count.bytes = n * token_bytes<P>;
    piece.move = [to, from, ids](bool) { copy_rows<P>(to, ids->to, from, ids->from); };
    if (digest == 0) return;
    piece.source = [from, ids, digest] { return digest_slots<P>(digest, from, ids->from); };
    piece.destination = [to, ids, digest] { return digest_slots<P>(digest, ConstPageView<P, Backend>(to), ids->to); };
  }

  /// Before the first piece. From here to `end` a failure of the stream is the transfer's.
  static void begin(Stream<Backend>& stream, const std::shared_ptr<TransferState>& state, const std::vector<TransferWait<Backend>>& waits,
                    std::chrono::milliseconds limit) {
    stream.launch([state] { state->clean_start = true; });
    for (const auto& wait : waits) {
      stream.launch([wait, limit]() -> Status {
        const Status status = wait.event.wait(deadline_in(limit));
        return status.ok() || (wait.may_fail && status.error().code != ErrorCode::timeout) ? Status() : status;
      });
    }
  }

  static void queue(Stream<Backend>& stream, const std::shared_ptr<TransferState>& state, Piece piece) {
    piece.info.bytes = piece.count.bytes;
    auto expected = std::make_shared<Digest>();
    const bool digest = static_cast<bool>(piece.source);
    if (digest) stream.launch([source = std::move(piece.source), expected]() mutable { *expected = source(); });
    const bool streaming = state->planned_bytes >= streaming_bytes;
    stream.copy_with(piece.info, [move = std::move(piece.move), streaming]() mutable { move(streaming); }, [state, count = std::move(piece.count)](const Status& status) {
      if (status.ok()) state->count(count);
    });
    if (piece.settle) stream.launch(std::move(piece.settle));
    if (!digest) return;
    stream.launch([state, destination = std::move(piece.destination), expected, info = piece.info]() mutable -> Status {
      const Digest found = destination();
      {
        std::lock_guard lock(state->mutex);
        state->source += *expected;
        state->destination += found;
      }
      return found == *expected ? Status() : digest_error(info.entry, info.layer);
    });
  }

  static void end(Stream<Backend>& stream, const std::shared_ptr<TransferState>& state, const Event<Backend>& done) {
    (void)stream.record(done);
    // The failure of a transfer is known to its ticket and its readers; what follows on the stream does not depend on it.
    stream.clear_failure_if([state] { return state->clean_start; });
  }

  /// All of it, with an event behind each layer. Never fails here: what goes wrong is found on the stream.
  static Status issue(Stream<Backend>& stream, const std::shared_ptr<TransferState>& state, const std::vector<TransferWait<Backend>>& waits,
                      std::chrono::milliseconds limit, std::vector<Piece>& pieces, LoadProgress<Backend>& progress, const EngineOptions<Backend>&) {
    const auto section = stream.section();
    begin(stream, state, waits, limit);
    std::size_t next = 0;
    for (int position = 0; position < progress.layers(); ++position) {
      for (; next < pieces.size() && pieces[next].position == position; ++next) queue(stream, state, std::move(pieces[next]));
      progress.issued(position, stream.record(progress.name()));
    }
    end(stream, state, progress.done());
    return {};
  }
};

}  // namespace detail

KVIRE_NAMESPACE_END
