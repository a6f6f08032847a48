// A small generator with the same sequence on every platform (splitmix64), so that failures can be repeated anywhere.
#pragma once

#include <cstdint>

namespace lowbit::test {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t limit) { return static_cast<int64_t>(next() % static_cast<uint64_t>(limit)); }
  int64_t between(int64_t first, int64_t last) { return first + below(last - first + 1); }
  // In [0, 1), with 24 random bits.
  float unit() { return static_cast<float>(next() >> 40) * 0x1p-24f; }
  float between(float low, float high) { return low + (high - low) * unit(); }
  // Roughly normal, mean 0, deviation 1: a sum of 12 numbers in [0, 1), of 21 bits each. Tests make millions of them.
  float normal() {
    int64_t sum = -6 * (1 << 21);
    for (int i = 0; i < 4; ++i) {
      const uint64_t bits = next();
      sum += static_cast<int64_t>((bits >> 43) + (bits >> 22 & 0x1fffff) + (bits >> 1 & 0x1fffff));
    }
    return static_cast<float>(sum) * 0x1p-21f;
  }

 private:
  uint64_t state_;
};

}  // namespace lowbit::test
