// linear_a8w<b>_1x16_neondot: int8 activations times b-bit weights, the 16 output rows of a panel in four registers.
// linear_a8w<b>_2x16_neondot (3x16 at 1 bit, 4x16 at 8), for many rows of m: tile_neondot.h.
//
//   line (64 bytes): row 0: 4 codes | row 1: 4 codes | ... | row 15: 4 codes       quarter q: rows 4q to 4q + 3
//   sdot sums[q], quarter of line j, a[j]      a[j]: the activations 4j to 4j + 3, one 32-bit lane of two registers
//
// One int32 lane is one output row: no horizontal adds, and the 32 activations of a block are loaded once for all 16
// rows. Integer part of a group, with S the sum of a * code and A the sum of a (ukernel.h):
//   symmetric   S - 2^(b-1) A: the sums start there, so no weight pays for its zero point; affine   S
//   1 bit       2 S - A. cmtst leaves -1 for a set bit, so sums that start at floor(A/2) end at h = floor(A/2) - S.
//               2 h + A mod 2 is A - 2 S, the negative of what is wanted. One instruction, sli (shift left and insert),
//               makes it: h goes above the lowest bit of A
//   8 bit       the bytes are code - 128: symmetric needs no start, affine starts at 128 A
//   levels      the bytes are levels, no start
// Sums of fields at different bit positions p (bits/unpack_neon.h) stay apart and are joined by ssra once per group.
// Every sum is an int32 that may wrap on its way; what leaves a group is at most 65536 * 128 * 255 < 2^31
// (kMaxGroupInputs), and a sum at position p at most 65536 * 128 * 56.
//
// 1x16 because four quarters are four independent chains, enough for the latency of sdot on cores that forward its
// accumulator, and leave registers for two quarters of a packed block: adjacent, so that one ldp loads both.

#include <arm_neon.h>

#include "../bits/unpack_neon.h"
#include "../ukernel.h"
#include "panel_neon.h"
#include "tile_neondot.h"

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
      int found = count;
      for (int c = 0; c < count; ++c) {
        if (shift[c] == Unpack<Bits>::shift[j]) found = c;
      }
      if (found == count) shift[count++] = Unpack<Bits>::shift[j];
      of_line[j] = found;
    }
  }
};

template <int Bits>
constexpr Chains<Bits> kChains{};

// The sums of one group, for four rows.
template <int Bits>
struct Sums {
  int32x4_t chain[kChains<Bits>.count];
};

// What a group's activation sum counts at the start of its sums. Hidden from the compiler, which would take a shift and
// a negation for the one multiplication.
template <int Bits, bool Affine>
[[gnu::always_inline]] inline int32x4_t start_factor() {
  constexpr int kCodeOffset = stored_flip(Bits);  // the bytes are the codes minus this
  int32x4_t factor = vdupq_n_s32(Affine ? kCodeOffset : kCodeOffset - level_offset(Bits));
  __asm__("" : "+w"(factor));
  return factor;
}

// `group_sum` holds the sum of the group's activations in every lane.
template <int Bits, bool Affine>
[[gnu::always_inline]] inline int32x4_t start_value(int32x4_t group_sum, int32x4_t factor) {
  if constexpr (stored_flip(Bits) == (Affine ? 0 : level_offset(Bits))) return vdupq_n_s32(0);
  if constexpr (Bits == 1) return vshrq_n_s32(group_sum, 1);
  return vmulq_s32(group_sum, factor);
}

template <int Bits, int Count>
[[gnu::always_inline]] inline void start(Sums<Bits> (&sums)[Count], int32x4_t value) {
  unroll<Count>([&](auto q) __attribute__((always_inline)) {
    sums[q].chain[0] = value;
    unroll<kChains<Bits>.count - 1>([&](auto c) __attribute__((always_inline)) {
      sums[q].chain[c + 1] = vdupq_n_s32(0);
    });
  });
}

enum Halves { kFirstHalf = 1, kSecondHalf = 2, kWholeBlock = 3 };

// Quarters First and First + 1 of a block, for Unpack::lines(). Lines of a half that is not wanted are dead code.
template <int Bits, int First, Halves Wanted>
struct QuarterPair {
  const uint8_t* block;
  const Tables<Bits>& tables;
  Sums<Bits>& sums0;
  Sums<Bits>& sums1;
  Sums<Bits>& second0;  // of the second half: the same, unless a group ends between the halves
  Sums<Bits>& second1;
  int8x16_t a0, a1;     // of the first and the second half

