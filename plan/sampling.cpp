#include "sampling.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <functional>
#include <new>
#include <vector>

#include "real_functions.h"

namespace lowbit {
namespace {

// SplitMix64 (Steele et al. 2014): a number in [0, 1) with 53 bits.
double next_random(uint64_t* state) {
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return static_cast<double>((z ^ z >> 31) >> 11) * 0x1p-53;
}

struct Candidate {
  int64_t token;
  double weight;  // the probability relative to the largest one
};

bool is_within(double value, double most) { return value >= 0 && value <= most; }  // false for NaN

}  // namespace

int64_t most_likely(const float* logits, int64_t vocabulary) {
  int64_t best = 0;
  for (int64_t i = 0; i < vocabulary; ++i) {
    if (std::isnan(logits[i])) return -1;
    if (logits[i] > logits[best]) best = i;
  }
  return vocabulary > 0 && std::isfinite(logits[best]) ? best : -1;
}

Status sample(const float* logits, int64_t vocabulary, const SamplingOptions& options, uint64_t* random, int64_t* token) {
  if (!is_within(options.temperature, 1e300)) {
    return Status::error("temperature is %g; expected 0 or more", options.temperature);
  }
  if (options.top_k < 0) return Status::error("top_k is %" PRId64 "; expected 0 or more", options.top_k);
  if (!is_within(options.top_p, 1)) return Status::error("top_p is %g; expected 0 to 1", options.top_p);
  if (!is_within(options.min_p, 1)) return Status::error("min_p is %g; expected 0 to 1", options.min_p);
  const int64_t best = most_likely(logits, vocabulary);
  if (best < 0) {
    return Status::error("%" PRId64 " logits have no largest one that is finite; expected the logits of a sound model",
                         vocabulary);
  }
  *token = best;
  if (options.temperature == 0) return {};
  try {
    float least = -INFINITY;
    if (options.top_k > 0 && options.top_k < vocabulary) {
      std::vector<float> order(logits, logits + vocabulary);
      const auto last = order.begin() + (options.top_k - 1);
      std::nth_element(order.begin(), last, order.end(), std::greater<float>());
      least = *last;
    }
    std::vector<Candidate> candidates;
    double sum = 0;
    for (int64_t i = 0; i < vocabulary; ++i) {
      // Below 1e-30 only logits that are equal to the largest one have a chance.
      const double exponent = (static_cast<double>(logits[i]) - static_cast<double>(logits[best])) /
                              std::max(options.temperature, 1e-30);
      if (logits[i] < least || exponent < -700) continue;
      candidates.push_back({i, exp_of(exponent)});
      sum += candidates.back().weight;
    }
    if (options.top_p < 1) {
      std::stable_sort(candidates.begin(), candidates.end(),
                       [](const Candidate& a, const Candidate& b) { return a.weight > b.weight; });
      const double needed = options.top_p * sum;
      size_t count = 0;
      for (sum = 0; count < candidates.size() && (count == 0 || sum < needed); ++count) sum += candidates[count].weight;
      candidates.resize(count);
    }
    sum = 0;
    for (Candidate& each : candidates) {
      if (each.weight < options.min_p) each.weight = 0;
      sum += each.weight;
    }
    double left = next_random(random) * sum;
    for (const Candidate& each : candidates) {
      if (each.weight == 0) continue;
      *token = each.token;  // the last one, if rounding leaves a rest
      left -= each.weight;
      if (left < 0) break;
    }
    return {};
  } catch (const std::bad_alloc&) {
    return Status::no_memory("no memory to draw from %" PRId64 " tokens", vocabulary);
  }
}

}  // namespace lowbit
