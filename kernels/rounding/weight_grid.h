// Shared by the code that rounds weights: round_to_nearest.cpp, weighted_search.cpp and error_feedback.cpp.
#pragma once

#include <cstring>

#include "../inline.h"

namespace lowbit {

// A group with a smaller scale counts as constant, because the inverse of the scale must be finite.
constexpr float kSmallestScale = 0x1p-120f;

// For x below 2^22, x + kRoundShift - kRoundShift is x rounded to an integer, ties to even: the sum has no bits for a fraction.
constexpr float kRoundShift = 0x1.8p23f;

// Vectors of 16 bytes, which every CPU has: compilers compare wider ones lane by lane.
using WeightVector = float __attribute__((vector_size(16)));

inline WeightVector load_weights(const float* from) {
  WeightVector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// Rounds to the nearest integer from `low` to `high`, ties to even. Clamps first, because rounding needs values below 2^22.
LOWBIT_INLINE inline WeightVector round_within(const WeightVector& value, const WeightVector& low,
                                               const WeightVector& high) {
  WeightVector clamped = value > low ? value : low;
  clamped = clamped < high ? clamped : high;
  return (clamped + kRoundShift) - kRoundShift;
}

}  // namespace lowbit
