// 16 floats in plain C++.
#pragma once

#include <cmath>
#include <cstring>

#include "../ukernel.h"

namespace lowbit {
namespace {

struct Vector {
  float lane[16];

  // One sum at a time, and loops that are not fully unrolled. Here a vector is in memory, so more sums would not be faster, but
  // three times the code, which took compilers 40 seconds.
  static constexpr int kSums = 1;

  template <class Op>
  static Vector map_lanes(Op op) {
    Vector result;
#pragma GCC unroll 4
    for (int l = 0; l < 16; ++l) result.lane[l] = op(l);
    return result;
  }
  static Vector broadcast(float value) {
    return map_lanes([=](int) { return value; });
  }
  static Vector load(const float* at) {
    return map_lanes([=](int l) { return at[l]; });
  }
  static void store(float* at, const Vector& v) {
    for (int l = 0; l < 16; ++l) at[l] = v.lane[l];
  }
  template <DType T>
  static Vector load_as_f32(const void* at) {
    return map_lanes([=](int l) { return lowbit::load_as_f32(at, T, l); });
  }
  static Vector load_int8_as_f32(const void* at) {
    return map_lanes([=](int l) { return static_cast<float>(static_cast<const int8_t*>(at)[l]); });
  }
  static Vector load_levels_as_f32(const void* at, bool upper) {
    return map_lanes([=](int l) {
      return static_cast<float>(kCacheLevels[static_cast<const uint8_t*>(at)[l] >> (upper ? 4 : 0) & 15]);
    });
  }
  template <DType T>
  static void store_from_f32(void* at, const Vector& v) {
    for (int l = 0; l < 16; ++l) lowbit::store_from_f32(at, T, l, v.lane[l]);
  }
  static Vector add(const Vector& a, const Vector& b) {
    return map_lanes([&](int l) { return a.lane[l] + b.lane[l]; });
  }
  static Vector sub(const Vector& a, const Vector& b) {
    return map_lanes([&](int l) { return a.lane[l] - b.lane[l]; });
  }
  static Vector mul(const Vector& a, const Vector& b) {
    return map_lanes([&](int l) { return a.lane[l] * b.lane[l]; });
  }
  static Vector div(const Vector& a, const Vector& b) {
    return map_lanes([&](int l) { return a.lane[l] / b.lane[l]; });
  }
  static Vector max(const Vector& a, const Vector& b) {
    return map_lanes([&](int l) { return a.lane[l] > b.lane[l] ? a.lane[l] : b.lane[l]; });
  }
  static Vector fma(const Vector& a, const Vector& b, const Vector& c) {
    return map_lanes([&](int l) { return std::fma(a.lane[l], b.lane[l], c.lane[l]); });
  }
  static Vector zero_below(const Vector& x, const Vector& bound, const Vector& value) {
    return map_lanes([&](int l) { return x.lane[l] < bound.lane[l] ? 0.0f : value.lane[l]; });
  }
  static Vector shift_left_23(const Vector& v) {
    return map_lanes([&](int l) { return float_from_bits(bits_of_float(v.lane[l]) << 23); });
  }
  static Vector same_nan(const Vector& v) {
    return map_lanes([&](int l) { return v.lane[l] == v.lane[l] ? v.lane[l] : float_from_bits(0x7fc00000u); });
  }

  struct Quads {
    int8_t key[16 * 4];
  };
  struct Integers {
    int32_t lane[16];
  };
  static Quads load_quads(const void* at) {
    Quads quads;
    std::memcpy(quads.key, at, sizeof quads.key);
    return quads;
  }
  static Integers before_products(int32_t) { return {}; }
  static Integers add_products(const Quads& quads, const int8_t* codes, Integers sums) {
    for (int l = 0; l < 16; ++l) {
      for (int i = 0; i < 4; ++i) sums.lane[l] += quads.key[4 * l + i] * codes[i];
    }
    return sums;
  }
  static Vector to_floats(const Integers& sums) {
    return map_lanes([&](int l) { return static_cast<float>(sums.lane[l]); });
  }

  // Lane l gets lane l ^ Half.
  template <int Half>
  static Vector swap_lanes(const Vector& v) {
    return map_lanes([&](int l) { return v.lane[l ^ Half]; });
  }

  struct Four {
    const float* at;
  };
  static Four load_four(const float* at) { return {at}; }
  template <int Lane>
  static Vector fma_lane(const Vector& a, Four four, const Vector& c) {
    return fma(a, broadcast(four.at[Lane]), c);
  }
};

}  // namespace
}  // namespace lowbit
