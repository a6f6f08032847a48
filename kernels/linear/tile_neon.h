// linear_a8w<b>_<m>x16_neon: many rows of activations. one_row_neon.h has the arithmetic and its bounds.
//
// Per panel and tile of up to 32 rows: a piece of a group, up to 8 blocks, is unpacked to 4 KiB of scratch. Pairs of rows are
// then multiplied by it: 16 registers for the broadcasts of 8 lines, 8 for the sums, 4 for the products. Between the segments
// of a group, P of each row is in the scratch.
//
// The loops depend on the width only by a Form, so widths share them. Groups that end in the middle of blocks but do not have
// 16 inputs, which no common format has, are left to the kernels for one row.
#pragma once

#include "registers_neon.h"
#include "sums_neon.h"

namespace lowbit {

extern const Table<LinearKernel> kLinearNarrowNeon, kLinearNeon;  // one row of 1 to 3 bits, of 4 to 8 bits

namespace {

constexpr int kTileRows = 32;    // rows of activations per unpacking
constexpr int kPieceBlocks = 8;  // at most, of a group
constexpr int kPieceSegments = kPieceBlocks * kBlockInputs / kSegmentInputs;
constexpr int kUnpackedBlock = kBlockInputs * kPanelRows;

// Offset of the unpacked weights, which are offset - code at 2 to 7 bits.
constexpr int unpacked_offset(int bits, bool affine) { return affine && bits <= 4 ? 0 : 1 << (bits - 1); }

// What the loops of a tile need to know of unpacked weights.
struct Form {
  bool affine;
  bool wide;   // whether int16 sums are added to int32 sums without folding, and unpacked weights keep their sign
  bool bytes;  // 8 bits: the products of odd lines are subtracted
  int lines;   // whose products fit int16, at most those of a block
  int start;   // factor of A in the integer part
};

constexpr Form form_of(int bits, bool affine) {
  const bool bytes = bits == 8, wide = bytes || is_by_table(bits);
  const int lines = wide ? 2 : most_lines(bits) < 2 ? 2 : most_lines(bits);
  return {affine, wide, bytes, lines, !affine || bits == 1 ? 0 : bytes ? 128 : -unpacked_offset(bits, affine)};
}

// Values shared by the rows of a tile, and values kept between the pieces of a panel.
struct alignas(64) Scratch {
  int8_t weights[kPieceBlocks * kUnpackedBlock];  // steps of 8 or 4 lines; a step: quarter 0, 16 bytes per line, quarter 1, ...
  int32_t odd_lines[kPieceSegments][kPanelRows];  // 8 bits: the sum of the odd lines' weights in each segment of a piece
  float scale[2][kPanelRows], min[2][kPanelRows];  // of the group, or of the two groups of a block
  float products[kTileRows][kPanelRows];           // P, or -P, of a group that continues
  float acc[kTileRows][kPanelRows];
};

// Unpacks two adjacent quarters of a block, for Unpack::lines(), to steps of StepLines lines.
template <int Bits, bool Affine, int StepLines>
struct ToScratch {
  const uint8_t* from;
  const Tables<Bits>& tables;
  int8_t* to;
  int32x4_t (&odd_lines)[kBlockLines / StepLines][2];

  LOWBIT_INLINE Pair load(int i) const {
    return {vld1q_u8(from + i * kLineBytes), vld1q_u8(from + i * kLineBytes + 16)};
  }

  template <int J>
  LOWBIT_INLINE void use(Index<J>, const Pair& line) const {
    constexpr int kStep = J / StepLines;
    int8_t* at = to + kStep * StepLines * kLineBytes + J % StepLines * 16;
    vst1q_s8(at, weight<J>(line.q0, odd_lines[kStep][0]));
    vst1q_s8(at + StepLines * 16, weight<J>(line.q1, odd_lines[kStep][1]));
  }

