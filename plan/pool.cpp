#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "../kernels/numeric.h"
#include "../ops/check.h"
#include "../ops/schedule.h"
#include "numbers.h"

namespace lowbit {
namespace {

constexpr int64_t kColumnsPerClaim = 64;

// Sums of float64 do not depend on the CPU: each column is added row by row.
void pool_text(const TensorView& x, int64_t begin, int64_t end, Pooling mode, int64_t first, int64_t last,
               const TensorView& out, int64_t text) {
  double sums[kColumnsPerClaim] = {};
  float largest[kColumnsPerClaim];
  const int64_t columns = last - first;
  const DType type = dtype_of(x.type);
  for (int64_t row = begin; row < end; ++row) {
    const double weight = mode == Pooling::weighted ? static_cast<double>(row - begin + 1) : 1.0;
    for (int64_t c = 0; c < columns; ++c) {
      const float value = load_as_f32(x.data, type, row * x.stride[1] + (first + c) * x.stride[2]);
      if (mode != Pooling::largest) sums[c] += weight * static_cast<double>(value);
      else if (row == begin || value > largest[c] || std::isnan(value)) largest[c] = value;  // a NaN stays
    }
  }
  const double count = static_cast<double>(end - begin);
  const double divisor = mode == Pooling::root       ? std::sqrt(count)
                         : mode == Pooling::weighted ? count * (count + 1.0) / 2.0
                                                     : count;
  for (int64_t c = 0; c < columns; ++c) {
    const float result = mode == Pooling::largest ? largest[c] : static_cast<float>(sums[c] / divisor);
    store_from_f32(out.data, dtype_of(out.type), text * out.stride[0] + (first + c) * out.stride[1],
                   std::isnan(result) ? std::numeric_limits<float>::quiet_NaN() : result);  // the same NaN on all CPUs
  }
}

}  // namespace

Status pool(const TensorView& x, const TensorView& ranges, int64_t mode, const TensorView& out, const Parallel& parallel) {
  for (const auto& [name, tensor] : {std::pair("x", &x), std::pair("out", &out)}) {
    if (Status status = check_memory(name, *tensor); !status.ok()) return status;
    if (!is_activation_type(tensor->type)) {
      return Status::error("%s has dtype %s; expected floats", name, name_of(tensor->type));
    }
  }
  if (Status status = check_memory("ranges", ranges); !status.ok()) return status;
  const int64_t rows = x.shape.ndim == 3 ? x.shape.size[1] : 0, width = x.shape.ndim == 3 ? x.shape.size[2] : 0;
  const int64_t texts = ranges.shape.size[0];
  if (x.shape.ndim != 3 || x.shape.size[0] != 1 || ranges.shape.ndim != 2 || ranges.shape.size[1] != 2 ||
      ranges.type != ElementType::i64 || out.shape.ndim != 2 || out.shape.size[0] != texts || out.shape.size[1] != width) {
    return Status::error("x has shape %s, ranges %s of %s, and out %s; expected [1, rows, width], [texts, 2] of int64 and "
                         "[texts, width]", describe(x.shape).text, describe(ranges.shape).text, name_of(ranges.type),
                         describe(out.shape).text);
  }
  if (mode < 0 || mode > static_cast<int64_t>(Pooling::weighted)) {
    return Status::error("pooling has mode %" PRId64 "; expected 0 to %d", mode, static_cast<int>(Pooling::weighted));
  }
  if (Status status = check_apart({{"out", &out}}, {{"x", &x}, {"ranges", &ranges}}); !status.ok()) return status;
  std::vector<int64_t> bounds;  // read once, because the owner of the memory may change it meanwhile
  for (int64_t text = 0; text < texts; ++text) {
    for (int64_t which = 0; which < 2; ++which) {
      bounds.push_back(static_cast<const int64_t*>(ranges.data)[text * ranges.stride[0] + which * ranges.stride[1]]);
    }
    const int64_t begin = bounds[bounds.size() - 2], end = bounds.back();
    if (begin < 0 || end <= begin || end > rows) {
      return Status::out_of_range("text %" PRId64 " has rows %" PRId64 " to %" PRId64 " of %" PRId64 "; expected at least one",
                                  text, begin, end, rows);
    }
  }
  const int64_t claims = (width + kColumnsPerClaim - 1) / kColumnsPerClaim;
  parallel_1d(parallel, texts * claims, 1, [&](int, int64_t begin, int64_t end) {
    for (int64_t claim = begin; claim < end; ++claim) {
      const int64_t text = claim / claims, first = claim % claims * kColumnsPerClaim;
      const int64_t* const range = &bounds[static_cast<size_t>(2 * text)];
      const int64_t last = std::min(first + kColumnsPerClaim, width);
      pool_text(x, range[0], range[1], static_cast<Pooling>(mode), first, last, out, text);
    }
  });
  return {};
}

}  // namespace lowbit
