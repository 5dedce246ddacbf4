// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <kvire/kernel/cuda/launch.cuh>
#include <kvire/kernel/fp4_operand.cuh>
#include <kvire/kernel/sm90_logits_operand.cuh>

KVIRE_NAMESPACE_BEGIN

/// Paged sparse logits for Hopper: logit[b,t,s] = k_scale[s] * sum over heads of w[b,t,h] * relu(q[b,t,h] . k[s]).
///
/// How it works. The pages of all rows, cut into tiles of 64 tokens, form one list; each CTA takes a contiguous share of it, found from the lengths
/// inside the kernel. One warp brings tiles to shared memory by bulk copies through a ring of mbarriers; a warpgroup multiplies each tile by the queries
/// and writes 64 logits for each query token. A tile is an operand in shared memory, brought there by tensor copies with a swizzle, or goes to registers
/// (and frees its stage at once); then no tensor map is needed, so any page stride that is a multiple of 16 bytes will do.
namespace sm90 {

/// The pages of a layer as a tensor map: bytes of a key, tokens, pages.
struct alignas(128) KeyMap {
  unsigned char bytes[128];
};

#if KVIRE_SM90A
namespace detail {

/// Has the queries of a row brought to L2 by `count` threads.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE void prefetch_queries(const LogitsArguments& a, int row, int thread, int count) {
  constexpr int bytes = Plan::next_n * Plan::query_bytes;
  const char* queries = static_cast<const char*>(a.queries) + static_cast<kstd::int64_t>(row) * bytes;
  for (int i = thread * 128; i < bytes; i += count * 128) ptx::prefetch_l2(queries + i);
}

/// Brings tile `t` of a segment to a stage that is free; one warp.
template <class Plan>
KVIRE_DEVICE KVIRE_INLINE void bring_tile(const LogitsArguments& a, [[maybe_unused]] const KeyMap& map, const Segment<Plan>& s, int t, kstd::uint32_t shared, int stage) {
  constexpr int ids = Plan::pages_per_tile;
  constexpr int rows = tile_tokens / ids;  // of a tile on one page
  int id[ids];
  unsigned position[ids];
#pragma unroll
  for (int i = 0; i < ids; ++i) {
    id[i] = __shfl_sync(~0U, s.id[i], t);
    if constexpr (Plan::options) position[i] = __shfl_sync(~0U, s.position[i], t);
  }
  const kstd::uint32_t full = shared + Plan::full_at + stage * 8;
  const kstd::uint32_t to = shared + Plan::stages_at + stage * Plan::stage_bytes;
  if (ptx::elect()) {
    const int tile = s.tile + t;
    kstd::uint32_t bytes = 0;
#pragma unroll
    for (int i = 0; i < ids; ++i) {
      if constexpr (!Plan::options) position[i] = id[i] < 0 ? nowhere : static_cast<unsigned>(tile * tile_tokens + i * rows);
      if (id[i] >= 0) bytes += Plan::tile_bytes / ids;
    }
    ptx::store_shared4(shared + Plan::meta_at + stage * 16,
                       {static_cast<kstd::uint32_t>(s.row), static_cast<kstd::uint32_t>(tile * tile_tokens), position[0], position[ids - 1]});
    ptx::mbarrier_arrive_expect(full, bytes);
#pragma unroll
    for (int i = 0; i < ids; ++i) {
      if (id[i] < 0) continue;
      const kstd::byte* page = a.pages + a.page_stride * id[i];
      const int part = tile % Plan::tiles_per_page;
      if constexpr (Plan::swizzled) {
#pragma unroll
        for (int x = 0; x < Plan::key_row; x += Plan::width) {
          ptx::tensor_load(to + x / Plan::width * Plan::plane_bytes + i * rows * Plan::width, &map, x, part * tile_tokens, id[i], full);
        }
        if constexpr (Plan::scaled) {
          ptx::bulk_load(shared + Plan::scales_at + stage * Plan::scale_bytes + i * rows * Plan::scale_row,
                         page + Plan::tokens * Plan::key_row + part * tile_tokens * Plan::scale_row, rows * Plan::scale_row, full);
        }
      } else if constexpr (Plan::whole_page) {
        ptx::bulk_load(to, page, Plan::tile_bytes, full);
      } else {
        ptx::bulk_load(to + i * rows * Plan::key_pitch, page + part * Plan::value_bytes, rows * Plan::key_pitch, full);
        if constexpr (Plan::scale_plane) {
          ptx::bulk_load(to + Plan::value_bytes + i * rows * Plan::scale_row, page + Plan::tokens * Plan::key_pitch + part * tile_tokens * Plan::scale_row,
                         rows * Plan::scale_row, full);
        }
      }
    }
  }
  __syncwarp();
}

/// The producer warp: brings all tiles of the share.
template <class Plan, class Shape>
KVIRE_DEVICE KVIRE_INLINE void produce(const LogitsArguments& a, const KeyMap& map, const Guess<Plan>& guess, Share share, kstd::uint32_t shared, int lane) {
  Walk<Plan> walk(a, lane, share, true);
  Segment<Plan> now, next;
  bool more = walk.next(now, &guess);
  int stage = 0;
  kstd::uint32_t parity = 1;
  while (more) {
    walk.check(now);
#pragma unroll 1
    for (int t = 0; t < now.tiles; ++t) {
      ptx::mbarrier_wait(shared + Plan::empty_at + stage * 8, parity);
      bring_tile<Plan>(a, map, now, t, shared, stage);
      if (++stage == Shape::stages) {
        stage = 0;
        parity ^= 1;
      }
      if (t == 1 || now.tiles == 1) {
        // The first tiles are under way: the ids of the next segment can follow, and, if it is of another row, its queries as far as L2.
        more = walk.next(next);
        if (more && next.row != now.row) prefetch_queries<Plan>(a, next.row, lane, 32);
      }
    }
    now = next;
  }
}

/// Keeps a lane's number in its register: the assembler would compute it again at every use.
template <class T>
KVIRE_DEVICE KVIRE_INLINE T keep(T x, int lane) {
  return __shfl_sync(~0U, x, lane);
}

struct Nothing {};

/// The consumer warpgroup: all tiles of the share. `row`: whose queries are in shared memory.
///
/// What counts here is the number of instructions: while an ordinary one reads its operands, the tensor cores do not read theirs, so the time of a
/// tile is that of its products and of everything else, one after the other, however many warps there are.
template <class P, class Plan, int Heads, class Shape>
struct Consumer {
  static constexpr int columns = Plan::columns;
  static constexpr int next_n = Plan::next_n;
  static constexpr int together = Shape::together;
  static constexpr int products = next_n / together;  // of a tile
  static constexpr bool few = next_n <= 2;            // what belongs to a query token stays in registers
  static constexpr bool resident = Shape::resident && few;
  using Sums = float[columns * together];

