// One row of m times the panels of a matrix on Arm. The kernels for plain NEON (one_row_neon.h) and for dot products
// (neondot.cpp) share this walk over blocks, segments and groups. Formulas: ukernel.h.
//
// A `Row` has the instructions that multiply:
//   start_of()                 c's bits plus the contribution of A to the integer sums of a segment; argument: A in every lane
//   Inputs, load<Halves>()     the activations of a block, or of the wanted half of it
//   Sums                       the integer sums of a segment for four output rows, a quarter of a panel
//   start(), start_two()       begins a segment: reads its start value, which is stored four times, and advances the pointer;
//                              start_two() is for half a block and two quarters
//   pin()                      keeps sums in the registers where start() began them
//   add<Halves>(), add_two()   adds the products of a block or half of it; add_two() of two quarters, with sums for each half
//   shifted()                  c + I, or c - I with kNegative
#pragma once

#include "../group_parts.h"
#include "dispatch.h"
#include "panel_neon.h"
#include "registers_neon.h"

namespace lowbit {
namespace {

enum Halves { kFirstHalf = 1, kSecondHalf = 2, kWholeBlock = 3 };

// How groups relate to blocks.
enum class GroupKind { half_block, one_block, blocks, halves };

// acc + scale * P for one quarter; `product` is P, or -P.
template <bool Negative>
LOWBIT_INLINE inline float32x4_t add_scaled(float32x4_t acc, float32x4_t scale, float32x4_t product) {
  return Negative ? vfmsq_f32(acc, scale, product) : vfmaq_f32(acc, scale, product);
}

// Finishes one group before the next: interleaved groups need too many registers.
LOWBIT_INLINE inline void settle(float32x4_t (&v)[kQuarters]) {
  __asm__ volatile("" : "+w"(v[0]), "+w"(v[1]), "+w"(v[2]), "+w"(v[3]));
}

// The values of one segment of a row that all panels read, computed once. A panel has four quarters, so some values are stored
// four times: one instruction (ld4r) loads them to four registers.
struct Segment {
  int32_t start[4];
  float t;
  float shift[4];  // -c * t
};

// A window of the segments of all rows of m: it begins where a walk requests it, and holds as many as fit in the scratch.
template <class Row>
class Segments {
 public:
  static constexpr int64_t kMost = kLinearScratchBytes / static_cast<int64_t>(sizeof(Segment)) / 2 * 2;

  explicit Segments(const LinearArgs& args) : args_(args), all_(args.m * args.layout.segments) {}

  // Segment `index`. `count`: number of segments in the window from it on, at least `least`.
  LOWBIT_INLINE const uint8_t* from(int64_t index, int64_t least, int64_t& count) {
    if (index < begin_ || end_ - index < least) fill(index);
    count = end_ - index;
    return static_cast<const uint8_t*>(args_.scratch) + (index - begin_) * static_cast<int64_t>(sizeof(Segment));
  }

 private:
  const LinearArgs& args_;
  const int64_t all_;
  int64_t begin_ = 0, end_ = 0;

  [[gnu::noinline]] void fill(int64_t begin) {
    begin_ = begin;
    end_ = all_ - begin < kMost ? all_ : begin + kMost;
    auto* to = static_cast<Segment*>(args_.scratch);
    const float* scales = args_.scales + begin_;
    const int32_t* sums = args_.sums + begin_;
    for (int64_t remaining = end_ - begin_; remaining > 0; --remaining, ++to) {
      const float32x4_t t = vld1q_dup_f32(scales++);
      vst1q_s32(to->start, Row::start_of(vld1q_dup_s32(sums++)));
      vst1q_lane_f32(&to->t, t, 0);
      vst1q_f32(to->shift, vmulq_n_f32(t, -kShift));
    }
  }
};

template <class Row, GroupKind Kind>
class PanelRow {
 public:
  float32x4_t acc[kQuarters];

  LOWBIT_INLINE PanelRow(const LinearArgs& args, Segments<Row>& segments, const uint8_t* panel, int64_t row)
      : layout_(args.layout),
        multiply_(args.layout),
        segments_(segments),
        block_(panel),
        a_(args.a + row * layout_.blocks * kBlockInputs),
        segment_(row * layout_.segments),
        sums_(args.sums + segment_),
        group_sums_(Row::kAffine ? args.group_sums + row * layout_.groups : nullptr) {
    unroll<kQuarters>([&](auto q) LOWBIT_INLINE { acc[q] = vdupq_n_f32(0.0f); });
  }

