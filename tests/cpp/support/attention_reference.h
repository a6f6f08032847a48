// Attention and its caches of codes by the contract of kernels/ukernel.h, and in float64 with a bound (reference.h).
#pragma once

#include <cstdint>
#include <vector>

#include "reference.h"

namespace lowbit::test {

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

}  // namespace lowbit::test
