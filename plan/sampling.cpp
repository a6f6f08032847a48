#include "sampling.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <functional>
#include <numeric>

#include "real_functions.h"

namespace lowbit {
namespace {

// numpy.random.SeedSequence(seed).generate_state(8): after Melissa O'Neill's seed_seq_fe.
void spread(uint64_t seed, uint32_t state[8]) {
  uint32_t constant = 0x43b0d7e5u, pool[4] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), 0, 0};
  const auto hashed = [&](uint32_t value, uint32_t multiplier) {
    value ^= constant;
    constant *= multiplier;
    value *= constant;
    return value ^ value >> 16;
  };
  for (uint32_t& each : pool) each = hashed(each, 0x931e8875u);
  for (int from = 0; from < 4; ++from) {
    for (int to = 0; to < 4; ++to) {
      if (from == to) continue;
      const uint32_t mixed = 0xca01f9ddu * pool[to] - 0x4973f715u * hashed(pool[from], 0x931e8875u);
      pool[to] = mixed ^ mixed >> 16;
    }
  }
  constant = 0x8b51f9ddu;
  for (int i = 0; i < 8; ++i) state[i] = hashed(pool[i % 4], 0x58f38dedu);
}

// Keeps the most likely tokens that together reach top_p, at least one. Equally likely tokens come in the order of their ids.
void keep_nucleus(double top_p, std::vector<float>& probabilities) {
  // Sorting a whole vocabulary is slow; the tokens above some probability are usually enough.
  for (const float least : {1e-3f, 1e-4f, 1e-5f, 1e-6f, -1.0f}) {
    std::vector<size_t> order;
    double sum = 0.0;
    for (size_t i = 0; i < probabilities.size(); ++i) {
      if (!(probabilities[i] > least)) continue;
      order.push_back(i);
      sum += static_cast<double>(probabilities[i]);
    }
    if (least > 0.0f && sum < top_p) continue;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return probabilities[a] > probabilities[b]; });
    std::vector<float> kept(probabilities.size());
    double reached = 0.0;
    for (size_t i = 0; i < order.size() && (i == 0 || reached < top_p); ++i) {
      kept[order[i]] = probabilities[order[i]];
      reached += static_cast<double>(kept[order[i]]);
    }
    probabilities = std::move(kept);
    return;
  }
}

}  // namespace

RandomNumbers::RandomNumbers(uint64_t seed) {
  uint32_t words[8];
  spread(seed, words);
  const auto wide = [&](int at) {
    const auto half = [&](int i) { return Wide{words[i]} | Wide{words[i + 1]} << 32; };
    return half(at) << 64 | half(at + 2);
  };
  increment_ = wide(4) << 1 | 1;
  step();
  state_ += wide(0);
  step();
}

RandomNumbers::RandomNumbers(const uint64_t* state)
    : state_(Wide{state[0]} << 64 | state[1]), increment_(Wide{state[2]} << 64 | state[3]) {}

void RandomNumbers::keep(uint64_t* state) const {
  state[0] = static_cast<uint64_t>(state_ >> 64);
  state[1] = static_cast<uint64_t>(state_);
  state[2] = static_cast<uint64_t>(increment_ >> 64);
  state[3] = static_cast<uint64_t>(increment_);
}

double RandomNumbers::next() {
  step();
  const uint64_t folded = static_cast<uint64_t>(state_ >> 64) ^ static_cast<uint64_t>(state_);
  const int turn = static_cast<int>(state_ >> 122);
  const uint64_t turned = folded >> turn | folded << (-turn & 63);
  return static_cast<double>(turned >> 11) * 0x1p-53;
}

Status Sampling::check() const {
  const auto outside = [](double value, double least, double most) { return !(value >= least && value <= most); };
  if (outside(temperature, 0.0, 1e300)) return Status::error("temperature is %g; expected 0 or more", temperature);
  if (outside(top_p, 0.0, 1.0)) return Status::error("top_p is %g; expected 0 to 1", top_p);
  if (outside(min_p, 0.0, 1.0)) return Status::error("min_p is %g; expected 0 to 1", min_p);
  if (outside(repetition_penalty, 5e-324, 1e300)) {
    return Status::error("repetition_penalty is %g; expected a number above 0", repetition_penalty);
  }
  return top_k >= 0 ? Status() : Status::error("top_k is %" PRId64 "; expected 0 or more", top_k);
}

int64_t most_likely(const float* logits, int64_t vocabulary) {
  int64_t best = 0;
  for (int64_t i = 0; i < vocabulary; ++i) {
    if (std::isnan(logits[i])) return -1;
    if (logits[i] > logits[best]) best = i;
  }
  return vocabulary > 0 && std::isfinite(logits[best]) ? best : -1;
}

Status draw(const Sampling& sampling, const std::set<int64_t>& seen, std::vector<float>& logits, RandomNumbers& random,
            int64_t* token) {
  if (sampling.repetition_penalty != 1.0) {
    const float penalty = static_cast<float>(sampling.repetition_penalty);
    for (const int64_t each : seen) {
      float& value = logits[static_cast<size_t>(each)];
      value = value < 0.0f ? value * penalty : value / penalty;
    }
  }
  const auto vocabulary = static_cast<int64_t>(logits.size());
  *token = most_likely(logits.data(), vocabulary);
  if (*token < 0) {
    return Status::error("%" PRId64 " logits have no largest one that is finite; expected no NaN, and a finite one",
                         vocabulary);
  }
  if (sampling.temperature == 0.0) return {};
  float least = -HUGE_VALF;  // the smallest logit that is kept
  if (sampling.top_k > 0 && static_cast<size_t>(sampling.top_k) < logits.size()) {
    std::vector<float> sorted(logits);
    std::nth_element(sorted.begin(), sorted.begin() + sampling.top_k - 1, sorted.end(), std::greater<float>());
    least = sorted[static_cast<size_t>(sampling.top_k - 1)];
  }
  const float shift = logits[static_cast<size_t>(*token)];
  const auto scale = static_cast<float>(std::clamp(sampling.temperature, 1e-30, 1e38));
  std::vector<float> probabilities(logits.size());
  double sum = 0.0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const bool kept = logits[i] >= least;
    logits[i] = (logits[i] - shift) / scale;
    if (kept) probabilities[i] = static_cast<float>(exp_of(static_cast<double>(logits[i])));
    sum += static_cast<double>(probabilities[i]);
  }
  for (float& each : probabilities) each /= static_cast<float>(sum);
  if (sampling.top_p < 1.0) keep_nucleus(sampling.top_p, probabilities);
  if (sampling.min_p > 0.0) {
    float largest = -HUGE_VALF;  // of those that are left: at a high temperature top_p may have removed the largest of all
    for (size_t i = 0; i < logits.size(); ++i) {
      if (probabilities[i] > 0.0f) largest = std::max(largest, logits[i]);
    }
    const float smallest = largest + static_cast<float>(std::log(sampling.min_p));
    for (size_t i = 0; i < logits.size(); ++i) {
      if (logits[i] < smallest) probabilities[i] = 0.0f;
    }
  }
  double total = 0.0;
  for (const float each : probabilities) total += static_cast<double>(each);
  const double wanted = random.next() * total;
  double reached = 0.0;
  for (size_t i = 0; i < probabilities.size(); ++i) {
    reached += static_cast<double>(probabilities[i]);
    if (reached > wanted) {
      *token = static_cast<int64_t>(i);
      break;
    }
  }
  return {};
}

}  // namespace lowbit
