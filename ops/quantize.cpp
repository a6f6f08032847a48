#include <algorithm>
#include <cmath>
#include <memory>
#include <new>
#include <utility>

#include "../kernels/rounding/error_feedback.h"
#include "../kernels/rounding/round_to_nearest.h"
#include "../kernels/rounding/weighted_search.h"
#include "check.h"
#include "operators.h"
#include "schedule.h"

namespace lowbit {
namespace {

// Checks that `holds` is true for each number of a contiguous float32 tensor. `expected` describes it. Null: there is no
// tensor.
template <class Holds>
Status check_numbers(const char* name, const TensorView* tensor, const char* expected, const Holds& holds) {
  if (tensor == nullptr) return {};
  const auto* const numbers = static_cast<const float*>(tensor->data);
  const int64_t count = tensor->shape.numel();
  for (int64_t i = 0; i < count; ++i) {
    if (holds(numbers[i])) continue;
    return Status::error("%s has %g at position %" PRId64 "; expected %s", name, numbers[i], i, expected);
  }
  return {};
}

Status check_finite(const char* name, const TensorView* tensor) {
  return check_numbers(name, tensor, "finite numbers", [](float number) { return std::isfinite(number); });
}

}  // namespace

Status quantize_shape(const TensorView& weight, int bits, int64_t group_size, bool affine, Layout* layout) {
  return matrix_layout("weight has", weight, bits, group_size, affine, false, layout);
}

Status quantize(const TensorView& weight, int bits, int64_t group_size, bool affine, bool search,
                const TensorView& codes, const TensorView& scales, const TensorView& mins, const Parallel& parallel) {
  Layout layout;
  if (Status s = check_parallel(parallel); !s.ok()) return s;
  if (Status s = quantize_shape(weight, bits, group_size, affine, &layout); !s.ok()) return s;
  if (Status s = check_memory("weight", weight); !s.ok()) return s;
  if (!is_activation_type(weight.type)) {
    return Status::error("weight has dtype %s; expected float32, bfloat16 or float16", name_of(weight.type));
  }
  if (layout.k > 1 && weight.stride[1] != 1) {
    return Status::error("weight has stride %" PRId64 " between inputs; expected 1", weight.stride[1]);
  }
  const Shape per_group{2, {layout.n, layout.groups}};
  if (Status s = check_tensor("codes", codes, ElementType::u8, weight.shape); !s.ok()) return s;
  if (Status s = check_tensor("scales", scales, ElementType::f32, per_group); !s.ok()) return s;
  if (Status s = check_tensor("mins", mins, ElementType::f32, affine ? per_group : Shape{2, {0, 0}}); !s.ok()) return s;
  if (Status s = check_apart({{"codes", &codes}, {"scales", &scales}, {"mins", &mins}}, {{"weight", &weight}}); !s.ok()) {
    return s;
  }

  RoundToNearestArgs args{};
  args.weight = weight.data;
  args.dtype = dtype_of(weight.type);
  args.row_stride = weight.stride[0];
  args.search = search;
  args.codes = static_cast<uint8_t*>(codes.data);
  args.scales = static_cast<float*>(scales.data);
  args.mins = affine ? static_cast<float*>(mins.data) : nullptr;

  FirstError error;
  constexpr int64_t kClaimWeights = 1 << 16;
  parallel_1d(parallel, layout.n, 1 + kClaimWeights / layout.k, [&](int, int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> row(new (std::nothrow) float[static_cast<size_t>(layout.k)]);
    error.report(begin, row == nullptr ? Status::no_memory("no memory for a row of %" PRId64 " weights", layout.k)
                                       : round_to_nearest(layout, args, begin, end, row.get()));
  });
  return error.status();
}

Status search_groups(const TensorView& weights, const TensorView& importance, int bits, bool affine,
                     const TensorView& scales, const TensorView& mins, const Parallel& parallel) {
  if (Status s = check_parallel(parallel); !s.ok()) return s;
  if (bits < 1 || bits > 8) return Status::error("bits is %d; expected 1 to 8", bits);
  for (const auto& [name, tensor] : {std::pair{"weights", &weights}, std::pair{"importance", &importance}}) {
    if (tensor->shape.ndim != 2 || tensor->shape.size[0] < 1 || tensor->shape.size[1] < 1) {
      return Status::error("%s has shape %s; expected [rows, inputs], each 1 or more", name, describe(tensor->shape).text);
    }
    if (Status s = check_tensor(name, *tensor, ElementType::f32, tensor->shape); !s.ok()) return s;
  }
  const int64_t groups = weights.shape.size[0], inputs = weights.shape.size[1];
  if (importance.shape.size[1] != inputs || groups % importance.shape.size[0] != 0) {
    return Status::error("importance has shape %s; expected [rows, %" PRId64 "], rows a divisor of %" PRId64,
                         describe(importance.shape).text, inputs, groups);
  }
  if (Status s = check_tensor("scales", scales, ElementType::f32, Shape{1, {groups}}); !s.ok()) return s;
  if (Status s = check_tensor("mins", mins, ElementType::f32, Shape{1, {affine ? groups : 0}}); !s.ok()) return s;
  if (Status s = check_apart({{"scales", &scales}, {"mins", &mins}}, {{"weights", &weights}, {"importance", &importance}});
      !s.ok()) {
    return s;
  }
  if (Status s = check_finite("weights", &weights); !s.ok()) return s;
  const auto is_importance = [](float number) { return number >= 0.0f && std::isfinite(number); };
  if (Status s = check_numbers("importance", &importance, "finite numbers from 0 on", is_importance); !s.ok()) return s;
  const WeightedSearchArgs args{static_cast<const float*>(weights.data), static_cast<const float*>(importance.data), inputs,
                                importance.shape.size[0], bits, affine, static_cast<float*>(scales.data),
                                affine ? static_cast<float*>(mins.data) : nullptr};
  FirstError error;
  constexpr int64_t kClaimWeights = 1 << 14;
  parallel_1d(parallel, groups, 1 + kClaimWeights / inputs, [&](int, int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> scratch(new (std::nothrow) float[static_cast<size_t>(weighted_search_scratch(inputs))]);
    if (scratch == nullptr) {
      error.report(begin, Status::no_memory("no memory for a group of %" PRId64 " weights", inputs));
    } else {
      weighted_search(args, begin, end, scratch.get());
    }
  });
  return error.status();
}

Status error_feedback(const TensorView& weights, const TensorView& factor, const TensorView* pull, const TensorView& scales,
                      const TensorView* mins, const TensorView* levels, int bits, const TensorView& values,
                      const TensorView& out_levels, const TensorView& errors, const Parallel& parallel) {
  if (Status s = check_parallel(parallel); !s.ok()) return s;
  if (bits < 1 || bits > 8) return Status::error("bits is %d; expected 1 to 8", bits);
  if (mins != nullptr && levels != nullptr) return Status::error("levels and mins are both given; expected at most one");
  if (weights.shape.ndim != 2 || weights.shape.size[0] < 1 || weights.shape.size[1] < 1) {
    return Status::error("weights have shape %s; expected [inputs, rows], each 1 or more", describe(weights.shape).text);
  }
  const int64_t inputs = weights.shape.size[0], rows = weights.shape.size[1];
  const bool shared = scales.shape.ndim == 2 && scales.shape.size[0] == 1;
  const Shape square{2, {inputs, inputs}}, grids{2, {shared ? 1 : inputs, rows}};
  const auto check = [](const char* name, const TensorView* tensor, const Shape& shape) {
    return tensor == nullptr ? Status() : check_tensor(name, *tensor, ElementType::f32, shape);
  };
  if (Status s = check("weights", &weights, weights.shape); !s.ok()) return s;
  if (Status s = check("factor", &factor, square); !s.ok()) return s;
  if (Status s = check("pull", pull, square); !s.ok()) return s;
  if (Status s = check("scales", &scales, grids); !s.ok()) return s;
  if (Status s = check("mins", mins, grids); !s.ok()) return s;
  if (Status s = check("levels", levels, {1, {int64_t{1} << bits}}); !s.ok()) return s;
  if (Status s = check("values", &values, weights.shape); !s.ok()) return s;
  if (Status s = check("out_levels", &out_levels, weights.shape); !s.ok()) return s;
  if (Status s = check("errors", &errors, weights.shape); !s.ok()) return s;
  if (Status s = check_apart({{"values", &values}, {"out_levels", &out_levels}, {"errors", &errors}},
                             {{"weights", &weights}, {"factor", &factor}, {"pull", pull}, {"scales", &scales},
                              {"mins", mins}, {"levels", levels}});
      !s.ok()) {
    return s;
  }
  for (const auto& [name, tensor] : {NamedTensor{"weights", &weights}, {"factor", &factor}, {"pull", pull},
                                     {"scales", &scales}, {"mins", mins}, {"levels", levels}}) {
    if (Status s = check_finite(name, tensor); !s.ok()) return s;
  }
  for (int64_t i = 0; i < inputs; ++i) {
    if (static_cast<const float*>(factor.data)[i * (inputs + 1)] == 0.0f) {
      return Status::error("factor has 0 at [%" PRId64 ", %" PRId64 "]; expected no zeros on its diagonal", i, i);
    }
  }
  const auto data = [](const TensorView* tensor) { return tensor == nullptr ? nullptr : static_cast<float*>(tensor->data); };
  const ErrorFeedbackArgs args{data(&weights), data(&factor), data(pull), data(&scales), data(mins), data(levels), inputs,
                               rows, shared ? 0 : rows, bits, data(&values), data(&out_levels), data(&errors)};
  FirstError error;
  constexpr int64_t kTile = 16;  // rows
  parallel_1d(parallel, (rows + kTile - 1) / kTile, 1, [&](int, int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> scratch(new (std::nothrow) float[static_cast<size_t>(error_feedback_scratch(inputs))]);
    if (scratch == nullptr) {
      error.report(begin, Status::no_memory("no memory for the errors of %" PRId64 " inputs", inputs));
    } else {
      error_feedback(args, begin * kTile, std::min(end * kTile, rows), scratch.get());
    }
  });
  return error.status();
}

}  // namespace lowbit
