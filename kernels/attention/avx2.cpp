// attention_avx2. Formula: ../ukernel.h; body: attention_impl.h.

#include "../vector/avx2.h"
#include "attention_impl.h"
#include "write_cache.h"

namespace lowbit {
namespace {

constexpr AttentionKernel kKernels[] = {
    {"attention_avx2", kAvx2, attention<Vector>, write_cache<Vector>, join_spans<Vector>, nullptr, true}};

}  // namespace

extern const Table<AttentionKernel> kAttentionAvx2;
const Table<AttentionKernel> kAttentionAvx2{kKernels, 1};

}  // namespace lowbit
