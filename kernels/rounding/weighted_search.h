// Scales and minimums of groups of weights by weighted search. Portable C++ only, with the same bits on every machine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../export.h"

namespace lowbit {

struct WeightedSearchArgs {
  const float* weights;     // groups x inputs, finite
  const float* importance;  // importance_rows x inputs, finite, not negative; group i has row i % importance_rows
  int64_t inputs;           // inputs of a group
  int64_t importance_rows;
  int bits;       // 1 to 8
  bool affine;
  float* scales;  // out: one per group, not rounded to the values that packing stores
  float* mins;    // out: one per group; nullptr if symmetric
};

// Floats of scratch memory that a call needs.
LOWBIT_API int64_t weighted_search_scratch(int64_t inputs);

// For each group in [begin, end): a scale (and minimum) with a small sum of importance * (weight - rounded)^2. Several ranges
// are tried, and each is refitted to its codes by weighted least squares. The best one is refitted a few times more. Inputs
// without importance do not count, unless the whole group has none: then all count alike.
LOWBIT_API void weighted_search(const WeightedSearchArgs& args, int64_t begin, int64_t end, float* scratch);

}  // namespace lowbit
