// Kernels, and packed formats, from a shared library: what it exports, for libraries in C++. The operators
// load it at run time (ops/load_kernels.h); nothing is built again. lowbit_ukernel.h has the structures, and is all that a
// library in C needs.
//
// The library defines one function:
//
//   extern "C" LOWBIT_API const lowbit::KernelLibrary* lowbit_kernels(uint32_t abi);
//
// Kernels of Format::panel16 keep the contract of ukernel.h to the bit, so that a result does not depend on who computed
// it. A format of the vendor's own has its own rounding, and says how much that is. All kernels are tried at load, and a
// library with a kernel that computes something else is refused.
#pragma once

#include "pack.h"
#include "ukernel.h"

namespace lowbit {

// Changes with every structure that a library and its host share, unless that only grew at its end.
inline constexpr uint32_t kKernelAbi = LOWBIT_KERNEL_ABI;

using PackedFormat = ::lowbit_format;

// As the library was built with them: leave `abi` and `sizes` as they are.
struct KernelLibrary : ::lowbit_library {
  constexpr KernelLibrary() : ::lowbit_library{} {
    abi = kKernelAbi;
    sizes = LOWBIT_SIZES;
  }
};

}  // namespace lowbit
