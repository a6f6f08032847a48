// What the trials of a kernel library's rows share: try_kernels.cpp and try_attention.cpp.
#pragma once

#include <cmath>
#include <cstdint>

#include "../kernels/numeric.h"
#include "../kernels/registry.h"
#include "sme_threads.h"

namespace lowbit {

// Numbers without a pattern, the same in each trial.
class Random {
 public:
  uint32_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 32);
  }
  float between(float low, float high) { return low + (high - low) * static_cast<float>(next() >> 8) * 0x1p-24f; }

 private:
  uint64_t state_ = 1;
};

inline const char* name_of(DType type) { return type == DType::f32 ? "float32" : type == DType::bf16 ? "bfloat16" : "float16"; }

inline bool same(float a, float b) { return bits_of_float(a) == bits_of_float(b) || (std::isnan(a) && std::isnan(b)); }

// Whether a row can be run here and now.
inline bool can_run(IsaBits isa) {
  return (isa & ~active_isa()) == 0 && ((isa & kSme2) == 0 || sme_threads() > 0);
}

// try_kernels() for the rows of attention.
Status try_attention(const LoadedLibrary& library);

}  // namespace lowbit
