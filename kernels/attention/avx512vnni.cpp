// attention_avx512vnni. Formula: ../ukernel.h; body: attention_impl.h.

#include "../vector/avx512.h"
#include "attention_impl.h"
#include "write_cache.h"

namespace lowbit {
namespace {

constexpr AttentionKernel kKernels[] = {
    {"attention_avx512vnni", kAvx512Vnni, attention<Vector>, write_cache<Vector>, join_spans<Vector>, nullptr, true}};

}  // namespace

extern const Table<AttentionKernel> kAttentionAvx512Vnni;
const Table<AttentionKernel> kAttentionAvx512Vnni{kKernels, 1};

}  // namespace lowbit
