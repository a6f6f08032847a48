// Every kernel of the quantization table. The portable kernel is compared with the contract in float32 (equal bits) and with
// exact results (a derived bound), all others with the portable kernel (equal bits).

#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "support/coverage.h"
#include "support/guarded.h"
#include "support/random.h"
#include "support/reference.h"

namespace lowbit::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Pattern {
  const char* name;
  float (*value)(int64_t i, int64_t k, Random& random);
};

constexpr Pattern kPatterns[] = {
    {"normal", [](int64_t, int64_t, Random& r) { return r.normal(); }},
    {"positive", [](int64_t, int64_t, Random& r) { return r.between(0.5f, 2.0f); }},
    {"negative", [](int64_t, int64_t, Random& r) { return r.between(-2.0f, -0.5f); }},
    {"constant_positive", [](int64_t, int64_t, Random&) { return 3.0f; }},
    {"constant_negative", [](int64_t, int64_t, Random&) { return -0.7f; }},
    {"all_zero", [](int64_t, int64_t, Random&) { return 0.0f; }},
    {"all_minus_zero", [](int64_t, int64_t, Random&) { return -0.0f; }},
    {"zeros_of_both_signs",
     [](int64_t i, int64_t, Random& r) { return i % 3 == 0   ? r.normal()
                                                : i % 3 == 1 ? -0.0f
                                                             : 0.0f; }},
    {"ties",
     [](int64_t i, int64_t, Random& r) { return i % 8 == 0 ? 127.5f : static_cast<float>(r.below(256)) * 0.5f; }},
    {"one_outlier", [](int64_t i, int64_t k, Random& r) { return i == k / 2 ? 1e6f : r.normal(); }},
    {"negative_outlier", [](int64_t i, int64_t k, Random& r) { return i == k - 1 ? -3e4f : r.normal(); }},
    {"extremes_1e38", [](int64_t i, int64_t, Random& r) { return (i % 2 ? 1e38f : -1e38f) * r.unit(); }},
    {"largest_floats", [](int64_t i, int64_t, Random&) { return i % 2 ? FLT_MAX : -FLT_MAX; }},
    {"just_quantizable", [](int64_t i, int64_t, Random& r) { return i % 16 ? 0x1p-119f * r.normal() : 0x1.8p-119f; }},
    {"just_below_the_limit", [](int64_t i, int64_t, Random& r) { return i % 16 ? 0x1p110f * r.unit() : -0x1.fbp110f; }},
    {"just_beyond_the_limit", [](int64_t i, int64_t, Random& r) { return i % 16 ? 0x1p110f * r.unit() : -0x1.fdp110f; }},
    {"smallest_range",
     [](int64_t i, int64_t, Random& r) { return i % 16 ? 0x1p-120f * r.unit() : 0x1.fc0004p-120f; }},  // 127 * 2^-126
    {"range_just_too_small", [](int64_t i, int64_t, Random& r) { return i % 16 ? 0x1p-120f * r.unit() : 0x1.fap-120f; }},
    {"range_too_small", [](int64_t, int64_t, Random& r) { return 0x1p-122f * r.normal(); }},
    {"subnormal", [](int64_t, int64_t, Random& r) { return 0x1p-140f * r.normal(); }},
    {"half_subnormal", [](int64_t, int64_t, Random& r) { return 0x1p-22f * r.normal(); }},
    {"nan_first", [](int64_t i, int64_t, Random& r) { return i == 0 ? kNan : r.normal(); }},
    {"nan_last", [](int64_t i, int64_t k, Random& r) { return i == k - 1 ? -kNan : r.normal(); }},
    {"infinity", [](int64_t i, int64_t k, Random& r) { return i == k / 2 ? kInfinity : r.normal(); }},
    {"minus_infinity_last", [](int64_t i, int64_t k, Random& r) { return i == k - 1 ? -kInfinity : r.normal(); }},
};

constexpr int64_t kLengths[] = {1,  2,  3,  7,  8,  15, 16,  17,  31,  32,  33,
                                47, 48, 49, 63, 64, 65, 100, 127, 130, 257, 1000};
