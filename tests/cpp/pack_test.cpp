// Packing and unpacking preserve every value that the format can represent; other values are refused.

#include "../../kernels/pack.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "support/guarded.h"
#include "support/matrix.h"

namespace lowbit::test {
namespace {

// A matrix with `groups` groups of 16 per row, given scales in row order, and random codes.
Weights matrix_of(const std::vector<float>& scales, int64_t groups, int bits = 4, std::vector<float> mins = {}) {
  const int64_t n = static_cast<int64_t>(scales.size()) / groups;
  Random random(9);
  Weights w = random_weights(
      layout_of(n, groups * 16, bits, 16, mins.empty() ? Mapping::symmetric : Mapping::affine, false), random);
  w.scales = scales;
  w.mins = std::move(mins);
  return w;
}

std::vector<float> scales_back(const Weights& w) { return unpacked(w.layout, packed(w)).scales; }

TEST(Pack, EveryShapeComesBack) {
  Random random(4);
  for (int bits = 1; bits <= 8; ++bits) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {3, 17}, {16, 32}, {17, 33}, {35, 100}, {16, 31}}) {
      for (const int64_t group_size : {0, 16, 32, 48, 128}) {
        for (const Mapping mapping : {Mapping::symmetric, Mapping::affine}) {
          const Layout layout = layout_of(n, k, bits, group_size, mapping, n % 2 == 1);
          Weights w = random_weights(layout, random);
          for (float& s : w.scales) s = std::ldexp(std::rint(std::ldexp(s, 14)), -14);  // exact in float16
          for (float& m : w.mins) m = std::ldexp(std::rint(std::ldexp(m, 9)), -9);
          const std::vector<uint8_t> bytes = packed(w);
          const Weights back = unpacked(layout, bytes);
          ASSERT_EQ(back.codes, w.codes) << bits << " bits, " << n << " x " << k << ", groups of " << group_size;
          ASSERT_EQ(back.scales, w.scales) << bits << " bits, " << n << " x " << k << ", groups of " << group_size;
          ASSERT_EQ(back.mins, w.mins);
          ASSERT_EQ(back.bias, w.bias);
          const Decoded decoded = decode(bytes.data(), layout);
          ASSERT_EQ(decoded.codes, w.codes) << "by the test's decoder";
        }
      }
    }
  }
}

TEST(Pack, InputsAreReadAndOutputsWrittenInBounds) {
  Random random(4);
  for (int bits = 1; bits <= 8; ++bits) {
    const Layout layout = layout_of(19, 45, bits, 32, Mapping::affine, true);
    const Weights w = random_weights(layout, random);
    const auto guard = [](const auto& values) {
      auto buffer = std::make_unique<Guarded>(static_cast<int64_t>(values.size() * sizeof values[0]));
      std::memcpy(buffer->data(), values.data(), values.size() * sizeof values[0]);
      buffer->freeze();
      return buffer;
    };
    const auto codes = guard(w.codes), scales = guard(w.scales), mins = guard(w.mins), bias = guard(w.bias);
    Guarded out(layout.total_bytes), checksums(layout.panels * 8);
    const PackArgs args{codes->data(), scales->as<float>(), mins->as<float>(), bias->as<float>()};
    ASSERT_TRUE(pack_panels(layout, args, 0, layout.panels, out.data(), checksums.as<uint64_t>()).ok());
    seal(layout, checksums.as<uint64_t>(), out.data());
    EXPECT_EQ(out.bytes(), packed(w));
    for (const Guarded* buffer : {codes.get(), scales.get(), mins.get(), bias.get(), &out, &checksums}) {
      EXPECT_TRUE(buffer->intact());
    }
    out.freeze();
    Guarded codes_out(codes->size()), scales_out(scales->size()), mins_out(mins->size()), bias_out(bias->size());
    unpack_panels(layout, out.data(), 0, layout.panels,
                  {codes_out.data(), scales_out.as<float>(), mins_out.as<float>(), bias_out.as<float>()});
    EXPECT_EQ(codes_out.bytes(), codes->bytes());
    EXPECT_EQ(bias_out.bytes(), bias->bytes());
    for (const Guarded* buffer : {&out, &codes_out, &scales_out, &mins_out, &bias_out}) EXPECT_TRUE(buffer->intact());
  }
}

// The previous content of the buffer has no effect, and panels can be packed one by one.
TEST(Pack, BytesAreDeterministic) {
  Random random(6);
  for (int bits = 1; bits <= 8; ++bits) {
    const Layout layout = layout_of(37, 50, bits, 48, Mapping::symmetric, false);
    const Weights w = random_weights(layout, random);
    const std::vector<uint8_t> expected = packed(w);
    for (const uint8_t before : {0x00, 0xff, 0x5a}) {
      std::vector<uint8_t> bytes(expected.size(), before);
      std::vector<uint64_t> checksums(static_cast<size_t>(layout.panels));
      for (int64_t p = layout.panels - 1; p >= 0; --p) {
        ASSERT_TRUE(pack_panels(layout, pack_args(w), p, p + 1, bytes.data(), checksums.data()).ok());
      }
      seal(layout, checksums.data(), bytes.data());
      ASSERT_EQ(bytes, expected);
    }
  }
}

