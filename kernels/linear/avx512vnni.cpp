// linear_a8w<b>_{1,2}x16_avx512vnni: int8 activations times b-bit weights, 16 outputs to a register (linear_avx512.h).

#include "../bits/widths.h"
#include "linear_avx512.h"

namespace lowbit {
namespace {

template <int Bits, int MostRows>
void run(const LinearArgs& args) {
  const bool affine = args.layout.mapping == Mapping::affine;
  const bool halves = args.layout.group_inputs() % kBlockInputs != 0;
  if constexpr (can_have_levels(Bits)) {
    if (args.layout.mapping == Mapping::levels) {
      return halves ? run_panels<by_table(Bits), false, true, MostRows>(args)
                    : run_panels<by_table(Bits), false, false, MostRows>(args);
    }
  }
  if (halves) {
    return affine ? run_panels<Bits, true, true, MostRows>(args) : run_panels<Bits, false, true, MostRows>(args);
  }
  affine ? run_panels<Bits, true, false, MostRows>(args) : run_panels<Bits, false, false, MostRows>(args);
}

#define ROW(bits, m, most_rows) \
  with_levels<LinearKernel>(     \
      {"linear_a8w" #bits "_" #m "x16_avx512vnni", kAvx512Vnni, Format::panel16, bits, m, 16, run<bits, most_rows>})
constexpr LinearKernel kRows[] = {LOWBIT_EACH_WIDTH(ROW, 2, 8), LOWBIT_EACH_WIDTH(ROW, 1, 1)};
#undef ROW

}  // namespace

extern const Table<LinearKernel> kLinearAvx512Vnni;
const Table<LinearKernel> kLinearAvx512Vnni{kRows, sizeof kRows / sizeof kRows[0]};

}  // namespace lowbit