  LOWBIT_INLINE void run() {
    if constexpr (Kind == GroupKind::halves) return run_halves();
    // A pass takes two groups that share a block, or one group.
    const int64_t turn = Kind == GroupKind::half_block ? 2 : layout_.group_segments();
    const int64_t row_end = segment_ + layout_.segments;
    for (int64_t remaining = layout_.groups; remaining > 0;) {
      int64_t segments, groups = remaining;
      const int64_t rest = row_end - segment_;
      at_ = segments_.from(segment_, turn < rest ? turn : rest, segments);
      if (segments < rest) groups = segments / turn * (Kind == GroupKind::half_block ? 2 : 1);
      segment_ += groups * layout_.group_segments();
      remaining -= groups;
      if constexpr (Kind == GroupKind::one_block) {
        // Two per iteration, which halves the loop's own instructions.
        for (; groups >= 2; groups -= 2) {
          next_block();
          next_block();
        }
        if (groups != 0) next_block();
      } else if constexpr (Kind == GroupKind::half_block) {
        for (; groups >= 2; groups -= 2) next_two_groups();
        if (groups != 0) {
          typename Row::Sums sums[kQuarters];
          begin(sums);
          multiply_.template add<kFirstHalf>(sums, block_, multiply_.template load<kFirstHalf>(a_));
          end<true>(sums);
          end_group(block_ + kBlockBytes);
        }
      } else {
        const int64_t group_blocks = layout_.group_inputs() / kBlockInputs;
        int64_t blocks = layout_.blocks - done_;
        done_ += groups * group_blocks;
        for (; groups > 0; --groups, blocks -= group_blocks) next_blocks(blocks < group_blocks ? blocks : group_blocks);
      }
    }
  }

 private:
  static constexpr int64_t kGroupBytes = group_bytes(Row::kAffine);
  static constexpr int64_t kBlockBytes = code_bits(Row::kBits) * kLineBytes;

  const Layout& layout_;
  const Row multiply_;
  Segments<Row>& segments_;
  const uint8_t* block_;
  const int8_t* a_;
  int64_t segment_;        // the next one to request from segments_
  int64_t done_ = 0;       // blocks done
  const uint8_t* at_;      // the next segment
  const int32_t* sums_;    // A of that segment
  const float* group_sums_;
  float32x4_t product_[kQuarters];  // P of the group

  template <bool Loop = false>
  LOWBIT_INLINE void begin(typename Row::Sums (&sums)[kQuarters]) {
    multiply_.template start<Loop>(sums, at_);
  }

  template <bool First>
  LOWBIT_INLINE void end(typename Row::Sums (&sums)[kQuarters]) {
    multiply_.pin(sums);
    int32x4_t parity;
    if constexpr (Row::kHalvesSum) parity = vld1q_dup_s32(sums_++);
    if constexpr (First) {
      const float32x4_t t = next_dup<float32x4_t>(at_);
      float32x4_t shift[kQuarters];
      Four<24>::load_each(at_, shift);
      unroll<kQuarters>([&](auto q) LOWBIT_INLINE {
        product_[q] = vfmaq_f32(shift[q], multiply_.shifted(sums[q], parity), t);
      });
    } else {
      const float32x4_t t = next_dup<float32x4_t, 20>(at_);
      unroll<kQuarters>([&](auto q) LOWBIT_INLINE {
        const float32x4_t value = vsubq_f32(multiply_.shifted(sums[q], parity), vdupq_n_f32(kShift));
        product_[q] = vfmaq_f32(product_[q], value, t);
      });
    }
  }

  LOWBIT_INLINE void end_group(const uint8_t* scales) {
    const Scales scale = load_scales(scales);
    unroll<kQuarters>([&](auto q) LOWBIT_INLINE {
      acc[q] = add_scaled<Row::kNegative>(acc[q], scale.q[q], product_[q]);
    });
    if constexpr (Row::kAffine) {
      const Scales min = load_scales(scales + 2 * kPanelRows);
      const float32x4_t sum = vld1q_dup_f32(group_sums_++);
      unroll<kQuarters>([&](auto q) LOWBIT_INLINE { acc[q] = vfmaq_f32(acc[q], min.q[q], sum); });
    }
    settle(acc);
  }

  LOWBIT_INLINE void add_block(typename Row::Sums (&sums)[kQuarters]) {
    multiply_.template add<kWholeBlock>(sums, block_, multiply_.template load<kWholeBlock>(a_));
    block_ += kBlockBytes;
    a_ += kBlockInputs;
  }

  // A group of one block.
  LOWBIT_INLINE void next_block() {
    typename Row::Sums sums[kQuarters];
    begin(sums);
    add_block(sums);
    end<true>(sums);
    end_group(block_);
    block_ += kGroupBytes;
    __asm__ volatile("" : "+r"(block_), "+r"(a_));
  }

  // A group of `blocks` blocks, in segments of two.
  LOWBIT_INLINE void next_blocks(int64_t blocks) {
    const auto two = [&](auto first) LOWBIT_INLINE {
      typename Row::Sums sums[kQuarters];
      begin(sums);
      add_block(sums);
      add_block(sums);
      end<first()>(sums);
      settle(product_);
      __asm__ volatile("" : "+r"(block_), "+r"(a_));  // otherwise GCC keeps its own counters
    };
    int64_t segments = blocks / 2;
    if (segments > 0) {
      two(std::true_type());
      while (--segments > 0) two(std::false_type());
    } else {
      unroll<kQuarters>([&](auto q) LOWBIT_INLINE { product_[q] = vdupq_n_f32(0.0f); });
    }
    if (blocks % 2 != 0) {
      typename Row::Sums sums[kQuarters];
      begin(sums);
      add_block(sums);
      end<false>(sums);
    }
    end_group(block_);
    block_ += kGroupBytes;
  }

