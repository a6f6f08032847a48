// linear_a8w<b>_1x64_sme2, linear_a8w<b>_5x32_sme2: int8 activations times b-bit weights on Arm's matrix unit, where
// its vectors have 512 bits: a line (64 bytes: 16 rows x 4 inputs) is one vector, just as it lies.
//
//   many rows   smopa tile, a, line      tile: 16 rows of m x 16 outputs, int32; a: 16 rows of m x 4 inputs
//               Two of the four tiles are integer sums, of two panels or of two times 16 rows of m; the other two are
//               their float sums, so that one fmla per four rows of a tile adds a finished group.
//               for each piece of k: activations, and the sums of their groups, are transposed    once for all panels
//                                    for each panel: tiles                 a group may begin before and end behind it
//   few rows    sdot za, {lines of 4 panels}, a      za: 4 vectors of 16 outputs each, for up to 4 rows of m
//
// Lines are unsigned codes, signed at 8 bits and with a table of levels (sumopa, usdot). What a symmetric code has less
// than its level, times the sum of the group's activations, comes by one product more for many rows: the sum, at most
// 2^23, as two int16, times that number and 256 times that number. fmla, fmopa are fused: the contract's fma.
//
// ZA is one register file of 64 vectors. Vector 4 i + t is row i of tile t; four vectors 16 apart, which multiply-adds
// take at once, are rows i, i + 4, i + 8 and i + 12 of one tile.
//
// The unit wants its own mode, in which ordinary vector instructions do not exist; on CPUs with it but without SVE,
// those of SVE exist there only. So streaming functions are entered by run_streaming() alone, stay there for some
// panels, and make the outputs there as well. A thread whose vectors are shorter,
// or with a caller's live ZA, goes the way of the rows for i8mm.

#include <arm_sme.h>

#include "../bits/unpack_sme.h"
#include "../bits/widths.h"
#include "../ukernel.h"

#define LOWBIT_STREAMING __arm_streaming __arm_inout("za")

namespace lowbit {

extern const Table<LinearKernel> kLinearI8mm, kLinearNeonDot;

namespace {

constexpr int64_t kVectorBytes = 64;
constexpr int kTileRows = 16;
constexpr int kTileSums = kTileRows * kPanelRows;
constexpr int kChunkTiles = 2;
constexpr int kChunkPanels = 8;
// Along k everything is counted in half blocks of 16 inputs, 4 lines.
constexpr int kHalfLines = kBlockLines / 2;
constexpr int kPieceHalves = 128;  // times 16 rows; of twice as many rows half
constexpr int kFewRows = 4;
constexpr int kFewPanels = 4;

// Calls body(argument) in streaming mode with ZA on. Both start with all registers zero.
[[gnu::noinline]] void run_streaming(const void* body, const void* argument) {
  uint64_t flags;
  __asm__ volatile("mrs %0, fpsr" : "=r"(flags));  // the mode sets them all
  register const void* x0 __asm__("x0") = argument;
  __asm__ volatile("smstart\n\tblr %1\n\tsmstop"
                   : "+r"(x0)
                   : "r"(body)
                   : "memory", "cc", "x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13",
                     "x14", "x15", "x16", "x17",
#if !defined(__APPLE__) && !defined(__ANDROID__)
                     "x18",
#endif
                     "x30", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",
                     "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27",
                     "v28", "v29", "v30", "v31");
  __asm__ volatile("msr fpsr, %0" : : "r"(flags));
}

// The length of vectors belongs to a thread (Linux: prctl). TPIDR2_EL0 is not zero where a caller has left live ZA to
// whoever wants to use it next, who has to save it.
bool has_unit() {
  uint64_t live;
  __asm__ volatile("mrs %0, S3_3_C13_C0_5" : "=r"(live));
  return svcntsb() == kVectorBytes && live == 0;
}

// A number that compilers do not know. ZA is addressed by a register and a small constant; of two constants Clang 19
// makes a new register each time.
[[gnu::always_inline]] inline uint32_t hidden(uint32_t number) __arm_streaming_compatible {
  __asm__("" : "+r"(number));
  return number;
}

int64_t half_blocks(const Layout& layout) { return (layout.k + kHalfInputs - 1) / kHalfInputs; }

constexpr bool is_signed(int bits) { return stored_flip(bits) != 0; }

// What an integer part has more than the sum of products: this, times the sum of the group's activations.
template <int Bits, bool Affine>
constexpr int offset() {
  return Affine ? stored_flip(Bits) : stored_flip(Bits) - level_offset(Bits);
}

// Line J as it is multiplied.
template <int Bits, bool Affine, int J>
[[gnu::always_inline]] inline svuint8_t line(svuint8x4_t low, svuint8x4_t high, svuint8_t table) __arm_streaming {
  const svuint8_t codes = unpack_line<code_bits(Bits), J, Bits == 1 && !Affine>(low, high);
  if constexpr (is_by_table(Bits)) return svtbl_u8(table, codes);
  else return codes;
}

template <int Bits>
[[gnu::always_inline]] inline svuint8x4_t levels_of(svuint8x4_t codes, svuint8_t table) __arm_streaming {
  if constexpr (is_by_table(Bits)) {
    return svcreate4_u8(svtbl_u8(table, svget4(codes, 0)), svtbl_u8(table, svget4(codes, 1)),
                        svtbl_u8(table, svget4(codes, 2)), svtbl_u8(table, svget4(codes, 3)));
  } else {
    return codes;
  }
}

[[gnu::always_inline]] inline svfloat32_t load_scales(const uint8_t* at, int64_t vector) __arm_streaming {
  const svbool_t all = svptrue_b32();
  const svuint32_t half = svld1uh_vnum_u32(all, reinterpret_cast<const uint16_t*>(at), vector);
  return svcvt_f32_f16_x(all, svreinterpret_f16_u32(half));
}

constexpr int64_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// A panel's head, and where row 0 of its outputs begins.
struct Head {
  const float *row_scale, *row_sum, *bias;
  char* out;
  int64_t n;

