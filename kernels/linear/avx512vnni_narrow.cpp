// linear_a8w<b>_2x16_avx512vnni for 1 to 3 bits (tiles_avx512.h).

#include "../bits/widths.h"
#include "tiles_avx512.h"

namespace lowbit {
namespace {

#define KERNEL(bits) many_rows<bits>("linear_a8w" #bits "_2x16_avx512vnni")
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_NARROW_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<LinearKernel> kLinearNarrowAvx512Vnni;
const Table<LinearKernel> kLinearNarrowAvx512Vnni{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
