// The operators of plan/numbers.h against loops over single elements, on any views.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "../../plan/numbers.h"
#include "support/tensors.h"

namespace lowbit::test {
namespace {

constexpr auto kF32 = ElementType::f32, kBf16 = ElementType::bf16, kF16 = ElementType::f16, kI32 = ElementType::i32,
               kI64 = ElementType::i64, kBool = ElementType::boolean, kU8 = ElementType::u8;
constexpr ElementType kFloats[] = {kF32, kBf16, kF16};
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();

bool is_float(ElementType type) { return is_activation_type(type); }

double value(const TensorView& view, int64_t flat) {
  const uint8_t* const at = element(view, flat);
  if (is_float(view.type)) return load_as_f32(at, dtype_of(view.type), 0);
  if (view.type == kI64) return static_cast<double>(*reinterpret_cast<const int64_t*>(at));
  return view.type == kI32 ? *reinterpret_cast<const int32_t*>(at) : *at;
}

void set(const TensorView& view, int64_t flat, double value) {
  uint8_t* const at = const_cast<uint8_t*>(element(view, flat));
  if (is_float(view.type)) store_from_f32(at, dtype_of(view.type), 0, static_cast<float>(value));
  else if (view.type == kI64) *reinterpret_cast<int64_t*>(at) = static_cast<int64_t>(value);
  else if (view.type == kI32) *reinterpret_cast<int32_t*>(at) = static_cast<int32_t>(value);
  else *at = value != 0.0;
}

float rounded(double value, ElementType type) {
  uint8_t bytes[4];
  store_from_f32(bytes, dtype_of(type), 0, static_cast<float>(value));
  return load_as_f32(bytes, dtype_of(type), 0);
}

// Equal, or both NaN.
bool same(double a, double b) { return a == b || (a != a && b != b); }

enum class Form { contiguous, transposed, with_gaps, backwards };
constexpr Form kForms[] = {Form::contiguous, Form::transposed, Form::with_gaps, Form::backwards};

// A view of these sizes, in guarded memory that ends with it.
struct Strided {
  std::unique_ptr<Guarded> memory;
  TensorView view;

  Strided(ElementType type, const std::vector<int64_t>& sizes, Form form, std::vector<bool> repeats = {}) {
    repeats.resize(sizes.size());
    std::vector<int64_t> strides(sizes.size());
    const int64_t gap = form == Form::with_gaps ? 3 : 1;
    int64_t stride = gap, first = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const size_t d = form == Form::transposed ? i : sizes.size() - 1 - i;
      if (repeats[d]) continue;
      strides[d] = stride;
      stride *= std::max<int64_t>(sizes[d], 1) + (gap > 1 ? 1 : 0);
    }
    int64_t last = 0;
    for (size_t d = 0; d < sizes.size(); ++d) last += std::max<int64_t>(sizes[d] - 1, 0) * strides[d];
    if (form == Form::backwards) {
      first = last;
      for (int64_t& each : strides) each = -each;
    }
    int64_t count = 1;
    for (const int64_t size : sizes) count *= size;
    const int64_t bytes = element_bytes(type);
    memory = std::make_unique<Guarded>(count == 0 ? 0 : (last + 1) * bytes);
    std::memset(memory->data(), 0x3c, static_cast<size_t>(memory->size()));
    view = view_of(memory->data() + (count == 0 ? 0 : first * bytes), type, sizes, strides);
  }

  Strided& fill(Random& random) {
    for (int64_t i = 0; i < view.shape.numel(); ++i) {
      const double odd[] = {0.0, -0.0, kInfinity, -kInfinity, kNaN, 1e-30, -3e4};
      const bool special = is_float(view.type) && random.below(8) == 0;
      const double usual = is_float(view.type) ? static_cast<double>(random.normal())
                                               : static_cast<double>(random.between(int64_t{-3}, int64_t{3}));
      set(view, i, special ? odd[random.below(7)] : usual);
    }
    return *this;
  }
};

// The bytes of a result's elements, in order.
std::vector<uint8_t> elements(const TensorView& view) {
  std::vector<uint8_t> result;
  for (int64_t i = 0; i < view.shape.numel(); ++i) {
    result.insert(result.end(), element(view, i), element(view, i) + element_bytes(view.type));
  }
  return result;
}

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

// Sixteen running sums, added in halves: the same on every CPU.
float lanes(int64_t count, const std::function<float(int64_t)>& term) {
  float sums[16] = {};
  for (int64_t i = 0; i < count; ++i) sums[i % 16] += term(i);
  for (int half = 8; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) sums[l] += sums[l + half];
  }
  return sums[0];
}

