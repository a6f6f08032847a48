// attention_neondot: products with int8 keys by sdot. For all other caches it is the same as attention_neon.

#include "../vector/neon.h"
#include "attention_impl.h"

namespace lowbit {

extern const Table<AttentionKernel> kAttentionNeon, kAttentionNeonDot;

namespace {

void run_by_dot(const AttentionArgs& args) {
  key_type(args.cache) == CacheType::i8 ? attention<Vector, true>(args) : kAttentionNeon.entries[0].run(args);
}

void write_as_neon(const AttentionWriteArgs& args) { kAttentionNeon.entries[0].write(args); }
void join_as_neon(const AttentionJoinArgs& args) { kAttentionNeon.entries[0].join(args); }

constexpr AttentionKernel kKernels[] = {
    {"attention_neondot", kNeonDot, run_by_dot, write_as_neon, join_as_neon}};

}  // namespace

const Table<AttentionKernel> kAttentionNeonDot{kKernels, 1};

}  // namespace lowbit
