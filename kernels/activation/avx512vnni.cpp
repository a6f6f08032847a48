// quantize_avx512vnni: one activation row to int8 and its group sums, 64 values at a time. Formula: ukernel.h.
// Two passes: range and finiteness; then fma, round, saturate. Group sums by vpdpbusd against ones: each 128 bits of it
// are about 16 values. What is left of 64, and groups that do not fit them, go 16 values at a time.

#include <immintrin.h>

#include "../bits/simd_avx512.h"
#include "../ukernel.h"

namespace lowbit {
namespace {

[[gnu::always_inline]] inline int32_t sum_lanes(__m128i v) {
  v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
  v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1));
  return _mm_cvtsi128_si32(v);
}

struct Range {
  float lowest, highest;
  bool finite;
};

// Four minima and four maxima that do not wait for one another. NaN is looked for; infinities show in the range.
template <DType T>
[[gnu::always_inline]] inline Range range_of(const void* x, int64_t k) {
  __m512 lo[4], hi[4];
  for (int j = 0; j < 4; ++j) lo[j] = hi[j] = _mm512_setzero_ps();
  unsigned nan = 0;
  int64_t i = 0;
  for (; i + 64 <= k; i += 64) {
    __m512 v[4];
    for (int j = 0; j < 4; ++j) {
      v[j] = load16<T>(x, i + 16 * j, 0xffff);
      lo[j] = _mm512_min_ps(v[j], lo[j]);
      hi[j] = _mm512_max_ps(v[j], hi[j]);
    }
    nan |= _mm512_cmp_ps_mask(v[0], v[1], _CMP_UNORD_Q) | _mm512_cmp_ps_mask(v[2], v[3], _CMP_UNORD_Q);
  }
  for (; i < k; i += 16) {
    const __m512 v = load16<T>(x, i, first_lanes(k - i));
    lo[0] = _mm512_min_ps(v, lo[0]);
    hi[0] = _mm512_max_ps(v, hi[0]);
    nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  }
  const float lowest = _mm512_reduce_min_ps(_mm512_min_ps(_mm512_min_ps(lo[0], lo[1]), _mm512_min_ps(lo[2], lo[3])));
  const float highest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(hi[0], hi[1]), _mm512_max_ps(hi[2], hi[3])));
  const float infinity = float_from_bits(0x7f800000u);
  return {lowest, highest, nan == 0 && lowest > -infinity && highest < infinity};
}

// 64 values; the packing instructions work on 128 bits at a time, so their dwords are put in order behind them.
template <DType T>
[[gnu::always_inline]] inline __m512i to_int8(const void* x, int64_t at, __m512 inverse, __m512 zero) {
  __m512i v[4];
  for (int j = 0; j < 4; ++j) {
    v[j] = _mm512_cvtps_epi32(_mm512_fmadd_ps(load16<T>(x, at + 16 * j, 0xffff), inverse, zero));
  }
  const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(v[0], v[1]), _mm512_packs_epi32(v[2], v[3]));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, bytes);
}

// In each dword the sum of its 128 bits.
[[gnu::always_inline]] inline __m512i sums_of_16(__m512i v) {
  v = _mm512_add_epi32(v, _mm512_shuffle_epi32(v, _MM_PERM_BADC));
  return _mm512_add_epi32(v, _mm512_shuffle_epi32(v, _MM_PERM_CDAB));
}

