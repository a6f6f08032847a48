// Shared by attention, recurrence and elementwise kernels: functions of a class V, a vector of 16 floats. portable.h, neon.h,
// avx2.h and avx512.h have such a class for each register file.
#pragma once

#include "../ukernel.h"

namespace lowbit {
namespace {

constexpr int kLanes = 16;

// 2^x for x <= 0; 0 below -126, NaN for NaN; relative error below 2^-23. Adding 1.5 * 2^23 rounds x to an integer n in the last
// bits; with 127 added they are the exponent bits of 2^n. The polynomial is 2^r on [-1/2, 1/2], exact at 0.
template <class V>
LOWBIT_INLINE inline V exp2_of(V x) {
  constexpr float kRound = 12582912.0f + 127.0f;
  const V rounded = V::add(x, V::broadcast(kRound));
  const V r = V::sub(x, V::sub(rounded, V::broadcast(kRound)));
  V p = V::broadcast(0x1.41fbbcp-13f);
  p = V::fma(p, r, V::broadcast(0x1.5f3e54p-10f));
  p = V::fma(p, r, V::broadcast(0x1.3b2d4cp-7f));
  p = V::fma(p, r, V::broadcast(0x1.c6aee8p-5f));
  p = V::fma(p, r, V::broadcast(0x1.ebfbdcp-3f));
  p = V::fma(p, r, V::broadcast(0x1.62e430p-1f));
  p = V::fma(p, r, V::broadcast(1.0f));
  return V::zero_below(x, V::broadcast(-126.0f), V::mul(p, V::shift_left_23(rounded)));
}

// x / (1 + exp(-z)), computed with exp of numbers up to 0 only.
template <class V>
LOWBIT_INLINE inline V times_sigmoid(V x, V z) {
  const V zero = V::broadcast(0.0f), one = V::broadcast(1.0f);
  const V minus = V::sub(zero, V::max(z, V::sub(zero, z)));
  const V e = exp2_of(V::mul(minus, V::broadcast(0x1.715476p+0f)));
  // 1 for z >= 0, otherwise e: one of the two parts is 0.
  const V above = V::zero_below(z, zero, one), below = V::sub(e, V::zero_below(z, zero, e));
  return V::mul(x, V::div(V::add(above, below), V::add(one, e)));
}

// Folds the lanes in the order of the contract.
template <class V, class Op>
LOWBIT_INLINE inline float fold(V v, Op op) {
  v = op(v, V::template swap_lanes<8>(v));
  v = op(v, V::template swap_lanes<4>(v));
  v = op(v, V::template swap_lanes<2>(v));
  v = op(v, V::template swap_lanes<1>(v));
  alignas(64) float lanes[kLanes];
  V::store(lanes, v);
  return lanes[0];
}

template <class V>
LOWBIT_INLINE inline V load_floats(const void* at, DType dtype) {
  switch (dtype) {
    case DType::f32: return V::template load_as_f32<DType::f32>(at);
    case DType::bf16: return V::template load_as_f32<DType::bf16>(at);
    case DType::f16: break;
  }
  return V::template load_as_f32<DType::f16>(at);
}

template <class V>
LOWBIT_INLINE inline void store_floats(void* at, DType dtype, V v) {
  switch (dtype) {
    case DType::f32: return V::template store_from_f32<DType::f32>(at, v);
    case DType::bf16: return V::template store_from_f32<DType::bf16>(at, v);
    case DType::f16: return V::template store_from_f32<DType::f16>(at, v);
  }
}

// Sums and differences of lanes that are Half apart. Multiplying by 1 or -1 is exact.
template <class V, int Half>
LOWBIT_INLINE inline V butterfly(V x) {
  alignas(64) float signs[kLanes];
  for (int l = 0; l < kLanes; ++l) signs[l] = (l & Half) != 0 ? -1.0f : 1.0f;
  return V::fma(x, V::load(signs), V::template swap_lanes<Half>(x));
}

// Multiplies `size` values, a power of two from 16 on, by the Hadamard matrix (ukernel.h).
template <class V>
void hadamard(float* x, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    V::store(x + i, butterfly<V, 8>(butterfly<V, 4>(butterfly<V, 2>(butterfly<V, 1>(V::load(x + i))))));
  }
  for (int64_t half = kLanes; half < size; half *= 2) {
    for (int64_t first = 0; first < size; first += 2 * half) {
      for (int64_t i = first; i < first + half; i += kLanes) {
        const V a = V::load(x + i), b = V::load(x + i + half);
        V::store(x + i, V::add(a, b));
        V::store(x + i + half, V::sub(a, b));
      }
    }
  }
}

// Multiplies each block of x by a Hadamard matrix (ukernel.h).
template <class V>
void rotate(float* x, int64_t width) {
  const int64_t size = width & -width;
  for (int64_t i = 0; i < width; i += size) hadamard<V>(x + i, size);
}

// Loads up to `count` of 16 consecutive numbers; the others are 0.
template <class V>
V load_some(const void* at, DType dtype, int64_t count) {
  if (count >= kLanes) return load_floats<V>(at, dtype);
  alignas(64) float lanes[kLanes] = {};
  for (int64_t l = 0; l < count; ++l) lanes[l] = load_as_f32(at, dtype, l);
  return V::load(lanes);
}

template <class V>
void store_some(void* at, DType dtype, int64_t count, V v) {
  if (count >= kLanes) return store_floats<V>(at, dtype, v);
  alignas(64) float lanes[kLanes];
  V::store(lanes, v);
  for (int64_t l = 0; l < count; ++l) store_from_f32(at, dtype, l, lanes[l]);
}

inline const char* element(const void* base, DType dtype, int64_t index) {
  return static_cast<const char*>(base) + index * size_of(dtype);
}

}  // namespace
}  // namespace lowbit
