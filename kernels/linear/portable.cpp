// linear_a8w<b>_1x16_portable: int8 activations times b-bit weights in plain C++, for every CPU and every case. The vector
// kernels are compared with it. Formula: ukernel.h; layout: format.h.
//
// Levels of a table are bytes level + 128, and the rest of the code treats them as 8-bit codes.
// Works on half a block (16 inputs) at a time, because that is the granularity of group sizes. The magnitude of a segment's
// integer sums is at most 64 * 127 * 255 < 2^21.

#include <cmath>
#include <utility>

#include "../bits/widths.h"
#include "../group_parts.h"
#include "../ukernel.h"

namespace lowbit {
namespace {

// Adds the products of one unpacked line: 16 rows x 4 inputs.
template <int Bits, int J>
LOWBIT_INLINE inline void add_line(const uint8_t* block, const int8_t* levels, const int8_t* a,
                                   int32_t (&sums)[kPanelRows]) {
  uint8_t codes[kLineBytes];
  for (int p = 0; p < kLineBytes; ++p) codes[p] = read_code<code_bits(Bits), J>(block + p);
  if constexpr (is_by_table(Bits)) {
    for (uint8_t& code : codes) code = static_cast<uint8_t>(levels[code] + level_offset(Bits));
  }
  for (int r = 0; r < kPanelRows; ++r) {
    int32_t sum = 0;
    for (int i = 0; i < 4; ++i) sum += int32_t{codes[4 * r + i]} * a[4 * (J % 4) + i];
    sums[r] += sum;
  }
}

template <int Bits, int First>
void add_half(const uint8_t* block, const int8_t* levels, const int8_t* a, int32_t (&sums)[kPanelRows]) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    (add_line<Bits, First + I>(block, levels, a, sums), ...);
  }(std::make_integer_sequence<int, 4>());
}

template <int Bits>
void row_times_panel(const LinearArgs& args, const uint8_t* panel, int64_t row, float (&acc)[kPanelRows]) {
  const Layout& layout = args.layout;
  const bool affine = has_mins(layout.mapping);
  const int8_t* a = args.a + row * layout.blocks * kBlockInputs;
  const float* scale = args.scales + row * layout.segments;
  const int32_t* a_sum = args.sums + row * layout.segments;
  float products[kPanelRows];
  for (const GroupPart segment : GroupParts(layout)) {
    int32_t sums[kPanelRows] = {};
    for (int64_t half = segment.begin; half < segment.end; ++half) {
      const uint8_t* block = panel + layout.block_offset(half / 2);
      if (half % 2 == 0) {
        add_half<Bits, 0>(block, layout.levels, a + half * kHalfInputs, sums);
      } else {
        add_half<Bits, 4>(block, layout.levels, a + half * kHalfInputs, sums);
      }
    }
    for (int r = 0; r < kPanelRows; ++r) {
      const int32_t sum = affine ? sums[r] : level_factor(Bits) * sums[r] - level_offset(Bits) * a_sum[segment.index];
      const float t = scale[segment.index], value = static_cast<float>(sum);
      products[r] = segment.first ? t * value : std::fma(t, value, products[r]);
    }
    if (!segment.last) continue;
    const uint8_t* scales = panel + layout.scales_offset(segment.group);
    for (int r = 0; r < kPanelRows; ++r) {
      acc[r] = std::fma(load_as_f32(scales, DType::f16, r), products[r], acc[r]);
      if (!affine) continue;
      const float group_sum = args.group_sums[row * layout.groups + segment.group];
      acc[r] = std::fma(load_as_f32(scales, DType::f16, kPanelRows + r), group_sum, acc[r]);
    }
  }
}

template <int Bits>
void run_panels(const LinearArgs& args) {
  const Layout& layout = args.layout;
  for (int64_t p = args.panel_begin; p < args.panel_end; ++p) {
    const uint8_t* panel = args.panels + p * layout.panel_bytes;
    const uint8_t* head = panel + layout.head_offset;
    const int64_t columns = layout.n - p * kPanelRows < kPanelRows ? layout.n - p * kPanelRows : kPanelRows;
    for (int64_t row = 0; row < args.m; ++row) {
      float acc[kPanelRows] = {};
      row_times_panel<Bits>(args, panel, row, acc);
      for (int64_t r = 0; r < columns; ++r) {
        const float row_scale = load_as_f32(head, DType::f32, r);
        const float bias = load_as_f32(head, DType::f32, 2 * kPanelRows + r);
        const float y = std::fma(row_scale, acc[r], bias);
        store_from_f32(args.out, args.out_dtype, row * args.out_stride + p * kPanelRows + r, y);
      }
    }
  }
}

template <int Bits>
void run(const LinearArgs& args) {
  with_mapping<Bits>(args.layout.mapping, [&](auto bits, auto) { run_panels<bits()>(args); });
}

#define KERNEL(bits) \
  with_levels<LinearKernel>({"linear_a8w" #bits "_1x16_portable", kPortable, Format::panel16, bits, 1, 16, run<bits>})
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<LinearKernel> kLinearPortable;
const Table<LinearKernel> kLinearPortable{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
