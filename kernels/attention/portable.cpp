// attention_portable: attention in plain C++. The vector kernels are compared with it.

#include "../vector/portable.h"
#include "attention_impl.h"
#include "write_cache.h"

namespace lowbit {
namespace {

constexpr AttentionKernel kKernels[] = {
    {"attention_portable", kPortable, attention<Vector>, write_cache<Vector>, join_spans<Vector>, nullptr, true}};

}  // namespace

extern const Table<AttentionKernel> kAttentionPortable;
const Table<AttentionKernel> kAttentionPortable{kKernels, 1};

}  // namespace lowbit
