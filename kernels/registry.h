// Which kernels there are, and which one to take.
#pragma once

#include "export.h"
#include "ukernel.h"

namespace lowbit {

// Every row compiled into this build, best ISA first, whether or not this CPU can run it.
LOWBIT_API size_t quantize_kernel_count();
LOWBIT_API const QuantizeKernel& quantize_kernel(size_t index);
LOWBIT_API size_t linear_kernel_count();
LOWBIT_API const LinearKernel& linear_kernel(size_t index);
LOWBIT_API size_t embedding_kernel_count();
LOWBIT_API const EmbeddingKernel& embedding_kernel(size_t index);

// The kernel for a task on a CPU with these ISA bits: pure functions, so "what would be chosen on a Cortex-A76?" can be
// asked on any machine whose build has the rows. Never null: the portable rows cover everything.
LOWBIT_API const QuantizeKernel& choose_quantize(IsaBits isa);
LOWBIT_API const LinearKernel& choose_linear(Format format, int bits, int64_t m, IsaBits isa);
LOWBIT_API const EmbeddingKernel& choose_embedding(Format format, int bits, IsaBits isa);

}  // namespace lowbit
