// linear_a8w<b>_<m>x16_neon: many rows of activations. neon.cpp has the arithmetic and its bounds.
//
// Per panel and tile of up to 32 rows: a piece of a group, up to 8 blocks, is unpacked to 4 KiB of scratch, and every
// two rows run through it: 16 registers for the broadcasts of 8 lines, 8 for the sums, 4 for the products.
#pragma once

#include "registers_neon.h"
#include "sums_neon.h"

namespace lowbit {
namespace {

constexpr int kTileRows = 32;    // of activations, for one unpacking
constexpr int kPieceBlocks = 8;  // of a group
constexpr int kUnpackedBlock = kBlockInputs * kPanelRows;

template <int Bits, bool Affine>
constexpr int kOffset = Affine && Bits <= 4 ? 0 : 1 << (Bits - 1);  // of the unpacked weights, 2 to 7 bits

// Whether int16 sums are added to int32 ones without being folded, and weights lie there with their own sign.
template <int Bits>
constexpr bool kWideTiles = Bits == 8 || is_by_table(Bits);

// What the rows of a tile share and what they keep between the pieces of a panel.
struct alignas(64) Scratch {
  int8_t weights[kPieceBlocks * kUnpackedBlock];  // steps of 8 or 4 lines: quarter 0: 16 bytes per line, quarter 1, ...
  int32_t odd_lines[kPanelRows];                  // 8 bits: the sum of their weights in this piece
  float scale[2][kPanelRows], min[2][kPanelRows];  // of a group, or of the two of a block
  int32_t sums[kTileRows][kPanelRows];  // of a group, when there is more to come
  float acc[kTileRows][kPanelRows];
};

// Two adjacent quarters of a block, for Unpack::lines(), into steps of StepLines lines.
template <int Bits, bool Affine, int StepLines, Halves Wanted>
struct ToScratch {
  const uint8_t* from;
  const Tables<Bits>& tables;
  int8_t* to;
  int32x4_t (&odd_lines)[2];

  [[gnu::always_inline]] Pair load(int i) const {
    return {vld1q_u8(from + i * kLineBytes), vld1q_u8(from + i * kLineBytes + 16)};
  }

  template <int J>
  [[gnu::always_inline]] void use(Index<J>, const Pair& line) const {
    if constexpr ((Wanted & (J < 4 ? kFirstHalf : kSecondHalf)) != 0) {
      constexpr int kStep = Wanted == kWholeBlock ? J / StepLines : 0;
      int8_t* at = to + kStep * StepLines * kLineBytes + J % StepLines * 16;
      vst1q_s8(at, weight<J>(line.q0, odd_lines[0]));
      vst1q_s8(at + StepLines * 16, weight<J>(line.q1, odd_lines[1]));
    }
  }