  template <int J>
  LOWBIT_INLINE static int8x16_t weight(uint8x16_t line, int32x4_t& odd_line) {
    if constexpr (Unpack<Bits>::shift[J] != 0) line = vshrq_n_u8(line, Unpack<Bits>::shift[J]);
    const int8x16_t w = vreinterpretq_s8_u8(line);
    if constexpr (Bits == 8 && J % 2 != 0) odd_line = vpadalq_s16(odd_line, vpaddlq_s8(w));
    if constexpr (Bits == 1) {
      return Affine ? w : vorrq_s8(w, vdupq_n_s8(1));
    } else if constexpr (form_of(Bits, Affine).wide) {
      return w;
    } else {
      return vsubq_s8(vdupq_n_s8(unpacked_offset(Bits, Affine)), w);
    }
  }
};

// Unpacks adjacent blocks, which end at most one group (with steps of half a block: two groups).
using UnpackBlocks = void (*)(Scratch& scratch, const Layout& layout, const uint8_t* from, int64_t blocks);

template <int Bits, bool Affine, int StepLines>
[[gnu::noinline]] void unpack_blocks(Scratch& scratch, const Layout& layout, const uint8_t* from, int64_t blocks) {
  constexpr int kSteps = kBlockLines / StepLines;
  if constexpr (Bits == 8) std::memset(scratch.odd_lines, 0, sizeof scratch.odd_lines);
  const Tables<Bits> tables(layout.levels);
  int8_t* to = scratch.weights;
  for (int64_t block = 0; block < blocks; ++block, from += code_bits(Bits) * kLineBytes, to += kUnpackedBlock) {
    int32_t* const sums = scratch.odd_lines[block * kBlockInputs / kSegmentInputs];
    unroll<2>([&](auto pair) LOWBIT_INLINE {
      const auto for_sums = [&](auto use) LOWBIT_INLINE {
        if constexpr (Bits == 8) {
          unroll<2 * kSteps>([&](auto i) LOWBIT_INLINE {
            use(i / 2, i % 2, sums + i / 2 * kPanelRows + 8 * pair + 4 * (i % 2));
          });
        }
      };
      int32x4_t odd_lines[kSteps][2];
      for_sums([&](int step, int q, const int32_t* at) LOWBIT_INLINE { odd_lines[step][q] = vld1q_s32(at); });
      Unpack<Bits>::lines(ToScratch<Bits, Affine, StepLines>{from + 32 * pair, tables, to + 32 * StepLines * pair, odd_lines});
      for_sums([&](int step, int q, int32_t* at) LOWBIT_INLINE { vst1q_s32(at, odd_lines[step][q]); });
    });
  }
}

// Adds the products of one step for `Rows` rows of activations, which are `stride` apart.
template <Form F, int StepLines, int Rows>
LOWBIT_INLINE inline void add_step(Sums<F.wide> (&sums)[Rows][kQuarters], const int8_t* weights, const int8_t* a,
                                   int64_t stride) {
  constexpr int kLines = F.lines < StepLines ? F.lines : StepLines;
  int8x16_t fours[Rows][2];  // activations of 4 lines each
  unroll<StepLines / kLines>([&](auto part) LOWBIT_INLINE {
    constexpr int kFirst = part * kLines;
    int8x16_t broadcasts[Rows][kLines];
    unroll<Rows>([&](auto r) LOWBIT_INLINE {
      unroll<kLines>([&](auto i) LOWBIT_INLINE {
        constexpr int kLine = kFirst + i;
        int8x16_t& four = fours[r][kLine / 4];
        if constexpr (kLine % 4 == 0) {
          four = vld1q_s8(a + r * stride + 4 * kLine);
          if constexpr (F.bytes) four = veorq_s8(four, vreinterpretq_s8_s64(vdupq_n_s64(int64_t{-1} << 32)));
          __asm__ volatile("" : "+w"(four));  // otherwise GCC loads each lane separately
        }
        broadcasts[r][i] = broadcast(four, kLine % 4);
      });
    });
    unroll<kQuarters>([&](auto q) LOWBIT_INLINE {
      Products products[Rows];
      unroll<kLines / 2>([&](auto i) LOWBIT_INLINE {
        const int8_t* at = weights + (q * StepLines + kFirst + 2 * i) * 16;
        int8x16_t w0 = vld1q_s8(at), w1 = vld1q_s8(at + 16);
        __asm__ volatile("" : "+w"(w0), "+w"(w1));  // for one ldp
        unroll<Rows>([&](auto r) LOWBIT_INLINE {
          products[r].add(w0, broadcasts[r][2 * i]);
          if constexpr (F.bytes) {
            products[r].subtract(w1, broadcasts[r][2 * i + 1]);
          } else {
            products[r].add(w1, broadcasts[r][2 * i + 1]);
          }
        });
      });
      unroll<Rows>([&](auto r) LOWBIT_INLINE {
        sums[r][q].take(products[r]);
        sums[r][q].settle();  // finishes one quarter before the next: together they need too many registers
      });
    });
  });
}

// The integer part of a finished segment for a quarter, or minus it if unpacked weights have the other sign.
template <Form F>
LOWBIT_INLINE inline float32x4_t value(int32x4_t total, int32_t sum) {
  if constexpr (F.start != 0) total = vaddq_s32(total, vdupq_n_s32(F.start * sum));
  return vcvtq_f32_s32(total);
}

// Adds a finished group to the float sums of a quarter.
template <Form F>
LOWBIT_INLINE inline void add_group(float32x4_t& y, float32x4_t product, float32x4_t scale, float32x4_t min,
                                    const float* group_sum) {
  y = add_scaled<!F.wide>(y, scale, product);
  if constexpr (F.affine) y = vfmaq_n_f32(y, min, *group_sum);
}

// Loads a row of a tile.
LOWBIT_INLINE inline void load_row(const float* from, float32x4_t (&row)[kQuarters]) {
  load_pair<0>(from, row[0], row[1]);
  load_pair<32>(from, row[2], row[3]);
}

LOWBIT_INLINE inline void store_row(float* to, const float32x4_t (&row)[kQuarters]) {
  store_pair<0>(to, row[0], row[1]);
  store_pair<32>(to, row[2], row[3]);
}

// A part of a group: whole segments, or the rest of the group. `which`: whether it is the second of two groups in a block.
struct Piece {
  int64_t block, blocks;
  int64_t segment, group;
  int which;
  bool begins, ends;
};

// Multiplies a piece by `Rows` rows of activations from `row` on, which is row `in_tile` of the tile. `OneStep`: the piece is a
// group of one step, of StepLines lines.
template <Form F, int StepLines, bool OneStep, int Rows>
LOWBIT_INLINE inline void add_piece(const LinearArgs& args, Scratch& scratch, int64_t row, int64_t in_tile,
                                    const Piece& piece) {
  static_assert(OneStep || StepLines == kBlockLines);
  const int64_t stride = args.layout.blocks * kBlockInputs;
  const int64_t which = StepLines == kBlockLines ? 0 : piece.which;
  const int8_t* a = args.a + row * stride + piece.block * kBlockInputs + which * kHalfInputs;
  const int8_t* weights = scratch.weights + which * (kUnpackedBlock / 2);
  bool begins = piece.begins;
  int64_t blocks = piece.blocks, segment = 0;
  do {
    Sums<F.wide> sums[Rows][kQuarters];
    const auto next_step = [&]() LOWBIT_INLINE {
      add_step<F, StepLines>(sums, weights, a, stride);
      weights += StepLines * kLineBytes;
      a += StepLines * 4;
    };
    next_step();
    if (!OneStep && blocks > 1) next_step();
    blocks -= kSegmentInputs / kBlockInputs;
    const bool ends = piece.ends && blocks <= 0;
    unroll<Rows>([&](auto r) LOWBIT_INLINE {
      const int64_t at = (row + r) * args.layout.segments + piece.segment + segment;
      float* const products = scratch.products[in_tile + r];
      float* const acc = scratch.acc[in_tile + r];
      float32x4_t product[kQuarters];
      unroll<kQuarters>([&](auto q) LOWBIT_INLINE {
        int32x4_t total = sums[r][q].total();
        if constexpr (F.bytes) total = vsubq_s32(total, vld1q_s32(scratch.odd_lines[which + segment] + 4 * q));
        product[q] = value<F>(total, args.sums[at]);
      });
      if (OneStep || begins) {
        unroll<kQuarters>([&](auto q) LOWBIT_INLINE {
          product[q] = vmulq_n_f32(product[q], args.scales[at]);
        });
      } else {
        float32x4_t before[kQuarters];
        load_row(products, before);
        unroll<kQuarters>([&](auto q) LOWBIT_INLINE {
          product[q] = vfmaq_n_f32(before[q], product[q], args.scales[at]);
        });
      }
      if (OneStep || ends) {
        // Groups of one step have a segment each.
        const float* group_sum = args.group_sums + (OneStep ? at : (row + r) * args.layout.groups + piece.group);
        float32x4_t y[kQuarters], scale[kQuarters], min[kQuarters];
        load_row(acc, y);
        load_row(scratch.scale[which], scale);
        if constexpr (F.affine) load_row(scratch.min[which], min);
        unroll<kQuarters>([&](auto q) LOWBIT_INLINE { add_group<F>(y[q], product[q], scale[q], min[q], group_sum); });
        store_row(acc, y);
      } else {
        store_row(products, product);
      }
    });
    begins = false;
    ++segment;
  } while (!OneStep && blocks > 0);
}

// Multiplies a block's two groups, or the last block's only group, by `Rows` rows of activations from `row` on. The float sums
// stay in registers in between. Not for 8 bits and levels, whose sums need twice the registers.
template <Form F, int Rows>
LOWBIT_INLINE inline void add_two_groups(const LinearArgs& args, Scratch& scratch, int64_t row, int64_t in_tile,
                                         int64_t group, bool both) {
  const int64_t stride = args.layout.blocks * kBlockInputs;
  const int8_t* a = args.a + row * stride + group * kHalfInputs;
  float32x4_t y[Rows][kQuarters];
  unroll<Rows>([&](auto r) LOWBIT_INLINE { load_row(scratch.acc[in_tile + r], y[r]); });
  unroll<2>([&](auto g) LOWBIT_INLINE {
    if (g != 0 && !both) return;
    Sums<false> sums[Rows][kQuarters];
    add_step<F, 4>(sums, scratch.weights + g * 4 * kLineBytes, a + g * kHalfInputs, stride);
    unroll<2>([&](auto pair) LOWBIT_INLINE {
      float32x4_t scale[2], min[2];
      load_pair<32 * pair>(scratch.scale[g], scale[0], scale[1]);
      if constexpr (F.affine) load_pair<32 * pair>(scratch.min[g], min[0], min[1]);
      unroll<Rows>([&](auto r) LOWBIT_INLINE {
        const int64_t at = (row + r) * args.layout.segments + group + g;  // index of a segment, which is also a group
        unroll<2>([&](auto i) LOWBIT_INLINE {
          constexpr int kQuarter = 2 * pair + i;
          const float32x4_t product = vmulq_n_f32(value<F>(sums[r][kQuarter].total(), args.sums[at]), args.scales[at]);
          add_group<F>(y[r][kQuarter], product, scale[i], min[i], args.group_sums + at);
        });
      });
    });
  });
  unroll<Rows>([&](auto r) LOWBIT_INLINE { store_row(scratch.acc[in_tile + r], y[r]); });
}

// Loads the scales of a group; affine: and its mins.
template <bool Affine>
LOWBIT_INLINE inline void unpack_scales(Scratch& scratch, int which, const uint8_t* scales) {
  const Scales scale = load_scales(scales), min = Affine ? load_scales(scales + 2 * kPanelRows) : scale;
  unroll<kQuarters>([&](auto q) LOWBIT_INLINE {
    vst1q_f32(scratch.scale[which] + 4 * q, scale.q[q]);
    if constexpr (Affine) vst1q_f32(scratch.min[which] + 4 * q, min.q[q]);
  });
}

// Calls add(rows, row) for all rows of a tile, two at a time.
template <class Add>
LOWBIT_INLINE inline void for_rows(int64_t rows, Add add) {
  int64_t row = 0;
  for (; row + 2 <= rows; row += 2) add(Index<2>{}, row);
  if (row < rows) add(Index<1>{}, row);
}

LOWBIT_INLINE inline void finish_tile(const LinearArgs& args, const Scratch& scratch, int64_t p, int64_t tile,
                                      int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    float32x4_t acc[kQuarters];
    unroll<kQuarters>([&](auto q) LOWBIT_INLINE { acc[q] = vld1q_f32(scratch.acc[row] + 4 * q); });
    store_outputs(args, p, tile + row, acc);
  }
}

// Calls body(panel, tile, rows) for the tiles of each panel.
template <class Body>
LOWBIT_INLINE inline void for_tiles(const LinearArgs& args, Scratch& scratch, Body body) {
  for (int64_t p = args.panel_begin; p < args.panel_end; ++p) {
    for (int64_t tile = 0; tile < args.m; tile += kTileRows) {
      const int64_t rows = args.m - tile < kTileRows ? args.m - tile : kTileRows;
      std::memset(scratch.acc, 0, sizeof scratch.acc);
      body(args.panels + p * args.layout.panel_bytes, tile, rows);
      finish_tile(args, scratch, p, tile, rows);
    }
  }
}

// Groups of 16 inputs, two in a block.
template <Form F>
[[gnu::noinline]] void run_half_block_tiles(const LinearArgs& args, UnpackBlocks unpack) {
  Scratch scratch;
  for_tiles(args, scratch, [&](const uint8_t* at, int64_t tile, int64_t rows) LOWBIT_INLINE {
    for (int64_t block = 0; block < args.layout.blocks; ++block) {
      const int64_t group = 2 * block;
      const int count = group + 1 < args.layout.groups ? 2 : 1;
      unpack(scratch, args.layout, at, 1);
      at += args.layout.block_bytes;
      for (int which = 0; which < count; ++which, at += group_bytes(F.affine)) unpack_scales<F.affine>(scratch, which, at);
      if constexpr (F.wide) {
        for (int which = 0; which < count; ++which) {
          const Piece piece{block, 1, group + which, group + which, which, true, true};
          for_rows(rows, [&](auto at_once, int64_t row) LOWBIT_INLINE {
            add_piece<F, kBlockLines / 2, true, at_once>(args, scratch, tile + row, row, piece);
          });
        }
      } else {
        for_rows(rows, [&](auto at_once, int64_t row) LOWBIT_INLINE {
          add_two_groups<F, at_once>(args, scratch, tile + row, row, group, count == 2);
        });
      }
    }
  });
}

// Groups of whole blocks. `OneStep`: of one block.
template <Form F, bool OneStep>
[[gnu::noinline]] void run_tiles(const LinearArgs& args, UnpackBlocks unpack) {
  const Layout& layout = args.layout;
  const int64_t group_blocks = layout.group_inputs() / kBlockInputs;
  Scratch scratch;
  for_tiles(args, scratch, [&](const uint8_t* panel, int64_t tile, int64_t rows) LOWBIT_INLINE {
    int64_t segment = 0;
    for (const GroupPart part : GroupParts(layout.blocks, group_blocks, kPieceBlocks)) {
      if (part.first) unpack_scales<F.affine>(scratch, 0, panel + layout.scales_offset(part.group));
      unpack(scratch, layout, panel + layout.block_offset(part.begin), part.end - part.begin);
      const Piece piece{part.begin, part.end - part.begin, segment, part.group, 0, part.first, part.last};
      segment += Layout::segments_of(piece.blocks * kBlockInputs);
      for_rows(rows, [&](auto at_once, int64_t row) LOWBIT_INLINE {
        add_piece<F, kBlockLines, OneStep, at_once>(args, scratch, tile + row, row, piece);
      });
    }
  });
}

template <int Bits>
void run(const LinearArgs& args) {
  const int64_t group_inputs = args.layout.group_inputs();
  with_mapping<Bits>(args.layout.mapping, [&](auto bits, auto affine) {
    constexpr Form kForm = form_of(bits, affine);
    if (group_inputs == kHalfInputs) {
      run_half_block_tiles<kForm>(args, unpack_blocks<bits(), affine(), kBlockLines / 2>);
    } else if (group_inputs % kBlockInputs != 0) {
      (Bits < 4 ? kLinearNarrowNeon.entries[Bits - 1] : kLinearNeon.entries[Bits - 4]).run(args);
    } else {
      const auto run_form = group_inputs == kBlockInputs ? run_tiles<kForm, true> : run_tiles<kForm, false>;
      run_form(args, unpack_blocks<bits(), affine(), kBlockLines>);
    }
  });
}

template <int Bits, int LeastRows>
constexpr LinearKernel many_rows(const char* name) {
  return with_levels<LinearKernel>({name, kNeon, Format::panel16, Bits, LeastRows, 16, run<Bits>});
}

}  // namespace
}  // namespace lowbit
