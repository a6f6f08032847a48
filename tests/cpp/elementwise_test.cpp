// Every kernel of the elementwise table has the bits of the portable kernel and stays within its memory.
// tests/python/operators/test_elementwise.py compares the chosen kernels with torch.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "support/coverage.h"
#include "support/guarded.h"
#include "support/random.h"
#include "support/reference.h"

namespace lowbit::test {
namespace {

constexpr DType kTypes[] = {DType::f32, DType::bf16, DType::f16};
constexpr int64_t kRows = 3;
constexpr int64_t kWidths[] = {1, 15, 16, 17, 64, 100};
// Special values, for which every ISA must give the same bits.
constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kOdd[] = {0.0f, -0.0f, 5.6f, -5.6f, -5.7f, 1e-40f, -88.0f, 3e38f, -3e38f, kInfinity, -kInfinity, kNaN};

void fill(Guarded& memory, DType dtype, float scale, Random& random) {
  for (int64_t i = 0; i < memory.size() / size_of(dtype); ++i) {
    store_from_f32(memory.data(), dtype, i, scale * random.normal());
  }
}

std::vector<uint8_t> bytes_of(const Guarded& memory) { return {memory.data(), memory.data() + memory.size()}; }

std::vector<uint8_t> activate(const ElementwiseKernel& kernel, Activation activation, DType dtype, int64_t width, bool gated) {
  Random random(static_cast<uint64_t>(width));
  Guarded x(kRows * width * size_of(dtype)), gate(x.size()), out(x.size());
  fill(x, dtype, 4.0f, random);
  fill(gate, dtype, 1.0f, random);
  for (int64_t i = 0; i < kRows * width && i < static_cast<int64_t>(std::size(kOdd)); ++i) {
    store_from_f32(x.data(), dtype, i, kOdd[i]);
  }
  x.freeze();
  gate.freeze();
  ActivateArgs args{};
  args.x = x.data();
  args.gate = gated ? gate.data() : nullptr;
  args.out = out.data();
  args.x_step = args.gate_step = args.out_step = args.width = width;
  args.rows = kRows;
  args.dtype = dtype;
  args.activation = activation;
  kernel.activate(args);
  return bytes_of(out);
}

std::vector<uint8_t> rms_norm(const ElementwiseKernel& kernel, DType dtype, int64_t width, bool weighted, float odd) {
  Random random(static_cast<uint64_t>(width));
  Guarded x(kRows * width * size_of(dtype)), weight(width * size_of(dtype)), out(x.size());
  fill(x, dtype, 4.0f, random);
  fill(weight, dtype, 1.0f, random);
  store_from_f32(x.data(), dtype, width, odd);  // in the second row
  x.freeze();
  weight.freeze();
  RmsNormArgs args{};
  args.x = x.data();
  args.weight = weighted ? weight.data() : nullptr;
  args.out = out.data();
  args.x_step = args.out_step = args.width = width;
  args.rows = kRows;
  args.dtype = dtype;
  args.epsilon = 1e-6f;
  args.weight_offset = width % 2 == 0 ? 1.0f : 0.0f;
  kernel.rms_norm(args);
  return bytes_of(out);
}

// Rows computed number by number, as kernels/elementwise.h describes.
std::vector<uint8_t> expected_layer_norm(const LayerNormArgs& args, int64_t out_bytes) {
  std::vector<uint8_t> out(static_cast<size_t>(out_bytes));
  const float width = static_cast<float>(args.width);
  for (int64_t row = 0; row < args.rows; ++row) {
    const auto x = [&](int64_t i) { return load_as_f32(args.x, args.dtype, row * args.x_step + i); };
    const auto sum = [&](const auto& add) {
      float lanes[16] = {};
      for (int64_t i = 0; i < args.width; ++i) lanes[i % 16] = add(x(i), lanes[i % 16]);
      for (int half = 8; half > 0; half /= 2) {
        for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
      }
      return lanes[0];
    };
    const float mean = sum([](float value, float s) { return s + value; }) / width;
    const float variance = sum([&](float value, float s) { return std::fma(value - mean, value - mean, s); }) / width;
    const float factor = 1.0f / std::sqrt(variance + args.epsilon);
    for (int64_t i = 0; i < args.width; ++i) {
      float value = (x(i) - mean) * factor;
      const float weight = args.weight == nullptr ? 1.0f : load_as_f32(args.weight, args.dtype, i);
      value = args.bias == nullptr ? value * weight : std::fma(value, weight, load_as_f32(args.bias, args.dtype, i));
      store_from_f32(out.data(), args.dtype, row * args.out_step + i, std::isnan(value) ? kNaN : value);
    }
  }
  return out;
}

// Two heads of one position, computed number by number.
std::vector<uint8_t> expected_rotary(const RotaryArgs& args, int64_t out_bytes) {
  std::vector<uint8_t> out(static_cast<size_t>(out_bytes));
  const int64_t half = args.rotary / 2;
  const bool halves = args.layout == RotaryLayout::halves, to_halves = args.layout == RotaryLayout::adjacent_to_halves;
  const bool half_table = to_halves || args.layout == RotaryLayout::adjacent_half_table;
  const auto step = [&](float value) {
    if (args.round_once) return value;
    uint8_t rounded[4];
    store_from_f32(rounded, args.dtype, 0, value);
    return load_as_f32(rounded, args.dtype, 0);
  };
  for (int64_t head = 0; head < args.heads; ++head) {
    const auto x = [&](int64_t i) { return load_as_f32(args.x, args.dtype, head * args.x_step + i); };
    const auto store = [&](int64_t i, float value) {
      if (std::isnan(value)) value = kNaN;
      store_from_f32(out.data(), args.dtype, head * args.out_step + i, value);
    };
    for (int64_t i = 0; i < half; ++i) {
      const int64_t a = halves ? i : 2 * i, b = halves ? i + half : 2 * i + 1;
      const auto factor = [&](const void* table, int64_t at) {
        return load_as_f32(table, args.table_dtype, half_table ? i : at);
      };
      const float first = step(x(a) * factor(args.cos, a)) - step(x(b) * factor(args.sin, a));
      const float second = step(x(b) * factor(args.cos, b)) + step(x(a) * factor(args.sin, b));
      store(to_halves ? i : a, first);
      store(to_halves ? i + half : b, second);
    }
    for (int64_t i = args.rotary; i < args.width; ++i) store(i, x(i));
  }
  return out;
}

class ElementwiseRow : public testing::TestWithParam<RowRef> {};

TEST_P(ElementwiseRow, Activate) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const ElementwiseKernel& kernel = elementwise_kernel(GetParam().index);
  note_exercised(kernel.name);
  for (int a = 0; a < kActivations; ++a) {
    for (const DType dtype : kTypes) {
      for (const int64_t width : kWidths) {
        for (const bool gated : {false, true}) {
          const std::string what =
              std::string(kernel.name) + " activation " + std::to_string(a) + " width " + std::to_string(width);
          SCOPED_TRACE(what);
          set_current_case(what.c_str());
          const auto activation = static_cast<Activation>(a);
          ASSERT_EQ(activate(kernel, activation, dtype, width, gated),
                    activate(choose_elementwise(kPortable), activation, dtype, width, gated));
        }
      }
    }
  }
}

TEST_P(ElementwiseRow, RmsNorm) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const ElementwiseKernel& kernel = elementwise_kernel(GetParam().index);
  note_exercised(kernel.name);
  for (const DType dtype : kTypes) {
    for (const int64_t width : kWidths) {
      for (const float odd : kOdd) {
        const std::string what = std::string(kernel.name) + " width " + std::to_string(width) + " odd " + std::to_string(odd);
        SCOPED_TRACE(what);
        set_current_case(what.c_str());
        for (const bool weighted : {false, true}) {
          ASSERT_EQ(rms_norm(kernel, dtype, width, weighted, odd),
                    rms_norm(choose_elementwise(kPortable), dtype, width, weighted, odd));
        }
      }
    }
  }
}

