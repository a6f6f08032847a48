// attention_neondot: products with int8 keys by sdot. For all other caches it is the same as attention_neon.

#include "../vector/neon.h"
#include "int8_keys.h"

namespace lowbit {

extern const Table<AttentionKernel> kAttentionNeon, kAttentionNeonDot;

namespace {

constexpr AttentionKernel kKernels[] = {with_int8_keys<kAttentionNeon>("attention_neondot", kNeonDot)};

}  // namespace

const Table<AttentionKernel> kAttentionNeonDot{kKernels, 1};

}  // namespace lowbit
