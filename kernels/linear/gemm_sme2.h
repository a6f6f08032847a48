// Many rows of m on SME2: outer products, 16 rows of m by 16 outputs in a tile of ZA. sme2.cpp explains it.
#pragma once

#include <type_traits>

#include "streaming_sme2.h"

namespace lowbit {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileSums = kTileRows * kPanelRows;
constexpr int kChunkTiles = 2;
constexpr int kChunkPanels = 8;
constexpr int kPieceHalves = 128;  // times 16 rows; of twice as many rows half

// Some half blocks of k.
struct Piece {
  int64_t first, halves;
  bool last;            // the end of k is the end of its last group
  int64_t first_group, groups;
  int64_t first_left;   // half blocks of the first group from the piece's beginning on
  int64_t group_halves;
  bool begins;          // the first group begins with the piece
  bool open;            // the last group does not end with it
};

struct Scratch {
  // Of each tile of 16 rows, kTilePiece apart: vectors of 16 rows x 4 inputs. Whole tiles of 16 are transposed.
  alignas(64) int8_t a[(kPieceHalves * kHalfLines + 2 * 16) * kVectorBytes];
  // Of each group and 16 rows of m: its sum, as float32 where weights are affine, and in two int16.
  alignas(64) int32_t sums[(kPieceHalves + 2 * 18) * kTileRows];
  alignas(64) int32_t parts[(kPieceHalves + 2 * 18) * kTileRows];
  // Of each panel and tile: float sums, and the integer sums of the group at the piece's edge. In ZA's order.
  alignas(64) float acc[kChunkPanels][kChunkTiles][kTileSums];
  alignas(64) int32_t open[kChunkPanels][kChunkTiles][kTileSums];
};
static_assert(sizeof(Scratch) <= kLinearScratchBytes);

// Up to 32 rows of m times up to 8 panels. Streaming functions call no others, so all is worked out before.
struct Chunk {
  const LinearArgs& args;
  int64_t first_row, rows;
  int64_t first_panel, panels;
  Scratch& scratch;

