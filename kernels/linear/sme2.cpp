// linear_a8w<b>_1x64_sme2, linear_a8w<b>_5x32_sme2: int8 activations times b-bit weights on Arm's matrix unit, if its
// vectors have 512 bits. Then a packed line (64 bytes: 16 rows x 4 inputs) is one vector.
//
//   many rows   smopa tile, a, line      tile: 16 rows of m x 16 outputs, int32; a: 16 rows of m x 4 inputs
//               Two of the four tiles are integer sums, of two panels or of 32 rows of m.
//               for each piece of k: activations, their scales and sums are transposed      once for all panels
//                                    for each panel: tiles     a long group may begin before the piece and end after it
//   few rows    sdot za, {lines of 4 panels}, a      za: 4 vectors of 16 outputs each, for up to 4 rows of m
// Lines are unsigned codes, or signed at 8 bits and with a table of levels (sumopa, usdot). For many rows, the difference
// between symmetric codes and their levels, times the segment's sum A, is added by one more product. fmla and fmopa are fused,
// like the fma of the contract.
//
// ZA is one register file of 64 vectors. Vector 4 i + t is row i of tile t. Multiply-adds take four vectors that are 16 apart:
// rows i, i + 4, i + 8 and i + 12 of one tile. All four are multiplied by the same vector, but each row of activations has its
// own scale t. So a segment's sums are read by columns and written back as rows of the products P:
//
//   row r: m's row r, lane j: output j          integer sums; a column has all rows of m, to be multiplied by their t
//   row s(j): output j, lane r: m's row r       P; a column has all outputs, to be multiplied by their scales
//   row s(r): m's row r, lane s(j): output j    float sums                  s(4 q + i) = 4 i + q, its own inverse
//
//   one segment per group     P replaces the integer sums; tiles 2 and 3 are float sums
//   two, of whole blocks      likewise; until the second ends, the integer sums of the first segment are in memory
//   others                    tiles 2 and 3 are P; float sums are in memory, and move to tiles 0 and 1 at the end of a group
//
// A P of zero may have the other sign. This has no effect: float sums begin at +0 and are therefore never -0.
//
// The unit works in streaming mode, where ordinary vector instructions do not exist. On CPUs with the unit but without SVE, SVE
// instructions exist only in that mode. So only run_streaming() enters streaming functions; they stay in the mode for several
// panels and also store the outputs there. If a thread's vectors are shorter, or its caller has live ZA, it runs the kernel for
// CPUs without the unit.
//
// gemm_sme2.h has the code for many rows (pieces_sme2.h: their activations, tiles_sme2.h: their sums and outputs), gemv_sme2.h
// for few, streaming_sme2.h is shared.

#include "../bits/widths.h"
#include "../registry.h"
#include "dispatch.h"
#include "gemm_sme2.h"
#include "gemv_sme2.h"

namespace lowbit {

namespace {

template <class Function>
const void* address(Function* streaming) {
  return reinterpret_cast<const void*>(streaming);
}

template <int Bits, bool Affine, bool Halves>
void run_few(const LinearArgs& args, int64_t first_row, int64_t rows) {
  const Few few{args, first_row, rows, args.panel_begin, args.panel_end - args.panel_begin};
  run_streaming(rows == 1   ? address(&dot_panels<Bits, Affine, 1, Halves>)
                : rows == 2 ? address(&dot_panels<Bits, Affine, 2, Halves>)
                            : address(&dot_panels<Bits, Affine, kFewRows, Halves>),
                &few);
}

template <int Bits, bool Affine, bool Halves>
void run_many(const LinearArgs& args, int64_t first_row, int64_t rows) {
  for (int64_t p = args.panel_begin; p < args.panel_end; p += kChunkPanels) {
    const int64_t panels = args.panel_end - p < kChunkPanels ? args.panel_end - p : kChunkPanels;
    const Chunk chunk{args, first_row, rows, p, panels, *static_cast<Scratch*>(args.scratch)};
    const int64_t segments = args.layout.group_segments();
    run_streaming(segments == 1              ? address(&multiply_chunk<Bits, Affine, Halves, Segments::one>)
                  : segments == 2 && !Halves ? address(&multiply_chunk<Bits, Affine, false, Segments::two>)
                                             : address(&multiply_chunk<Bits, Affine, Halves, Segments::many>),
                  &chunk);
  }
}

// Whether P, which is 16 times as large here, could be infinite where the contract's P is finite.
template <int Bits>
bool is_too_large(const LinearArgs& args) {
  constexpr int64_t kAlways = 8;  // segments that never overflow: 8 * 2^104 * 16 * (64 * 127 * 15) < 2^128
  if (!kInPlace<Bits> || has_table(args.layout.mapping) || args.layout.group_segments() <= kAlways ||
      args.m <= kFewRows) {
    return false;
  }
  const float* const scales = args.scales;
  const int64_t count = args.m * args.layout.segments;
  uint32_t too_large = 0;  // without a branch, so that compilers vectorize the loop
  for (int64_t i = 0; i < count; ++i) too_large |= scales[i] >= 0x1p80f;
  return too_large != 0;
}

template <int Bits>
void run(const LinearArgs& args) {
  // The kernel for CPUs without the unit.
  if (!has_unit() || is_too_large<Bits>(args)) {
    LinearArgs same = args;
    const LinearKernel& other = choose_linear_built_in(args.layout, args.m, active_isa() & ~kSme2);
    same.context = other.context;
    return other.run(same);
  }
  dispatch<Bits>(args.layout, [&](auto bits, auto affine, auto halves) {
    constexpr int64_t kMost = kChunkTiles * kTileRows;
    for (int64_t row = 0; row < args.m; row += kMost) {
      const int64_t rows = args.m - row < kMost ? args.m - row : kMost;
      rows <= kFewRows ? run_few<bits(), affine(), halves()>(args, row, rows)
                       : run_many<bits(), affine(), halves()>(args, row, rows);
    }
  });
}

// From 5 rows on, by instruction counts: products for 16 rows take fewer than products for 4 rows and for the remaining ones.
#define MANY(bits) \
  with_levels<LinearKernel>({"linear_a8w" #bits "_5x32_sme2", kSme2, Format::panel16, bits, 5, 32, run<bits>})
#define FEW(bits) \
  with_levels<LinearKernel>({"linear_a8w" #bits "_1x64_sme2", kSme2, Format::panel16, bits, 1, 64, run<bits>})
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_WIDTH(MANY), LOWBIT_EACH_WIDTH(FEW)};
#undef MANY
#undef FEW

}  // namespace

extern const Table<LinearKernel> kLinearSme2;
const Table<LinearKernel> kLinearSme2{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
