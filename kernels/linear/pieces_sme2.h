// Many rows of m on SME2: the pieces of a call, and its activations as vectors of 16 rows.
#pragma once

#include "streaming_sme2.h"

namespace lowbit {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileSums = kTileRows * kPanelRows;
constexpr int kChunkTiles = 2;
constexpr int kChunkPanels = 8;
constexpr int kPieceHalves = 128;  // for 16 rows; half as many for 32 rows

constexpr int kStartRow = -32768;  // gemm_sme2.h

// Segments per group. Each value keeps P between segments in the way that is cheapest for it (sme2.cpp).
enum class Segments { one, two, many };

// Consecutive half blocks of k: whole segments, and whole groups unless groups have many segments.
struct Piece {
  int64_t first, halves;
  bool last;  // whether the piece, and with it the last group, ends at the end of k
  int64_t first_segment, segments;
  int64_t first_group, groups;  // groups that it contains or shares
  int64_t first_left;           // half blocks of the first group from the start of the piece
  bool begins;                  // whether the first group begins with the piece
  bool open;                    // whether the last group continues after it
};

// The values of `tiles` tiles of 16 rows of m are adjacent.
struct Scratch {
  // Per block and tile: vectors of 16 rows x 4 inputs. transpose() writes whole tiles of 16 vectors.
  alignas(64) int8_t a[(kPieceHalves * kHalfLines + 2 * 16) * kVectorBytes];
  // Per segment: the scales t of each tile's rows. If sums need start values, then also each row's sum A as one int16, with
  // kStartRow as the other.
  alignas(64) float segments[(kPieceHalves + 4 * kChunkTiles) * 2 * kTileRows];
  // Per group and tile, affine: the sum S, in the order of rows of the float sums.
  alignas(64) float sums[(kPieceHalves + 4 * kChunkTiles) * kTileRows];
  // Intermediate results of spread(): transposed values.
  alignas(64) float columns[(kPieceHalves + 16) * kTileRows];
  // Per panel and tile: float sums in ZA's order. `open`, in the same order: P of a group that continues in the next piece, or
  // the integer sums of the first of two segments.
  alignas(64) float acc[kChunkPanels][kChunkTiles][kTileSums];
  alignas(64) float open[kChunkPanels][kChunkTiles][kTileSums];
};
static_assert(sizeof(Scratch) <= kLinearScratchBytes);

// Up to 32 rows of m times up to 8 panels. Streaming functions call no other functions, so these members are computed before.
struct Chunk {
  const LinearArgs& args;
  int64_t first_row, rows;
  int64_t first_panel, panels;
  Scratch& scratch;

  int64_t halves = half_blocks(args.layout), group_halves = args.layout.group_inputs() / kHalfInputs;
  int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  int64_t piece_halves = kPieceHalves / tiles;
};

LOWBIT_INLINE inline Piece next_piece(const Chunk& chunk, int64_t first) __arm_streaming_compatible {
  const int64_t halves = chunk.halves, group_halves = chunk.group_halves;
  const auto segment_at = [&](int64_t half) {
    return half / group_halves * chunk.args.layout.group_segments() +
           (half % group_halves + kSegmentHalves - 1) / kSegmentHalves;
  };
  int64_t end = first + chunk.piece_halves;
  if (end >= halves) end = halves;
  else end -= group_halves <= 2 * kSegmentHalves ? end % group_halves : end % group_halves % kSegmentHalves;

  Piece piece;
  piece.first = first;
  piece.halves = end - first;
  piece.last = end == halves;
  piece.first_segment = segment_at(first);
  piece.segments = segment_at(end) - piece.first_segment;
  piece.first_group = first / group_halves;
  piece.groups = (end - 1) / group_halves - piece.first_group + 1;
  piece.first_left = group_halves - first % group_halves;
  piece.begins = first % group_halves == 0;
  piece.open = !piece.last && end % group_halves != 0;
  return piece;
}

// Loads 16 rows, `stride` words apart, to the rows of tile 0. In assembly, because compilers would recompute each address.
LOWBIT_INLINE inline void load_tile_rows(const uint32_t* const (&rows)[4], int64_t word, int64_t stride,
                                         svbool_t columns) LOWBIT_STREAMING {
#pragma clang loop unroll(full)
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t* row = rows[i] + word;
    __asm__ volatile(
        "ld1w {za0h.s[%w0, 0]}, %1/z, [%2]\n\t"
        "ld1w {za0h.s[%w0, 1]}, %1/z, [%2, %3, lsl #2]\n\t"
        "ld1w {za0h.s[%w0, 2]}, %1/z, [%2, %4, lsl #2]\n\t"
        "ld1w {za0h.s[%w0, 3]}, %1/z, [%2, %5, lsl #2]"
        :
        : "Ucj"(4 * i), "Upl"(columns), "r"(row), "r"(stride), "r"(2 * stride), "r"(3 * stride)
        : "za", "memory");
  }
}

// Stores half of the columns of tile 0.
LOWBIT_INLINE inline void store_tile_columns(uint32_t* first, uint32_t* second) LOWBIT_STREAMING {
  __asm__ volatile(
      "mov {z0.s-z3.s}, za0v.s[%w0, 0:3]\n\t"
      "mov {z4.s-z7.s}, za0v.s[%w1, 0:3]\n\t"
      "st1w {z0.s-z3.s}, %4, [%5]\n\t"
      "st1w {z4.s-z7.s}, %4, [%5, #4, mul vl]\n\t"
      "mov {z0.s-z3.s}, za0v.s[%w2, 0:3]\n\t"
      "mov {z4.s-z7.s}, za0v.s[%w3, 0:3]\n\t"
      "st1w {z0.s-z3.s}, %4, [%6]\n\t"
      "st1w {z4.s-z7.s}, %4, [%6, #4, mul vl]"
      :
      : "Ucj"(0), "Ucj"(4), "Ucj"(8), "Ucj"(12), "Uph"(svptrue_c32()), "r"(first), "r"(second)
      : "z0", "z1", "z2", "z3", "z4", "z5", "z6", "z7", "memory");
}

