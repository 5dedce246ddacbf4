// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/transfer/cuda/engine.hpp>
#include <kvire/transfer/cuda/scratch.hpp>

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

}  // namespace detail

KVIRE_NAMESPACE_END
