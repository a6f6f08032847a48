// Checks that the operators of numbers.h share.
#pragma once

#include "../kernels/status.h"
#include "../ops/check.h"
#include "../ops/tensor_view.h"

namespace lowbit {

inline bool is_number(ElementType type) {
  return is_activation_type(type) || type == ElementType::i32 || type == ElementType::i64 || type == ElementType::boolean;
}

inline Status check_number(const char* name, const TensorView& tensor) {
  if (Status status = check_memory(name, tensor); !status.ok()) return status;
  if (is_number(tensor.type)) return {};
  return Status::error("%s has dtype %s; expected floats, int32, int64 or bool", name, name_of(tensor.type));
}

inline Status check_shape_is(const char* name, const TensorView& tensor, const Shape& shape) {
  bool same = tensor.shape.ndim == shape.ndim;
  for (int d = 0; same && d < shape.ndim; ++d) same = tensor.shape.size[d] == shape.size[d];
  if (same) return {};
  return Status::error("%s has shape %s; expected %s", name, describe(tensor.shape).text, describe(shape).text);
}

}  // namespace lowbit