TEST(PlanFloatLinear, AsSixteenRunningSums) {
  Random random(5);
  for (const ElementType type : kFloats) {
    for (const int64_t k : {0, 1, 15, 16, 40, 300}) {
      for (const int64_t n : {0, 1, 33}) {
        for (const int64_t m : {0, 1, 5}) {
          Strided x(type, {2, m, k}, kForms[random.below(4)]);
          Strided weight(random.below(2) != 0 ? kF32 : type, {n, k}, kForms[random.below(4)]);
          Strided bias(kF32, {n}, kForms[random.below(4)]);
          for (Strided* each : {&x, &weight, &bias}) {
            for (int64_t i = 0; i < each->view.shape.numel(); ++i) set(each->view, i, random.normal());
          }
          const Strided out(type, {2, m, n}, kForms[random.below(4)]);
          const bool with_bias = random.below(2) != 0;
          const Status status = float_linear(x.view, weight.view, with_bias ? &bias.view : nullptr, out.view, threads(3));
          ASSERT_TRUE(status.ok()) << status.message();
          for (int64_t i = 0; i < out.view.shape.numel(); ++i) {
            float sums[16] = {};
            for (int64_t j = 0; j < k; ++j) {
              sums[j % 16] = std::fma(static_cast<float>(value(x.view, i / n * k + j)),
                                      static_cast<float>(value(weight.view, i % n * k + j)), sums[j % 16]);
            }
            float expected = lanes(16, [&](int64_t j) { return sums[j]; });
            if (with_bias) expected += static_cast<float>(value(bias.view, i % n));
            ASSERT_EQ(value(out.view, i), rounded(expected, type)) << "k " << k << ", n " << n;
          }
          ASSERT_TRUE(out.memory->intact());
        }
      }
    }
  }
}

TEST(PlanSum, OfTheLastDimension) {
  Random random(6);
  for (const ElementType type : kFloats) {
    for (const int64_t n : {0, 1, 16, 37, 500}) {
      Strided x(type, {3, 4, n}, kForms[random.below(4)]);
      x.fill(random);
      const Strided out(kF32, {3, 4}, kForms[random.below(4)]);
      ASSERT_TRUE(sum(x.view, out.view, threads(2)).ok());
      for (int64_t i = 0; i < 12; ++i) {
        const float expected = lanes(n, [&](int64_t j) { return static_cast<float>(value(x.view, i * n + j)); });
        ASSERT_TRUE(same(value(out.view, i), expected)) << n;
      }
    }
  }
  const Strided x(kF32, {5}, Form::contiguous), total(kF32, {}, Form::contiguous);
  for (int64_t i = 0; i < 5; ++i) set(x.view, i, static_cast<double>(i));
  ASSERT_TRUE(sum(x.view, total.view, {}).ok());
  EXPECT_EQ(value(total.view, 0), 10.0);
  EXPECT_TRUE(refused(sum(total.view, total.view, {}), "at least 1 dimensions"));
}

