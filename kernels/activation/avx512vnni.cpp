// quantize_avx512vnni: one activation row to int8 and its group sums, 16 values at a time. Formula: ukernel.h.
// Two passes: range and finiteness; then fma, round, saturate. Group sums by vpdpbusd against ones.

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

template <DType T>
void quantize(const QuantizeArgs& args) {
  __m512 lo = _mm512_setzero_ps(), hi = _mm512_setzero_ps();
  unsigned not_finite = 0;
  for (int64_t i = 0; i < args.k; i += 16) {
    const __m512 x = load16<T>(args.x, i, first_lanes(args.k - i));
    constexpr int kNanOrInfinity = 0x01 | 0x80 | 0x08 | 0x10;
    not_finite |= _mm512_fpclass_ps_mask(x, kNanOrInfinity);
    lo = _mm512_min_ps(x, lo);
    hi = _mm512_max_ps(x, hi);
  }
  const float lowest = _mm512_reduce_min_ps(lo), highest = _mm512_reduce_max_ps(hi);

  float scale = highest / 255.0f - lowest / 255.0f;
  const bool degenerate = not_finite != 0 || scale < 0x1p-126f;
  if (degenerate) {
    scale = not_finite != 0 ? float_from_bits(0x7fc00000u) : 0.0f;
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
  int64_t group_end = args.group_inputs;
  __m128i sums = _mm_setzero_si128();
  int32_t* group_sum = args.group_sums;
  for (int64_t i = 0; i < args.k; i += 16) {
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
