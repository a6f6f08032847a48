// Activation functions, norms and rotary positions: strides, threads, refusals. ctest runs this once per LOWBIT_ISA.

#include <gtest/gtest.h>

#include "support/tensors.h"

namespace lowbit::test {
namespace {

// Halves of one tensor [rows, 2 n], a common form of the inputs of a gated activation.
TEST(Elementwise, RowsAtEqualDistancesAndThreads) {
  Random random(1);
  const Tensor both = random_tensor(ElementType::f32, {4, 50, 2, 100}, random);
  const auto half = [&](int64_t i) {
    return view_of(both.memory->data() + i * 400, ElementType::f32, {4, 50, 100}, {10000, 200, 1});
  };
  Tensor x(ElementType::f32, {4, 50, 100}), gate(ElementType::f32, {4, 50, 100});
  for (int64_t i = 0; i < 20000; ++i) {
    std::memcpy(x.memory->data() + 4 * i, element(half(0), i), 4);
    std::memcpy(gate.memory->data() + 4 * i, element(half(1), i), 4);
  }
  Tensor expected(ElementType::f32, {4, 50, 100}), out(ElementType::f32, {4, 50, 100});
  for (int64_t activation = 0; activation < 4; ++activation) {
    ASSERT_TRUE(activate(x.view, &gate.view, activation, expected.view, {}).ok());
    for (const int count : {1, 3}) {
      const TensorView a = half(0), b = half(1);
      ASSERT_TRUE(activate(a, &b, activation, out.view, threads(count)).ok());
      EXPECT_EQ(out.bytes(), expected.bytes());
    }
  }
  ASSERT_TRUE(rms_norm(x.view, nullptr, 1e-6, 0.0, expected.view, {}).ok());
  ASSERT_TRUE(rms_norm(half(0), nullptr, 1e-6, 0.0, out.view, threads(3)).ok());
  EXPECT_EQ(out.bytes(), expected.bytes());
  const Tensor weight = random_tensor(ElementType::f32, {100}, random), bias = random_tensor(ElementType::f32, {100}, random);
  ASSERT_TRUE(layer_norm(x.view, &weight.view, &bias.view, 1e-5, expected.view, {}).ok());
  ASSERT_TRUE(layer_norm(half(0), &weight.view, &bias.view, 1e-5, out.view, threads(3)).ok());
  EXPECT_EQ(out.bytes(), expected.bytes());
}

// Heads of projections [batch, positions, heads, width], in both orders of dimensions.
TEST(Elementwise, RotaryStridesAndThreads) {
  Random random(1);
  const int64_t batch = 2, positions = 90, heads = 6, kv_heads = 2, width = 48;
  const Tensor q = random_tensor(ElementType::f32, {batch, positions, heads, width}, random);
  const Tensor k = random_tensor(ElementType::f32, {batch, positions, kv_heads, width}, random);
  const Tensor cos = random_tensor(ElementType::f32, {batch, positions, 32}, random);
  const Tensor sin = random_tensor(ElementType::f32, {batch, positions, 32}, random);
  Tensor q_expected(ElementType::f32, {batch, positions, heads, width});
  Tensor k_expected(ElementType::f32, {batch, positions, kv_heads, width});
  ASSERT_TRUE(rotary(q.view, k.view, cos.view, sin.view, 2, 0, false, q_expected.view, k_expected.view, {}).ok());
  const auto transposed = [&](const Tensor& x, int64_t n) {
    return view_of(x.view.data, ElementType::f32, {batch, n, positions, width}, {positions * n * width, width, n * width, 1});
  };
  Tensor q_out(ElementType::f32, {batch, heads, positions, width});
  Tensor k_out(ElementType::f32, {batch, kv_heads, positions, width});
  for (const int count : {1, 3}) {
    ASSERT_TRUE(rotary(transposed(q, heads), transposed(k, kv_heads), cos.view, sin.view, 1, 0, false, q_out.view, k_out.view,
                       threads(count)).ok());
    for (int64_t i = 0; i < batch * heads * positions * width; ++i) {
      ASSERT_EQ(std::memcmp(element(q_out.view, i), element(transposed(q_expected, heads), i), 4), 0) << i;
    }
    for (int64_t i = 0; i < batch * kv_heads * positions * width; ++i) {
      ASSERT_EQ(std::memcmp(element(k_out.view, i), element(transposed(k_expected, kv_heads), i), 4), 0) << i;
    }
  }
  const auto call = [&](const TensorView& q_to, const TensorView& k_to) {
    return rotary(q.view, k.view, cos.view, sin.view, 2, 0, false, q_to, k_to, {});
  };
  EXPECT_TRUE(refused(call(q.view, k_expected.view), "q_out and q share memory; expected separate memory"));
  EXPECT_TRUE(refused(call(q_expected.view, k.view), "k_out and k share memory; expected separate memory"));
  EXPECT_TRUE(refused(call(q_out.view, k_expected.view), "q_out has shape [2, 6, 90, 48]; expected [2, 90, 6, 48]"));
  EXPECT_TRUE(refused(call(transposed(q_expected, heads), k_expected.view), "q_out has shape"));
}

TEST(Elementwise, Refusals) {
  Random random(1);
  const Tensor x = random_tensor(ElementType::f32, {3, 8}, random), weight = random_tensor(ElementType::f32, {8}, random);
  Tensor out(ElementType::f32, {3, 8});
  EXPECT_TRUE(refused(activate(x.view, nullptr, 4, out.view, {}), "activation is 4; expected 0 to 3"));
  EXPECT_TRUE(refused(activate(x.view, &weight.view, 0, out.view, {}), "gate has shape [8]; expected [3, 8]"));
  EXPECT_TRUE(refused(activate(index_tensor<int64_t>({1}).view, nullptr, 0, out.view, {}), "x has dtype int64; expected"));
  EXPECT_TRUE(refused(activate(x.view, nullptr, 0, x.view, {}), "out and x share memory; expected separate memory"));
  const TensorView uneven = view_of(x.view.data, ElementType::f32, {2, 2, 2}, {5, 3, 1});
  const TensorView number = view_of(x.view.data, ElementType::f32, {}, {});
  EXPECT_TRUE(refused(activate(uneven, nullptr, 0, out.view, {}), "x has strides that are not those of rows"));
  EXPECT_TRUE(refused(activate(number, nullptr, 0, out.view, {}), "x has no dimension; expected one or more"));
  EXPECT_TRUE(refused(rms_norm(x.view, &x.view, 1e-6, 0.0, out.view, {}), "weight has shape [3, 8]; expected [8]"));
  EXPECT_TRUE(refused(rms_norm(x.view, nullptr, -1.0, 0.0, out.view, {}), "epsilon is -1 and weight_offset 0"));
  EXPECT_TRUE(refused(rms_norm(x.view, nullptr, 1e-6, 7.0, out.view, {}), "epsilon is 1e-06 and weight_offset 7"));
  EXPECT_TRUE(refused(rms_norm(x.view, &weight.view, 1e-6, 0.0, x.view, {}), "out and x share memory"));
  EXPECT_TRUE(refused(layer_norm(x.view, &x.view, nullptr, 1e-5, out.view, {}), "weight has shape [3, 8]; expected [8]"));
  EXPECT_TRUE(refused(layer_norm(x.view, &weight.view, &x.view, 1e-5, out.view, {}), "bias has shape [3, 8]; expected [8]"));
  EXPECT_TRUE(refused(layer_norm(x.view, nullptr, nullptr, 1.5, out.view, {}), "epsilon is 1.5; expected 0 to 1"));
  EXPECT_TRUE(refused(layer_norm(x.view, nullptr, nullptr, 1e-5, x.view, {}), "out and x share memory"));
  EXPECT_TRUE(refused(layer_norm(uneven, nullptr, nullptr, 1e-5, out.view, {}), "x has strides that are not those of rows"));
  const TensorView row = view_of(out.view.data, ElementType::f32, {8}, {1});
  EXPECT_TRUE(refused(layer_norm(x.view, nullptr, &row, 1e-5, out.view, {}), "out and bias share memory"));
}

}  // namespace
}  // namespace lowbit::test
