// Tests the kernels of a library before it is accepted.
#pragma once

#include "../kernels/registry.h"
#include "../kernels/status.h"

namespace lowbit {

// Runs each kernel of a checked table on matrices of each kind that the kernel reads, except kernels that this CPU lacks or
// LOWBIT_ISA forbids. Compares the results with those of the portable kernels: equal bits for panel16, otherwise within the
// format's tolerance. Also refuses kernels that support none of the matrices or write out of bounds. An error names the kernel,
// the shape, the element, and what was found and expected. Takes about 100 ms per kernel.
Status try_kernels(const LoadedLibrary& library);

}  // namespace lowbit
