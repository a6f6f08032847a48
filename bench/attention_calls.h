// The calls of attention kernels that the counting programs count.
#pragma once

#include <utility>

#include "../kernels/registry.h"

namespace lowbit::bench {

// Calls count(kernel, cache type, its name, whether it is a prompt) for each kernel for which wanted(name, isa) is true.
template <class Wanted, class Count>
void for_attention(const Wanted& wanted, const Count& count) {
  constexpr std::pair<CacheType, const char*> kCaches[] = {{CacheType::f32, "f32"}, {CacheType::bf16, "bf16"},
                                                           {CacheType::f16, "f16"}, {CacheType::i8, "int8"},
                                                           {CacheType::i4, "int4"}, {CacheType::i8_i4, "int8,int4"}};
  for (size_t i = 0; i < attention_kernel_count(); ++i) {
    const AttentionKernel& kernel = attention_kernel(i);
    if (!wanted(kernel.name, kernel.isa)) continue;
    for (const auto& [cache, name] : kCaches) {
      for (const bool prompt : {true, false}) count(kernel, cache, name, prompt);
    }
  }
}

}  // namespace lowbit::bench