  [[gnu::always_inline]] Head(const LinearArgs& args, int64_t panel) __arm_streaming_compatible
      : row_scale(reinterpret_cast<const float*>(args.panels + panel * args.layout.panel_bytes +
                                                 args.layout.head_offset)),
        row_sum(row_scale + kPanelRows),
        bias(row_sum + kPanelRows),
        out(static_cast<char*>(args.out) + panel * kPanelRows * bytes_of(args.out_dtype)),
        n(args.layout.n - panel * kPanelRows) {}

  [[gnu::always_inline]] svbool_t columns() const __arm_streaming { return svwhilelt_b32(int64_t{0}, n); }
};

[[gnu::always_inline]] inline void store_row(char* out, DType dtype, svbool_t columns, svfloat32_t y) __arm_streaming {
  if (dtype == DType::f32) return svst1_f32(columns, reinterpret_cast<float*>(out), y);
  const svbool_t all = svptrue_b32();
  const svuint32_t half = dtype == DType::bf16 ? svreinterpret_u32_bf16(svcvt_bf16_f32_x(all, y))
                                               : svreinterpret_u32_f16(svcvt_f16_f32_x(all, y));
  svst1h_u32(columns, reinterpret_cast<uint16_t*>(out), half);
}

[[gnu::always_inline]] inline svuint8_t load_table(const Layout& layout) __arm_streaming {
  return svld1_u8(svwhilelt_b8(0, kMostLevels), reinterpret_cast<const uint8_t*>(layout.levels));
}

// ---- Many rows ----

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

enum Halves { kFirstHalf = 1, kSecondHalf = 2, kWholeBlock = 3 };

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
[[gnu::always_inline]] inline void finish(svfloat32_t scale, svfloat32_t min, const int32_t* sum) LOWBIT_STREAMING {
  const uint32_t begin[2] = {hidden(0), hidden(8)};
#pragma clang loop unroll(full)
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t at = begin[i / 2] + 4 * (i % 2) + T;
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
    if (i < rows) store_row(row, args.out_dtype, columns, svmad_f32_x(all, svget4(scale, 0), svget4(sum, 0), bias));
    row += 4 * row_bytes;
    if (i + 4 < rows) store_row(row, args.out_dtype, columns, svmad_f32_x(all, svget4(scale, 1), svget4(sum, 1), bias));
    row += 4 * row_bytes;
    if (i + 8 < rows) store_row(row, args.out_dtype, columns, svmad_f32_x(all, svget4(scale, 2), svget4(sum, 2), bias));
    row += 4 * row_bytes;
    if (i + 12 < rows) store_row(row, args.out_dtype, columns, svmad_f32_x(all, svget4(scale, 3), svget4(sum, 3), bias));
  }
}

// A piece of k: one or two tiles of rows times one panel, or one tile times two. `at` moves on to the next piece.
template <int Bits, bool Affine, int Tiles, int Panels>
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
    if (half % 2 != 0) {
      add_block<Bits, Affine, Tiles, Panels, kSecondHalf>(at, table, a, a_stride);
      a += kHalfLines * kVectorBytes;
      at[0] += kBlockBytes + skip, at[1] += kBlockBytes + skip;
      ++half;
    }
#pragma clang loop unroll(disable)
    for (; half + 2 <= end; half += 2) {
      add_block<Bits, Affine, Tiles, Panels, kWholeBlock>(at, table, a, a_stride);
      a += kBlockLines * kVectorBytes;
      at[0] += kBlockBytes, at[1] += kBlockBytes;
    }
    const uint8_t* scales[2] = {at[0], at[1]};
    if (half < end) {
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
    svfloat32_t scale = load_scales(scales[0], 0), min = svundef_f32();
    if constexpr (Affine) min = load_scales(scales[0], 1);
    finish<Affine, 0>(scale, min, sums);
    if constexpr (Panels == 2) {
      scale = load_scales(scales[1], 0);
      if constexpr (Affine) min = load_scales(scales[1], 1);
    }
    if constexpr (kUsed == 2) finish<Affine, 1>(scale, min, sums + kTile1 * sums_stride);
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

template <int Bits, bool Affine>
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
      for (; panel < chunk.panels; ++panel) multiply_piece<Bits, Affine, 2, 1>(chunk, piece, panel, at + panel);
    } else {
      for (; panel + 2 <= chunk.panels; panel += 2) multiply_piece<Bits, Affine, 1, 2>(chunk, piece, panel, at + panel);
      if (panel < chunk.panels) multiply_piece<Bits, Affine, 1, 1>(chunk, piece, panel, at + panel);
    }
  }
}

