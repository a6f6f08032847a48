// Draws tokens from logits as lowbit.llm.Sampling does, with the random numbers of numpy.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "../kernels/status.h"

namespace lowbit::text {

// numpy.random.Generator(PCG64(seed)).random()
class RandomNumbers {
 public:
  explicit RandomNumbers(uint64_t seed);
  double next();  // from 0 to 1, below 1

 private:
  __extension__ typedef unsigned __int128 Wide;
  void step() { state_ = state_ * ((Wide{0x2360ed051fc65da4u} << 64) | 0x4385df649fccf645u) + increment_; }
  Wide state_ = 0, increment_ = 0;
};

struct Sampling {
  double temperature = 0.0, top_p = 1.0, min_p = 0.0, repetition_penalty = 1.0;
  int64_t top_k = 0;  // 0: all tokens

  Status check() const;
};

// The next token after logits, which it changes. `seen`: tokens of the text, for the repetition penalty.
Status draw(const Sampling& sampling, const std::set<int64_t>& seen, std::vector<float>& logits, RandomNumbers& random,
            int64_t* token);

}  // namespace lowbit::text