  const LogitsArguments& a;
  int row;
  kstd::uint32_t shared;
  int thread;
  [[no_unique_address]] std::conditional_t<Shape::candidates, KeptScores<Plan::kept, next_n>, Nothing> kept;
  int lane = keep(thread % 32, thread);
  int c = lane & 3;
  int first = keep(thread / 32 * 16 + thread % 32 / 4, thread);  // row of a tile: this lane has a part of it and of the eighth behind
  int local = first + c % 2 * 8;                                 // the one that it finishes
  int key_at = keep(static_cast<int>(key_offset<Plan>(thread / 32, thread % 32)), thread);
  int stage = 0;
  kstd::uint32_t parity = 0;
  float held[resident ? next_n : 1][columns / 2];
  char* out[few ? products : 1];
  int visible[few ? products : 1];

  KVIRE_DEVICE KVIRE_INLINE kstd::uint32_t weights(int q) const { return shared + Plan::weights_at + c * Plan::weight_run + q * 4 * Plan::weight_run; }
  KVIRE_DEVICE KVIRE_INLINE int token_of(int product) const { return product * together + (together == 2 ? c / 2 : 0); }
  KVIRE_DEVICE KVIRE_INLINE int score_shift() const { return Plan::options && a.bf16 ? 1 : 2; }
  KVIRE_DEVICE KVIRE_INLINE void take_row() {
#pragma unroll
    for (int i = 0; i < (few ? products : 1); ++i) {
      out[i] = static_cast<char*>(a.logits) + (((static_cast<kstd::int64_t>(row) * next_n + token_of(i)) * a.logits_stride) << score_shift());
      visible[i] = static_cast<int>(ptx::load_shared(shared + Plan::visible_at + token_of(i) * 4));
    }
    if constexpr (resident) {
#pragma unroll
      for (int q = 0; q < next_n; ++q) load_weights<Plan>(held[q], weights(q));
    }
  }
  /// Sum over a quarter of the heads, of query token `q`, whose products are in d from column First on.
  template <int First, int Known>
  KVIRE_DEVICE KVIRE_INLINE float sum_token(const Sums& d, int q) const {
    float low, high;
    if constexpr (resident) {
      head_sums<Plan, First>(d, held[Known], low, high);
    } else {
      float w[columns / 2];
      load_weights<Plan>(w, weights(q));
      head_sums<Plan, First>(d, w, low, high);
    }
    return half_sum(low, high, c);
  }
  /// Writes a logit from the sum over the heads. `product`: of which query tokens; `to`: their scores; `seen`: the tokens that this lane's one sees;
  /// `token`: index of the score; `position`: of the key. Together: of a warp's 16 keys, lanes with c of 2 and 3 write those of the second query token.
  KVIRE_DEVICE KVIRE_INLINE void write(int product, char* to, int seen, int token, unsigned position, float sum, float scale) {
    const bool mine = together == 2 || c < 2;
    const bool there = position < static_cast<unsigned>(seen);
    float logit = Plan::scaled ? mul_exact(sum, scale) : sum;
    if (!there) logit = -__int_as_float(0x7F800000);
    if (logit != logit) {
      logit = -__int_as_float(0x7F800000);
      if (mine && a.nan_logits != nullptr) atomicAdd(a.nan_logits, 1ULL);
    }
    if constexpr (Shape::candidates) {
      if (mine && token < seen) kept.put(token_of(product), token, there ? logit : float_of(nan_bits));
      return;
    }
    if (mine && token < (listed<Plan>(a) ? listed_scores<Plan>(a) : seen)) {
      if (Plan::options && a.bf16) {
        store_logit(reinterpret_cast<kstd::uint16_t*>(to) + token, logit);
      } else {
        store_logit(reinterpret_cast<float*>(to) + token, logit);
      }
    }
    if constexpr (Shape::best) {
      const kstd::uint32_t key = there ? order_key(logit) : 0U;
#pragma unroll
      for (int t = 0; t < together; ++t) {
        const bool of_t = together == 1 || c / 2 == t;
        const kstd::uint32_t best = __reduce_max_sync(~0U, of_t ? key : 0U);
        if (lane == 2 * t && token < seen) {  // lanes with the first token
          const kstd::int64_t at = static_cast<kstd::int64_t>(row) * next_n + token_of(product);
          a.group_best[at * ((a.logits_stride + 15) / 16) + token / 16] = best;
        }
      }
    }
  }
  /// Sums and logits of a product, which is in d. Known: which one, if `few`.
  template <int Known>
  KVIRE_DEVICE KVIRE_INLINE void finish(const Sums& d, int product, int token, unsigned position, float scale) {
    float sum = sum_token<0, Known * together>(d, product * together);
    if constexpr (together == 2) {  // lanes with c of 0 and 1 finish the first query token, the others the second
      const float second = sum_token<columns, Known * together + 1>(d, product * together + 1);
      sum = add_exact(c >= 2 ? second : sum, __shfl_xor_sync(~0U, c >= 2 ? sum : second, 2));
    } else {
      sum = add_exact(sum, __shfl_xor_sync(~0U, sum, 2));
    }
    const int seen = few ? visible[few ? Known : 0] : static_cast<int>(ptx::load_shared(shared + Plan::visible_at + token_of(product) * 4));
    char* to = few ? out[few ? Known : 0] : out[0] + (product * together * a.logits_stride << score_shift());
    write(product, to, seen, token, position, sum, scale);
  }
  /// This lane reads a stage no more. All arrive: that one lane may speak for its warp is more than racecheck follows, and it costs no time.
  KVIRE_DEVICE KVIRE_INLINE void release(int which) { ptx::mbarrier_arrive(shared + Plan::empty_at + which * 8); }
  /// One product of a tile, to the last. `keys`: its operand, in registers or in shared memory; `done` is called when nothing reads it any more. Known:
  /// which product, if `few`.
  template <int Known, class Keys, class Done>
  KVIRE_DEVICE KVIRE_INLINE void product_of(const Keys& keys, int product, int token, unsigned position, float scale, Done&& done) {
    Sums d;
    start_product<Plan>(d, keys, query_operand<Plan>(shared + Plan::queries_at + product * together * Plan::query_bytes));
    ptx::wgmma_wait<0>();
    if (product == products - 1) done();
    ptx::touch(d);
    finish<Known>(d, product, token, position, scale);
  }
  template <class Keys, class Done>
  KVIRE_DEVICE KVIRE_INLINE void products_of(const Keys& keys, int token, unsigned position, float scale, Done&& done) {
    if constexpr (few) {
      product_of<0>(keys, 0, token, position, scale, done);
      if constexpr (products == 2) product_of<1>(keys, 1, token, position, scale, done);
    } else {
#pragma unroll 1
      for (int product = 0; product < products; ++product) product_of<0>(keys, product, token, position, scale, done);
    }
  }
  /// KeepCandidates: before a tile; `other`: it is of another row, or there is none.
  KVIRE_DEVICE KVIRE_INLINE void make_room([[maybe_unused]] bool other) {
    if constexpr (Shape::candidates) {
      if (!other && !kept.full()) return;
      kept.flush(other, (static_cast<kstd::int64_t>(blockIdx.x) + row) * next_n, [&](int q) { return static_cast<int>(ptx::load_shared(shared + Plan::visible_at + q * 4)); });
    }
  }
  /// `tiles`: of the share.
  KVIRE_DEVICE KVIRE_INLINE void run(int tiles) {
    bool begun = false;  // KeepCandidates: this CTA's part of the row
    constexpr int rows = tile_tokens / Plan::pages_per_tile;
    take_row();
#pragma unroll 1
    for (; Shape::candidates || tiles > 0; --tiles) {
      const bool last = Shape::candidates && tiles == 0;
      Words4 meta{};
      if (!last) {
        ptx::mbarrier_wait(shared + Plan::full_at + stage * 8, parity);
        meta = ptx::load_shared4(shared + Plan::meta_at + stage * 16);
      }
      if (begun) make_room(last || static_cast<int>(meta.x) != row);
      if (last) return;
      if (static_cast<int>(meta.x) != row) {
        begun = false;
        row = static_cast<int>(meta.x);
        ptx::named_barrier(1, group_threads);  // all warps are through with the old row's queries
        load_row<Plan, Heads>(a, row, shared, thread);
        ptx::named_barrier(1, group_threads);
        take_row();
      }
      if constexpr (Shape::candidates) {
        if (!begun) kept.begin(static_cast<int>(meta.y));
        begun = true;
        kept.next_tile();
      }
      const int token = static_cast<int>(meta.y) + local;
      const unsigned position = Plan::pages_per_tile > 1 ? (local < rows ? meta.z : meta.w) + local % rows : meta.z + local;
      const int used = stage;
      if (++stage == Shape::stages) {
        stage = 0;
        parity ^= 1;
      }
      if constexpr (Plan::swizzled) {
        float scale = 1;
        if constexpr (Plan::scaled) scale = __uint_as_float(ptx::load_shared(shared + Plan::scales_at + used * Plan::scale_bytes + local * 4));
        const ptx::Descriptor tile = ptx::swizzled_descriptor<Plan::width>(shared + Plan::stages_at + used * Plan::stage_bytes);
        products_of(tile, token, position, scale, [&] {
          release(used);
          // A wait for nothing ends the basic block, within which the assembler would move the release behind the sums.
          ptx::mbarrier_wait(shared + Plan::open_at, 1);
        });
      } else {
        const kstd::uint32_t tile = shared + Plan::stages_at + used * Plan::stage_bytes;
        kstd::uint32_t keys[Plan::steps][4];
        [[maybe_unused]] bool lost[2] = {false, false};
        float scale = 1;
        if constexpr (Plan::fp4) {
          scale = load_fp4_keys<Plan>(keys, lost, tile, shared + Plan::codes_at, first, c);
        } else {
          load_keys<Plan>(keys, tile + key_at, first % 2 != 0);
          if constexpr (Plan::scaled) {
            scale = __uint_as_float(ptx::load_shared(tile + (Plan::interleaved ? local * Plan::key_pitch + Plan::key_row : Plan::value_bytes + local * 4)));
          }
        }
        release(used);  // the tile is in registers
        complete(keys);
        products_of(keys, token, position, scale, [] {});
        if constexpr (Plan::fp4 && Plan::fp8) {
          if (static_cast<int>(position) < 0) lost[0] = lost[1] = false;  // no page
          const int back = local - first / 16 * 16;
          exact_logits<P, Plan, Heads, Shape>(a, row, token - back, static_cast<int>(position) - back, lost, shared, lane);
        }
      }
    }
  }
};

}  // namespace detail
#endif  // KVIRE_SM90A

