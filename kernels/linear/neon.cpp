// linear_a8w<b>_1x16_neon for 4 to 8 bits (one_row_neon.h).

#include "../bits/widths.h"
#include "one_row_neon.h"

namespace lowbit {
namespace {

#define KERNEL(bits) one_row<bits>("linear_a8w" #bits "_1x16_neon")
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_WIDE_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<LinearKernel> kLinearNeon;
const Table<LinearKernel> kLinearNeon{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
