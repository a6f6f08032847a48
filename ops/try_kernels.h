// What a kernel library computes, before it is taken.
#pragma once

#include "../kernels/registry.h"
#include "../kernels/status.h"

namespace lowbit {

// Runs each row of a checked table, but those that this CPU lacks or LOWBIT_ISA forbids, on small matrices of each kind that
// the row reads, and compares what it writes with the portable kernels: equal bits for panel16, within the format's tolerance
// otherwise. An error names the row, the shape, the element, and what was found and expected. Takes some milliseconds a row.
Status try_kernels(const LoadedLibrary& library);

}  // namespace lowbit
