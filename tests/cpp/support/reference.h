// The contract of kernels/ukernel.h, restated in plain float32 loops, and the same quantities in float64 with a bound on the
// error of float32 arithmetic.
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

// Begin, end and group of each segment, for k inputs in groups of the given size.
struct Segment {
  int64_t begin, end, group;
};
std::vector<Segment> segments_of(int64_t k, int64_t group_inputs);

// S of each group, from the scales and sums of a row's segments.
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
  std::vector<float> scales;  // one per segment
  std::vector<int32_t> sums;  // one per segment
};
QuantizedRow contract_quantize(const std::vector<float>& x, int64_t group_inputs);

// Rotates a layer's inputs in blocks of this size, or rotates a row of its weights back.
std::vector<float> contract_rotate(std::vector<float> x, int64_t block, bool back = false);

// The positions and options of one row of attention.
struct Sight {
  int64_t begin, end;         // positions
  float cap = 0.0f;           // AttentionArgs::cap
  const float* sink = nullptr;
  const float* key_scales = nullptr;  // of codes, by position; keys and values are then levels; null: none
  const float* value_scales = nullptr;
  bool rotated_keys = false;          // 4-bit codes
  bool rotated_values = false;
};

// The keys or values of a position in an int8 cache.
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

// Converts values to float32 and back, like numeric.h (numeric_test.cpp tests numeric.h independently).
std::vector<uint8_t> to_bytes(const std::vector<float>& values, DType dtype);
std::vector<float> from_bytes(const std::vector<uint8_t>& bytes, DType dtype);

const char* name_of(DType dtype);

// Equal bits; otherwise names the first element that differs.
testing::AssertionResult same_bits(const std::vector<uint8_t>& found, const std::vector<uint8_t>& expected,
                                   DType dtype);

}  // namespace lowbit::test
