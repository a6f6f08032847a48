// Many rows of m on SME2: what of a call is computed at once, and its activations as vectors of 16 rows.
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

}  // namespace
}  // namespace lowbit
