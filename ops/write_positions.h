// Writes new positions of one head by an attention kernel.
#pragma once

#include "../kernels/ukernel.h"

namespace lowbit {

// `args` has the position steps of k and v.
inline void write_positions(const AttentionKernel& kernel, AttentionWriteArgs args, int64_t count) {
  args.context = kernel.context;
  if (kernel.writes_several) {
    args.positions = count;
    return kernel.write(args);
  }
  const int64_t item = size_of(args.dtype);
  for (int64_t i = 0; i < count; ++i) {
    kernel.write(args);
    args.k = static_cast<const char*>(args.k) + args.k_position_step * item;
    args.v = static_cast<const char*>(args.v) + args.v_position_step * item;
    ++args.position;
  }
}

}  // namespace lowbit
