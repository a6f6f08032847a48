// Copies and elementwise computations of plan/numbers.h against loops over single elements, on any views.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>

#include "../../plan/numbers.h"
#include "support/strided.h"

namespace lowbit::test {
namespace {

const std::vector<std::vector<int64_t>> kSizes = {
    {}, {0}, {1}, {7}, {65}, {3, 5}, {2, 0, 4}, {5, 1, 3}, {2, 3, 130}, {4, 2, 3, 5}, {2, 1500}};

TEST(PlanCopy, EveryFormAndType) {
  Random random(1);
  for (const ElementType from : {kF32, kBf16, kF16, kI32, kI64, kBool}) {
    for (const ElementType to : {kF32, kBf16, kF16, kI32, kI64, kBool}) {
      for (const auto& sizes : kSizes) {
        const Form form = kForms[random.below(4)], out_form = kForms[random.below(4)];
        const Strided x(from, sizes, form), out(to, sizes, out_form);
        for (int64_t i = 0; i < x.view.shape.numel(); ++i) {
          const double integer = static_cast<double>(random.between(int64_t{-40}, int64_t{40}));
          set(x.view, i, is_float(from) ? random.between(-40.0f, 40.0f) : integer);
        }
        const Status status = copy(x.view, out.view, threads(2));
        ASSERT_TRUE(status.ok()) << status.message();
        for (int64_t i = 0; i < out.view.shape.numel(); ++i) {
          const double given = value(x.view, i);
          const double expected = is_float(to) ? rounded(given, to) : to == kBool ? given != 0.0 : std::trunc(given);
          ASSERT_EQ(value(out.view, i), expected) << name_of(from) << " to " << name_of(to);
        }
        ASSERT_TRUE(x.memory->intact() && out.memory->intact());
      }
    }
  }
}

TEST(PlanCopy, RepeatsValuesOfStrideZero) {
  Random random(1);
  const Strided out(kF32, {3, 70, 4}, Form::transposed);
  for (int which = 1; which < 8; ++which) {
    Strided x(kF32, {3, 70, 4}, Form::contiguous, {(which & 1) != 0, (which & 2) != 0, (which & 4) != 0});
    x.fill(random);
    ASSERT_TRUE(copy(x.view, out.view, {}).ok());
    EXPECT_EQ(elements(out.view), elements(x.view));
  }
}

// Numbers that a smaller type cannot hold. A plain conversion would be undefined.
TEST(PlanCopy, FloatsBeyondIntegers) {
  const Strided x(kF32, {5}, Form::contiguous), wide(kI64, {5}, Form::contiguous), truth(kBool, {5}, Form::contiguous);
  const float given[] = {kNaN, kInfinity, -kInfinity, 1e30f, 0.25f};
  for (int64_t i = 0; i < 5; ++i) set(x.view, i, given[i]);
  ASSERT_TRUE(copy(x.view, wide.view, {}).ok());
  ASSERT_TRUE(copy(x.view, truth.view, {}).ok());
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(*reinterpret_cast<const int64_t*>(element(wide.view, i)), INT64_MIN);
  EXPECT_EQ(value(wide.view, 4), 0.0);
  for (int64_t i = 0; i < 5; ++i) EXPECT_EQ(value(truth.view, i), 1.0);
}

struct FloatOperator {
  Elementwise op;
  int operands;
  std::function<double(double, double)> value;  // from float32 numbers
};

// The results of float32 for the first ones; the others are compared with float64.
const FloatOperator kFloatOperators[] = {
    {Elementwise::convert, 1, [](double x, double) { return x; }},
    {Elementwise::add, 2, [](double x, double y) { return x + y; }},
    {Elementwise::sub, 2, [](double x, double y) { return x - y; }},
    {Elementwise::mul, 2, [](double x, double y) { return x * y; }},
    {Elementwise::div, 2, [](double x, double y) { return x / y; }},
    {Elementwise::minimum, 2, [](double x, double y) { return x != x || y != y ? kNaN : std::min(x, y); }},
    {Elementwise::maximum, 2, [](double x, double y) { return x != x || y != y ? kNaN : std::max(x, y); }},
    {Elementwise::neg, 1, [](double x, double) { return -x; }},
    {Elementwise::abs, 1, [](double x, double) { return std::fabs(x); }},
    {Elementwise::reciprocal, 1, [](double x, double) { return 1.0 / x; }},
    {Elementwise::sqrt, 1, [](double x, double) { return std::sqrt(x); }},
    {Elementwise::rsqrt, 1, [](double x, double) { return 1.0f / static_cast<float>(std::sqrt(x)); }},
    {Elementwise::floor, 1, [](double x, double) { return std::floor(x); }},
    {Elementwise::exp, 1, [](double x, double) { return std::exp(x); }},
    {Elementwise::log, 1, [](double x, double) { return std::log(x); }},
    {Elementwise::log1p, 1, [](double x, double) { return std::log1p(x); }},
    {Elementwise::tanh, 1, [](double x, double) { return std::tanh(x); }},
    {Elementwise::sigmoid, 1, [](double x, double) { return 1.0 / (1.0 + std::exp(-x)); }},
    {Elementwise::softplus, 1, [](double x, double) { return x > 20.0 ? x : std::log1p(std::exp(x)); }},
    {Elementwise::sin, 1, [](double x, double) { return std::sin(x); }},
    {Elementwise::cos, 1, [](double x, double) { return std::cos(x); }},
};

TEST(PlanCompute, FloatsOfEveryFormAndType) {
  Random random(2);
  for (const FloatOperator& each : kFloatOperators) {
    for (const ElementType type : kFloats) {
      for (const auto& sizes : kSizes) {
        Strided x(type, sizes, kForms[random.below(4)], {random.below(3) == 0}), y(kF32, sizes, kForms[random.below(4)]);
        if (sizes.empty() || sizes[0] == 0) x = Strided(type, sizes, Form::contiguous);
        const Strided out(type, sizes, kForms[random.below(4)]);
        x.fill(random);
        y.fill(random);
        const TensorView inputs[] = {x.view, y.view};
        const Instruction code{static_cast<int64_t>(each.op), 0, each.operands - 1, 0, static_cast<int64_t>(type)};
        const Status status = compute(inputs, 2, &code, 1, nullptr, 0, out.view, threads(3));
        ASSERT_TRUE(status.ok()) << status.message();
        for (int64_t i = 0; i < out.view.shape.numel(); ++i) {
          const double a = value(x.view, i), b = value(y.view, i);
          ASSERT_TRUE(same(value(out.view, i), rounded(each.value(a, b), type)))
              << "operator " << static_cast<int>(each.op) << " of " << a << " and " << b << " is " << value(out.view, i);
        }
      }
    }
  }
}

TEST(PlanCompute, IntegersAndComparisons) {
  struct IntegerOperator {
    Elementwise op;
    std::function<int64_t(int64_t, int64_t)> value;
  };
  const IntegerOperator operators[] = {
      {Elementwise::add, [](int64_t x, int64_t y) { return x + y; }},
      {Elementwise::sub, [](int64_t x, int64_t y) { return x - y; }},
      {Elementwise::mul, [](int64_t x, int64_t y) { return x * y; }},
      {Elementwise::minimum, [](int64_t x, int64_t y) { return std::min(x, y); }},
      {Elementwise::maximum, [](int64_t x, int64_t y) { return std::max(x, y); }},
      {Elementwise::neg, [](int64_t x, int64_t) { return -x; }},
      {Elementwise::abs, [](int64_t x, int64_t) { return std::abs(x); }},
      {Elementwise::logical_and, [](int64_t x, int64_t y) { return x & y; }},
      {Elementwise::logical_or, [](int64_t x, int64_t y) { return x | y; }},
  };
  const IntegerOperator comparisons[] = {
      {Elementwise::equal, [](int64_t x, int64_t y) { return x == y; }},
      {Elementwise::not_equal, [](int64_t x, int64_t y) { return x != y; }},
      {Elementwise::less, [](int64_t x, int64_t y) { return x < y; }},
      {Elementwise::less_equal, [](int64_t x, int64_t y) { return x <= y; }},
      {Elementwise::greater, [](int64_t x, int64_t y) { return x > y; }},
      {Elementwise::greater_equal, [](int64_t x, int64_t y) { return x >= y; }},
      // The results are bool, so these operators are logical.
      {Elementwise::logical_and, [](int64_t x, int64_t y) { return x != 0 && y != 0; }},
      {Elementwise::logical_or, [](int64_t x, int64_t y) { return x != 0 || y != 0; }},
      {Elementwise::logical_not, [](int64_t x, int64_t) { return x == 0; }},
      {Elementwise::add, [](int64_t x, int64_t y) { return x + y != 0; }},
      {Elementwise::convert, [](int64_t x, int64_t) { return x != 0; }},
  };
  Random random(3);
  for (const ElementType type : {kI64, kI32, kBool}) {
    Strided x(type, {4, 33}, Form::transposed), y(kI64, {4, 33}, Form::with_gaps);
    x.fill(random);
    y.fill(random);
    const TensorView inputs[] = {x.view, y.view};
    const auto check = [&](const IntegerOperator& each, ElementType to) {
      const Strided out(to, {4, 33}, Form::with_gaps);
      const Instruction code{static_cast<int64_t>(each.op), 0, 1, 0, static_cast<int64_t>(to)};
      const Status status = compute(inputs, 2, &code, 1, nullptr, 0, out.view, threads(2));
      ASSERT_TRUE(status.ok()) << status.message();
      for (int64_t i = 0; i < 132; ++i) {
        const int64_t a = static_cast<int64_t>(value(x.view, i)), b = static_cast<int64_t>(value(y.view, i));
        ASSERT_EQ(value(out.view, i), static_cast<double>(each.value(a, b)))
            << static_cast<int>(each.op) << " of " << a << ", " << b;
      }
    };
    for (const auto& each : operators) check(each, kI64);
    for (const auto& each : operators) check(each, kI32);
    for (const auto& each : comparisons) check(each, kBool);
  }
  for (const auto& each : comparisons) {  // of floats, where only comparisons have a result of bool
    if (each.op > Elementwise::greater_equal || each.op < Elementwise::equal) continue;
    Strided x(kF32, {50}, Form::contiguous), y(kF16, {50}, Form::contiguous);
    const Strided out(kBool, {50}, Form::contiguous);
    for (int64_t i = 0; i < 50; ++i) {
      set(x.view, i, i % 7 == 0 ? kNaN : static_cast<double>(i % 5));
      set(y.view, i, i % 11 == 0 ? kNaN : static_cast<double>(i % 3));
    }
    const TensorView inputs[] = {x.view, y.view};
    const Instruction code{static_cast<int64_t>(each.op), 0, 1, 0, static_cast<int64_t>(kBool)};
    ASSERT_TRUE(compute(inputs, 2, &code, 1, nullptr, 0, out.view, {}).ok());
    for (int64_t i = 0; i < 50; ++i) {
      const bool numbers = i % 7 != 0 && i % 11 != 0;
      EXPECT_EQ(value(out.view, i), numbers ? each.value(i % 5, i % 3) : each.op == Elementwise::not_equal) << i;
    }
  }
}

// Sums that overflow wrap around, as in torch.
TEST(PlanCompute, IntegersWrap) {
  Strided x(kI64, {2}, Form::contiguous), narrow(kI32, {2}, Form::contiguous);
  *reinterpret_cast<int64_t*>(x.memory->data()) = INT64_MAX;
  *reinterpret_cast<int64_t*>(x.memory->data() + 8) = INT64_MIN;
  const Instruction twice{static_cast<int64_t>(Elementwise::add), 0, 0, 0, static_cast<int64_t>(kI64)};
  const Strided out(kI64, {2}, Form::contiguous);
  ASSERT_TRUE(compute(&x.view, 1, &twice, 1, nullptr, 0, out.view, {}).ok());
  EXPECT_EQ(value(out.view, 0), -2.0);
  EXPECT_EQ(value(out.view, 1), 0.0);
  ASSERT_TRUE(copy(x.view, narrow.view, {}).ok());
  EXPECT_EQ(value(narrow.view, 0), -1.0);
  EXPECT_EQ(value(narrow.view, 1), 0.0);
}

// select(x < 0.5, -x, 7) + y as one computation, which may replace its input.
TEST(PlanCompute, SeveralInstructionsInPlace) {
  Random random(4);
  Strided x(kF32, {3, 100}, Form::with_gaps), y(kBf16, {3, 100}, Form::transposed, {true, false});
  x.fill(random);
  y.fill(random);
  std::vector<double> expected;
  for (int64_t i = 0; i < 300; ++i) {
    const float a = static_cast<float>(value(x.view, i));
    expected.push_back(static_cast<float>((a < 0.5f ? -a : 7.0f) + static_cast<float>(value(y.view, i))));
  }
  const auto op = [](Elementwise each) { return static_cast<int64_t>(each); };
  const int64_t f32 = static_cast<int64_t>(kF32), boolean = static_cast<int64_t>(kBool);
  const Instruction code[] = {{op(Elementwise::less), 0, -1, 0, boolean}, {op(Elementwise::neg), 0, 0, 0, f32},
                              {op(Elementwise::select), 2, 3, -2, f32}, {op(Elementwise::add), 4, 1, 0, f32}};
  const double constants[] = {0.5, 7.0};
  const TensorView inputs[] = {x.view, y.view};
  ASSERT_TRUE(compute(inputs, 2, code, 4, constants, 2, x.view, threads(2)).ok());
  for (int64_t i = 0; i < 300; ++i) ASSERT_TRUE(same(value(x.view, i), expected[static_cast<size_t>(i)])) << i;
  EXPECT_TRUE(x.memory->intact());
}

TEST(PlanCompute, RefusesWhatItCannotRun) {
  const Strided x(kF32, {4, 6}, Form::contiguous), n(kI64, {4, 6}, Form::contiguous), out(kF32, {4, 6}, Form::contiguous);
  const Strided other(kF32, {4, 5}, Form::contiguous), bytes(kU8, {4, 6}, Form::contiguous);
  const auto run = [&](std::vector<TensorView> inputs, std::vector<Instruction> code, const TensorView& to,
                       const std::vector<double>& constants = {}) {
    return compute(inputs.data(), static_cast<int64_t>(inputs.size()), code.data(), static_cast<int64_t>(code.size()),
                   constants.data(), static_cast<int64_t>(constants.size()), to, {});
  };
  const auto code = [](Elementwise op, int64_t a, int64_t b, ElementType type) {
    return Instruction{static_cast<int64_t>(op), a, b, 0, static_cast<int64_t>(type)};
  };
  EXPECT_TRUE(refused(run({x.view}, {}, out.view), "0 instructions"));
  EXPECT_TRUE(refused(run(std::vector<TensorView>(13, x.view), {code(Elementwise::neg, 0, 0, kF32)}, out.view), "13 inputs"));
  EXPECT_TRUE(refused(run({x.view}, std::vector<Instruction>(40, code(Elementwise::neg, 0, 0, kF32)), out.view), "registers"));
  EXPECT_TRUE(refused(run({x.view}, {code(Elementwise::add, 0, 1, kF32)}, out.view), "reads register 1"));
  EXPECT_TRUE(refused(run({x.view}, {code(Elementwise::add, 0, -1, kF32)}, out.view), "reads register -1"));
  EXPECT_TRUE(refused(run({x.view}, {code(Elementwise::add, 0, -3, kF32)}, out.view, {1.0, 2.0}), "reads register -3"));
  EXPECT_TRUE(refused(run({x.view}, {code(static_cast<Elementwise>(kElementwise), 0, 0, kF32)}, out.view),
                      ("operator " + std::to_string(kElementwise)).c_str()));
  EXPECT_TRUE(refused(run({x.view}, {code(static_cast<Elementwise>(255), 0, 0, kF32)}, out.view), "operator 255"));
  EXPECT_TRUE(refused(run({x.view}, {code(Elementwise::neg, 0, 0, kU8)}, out.view), "type 3"));
  EXPECT_TRUE(refused(run({x.view, n.view}, {code(Elementwise::add, 0, 1, kF32)}, out.view), "mixes floats and integers"));
  EXPECT_TRUE(refused(run({n.view}, {code(Elementwise::exp, 0, 0, kF32)}, out.view), "no result of float32"));
  EXPECT_TRUE(refused(run({n.view}, {code(Elementwise::div, 0, 0, kI64)}, n.view), "no result of int64"));
  EXPECT_TRUE(refused(run({x.view}, {code(Elementwise::less, 0, 0, kF32)}, out.view), "no result of float32"));
  EXPECT_TRUE(refused(run({x.view}, {{static_cast<int64_t>(Elementwise::select), 0, 0, 0, 0}}, out.view), "selects by floats"));
  EXPECT_TRUE(refused(run({x.view}, {code(Elementwise::neg, 0, 0, kBf16)}, out.view), "gives bfloat16; expected float32"));
  EXPECT_TRUE(refused(run({other.view}, {code(Elementwise::neg, 0, 0, kF32)}, out.view), "[4, 5]; expected [4, 6]"));
  EXPECT_TRUE(refused(run({bytes.view}, {code(Elementwise::neg, 0, 0, kF32)}, out.view), "uint8"));
  TensorView shifted = x.view;  // one column to the right
  shifted.shape.size[1] = 5;
  TensorView target = shifted;
  target.data = static_cast<float*>(target.data) + 1;
  EXPECT_TRUE(refused(run({shifted}, {code(Elementwise::neg, 0, 0, kF32)}, target), "share memory"));
  EXPECT_TRUE(refused(copy(shifted, target, {}), "share memory"));
  TensorView nowhere = x.view;
  nowhere.data = nullptr;
  EXPECT_TRUE(refused(copy(nowhere, out.view, {}), "no memory"));
}

}  // namespace
}  // namespace lowbit::test
