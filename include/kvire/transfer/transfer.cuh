// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <span>
#include <thread>

#include <kvire/transfer/copy_pages.cuh>
#include <kvire/transfer/copy_rows.cuh>
#include <kvire/transfer/digest.cuh>
#include <kvire/transfer/seal.cuh>
#include <kvire/transfer/transfer.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// The digests of a transfer while it runs: what the host and the kernels find out of each piece, read when its event is asked. Shared by the
/// events and the queued work.
class DigestBook {
 public:
  /// `written`: once this is final no kernel writes there any more. Not an event that asks the book. Errors of the runtime.
  static Result<std::shared_ptr<DigestBook>> make(std::size_t pieces, const Event<Cuda>& written) {
    auto parts = Scratch::make(pieces * digest_parts * sizeof(Digest));
    if (!parts.ok()) return parts.error();
    auto book = std::make_shared<DigestBook>();
    book->parts_ = std::move(parts).value();
    book->parts_.busy_until(written);
    book->on_host_.resize(pieces);
    book->infos_.reserve(pieces);  // early pieces are judged while later ones are added
    return book;
  }

  /// Number of the next piece.
  std::size_t add(const CopyInfo& info) {
    infos_.push_back({info.entry, info.layer, info.direction == CopyDirection::host_to_device});
    return infos_.size() - 1;
  }
  Digest* on_host(std::size_t piece) { return &on_host_[piece]; }
  Digest* on_device(std::size_t piece) { return reinterpret_cast<Digest*>(parts_.device()) + piece * digest_parts; }

  std::size_t pieces() const { return infos_.size(); }

  /// After the work of the first `pieces`: whether both sides agree on each of them, and the sums of both.
  Status verdict(std::size_t pieces, Digest& source, Digest& destination) const {
    Status status;
    for (std::size_t i = 0; i < pieces; ++i) {
      Digest device;
      const auto* parts = reinterpret_cast<const Digest*>(parts_.host()) + i * digest_parts;
      for (int part = 0; part < digest_parts; ++part) device += parts[part];
      const Info& info = infos_[i];
      source += info.from_host ? on_host_[i] : device;
      destination += info.from_host ? device : on_host_[i];
      if (on_host_[i] == device || !status.ok()) continue;
      (void)(status = digest_error(info.entry, info.layer));
    }
    return status;
  }

 private:
  struct Info {
    std::string entry;
    int layer = 0;
    bool from_host = true;
  };
  std::vector<Info> infos_;
  std::vector<Digest> on_host_;
  Scratch parts_;  // in pinned memory, written by kernels
};

/// Neighbouring pages as one copy each, by the copy engine. Error unsupported on a capturing stream, where CUDA may leave the copies out without a word.
inline Status copy_by_engine(Stream<Cuda>& stream, const PageList& list, const CheckedIds<std::int32_t>& ids) {
  if (stream.capturing()) return Error{ErrorCode::unsupported, "the copy engine cannot be used on a capturing stream: a batch of copies is not captured"};
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<std::size_t> bytes;
  const bool dense = list.to_stride == list.page_bytes && list.from_stride == list.page_bytes;
  const std::size_t n = ids.to.size();
  for (std::size_t i = 0; i < n;) {
    std::size_t run = 1;
    while (dense && i + run < n && ids.from[i + run] == ids.from[i] + static_cast<std::int32_t>(run) && ids.to[i + run] == ids.to[i] + static_cast<std::int32_t>(run)) ++run;
    to.push_back(list.to + page_start(list.to_stride, ids.to[i]));
    from.push_back(list.from + page_start(list.from_stride, ids.from[i]));
    bytes.push_back(run * static_cast<std::size_t>(list.page_bytes));
    i += run;
  }
  if (to.empty()) return {};
  DeviceScope scope(stream.device());
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  std::size_t first = 0;
#if CUDART_VERSION >= 13000
  const cudaError_t e = cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), to.size(), &attributes, &first, 1, stream.native());
#else
  std::size_t failed = 0;
  const cudaError_t e = cudaMemcpyBatchAsync(to.data(), const_cast<void**>(from.data()), bytes.data(), to.size(), &attributes, &first, 1, &failed, stream.native());
