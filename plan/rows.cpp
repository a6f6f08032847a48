#include <algorithm>
#include <cmath>
#include <cstring>

#include "../kernels/isa.h"
#include "../kernels/numeric.h"
#include "../kernels/registry.h"
#include "../ops/schedule.h"
#include "number_checks.h"
#include "numbers.h"
#include "real_functions.h"

namespace lowbit {
namespace {

Status check_floats(const char* name, const TensorView& tensor, int least_dims) {
  if (Status status = check_activations(name, tensor); !status.ok()) return status;
  if (tensor.shape.ndim >= least_dims) return {};
  return Status::error("%s has shape %s; expected at least %d dimensions", name, describe(tensor.shape).text, least_dims);
}

// Rows of the last dimension.
struct Rows {
  const TensorView& tensor;
  int64_t width, count;
  explicit Rows(const TensorView& t)
      : tensor(t), width(t.shape.size[t.shape.ndim - 1]), count(width == 0 ? 0 : t.shape.numel() / width) {}
  int64_t step() const { return tensor.stride[tensor.shape.ndim - 1]; }
  int64_t offset(int64_t row) const { return offset_of(tensor, tensor.shape.ndim - 1, row); }
  float value(int64_t offset, int64_t i) const { return load_as_f32(tensor.data, dtype_of(tensor.type), offset + i * step()); }
};

Shape without_last(const Shape& shape, int64_t last = -1) {
  Shape result = shape;
  if (last < 0) --result.ndim;
  else result.size[result.ndim - 1] = last;
  return result;
}

constexpr int kLanes = 16;

float fold_lanes(const float* lanes) {
  float sums[kLanes];
  std::copy(lanes, lanes + kLanes, sums);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) sums[l] += sums[l + half];
  }
  return sums[0];
}

float canonical(float value) { return value == value ? value : float_from_bits(0x7fc00000); }

// Reads the index at this offset, counted from the end if it is negative.
Status read_index(const TensorView& indices, int64_t offset, int64_t count, int64_t* index) {
  TensorView one = indices;  // ops/check.h's function reads it once, because the owner of the memory may change it meanwhile
  one.data = static_cast<char*>(indices.data) + offset * element_bytes(indices.type);
  one.shape.ndim = 0;
  *index = index_at(one, 0);
  if (*index < 0) *index += count;
  if (*index >= 0 && *index < count) return {};
  return Status::out_of_range("an index is %" PRId64 "; expected less than %" PRId64, *index, count);
}

Status check_indices(const char* name, const TensorView& indices) {
  if (Status status = check_memory(name, indices); !status.ok()) return status;
  if (indices.type == ElementType::i64 || indices.type == ElementType::i32) return {};
  return Status::error("%s has dtype %s; expected int64 or int32", name, name_of(indices.type));
}

// Checks the tensors of gather() and take(); `fits`: whether the numbers of dimensions are possible.
Status check_indexed(const TensorView& x, const TensorView& indices, const TensorView& out, bool fits) {
  if (Status status = check_number("x", x); !status.ok()) return status;
  if (Status status = check_indices("indices", indices); !status.ok()) return status;
  if (Status status = check_number("out", out); !status.ok()) return status;
  if (fits && x.shape.ndim >= 1 && x.type == out.type) return {};
  return Status::error("x is %s %s, indices %s and out %s; expected a dimension and one type", name_of(x.type),
                       describe(x.shape).text, describe(indices.shape).text, name_of(out.type));
}

}  // namespace

