// Arm's matrix unit (SME2) is not a core's own: a cluster of cores has one, and more threads on it gain nothing.
#pragma once

#include "../kernels/export.h"
#include "../kernels/status.h"

namespace lowbit {

// How many threads of a call may run kernels for SME2, while the others run those for the cores' own units (the bits
// are the same): LOWBIT_SME_THREADS, 0 to 1024, or without it one for each cluster that the system tells of, and at
// least one. Read once.
LOWBIT_API int sme_threads();

#if defined(__linux__)
// The clusters of CPUs that a directory of the shape of /sys/devices/system/cpu tells of.
LOWBIT_API int clusters_in(const char* directory);
#endif

// An error when LOWBIT_SME_THREADS is no such number: linear() returns it then.
LOWBIT_API const Status& sme_threads_status();

}  // namespace lowbit
