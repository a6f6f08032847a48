// Unpacking a block with the streaming instructions of SME2, at vectors of 512 bits: a line is one vector.
//
// A field moves down to the lowest bits, so that all lines can share one sum: products go to tiles of 16 x 16 sums, and there
// are too few tiles for one per shift. Scattered codes are joined by shift-and-insert (sri, sli). At 1 bit, lines are twice the
// codes if requested: such a sum minus the sum of the activations is the result of a symmetric group. Instructions per 512
// weights, without the loads (8 more with a table of levels; 5 at 4 bits if codes may stay in the upper halves of their
// bytes, see gemm_sme2.h):
//   bits   1    2    3    4    5    6    7    8
//         14   12   14    8   15   12   14    0
#pragma once

#include <arm_sme.h>

#include <cstdint>

#include "codec.h"

namespace lowbit {
namespace {

// Four packed lines of a block from line First on, or the remaining ones. (Vector types cannot be members.)
template <int Bits, int First>
LOWBIT_INLINE inline svuint8x4_t load_lines(const uint8_t* block) __arm_streaming {
  constexpr int kCount = Bits - First;
  if constexpr (kCount <= 0) {
    return svundef4_u8();
  } else if constexpr (kCount == 1) {
    return svset4_u8(svundef4_u8(), 0, svld1_vnum_u8(svptrue_b8(), block, First));
  } else if constexpr (kCount <= 3) {
    const svuint8x2_t pair = svld1_vnum_u8_x2(svptrue_c8(), block, First);
    const svuint8x4_t two = svset4_u8(svset4_u8(svundef4_u8(), 0, svget2_u8(pair, 0)), 1, svget2_u8(pair, 1));
    if constexpr (kCount == 2) return two;
    else return svset4_u8(two, 2, svld1_vnum_u8(svptrue_b8(), block, First + 2));
  } else {
    return svld1_vnum_u8_x4(svptrue_c8(), block, First);
  }
}

template <int I>
LOWBIT_INLINE inline svuint8_t packed_line(svuint8x4_t low, svuint8x4_t high) __arm_streaming {
  if constexpr (I < 4) {
    return svget4_u8(low, I);
  } else {
    return svget4_u8(high, I - 4);
  }
}

// Hides the mask from the compiler, because AND with a constant overwrites its operand, which would be copied first.
LOWBIT_INLINE inline svuint8_t and_mask(svuint8_t v, uint8_t mask) __arm_streaming {
  svuint8_t masks = svdup_n_u8(mask);
  __asm__("" : "+w"(masks));
  return svand_u8_x(svptrue_b8(), v, masks);
}

template <int Count>
LOWBIT_INLINE inline svuint8_t shift_right(svuint8_t v) __arm_streaming {
  if constexpr (Count == 0) return v;
  else return svlsr_n_u8_x(svptrue_b8(), v, Count);
}

template <int Count>
LOWBIT_INLINE inline svuint8_t shift_left(svuint8_t v) __arm_streaming {
  if constexpr (Count == 0) return v;
  else return svlsl_n_u8_x(svptrue_b8(), v, Count);
}

// Shifts four vectors by one instruction. The shift is signed, but unsigned in Clang 19's headers.
template <int Count, class Signed = svint8_t, class Unsigned = svuint8_t>
LOWBIT_INLINE inline svuint8x4_t shift_left_all(svuint8x4_t v) __arm_streaming {
  if constexpr (requires(Signed count) { svrshl_single_u8_x4(v, count); }) {
    const Signed count = svdup_n_s8(Count);
    return svrshl_single_u8_x4(v, count);
  } else {
    const Unsigned count = svdup_n_u8(Count);
    return svrshl_single_u8_x4(v, count);
  }
}

// The top `Count` bits of `upper`, and below them the top bits of `lower`; or the lowest `Count` bits of `lower`, and
// above them the lowest bits of `upper`.
template <int Count>
LOWBIT_INLINE inline svuint8_t insert_below(svuint8_t upper, svuint8_t lower) __arm_streaming {
  return svsri_n_u8(upper, lower, Count);
}
template <int Count>
LOWBIT_INLINE inline svuint8_t insert_above(svuint8_t lower, svuint8_t upper) __arm_streaming {
  return svsli_n_u8(lower, upper, Count);
}

// `Length` bits, from bit `First` up.
template <int First, int Length>
LOWBIT_INLINE inline svuint8_t field(svuint8_t v) __arm_streaming {
  const svuint8_t low = shift_right<First>(v);
  if constexpr (First + Length == 8) return low;
  else return and_mask(low, (1 << Length) - 1);
}

// The same for lines of four panels.
#define LOWBIT_OF_FOUR(op, ...)                                                                              \
  svcreate4_u8(op(svget4_u8(v, 0) __VA_OPT__(, svget4_u8(__VA_ARGS__, 0))),                                  \
               op(svget4_u8(v, 1) __VA_OPT__(, svget4_u8(__VA_ARGS__, 1))),                                  \
               op(svget4_u8(v, 2) __VA_OPT__(, svget4_u8(__VA_ARGS__, 2))),                                  \
               op(svget4_u8(v, 3) __VA_OPT__(, svget4_u8(__VA_ARGS__, 3))))
template <int Count>
LOWBIT_INLINE inline svuint8x4_t shift_right(svuint8x4_t v) __arm_streaming {
  return LOWBIT_OF_FOUR(shift_right<Count>);
}
template <int Count>
LOWBIT_INLINE inline svuint8x4_t shift_left(svuint8x4_t v) __arm_streaming {
  return LOWBIT_OF_FOUR(shift_left<Count>);
}
template <int Count>
LOWBIT_INLINE inline svuint8x4_t insert_below(svuint8x4_t v, svuint8x4_t lower) __arm_streaming {
  return LOWBIT_OF_FOUR(insert_below<Count>, lower);
}
template <int Count>
LOWBIT_INLINE inline svuint8x4_t insert_above(svuint8x4_t v, svuint8x4_t upper) __arm_streaming {
  return LOWBIT_OF_FOUR(insert_above<Count>, upper);
}
template <int First, int Length>
LOWBIT_INLINE inline svuint8x4_t field(svuint8x4_t v) __arm_streaming {
  return svcreate4_u8(field<First, Length>(svget4_u8(v, 0)), field<First, Length>(svget4_u8(v, 1)),
                      field<First, Length>(svget4_u8(v, 2)), field<First, Length>(svget4_u8(v, 3)));
}
LOWBIT_INLINE inline svuint8x4_t and_mask(svuint8x4_t v, uint8_t mask) __arm_streaming {
  return svcreate4_u8(and_mask(svget4_u8(v, 0), mask), and_mask(svget4_u8(v, 1), mask),
                      and_mask(svget4_u8(v, 2), mask), and_mask(svget4_u8(v, 3), mask));
}
#undef LOWBIT_OF_FOUR

// Joins run `Run` of line J's codes to the earlier runs, from the top of a byte down, in one vector or four.
template <int Bits, int J, int Run, class Vector>
LOWBIT_INLINE inline Vector join_run(Vector codes, Vector packed) __arm_streaming {
  constexpr CodePlacement where = placement(Bits, J);
  constexpr BitRun run = where.run[Run];
  if constexpr (Run == 0) return packed;
  else if constexpr (ends_lowest(where)) return insert_above<run.length>(packed, shift_right<where.run[0].line_bit>(codes));
  else return insert_below<bits_of_runs(where, Run)>(codes, shift_left<8 - run.line_bit - run.length>(packed));
}

// Line J from all runs of its codes, unsigned; at 8 bits signed, minus 128. `Double`: twice the codes, at 1 bit.
template <int Bits, int J, bool Double = false, class Vector>
LOWBIT_INLINE inline Vector finish_line(Vector codes) __arm_streaming {
  constexpr CodePlacement where = placement(Bits, J);
  if constexpr (Double && J == 0) return and_mask(shift_left<1>(codes), 2);
  else if constexpr (Double) return and_mask(shift_right<J - 1>(codes), 2);
  else if constexpr (Bits == 8 || ends_lowest(where)) return codes;
  else if constexpr (!is_whole(where)) return shift_right<8 - Bits>(codes);
  else return field<where.run[0].line_bit, Bits>(codes);
}

template <int Bits, int J, int Runs>
LOWBIT_INLINE inline svuint8_t join_runs(svuint8x4_t low, svuint8x4_t high) __arm_streaming {
  const svuint8_t packed = packed_line<placement(Bits, J).run[Runs - 1].line>(low, high);
  if constexpr (Runs == 1) return packed;
  else return join_run<Bits, J, Runs - 1>(join_runs<Bits, J, Runs - 1>(low, high), packed);
}

// Line J of a block whose packed lines are `low` (0 to 3) and `high`.
template <int Bits, int J, bool Double = false>
LOWBIT_INLINE inline svuint8_t unpack_line(svuint8x4_t low, svuint8x4_t high) __arm_streaming {
  return finish_line<Bits, J, Double>(join_runs<Bits, J, placement(Bits, J).count>(low, high));
}

}  // namespace
}  // namespace lowbit