#endif
  if (e != cudaSuccess) return stream.error(e, "queueing a batch of copies");
  return {};
}

/// Addresses of the device for both sides, and a refusal of memory that belongs elsewhere.
inline Status on_device(PageList& list, const CopyInfo& info, int device, const std::string& transfer) {
  const auto check = [&](const std::byte* p, bool host) -> Result<std::byte*> {
    const std::string what = "transfer '" + transfer + "', entry '" + info.entry + "', layer " + std::to_string(info.layer);
    if (host) {
      auto address = device_address(HostAddress{const_cast<std::byte*>(p)}, what);
      if (!address.ok()) return address.error();
      return address.value().value;
    }
    cudaPointerAttributes attributes{};
    if (const cudaError_t e = cudaPointerGetAttributes(&attributes, p); e != cudaSuccess) return cuda_error(e, what);
    if (attributes.type != cudaMemoryTypeDevice || attributes.device != device) {
      return Error{ErrorCode::mismatch, what + ": the stream belongs to device " + std::to_string(device) + ", the pool's memory to " +
                                            (attributes.type == cudaMemoryTypeDevice ? "device " + std::to_string(attributes.device) : std::string("no device"))};
    }
    return const_cast<std::byte*>(p);
  };
  auto from = check(list.from, info.direction == CopyDirection::host_to_device || info.direction == CopyDirection::host_to_host);
  if (!from.ok()) return from.error();
  auto to = check(list.to, info.direction == CopyDirection::device_to_host || info.direction == CopyDirection::host_to_host);
  if (!to.ok()) return to.error();
  list.from = from.value();
  list.to = to.value();
  return {};
}

/// Lets the fault hooks of a stream decide about a copy that is about to be queued. True: queue it.
inline Result<bool> ask_faults(Stream<Cuda>& stream, const CopyInfo& info) {
  if (!stream.faults()) return true;
  Fault fault = stream.faults()->decide(info);
  Status status;
  switch (fault.kind) {
    case Fault::Kind::none: return true;
    case Fault::Kind::skip: return false;
    case Fault::Kind::delay: (void)(status = stream.launch([time = fault.time] { std::this_thread::sleep_for(time); })); break;
    case Fault::Kind::hold:
      (void)(status = stream.launch([gate = fault.gate] {
        const std::atomic<bool> never{false};
        if (gate) (void)gate->hold(never);
      }));
      break;
    case Fault::Kind::drop: fault.message = "was dropped"; [[fallthrough]];
    case Fault::Kind::fail:
      return Error{ErrorCode::failed, "stream '" + stream.name() + "': copy of entry '" + info.entry + "', layer " + std::to_string(info.layer) + ", " +
                                          name_of(info.direction) + ": " + fault.message};
  }
  if (!status.ok()) return status.error();
  return true;
}

/// Queues the pieces of one or more layers.
class PieceQueue {
 public:
  // Pages are rewritten on as many multiprocessors as keep up with the link; writes need more of them under way.
  static constexpr int migrate_blocks(bool to_host) { return to_host ? 128 : 64; }
  using Piece = TransferEngine<Cuda>::Piece;

  /// `read`: once this is final no kernel reads the ids any more. `book`, `seals`: if they are asked for.
  PieceQueue(Stream<Cuda>& stream, const EngineOptions<Cuda>& options, const Event<Cuda>& read, std::shared_ptr<DigestBook> book, std::shared_ptr<SealBook> seals)
      : stream_(stream), options_(options), read_(read), book_(std::move(book)), seals_(std::move(seals)) {}

  Status add(Piece& piece) {
    if (piece.seal) {
      auto pages = upload(piece.pages);
      if (!pages.ok()) return pages.error();
      seals_->add(piece.seal, piece.info, piece.list, piece.seal.store ? pages.value().from : pages.value().to);
    }
    if (!piece.digest) return copy(piece);
    Landing landing{book_->add(piece.info), std::move(piece.digest), piece.pages};
    const bool from_host = piece.info.direction == CopyDirection::host_to_device;
    if (Status status = from_host ? digest_host(landing) : digest_device(landing, true); !status.ok()) return status;
    if (Status status = copy(piece); !status.ok()) return status;
    landed_.push_back({from_host, std::move(landing)});
    return {};
  }

