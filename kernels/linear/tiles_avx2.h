// linear_a8w<b>_2x16_avx2: tiles of several rows of int8 activations times b-bit weights, without VNNI (sums_avx2.h). The
// kernels for one row handle a single row.
#pragma once

#include <type_traits>

#include "sums_avx2.h"
#include "unpacked_avx2.h"
#include "wide_avx2.h"

namespace lowbit {

extern const Table<LinearKernel> kLinearAvx2;

namespace {

constexpr bool is_wide(int bits) { return bits == 8 || is_by_table(bits); }

template <int Bits, bool Affine, bool Halves, int Rows>
using ManySums = std::conditional_t<is_wide(Bits), WideSums<Bits, Affine, Halves, Rows>, Sums<Bits, Affine, Halves, Rows>>;

template <int Bits>
void run(const LinearArgs& args) {
  const Layout& layout = args.layout;
  const RunRow one_row = kLinearAvx2.entries[Bits - 1].run;
  with_mapping<Bits>(layout.mapping, [&](auto bits, auto) LOWBIT_INLINE {
    if constexpr (is_wide(bits())) {
      if (!end_anywhere(layout)) return with_widened_rows(args, run_many<ManySums, Bits>, one_row);
    } else if constexpr (is_unpacked(bits())) {
      const bool whole_blocks = layout.group_inputs() % kBlockInputs == 0;
      if (args.m > 2 * kMostRows && whole_blocks) return run_unpacked<bits()>(args, one_row);
    }
    run_many<ManySums, Bits>(args, one_row);
  });
}

template <int Bits>
constexpr LinearKernel many_rows(const char* name) {
  LinearKernel kernel = with_levels<LinearKernel>({name, kAvx2, Format::panel16, Bits, 2, 16, run<Bits>});
  if (Bits == 8 || can_have_levels(Bits)) kernel.scratch_bytes = wide_scratch;
  if (is_unpacked(Bits)) kernel.scratch_bytes = unpacked_scratch;
  return kernel;
}

}  // namespace
}  // namespace lowbit