  // A block that contains two groups. It is read once, two quarters at a time.
  LOWBIT_INLINE void next_two_groups() {
    const auto inputs = multiply_.template load<kWholeBlock>(a_);
    unroll<2>([&](auto pair) LOWBIT_INLINE {
      typename Row::Sums sums[2][2];
      unroll<2>([&](auto g) LOWBIT_INLINE {
        multiply_.start_two(sums[g], reinterpret_cast<const Segment*>(at_)[g].start);
      });
      multiply_.template add_two<2 * pair>(sums, block_, inputs);
      unroll<2>([&](auto g) LOWBIT_INLINE {
        const Segment& segment = reinterpret_cast<const Segment*>(at_)[g];
        const uint8_t* scales = block_ + kBlockBytes + g * kGroupBytes + 16 * pair;
        float32x4_t scale[2], min[2], group_sum;
        load_two_scales(scales, scale);
        if constexpr (Row::kAffine) {
          load_two_scales(scales + 2 * kPanelRows, min);
          group_sum = vld1q_dup_f32(group_sums_ + g);
        }
        int32x4_t parity;
        if constexpr (Row::kHalvesSum) parity = vld1q_dup_s32(sums_ + g);
        const float32x4_t shift = vld1q_f32(segment.shift);
        unroll<2>([&](auto q) LOWBIT_INLINE {
          float32x4_t& y = acc[2 * pair + q];
          y = add_scaled<Row::kNegative>(y, scale[q], vfmaq_n_f32(shift, multiply_.shifted(sums[g][q], parity), segment.t));
          if constexpr (Row::kAffine) y = vfmaq_f32(y, min[q], group_sum);
        });
      });
      // Finishes one pair before the next: interleaved pairs need too many registers.
      __asm__ volatile("" : "+w"(acc[2 * pair]), "+w"(acc[2 * pair + 1]));
    });
    block_ += kBlockBytes + 2 * kGroupBytes;
    a_ += kBlockInputs;
    at_ += 2 * sizeof(Segment);
    if constexpr (Row::kHalvesSum) sums_ += 2;
    if constexpr (Row::kAffine) group_sums_ += 2;
  }

  // Groups that end in the middle of a block. Such a block is read twice, once for each half, and unpacking the unused half is
  // dead code.
  LOWBIT_INLINE void run_halves() {
    const uint8_t* scales = block_ + kBlockBytes;  // of the next group that ends in this block
    for (const GroupPart part : GroupParts(layout_)) {
      if (part.first) unroll<kQuarters>([&](auto q) LOWBIT_INLINE { product_[q] = vdupq_n_f32(0.0f); });
      typename Row::Sums sums[kQuarters];
      int64_t segments;
      at_ = segments_.from(segment_ + part.index, 1, segments);
      begin<true>(sums);
      for (int64_t half = part.begin; half < part.end; ++half, a_ += kHalfInputs) {
        if (half % 2 != 0) {
          multiply_.template add<kSecondHalf>(sums, block_, multiply_.template load<kSecondHalf>(a_));
        } else {
          if (half != 0) {
            block_ = scales;
            scales += kBlockBytes;
          }
          multiply_.template add<kFirstHalf>(sums, block_, multiply_.template load<kFirstHalf>(a_));
        }
      }
      end<false>(sums);
      if (!part.last) continue;
      end_group(scales);
      scales += kGroupBytes;
    }
  }
};

template <class Row, GroupKind Kind>
[[gnu::noinline]] void run_panels(const LinearArgs& args) {
  Segments<Row> segments(args);
  for (int64_t p = args.panel_begin; p < args.panel_end; ++p) {
    const uint8_t* panel = args.panels + p * args.layout.panel_bytes;
    for (int64_t row = 0; row < args.m; ++row) {
      PanelRow<Row, Kind> result(args, segments, panel, row);
      result.run();
      store_outputs(args, p, row, result.acc);
    }
  }
}

// Multiplies one row of m at a time. `Row<bits, affine>` is described above.
template <template <int, bool> class Row, int Bits>
void run_rows(const LinearArgs& args) {
  dispatch<Bits>(args.layout, [&](auto bits, auto affine, auto halves) {
    using RowKernel = Row<bits(), affine()>;
    const int64_t group_inputs = args.layout.group_inputs();
    if constexpr (halves()) {
      return group_inputs == kHalfInputs ? run_panels<RowKernel, GroupKind::half_block>(args)
                                         : run_panels<RowKernel, GroupKind::halves>(args);
    }
    if (group_inputs == kBlockInputs) return run_panels<RowKernel, GroupKind::one_block>(args);
    // Groups with more segments than fit in the scratch request each segment separately.
    args.layout.group_segments() <= Segments<RowKernel>::kMost ? run_panels<RowKernel, GroupKind::blocks>(args)
                                                               : run_panels<RowKernel, GroupKind::halves>(args);
  });
}

}  // namespace
}  // namespace lowbit
