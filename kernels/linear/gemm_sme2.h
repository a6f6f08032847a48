// Many rows of m on SME2: outer products, 16 rows of m by 16 outputs in a tile of ZA. sme2.cpp explains it.
#pragma once

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
#pragma clang loop unroll(full)
      for (uint32_t i = 0; i < kTileRows; i += 4, row += 4 * stride) {
        const uint32_t first = hidden(i);
        svld1_hor_za32(0, first, columns, row);
        svld1_hor_za32(0, first + 1, columns, row + stride);
        svld1_hor_za32(0, first + 2, columns, row + 2 * stride);
        svld1_hor_za32(0, first + 3, columns, row + 3 * stride);
      }
    } else {
      for (uint32_t i = 0; i < rows; ++i, row += stride) svld1_hor_za32(0, i, columns, row);
    }
#pragma clang loop unroll(full)
    for (uint32_t i = 0; i < 4; ++i) {
      svst1_vnum_u32_x4(svptrue_c32(), out, 4 * i, svread_ver_za32_u32_vg4(0, 4 * i));
    }
  }
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
      const svbool_t all = svptrue_b32();
      for (int64_t group = 0; group < piece.groups; ++group) {
        const svint32_t sum = svld1_vnum_s32(all, sums, group);
        if constexpr (offset<Bits, Affine>() != 0) {
          const svint32_t low = svand_n_s32_x(all, sum, 0xff), high = svasr_n_s32_x(all, sum, 8);
          svst1_vnum_s32(all, parts, group, svsli_n_s32(low, high, 16));
        }
        if constexpr (Affine) {
          svst1_vnum_f32(all, reinterpret_cast<float*>(sums), group, svcvt_f32_s32_x(all, sum));
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
    const svuint8_t w = line<Bits, Affine, J>(low, high, table);
    multiply<Bits, Panel>(svget4_s8(a0, J % 4), w);
    if constexpr (Tiles == 2) multiply<Bits, 1>(svget4_s8(a1, J % 4), w);
    add_lines<Bits, Affine, Tiles, Panel, J + 1, End>(low, high, table, a0, a1);
  }
}

// A block, or a half of it, of every panel. `a`: of its (first) half.
template <int Bits, bool Affine, int Tiles, int Panels, Halves Wanted>
[[gnu::always_inline]] inline void add_block(const uint8_t* const* at, svuint8_t table, const int8_t* a,
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
  {
    const svuint8x4_t low = load_lines<code_bits(Bits), 0>(at[0]), high = load_lines<code_bits(Bits), 4>(at[0]);
    if constexpr ((Wanted & kFirstHalf) != 0) add_lines<Bits, Affine, Tiles, 0, 0, 4>(low, high, table, first0, first1);
    if constexpr ((Wanted & kSecondHalf) != 0) {
      add_lines<Bits, Affine, Tiles, 0, 4, 8>(low, high, table, second0, second1);
    }
  }
  if constexpr (Panels == 2) {
    const svuint8x4_t low = load_lines<code_bits(Bits), 0>(at[1]), high = load_lines<code_bits(Bits), 4>(at[1]);
    if constexpr ((Wanted & kFirstHalf) != 0) add_lines<Bits, Affine, 1, 1, 0, 4>(low, high, table, first0, first0);
    if constexpr ((Wanted & kSecondHalf) != 0) add_lines<Bits, Affine, 1, 1, 4, 8>(low, high, table, second0, second0);
  }
}

// Integer sums of tile T += Offset * the group's sums of activations, each in two int16.
template <int Offset, int T>
[[gnu::always_inline]] inline void add_offset(const int32_t* parts, svint16_t factors) LOWBIT_STREAMING {
  const svbool_t all = svptrue_b16();
  const svint16_t sums = svld1_s16(all, reinterpret_cast<const int16_t*>(parts));
  if constexpr (Offset < 0) svmopa_za32_s16_m(T, all, all, sums, factors);
  else svmops_za32_s16_m(T, all, all, sums, factors);
}

