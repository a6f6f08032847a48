// linear_a8w<b>_2x16_avx512vnni for 4 to 8 bits (tiles_avx512.h).

#include "../bits/widths.h"
#include "tiles_avx512.h"

namespace lowbit {
namespace {

#define ROW(bits) many_rows<bits>("linear_a8w" #bits "_2x16_avx512vnni")
constexpr LinearKernel kRows[] = {LOWBIT_EACH_WIDE_WIDTH(ROW)};
#undef ROW

}  // namespace

extern const Table<LinearKernel> kLinearWideAvx512Vnni;
const Table<LinearKernel> kLinearWideAvx512Vnni{kRows, sizeof kRows / sizeof kRows[0]};

}  // namespace lowbit
