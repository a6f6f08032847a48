// 16 floats in two registers of AVX2.
#pragma once

#include <cstring>

#include "../bits/simd_avx2.h"
#include "../ukernel.h"

namespace lowbit {
namespace {

struct Vector {
  __m256 low, high;

  static constexpr int kSums = 4;  // sums, of two registers each, that fit next to a vector and a scalar

  LOWBIT_INLINE static Vector of(const Float16& v) { return {v.half[0], v.half[1]}; }
  LOWBIT_INLINE static Vector broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  LOWBIT_INLINE static Vector load(const float* at) { return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
  LOWBIT_INLINE static void store(float* at, Vector v) {
    _mm256_storeu_ps(at, v.low);
    _mm256_storeu_ps(at + 8, v.high);
  }
  template <DType T>
  LOWBIT_INLINE static Vector load_as_f32(const void* at) {
    return of(load16<T>(at));
  }
  LOWBIT_INLINE static Vector load_int8_as_f32(const void* at) {
    return of_int8(_mm_loadu_si128(static_cast<const __m128i*>(at)));
  }
  LOWBIT_INLINE static Vector load_levels_as_f32(const void* at, bool upper) {
    const __m128i levels = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kCacheLevels));
    const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(at));
    const __m128i codes = _mm_and_si128(upper ? _mm_srli_epi16(bytes, 4) : bytes, _mm_set1_epi8(15));
    return of_int8(_mm_shuffle_epi8(levels, codes));
  }
  LOWBIT_INLINE static Vector of_int8(__m128i bytes) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
  }
  template <DType T>
  LOWBIT_INLINE static void store_from_f32(void* at, Vector v) {
    store16(at, T, {{v.low, v.high}});
  }
  LOWBIT_INLINE static Vector add(Vector a, Vector b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
  }
  LOWBIT_INLINE static Vector sub(Vector a, Vector b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
  }
  LOWBIT_INLINE static Vector mul(Vector a, Vector b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
  }
  LOWBIT_INLINE static Vector div(Vector a, Vector b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
  }
  LOWBIT_INLINE static Vector max(Vector a, Vector b) {
    return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
  }
  LOWBIT_INLINE static Vector fma(Vector a, Vector b, Vector c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  LOWBIT_INLINE static Vector zero_below(Vector x, Vector bound, Vector value) {
    return {_mm256_andnot_ps(_mm256_cmp_ps(x.low, bound.low, _CMP_LT_OQ), value.low),
            _mm256_andnot_ps(_mm256_cmp_ps(x.high, bound.high, _CMP_LT_OQ), value.high)};
  }
  LOWBIT_INLINE static Vector shift_left_23(Vector v) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v.low), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v.high), 23))};
  }
  LOWBIT_INLINE static Vector same_nan(Vector v) {
    const __m256 nan = _mm256_set1_ps(float_from_bits(0x7fc00000u));
    return {_mm256_blendv_ps(v.low, nan, _mm256_cmp_ps(v.low, v.low, _CMP_UNORD_Q)),
            _mm256_blendv_ps(v.high, nan, _mm256_cmp_ps(v.high, v.high, _CMP_UNORD_Q))};
  }

  struct Integers {
    __m256i half[2];
  };
#if defined(__AVXVNNI__)
  // vpdpbusd multiplies unsigned by signed bytes: 128 is added to keys, and the effect is subtracted in advance.
  struct Quads {
    __m256i keys[2];
  };
  LOWBIT_INLINE static Quads load_quads(const void* at) {
    const auto half = [at](int i) LOWBIT_INLINE {
      return _mm256_xor_si256(_mm256_loadu_si256(static_cast<const __m256i*>(at) + i), _mm256_set1_epi8(-128));
    };
    return {{half(0), half(1)}};
  }
  LOWBIT_INLINE static Integers before_products(int32_t sum) {
    return {{_mm256_set1_epi32(-128 * sum), _mm256_set1_epi32(-128 * sum)}};
  }
#else
  // vpmaddubsw multiplies unsigned by signed bytes: magnitudes of keys by queries with the signs of the keys. Two products are
  // below 2^15.
  struct Quads {
    __m256i keys[2], magnitudes[2];
  };
  LOWBIT_INLINE static Quads load_quads(const void* at) {
    Quads quads;
    for (int i = 0; i < 2; ++i) {
      quads.keys[i] = _mm256_loadu_si256(static_cast<const __m256i*>(at) + i);
      quads.magnitudes[i] = _mm256_abs_epi8(quads.keys[i]);
    }
    return quads;
  }
  LOWBIT_INLINE static Integers before_products(int32_t) { return {{_mm256_setzero_si256(), _mm256_setzero_si256()}}; }
#endif
  LOWBIT_INLINE static Integers add_products(const Quads& quads, const int8_t* codes, Integers sums) {
    int32_t quad;
    std::memcpy(&quad, codes, sizeof quad);
    const __m256i query = _mm256_set1_epi32(quad);
    for (int i = 0; i < 2; ++i) {
#if defined(__AVXVNNI__)
      sums.half[i] = _mm256_dpbusd_avx_epi32(sums.half[i], quads.keys[i], query);
#else
      const __m256i pairs = _mm256_maddubs_epi16(quads.magnitudes[i], _mm256_sign_epi8(query, quads.keys[i]));
      sums.half[i] = _mm256_add_epi32(sums.half[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
    }
    return sums;
  }
  LOWBIT_INLINE static Vector to_floats(const Integers& sums) {
    return {_mm256_cvtepi32_ps(sums.half[0]), _mm256_cvtepi32_ps(sums.half[1])};
  }

  // Lane l gets lane l ^ Half.
  template <int Half>
  LOWBIT_INLINE static Vector swap_lanes(Vector v) {
    if constexpr (Half == 1) return {_mm256_permute_ps(v.low, 0xb1), _mm256_permute_ps(v.high, 0xb1)};
    else if constexpr (Half == 2) return {_mm256_permute_ps(v.low, 0x4e), _mm256_permute_ps(v.high, 0x4e)};
    else if constexpr (Half == 4) return {_mm256_permute2f128_ps(v.low, v.low, 1), _mm256_permute2f128_ps(v.high, v.high, 1)};
    else return {v.high, v.low};
  }

  struct Four {
    const float* at;
  };
  LOWBIT_INLINE static Four load_four(const float* at) { return {at}; }
  template <int Lane>
  LOWBIT_INLINE static Vector fma_lane(Vector a, Four four, Vector c) {
    // Not the intrinsic, for which GCC 12 adds in the scalar's register and copies sums.
    const __m256 scalar = _mm256_set1_ps(four.at[Lane]);
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(c.low) : "x"(scalar), "x"(a.low));
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(c.high) : "x"(scalar), "x"(a.high));
    return c;
  }
};

}  // namespace
}  // namespace lowbit
