#include "round_to_nearest.h"

#include <cinttypes>
#include <cmath>
#include <limits>

#include "../pack.h"
#include "weight_grid.h"

namespace lowbit {
namespace {

constexpr float kLargestWeight = std::numeric_limits<float>::max() / 4;
constexpr float kShrinkStep = 0.05f;
constexpr int kFits = 2;

// Number of ranges to try, each kShrinkStep smaller than the one before. Narrow codes gain more from clipping.
int candidates(int bits, bool search) {
  if (!search) return 1;
  switch (bits) {
    case 1: return 15;
    case 2: return 14;
    case 3: return 10;
    case 4: return 7;
    default: return 4;
  }
}

struct Grid {
  float scale, min;  // a weight is scale * code + min
};

float round_small(float value) { return (value + kRoundShift) - kRoundShift; }

// In the form that compiles to one max and one min instruction.
float clamp_code(float value, float top) {
  value = value > 0.0f ? value : 0.0f;
  return value < top ? value : top;
}

// Codes outside the range are clamped first, so that the rounding gets only small values.
float nearest_code(float weight, Grid grid, float inverse, float top) {
  return round_small(clamp_code((weight - grid.min) * inverse, top));
}

// Loops over a group keep eight partial results in a fixed order, so that compilers vectorize them and the result is the same
// on every machine.
struct Range {
  float low, high;
};

Range range(const float* weight, int64_t count) {
  float low[8], high[8];
  for (int lane = 0; lane < 8; ++lane) low[lane] = high[lane] = weight[0];
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int lane = 0; lane < 8; ++lane) {
      const float w = weight[i + lane];
      low[lane] = w < low[lane] ? w : low[lane];
      high[lane] = w > high[lane] ? w : high[lane];
    }
  }
  for (; i < count; ++i) {
    low[0] = std::fmin(low[0], weight[i]);
    high[0] = std::fmax(high[0], weight[i]);
  }
  for (int lane = 1; lane < 8; ++lane) {
    low[0] = std::fmin(low[0], low[lane]);
    high[0] = std::fmax(high[0], high[lane]);
  }
  return {low[0], high[0]};
}

