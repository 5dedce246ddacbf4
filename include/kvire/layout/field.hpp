// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/layout/element.hpp>

KVIRE_NAMESPACE_BEGIN

/// What a field is for. A role is a tag type with a `name`; add your own beside these.
namespace role {
struct Value {
  static constexpr const char* name = "value";
};
struct Scale {
  static constexpr const char* name = "scale";
};
/// The part of an MLA latent without position.
struct Nope {
  static constexpr const char* name = "nope";
};
/// The part of an MLA latent that carries the rotary position.
struct Rope {
  static constexpr const char* name = "rope";
};
/// Plain attention: the K half and the V half of a row.
struct K {
  static constexpr const char* name = "k";
};
struct V {
  static constexpr const char* name = "v";
};
/// fp32 running state of a compressor.
struct State {
  static constexpr const char* name = "state";
};
}  // namespace role

/// What the numbers are, beyond their format: part of the fingerprint, because two caches can agree on every byte and mean different
/// things. A tag type with a `text`.
namespace content {
struct Plain {
  static constexpr const char* text = "plain";
};
/// DeepSeek-V4 index keys: RoPE on the last 64 dims, then a 128-point Hadamard.
struct RopeTail64Hadamard128 {
  static constexpr const char* text = "rope_tail64+hadamard128";
};
/// DeepSeek-V3.2 index keys: RoPE on the first 64 dims.
struct RopeHead64 {
  static constexpr const char* text = "rope_head64";
};
struct MlaLatent {
  static constexpr const char* text = "mla_latent";
};
struct CompressorState {
  static constexpr const char* text = "compressor_state";
};
}  // namespace content

/// `Count` elements of one kind in every row, serving one role.
template <class Role, Element E, int Count>
struct Field {
  using role = Role;
  static constexpr bool is_padding = false;
  static constexpr Element element = E;
  static constexpr int count = Count;
  static constexpr kstd::int64_t size_bits = static_cast<kstd::int64_t>(Count) * bits(E);
};

/// `Count` declared bytes in every row that mean nothing: a store writes zeros there, readers skip them.
template <int Count>
struct Pad {
  using role = void;
  static constexpr bool is_padding = true;
  static constexpr Element element = Element::u8;
  static constexpr int count = Count;
  static constexpr kstd::int64_t size_bits = static_cast<kstd::int64_t>(Count) * 8;
};

/// A plane of a page: `tokens_per_page` rows, each the given fields and padding in order.
template <class... Parts>
struct Plane {
  static constexpr int part_count = sizeof...(Parts);
  static constexpr kstd::int64_t row_bits = (Parts::size_bits + ... + 0);
  static constexpr kstd::int64_t row_bytes = (row_bits + 7) / 8;
};

KVIRE_NAMESPACE_END
