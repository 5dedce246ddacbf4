// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include <kvire/transfer/copy_pages.cuh>
#include <kvire/transfer/cuda/copy_engine.hpp>
#include <kvire/transfer/cuda/digest_book.hpp>
#include <kvire/transfer/seal.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail {

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
    return {};
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

}  // namespace detail

KVIRE_NAMESPACE_END
