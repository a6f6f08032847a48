// Chooses tokens from logits, with the same bits on every machine.
#pragma once

#include <cstdint>

#include "../kernels/export.h"
#include "../kernels/status.h"

namespace lowbit {

struct SamplingOptions {
  double temperature = 0;  // 0: the most likely token
  int64_t top_k = 0;       // only the k most likely tokens, and those equal to the last of them; 0: all
  double top_p = 1;        // of these, only the most likely ones that together reach this probability; at least one
  double min_p = 0;        // of these, only those with at least this part of the largest probability
};

// The first token with the largest logit; -1 if one is NaN or the largest is infinite.
LOWBIT_API int64_t most_likely(const float* logits, int64_t vocabulary);

// Draws a token. `random` is the state of the random numbers: any number to begin with, changed by each draw.
LOWBIT_API Status sample(const float* logits, int64_t vocabulary, const SamplingOptions& options, uint64_t* random,
                         int64_t* token);

}  // namespace lowbit
