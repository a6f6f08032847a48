// The memory that a linear row may work in, between guard pages and full of NaN, as the operators promise nothing of its
// content.
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

// As much as the row asks for.
inline void* linear_scratch(const LinearKernel& row, const Layout& layout, int64_t m) {
  const int64_t asked = row.scratch_bytes == nullptr ? 0 : row.scratch_bytes(row.context, layout, m, 1);
  return linear_scratch(std::max(kLinearScratchBytes, asked));
}

}  // namespace lowbit::test
