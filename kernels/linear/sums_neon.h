// Shared by the linear kernels for plain NEON: integer sums of products (one_row_neon.h explains them).
#pragma once

#include "row_neon.h"

namespace lowbit {
namespace {

LOWBIT_INLINE inline int8x16_t broadcast(int8x16_t a, int lane) {
  switch (lane) {
    case 0: return vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(a), 0));
    case 1: return vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(a), 1));
    case 2: return vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(a), 2));
    default: return vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(a), 3));
  }
}

// How many lines of products of codes fit int16, at most those of a block.
constexpr int most_lines(int bits) {
  const int lines = 256 / ((1 << bits) - 1);
  return lines < 1 ? 1 : lines < kBlockLines ? lines : kBlockLines;
}

// The int16 sums of a quarter. `lines`: number of lines that were added to them. All loops around them are unrolled, so the
// compiler knows this number, and counting costs no instruction.
struct Products {
  int16x8_t lo, hi;
  int lines = 0;

  LOWBIT_INLINE void add(int8x16_t w, int8x16_t a) {
    if (lines++ == 0) {
      lo = vmull_s8(vget_low_s8(w), vget_low_s8(a));
      hi = vmull_high_s8(w, a);
    } else {
      lo = vmlal_s8(lo, vget_low_s8(w), vget_low_s8(a));
      hi = vmlal_high_s8(hi, w, a);
    }
  }

  LOWBIT_INLINE void subtract(int8x16_t w, int8x16_t a) {
    lo = vmlsl_s8(lo, vget_low_s8(w), vget_low_s8(a));
    hi = vmlsl_high_s8(hi, w, a);
    ++lines;
  }

  // Adds sums of fields that are 2^Shift times as large.
  template <int Shift>
  LOWBIT_INLINE void join(const Products& other) {
    if (other.lines == 0) return;
    lo = vsraq_n_s16(lo, other.lo, Shift);
    hi = vsraq_n_s16(hi, other.hi, Shift);
  }
};

// The int32 sums of a quarter. The compiler knows `empty`, as it knows `lines` above.
template <bool Wide>
struct Sums {
  int32x4_t part[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
  bool empty = true;

  LOWBIT_INLINE void take(Products& products) {
    if constexpr (Wide) {
      part[0] = empty ? vpaddlq_s16(products.lo) : vpadalq_s16(part[0], products.lo);
      part[1] = empty ? vpaddlq_s16(products.hi) : vpadalq_s16(part[1], products.hi);
    } else {
      const int16x8_t folded = vpaddq_s16(products.lo, products.hi);
      part[0] = empty ? vpaddlq_s16(folded) : vpadalq_s16(part[0], folded);
    }
    empty = false;
    products.lines = 0;
  }

  // Compilers do not move volatile assembly across this one.
  LOWBIT_INLINE void settle() {
    __asm__ volatile("" : "+w"(part[0]));
    if constexpr (Wide) __asm__ volatile("" : "+w"(part[1]));
  }

  LOWBIT_INLINE int32x4_t total() const { return Wide ? vpaddq_s32(part[0], part[1]) : part[0]; }
};

}  // namespace
}  // namespace lowbit
