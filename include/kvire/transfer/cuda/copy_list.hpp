// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/base/std.hpp>

KVIRE_NAMESPACE_BEGIN

namespace detail {

/// Pages of one layer of one entry, as a copy kernel takes them. All addresses are the device's.
struct CopyPiece {
  const unsigned char* from = nullptr;  ///< page 0
  unsigned char* to = nullptr;
  kstd::int64_t from_stride = 0;
  kstd::int64_t to_stride = 0;
  const kstd::int32_t* from_ids = nullptr;
  const kstd::int32_t* to_ids = nullptr;
  kstd::int32_t from_pages = 0;  ///< ids are below
  kstd::int32_t to_pages = 0;
  kstd::int32_t page_bytes = 0;
  kstd::int32_t chunk_bytes = 0;  ///< a multiple of 128
  kstd::int32_t chunks = 1;       ///< of a page
  kstd::int32_t end = 0;          ///< chunks of this piece and those before it
};

/// Page ids that travel with the launch itself.
template <int Pairs>
struct InlineIds {
  kstd::int32_t from[Pairs];
  kstd::int32_t to[Pairs];
};
template <>
struct InlineIds<0> {};

/// What one launch copies; passed by value.
template <int Capacity>
struct CopyList {
  CopyPiece piece[Capacity];
  kstd::int32_t pieces = 0;
  kstd::int32_t slots = 0;       ///< chunks in shared memory, a warp
  kstd::int32_t slot_bytes = 0;  ///< at least every chunk
  kstd::int32_t batch = 32;      ///< chunks that a warp prepares at a time, more than it has slots; 32 at most
  kstd::int32_t to_host = 0;     ///< which side is behind the link
  kstd::int32_t pace = 0;        ///< nanoseconds from one write to the host to the warp's next; 0: as fast as they finish
  int* bad = nullptr;            ///< pairs skipped because an id is beyond its pool
};

}  // namespace detail

KVIRE_NAMESPACE_END
