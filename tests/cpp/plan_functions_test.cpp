// The functions of real numbers that plans compute, against the C library's in long double.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "../../kernels/numeric.h"
#include "../../plan/real_functions.h"

namespace lowbit::test {
namespace {

using Real = long double;

// Every so many of the bit patterns of float32 from `first` to `last`, both signs.
void for_floats(float first, float last, uint32_t step, const std::function<void(float)>& check) {
  for (uint64_t bits = bits_of_float(first); bits <= bits_of_float(last); bits += step) {
    check(float_from_bits(static_cast<uint32_t>(bits)));
    check(-float_from_bits(static_cast<uint32_t>(bits)));
  }
}

// The float32 is at most the nearest one's neighbor; and the error before rounding is far smaller.
void expect_close(const char* name, float x, double result, Real expected) {
  const float rounded = static_cast<float>(result), nearest = static_cast<float>(expected);
  ASSERT_TRUE(rounded == nearest || rounded == std::nextafter(nearest, rounded)) << name << "(" << x << ") is " << result;
  const Real error = std::fabs(static_cast<Real>(result) - expected), size = std::fabs(expected);
  ASSERT_TRUE(error <= 0x1p-34L * size || size < 0x1p-150L || size > 0x1p128L) << name << "(" << x << ") is " << result;
}

constexpr uint32_t kStep = 20011;

TEST(PlanFunctions, WithinOneUlpEverywhere) {
  for_floats(0.0f, 3.4e38f, kStep, [](float x) {
    const Real exact = x;
    expect_close("exp", x, exp_of(x), std::exp(exact));
    expect_close("tanh", x, tanh_of(x), std::tanh(exact));
    expect_close("sigmoid", x, sigmoid_of(x), 1.0L / (1.0L + std::exp(-exact)));
    expect_close("softplus", x, softplus_of(x), x > 20.0f ? exact : std::log1p(std::exp(exact)));
    if (x > 0.0f) expect_close("log", x, log_of(x), std::log(exact));
    if (x > -1.0f) expect_close("log1p", x, log1p_of(x), std::log1p(exact));
  });
}

// Arguments beyond 3e6 are not reduced: NaN, and never a wrong number.
TEST(PlanFunctions, SinesOfEveryPosition) {
  const auto check = [](float x) {
    expect_close("sin", x, sine_of(x, 0), std::sin(static_cast<Real>(x)));
    expect_close("cos", x, sine_of(x, 1), std::cos(static_cast<Real>(x)));
  };
  for_floats(0.0f, 2.9e6f, kStep, check);
  for (int64_t n = 1; n < 1800000; n += 397) {  // next to multiples of pi / 2, where a wrong reduction shows most
    const float x = static_cast<float>(static_cast<double>(n) * 1.5707963267948966);
    check(x);
    check(std::nextafter(x, 0.0f));
  }
  for_floats(3.1e6f, 3.4e38f, kStep, [](float x) { ASSERT_TRUE(std::isnan(sine_of(x, 0)) && std::isnan(sine_of(x, 1))); });
}

TEST(PlanFunctions, OfNoNumbers) {
  const double infinity = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (double (*function)(double) : {exp_of, log_of, log1p_of, tanh_of, sigmoid_of, softplus_of}) {
    EXPECT_TRUE(std::isnan(function(nan)));
  }
  EXPECT_TRUE(std::isnan(sine_of(nan, 0)) && std::isnan(sine_of(infinity, 1)) && std::isnan(sine_of(-infinity, 0)));
  EXPECT_EQ(static_cast<float>(exp_of(infinity)), INFINITY);
  EXPECT_EQ(static_cast<float>(exp_of(-infinity)), 0.0f);
  EXPECT_EQ(log_of(infinity), infinity);
  EXPECT_EQ(log_of(0.0), -infinity);
  EXPECT_TRUE(std::isnan(log_of(-1.0)) && std::isnan(log1p_of(-1.5)));
  EXPECT_EQ(log1p_of(-1.0), -infinity);
  EXPECT_EQ(tanh_of(infinity), 1.0);
  EXPECT_EQ(tanh_of(-infinity), -1.0);
  EXPECT_EQ(sigmoid_of(infinity), 1.0);
  EXPECT_EQ(static_cast<float>(sigmoid_of(-infinity)), 0.0f);
  EXPECT_EQ(softplus_of(infinity), infinity);
  EXPECT_EQ(static_cast<float>(softplus_of(-infinity)), 0.0f);
  EXPECT_TRUE(std::signbit(tanh_of(-0.0)));
}

}  // namespace
}  // namespace lowbit::test
