// Scratch memory of a linear kernel, between guard pages and full of NaN, because operators do not initialize it.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>

#include "../../../kernels/ukernel.h"
#include "guarded.h"

namespace lowbit::test {

inline void* linear_scratch(int64_t bytes = kLinearScratchBytes) {
  static std::unique_ptr<Guarded> memory;
  if (memory == nullptr || memory->size() != bytes) memory = std::make_unique<Guarded>(bytes);
  std::memset(memory->data(), 0xff, static_cast<size_t>(bytes));
  forget(memory->data(), bytes);
  return memory->data();
}

// The same, with at least the size that the kernel requests.
inline void* linear_scratch(const LinearKernel& row, const Layout& layout, int64_t m) {
  const int64_t asked = row.scratch_bytes == nullptr ? 0 : row.scratch_bytes(row.context, layout, m, 1);
  return linear_scratch(std::max(kLinearScratchBytes, asked));
}

}  // namespace lowbit::test