// A finished group of tile T to the float sums of tile 2 + T.
template <bool Affine, int T>
[[gnu::always_inline]] inline void finish(svfloat32_t scale, svfloat32_t min, const int32_t* sum, uint32_t vector0,
                                          uint32_t vector8) LOWBIT_STREAMING {
#pragma clang loop unroll(full)
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t at = (i < 2 ? vector0 : vector8) + 4 * (i % 2) + T;
    svmla_single_za32_f32_vg1x4(at + 2, svcvt_f32_s32_x4(svread_za32_s32_vg1x4(at)), scale);
  }
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
[[gnu::noinline]] void store_outputs(const Chunk& chunk, int64_t panel, int64_t tile) LOWBIT_STREAMING {
  const LinearArgs& args = chunk.args;
  const Head head(args, chunk.first_panel + panel);
  const svbool_t all = svptrue_b32();
  const int64_t first = chunk.first_row + tile * kTileRows, rows = chunk.rows - tile * kTileRows;
  const svbool_t there = svwhilelt_b32(int64_t{0}, rows);
  svmops_za32_f32_m(2 + T, there, all, svld1_f32(there, args.zeros + first), svld1_f32(all, head.row_sum));
  const svfloat32_t zero = svdup_n_f32(-0.0f);
  const uint32_t begin[2] = {hidden(0), hidden(8)};
#pragma clang loop unroll(full)
  for (uint32_t i = 0; i < 4; ++i) {
    svwrite_za32_f32_vg1x4(begin[i / 2] + 4 * (i % 2) + T, svcreate4_f32(zero, zero, zero, zero));
  }
  svmopa_za32_f32_m(T, there, all, svld1_f32(there, args.scales + first), svld1_f32(all, head.row_scale));

  const svfloat32_t bias = svld1_f32(all, head.bias);
  const int64_t row_bytes = args.out_stride * bytes_of(args.out_dtype);
  const svbool_t columns = head.columns();
  char* out = head.out + first * row_bytes;
#pragma clang loop unroll(full)
  for (uint32_t i = 0; i < 4; ++i, out += row_bytes) {
    const uint32_t at = begin[i / 2] + 4 * (i % 2) + T;
    const svfloat32x4_t scale = svread_za32_f32_vg1x4(at), sum = svread_za32_f32_vg1x4(at + 2);
    char* row = out;
    const auto dtype = args.out_dtype;
    if (i < rows) store_row(row, dtype, columns, svmad_f32_x(all, svget4(scale, 0), svget4(sum, 0), bias));
    row += 4 * row_bytes;
    if (i + 4 < rows) store_row(row, dtype, columns, svmad_f32_x(all, svget4(scale, 1), svget4(sum, 1), bias));
    row += 4 * row_bytes;
    if (i + 8 < rows) store_row(row, dtype, columns, svmad_f32_x(all, svget4(scale, 2), svget4(sum, 2), bias));
    row += 4 * row_bytes;
    if (i + 12 < rows) store_row(row, dtype, columns, svmad_f32_x(all, svget4(scale, 3), svget4(sum, 3), bias));
  }
}

