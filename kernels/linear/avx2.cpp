// linear_a8w<b>_1x16_avx2: one row of int8 activations times b-bit weights, without VNNI (sums_avx2.h).

#include "../bits/widths.h"
#include "sums_avx2.h"

namespace lowbit {
namespace {

#define KERNEL(bits)            \
  with_levels<LinearKernel>( \
      {"linear_a8w" #bits "_1x16_avx2", kAvx2, Format::panel16, bits, 1, 16, run_one<Sums, bits>})
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<LinearKernel> kLinearAvx2;
const Table<LinearKernel> kLinearAvx2{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
