// Rows of the kernel table, and packed formats, from a shared library: what it exports. The operators load it at run
// time (ops/load_kernels.h); nothing is built again.
//
// The library defines one function:
//
//   extern "C" __attribute__((visibility("default")))
//   const lowbit::KernelLibrary* lowbit_kernels(uint32_t abi);
//
// `abi` is the kKernelAbi of the program that loads it. The result stays valid, and constant, for the life of the
// process; null says that the library has nothing for this ABI. It is called at load, on the CPU that will run the
// rows: a row that needs more than IsaBits can say (SVE2, SME) is left out where the CPU lacks it.
//
// Rows of Format::panel16 keep the contract of ukernel.h to the bit, so that a result does not depend on who computed
// it. A format of the vendor's own has its own rounding, and says how much that is. All rows are tried at load, and a library
// with a row that computes something else is refused.
#pragma once

#include "pack.h"
#include "ukernel.h"

namespace lowbit {

// Changes with every structure that a library and its host share.
inline constexpr uint32_t kKernelAbi = 5;

// A vendor's layout of the bytes behind the 64-byte header, which stays lowbit's. `bytes` is asked on each call, for
// sizes that come from outside: it takes any n and k up to kMaxDimension.
struct PackedFormat {
  Format format;  // vendor_format("NAME")
  // How many bytes such a matrix takes; 0: the format does not hold it.
  int64_t (*bytes)(const Layout&);
  // Writes them (they start as zeros) / reads them back. Returns null, or a sentence that says why not.
  // unpack may be null: weights of this format cannot be unpacked then.
  const char* (*pack)(const Layout&, const PackArgs&, void* bytes);
  const char* (*unpack)(const Layout&, const void* bytes, const UnpackArgs&) = nullptr;
  // How far results of its rows may be from those of the portable kernels with the same weights in panel16, for the trial at
  // load (ops/try_kernels.h): of linear rows, as a share of the sum of the magnitudes of all products and of the bias; of
  // embedding rows, of the largest value of the row. 0: not at all, but for the rounding of outputs.
  float tolerance = 0.0f;
};

// Whether a library's rows are asked before or after those that are built in. Among libraries, the first loaded comes
// first. After, unless a library claims more: a row that is preferred gets every call that it fits, on every CPU that can
// run it, and a scalar row fits all of them.
enum class Preference : uint32_t { before_built_in, after_built_in };

struct AbiSizes {
  uint32_t library, format, quantize_row, linear_row, embedding_row;
  uint32_t quantize_args, prepare_args, linear_args, embedding_args, pack_args, unpack_args;
};

struct KernelLibrary {
  // The first field of every version. Leave it and `sizes` as they are.
  uint32_t abi = kKernelAbi;
  AbiSizes sizes = {sizeof(KernelLibrary), sizeof(PackedFormat),  sizeof(QuantizeKernel), sizeof(LinearKernel),
                    sizeof(EmbeddingKernel), sizeof(QuantizeArgs), sizeof(PrepareArgs), sizeof(LinearArgs),
                    sizeof(EmbeddingArgs), sizeof(PackArgs), sizeof(UnpackArgs)};
  const char* vendor = nullptr;  // as lowbit.kernels() shows it
  Preference preference = Preference::after_built_in;
  Table<LinearKernel> linear = {};
  Table<EmbeddingKernel> embedding = {};
  Table<QuantizeKernel> quantize = {};
  Table<PackedFormat> formats = {};
};

using KernelLibraryFunction = const KernelLibrary*(uint32_t abi);

}  // namespace lowbit
