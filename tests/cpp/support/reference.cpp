#include "reference.h"

#include <algorithm>
#include <cmath>

#include "written.h"

namespace lowbit::test {
namespace {

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

// The signs of rotated inputs, one per bit: the fraction of pi in hexadecimal digits, lowest bit first.
bool is_negated(int64_t i) {
  static const char kPi[] = "243f6a8885a308d313198a2e03707344";
  const int64_t digit = i / 32 * 8 + 7 - i % 32 / 4;
  const char c = kPi[digit];
  return ((c <= '9' ? c - '0' : c - 'a' + 10) >> i % 4 & 1) != 0;
}

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