  int64_t halves = half_blocks(args.layout), group_halves = args.layout.group_inputs() / kHalfInputs;
  int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  int64_t piece_halves = kPieceHalves / tiles;
  // From one tile's part of Scratch to the next.
  int64_t a_stride = (piece_halves * kHalfLines + 16) * kVectorBytes;
  int64_t sums_stride = (piece_halves + 18) * kTileRows;
};

// 16 rows, `stride` words apart, to the rows of tile 0. Compilers work each address out anew.
[[gnu::always_inline]] inline void load_tile_rows(const uint32_t* row, int64_t stride,
                                                  svbool_t columns) LOWBIT_STREAMING {
#pragma clang loop unroll(full)
  for (uint32_t i = 0; i < kTileRows; i += 4, row += 4 * stride) {
    __asm__ volatile(
        "ld1w {za0h.s[%w0, 0]}, %1/z, [%2]\n\t"
        "ld1w {za0h.s[%w0, 1]}, %1/z, [%2, %3, lsl #2]\n\t"
        "ld1w {za0h.s[%w0, 2]}, %1/z, [%2, %4, lsl #2]\n\t"
        "ld1w {za0h.s[%w0, 3]}, %1/z, [%2, %5, lsl #2]"
        :
        : "Ucj"(i), "Upl"(columns), "r"(row), "r"(stride), "r"(2 * stride), "r"(3 * stride)
        : "za", "memory");
  }
}

// The columns of tile 0 to memory.
[[gnu::always_inline]] inline void store_tile_columns(uint32_t* out) LOWBIT_STREAMING {
  __asm__ volatile(
      "mov {z0.s-z3.s}, za0v.s[%w0, 0:3]\n\t"
      "mov {z4.s-z7.s}, za0v.s[%w1, 0:3]\n\t"
      "st1w {z0.s-z3.s}, %4, [%5]\n\t"
      "st1w {z4.s-z7.s}, %4, [%5, #4, mul vl]\n\t"
      "mov {z0.s-z3.s}, za0v.s[%w2, 0:3]\n\t"
      "mov {z4.s-z7.s}, za0v.s[%w3, 0:3]\n\t"
      "st1w {z0.s-z3.s}, %4, [%5, #8, mul vl]\n\t"
      "st1w {z4.s-z7.s}, %4, [%5, #12, mul vl]"
      :
      : "Ucj"(0), "Ucj"(4), "Ucj"(8), "Ucj"(12), "Uph"(svptrue_c32()), "r"(out)
      : "z0", "z1", "z2", "z3", "z4", "z5", "z6", "z7", "memory");
}

// `words` columns of up to 16 rows, `stride` words apart, to vectors of 16 rows; zeros for rows that are not there.
// Whole tiles of 16 columns are written.
[[gnu::noinline]] void transpose(const void* from, int64_t stride, int64_t rows, int64_t words,
                                 void* to) LOWBIT_STREAMING {
  svzero_mask_za(0x11);
  auto* out = static_cast<uint32_t*>(to);
  for (int64_t word = 0; word < words; word += kTileRows, out += kTileSums) {
    const svbool_t columns = svwhilelt_b32(word, words);
    const uint32_t* row = static_cast<const uint32_t*>(from) + word;
    if (rows == kTileRows) {
      load_tile_rows(row, stride, columns);
    } else {
      for (uint32_t i = 0; i < rows; ++i, row += stride) svld1_hor_za32(0, i, columns, row);
    }
    store_tile_columns(out);
  }
}

// A sum as two int16: its lowest 8 bits, and what is above them.
[[gnu::always_inline]] inline svint32_t two_parts(svint32_t sum) __arm_streaming {
  const svbool_t all = svptrue_b32();
  return svsli_n_s32(svand_n_s32_x(all, sum, 0xff), svasr_n_s32_x(all, sum, 8), 16);
}

template <int Bits, bool Affine>
[[gnu::always_inline]] inline void transpose_piece(const Chunk& chunk, const Piece& piece) LOWBIT_STREAMING {
  const LinearArgs& args = chunk.args;
  const Layout& layout = args.layout;
  const int64_t stride = layout.blocks * kBlockInputs;
  for (int64_t tile = 0; tile < chunk.tiles; ++tile) {
    const int64_t row = chunk.first_row + tile * kTileRows;
    const int64_t left = chunk.rows - tile * kTileRows, rows = left < kTileRows ? left : kTileRows;
    transpose(args.a + row * stride + piece.first * kHalfInputs, stride / 4, rows, piece.halves * kHalfLines,
              chunk.scratch.a + tile * chunk.a_stride);
    if constexpr (Affine || offset<Bits, Affine>() != 0) {
      int32_t* const sums = chunk.scratch.sums + tile * chunk.sums_stride;
      int32_t* const parts = chunk.scratch.parts + tile * chunk.sums_stride;
      transpose(args.group_sums + row * layout.groups + piece.first_group, layout.groups, rows, piece.groups, sums);
      // Four groups at a time: whole tiles of 16 are there.
      const svcount_t all = svptrue_c32();
      for (int64_t group = 0; group < piece.groups; group += 4) {
        const svint32x4_t four = svld1_vnum_s32_x4(all, sums, group);
        if constexpr (offset<Bits, Affine>() != 0) {
          svst1_vnum_s32_x4(all, parts, group, svcreate4_s32(two_parts(svget4(four, 0)), two_parts(svget4(four, 1)),
                                                             two_parts(svget4(four, 2)), two_parts(svget4(four, 3))));
        }
        if constexpr (Affine) {
          svst1_vnum_f32_x4(all, reinterpret_cast<float*>(sums), group, svcvt_f32_s32_x4(four));
        }
      }
    }
  }
}

// Integer sums of `Tile` += activations * line.
template <int Bits, int Tile>
[[gnu::always_inline]] inline void multiply(svint8_t a, svuint8_t line) LOWBIT_STREAMING {
  const svbool_t all = svptrue_b8();
  if constexpr (is_signed(Bits)) svmopa_za32_s8_m(Tile, all, all, a, svreinterpret_s8_u8(line));
  else svsumopa_za32_s8_m(Tile, all, all, a, line);
}

// Lines J to End - 1 of a block of panel `Panel`. a0, a1: activations of 16 rows, and of 16 others if there are two
// tiles of them.
template <int Bits, bool Affine, int Tiles, int Panel, int J, int End>
[[gnu::always_inline]] inline void add_lines(svuint8x4_t low, svuint8x4_t high, svuint8_t table, svint8x4_t a0,
                                             svint8x4_t a1) LOWBIT_STREAMING {
  if constexpr (J < End) {
    svuint8_t w;
    if constexpr (kInPlace<Bits>) w = svget4_u8(J < 4 ? low : high, J % 4);
    else w = line<Bits, Affine, J>(low, high, table);
    multiply<Bits, Panel>(svget4_s8(a0, J % 4), w);
    if constexpr (Tiles == 2) multiply<Bits, 1>(svget4_s8(a1, J % 4), w);
    add_lines<Bits, Affine, Tiles, Panel, J + 1, End>(low, high, table, a0, a1);
  }
}

// A block, or a half of it, of panel `Panel`.
template <int Bits, bool Affine, int Tiles, int Panel, Halves Wanted>
[[gnu::always_inline]] inline void add_panel(const uint8_t* at, svuint8_t table, svint8x4_t first0, svint8x4_t first1,
                                             svint8x4_t second0, svint8x4_t second1) LOWBIT_STREAMING {
  svuint8x4_t low = load_lines<code_bits(Bits), 0>(at), high = load_lines<code_bits(Bits), 4>(at);
  if constexpr (kInPlace<Bits>) {
    high = and_mask(low, 0xf0);
    low = shift_left_all<4>(low);
  }
  if constexpr ((Wanted & kFirstHalf) != 0) {
    add_lines<Bits, Affine, Tiles, Panel, 0, 4>(low, high, table, first0, first1);
  }
  if constexpr ((Wanted & kSecondHalf) != 0) {
    add_lines<Bits, Affine, Tiles, Panel, 4, 8>(low, high, table, second0, second1);
  }
}

// A block, or a half of it, of every panel: the second one is `stride` bytes behind the first. `a`: of its (first)
// half.
template <int Bits, bool Affine, int Tiles, int Panels, Halves Wanted>
[[gnu::always_inline]] inline void add_block(const uint8_t* at, int64_t stride, svuint8_t table, const int8_t* a,
                                             int64_t a_stride) LOWBIT_STREAMING {
  const svcount_t all = svptrue_c8();
  svint8x4_t first0 = svundef4_s8(), first1 = first0, second0 = first0, second1 = first0;
  if constexpr ((Wanted & kFirstHalf) != 0) {
    first0 = svld1_vnum_s8_x4(all, a, 0);
    if constexpr (Tiles == 2) first1 = svld1_vnum_s8_x4(all, a + a_stride, 0);
  }
  if constexpr ((Wanted & kSecondHalf) != 0) {
    constexpr int kAt = Wanted == kWholeBlock ? kHalfLines : 0;
    second0 = svld1_vnum_s8_x4(all, a, kAt);
    if constexpr (Tiles == 2) second1 = svld1_vnum_s8_x4(all, a + a_stride, kAt);
  }
  add_panel<Bits, Affine, Tiles, 0, Wanted>(at, table, first0, first1, second0, second1);
  if constexpr (Panels == 2) {
    add_panel<Bits, Affine, 1, 1, Wanted>(at + stride, table, first0, first0, second0, second0);
  }
}

[[gnu::always_inline]] inline svint16_t load_parts(const int32_t* parts) __arm_streaming {
  return svld1_s16(svptrue_b16(), reinterpret_cast<const int16_t*>(parts));
}

// Integer sums of tile T += Offset * the group's sums of activations, each in two int16.
template <int Offset, int T>
[[gnu::always_inline]] inline void add_offset(svint16_t sums) LOWBIT_STREAMING {
  static_assert(Offset >= -128 && Offset <= 128);  // 256 times as much is an int16, if it is negative
  // -|offset| and 256 times that, in every lane.
  constexpr uint32_t kNegative = static_cast<uint32_t>(Offset < 0 ? Offset : -Offset);
  const svint16_t factors = svreinterpret_s16_u32(svdup_n_u32((kNegative & 0xffff) | kNegative << 24));
  const svbool_t all = svptrue_b16();
  if constexpr (Offset < 0) svmopa_za32_s16_m(T, all, all, sums, factors);
  else svmops_za32_s16_m(T, all, all, sums, factors);
}

// A finished group of tile T to the float sums of tile 2 + T. In registers by name: compilers find none for both of
// ZA's indices, which can be four only, and keep them in memory.
template <bool Affine, int T>
[[gnu::always_inline]] inline void finish(svfloat32_t scale, svfloat32_t min, const int32_t* sum, uint32_t vector0,
                                          uint32_t vector8) LOWBIT_STREAMING {
  __asm__ volatile(
      "mov {z16.d-z19.d}, za.d[%w0, %3, vgx4]\n\t"
      "mov {z20.d-z23.d}, za.d[%w0, %4, vgx4]\n\t"
      "mov {z24.d-z27.d}, za.d[%w1, %3, vgx4]\n\t"
      "mov {z28.d-z31.d}, za.d[%w1, %4, vgx4]\n\t"
      "scvtf {z16.s-z19.s}, {z16.s-z19.s}\n\t"
      "scvtf {z20.s-z23.s}, {z20.s-z23.s}\n\t"
      "scvtf {z24.s-z27.s}, {z24.s-z27.s}\n\t"
      "scvtf {z28.s-z31.s}, {z28.s-z31.s}\n\t"
      "fmla za.s[%w0, %5, vgx4], {z16.s-z19.s}, %2.s\n\t"
      "fmla za.s[%w0, %6, vgx4], {z20.s-z23.s}, %2.s\n\t"
      "fmla za.s[%w1, %5, vgx4], {z24.s-z27.s}, %2.s\n\t"
      "fmla za.s[%w1, %6, vgx4], {z28.s-z31.s}, %2.s"
      :
      : "Uci"(vector0), "Uci"(vector8), "x"(scale), "i"(T), "i"(4 + T), "i"(2 + T), "i"(6 + T)
      : "z16", "z17", "z18", "z19", "z20", "z21", "z22", "z23", "z24", "z25", "z26", "z27", "z28", "z29", "z30", "z31",
        "za", "memory");
  if constexpr (Affine) {
    const svbool_t all = svptrue_b32();
    svmopa_za32_f32_m(2 + T, all, all, svld1_f32(all, reinterpret_cast<const float*>(sum)), min);
  }
}

// Between pieces: float sums, and the integer sums of a group that is open.
template <int T>
[[gnu::always_inline]] inline void load_tile(const Chunk& chunk, bool open, int64_t panel,
                                             int64_t tile) LOWBIT_STREAMING {
  const svcount_t all = svptrue_c32();
#pragma clang loop unroll(full)
  for (uint32_t i = 0; i < 4; ++i) {
    if (open) svwrite_za32_s32_vg1x4(4 * i + T, svld1_vnum_s32_x4(all, chunk.scratch.open[panel][tile], 4 * i));
    svwrite_za32_f32_vg1x4(4 * i + 2 + T, svld1_vnum_f32_x4(all, chunk.scratch.acc[panel][tile], 4 * i));
  }
}

template <int T>
[[gnu::always_inline]] inline void store_tile(const Chunk& chunk, bool open, int64_t panel,
                                              int64_t tile) LOWBIT_STREAMING {
  const svcount_t all = svptrue_c32();
#pragma clang loop unroll(full)
  for (uint32_t i = 0; i < 4; ++i) {
    if (open) svst1_vnum_s32_x4(all, chunk.scratch.open[panel][tile], 4 * i, svread_za32_s32_vg1x4(4 * i + T));
    svst1_vnum_f32_x4(all, chunk.scratch.acc[panel][tile], 4 * i, svread_za32_f32_vg1x4(4 * i + 2 + T));
  }
}

// The float sums of tile 2 + T to outputs; the integer ones are not needed any more. The scale of each output, that of
// its row of m times that of its weights, is a product of vectors like the zero points' part; added to -0, which leaves
// the sign of a zero.
template <int T>
[[gnu::always_inline]] inline void store_tile_outputs(const Head& head, int64_t first, int64_t rows, int64_t stride,
                                                      DType dtype, svfloat32_t scales, svfloat32_t zeros,
                                                      svfloat32_t zero) LOWBIT_STREAMING {
  const svbool_t all = svptrue_b32(), there = svwhilelt_b32(int64_t{0}, rows), columns = head.columns();
  svmops_za32_f32_m(2 + T, there, all, zeros, svld1_f32(all, head.row_sum));
  const uint32_t begin[2] = {hidden(0), hidden(8)};
#pragma clang loop unroll(full)
  for (uint32_t i = 0; i < 4; ++i) {
    svwrite_za32_f32_vg1x4(begin[i / 2] + 4 * (i % 2) + T, svcreate4_f32(zero, zero, zero, zero));
  }
  svmopa_za32_f32_m(T, there, all, scales, svld1_f32(all, head.row_scale));

  const svfloat32_t bias = svld1_f32(all, head.bias);
  if (rows >= kTileRows && dtype == DType::f32) {
    float* const out = reinterpret_cast<float*>(head.out) + first * stride;
    float *const out4 = out + 4 * stride, *const out8 = out4 + 4 * stride, *const out12 = out8 + 4 * stride;
    int64_t row = 0;
#pragma clang loop unroll(full)
    for (uint32_t i = 0; i < 4; ++i, row += stride) {
      __asm__ volatile(
          "mov {z16.d-z19.d}, za.d[%w0, %1, vgx4]\n\t"
          "mov {z20.d-z23.d}, za.d[%w0, %2, vgx4]\n\t"
          "fmad z16.s, %3/m, z20.s, %4.s\n\t"
          "fmad z17.s, %3/m, z21.s, %4.s\n\t"
          "fmad z18.s, %3/m, z22.s, %4.s\n\t"
          "fmad z19.s, %3/m, z23.s, %4.s\n\t"
          "st1w {z16.s}, %5, [%6, %10, lsl #2]\n\t"
          "st1w {z17.s}, %5, [%7, %10, lsl #2]\n\t"
          "st1w {z18.s}, %5, [%8, %10, lsl #2]\n\t"
          "st1w {z19.s}, %5, [%9, %10, lsl #2]"
          :
          : "Uci"(begin[i / 2]), "i"(4 * (i % 2) + T), "i"(4 * (i % 2) + 2 + T), "Upl"(all), "w"(bias), "Upl"(columns),
            "r"(out), "r"(out4), "r"(out8), "r"(out12), "r"(row)
          : "z16", "z17", "z18", "z19", "z20", "z21", "z22", "z23", "memory");
    }
    return;
  }
  const int64_t row_bytes = stride * bytes_of(dtype);
  char* out = head.out + first * row_bytes;
#pragma clang loop unroll(full)
  for (uint32_t i = 0; i < 4; ++i, out += row_bytes) {
    const uint32_t at = begin[i / 2] + 4 * (i % 2) + T;
    const svfloat32x4_t scale = svread_za32_f32_vg1x4(at), sum = svread_za32_f32_vg1x4(at + 2);
    char* row = out;
    if (i < rows) store_row(row, dtype, columns, svmad_f32_x(all, svget4(scale, 0), svget4(sum, 0), bias));
    row += 4 * row_bytes;
    if (i + 4 < rows) store_row(row, dtype, columns, svmad_f32_x(all, svget4(scale, 1), svget4(sum, 1), bias));
    row += 4 * row_bytes;
    if (i + 8 < rows) store_row(row, dtype, columns, svmad_f32_x(all, svget4(scale, 2), svget4(sum, 2), bias));
    row += 4 * row_bytes;
    if (i + 12 < rows) store_row(row, dtype, columns, svmad_f32_x(all, svget4(scale, 3), svget4(sum, 3), bias));
  }
}

// Those of all tiles.
template <int Tiles, int Panels>
[[gnu::noinline]] void store_outputs(const Chunk& chunk, int64_t panel) LOWBIT_STREAMING {
  const LinearArgs& args = chunk.args;
  const Head head(args, chunk.first_panel + panel);
  const int64_t first = chunk.first_row, rows = chunk.rows, stride = args.out_stride;
  const DType dtype = args.out_dtype;
  const svfloat32_t zero = svdup_n_f32(-0.0f);
  const svbool_t there = svwhilelt_b32(int64_t{0}, rows);
  const svfloat32_t scales = svld1_f32(there, args.scales + first), zeros = svld1_f32(there, args.zeros + first);
  if constexpr (Panels == 2) {
    const Head next = head.next(chunk.args.layout.panel_bytes, dtype);
    store_tile_outputs<0>(head, first, rows, stride, dtype, scales, zeros, zero);
    store_tile_outputs<1>(next, first, rows, stride, dtype, scales, zeros, zero);
  } else if constexpr (Tiles == 2) {
    const int64_t next = first + kTileRows, left = rows - kTileRows;
    const svbool_t below = svwhilelt_b32(int64_t{0}, left);
    const svfloat32_t scales1 = svld1_f32(below, args.scales + next), zeros1 = svld1_f32(below, args.zeros + next);
    store_tile_outputs<0>(head, first, rows, stride, dtype, scales, zeros, zero);
    store_tile_outputs<1>(head, next, left, stride, dtype, scales1, zeros1, zero);
  } else {
    store_tile_outputs<0>(head, first, rows, stride, dtype, scales, zeros, zero);
  }
}

// Where a piece is read. `at`: in the first panel; the second one is `stride` bytes behind it.
struct Place {
  const uint8_t* at;
  const int8_t* a;
  const int32_t *sums, *parts;
  int64_t stride, a_stride, sums_stride;
};

// Begins a group: integer sums of `Used` tiles.
template <int Bits, bool Affine, int Tiles, int Used>
[[gnu::always_inline]] inline void begin_group(const Place& place) LOWBIT_STREAMING {
  constexpr int kOffset = kFactor<Bits> * offset<Bits, Affine>();
  svzero_mask_za(Used == 2 ? 0x33 : 0x11);
  if constexpr (kOffset != 0) {
    const svint16_t sums = load_parts(place.parts);
    add_offset<kOffset, 0>(sums);
    if constexpr (Tiles == 2) add_offset<kOffset, 1>(load_parts(place.parts + place.sums_stride));
    else if constexpr (Used == 2) add_offset<kOffset, 1>(sums);
  }
}

// Some blocks of a group.
template <int Bits, bool Affine, int Tiles, int Panels>
[[gnu::always_inline]] inline void add_blocks(Place& place, int64_t blocks, svuint8_t table) LOWBIT_STREAMING {
#pragma clang loop unroll(disable)
  do {
    add_block<Bits, Affine, Tiles, Panels, kWholeBlock>(place.at, place.stride, table, place.a, place.a_stride);
    place.a += kBlockLines * kVectorBytes;
    place.at += code_bits(Bits) * kLineBytes;
  } while (--blocks != 0);
}

// The same where it need not be fast: of a group that a piece cuts.
template <int Bits, bool Affine, int Tiles, int Panels>
[[gnu::noinline]] void add_cut_blocks(Place& place, int64_t blocks, svuint8_t table) LOWBIT_STREAMING {
  add_blocks<Bits, Affine, Tiles, Panels>(place, blocks, table);
}

// Ends a group, whose scales are at `scales`.
template <int Bits, bool Affine, int Tiles, int Panels>
[[gnu::always_inline]] inline void end_group(Place& place, const uint8_t* scales, uint32_t vector0,
                                             uint32_t vector8) LOWBIT_STREAMING {
  svfloat32_t scale = load_factored_scales<Bits>(scales), min = svundef_f32();
  if constexpr (Affine) min = load_scales(scales, 1);
  finish<Affine, 0>(scale, min, place.sums, vector0, vector8);
  if constexpr (Panels == 2) {
    scale = load_factored_scales<Bits>(scales + place.stride);
    if constexpr (Affine) min = load_scales(scales + place.stride, 1);
  }
  if constexpr (Tiles * Panels == 2) {
    finish<Affine, 1>(scale, min, place.sums + (Tiles == 2 ? place.sums_stride : 0), vector0, vector8);
  }
  if constexpr (Affine) place.sums += kTileRows;
  if constexpr (offset<Bits, Affine>() != 0) place.parts += kTileRows;
}

// A piece of k: one or two tiles of rows times one panel, or one tile times two. `begin`: where it is in the first
// panel. Returns its bytes.
template <int Bits, bool Affine, int Tiles, int Panels, bool Halves>
[[gnu::always_inline]] inline int64_t multiply_piece(const Chunk& chunk, const Piece& piece, int64_t panel,
                                                     const uint8_t* begin) LOWBIT_STREAMING {
  constexpr int kUsed = Tiles * Panels, kPanel1 = Panels - 1, kTile1 = Tiles - 1;
  constexpr int kBlockBytes = code_bits(Bits) * kLineBytes, kGroupBytes = (Affine ? 4 : 2) * kPanelRows;
  const svuint8_t table = load_table(chunk.args.layout);
  const uint32_t vector0 = hidden(0), vector8 = hidden(8);
  Place place{begin, chunk.scratch.a, chunk.scratch.sums, chunk.scratch.parts, chunk.args.layout.panel_bytes,
              chunk.a_stride, chunk.sums_stride};

  svzero_za();
  if (piece.first > 0) {
    load_tile<0>(chunk, !piece.begins, panel, 0);
    if constexpr (kUsed == 2) load_tile<1>(chunk, !piece.begins, panel + kPanel1, kTile1);
  }

  int64_t rest = piece.halves;
  if constexpr (!Halves) {
    const auto end = [&]() __attribute__((always_inline)) LOWBIT_STREAMING {
      end_group<Bits, Affine, Tiles, Panels>(place, place.at, vector0, vector8);
      place.at += kGroupBytes;
    };
    if (!piece.begins) {
      const int64_t count = piece.first_left < rest ? piece.first_left : rest;
      add_cut_blocks<Bits, Affine, Tiles, Panels>(place, count >> 1, table);
      rest -= count;
      if (rest != 0 || !piece.open) end();
    }
    const int64_t blocks = piece.group_halves >> 1, groups = rest / piece.group_halves;
    rest -= groups * piece.group_halves;
    for (int64_t left = groups; left != 0; --left) {
      begin_group<Bits, Affine, Tiles, kUsed>(place);
      add_blocks<Bits, Affine, Tiles, Panels>(place, blocks, table);
      end();
    }
    if (rest != 0) {
      begin_group<Bits, Affine, Tiles, kUsed>(place);
      add_cut_blocks<Bits, Affine, Tiles, Panels>(place, rest >> 1, table);
      if (!piece.open) end();
    }
  } else if (piece.group_halves == 1) {
    const auto add_group = [&](auto half, const uint8_t* scales) __attribute__((always_inline)) LOWBIT_STREAMING {
      begin_group<Bits, Affine, Tiles, kUsed>(place);
      add_block<Bits, Affine, Tiles, Panels, decltype(half)::value>(place.at, place.stride, table, place.a,
                                                                    place.a_stride);
      place.a += kHalfLines * kVectorBytes;
      end_group<Bits, Affine, Tiles, Panels>(place, scales, vector0, vector8);
    };
    for (;;) {
      const uint8_t* scales = place.at + kBlockBytes;
      add_group(std::integral_constant<::lowbit::Halves, kFirstHalf>(), scales);
      if (--rest == 0) break;
      add_group(std::integral_constant<::lowbit::Halves, kSecondHalf>(), scales + kGroupBytes);
      place.at = scales + 2 * kGroupBytes;
      if (--rest == 0) break;
    }
  } else {
    bool begins = piece.begins, second = false;  // second: a block's first half is done
    int64_t left = piece.first_left, skip = 0;
    for (;;) {
      if (begins) begin_group<Bits, Affine, Tiles, kUsed>(place);
      int64_t count = left < rest ? left : rest;
      rest -= count;
      const auto add_half = [&](auto half) __attribute__((always_inline)) LOWBIT_STREAMING {
        add_block<Bits, Affine, Tiles, Panels, decltype(half)::value>(place.at, place.stride, table, place.a,
                                                                      place.a_stride);
        place.a += kHalfLines * kVectorBytes;
      };
      if (second) {
        add_half(std::integral_constant<::lowbit::Halves, kSecondHalf>());
        place.at += kBlockBytes + skip;
        --count;
        second = false;
      }
      if (count > 1) add_blocks<Bits, Affine, Tiles, Panels>(place, count >> 1, table);
      const uint8_t* scales = place.at;
      if (count % 2 != 0) {
        add_half(std::integral_constant<::lowbit::Halves, kFirstHalf>());
        scales += kBlockBytes;  // behind the whole block
        skip = kGroupBytes;
        second = true;
      }
      if (rest == 0 && piece.open) break;
      if (!second) place.at += kGroupBytes;
      end_group<Bits, Affine, Tiles, Panels>(place, scales, vector0, vector8);
      if (rest == 0) break;
      begins = true;
      left = piece.group_halves;
    }
  }
  if (piece.last) {
    store_outputs<Tiles, Panels>(chunk, panel);
  } else {
    store_tile<0>(chunk, piece.open, panel, 0);
    if constexpr (kUsed == 2) store_tile<1>(chunk, piece.open, panel + kPanel1, kTile1);
  }
  return place.at - begin;
}

template <int Bits, bool Affine, bool Halves>
void multiply_chunk(const Chunk& chunk) LOWBIT_STREAMING {
  const Layout& layout = chunk.args.layout;
  const int64_t halves = chunk.halves, group_halves = chunk.group_halves;
  const uint8_t* at = chunk.args.panels + chunk.first_panel * layout.panel_bytes;  // of the first panel
  for (int64_t first = 0; first < halves; first += chunk.piece_halves) {
    Piece piece;
    piece.first = first;
    piece.halves = halves - first < chunk.piece_halves ? halves - first : chunk.piece_halves;
    piece.last = first + piece.halves == halves;
    piece.first_group = first / group_halves;
    piece.groups = (first + piece.halves - 1) / group_halves - piece.first_group + 1;
    piece.first_left = group_halves - first % group_halves;
    piece.group_halves = group_halves;
    piece.begins = first % group_halves == 0;
    piece.open = !piece.last && (first + piece.halves) % group_halves != 0;
    transpose_piece<Bits, Affine>(chunk, piece);
    const uint8_t* next = at;
    int64_t panel = 0, moved = 0;
    for (const int64_t step = chunk.tiles == 2 ? 1 : 2; panel + step <= chunk.panels;
         panel += step, next += step * layout.panel_bytes) {
      moved = step == 1 ? multiply_piece<Bits, Affine, 2, 1, Halves>(chunk, piece, panel, next)
                        : multiply_piece<Bits, Affine, 1, 2, Halves>(chunk, piece, panel, next);
    }
    if (panel < chunk.panels) moved = multiply_piece<Bits, Affine, 1, 1, Halves>(chunk, piece, panel, next);
    at += moved;
  }
}

}  // namespace
}  // namespace lowbit
