// Argument checks that the operators share.
#pragma once

#include <cinttypes>

#include "../kernels/status.h"
#include "tensor_view.h"

namespace lowbit {

struct ShapeText {
  char text[128];
};

inline ShapeText describe(const Shape& shape) {
  ShapeText result;
  int at = std::snprintf(result.text, sizeof result.text, "[");
  for (int d = 0; d < shape.ndim && at < 100; ++d) {
    at += std::snprintf(result.text + at, sizeof result.text - static_cast<size_t>(at), "%s%" PRId64, d ? ", " : "",
                        shape.size[d]);
  }
  std::snprintf(result.text + at, sizeof result.text - static_cast<size_t>(at), "]");
  return result;
}

inline Status check_on_cpu(const char* name, const TensorView& tensor) {
  if (!tensor.on_cpu) return Status::error("%s is not on the CPU; lowbit kernels run on CPU tensors", name);
  return {};
}

// A contiguous CPU tensor of the given type and shape.
inline Status check_tensor(const char* name, const TensorView& tensor, ElementType type, const Shape& shape) {
  if (Status status = check_on_cpu(name, tensor); !status.ok()) return status;
  if (tensor.type != type) {
    return Status::error("%s has dtype %s; expected %s", name, name_of(tensor.type), name_of(type));
  }
  bool same = tensor.shape.ndim == shape.ndim;
  for (int d = 0; same && d < shape.ndim; ++d) same = tensor.shape.size[d] == shape.size[d];
  if (!same) {
    return Status::error("%s has shape %s; expected %s", name, describe(tensor.shape).text, describe(shape).text);
  }
  if (!tensor.is_contiguous()) return Status::error("%s is not contiguous", name);
  return {};
}

// The offset in elements of position `flat` (row-major) over the first `dims` dimensions.
inline int64_t offset_of(const TensorView& tensor, int dims, int64_t flat) {
  int64_t offset = 0;
  for (int d = dims - 1; d >= 0; --d) {
    offset += flat % tensor.shape.size[d] * tensor.stride[d];
    flat /= tensor.shape.size[d];
  }
  return offset;
}

}  // namespace lowbit
