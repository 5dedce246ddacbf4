// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/transfer/copy_rows.cuh>
#include <kvire/transfer/cuda/on_device.hpp>
#include <kvire/transfer/digest.cuh>
#include <kvire/transfer/piece_queue.cuh>
#include <kvire/transfer/transfer.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

inline Status TransferEngine<Cuda>::issue(Stream<Cuda>& stream, const std::shared_ptr<TransferState>& state, const std::vector<TransferWait<Cuda>>& waits,
                                          std::chrono::milliseconds, std::vector<Piece>& pieces, LoadProgress<Cuda>& progress,
                                          const EngineOptions<Cuda>& options) {
  const std::string name = "transfer '" + state->name + "'";
  if (stream.capturing()) {
    return Error{ErrorCode::unsupported, name + ": a ticket stands for work that runs once; on a capturing stream use submit with ids in device buffers"};
  }
  std::size_t digests = 0;
  std::size_t sealed = 0;
  for (Piece& piece : pieces) {
    digests += piece.digest ? 1 : 0;
    sealed += piece.seal ? piece.pages->to.size() : 0;
    if (Status status = on_device(piece.list, piece.info, stream.device(), state->name); !status.ok()) return status;
  }
  std::vector<Event<Cuda>> judged;  // what this reads may yet be found wrong, though the stream goes on behind it
  for (const auto& wait : waits) {
    const Status status = stream.wait(wait.event);
    if (!status.ok() && !(wait.may_fail && wait.event.query() == EventState::failed)) return Error{status.error().code, name + ": " + status.error().message};
    if (status.ok() && !wait.may_fail && wait.event.judged()) judged.push_back(wait.event);
  }

  // An end that has a verdict asks books and other events: not what memory waits for, which is asked under the lock of all of it.
  const bool judges = digests + sealed > 0 || !judged.empty();
  const Event<Cuda> through = judges ? Event<Cuda>::make("work of " + state->name) : progress.done();
  std::shared_ptr<DigestBook> book;
  if (digests > 0) {
    auto made = DigestBook::make(digests, through);
    if (!made.ok()) return made.error();
    book = std::move(made).value();
  }
  // Seals are made beside the copies of the next layer; events stand behind both.
  std::shared_ptr<SealBook> seals;
  Stream<Cuda> last = stream.share();
  if (sealed > 0) {
    auto made = SealBook::make(sealed, pieces.size(), through);
    if (!made.ok()) return made.error();
    seals = std::move(made).value();
    auto beside = stream.companion();
    if (!beside.ok()) return beside.error();
    last = std::move(beside).value();
  }
  const auto seal = [&]() -> Status {
    if (!seals) return {};
    if (Status status = last.wait(stream.record("copies of " + state->name)); !status.ok()) return status;
    return seals->flush(last);
  };
  // What the first pieces of the books have come to; behind the whole transfer the digests' sums are the ticket's.
  const auto verdict = [&](bool whole) {
    MoveOnlyFunction<Status()> ask;
    if (!book && !seals && judged.empty()) return ask;
    ask = [book, seals, judged, n = book ? book->pieces() : 0, layers = seals ? seals->layers() : 0, into = whole ? state : nullptr]() -> Status {
      Status found = seals ? seals->verdict(layers) : Status();
      for (const auto& event : judged) {
        if (event.query() == EventState::failed) (void)(found = event.status());
      }
      if (!book) return found;
      Digest source;
      Digest destination;
      Status digests = book->verdict(n, source, destination);
      if (into) {
        std::lock_guard lock(into->mutex);
        into->source = source;
        into->destination = destination;
      }
      return digests.ok() ? found : digests;
    };
    return ask;
  };

  PieceQueue queue(stream, options, through, book, seals);
  auto arrivals = std::make_shared<std::vector<std::pair<Event<Cuda>, MovedCount>>>();
  Status status;
  std::size_t next = 0;
  std::size_t counted = 0;
  int first_open = 0;  // positions from here on have no event yet
  for (int position = 0; position < progress.layers() && status.ok(); ++position) {
    for (; next < pieces.size() && pieces[next].position == position && status.ok(); ++next) {
      pieces[next].info.bytes = pieces[next].count.bytes;
      (void)(status = queue.add(pieces[next]));
    }
    if (!status.ok() || !(options.layer_events || position + 1 == progress.layers())) continue;
    (void)(status = queue.flush());
    if (status.ok()) (void)(status = seal());
    if (!status.ok()) break;
    auto event = Event<Cuda>::make(state->name);
    if (Status recorded = last.record(event, {}, verdict(false)); !recorded.ok()) (void)event.complete(recorded);
    for (; counted < next; ++counted) arrivals->emplace_back(event, pieces[counted].count);
    for (; first_open <= position; ++first_open) progress.issued(first_open, event);
  }
  if (!status.ok()) progress.fail(first_open, status.error());
  if (seals && !status.ok()) (void)last.wait(stream.record("copies of " + state->name));  // those of a layer that failed
  if (Status recorded = last.record(progress.done(), status, verdict(true)); !recorded.ok()) (void)progress.done().complete(recorded);
  if (judges) (void)last.record(through);
  if (seals) (void)stream.wait(through);  // what follows on the stream may write the pages
  pieces.clear();
  // The layers of a stream arrive in order.
  const auto follow = [&](TransferStats& stats) {
    stats.follow([arrivals, at = std::size_t(0)](std::vector<MovedCount>& arrived) mutable {
      for (; at < arrivals->size(); ++at) {
        const auto& [event, count] = (*arrivals)[at];
        const EventState reached = event.query();
        if (!is_final(reached)) return false;
        if (reached == EventState::complete) arrived.push_back(count);
      }
      return true;
    });
  };
  follow(state->moved);
  if (state->totals) follow(*state->totals);
  return {};
}

}  // namespace detail

KVIRE_NAMESPACE_END
