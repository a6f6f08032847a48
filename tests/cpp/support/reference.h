// What the kernels must compute: the contract of kernels/ukernel.h stated once more in plain float32 loops, and the
// same quantities in float64 with a bound on how far float32 arithmetic may be from them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "../../../kernels/numeric.h"
#include "matrix.h"

namespace lowbit::test {

struct Bounded {
  double value, bound;  // |float32 result - value| <= bound
};

// Begins and ends of the segments of k inputs in groups of so many, and the group that each is of.
struct Segment {
  int64_t begin, end, group;
};
std::vector<Segment> segments_of(int64_t k, int64_t group_inputs);

// What the contract makes of the scales and sums of a row's segments: S of each group.
std::vector<float> contract_group_sums(const std::vector<Segment>& segments, const float* scales, const int32_t* sums);

// y of one activation row (k values, and a scale for each segment) and one weight row. The sums of the activations are
// computed from the values.
float contract_linear(const Decoded& w, int64_t row, const int8_t* a, const float* scales);
Bounded exact_linear(const Decoded& w, int64_t row, const int8_t* a, const float* scales);

float contract_embedding(const Decoded& w, int64_t row, int64_t input);
Bounded exact_embedding(const Decoded& w, int64_t row, int64_t input);

// One quantized row of activations.
struct QuantizedRow {
  std::vector<int8_t> a;      // k
  std::vector<float> scales;  // of each segment
  std::vector<int32_t> sums;  // of each segment
};
QuantizedRow contract_quantize(const std::vector<float>& x, int64_t group_inputs);

// Inputs of a layer that rotates them in such blocks; or, back, a row of its weights.
std::vector<float> contract_rotate(std::vector<float> x, int64_t block, bool back = false);

// What one row of attention sees.
struct Sight {
  int64_t begin, end;         // positions
  float cap = 0.0f;           // AttentionArgs::cap
  const float* sink = nullptr;
  const float* key_scales = nullptr;  // of codes, by position: keys and values are their levels; null: none
  const float* value_scales = nullptr;
  bool rotated_keys = false;          // 4-bit codes
  bool rotated_values = false;
};

// A position's keys or values as an int8 cache has them.
struct QuantizedPosition {
  float scale;
  std::vector<int8_t> codes;
};
QuantizedPosition contract_quantize_position(const std::vector<float>& x);
// The same in 4 bits: codes from 0 to 15.
QuantizedPosition contract_quantize_rotated(const std::vector<float>& x);
float level_of_code(int code);

// One row of attention over keys and values position by position: q.size() and value_width values each.
std::vector<float> contract_attention(const std::vector<float>& q, float factor, const std::vector<float>& keys,
                                      const std::vector<float>& values, int64_t value_width, const Sight& sight);
std::vector<Bounded> exact_attention(const std::vector<float>& q, float factor, const std::vector<float>& keys,
                                     const std::vector<float>& values, int64_t value_width, const Sight& sight);

// Values to float32, and back to the type, as numeric.h does it (numeric_test.cpp has its own opinion of that).
std::vector<uint8_t> to_bytes(const std::vector<float>& values, DType dtype);
std::vector<float> from_bytes(const std::vector<uint8_t>& bytes, DType dtype);

const char* name_of(DType dtype);

// Equal bits; otherwise names the first element that differs.
testing::AssertionResult same_bits(const std::vector<uint8_t>& found, const std::vector<uint8_t>& expected,
                                   DType dtype);

}  // namespace lowbit::test