TEST(Pack, Float16ScalesComeBackExactly) {
  // Every positive float16 in rows with both signs, like scales and mins of a GGUF file.
  std::vector<float> scales, mins;
  for (int half = 1; half < 0x7c00; half += 3) {
    for (const int other : {half ^ 0x8000, 0x0001, half})
      scales.push_back(static_cast<float>(value_of_half(static_cast<uint16_t>(other))));
  }
  EXPECT_EQ(scales_back(matrix_of(scales, 3)), scales) << "next to the smallest float16: range of 2^40";
  for (const float s : scales) mins.push_back(-0.5f * s);
  mins[1] = 0.0f;
  for (float& s : scales) s = s == 0x1p-24f ? 0.0f : s;
  for (float& m : mins) m = std::fabs(m) < 0x1p-14f ? 0.0f : m;
  const Weights w = matrix_of(scales, 3, 4, mins);
  const Weights back = unpacked(w.layout, packed(w));
  EXPECT_EQ(back.scales, scales);
  EXPECT_EQ(back.mins, mins);
}

// A float32 scale is rounded to 11 significant bits (half a unit of 2^-10: 2^-11), after a division that rounds at
// 2^-24, and is multiplied back, which rounds at 2^-24. Scales 2^-29 times the row's largest are still normal float16 numbers.
// For smaller scales the unit is fixed: 2^-24 of float16, relative to a largest scale of 2^15.
TEST(Pack, Float32ScalesAreRoundedTo11Bits) {
  Random random(8);
  constexpr int64_t kRows = 400, kGroups = 5;
  std::vector<float> scales;
  for (int64_t row = 0; row < kRows; ++row) {
    const int size = static_cast<int>(random.between(int64_t{-90}, 90));
    for (int64_t g = 0; g < kGroups; ++g) {
      const float value =
          std::ldexp(random.between(0.5f, 1.0f), size - static_cast<int>(random.below(g == 0 ? 1 : 36)));
      scales.push_back(random.below(2) ? value : -value);
    }
  }
  const std::vector<float> back = scales_back(matrix_of(scales, kGroups));
  for (int64_t row = 0; row < kRows; ++row) {
    float largest = 0.0f;
    for (int64_t g = 0; g < kGroups; ++g)
      largest = std::fmax(largest, std::fabs(scales[static_cast<size_t>(row * kGroups + g)]));
    for (int64_t g = 0; g < kGroups; ++g) {
      const size_t at = static_cast<size_t>(row * kGroups + g);
      const double relative = 0x1p-11 + 0x1.1p-23;
      const double bound = std::fmax(std::fabs(scales[at]) * relative, largest * 0x1p-15 * 0x1p-25 * (1 + 0x1p-22));
      EXPECT_LE(std::fabs(double{back[at]} - scales[at]), bound) << "row " << row << " group " << g;
      EXPECT_TRUE(std::fabs(scales[at]) != largest || back[at] == scales[at]) << "the largest of a row is exact";
    }
  }
}

TEST(Pack, PackingAgainChangesNoValue) {
  Random random(8);
  for (const float magnitude : {0.02f, 1e-30f, 1e-38f, 1e-42f, 1e30f}) {
    for (const Mapping mapping : {Mapping::symmetric, Mapping::affine}) {
      const Layout layout = layout_of(40, 70, 5, 16, mapping, true);
      const Weights once = unpacked(layout, packed(random_weights(layout, random, magnitude)));
      const std::vector<uint8_t> bytes = packed(once);
      const Weights twice = unpacked(layout, bytes);
      EXPECT_EQ(twice.codes, once.codes);
      EXPECT_EQ(twice.scales, once.scales);
      EXPECT_EQ(twice.mins, once.mins);
      EXPECT_EQ(twice.bias, once.bias);
      EXPECT_EQ(packed(twice), bytes);
    }
  }
}

TEST(Pack, RowsOfZeros) {
  const Weights w = matrix_of({0.0f, 0.0f, -0.0f, 0.0f, 0.5f, 0.0f}, 2);
  const std::vector<uint8_t> bytes = packed(w);
  const Decoded decoded = decode(bytes.data(), w.layout);
  EXPECT_EQ(decoded.row_scale[0], 1.0f);
  EXPECT_EQ(decoded.row_scale[1], 1.0f);
  EXPECT_EQ(decoded.row_sum[0], 0.0f);
  EXPECT_EQ(unpacked(w.layout, bytes).scales, w.scales);
}

