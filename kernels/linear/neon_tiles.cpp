// linear_a8w<b>_<m>x16_neon: from m rows of activations on by tiles (tile_neon.h).

#include "../bits/widths.h"
#include "tile_neon.h"

namespace lowbit {
namespace {

#define KERNEL(bits, neon, neondot, streams) \
  with_levels<LinearKernel>(                 \
      {"linear_a8w" #bits "_" #neon "x16_neon", kNeon, Format::panel16, bits, neon, 16, run_tiles<bits>})
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_SET_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<LinearKernel> kLinearTilesNeon;
const Table<LinearKernel> kLinearTilesNeon{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
