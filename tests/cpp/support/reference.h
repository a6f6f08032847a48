// The contract of kernels/ukernel.h, restated in plain float32 loops, and the same quantities in float64 with a bound on the
// error of float32 arithmetic.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "../../../kernels/numeric.h"
#include "matrix.h"

namespace lowbit::test {

constexpr double kUnit = 0x1p-24;       // half the distance from 1 to the next float32
constexpr double kSmallest = 0x1p-149;  // the smallest positive float32

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

// Recursive halves, then sums and differences: the same operations as in ukernel.h, in another order.
template <class T>
void rotate_block(T* x, size_t size) {
  if (size == 1) return;
  rotate_block(x, size / 2);
  rotate_block(x + size / 2, size / 2);
  const std::vector<T> old(x, x + size);
  for (size_t i = 0; i < size / 2; ++i) {
    x[i] = old[i] + old[i + size / 2];
    x[i + size / 2] = old[i] - old[i + size / 2];
  }
}

// Rotates a layer's inputs in blocks of this size, or rotates a row of its weights back.
std::vector<float> contract_rotate(std::vector<float> x, int64_t block, bool back = false);

// Converts values to float32 and back, like numeric.h (numeric_test.cpp tests numeric.h independently).
std::vector<uint8_t> to_bytes(const std::vector<float>& values, DType dtype);
std::vector<float> from_bytes(const std::vector<uint8_t>& bytes, DType dtype);

const char* name_of(DType dtype);

// Equal bits; otherwise names the first element that differs.
testing::AssertionResult same_bits(const std::vector<uint8_t>& found, const std::vector<uint8_t>& expected,
                                   DType dtype);

}  // namespace lowbit::test
