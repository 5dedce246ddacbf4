// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include <kvire/memory/resource.hpp>

/// Between kvire's resources and those of the `cuda::mr` concepts (CCCL), in both directions. Nothing of CCCL is included: what a program may
/// include of it, and under which macros, depends on its version.

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// `resource` of CCCL up to 3.0 and the synchronous one of later versions, by what is called.
template <class R>
concept MrNamedAllocate = requires(R r, void* p, std::size_t n) {
  { r.allocate(n, n) } -> std::same_as<void*>;
  r.deallocate(p, n, n);
};
template <class R>
concept MrNamedSync = requires(R r, void* p, std::size_t n) {
  { r.allocate_sync(n, n) } -> std::same_as<void*>;
  r.deallocate_sync(p, n, n);
};

template <class Self, class Property>
struct MrProperty {
  friend void get_property(const Self&, Property) noexcept {}
};

}  // namespace detail

/// Memory of a `cuda::mr` resource for kvire's pools: a `cuda::mr::resource_ref`, or any copyable resource. Whether a device reaches the memory is
/// the caller's to know: `{.memory = FromMr(resource)}`. Only the synchronous calls are used.
/// Errors: invalid_argument; exhausted, with what the resource threw, or if it returned null. Without exceptions what it throws ends the program.
template <class Resource>
  requires std::copy_constructible<Resource> && (detail::MrNamedAllocate<Resource> || detail::MrNamedSync<Resource>)
class FromMr {
 public:
  static constexpr bool zeroed = false;

  explicit FromMr(Resource resource, std::string name = "cuda::mr resource") : resource_(std::move(resource)), name_(std::move(name)) {}

  std::string name() const { return name_; }

  Result<std::byte*> allocate(std::int64_t bytes, std::int64_t alignment) {
    if (auto ok = detail::check_request(name_, bytes, alignment); !ok.ok()) return ok.error();
    std::string reason = "it returned null";
    void* p = nullptr;
#if KVIRE_EXCEPTIONS
    try {
      p = ask(static_cast<std::size_t>(bytes), static_cast<std::size_t>(alignment));
    } catch (const std::exception& e) {
      reason = e.what();
    } catch (...) {
      reason = "it threw";
    }
#else
    p = ask(static_cast<std::size_t>(bytes), static_cast<std::size_t>(alignment));
#endif
    if (p == nullptr) return Error{ErrorCode::exhausted, name_ + ": " + std::to_string(bytes) + " bytes wanted: " + reason};
    return static_cast<std::byte*>(p);
  }

  void deallocate(std::byte* p, std::int64_t bytes, std::int64_t alignment) {
    const auto n = static_cast<std::size_t>(bytes);
    const auto a = static_cast<std::size_t>(alignment);
    if constexpr (detail::MrNamedSync<Resource>) {
      resource_.deallocate_sync(p, n, a);
    } else {
      resource_.deallocate(p, n, a);
    }
  }

 private:
  void* ask(std::size_t bytes, std::size_t alignment) {
    if constexpr (detail::MrNamedSync<Resource>) {
      return resource_.allocate_sync(bytes, alignment);
    } else {
      return resource_.allocate(bytes, alignment);
    }
  }

  Resource resource_;
  std::string name_;
};

/// A kvire resource as a `cuda::mr` resource with the given properties, for instance
/// `ToMr<PinnedMemory, cuda::mr::host_accessible, cuda::mr::device_accessible>`. Two are equal if one is a copy of the other.
///
/// Such a resource has no way to return an error: `refused` is told, and must not return. By default it prints the message and aborts; a program
/// with exceptions passes a function that throws.
template <ByteResource R, class... Properties>
class ToMr : public detail::MrProperty<ToMr<R, Properties...>, Properties>... {
 public:
  using Refused = void (*)(const Error& error);

  explicit ToMr(R resource = R(), Refused refused = &abort_with) : shared_(std::make_shared<R>(std::move(resource))), refused_(refused) {}

  void* allocate(std::size_t bytes, std::size_t alignment = default_alignment) {
    auto memory = shared_->allocate(at_least_one(bytes), static_cast<std::int64_t>(alignment));
    if (memory.ok()) return memory.value();
    refused_(memory.error());
    std::abort();
  }
  void deallocate(void* p, std::size_t bytes, std::size_t alignment = default_alignment) noexcept {
    shared_->deallocate(static_cast<std::byte*>(p), at_least_one(bytes), static_cast<std::int64_t>(alignment));
  }
  // The names of later versions.
  void* allocate_sync(std::size_t bytes, std::size_t alignment = default_alignment) { return allocate(bytes, alignment); }
  void deallocate_sync(void* p, std::size_t bytes, std::size_t alignment = default_alignment) noexcept { deallocate(p, bytes, alignment); }

  friend bool operator==(const ToMr& a, const ToMr& b) noexcept { return a.shared_ == b.shared_; }

 private:
  static constexpr std::size_t default_alignment = alignof(std::max_align_t);
  // Containers ask for no bytes, which kvire's resources refuse.
  static std::int64_t at_least_one(std::size_t bytes) { return bytes == 0 ? 1 : static_cast<std::int64_t>(bytes); }
  static void abort_with(const Error& error) { std::fprintf(stderr, "kvire: %s\n", error.message.c_str()); }

  std::shared_ptr<R> shared_;
  Refused refused_;
};

KVIRE_NAMESPACE_END
