// attention_neon. Formula: ../ukernel.h; body: attention_impl.h.

#include "../vector/neon.h"
#include "attention_impl.h"
#include "write_cache.h"

namespace lowbit {
namespace {

constexpr AttentionKernel kKernels[] = {
    {"attention_neon", kNeon, attention<Vector>, write_cache<Vector>, join_spans<Vector>, nullptr, true}};

}  // namespace

extern const Table<AttentionKernel> kAttentionNeon;
const Table<AttentionKernel> kAttentionNeon{kKernels, 1};

}  // namespace lowbit
