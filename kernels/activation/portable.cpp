// quantize_portable: one activation row to int8 in plain C++. The vector kernels are compared with it.
// Formula and edge cases: ukernel.h.

#include <cmath>

#include "../ukernel.h"

namespace lowbit {
namespace {

// t of a segment, from the bits of its largest magnitude. As integers, the bits of NaN are the largest.
float scale_of(uint32_t most) {
  const float scale = float_from_bits(bits_of_float(float_from_bits(most) * (1.0f / 127.0f)) & ~3u);
  if (!(scale < 0x1p104f)) return float_from_bits(0x7fc00000u);
  return scale < 0x1p-126f ? 0.0f : scale;  // the inverse of a smaller scale would overflow
}

// Quantizes one segment, values [begin, end) of x, and stores its scale. Returns the sum of the codes.
int32_t quantize_segment(const QuantizeArgs& args, int64_t begin, int64_t end, float* scale) {
  uint32_t most = 0;
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t magnitude = bits_of_float(load_as_f32(args.x, args.x_dtype, i)) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  *scale = scale_of(most);
  const bool is_zero = !(*scale > 0.0f);
  const float inverse = is_zero ? 0.0f : 1.0f / *scale;
  int32_t sum = 0;
  for (int64_t i = begin; i < end; ++i) {
    const float x = is_zero ? 0.0f : load_as_f32(args.x, args.x_dtype, i);
    args.a[i] = static_cast<int8_t>(std::nearbyint(x * inverse));
    sum += args.a[i];
  }
  return sum;
}

void run(const QuantizeArgs& args) {
  int64_t i = 0, segment = 0;
  for (int64_t group = 0; i < args.k; ++group) {
    const int64_t group_end = i + args.group_inputs < args.k ? i + args.group_inputs : args.k;
    float group_sum = 0.0f;
    for (bool first = true; i < group_end; first = false, ++segment) {
      const int64_t end = i + kSegmentInputs < group_end ? i + kSegmentInputs : group_end;
      float scale;
      const int32_t sum = quantize_segment(args, i, end, &scale);
      args.scales[segment] = scale;
      args.sums[segment] = sum;
      group_sum = first ? scale * static_cast<float>(sum) : std::fma(scale, static_cast<float>(sum), group_sum);
      i = end;
    }
    if (args.group_sums != nullptr) args.group_sums[group] = group_sum;
  }
  for (; i < args.k_padded; ++i) args.a[i] = 0;
}

constexpr QuantizeKernel kKernels[] = {{"quantize_portable", kPortable, run}};

}  // namespace

extern const Table<QuantizeKernel> kQuantizePortable;
const Table<QuantizeKernel> kQuantizePortable{kKernels, 1};

}  // namespace lowbit
