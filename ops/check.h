// Argument checks shared by the operators.
#pragma once

#include <cinttypes>
#include <cstring>
#include <initializer_list>
#include <mutex>

#include "../kernels/format.h"
#include "../kernels/isa.h"
#include "../kernels/status.h"
#include "parallel.h"
#include "tensor_view.h"

namespace lowbit {

struct ShapeText {
  char text[128];
};

inline ShapeText describe(const Shape& shape) {
  ShapeText result;
  int at = std::snprintf(result.text, sizeof result.text, "[");
  for (int d = 0; d < shape.ndim && d < kMaxDims && at < 100; ++d) {
    at += std::snprintf(result.text + at, sizeof result.text - static_cast<size_t>(at), "%s%" PRId64, d ? ", " : "",
                        shape.size[d]);
  }
  std::snprintf(result.text + at, sizeof result.text - static_cast<size_t>(at), "]");
  return result;
}

// The table of levels, if the mapping has one.
inline const int8_t* levels_of(const Layout& layout) { return has_table(layout.mapping) ? layout.levels : nullptr; }

// An unknown name in LOWBIT_ISA is an error, because the intended cap is unknown.
inline Status check_isa_cap() {
  if (const Status& status = isa_cap_status(); !status.ok()) return status;
  return {};
}

// A program may fill in a shape by hand, so every field must be checked.
inline Status check_shape(const char* name, const Shape& shape) {
  if (shape.ndim < 0 || shape.ndim > kMaxDims) {
    return Status::error("%s has %d dimensions; expected 0 to %d", name, shape.ndim, kMaxDims);
  }
  int64_t bytes = 8;  // of the widest type
  for (int d = 0; d < shape.ndim; ++d) {
    if (shape.size[d] < 0) {
      return Status::error("%s has shape %s; expected no size below 0", name, describe(shape).text);
    }
    if (shape.size[d] != 0 && __builtin_mul_overflow(bytes, shape.size[d], &bytes)) {
      return Status::error("%s has shape %s; expected less than 2^60 elements", name, describe(shape).text);
    }
  }
  return {};
}

// Checks that a shape is possible and has this many dimensions.
inline Status check_dimensions(const char* name, const TensorView& tensor, int ndim, const char* expected) {
  if (Status status = check_shape(name, tensor.shape); !status.ok()) return status;
  if (tensor.shape.ndim == ndim) return {};
  return Status::error("%s has shape %s; expected %s", name, describe(tensor.shape).text, expected);
}

// The bytes between the first and the last element of a valid shape, with strides of any sign.
inline Status check_strides(const char* name, const TensorView& tensor) {
  if (tensor.shape.numel() == 0) return {};
  int64_t bytes = 0;
  for (int d = 0; d < tensor.shape.ndim; ++d) {
    int64_t step;
    if (__builtin_mul_overflow(tensor.stride[d], 8 * (tensor.shape.size[d] - 1), &step) ||
        __builtin_add_overflow(bytes, step < 0 ? ~step : step, &bytes)) {
      return Status::error("%s has shape %s and stride %" PRId64 " in dimension %d; expected less than 2^60 elements "
                           "between the first and the last", name, describe(tensor.shape).text, tensor.stride[d], d);
    }
  }
  return {};
}

// Checks that a tensor is on the CPU, has a possible shape and strides, and has memory.
inline Status check_memory(const char* name, const TensorView& tensor) {
  if (!tensor.on_cpu) return Status::error("%s is not on the CPU; lowbit kernels run on CPU tensors", name);
  if (Status status = check_shape(name, tensor.shape); !status.ok()) return status;
  if (Status status = check_strides(name, tensor); !status.ok()) return status;
  if (tensor.data == nullptr && tensor.shape.numel() != 0) {
    return Status::error("%s has shape %s and no memory", name, describe(tensor.shape).text);
  }
  return {};
}

inline Status check_parallel(const Parallel& parallel) {
  constexpr int kMostThreads = 1 << 16;
  if (parallel.threads < 1 || parallel.threads > kMostThreads) {
    return Status::error("parallel has %d threads; expected 1 to %d", parallel.threads, kMostThreads);
  }
  if (parallel.threads > 1 && parallel.run == nullptr) {
    return Status::error("parallel has %d threads and no function that runs tasks on them", parallel.threads);
  }
  return {};
}

// Whether the memory ranges of two tensors, from the first to the last byte, overlap.
inline bool overlap(const TensorView& a, const TensorView& b) {
  if (a.shape.numel() == 0 || b.shape.numel() == 0) return false;
  const auto offset_to = [](const TensorView& tensor, bool last) {  // in bytes
    int64_t offset = 0;
    for (int d = 0; d < tensor.shape.ndim; ++d) {
      if ((tensor.stride[d] > 0) == last) offset += (tensor.shape.size[d] - 1) * tensor.stride[d];
    }
    return static_cast<uintptr_t>((offset + last) * element_bytes(tensor.type));
  };
  const auto at = [](const TensorView& tensor) { return reinterpret_cast<uintptr_t>(tensor.data); };
  return at(a) + offset_to(a, false) < at(b) + offset_to(b, true) &&
         at(b) + offset_to(b, false) < at(a) + offset_to(a, true);
}

struct NamedTensor {
  const char* name;
  const TensorView* tensor;  // null: there is none
};

// An output that overlaps an input would change the input while it is read.
inline Status check_apart(std::initializer_list<NamedTensor> outputs, std::initializer_list<NamedTensor> inputs) {
  const auto check = [](const NamedTensor& a, const NamedTensor& b) {
    if (a.tensor == nullptr || b.tensor == nullptr || !overlap(*a.tensor, *b.tensor)) return Status();
    return Status::error("%s and %s share memory; expected separate memory", a.name, b.name);
  };
  for (const NamedTensor* out = outputs.begin(); out != outputs.end(); ++out) {
    for (const NamedTensor* other = out + 1; other != outputs.end(); ++other) {
      if (Status status = check(*out, *other); !status.ok()) return status;
    }
    for (const NamedTensor& input : inputs) {
      if (Status status = check(*out, input); !status.ok()) return status;
    }
  }
  return {};
}

// Checks for a CPU tensor of the given type and shape, with any strides.
inline Status check_type_and_shape(const char* name, const TensorView& tensor, ElementType type, const Shape& shape) {
  if (Status status = check_memory(name, tensor); !status.ok()) return status;
  if (tensor.type != type) {
    return Status::error("%s has dtype %s; expected %s", name, name_of(tensor.type), name_of(type));
  }
  bool same = tensor.shape.ndim == shape.ndim;
  for (int d = 0; same && d < shape.ndim; ++d) same = tensor.shape.size[d] == shape.size[d];
  if (!same) {
    return Status::error("%s has shape %s; expected %s", name, describe(tensor.shape).text, describe(shape).text);
  }
  return {};
}

// The same, contiguous.
inline Status check_tensor(const char* name, const TensorView& tensor, ElementType type, const Shape& shape) {
  if (Status status = check_type_and_shape(name, tensor, type, shape); !status.ok()) return status;
  if (!tensor.is_contiguous()) return Status::error("%s is not contiguous", name);
  return {};
}

// Checks type and shape; strides are arbitrary, but the last dimension must be contiguous.
inline Status check_rows_of(const char* name, const TensorView& tensor, ElementType type, const Shape& expected) {
  if (Status status = check_type_and_shape(name, tensor, type, expected); !status.ok()) return status;
  const int last = expected.ndim - 1;
  if (tensor.shape.size[last] > 1 && tensor.stride[last] != 1) {
    return Status::error("%s has stride %" PRId64 " in its last dimension; expected 1", name, tensor.stride[last]);
  }
  return {};
}

// Checks for a type in which layers compute.
inline Status check_activations(const char* name, const TensorView& tensor) {
  if (Status status = check_memory(name, tensor); !status.ok()) return status;
  if (is_activation_type(tensor.type)) return {};
  return Status::error("%s has dtype %s; expected float32, bfloat16 or float16", name, name_of(tensor.type));
}

// The error if no kernel can read a weight, which is only possible for a vendor's format.
inline Status no_kernel(const char* family, const Layout& layout) {
  return Status::error("no %s kernel for weights of %d bits in format '%s' runs on this CPU under LOWBIT_ISA", family,
                       layout.bits, name_of(layout.format).text);
}

// The layout of a packed [n, k] matrix with the shape of `tensor`. `levels`: 2^bits int8 levels, or null. `rotated_inputs`:
// block size of the rotation, or 0.
inline Status matrix_layout(const char* name_has, const TensorView& tensor, int bits, int64_t group_size, bool affine,
                            bool has_bias, Layout* layout, const TensorView* levels = nullptr,
                            int64_t rotated_inputs = 0) {
  if (Status status = check_isa_cap(); !status.ok()) return status;
  if (tensor.shape.ndim != 2) {
    return Status::error("%s shape %s; expected two dimensions [n, k]", name_has, describe(tensor.shape).text);
  }
  if (levels != nullptr) {
    if (affine) return Status::error("levels and mins are both given; expected at most one");
    if (Status s = check_memory("levels", *levels); !s.ok()) return s;
    const int64_t count = can_have_levels(bits) ? int64_t{1} << bits : levels->shape.numel();
    // Another width is refused below.
    if (Status s = check_tensor("levels", *levels, ElementType::i8, {1, {count}}); !s.ok()) return s;
  }
  if (Status s = make_layout(tensor.shape.size[0], tensor.shape.size[1], bits, group_size,
                             mapping_with(affine, levels != nullptr), has_bias, layout,
                             levels == nullptr ? nullptr : static_cast<const int8_t*>(levels->data));
      !s.ok()) {
    return s;
  }
  return set_rotation(rotated_inputs, layout);
}

// Keeps the error of the first piece with an error, whichever thread finds one first.
class FirstError {
 public:
  void report(int64_t piece, const Status& status) {
    if (status.ok()) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (status_.ok() || piece < piece_) {
      piece_ = piece;
      status_ = status;
    }
  }
  const Status& status() const { return status_; }

