// linear_a8w<b>_<m>x16_neon for 1 to 5 bits (tile_neon.h).

#include "../bits/widths.h"
#include "tile_neon.h"

namespace lowbit {
namespace {

#define KERNEL(bits, neon, neondot, streams) many_rows<bits, neon>("linear_a8w" #bits "_" #neon "x16_neon")
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_NARROW_SET_WIDTH(KERNEL), LOWBIT_EACH_MIDDLE_SET_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<LinearKernel> kLinearTilesNeon;
const Table<LinearKernel> kLinearTilesNeon{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
