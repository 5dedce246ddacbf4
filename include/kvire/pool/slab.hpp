// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <kvire/exec/backend.hpp>
#include <kvire/layout/arrangement.hpp>
#include <kvire/memory/host.hpp>
#include <kvire/pool/ledger_core.hpp>

KVIRE_NAMESPACE_BEGIN

/// Which side of a transfer a pool is: decides the type of its page ids and its default memory.
struct DeviceSide {
  using page_id = DevicePage;
  static constexpr const char* name = "device";
};
struct HostSide {
  using page_id = HostPage;
  static constexpr const char* name = "host";
};

/// Where the pages of a backend's side come from, and how they are filled. Specialised by each backend.
template <class Backend, class Side>
struct BackendMemory;

template <class Side>
struct BackendMemory<Host, Side> {
  /// The host can read and write the pages directly.
  static constexpr bool addressable = true;
  /// Memory for pages that start at multiples of `page_stride`.
  static AnyResource resource([[maybe_unused]] std::int64_t page_stride) { return HostMemory{}; }
  static Status fill(std::byte* p, unsigned char value, std::int64_t bytes) {
    std::memset(p, value, static_cast<std::size_t>(bytes));
    return {};
  }
};

/// A side whose pages the host can read and write directly.
template <class Backend, class Side>
concept AddressableMemory = BackendMemory<Backend, Side>::addressable;

namespace detail {

/// The numbers of a slab.
struct SlabShape {
  int layers = 0;
  std::int64_t pages = 0;
  std::int64_t page_bytes = 0;
  std::int64_t page_stride = 0;  // of one layer, for layer_first
  Arrangement arrangement = Arrangement::layer_first;
};

/// Pages of one policy for some layers: a base per layer and a page stride. Owns the bytes, or whatever keeps foreign bytes alive.
template <class Backend>
class Slab final : public PageMemory {
 public:
  using Fill = Status (*)(std::byte*, unsigned char, std::int64_t);

  /// Allocates and zeroes. Padding stays zero for good, since stores write fields only and copies move whole pages or runs of them.
  static Result<std::shared_ptr<Slab>> make(const std::string& name, const SlabShape& shape, AnyResource resource, Fill fill) {
    auto slab = std::make_shared<Slab>();
    slab->fill_ = fill;
    slab->page_bytes = shape.page_bytes;
    slab->pages = static_cast<std::int32_t>(shape.pages);
    const Strides strides = strides_of(shape.arrangement, shape.layers, shape.pages, shape.page_stride);
    slab->page_stride = strides.page_bytes;
    if (shape.layers == 0) return slab;
    const std::int64_t bytes = checked_mul(checked_mul(shape.page_stride, shape.pages), shape.layers);
    if (bytes < 0) {
      return Error{ErrorCode::invalid_argument, "pool " + name + ": " + std::to_string(shape.layers) + " layers of " + std::to_string(shape.pages) +
                                                    " pages of " + std::to_string(shape.page_stride) + " bytes do not fit 63 bits"};
    }
    auto buffer = Buffer::make(std::move(resource), bytes);
    if (!buffer.ok()) return Error{buffer.error().code, "pool " + name + ": " + buffer.error().message};
    slab->buffer_ = std::move(buffer).value();
    if (!slab->buffer_.zeroed()) {
      if (auto ok = fill(slab->buffer_.data(), 0, bytes); !ok.ok()) return ok.error();
    }
    for (int layer = 0; layer < shape.layers; ++layer) slab->bases.push_back(slab->buffer_.data() + strides.offset(layer, 0));
    return slab;
  }

  /// Foreign memory, described by its owner and checked by `adopt`.
  static std::shared_ptr<Slab> adopt(std::vector<std::byte*> bases, std::int64_t page_stride, std::int32_t pages, std::int64_t page_bytes,
                                     std::shared_ptr<void> owner, Fill fill) {
    auto slab = std::make_shared<Slab>();
    slab->bases = std::move(bases);
    slab->page_stride = page_stride;
    slab->page_bytes = page_bytes;
    slab->pages = pages;
    slab->owner_ = std::move(owner);
    slab->fill_ = fill;
    return slab;
  }

  std::byte* page(std::size_t layer, std::int32_t id) const { return bases[layer] + page_stride * static_cast<std::int64_t>(id); }
  std::int64_t bytes() const { return buffer_.bytes(); }

  /// Overwrites a page in all layers.
  Status fill_page(std::int32_t id, unsigned char value) const {
    for (std::size_t layer = 0; layer < bases.size(); ++layer) {
      if (auto ok = fill_(page(layer, id), value, page_bytes); !ok.ok()) return ok;
    }
    return {};
  }

  bool wants_freed() const override { return fill_on_free.has_value(); }
  void page_freed(std::int32_t id) override { (void)fill_page(id, *fill_on_free); }

  std::vector<std::byte*> bases;
  std::int64_t page_stride = 0;
  std::int64_t page_bytes = 0;
  std::int32_t pages = 0;
  std::optional<unsigned char> fill_on_free;

 private:
  Fill fill_ = nullptr;
  Buffer buffer_;
  std::shared_ptr<void> owner_;
};

/// "byte 17 is 0x00, expected 0xA5": the first byte of [first, first + size) that is not `expected`; empty if there is none.
inline std::string first_other_byte(const std::byte* page, std::int64_t first, std::int64_t size, unsigned char expected) {
  for (std::int64_t i = first; i < first + size; ++i) {
    if (page[i] == static_cast<std::byte>(expected)) continue;
    char text[64];
    std::snprintf(text, sizeof text, "byte %lld is 0x%02X, expected 0x%02X", static_cast<long long>(i), static_cast<unsigned>(page[i]),
                  static_cast<unsigned>(expected));
    return text;
  }
  return {};
}

}  // namespace detail

KVIRE_NAMESPACE_END
