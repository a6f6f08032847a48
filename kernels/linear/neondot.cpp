// linear_a8w<b>_1x16_neondot: int8 activations times b-bit weights, the 16 output rows of a panel in four registers.
//
//   line (64 bytes): row 0: 4 codes | row 1: 4 codes | ... | row 15: 4 codes       quarter q: rows 4q to 4q + 3
//   sdot sums[q], quarter of line j, a[j]      a[j]: the activations 4j to 4j + 3, one 32-bit lane of two registers
//
// One int32 lane is one output row: no horizontal adds, and the 32 activations of a block are loaded once for all 16
// rows. Sums start at the bits of the float c (ukernel.h). Integer part of a segment, with S the sum of a * code and A the sum
// of a:
//   symmetric   S - 2^(b-1) A: sums start at the second term, so no weight pays for its zero point; affine: S
//   1 bit       2 S - A. cmtst yields -1 for a set bit, so sums that start at floor(A/2) end at h = floor(A/2) - S.
//               2 h + A mod 2 is A - 2 S, the negative of the integer part. One instruction, sli (shift left and insert),
//               computes it: h moves above the lowest bit of A. The bits of c are even, so sums start at half of them
//   8 bit       the bytes are code - 128: symmetric needs no start value, affine starts at 128 A
//   levels      the bytes are levels, no start value
// Sums of fields at different bit positions p (bits/unpack_neon.h) are separate and are joined by ssra once per segment.
//
// Why 1x16: four quarters are four independent chains, enough for the latency of sdot on cores that forward its accumulator.
// They leave registers for two quarters of a packed block, which are adjacent, so that one ldp loads both.

#include <arm_neon.h>

#include "../bits/widths.h"
#include "row_neon.h"

namespace lowbit {
namespace {

// The distinct shifts of a width: one sum each.
template <int Bits>
struct Chains {
  int shift[8] = {};
  int of_line[8] = {};
  int count = 0;

  constexpr Chains() {
    for (int j = 0; j < 8; ++j) {
      int chain = count;
      for (int c = 0; c < count; ++c) {
        if (shift[c] == Unpack<Bits>::shift[j]) chain = c;
      }
      if (chain == count) shift[count++] = Unpack<Bits>::shift[j];
      of_line[j] = chain;
    }
  }
};

template <int Bits>
constexpr Chains<Bits> kChains{};

// The sums of one segment, for four rows.
template <int Bits>
struct Sums {
  int32x4_t chain[kChains<Bits>.count];
};

// Quarters First and First + 1 of a block, for Unpack::lines(). Lines of an unwanted half are dead code.
template <int Bits, int First, Halves Wanted>
struct QuarterPair {
  const uint8_t* block;
  const Tables<Bits>& tables;
  Sums<Bits>& sums0;
  Sums<Bits>& sums1;
  Sums<Bits>& second0;  // of the second half: the same as sums0, unless a group ends between the halves
  Sums<Bits>& second1;
  int8x16_t a0, a1;     // of the first and the second half

  LOWBIT_INLINE Pair load(int i) const {
    const uint8_t* at = block + i * kLineBytes + 16 * First;
    uint8x16_t q0 = vld1q_u8(at), q1 = vld1q_u8(at + 16);
    // Keeps the two loads together, for ldp. Volatile, so that GCC does not move all loads to the front and run out of
    // registers.
    __asm__ volatile("" : "+w"(q0), "+w"(q1));
    return {q0, q1};
  }

  template <int J>
  LOWBIT_INLINE void use(Index<J>, const Pair& line) const {
    if constexpr ((Wanted & (J < 4 ? kFirstHalf : kSecondHalf)) != 0) {
      constexpr int kChain = kChains<Bits>.of_line[J];
      const int8x16_t a = J < 4 ? a0 : a1;
      int32x4_t& chain0 = (J < 4 ? sums0 : second0).chain[kChain];
      int32x4_t& chain1 = (J < 4 ? sums1 : second1).chain[kChain];
      chain0 = vdotq_laneq_s32(chain0, vreinterpretq_s8_u8(line.q0), a, J % 4);
      chain1 = vdotq_laneq_s32(chain1, vreinterpretq_s8_u8(line.q1), a, J % 4);
    }
  }
};

// The `Row` of row_neon.h.
template <int Bits, bool Affine>
class DotRow {
 public:
  static constexpr int kBits = Bits;
  static constexpr bool kAffine = Affine, kNegative = Bits == 1;
  static constexpr bool kHalvesSum = Bits == 1 && !Affine;
  using Sums = lowbit::Sums<Bits>;
  struct Inputs {
    int8x16_t half[2];
  };

