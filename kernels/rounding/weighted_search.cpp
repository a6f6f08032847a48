#include "weighted_search.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "weight_grid.h"

namespace lowbit {
namespace {

// Sums have eight lanes, which are added in a fixed order: loops can be vectorized, and every machine gets the same bits.
using Vector = WeightVector;
constexpr int64_t kLanes = 8;

struct Lanes {
  Vector half[2] = {};
  float sum() const {
    const Vector sums = half[0] + half[1];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
};

constexpr int kFits = 3;        // number of times that the best fit is refitted to its own codes
constexpr float kStep = 0.03f;  // step between the ranges to try for a symmetric group, as a share of the whole range

// Number of symmetric ranges to try below the whole range. Narrow codes gain more from clipping.
constexpr int kShrinks[] = {0, 24, 24, 20, 16, 12, 10, 8, 8};

float inverse_of(float scale) { return std::fabs(scale) < kSmallestScale ? 0.0f : 1.0f / scale; }

struct Fit {
  float scale, min;
  float gain;  // reduction of the error compared with that of the best constant (symmetric: of zeros)
};

// One group: weights (affine: minus their mean), importance that sums to 1, and their products. Padded with zeros to a multiple
// of eight inputs.
class Group {
 public:
  Group(const float* weights, const float* importance, int64_t inputs, int bits, float* scratch)
      : bits_(bits), inputs_(inputs), filled_((inputs + kLanes - 1) / kLanes * kLanes),
        x_(scratch), w_(scratch + filled_), wx_(scratch + 2 * filled_), q_(scratch + 3 * filled_) {
    std::memcpy(x_, weights, static_cast<size_t>(inputs) * sizeof(float));
    std::memcpy(w_, importance, static_cast<size_t>(inputs) * sizeof(float));
    for (int64_t i = inputs; i < filled_; ++i) x_[i] = w_[i] = 0.0f;
    const float total = sum(w_);
    if (total > 0.0f && std::isfinite(total)) {
      for (int64_t i = 0; i < inputs; ++i) w_[i] /= total;
    } else {
      for (int64_t i = 0; i < inputs; ++i) w_[i] = 1.0f / static_cast<float>(inputs);
    }
  }

  float weighted_magnitude() {
    for (int64_t i = 0; i < filled_; ++i) q_[i] = std::fabs(x_[i]) * w_[i];
    return sum(q_);
  }

  float symmetric() {
    prepare();
    const float half = static_cast<float>(1 << (bits_ - 1));
    Fit best{0.0f, 0.0f, -1.0f};
    // Levels are from -half to half - 1, so both signs of the scale are tried.
    const float sides[] = {std::max(-low_ / half, high_ / (half - 1.0f)), -std::max(high_ / half, -low_ / (half - 1.0f))};
    for (const float full : sides) {
      for (int step = 0; step < kShrinks[bits_] + 3; ++step) {
        keep(best, fit_symmetric(full * (1.0f + kStep * static_cast<float>(2 - step)), half));
      }
    }
    for (int i = 0; i < kFits; ++i) keep(best, fit_symmetric(best.scale, half));
    return best.scale;
  }

  Fit affine() {
    for (int64_t i = 0; i < filled_; ++i) q_[i] = x_[i] * w_[i];
    const float middle = sum(q_);
    for (int64_t i = 0; i < inputs_; ++i) x_[i] -= middle;
    prepare();
    const float top = static_cast<float>((1 << bits_) - 1);
    // Both ends of the range are clipped independently.
    static constexpr float kFewCodes[] = {1.0f, 0.93f, 0.86f, 0.79f, 0.72f, 0.62f, 0.5f};
    static constexpr float kManyCodes[] = {1.0f, 0.95f, 0.9f, 0.83f, 0.75f};
    const bool few = top < 8.0f;
    const float* const cuts = few ? kFewCodes : kManyCodes;
    const int count = few ? 7 : 5;
    Fit best{0.0f, 0.0f, -1.0f};
    for (int below = 0; below < count; ++below) {
      for (int above = 0; above < count; ++above) {
        const float low = low_ * cuts[below];
        keep(best, fit_affine((high_ * cuts[above] - low) / top, low, top));
      }
    }
    for (int i = 0; i < kFits; ++i) keep(best, fit_affine(best.scale, best.min, top));
    best.min += middle;
    return best;
  }

