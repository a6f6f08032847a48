// embedding_w<b>_portable: dequantizes one row of a packed matrix in plain C++. The vector kernels are compared with it.
// Formula: ukernel.h; layout: format.h. A row has 4 bytes in every packed line of its panel.

#include <cmath>
#include <utility>

#include "../bits/widths.h"
#include "../ukernel.h"

namespace lowbit {
namespace {

template <int Bits>
void read_row(const EmbeddingArgs& args) {
  const Layout& layout = args.layout;
  const bool affine = has_mins(layout.mapping);
  const uint8_t* panel = args.panels + (args.row / kPanelRows) * layout.panel_bytes;
  const int64_t r = args.row % kPanelRows;
  const float row_scale = load_as_f32(panel + layout.head_offset, DType::f32, r);
  const int64_t group_inputs = layout.group_inputs();

  for (int64_t b = 0; b < layout.blocks; ++b) {
    const uint8_t* bytes = panel + layout.block_offset(b) + 4 * r;
    uint8_t codes[kBlockInputs];
    [&]<int... J>(std::integer_sequence<int, J...>) {
      for (int i = 0; i < 4; ++i) ((codes[4 * J + i] = read_code<code_bits(Bits), J>(bytes + i)), ...);
    }(std::make_integer_sequence<int, kBlockLines>());
    if constexpr (is_by_table(Bits)) {
      for (uint8_t& code : codes) code = static_cast<uint8_t>(layout.levels[code] + level_offset(Bits));
    }

    const int64_t first = b * kBlockInputs;
    const int64_t count = layout.k - first < kBlockInputs ? layout.k - first : kBlockInputs;
    float scale = 0.0f, min = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
      if (i % kHalfInputs == 0) {
        const uint8_t* scales = panel + layout.scales_offset((first + i) / group_inputs);
        scale = row_scale * load_as_f32(scales, DType::f16, r);
        if (affine) min = row_scale * load_as_f32(scales, DType::f16, kPanelRows + r);
      }
      const int level = level_factor(Bits) * codes[i] - level_offset(Bits);
      const float value = affine ? std::fma(scale, static_cast<float>(codes[i]), min) : scale * static_cast<float>(level);
      store_from_f32(args.out, args.out_dtype, first + i, value);
    }
  }
}

template <int Bits>
void run(const EmbeddingArgs& args) {
  with_mapping<Bits>(args.layout.mapping, [&](auto bits, auto) { read_row<bits()>(args); });
}

#define KERNEL(bits) \
  with_levels<EmbeddingKernel>({"embedding_w" #bits "_portable", kPortable, Format::panel16, bits, run<bits>})
constexpr EmbeddingKernel kKernels[] = {LOWBIT_EACH_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<EmbeddingKernel> kEmbeddingPortable;
const Table<EmbeddingKernel> kEmbeddingPortable{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
