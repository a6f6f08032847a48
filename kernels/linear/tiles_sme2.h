// Many rows of m on SME2: tiles of sums, their updates at the end of a segment, a group or a piece of k, and outputs. sme2.cpp
// explains it.
#pragma once

#include "pieces_sme2.h"

namespace lowbit {
namespace {

// ZA is addressed by a register and a small constant. These are the possible registers: for rows 0 and 8, of which
// multiply-adds take four at a time, and for columns.
struct Indices {
  uint32_t row0 = hidden(0), row8 = hidden(8), column0 = hidden(0), column4 = hidden(4), column8 = hidden(8),
           column12 = hidden(12);

  LOWBIT_INLINE Indices() __arm_streaming_compatible {}
};

// Instructions on a tile through z16 to z31. Registers are named, because compilers run out of registers for ZA's indices and
// keep them in memory. The operands of a sequence have these names:
#define LOWBIT_INDICES(indices)                                                                                     \
  [row0] "Uci"((indices).row0), [row8] "Uci"((indices).row8), [column0] "Ucj"((indices).column0),                     \
      [column4] "Ucj"((indices).column4), [column8] "Ucj"((indices).column8), [column12] "Ucj"((indices).column12)
#define LOWBIT_ALL_16                                                                                               \
  "z16", "z17", "z18", "z19", "z20", "z21", "z22", "z23", "z24", "z25", "z26", "z27", "z28", "z29", "z30", "z31"
// Reads the columns of a tile to z16 to z31.
#define LOWBIT_READ_COLUMNS(tile)                                                                                   \
  "mov {z16.s-z19.s}, za%[" tile "]v.s[%w[column0], 0:3]\n\t"                                                       \
  "mov {z20.s-z23.s}, za%[" tile "]v.s[%w[column4], 0:3]\n\t"                                                       \
  "mov {z24.s-z27.s}, za%[" tile "]v.s[%w[column8], 0:3]\n\t"                                                       \
  "mov {z28.s-z31.s}, za%[" tile "]v.s[%w[column12], 0:3]\n\t"
// `operation` (fmla or fmls): to the rows of tile `tile`, adds z16 to z31 times `factor`. `above` is `tile` + 4.
#define LOWBIT_MULTIPLY(operation, tile, above, factor)                                                             \
  operation " za.s[%w[row0], %[" tile "], vgx4], {z16.s-z19.s}, %[" factor "].s\n\t"                                \
  operation " za.s[%w[row0], %[" above "], vgx4], {z20.s-z23.s}, %[" factor "].s\n\t"                               \
  operation " za.s[%w[row8], %[" tile "], vgx4], {z24.s-z27.s}, %[" factor "].s\n\t"                                \
  operation " za.s[%w[row8], %[" above "], vgx4], {z28.s-z31.s}, %[" factor "].s\n\t"
// Writes z16 to z31 to the rows of a tile, in the same order.
#define LOWBIT_WRITE_ROWS(tile, above)                                                                              \
  "mov za.d[%w[row0], %[" tile "], vgx4], {z16.d-z19.d}\n\t"                                                        \
  "mov za.d[%w[row0], %[" above "], vgx4], {z20.d-z23.d}\n\t"                                                       \
  "mov za.d[%w[row8], %[" tile "], vgx4], {z24.d-z27.d}\n\t"                                                        \
  "mov za.d[%w[row8], %[" above "], vgx4], {z28.d-z31.d}\n\t"
#define LOWBIT_READ_ROWS(tile, above)                                                                               \
  "mov {z16.d-z19.d}, za.d[%w[row0], %[" tile "], vgx4]\n\t"                                                        \
  "mov {z20.d-z23.d}, za.d[%w[row0], %[" above "], vgx4]\n\t"                                                       \
  "mov {z24.d-z27.d}, za.d[%w[row8], %[" tile "], vgx4]\n\t"                                                        \
  "mov {z28.d-z31.d}, za.d[%w[row8], %[" above "], vgx4]\n\t"
#define LOWBIT_CONVERT                                                                                               \
  "scvtf {z16.s-z19.s}, {z16.s-z19.s}\n\t"                                                                           \
  "scvtf {z20.s-z23.s}, {z20.s-z23.s}\n\t"                                                                           \
  "scvtf {z24.s-z27.s}, {z24.s-z27.s}\n\t"                                                                           \
  "scvtf {z28.s-z31.s}, {z28.s-z31.s}\n\t"
#define LOWBIT_STORE_16                                                                                              \
  "st1w {z16.s-z19.s}, %[all], [%[at]]\n\t"                                                                          \
  "st1w {z20.s-z23.s}, %[all], [%[at], #4, mul vl]\n\t"                                                              \
  "st1w {z24.s-z27.s}, %[all], [%[at], #8, mul vl]\n\t"                                                              \
  "st1w {z28.s-z31.s}, %[all], [%[at], #12, mul vl]\n\t"
// Sets tile `tile` to the products P of a group's first segment. z16 to z31 are its integer sums, which began at the bits of
// -c: P = (0 - c * t) + (-c - I) * -t.
#define LOWBIT_FIRST_PRODUCT(tile, above)                                                                           \
  "zero {za%[" tile "].s}\n\t"                                                                                      \
  "fmops za%[" tile "].s, %[all]/m, %[all]/m, %[start].s, %[t].s\n\t" LOWBIT_MULTIPLY("fmls", tile, above, "t")

// Ends a group of one segment: computes P from the integer sums of tile T, and adds it, times the scales, to the float sums of
// tile 2 + T.
template <int T>
LOWBIT_INLINE inline void finish_group(const Indices& indices, svfloat32_t start, svfloat32_t t,
                                       svfloat32_t scale) LOWBIT_STREAMING {
  __asm__ volatile(
      LOWBIT_READ_COLUMNS("sum") LOWBIT_FIRST_PRODUCT("sum", "sum4")
      LOWBIT_READ_COLUMNS("sum") LOWBIT_MULTIPLY("fmla", "acc", "acc4", "scale")
      :
      : LOWBIT_INDICES(indices), [sum] "i"(T), [sum4] "i"(4 + T), [acc] "i"(2 + T), [acc4] "i"(6 + T),
        [all] "Upl"(svptrue_b32()), [start] "w"(start), [t] "x"(t), [scale] "x"(scale)
      : LOWBIT_ALL_16, "za", "memory");
}

// The first of two segments: stores the integer sums of tile T. The second one, whose t is `t1`, ends the group.
template <int T>
LOWBIT_INLINE inline void keep_sums(const Indices& indices, float* at) LOWBIT_STREAMING {
  __asm__ volatile(
      LOWBIT_READ_COLUMNS("sum") LOWBIT_STORE_16
      :
      : LOWBIT_INDICES(indices), [sum] "i"(T), [all] "Uph"(svptrue_c32()), [at] "r"(at)
      : LOWBIT_ALL_16, "memory");
}

template <int T>
LOWBIT_INLINE inline void finish_two(const Indices& indices, const float* first, svfloat32_t start, svfloat32_t t0,
                                     svfloat32_t t1, svfloat32_t scale) LOWBIT_STREAMING {
  __asm__ volatile(
      LOWBIT_READ_COLUMNS("sum")
      "zero {za%[sum].s}\n\t"
      "fmops za%[sum].s, %[all]/m, %[all]/m, %[start].s, %[t0].s\n\t"
      "ld1w {z4.s-z7.s}, %[four]/z, [%[at]]\n\t"
      "fmls za.s[%w[row0], %[sum], vgx4], {z4.s-z7.s}, %[t0].s\n\t"
      "ld1w {z4.s-z7.s}, %[four]/z, [%[at], #4, mul vl]\n\t"
      "fmls za.s[%w[row0], %[sum4], vgx4], {z4.s-z7.s}, %[t0].s\n\t"
      "ld1w {z4.s-z7.s}, %[four]/z, [%[at], #8, mul vl]\n\t"
      "fmls za.s[%w[row8], %[sum], vgx4], {z4.s-z7.s}, %[t0].s\n\t"
      "ld1w {z4.s-z7.s}, %[four]/z, [%[at], #12, mul vl]\n\t"
      "fmls za.s[%w[row8], %[sum4], vgx4], {z4.s-z7.s}, %[t0].s\n\t"
      LOWBIT_CONVERT LOWBIT_MULTIPLY("fmla", "sum", "sum4", "t1")
      LOWBIT_READ_COLUMNS("sum") LOWBIT_MULTIPLY("fmla", "acc", "acc4", "scale")
      :
      : LOWBIT_INDICES(indices), [sum] "i"(T), [sum4] "i"(4 + T), [acc] "i"(2 + T), [acc4] "i"(6 + T),
        [all] "Upl"(svptrue_b32()), [four] "Uph"(svptrue_c32()), [at] "r"(first), [start] "w"(start), [t0] "x"(t0),
        [t1] "x"(t1), [scale] "x"(scale)
      : LOWBIT_ALL_16, "z4", "z5", "z6", "z7", "za", "memory");
}

// Ends a segment of a longer group: adds the products of tile T's integer sums to the P of tile 2 + T.
template <int T, bool First>
LOWBIT_INLINE inline void finish_segment(const Indices& indices, svfloat32_t start, svfloat32_t t) LOWBIT_STREAMING {
  if constexpr (First) {
    __asm__ volatile(
        LOWBIT_READ_COLUMNS("sum") LOWBIT_FIRST_PRODUCT("product", "product4")
        :
        : LOWBIT_INDICES(indices), [sum] "i"(T), [product] "i"(2 + T), [product4] "i"(6 + T), [all] "Upl"(svptrue_b32()),
          [start] "w"(start), [t] "x"(t)
        : LOWBIT_ALL_16, "za", "memory");
  } else {
    __asm__ volatile(
        LOWBIT_READ_COLUMNS("sum") LOWBIT_CONVERT LOWBIT_MULTIPLY("fmla", "product", "product4", "t")
        :
        : LOWBIT_INDICES(indices), [sum] "i"(T), [product] "i"(2 + T), [product4] "i"(6 + T), [t] "x"(t)
        : LOWBIT_ALL_16, "za", "memory");
  }
}

// Loads tile T from memory, in the order of LOWBIT_READ_ROWS; store_tile() is the inverse.
template <int T>
LOWBIT_INLINE inline void load_tile(const Indices& indices, const float* at) LOWBIT_STREAMING {
  __asm__ volatile(
      "ld1w {z16.s-z19.s}, %[all]/z, [%[at]]\n\t"
      "ld1w {z20.s-z23.s}, %[all]/z, [%[at], #4, mul vl]\n\t"
      "ld1w {z24.s-z27.s}, %[all]/z, [%[at], #8, mul vl]\n\t"
      "ld1w {z28.s-z31.s}, %[all]/z, [%[at], #12, mul vl]\n\t"
      LOWBIT_WRITE_ROWS("tile", "tile4")
      :
      : LOWBIT_INDICES(indices), [tile] "i"(T), [tile4] "i"(4 + T), [all] "Uph"(svptrue_c32()), [at] "r"(at)
      : LOWBIT_ALL_16, "za", "memory");
}

template <int T>
LOWBIT_INLINE inline void store_tile(const Indices& indices, float* at) LOWBIT_STREAMING {
  __asm__ volatile(
      LOWBIT_READ_ROWS("tile", "tile4") LOWBIT_STORE_16
      :
      : LOWBIT_INDICES(indices), [tile] "i"(T), [tile4] "i"(4 + T), [all] "Uph"(svptrue_c32()), [at] "r"(at)
      : LOWBIT_ALL_16, "memory");
}

// Ends a longer group: adds the P of tile 2 + T, times the scales, to the float sums of tile T.
template <int T>
LOWBIT_INLINE inline void add_products(const Indices& indices, svfloat32_t scale) LOWBIT_STREAMING {
  __asm__ volatile(
      LOWBIT_READ_COLUMNS("product") LOWBIT_MULTIPLY("fmla", "acc", "acc4", "scale")
      :
      : LOWBIT_INDICES(indices), [product] "i"(2 + T), [acc] "i"(T), [acc4] "i"(4 + T), [scale] "x"(scale)
      : LOWBIT_ALL_16, "za", "memory");
}

// Stores the float sums of tile T as outputs. Reading them by columns once more puts them in order.
template <int T>
LOWBIT_INLINE inline void store_tile_outputs(const Indices& indices, const Head& head, int64_t first, int64_t rows,
                                             int64_t stride, DType dtype) LOWBIT_STREAMING {
  const svbool_t all = svptrue_b32(), columns = head.columns();
  __asm__ volatile(
      LOWBIT_READ_COLUMNS("tile") LOWBIT_WRITE_ROWS("tile", "tile4")
      :
      : LOWBIT_INDICES(indices), [tile] "i"(T), [tile4] "i"(4 + T)
      : LOWBIT_ALL_16, "za", "memory");
  const svfloat32_t scale = svld1_f32(all, head.row_scale), bias = svld1_f32(all, head.bias);
  const uint32_t begin[4] = {indices.column0, indices.column4, indices.column8, indices.column12};
  if (rows >= kTileRows && dtype == DType::f32) {
    float* const out = reinterpret_cast<float*>(head.out) + first * stride;
    float *const out4 = out + 4 * stride, *const out8 = out4 + 4 * stride, *const out12 = out8 + 4 * stride;
    int64_t row = 0;
#pragma clang loop unroll(full)
    for (uint32_t i = 0; i < 4; ++i, row += stride) {
      __asm__ volatile(
          "mov {z16.s-z19.s}, za%1v.s[%w0, 0:3]\n\t"
          "fmad z16.s, %2/m, %3.s, %4.s\n\t"
          "fmad z17.s, %2/m, %3.s, %4.s\n\t"
          "fmad z18.s, %2/m, %3.s, %4.s\n\t"
          "fmad z19.s, %2/m, %3.s, %4.s\n\t"
          "st1w {z16.s}, %5, [%6, %10, lsl #2]\n\t"
          "st1w {z17.s}, %5, [%7, %10, lsl #2]\n\t"
          "st1w {z18.s}, %5, [%8, %10, lsl #2]\n\t"
          "st1w {z19.s}, %5, [%9, %10, lsl #2]"
          :
          : "Ucj"(begin[i]), "i"(T), "Upl"(all), "w"(scale), "w"(bias), "Upl"(columns), "r"(out), "r"(out4), "r"(out8),
            "r"(out12), "r"(row)
          : "z16", "z17", "z18", "z19", "memory");
    }
    return;
  }
  const int64_t row_bytes = stride * bytes_of(dtype);
  char* out = head.out + first * row_bytes;
#pragma clang loop unroll(full)
  for (uint32_t i = 0; i < 4; ++i, out += row_bytes) {
    const svfloat32x4_t sum = svread_ver_za32_f32_vg4(T, begin[i]);
    char* row = out;
    if (i < rows) store_row(row, dtype, columns, svmad_f32_x(all, svget4(sum, 0), scale, bias));
    row += 4 * row_bytes;
    if (i + 4 < rows) store_row(row, dtype, columns, svmad_f32_x(all, svget4(sum, 1), scale, bias));
    row += 4 * row_bytes;
    if (i + 8 < rows) store_row(row, dtype, columns, svmad_f32_x(all, svget4(sum, 2), scale, bias));
    row += 4 * row_bytes;
    if (i + 12 < rows) store_row(row, dtype, columns, svmad_f32_x(all, svget4(sum, 3), scale, bias));
  }
}

// Stores the outputs of all tiles. Their float sums are in tiles First and First + 1.
template <int Tiles, int Panels, int First>
[[gnu::noinline]] void store_outputs(const Chunk& chunk, int64_t panel) LOWBIT_STREAMING {
  const LinearArgs& args = chunk.args;
  const Head head(args, chunk.first_panel + panel);
  const int64_t row = chunk.first_row, rows = chunk.rows, stride = args.out_stride;
  const DType dtype = args.out_dtype;
  const Indices indices;
  store_tile_outputs<First>(indices, head, row, rows, stride, dtype);
  if constexpr (Panels == 2) {
    store_tile_outputs<First + 1>(indices, head.next(args.layout.panel_bytes, dtype), row, rows, stride, dtype);
  } else if constexpr (Tiles == 2) {
    store_tile_outputs<First + 1>(indices, head, row + kTileRows, rows - kTileRows, stride, dtype);
  }
}

#undef LOWBIT_FIRST_PRODUCT
#undef LOWBIT_STORE_16
#undef LOWBIT_CONVERT
#undef LOWBIT_READ_ROWS
#undef LOWBIT_WRITE_ROWS
#undef LOWBIT_MULTIPLY
#undef LOWBIT_READ_COLUMNS
#undef LOWBIT_ALL_16
#undef LOWBIT_INDICES

}  // namespace
}  // namespace lowbit
