// Round-to-nearest quantization of weights. Portable C++ only: the compiler vectorizes the loops over a group.
#pragma once

#include "../format.h"
#include "../numeric.h"

namespace lowbit {

struct RoundToNearestArgs {
  const void* weight;  // layout.n rows of layout.k values
  DType dtype;
  int64_t row_stride;  // elements from one row to the next
  bool search;         // also try smaller ranges, keep the one with the least squared error, and fit it to its codes
  uint8_t* codes;      // out: n x k
  float* scales;       // out: n x groups
  float* mins;         // out: n x groups; nullptr if symmetric
};

// Quantizes rows [begin, end). `row` is scratch for layout.k floats. The scales and mins are those that packing stores
// (pack.h), and the codes are the nearest for them.
// Returns an error if a weight is not finite, or so large that the range of its group overflows.
LOWBIT_API Status round_to_nearest(const Layout& layout, const RoundToNearestArgs& args, int64_t begin, int64_t end,
                                   float* row);

}  // namespace lowbit