constexpr int64_t kGroups[] = {16, 32, 48, 64, 80, 128, 0};

struct Result {
  std::vector<uint8_t> a, scales, sums, group_sums;
  bool operator==(const Result&) const = default;
};

Result run(const QuantizeKernel& kernel, const std::vector<uint8_t>& x_bytes, DType dtype, int64_t k, int64_t group,
           Wall wall, int64_t misaligned, bool with_group_sums = true) {
  const int64_t padded = (k + 31) / 32 * 32;
  const int64_t group_inputs = group == 0 ? padded : group;
  Guarded x(static_cast<int64_t>(x_bytes.size()), wall, misaligned);
  std::memcpy(x.data(), x_bytes.data(), x_bytes.size());
  x.freeze();
  const int64_t segment_bytes = static_cast<int64_t>(segments_of(k, group_inputs).size()) * 4;
  const int64_t group_bytes = (k + group_inputs - 1) / group_inputs * 4;
  Guarded a(padded, wall), scales(segment_bytes, wall), sums(segment_bytes, wall), group_sums(group_bytes, wall);
  std::vector<Guarded*> outputs = {&a, &scales, &sums, &group_sums};
  for (Guarded* out : outputs) std::memset(out->data(), 0x5c, static_cast<size_t>(out->size()));
  kernel.run({.x = x.data(),
              .x_dtype = dtype,
              .k = k,
              .k_padded = padded,
              .group_inputs = group_inputs,
              .a = a.as<int8_t>(),
              .scales = scales.as<float>(),
              .sums = sums.as<int32_t>(),
              .group_sums = with_group_sums ? group_sums.as<float>() : nullptr});
  EXPECT_TRUE(x.intact()) << "wrote to x";
  for (const Guarded* out : outputs) EXPECT_TRUE(out->intact()) << "wrote outside of an output";
  return {a.bytes(), scales.bytes(), sums.bytes(), group_sums.bytes()};
}

int64_t inputs_of(int64_t group, size_t k) { return group == 0 ? static_cast<int64_t>((k + 31) / 32 * 32) : group; }

Result contract(const std::vector<float>& x, int64_t group) {
  const int64_t group_inputs = inputs_of(group, x.size());
  const QuantizedRow q = contract_quantize(x, group_inputs);
  const std::vector<Segment> segments = segments_of(static_cast<int64_t>(x.size()), group_inputs);
  Result result;
  result.a.assign((x.size() + 31) / 32 * 32, 0);
  std::memcpy(result.a.data(), q.a.data(), q.a.size());
  const auto raw = [](const auto& values) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(values.data());
    return std::vector<uint8_t>(bytes, bytes + values.size() * sizeof values[0]);
  };
  result.scales = raw(q.scales);
  result.sums = raw(q.sums);
  result.group_sums = raw(contract_group_sums(segments, q.scales.data(), q.sums.data()));
  return result;
}

// |x - t a| <= t (0.5 + e): 1/t and the product x * inv are both rounded, by u = 2^-24 relative to at most 127 (1 + 2^-21). So
// e <= 127 * 2 u (1 + 2^-20) < 2^-15, and rounding to an integer adds 0.5. The integer is at most 127, because it is the
// nearest to at most 127 (1 + 2^-21).
void check_against_real_numbers(const std::vector<float>& x, int64_t group, const Result& result) {
  size_t s = 0;
  for (const Segment& segment : segments_of(static_cast<int64_t>(x.size()), inputs_of(group, x.size()))) {
    float scale;
    std::memcpy(&scale, result.scales.data() + 4 * s++, 4);
    for (int64_t i = segment.begin; i < segment.end; ++i) {
      const double value = x[static_cast<size_t>(i)];
      const double restored = double{scale} * static_cast<int8_t>(result.a[static_cast<size_t>(i)]);
      // A segment whose scale would be below 2^-126 becomes zero.
      const double bound = scale == 0.0f ? 0x1p-119 : scale * (0.5 + 0x1p-15);
      EXPECT_LE(std::fabs(value - restored), bound) << "x[" << i << "] = " << value;
    }
  }
}

