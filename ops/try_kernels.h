// What a kernel library computes, before it is taken.
#pragma once

#include "../kernels/registry.h"
#include "../kernels/status.h"

namespace lowbit {

// Runs each kernel of a checked table, except those that this CPU lacks or LOWBIT_ISA forbids, on matrices of each kind that
// the kernel reads, and compares what it writes with the portable kernels: equal bits for panel16, within the format's
// tolerance otherwise. Refused are also kernels that take none of the matrices or write where they must not.
// An error names the kernel, the shape, the element, and what was found and expected. Takes some 100 ms a kernel.
Status try_kernels(const LoadedLibrary& library);

}  // namespace lowbit