Status float_linear(const TensorView& x, const TensorView& weight, const TensorView* bias, const TensorView& out,
                    const Parallel& parallel) {
  if (Status status = check_floats("x", x, 1); !status.ok()) return status;
  if (Status status = check_floats("weight", weight, 2); !status.ok()) return status;
  if (Status status = check_floats("out", out, 1); !status.ok()) return status;
  const Rows inputs(x), outputs(out), weights(weight);
  const int64_t k = inputs.width, n = weight.shape.size[0];
  if (weight.shape.ndim != 2 || weights.width != k) {
    return Status::error("weight has shape %s; expected [n, %" PRId64 "]", describe(weight.shape).text, k);
  }
  if (Status status = check_shape_is("out", out, without_last(x.shape, n)); !status.ok()) return status;
  if (bias != nullptr) {
    if (Status status = check_floats("bias", *bias, 1); !status.ok()) return status;
    if (Status status = check_shape_is("bias", *bias, {1, {n}}); !status.ok()) return status;
  }
  if (Status status = check_apart({{"out", &out}}, {{"x", &x}, {"weight", &weight}, {"bias", bias}}); !status.ok()) {
    return status;
  }
  if (out.shape.numel() == 0) return {};
  const bool plain = x.type == ElementType::f32 && weight.type == ElementType::f32 && inputs.step() == 1 && weights.step() == 1;
  const auto kernel = choose_elementwise(active_isa()).float_products;
  const Parallel threads = inputs.count * n * k < (1 << 16) ? Parallel() : parallel;
  const auto row_of = [](const Rows& rows, int64_t row) {
    return static_cast<const float*>(rows.tensor.data) + rows.offset(row);
  };
  // The same sum as the kernel's, of numbers of any type and step.
  const auto product = [&](int64_t of_x, int64_t of_weight) {
    float lanes[kLanes] = {};
    for (int64_t i = 0; i < (k + kLanes - 1) / kLanes * kLanes; ++i) {
      float& lane = lanes[i % kLanes];
      lane = i < k ? std::fma(inputs.value(of_x, i), weights.value(of_weight, i), lane) : lane + 0.0f;
    }
    return fold_lanes(lanes);
  };
  // Computes a few columns for a block of rows, then the next ones: the rows stay in the second-level cache.
  constexpr int64_t kColumns = 16, kMostRows = 64, kBlockBytes = 1 << 18;
  const int64_t block = std::clamp<int64_t>(kBlockBytes / (4 * k + 4), 4, kMostRows);
  const int64_t blocks = (outputs.count + block - 1) / block, panels = (n + kColumns - 1) / kColumns;
  parallel_1d(threads, blocks * panels, 1, [&](int, int64_t begin, int64_t end) {
    float sums[kMostRows][kColumns];
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t last = std::min((unit / panels + 1) * block, outputs.count);
      const int64_t first = unit % panels * kColumns, columns = std::min(kColumns, n - first);
      for (int64_t row = unit / panels * block, rows; row < last; row += rows) {
        const int64_t step = row + 1 < last ? inputs.offset(row + 1) - inputs.offset(row) : 0;
        for (rows = 1; row + rows < last && inputs.offset(row + rows) - inputs.offset(row) == step * rows;) ++rows;
        if (plain) {
          kernel({row_of(inputs, row), row_of(weights, first), sums[0], step, weight.stride[0], kColumns, rows, columns, k});
        }
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t to = outputs.offset(row + r) + first * outputs.step();
          for (int64_t c = 0; c < columns; ++c) {
            float result = plain ? sums[r][c] : product(inputs.offset(row + r), weights.offset(first + c));
            if (bias != nullptr) result += load_as_f32(bias->data, dtype_of(bias->type), (first + c) * bias->stride[0]);
            store_from_f32(out.data, dtype_of(out.type), to + c * outputs.step(), canonical(result));
          }
        }
      }
    }
  });
  return {};
}

Status sum(const TensorView& x, const TensorView& out, const Parallel& parallel) {
  if (Status status = check_floats("x", x, 1); !status.ok()) return status;
  if (Status status = check_floats("out", out, 0); !status.ok()) return status;
  if (Status status = check_shape_is("out", out, without_last(x.shape)); !status.ok()) return status;
  if (Status status = check_apart({{"out", &out}}, {{"x", &x}}); !status.ok()) return status;
  if (out.shape.numel() == 0) return {};
  TensorView wide = out;  // with a last dimension of 1
  wide.shape.size[wide.shape.ndim] = 1;
  wide.stride[wide.shape.ndim++] = 1;
  const Rows inputs(x), outputs(wide);
  parallel_1d(parallel, outputs.count, 1 + (1 << 13) / (1 + inputs.width), [&](int, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = inputs.offset(row);
      float lanes[kLanes] = {};
      for (int64_t i = 0; i < inputs.width; ++i) lanes[i % kLanes] += inputs.value(at, i);
      store_from_f32(out.data, dtype_of(out.type), outputs.offset(row), canonical(fold_lanes(lanes)));
    }
  });
  return {};
}