TEST(PlanSoftmax, OfTheLastDimension) {
  Random random(7);
  for (const ElementType type : kFloats) {
    for (const int64_t n : {1, 2, 70, 1500}) {
      Strided x(type, {3, n}, kForms[random.below(4)]);
      for (int64_t i = 0; i < 3 * n; ++i) set(x.view, i, i % 5 == 1 ? -kInfinity : 3.0 * static_cast<double>(random.normal()));
      const Strided out(type, {3, n}, kForms[random.below(4)]);
      ASSERT_TRUE(softmax(x.view, out.view, threads(2)).ok());
      for (int64_t row = 0; row < 3; ++row) {
        double most = -kInfinity, total = 0.0;
        for (int64_t i = 0; i < n; ++i) most = std::max(most, value(x.view, row * n + i));
        for (int64_t i = 0; i < n; ++i) total += std::exp(value(x.view, row * n + i) - most);
        for (int64_t i = 0; i < n; ++i) {
          const double expected = std::exp(value(x.view, row * n + i) - most) / total;
          ASSERT_TRUE(same(value(out.view, row * n + i), rounded(expected, type)) ||
                      std::fabs(value(out.view, row * n + i) / expected - 1.0) < 0x1p-22);
        }
      }
    }
  }
  const Strided x(kF32, {3, 2}, Form::contiguous), out(kF32, {3, 2}, Form::contiguous);
  const float given[] = {kNaN, 1.0f, -kInfinity, -kInfinity, 1.0f, kNaN};
  for (int64_t i = 0; i < 6; ++i) set(x.view, i, given[i]);
  ASSERT_TRUE(softmax(x.view, out.view, {}).ok());
  for (int64_t i = 0; i < 6; ++i) EXPECT_TRUE(std::isnan(value(out.view, i))) << i;
}

TEST(PlanTop, LargestFirst) {
  Random random(8);
  for (const int64_t n : {1, 5, 64, 4096}) {
    for (const int64_t k : {int64_t{0}, int64_t{1}, std::min<int64_t>(n, 6), n > 64 ? int64_t{8} : n}) {
      Strided x(kF32, {3, n}, kForms[random.below(4)]);
      x.fill(random);
      const Strided values(kF32, {3, k}, kForms[random.below(4)]), indices(kI64, {3, k}, kForms[random.below(4)]);
      ASSERT_TRUE(top(x.view, values.view, indices.view, threads(2)).ok());
      const auto rank = [](double value) { return value != value ? std::numeric_limits<double>::max() : value; };
      for (int64_t row = 0; row < 3 && k > 0; ++row) {
        std::vector<double> sorted;
        std::vector<bool> seen(static_cast<size_t>(n));
        for (int64_t i = 0; i < n; ++i) sorted.push_back(std::min(rank(value(x.view, row * n + i)), 1e300));
        std::sort(sorted.begin(), sorted.end(), std::greater<>());
        for (int64_t i = 0; i < k; ++i) {
          const int64_t index = static_cast<int64_t>(value(indices.view, row * k + i));
          ASSERT_TRUE(index >= 0 && index < n && !seen[static_cast<size_t>(index)]);
          seen[static_cast<size_t>(index)] = true;
          ASSERT_TRUE(same(value(values.view, row * k + i), value(x.view, row * n + index)));
          ASSERT_EQ(std::min(rank(value(values.view, row * k + i)), 1e300), sorted[static_cast<size_t>(i)]);
        }
      }
    }
  }
  const Strided x(kF32, {3, 5}, Form::contiguous), values(kF32, {3, 6}, Form::contiguous);
  const Strided indices(kI64, {3, 6}, Form::contiguous);
  EXPECT_TRUE(refused(top(x.view, values.view, indices.view, {}), "[3, 6]"));
  const Strided few(kF32, {3, 2}, Form::contiguous), narrow(kI32, {3, 2}, Form::contiguous), number(kI64, {}, Form::contiguous);
  EXPECT_TRUE(refused(top(x.view, few.view, narrow.view, {}), "int32"));
  EXPECT_TRUE(refused(top(x.view, few.view, number.view, {}), "indices has shape []"));
  const Strided many(kF32, {1, 4097}, Form::contiguous), one(kF32, {1, 1}, Form::contiguous);
  const Strided place(kI64, {1, 1}, Form::contiguous);
  EXPECT_TRUE(refused(top(many.view, one.view, place.view, {}), "4096 numbers to choose from"));
}

