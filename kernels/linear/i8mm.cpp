// linear_a8w<b>_4x16_i8mm: int8 activations times b-bit weights for many rows of m (gemm_neon.h), by smmla.
//
//   line (64 bytes): row 0: 4 codes | row 1: 4 codes | ... | row 15: 4 codes
//   two lines, zipped by 32-bit lanes: row 0: 8 codes | row 1: 8 codes ... row 15: a 2x8 operand per pair of rows
//   activations: two rows of m, zipped by 64-bit lanes: row 0: 8 inputs | row 1: 8 inputs
//   smmla sums[i][r], activations of pair i, weights of pair r: 2 rows of m x 2 rows of weights, 8 inputs
//
// The float sums stay in this 2x2 order until the last group, with every pair of scales in both halves of a register:
// weights are zipped (once for all rows of m), activations (once for 8 panels), but never the sums.
// 4x16: 2 x 8 pairs are 16 sums; 8 registers hold the activations of a block, 4 to 8 its weights. A last single row is
// paired with zeros. Instructions per 128 weights and row of m, in a tile of 4 rows:
//   4 smmla + 10/16 loads + per group 3 (start, convert, fma), 1 to 1 1/2 for the float sums, 1/2 for everything else
// Below 4 rows the dot-product kernels take fewer. Bounds of the sums: gemm_neon.h.

#include <arm_neon.h>

#include "gemm_neon.h"

namespace lowbit {

extern const Table<LinearKernel> kLinearNeonDot;

namespace {

constexpr int kRowPairs = 8;   // of a panel
constexpr int kLinePairs = 4;  // of a block

struct MatrixTile {
  static constexpr bool kReadsLines = false;
  static constexpr int kScales = 2 * kPanelRows;

  // Quarters `first` and first + 1 of a block. Of each pair of lines: the 8 pairs of rows.
  [[gnu::always_inline]] static void store_block(uint8_t* to, int first, const Pair (&line)[kBlockLines]) {
    unroll<kLinePairs>([&](auto c) __attribute__((always_inline)) {
      const auto zip = [&](int quarter, uint8x16_t even, uint8x16_t odd) __attribute__((always_inline)) {
        const uint32x4_t codes0 = vreinterpretq_u32_u8(even), codes1 = vreinterpretq_u32_u8(odd);
        uint8_t* at = to + 2 * kLineBytes * c + 32 * quarter;
        vst1q_u8(at, vreinterpretq_u8_u32(vzip1q_u32(codes0, codes1)));
        vst1q_u8(at + 16, vreinterpretq_u8_u32(vzip2q_u32(codes0, codes1)));
      };
      zip(first, line[2 * c].q0, line[2 * c + 1].q0);
      zip(first + 1, line[2 * c].q1, line[2 * c + 1].q1);
    });
  }

  // Each pair of scales twice.
  [[gnu::always_inline]] static void store_scales(float* to, const Scales& scales) {
    unroll<kQuarters>([&](auto q) __attribute__((always_inline)) {
      const float64x2_t pairs = vreinterpretq_f64_f32(scales.q[q]);
      vst1q_f32(to + 8 * q, vreinterpretq_f32_f64(vzip1q_f64(pairs, pairs)));
      vst1q_f32(to + 8 * q + 4, vreinterpretq_f32_f64(vzip2q_f64(pairs, pairs)));
    });
  }

  // Of each block: for every pair of rows 4 x 2 x 8 activations.
  [[gnu::always_inline]] static void copy_rows(uint8_t* to, const int8_t* a, int64_t stride, int64_t rows,
                                               int64_t blocks) {
    const int64_t pair_bytes = 2 * kBlockInputs, step = (rows + 1) / 2 * pair_bytes;
    for (int64_t r = 0; r < rows; r += 2, to += pair_bytes) {
      const int8_t* row0 = a + r * stride;
      const int8_t* row1 = row0 + stride;
      uint8_t* at = to;
      const auto zip = [&](int8x16_t even, int8x16_t odd, int half) __attribute__((always_inline)) {
        const int64x2_t row0_inputs = vreinterpretq_s64_s8(even), row1_inputs = vreinterpretq_s64_s8(odd);
        vst1q_u8(at + 32 * half, vreinterpretq_u8_s64(vzip1q_s64(row0_inputs, row1_inputs)));
        vst1q_u8(at + 32 * half + 16, vreinterpretq_u8_s64(vzip2q_s64(row0_inputs, row1_inputs)));
      };
      if (r + 1 < rows) {
        for (int64_t b = 0; b < blocks; ++b, row0 += kBlockInputs, row1 += kBlockInputs, at += step) {
          zip(vld1q_s8(row0), vld1q_s8(row1), 0);
          zip(vld1q_s8(row0 + 16), vld1q_s8(row1 + 16), 1);
        }
      } else {
        for (int64_t b = 0; b < blocks; ++b, row0 += kBlockInputs, at += step) {
          zip(vld1q_s8(row0), vdupq_n_s8(0), 0);
          zip(vld1q_s8(row0 + 16), vdupq_n_s8(0), 1);
        }
      }
    }
  }

  [[gnu::always_inline]] static void load_row(const float* acc, int64_t row, float32x4_t (&y)[kQuarters]) {
    const float* at = acc + 2 * kPanelRows * (row / 2) + 2 * (row % 2);
    unroll<kQuarters>([&](auto q) __attribute__((always_inline)) {
      y[q] = vcombine_f32(vld1_f32(at + 8 * q), vld1_f32(at + 8 * q + 4));
    });
  }

