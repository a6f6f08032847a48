// linear_a8w<b>_{1,2}x16_avx512vnni: int8 activations times b-bit weights, 16 outputs to a register (linear_avx512.h).

#include "linear_avx512.h"

namespace lowbit {
namespace {

template <int Bits, int MostRows>
void run(const LinearArgs& args) {
  const bool affine = args.layout.mapping == Mapping::affine;
  if (args.layout.group_inputs() % kBlockInputs != 0) {  // half blocks are rare: not worth a tile of several rows
    return affine ? run_panels<Bits, true, true, 1>(args) : run_panels<Bits, false, true, 1>(args);
  }
  affine ? run_panels<Bits, true, false, MostRows>(args) : run_panels<Bits, false, false, MostRows>(args);
}

#define ROW(bits, m, most_rows) \
  {"linear_a8w" #bits "_" #m "x16_avx512vnni", kAvx512Vnni, Format::panel16, bits, m, 16, run<bits, most_rows>}
constexpr LinearKernel kRows[] = {
    ROW(1, 2, 8), ROW(2, 2, 8), ROW(3, 2, 8), ROW(4, 2, 8), ROW(5, 2, 8), ROW(6, 2, 8), ROW(7, 2, 8), ROW(8, 2, 8),
    ROW(1, 1, 1), ROW(2, 1, 1), ROW(3, 1, 1), ROW(4, 1, 1), ROW(5, 1, 1), ROW(6, 1, 1), ROW(7, 1, 1), ROW(8, 1, 1)};
#undef ROW

}  // namespace

extern const Table<LinearKernel> kLinearAvx512Vnni;
const Table<LinearKernel> kLinearAvx512Vnni{kRows, sizeof kRows / sizeof kRows[0]};

}  // namespace lowbit
