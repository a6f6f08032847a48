// Factors of attention scores, and limits within which they are finite in float32 and rounding does not lose a cap.
#pragma once

namespace lowbit {

inline constexpr double kLog2E = 1.4426950408889634;
inline constexpr double kLargestScale = 1e30, kSmallestSoftcap = 1e-6;

// The factor of the products of queries and keys, for the base of the softmax. With a cap, for the argument of tanh.
inline float score_factor(double scale, double softcap) {
  return static_cast<float>(softcap > 0.0 ? scale / softcap * (2 * kLog2E) : scale * kLog2E);
}

inline float score_cap(double softcap) { return static_cast<float>(softcap * kLog2E); }

}  // namespace lowbit
