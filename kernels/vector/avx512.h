// 16 floats in one register of AVX-512.
#pragma once

#include <cstring>

#include "../bits/simd_avx512.h"
#include "../ukernel.h"

namespace lowbit {
namespace {

constexpr __mmask16 kAll = 0xffff;

struct Vector {
  __m512 v;

  static constexpr int kSums = 16;

  LOWBIT_INLINE static Vector broadcast(float value) { return {_mm512_set1_ps(value)}; }
  LOWBIT_INLINE static Vector load(const float* at) { return {_mm512_loadu_ps(at)}; }
  LOWBIT_INLINE static void store(float* at, Vector a) { _mm512_storeu_ps(at, a.v); }
  template <DType T>
  LOWBIT_INLINE static Vector load_as_f32(const void* at) {
    return {load16<T>(at, 0, kAll)};
  }
  LOWBIT_INLINE static Vector load_int8_as_f32(const void* at) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at))))};
  }
  // vpermps looks up the last four bits of each lane in a table of floats, so codes need neither a mask nor a conversion.
  LOWBIT_INLINE static Vector load_levels_as_f32(const void* at, bool upper) {
    const __m512 levels =
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kCacheLevels))));
    const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(at)));
    return {_mm512_permutexvar_ps(upper ? _mm512_srli_epi32(codes, 4) : codes, levels)};
  }
  template <DType T>
  LOWBIT_INLINE static void store_from_f32(void* at, Vector a) {
    store16(at, T, 0, a.v, kAll);
  }
  LOWBIT_INLINE static Vector add(Vector a, Vector b) { return {_mm512_add_ps(a.v, b.v)}; }
  LOWBIT_INLINE static Vector sub(Vector a, Vector b) { return {_mm512_sub_ps(a.v, b.v)}; }
  LOWBIT_INLINE static Vector mul(Vector a, Vector b) { return {_mm512_mul_ps(a.v, b.v)}; }
  LOWBIT_INLINE static Vector div(Vector a, Vector b) { return {_mm512_div_ps(a.v, b.v)}; }
  LOWBIT_INLINE static Vector max(Vector a, Vector b) { return {_mm512_max_ps(a.v, b.v)}; }
  LOWBIT_INLINE static Vector fma(Vector a, Vector b, Vector c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  LOWBIT_INLINE static Vector zero_below(Vector x, Vector bound, Vector value) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_NLT_UQ), value.v)};
  }
  LOWBIT_INLINE static Vector shift_left_23(Vector a) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), 23))};
  }
  LOWBIT_INLINE static Vector same_nan(Vector a) {
    return {_mm512_mask_mov_ps(a.v, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q),
                               _mm512_set1_ps(float_from_bits(0x7fc00000u)))};
  }

  // vpdpbusd multiplies unsigned by signed bytes: 128 is added to keys, and the effect is subtracted in advance.
  using Quads = __m512i;
  using Integers = __m512i;
  LOWBIT_INLINE static Quads load_quads(const void* at) {
    return _mm512_xor_si512(_mm512_loadu_si512(at), _mm512_set1_epi8(-128));
  }
  LOWBIT_INLINE static Integers before_products(int32_t sum) { return _mm512_set1_epi32(-128 * sum); }
  LOWBIT_INLINE static Integers add_products(Quads keys, const int8_t* codes, Integers sums) {
    int32_t quad;
    std::memcpy(&quad, codes, sizeof quad);
    return _mm512_dpbusd_epi32(sums, keys, _mm512_set1_epi32(quad));
  }
  LOWBIT_INLINE static Vector to_floats(Integers sums) { return {_mm512_cvtepi32_ps(sums)}; }

  // Lane l gets lane l ^ Half.
  template <int Half>
  LOWBIT_INLINE static Vector swap_lanes(Vector a) {
    if constexpr (Half == 1) return {_mm512_permute_ps(a.v, 0xb1)};
    else if constexpr (Half == 2) return {_mm512_permute_ps(a.v, 0x4e)};
    else if constexpr (Half == 4) return {_mm512_shuffle_f32x4(a.v, a.v, 0xb1)};
    else return {_mm512_shuffle_f32x4(a.v, a.v, 0x4e)};
  }

  struct Four {
    const float* at;
  };
  LOWBIT_INLINE static Four load_four(const float* at) { return {at}; }
  template <int Lane>
  LOWBIT_INLINE static Vector fma_lane(Vector a, Four four, Vector c) {
    // In assembly: for the intrinsic, GCC 12 accumulates in the register of the scalar, and copies the sums.
    const __m512 scalar = _mm512_set1_ps(four.at[Lane]);
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(c.v) : "v"(scalar), "v"(a.v));
    return c;
  }
};

}  // namespace
}  // namespace lowbit
