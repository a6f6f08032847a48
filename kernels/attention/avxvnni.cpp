// attention_avxvnni: products with int8 keys by vpdpbusd. For all other caches it is the same as attention_avx2.

#include "../vector/avx2.h"
#include "int8_keys.h"

namespace lowbit {

extern const Table<AttentionKernel> kAttentionAvx2, kAttentionAvxVnni;

namespace {

constexpr AttentionKernel kKernels[] = {with_int8_keys<kAttentionAvx2>("attention_avxvnni", kAvxVnni)};

}  // namespace

const Table<AttentionKernel> kAttentionAvxVnni{kKernels, 1};

}  // namespace lowbit
