// Draws tokens from logits as lowbit.llm.Sampling does, with the random numbers of numpy.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "../kernels/export.h"
#include "../kernels/status.h"

namespace lowbit {

// numpy.random.Generator(PCG64(seed)).random()
class LOWBIT_API RandomNumbers {
 public:
  explicit RandomNumbers(uint64_t seed);
  // Continues with numbers that another object kept; `state` has 4 words.
  explicit RandomNumbers(const uint64_t* state);
  void keep(uint64_t* state) const;
  double next();  // from 0 to 1, below 1

 private:
  __extension__ typedef unsigned __int128 Wide;
  void step() { state_ = state_ * ((Wide{0x2360ed051fc65da4u} << 64) | 0x4385df649fccf645u) + increment_; }
  Wide state_ = 0, increment_ = 0;
};

struct LOWBIT_API Sampling {
  double temperature = 0.0;  // 0: the most likely token
  double top_p = 1.0;        // keep only the most likely of these tokens that together reach this probability; at least one
  double min_p = 0.0;        // of these, keep only tokens with at least this part of the largest probability
  double repetition_penalty = 1.0;
  int64_t top_k = 0;         // only the k most likely tokens, and those equal to the last of them; 0: all

  Status check() const;
};

// The first token with the largest logit; -1 if one is NaN or the largest is infinite.
LOWBIT_API int64_t most_likely(const float* logits, int64_t vocabulary);

// The next token after logits, which it changes. `seen`: tokens of the text, for the repetition penalty.
LOWBIT_API Status draw(const Sampling& sampling, const std::set<int64_t>& seen, std::vector<float>& logits,
                       RandomNumbers& random, int64_t* token);

}  // namespace lowbit
