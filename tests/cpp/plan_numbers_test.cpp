// Products, sums, softmax, operators with indices, and pooling of plan/numbers.h against loops over single elements, on any
// views.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "../../plan/numbers.h"
#include "support/strided.h"

namespace lowbit::test {
namespace {

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
