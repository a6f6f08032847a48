// linear_a8w<b>_1x16_neon, linear_a8w<b>_<m>x16_neon: int8 activations times b-bit weights for Armv8-A cores without
// dot products; from m rows of activations on by tiles. The 16 output rows of a panel are four quarters of 4 rows.
//
//   quarter of line j   row 0: 4 codes | row 1: 4 codes | row 2: 4 codes | row 3: 4 codes      16 bytes
//   a[j]                activations 4j to 4j + 3, the same in all four 32-bit lanes            16 bytes
//   smull(2)/smlal(2)   lo: rows 0 and 1, hi: rows 2 and 3; 4 int16 sums per row, over lines: two instructions a line
//   addp, sadalp        pairs of lo and hi in int16, then in int32: one int32 lane is one output row ("folded"); or
//   2 sadalp            int32 pairs, and one addp in int32 at the end of a group ("wide"), when addp would overflow
//
// How many lines fit an int16 sum? Each adds one product, of a weight up to c and an activation from -128 to 127. The
// sum is lowest at lines * c * -128, which int16 holds while lines * c <= 256; at its highest it is smaller, because
// activations end at 127. Where weights reach -c too, lines * c must be below 256, as it is in both tables below. addp
// adds two such sums, so folding needs lines * c <= 128.
//
//   1x16   Weights are codes, or -1 for a set bit at 1 bit. Fields in place (bits/unpack_neon.h) have their own int16
//          sums, joined by ssra once per block: 2 lines of 48 at 2 bits, 3 lines of 56 at 3.
//            bits            1   2   3   4   5   6   7   8        At 8 bits weights do reach -128, and two products of
//            c               1   3   7  15  31  63 127 128        -128 * -128 are 2^15: one line at a time.
//            lines           8   8   8   8   8   4   2   1
//                            folded        | wide
//   tiles  A piece of a group is unpacked once for up to 32 rows of activations, as offset - code, or -level at 1 bit:
//          c is halved, and the largest weight is on the side where c * -128 still fits.
//            c               1   2   4   8  16  32  64             Affine up to 4 bits: -code, 8 * 15 < 128.
//            lines           8   8   8   8   8   4   2             Folded.
//          8 bits: w0 * a0 - w1 * ~a1 = w0 * a0 + w1 * a1 + w1 is at most 128 * 128 + 128 * 127 < 2^15, so two lines
//          are one smull and one smlsl; the sum of the odd lines' weights is known from unpacking and taken off again.
//          Two rows of activations at once: their broadcasts of a block are 16 registers. The scratch has paid for
//          itself from 3 to 7 rows on.
//
// Levels of a table reach from -127 to 127, whatever the width: two lines, wide. 2 * 127 * 128 is below 2^15, so no
// offset is needed, and tiles have them as they are.
// Every int32 sum may wrap on its way; what leaves a group is at most 65536 * 128 * 255 < 2^31 (kMaxGroupInputs).

#include "sums_neon.h"
#include "tile_neon.h"

namespace lowbit {
namespace {

constexpr bool is_wide(int bits) { return bits >= 5; }
constexpr int most_lines(int bits) { return bits <= 5 ? 8 : bits == 6 ? 4 : bits == 7 ? 2 : 1; }

// Two adjacent quarters of a block, for Unpack::lines(). Lines of a half that is not wanted are dead code. `Groups`: 2
// when a group ends between the halves, which have their own sums then.
template <int Bits, Halves Wanted, int Groups>
struct QuarterPair {
  const uint8_t* at;
  const Tables<Bits>& tables;
  const int8x16_t (&a)[8];
  Sums<is_wide(Bits)>* const (&sums)[Groups];
  Products (&products)[Groups][2][3];  // by Unpack<Bits>::shift: none, the lower one, the higher one

  [[gnu::always_inline]] Pair load(int i) const {
    uint8x16_t q0 = vld1q_u8(at + i * kLineBytes), q1 = vld1q_u8(at + i * kLineBytes + 16);
    // Keeps the two loads together, for ldp. Volatile, so that GCC does not move all loads to the front and run out of
    // registers.
    __asm__ volatile("" : "+w"(q0), "+w"(q1));
    return {q0, q1};
  }