TEST_P(ElementwiseRow, LayerNorm) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const ElementwiseKernel& kernel = elementwise_kernel(GetParam().index);
  note_exercised(kernel.name);
  for (const DType dtype : kTypes) {
    for (const int64_t width : kWidths) {
      for (const float odd : kOdd) {
        const std::string what = std::string(kernel.name) + " width " + std::to_string(width) + " odd " + std::to_string(odd);
        SCOPED_TRACE(what);
        set_current_case(what.c_str());
        Random random(static_cast<uint64_t>(width));
        Guarded x(kRows * width * size_of(dtype)), weight(width * size_of(dtype)), bias(weight.size()), out(x.size());
        fill(x, dtype, 4.0f, random);
        fill(weight, dtype, 1.0f, random);
        fill(bias, dtype, 1.0f, random);
        store_from_f32(x.data(), dtype, width, odd);  // in the second row
        x.freeze();
        weight.freeze();
        bias.freeze();
        for (int given = 0; given < 4; ++given) {
          LayerNormArgs args{};
          args.x = x.data();
          args.weight = (given & 1) != 0 ? weight.data() : nullptr;
          args.bias = (given & 2) != 0 ? bias.data() : nullptr;
          args.out = out.data();
          args.x_step = args.out_step = args.width = width;
          args.rows = kRows;
          args.dtype = dtype;
          args.epsilon = 1e-5f;
          kernel.layer_norm(args);
          ASSERT_EQ(bytes_of(out), expected_layer_norm(args, out.size())) << given;
          EXPECT_TRUE(out.intact());
        }
      }
    }
  }
}

