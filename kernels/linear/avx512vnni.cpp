// linear_a8w<b>_{1,2}x16_avx512vnni: int8 activations times b-bit weights, 16 outputs to a register (linear_avx512.h).
// linear_a8w<b>_1x{32,64}_avx512vnni: one row through 2 or 4 interleaved panels, for CPUs that read several streams faster.

#include "../bits/widths.h"
#include "dispatch.h"
#include "linear_avx512.h"

namespace lowbit {
namespace {

// Tiles of up to MostRows rows; 0: one row through interleaved panels.
template <int Bits, bool Affine, Groups Kind, int MostRows>
void run_as(const LinearArgs& args) {
  if constexpr (MostRows == 0) {
    run_interleaved<Bits, Affine, Kind>(args);
  } else {
    run_panels<Bits, Affine, Kind, MostRows>(args);
  }
}

template <int Bits, int MostRows>
void run(const LinearArgs& args) {
  dispatch<Bits>(args.layout, [&](auto bits, auto affine, auto halves) {
    if (args.layout.group_inputs() > kSegmentInputs) {
      run_as<bits(), affine(), groups_of(halves(), true), MostRows>(args);
    } else {
      run_as<bits(), affine(), groups_of(halves(), false), MostRows>(args);
    }
  });
}

constexpr LinearKernel in_several_streams(LinearKernel row) {
  row.several_streams = true;
  return row;
}

#define ROW(bits, m, most_rows) \
  with_levels<LinearKernel>(     \
      {"linear_a8w" #bits "_" #m "x16_avx512vnni", kAvx512Vnni, Format::panel16, bits, m, 16, run<bits, most_rows>})
#define INTERLEAVED(bits, n)                \
  in_several_streams(with_levels<LinearKernel>( \
      {"linear_a8w" #bits "_1x" #n "_avx512vnni", kAvx512Vnni, Format::panel16, bits, 1, n, run<bits, 0>}))
constexpr LinearKernel kRows[] = {
    LOWBIT_EACH_WIDTH(ROW, 2, 8),
    INTERLEAVED(1, 32), INTERLEAVED(2, 64), INTERLEAVED(3, 64), INTERLEAVED(4, 64),
    INTERLEAVED(5, 64), INTERLEAVED(6, 64), INTERLEAVED(7, 64), INTERLEAVED(8, 64),
    LOWBIT_EACH_WIDTH(ROW, 1, 1)};
#undef INTERLEAVED
#undef ROW

}  // namespace

extern const Table<LinearKernel> kLinearAvx512Vnni;
const Table<LinearKernel> kLinearAvx512Vnni{kRows, sizeof kRows / sizeof kRows[0]};

}  // namespace lowbit