  /// Launches what `add` collected.
  Status flush() {
    if (!requests_.empty()) {
      const CopyShape shape = this->shape();
      for (MovedCount* count : counts_) count->sms = std::max(count->sms, shape.blocks);
      const Status status = launch_pages(stream_, requests_, to_host_, shape);
      requests_.clear();
      counts_.clear();
      if (!status.ok()) return status;
    }
    for (auto& [from_host, landing] : landed_) {
      if (Status status = from_host ? digest_device(landing, false) : digest_host(landing); !status.ok()) return status;
    }
    landed_.clear();
    return seals_ ? seals_->flush(stream_) : Status();
  }

 private:
  // The digest of a piece on one side.
  struct Landing {
    std::size_t piece = 0;
    PieceDigest digest;
    std::shared_ptr<const CheckedIds<std::int32_t>> pages;
  };

  Status digest_host(Landing& landing) {
    return stream_.launch([book = book_, piece = landing.piece, digest = std::move(landing.digest.on_host)]() mutable { *book->on_host(piece) = digest(); });
  }
  Status digest_device(Landing& landing, bool source) {
    DigestRows rows = landing.digest.rows;
    if (landing.digest.slots) {
      auto slots = upload(source ? landing.digest.slots->from : landing.digest.slots->to);
      if (!slots.ok()) return slots.error();
      rows.slots = slots.value();
    } else {
      auto pages = upload(landing.pages);
      if (!pages.ok()) return pages.error();
      rows.pages = source ? pages.value().from : pages.value().to;
    }
    DeviceScope scope(stream_.device());
    return landing.digest.launch(stream_, rows, book_->on_device(landing.piece));
  }

  Status copy(Piece& piece) {
    auto go = ask_faults(stream_, piece.info);
    if (!go.ok()) return go.error();
    if (!go.value()) return {};
    if (piece.pages) {
      const bool long_runs = piece.launch_migrate == nullptr && mean_run_bytes(piece.list, *piece.pages) >= copy_engine_run_bytes;
      if (piece.launch_migrate != nullptr) {
        auto ids = upload(piece.pages);
        if (!ids.ok()) return ids.error();
        piece.count.sms = options_.blocks > 0 ? options_.blocks : migrate_blocks(piece.info.direction == CopyDirection::device_to_host);
        DeviceScope scope(stream_.device());
        if (Status status = piece.launch_migrate(stream_, piece.list, ids.value(), static_cast<std::int64_t>(piece.pages->to.size()), piece.row, piece.count.sms);
            !status.ok()) {
          return status;
        }
      } else if (options_.choice == EngineChoice::copy_engine || (options_.choice == EngineChoice::automatic && long_runs)) {
        piece.count.engine = Engine::copy_engine;
        if (Status status = copy_by_engine(stream_, piece.list, *piece.pages); !status.ok()) return status;
      } else {
        auto ids = upload(piece.pages);
        if (!ids.ok()) return ids.error();
        to_host_ = piece.info.direction == CopyDirection::device_to_host;
        counts_.push_back(&piece.count);
        requests_.push_back({piece.list, ids.value(), static_cast<std::int64_t>(piece.pages->to.size()), piece.pages.get()});
      }
    }
    if (piece.runs) {
      auto runs = upload(*piece.runs);
      if (!runs.ok()) return runs.error();
      const int blocks = options_.blocks > 0 ? options_.blocks : 8;
      piece.count.sms = std::max(piece.count.sms, blocks);
      piece.count.engine = Engine::sm_kernel;
      DeviceScope scope(stream_.device());
      if (Status status = piece.launch_rows(stream_, piece.list, runs.value(), static_cast<std::int64_t>(piece.runs->size()), piece.run_tokens, blocks);
          !status.ok()) {
        return status;
      }
    }
    return {};
  }

  // Of the launch of what was collected.
  CopyShape shape() const {
    std::int64_t smallest = requests_.front().list.page_bytes;
    for (const CopyRequest& request : requests_) smallest = std::min(smallest, request.list.page_bytes);
    CopyShape shape = CopyShape::of(options_.pace, to_host_, smallest);
    if (options_.blocks > 0) shape.blocks = options_.blocks;
    if (options_.gigabytes_per_second > 0) shape.gigabytes_per_second = options_.gigabytes_per_second;
    return shape;
  }

