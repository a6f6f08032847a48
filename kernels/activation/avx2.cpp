// quantize_avx2: one activation row to int8 and its group sums, 32 values at a time. Formula: ukernel.h.
// Two passes: range and NaN; then fma, round, saturate. Infinities show in the range. Group sums by vpmaddubsw and
// vpmaddwd against ones: 16 values are at most 2 * 128 in each int16 lane. What is left of 32, and groups that end within
// them, go 16 values at a time.

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

// Minima and maxima in four chains that do not wait for one another.
template <DType T>
[[gnu::always_inline]] inline Range range_of(const char* x, int64_t k) {
  Float16 lo[2], hi[2];
  for (int j = 0; j < 2; ++j) {
    for (int h = 0; h < 2; ++h) lo[j].half[h] = hi[j].half[h] = _mm256_setzero_ps();
  }
  __m256 nan = _mm256_setzero_ps();
  const auto add = [&](const Float16& v, int j) __attribute__((always_inline)) {
    nan = _mm256_or_ps(nan, _mm256_cmp_ps(v.half[0], v.half[1], _CMP_UNORD_Q));
    for (int h = 0; h < 2; ++h) {
      lo[j].half[h] = _mm256_min_ps(v.half[h], lo[j].half[h]);
      hi[j].half[h] = _mm256_max_ps(v.half[h], hi[j].half[h]);
    }
  };
  int64_t i = 0;
  for (; i + 32 <= k; i += 32) {
    add(load16<T>(x + i * size_of(T)), 0);
    add(load16<T>(x + (i + 16) * size_of(T)), 1);
  }
  for (; i < k; i += 16) add(load_first<T>(x + i * size_of(T), k - i), 0);
  for (int h = 0; h < 2; ++h) {
    lo[0].half[h] = _mm256_min_ps(lo[0].half[h], lo[1].half[h]);
    hi[0].half[h] = _mm256_max_ps(hi[0].half[h], hi[1].half[h]);
  }
  const auto min = [](__m128 a, __m128 b) { return _mm_min_ps(a, b); };
  const auto max = [](__m128 a, __m128 b) { return _mm_max_ps(a, b); };
  const float lowest = reduce(_mm256_min_ps(lo[0].half[0], lo[0].half[1]), min);
  const float highest = reduce(_mm256_max_ps(hi[0].half[0], hi[0].half[1]), max);
  const float infinity = float_from_bits(0x7f800000u);
  return {lowest, highest, _mm256_movemask_ps(nan) == 0 && lowest > -infinity && highest < infinity};
}

[[gnu::always_inline]] inline __m128i to_int8(const Float16& x, __m256 inverse, __m256 zero) {
  const __m256i low = _mm256_cvtps_epi32(_mm256_fmadd_ps(x.half[0], inverse, zero));
  const __m256i high = _mm256_cvtps_epi32(_mm256_fmadd_ps(x.half[1], inverse, zero));
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
  return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

// 32 values; the packing instructions work on 128 bits at a time, so their dwords are put in order behind them.
template <DType T>
[[gnu::always_inline]] inline __m256i to_int8(const char* x, __m256 inverse, __m256 zero) {
  __m256i words[2];
  for (int j = 0; j < 2; ++j) {
    const Float16 v = load16<T>(x + 16 * j * size_of(T));
    words[j] = _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_fmadd_ps(v.half[0], inverse, zero)),
                                  _mm256_cvtps_epi32(_mm256_fmadd_ps(v.half[1], inverse, zero)));
  }
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]), order);
}

// All whole 32 values of a row whose groups are of 16 or multiples of 32; returns how many values. `sums` is what the
// group has that goes on behind them.
template <DType T>
[[gnu::always_inline]] inline int64_t quantize_by_32(const QuantizeArgs& args, __m256 inverse, __m256 zero,
                                                     int32_t*& group_sum, __m128i& sums) {
  const int64_t whole = args.k / 32 * 32, group_inputs = args.group_inputs;
  if (group_inputs != 16 && group_inputs % 32 != 0) return 0;
  const char* x = static_cast<const char*>(args.x);
  int8_t* const out = args.a;
  int64_t left = group_inputs;
  __m256i acc = _mm256_setzero_si256();
  for (int64_t i = 0; i < whole; i += 32, x += 32 * size_of(T)) {
    const __m256i a = to_int8<T>(x, inverse, zero);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), a);
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), a), _mm256_set1_epi16(1)));
    if ((left -= 32) > 0) continue;
    const __m128i low = _mm256_castsi256_si128(acc), high = _mm256_extracti128_si256(acc, 1);
    if (group_inputs == 16) {
      *group_sum++ = sum_lanes(low);
      *group_sum++ = sum_lanes(high);
    } else {
      *group_sum++ = sum_lanes(_mm_add_epi32(low, high));
    }
    acc = _mm256_setzero_si256();
    left = group_inputs;
  }
  sums = _mm_add_epi32(_mm256_castsi256_si128(acc), _mm256_extracti128_si256(acc, 1));
  return whole;
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
  __m128i sums = _mm_setzero_si128();
  int32_t* group_sum = args.group_sums;
  int64_t i = quantize_by_32<T>(args, inverses, zeros, group_sum, sums);
  int64_t group_end = (i / args.group_inputs + 1) * args.group_inputs;
  for (; i < args.k; i += 16) {
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
