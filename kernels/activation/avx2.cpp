// quantize_avx2: one activation row to int8 and its group sums, 16 values at a time. Formula: ukernel.h.
// Two passes: range and NaN; then fma, round, saturate. Infinities show in the range. Group sums by vpmaddubsw and
// vpmaddwd against ones: 16 values are at most 2 * 128 in each int16 lane.

#include <immintrin.h>

#include "../bits/simd_avx2.h"
#include "../ukernel.h"

namespace lowbit {
namespace {

// Folds the lanes of a register with `op`, down to lane 0.
template <class Op>
[[gnu::always_inline]] inline float reduce(__m256 v, Op op) {
  __m128 half = op(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = op(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(op(half, _mm_movehdup_ps(half)));
}

[[gnu::always_inline]] inline int32_t sum_lanes(__m128i v) {
  v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
  v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1));
  return _mm_cvtsi128_si32(v);
}

struct Range {
  float lowest, highest;
  bool finite;
};

template <DType T>
[[gnu::always_inline]] inline Range range_of(const char* x, int64_t k) {
  Float16 lo, hi;
  for (int h = 0; h < 2; ++h) lo.half[h] = hi.half[h] = _mm256_setzero_ps();
  __m256 nan = _mm256_setzero_ps();
  for (int64_t i = 0; i < k; i += 16) {
    const Float16 v = load_first<T>(x + i * size_of(T), k - i);
    nan = _mm256_or_ps(nan, _mm256_cmp_ps(v.half[0], v.half[1], _CMP_UNORD_Q));
    for (int h = 0; h < 2; ++h) {
      lo.half[h] = _mm256_min_ps(v.half[h], lo.half[h]);
      hi.half[h] = _mm256_max_ps(v.half[h], hi.half[h]);
    }
  }
  const auto min = [](__m128 a, __m128 b) { return _mm_min_ps(a, b); };
  const auto max = [](__m128 a, __m128 b) { return _mm_max_ps(a, b); };
  const float lowest = reduce(_mm256_min_ps(lo.half[0], lo.half[1]), min);
  const float highest = reduce(_mm256_max_ps(hi.half[0], hi.half[1]), max);
  const float infinity = float_from_bits(0x7f800000u);
  return {lowest, highest, _mm256_movemask_ps(nan) == 0 && lowest > -infinity && highest < infinity};
}

[[gnu::always_inline]] inline __m128i to_int8(const Float16& x, __m256 inverse, __m256 zero) {
  const __m256i low = _mm256_cvtps_epi32(_mm256_fmadd_ps(x.half[0], inverse, zero));
  const __m256i high = _mm256_cvtps_epi32(_mm256_fmadd_ps(x.half[1], inverse, zero));
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
  return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

template <DType T>
void quantize(const QuantizeArgs& args) {
  const char* x = static_cast<const char*>(args.x);
  const Range range = range_of<T>(x, args.k);
  const float scale = range.highest / 255.0f - range.lowest / 255.0f;
  if (!range.finite || scale < 0x1p-126f) {
    *args.scale = range.finite ? 0.0f : float_from_bits(0x7fc00000u);
    *args.zero = 0.0f;
    std::memset(args.a, 0, static_cast<size_t>(args.k_padded));
    const int64_t groups = (args.k + args.group_inputs - 1) / args.group_inputs;
    std::memset(args.group_sums, 0, static_cast<size_t>(groups) * sizeof(int32_t));
    return;
  }
  const float inverse = 1.0f / scale;
  constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m128 rounded = _mm_round_ss(_mm_setzero_ps(), _mm_set_ss(-range.lowest * inverse), kToNearest);
  const float unlimited = _mm_cvtss_f32(rounded) - 128.0f;
  const float zero = unlimited < 127.0f ? unlimited : 127.0f;
  *args.scale = scale;
  *args.zero = zero;

  const __m256 inverses = _mm256_set1_ps(inverse), zeros = _mm256_set1_ps(zero);
  int64_t group_end = args.group_inputs;
  __m128i sums = _mm_setzero_si128();
  int32_t* group_sum = args.group_sums;
  for (int64_t i = 0; i < args.k; i += 16) {
    __m128i a = to_int8(load_first<T>(x + i * size_of(T), args.k - i), inverses, zeros);
    if (args.k - i < 16) {  // zeros from k on
      const __m128i lane = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      a = _mm_and_si128(a, _mm_cmpgt_epi8(_mm_set1_epi8(static_cast<char>(args.k - i)), lane));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(args.a + i), a);
    sums = _mm_add_epi32(sums, _mm_madd_epi16(_mm_maddubs_epi16(_mm_set1_epi8(1), a), _mm_set1_epi16(1)));
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

constexpr QuantizeKernel kRows[] = {{"quantize_avx2", kAvx2, run}};

}  // namespace

extern const Table<QuantizeKernel> kQuantizeAvx2;
const Table<QuantizeKernel> kQuantizeAvx2{kRows, 1};

}  // namespace lowbit
