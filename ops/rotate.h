// Rotation of the inputs of packed weights: rotate_inputs() of kernels/ukernel.h.
#pragma once

#include "../kernels/registry.h"

namespace lowbit {

// Rotates one row of `width` values in blocks of `block`. x may equal `out` if it is float32.
inline void rotate_row(const void* x, DType dtype, float* out, int64_t width, int64_t block, bool back = false) {
  RotateArgs args{};
  args.x = x;
  args.out = out;
  args.width = width;
  args.block = block;
  args.dtype = dtype;
  args.back = back;
  choose_elementwise(active_isa()).rotate(args);
}

}  // namespace lowbit
