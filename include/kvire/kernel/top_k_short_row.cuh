// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvire/kernel/top_k_short_cut.cuh>

KVIRE_NAMESPACE_BEGIN

namespace detail::topk {

#if KVIRE_CUDA_COMPILER

/// A short row: one block keeps it in registers, and looks for the k-th best by bins of equal width. Where they lie is a guess by a sample of the row, which
/// decides how many scores share the bin that is found, never what is selected.
template <int Threads, int Items, bool Paged>
struct ShortRow : ShortCut<Threads, Items, Paged> {
  using Base = ShortCut<Threads, Items, Paged>;
  using Choice = typename Base::Choice;
  using Base::bins, Base::count, Base::get, Base::lane, Base::listed_as, Base::no_bin, Base::none, Base::p, Base::part, Base::place, Base::quads, Base::row, Base::s;
  using Base::tid, Base::warp, Base::warps;

  // The same, of which the assembler does not know that, so that it keeps it instead of computing it again, behind a wait or in each branch.
  template <class T>
  __device__ T* kept(T* x) const { return reinterpret_cast<T*>(__shfl_sync(~0U, reinterpret_cast<u64>(x), lane)); }

  // --- loads; NaN for what is not there ---
  __device__ static float4 load_whole(const float* from, bool whole) {
    float4 v;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\n"
        "mov.b32 %0, 0x7FFFFFFF;\nmov.b32 %1, 0x7FFFFFFF;\nmov.b32 %2, 0x7FFFFFFF;\nmov.b32 %3, 0x7FFFFFFF;\n"
        "@p ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "l"(from), "r"(int(whole)));
    return v;
  }
  __device__ static float4 load_some(const float* from, int left) {
    return {left > 0 ? from[0] : none(), left > 1 ? from[1] : none(), left > 2 ? from[2] : none(), left > 3 ? from[3] : none()};
  }
  // A thread's quads, from `from` on, and the sample: eight runs of 16 scores. First what is asked for by all lanes of a warp; where that is not everything
  // (false), the rest, when all else that can be done before has been done.
  __device__ bool load(float4 (&v)[quads], float4& sample, const float* from, int length) const {
    const bool whole = p.vector_loads && length >= max((warp + 1) * part, 128);
#pragma unroll
    for (int q = 0; q < quads; ++q) v[q] = load_whole(from + q * 128, whole);
    sample = load_whole(from + sampled(length), whole);
    return whole;
  }
  __device__ void load_rest(float4 (&v)[quads], float4& sample, const float* from, int length) const {
#pragma unroll
    for (int q = 0; q < quads; ++q) v[q] = load_some(from + q * 128, length - place(q));
    sample = load_some(from + sampled(length), length - place(0) - sampled(length));
  }
  __device__ int sampled(int length) const { return lane / 4 * (length / 8 & ~3) + lane % 4 * 4 - place(0); }
  // The row on its way to L2 while its length is on its way here; nothing is read.
  __device__ void prefetch(const float* scores) const {
    if (tid < min(p.most, Threads * Items) / 32) ptx::prefetch_l2(scores + tid * 32);
    if constexpr (Paged) {
      if (std::int64_t(tid) * 32 * p.args.tokens_per_page < min(p.most, Threads * Items)) ptx::prefetch_l2(p.args.page_table + std::int64_t(this->request()) * p.args.max_pages + tid * 32);
    }
  }
  // By one instruction, behind which the assembler waits no sooner than the length is needed.
  __device__ int load_length() const {
    int length;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u64 p, %1, 0;\nmov.b32 %0, %2;\n@p ld.global.b32 %0, [%3];\n}"
                 : "=r"(length)
                 : "l"(p.args.lengths), "r"(p.most), "l"(p.args.lengths + this->length_at())
                 : "memory");
    return length;
  }
  // Pages of the quads, where each is on one. Without a branch, in front of which all loads would be waited for.
  __device__ void load_pages(std::int32_t (&id)[quads], int length) const {
    const std::int32_t* const pages = p.args.page_table + std::int64_t(this->request()) * p.args.max_pages;
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      const bool is = place(q) < length && p.args.tokens_per_page % 4 == 0;
      asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %1, 0;\nmov.b32 %0, 0;\n@p ld.global.b32 %0, [%2];\n}" : "=r"(id[q]) : "r"(int(is)), "l"(pages + this->page_of(place(q))) : "memory");
    }
  }
  __device__ void drop_bad_pages(float4 (&v)[quads], const std::int32_t (&id)[quads], int length) const {
    const auto check = [&](float& x, int position) {
      if (position < length && !this->on_good_page(position)) x = none();
    };
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      if (p.args.tokens_per_page % 4 == 0) {
        if (!this->good(id[q])) v[q] = float4{none(), none(), none(), none()};
      } else {
        check(v[q].x, place(q));
        check(v[q].y, place(q) + 1);
        check(v[q].z, place(q) + 2);
        check(v[q].w, place(q) + 3);
      }
    }
  }

  // The bin of a score, no more for a larger one whatever slope and offset are: saturated to 0 to 1, of which NaN becomes 0, and rounded to one of the numbers
  // behind 2^23, of which the bits count.
  struct Scale {
    float slope, offset;
    __device__ u32 bin_of(float x) const {
      float y;
      asm("{\n.reg .f32 z;\nfma.rn.sat.f32 z, %1, %2, %3;\nfma.rn.f32 %0, z, %4, %5;\n}" : "=f"(y) : "f"(x), "f"(slope), "f"(offset), "f"(-float(bins)), "f"(8388608.0F + float(bins)));
      return bits_of(y);
    }
  };
  // From somewhat above the largest of the sample down to where, of scores that are spread as most are, the k-th should have been passed. All warps find the
  // same. `least`: of the lanes' largest, so that it is not one stray score.
  __device__ Scale guess(const float4& sample, int length) const {
    const float best = larger(larger(sample.x, sample.y), larger(sample.z, sample.w));
    const auto in_order = [](int bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); };  // its own inverse
    const bool is = is_finite(best);
    const int most = __reduce_max_sync(~0U, is ? in_order(int(bits_of(best))) : int(sign_bit)), least = __reduce_min_sync(~0U, is ? in_order(int(bits_of(best))) : 0x7FFFFFFF);
    const float high = float_of(u32(in_order(most))), range = most < least ? 0 : high - float_of(u32(in_order(least)));
    Scale scale;
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(range * (float(length) + 1.6F * float(p.args.k))));
    scale.slope = fminf(fmaxf(reciprocal * float(length), 1e-36F), 1e30F);  // times an infinite score no NaN, whatever the sample was
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(scale.offset) : "f"(high + range / 4), "f"(-scale.slope), "f"(1.0F));
    return scale;
  }

  __device__ u64 entry_at(const float4 (&v)[quads], int i) const { return entry_of(order_key(get(v, i)), u32(place(i / 4) + i % 4)); }

  // Where the scores of this warp that `reach` names are listed: slots of each quad's first one, counted from the warp's first; and how many there are.
  struct Slots {
    u32 of[quads];
    u32 all = 0;
  };
  __device__ static Slots number(u32 reach) {
    u32 n = 0;  // a byte for each quad: no more than 128 in a warp
#pragma unroll
    for (int q = 0; q < quads; ++q) n += u32(__popc(reach >> (q * 4) & 15U)) << (q * 8);
    const u32 up = scan_lanes(n), all = __shfl_sync(~0U, up, 31);
    Slots slots;
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      slots.of[q] = slots.all + ((up - n) >> (q * 8) & 255U);
      slots.all += all >> (q * 8) & 255U;
    }
    return slots;
  }
  // Ranks the members, each lane one, and leaves out what of this warp is behind the k-th. Whether the lane's is, and of a warp before this one.
  __device__ bool leave_out(const Choice& c, u32& reach, Slots& slots) const {
    const u64 mine = s.members[lane];
    u32 better = 0;
#pragma unroll 1
    for (u32 j = 0; j < c.count; j += 4) {  // 0 from `count` on
#pragma unroll
      for (u32 i = 0; i < 4; ++i) better += s.members[j + i] > mine ? 1U : 0U;
    }
    const bool out = mine != 0 && better >= c.need;
    const int at = int(position_of(mine)), owner = at / part;
#pragma unroll 1
    for (u32 left = __ballot_sync(~0U, out && owner == warp); left != 0; left &= left - 1) {
      const int position = __shfl_sync(~0U, at, __ffs(int(left)) - 1);
#pragma unroll
      for (int q = 0; q < quads; ++q) {
        const int i = position - place(q);
        if (i < 0) --slots.of[q];
        if (u32(i) < 4) reach &= ~(1U << (q * 4 + i));
      }
    }
    return out && owner < warp;
  }

  // Lists the positions that `reach` names, or their slots. `to`, lane-th slot of the list: kept.
  __device__ void emit(u32 reach, const Slots& slots, u32 before, std::int32_t* to, const std::int32_t (&id)[quads]) const {
    u32 in_slots[quads] = {};  // what makes slots of the positions of a quad
    if constexpr (Paged) {
      if (p.args.translate && p.args.tokens_per_page % 4 != 0) {
#pragma unroll
        for (int q = 0; q < quads; ++q) {
          std::int32_t* slot = to - lane + before + slots.of[q];
#pragma unroll 1
          for (u32 left = reach >> (q * 4) & 15U; left != 0; left &= left - 1) *slot++ = listed_as(place(q) + __ffs(int(left)) - 1);
        }
        return;
      }
      if (p.args.translate) {
#pragma unroll
        for (int q = 0; q < quads; ++q) in_slots[q] = u32(id[q] - this->page_of(place(q))) * u32(p.args.tokens_per_page);
      }
    }
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      int at = int(before + slots.of[q]) - lane;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        asm volatile("{\n.reg .pred p;\n.reg .u32 b;\nand.b32 b, %1, %2;\nsetp.ne.u32 p, b, 0;\n@p st.global.u32 [%3], %4;\n@p add.u32 %0, %0, 1;\n}"
                     : "+r"(at)
                     : "r"(reach), "r"(1U << (q * 4 + i)), "l"(to + at), "r"(u32(place(q) + i) + in_slots[q])
                     : "memory");
      }
    }
  }

  __device__ void run() {
    const float* const scores = p.args.scores + u64(row) * u32(p.args.stride);
    prefetch(scores);
    int length = load_length();
    this->template clear<offsetof(typename Base::Memory, sums)>();
    const float* const from = kept(scores + place(0));
    std::int32_t* const to = kept(p.args.selected + u64(row) * u32(p.args.k) + lane);
    length = this->visible_of(length);
    float4 v[quads], sample;
    std::int32_t id[quads] = {};
    if constexpr (Paged) load_pages(id, length);
    const bool loaded = load(v, sample, from, length);
    __syncthreads();
    if (__builtin_expect(!loaded, 0)) load_rest(v, sample, from, length);
    u32 nans = 0;
    if (__builtin_expect(p.counts != nullptr, 0)) {
#pragma unroll
      for (int i = 0; i < Items; ++i) nans += is_nan(get(v, i)) ? 1U : 0U;
    }
    if constexpr (Paged) drop_bad_pages(v, id, length);

    Choice c;
    if (__builtin_expect(length > p.args.k, 1)) {
      const Scale scale = guess(sample, length);
#pragma unroll
      for (int i = 0; i < Items; ++i) {
        c.bin[i] = scale.bin_of(get(v, i));
        count(c.bin[i]);
      }
      __syncthreads();
      this->cut(v, c);
    } else {
#pragma unroll
      for (int i = 0; i < Items; ++i) c.bin[i] = is_nan(get(v, i)) ? ~0U : 0;
    }
    const bool ranks = c.count != c.need;
    u32 reach = 0;  // a bit for each score that is selected, or may be
    bool asks = false;
#pragma unroll
    for (int i = 0; i < Items; ++i) {
      asm("{\n.reg .pred p;\nsetp.le.u32 p, %1, %2;\n@p or.b32 %0, %0, %3;\n}" : "+r"(reach) : "r"(c.bin[i]), "r"(c.last), "r"(1U << i));
      asks |= c.bin[i] == c.last;
    }
    if (asks && ranks) {
      u32 last = c.last;
      asm volatile("" : "+r"(last));  // else all lanes would keep what they have just compared
#pragma unroll
      for (int i = 0; i < Items; ++i) {
        if (c.bin[i] == last) s.members[ptx::add_shared(ptx::shared_address(&s.joined), 1)] = entry_at(v, i);
      }
    }
    Slots slots = number(reach);
    if (lane == 0) s.reached[warp] = slots.all;
    __syncthreads();
    const u32 listed = lane < warps ? s.reached[lane] : 0;
    u32 before = lane < warp ? listed : 0;
    if (ranks && leave_out(c, reach, slots)) --before;
    before = __reduce_add_sync(~0U, before);
    if (__builtin_expect(p.args.order == TopKOrder::by_score, 0)) {
#pragma unroll
      for (int i = 0; i < Items; ++i) {
        if ((reach >> i & 1U) != 0) s.ranked[ptx::add_shared(ptx::shared_address(&s.emitted), 1)] = entry_at(v, i);
      }
      __syncthreads();
      Row<Paged>::template emit_by_score<Threads>(s.ranked, s.emitted);
    } else {
      emit(reach, slots, before, to, id);
      if (__builtin_expect(c.count == 0, 0)) {  // all that there are
#pragma unroll 1
        for (int j = int(__reduce_add_sync(~0U, listed)) + tid; j < p.args.k; j += Threads) to[j - lane] = -1;
      }
    }
    if (p.counts != nullptr) {
      nans = __reduce_add_sync(~0U, nans) - u32(min(max((warp + 1) * part - length, 0), part));  // those that stand beyond the end
      if (lane == 0 && nans != 0) atomicAdd(p.counts, u64(nans));
      this->count_pages(length);
    }
  }
};

/// Selects of a short row; for all threads of a block. The memory and the number of the thread come out of shuffles: else the assembler would compute their
/// addresses, and ask for the number, again behind each barrier.
template <int Threads, int Items, bool Paged>
__device__ inline void select_short(const Params& p, u32 row, ShortMemory<Threads, Items>& memory) {
  const int lane = int(threadIdx.x & 31U), tid = __shfl_sync(~0U, int(threadIdx.x), lane);
  auto& kept = *static_cast<ShortMemory<Threads, Items>*>(__cvta_shared_to_generic(__shfl_sync(~0U, ptx::shared_address(&memory), lane)));
  ShortRow<Threads, Items, Paged>{{{p, row}, kept, tid, tid & 31, tid >> 5}}.run();
}

#endif  // KVIRE_CUDA_COMPILER

}  // namespace detail::topk

KVIRE_NAMESPACE_END
