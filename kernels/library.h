// The interface of a shared library with kernels or packed formats, for libraries in C++. The operators load it at run time
// (ops/load_kernels.h) without rebuilding lowbit. lowbit_ukernel.h has the structures, and is sufficient for libraries in C.
//
// The library defines one function:
//
//   extern "C" LOWBIT_API const lowbit::KernelLibrary* lowbit_kernels(uint32_t abi);
//
// Kernels of Format::panel16 follow the contract of ukernel.h bit for bit, so that results do not depend on the kernel. A
// vendor's own format may round differently within a tolerance that it declares. All kernels are tested when the library is
// loaded, and a library with a wrong kernel is refused.
#pragma once

#include "pack.h"
#include "ukernel.h"

namespace lowbit {

// Changes with every shared structure, unless the structure only grew at its end.
inline constexpr uint32_t kKernelAbi = LOWBIT_KERNEL_ABI;

using PackedFormat = ::lowbit_format;

// Values from the library's build: do not change `abi` and `sizes`.
struct KernelLibrary : ::lowbit_library {
  constexpr KernelLibrary() : ::lowbit_library{} {
    abi = kKernelAbi;
    sizes = LOWBIT_SIZES;
  }
};

}  // namespace lowbit