  template <int J>
  [[gnu::always_inline]] void use(Index<J>, const Pair& line) const {
    if constexpr ((Wanted & (J < 4 ? kFirstHalf : kSecondHalf)) != 0) {
      constexpr int kShift = Unpack<Bits>::shift[J], kChain = kShift == 0 ? 0 : kShift == 4 ? 2 : 1;
      constexpr int kGroup = J / 4 * (Groups - 1);
      auto& to = products[kGroup];
      to[0][kChain].add(vreinterpretq_s8_u8(line.q0), a[J]);
      to[1][kChain].add(vreinterpretq_s8_u8(line.q1), a[J]);
      if constexpr (most_lines(Bits) < 8) {
        if (to[0][0].lines == most_lines(Bits)) {
          sums[kGroup][0].take(to[0][0]);
          sums[kGroup][1].take(to[1][0]);
        }
      }
    }
  }
};

// `sums`: of each group, for two quarters.
template <int Bits, Halves Wanted, int Groups>
[[gnu::always_inline]] inline void add_pair(Sums<is_wide(Bits)>* const (&sums)[Groups], const uint8_t* at,
                                            const Tables<Bits>& tables, const int8x16_t (&a)[8]) {
  Products products[Groups][2][3];
  Unpack<Bits>::lines(QuarterPair<Bits, Wanted, Groups>{at, tables, a, sums, products});
  unroll<Groups>([&](auto g) __attribute__((always_inline)) {
    unroll<2>([&](auto q) __attribute__((always_inline)) {
      Products(&of)[3] = products[g][q];
      of[0].template join<Bits == 2 ? 2 : 3>(of[1]);
      of[0].template join<4>(of[2]);
      if (of[0].lines != 0) sums[g][q].take(of[0]);
      sums[g][q].settle();
    });
  });
}

// The broadcasts of the activations that the wanted half or halves of a block need.
template <Halves Wanted>
[[gnu::always_inline]] inline void load_broadcasts(const int8_t* from, int8x16_t (&a)[8]) {
  const int8x16_t a0 = vld1q_s8(from), a1 = vld1q_s8(Wanted == kWholeBlock ? from + kHalfInputs : from);
  unroll<8>([&](auto j) __attribute__((always_inline)) { a[j] = broadcast(j < 4 ? a0 : a1, j % 4); });
}

template <int Bits, Halves Wanted>
[[gnu::always_inline]] inline void add_block(Sums<is_wide(Bits)> (&sums)[kQuarters], const uint8_t* block,
                                             const Tables<Bits>& tables, const int8_t* from) {
  int8x16_t a[8];
  load_broadcasts<Wanted>(from, a);
  add_pair<Bits, Wanted, 1>({sums}, block, tables, a);
  add_pair<Bits, Wanted, 1>({sums + 2}, block + 32, tables, a);
}

// What the sum of the products lacks, per activation sum of the group: the codes' zero, and at 8 bits that the bytes
// are codes - 128.
template <int Bits, bool Affine>
constexpr int kStart = stored_flip(Bits) - (Affine ? 0 : level_offset(Bits));

// At 1 bit minus the integer part: the sum of the activations, minus twice those with a set bit.
template <int Bits, bool Affine>
[[gnu::always_inline]] inline int32x4_t start_value(int32_t group_sum) {
  return vdupq_n_s32(Bits == 1 ? group_sum : kStart<Bits, Affine> * group_sum);
}

// Adds one quarter of a finished group to the float sums.
template <int Bits, bool Affine>
[[gnu::always_inline]] inline float32x4_t finish(float32x4_t acc, const Sums<is_wide(Bits)>& sums, float32x4_t scale,
                                                 int32x4_t start) {
  int32x4_t total = sums.total();
  if constexpr (Bits == 1 && !Affine) total = vaddq_s32(total, total);
  if constexpr (kStart<Bits, Affine> != 0) total = vaddq_s32(total, start);
  return add_scaled<Bits == 1>(acc, scale, total);
}

template <int Bits, bool Affine>
[[gnu::always_inline]] inline void finish_group(float32x4_t (&acc)[kQuarters],
                                                const Sums<is_wide(Bits)> (&sums)[kQuarters], const uint8_t* scales,
                                                int32_t group_sum) {
  const Scales scale = load_scales(scales);
  const int32x4_t start = start_value<Bits, Affine>(group_sum);
  unroll<kQuarters>([&](auto q) __attribute__((always_inline)) {
    acc[q] = finish<Bits, Affine>(acc[q], sums[q], scale.q[q], start);
  });
  if constexpr (Affine) add_mins(acc, scales + 2 * kPanelRows, vdupq_n_f32(static_cast<float>(group_sum)));
}

// A block of two groups: it is read once, two quarters at a time.
template <int Bits, bool Affine>
[[gnu::always_inline]] inline void add_two_groups(float32x4_t (&acc)[kQuarters], const uint8_t* block,
                                                  const Tables<Bits>& tables, const int8_t* from,
                                                  const int32_t* group_sums) {
  constexpr int64_t kGroupBytes = (Affine ? 4 : 2) * kPanelRows;
  int8x16_t a[8];
  load_broadcasts<kWholeBlock>(from, a);
  unroll<2>([&](auto pair) __attribute__((always_inline)) {
    Sums<is_wide(Bits)> sums[2][2];
    add_pair<Bits, kWholeBlock, 2>({sums[0], sums[1]}, block + 32 * pair, tables, a);
    unroll<2>([&](auto g) __attribute__((always_inline)) {
      const uint8_t* scales = block + code_bits(Bits) * kLineBytes + g * kGroupBytes + 16 * pair;
      float32x4_t scale[2], min[2];
      load_two_scales(scales, scale);
      if constexpr (Affine) load_two_scales(scales + 2 * kPanelRows, min);
      const int32x4_t start = start_value<Bits, Affine>(group_sums[g]);
      unroll<2>([&](auto q) __attribute__((always_inline)) {
        float32x4_t& y = acc[2 * pair + q];
        y = finish<Bits, Affine>(y, sums[g][q], scale[q], start);
        if constexpr (Affine) y = vfmaq_n_f32(y, min[q], static_cast<float>(group_sums[g]));
      });
    });
  });
}

enum class Groups { half_block, one_block, blocks, halves };

template <int Bits, bool Affine, Groups Kind>
[[gnu::always_inline]] inline void row_times_panel(const LinearArgs& args, const uint8_t* panel, int64_t row,
                                                   float32x4_t (&acc)[kQuarters]) {
  constexpr int64_t kGroupBytes = (Affine ? 4 : 2) * kPanelRows;
  constexpr int64_t kBlockBytes = code_bits(Bits) * kLineBytes;
  const Layout& layout = args.layout;
  const int8_t* a = args.a + row * layout.blocks * kBlockInputs;
  const int32_t* group_sums = args.group_sums + row * layout.groups;
  const int64_t group_halves = layout.group_inputs() / kHalfInputs;
  const int64_t halves = Kind == Groups::halves ? (layout.k + kHalfInputs - 1) / kHalfInputs : 2 * layout.blocks;
  const Tables<Bits> tables(layout.levels);
  const uint8_t* block = panel;
  const uint8_t* scales = block + kBlockBytes;  // of the next group to end in this block, when groups end in halves
  unroll<kQuarters>([&](auto q) __attribute__((always_inline)) { acc[q] = vdupq_n_f32(0.0f); });

  if constexpr (Kind == Groups::half_block) {
    for (int64_t pairs = layout.groups / 2; pairs > 0; --pairs) {
      add_two_groups<Bits, Affine>(acc, block, tables, a, group_sums);
      block += kBlockBytes + 2 * kGroupBytes;
      a += kBlockInputs;
      group_sums += 2;
    }
    if (layout.groups % 2 != 0) {
      Sums<is_wide(Bits)> sums[kQuarters];
      add_block<Bits, kFirstHalf>(sums, block, tables, a);
      finish_group<Bits, Affine>(acc, sums, block + kBlockBytes, *group_sums);
    }
    return;
  }
  int64_t half = 0;
  for (int64_t group = 0; group < layout.groups; ++group) {
    Sums<is_wide(Bits)> sums[kQuarters];
    if constexpr (Kind == Groups::one_block) {
      add_block<Bits, kWholeBlock>(sums, block, tables, a);
      block += kBlockBytes;
      a += kBlockInputs;
    } else {
      unroll<kQuarters>([&](auto q) __attribute__((always_inline)) { sums[q].empty = false; });
      const int64_t end = half + group_halves < halves ? half + group_halves : halves;
      if constexpr (Kind == Groups::blocks) {
        for (; half < end; half += 2, block += kBlockBytes, a += kBlockInputs) {
          add_block<Bits, kWholeBlock>(sums, block, tables, a);
        }
      } else {
        // A block is read twice, once for each half: the unused half of the unpacking is dead code.
        for (; half < end; ++half, a += kHalfInputs) {
          if (half % 2 != 0) {
            add_block<Bits, kSecondHalf>(sums, block, tables, a);
          } else {
            if (half != 0) {
              block = scales;
              scales += kBlockBytes;
            }
            add_block<Bits, kFirstHalf>(sums, block, tables, a);
          }
        }
      }
    }
    finish_group<Bits, Affine>(acc, sums, Kind == Groups::halves ? scales : block, group_sums[group]);
    (Kind == Groups::halves ? scales : block) += kGroupBytes;
  }
}

template <int Bits, bool Affine, Groups Kind>
[[gnu::noinline]] void run_rows(const LinearArgs& args) {
  for (int64_t p = args.panel_begin; p < args.panel_end; ++p) {
    for (int64_t row = 0; row < args.m; ++row) {
      float32x4_t acc[kQuarters];
      row_times_panel<Bits, Affine, Kind>(args, args.panels + p * args.layout.panel_bytes, row, acc);
      store_outputs(args, p, row, acc);
    }
  }
}

template <int Bits, bool Affine, bool Tiles>
void run_groups(const LinearArgs& args) {
  const int64_t group_inputs = args.layout.group_inputs();
  if (group_inputs == kBlockInputs) {
    return Tiles ? run_tiles<Bits, Affine, 8, true>(args) : run_rows<Bits, Affine, Groups::one_block>(args);
  }
  if (group_inputs % kBlockInputs == 0) {
    return Tiles ? run_tiles<Bits, Affine, 8, false>(args) : run_rows<Bits, Affine, Groups::blocks>(args);
  }
  if (group_inputs == kHalfInputs) {
    if constexpr (!Tiles) {
      return run_rows<Bits, Affine, Groups::half_block>(args);
    } else if constexpr (kWideTiles<Bits>) {
      return run_tiles<Bits, Affine, 4, true>(args);
    } else {
      return run_half_block_tiles<Bits, Affine>(args);
    }
  }
  Tiles ? run_tiles<Bits, Affine, 4, false>(args) : run_rows<Bits, Affine, Groups::halves>(args);
}

template <int Bits, bool Tiles>
void run(const LinearArgs& args) {
  if constexpr (can_have_levels(Bits)) {
    if (args.layout.mapping == Mapping::levels) return run_groups<by_table(Bits), false, Tiles>(args);
  }
  args.layout.mapping == Mapping::affine ? run_groups<Bits, true, Tiles>(args) : run_groups<Bits, false, Tiles>(args);
}

// Tiles from the row on from which they take fewer instructions, with groups of 32 (docs/arm_cost.md).
#define ROWS(bits, m)                                                                             \
  with_levels<LinearKernel>(                                                                      \
      {"linear_a8w" #bits "_" #m "x16_neon", kNeon, Format::panel16, bits, m, 16, run<bits, true>}), \
  with_levels<LinearKernel>(                                                                      \
      {"linear_a8w" #bits "_1x16_neon", kNeon, Format::panel16, bits, 1, 16, run<bits, false>})
constexpr LinearKernel kRows[] = {ROWS(1, 7), ROWS(2, 5), ROWS(3, 4), ROWS(4, 5),
                                  ROWS(5, 4), ROWS(6, 4), ROWS(7, 3), ROWS(8, 6)};
#undef ROWS

}  // namespace

extern const Table<LinearKernel> kLinearNeon;
const Table<LinearKernel> kLinearNeon{kRows, sizeof kRows / sizeof kRows[0]};

}  // namespace lowbit