TEST(PlanGather, OfTheLastDimension) {
  Random random(9);
  for (const ElementType type : {kF32, kBf16, kI64, kBool}) {
    for (const ElementType index_type : {kI32, kI64}) {
      Strided x(type, {2, 3, 9}, kForms[random.below(4)]), indices(index_type, {2, 3, 4}, kForms[random.below(4)]);
      x.fill(random);
      for (int64_t i = 0; i < 24; ++i) set(indices.view, i, static_cast<double>(random.between(int64_t{-9}, int64_t{8})));
      const Strided out(type, {2, 3, 4}, kForms[random.below(4)]);
      ASSERT_TRUE(gather(x.view, indices.view, out.view, {}).ok());
      for (int64_t i = 0; i < 24; ++i) {
        const int64_t index = (static_cast<int64_t>(value(indices.view, i)) + 9) % 9;
        ASSERT_TRUE(same(value(out.view, i), value(x.view, i / 4 * 9 + index)));
      }
      for (const double wrong : {9.0, -10.0, 1e9}) {
        set(indices.view, 5, wrong);
        EXPECT_TRUE(refused(gather(x.view, indices.view, out.view, {}), "expected less than 9", Status::Kind::out_of_range));
      }
    }
  }
}

TEST(PlanTake, SlicesOfTheFirstDimension) {
  Random random(10);
  for (const std::vector<int64_t>& rest : std::vector<std::vector<int64_t>>{{}, {5}, {2, 70}, {0}}) {
    for (const std::vector<int64_t>& shape : std::vector<std::vector<int64_t>>{{}, {3}, {2, 4}, {0}}) {
      std::vector<int64_t> sizes = {6}, result = shape;
      sizes.insert(sizes.end(), rest.begin(), rest.end());
      result.insert(result.end(), rest.begin(), rest.end());
      Strided x(kF32, sizes, kForms[random.below(4)]), indices(kI64, shape, kForms[random.below(4)]);
      x.fill(random);
      for (int64_t i = 0; i < indices.view.shape.numel(); ++i) {
        set(indices.view, i, static_cast<double>(random.between(int64_t{-6}, int64_t{5})));
      }
      const Strided out(kF32, result, kForms[random.below(4)]);
      const Status status = take(x.view, indices.view, out.view, {});
      ASSERT_TRUE(status.ok()) << status.message();
      const int64_t slice = x.view.shape.numel() / 6;
      for (int64_t i = 0; i < out.view.shape.numel(); ++i) {
        const int64_t index = (static_cast<int64_t>(value(indices.view, i / slice)) + 6) % 6;
        ASSERT_TRUE(same(value(out.view, i), value(x.view, index * slice + i % slice)));
      }
      if (out.view.shape.numel() == 0) continue;
      set(indices.view, 0, 6.0);
      EXPECT_TRUE(refused(take(x.view, indices.view, out.view, {}), "expected less than 6", Status::Kind::out_of_range));
    }
  }
  const std::vector<int64_t> ones(static_cast<size_t>(kMaxDims), 1);
  Strided x(kF32, {2}, Form::contiguous), deep(kI64, ones, Form::contiguous);
  const Strided out(kF32, ones, Form::contiguous);
  x.fill(random);
  set(deep.view, 0, 1.0);
  ASSERT_TRUE(take(x.view, deep.view, out.view, {}).ok());
  EXPECT_TRUE(same(value(out.view, 0), value(x.view, 1)));
}

TEST(PlanScatter, LeavesTheRest) {
  Random random(11);
  for (const ElementType type : kFloats) {
    Strided indices(kI64, {3, 2}, kForms[random.below(4)]), out(type, {3, 7}, kForms[random.below(4)]);
    std::vector<double> expected(21);
    for (int64_t i = 0; i < 21; ++i) {
      set(out.view, i, static_cast<double>(i));
      expected[static_cast<size_t>(i)] = static_cast<double>(i);
    }
    for (int64_t i = 0; i < 6; ++i) {
      const int64_t index = random.below(7);
      set(indices.view, i, static_cast<double>(i % 2 != 0 ? index - 7 : index));
      expected[static_cast<size_t>(i / 2 * 7 + index)] = 0.5;
    }
    ASSERT_TRUE(scatter(indices.view, 0.5, out.view, {}).ok());
    for (int64_t i = 0; i < 21; ++i) EXPECT_EQ(value(out.view, i), expected[static_cast<size_t>(i)]);
    set(indices.view, 3, -8.0);
    EXPECT_TRUE(refused(scatter(indices.view, 0.5, out.view, {}), "expected less than 7", Status::Kind::out_of_range));
    const Strided number(kI64, {}, Form::contiguous);
    EXPECT_TRUE(refused(scatter(number.view, 0.5, out.view, {}), "no dimensions"));
  }
}