  [[gnu::always_inline]] Pair load(int i) const {
    const uint8_t* at = block + i * kLineBytes + 16 * First;
    uint8x16_t q0 = vld1q_u8(at), q1 = vld1q_u8(at + 16);
    // Keeps the two loads together, for ldp. Volatile, so that GCC does not move all loads to the front and run out of
    // registers.
    __asm__ volatile("" : "+w"(q0), "+w"(q1));
    return {q0, q1};
  }

  template <int J>
  [[gnu::always_inline]] void use(Index<J>, const Pair& line) const {
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

template <Halves Wanted, int Bits>
[[gnu::always_inline]] inline void add_block(Sums<Bits> (&sums)[kQuarters], const uint8_t* block,
                                             const Tables<Bits>& tables, int8x16_t a0, int8x16_t a1) {
  Unpack<Bits>::lines(QuarterPair<Bits, 0, Wanted>{block, tables, sums[0], sums[1], sums[0], sums[1], a0, a1});
  Unpack<Bits>::lines(QuarterPair<Bits, 2, Wanted>{block, tables, sums[2], sums[3], sums[2], sums[3], a0, a1});
}

// Adds one quarter of a finished group to the float sums. `parity` is the register that sli shifts into at 1 bit: its
// lowest bit is that of the group's activation sum, before and after.
template <int Bits, bool Affine>
[[gnu::always_inline]] inline float32x4_t finish(float32x4_t acc, const Sums<Bits>& sums, float32x4_t scale,
                                                 int32x4_t& parity) {
  constexpr int kShift1 = kChains<Bits>.shift[1], kShift2 = kChains<Bits>.shift[2];
  int32x4_t total = sums.chain[0];
  if constexpr (kChains<Bits>.count > 1) total = vsraq_n_s32(total, sums.chain[1], kShift1);
  if constexpr (kChains<Bits>.count > 2) total = vsraq_n_s32(total, sums.chain[2], kShift2);
  if constexpr (Bits != 1) return vfmaq_f32(acc, scale, vcvtq_f32_s32(total));
  if constexpr (Affine) return vfmsq_f32(acc, scale, vcvtq_f32_s32(total));
  parity = vsliq_n_s32(parity, total, 1);
  return vfmsq_f32(acc, scale, vcvtq_f32_s32(parity));
}

template <int Bits, bool Affine>
[[gnu::always_inline]] inline void finish_group(float32x4_t (&acc)[kQuarters], const Sums<Bits> (&sums)[kQuarters],
                                                const uint8_t* scales, int32x4_t group_sum) {
  const Scales scale = load_scales(scales);
  int32x4_t parity = group_sum;
  unroll<kQuarters>([&](auto q) __attribute__((always_inline)) {
    acc[q] = finish<Bits, Affine>(acc[q], sums[q], scale.q[q], parity);
  });
  if constexpr (Affine) add_mins(acc, scales + 2 * kPanelRows, vcvtq_f32_s32(group_sum));
}

// A block of two groups: it is read once, two quarters at a time.
template <int Bits, bool Affine>
[[gnu::always_inline]] inline void add_two_groups(float32x4_t (&acc)[kQuarters], const uint8_t* block,
                                                  const Tables<Bits>& tables, int8x16_t a0, int8x16_t a1,
                                                  const int32_t* group_sums, int32x4_t factor) {
  constexpr int64_t kGroupBytes = (Affine ? 4 : 2) * kPanelRows;
  int32x4_t group_sum[2], parity[2];
  unroll<2>([&](auto g) __attribute__((always_inline)) {
    group_sum[g] = vld1q_dup_s32(group_sums + g);
    parity[g] = group_sum[g];
  });
  unroll<2>([&](auto pair) __attribute__((always_inline)) {
    Sums<Bits> sums[2][2];
    unroll<2>([&](auto g) __attribute__((always_inline)) {
      start(sums[g], start_value<Bits, Affine>(group_sum[g], factor));
    });
    Unpack<Bits>::lines(
        QuarterPair<Bits, 2 * pair, kWholeBlock>{block, tables, sums[0][0], sums[0][1], sums[1][0], sums[1][1], a0,
                                                 a1});
    unroll<2>([&](auto g) __attribute__((always_inline)) {
      const uint8_t* scales = block + code_bits(Bits) * kLineBytes + g * kGroupBytes + 16 * pair;
      float32x4_t scale[2], min[2];
      load_two_scales(scales, scale);
      if constexpr (Affine) load_two_scales(scales + 2 * kPanelRows, min);
      unroll<2>([&](auto q) __attribute__((always_inline)) {
        float32x4_t& y = acc[2 * pair + q];
        y = finish<Bits, Affine>(y, sums[g][q], scale[q], parity[g]);
        if constexpr (Affine) y = vfmaq_f32(y, min[q], vcvtq_f32_s32(group_sum[g]));
      });
    });
    // One pair after the other: interleaved, they need too many registers.
    __asm__ volatile("" : "+w"(acc[2 * pair]), "+w"(acc[2 * pair + 1]));
  });
}

enum class Groups { half_block, one_block, blocks, halves };

template <int Bits, bool Affine, Groups Kind>
[[gnu::always_inline]] inline void row_times_panel(const LinearArgs& args, const uint8_t* panel, int64_t row,
                                                   float32x4_t (&acc)[kQuarters]) {
  constexpr int64_t kGroupBytes = (Affine ? 4 : 2) * kPanelRows;
  constexpr int64_t kBlockBytes = code_bits(Bits) * kLineBytes;
  const Layout& layout = args.layout;
  const int64_t groups = layout.groups;
  const int8_t* a = args.a + row * layout.blocks * kBlockInputs;
  const int32_t* group_sums = args.group_sums + row * groups;
  const uint8_t* block = panel;
  const int32x4_t factor = start_factor<Bits, Affine>();
  const Tables<Bits> tables(layout.levels);
  Sums<Bits> sums[kQuarters];
  unroll<kQuarters>([&](auto q) __attribute__((always_inline)) { acc[q] = vdupq_n_f32(0.0f); });

  if constexpr (Kind == Groups::one_block) {
    const auto next_group = [&]() __attribute__((always_inline)) {
      const int32x4_t group_sum = vld1q_dup_s32(group_sums++);
      start(sums, start_value<Bits, Affine>(group_sum, factor));
      add_block<kWholeBlock>(sums, block, tables, vld1q_s8(a), vld1q_s8(a + 16));
      finish_group<Bits, Affine>(acc, sums, block + kBlockBytes, group_sum);
      block += kBlockBytes + kGroupBytes;
      a += kBlockInputs;
      // One group after the other: interleaved, they need too many registers.
      __asm__ volatile("" : "+w"(acc[0]), "+w"(acc[1]), "+w"(acc[2]), "+w"(acc[3]));
      __asm__ volatile("" : "+r"(block), "+r"(a), "+r"(group_sums));
    };
    // Two in a turn, which saves half of the loop's own instructions.
    for (int64_t pairs = groups / 2; pairs > 0; --pairs) {
      next_group();
      next_group();
    }
    if (groups % 2 != 0) next_group();
  } else if constexpr (Kind == Groups::half_block) {
    for (int64_t pairs = groups / 2; pairs > 0; --pairs) {
      add_two_groups<Bits, Affine>(acc, block, tables, vld1q_s8(a), vld1q_s8(a + 16), group_sums, factor);
      block += kBlockBytes + 2 * kGroupBytes;
      a += kBlockInputs;
      group_sums += 2;
    }
    if (groups % 2 != 0) {
      const int32x4_t group_sum = vld1q_dup_s32(group_sums);
      start(sums, start_value<Bits, Affine>(group_sum, factor));
      add_block<kFirstHalf>(sums, block, tables, vld1q_s8(a), vld1q_s8(a));
      finish_group<Bits, Affine>(acc, sums, block + kBlockBytes, group_sum);
    }
  } else if constexpr (Kind == Groups::blocks) {
    const int64_t group_blocks = layout.group_inputs() / kBlockInputs;
    int64_t left = layout.blocks;
    for (int64_t group = 0; group < groups; ++group) {
      const int32x4_t group_sum = vld1q_dup_s32(group_sums + group);
      start(sums, start_value<Bits, Affine>(group_sum, factor));
      const int64_t count = left < group_blocks ? left : group_blocks;
      left -= count;
      for (const uint8_t* end = block + count * kBlockBytes; block != end; block += kBlockBytes, a += kBlockInputs) {
        add_block<kWholeBlock>(sums, block, tables, vld1q_s8(a), vld1q_s8(a + 16));
      }
      finish_group<Bits, Affine>(acc, sums, block, group_sum);
      block += kGroupBytes;
    }
  } else {
    // A block is read twice, once for each half: the unused half of the unpacking is dead code.
    const int64_t group_halves = layout.group_inputs() / kHalfInputs;
    const int64_t halves = (layout.k + kHalfInputs - 1) / kHalfInputs;
    const uint8_t* scales = block + kBlockBytes;  // of the next group to end in this block
    int64_t half = 0;
    for (int64_t group = 0; group < groups; ++group) {
      const int32x4_t group_sum = vld1q_dup_s32(group_sums + group);
      start(sums, start_value<Bits, Affine>(group_sum, factor));
      const int64_t end = half + group_halves < halves ? half + group_halves : halves;
      for (; half < end; ++half, a += kHalfInputs) {
        if (half % 2 != 0) {
          add_block<kSecondHalf>(sums, block, tables, vld1q_s8(a), vld1q_s8(a));
        } else {
          if (half != 0) {
            block = scales;
            scales += kBlockBytes;
          }
          add_block<kFirstHalf>(sums, block, tables, vld1q_s8(a), vld1q_s8(a));
        }
      }
      finish_group<Bits, Affine>(acc, sums, scales, group_sum);
      scales += kGroupBytes;
    }
  }
}

template <int Bits, bool Affine, Groups Kind>
[[gnu::noinline]] void run_panels(const LinearArgs& args) {
  for (int64_t p = args.panel_begin; p < args.panel_end; ++p) {
    const uint8_t* panel = args.panels + p * args.layout.panel_bytes;
    for (int64_t row = 0; row < args.m; ++row) {
      float32x4_t y[kQuarters];
      row_times_panel<Bits, Affine, Kind>(args, panel, row, y);
      with_dtype(args.out_dtype, [&](auto dtype) __attribute__((always_inline)) {
        store_outputs<dtype()>(args, p, row, load_heads(args, p), y);
      });
    }
  }
}

template <int Bits, bool Affine>
void run_groups(const LinearArgs& args) {
  const int64_t group_inputs = args.layout.group_inputs();
  if (group_inputs == kBlockInputs) return run_panels<Bits, Affine, Groups::one_block>(args);
  if (group_inputs % kBlockInputs == 0) return run_panels<Bits, Affine, Groups::blocks>(args);
  if (group_inputs == kHalfInputs) return run_panels<Bits, Affine, Groups::half_block>(args);
  run_panels<Bits, Affine, Groups::halves>(args);
}

template <int Bits>
void run(const LinearArgs& args) {
  if constexpr (can_have_levels(Bits)) {
    if (args.layout.mapping == Mapping::levels) return run_groups<by_table(Bits), false>(args);
  }
  args.layout.mapping == Mapping::affine ? run_groups<Bits, true>(args) : run_groups<Bits, false>(args);
}

template <int Bits>
void run_many(const LinearArgs& args) {
  run_gemm<DotTile, Bits>(args);
}

// The first m for which unpacking to memory takes fewer instructions at every group size: fields that need next to no
// resolving where they lie (1 and 8 bits) leave it less to win.
#define ROW(bits, m, run)        \
  with_levels<LinearKernel>(     \
      {"linear_a8w" #bits "_" #m "x16_neondot", kNeonDot, Format::panel16, bits, m, 16, run<bits>})
constexpr LinearKernel kRows[] = {
    ROW(1, 3, run_many), ROW(2, 2, run_many), ROW(3, 2, run_many), ROW(4, 2, run_many),
    ROW(5, 2, run_many), ROW(6, 2, run_many), ROW(7, 2, run_many), ROW(8, 3, run_many),
    ROW(1, 1, run),      ROW(2, 1, run),      ROW(3, 1, run),      ROW(4, 1, run),
    ROW(5, 1, run),      ROW(6, 1, run),      ROW(7, 1, run),      ROW(8, 1, run),
};
#undef ROW

}  // namespace

extern const Table<LinearKernel> kLinearNeonDot;
const Table<LinearKernel> kLinearNeonDot{kRows, sizeof kRows / sizeof kRows[0]};

}  // namespace lowbit
