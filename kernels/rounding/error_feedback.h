// Rounds weights in order, and compensates each error by the inputs that follow. Portable C++ only, with the same bits on every
// machine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../export.h"

namespace lowbit {

// A run of inputs of a matrix [rows, inputs], transposed: an input is a row of memory.
struct ErrorFeedbackArgs {
  const float* weights;  // [inputs, rows]
  const float* factor;  // [inputs, inputs]: row i has the factors for the errors of the inputs before i, then the divisor
  const float* pull;    // [inputs, inputs]: row i has the factors for the values of the inputs before i; nullptr: none
  const float* scales;  // [inputs, rows], or [1, rows] for all inputs
  const float* mins;    // like scales; nullptr: symmetric, or levels
  const float* table;   // the levels in ascending order; nullptr: whole numbers
  int64_t inputs, rows;
  int64_t scale_stride;  // from the scales of one input to those of the next: rows, or 0
  int bits;
  float* values;  // out [inputs, rows]: the values before rounding
  float* levels;  // out [inputs, rows]
  float* errors;  // out [inputs, rows]
};

// Floats of scratch memory that a call needs.
LOWBIT_API int64_t error_feedback_scratch(int64_t inputs);

// Rounds rows [begin, end), for each input i in order:
//   value = value - sum of factor[i][j] * error[j] + pull[i][j] * value[j] over the inputs j < i
//   level = the nearest level of the grid;  error = (value - rounded) / factor[i][i]
LOWBIT_API void error_feedback(const ErrorFeedbackArgs& args, int64_t begin, int64_t end, float* scratch);

}  // namespace lowbit
