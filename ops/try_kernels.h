// Tests the kernels of a library before it is accepted.
#pragma once

#include "../kernels/registry.h"
#include "../kernels/status.h"

namespace lowbit {

// Runs each kernel of a checked table, except those that this CPU lacks or LOWBIT_ISA forbids, on matrices of each kind that
// the kernel reads, and compares what it writes with the portable kernels: equal bits for panel16, within the format's
// tolerance otherwise. Also refuses kernels that support none of the matrices or write out of bounds.
// An error names the kernel, the shape, the element, and what was found and expected. Takes some 100 ms a kernel.
Status try_kernels(const LoadedLibrary& library);

}  // namespace lowbit
