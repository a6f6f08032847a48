// Shared by the AVX2 kernels: the 16-bit float conversions of numeric.h, for 16 values (two registers) at a time. AVX2 has
// no masks for bytes and words, so fewer than 16 go through a buffer.
#pragma once

#include <immintrin.h>

#include "../inline.h"
#include "../numeric.h"

namespace lowbit {
namespace {

struct Float16 {  // 16 floats
  __m256 half[2];
};

template <DType T>
LOWBIT_INLINE inline Float16 load16(const void* at) {
  if constexpr (T == DType::f32) {
    const float* values = static_cast<const float*>(at);
    return {{_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)}};
  } else {
    const __m128i* words = static_cast<const __m128i*>(at);
    const __m128i low = _mm_loadu_si128(words), high = _mm_loadu_si128(words + 1);
    if constexpr (T == DType::f16) return {{_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)}};
    const auto widen = [](__m128i v) LOWBIT_INLINE {
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
    };
    return {{widen(low), widen(high)}};
  }
}

// Loads the first `count` of 16 values, followed by zeros.
template <DType T>
LOWBIT_INLINE inline Float16 load_first(const void* at, int64_t count) {
  if (count >= 16) return load16<T>(at);
  alignas(32) char buffer[16 * size_of(T)] = {};
  std::memcpy(buffer, at, static_cast<size_t>(count * size_of(T)));
  return load16<T>(buffer);
}

LOWBIT_INLINE inline __m256i bf16_bits(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan)), 16);
}

LOWBIT_INLINE inline void store16(void* at, DType dtype, const Float16& value) {
  if (dtype == DType::f32) {
    _mm256_storeu_ps(static_cast<float*>(at), value.half[0]);
    _mm256_storeu_ps(static_cast<float*>(at) + 8, value.half[1]);
  } else if (dtype == DType::f16) {
    constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    __m128i* words = static_cast<__m128i*>(at);
    _mm_storeu_si128(words, _mm256_cvtps_ph(value.half[0], kToNearest));
    _mm_storeu_si128(words + 1, _mm256_cvtps_ph(value.half[1], kToNearest));
  } else {
    const __m256i words = _mm256_packus_epi32(bf16_bits(value.half[0]), bf16_bits(value.half[1]));
    _mm256_storeu_si256(static_cast<__m256i*>(at), _mm256_permute4x64_epi64(words, 0xd8));
  }
}

// Stores the first `count` values at element `index`.
LOWBIT_INLINE inline void store_first(void* base, DType dtype, int64_t index, const Float16& value, int64_t count) {
  char* at = static_cast<char*>(base) + size_of(dtype) * index;
  if (count >= 16) return store16(at, dtype, value);
  alignas(32) char buffer[64];
  store16(buffer, dtype, value);
  std::memcpy(at, buffer, static_cast<size_t>(count * size_of(dtype)));
}

}  // namespace
}  // namespace lowbit
