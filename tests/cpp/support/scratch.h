// The memory that a linear row may work in, between guard pages and full of NaN, as the operators promise nothing of its
// content.
#pragma once

#include <cstring>

#include "../../../kernels/ukernel.h"
#include "guarded.h"

namespace lowbit::test {

inline void* linear_scratch() {
  static Guarded memory(kLinearScratchBytes);
  std::memset(memory.data(), 0xff, static_cast<size_t>(memory.size()));
  forget(memory.data(), memory.size());
  return memory.data();
}

}  // namespace lowbit::test
