// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <kvire/base/ints.hpp>
#include <kvire/base/result.hpp>
#include <kvire/layout/element.hpp>

KVIRE_NAMESPACE_BEGIN

/// A contiguous array that a kernel reads or writes: a pointer and its extents, the last running fastest. Owns nothing. Kernels check the
/// extents against each other before anything runs.
template <class T, int Rank>
struct Tensor {
  T* data = nullptr;
  std::int64_t extent[Rank] = {};

  /// The product of the extents; -1 if one is negative or it does not fit 63 bits.
  std::int64_t elements() const {
    std::int64_t n = 1;
    for (const std::int64_t e : extent) {
      if (e == 0) return 0;
    }
    for (const std::int64_t e : extent) n = checked_mul(n, e);
    return n;
  }
  template <class U>
    requires(!std::is_const_v<T> && std::is_same_v<U, const T>)
  operator Tensor<U, Rank>() const {
    Tensor<U, Rank> out{data, {}};
    for (int i = 0; i < Rank; ++i) out.extent[i] = extent[i];
    return out;
  }
};

/// Queries of an indexer, [batch][next_n][heads][dim], contiguous. Elements: e4m3 (bytes), bf16 (16 bits) or f32.
struct Queries {
  const void* data = nullptr;
  Element element = Element::f32;
  std::int64_t batch = 0;   ///< rows: sequences of the batch
  std::int64_t next_n = 1;  ///< query tokens of each row
  std::int64_t heads = 0;
  std::int64_t dim = 0;
};

/// Scores of an indexer, contiguous, the last extent a row's positions: f32, or bf16 codes, which are the f32 scores rounded to nearest even.
template <int Rank>
class ScoreTensor {
 public:
  ScoreTensor() : ScoreTensor(Tensor<float, Rank>{}) {}
  ScoreTensor(const Tensor<float, Rank>& scores) : ScoreTensor(scores.data, Element::f32, scores.extent) {}
  ScoreTensor(float* data, const std::int64_t (&extent)[Rank]) : ScoreTensor(data, Element::f32, extent) {}
  static ScoreTensor bf16(const Tensor<std::uint16_t, Rank>& scores) { return {scores.data, Element::bf16, scores.extent}; }

  void* data() const { return shape_.data; }
  Element element() const { return element_; }
  std::int64_t extent(int i) const { return shape_.extent[i]; }
  /// The extents alone, for checks.
  const Tensor<std::byte, Rank>& shape() const { return shape_; }

 private:
  ScoreTensor(void* data, Element element, const std::int64_t (&extent)[Rank]) : element_(element) {
    shape_.data = static_cast<std::byte*>(data);
    for (int i = 0; i < Rank; ++i) shape_.extent[i] = extent[i];
  }

  Tensor<std::byte, Rank> shape_;
  Element element_;
};

namespace detail {

/// Collects the first complaint about a kernel's arguments.
class ArgumentCheck {
 public:
  explicit ArgumentCheck(const char* kernel) : kernel_(kernel) {}

  void require(bool ok, ErrorCode code, const std::string& text) {
    if (!ok && !error_) error_ = Error{code, std::string(kernel_) + ": " + text};
  }

