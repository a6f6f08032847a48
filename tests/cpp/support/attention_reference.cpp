#include "attention_reference.h"

#include <algorithm>
#include <cmath>

namespace lowbit::test {
namespace {

float contract_exp2(float x) {
  if (x < -126.0f) return 0.0f;
  const float n = std::nearbyint(x), r = x - n;
  float p = 0x1.41fbbcp-13f;
  for (const float c : {0x1.5f3e54p-10f, 0x1.3b2d4cp-7f, 0x1.c6aee8p-5f, 0x1.ebfbdcp-3f, 0x1.62e430p-1f, 1.0f}) {
    p = std::fma(p, r, c);
  }
  return std::ldexp(p, static_cast<int>(n));
}

float contract_tanh2(float x) {
  if (std::isnan(x)) return x;
  const float e = contract_exp2(-std::fabs(x));
  return std::copysign((1.0f - e) / (1.0f + e), x);
}

size_t block_of(size_t width) {
  size_t size = 1;
  while (width % (2 * size) == 0) size *= 2;
  return size;
}

template <class T>
std::vector<T> rotated(std::vector<T> x) {
  const size_t size = block_of(x.size());
  for (size_t at = 0; at < x.size(); at += size) rotate_block(x.data() + at, size);
  return x;
}

constexpr float kLevels[8] = {6, 18, 31, 44, 58, 75, 96, 127};  // and their negatives

}  // namespace

QuantizedPosition contract_quantize_position(const std::vector<float>& x) {
  QuantizedPosition result{0.0f, std::vector<int8_t>(x.size(), 0)};
  float most = 0.0f;
  bool finite = true;
  for (const float value : x) {
    most = std::fmax(most, std::fabs(value));
    finite = finite && std::isfinite(value);
  }
  result.scale = finite ? most / 127.0f : float_from_bits(0x7fc00000u);
  if (!(result.scale >= 0x1p-126f)) {
    if (finite) result.scale = 0.0f;
    return result;
  }
  for (size_t i = 0; i < x.size(); ++i) {
    const float product = x[i] * (1.0f / result.scale);
    result.codes[i] = static_cast<int8_t>(std::nearbyint(product));
  }
  return result;
}

float level_of_code(int code) { return code < 8 ? -kLevels[7 - code] : kLevels[code - 8]; }

QuantizedPosition contract_quantize_rotated(const std::vector<float>& given) {
  std::vector<float> x = given;
  for (float& value : x) value *= 1.0f / static_cast<float>(block_of(x.size()));
  x = rotated(x);
  QuantizedPosition result = contract_quantize_position(x);  // for its scale
  std::fill(result.codes.begin(), result.codes.end(), int8_t{8});
  if (!(result.scale > 0.0f)) return result;
  float products[16] = {}, squares = 0.0f;
  for (size_t i = 0; i < x.size(); ++i) {
    const float t = x[i] * (1.0f / result.scale);
    int code = 0;
    for (int c = 1; c < 16; ++c) {
      if (t > (level_of_code(c - 1) + level_of_code(c)) / 2) code = c;
    }
    result.codes[i] = static_cast<int8_t>(code);
    products[i % 16] = std::fma(t, level_of_code(code), products[i % 16]);
    squares += level_of_code(code) * level_of_code(code);
  }
  for (size_t half = 8; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) products[l] += products[l + half];
  }
  result.scale *= products[0] / squares;
  return result;
}

namespace {

// Queries for int8 keys: codes, and a scale per 64 inputs.
struct CodedQueries {
  std::vector<float> scales, codes;
};

CodedQueries coded_queries(const std::vector<float>& scaled) {
  CodedQueries result;
  for (size_t first = 0; first < scaled.size(); first += 64) {
    const size_t end = std::min(first + 64, scaled.size());
    const QuantizedPosition part = contract_quantize_position(
        {scaled.begin() + static_cast<std::ptrdiff_t>(first), scaled.begin() + static_cast<std::ptrdiff_t>(end)});
    result.scales.push_back(part.scale);
    result.codes.insert(result.codes.end(), part.codes.begin(), part.codes.end());
  }
  return result;
}

bool has_int8_keys(const Sight& sight) { return sight.key_scales != nullptr && !sight.rotated_keys; }

}  // namespace

