// Loads external kernels: a vendor's shared library, or a table linked into the program.
#pragma once

#include "../kernels/export.h"
#include "../kernels/library.h"
#include "../kernels/status.h"

namespace lowbit {

// Adds the kernels and formats of a shared library (kernels/library.h) to the kernel table, for the rest of the process.
// A `path` without a directory is a file in the current directory or, except on Windows, in the system's library search path.
// On Windows it is UTF-8. All kernels are checked and compared with the portable kernels (try_kernels.h); on an error nothing
// is added. Does nothing if the library is already loaded. May be called on any thread; concurrent operators use the old or the
// new kernels.
LOWBIT_API Status load_kernels(const char* path);

// The same for a table in the process. `name` is reported as its origin.
LOWBIT_API Status add_kernels(const lowbit_library& library, const char* name);

}  // namespace lowbit
