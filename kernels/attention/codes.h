// Keys and queries as int8 codes with a scale, and their products. Formula: ../ukernel.h.
#pragma once

#include <cstring>

#include "../vector/vector.h"

namespace lowbit {
namespace {

constexpr int64_t kQuad = 4;  // adjacent inputs of a position in int8 keys

// The largest magnitude of a position, divided by 127. Magnitudes are compared by their bits, as integers: NaN and infinity are
// the largest, and compilers vectorize such a loop. A scale that is too small is 0; one that is not finite is NaN.
inline float scale_of(const float* x, int64_t width) {
  uint32_t most = 0;
  for (int64_t i = 0; i < width; ++i) {
    const uint32_t magnitude = bits_of_float(x[i]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  const float scale = float_from_bits(most) / 127.0f;
  return most >= 0x7f800000u ? float_from_bits(0x7fc00000u) : scale < 0x1p-126f ? 0.0f : scale;
}

// Computes codes and returns their scale. Adding 1.5 * 2^23 rounds x * inv to an integer in the last bits. |x * inv| is at most
// 127 apart from two roundings, so no code exceeds 127.
inline float quantize_position(const float* x, int64_t width, int8_t* codes) {
  const float scale = scale_of(x, width);
  if (!(scale > 0.0f)) {
    for (int64_t i = 0; i < width; ++i) codes[i] = 0;
    return scale;
  }
  const float inverse = 1.0f / scale;
  for (int64_t i = 0; i < width; ++i) {
    const float product = x[i] * inverse;
    codes[i] = static_cast<int8_t>(bits_of_float(product + 12582912.0f));
  }
  return scale;
}

// A row of queries, stored in the memory of its floats: codes, then the scale of each segment, then the sum of its codes.
class CodedQuery {
 public:
  CodedQuery(float* row, int64_t width) : row_(row), width_(width) {}

  // Quantizes the row in place.
  void code() {
    alignas(64) float values[kAttentionWidth];
    std::memcpy(values, row_, static_cast<size_t>(width_) * sizeof(float));
    int8_t* const codes = reinterpret_cast<int8_t*>(row_);
    for (int64_t first = 0, s = 0; first < width_; first += kSegmentInputs, ++s) {
      const int64_t count = width_ - first < kSegmentInputs ? width_ - first : kSegmentInputs;
      const float scale = quantize_position(values + first, count, codes + first);
      int32_t sum = 0;
      for (int64_t i = first; i < first + count; ++i) sum += codes[i];
      std::memcpy(row_ + width_ / 4 + s, &scale, sizeof scale);
      std::memcpy(row_ + width_ / 4 + segments() + s, &sum, sizeof sum);
    }
  }

  int64_t segments() const { return Layout::segments_of(width_); }
  const int8_t* codes() const { return reinterpret_cast<const int8_t*>(row_); }
  float scale(int64_t segment) const { return row_[width_ / 4 + segment]; }
  int32_t sum(int64_t segment) const {
    int32_t value;
    std::memcpy(&value, row_ + width_ / 4 + segments() + segment, sizeof value);
    return value;
  }

 private:
  float* row_;
  int64_t width_;
};

// Number of vectors that a product takes at a time, limited by the registers for their sums.
template <class V, int Rows>
constexpr int kAtOnce = V::kSums / Rows < 1 ? 1 : V::kSums / Rows > 4 ? 4 : V::kSums / Rows;

// Computes scores of Rows rows of queries, `width` floats apart, and Vectors panels of int8 keys.
template <class V, int Rows, int Vectors>
LOWBIT_INLINE inline void score_codes(float* q, const char* keys, int64_t width, float* out) {
  const int64_t panel = width * kKeyPositions;
  for (int64_t first = 0, s = 0; first < width; first += kSegmentInputs, ++s) {
    const int64_t end = first + kSegmentInputs < width ? first + kSegmentInputs : width;
    typename V::Integers sums[Rows][Vectors];
    const int8_t* codes[Rows];
    for (int r = 0; r < Rows; ++r) {
      const CodedQuery query(q + r * width, width);
      codes[r] = query.codes();
      for (int v = 0; v < Vectors; ++v) sums[r][v] = V::before_products(query.sum(s));
    }
    for (int64_t i = first; i < end; i += kQuad) {
      const char* const at = keys + i * kKeyPositions;
      typename V::Quads quads[Vectors];
      for (int v = 0; v < Vectors; ++v) {
        __builtin_prefetch(at + (v + Vectors) * panel, 0, 2);  // the next panels; past the end nothing is read
        quads[v] = V::load_quads(at + v * panel);
      }
      for (int r = 0; r < Rows; ++r) {
        for (int v = 0; v < Vectors; ++v) sums[r][v] = V::add_products(quads[v], codes[r] + i, sums[r][v]);
      }
    }
    for (int r = 0; r < Rows; ++r) {
      const V scale = V::broadcast(CodedQuery(q + r * width, width).scale(s));
      for (int v = 0; v < Vectors; ++v) {
        float* const to = out + r * kAttentionBlock + v * kLanes;
        V::store(to, V::fma(scale, V::to_floats(sums[r][v]), s == 0 ? V::broadcast(0.0f) : V::load(to)));
      }
    }
  }
}

// Computes scores for all panels of a block that some row sees. Not inlined, so that each is compiled once.
template <class V, int Rows>
__attribute__((noinline)) void score_all_codes(float* q, const char* keys, int64_t width, float* out, int64_t panels) {
  constexpr int kPanels = kAtOnce<V, Rows>;
  int64_t panel = 0;
  for (; panel + kPanels <= panels; panel += kPanels) {
    score_codes<V, Rows, kPanels>(q, keys + panel * width * kKeyPositions, width, out + panel * kLanes);
  }
  if constexpr (kPanels > 1) {
    for (; panel < panels; ++panel) {
      score_codes<V, Rows, 1>(q, keys + panel * width * kKeyPositions, width, out + panel * kLanes);
    }
  }
}

}  // namespace
}  // namespace lowbit
