// Where each thread of a call of linears() begins to read weights, so that it can do so before the call.
#pragma once

#include "../kernels/export.h"
#include "parallel.h"
#include "tensor_view.h"

namespace lowbit {

// Panels that are interleaved: each has `bytes`, and the next one begins after it. No panels if the threads have no parts.
struct FirstWeights {
  const uint8_t* begin = nullptr;
  int64_t bytes = 0, panels = 0;
};

// The first panels of a thread's part (Parallel::part). The arguments are those of linears(). If it refuses them, there are
// no panels.
LOWBIT_API FirstWeights first_weights(const TensorView& x, const TensorView* packed, const int64_t* out_features, int64_t count,
                                      const TensorView& out, const Parallel& parallel, int part);

}  // namespace lowbit
