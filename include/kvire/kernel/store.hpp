// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mutex>
#include <string>

#include <kvire/exec/host/parallel.hpp>
#include <kvire/kernel/body/store.hpp>
#include <kvire/kernel/require.hpp>
#include <kvire/sync/host.hpp>

KVIRE_NAMESPACE_BEGIN

/// `count` rows of numbers in memory that must stay as it is until the stream has run the kernel.
struct Rows {
  constexpr Rows(const float* rows, std::int64_t n, std::int64_t row_stride = 0) : data(rows), element(Element::f32), count(n), stride(row_stride) {}
  /// bf16 rows, as codes.
  constexpr Rows(const std::uint16_t* bf16_codes, std::int64_t n, std::int64_t row_stride = 0)
      : data(bf16_codes), element(Element::bf16), count(n), stride(row_stride) {}

  const void* data;
  Element element;
  std::int64_t count;
  std::int64_t stride;  ///< elements from a row to the next; 0: the policy's dim
};

struct StoreOptions {
  RowOptions row;
  Prologue prologue;
  StoreCounts* counts = nullptr;  ///< what became of the rows is added here when the kernel runs; must live until then
  bool overlap = false;           ///< CUDA from sm_90 on: programmatic dependent launch, see launch_store; the host backend has none
};

/// What is wrong with the arguments of a store, before anything is queued. The numbers inside slots and positions are looked at when the
/// kernel runs: bad ones are skipped and counted.
template <LayoutPolicy P>
Status check_store(const Rows& rows, const std::int64_t* slots, const Prologue& prologue) {
  const auto wrong = [](std::string what) { return Error{ErrorCode::invalid_argument, std::string("store<") + P::name + ">: " + what}; };
  if (rows.count < 0) return wrong(std::to_string(rows.count) + " rows");
  if (rows.count > 0 && (rows.data == nullptr || slots == nullptr)) return wrong(std::to_string(rows.count) + " rows, but no memory of rows or slots");
  const auto aligned = [](const void* p, std::size_t bytes) { return reinterpret_cast<std::uintptr_t>(p) % bytes == 0; };
  if (!aligned(rows.data, static_cast<std::size_t>(bits(rows.element) / 8))) return wrong("rows are not aligned for their elements");
  if (!aligned(slots, alignof(std::int64_t))) return wrong("slots are not aligned for 64-bit integers");
  if (!aligned(prologue.weight, 4) || !aligned(prologue.cos, 4) || !aligned(prologue.sin, 4) || !aligned(prologue.positions, alignof(std::int64_t))) {
    return wrong("an array of the prologue is not aligned for its elements");
  }
  if (checked_mul(rows.count, rows.stride == 0 ? P::dim : rows.stride) < 0 && rows.stride >= 0) {
    return wrong(std::to_string(rows.count) + " rows, " + std::to_string(rows.stride == 0 ? P::dim : rows.stride) + " elements apart, are more than 63 bits can count");
  }
  if (prologue.norm && (!is_finite(prologue.epsilon) || prologue.epsilon < 0)) {  // of 0 a row of zeros gives NaN, as the formula says
    return wrong("an RMSNorm epsilon of " + std::to_string(prologue.epsilon) + "; a finite number not below 0 is needed");
  }
  if (rows.stride != 0 && rows.stride < P::dim) {
    return wrong("a row stride of " + std::to_string(rows.stride) + " elements is below the " + std::to_string(P::dim) + " of a row");
  }
  if (prologue.rope_dims < 0 || prologue.rope_dims % 2 != 0 || prologue.rope_dims > P::dim) {
    return wrong("RoPE on " + std::to_string(prologue.rope_dims) + " of " + std::to_string(P::dim) + " dims; an even count within the row is needed");
  }
  if (prologue.rope_dims > 0 && (prologue.cos == nullptr || prologue.sin == nullptr || prologue.table_rows <= 0)) {
    return wrong("RoPE needs tables of cosines and sines, and the count of their rows");
  }
  if (prologue.hadamard && !is_power_of_two(P::dim)) {
    return wrong("a Hadamard transform needs a power of two of dims, not " + std::to_string(P::dim));
  }
  return {};
}

/// Queues a store: each row goes through the prologue, is encoded as P, and is written at its slot (page * tokens_per_page + token). Negative
/// slots and slots of the null page are dropped; slots beyond the pool or of pages that the lease does not cover are dropped and counted as
/// bad. Slots must be distinct. Rows are computed by all cores, each by itself, so the bytes do not depend on how many there are.
/// Errors: invalid_argument as check_store says; the kernel itself does not fail.
template <LayoutPolicy P, class Lease>
Status store(Rows rows, const std::int64_t* slots, const Lease& lease, Stream<Host>& stream, const StoreOptions& options = {}) {
  require_target<P, Lease>();
  if constexpr (writes_pages<P, Lease>) {
    if (Status status = check_store<P>(rows, slots, options.prologue); !status.ok()) return status;
    launch(
        stream,
        [rows, slots, options, lease](const auto& view) {
          body::StoreArgs<P> args;
          args.rows = rows.data;
          args.row_element = rows.element;
          args.row_stride = rows.stride == 0 ? P::dim : rows.stride;
          args.slots = slots;
          args.pages = view.base;
          args.page_stride = view.page_stride;
          args.page_count = view.pages;
          args.options = options.row;
          args.prologue = options.prologue;
          std::mutex mutex;
          StoreCounts total;
          parallel_for(rows.count, 32, [&](std::int64_t begin, std::int64_t end) {
            StoreCounts counts;
            for (std::int64_t item = begin; item < end; ++item) {
              const std::int64_t page = slots[item] / P::tokens_per_page;
              if (slots[item] >= 0 && page > null_page && page < view.pages && !kernel_access::covers(lease, static_cast<std::int32_t>(page))) {
                ++counts.bad_slots;
              } else {
                counts += body::store<P>(HostGroup<32>{}, item, args);
              }
            }
            std::lock_guard lock(mutex);
            total += counts;
          });
          if (options.counts != nullptr) *options.counts += total;
        },
        lease);
  }
  return {};
}

KVIRE_NAMESPACE_END
