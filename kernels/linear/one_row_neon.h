// linear_a8w<b>_1x16_neon: one row of int8 activations times b-bit weights for Armv8-A cores without dot products; tile_neon.h
// has the kernels for more rows. The 16 output rows of a panel are four quarters of 4 rows.
//
//   quarter of line j   row 0: 4 codes | row 1: 4 codes | row 2: 4 codes | row 3: 4 codes      16 bytes
//   a[j]                activations 4j to 4j + 3, the same in all four 32-bit lanes            16 bytes
//   smull(2)/smlal(2)   lo: rows 0 and 1, hi: rows 2 and 3; 4 int16 sums per row, over lines: two instructions a line
//   addp, sadalp        pairs of lo and hi in int16, then in int32: one int32 lane is one output row ("folded"); or
//   2 sadalp            int32 pairs, and one addp in int32 at the end of a group ("wide"), if addp would overflow
//
// Number of lines that fit an int16 sum: each adds one product of a weight up to c and an activation from -127 to 127, so int16
// holds lines * c <= 256, for both signs: 256 * 127 < 2^15. addp adds two such sums, so folding needs lines * c <= 128.
//
//   1x16   Weights are codes, or -1 for a set bit at 1 bit. Fields in place (bits/unpack_neon.h) have their own int16
//          sums, joined by ssra once per block: 2 lines of 48 at 2 bits, 3 lines of 56 at 3.
//            bits            1   2   3   4   5   6   7   8
//            c               1   3   7  15  31  63 127 128
//            lines           8   8   8   8   8   4   2   1
//                            folded        | wide
//   tiles  A piece of a group is unpacked once for up to 32 rows of activations, as offset - code, or -level at 1 bit:
//          c is halved.
//            c               1   2   4   8  16  32  64             Affine up to 4 bits: -code, 8 * 15 < 128.
//            lines           8   8   8   8   8   4   2             Folded.
//          8 bits: w0 * a0 - w1 * ~a1 = w0 * a0 + w1 * a1 + w1 is at most 128 * 128 + 128 * 127 < 2^15, so two lines
//          are one smull and one smlsl. Unpacking sums the odd lines' weights, and that sum is subtracted again.
//          Two rows of activations at once: their broadcasts of a block are 16 registers. Unpacking to the scratch
//          is faster from 3 to 7 rows on.
//
// Levels of a table are from -127 to 127, whatever the width: two lines, wide. They need no offset, and tiles store them
// unchanged.

#pragma once

#include "sums_neon.h"

namespace lowbit {
namespace {

constexpr bool is_wide(int bits) { return most_lines(bits) * ((1 << bits) - 1) > 128; }

// Two adjacent quarters of a block, for Unpack::lines(). Lines of an unwanted half are dead code. `Groups`: 2 if a group ends
// between the halves, which then have separate sums.
template <int Bits, Halves Wanted, int Groups>
struct QuarterPair {
  const uint8_t* at;
  const Tables<Bits>& tables;
  const int8x16_t (&a)[8];
  Sums<is_wide(Bits)>* const (&sums)[Groups][2];
  Products (&products)[Groups][2][3];  // by Unpack<Bits>::shift: none, the smaller one, the larger one

  LOWBIT_INLINE Pair load(int i) const {
    uint8x16_t q0 = vld1q_u8(at + i * kLineBytes), q1 = vld1q_u8(at + i * kLineBytes + 16);
    // Keeps the two loads together, for ldp. Volatile, so that GCC does not move all loads to the front and run out of
    // registers.
    __asm__ volatile("" : "+w"(q0), "+w"(q1));
    return {q0, q1};
  }