// Converts `words` columns of up to 16 rows, `stride` words apart, to vectors of 16 rows; missing rows are zero. Writes whole
// tiles of 16 columns. Each eight columns are `step` vectors after the previous eight.
[[gnu::noinline]] void transpose(const void* from, int64_t stride, int64_t rows, int64_t words, void* to,
                                 int64_t step) LOWBIT_STREAMING {
  svzero_mask_za(0x11);
  auto* out = static_cast<uint32_t*>(to);
  const uint32_t* const row = static_cast<const uint32_t*>(from);
  const uint32_t* const fours[4] = {row, row + 4 * stride, row + 8 * stride, row + 12 * stride};
  for (int64_t word = 0; word < words; word += kTileRows, out += 2 * step * kTileRows) {
    const svbool_t columns = svwhilelt_b32(word, words);
    if (rows == kTileRows) {
      load_tile_rows(fours, word, stride, columns);
    } else {
      for (uint32_t i = 0; i < rows; ++i) svld1_hor_za32(0, i, columns, row + i * stride + word);
    }
    store_tile_columns(out, out + step * kTileRows);
  }
}

// The order in which a multiply-add of four vectors uses the columns of a tile, for rows and for outputs. It is its own
// inverse: the transposition of a 4 x 4 matrix.
LOWBIT_INLINE inline svuint32_t swapped_lanes() __arm_streaming {
  const svbool_t all = svptrue_b32();
  const svuint32_t lane = svindex_u32(0, 1);
  return svorr_u32_x(all, svlsr_n_u32_x(all, lane, 2), svand_n_u32_x(all, svlsl_n_u32_x(all, lane, 2), 15));
}

// Stores use(vector of 16 rows) for each of `columns` columns, `step` vectors apart. Rounds `columns` up to a multiple of four.
template <class Use>
LOWBIT_INLINE inline void spread(const void* from, int64_t stride, int64_t rows, int64_t columns, Scratch& scratch,
                                 float* to, int64_t step, Use use) LOWBIT_STREAMING {
  transpose(from, stride, rows, columns, scratch.columns, 8);
  const float* at = scratch.columns;
#pragma clang loop unroll(disable)
  for (int64_t i = 0; i < columns; i += 4, at += 4 * kTileRows) {
    const svfloat32x4_t four = svld1_f32_x4(svptrue_c32(), at);
    const svbool_t all = svptrue_b32();
    svst1_f32(all, to, use(svget4(four, 0))), to += step * kTileRows;
    svst1_f32(all, to, use(svget4(four, 1))), to += step * kTileRows;
    svst1_f32(all, to, use(svget4(four, 2))), to += step * kTileRows;
    svst1_f32(all, to, use(svget4(four, 3))), to += step * kTileRows;
  }
}

template <int Bits, bool Affine>
LOWBIT_INLINE inline void transpose_piece(const Chunk& chunk, const Piece& piece) LOWBIT_STREAMING {
  const LinearArgs& args = chunk.args;
  const Layout& layout = args.layout;
  Scratch& scratch = chunk.scratch;
  constexpr bool kStarts = offset<Bits, Affine>() != 0;
  const int64_t stride = layout.blocks * kBlockInputs, tiles = chunk.tiles, step = (kStarts ? 2 : 1) * tiles;
  const int64_t odd = piece.first % 2;  // so that whole blocks are read
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t row = chunk.first_row + tile * kTileRows;
    const int64_t remaining = chunk.rows - tile * kTileRows, rows = remaining < kTileRows ? remaining : kTileRows;
    const int64_t segment = row * layout.segments + piece.first_segment;
    transpose(args.a + row * stride + (piece.first - odd) * kHalfInputs, stride / 4, rows,
              (piece.halves + odd) * kHalfLines, scratch.a + tile * kBlockLines * kVectorBytes, tiles * kBlockLines);
    float* const to = scratch.segments + tile * kTileRows;
    spread(args.scales + segment, layout.segments, rows, piece.segments, scratch, to, step,
           [](svfloat32_t t) LOWBIT_INLINE __arm_streaming { return t; });
    if constexpr (kStarts) {
      const svint32_t start = svdup_n_s32(kStartRow);
      spread(args.sums + segment, layout.segments, rows, piece.segments, scratch, to + tiles * kTileRows, step,
             [&](svfloat32_t sum) LOWBIT_INLINE __arm_streaming {
               return svreinterpret_f32_s32(svsli_n_s32(svreinterpret_s32_f32(sum), start, 16));
             });
    }
    if constexpr (Affine) {
      const svuint32_t lanes = swapped_lanes();
      spread(args.group_sums + row * layout.groups + piece.first_group, layout.groups, rows, piece.groups, scratch,
             scratch.sums + tile * kTileRows, tiles,
             [&](svfloat32_t sum) LOWBIT_INLINE __arm_streaming { return svtbl_f32(sum, lanes); });
    }
  }
}

}  // namespace
}  // namespace lowbit