  LOWBIT_INLINE explicit DotRow(const Layout& layout) : tables_(layout.levels) {}

  // At 1 bit half of the start value, because shifted() doubles it.
  LOWBIT_INLINE static int32x4_t start_of(int32x4_t sum) {
    if constexpr (kHalvesSum) return vaddq_s32(vdupq_n_s32(kShiftBits / 2), vshrq_n_s32(sum, 1));
    constexpr int kFactor = Bits == 1 ? 0 : stored_flip(Bits) - (Affine ? 0 : level_offset(Bits));
    return vmlaq_s32(vdupq_n_s32(kShiftBits), sum, vdupq_n_s32(kFactor));
  }

  template <Halves Wanted>
  LOWBIT_INLINE static Inputs load(const int8_t* a) {
    return {{vld1q_s8(a), vld1q_s8(Wanted == kWholeBlock ? a + kHalfInputs : a)}};
  }

  // Advances `at`.
  template <bool Loop>
  LOWBIT_INLINE static void start(Sums (&sums)[kQuarters], const uint8_t*& at) {
    int32x4_t first[kQuarters];
    Four<28>::load_each(at, first);
    unroll<kQuarters>([&](auto q) LOWBIT_INLINE { start_at(sums[q], first[q]); });
  }

  // For half a block and two quarters.
  LOWBIT_INLINE static void start_two(Sums (&sums)[2], const int32_t* at) {
    const int32x4_t first = vld1q_s32(at);
    unroll<2>([&](auto q) LOWBIT_INLINE { start_at(sums[q], first); });
  }

  // Keeps the sums in the registers where start() began them.
  LOWBIT_INLINE static void pin(Sums (&sums)[kQuarters]) {
    int32x4_t first[kQuarters];
    unroll<kQuarters>([&](auto q) LOWBIT_INLINE { first[q] = sums[q].chain[0]; });
    Four<28>::pin<kQuarters>(first);
    unroll<kQuarters>([&](auto q) LOWBIT_INLINE { sums[q].chain[0] = first[q]; });
  }

  template <Halves Wanted>
  LOWBIT_INLINE void add(Sums (&sums)[kQuarters], const uint8_t* block, const Inputs& a) const {
    unroll<2>([&](auto pair) LOWBIT_INLINE {
      Sums &sums0 = sums[2 * pair], &sums1 = sums[2 * pair + 1];
      Unpack<Bits>::lines(
          QuarterPair<Bits, 2 * pair, Wanted>{block, tables_, sums0, sums1, sums0, sums1, a.half[0], a.half[1]});
    });
  }

  template <int First>
  LOWBIT_INLINE void add_two(Sums (&sums)[2][2], const uint8_t* block, const Inputs& a) const {
    Unpack<Bits>::lines(QuarterPair<Bits, First, kWholeBlock>{block, tables_, sums[0][0], sums[0][1], sums[1][0], sums[1][1],
                                                              a.half[0], a.half[1]});
  }

  // `sum` is A. At 1 bit, sli takes its lowest bit and overwrites the other bits.
  LOWBIT_INLINE static float32x4_t shifted(const Sums& sums, int32x4_t& sum) {
    constexpr int kShift1 = kChains<Bits>.shift[1], kShift2 = kChains<Bits>.shift[2];
    int32x4_t total = sums.chain[0];
    if constexpr (kChains<Bits>.count > 1) total = vsraq_n_s32(total, sums.chain[1], kShift1);
    if constexpr (kChains<Bits>.count > 2) total = vsraq_n_s32(total, sums.chain[2], kShift2);
    if constexpr (kHalvesSum) total = sum = vsliq_n_s32(sum, total, 1);
    return vreinterpretq_f32_s32(total);
  }

 private:
  const Tables<Bits> tables_;

  LOWBIT_INLINE static void start_at(Sums& sums, int32x4_t first) {
    sums.chain[0] = first;
    unroll<kChains<Bits>.count - 1>([&](auto c) LOWBIT_INLINE { sums.chain[c + 1] = vdupq_n_s32(0); });
  }
};

#define KERNEL(bits)         \
  with_levels<LinearKernel>( \
      {"linear_a8w" #bits "_1x16_neondot", kNeonDot, Format::panel16, bits, 1, 16, run_rows<DotRow, bits>})
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<LinearKernel> kLinearNeonDot;
const Table<LinearKernel> kLinearNeonDot{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
