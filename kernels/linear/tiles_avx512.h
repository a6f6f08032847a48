// linear_a8w<b>_2x16_avx512vnni: tiles of several rows of int8 activations times b-bit weights, 16 outputs to a register
// (linear_avx512.h). The kernels for one row handle a single row, and groups that end in the middle of blocks but do not have
// 16 inputs, which no common format has.
#pragma once

#include "linear_avx512.h"

namespace lowbit {

extern const Table<LinearKernel> kLinearAvx512Vnni;

namespace {

template <int Bits>
const LinearKernel& one_row() {
  const LinearKernel* row = kLinearAvx512Vnni.begin();
  while (row->bits != Bits || row->n_step != kPanelRows) ++row;
  return *row;
}

template <int Bits>
void run_many(const LinearArgs& args) {
  with_groups<Bits>(args.layout, [&](auto bits, auto affine, auto kind) LOWBIT_INLINE {
    if constexpr (kind() == Groups::anywhere) {
      one_row<Bits>().run(args);
    } else {
      constexpr int kMost = 8;
      constexpr bool kAffine = affine() && !asks_for_mins(bits(), 2, 1);
      [&]<int... I>(std::integer_sequence<int, I...>) LOWBIT_INLINE {
        static constexpr RunTile kTiles[] = {run_tile<bits(), kAffine, kind(), I + 2>...};
        run_tiles<kMost>(args, level_offset(bits()), one_row<Bits>(), kTiles);
      }(std::make_integer_sequence<int, kMost - 1>());
    }
  });
}

template <int Bits>
constexpr LinearKernel many_rows(const char* name) {
  return with_levels<LinearKernel>({name, kAvx512Vnni, Format::panel16, Bits, 2, 16, run_many<Bits>});
}

}  // namespace
}  // namespace lowbit