TEST_P(ElementwiseRow, Rotary) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const ElementwiseKernel& kernel = elementwise_kernel(GetParam().index);
  note_exercised(kernel.name);
  for (int layout = 0; layout < kRotaryLayouts; ++layout) {
    for (const DType dtype : kTypes) {
      for (const auto& [width, rotary] : {std::pair{2, 2}, {32, 32}, {64, 64}, {65, 64}, {40, 30}, {100, 98}}) {
        for (int rounding = 0; rounding < 3; ++rounding) {  // each step; once; once with tables of float32
          const std::string what = std::string(kernel.name) + " layout " + std::to_string(layout) + " rotary " +
                                   std::to_string(rotary) + " rounding " + std::to_string(rounding);
          SCOPED_TRACE(what);
          set_current_case(what.c_str());
          const DType table = rounding == 2 ? DType::f32 : dtype;
          Random random(static_cast<uint64_t>(width));
          Guarded x(2 * width * size_of(dtype)), cos(rotary * size_of(table)), sin(cos.size()), out(x.size());
          fill(x, dtype, 4.0f, random);
          fill(cos, table, 1.0f, random);
          fill(sin, table, 1.0f, random);
          for (int64_t i = 0; i < 2 * width && i < static_cast<int64_t>(std::size(kOdd)) && width > 2; ++i) {
            store_from_f32(x.data(), dtype, i, kOdd[i]);
          }
          x.freeze();
          cos.freeze();
          sin.freeze();
          RotaryArgs args{};
          args.x = x.data();
          args.cos = cos.data();
          args.sin = sin.data();
          args.out = out.data();
          args.x_step = args.out_step = args.width = width;
          args.heads = 2;
          args.rotary = rotary;
          args.dtype = dtype;
          args.table_dtype = table;
          args.layout = static_cast<RotaryLayout>(layout);
          args.round_once = rounding > 0;
          kernel.rotary(args);
          ASSERT_EQ(bytes_of(out), expected_rotary(args, out.size()));
          EXPECT_TRUE(out.intact());
        }
      }
    }
  }
}

