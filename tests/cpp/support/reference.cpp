#include "reference.h"

#include <algorithm>
#include <cmath>

#include "written.h"

namespace lowbit::test {
namespace {

constexpr double kUnit = 0x1p-24;       // half the distance from 1 to the next float32
constexpr double kSmallest = 0x1p-149;  // the smallest positive float32

struct SegmentSums {
  int64_t products;  // sum of a * level
  int64_t values;    // sum of a
};

SegmentSums segment_sums(const Decoded& w, int64_t row, const Segment& segment, const int8_t* a) {
  const int16_t* integers = w.integers.data() + row * w.k;
  SegmentSums sums{};
  for (int64_t i = segment.begin; i < segment.end; ++i) {
    sums.products += a[i] * integers[i];
    sums.values += a[i];
  }
  return sums;
}

float contract_exp2(float x) {
  if (x < -126.0f) return 0.0f;
  const float n = std::nearbyint(x), r = x - n;
  float p = 0x1.41fbbcp-13f;
  for (const float c : {0x1.5f3e54p-10f, 0x1.3b2d4cp-7f, 0x1.c6aee8p-5f, 0x1.ebfbdcp-3f, 0x1.62e430p-1f, 1.0f}) {
    p = std::fma(p, r, c);
  }
  return std::ldexp(p, static_cast<int>(n));
}

}  // namespace

std::vector<Segment> segments_of(int64_t k, int64_t group_inputs) {
  std::vector<Segment> segments;
  for (int64_t begin = 0; begin < k;) {
    const int64_t group = begin / group_inputs;
    const int64_t end = std::min({begin + 64, (group + 1) * group_inputs, k});
    segments.push_back({begin, end, group});
    begin = end;
  }
  return segments;
}

std::vector<float> contract_group_sums(const std::vector<Segment>& segments, const float* scales, const int32_t* sums) {
  std::vector<float> groups;
  for (size_t s = 0; s < segments.size(); ++s) {
    const float sum = static_cast<float>(sums[s]);
    if (segments[s].group == static_cast<int64_t>(groups.size())) {
      groups.push_back(scales[s] * sum);
    } else {
      groups.back() = std::fma(scales[s], sum, groups.back());
    }
  }
  return groups;
}

float contract_linear(const Decoded& w, int64_t row, const int8_t* a, const float* scales) {
  const std::vector<Segment> segments = segments_of(w.k, w.group_inputs);
  std::vector<int32_t> products, values;
  for (const Segment& segment : segments) {
    const SegmentSums sums = segment_sums(w, row, segment, a);
    products.push_back(static_cast<int32_t>(sums.products));
    values.push_back(static_cast<int32_t>(sums.values));
  }
  const std::vector<float> p = contract_group_sums(segments, scales, products.data());
  const std::vector<float> s = contract_group_sums(segments, scales, values.data());
  float acc = 0.0f;
  for (size_t g = 0; g < p.size(); ++g) {
    const size_t at = static_cast<size_t>(row * w.groups) + g;
    acc = std::fma(static_cast<float>(w.scales[at]), p[g], acc);
    if (w.affine) acc = std::fma(static_cast<float>(w.mins[at]), s[g], acc);
  }
  return std::fma(w.row_scale[static_cast<size_t>(row)], acc, w.bias[static_cast<size_t>(row)]);
}

// The bound. Let u = 2^-24; float(I) and float(A) are exact. A term scale * t * I takes part in one product and in up to L - 1
// fmas within its group, where L is the number of segments of a group, and then in up to T fmas, where T is the number of terms
// of all groups. Each multiplies it by a factor 1 + d, |d| <= u. So before the last fma the error is at most
// |row_scale| * P * ((1 + u)^(T + L) - 1), where P is the sum of the magnitudes of the terms. With n = T + L and n u < 0.01
// that is below |row_scale| P * 1.01 n u. The last fma adds u |y|, and u times the error, which the 1.01 covers. A step that
// underflows adds half of 2^-149, within a group times the scale, which is below 2^16. The float64 sums here are off by less
// than T L 2^-52 P, which is below u P, hence the n + 1.
Bounded exact_linear(const Decoded& w, int64_t row, const int8_t* a, const float* scales) {
  const std::vector<Segment> segments = segments_of(w.k, w.group_inputs);
  double sum = 0.0, magnitude = 0.0;
  for (size_t s = 0; s < segments.size(); ++s) {
    const SegmentSums sums = segment_sums(w, row, segments[s], a);
    const size_t at = static_cast<size_t>(row * w.groups + segments[s].group);
    const double product = w.scales[at] * scales[s] * static_cast<double>(sums.products);
    const double shift = w.affine ? w.mins[at] * scales[s] * static_cast<double>(sums.values) : 0.0;
    sum += product + shift;
    magnitude += std::fabs(product) + std::fabs(shift);
  }
  const double row_scale = w.row_scale[static_cast<size_t>(row)];
  const double value = row_scale * sum + w.bias[static_cast<size_t>(row)];
  const double terms = static_cast<double>((w.affine ? 2 : 1) * w.groups);
  const double n = terms + static_cast<double>(Layout::segments_of(w.group_inputs)) + 1;
  const double underflows = static_cast<double>(2 * segments.size()) * 0x1p16 + terms;
  const double bound = std::fabs(row_scale) * (magnitude * 1.01 * n * kUnit + underflows * kSmallest) +
                       std::fabs(value) * kUnit + kSmallest;
  return {value, bound};
}

float contract_embedding(const Decoded& w, int64_t row, int64_t input) {
  const size_t at = static_cast<size_t>(row * w.groups + input / w.group_inputs);
  const float row_scale = w.row_scale[static_cast<size_t>(row)];
  const float scale = row_scale * static_cast<float>(w.scales[at]);
  const float level = static_cast<float>(w.level(row, input));
  return w.affine ? std::fma(scale, level, row_scale * static_cast<float>(w.mins[at])) : scale * level;
}

// The bound. scale and min are products that are rounded once, and the result is rounded once. An underflow adds at most half
// of 2^-149 for each of them, times the level.
Bounded exact_embedding(const Decoded& w, int64_t row, int64_t input) {
  const size_t at = static_cast<size_t>(row * w.groups + input / w.group_inputs);
  const double row_scale = w.row_scale[static_cast<size_t>(row)];
  const double product = row_scale * w.scales[at] * w.level(row, input);
  const double min = w.affine ? row_scale * w.mins[at] : 0.0;
  const double magnitude = std::fabs(product) + std::fabs(min);
  return {product + min, 2.01 * kUnit * magnitude + (std::fabs(w.level(row, input)) + 2) * kSmallest};
}

QuantizedRow contract_quantize(const std::vector<float>& x, int64_t group_inputs) {
  QuantizedRow q{std::vector<int8_t>(x.size(), 0), {}, {}};
  for (const Segment& segment : segments_of(static_cast<int64_t>(x.size()), group_inputs)) {
    float most = 0.0f;
    bool finite = true;
    for (int64_t i = segment.begin; i < segment.end; ++i) {
      most = std::fmax(most, std::fabs(x[static_cast<size_t>(i)]));
      finite = finite && std::isfinite(x[static_cast<size_t>(i)]);
    }
    float scale = most * (1.0f / 127.0f);
    uint32_t bits = bits_of_float(scale);
    bits -= bits % 4;
    scale = float_from_bits(bits);
    int32_t sum = 0;
    if (!finite || scale >= 0x1p104f) {
      scale = float_from_bits(0x7fc00000u);
    } else if (scale < 0x1p-126f) {
      scale = 0.0f;
    } else {
      for (int64_t i = segment.begin; i < segment.end; ++i) {
        const float product = x[static_cast<size_t>(i)] * (1.0f / scale);
        q.a[static_cast<size_t>(i)] = static_cast<int8_t>(std::rint(product));
        sum += q.a[static_cast<size_t>(i)];
      }
    }
    q.scales.push_back(scale);
    q.sums.push_back(sum);
  }
  return q;
}

namespace {

float contract_tanh2(float x) {
  if (std::isnan(x)) return x;
  const float e = contract_exp2(-std::fabs(x));
  return std::copysign((1.0f - e) / (1.0f + e), x);
}

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

namespace {

// Recursive halves, then sums and differences: the same operations as in ukernel.h, in another order.
template <class T>
void rotate_block(T* x, size_t size) {
  if (size == 1) return;
  rotate_block(x, size / 2);
  rotate_block(x + size / 2, size / 2);
  const std::vector<T> old(x, x + size);
  for (size_t i = 0; i < size / 2; ++i) {
    x[i] = old[i] + old[i + size / 2];
    x[i + size / 2] = old[i] - old[i + size / 2];
  }
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

// The signs of rotated inputs, one per bit: the fraction of pi in hexadecimal digits, lowest bit first.
bool is_negated(int64_t i) {
  static const char kPi[] = "243f6a8885a308d313198a2e03707344";
  const int64_t digit = i / 32 * 8 + 7 - i % 32 / 4;
  const char c = kPi[digit];
  return ((c <= '9' ? c - '0' : c - 'a' + 10) >> i % 4 & 1) != 0;
}

constexpr float kLevels[8] = {6, 18, 31, 44, 58, 75, 96, 127};  // and their negatives

}  // namespace

std::vector<float> contract_rotate(std::vector<float> x, int64_t block, bool back) {
  int log = 0;
  while (int64_t{1} << log < block) ++log;
  const float factor = std::ldexp(1.0f, -(log + 1) / 2);
  const auto scale = [&] {
    for (size_t i = 0; i < x.size(); ++i) x[i] *= is_negated(static_cast<int64_t>(i) % block) ? -factor : factor;
  };
  if (!back) scale();
  for (size_t at = 0; at < x.size(); at += static_cast<size_t>(block)) {
    rotate_block(x.data() + at, static_cast<size_t>(block));
  }
  if (back) scale();
  return x;
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

std::vector<uint8_t> to_bytes(const std::vector<float>& values, DType dtype) {
  std::vector<uint8_t> bytes(values.size() * static_cast<size_t>(size_of(dtype)));
  for (size_t i = 0; i < values.size(); ++i) store_from_f32(bytes.data(), dtype, static_cast<int64_t>(i), values[i]);
  return bytes;
}

std::vector<float> from_bytes(const std::vector<uint8_t>& bytes, DType dtype) {
  std::vector<float> values(bytes.size() / static_cast<size_t>(size_of(dtype)));
  for (size_t i = 0; i < values.size(); ++i) values[i] = load_as_f32(bytes.data(), dtype, static_cast<int64_t>(i));
  return values;
}

const char* name_of(DType dtype) { return dtype == DType::f32 ? "f32" : dtype == DType::bf16 ? "bf16" : "f16"; }

testing::AssertionResult same_bits(const std::vector<uint8_t>& found, const std::vector<uint8_t>& expected,
                                   DType dtype) {
  expect_written(found.data(), static_cast<int64_t>(found.size()));
  if (found == expected) return testing::AssertionSuccess();
  if (found.size() != expected.size())
    return testing::AssertionFailure() << found.size() << " bytes, not " << expected.size();
  size_t at = 0;
  while (found[at] == expected[at]) ++at;
  const int64_t index = static_cast<int64_t>(at) / size_of(dtype);
  return testing::AssertionFailure() << "element " << index << " is " << load_as_f32(found.data(), dtype, index)
                                     << "; expected " << load_as_f32(expected.data(), dtype, index);
}

}  // namespace lowbit::test
