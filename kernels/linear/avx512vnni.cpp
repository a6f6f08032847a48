// linear_a8w<b>_1x16_avx512vnni: one row of int8 activations times b-bit weights, 16 outputs to a register (linear_avx512.h).
// linear_a8w<b>_1x{32,64}_avx512vnni: one row through 2 or 4 interleaved panels, for CPUs that read several streams faster.

#include "../bits/widths.h"
#include "linear_avx512.h"

namespace lowbit {
namespace {

template <int Bits>
void run_one(const LinearArgs& args) {
  with_groups<Bits>(args.layout, [&](auto bits, auto affine, auto kind) LOWBIT_INLINE {
    run_single_rows<bits(), affine(), kind()>(args);
  });
}

template <int Bits>
void run_streams(const LinearArgs& args) {
  with_groups<Bits>(args.layout, [&](auto bits, auto affine, auto kind) LOWBIT_INLINE {
    constexpr auto kSingleRows = run_single_rows<bits(), affine(), kind()>;
    if constexpr (kind() == Groups::anywhere) {
      kSingleRows(args);
    } else {
      constexpr bool kAffine = affine() && !asks_for_mins(bits(), 1, kInterleavedPanels<bits()>);
      run_interleaved<bits(), kAffine, kind()>(args, kSingleRows);
    }
  });
}

constexpr LinearKernel in_several_streams(LinearKernel kernel) {
  kernel.several_streams = true;
  return kernel;
}

#define KERNEL(bits)            \
  with_levels<LinearKernel>( \
      {"linear_a8w" #bits "_1x16_avx512vnni", kAvx512Vnni, Format::panel16, bits, 1, 16, run_one<bits>})
#define INTERLEAVED(bits, neon, neondot, streams) \
  in_several_streams(with_levels<LinearKernel>(   \
      {"linear_a8w" #bits "_1x" #streams "_avx512vnni", kAvx512Vnni, Format::panel16, bits, 1, streams, run_streams<bits>}))
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_SET_WIDTH(INTERLEAVED), LOWBIT_EACH_WIDTH(KERNEL)};
#undef INTERLEAVED
#undef KERNEL

}  // namespace

extern const Table<LinearKernel> kLinearAvx512Vnni;
const Table<LinearKernel> kLinearAvx512Vnni{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
