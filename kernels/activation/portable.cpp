// quantize_portable: one activation row to int8 in plain C++; the definition that the vector kernels are compared with.
// Formula and edge cases: ukernel.h. Group sums are at most 65536 * 128 = 2^23 in size, so int32 is ample.

#include <cmath>

#include "../ukernel.h"

namespace lowbit {
namespace {

void run(const QuantizeArgs& args) {
  float lo = 0.0f, hi = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < args.k; ++i) {
    const float x = load_as_f32(args.x, args.x_dtype, i);
    finite &= std::isfinite(x);
    lo = x < lo ? x : lo;
    hi = x > hi ? x : hi;
  }

  float scale = hi / 255.0f - lo / 255.0f;
  float inverse = 0.0f, zero = 0.0f;
  if (!finite) {
    scale = float_from_bits(0x7fc00000u);
  } else if (scale < 0x1p-126f) {
    scale = 0.0f;  // its inverse would overflow; such a row is zero to within 2^-118
  } else {
    inverse = 1.0f / scale;
    zero = std::fmin(std::nearbyint(-lo * inverse) - 128.0f, 127.0f);
  }
  std::memcpy(args.scale, &scale, sizeof scale);
  std::memcpy(args.zero, &zero, sizeof zero);

  const bool is_zero = inverse == 0.0f;
  int64_t i = 0;
  for (int64_t group = 0; i < args.k; ++group) {
    const int64_t end = i + args.group_inputs < args.k ? i + args.group_inputs : args.k;
    int32_t sum = 0;
    for (; i < end; ++i) {
      const float x = is_zero ? 0.0f : load_as_f32(args.x, args.x_dtype, i);
      const float rounded = std::nearbyint(std::fma(x, inverse, zero));
      const float clamped = rounded < -128.0f ? -128.0f : rounded > 127.0f ? 127.0f : rounded;
      args.a[i] = static_cast<int8_t>(clamped);
      sum += args.a[i];
    }
    std::memcpy(args.group_sums + group, &sum, sizeof sum);
  }
  for (; i < args.k_padded; ++i) args.a[i] = 0;
}

constexpr QuantizeKernel kRows[] = {{"quantize_portable", kPortable, run}};

}  // namespace

extern const Table<QuantizeKernel> kQuantizePortable;
const Table<QuantizeKernel> kQuantizePortable{kRows, 1};

}  // namespace lowbit