  /// Exact extents of a tensor, and memory behind it unless it is empty. `what` names it, `from` what the extents derive from.
  template <class T, int Rank>
  void extents(const char* what, const Tensor<T, Rank>& tensor, const std::int64_t (&want)[Rank], const char* from, std::size_t alignment = alignof(T)) {
    bool equal = true;
    for (int i = 0; i < Rank; ++i) equal = equal && tensor.extent[i] == want[i];
    bool given = tensor.data != nullptr;
    for (const std::int64_t e : tensor.extent) given = given || e != 0;
    if (!equal && !given) require(false, ErrorCode::mismatch, std::string(what) + " is not given, " + from + " need " + text(want));
    if (!equal) require(false, ErrorCode::mismatch, std::string(what) + " is " + text(tensor.extent) + ", " + from + " need " + text(want));
    bool negative = false;
    for (const std::int64_t e : tensor.extent) negative = negative || e < 0;
    const std::int64_t elements = equal && !negative ? tensor.elements() : 0;
    if (elements < 0) require(false, ErrorCode::out_of_range, std::string(what) + " is " + text(tensor.extent) + ", which is more than 63 bits can count");
    memory(what, static_cast<const void*>(tensor.data), elements, alignment);
  }
  /// The same of scores, whose elements are known at run time.
  template <int Rank>
  void extents(const char* what, const ScoreTensor<Rank>& scores, const std::int64_t (&want)[Rank], const char* from) {
    extents(what, scores.shape(), want, from, static_cast<std::size_t>(bits(scores.element()) / 8));
  }
  void memory(const char* what, const void* data, std::int64_t elements, std::size_t alignment) {
    if (elements <= 0) return;
    require(data != nullptr, ErrorCode::invalid_argument, std::string(what) + " has " + std::to_string(elements) + " elements and no memory");
    const auto beyond = reinterpret_cast<std::uintptr_t>(data) % alignment;
    if (beyond != 0) {
      require(false, ErrorCode::invalid_argument, std::string(what) + " is " + std::to_string(beyond) + " bytes beyond a multiple of " + std::to_string(alignment) +
                                                      ", the bytes of its element");
    }
  }
  template <class T>
    requires(!std::is_void_v<T>)
  void memory(const char* what, const T* data, std::int64_t elements) {
    memory(what, static_cast<const void*>(data), elements, alignof(T));
  }
  /// Queries for keys of `dim` elements: what they are made of, counts within bounds, `most_next_n` of query tokens among them, and memory.
  void queries(const Queries& q, int dim, const char* policy, std::int64_t most_next_n) {
    require(q.element == Element::e4m3 || q.element == Element::bf16 || q.element == Element::f32, ErrorCode::unsupported,
            std::string("queries are ") + name_of(q.element) + ", not e4m3, bf16 or f32");
    require(q.dim == dim, ErrorCode::mismatch, "queries have dim " + std::to_string(q.dim) + ", keys of " + policy + " have " + std::to_string(dim));
    between("queries.batch", q.batch, 0, 0x7FFFFFFF);
    between("queries.next_n", q.next_n, 1, most_next_n);
    between("queries.heads", q.heads, 1, 0x7FFFFFFF);
    if (!ok()) return;
    const std::int64_t elements = Tensor<const void, 4>{q.data, {q.batch, q.next_n, q.heads, q.dim}}.elements();
    require(elements >= 0, ErrorCode::out_of_range, "queries are more elements than 63 bits can count");
    memory("queries", q.data, elements, static_cast<std::size_t>(bits(q.element) / 8));
  }
  void between(const char* what, std::int64_t value, std::int64_t least, std::int64_t most) {
    if (value < least) require(false, ErrorCode::invalid_argument, std::string(what) + " is " + std::to_string(value) + ", below " + std::to_string(least));
    if (value > most) require(false, ErrorCode::out_of_range, std::string(what) + " is " + std::to_string(value) + ", above " + std::to_string(most));
  }

  /// Lengths are [batch][1], one a row, or [batch][next_n], one a query token; each from 0 to the smallest of the bounds. Those in device memory
  /// (`readable` false) are not looked at.
  void lengths(const Tensor<const std::int32_t, 2>& lengths, std::int64_t batch, std::int64_t next_n, std::int64_t table_tokens, std::int64_t stride,
               bool readable = true) {
    const bool per_query = lengths.extent[1] == next_n;
    if (lengths.extent[0] != batch || (lengths.extent[1] != 1 && !per_query)) {
      const std::int64_t want[2] = {batch, 1};
      require(false, ErrorCode::mismatch,
              "lengths is " + text(lengths.extent) + ", one a row needs " + text(want) + " and one a query token " + std::to_string(next_n) + " of them");
      return;
    }
    memory("lengths", lengths.data, lengths.elements());
    if (error_ || !readable) return;
    for (std::int64_t i = 0; i < lengths.elements(); ++i) {
      const std::int64_t length = lengths.data[i];
      if (length >= 0 && length <= table_tokens && length <= stride) continue;
      const std::string at = "lengths[" + std::to_string(i) + "] is " + std::to_string(length);
      require(length >= 0, ErrorCode::out_of_range, at + ", below 0");
      require(length <= table_tokens, ErrorCode::out_of_range, at + ", above the " + std::to_string(table_tokens) + " tokens of a page-table row");
      require(false, ErrorCode::out_of_range, at + ", above the " + std::to_string(stride) + " scores of a row");
    }
  }

  bool ok() const { return !error_; }
  /// Requires !ok().
  const Error& error() const { return *error_; }

  template <int Rank>
  static std::string text(const std::int64_t (&extent)[Rank]) {
    std::string out;
    for (const std::int64_t e : extent) out.append("[").append(std::to_string(e)).append("]");
    return out;
  }

 private:
  const char* kernel_;
  std::optional<Error> error_;
};

inline constexpr std::int64_t most_int32 = 0x7FFFFFFF;

// A copy for queued work: what was checked is what is used.
inline std::vector<std::int32_t> own(const Tensor<const std::int32_t, 2>& lengths) {
  return {lengths.data, lengths.data + lengths.elements()};
}

}  // namespace detail
KVIRE_NAMESPACE_END
