// The operator that quantizes weights: the nearest codes for the stored scales, the same on any number of threads, within its
// buffers.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/tensors.h"

namespace lowbit::test {
namespace {

struct Outputs {
  Tensor codes, scales, mins;

  explicit Outputs(const Layout& l)
      : codes(ElementType::u8, {l.n, l.k}),
        scales(ElementType::f32, {l.n, l.groups}),
        mins(ElementType::f32,
             l.mapping == Mapping::affine ? std::vector<int64_t>{l.n, l.groups} : std::vector<int64_t>{0, 0}) {}
  bool intact() const { return codes.memory->intact() && scales.memory->intact() && mins.memory->intact(); }
  bool same(const Outputs& other) const {
    return codes.bytes() == other.codes.bytes() && scales.bytes() == other.scales.bytes() &&
           mins.bytes() == other.mins.bytes();
  }
  Weights weights(const Layout& l) const {
    const auto floats = [](const Tensor& t) { return from_bytes(t.bytes(), DType::f32); };
    return {l, codes.bytes(), floats(scales), floats(mins), {}};
  }
};

Status run(const TensorView& weight, const Layout& l, bool search, const Outputs& out, const Parallel& parallel = {}) {
  return quantize(weight, l.bits, l.group_size, l.mapping == Mapping::affine, search, out.codes.view, out.scales.view,
                  out.mins.view, parallel);
}

// The value of a code, in float64.
double value_of(const Weights& w, size_t group, int code) {
  if (w.layout.mapping == Mapping::affine) return double{w.scales[group]} * code + w.mins[group];
  return double{w.scales[group]} * (w.layout.bits == 1 ? 2 * code - 1 : code - (1 << (w.layout.bits - 1)));
}

// Every code is the nearest one. The position (weight - min) / scale is at most 2^bits and is rounded three times at 2^-24. At
// that distance from a midpoint both codes are valid, which adds at most twice that distance to the error, in steps.
void check_nearest(const TensorView& weight, const Weights& w) {
  const Layout& l = w.layout;
  for (int64_t i = 0; i < l.n * l.k; ++i) {
    const float x = load_as_f32(element(weight, i), dtype_of(weight.type), 0);
    const size_t group = static_cast<size_t>(i / l.k * l.groups + i % l.k / l.group_inputs());
    const double found = std::fabs(value_of(w, group, w.codes[static_cast<size_t>(i)]) - x);
    double least = std::numeric_limits<double>::infinity();
    for (int code = 0; code < 1 << l.bits; ++code) {
      const double error = std::fabs(value_of(w, group, code) - x);
      if (error < least) least = error;  // not fmin: as a vector reduction it crashes g++ 12 for Arm
    }
    const double step = std::fabs(value_of(w, group, 1) - value_of(w, group, 0));
    ASSERT_LE(found, least + step * std::ldexp(8.0, l.bits - 24)) << "weight " << i << " of " << l.bits << " bits";
  }
}

TEST(Quantize, CodesAreTheNearest) {
  Random random(1);
  for (int bits = 1; bits <= 8; ++bits) {
    for (const Mapping mapping : {Mapping::symmetric, Mapping::affine}) {
      for (const ElementType type : {ElementType::f32, ElementType::bf16, ElementType::f16}) {
        for (const auto& [k, group_size] : {std::pair<int64_t, int64_t>{100, 32}, {1, 0}, {49, 16}, {70, 0}}) {
          const Layout layout = layout_of(5, k, bits, group_size, mapping, false);
          const Tensor weight = random_tensor(type, {5, k}, random);
          for (const bool search : {false, true}) {
            const Outputs out(layout);
            const Status status = run(weight.view, layout, search, out);
            ASSERT_TRUE(status.ok()) << status.message();
            EXPECT_TRUE(out.intact() && weight.memory->intact());
            const Weights w = out.weights(layout);
            check_nearest(weight.view, w);
            const Weights stored = unpacked(layout, packed(w));
            EXPECT_EQ(stored.scales, w.scales) << "packing changes the scales";
            EXPECT_EQ(stored.mins, w.mins) << "packing changes the mins";
          }
        }
      }
    }
  }
}

TEST(Quantize, SearchIsNeverWorse) {
  Random random(2);
  const Tensor weight = random_tensor(ElementType::f32, {40, 96}, random);
  for (int bits = 1; bits <= 8; ++bits) {
    for (const Mapping mapping : {Mapping::symmetric, Mapping::affine}) {
      const Layout layout = layout_of(40, 96, bits, 32, mapping, false);
      double error[2] = {};
      for (const bool search : {false, true}) {
        const Outputs out(layout);
        ASSERT_TRUE(run(weight.view, layout, search, out).ok());
        const Weights w = out.weights(layout);
        for (size_t i = 0; i < w.codes.size(); ++i) {
          const double difference = value_of(w, i / 32, w.codes[i]) - weight.memory->as<float>()[i];
          error[search] += difference * difference;
        }
      }
      // The scales are rounded to 2^-11 after the choice, which can increase the error by that much.
      EXPECT_LE(error[1], error[0] * (1 + 0x1p-8)) << bits << " bits";
      if (bits >= 2 && bits <= 5) {
        EXPECT_LT(error[1], error[0] * 0.99) << bits << " bits";  // the search reduces the error
      }
    }
  }
}

TEST(Quantize, AnyNumberOfThreadsAndAnyRowStride) {
  Random random(3);
  const Layout layout = layout_of(300, 700, 3, 48, Mapping::affine, false);
  const Tensor wide = random_tensor(ElementType::bf16, {300, 701}, random);
  const TensorView weight = view_of(wide.memory->data(), ElementType::bf16, {300, 700}, {701, 1});
  const Outputs alone(layout);
  ASSERT_TRUE(run(weight, layout, true, alone).ok());
  check_nearest(weight, alone.weights(layout));
  for (const int count : {2, 7}) {
    const Outputs out(layout);
    ASSERT_TRUE(run(weight, layout, true, out, threads(count)).ok());
    EXPECT_TRUE(out.same(alone)) << count << " threads";
  }
}

// For rows of one input, the stride between inputs does not matter.
TEST(Quantize, AnyStrideOfASingleInput) {
  Random random(5);
  const Layout layout = layout_of(20, 1, 4, 0, Mapping::symmetric, false);
  Tensor column = random_tensor(ElementType::f32, {20, 1}, random);
  const Outputs expected(layout), out(layout);
  ASSERT_TRUE(run(column.view, layout, false, expected).ok());
  column.view.stride[1] = 20;
  const Status status = run(column.view, layout, false, out);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(out.same(expected));
}

TEST(Quantize, ConstantAndTinyRows) {
  for (const float value : {0.0f, -0.0f, 1.0f, -3.0f, 1e-30f, 1e-40f, -1e-45f, 8e37f}) {
    for (int bits = 1; bits <= 8; ++bits) {
      for (const Mapping mapping : {Mapping::symmetric, Mapping::affine}) {
        const Layout layout = layout_of(1, 32, bits, 32, mapping, false);
        Tensor weight(ElementType::f32, {1, 32});
        for (int i = 0; i < 32; ++i) weight.memory->as<float>()[i] = value;
        const Outputs out(layout);
        ASSERT_TRUE(run(weight.view, layout, false, out).ok());
        const Weights w = out.weights(layout);
        // A full-range symmetric grid ends at the value; a step below 2^-120 counts as none. Scales have 11 bits.
        const double bound = std::fabs(value) < 0x1p-112 ? 0x1p-112 : std::fabs(value) * 0x1p-10;
        for (const uint8_t code : w.codes) {
          ASSERT_LE(std::fabs(value_of(w, 0, code) - value), bound) << value << " at " << bits << " bits";
        }
      }
    }
  }
}

TEST(Quantize, Refusals) {
  Random random(4);
  const Layout layout = layout_of(20, 70, 4, 32, Mapping::symmetric, false);
  const Outputs out(layout);
  const Tensor weight = random_tensor(ElementType::f32, {20, 70}, random);
  ASSERT_TRUE(run(weight.view, layout, false, out).ok());
  const auto with = [&](auto change) {
    TensorView view = weight.view;
    change(view);
    return run(view, layout, false, out);
  };
  EXPECT_TRUE(refused(with([](auto& v) { v.shape.ndim = 1; }), "expected two dimensions"));
  EXPECT_TRUE(refused(with([](auto& v) { v.type = ElementType::u8; }), "weight has dtype uint8"));
  EXPECT_TRUE(refused(with([](auto& v) { v.stride[1] = 2; }), "stride 2 between inputs; expected 1"));
  const Layout two_inputs = layout_of(20, 2, 4, 32, Mapping::symmetric, false);
  const Tensor narrow = random_tensor(ElementType::f32, {20, 2}, random);
  TensorView columns = narrow.view;
  columns.stride[1] = 20;
  EXPECT_TRUE(refused(run(columns, two_inputs, false, Outputs(two_inputs)), "stride 20 between inputs; expected 1"));
  EXPECT_TRUE(refused(with([](auto& v) { v.on_cpu = false; }), "weight is not on the CPU"));
  EXPECT_TRUE(refused(with([](auto& v) { v.shape.size[0] = 21; }), "codes has shape [20, 70]; expected [21, 70]"));
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), 3e38f}) {
    Tensor altered(ElementType::f32, {20, 70});
    for (int i = 0; i < 20 * 70; ++i) altered.memory->as<float>()[i] = i == 3 * 70 + 69 || i == 19 * 70 ? bad : 1.0f;
    for (const int count : {1, 2}) {
      EXPECT_TRUE(refused(run(altered.view, layout, false, out, threads(count)), "weight [3, 69] is"));
    }
  }
  EXPECT_TRUE(out.intact());
}

}  // namespace
}  // namespace lowbit::test
