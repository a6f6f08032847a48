// Many rows of m on SME2: tiles of sums to memory and back between pieces of k, and at the end to outputs.
#pragma once

#include "pieces_sme2.h"

namespace lowbit {
namespace {

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

}  // namespace
}  // namespace lowbit
