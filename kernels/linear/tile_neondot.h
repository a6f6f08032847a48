// The tile of linear_a8w<b>_3x16_neondot (gemm_neon.h): up to 4 rows of m times a panel, by sdot.
//
//   line (64 bytes): row 0: 4 codes | row 1: 4 codes | ... | row 15: 4 codes       quarter q: rows 4q to 4q + 3
//   sdot sums[i][q], quarter q of line j, a[i][j]      a[i][j]: 4 activations of row i of m, one 32-bit lane
//
// 4 rows because their 16 sums, 4 quarters of a line and 8 registers of activations are what 32 registers hold: a block
// takes 8 loads of weights (64 bytes each), 2 of activations and 128 sdot. The float sums do not fit and stay in the
// scratch: they are loaded and stored once per group. Instructions per 128 weights and row of m, in a tile of 4 rows:
//   8 sdot + 10/16 loads + per group 3 (start, convert, fma), 1 to 1 1/2 for the float sums, 1/2 for everything else
#pragma once

#include "gemm_neon.h"

namespace lowbit {
namespace {

struct DotTile {
  static constexpr bool kReadsLines = true;
  static constexpr int kScales = kPanelRows;

  // Quarters `first` and first + 1 of a block.
  [[gnu::always_inline]] static void store_block(uint8_t* to, int first, const Pair (&line)[kBlockLines]) {
    unroll<kBlockLines>([&](auto j) __attribute__((always_inline)) {
      vst1q_u8(to + kLineBytes * j + 16 * first, line[j].q0);
      vst1q_u8(to + kLineBytes * j + 16 * first + 16, line[j].q1);
    });
  }

  [[gnu::always_inline]] static void store_scales(float* to, const Scales& scales) {
    unroll<kQuarters>([&](auto q) __attribute__((always_inline)) { vst1q_f32(to + 4 * q, scales.q[q]); });
  }

  // Of each block: the 32 activations of every row.
  [[gnu::always_inline]] static void copy_rows(uint8_t* to, const int8_t* a, int64_t stride, int64_t rows,
                                               int64_t blocks) {
    const auto copy = [&](auto count) __attribute__((always_inline)) {
      const uint8_t* from[kTileRows];
      unroll<count>([&](auto r) __attribute__((always_inline)) {
        from[r] = reinterpret_cast<const uint8_t*>(a + r * stride);
      });
      for (int64_t b = 0; b < blocks; ++b) {
        unroll<count>([&](auto r) __attribute__((always_inline)) {
          vst1q_u8(to, vld1q_u8(from[r]));
          vst1q_u8(to + 16, vld1q_u8(from[r] + 16));
          from[r] += kBlockInputs;
          to += kBlockInputs;
        });
      }
    };
    switch (rows) {
      case 1: return copy(Index<1>{});
      case 2: return copy(Index<2>{});
      case 3: return copy(Index<3>{});
      default: return copy(Index<4>{});
    }
  }

  [[gnu::always_inline]] static void load_row(const float* acc, int64_t row, float32x4_t (&y)[kQuarters]) {
    unroll<kQuarters>([&](auto q) __attribute__((always_inline)) { y[q] = vld1q_f32(acc + kPanelRows * row + 4 * q); });
  }

