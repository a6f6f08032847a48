// The cores of a cluster share one Arm matrix unit (SME2), so more threads on it gain nothing.
#pragma once

#include "../kernels/export.h"
#include "../kernels/status.h"

namespace lowbit {

// Number of threads of a call that may run SME2 kernels; the others run kernels for the cores' own units, with the same bits.
// From LOWBIT_SME_THREADS, 0 to 1024; by default one for each cluster that the system reports, at least one. Read once.
LOWBIT_API int sme_threads();

#if defined(__linux__)
// Number of CPU clusters in a directory like /sys/devices/system/cpu.
LOWBIT_API int clusters_in(const char* directory);
#endif

// An error, which linear() returns, if LOWBIT_SME_THREADS is not such a number.
LOWBIT_API const Status& sme_threads_status();

}  // namespace lowbit
