// quantize_avx2: one activation row to int8, with a scale and a sum for each segment. Formula: ukernel.h.
//
// Takes 64 values at a time in one pass: they stay in registers between their maximum and their rounding. They are one segment
// of 64, two of 32 or four of 16. Other segments are padded with zeros, which change neither a maximum nor a sum.

#include <immintrin.h>

#include "../bits/simd_avx2.h"
#include "../ukernel.h"
#include "row_x86.h"

namespace lowbit {
namespace {

LOWBIT_INLINE inline __m256i max_of_pairs(__m256i a, __m256i b) {
  return _mm256_max_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}

// Reduces maxima of 16 magnitudes each, of 64 in total, to segments of `Inputs` inputs: lane s is segment s, repeated.
template <int64_t Inputs>
LOWBIT_INLINE inline __m128i maxima(const __m256i (&m)[4]) {
  __m256i all;  // both halves of 128 bits contain all segments
  if constexpr (Inputs == 16) {
    all = max_of_pairs(max_of_pairs(m[0], m[2]), max_of_pairs(m[1], m[3]));
  } else {
    const __m256i low = _mm256_max_epi32(m[0], m[1]), high = _mm256_max_epi32(m[2], m[3]);
    all = Inputs == 32 ? max_of_pairs(low, high) : _mm256_max_epi32(low, high);
  }
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  if constexpr (Inputs >= 32) most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
  if constexpr (Inputs == 64) most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1));
  return most;
}

// The sums of 64 int8 values: lane s is segment s.
template <int64_t Inputs>
LOWBIT_INLINE inline __m128i sums_of(__m256i low, __m256i high) {
  // vpsadbw adds eight unsigned bytes.
  const auto sum8 = [](__m256i v) LOWBIT_INLINE {
    return _mm256_sad_epu8(_mm256_xor_si256(v, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
  };
  const __m256i second = sum8(high);
  const __m256i pairs = _mm256_add_epi64(sum8(low), Inputs == 64 ? second : _mm256_slli_epi64(second, 32));
  __m128i sums;
  if constexpr (Inputs == 16) {  // pairs: 0 2 0 2 | 1 3 1 3
    const __m256i whole = _mm256_add_epi32(pairs, _mm256_shuffle_epi32(pairs, 0x4e));
    sums = _mm_unpacklo_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  } else {
    sums = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
  }
  return _mm_sub_epi32(sums, _mm_set1_epi32(128 * Inputs));
}

// Quantizes 64 values in segments of `Inputs`.
template <DType T, int64_t Inputs>
LOWBIT_INLINE inline void quantize64(const void* from, int8_t* a, float* scales, int32_t* sums) {
  const char* const x = static_cast<const char*>(from);
  Float16 values[4];
  __m256i m[4];
  for (int j = 0; j < 4; ++j) {
    values[j] = load16<T>(x + 16 * j * size_of(T));
    const auto magnitude = [&](int h) LOWBIT_INLINE {
      return _mm256_and_si256(_mm256_castps_si256(values[j].half[h]), _mm256_set1_epi32(0x7fffffff));
    };
    m[j] = _mm256_max_epi32(magnitude(0), magnitude(1));  // as integers, because the bits of NaN are the largest
  }
  const __m128 most = _mm_castsi128_ps(maxima<Inputs>(m));
  const __m128i scale = _mm_and_si128(_mm_castps_si128(_mm_mul_ps(most, _mm_set1_ps(1.0f / 127.0f))), _mm_set1_epi32(~3));
  const __m128i too_small = _mm_cmpgt_epi32(_mm_set1_epi32(0x00800000), scale);  // below 2^-126
  const __m128i too_large = _mm_cmpgt_epi32(scale, _mm_set1_epi32(0x737fffff));  // at least 2^104, or NaN
  const __m128i zero = _mm_or_si128(too_small, too_large);
  __m128i t = scale;
  __m128 inverse = _mm_div_ps(_mm_set1_ps(1.0f), _mm_castsi128_ps(scale));
  const auto of_value = [](__m128 segments, int j) LOWBIT_INLINE {  // the lane of values[j]'s segment
    switch (16 * j / Inputs) {
      case 0: return _mm256_broadcastss_ps(segments);
      case 1: return _mm256_broadcastss_ps(_mm_permute_ps(segments, 0x55));
      case 2: return _mm256_broadcastss_ps(_mm_permute_ps(segments, 0xaa));
      default: return _mm256_broadcastss_ps(_mm_permute_ps(segments, 0xff));
    }
  };
  if (_mm_testz_si128(zero, zero) == 0) [[unlikely]] {
    const __m128i nan = _mm_set1_epi32(0x7fc00000);
    t = _mm_blendv_epi8(_mm_andnot_si128(zero, scale), nan, too_large);
    inverse = _mm_andnot_ps(_mm_castsi128_ps(zero), inverse);
    for (int j = 0; j < 4; ++j) {
      for (__m256& half : values[j].half) half = _mm256_andnot_ps(of_value(_mm_castsi128_ps(zero), j), half);
    }
  }
  __m256i words[4];
  for (int j = 0; j < 4; ++j) {
    const __m256 factor = of_value(inverse, j);
    words[j] = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(values[j].half[0], factor)),
                                  _mm256_cvtps_epi32(_mm256_mul_ps(values[j].half[1], factor)));
  }
  // The packing instructions work on 128 bits at a time, so dwords are then put in order.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  __m256i codes[2];
  for (int j = 0; j < 2; ++j) {
    codes[j] = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[2 * j], words[2 * j + 1]), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(a) + j, codes[j]);
  }
  store_segments<Inputs>(scales, t);
  store_segments<Inputs>(sums, sums_of<Inputs>(codes[0], codes[1]));
}

struct Quantizer {
  template <DType T, int64_t Inputs>
  LOWBIT_INLINE static void whole(const char* x, int8_t* a, float* scales, int32_t* sums) {
    quantize64<T, Inputs>(x, a, scales, sums);
  }

  template <DType T>
  LOWBIT_INLINE static void segment(const char* x, int64_t inputs, int8_t* a, float* scale, int32_t* sum) {
    alignas(32) char padded[64 * size_of(T)] = {};
    alignas(32) int8_t codes[64];
    std::memcpy(padded, x, static_cast<size_t>(inputs * size_of(T)));
    quantize64<T, 64>(padded, codes, scale, sum);
    std::memcpy(a, codes, static_cast<size_t>(inputs));
  }
};

constexpr QuantizeKernel kKernels[] = {{"quantize_avx2", kAvx2, quantize<Quantizer>}};

}  // namespace

extern const Table<QuantizeKernel> kQuantizeAvx2;
const Table<QuantizeKernel> kQuantizeAvx2{kKernels, 1};

}  // namespace lowbit
