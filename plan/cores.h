// How many threads a plan has if its user does not say.
#pragma once

#include <vector>

#include "../kernels/export.h"

namespace lowbit {

// One thread for each fast core that the process may use. Cores are fast unless others have far more capacity (big.LITTLE,
// hybrid CPUs); threads that share a core count once. At least 1.
LOWBIT_API int default_threads();

// The number of fast cores among these CPUs. `directory`: /sys/devices/system/cpu of Linux.
LOWBIT_API int count_fast_cores(const char* directory, const std::vector<int>& cpus);

}  // namespace lowbit