  template <int Pairs>
  [[gnu::always_inline]] static void add_block(int32x4_t (&sums)[Pairs][kRowPairs], const uint8_t*& weights,
                                               const uint8_t*& activations) {
    uint8x16x4_t a[Pairs];
    unroll<Pairs>([&](auto i) __attribute__((always_inline)) { a[i] = next64(activations); });
    unroll<kLinePairs>([&](auto c) __attribute__((always_inline)) {
      unroll<2>([&](auto h) __attribute__((always_inline)) {
        const uint8x16x4_t rows = next64(weights);
        unroll<Pairs>([&](auto i) __attribute__((always_inline)) {
          unroll<4>([&](auto r) __attribute__((always_inline)) {
            int32x4_t& sum = sums[i][4 * h + r];
            sum = vmmlaq_s32(sum, vreinterpretq_s8_u8(a[i].val[c]), vreinterpretq_s8_u8(rows.val[r]));
          });
          in_order(weights, sums[i] + 4 * h);
        });
      });
    });
  }

  template <int Pairs, bool Affine, Span Kind>
  [[gnu::noinline]] static void run_pairs(const TileArgs& args) {
    constexpr int kSums = Pairs * 2 * kPanelRows;
    const uint8_t* a = args.a;
    const int32_t* group_sums = args.group_sums;
    float* acc = args.acc;
    int32_t* parts = args.sums;
    const int64_t group_blocks = args.group_blocks;
    const int32_t factor = args.factor;
    const bool begins = args.begins, ends = args.ends;

    for (int64_t tiles = args.tiles; tiles > 0; --tiles, acc += kSums, parts += kSums) {
      const uint8_t* weights = args.weights;
      const float* scales = args.scales;
      int64_t left = args.blocks;
      do {
        const int32x4_t group_sum = vld1q_s32(group_sums);
        group_sums += kTileRows;
        const int32x4_t start = vmulq_n_s32(group_sum, factor);
        int32x4_t sums[Pairs][kRowPairs];
        unroll<Pairs>([&](auto i) __attribute__((always_inline)) {
          unroll<kRowPairs>([&](auto r) __attribute__((always_inline)) {
            sums[i][r] = i == 0 ? vzip1q_s32(start, start) : vzip2q_s32(start, start);
            if (Kind == Span::part && !begins) sums[i][r] = vld1q_s32(parts + 4 * (kRowPairs * i + r));
          });
        });
        if constexpr (Kind == Span::one_block) {
          left -= 1;
          add_block(sums, weights, a);
        } else {
          int64_t count = left < group_blocks ? left : group_blocks;
          left -= count;
          do {
            add_block(sums, weights, a);
          } while (--count > 0);
        }

        if (Kind == Span::part && !ends) {
          unroll<Pairs>([&](auto i) __attribute__((always_inline)) {
            unroll<kRowPairs>([&](auto r) __attribute__((always_inline)) {
              vst1q_s32(parts + 4 * (kRowPairs * i + r), sums[i][r]);
            });
          });
          continue;
        }
        const float32x4_t min_factor = vcvtq_f32_s32(group_sum);
        unroll<2>([&](auto h) __attribute__((always_inline)) {
          const float32x4x4_t scale = vld1q_f32_x4(scales + 16 * h);
          float32x4x4_t min{};
          if constexpr (Affine) min = vld1q_f32_x4(scales + kScales + 16 * h);
          unroll<Pairs>([&](auto i) __attribute__((always_inline)) {
            const float32x4_t factors =
                i == 0 ? vzip1q_f32(min_factor, min_factor) : vzip2q_f32(min_factor, min_factor);
            add_to(acc + 4 * kRowPairs * i + 16 * h, [&](float32x4_t y, auto r) __attribute__((always_inline)) {
              y = vfmaq_f32(y, scale.val[r], vcvtq_f32_s32(sums[i][4 * h + r]));
              if constexpr (Affine) y = vfmaq_f32(y, min.val[r], factors);
              return y;
            });
          });
        });
        scales += 2 * kScales;
      } while (left > 0);
    }
  }

  template <int Pairs, bool Affine>
  [[gnu::always_inline]] static void run_span(const TileArgs& args) {
    switch (args.span()) {
      case Span::one_block: return run_pairs<Pairs, Affine, Span::one_block>(args);
      case Span::blocks: return run_pairs<Pairs, Affine, Span::blocks>(args);
      case Span::part: return run_pairs<Pairs, Affine, Span::part>(args);
    }
  }

  template <bool Affine>
  [[gnu::always_inline]] static void run(const TileArgs& args, int64_t rows) {
    rows > 2 ? run_span<2, Affine>(args) : run_span<1, Affine>(args);
  }
};

// Groups that end within a block are rare: they go to the dot-product kernel, which every CPU with i8mm can run.
template <int Bits>
void run_rows(const LinearArgs& args) {
  for (const LinearKernel& kernel : kLinearNeonDot) {
    if (kernel.bits == Bits && kernel.m_step == 1) return kernel.run(args);
  }
}

template <int Bits>
void run(const LinearArgs& args) {
  if (args.layout.group_inputs() % kBlockInputs != 0) return run_rows<Bits>(args);
  const bool affine = args.layout.mapping == Mapping::affine;
  affine ? run_gemm<MatrixTile, Bits, true>(args) : run_gemm<MatrixTile, Bits, false>(args);
}

#define ROW(bits) {"linear_a8w" #bits "_4x16_i8mm", kI8mm, Format::panel16, bits, 4, 16, run<bits>}
constexpr LinearKernel kRows[] = {ROW(1), ROW(2), ROW(3), ROW(4), ROW(5), ROW(6), ROW(7), ROW(8)};
#undef ROW

}  // namespace

extern const Table<LinearKernel> kLinearI8mm;
const Table<LinearKernel> kLinearI8mm{kRows, sizeof kRows / sizeof kRows[0]};

}  // namespace lowbit
