// linear_a8w<b>_2x16_avx2 for 1 to 3 bits (tiles_avx2.h).

#include "../bits/widths.h"
#include "tiles_avx2.h"

namespace lowbit {
namespace {

#define KERNEL(bits) many_rows<bits>("linear_a8w" #bits "_2x16_avx2")
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_NARROW_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<LinearKernel> kLinearNarrowAvx2;
const Table<LinearKernel> kLinearNarrowAvx2{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
