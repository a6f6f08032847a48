// Functions of real numbers from additions, products and divisions of float64 only, so that every CPU and C library gives the
// same bits. Errors are far below float32's rounding.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace lowbit {
namespace {

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kRoundToInteger = 0x1.8p52;  // adding and subtracting it rounds to an integer

inline double from_bits(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline int64_t bits_of(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// e^x = 2^n e^r, with |r| <= ln(2) / 2. Beyond +-700, float32 has reached infinity and 0.
inline double exp_of(double x) {
  const double within = x > 700.0 ? 700.0 : x < -700.0 ? -700.0 : x == x ? x : 0.0;
  const double shifted = within * 0x1.71547652b82fep+0 + kRoundToInteger, n = shifted - kRoundToInteger;
  const double r = (within - n * 0x1.62e42fefa38p-1) - n * 0x1.ef35793c7673p-45;
  double p = 1.0 / 479001600.0;
  constexpr double kFactorials[] = {39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0};
  for (const double factorial : kFactorials) p = p * r + 1.0 / factorial;
  const double result = p * from_bits((bits_of(shifted) - bits_of(kRoundToInteger) + 1023) << 52);
  return x == x ? result : kNan;
}

// ln(x) = n ln(2) + 2 atanh(s), with s = (m - 1) / (m + 1) and m from sqrt(1/2) to sqrt(2). x comes from float32, so it is
// not a subnormal float64.
inline double log_of(double x) {
  if (!(x > 0.0)) return x == 0.0 ? -std::numeric_limits<double>::infinity() : kNan;
  if (x > std::numeric_limits<double>::max()) return x;
  const int64_t bits = bits_of(x), above = bits - 0x3fe6a09e667f3bcd;  // of sqrt(1/2)
  const int64_t n = above >> 52;
  const double m = from_bits(bits - (n << 52)), s = (m - 1.0) / (m + 1.0), t = s * s;
  double p = 0.0;
  for (int i = 23; i >= 1; i -= 2) p = p * t + 1.0 / i;
  return static_cast<double>(n) * 0x1.62e42fefa39efp-1 + 2.0 * s * p;
}

inline double log1p_of(double x) {
  return x > -1e-4 && x < 1e-4 ? x - x * x * (0.5 - x * (1.0 / 3.0 - x * 0.25)) : log_of(1.0 + x);
}

inline double expm1_of(double x) { return x > -1e-5 && x < 1e-5 ? x + x * x * 0.5 : exp_of(x) - 1.0; }

inline double sigmoid_of(double x) { return 1.0 / (1.0 + exp_of(-x)); }

inline double tanh_of(double x) {
  const double magnitude = x < 0.0 ? -x : x, e = exp_of(-2.0 * magnitude), result = (1.0 - e) / (1.0 + e);
  return magnitude < 1e-5 ? x : x < 0.0 ? -result : result;
}

// ln(1 + e^x); beyond 20 torch gives x itself.
inline double softplus_of(double x) { return x > 20.0 ? x : log1p_of(exp_of(x)); }

// sin(x), or cos(x) with quarter 1: x less a multiple n of pi/2, in three parts that are exact for n below 2^21. NaN beyond.
inline double sine_of(double x, int64_t quarter) {
  if (!(x > -3e6 && x < 3e6)) return kNan;
  const double shifted = x * 0x1.45f306dc9c883p-1 + kRoundToInteger, n = shifted - kRoundToInteger;
  const double r = ((x - n * 0x1.921fb544p+0) - n * 0x1.0b4611a6p-34) - n * 0x1.3198a2e037073p-69, t = r * r;
  double sine = 0.0, cosine = 0.0;
  for (int i = 17; i >= 3; i -= 2) sine = (sine + 1.0) * (-t / (i * (i - 1)));
  for (int i = 18; i >= 2; i -= 2) cosine = (cosine + 1.0) * (-t / (i * (i - 1)));
  const int64_t turn = (bits_of(shifted) + quarter) & 3;
  const double value = (turn & 1) != 0 ? 1.0 + cosine : r + r * sine;
  return (turn & 2) != 0 ? -value : value;
}

}  // namespace
}  // namespace lowbit