float add_lanes(const float (&sums)[8]) {
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

float mean_magnitude(const float* weight, int64_t count) {
  const float share = 1.0f / static_cast<float>(count);  // first, so that the sum cannot overflow
  float sums[8] = {};
  for (int64_t i = 0; i < count; ++i) sums[i % 8] += std::fabs(weight[i]) * share;
  return add_lanes(sums);
}

float squared_error(const float* weight, int64_t count, Grid grid, float top) {
  const float inverse = 1.0f / grid.scale;
  float sums[8] = {};
  int64_t i = 0;
  // The inner loop of the search; written as vectors because compilers leave the same loop over lanes scalar.
  using Lanes = float __attribute__((vector_size(32)));
  constexpr Lanes kZero = {};
  const Lanes tops = kZero + top, round_shift = kZero + kRoundShift;
  Lanes lanes = kZero;
  for (; i + 8 <= count; i += 8) {
    Lanes w;
    std::memcpy(&w, weight + i, sizeof w);
    Lanes code = (w - grid.min) * inverse;
    code = code > kZero ? code : kZero;
    code = code < tops ? code : tops;
    code = (code + round_shift) - round_shift;
    const Lanes error = code * grid.scale + grid.min - w;
    lanes += error * error;
  }
  std::memcpy(sums, &lanes, sizeof sums);
  for (; i < count; ++i) {
    const float error = nearest_code(weight[i], grid, inverse, top) * grid.scale + grid.min - weight[i];
    sums[i % 8] += error * error;
  }
  return add_lanes(sums);
}

// The grid with the least squared error for the codes of `grid`: linear regression of the weights on the codes, through level 0
// if symmetric. For some weights another code is then nearer, so the result is only a candidate.
Grid fit_to_codes(const float* weight, int64_t count, Grid grid, float half, bool affine, float top) {
  const float inverse = 1.0f / grid.scale;
  // Sums of code, squared code, weight and code times weight. Codes count from the middle, which keeps the sums small.
  float c[8] = {}, cc[8] = {}, w[8] = {}, cw[8] = {};
  for (int64_t i = 0; i < count; ++i) {
    const float code = nearest_code(weight[i], grid, inverse, top) - half;
    c[i % 8] += code;
    cc[i % 8] += code * code;
    w[i % 8] += weight[i];
    cw[i % 8] += code * weight[i];
  }
  const float n = static_cast<float>(count);
  const float sum_c = add_lanes(c), sum_cc = add_lanes(cc), sum_w = add_lanes(w), sum_cw = add_lanes(cw);
  if (!affine) {
    const float scale = sum_cc == 0.0f ? 0.0f : sum_cw / sum_cc;
    return {scale, -half * scale};
  }
  const float variance = n * sum_cc - sum_c * sum_c;
  const float scale = variance <= 0.0f ? 0.0f : (n * sum_cw - sum_c * sum_w) / variance;
  const float middle = (sum_w - scale * sum_c) / n;
  return {scale, middle - half * scale};
}

Grid choose_grid(const float* weight, int64_t count, int bits, bool affine, bool search) {
  const auto [low, high] = range(weight, count);
  const float top = static_cast<float>((1 << bits) - 1);
  if (!affine && bits == 1) {
    // For +-s, the mean magnitude has the least squared error (Rastegari et al., XNOR-Net, 2016).
    const float scale = search ? mean_magnitude(weight, count) : std::fmax(high, -low);
    return {2.0f * scale, -scale};
  }
  const float half = static_cast<float>(1 << (bits - 1));
  Grid full;
  if (affine) {
    full = {(high - low) / top, low};  // no overflow: kLargestWeight; exact if the weights are on a grid
  } else {
    // Levels are from -half to half - 1: the sign of the scale gives the longer side to the longer tail.
    const float upright = std::fmax(-low / half, high / (half - 1.0f));
    const float flipped = std::fmax(high / half, -low / (half - 1.0f));
    const float scale = upright <= flipped ? upright : -flipped;
    full = {scale, -half * scale};
  }
  if (std::fabs(full.scale) < kSmallestScale) return {0.0f, affine ? low : 0.0f};

  Grid best = full;
  float least = std::numeric_limits<float>::infinity();
  for (int c = 0; c < candidates(bits, search); ++c) {
    const float factor = 1.0f - kShrinkStep * static_cast<float>(c);
    Grid grid = {full.scale * factor, full.min * factor};
    if (affine) grid.min = full.min + full.scale * (top * (1.0f - factor) * 0.5f);  // shrinks towards the middle
    const float error = search ? squared_error(weight, count, grid, top) : 0.0f;
    if (error < least) {
      least = error;
      best = grid;
    }
  }
  for (int fits = 0; search && fits < kFits; ++fits) {
    const Grid grid = fit_to_codes(weight, count, best, half, affine, top);
    if (!(std::fabs(grid.scale) >= kSmallestScale)) break;
    const float error = squared_error(weight, count, grid, top);
    if (!(error < least)) break;
    least = error;
    best = grid;
  }
  return best;
}

// Levels of 1 bit are -1 and 1, so its symmetric scale is half the step of the grid.
float scale_of_step(int bits, bool affine, float step) { return !affine && bits == 1 ? step / 2.0f : step; }

Grid grid_of_scale(int bits, bool affine, float scale, float min) {
  if (affine) return {scale, min};
  return bits == 1 ? Grid{2.0f * scale, -scale} : Grid{scale, -scale * static_cast<float>(1 << (bits - 1))};
}

void load_row(const void* weight, DType dtype, int64_t first, int64_t count, float* row) {
  switch (dtype) {
    case DType::f32:
      std::memcpy(row, static_cast<const float*>(weight) + first, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::bf16:
      for (int64_t i = 0; i < count; ++i) row[i] = load_as_f32(weight, DType::bf16, first + i);
      return;
    case DType::f16:
      for (int64_t i = 0; i < count; ++i) row[i] = load_as_f32(weight, DType::f16, first + i);
      return;
  }
}

Status check_row(const float* row, int64_t k, int64_t index) {
  bool fine = true;
  for (int64_t i = 0; i < k; ++i) fine &= std::fabs(row[i]) <= kLargestWeight;
  if (fine) return {};
  for (int64_t i = 0; i < k; ++i) {
    if (!(std::fabs(row[i]) <= kLargestWeight)) {
      return Status::error("weight [%" PRId64 ", %" PRId64 "] is %g; expected a finite value of at most %g", index, i,
                           static_cast<double>(row[i]), static_cast<double>(kLargestWeight));
    }
  }
  return {};
}

}  // namespace

Status round_to_nearest(const Layout& layout, const RoundToNearestArgs& args, int64_t begin, int64_t end, float* row) {
  const bool affine = args.mins != nullptr;
  const int bits = layout.bits;
  const float top = static_cast<float>((1 << bits) - 1);
  const int64_t group_inputs = layout.group_inputs();
  for (int64_t r = begin; r < end; ++r) {
    load_row(args.weight, args.dtype, r * args.row_stride, layout.k, row);
    if (Status status = check_row(row, layout.k, r); !status.ok()) return status;

    float* scales = args.scales + r * layout.groups;
    float* mins = affine ? args.mins + r * layout.groups : nullptr;
    for (int64_t g = 0; g < layout.groups; ++g) {
      const int64_t start = g * group_inputs;
      const int64_t count = layout.k - start < group_inputs ? layout.k - start : group_inputs;
      const Grid grid = choose_grid(row + start, count, bits, affine, args.search);
      scales[g] = scale_of_step(bits, affine, grid.scale);
      if (affine) mins[g] = grid.min;
    }
    round_to_stored(scales, mins, layout.groups);

    for (int64_t g = 0; g < layout.groups; ++g) {
      const int64_t start = g * group_inputs;
      const int64_t stop = start + group_inputs < layout.k ? start + group_inputs : layout.k;
      const Grid grid = grid_of_scale(bits, affine, scales[g], affine ? mins[g] : 0.0f);
      uint8_t* codes = args.codes + r * layout.k;
      // Without a step, every code has the same error. The middle code is level 0.
      const float inverse = std::fabs(grid.scale) < kSmallestScale ? 0.0f : 1.0f / grid.scale;
      const float shift = inverse == 0.0f && !affine ? static_cast<float>(1 << (bits - 1)) : 0.0f;
      for (int64_t i = start; i < stop; ++i) {
        codes[i] = static_cast<uint8_t>(nearest_code(row[i], grid, inverse, top) + shift);
      }
    }
  }
  return {};
}

}  // namespace lowbit
