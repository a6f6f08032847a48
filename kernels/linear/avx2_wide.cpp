// linear_a8w<b>_2x16_avx2 for 4 to 8 bits (tiles_avx2.h).

#include "../bits/widths.h"
#include "tiles_avx2.h"

namespace lowbit {
namespace {

#define KERNEL(bits) many_rows<bits>("linear_a8w" #bits "_2x16_avx2")
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_WIDE_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<LinearKernel> kLinearWideAvx2;
const Table<LinearKernel> kLinearWideAvx2{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
