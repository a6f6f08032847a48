#include "error_feedback.h"

#include <algorithm>
#include <cstring>

#include "weight_grid.h"

namespace lowbit {
namespace {

using Vector = WeightVector;
constexpr int kVectors = 4;
constexpr int64_t kRows = 16;  // computed together: kVectors vectors

Vector load(const float* from) { return load_weights(from); }

void store(float* to, const Vector& vector) { std::memcpy(to, &vector, sizeof vector); }

// The nearest level, as a float.
struct Grid {
  Vector low, high;
  const float* table;
  int levels;
  bool signs;

  Grid(int bits, bool affine, const float* table) : table(table), levels(1 << bits), signs(bits == 1 && !affine && !table) {
    const float half = static_cast<float>(1 << (bits - 1));
    low = Vector{} - (affine ? 0.0f : half);
    high = Vector{} + (affine ? 2.0f * half - 1.0f : half - 1.0f);
  }

  LOWBIT_INLINE inline Vector nearest(const Vector& x) const {
    if (table != nullptr) {
      Vector level = Vector{} + table[0];
      for (int i = 1; i < levels; ++i) {
        const Vector border = Vector{} + (table[i - 1] + table[i]) * 0.5f;
        level = x > border ? Vector{} + table[i] : level;
      }
      return level;
    }
    if (signs) return x >= Vector{} ? Vector{} + 1.0f : Vector{} - 1.0f;
    return round_within(x, low, high);
  }
};

}  // namespace

int64_t error_feedback_scratch(int64_t inputs) { return 2 * inputs * kRows; }

void error_feedback(const ErrorFeedbackArgs& args, int64_t begin, int64_t end, float* scratch) {
  const Grid grid(args.bits, args.mins != nullptr, args.table);
  float *const values = scratch, *const errors = scratch + args.inputs * kRows;
  for (int64_t row = begin; row < end; row += kRows) {
    const size_t bytes = static_cast<size_t>(std::min(kRows, end - row)) * sizeof(float);
    for (int64_t i = 0; i < args.inputs; ++i) {
      const int64_t at = i * args.rows + row;
      float block[kRows] = {};
      std::memcpy(block, args.weights + at, bytes);
      Vector value[kVectors];
      for (int v = 0; v < kVectors; ++v) value[v] = load(block + 4 * v);
      const float* const factor = args.factor + i * args.inputs;
      for (int64_t j = 0; j < i; ++j) {
        for (int v = 0; v < kVectors; ++v) value[v] -= factor[j] * load(errors + j * kRows + 4 * v);
      }
      if (args.pull != nullptr) {
        const float* const pull = args.pull + i * args.inputs;
        for (int64_t j = 0; j < i; ++j) {
          for (int v = 0; v < kVectors; ++v) value[v] += pull[j] * load(values + j * kRows + 4 * v);
        }
      }
      float scales[kRows] = {}, mins[kRows] = {}, levels[kRows];
      std::memcpy(scales, args.scales + i * args.scale_stride + row, bytes);
      if (args.mins != nullptr) std::memcpy(mins, args.mins + i * args.scale_stride + row, bytes);
      for (int v = 0; v < kVectors; ++v) {
        const Vector scale = load(scales + 4 * v), min = load(mins + 4 * v);
        const Vector inverse = scale == Vector{} ? Vector{} : 1.0f / scale;
        const Vector level = grid.nearest((value[v] - min) * inverse);
        store(levels + 4 * v, level);
        store(values + i * kRows + 4 * v, value[v]);
        store(errors + i * kRows + 4 * v, (value[v] - (scale * level + min)) / factor[i]);
      }
      std::memcpy(args.values + at, values + i * kRows, bytes);
      std::memcpy(args.levels + at, levels, bytes);
      std::memcpy(args.errors + at, errors + i * kRows, bytes);
    }
  }
}

}  // namespace lowbit
