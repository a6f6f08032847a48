// How the x86 quantizers divide a row: 64 values at a time if segments fit in them, otherwise one segment at a time. A
// quantizer provides a struct with two functions:
//   whole<T, Inputs>(x, a, scales, sums)    64 values, in segments of `Inputs`
//   segment<T>(x, inputs, a, scale, sum)    one segment of up to 64 values; may write codes up to the next multiple of 16
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "../ukernel.h"

namespace lowbit {
namespace {

// Stores the first 64 / Inputs lanes. Not by a masked store, which GCC 12 turns into a masked vextracti32x4 that faults on
// masked-out lanes.
template <int64_t Inputs>
LOWBIT_INLINE inline void store_segments(void* to, __m128i v) {
  if constexpr (Inputs == 16) _mm_storeu_si128(static_cast<__m128i*>(to), v);
  if constexpr (Inputs == 32) _mm_storel_epi64(static_cast<__m128i*>(to), v);
  if constexpr (Inputs == 64) {
    const int32_t first = _mm_cvtsi128_si32(v);
    std::memcpy(to, &first, sizeof first);
  }
}

// Quantizes all whole blocks of 64 values in segments of `Inputs`; returns the number of values.
template <class Quantizer, DType T, int64_t Inputs>
int64_t quantize_whole(const QuantizeArgs& args) {
  const char* x = static_cast<const char*>(args.x);
  int8_t* a = args.a;
  float* scales = args.scales;
  int32_t* sums = args.sums;
  constexpr int64_t kSegments = 64 / Inputs;
  const int64_t count = args.k / 64;
  for (int64_t i = 0; i < count; ++i, x += 64 * size_of(T), a += 64, scales += kSegments, sums += kSegments) {
    Quantizer::template whole<T, Inputs>(x, a, scales, sums);
  }
  return 64 * count;
}

// Computes S of each group.
inline void add_segments(const QuantizeArgs& args) {
  const float* t = args.scales;
  const int32_t* sum = args.sums;
  float* group_sum = args.group_sums;
  for (int64_t begin = 0; begin < args.k; begin += args.group_inputs) {
    const int64_t inputs = args.k - begin < args.group_inputs ? args.k - begin : args.group_inputs;
    const float* const end = t + Layout::segments_of(inputs);
    float total = *t++ * static_cast<float>(*sum++);
    while (t < end) total = std::fma(*t++, static_cast<float>(*sum++), total);
    *group_sum++ = total;
  }
}

template <class Quantizer, DType T>
void quantize_row(const QuantizeArgs& args) {
  const char* const x = static_cast<const char*>(args.x);
  const int64_t group_inputs = args.group_inputs;
  int64_t i = 0, segment = 0;
  if (group_inputs % 64 == 0) {
    i = quantize_whole<Quantizer, T, 64>(args);
    segment = i / 64;
  } else if (group_inputs == 32 || group_inputs == 16) {
    i = group_inputs == 32 ? quantize_whole<Quantizer, T, 32>(args) : quantize_whole<Quantizer, T, 16>(args);
    segment = i / group_inputs;
  }
  for (; i < args.k; ++segment) {
    const int64_t group_left = group_inputs - i % group_inputs;
    int64_t inputs = args.k - i < group_left ? args.k - i : group_left;
    if (inputs > kSegmentInputs) inputs = kSegmentInputs;
    Quantizer::template segment<T>(x + i * size_of(T), inputs, args.a + i, args.scales + segment, args.sums + segment);
    i += inputs;
  }
  std::memset(args.a + args.k, 0, static_cast<size_t>(args.k_padded - args.k));
  if (args.group_sums != nullptr) add_segments(args);
}

template <class Quantizer>
void quantize(const QuantizeArgs& args) {
  switch (args.x_dtype) {
    case DType::f32: return quantize_row<Quantizer, DType::f32>(args);
    case DType::bf16: return quantize_row<Quantizer, DType::bf16>(args);
    case DType::f16: return quantize_row<Quantizer, DType::f16>(args);
  }
}

}  // namespace
}  // namespace lowbit
