// kernels/numeric.h compared with exact rounding in float64, for all 16-bit values and their neighborhoods, and with the
// compiler's 16-bit type.

#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <limits>

#include "../../kernels/numeric.h"
#include "support/matrix.h"
#include "support/random.h"

namespace lowbit::test {
namespace {

#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif

// The parameters of a 16-bit float type.
struct Type {
  int mantissa_bits, smallest_exponent;  // for normal numbers 1.m * 2^e
  double largest;
  uint16_t infinity;
};
constexpr Type kF16{10, -14, 65504.0, 0x7c00};
constexpr Type kBf16{7, -126, 0x1.fep127, 0x7f80};

// Rounds to nearest, ties to even, in float64, where every step is exact. Not for NaN.
uint16_t rounded(double value, const Type& type) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  if (std::isinf(magnitude)) return sign | type.infinity;
  const int exponent = std::max(std::ilogb(magnitude), type.smallest_exponent);
  const double steps = std::nearbyint(std::ldexp(magnitude, type.mantissa_bits - exponent));
  if (std::ldexp(steps, exponent - type.mantissa_bits) > type.largest) return sign | type.infinity;
  // Counts steps from 2^smallest_exponent, so that carries into the exponent are automatic.
  const int bits = static_cast<int>(steps) + ((exponent - type.smallest_exponent) << type.mantissa_bits);
  return static_cast<uint16_t>(sign | bits);
}

bool is_nan(uint16_t bits, const Type& type) { return (bits & 0x7fff) > type.infinity; }

template <class Check>
void for_floats_around_every_value(float (*to_float)(uint16_t), const Check& check) {
  for (int bits = 0; bits < 0x8000; ++bits) {
    const float value = to_float(static_cast<uint16_t>(bits));
    const float next = to_float(static_cast<uint16_t>(bits + 1));
    if (!std::isfinite(value)) break;
    // The midpoint of two neighbors: exact in float32 for float16; for bfloat16 from the bits.
    const float tie = float_from_bits(bits_of_float(value) / 2 + bits_of_float(next) / 2);
    const float middle = std::isfinite(next) ? value + (next - value) / 2 : tie;
    for (const float center : {value, middle, tie}) {
      for (const float x : {center, std::nextafter(center, 0.0f), std::nextafter(center, FLT_MAX)}) {
        check(x);
        check(-x);
      }
    }
  }
}

TEST(Numeric, F16ToF32IsExactForAllValues) {
  for (int bits = 0; bits < 65536; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    const float value = f32_from_f16(half);
    if (is_nan(half, kF16)) {
      // The payload moves up and the NaN becomes quiet.
      const uint32_t expected = (half & 0x8000u) << 16 | 0x7fc00000u | (half & 0x3ffu) << 13;
      ASSERT_EQ(bits_of_float(value), expected) << bits;
      continue;
    }
    ASSERT_EQ(double{value}, value_of_half(half)) << bits;
    ASSERT_EQ(std::signbit(value), half >= 0x8000) << bits;
    ASSERT_EQ(f16_from_f32(value), half) << bits;
    Half compilers;
    std::memcpy(&compilers, &half, 2);
    ASSERT_EQ(bits_of_float(static_cast<float>(compilers)), bits_of_float(value)) << bits;
  }
}

void expect_f16(float x) {
  const uint16_t found = f16_from_f32(x);
  const Half half = static_cast<Half>(x);
  uint16_t compilers;
  std::memcpy(&compilers, &half, 2);
  ASSERT_EQ(found, rounded(x, kF16)) << std::hexfloat << x;
  ASSERT_EQ(found, compilers) << std::hexfloat << x;
}

void expect_bf16(float x) { ASSERT_EQ(bf16_from_f32(x), rounded(x, kBf16)) << std::hexfloat << x; }

TEST(Numeric, F16FromF32AroundEveryValue) {
  for_floats_around_every_value(f32_from_f16, expect_f16);
  for (const float x : {65504.0f, 65519.996f, 65520.0f, 65536.0f, FLT_MAX, std::numeric_limits<float>::infinity(),
                        0x1p-24f, 0x1p-25f, 0x1.000002p-25f, 0x1p-26f, FLT_MIN, 0x1p-149f, 0.0f}) {
    expect_f16(x);
    expect_f16(-x);
  }
}

TEST(Numeric, Bf16ToF32AndBackForAllValues) {
  for (int bits = 0; bits < 65536; ++bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    ASSERT_EQ(bits_of_float(f32_from_bf16(half)), uint32_t{half} << 16);
    const uint16_t back = bf16_from_f32(f32_from_bf16(half));
    ASSERT_EQ(back, is_nan(half, kBf16) ? half | 0x40 : half) << bits;
  }
}

TEST(Numeric, Bf16FromF32AroundEveryValue) {
  for_floats_around_every_value(f32_from_bf16, expect_bf16);
  for (const float x :
       {FLT_MAX, 0x1.fefffep127f, 0x1.ffp127f, 0x1p-149f, 0x1p-134f, std::numeric_limits<float>::infinity()}) {
    expect_bf16(x);
    expect_bf16(-x);
  }
}

TEST(Numeric, RandomFloats) {
  Random random(3);
  for (int i = 0; i < 300000; ++i) {
    const float any = float_from_bits(static_cast<uint32_t>(random.next()));
    const float in_range = std::ldexp(random.between(-1.0f, 1.0f), static_cast<int>(random.between(int64_t{-28}, 17)));
    for (const float x : {any, in_range}) {
      if (std::isnan(x)) {
        ASSERT_TRUE(is_nan(f16_from_f32(x), kF16));
        ASSERT_TRUE(is_nan(bf16_from_f32(x), kBf16));
        continue;
      }
      expect_f16(x);
      expect_bf16(x);
    }
  }
}

TEST(Numeric, NanKeepsSignAndPayloadAndIsQuiet) {
  for (const uint32_t bits : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff812345u, 0x7fffffffu}) {
    const float nan = float_from_bits(bits);
    ASSERT_EQ(f16_from_f32(nan), static_cast<uint16_t>((bits >> 16 & 0x8000) | 0x7e00 | (bits >> 13 & 0x3ff)));
    ASSERT_EQ(bf16_from_f32(nan), static_cast<uint16_t>(bits >> 16 | 0x40));
  }
}

TEST(Numeric, LoadAndStoreAtAnyAddress) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    uint8_t bytes[16] = {};
    store_from_f32(bytes + 1, dtype, 2, -1.5f);
    EXPECT_EQ(load_as_f32(bytes + 1, dtype, 2), -1.5f);
    for (int i = 0; i < 16; ++i) {
      const int64_t begin = 1 + 2 * size_of(dtype);
      const bool inside = i >= begin && i < begin + size_of(dtype);
      EXPECT_TRUE(inside || bytes[i] == 0) << i;
    }
  }
}

}  // namespace
}  // namespace lowbit::test