  template <int J>
  [[gnu::always_inline]] static int8x16_t weight(uint8x16_t line, int32x4_t& odd_line) {
    if constexpr (Unpack<Bits>::shift[J] != 0) line = vshrq_n_u8(line, Unpack<Bits>::shift[J]);
    const int8x16_t w = vreinterpretq_s8_u8(line);
    if constexpr (Bits == 8 && J % 2 != 0) odd_line = vpadalq_s16(odd_line, vpaddlq_s8(w));
    if constexpr (Bits == 1) {
      return Affine ? w : vorrq_s8(w, vdupq_n_s8(1));
    } else if constexpr (kWideTiles<Bits>) {
      return w;
    } else {
      return vsubq_s8(vdupq_n_s8(kOffset<Bits, Affine>), w);
    }
  }
};

template <int Bits, bool Affine, int StepLines, Halves Wanted>
[[gnu::always_inline]] inline void unpack_step(Scratch& scratch, const Tables<Bits>& tables, const uint8_t* block,
                                               int8_t* to) {
  unroll<2>([&](auto pair) __attribute__((always_inline)) {
    int32_t* sums = scratch.odd_lines + 8 * pair;
    int32x4_t odd_lines[2] = {vld1q_s32(sums), vld1q_s32(sums + 4)};
    Unpack<Bits>::lines(ToScratch<Bits, Affine, StepLines, Wanted>{block + 32 * pair, tables,
                                                                   to + 32 * StepLines * pair, odd_lines});
    if constexpr (Bits == 8) {
      vst1q_s32(sums, odd_lines[0]);
      vst1q_s32(sums + 4, odd_lines[1]);
    }
  });
}

// Halves [begin, end) of a panel.
template <int Bits, bool Affine, int StepLines>
[[gnu::noinline]] void unpack_piece(Scratch& scratch, const Layout& layout, const uint8_t* panel, int64_t begin,
                                    int64_t end) {
  std::memset(scratch.odd_lines, 0, sizeof scratch.odd_lines);
  const Tables<Bits> tables(layout.levels);
  int8_t* to = scratch.weights;
  for (int64_t half = begin; half < end; half += StepLines / 4, to += StepLines * kLineBytes) {
    const uint8_t* block = panel + layout.block_offset(half / 2);
    if constexpr (StepLines == 8) {
      unpack_step<Bits, Affine, StepLines, kWholeBlock>(scratch, tables, block, to);
    } else if (half % 2 == 0) {
      unpack_step<Bits, Affine, StepLines, kFirstHalf>(scratch, tables, block, to);
    } else {
      unpack_step<Bits, Affine, StepLines, kSecondHalf>(scratch, tables, block, to);
    }
  }
}

constexpr int most_tile_lines(int bits) { return bits <= 5 ? 8 : bits == 6 ? 4 : 2; }

// One step for `Rows` rows of activations, which lie `stride` apart.
template <int Bits, int StepLines, int Rows>
[[gnu::always_inline]] inline void add_step(Sums<kWideTiles<Bits>> (&sums)[Rows][kQuarters], const int8_t* weights,
                                            const int8_t* a, int64_t stride) {
  constexpr int kMost = most_tile_lines(Bits), kLines = kMost < StepLines ? kMost : StepLines;
  int8x16_t fours[Rows][2];  // activations of 4 lines each
  unroll<StepLines / kLines>([&](auto part) __attribute__((always_inline)) {
    constexpr int kFirst = part * kLines;
    int8x16_t broadcasts[Rows][kLines];
    unroll<Rows>([&](auto r) __attribute__((always_inline)) {
      unroll<kLines>([&](auto i) __attribute__((always_inline)) {
        constexpr int kLine = kFirst + i;
        int8x16_t& four = fours[r][kLine / 4];
        if constexpr (kLine % 4 == 0) {
          four = vld1q_s8(a + r * stride + 4 * kLine);
          if constexpr (Bits == 8) four = veorq_s8(four, vreinterpretq_s8_s64(vdupq_n_s64(int64_t{-1} << 32)));
          __asm__ volatile("" : "+w"(four));  // or GCC loads each lane by itself
        }
        broadcasts[r][i] = broadcast(four, kLine % 4);
      });
    });
    unroll<kQuarters>([&](auto q) __attribute__((always_inline)) {
      Products products[Rows];
      unroll<kLines / 2>([&](auto i) __attribute__((always_inline)) {
        const int8_t* at = weights + (q * StepLines + kFirst + 2 * i) * 16;
        int8x16_t w0 = vld1q_s8(at), w1 = vld1q_s8(at + 16);
        __asm__ volatile("" : "+w"(w0), "+w"(w1));  // one ldp
        unroll<Rows>([&](auto r) __attribute__((always_inline)) {
          products[r].add(w0, broadcasts[r][2 * i]);
          if constexpr (Bits == 8) {
            products[r].subtract(w1, broadcasts[r][2 * i + 1]);
          } else {
            products[r].add(w1, broadcasts[r][2 * i + 1]);
          }
        });
      });
      unroll<Rows>([&](auto r) __attribute__((always_inline)) {
        sums[r][q].take(products[r]);
        sums[r][q].settle();  // one quarter after the other: together, they need too many registers
      });
    });
  });
}

// Adds a finished group to the float sums of a quarter.
template <int Bits, bool Affine>
[[gnu::always_inline]] inline void add_group(float32x4_t& y, int32x4_t total, int32_t group_sum, float32x4_t scale,
                                             float32x4_t min) {
  constexpr int kStartFactor = !Affine || Bits == 1 ? 0 : Bits == 8 ? 128 : -kOffset<Bits, Affine>;
  if constexpr (kStartFactor != 0) total = vaddq_s32(total, vdupq_n_s32(kStartFactor * group_sum));
  y = add_scaled<!kWideTiles<Bits>>(y, scale, total);
  if constexpr (Affine) y = vfmaq_n_f32(y, min, static_cast<float>(group_sum));
}

// A piece for rows [row, row + Rows) of the tile.
template <int Bits, bool Affine, int StepLines, bool OneStep, int Rows>
[[gnu::always_inline]] inline void add_piece(Scratch& scratch, int64_t row, const int8_t* a, int64_t stride,
                                             int64_t steps, const int32_t* group_sums, int64_t groups, bool first,
                                             bool last) {
  Sums<kWideTiles<Bits>> sums[Rows][kQuarters];
  const int8_t* weights = scratch.weights;
  if constexpr (OneStep) {
    add_step<Bits, StepLines>(sums, weights, a, stride);
  } else {
    unroll<Rows>([&](auto r) __attribute__((always_inline)) {
      unroll<kQuarters>([&](auto q) __attribute__((always_inline)) { sums[r][q].empty = false; });
    });
    for (; steps > 0; --steps, weights += StepLines * kLineBytes, a += StepLines * 4) {
      add_step<Bits, StepLines>(sums, weights, a, stride);
    }
  }
  unroll<Rows>([&](auto r) __attribute__((always_inline)) {
    int32_t* kept = scratch.sums[row + r];
    float* acc = scratch.acc[row + r];
    const int32_t group_sum = group_sums[r * groups];
    unroll<kQuarters>([&](auto q) __attribute__((always_inline)) {
      int32x4_t total = sums[r][q].total();
      if constexpr (Bits == 8) total = vsubq_s32(total, vld1q_s32(scratch.odd_lines + 4 * q));
      if constexpr (!OneStep) {
        if (!first) total = vaddq_s32(total, vld1q_s32(kept + 4 * q));
        if (!last) return vst1q_s32(kept + 4 * q, total);
      }
      float32x4_t y = vld1q_f32(acc + 4 * q);
      add_group<Bits, Affine>(y, total, group_sum, vld1q_f32(scratch.scale[0] + 4 * q),
                              vld1q_f32(scratch.min[0] + 4 * q));
      vst1q_f32(acc + 4 * q, y);
    });
  });
}

// The two groups of a block, or the one of the last block, for rows [row, row + Rows) of the tile. The float sums stay
// in registers in between. Not for 8 bits and levels, whose sums need twice the registers.
template <int Bits, bool Affine, int Rows>
[[gnu::always_inline]] inline void add_two_groups(Scratch& scratch, int64_t row, const int8_t* a, int64_t stride,
                                                  const int32_t* group_sums, int64_t groups, bool both) {
  float32x4_t y[Rows][kQuarters];
  unroll<Rows>([&](auto r) __attribute__((always_inline)) {
    load_pair<0>(scratch.acc[row + r], y[r][0], y[r][1]);
    load_pair<32>(scratch.acc[row + r], y[r][2], y[r][3]);
  });
  unroll<2>([&](auto g) __attribute__((always_inline)) {
    if (g != 0 && !both) return;
    Sums<false> sums[Rows][kQuarters];
    add_step<Bits, 4>(sums, scratch.weights + g * 4 * kLineBytes, a + g * kHalfInputs, stride);
    unroll<2>([&](auto pair) __attribute__((always_inline)) {
      float32x4_t scale[2], min[2];
      load_pair<32 * pair>(scratch.scale[g], scale[0], scale[1]);
      if constexpr (Affine) load_pair<32 * pair>(scratch.min[g], min[0], min[1]);
      unroll<Rows>([&](auto r) __attribute__((always_inline)) {
        unroll<2>([&](auto i) __attribute__((always_inline)) {
          constexpr int kQuarter = 2 * pair + i;
          add_group<Bits, Affine>(y[r][kQuarter], sums[r][kQuarter].total(), group_sums[r * groups + g], scale[i],
                                  min[i]);
        });
      });
    });
  });
  unroll<Rows>([&](auto r) __attribute__((always_inline)) {
    store_pair<0>(scratch.acc[row + r], y[r][0], y[r][1]);
    store_pair<32>(scratch.acc[row + r], y[r][2], y[r][3]);
  });
}

// The scales of a group, and its mins.
template <bool Affine>
[[gnu::always_inline]] inline void unpack_scales(Scratch& scratch, int which, const uint8_t* scales) {
  const Scales scale = load_scales(scales), min = Affine ? load_scales(scales + 2 * kPanelRows) : scale;
  unroll<kQuarters>([&](auto q) __attribute__((always_inline)) {
    vst1q_f32(scratch.scale[which] + 4 * q, scale.q[q]);
    if constexpr (Affine) vst1q_f32(scratch.min[which] + 4 * q, min.q[q]);
  });
}

// Calls add(rows, row) for all rows of a tile, two at a time.
template <class Add>
[[gnu::always_inline]] inline void for_rows(int64_t rows, Add add) {
  int64_t row = 0;
  for (; row + 2 <= rows; row += 2) add(Index<2>{}, row);
  if (row < rows) add(Index<1>{}, row);
}

[[gnu::always_inline]] inline void finish_tile(const LinearArgs& args, const Scratch& scratch, int64_t p, int64_t tile,
                                               int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    float32x4_t acc[kQuarters];
    unroll<kQuarters>([&](auto q) __attribute__((always_inline)) { acc[q] = vld1q_f32(scratch.acc[row] + 4 * q); });
    store_outputs(args, p, tile + row, acc);
  }
}

// Groups of 16 inputs, two in a block.
template <int Bits, bool Affine>
[[gnu::noinline]] void run_half_block_tiles(const LinearArgs& args) {
  constexpr int64_t kGroupBytes = (Affine ? 4 : 2) * kPanelRows;
  const Layout& layout = args.layout;
  const int64_t stride = layout.blocks * kBlockInputs;
  const Tables<Bits> tables(layout.levels);
  Scratch scratch;
  for (int64_t p = args.panel_begin; p < args.panel_end; ++p) {
    for (int64_t tile = 0; tile < args.m; tile += kTileRows) {
      const int64_t rows = args.m - tile < kTileRows ? args.m - tile : kTileRows;
      const uint8_t* block = args.panels + p * layout.panel_bytes;
      std::memset(scratch.acc, 0, sizeof scratch.acc);
      for (int64_t group = 0; group < layout.groups; group += 2) {
        const bool both = group + 1 < layout.groups;
        unpack_step<Bits, Affine, 4, kWholeBlock>(scratch, tables, block, scratch.weights);
        block += Bits * kLineBytes;
        for (int which = 0; which < (both ? 2 : 1); ++which, block += kGroupBytes) {
          unpack_scales<Affine>(scratch, which, block);
        }
        const int8_t* a = args.a + tile * stride + group * kHalfInputs;
        const int32_t* group_sums = args.group_sums + tile * layout.groups + group;
        for_rows(rows, [&](auto count, int64_t row) __attribute__((always_inline)) {
          add_two_groups<Bits, Affine, count>(scratch, row, a + row * stride, stride, group_sums + row * layout.groups,
                                              layout.groups, both);
        });
      }
      finish_tile(args, scratch, p, tile, rows);
    }
  }
}

template <int Bits, bool Affine, int StepLines, bool OneStep>
[[gnu::noinline]] void run_tiles(const LinearArgs& args) {
  constexpr int kStepHalves = StepLines / 4;
  const Layout& layout = args.layout;
  const int64_t stride = layout.blocks * kBlockInputs;
  const int64_t group_halves = layout.group_inputs() / kHalfInputs;
  const int64_t halves = StepLines == 4 ? (layout.k + kHalfInputs - 1) / kHalfInputs : 2 * layout.blocks;
  Scratch scratch;
  for (int64_t p = args.panel_begin; p < args.panel_end; ++p) {
    const uint8_t* panel = args.panels + p * layout.panel_bytes;
    for (int64_t tile = 0; tile < args.m; tile += kTileRows) {
      const int64_t rows = args.m - tile < kTileRows ? args.m - tile : kTileRows;
      std::memset(scratch.acc, 0, sizeof scratch.acc);
      for (int64_t group = 0, half = 0; group < layout.groups; ++group) {
        const int64_t begin = half, end = half + group_halves < halves ? half + group_halves : halves;
        unpack_scales<Affine>(scratch, 0, panel + layout.scales_offset(group));
        for (int64_t next; half < end; half = next) {
          next = half + 2 * kPieceBlocks < end ? half + 2 * kPieceBlocks : end;
          unpack_piece<Bits, Affine, StepLines>(scratch, layout, panel, half, next);
          const int8_t* a = args.a + tile * stride + half * kHalfInputs;
          const int32_t* group_sums = args.group_sums + tile * layout.groups + group;
          for_rows(rows, [&](auto count, int64_t row) __attribute__((always_inline)) {
            add_piece<Bits, Affine, StepLines, OneStep, count>(
                scratch, row, a + row * stride, stride, (next - half) / kStepHalves, group_sums + row * layout.groups,
                layout.groups, half == begin, next == end);
          });
        }
      }
      finish_tile(args, scratch, p, tile, rows);
    }
  }
}

}  // namespace
}  // namespace lowbit