Status softmax(const TensorView& x, const TensorView& out, const Parallel& parallel) {
  if (Status status = check_floats("x", x, 1); !status.ok()) return status;
  if (Status status = check_floats("out", out, 1); !status.ok()) return status;
  if (Status status = check_shape_is("out", out, x.shape); !status.ok()) return status;
  if (Status status = check_apart({{"out", &out}}, {{"x", &x}}); !status.ok()) return status;
  if (out.shape.numel() == 0) return {};
  const Rows inputs(x), outputs(out);
  parallel_1d(parallel, inputs.count, 1 + (1 << 10) / inputs.width, [&](int, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t from = inputs.offset(row), to = outputs.offset(row);
      float most = inputs.value(from, 0);
      for (int64_t i = 1; i < inputs.width; ++i) most = std::max(most, inputs.value(from, i));
      const auto weight = [&](int64_t i) { return exp_of(static_cast<double>(inputs.value(from, i)) - most); };
      double total = 0.0;
      for (int64_t i = 0; i < inputs.width; ++i) total += weight(i);
      for (int64_t i = 0; i < inputs.width; ++i) {
        const float value = canonical(static_cast<float>(weight(i) / total));
        store_from_f32(out.data, dtype_of(out.type), to + i * outputs.step(), value);
      }
    }
  });
  return {};
}

Status top(const TensorView& x, const TensorView& values, const TensorView& indices, const Parallel& parallel) {
  constexpr int64_t kMost = 4096;
  if (Status status = check_floats("x", x, 1); !status.ok()) return status;
  if (Status status = check_floats("values", values, 1); !status.ok()) return status;
  if (Status status = check_memory("indices", indices); !status.ok()) return status;
  if (Status status = check_shape_is("indices", indices, values.shape); !status.ok()) return status;
  const Rows inputs(x), largest(values), places(indices);
  if (Status status = check_shape_is("values", values, without_last(x.shape, largest.width)); !status.ok()) return status;
  if (values.type != x.type || indices.type != ElementType::i64 || inputs.width > kMost || largest.width > inputs.width) {
    return Status::error("x is %s %s, values %s and indices %s %s; expected values of x's type, indices of int64, and at most %"
                         PRId64 " numbers to choose from", name_of(x.type), describe(x.shape).text, name_of(values.type),
                         name_of(indices.type), describe(indices.shape).text, kMost);
  }
  if (Status status = check_apart({{"values", &values}, {"indices", &indices}}, {{"x", &x}}); !status.ok()) return status;
  if (values.shape.numel() == 0) return {};
  parallel_1d(parallel, inputs.count, 16, [&](int, int64_t begin, int64_t end) {
    float numbers[kMost];
    bool taken[kMost];
    for (int64_t row = begin; row < end; ++row) {
      const int64_t from = inputs.offset(row), to = largest.offset(row), place = places.offset(row);
      for (int64_t i = 0; i < inputs.width; ++i) {
        numbers[i] = inputs.value(from, i);
        taken[i] = false;
      }
      for (int64_t found = 0; found < largest.width; ++found) {
        int64_t best = -1;
        for (int64_t i = 0; i < inputs.width; ++i) {
          if (taken[i]) continue;
          // A NaN counts as the largest number, as in torch.
          const bool first_nan = best >= 0 && numbers[i] != numbers[i] && numbers[best] == numbers[best];
          if (best < 0 || numbers[i] > numbers[best] || first_nan) best = i;
        }
        taken[best] = true;
        store_from_f32(values.data, dtype_of(values.type), to + found * largest.step(), numbers[best]);
        static_cast<int64_t*>(indices.data)[place + found * places.step()] = best;
      }
    }
  });
  return {};
}