TEST_P(ElementwiseRow, Rotate) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const ElementwiseKernel& kernel = elementwise_kernel(GetParam().index);
  note_exercised(kernel.name);
  for (const int64_t block : {16, 32, 64, 128}) {
    for (const int64_t width : {block, 5 * block}) {
      for (const DType dtype : kTypes) {
        for (const bool back : {false, true}) {
          const std::string what = std::string(kernel.name) + " block " + std::to_string(block);
          SCOPED_TRACE(what);
          set_current_case(what.c_str());
          Random random(static_cast<uint64_t>(width));
          Guarded x(width * size_of(dtype)), out(width * 4);
          fill(x, dtype, 4.0f, random);
          store_from_f32(x.data(), dtype, 0, 1e-40f);
          store_from_f32(x.data(), dtype, 1, 6e4f);
          std::vector<float> values;
          for (int64_t i = 0; i < width; ++i) values.push_back(load_as_f32(x.data(), dtype, i));
          x.freeze();
          RotateArgs args{};
          args.x = x.data();
          args.out = reinterpret_cast<float*>(out.data());
          args.width = width;
          args.block = block;
          args.dtype = dtype;
          args.back = back;
          kernel.rotate(args);
          const std::vector<float> expected = contract_rotate(values, block, back);
          ASSERT_EQ(std::memcmp(out.data(), expected.data(), static_cast<size_t>(out.size())), 0);
          args.x = args.out;  // in place
          args.dtype = DType::f32;
          kernel.rotate(args);
          const std::vector<float> again = contract_rotate(expected, block, back);
          ASSERT_EQ(std::memcmp(out.data(), again.data(), static_cast<size_t>(out.size())), 0);
          EXPECT_TRUE(out.intact());
        }
      }
    }
  }
}

TEST_P(ElementwiseRow, Residual) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const ElementwiseKernel& kernel = elementwise_kernel(GetParam().index);
  note_exercised(kernel.name);
  for (const int64_t k : {1, 15, 16, 17, 64, 100, 208}) {
    for (const int64_t group_inputs : {16, 32, 48, 64, 80, 128, 256}) {
      for (const DType dtype : kTypes) {
        const std::string what = std::string(kernel.name) + " " + std::to_string(k) + " in " + std::to_string(group_inputs);
        SCOPED_TRACE(what);
        set_current_case(what.c_str());
        Random random(static_cast<uint64_t>(k + group_inputs));
        Guarded x(k * size_of(dtype)), out(k * 4);
        fill(x, dtype, 4.0f, random);
        std::vector<float> values;
        for (int64_t i = 0; i < k; ++i) values.push_back(load_as_f32(x.data(), dtype, i));
        x.freeze();
        const QuantizedRow row = contract_quantize(values, group_inputs);
        Guarded a((k + 15) / 16 * 16);
        std::memset(a.data(), 0, static_cast<size_t>(a.size()));
        std::memcpy(a.data(), row.a.data(), static_cast<size_t>(k));
        a.freeze();
        kernel.residual({x.data(), reinterpret_cast<const int8_t*>(a.data()), row.scales.data(),
                         reinterpret_cast<float*>(out.data()), k, group_inputs, dtype});
        const std::vector<Segment> segments = segments_of(k, group_inputs);
        for (size_t s = 0; s < segments.size(); ++s) {
          for (int64_t i = segments[s].begin; i < segments[s].end; ++i) {
            const size_t at = static_cast<size_t>(i);
            const float rest = load_as_f32(out.data(), DType::f32, i);
            ASSERT_EQ(rest, std::fma(-row.scales[s], static_cast<float>(row.a[at]), values[at])) << i;
            // The residual is exact.
            ASSERT_EQ(double{rest}, double{values[at]} - double{row.scales[s]} * row.a[at]) << i;
          }
        }
        EXPECT_TRUE(out.intact());
      }
    }
  }
}

