// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <kvire/base/ints.hpp>
#include <kvire/base/result.hpp>

KVIRE_NAMESPACE_BEGIN

/// Where bytes come from. A resource is a copyable handle, safe to use from any thread; copies serve the same memory. Behaviour is added by
/// wrapping one resource in another (Guarded<Counting<HostMemory>>), never by flags.
///
/// | expression | result |
/// |---|---|
/// | `r.allocate(bytes, alignment)` | `Result<std::byte*>`: at least `bytes` bytes at a multiple of `alignment` (a power of two). bytes >= 1 |
/// | `r.deallocate(p, bytes, alignment)` | gives back what `allocate` returned for the same numbers |
/// | `r.name()` | text for error messages |
/// | `R::zeroed` | constexpr bool: fresh bytes are zero, so nobody need touch them |
template <class R>
concept ByteResource = std::copy_constructible<R> && requires(R r, std::byte* p, std::int64_t bytes, std::int64_t alignment) {
  { r.allocate(bytes, alignment) } -> std::same_as<Result<std::byte*>>;
  { r.deallocate(p, bytes, alignment) };
  { r.name() } -> std::convertible_to<std::string>;
  { R::zeroed } -> std::convertible_to<bool>;
};

/// Alignment of pool memory unless asked otherwise: what the widest bulk copies and vector loads of both backends want.
inline constexpr std::int64_t pool_alignment = 256;

namespace detail {

/// The numbers of a request, checked once for all resources.
inline Status check_request(const std::string& resource, std::int64_t bytes, std::int64_t alignment) {
  if (bytes < 1) return Error{ErrorCode::invalid_argument, resource + ": cannot allocate " + std::to_string(bytes) + " bytes"};
  if (!is_power_of_two(alignment)) {
    return Error{ErrorCode::invalid_argument, resource + ": alignment " + std::to_string(alignment) + " is not a power of two"};
  }
  return {};
}

}  // namespace detail

/// Any resource behind one type: what pools store, so that their type does not depend on where their bytes come from.
class AnyResource {
 public:
  template <class R>
    requires(!std::same_as<R, AnyResource> && ByteResource<R>)
  AnyResource(R resource) : self_(std::make_shared<Model<R>>(std::move(resource))) {}

  Result<std::byte*> allocate(std::int64_t bytes, std::int64_t alignment) { return self_->allocate(bytes, alignment); }
  void deallocate(std::byte* p, std::int64_t bytes, std::int64_t alignment) { self_->deallocate(p, bytes, alignment); }
  std::string name() const { return self_->name(); }
  bool zeroed() const { return self_->zeroed(); }

 private:
  struct Concept {
    virtual ~Concept() = default;
    virtual Result<std::byte*> allocate(std::int64_t bytes, std::int64_t alignment) = 0;
    virtual void deallocate(std::byte* p, std::int64_t bytes, std::int64_t alignment) = 0;
    virtual std::string name() const = 0;
    virtual bool zeroed() const = 0;
  };
  template <class R>
  struct Model final : Concept {
    explicit Model(R r) : resource(std::move(r)) {}
    Result<std::byte*> allocate(std::int64_t bytes, std::int64_t alignment) override { return resource.allocate(bytes, alignment); }
    void deallocate(std::byte* p, std::int64_t bytes, std::int64_t alignment) override { resource.deallocate(p, bytes, alignment); }
    std::string name() const override { return resource.name(); }
    bool zeroed() const override { return R::zeroed; }
    R resource;
  };
  std::shared_ptr<Concept> self_;
};

/// One allocation, given back when the last owner goes. Move-only.
template <class Resource>
class BasicBuffer {
 public:
  BasicBuffer() = default;
  static Result<BasicBuffer> make(Resource resource, std::int64_t bytes, std::int64_t alignment = pool_alignment) {
    auto memory = resource.allocate(bytes, alignment);
    if (!memory.ok()) return memory.error();
    if (memory.value() == nullptr) return Error{ErrorCode::failed, resource.name() + ": a null pointer for " + std::to_string(bytes) + " bytes"};
    const auto beyond = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(memory.value()) % static_cast<std::uintptr_t>(alignment));
    if (beyond != 0) {
      resource.deallocate(memory.value(), bytes, alignment);
      return Error{ErrorCode::failed, resource.name() + ": memory " + std::to_string(beyond) + " bytes beyond a multiple of " + std::to_string(alignment)};
    }
    BasicBuffer buffer;
    buffer.resource_ = std::move(resource);
    buffer.data_ = memory.value();
    buffer.bytes_ = bytes;
    buffer.alignment_ = alignment;
    return Result<BasicBuffer>(std::move(buffer));
  }
  BasicBuffer(BasicBuffer&& other) noexcept { swap(other); }
  BasicBuffer& operator=(BasicBuffer&& other) noexcept {
    BasicBuffer(std::move(other)).swap(*this);
    return *this;
  }
  ~BasicBuffer() {
    if (data_ != nullptr) resource_->deallocate(data_, bytes_, alignment_);
  }

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }
  bool zeroed() const { return data_ != nullptr && resource_->zeroed(); }

 private:
  void swap(BasicBuffer& other) noexcept {
    std::swap(resource_, other.resource_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(alignment_, other.alignment_);
  }
  std::optional<Resource> resource_;
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
  std::int64_t alignment_ = 0;
};
using Buffer = BasicBuffer<AnyResource>;

KVIRE_NAMESPACE_END