  Result<std::byte*> block(std::size_t bytes, Scratch*& out) {
    auto scratch = Scratch::make(bytes);
    if (!scratch.ok()) return scratch.error();
    scratch.value().busy_until(read_);
    scratch_.push_back(std::move(scratch).value());
    out = &scratch_.back();
    return out->host();
  }

  // Ids are read by the kernel straight from pinned memory: a copy to the device first would take longer than the reads do.
  Result<UploadedPages> upload(const std::shared_ptr<const CheckedIds<std::int32_t>>& ids) {
    if (const auto known = uploaded_.find(ids.get()); known != uploaded_.end()) return known->second;
    const std::size_t n = ids->to.size();
    Scratch* scratch = nullptr;
    auto host = block(2 * n * sizeof(std::int32_t), scratch);
    if (!host.ok()) return host.error();
    std::memcpy(host.value(), ids->from.data(), n * sizeof(std::int32_t));
    std::memcpy(host.value() + n * sizeof(std::int32_t), ids->to.data(), n * sizeof(std::int32_t));
    const auto* device = reinterpret_cast<const std::int32_t*>(scratch->device());
    return uploaded_[ids.get()] = UploadedPages{device, device + n};
  }
  template <class T>
  Result<const T*> upload(const std::vector<T>& list) {
    Scratch* scratch = nullptr;
    auto host = block(list.size() * sizeof(T), scratch);
    if (!host.ok()) return host.error();
    std::memcpy(host.value(), list.data(), list.size() * sizeof(T));
    return reinterpret_cast<const T*>(scratch->device());
  }

  Stream<Cuda>& stream_;
  const EngineOptions<Cuda>& options_;
  const Event<Cuda>& read_;
  std::shared_ptr<DigestBook> book_;
  std::shared_ptr<SealBook> seals_;
  std::vector<Scratch> scratch_;  // not reused before the transfer is done
  std::map<const void*, UploadedPages> uploaded_;
  std::vector<CopyRequest> requests_;
  std::vector<MovedCount*> counts_;  // of their pieces
  std::vector<std::pair<bool, Landing>> landed_;  // copied or about to be; true: from the host
  bool to_host_ = false;
};

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
  for (const auto& wait : waits) {
    const Status status = stream.wait(wait.event);
    if (status.ok() || (wait.may_fail && wait.event.query() == EventState::failed)) continue;
    return Error{status.error().code, name + ": " + status.error().message};
  }

  // With checksums the end of the transfer asks their book, which must not be what the book's own memory waits for.
  const Event<Cuda> through = digests + sealed > 0 ? Event<Cuda>::make("checksums of " + state->name) : progress.done();
  std::shared_ptr<DigestBook> book;
  if (digests > 0) {
    auto made = DigestBook::make(digests, through);
    if (!made.ok()) return made.error();
    book = std::move(made).value();
  }
  std::shared_ptr<SealBook> seals;
  if (sealed > 0) {
    auto made = SealBook::make(sealed, pieces.size(), through);
    if (!made.ok()) return made.error();
    seals = std::move(made).value();
  }
  // What the first pieces of the books have come to; behind the whole transfer the digests' sums are the ticket's.
  const auto verdict = [&](bool whole) {
    MoveOnlyFunction<Status()> ask;
    if (!book && !seals) return ask;
    ask = [book, seals, n = book ? book->pieces() : 0, layers = seals ? seals->layers() : 0, into = whole ? state : nullptr]() -> Status {
      Status found = seals ? seals->verdict(layers) : Status();
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
    if (!status.ok()) break;
    auto event = Event<Cuda>::make(state->name);
    if (Status recorded = stream.record(event, {}, verdict(false)); !recorded.ok()) (void)event.complete(recorded);
    for (; counted < next; ++counted) arrivals->emplace_back(event, pieces[counted].count);
    for (; first_open <= position; ++first_open) progress.issued(first_open, event);
  }
  if (!status.ok()) progress.fail(first_open, status.error());
  if (Status recorded = stream.record(progress.done(), status, verdict(true)); !recorded.ok()) (void)progress.done().complete(recorded);
  if (book || seals) (void)stream.record(through);
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