TEST(PlanCountUp, FromAnyStart) {
  for (const Form form : kForms) {
    const Strided out(kI64, {9}, form);
    ASSERT_TRUE(count_up(-3.0, 2.0, out.view).ok());
    for (int64_t i = 0; i < 9; ++i) EXPECT_EQ(value(out.view, i), static_cast<double>(2 * i - 3));
  }
  const Strided out(kI64, {3}, Form::contiguous), narrow(kI32, {3}, Form::contiguous);
  ASSERT_TRUE(count_up(kNaN, 1e30, out.view).ok()) << "any number, without undefined behavior";
  EXPECT_TRUE(refused(count_up(0.0, 1.0, narrow.view), "int32"));
}

TEST(PlanPool, RowsOfEachText) {
  Random random(9);
  for (const ElementType type : kFloats) {
    for (const Form form : kForms) {
      const Strided x(type, {1, 9, 70}, form), out(type, {3, 70}, form), ranges(kI64, {3, 2}, form);
      for (int64_t i = 0; i < x.view.shape.numel(); ++i) set(x.view, i, static_cast<double>(random.normal()));
      const int64_t bounds[3][2] = {{0, 1}, {1, 6}, {6, 9}};
      for (int64_t i = 0; i < 6; ++i) set(ranges.view, i, static_cast<double>(bounds[i / 2][i % 2]));
      for (const Pooling mode : {Pooling::mean, Pooling::largest, Pooling::root, Pooling::weighted}) {
        const Status status = pool(x.view, ranges.view, static_cast<int64_t>(mode), out.view, threads(2));
        ASSERT_TRUE(status.ok()) << status.message();
        for (int64_t text = 0; text < 3; ++text) {
          for (int64_t column = 0; column < 70; ++column) {
            double total = 0.0, weights = 0.0, largest = -HUGE_VAL;
            for (int64_t row = bounds[text][0]; row < bounds[text][1]; ++row) {
              const double each = value(x.view, row * 70 + column);
              const double weight = mode == Pooling::weighted ? static_cast<double>(row - bounds[text][0] + 1) : 1.0;
              total += weight * each;
              weights += weight;
              largest = std::max(largest, each);
            }
            const double mean = total / (mode == Pooling::root ? std::sqrt(weights) : weights);
            ASSERT_EQ(value(out.view, text * 70 + column), rounded(mode == Pooling::largest ? largest : mean, type));
          }
        }
      }
      set(x.view, 3 * 70 + 5, static_cast<double>(kNaN));
      ASSERT_TRUE(pool(x.view, ranges.view, 1, out.view, {}).ok());
      EXPECT_TRUE(std::isnan(value(out.view, 70 + 5)));
      EXPECT_FALSE(std::isnan(value(out.view, 70 + 6)));
    }
  }
}

TEST(PlanPool, Refuses) {
  const Strided x(kF32, {1, 4, 8}, Form::contiguous), out(kF32, {1, 8}, Form::contiguous);
  const Strided ranges(kI64, {1, 2}, Form::contiguous);
  const Strided narrow(kI32, {1, 2}, Form::contiguous), wide(kF32, {1, 9}, Form::contiguous);
  const std::pair<double, double> wrong[] = {{-1.0, 2.0}, {2.0, 2.0}, {3.0, 5.0}};
  for (const auto& [begin, end] : wrong) {
    set(ranges.view, 0, begin);
    set(ranges.view, 1, end);
    EXPECT_TRUE(refused(pool(x.view, ranges.view, 0, out.view, {}), "expected at least one", Status::Kind::out_of_range));
  }
  EXPECT_TRUE(refused(pool(x.view, ranges.view, 4, out.view, {}), "mode 4; expected 0 to 3"));
  EXPECT_TRUE(refused(pool(x.view, narrow.view, 0, out.view, {}), "int32"));
  EXPECT_TRUE(refused(pool(x.view, ranges.view, 0, wide.view, {}), "out [1, 9]"));
  EXPECT_TRUE(refused(pool(ranges.view, ranges.view, 0, out.view, {}), "x has dtype int64"));
  TensorView row = x.view;
  row.shape = {2, {1, 8}};
  EXPECT_TRUE(refused(pool(x.view, ranges.view, 0, row, {}), "share memory"));
}

