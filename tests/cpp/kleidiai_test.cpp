// The KleidiAI adapter (adapters/kleidiai) through lowbit's operators, compared with exact results. It rounds more than lowbit:
//
//   scales are bfloat16, to nearest       at most 2^-9 of each product
//   activations are int8 per row          x is off by at most one step: half for its rounding, half for the rounding of the
//                                         zero point to an integer
//
// and the rest is float32 arithmetic. So |y - sum x w| <= 2^-9 sum |x w| + step * sum |w| + small. lowbit's result is within
// half a step of the same sum, so the two results are close to each other.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "../../kernels/registry.h"
#include "../../ops/load_kernels.h"
#include "support/tensors.h"

namespace lowbit::test {
namespace {

class KleidiAI : public testing::Test {
 protected:
  void SetUp() override {
    const Status status = load_kernels(LOWBIT_KLEIDIAI);
    ASSERT_TRUE(status.ok()) << status.message();
  }
};

const LinearKernel& chosen(int64_t m, IsaBits isa = active_isa()) {
  Layout layout = layout_of(16, 64, 4, 32, Mapping::symmetric, false);
  layout.format = vendor_format("KAI4");
  return choose_linear(layout, m, isa);
}

TEST_F(KleidiAI, RowsAreInTheTable) {
  std::string found;
  for (size_t i = 0; i < linear_kernel_count(); ++i) {
    const LoadedLibrary* const loaded = library_of(&linear_kernel(i));
    if (loaded == nullptr) continue;
    EXPECT_STREQ(loaded->library->vendor, "kleidiai");
    found += std::string(linear_kernel(i).name) + " ";
  }
  EXPECT_EQ(found, "kleidiai_a8w4_4x8_i8mm kleidiai_a8w4_1x8_neondot ");
  const IsaBits dot = kNeon | kNeonDot, mmla = dot | kI8mm;
  EXPECT_STREQ(chosen(1, mmla).name, "kleidiai_a8w4_1x8_neondot");
  EXPECT_STREQ(chosen(4, mmla).name, "kleidiai_a8w4_4x8_i8mm");
  EXPECT_STREQ(chosen(4, dot).name, "kleidiai_a8w4_1x8_neondot");
  EXPECT_EQ(chosen(4, kNeon).run, nullptr);
}

struct Case {
  int64_t m, n, k, group_size;
};

class Results : public KleidiAI, public testing::WithParamInterface<Case> {};

TEST_P(Results, AreWithinTheRounding) {
  const Case c = GetParam();
  Random random(static_cast<uint64_t>(c.m + c.n + c.k));
  for (const bool has_bias : {false, true}) {
    const Layout layout = layout_of(c.n, c.k, 4, c.group_size, Mapping::symmetric, has_bias);
    Tensor weight = bytes_tensor(packed(random_weights(layout, random)));
    const Decoded w = decode(weight.memory->data(), layout);
    Layout own;
    Status status = repack_shape(weight.view, "KAI4", &own);
    ASSERT_TRUE(status.ok()) << status.message();
    Tensor repacked(ElementType::u8, {own.total_bytes});
    status = repack(weight.view, "KAI4", repacked.view, {});
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(repacked.memory->intact());
    repacked.memory->freeze();
    for (const ElementType type : {ElementType::f32, ElementType::bf16, ElementType::f16}) {
      Tensor x = random_tensor(type, {c.m, c.k}, random), out(type, {c.m, c.n});
      status = linear(x.view, repacked.view, c.n, out.view, threads(2));
      if (chosen(c.m).run == nullptr) {
        EXPECT_TRUE(refused(status, "no linear kernel for weights of 4 bits in format 'KAI4'"));
        continue;
      }
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_TRUE(out.memory->intact());
      Tensor reference(type, {c.m, c.n});
      ASSERT_TRUE(linear(x.view, weight.view, c.n, reference.view, {}).ok());
      const DType dtype = dtype_of(type);
      const double rounding = type == ElementType::f32 ? 0x1p-24 : type == ElementType::bf16 ? 0x1p-8 : 0x1p-11;
      double error = 0.0, size = 0.0;
      for (int64_t i = 0; i < c.m; ++i) {
        double low = 0.0, high = 0.0;
        for (int64_t j = 0; j < c.k; ++j) {
          const double value = load_as_f32(x.view.data, dtype, i * c.k + j);
          low = std::min(low, value), high = std::max(high, value);
        }
        for (int64_t row = 0; row < c.n; ++row) {
          double y = has_bias ? w.bias[static_cast<size_t>(row)] : 0.0, products = 0.0, weights = 0.0;
          for (int64_t j = 0; j < c.k; ++j) {
            const double value = load_as_f32(x.view.data, dtype, i * c.k + j), weight_value = w.weight(row, j);
            y += value * weight_value;
            products += std::fabs(value * weight_value);
            weights += std::fabs(weight_value);
          }
          const double step = (high - low) / 255, stored = rounding * std::fabs(y);
          const double bound = 0x1p-9 * products + step * weights + 1e-5 * products + stored;
          const double found = load_as_f32(out.view.data, dtype, i * c.n + row);
          ASSERT_LE(std::fabs(found - y), bound * 1.01 + 1e-7) << "[" << i << ", " << row << "] is " << found;
          const double near = load_as_f32(reference.view.data, dtype, i * c.n + row);
          ASSERT_LE(std::fabs(found - near), bound + step * weights + stored + 1e-7);
          error += (found - y) * (found - y);
          size += y * y;
        }
      }
      // The bound is the worst case; roundings of random sign stay far below it.
      if (c.m * c.n >= 50) {
        EXPECT_LE(std::sqrt(error / size), 0.02);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Results,
                         testing::Values(Case{1, 8, 32, 32}, Case{1, 50, 128, 32}, Case{2, 17, 64, 64}, Case{4, 16, 96, 32},
                                         Case{5, 37, 256, 128}, Case{9, 64, 160, 0}, Case{70, 100, 96, 32},
                                         Case{1, 1, 32, 0}, Case{70, 33, 512, 64}));

TEST_F(KleidiAI, RefusesWhatItDoesNotHold) {
  Random random(1);
  const auto refuses = [&](const Layout& layout) {
    Tensor weight = bytes_tensor(packed(random_weights(layout, random)));
    Layout own;
    EXPECT_TRUE(refused(repack_shape(weight.view, "KAI4", &own), "format 'KAI4' does not hold"));
  };
  refuses(layout_of(16, 64, 3, 32, Mapping::symmetric, false));
  refuses(layout_of(16, 64, 4, 32, Mapping::affine, false));
  refuses(layout_of(16, 64, 4, 16, Mapping::symmetric, false));
  refuses(layout_of(16, 80, 4, 32, Mapping::symmetric, false));
  refuses(layout_of(16, 33, 4, 0, Mapping::symmetric, false));
}

TEST_F(KleidiAI, HasNoWayBack) {
  Random random(2);
  const Layout layout = layout_of(16, 64, 4, 32, Mapping::symmetric, false);
  Tensor weight = bytes_tensor(packed(random_weights(layout, random)));
  Layout own;
  ASSERT_TRUE(repack_shape(weight.view, "KAI4", &own).ok());
  Tensor repacked(ElementType::u8, {own.total_bytes}), back(ElementType::u8, {layout.total_bytes});
  ASSERT_TRUE(repack(weight.view, "KAI4", repacked.view, {}).ok());
  EXPECT_TRUE(refused(repack(repacked.view, "panel16", back.view, {}), "format 'KAI4' cannot be unpacked"));
  Tensor index = index_tensor<int64_t>({3}), row(ElementType::f32, {1, 64});
  EXPECT_TRUE(refused(embedding(index.view, repacked.view, 64, row.view, {}), "no embedding kernel"));
}

}  // namespace
}  // namespace lowbit::test
