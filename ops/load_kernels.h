// Kernels from outside: a vendor's shared library, or a table that the program links.
#pragma once

#include "../kernels/export.h"
#include "../kernels/library.h"
#include "../kernels/status.h"

namespace lowbit {

// Adds the kernels and formats of a shared library (kernels/library.h) to the kernel table, for the rest of the process.
// A `path` without a directory is a file in the current one, or else, but not on Windows, what the system finds where it
// looks for libraries. On Windows it is UTF-8. All kernels are checked, and tried against the portable kernels (try_kernels.h):
// on an error nothing is added. Does nothing when the library is loaded already. On any thread; operators that run meanwhile
// use the old kernels or the new ones.
LOWBIT_API Status load_kernels(const char* path);

// The same for a table that is already in the process. `name` is shown as its origin.
LOWBIT_API Status add_kernels(const lowbit_library& library, const char* name);

}  // namespace lowbit