/// Starts nothing unless compiled for sm_90a. Grid: any number of CTAs; block: Shape::threads; dynamic shared memory: Plan::shared_bytes.
template <class P, Element Query, int Heads, int NextN, class Shape>
__global__ void __launch_bounds__(Shape::threads, Shape::ctas_per_sm) logits_kernel(const __grid_constant__ LogitsArguments a, const __grid_constant__ KeyMap map) {
#if KVIRE_SM90A
  using Plan = LogitsPlan<P, Query, Heads, NextN, Shape>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = __shfl_sync(~0U, thread / 32, 0), lane = thread % 32;
  const kstd::uint32_t shared = detail::keep(ptx::shared_address(memory), lane);
  constexpr bool selected_from = Shape::best || Shape::candidates;  // by a kernel that reads the lengths as soon as it starts
  if constexpr (!selected_from) ptx::launch_dependents();
  // Where this CTA's share would start were all rows as long as the table is wide: what lies there is read while the lengths are on their way.
  const int width = detail::tiles_of(detail::most_scores<Plan>(a));
  int begin, size;
  detail::split(static_cast<unsigned>(width) * static_cast<unsigned>(a.batch), blockIdx.x, gridDim.x, begin, size);
  const int guess = begin / width < a.batch ? begin / width : 0;

  if (warp == group_threads / 32) {
    if constexpr (Plan::swizzled) ptx::prefetch_tensor_map(&map);
    if (lane < Shape::stages) {
      ptx::mbarrier_init(shared + Plan::full_at + lane * 8, 1);
      ptx::mbarrier_init(shared + Plan::empty_at + lane * 8, group_threads);
      if (lane == 0) ptx::mbarrier_init(shared + Plan::open_at, 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
    ptx::named_barrier_arrive(2, Shape::threads);
    ptx::wait_for_earlier_grids();
    if constexpr (selected_from) ptx::launch_dependents();
    const detail::Guess<Plan> ids(a, lane, guess, begin - guess * width);
    detail::produce<Plan, Shape>(a, map, ids, detail::find_share<Plan>(a, lane, blockIdx.x, gridDim.x), shared, lane);
  } else {
    ptx::wait_for_earlier_grids();
    if constexpr (selected_from) ptx::launch_dependents();
    // Warms L2: the whole page table, line by line over all CTAs.
    const kstd::int64_t lines = (a.table_stride * a.batch * 4 + 127) / 128;
    const kstd::int64_t line = static_cast<kstd::int64_t>(blockIdx.x) * group_threads + thread;
    if (line < lines) ptx::prefetch_l2(reinterpret_cast<const char*>(a.page_table) + line * 128);
    if constexpr (Plan::fp4 && Plan::fp8) {
      if (thread < 17) detail::make_codes(shared + Plan::codes_at, thread);
    }
    detail::load_row<Plan, Heads>(a, guess, shared, thread);
    ptx::named_barrier(2, Shape::threads);
    const detail::Share share = detail::find_share<Plan>(a, lane, blockIdx.x, gridDim.x);
    if (share.tiles == 0) return;
    if (share.row != guess) {  // where lengths differ; known before the first tile is there
      detail::load_row<Plan, Heads>(a, share.row, shared, thread);
      ptx::named_barrier(1, group_threads);
    }
    if constexpr (Shape::candidates) {
      auto& kept = *reinterpret_cast<detail::KeptScoresMemory<Plan::kept, NextN>*>(memory + Plan::kept_at);
      detail::Consumer<P, Plan, Heads, Shape>{a, share.row, shared, thread, {a.candidates, kept, a.candidates.whole(share.each), thread}}.run(share.tiles);
    } else {
      detail::Consumer<P, Plan, Heads, Shape>{a, share.row, shared, thread, {}}.run(share.tiles);
    }
  }
#else
  (void)a, (void)map;
  __trap();
#endif
}

namespace detail {

/// Asks the driver for the tensor map of a layer's keys. Host only; touches no memory of the device.
inline cudaError_t make_key_map(KeyMap& map, const LogitsArguments& a, int row_bytes, int width, int tokens) {
  static const auto encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry) : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  static_assert(require_tuning<KeyMap, (sizeof(KeyMap) == sizeof(CUtensorMap) && alignof(KeyMap) >= alignof(CUtensorMap))>());
  const cuuint64_t extent[3] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(a.page_count > 0 ? a.page_count : 1)};
  const cuuint64_t stride[2] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(a.page_stride)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(width), static_cast<cuuint32_t>(tokens < tile_tokens ? tokens : tile_tokens), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result = encode(reinterpret_cast<CUtensorMap*>(&map), CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<kstd::byte*>(a.pages), extent, stride, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, width == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace detail

/// Whether there are KeepCandidates kernels of these pages: not of fp4 keys, some of whose scores are mended when they have been written.
template <class P, int NextN>
constexpr bool keeps_candidates() {
  return NextN <= 2 && P::template element_of<role::Value> != Element::e2m1;
}

/// CTAs that launch_logits launches: at most `sms` times Shape::ctas_per_sm; fewer where the table cannot hold as many tiles.
template <class P, class Shape>
kstd::int64_t logits_ctas(const LogitsArguments& a, int sms) {
  const kstd::int64_t scores = (a.blocks != nullptr ? a.max_blocks : a.table_width) * P::tokens_per_page;  // of a row, at most
  const kstd::int64_t most = a.batch * ((scores + tile_tokens - 1) / tile_tokens);
  const kstd::int64_t fits = static_cast<kstd::int64_t>(sms) * Shape::ctas_per_sm;
  return most < fits ? most : fits;
}

/// Launches the kernel on `stream` with at most `sms` times Shape::ctas_per_sm CTAs; fewer where the table cannot hold as many tiles.
/// `overlap`: programmatic dependent launch. The kernel may then start while the stream's earlier kernel ends; it waits for that one before
/// it reads anything.
template <class P, Element Query, int Heads, int NextN, class Shape = DefaultLogitsShape<P, Query, Heads, NextN>>
cudaError_t launch_logits(const LogitsArguments& a, int sms, cudaStream_t stream, bool overlap = false) {
  static_assert(require_reader<P, LogitsReader>());
  using Plan = LogitsPlan<P, Query, Heads, NextN, Shape>;
  auto* kernel = &logits_kernel<P, Query, Heads, NextN, Shape>;
  const kstd::int64_t scores = (a.blocks != nullptr ? a.max_blocks : a.table_width) * Plan::tokens;  // of a row, at most
  if (a.batch <= 0 || scores <= 0 || a.logits_stride <= 0) return cudaSuccess;
  if (!Shape::options && (a.bf16 || a.blocks != nullptr)) return cudaErrorInvalidValue;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Plan::shared_bytes);
  if (error != cudaSuccess) return error;
  KeyMap map{};
  if constexpr (Plan::swizzled) {
    if (const cudaError_t e = detail::make_key_map(map, a, Plan::key_row, Plan::width, Plan::tokens); e != cudaSuccess) return e;
  }
  return kvire::detail::launch_kernel(kernel, {logits_ctas<P, Shape>(a, sms), Shape::threads, Plan::shared_bytes, overlap}, stream, a, map);
}

}  // namespace sm90

KVIRE_NAMESPACE_END
