// quantize_avx512vnni: one activation row to int8, with a scale and a sum for each segment. Formula: ukernel.h.
//
// Takes 64 values at a time in one pass: they stay in registers between their maximum and their rounding. They are one segment
// of 64, two of 32 or four of 16. Other segments are masked: the zeros after them change neither a maximum nor a sum.

#include <immintrin.h>

#include "../bits/simd_avx512.h"
#include "../ukernel.h"
#include "row_x86.h"

namespace lowbit {
namespace {

// In every 128 bits, lanes 0 and 2 are maxima of two values of `a`, lanes 1 and 3 of two values of `b`.
LOWBIT_INLINE inline __m512i max_of_pairs(__m512i a, __m512i b) {
  return _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}

// The maxima of 64 magnitudes: lane s is segment s of `Inputs` inputs, repeated.
template <int64_t Inputs>
LOWBIT_INLINE inline __m128i maxima(const __m512i (&m)[4]) {
  __m512i most;
  if constexpr (Inputs == 16) {
    most = max_of_pairs(max_of_pairs(m[0], m[2]), max_of_pairs(m[1], m[3]));
  } else {
    const __m512i low = _mm512_max_epi32(m[0], m[1]), high = _mm512_max_epi32(m[2], m[3]);
    most = Inputs == 32 ? max_of_pairs(low, high) : _mm512_max_epi32(low, high);
  }
  most = _mm512_max_epi32(most, _mm512_shuffle_i32x4(most, most, 0x4e));
  most = _mm512_max_epi32(most, _mm512_shuffle_i32x4(most, most, 0xb1));
  __m128i lanes = _mm512_castsi512_si128(most);
  if constexpr (Inputs >= 32) lanes = _mm_max_epi32(lanes, _mm_shuffle_epi32(lanes, 0x4e));
  if constexpr (Inputs == 64) lanes = _mm_max_epi32(lanes, _mm_shuffle_epi32(lanes, 0xb1));
  return lanes;
}

// The sums of 64 int8 values: lane s is segment s.
template <int64_t Inputs>
LOWBIT_INLINE inline __m128i sums_of(__m512i codes) {
  __m512i v = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), codes);
  v = _mm512_add_epi32(v, _mm512_shuffle_epi32(v, _MM_PERM_BADC));
  v = _mm512_add_epi32(v, _mm512_shuffle_epi32(v, _MM_PERM_CDAB));  // of 16 values, in each dword of their 128 bits
  if constexpr (Inputs == 16) return _mm512_castsi512_si128(_mm512_maskz_compress_epi32(0x1111, v));
  v = _mm512_add_epi32(v, _mm512_shuffle_i32x4(v, v, 0xb1));
  if constexpr (Inputs == 32) return _mm512_castsi512_si128(_mm512_maskz_compress_epi32(0x0101, v));
  return _mm_add_epi32(_mm512_castsi512_si128(v), _mm512_extracti32x4_epi32(v, 2));
}

// Quantizes `count` values, at most 64, in segments of `Inputs`; fewer than 64 are one segment. Writes their codes, and zeros
// up to the next multiple of 16.
template <DType T, int64_t Inputs>
LOWBIT_INLINE inline void quantize64(const char* x, int64_t count, int8_t* a, float* scales, int32_t* sums) {
  __m512 values[4];
  __m512i m[4];
  for (int j = 0; j < 4; ++j) {
    const int64_t remaining = count - 16 * j;
    values[j] = remaining > 0 ? load16<T>(x, 16 * j, first_lanes(remaining)) : _mm512_setzero_ps();
    // As integers, the bits of NaN are the largest.
    m[j] = _mm512_and_si512(_mm512_castps_si512(values[j]), _mm512_set1_epi32(0x7fffffff));
  }
  const __m128 most = _mm_castsi128_ps(maxima<Inputs>(m));
  const __m128i scale = _mm_and_si128(_mm_castps_si128(_mm_mul_ps(most, _mm_set1_ps(1.0f / 127.0f))), _mm_set1_epi32(~3));
  const __mmask8 too_large = _mm_cmpgt_epi32_mask(scale, _mm_set1_epi32(0x737fffff));  // at least 2^104, or NaN
  const __mmask8 zero = _mm_cmplt_epi32_mask(scale, _mm_set1_epi32(0x00800000)) | too_large;  // below 2^-126
  __m128i t = scale;
  __m128 inverse = _mm_div_ps(_mm_set1_ps(1.0f), _mm_castsi128_ps(scale));
  if (zero != 0) [[unlikely]] {
    t = _mm_mask_mov_epi32(_mm_maskz_mov_epi32(~zero, scale), too_large, _mm_set1_epi32(0x7fc00000));
    inverse = _mm_maskz_mov_ps(~zero, inverse);
    for (int j = 0; j < 4; ++j) {
      if ((zero >> (16 * j / Inputs)) & 1) values[j] = _mm512_setzero_ps();
    }
  }
  const __m512 inverses = _mm512_broadcast_f32x4(inverse);
  __m512i v[4];
  for (int j = 0; j < 4; ++j) {
    __m512 factor;
    switch (16 * j / Inputs) {
      case 0: factor = _mm512_permute_ps(inverses, 0x00); break;
      case 1: factor = _mm512_permute_ps(inverses, 0x55); break;
      case 2: factor = _mm512_permute_ps(inverses, 0xaa); break;
      default: factor = _mm512_permute_ps(inverses, 0xff);
    }
    v[j] = _mm512_cvtps_epi32(_mm512_mul_ps(values[j], factor));
  }
  // The packing instructions work on 128 bits at a time, so dwords are then put in order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i codes = _mm512_permutexvar_epi32(
      order, _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3])));
  _mm512_mask_storeu_epi8(a, ~__mmask64{0} >> (64 - (count + 15) / 16 * 16), codes);
  store_segments<Inputs>(scales, t);
  store_segments<Inputs>(sums, sums_of<Inputs>(codes));
}

struct Quantizer {
  template <DType T, int64_t Inputs>
  LOWBIT_INLINE static void whole(const char* x, int8_t* a, float* scales, int32_t* sums) {
    quantize64<T, Inputs>(x, 64, a, scales, sums);
  }

  template <DType T>
  LOWBIT_INLINE static void segment(const char* x, int64_t inputs, int8_t* a, float* scale, int32_t* sum) {
    quantize64<T, 64>(x, inputs, a, scale, sum);
  }
};

constexpr QuantizeKernel kKernels[] = {{"quantize_avx512vnni", kAvx512Vnni, quantize<Quantizer>}};

}  // namespace

extern const Table<QuantizeKernel> kQuantizeAvx512Vnni;
const Table<QuantizeKernel> kQuantizeAvx512Vnni{kKernels, 1};

}  // namespace lowbit
