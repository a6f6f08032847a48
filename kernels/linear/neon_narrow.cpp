// linear_a8w<b>_1x16_neon for 1 to 3 bits (one_row_neon.h).

#include "../bits/widths.h"
#include "one_row_neon.h"

namespace lowbit {
namespace {

#define KERNEL(bits) one_row<bits>("linear_a8w" #bits "_1x16_neon")
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_NARROW_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<LinearKernel> kLinearNarrowNeon;
const Table<LinearKernel> kLinearNarrowNeon{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