 private:
  const int bits_;
  const int64_t inputs_, filled_;
  float *const x_, *const w_, *const wx_, *const q_;
  float low_ = 0.0f, high_ = 0.0f;  // range of the weights with importance, including 0

  static void keep(Fit& best, const Fit& fit) {
    if (fit.gain > best.gain) best = fit;
  }

  float sum(const float* values) const {
    Lanes sums;
    for_each([&](int64_t i, int h) { sums.half[h] += load(values + i); });
    return sums.sum();
  }

  static Vector load(const float* from) { return load_weights(from); }

  // Calls use(first input, half) for every four inputs; the halves 0 and 1 take turns.
  template <class Use>
  LOWBIT_INLINE void for_each(const Use& use) const {
    for (int64_t i = 0; i < filled_; i += kLanes) {
      use(i, 0);
      use(i + kLanes / 2, 1);
    }
  }

  void prepare() {
    low_ = high_ = 0.0f;
    for (int64_t i = 0; i < filled_; ++i) {
      wx_[i] = w_[i] * x_[i];
      if (w_[i] > 0.0f) {
        low_ = std::min(low_, x_[i]);
        high_ = std::max(high_, x_[i]);
      }
    }
  }

  // The best scale for the levels that `scale` results in.
  Fit fit_symmetric(float scale, float half) const {
    const Vector low = Vector{} - half, high = Vector{} + (half - 1.0f);
    const float inverse = inverse_of(scale);
    Lanes products, squares;
    for_each([&](int64_t i, int h) LOWBIT_INLINE {
      const Vector q = round_within(load(x_ + i) * inverse, low, high);
      products.half[h] += load(wx_ + i) * q;
      squares.half[h] += load(w_ + i) * q * q;
    });
    return fitted(products.sum(), squares.sum(), 0.0f);
  }

  // The best scale and minimum for the codes that `scale` and `min` result in.
  Fit fit_affine(float scale, float min, float top) const {
    const Vector low = {}, high = low + top;
    const float inverse = inverse_of(scale);
    Lanes means;
    for_each([&](int64_t i, int h) LOWBIT_INLINE {
      const Vector q = round_within((load(x_ + i) - min) * inverse, low, high);
      std::memcpy(q_ + i, &q, sizeof q);
      means.half[h] += load(w_ + i) * q;
    });
    const float mean = means.sum();
    Lanes products, squares;
    for_each([&](int64_t i, int h) LOWBIT_INLINE {
      const Vector q = load(q_ + i) - mean;
      products.half[h] += load(wx_ + i) * q;
      squares.half[h] += load(w_ + i) * q * q;
    });
    return fitted(products.sum(), squares.sum(), mean);
  }

  static Fit fitted(float product, float square, float mean) {
    const float scale = square > 0.0f ? product / square : 0.0f;
    return {scale, -scale * mean, product * scale};
  }
};

}  // namespace

int64_t weighted_search_scratch(int64_t inputs) { return 4 * ((inputs + kLanes - 1) / kLanes * kLanes); }

void weighted_search(const WeightedSearchArgs& args, int64_t begin, int64_t end, float* scratch) {
  for (int64_t i = begin; i < end; ++i) {
    Group group(args.weights + i * args.inputs, args.importance + i % args.importance_rows * args.inputs, args.inputs,
                args.bits, scratch);
    if (args.affine) {
      const Fit fit = group.affine();
      args.scales[i] = fit.scale;
      args.mins[i] = fit.min;
    } else {
      // At 1 bit the weighted mean magnitude is the best scale (Rastegari et al., XNOR-Net, 2016).
      args.scales[i] = args.bits == 1 ? group.weighted_magnitude() : group.symmetric();
    }
  }
}

}  // namespace lowbit
