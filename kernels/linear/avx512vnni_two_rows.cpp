// linear_a8w<b>_2x32_avx512vnni: two rows of int8 activations through two interleaved panels, for CPUs that read several
// streams faster (linear_avx512.h). A token with 16-bit activations has two rows.

#include "../bits/widths.h"
#include "tiles_avx512.h"

namespace lowbit {
namespace {

constexpr int kPanels = 2;  // the sums of more do not fit the registers

template <int Bits, bool Affine, Groups Kind>
__attribute__((noinline)) void run_interleaved_rows(const LinearArgs& args, const Streams& streams) {
  streams.make(0, 0, 2);
  const int64_t panel = interleave<Bits, Affine, Kind, 2, kPanels>(args, 0, streams.of(0));
  if (panel < args.panel_end) run_tile<Bits, Affine, Kind, 2>(args, panel, 0, 0, 1, streams.of(0), false);
}

template <int Bits>
void run(const LinearArgs& args) {
  // The scratch memory has room for two rows of more segments than any model has.
  if (args.m != 2 || Streams(args, 0).most_rows() < 2) return one_row<Bits>().run(args);
  with_groups<Bits>(args.layout, [&](auto bits, auto affine, auto kind) LOWBIT_INLINE {
    if constexpr (kind() == Groups::anywhere) {
      one_row<Bits>().run(args);
    } else {
      constexpr bool kAffine = affine() && !asks_for_mins(bits(), 2, 1);
      run_interleaved_rows<bits(), kAffine, kind()>(args, Streams(args, level_offset(bits())));
    }
  });
}

bool supports(const void*, const Layout& layout, int64_t m, IsaBits) {
  return m == 2 && (layout.group_inputs() % kBlockInputs == 0 || layout.group_inputs() == kHalfInputs);
}

constexpr LinearKernel of_two_rows(LinearKernel kernel) {
  kernel.several_streams = true;
  kernel.supports = supports;
  return with_levels<LinearKernel>(kernel);
}

#define KERNEL(bits) \
  of_two_rows({"linear_a8w" #bits "_2x32_avx512vnni", kAvx512Vnni, Format::panel16, bits, 2, 32, run<bits>})
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<LinearKernel> kLinearTwoRowsAvx512Vnni;
const Table<LinearKernel> kLinearTwoRowsAvx512Vnni{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