TEST_P(ElementwiseRow, AddPlanes) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const ElementwiseKernel& kernel = elementwise_kernel(GetParam().index);
  note_exercised(kernel.name);
  for (const int64_t width : {1, 15, 16, 17, 64, 100}) {
    for (const DType dtype : kTypes) {
      const std::string what = std::string(kernel.name) + " width " + std::to_string(width);
      SCOPED_TRACE(what);
      set_current_case(what.c_str());
      Random random(static_cast<uint64_t>(width));
      const int64_t whole = (width + 15) / 16, step = 16 * whole, biases_step = 73;  // of no alignment
      Guarded planes(2 * kRows * step * 4), biases((whole - 1) * biases_step + 64), out(kRows * width * size_of(dtype));
      fill(planes, DType::f32, 4.0f, random);
      fill(biases, DType::f32, 1.0f, random);
      const float odd[] = {kInfinity, -kInfinity, -0.0f, 1e-40f, 3e38f};
      for (int64_t i = 0; i < 5 && i < width; ++i) store_from_f32(planes.data(), DType::f32, i, odd[i]);
      planes.freeze();
      biases.freeze();
      AddPlanesArgs args{};
      args.planes = reinterpret_cast<const float*>(planes.data());
      args.biases = biases.data();
      args.out = out.data();
      args.planes_step = step;
      args.out_step = args.width = width;
      args.biases_step = biases_step;
      args.rows = kRows;
      args.dtype = dtype;
      kernel.add_planes(args);
      std::vector<uint8_t> expected(static_cast<size_t>(out.size()));
      for (int64_t row = 0; row < kRows; ++row) {
        for (int64_t i = 0; i < width; ++i) {
          float bias;
          std::memcpy(&bias, biases.data() + i / 16 * biases_step + i % 16 * 4, sizeof bias);
          const float y1 = load_as_f32(planes.data(), DType::f32, 2 * row * step + i);
          const float y2 = load_as_f32(planes.data(), DType::f32, (2 * row + 1) * step + i);
          store_from_f32(expected.data(), dtype, row * width + i, y1 + (y2 - bias));
        }
      }
      ASSERT_EQ(bytes_of(out), expected);
      EXPECT_TRUE(out.intact());
    }
  }
}

TEST_P(ElementwiseRow, FloatProducts) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const ElementwiseKernel& kernel = elementwise_kernel(GetParam().index);
  note_exercised(kernel.name);
  for (const int64_t k : {0, 1, 15, 16, 17, 64, 100}) {
    for (const int64_t columns : {1, 3, 4, 9}) {
      const std::string what = std::string(kernel.name) + " k " + std::to_string(k) + " columns " + std::to_string(columns);
      SCOPED_TRACE(what);
      set_current_case(what.c_str());
      Random random(static_cast<uint64_t>(k));
      Guarded x(kRows * k * 4), weights(columns * k * 4), out(kRows * columns * 4);
      fill(x, DType::f32, 4.0f, random);
      fill(weights, DType::f32, 1.0f, random);
      const float odd[] = {-0.0f, 1e-40f, -1e-40f, 1e-25f, 3e20f};
      for (int64_t i = 0; i < 5 && i < k; ++i) store_from_f32(x.data(), DType::f32, i, odd[i]);
      x.freeze();
      weights.freeze();
      FloatProductsArgs args{};
      args.x = reinterpret_cast<const float*>(x.data());
      args.weights = reinterpret_cast<const float*>(weights.data());
      args.out = reinterpret_cast<float*>(out.data());
      args.x_step = args.weights_step = args.k = k;
      args.out_step = args.columns = columns;
      args.rows = kRows;
      kernel.float_products(args);
      std::vector<uint8_t> expected(static_cast<size_t>(out.size()));
      for (int64_t i = 0; i < kRows * columns; ++i) {
        float lanes[16] = {};
        for (int64_t j = 0; j < (k + 15) / 16 * 16; ++j) {
          float& lane = lanes[j % 16];
          lane = j >= k ? lane + 0.0f : std::fma(args.x[i / columns * k + j], args.weights[i % columns * k + j], lane);
        }
        for (int half = 8; half > 0; half /= 2) {
          for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
        }
        store_from_f32(expected.data(), DType::f32, i, lanes[0]);
      }
      ASSERT_EQ(bytes_of(out), expected);
      EXPECT_TRUE(out.intact());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, ElementwiseRow, testing::ValuesIn(elementwise_rows()), test_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ElementwiseRow);

}  // namespace
}  // namespace lowbit::test