std::vector<float> contract_attention(const std::vector<float>& q, float factor, const std::vector<float>& keys,
                                      const std::vector<float>& values, int64_t value_width, const Sight& sight) {
  const int64_t width = static_cast<int64_t>(q.size());
  const size_t outputs = static_cast<size_t>(value_width);
  std::vector<float> out(outputs, 0.0f), sums(16, 0.0f), scores(256), out_before, sums_before;
  float most = -0x1.fffffep127f, most_before = 0.0f;
  bool is_nan = false;
  std::vector<float> scaled = q;
  for (float& value : scaled) value *= factor;
  if (sight.rotated_keys) scaled = rotated(scaled);
  const CodedQueries coded = has_int8_keys(sight) ? coded_queries(scaled) : CodedQueries();
  if (sight.sink != nullptr) {
    sums[0] = 1.0f;
    most = std::fmax(most, *sight.sink);
    is_nan = std::isnan(*sight.sink) || std::isinf(most);
  }
  int64_t end;
  for (int64_t begin = sight.begin; begin < sight.end && !is_nan; begin = end) {
    end = std::min(begin / 256 * 256 + 256, sight.end);
    const bool behind = sight.begin < begin / 512 * 512;  // whether an earlier span is visible
    if (behind && begin % 512 == 0) {
      out_before = out;
      sums_before = sums;
      most_before = most;
      out.assign(outputs, 0.0f);
      sums.assign(16, 0.0f);
      most = -0x1.fffffep127f;
    }
    const float before = most;
    for (int64_t j = begin; j < end; ++j) {
      float score = 0.0f;
      for (size_t s = 0; s < coded.scales.size(); ++s) {
        float sum = 0.0f;  // of integers below 2^24
        for (size_t i = 64 * s; i < std::min(64 * s + 64, q.size()); ++i) {
          sum += keys[static_cast<size_t>(j * width) + i] * coded.codes[i];
        }
        score = std::fma(coded.scales[s], sum, score);
      }
      for (int64_t i = 0; i < width && coded.scales.empty(); ++i) {
        score = std::fma(keys[static_cast<size_t>(j * width + i)], scaled[static_cast<size_t>(i)], score);
      }
      if (sight.key_scales != nullptr) score *= sight.key_scales[j];
      if (sight.cap != 0.0f) score = contract_tanh2(score) * sight.cap;
      scores[static_cast<size_t>(j - begin)] = score;
      is_nan = is_nan || std::isnan(score);
      if (score > most) most = score;
    }
    if (is_nan) break;
    is_nan = std::isinf(most);
    if (is_nan) break;
    const float shrink = contract_exp2(before - most);
    for (float& sum : sums) sum *= shrink;
    for (float& value : out) value *= shrink;
    for (int64_t j = begin; j < end; ++j) {
      float weight = contract_exp2(scores[static_cast<size_t>(j - begin)] - most);
      sums[static_cast<size_t>(j % 16)] += weight;
      if (sight.value_scales != nullptr) weight *= sight.value_scales[j];
      for (int64_t i = 0; i < value_width; ++i) {
        float& value = out[static_cast<size_t>(i)];
        value = std::fma(values[static_cast<size_t>(j * value_width + i)], weight, value);
      }
    }
    if (behind && (end % 512 == 0 || end == sight.end)) {
      const float both = std::max(most_before, most);
      const float a = contract_exp2(most_before - both), b = contract_exp2(most - both);
      for (size_t l = 0; l < 16; ++l) sums[l] = std::fma(sums_before[l], a, sums[l] * b);
      for (size_t i = 0; i < outputs; ++i) out[i] = std::fma(out_before[i], a, out[i] * b);
      most = both;
    }
  }
  for (size_t half = 8; half > 0; half /= 2) {
    for (size_t l = 0; l < half; ++l) sums[l] += sums[l + half];
  }
  if (sight.rotated_values) out = rotated(out);
  for (float& value : out) {
    value *= 1.0f / sums[0];
    if (is_nan || std::isnan(value)) value = float_from_bits(0x7fc00000u);
  }
  return out;
}