  template <int J>
  LOWBIT_INLINE void use(Index<J>, const Pair& line) const {
    if constexpr ((Wanted & (J < 4 ? kFirstHalf : kSecondHalf)) != 0) {
      constexpr int kShift = Unpack<Bits>::shift[J], kChain = kShift == 0 ? 0 : kShift == 4 ? 2 : 1;
      constexpr int kGroup = J / 4 * (Groups - 1);
      auto& to = products[kGroup];
      to[0][kChain].add(vreinterpretq_s8_u8(line.q0), a[J]);
      to[1][kChain].add(vreinterpretq_s8_u8(line.q1), a[J]);
      if constexpr (most_lines(Bits) < 8) {
        if (to[0][0].lines == most_lines(Bits)) {
          sums[kGroup][0]->take(to[0][0]);
          sums[kGroup][1]->take(to[1][0]);
        }
      }
    }
  }
};

// `sums`: per group, for two quarters.
template <int Bits, Halves Wanted, int Groups>
LOWBIT_INLINE inline void add_pair(Sums<is_wide(Bits)>* const (&sums)[Groups][2], const uint8_t* at,
                                   const Tables<Bits>& tables, const int8x16_t (&a)[8]) {
  Products products[Groups][2][3];
  Unpack<Bits>::lines(QuarterPair<Bits, Wanted, Groups>{at, tables, a, sums, products});
  unroll<Groups>([&](auto g) LOWBIT_INLINE {
    unroll<2>([&](auto q) LOWBIT_INLINE {
      Products(&of)[3] = products[g][q];
      of[0].template join<Bits == 2 ? 2 : 3>(of[1]);
      of[0].template join<4>(of[2]);
      if (of[0].lines != 0) sums[g][q]->take(of[0]);
      sums[g][q]->settle();
    });
  });
}

// Loads the broadcasts of the activations for the wanted half or halves of a block.
template <Halves Wanted>
LOWBIT_INLINE inline void load_broadcasts(const int8_t* from, int8x16_t (&a)[8]) {
  const int8x16_t a0 = vld1q_s8(from), a1 = vld1q_s8(Wanted == kWholeBlock ? from + kHalfInputs : from);
  unroll<8>([&](auto j) LOWBIT_INLINE { a[j] = broadcast(j < 4 ? a0 : a1, j % 4); });
}

// The `Row` of row_neon.h.
template <int Bits, bool Affine>
class NeonRow {
 public:
  static constexpr int kBits = Bits;
  static constexpr bool kAffine = Affine, kNegative = Bits == 1, kHalvesSum = false;
  struct Inputs {
    int8x16_t a[8];
  };
  struct Sums {
    lowbit::Sums<is_wide(Bits)> products;
    int32x4_t start;
  };

  LOWBIT_INLINE explicit NeonRow(const Layout& layout) : tables_(layout.levels) {}

  // The part that the sum of products lacks: the zero of the codes, and at 8 bits the 128 by which bytes and codes differ. At
  // 1 bit, shifted() returns minus I: A minus twice the activations whose bit is set.
  LOWBIT_INLINE static int32x4_t start_of(int32x4_t sum) {
    constexpr int kFactor = Bits == 1 ? !Affine : stored_flip(Bits) - (Affine ? 0 : level_offset(Bits));
    return vmlaq_s32(vdupq_n_s32(kShiftBits), sum, vdupq_n_s32(kFactor));
  }

  template <Halves Wanted>
  LOWBIT_INLINE static Inputs load(const int8_t* a) {
    Inputs inputs;
    load_broadcasts<Wanted>(a, inputs.a);
    return inputs;
  }

  // `Loop`: whether a loop adds the products. Then the sums do not count as empty, so that all iterations are equal.
  template <bool Loop>
  LOWBIT_INLINE static void start(Sums (&sums)[kQuarters], const uint8_t*& at) {
    const int32x4_t first = vld1q_s32(reinterpret_cast<const int32_t*>(at));
    at += sizeof first;
    unroll<kQuarters>([&](auto q) LOWBIT_INLINE {
      sums[q].start = first;
      if (Loop) sums[q].products.empty = false;
    });
  }

  LOWBIT_INLINE static void start_two(Sums (&sums)[2], const int32_t* at) {
    sums[0].start = sums[1].start = vld1q_s32(at);
  }

  LOWBIT_INLINE static void pin(Sums (&)[kQuarters]) {}

  template <Halves Wanted>
  LOWBIT_INLINE void add(Sums (&sums)[kQuarters], const uint8_t* block, const Inputs& inputs) const {
    unroll<2>([&](auto pair) LOWBIT_INLINE {
      add_pair<Bits, Wanted, 1>({{&sums[2 * pair].products, &sums[2 * pair + 1].products}}, block + 32 * pair, tables_,
                                inputs.a);
    });
  }

  template <int First>
  LOWBIT_INLINE void add_two(Sums (&sums)[2][2], const uint8_t* block, const Inputs& inputs) const {
    add_pair<Bits, kWholeBlock, 2>({{&sums[0][0].products, &sums[0][1].products},
                                    {&sums[1][0].products, &sums[1][1].products}}, block + 16 * First, tables_, inputs.a);
  }

  LOWBIT_INLINE static float32x4_t shifted(const Sums& sums, int32x4_t) {
    int32x4_t total = sums.products.total();
    if constexpr (Bits == 1 && !Affine) total = vaddq_s32(total, total);
    return vreinterpretq_f32_s32(vaddq_s32(total, sums.start));
  }

 private:
  const Tables<Bits> tables_;
};

template <int Bits>
constexpr LinearKernel one_row(const char* name) {
  return with_levels<LinearKernel>({name, kNeon, Format::panel16, Bits, 1, 16, run_rows<NeonRow, Bits>});
}

}  // namespace
}  // namespace lowbit