// A piece of k: one or two tiles of rows times one panel, or one tile times two. `at` moves on to the next piece.
template <int Bits, bool Affine, int Tiles, int Panels, bool Halves>
[[gnu::always_inline]] inline void multiply_piece(const Chunk& chunk, const Piece& piece, int64_t panel,
                                                  const uint8_t** next) LOWBIT_STREAMING {
  constexpr int kUsed = Tiles * Panels, kPanel1 = Panels - 1, kTile1 = Tiles - 1;
  constexpr int kBlockBytes = code_bits(Bits) * kLineBytes, kGroupBytes = (Affine ? 4 : 2) * kPanelRows;
  constexpr int kOffset = offset<Bits, Affine>();
  const svuint8_t table = load_table(chunk.args.layout);
  // -|offset| and 256 times that, in every lane.
  constexpr uint32_t kFactor = static_cast<uint32_t>(kOffset < 0 ? kOffset : -kOffset);
  const svint16_t factors = svreinterpret_s16_u32(svdup_n_u32((kFactor & 0xffff) | kFactor << 24));
  const int64_t a_stride = chunk.a_stride, sums_stride = chunk.sums_stride;
  const int8_t* a = chunk.scratch.a;
  const int32_t *sums = chunk.scratch.sums, *parts = chunk.scratch.parts;
  const uint8_t* at[2] = {next[0], next[kPanel1]};

  svzero_za();
  if (piece.first > 0) {
    load_tile<0>(chunk, !piece.begins, panel, 0);
    if constexpr (kUsed == 2) load_tile<1>(chunk, !piece.begins, panel + kPanel1, kTile1);
  }

  bool open = false;
  int64_t half = 0, left = piece.first_left, skip = 0;
  for (bool begins = piece.begins; half < piece.halves; begins = true, left = piece.group_halves) {
    const bool ends = left <= piece.halves - half || piece.last;
    const int64_t end = left < piece.halves - half ? half + left : piece.halves;
    if (begins) {
      svzero_mask_za(kUsed == 2 ? 0x33 : 0x11);
      if constexpr (kOffset != 0) {
        add_offset<kOffset, 0>(parts, factors);
        if constexpr (kUsed == 2) add_offset<kOffset, 1>(parts + kTile1 * sums_stride, factors);
      }
    }
    if (Halves && half % 2 != 0) {
      add_block<Bits, Affine, Tiles, Panels, kSecondHalf>(at, table, a, a_stride);
      a += kHalfLines * kVectorBytes;
      at[0] += kBlockBytes + skip, at[1] += kBlockBytes + skip;
      ++half;
    }
#pragma clang loop unroll(disable)
    for (int64_t blocks = (end - half) >> 1; blocks > 0; --blocks) {
      add_block<Bits, Affine, Tiles, Panels, kWholeBlock>(at, table, a, a_stride);
      a += kBlockLines * kVectorBytes;
      at[0] += kBlockBytes, at[1] += kBlockBytes;
    }
    half = Halves ? half + ((end - half) & ~int64_t{1}) : end;
    const uint8_t* scales[2] = {at[0], at[1]};
    if (Halves && half < end) {
      add_block<Bits, Affine, Tiles, Panels, kFirstHalf>(at, table, a, a_stride);
      a += kHalfLines * kVectorBytes;
      scales[0] += kBlockBytes, scales[1] += kBlockBytes;  // behind the whole block
      skip = kGroupBytes;
      ++half;
    } else if (ends) {
      at[0] += kGroupBytes, at[1] += kGroupBytes;
    }
    if (!ends) {
      open = true;
      break;
    }
    const uint32_t vector0 = hidden(0), vector8 = hidden(8);
    svfloat32_t scale = load_scales(scales[0], 0), min = svundef_f32();
    if constexpr (Affine) min = load_scales(scales[0], 1);
    finish<Affine, 0>(scale, min, sums, vector0, vector8);
    if constexpr (Panels == 2) {
      scale = load_scales(scales[1], 0);
      if constexpr (Affine) min = load_scales(scales[1], 1);
    }
    if constexpr (kUsed == 2) finish<Affine, 1>(scale, min, sums + kTile1 * sums_stride, vector0, vector8);
    sums += kTileRows;
    parts += kTileRows;
  }
  next[0] = at[0], next[kPanel1] = at[kPanel1];
  if (piece.last) {
    store_outputs<0>(chunk, panel, 0);
    if constexpr (kUsed == 2) store_outputs<1>(chunk, panel + kPanel1, kTile1);
  } else {
    store_tile<0>(chunk, open, panel, 0);
    if constexpr (kUsed == 2) store_tile<1>(chunk, open, panel + kPanel1, kTile1);
  }
}

template <int Bits, bool Affine, bool Halves>
void multiply_chunk(const Chunk& chunk) LOWBIT_STREAMING {
  const Layout& layout = chunk.args.layout;
  const int64_t halves = chunk.halves, group_halves = chunk.group_halves;
  const uint8_t* at[kChunkPanels];
  for (int64_t p = 0; p < chunk.panels; ++p) {
    at[p] = chunk.args.panels + (chunk.first_panel + p) * layout.panel_bytes;
  }
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
    transpose_piece<Bits, Affine>(chunk, piece);
    int64_t panel = 0;
    if (chunk.tiles == 2) {
      for (; panel < chunk.panels; ++panel) multiply_piece<Bits, Affine, 2, 1, Halves>(chunk, piece, panel, at + panel);
    } else {
      for (; panel + 2 <= chunk.panels; panel += 2) {
        multiply_piece<Bits, Affine, 1, 2, Halves>(chunk, piece, panel, at + panel);
      }
      if (panel < chunk.panels) multiply_piece<Bits, Affine, 1, 1, Halves>(chunk, piece, panel, at + panel);
    }
  }
}

}  // namespace
}  // namespace lowbit
