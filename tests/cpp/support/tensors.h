// Tensors for the operator tests, which own their memory and make views with any strides.
#pragma once

#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "../../../ops/operators.h"
#include "guarded.h"
#include "matrix.h"
#include "reference.h"

namespace lowbit::test {

inline TensorView view_of(void* data, ElementType type, const std::vector<int64_t>& sizes,
                          const std::vector<int64_t>& strides) {
  TensorView view;
  view.data = data;
  view.type = type;
  view.shape.ndim = static_cast<int>(sizes.size());
  for (size_t d = 0; d < sizes.size(); ++d) {
    view.shape.size[d] = sizes[d];
    view.stride[d] = strides[d];
  }
  return view;
}

inline std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= sizes[d];
  }
  return strides;
}

// A contiguous tensor in guarded memory, filled with a pattern.
struct Tensor {
  std::unique_ptr<Guarded> memory;
  TensorView view;

  Tensor(ElementType type, const std::vector<int64_t>& sizes) {
    int64_t count = 1;
    for (const int64_t size : sizes) count *= size;
    memory = std::make_unique<Guarded>(count * element_bytes(type));
    std::memset(memory->data(), 0x5c, static_cast<size_t>(memory->size()));
    forget(memory->data(), memory->size());
    view = view_of(memory->data(), type, sizes, contiguous_strides(sizes));
  }
  std::vector<uint8_t> bytes() const { return memory->bytes(); }
};

inline Tensor bytes_tensor(const std::vector<uint8_t>& bytes) {
  Tensor tensor(ElementType::u8, {static_cast<int64_t>(bytes.size())});
  std::memcpy(tensor.memory->data(), bytes.data(), bytes.size());
  tensor.memory->freeze();
  return tensor;
}

inline Tensor random_tensor(ElementType type, const std::vector<int64_t>& sizes, Random& random) {
  Tensor tensor(type, sizes);
  const DType dtype = dtype_of(type);
  const int64_t count = tensor.memory->size() / size_of(dtype);
  for (int64_t i = 0; i < count; ++i) store_from_f32(tensor.memory->data(), dtype, i, random.normal());
  tensor.memory->freeze();
  return tensor;
}

template <class Index>
Tensor index_tensor(const std::vector<Index>& values) {
  Tensor tensor(sizeof(Index) == 8 ? ElementType::i64 : ElementType::i32, {static_cast<int64_t>(values.size())});
  if (!values.empty()) std::memcpy(tensor.memory->data(), values.data(), values.size() * sizeof(Index));
  tensor.memory->freeze();
  return tensor;
}

// Threads of the standard library, one per task.
inline Parallel threads(int count) {
  return {count, [](int tasks, void (*task)(void*, int), void* context) {
            std::vector<std::thread> running;
            for (int i = 0; i < tasks; ++i) running.emplace_back(task, context, i);
            for (std::thread& thread : running) thread.join();
          }};
}

// The value of a view at a flat (row-major) position, in bytes of its type.
inline const uint8_t* element(const TensorView& view, int64_t flat) {
  int64_t offset = 0;
  for (int d = view.shape.ndim - 1; d >= 0; --d) {
    offset += flat % view.shape.size[d] * view.stride[d];
    flat /= view.shape.size[d];
  }
  return static_cast<const uint8_t*>(view.data) + offset * element_bytes(view.type);
}

// The expected result of linear: each row gathered and run alone through the portable kernels.
std::vector<uint8_t> expected_linear(const TensorView& x, const uint8_t* packed, const Layout& layout);

testing::AssertionResult refused(const Status& status, const char* says, Status::Kind kind = Status::Kind::invalid);

}  // namespace lowbit::test
