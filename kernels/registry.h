// The list of kernels, and the choice of a kernel.
#pragma once

#include "elementwise.h"
#include "export.h"
#include "library.h"
#include "recurrence.h"
#include "ukernel.h"

namespace lowbit {

// Every kernel, whether or not this CPU can run it: those compiled into this build, best ISA first, then those of loaded
// libraries in the order of loading. Loading a library, on any thread, appends and moves nothing.
LOWBIT_API size_t quantize_kernel_count();
LOWBIT_API const QuantizeKernel& quantize_kernel(size_t index);
LOWBIT_API size_t linear_kernel_count();
LOWBIT_API const LinearKernel& linear_kernel(size_t index);
LOWBIT_API size_t embedding_kernel_count();
LOWBIT_API const EmbeddingKernel& embedding_kernel(size_t index);
LOWBIT_API size_t attention_kernel_count();
LOWBIT_API const AttentionKernel& attention_kernel(size_t index);
// Libraries have no kernels of these families.
LOWBIT_API size_t recurrence_kernel_count();
LOWBIT_API const RecurrenceKernel& recurrence_kernel(size_t index);
LOWBIT_API size_t elementwise_kernel_count();
LOWBIT_API const ElementwiseKernel& elementwise_kernel(size_t index);

// The kernel for a task on a CPU with these ISA bits. The result depends only on the arguments and on the loaded libraries, so
// "what would be chosen on a Cortex-A76?" can be answered on any machine whose build has the kernels. The portable kernels
// support everything of format panel16. If no kernel fits another format, the result has no function: run is null.
LOWBIT_API const QuantizeKernel& choose_quantize(IsaBits isa);
LOWBIT_API const LinearKernel& choose_linear(const Layout& layout, int64_t m, IsaBits isa, Streams streams = Streams::one);
// The same without loaded libraries, for a kernel that passes on a task of format panel16. Kernels of libraries may read other
// activations, with another context, and need more scratch memory.
LOWBIT_API const LinearKernel& choose_linear_built_in(const Layout& layout, int64_t m, IsaBits isa);
LOWBIT_API const EmbeddingKernel& choose_embedding(const Layout& layout, IsaBits isa);
LOWBIT_API const AttentionKernel& choose_attention(IsaBits isa);
LOWBIT_API const RecurrenceKernel& choose_recurrence(IsaBits isa);
LOWBIT_API const ElementwiseKernel& choose_elementwise(IsaBits isa);

// The portable kernels for panel16, whatever libraries are loaded. All other kernels give the same bits.
LOWBIT_API const QuantizeKernel& portable_quantize();
LOWBIT_API const LinearKernel& portable_linear(int bits);
LOWBIT_API const EmbeddingKernel& portable_embedding(int bits);
LOWBIT_API const AttentionKernel& portable_attention();

// Copies of a library's kernels and formats. Fields that the library's structures lack have their defaults.
struct LoadedLibrary {
  const lowbit_library* library;
  const char* path;
  Table<LinearKernel> linear;
  Table<EmbeddingKernel> embedding;
  Table<QuantizeKernel> quantize;
  Table<AttentionKernel> attention;
  Table<PackedFormat> formats;
};

// The library of a kernel, or null if it is built in.
LOWBIT_API const LoadedLibrary* library_of(const void* kernel);

// A loaded library's format, or null if there is none, and for panel16.
LOWBIT_API const PackedFormat* find_format(Format format);

// make_vendor_layout() for a format whose library need not be loaded.
Status vendor_layout(const Layout& layout, const PackedFormat& format, Layout* result);

// For ops/load_kernels.cpp. check_tables() decides whether a library's tables can be copied, copy_bytes() returns the memory
// for the copies, copy_tables() makes them, check_kernels() decides whether they can be used, add_library() adds them. Call
// these on one thread at a time; others may choose kernels meanwhile. All pointers stay valid for the life of the process.
Status check_tables(const lowbit_library& library);
size_t copy_bytes(const lowbit_library& library);
LoadedLibrary copy_tables(const lowbit_library& library, void* memory);
Status check_kernels(const LoadedLibrary& library);
Status add_library(const LoadedLibrary& library);
bool is_loaded(const lowbit_library& library);

}  // namespace lowbit