// All whole 64 values of a row whose groups are of 16 or 32, or multiples of 64; returns how many values. `sums` is what
// the group has that goes on behind them.
template <DType T>
[[gnu::always_inline]] inline int64_t quantize_by_64(const QuantizeArgs& args, __m512 inverse, __m512 zero,
                                                     int32_t*& group_sum, __m128i& sums) {
  const int64_t whole = args.k / 64 * 64, group_inputs = args.group_inputs;
  const __m512i ones = _mm512_set1_epi8(1);
  const void* const x = args.x;
  int8_t* const out = args.a;
  if (group_inputs == 16 || group_inputs == 32) {
    for (int64_t i = 0; i < whole; i += 64) {
      const __m512i a = to_int8<T>(x, i, inverse, zero);
      _mm512_storeu_si512(out + i, a);
      __m512i v = sums_of_16(_mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, a));
      if (group_inputs == 16) {
        const __m512i found = _mm512_maskz_compress_epi32(0x1111, v);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(group_sum), _mm512_castsi512_si128(found));
        group_sum += 4;
      } else {
        v = _mm512_add_epi32(v, _mm512_shuffle_i32x4(v, v, 0xb1));
        const __m512i found = _mm512_maskz_compress_epi32(0x0101, v);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(group_sum), _mm512_castsi512_si128(found));
        group_sum += 2;
      }
    }
    return whole;
  }
  if (group_inputs % 64 != 0) return 0;
  int64_t i = 0;
  __m512i acc = _mm512_setzero_si512();
  for (int64_t left = group_inputs; i < whole; i += 64) {
    const __m512i a = to_int8<T>(x, i, inverse, zero);
    _mm512_storeu_si512(out + i, a);
    acc = _mm512_dpbusd_epi32(acc, ones, a);
    if ((left -= 64) == 0) {
      *group_sum++ = _mm512_reduce_add_epi32(acc);
      acc = _mm512_setzero_si512();
      left = group_inputs;
    }
  }
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(acc), _mm512_extracti64x4_epi64(acc, 1));
  sums = _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  return whole;
}

template <DType T>
void quantize(const QuantizeArgs& args) {
  const Range range = range_of<T>(args.x, args.k);
  const float lowest = range.lowest, highest = range.highest;
  float scale = highest / 255.0f - lowest / 255.0f;
  if (!range.finite || scale < 0x1p-126f) {
    scale = range.finite ? 0.0f : float_from_bits(0x7fc00000u);
    *args.scale = scale;
    *args.zero = 0.0f;
    std::memset(args.a, 0, static_cast<size_t>(args.k_padded));
    const int64_t groups = (args.k + args.group_inputs - 1) / args.group_inputs;
    std::memset(args.group_sums, 0, static_cast<size_t>(groups) * sizeof(int32_t));
    return;
  }
  const float inverse = 1.0f / scale;
  const __m128 rounded = _mm_roundscale_ss(_mm_setzero_ps(), _mm_set_ss(-lowest * inverse), 0);
  const float unlimited = _mm_cvtss_f32(rounded) - 128.0f;
  const float zero = unlimited < 127.0f ? unlimited : 127.0f;
  *args.scale = scale;
  *args.zero = zero;

  const __m512 inverses = _mm512_set1_ps(inverse), zeros = _mm512_set1_ps(zero);
  __m128i sums = _mm_setzero_si128();
  int32_t* group_sum = args.group_sums;
  int64_t i = quantize_by_64<T>(args, inverses, zeros, group_sum, sums);
  int64_t group_end = (i / args.group_inputs + 1) * args.group_inputs;
  for (; i < args.k; i += 16) {
    const __mmask16 mask = first_lanes(args.k - i);
    const __m512 x = load16<T>(args.x, i, mask);
    const __m512i rounded16 = _mm512_cvtps_epi32(_mm512_fmadd_ps(x, inverses, zeros));
    const __m128i a = _mm_maskz_mov_epi8(mask, _mm512_cvtsepi32_epi8(rounded16));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(args.a + i), a);
    sums = _mm_dpbusd_epi32(sums, _mm_set1_epi8(1), a);
    if (i + 16 == group_end) {
      *group_sum++ = sum_lanes(sums);
      sums = _mm_setzero_si128();
      group_end += args.group_inputs;
    }
  }
  if (group_end - args.group_inputs < args.k) *group_sum = sum_lanes(sums);
  const int64_t written = (args.k + 15) / 16 * 16;
  std::memset(args.a + written, 0, static_cast<size_t>(args.k_padded - written));
}

void run(const QuantizeArgs& args) {
  switch (args.x_dtype) {
    case DType::f32: return quantize<DType::f32>(args);
    case DType::bf16: return quantize<DType::bf16>(args);
    case DType::f16: return quantize<DType::f16>(args);
  }
}

constexpr QuantizeKernel kRows[] = {{"quantize_avx512vnni", kAvx512Vnni, run}};

}  // namespace

extern const Table<QuantizeKernel> kQuantizeAvx512Vnni;
const Table<QuantizeKernel> kQuantizeAvx512Vnni{kRows, 1};

}  // namespace lowbit