class QuantizeRow : public testing::TestWithParam<RowRef> {
 protected:
  bool case_is_right(const QuantizeKernel& kernel, const Pattern& pattern, DType dtype, int64_t k) {
    Random random(static_cast<uint64_t>(k));
    std::vector<float> x;
    for (int64_t i = 0; i < k; ++i) x.push_back(pattern.value(i, k, random));
    const std::vector<uint8_t> bytes = to_bytes(x, dtype);
    x = from_bytes(bytes, dtype);
    bool finite = true;
    for (const float value : x) finite = finite && std::fabs(value) < 0x1.fcp110f;  // 127 * 2^104: beyond, all is NaN
    for (const int64_t group : kGroups) {
      for (const auto& [wall, misaligned] : {std::pair{Wall::after, 0}, {Wall::after, 1}, {Wall::before, 0}}) {
        const std::string what = std::string(kernel.name) + " " + pattern.name + " " + name_of(dtype) +
                                 " k=" + std::to_string(k) + " group=" + std::to_string(group);
        SCOPED_TRACE(what);
        set_current_case(what.c_str());
        const Result result = run(kernel, bytes, dtype, k, group, wall, misaligned);
        const bool is_portable = kernel.isa == kPortable;
        const Result expected =
            is_portable ? contract(x, group) : run(choose_quantize(kPortable), bytes, dtype, k, group, Wall::after, 0);
        EXPECT_EQ(result.a, expected.a) << "values";
        EXPECT_EQ(result.scales, expected.scales) << "scales";
        EXPECT_EQ(result.sums, expected.sums) << "sums";
        EXPECT_EQ(result.group_sums, expected.group_sums) << "group sums";
        if (is_portable && finite) check_against_real_numbers(x, group, result);
        if (HasFailure()) return false;
      }
    }
    return true;
  }
};

TEST_P(QuantizeRow, SameBits) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const QuantizeKernel& kernel = quantize_kernel(GetParam().index);
  note_exercised(kernel.name);
  for (const Pattern& pattern : kPatterns) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const int64_t k : kLengths) {
        if (!case_is_right(kernel, pattern, dtype, k)) return;
      }
    }
  }
}

// Many random ranges, so that scales and values round in every possible way.
TEST_P(QuantizeRow, RandomRanges) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const QuantizeKernel& kernel = quantize_kernel(GetParam().index);
  Random random(7);
  for (int repeat = 0; repeat < 3000; ++repeat) {
    std::vector<float> x(static_cast<size_t>(random.between(int64_t{2}, 40)));
    const float low = random.normal(), high = random.normal();
    const float size = std::ldexp(1.0f, static_cast<int>(random.between(int64_t{-100}, 100)));
    for (float& value : x) value = size * random.between(low, high);
    const int64_t k = static_cast<int64_t>(x.size());
    const Result result = run(kernel, to_bytes(x, DType::f32), DType::f32, k, 16, Wall::after, 0);
    EXPECT_TRUE(result == contract(x, 16)) << "repeat " << repeat;
    check_against_real_numbers(x, 16, result);
    if (HasFailure()) return;
  }
}

// Group sums that are not requested are not written, and change nothing else.
TEST_P(QuantizeRow, WithoutGroupSums) {
  LOWBIT_SKIP_UNLESS_SUPPORTED(GetParam());
  const QuantizeKernel& kernel = quantize_kernel(GetParam().index);
  Random random(9);
  for (const int64_t k : kLengths) {
    std::vector<float> x;
    for (int64_t i = 0; i < k; ++i) x.push_back(random.normal());
    for (const int64_t group : kGroups) {
      const Result result = run(kernel, to_bytes(x, DType::f32), DType::f32, k, group, Wall::after, 0, false);
      Result expected = contract(x, group);
      expected.group_sums.assign(expected.group_sums.size(), 0x5c);
      EXPECT_TRUE(result == expected) << "k=" << k << " group=" << group;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, QuantizeRow, testing::ValuesIn(quantize_rows()), test_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(QuantizeRow);

}  // namespace
}  // namespace lowbit::test
