// linear_a8w<b>_{1,2}x16_avx512vnni: int8 activations times b-bit weights, 16 outputs to a register (linear_avx512.h).
// linear_a8w<b>_1x{32,64}_avx512vnni: one row through 2 or 4 panels in step, for CPUs that want several streams.

#include "../bits/widths.h"
#include "dispatch.h"
#include "linear_avx512.h"

namespace lowbit {
namespace {

constexpr int kInStepRow = 0;

// One row in step, or tiles of rows.
template <int Bits, bool Affine, Groups Kind, int MostRows>
void run_as(const LinearArgs& args) {
  if constexpr (MostRows == kInStepRow) {
    run_in_step<Bits, Affine, Kind>(args);
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

#define ROW(bits, m, most_rows) \
  with_levels<LinearKernel>(     \
      {"linear_a8w" #bits "_" #m "x16_avx512vnni", kAvx512Vnni, Format::panel16, bits, m, 16, run<bits, most_rows>})
#define IN_STEP(bits, n)                                                                                             \
  with_levels<LinearKernel>({"linear_a8w" #bits "_1x" #n "_avx512vnni", kAvx512Vnni | kInStep, Format::panel16, bits, \
                             1, n, run<bits, kInStepRow>})
constexpr LinearKernel kRows[] = {
    LOWBIT_EACH_WIDTH(ROW, 2, 8),
    IN_STEP(1, 32), IN_STEP(2, 64), IN_STEP(3, 64), IN_STEP(4, 64),
    IN_STEP(5, 64), IN_STEP(6, 64), IN_STEP(7, 64), IN_STEP(8, 64),
    LOWBIT_EACH_WIDTH(ROW, 1, 1)};
#undef IN_STEP
#undef ROW

}  // namespace

extern const Table<LinearKernel> kLinearAvx512Vnni;
const Table<LinearKernel> kLinearAvx512Vnni{kRows, sizeof kRows / sizeof kRows[0]};

}  // namespace lowbit