// ---- Few rows ----

// Up to 4 rows of m times some panels.
struct Few {
  const LinearArgs& args;
  int64_t first_row, rows;
  int64_t first_panel, panels;
  int64_t halves = half_blocks(args.layout), group_halves = args.layout.group_inputs() / kHalfInputs;
};

// Integer sums of row `row` of m += line * activations 4 J to 4 J + 3 of a half.
template <int Bits, int J>
[[gnu::always_inline]] inline void dot(uint32_t row, svuint8x4_t w, svint8_t a) LOWBIT_STREAMING {
  if constexpr (is_signed(Bits)) {
    const svint8x4_t levels = svcreate4_s8(svreinterpret_s8_u8(svget4_u8(w, 0)), svreinterpret_s8_u8(svget4_u8(w, 1)),
                                           svreinterpret_s8_u8(svget4_u8(w, 2)), svreinterpret_s8_u8(svget4_u8(w, 3)));
    svdot_lane_za32_s8_vg1x4(row, levels, a, J);
  } else {
    svusdot_lane_za32_u8_vg1x4(row, w, a, J);
  }
}

// 16 inputs of each row, in every quarter of a vector.
template <int Rows>
[[gnu::always_inline]] inline svint8x4_t load_rows(const int8_t* const* a, int64_t input) __arm_streaming {
  const svbool_t all = svptrue_b8();
  svint8x4_t rows = svset4_s8(svundef4_s8(), 0, svld1rq_s8(all, a[0] + input));
  if constexpr (Rows > 1) rows = svset4_s8(rows, 1, svld1rq_s8(all, a[1] + input));
  if constexpr (Rows > 2) rows = svset4_s8(rows, 2, svld1rq_s8(all, a[2] + input));
  if constexpr (Rows > 2) rows = svset4_s8(rows, 3, svld1rq_s8(all, a[3] + input));
  return rows;
}

