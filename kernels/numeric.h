// Scalar conversions between float32 and the 16-bit floats in integer arithmetic, so that every compiler and CPU rounds equally
// (to nearest, ties to even). Vector kernels must give the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "lowbit_ukernel.h"

namespace lowbit {

namespace {

[[maybe_unused]] inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

[[maybe_unused]] inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

[[maybe_unused]] inline float f32_from_bf16(uint16_t h) { return float_from_bits(uint32_t{h} << 16); }

[[maybe_unused]] inline uint16_t bf16_from_f32(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // quiet NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

[[maybe_unused]] inline float f32_from_f16(uint16_t h) {
  const uint32_t sign = uint32_t{h & 0x8000u} << 16;
  const uint32_t exponent = (h >> 10) & 31u;
  const uint32_t mantissa = h & 0x3ffu;
  if (exponent == 31) return float_from_bits(sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u));
  if (exponent != 0) return float_from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // exact: 10 bits
  return float_from_bits(sign | bits_of_float(magnitude));
}

[[maybe_unused]] inline uint16_t f16_from_f32(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u | static_cast<uint16_t>((magnitude >> 13) & 0x3ffu);
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {                         // below 2^-14: subnormal
    // After adding 0.5, the unit in the last place is 2^-24, so the addition rounds.
    const float shifted = float_from_bits(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(bits_of_float(shifted) - 0x3f000000u);
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

[[maybe_unused]] inline float load_as_f32(const void* base, DType dtype, int64_t index) {
  if (dtype == DType::f32) {
    float value;
    std::memcpy(&value, static_cast<const char*>(base) + 4 * index, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, static_cast<const char*>(base) + 2 * index, 2);
  return dtype == DType::bf16 ? f32_from_bf16(half) : f32_from_f16(half);
}

[[maybe_unused]] inline void store_from_f32(void* base, DType dtype, int64_t index, float value) {
  if (dtype == DType::f32) {
    std::memcpy(static_cast<char*>(base) + 4 * index, &value, 4);
    return;
  }
  const uint16_t half = dtype == DType::bf16 ? bf16_from_f32(value) : f16_from_f32(value);
  std::memcpy(static_cast<char*>(base) + 2 * index, &half, 2);
}

[[maybe_unused]] constexpr int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

}  // namespace
}  // namespace lowbit