 private:
  std::mutex mutex_;
  int64_t piece_ = 0;
  Status status_;
};

// The offset in elements of position `flat` (row-major) over the first `dims` dimensions.
inline int64_t offset_of(const TensorView& tensor, int dims, int64_t flat) {
  int64_t offset = 0;
  for (int d = dims - 1; d >= 0; --d) {
    offset += flat % tensor.shape.size[d] * tensor.stride[d];
    flat /= tensor.shape.size[d];
  }
  return offset;
}

// Reads the int32 or int64 at position `flat`. The owner of the memory may change it meanwhile, so it is read only once.
inline int64_t index_at(const TensorView& indices, int64_t flat) {
  const char* at = static_cast<const char*>(indices.data) +
                   element_bytes(indices.type) * offset_of(indices, indices.shape.ndim, flat);
  if (indices.type == ElementType::i64) {
    int64_t index;
    std::memcpy(&index, at, sizeof index);
    __asm__ volatile("" : "+r"(index));  // the compiler must not read it a second time
    return index;
  }
  int32_t index;
  std::memcpy(&index, at, sizeof index);
  __asm__ volatile("" : "+r"(index));
  return index;
}

// The number of positions of a text before a call.
inline Status read_start(const TensorView& start, int64_t* value) {
  if (Status status = check_memory("start", start); !status.ok()) return status;
  if (start.type != ElementType::i64 || start.shape.ndim > 1 || start.shape.numel() != 1) {
    return Status::error("start has dtype %s and shape %s; expected int64 and one element", name_of(start.type),
                         describe(start.shape).text);
  }
  std::memcpy(value, start.data, sizeof *value);
  __asm__ volatile("" : "+r"(*value));  // read once: another thread may write to it meanwhile
  return {};
}

}  // namespace lowbit