// Packed line I of four panels.
template <int I>
[[gnu::always_inline]] inline svuint8x4_t load_four(const uint8_t* const* block) __arm_streaming {
  const svbool_t all = svptrue_b8();
  return svcreate4_u8(svld1_vnum_u8(all, block[0], I), svld1_vnum_u8(all, block[1], I),
                      svld1_vnum_u8(all, block[2], I), svld1_vnum_u8(all, block[3], I));
}

// Line J of four panels times the activations of all rows.
template <int Bits, bool Affine, int Rows, Halves Wanted, int J>
[[gnu::always_inline]] inline void use(svuint8x4_t codes, svuint8_t table, svint8x4_t a0,
                                       svint8x4_t a1) LOWBIT_STREAMING {
  if constexpr ((Wanted & (J < 4 ? kFirstHalf : kSecondHalf)) != 0) {
    const svuint8x4_t w = levels_of<Bits>(codes, table);
    const svint8x4_t a = J < 4 ? a0 : a1;
    dot<Bits, J % 4>(0, w, svget4_s8(a, 0));
    if constexpr (Rows > 1) dot<Bits, J % 4>(1, w, svget4_s8(a, 1));
    if constexpr (Rows > 2) dot<Bits, J % 4>(2, w, svget4_s8(a, 2));
    if constexpr (Rows > 2) dot<Bits, J % 4>(3, w, svget4_s8(a, 3));
  }
}