// No operator writes where it reads, except elementwise ones to their own elements.
TEST(PlanNumbers, RefuseSharedMemory) {
  Strided x(kF32, {4, 4}, Form::contiguous), indices(kI64, {4, 4}, Form::contiguous);
  for (int64_t i = 0; i < 16; ++i) set(indices.view, i, 0.0);
  TensorView row = x.view;
  row.shape = {1, {4}};
  EXPECT_TRUE(refused(float_linear(x.view, x.view, nullptr, x.view, {}), "share memory"));
  EXPECT_TRUE(refused(sum(x.view, row, {}), "share memory"));
  EXPECT_TRUE(refused(softmax(x.view, x.view, {}), "share memory"));
  EXPECT_TRUE(refused(top(x.view, x.view, indices.view, {}), "share memory"));
  EXPECT_TRUE(refused(gather(x.view, indices.view, x.view, {}), "share memory"));
  TensorView few = indices.view;
  few.shape = {1, {4}};
  EXPECT_TRUE(refused(take(x.view, few, x.view, {}), "share memory"));
  TensorView floats = x.view;
  floats.data = indices.view.data;
  EXPECT_TRUE(refused(scatter(indices.view, 1.0, floats, {}), "share memory"));
  EXPECT_TRUE(copy(x.view, x.view, {}).ok());
}

// Types that each operator cannot compute, and tensors without dimensions.
TEST(PlanNumbers, RefuseOtherTypes) {
  const Strided x(kF32, {4, 4}, Form::contiguous), n(kI64, {4, 4}, Form::contiguous), out(kF32, {4, 4}, Form::contiguous);
  const Strided bytes(kU8, {4, 4}, Form::contiguous), row(kF32, {4}, Form::contiguous), whole(kI64, {4}, Form::contiguous);
  EXPECT_TRUE(refused(float_linear(n.view, x.view, nullptr, out.view, {}), "x has dtype int64"));
  EXPECT_TRUE(refused(float_linear(x.view, bytes.view, nullptr, out.view, {}), "weight has dtype uint8"));
  EXPECT_TRUE(refused(float_linear(x.view, x.view, &whole.view, out.view, {}), "bias has dtype int64"));
  EXPECT_TRUE(refused(float_linear(x.view, row.view, nullptr, out.view, {}), "at least 2 dimensions"));
  EXPECT_TRUE(refused(sum(n.view, row.view, {}), "x has dtype int64"));
  EXPECT_TRUE(refused(sum(x.view, whole.view, {}), "out has dtype int64"));
  EXPECT_TRUE(refused(softmax(n.view, out.view, {}), "x has dtype int64"));
  EXPECT_TRUE(refused(top(n.view, out.view, n.view, {}), "x has dtype int64"));
  EXPECT_TRUE(refused(gather(x.view, x.view, out.view, {}), "indices has dtype float32"));
  EXPECT_TRUE(refused(gather(x.view, n.view, bytes.view, {}), "uint8"));
  EXPECT_TRUE(refused(gather(n.view, n.view, out.view, {}), "expected a dimension and one type"));
  EXPECT_TRUE(refused(take(x.view, x.view, out.view, {}), "indices has dtype float32"));
  EXPECT_TRUE(refused(take(n.view, whole.view, out.view, {}), "one type"));
  EXPECT_TRUE(refused(scatter(x.view, 1.0, out.view, {}), "indices has dtype float32"));
  EXPECT_TRUE(refused(scatter(n.view, 1.0, n.view, {}), "out has dtype int64"));
  EXPECT_TRUE(refused(copy(bytes.view, out.view, {}), "uint8"));
  EXPECT_TRUE(refused(copy(x.view, row.view, {}), "[4]; expected [4, 4]"));
}

}  // namespace
}  // namespace lowbit::test