  template <int Rows, bool Affine, Span Kind>
  [[gnu::noinline]] static void run_rows(const TileArgs& args) {
    const uint8_t* a = args.a;
    const int32_t* group_sums = args.group_sums;
    float* acc = args.acc;
    int32_t* parts = args.sums;
    const int64_t gap = args.weights_gap, group_blocks = args.group_blocks;
    const int32_t factor = args.factor;
    const bool begins = args.begins, ends = args.ends;

    for (int64_t tiles = args.tiles; tiles > 0; --tiles, acc += Rows * kPanelRows, parts += Rows * kPanelRows) {
      const uint8_t* weights = args.weights;
      const float* scales = args.scales;
      int64_t left = args.blocks;
      do {
        const int32x4_t group_sum = vld1q_s32(group_sums);
        group_sums += kTileRows;
        const int32x4_t start = vmulq_n_s32(group_sum, factor);
        int32x4_t sums[Rows][kQuarters];
        unroll<Rows>([&](auto i) __attribute__((always_inline)) {
          unroll<kQuarters>([&](auto q) __attribute__((always_inline)) {
            sums[i][q] = vdupq_laneq_s32(start, i);
            if (Kind == Span::part && !begins) sums[i][q] = vld1q_s32(parts + kPanelRows * i + 4 * q);
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
        weights += gap;

        if (Kind == Span::part && !ends) {
          unroll<Rows>([&](auto i) __attribute__((always_inline)) {
            unroll<kQuarters>([&](auto q) __attribute__((always_inline)) {
              vst1q_s32(parts + kPanelRows * i + 4 * q, sums[i][q]);
            });
          });
          continue;
        }
        const float32x4x4_t scale = vld1q_f32_x4(scales);
        float32x4x4_t min{};
        if constexpr (Affine) min = vld1q_f32_x4(scales + kScales);
        scales += 2 * kScales;
        const float32x4_t min_factor = vcvtq_f32_s32(group_sum);
        unroll<Rows>([&](auto i) __attribute__((always_inline)) {
          add_to(acc + kPanelRows * i, [&](float32x4_t y, auto q) __attribute__((always_inline)) {
            y = vfmaq_f32(y, scale.val[q], vcvtq_f32_s32(sums[i][q]));
            if constexpr (Affine) y = vfmaq_laneq_f32(y, min.val[q], min_factor, i);
            return y;
          });
        });
      } while (left > 0);
    }
  }

  template <int Rows>
  [[gnu::always_inline]] static void add_block(int32x4_t (&sums)[Rows][kQuarters], const uint8_t*& weights,
                                               const uint8_t*& activations) {
    int8x16_t a[2 * Rows];
    unroll<Rows / 2>([&](auto p) __attribute__((always_inline)) {
      const uint8x16x4_t two = next64(activations);
      unroll<4>([&](auto v) __attribute__((always_inline)) { a[4 * p + v] = vreinterpretq_s8_u8(two.val[v]); });
    });
    if constexpr (Rows % 2 != 0) {
      a[2 * Rows - 2] = vreinterpretq_s8_u8(vld1q_u8(activations));
      a[2 * Rows - 1] = vreinterpretq_s8_u8(vld1q_u8(activations + 16));
      activations += kBlockInputs;
    }
    unroll<kBlockLines>([&](auto j) __attribute__((always_inline)) {
      const uint8x16x4_t line = next64(weights);
      unroll<Rows>([&](auto i) __attribute__((always_inline)) {
        unroll<kQuarters>([&](auto q) __attribute__((always_inline)) {
          sums[i][q] = vdotq_laneq_s32(sums[i][q], vreinterpretq_s8_u8(line.val[q]), a[2 * i + j / 4], j % 4);
        });
        in_order(weights, sums[i]);
      });
    });
  }

  template <int Rows, bool Affine>
  [[gnu::always_inline]] static void run_span(const TileArgs& args) {
    switch (args.span()) {
      case Span::one_block: return run_rows<Rows, Affine, Span::one_block>(args);
      case Span::blocks: return run_rows<Rows, Affine, Span::blocks>(args);
      case Span::part: return run_rows<Rows, Affine, Span::part>(args);
    }
  }

  template <bool Affine>
  [[gnu::always_inline]] static void run(const TileArgs& args, int64_t rows) {
    switch (rows) {
      case 1: return run_span<1, Affine>(args);
      case 2: return run_span<2, Affine>(args);
      case 3: return run_span<3, Affine>(args);
      default: return run_span<4, Affine>(args);
    }
  }
};

}  // namespace
}  // namespace lowbit