// The bound. Let u = 2^-24 and n the number of positions, in b blocks and s spans. A score of width products is off by (width +
// 1) u times the sum of their magnitudes, at most `score_error`. A weight relative to the last block's maximum is a product of
// up to b + 1 results of exp2, and one more per span. Their arguments are rounded differences that add up to at most the range
// of the scores. Their values are off by 2 u each, and b + 2 s roundings join them. Together that is a factor 1 + e of the
// weight. The sum, and the weighted sum of the values, have errors of e and n + b + 2 s + 16 roundings each, relative to sums
// of magnitudes; two more operations follow. Scales of int8 caches add one rounding to a score, and one to a weight. With a
// cap, a score's error e' becomes at most cap * (e' / (2 log2(e)) + 12 u): the slope of tanh is at most 1, e is off by 2 u, and
// a difference, a sum, a quotient and a product are rounded. A sink is one more position, without a value. Weights below 2^-126
// are dropped; underflows add half of 2^-149 each. With rotation, log2(width) sums and a factor each add a rounding of the sum
// of magnitudes, to a query and so to its products with keys, and to an output.
std::vector<Bounded> exact_attention(const std::vector<float>& q, float factor, const std::vector<float>& keys,
                                     const std::vector<float>& values, int64_t value_width, const Sight& sight) {
  const int64_t width = static_cast<int64_t>(q.size());
  std::vector<double> scaled(q.begin(), q.end());
  for (double& value : scaled) value *= factor;
  if (has_int8_keys(sight)) {  // the codes are not an error: the query is the values of its codes
    std::vector<float> rounded = q;
    for (float& value : rounded) value *= factor;
    const CodedQueries coded = coded_queries(rounded);
    for (size_t i = 0; i < scaled.size(); ++i) scaled[i] = double{coded.codes[i]} * coded.scales[i / 64];
  }
  double query_error = 0.0;
  if (sight.rotated_keys) {
    for (const double value : scaled) query_error += std::fabs(value);
    query_error *= (std::log2(static_cast<double>(width)) + 1) * kUnit;
    scaled = rotated(scaled);
  }
  const double slope = 0.5 * std::log(2.0);  // 1 / (2 log2(e))
  std::vector<double> scores;
  double most = -INFINITY, least = INFINITY, score_error = 0.0;
  for (int64_t j = sight.begin; j < sight.end; ++j) {
    double score = 0.0, magnitude = 0.0, error = 0.0;
    for (int64_t i = 0; i < width; ++i) {
      const double key = keys[static_cast<size_t>(j * width + i)], product = scaled[static_cast<size_t>(i)] * key;
      score += product;
      magnitude += std::fabs(product) + query_error * std::fabs(key);
      error += query_error * std::fabs(key);
    }
    error += static_cast<double>(width + 1) * kUnit * magnitude;
    if (sight.key_scales != nullptr) {
      score *= sight.key_scales[j];
      error = (error + kUnit * magnitude) * sight.key_scales[j];
    }
    if (sight.cap != 0.0f) {
      score = sight.cap * std::tanh(score * slope);
      error = sight.cap * (error * slope + 12 * kUnit);
    }
    scores.push_back(score);
    most = std::fmax(most, score);
    least = std::fmin(least, score);
    score_error = std::fmax(score_error, error);
  }
  if (sight.sink != nullptr) {
    most = std::fmax(most, double{*sight.sink});
    least = std::fmin(least, double{*sight.sink});
  }
  const double blocks = static_cast<double>((sight.end + 255) / 256 - sight.begin / 256);
  const double spans = static_cast<double>((sight.end + 511) / 512 - sight.begin / 512);
  const double n = static_cast<double>(sight.end - sight.begin + 1);
  const double range = most - least + 2 * score_error;
  const double e = 0.7 * (2 * score_error + range * kUnit) + (3 * blocks + 4 * spans + 2) * kUnit;
  double sum = sight.sink != nullptr ? std::exp2(*sight.sink - most) : 0.0;
  std::vector<double> weights;
  for (const double score : scores) {
    weights.push_back(std::exp2(score - most));
    sum += weights.back();
  }
  std::vector<Bounded> result;
  for (int64_t i = 0; i < value_width; ++i) {
    double value = 0.0, magnitude = 0.0, largest = 0.0;
    for (int64_t j = sight.begin; j < sight.end; ++j) {
      const double weight = weights[static_cast<size_t>(j - sight.begin)];
      double v = values[static_cast<size_t>(j * value_width + i)];
      if (sight.value_scales != nullptr) v *= sight.value_scales[j];
      value += weight * v;
      magnitude += weight * std::fabs(v);
      largest = std::fmax(largest, std::fabs(v));
    }
    const double relative = 2 * e + (2 * n + 2 * blocks + 4 * spans + 41) * kUnit;
    result.push_back({value / sum, 1.02 * relative * magnitude / sum + n * (0x1p-120 * largest + kSmallest)});
  }
  if (sight.rotated_values) {
    std::vector<double> rows;
    for (const Bounded& each : result) rows.push_back(each.value);
    rows = rotated(rows);
    const size_t size = block_of(rows.size());
    for (size_t at = 0; at < rows.size(); at += size) {
      double errors = 0.0, magnitudes = 0.0;
      for (size_t i = at; i < at + size; ++i) {
        errors += result[i].bound;
        magnitudes += std::fabs(result[i].value);
      }
      const double roundings = (std::log2(static_cast<double>(size)) + 1) * kUnit;
      for (size_t i = at; i < at + size; ++i) result[i] = {rows[i], errors + roundings * (magnitudes + errors)};
    }
  }
  return result;
}

}  // namespace lowbit::test