// A block, or a half of it, of four panels: a packed line is loaded when it is needed first, and few are in registers
// at any time. What is computed for lines of a half that is not wanted is dead code.
template <int Bits, bool Affine, int Rows, Halves Wanted>
[[gnu::always_inline]] inline void dot_block(const uint8_t* const* panel, int64_t at, svuint8_t table,
                                             const int8_t* const* a, int64_t input) LOWBIT_STREAMING {
  constexpr int kBits = code_bits(Bits);
  constexpr bool kDouble = Bits == 1 && !Affine;
  svint8x4_t a0 = svundef4_s8(), a1 = a0;
  if constexpr ((Wanted & kFirstHalf) != 0) a0 = load_rows<Rows>(a, input);
  if constexpr ((Wanted & kSecondHalf) != 0) a1 = load_rows<Rows>(a, input + kHalfInputs);
  const uint8_t* const block[kFewPanels] = {panel[0] + at, panel[1] + at, panel[2] + at, panel[3] + at};
#define USE(j, line) use<Bits, Affine, Rows, Wanted, j>(line, table, a0, a1)
#define BITS(j, q) USE(j, (field<placement(kBits, j).run[0].line_bit, kBits>(q)))
  if constexpr (kBits == 1) {
    const svuint8x4_t q = load_four<0>(block);
    if constexpr (kDouble) {
#define TWICE(j, line) USE(j, and_mask(line, 2))
      TWICE(0, shift_left<1>(q)), TWICE(1, q), TWICE(2, shift_right<1>(q)), TWICE(3, shift_right<2>(q));
      TWICE(4, shift_right<3>(q)), TWICE(5, shift_right<4>(q)), TWICE(6, shift_right<5>(q)), TWICE(7, shift_right<6>(q));
#undef TWICE
    } else {
      BITS(0, q), BITS(1, q), BITS(2, q), BITS(3, q), BITS(4, q), BITS(5, q), BITS(6, q), BITS(7, q);
    }
  } else if constexpr (kBits == 2) {
    const svuint8x4_t q0 = load_four<0>(block);
    BITS(0, q0), BITS(1, q0), BITS(2, q0), BITS(3, q0);
    const svuint8x4_t q1 = load_four<1>(block);
    BITS(4, q1), BITS(5, q1), BITS(6, q1), BITS(7, q1);
  } else if constexpr (kBits == 3) {
    const svuint8x4_t q0 = load_four<0>(block);
    BITS(0, q0), BITS(3, q0);
    const svuint8x4_t q1 = load_four<1>(block);
    BITS(1, q1), BITS(4, q1);
    USE(6, shift_right<5>(insert_below<2>(q0, q1)));
    const svuint8x4_t q2 = load_four<2>(block);
    BITS(2, q2), BITS(5, q2);
    USE(7, shift_right<5>(insert_below<2>(q2, shift_left<1>(q1))));
  } else if constexpr (kBits == 4) {
    const svuint8x4_t q0 = load_four<0>(block);
    BITS(0, q0), BITS(4, q0);
    const svuint8x4_t q1 = load_four<1>(block);
    BITS(1, q1), BITS(5, q1);
    const svuint8x4_t q2 = load_four<2>(block);
    BITS(2, q2), BITS(6, q2);
    const svuint8x4_t q3 = load_four<3>(block);
    BITS(3, q3), BITS(7, q3);
  } else if constexpr (kBits == 5) {
    const svuint8x4_t low = load_four<4>(block), q3 = load_four<3>(block);
    BITS(3, q3), USE(7, shift_right<3>(insert_below<3>(q3, low)));
    const svuint8x4_t q2 = load_four<2>(block);
    BITS(2, q2), USE(6, shift_right<3>(insert_below<3>(q2, shift_left<2>(low))));
    const svuint8x4_t q1 = load_four<1>(block);
    BITS(1, q1), USE(5, shift_right<3>(insert_below<3>(q1, shift_left<4>(low))));
    const svuint8x4_t q0 = load_four<0>(block);
    BITS(0, q0), USE(4, insert_above<2>(low, shift_right<5>(q0)));
  } else if constexpr (kBits == 6) {
    const svuint8x4_t q0 = load_four<0>(block), q1 = load_four<1>(block), q2 = load_four<2>(block);
    BITS(0, q0), BITS(1, q1), BITS(2, q2), USE(3, shift_right<2>(insert_below<2>(q0, insert_below<2>(q1, q2))));
    const svuint8x4_t q3 = load_four<3>(block), q4 = load_four<4>(block), q5 = load_four<5>(block);
    BITS(4, q3), BITS(5, q4), BITS(6, q5), USE(7, shift_right<2>(insert_below<2>(q3, insert_below<2>(q4, q5))));
  } else if constexpr (kBits == 7) {
    svuint8x4_t top = load_four<0>(block);
    BITS(0, top);
#define NEXT(j)                                       \
  const svuint8x4_t q##j = load_four<j>(block);       \
  BITS(j, q##j);                                      \
  top = insert_below<j>(top, q##j)
    NEXT(1);
    NEXT(2);
    NEXT(3);
    NEXT(4);
    NEXT(5);
    NEXT(6);
#undef NEXT
    USE(7, shift_right<1>(top));
  } else {
    USE(0, load_four<0>(block)), USE(1, load_four<1>(block)), USE(2, load_four<2>(block)), USE(3, load_four<3>(block));
    USE(4, load_four<4>(block)), USE(5, load_four<5>(block)), USE(6, load_four<6>(block)), USE(7, load_four<7>(block));
  }
#undef BITS
#undef USE
}

[[gnu::always_inline]] inline svfloat32x4_t load_four_scales(const uint8_t* const* panel, int64_t at,
                                                             int64_t vector) __arm_streaming {
  return svcreate4_f32(load_scales(panel[0] + at, vector), load_scales(panel[1] + at, vector),
                       load_scales(panel[2] + at, vector), load_scales(panel[3] + at, vector));
}

[[gnu::always_inline]] inline void store_outputs(const Few& few, int64_t panel, int64_t row,
                                                 svfloat32_t sum) __arm_streaming {
  if (panel >= few.panels) return;
  const LinearArgs& args = few.args;
  const Head head(args, few.first_panel + panel);
  const svbool_t all = svptrue_b32();
  const int64_t there = few.first_row + row;
  const svfloat32_t scale = svmul_f32_x(all, svld1_f32(all, head.row_scale), svdup_n_f32(args.scales[there]));
  const svfloat32_t corrected = svmls_f32_x(all, sum, svld1_f32(all, head.row_sum), svdup_n_f32(args.zeros[there]));
  store_row(head.out + there * args.out_stride * bytes_of(args.out_dtype), args.out_dtype, head.columns(),
            svmad_f32_x(all, scale, corrected, svld1_f32(all, head.bias)));
}

// The float sums of four panels.
[[gnu::noinline]] void store_outputs(const Few& few, int64_t first) LOWBIT_STREAMING {
  for (int64_t row = 0; row < few.rows; ++row) {
    const svfloat32x4_t total = svread_za32_f32_vg1x4(static_cast<uint32_t>(4 + row));
    store_outputs(few, first, row, svget4_f32(total, 0));
    store_outputs(few, first + 1, row, svget4_f32(total, 1));
    store_outputs(few, first + 2, row, svget4_f32(total, 2));
    store_outputs(few, first + 3, row, svget4_f32(total, 3));
  }
}

// Integer sums are groups of vectors 0 to 3, a row of m each, float sums 4 to 7.
template <int Bits, bool Affine, int Rows>
[[gnu::always_inline]] inline void dot_four(const Few& few, int64_t first) LOWBIT_STREAMING {
  constexpr int kBlockBytes = code_bits(Bits) * kLineBytes, kGroupBytes = (Affine ? 4 : 2) * kPanelRows;
  constexpr int kOffset = offset<Bits, Affine>();
  const LinearArgs& args = few.args;
  const Layout& layout = args.layout;
  const svuint8_t table = load_table(layout);
  const svbool_t all = svptrue_b32();
  const uint8_t* panel[kFewPanels];
  for (int64_t p = 0; p < kFewPanels; ++p) {
    const int64_t there = first + p < few.panels ? first + p : few.panels - 1;  // the last one again
    panel[p] = args.panels + (few.first_panel + there) * layout.panel_bytes;
  }
  const int8_t* a[Rows];
  const int32_t* sums[Rows];
  for (int64_t row = 0; row < Rows; ++row) {
    const int64_t there = few.first_row + (row < few.rows ? row : few.rows - 1);
    a[row] = args.a + there * layout.blocks * kBlockInputs;
    sums[row] = args.group_sums + there * layout.groups;
  }

  svzero_za();
  const int64_t halves = few.halves, group_halves = few.group_halves;
  int64_t half = 0, at = 0, skip = 0, input = 0;
  for (int64_t group = 0; half < halves; ++group) {
    const int64_t end = group_halves < halves - half ? half + group_halves : halves;
    svzero_mask_za((1 << Rows) - 1);  // 64-bit tiles: the vectors 0 to 3, 8 to 11 and so on
    if (half % 2 != 0) {
      dot_block<Bits, Affine, Rows, kSecondHalf>(panel, at, table, a, input);
      at += kBlockBytes + skip;
      input += kBlockInputs;
      ++half;
    }
#pragma clang loop unroll(disable)
    for (; half + 2 <= end; half += 2) {
      dot_block<Bits, Affine, Rows, kWholeBlock>(panel, at, table, a, input);
      at += kBlockBytes;
      input += kBlockInputs;
    }
    int64_t scales = at;
    if (half < end) {
      dot_block<Bits, Affine, Rows, kFirstHalf>(panel, at, table, a, input);
      scales += kBlockBytes;  // behind the whole block
      skip = kGroupBytes;
      ++half;
    } else {
      at += kGroupBytes;
    }
    const svfloat32x4_t scale = load_four_scales(panel, scales, 0);
    svfloat32x4_t min = svundef4_f32();
    if constexpr (Affine) min = load_four_scales(panel, scales, 1);
#pragma clang loop unroll(full)
    for (uint32_t row = 0; row < Rows; ++row) {
      svint32x4_t total = svread_za32_s32_vg1x4(row);
      if constexpr (kOffset != 0) {
        const svint32_t sum = svdup_n_s32(sums[row][group]);
        total = svadd_single_s32_x4(total, svmul_n_s32_x(all, sum, kOffset));
      }
      svmla_za32_f32_vg1x4(4 + row, svcvt_f32_s32_x4(total), scale);
      if constexpr (Affine) {
        svmla_single_za32_f32_vg1x4(4 + row, min, svcvt_f32_s32_x(all, svdup_n_s32(sums[row][group])));
      }
    }
  }
  store_outputs(few, first);
}

template <int Bits, bool Affine, int Rows>
void dot_panels(const Few& few) LOWBIT_STREAMING {
  for (int64_t first = 0; first < few.panels; first += kFewPanels) dot_four<Bits, Affine, Rows>(few, first);
}

// ---- Calls ----

template <class Function>
const void* address(Function* streaming) {
  return reinterpret_cast<const void*>(streaming);
}

template <int Bits, bool Affine>
void run_few(const LinearArgs& args, int64_t first_row, int64_t rows) {
  const Few few{args, first_row, rows, args.panel_begin, args.panel_end - args.panel_begin};
  run_streaming(rows == 1   ? address(&dot_panels<Bits, Affine, 1>)
                : rows == 2 ? address(&dot_panels<Bits, Affine, 2>)
                            : address(&dot_panels<Bits, Affine, kFewRows>),
                &few);
}

template <int Bits, bool Affine>
void run_many(const LinearArgs& args, int64_t first_row, int64_t rows) {
  for (int64_t p = args.panel_begin; p < args.panel_end; p += kChunkPanels) {
    const int64_t panels = args.panel_end - p < kChunkPanels ? args.panel_end - p : kChunkPanels;
    const Chunk chunk{args, first_row, rows, p, panels, *static_cast<Scratch*>(args.scratch)};
    run_streaming(address(&multiply_chunk<Bits, Affine>), &chunk);
  }
}

template <int Bits, bool Affine>
void run_rows(const LinearArgs& args) {
  constexpr int64_t kMost = kChunkTiles * kTileRows;
  for (int64_t row = 0; row < args.m; row += kMost) {
    const int64_t rows = args.m - row < kMost ? args.m - row : kMost;
    rows <= kFewRows ? run_few<Bits, Affine>(args, row, rows) : run_many<Bits, Affine>(args, row, rows);
  }
}

// What any other CPU of the family runs.
template <int Bits>
void run_without_unit(const LinearArgs& args) {
  const Table<LinearKernel>* const kTables[] = {&kLinearI8mm, &kLinearNeonDot};
  for (const Table<LinearKernel>* table : kTables) {
    for (const LinearKernel& row : *table) {
      if (row.bits == Bits && row.m_least <= args.m && args.layout.group_inputs() % row.group_step == 0) {
        return row.run(args);
      }
    }
  }
}

template <int Bits>
void run(const LinearArgs& args) {
  if (!has_unit()) return run_without_unit<Bits>(args);
  if constexpr (can_have_levels(Bits)) {
    if (args.layout.mapping == Mapping::levels) return run_rows<by_table(Bits), false>(args);
  }
  args.layout.mapping == Mapping::affine ? run_rows<Bits, true>(args) : run_rows<Bits, false>(args);
}

// From 5 rows on, by instructions: the products for 16 rows take fewer than those for 4 and for the rest.
#define MANY(bits) \
  with_levels<LinearKernel>({"linear_a8w" #bits "_5x32_sme2", kSme2, Format::panel16, bits, 5, 32, run<bits>})
#define FEW(bits) \
  with_levels<LinearKernel>({"linear_a8w" #bits "_1x64_sme2", kSme2, Format::panel16, bits, 1, 64, run<bits>})
constexpr LinearKernel kRows[] = {LOWBIT_EACH_WIDTH(MANY), LOWBIT_EACH_WIDTH(FEW)};
#undef MANY
#undef FEW

}  // namespace

extern const Table<LinearKernel> kLinearSme2;
const Table<LinearKernel> kLinearSme2{kRows, sizeof kRows / sizeof kRows[0]};

}  // namespace lowbit
