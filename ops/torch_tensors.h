// Tensors of PyTorch as operands: views, outputs, and a Status as an exception. Only for torch_ops.cpp.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <new>
#include <stdexcept>

#include "check.h"

namespace lowbit {

// std::bad_alloc has no settable message.
class NoMemory : public std::bad_alloc {
 public:
  explicit NoMemory(const Status& status) : status_(status) {}
  const char* what() const noexcept override { return status_.message(); }

 private:
  Status status_;
};

// pybind11 maps these to ValueError, IndexError, MemoryError and RuntimeError.
inline void raise_unless_ok(const Status& status) {
  switch (status.kind()) {
    case Status::Kind::ok: return;
    case Status::Kind::invalid: throw std::invalid_argument(status.message());
    case Status::Kind::out_of_range: throw std::out_of_range(status.message());
    case Status::Kind::no_memory: throw NoMemory(status);
    case Status::Kind::system: throw std::runtime_error(status.message());
  }
}

// Name of a tensor's dtype. Torch only appends to its numbering of types.
inline const char* dtype_name(const torch::stable::Tensor& tensor) {
  static constexpr const char* kNames[] = {
      "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex32", "complex64", "complex128",
      "bool", "qint8", "quint8", "qint32", "bfloat16", "quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8",
      "bits16", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "uint16", "uint32", "uint64", "uint1",
      "uint2", "uint3", "uint4", "uint5", "uint6", "uint7", "int1", "int2", "int3", "int4", "int5", "int6", "int7",
      "float8_e8m0fnu", "float4_e2m1fn_x2"};
  int32_t number = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &number));
  return number < static_cast<int32_t>(sizeof kNames / sizeof *kNames) ? kNames[number] : "newer than this version of lowbit";
}

inline TensorView view_of(const char* name, const torch::stable::Tensor& tensor) {
  TensorView view;
  int32_t layout;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  if (layout != aoti_torch_layout_strided()) {
    raise_unless_ok(Status::error("%s is sparse, or has another layout than torch.strided; expected a dense tensor", name));
  }
  const int64_t ndim = tensor.dim();
  if (ndim > kMaxDims) {
    raise_unless_ok(Status::error("%s has %d dimensions; expected at most %d", name, static_cast<int>(ndim), kMaxDims));
  }
  view.shape.ndim = static_cast<int>(ndim);
  int64_t *sizes, *strides;
  if (aoti_torch_get_sizes(tensor.get(), &sizes) != AOTI_TORCH_SUCCESS ||
      aoti_torch_get_strides(tensor.get(), &strides) != AOTI_TORCH_SUCCESS) {
    raise_unless_ok(Status::error("%s is nested, or has symbolic sizes; expected a dense tensor", name));
  }
  bool empty = false;
  int64_t last = 0;  // element
  for (int d = 0; d < view.shape.ndim; ++d) {
    view.shape.size[d] = sizes[d];
    view.stride[d] = strides[d];
    empty = empty || sizes[d] == 0;
    last += (sizes[d] - 1) * strides[d];  // torch has checked that this does not overflow
  }
  try {
    view.type = element_type_of(tensor.scalar_type());
  } catch (const std::exception&) {  // the stable ABI has no such type
  }
  if (view.type == ElementType::other) {
    raise_unless_ok(Status::error("%s has dtype %s; expected one of torch's usual types, such as float32 or int64", name,
                                  dtype_name(tensor)));
  }
  view.on_cpu = tensor.is_cpu();
  // The memory is only read, except that of outputs from allocate().
  view.data = const_cast<void*>(tensor.const_data_ptr());
  // A storage that was made smaller, as by untyped_storage().resize_().
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  const int64_t needed = (tensor.storage_offset() + last + 1) * static_cast<int64_t>(tensor.element_size());
  if (view.on_cpu && !empty && view.data != nullptr && needed > bytes) {
    raise_unless_ok(Status::error("%s has shape %s, which needs %" PRId64 " bytes, and a storage of %" PRId64, name,
                                  describe(view.shape).text, needed, bytes));
  }
  return view;
}

// A view of a tensor that the operator changes in place. As in torch's in-place operators, its version changes, so that a
// backward pass that needs the old values raises an error. While gradients are recorded, it must not be part of the graph.
inline TensorView changed(const char* name, const torch::stable::Tensor& tensor) {
  TensorView view = view_of(name, tensor);
  if (!view.on_cpu) return view;
  if (aoti_torch_grad_mode_is_enabled()) {
    StableIValue stack[] = {torch::stable::detail::from(tensor)};
    TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::is_leaf", "", stack, TORCH_ABI_VERSION));
    if (!torch::stable::detail::to<bool>(stack[0])) {
      raise_unless_ok(Status::system("%s is computed from a tensor that requires gradients; expected one that can be "
                                     "changed in place: call the operator under torch.no_grad(), or detach it", name));
    }
  }
  // Assigning to itself copies nothing.
  if (aoti_torch_copy_(tensor.get(), tensor.get(), 0) != AOTI_TORCH_SUCCESS) {
    raise_unless_ok(Status::system("%s cannot be changed in place: it requires gradients, or it is a tensor of "
                                   "torch.inference_mode() outside of that mode", name));
  }
  view.data = tensor.mutable_data_ptr();  // copies memory with copy-on-write sharing
  return view;
}

// A contiguous CPU tensor. The shim costs 0.7 us less than the empty_like wrapper.
inline torch::stable::Tensor allocate(const Shape& shape, torch::headeronly::ScalarType type) {
  raise_unless_ok(check_shape("the output", shape));
  int64_t strides[kMaxDims];
  int64_t stride = 1;
  for (int d = shape.ndim - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= shape.size[d] > 0 ? shape.size[d] : 1;
  }
  AtenTensorHandle handle;
  if (aoti_torch_empty_strided(shape.ndim, shape.size, strides,
                               torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)),
                               aoti_torch_device_type_cpu(), 0, &handle) != AOTI_TORCH_SUCCESS) {
    raise_unless_ok(Status::no_memory("no memory for an output of shape %s", describe(shape).text));
  }
  return torch::stable::Tensor(handle);
}

}  // namespace lowbit
