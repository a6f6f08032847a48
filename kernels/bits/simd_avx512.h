// Shared by the AVX-512 kernels: the 16-bit float conversions of numeric.h, for 16 values at a time.
#pragma once

#include <immintrin.h>

#include "../inline.h"
#include "../numeric.h"

namespace lowbit {
namespace {

LOWBIT_INLINE inline __mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffffu : (1u << count) - 1u);
}

template <DType T>
LOWBIT_INLINE inline __m512 load16(const void* base, int64_t index, __mmask16 mask) {
  if constexpr (T == DType::f32) {
    return _mm512_maskz_loadu_ps(mask, static_cast<const char*>(base) + 4 * index);
  } else {
    const __m256i half = _mm256_maskz_loadu_epi16(mask, static_cast<const char*>(base) + 2 * index);
    if constexpr (T == DType::f16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
}

LOWBIT_INLINE inline void store16(void* base, DType dtype, int64_t index, __m512 value, __mmask16 mask) {
  char* at = static_cast<char*>(base) + size_of(dtype) * index;
  if (dtype == DType::f32) {
    _mm512_mask_storeu_ps(at, mask, value);
  } else if (dtype == DType::f16) {
    _mm256_mask_storeu_epi16(at, mask, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  } else {
    // Not vcvtneps2bf16: it flushes subnormal numbers.
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), bits,
                                   _mm512_set1_epi32(0x400000));
    _mm256_mask_storeu_epi16(at, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
}

}  // namespace
}  // namespace lowbit
