// Correct panel16 kernels of any width and mapping for the tests' libraries, written exactly after kernels/ukernel.h and
// docs/format.md.
#pragma once

#include <lowbit/kernels/library.h>

#include <cmath>
#include <cstring>

namespace plain {

using namespace lowbit;

// The factor of the scale: the code of an affine weight, otherwise its level.
inline int integer_of(const Layout& layout, const uint8_t* panel, int64_t r, int64_t i) {
  const uint8_t* const block = panel + layout.block_offset(i / kBlockInputs);
  const int64_t line = i % kBlockInputs / 4, position = 4 * r + i % 4;
  const CodePlacement where = placement(layout.bits, static_cast<int>(line));
  unsigned code = 0;
  for (int part = 0; part < where.count; ++part) {
    const BitRun run = where.run[part];
    const unsigned byte = block[run.line * kLineBytes + position];
    code |= ((byte >> run.line_bit) & ((1u << run.length) - 1u)) << run.code_bit;
  }
  const int value = static_cast<int>(code ^ stored_flip(layout.bits));
  if (layout.mapping == Mapping::levels) return layout.levels[value];
  if (layout.mapping == Mapping::affine) return value;
  return level_factor(layout.bits) * value - level_offset(layout.bits);
}

inline float product(const LinearArgs& args, int64_t row, int64_t column) {
  const Layout& layout = args.layout;
  const bool affine = layout.mapping == Mapping::affine;
  const uint8_t* const panel = args.panels + column / kPanelRows * layout.panel_bytes;
  const int64_t r = column % kPanelRows;
  float acc = 0.0f;
  for (int64_t group = 0, i = 0, segment = row * layout.segments; group < layout.groups; ++group) {
    const int64_t group_end = i + layout.group_inputs() < layout.k ? i + layout.group_inputs() : layout.k;
    float products = 0.0f;
    for (bool first = true; i < group_end; first = false, ++segment) {
      const int64_t end = i + kSegmentInputs < group_end ? i + kSegmentInputs : group_end;
      int32_t sum = 0;
      for (; i < end; ++i) sum += args.a[row * layout.blocks * kBlockInputs + i] * integer_of(layout, panel, r, i);
      const float t = args.scales[segment];
      products = first ? t * static_cast<float>(sum) : std::fma(t, static_cast<float>(sum), products);
    }
    const uint8_t* const scales = panel + layout.scales_offset(group);
    acc = std::fma(load_as_f32(scales, DType::f16, r), products, acc);
    if (!affine) continue;
    acc = std::fma(load_as_f32(scales, DType::f16, kPanelRows + r), args.group_sums[row * layout.groups + group], acc);
  }
  const uint8_t* const head = panel + layout.head_offset;
  return std::fma(load_as_f32(head, DType::f32, r), acc, load_as_f32(head, DType::f32, 2 * kPanelRows + r));
}

// `change(args, row, column, value)` modifies the result.
template <class Change>
void linear_but(const LinearArgs& args, const Change& change) {
  const int64_t end = args.panel_end * kPanelRows < args.layout.n ? args.panel_end * kPanelRows : args.layout.n;
  for (int64_t row = 0; row < args.m; ++row) {
    for (int64_t column = args.panel_begin * kPanelRows; column < end; ++column) {
      const float value = change(args, row, column, product(args, row, column));
      store_from_f32(args.out, args.out_dtype, row * args.out_stride + column, value);
    }
  }
}

inline void linear(const LinearArgs& args) {
  linear_but(args, [](const LinearArgs&, int64_t, int64_t, float value) { return value; });
}

inline void embedding(const EmbeddingArgs& args) {
  const Layout& layout = args.layout;
  const uint8_t* const panel = args.panels + args.row / kPanelRows * layout.panel_bytes;
  const int64_t r = args.row % kPanelRows;
  const float row_scale = load_as_f32(panel + layout.head_offset, DType::f32, r);
  for (int64_t i = 0; i < layout.k; ++i) {
    const uint8_t* const scales = panel + layout.scales_offset(i / layout.group_inputs());
    const float scale = row_scale * load_as_f32(scales, DType::f16, r);
    const float integer = static_cast<float>(integer_of(layout, panel, r, i));
    float value = scale * integer;
    if (layout.mapping == Mapping::affine) {
      value = std::fma(scale, integer, row_scale * load_as_f32(scales, DType::f16, kPanelRows + r));
    }
    store_from_f32(args.out, args.out_dtype, i, value);
  }
}

inline void quantize(const QuantizeArgs& args) {
  std::memset(args.a, 0, static_cast<size_t>(args.k_padded));
  int64_t i = 0, segment = 0;
  for (int64_t group = 0; i < args.k; ++group) {
    const int64_t group_end = i + args.group_inputs < args.k ? i + args.group_inputs : args.k;
    float group_sum = 0.0f;
    for (bool first = true; i < group_end; first = false, ++segment) {
      const int64_t begin = i, end = i + kSegmentInputs < group_end ? i + kSegmentInputs : group_end;
      float most = 0.0f;
      for (int64_t j = begin; j < end; ++j) {
        const float magnitude = std::fabs(load_as_f32(args.x, args.x_dtype, j));
        if (!(magnitude <= most)) most = magnitude;
        if (std::isnan(most)) break;
      }
      float t = float_from_bits(bits_of_float(most * (1.0f / 127.0f)) & ~3u);
      if (!(t < 0x1p104f)) t = float_from_bits(0x7fc00000u);
      if (t < 0x1p-126f) t = 0.0f;
      int32_t sum = 0;
      for (; i < end; ++i) {
        if (!(t > 0.0f)) continue;
        args.a[i] = static_cast<int8_t>(std::nearbyint(load_as_f32(args.x, args.x_dtype, i) * (1.0f / t)));
        sum += args.a[i];
      }
      args.scales[segment] = t;
      args.sums[segment] = sum;
      group_sum = first ? t * static_cast<float>(sum) : std::fma(t, static_cast<float>(sum), group_sum);
    }
    if (args.group_sums != nullptr) args.group_sums[group] = group_sum;
  }
}

}  // namespace plain