Status gather(const TensorView& x, const TensorView& indices, const TensorView& out, const Parallel&) {
  if (Status status = check_indexed(x, indices, out, indices.shape.ndim >= 1); !status.ok()) return status;
  if (Status status = check_shape_is("out", out, indices.shape); !status.ok()) return status;
  const Rows inputs(x), places(indices), outputs(out);
  if (Status status = check_shape_is("x", x, without_last(indices.shape, inputs.width)); !status.ok()) return status;
  if (Status status = check_apart({{"out", &out}}, {{"x", &x}, {"indices", &indices}}); !status.ok()) return status;
  const int64_t bytes = element_bytes(x.type);
  for (int64_t row = 0; row < places.count; ++row) {
    const int64_t from = inputs.offset(row), place = places.offset(row), to = outputs.offset(row);
    for (int64_t i = 0; i < places.width; ++i) {
      int64_t index;
      if (Status s = read_index(indices, place + i * places.step(), inputs.width, &index); !s.ok()) return s;
      std::memcpy(static_cast<char*>(out.data) + (to + i * outputs.step()) * bytes,
                  static_cast<const char*>(x.data) + (from + index * inputs.step()) * bytes, static_cast<size_t>(bytes));
    }
  }
  return {};
}

Status take(const TensorView& x, const TensorView& indices, const TensorView& out, const Parallel&) {
  const bool fits = indices.shape.ndim + x.shape.ndim - 1 <= kMaxDims;
  if (Status status = check_indexed(x, indices, out, fits); !status.ok()) return status;
  Shape expected = indices.shape;
  TensorView slice = x;
  for (int d = 1; d < x.shape.ndim; ++d) {
    expected.size[expected.ndim++] = slice.shape.size[d - 1] = x.shape.size[d];
    slice.stride[d - 1] = x.stride[d];
  }
  --slice.shape.ndim;
  if (Status status = check_shape_is("out", out, expected); !status.ok()) return status;
  if (Status status = check_apart({{"out", &out}}, {{"x", &x}, {"indices", &indices}}); !status.ok()) return status;
  if (out.shape.numel() == 0) return {};
  TensorView target = out;
  target.shape = slice.shape;
  for (int d = 0; d < slice.shape.ndim; ++d) target.stride[d] = out.stride[indices.shape.ndim + d];
  const int64_t bytes = element_bytes(x.type);
  const int64_t count = indices.shape.numel();
  for (int64_t i = 0; i < count; ++i) {
    int64_t index;
    const int dims = indices.shape.ndim;
    if (Status s = read_index(indices, offset_of(indices, dims, i), x.shape.size[0], &index); !s.ok()) return s;
    slice.data = static_cast<char*>(x.data) + index * x.stride[0] * bytes;
    target.data = static_cast<char*>(out.data) + offset_of(out, dims, i) * bytes;
    if (Status status = copy(slice, target, {}); !status.ok()) return status;
  }
  return {};
}

Status scatter(const TensorView& indices, double value, const TensorView& out, const Parallel&) {
  if (Status status = check_indices("indices", indices); !status.ok()) return status;
  if (Status status = check_floats("out", out, 1); !status.ok()) return status;
  if (indices.shape.ndim < 1) return Status::error("indices has no dimensions; expected at least one");
  const Rows places(indices), outputs(out);
  if (Status status = check_shape_is("out", out, without_last(indices.shape, outputs.width)); !status.ok()) return status;
  if (Status status = check_apart({{"out", &out}}, {{"indices", &indices}}); !status.ok()) return status;
  for (int64_t row = 0; row < places.count; ++row) {
    const int64_t place = places.offset(row), to = outputs.offset(row);
    for (int64_t i = 0; i < places.width; ++i) {
      int64_t index;
      if (Status s = read_index(indices, place + i * places.step(), outputs.width, &index); !s.ok()) return s;
      store_from_f32(out.data, dtype_of(out.type), to + index * outputs.step(), static_cast<float>(value));
    }
  }
  return {};
}

}  // namespace lowbit