TEST(Pack, ExtremeScales) {
  // The largest, huge next to small, the smallest normal, and subnormal numbers. None may give infinity or NaN.
  const std::vector<float> scales = {FLT_MAX, -FLT_MAX, FLT_MAX, 1e-30f,  3e38f,     1.0f,
                                     FLT_MIN, FLT_MIN,  1e-38f,  -1e-39f, 0x1p-149f, 0x1p-148f};
  const Weights w = matrix_of(scales, 2);
  const std::vector<uint8_t> bytes = packed(w);
  const std::vector<float> back = unpacked(w.layout, bytes).scales;
  const Decoded decoded = decode(bytes.data(), w.layout);
  for (size_t i = 0; i < scales.size(); ++i) {
    ASSERT_TRUE(std::isfinite(back[i])) << i;
    const double row_scale = decoded.row_scale[i / 2];
    EXPECT_GE(row_scale, 0x1p-126);
    const double bound = std::fmax(std::fabs(scales[i]) * (0x1p-11 + 0x1.1p-23), row_scale * 0x1p-25) + 0x1p-149;
    EXPECT_LE(std::fabs(double{back[i]} - scales[i]), bound) << i;
  }
  EXPECT_EQ(back[0], FLT_MAX);
  EXPECT_EQ(back[1], -FLT_MAX);
  EXPECT_EQ(back[6], FLT_MIN);
}

TEST(Pack, RowSumIsTheSumOfTheWeights) {
  Random random(12);
  for (int bits = 1; bits <= 8; ++bits) {
    for (const Mapping mapping : mappings_of_width(bits)) {
      const Layout layout = layout_of(18, 77, bits, 48, mapping, false);
      const Decoded d = decode(packed(random_weights(layout, random)).data(), layout);
      for (int64_t row = 0; row < layout.n; ++row) {
        double sum = 0.0, magnitude = 0.0;
        for (int64_t i = 0; i < layout.k; ++i) {
          const double w = d.weight(row, i) / d.row_scale[static_cast<size_t>(row)];
          sum += w;
          magnitude += std::fabs(w);
        }
        // One rounding to float32, and 77 + 2 + 2 roundings in float64 in both sums.
        EXPECT_LE(std::fabs(d.row_sum[static_cast<size_t>(row)] - sum), std::fabs(sum) * 0x1p-24 + magnitude * 0x1p-44);
      }
    }
  }
}

testing::AssertionResult refused(const Weights& w, const char* says) {
  std::vector<uint8_t> bytes(static_cast<size_t>(w.layout.total_bytes));
  std::vector<uint64_t> checksums(static_cast<size_t>(w.layout.panels));
  const Status status = pack_panels(w.layout, pack_args(w), 0, w.layout.panels, bytes.data(), checksums.data());
  if (status.ok()) return testing::AssertionFailure() << "accepted";
  if (std::strstr(status.message(), says) != nullptr) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "the message is '" << status.message() << "', without '" << says << "'";
}

TEST(Pack, CodesBeyondTheWidthAreRefused) {
  Random random(1);
  for (int bits = 1; bits < 8; ++bits) {
    const Layout layout = layout_of(20, 70, bits, 0, Mapping::symmetric, false);
    const int limit = 1 << bits;
    for (const auto& [row, input] : {std::pair{0, 0}, {3, 31}, {19, 69}, {16, 64}}) {
      for (const int code : {limit, limit + 1, 255}) {
        Weights w = random_weights(layout, random);
        if (code == limit) std::fill(w.codes.begin(), w.codes.end(), uint8_t{0});  // all codes at the limit
        w.codes[static_cast<size_t>(row * 70 + input)] = static_cast<uint8_t>(code);
        const std::string says = "code [" + std::to_string(row) + ", " + std::to_string(input) + "] is " +
                                 std::to_string(code) + "; expected less than " + std::to_string(limit);
        EXPECT_TRUE(refused(w, says.c_str()));
      }
    }
  }
}

TEST(Pack, NumbersThatAreNotFiniteAreRefused) {
  Random random(1);
  const Layout layout = layout_of(20, 70, 4, 32, Mapping::affine, true);
  const Weights good = random_weights(layout, random);
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const auto with = [&](std::vector<float> Weights::* values, size_t at, float value) {
    Weights w = good;
    (w.*values)[at] = value;
    return w;
  };
  EXPECT_TRUE(refused(with(&Weights::scales, 0, nan), "scale [0, 0] is nan; expected a finite value"));
  EXPECT_TRUE(refused(with(&Weights::scales, 59, infinity), "scale [19, 2] is inf; expected a finite value"));
  EXPECT_TRUE(refused(with(&Weights::mins, 4, -infinity), "min [1, 1] is -inf; expected a finite value"));
  EXPECT_TRUE(refused(with(&Weights::mins, 50, nan), "min [16, 2] is nan"));
  EXPECT_TRUE(refused(with(&Weights::bias, 17, nan), "bias [17] is nan; expected a finite value"));
  EXPECT_TRUE(refused(with(&Weights::bias, 0, infinity), "bias [0] is inf"));
}

}  // namespace
}  // namespace lowbit::test
