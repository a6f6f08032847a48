// A tensor of any host framework, as seen by the operator bodies. A framework's registration file fills it in; the operator
// bodies do not know the framework.
#pragma once

#include <cstdint>

#include "../kernels/numeric.h"

namespace lowbit {

// The types that operators accept come first; the others are only named in messages.
enum class ElementType : uint8_t { f32, bf16, f16, u8, i32, i64, f64, i8, i16, boolean, other };

// Converts the host's enumeration: PyTorch's and ExecuTorch's are two types with the same names.
template <class ScalarType>
ElementType element_type_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return ElementType::f32;
    case ScalarType::BFloat16: return ElementType::bf16;
    case ScalarType::Half: return ElementType::f16;
    case ScalarType::Byte: return ElementType::u8;
    case ScalarType::Int: return ElementType::i32;
    case ScalarType::Long: return ElementType::i64;
    case ScalarType::Double: return ElementType::f64;
    case ScalarType::Char: return ElementType::i8;
    case ScalarType::Short: return ElementType::i16;
    case ScalarType::Bool: return ElementType::boolean;
    default: return ElementType::other;
  }
}

inline constexpr int kMaxDims = 16;

struct Shape {
  int ndim = 0;
  int64_t size[kMaxDims] = {};

  int64_t numel() const {
    int64_t count = 1;
    for (int d = 0; d < ndim; ++d) count *= size[d];
    return count;
  }
};

struct TensorView {
  void* data = nullptr;
  ElementType type = ElementType::other;
  bool on_cpu = true;
  Shape shape;
  int64_t stride[kMaxDims] = {};  // in elements

  bool is_contiguous() const {
    if (shape.numel() == 0) return true;
    int64_t expected = 1;
    for (int d = shape.ndim - 1; d >= 0; --d) {
      if (shape.size[d] != 1 && stride[d] != expected) return false;
      expected *= shape.size[d];
    }
    return true;
  }
};

// Gives a tensor the strides of its shape without gaps.
inline void make_contiguous(TensorView* tensor) {
  int64_t stride = 1;
  for (int d = tensor->shape.ndim - 1; d >= 0; --d) {
    tensor->stride[d] = stride;
    stride *= tensor->shape.size[d];
  }
}

// For a type that operators accept.
inline int64_t element_bytes(ElementType type) {
  switch (type) {
    case ElementType::f32:
    case ElementType::i32: return 4;
    case ElementType::bf16:
    case ElementType::f16: return 2;
    case ElementType::i64: return 8;
    default: return 1;
  }
}

inline const char* name_of(ElementType type) {
  switch (type) {
    case ElementType::f32: return "float32";
    case ElementType::bf16: return "bfloat16";
    case ElementType::f16: return "float16";
    case ElementType::u8: return "uint8";
    case ElementType::i32: return "int32";
    case ElementType::i64: return "int64";
    case ElementType::f64: return "float64";
    case ElementType::i8: return "int8";
    case ElementType::i16: return "int16";
    case ElementType::boolean: return "bool";
    case ElementType::other: break;
  }
  return "another type";
}

inline bool is_activation_type(ElementType type) {
  return type == ElementType::f32 || type == ElementType::bf16 || type == ElementType::f16;
}

// For a type for which is_activation_type() is true.
inline DType dtype_of(ElementType type) {
  return type == ElementType::f32 ? DType::f32 : type == ElementType::bf16 ? DType::bf16 : DType::f16;
}

}  // namespace lowbit
