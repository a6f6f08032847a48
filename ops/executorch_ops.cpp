// ExecuTorch registration of the operator bodies that PyTorch's also uses. It converts tensors, resizes outputs, turns
// a Status into a failed call, and nothing else.

#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include <initializer_list>
#include <optional>

#include "operators.h"

namespace {

using executorch::aten::ArrayRef;
using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::KernelRuntimeContext;
using lowbit::Parallel;
using lowbit::Shape;
using lowbit::Status;
using lowbit::TensorView;

static_assert(executorch::runtime::kTensorDimensionLimit <= lowbit::kMaxDims, "a TensorView holds any tensor");

// Ends the call with an error for the program's caller. ET_CHECK and its kin would end the process.
void fail(KernelRuntimeContext& context, const char* name, const Status& status) {
  ET_LOG(Error, "%s: %s", name, status.message());
  context.fail(status.kind() == Status::Kind::no_memory ? Error::MemoryAllocationFailed : Error::InvalidArgument);
}

TensorView view_of(const Tensor& tensor) {
  TensorView view;
  view.shape.ndim = static_cast<int>(tensor.dim());
  for (int d = 0; d < view.shape.ndim; ++d) {
    view.shape.size[d] = tensor.sizes()[static_cast<size_t>(d)];
    view.stride[d] = tensor.strides()[static_cast<size_t>(d)];
  }
  view.type = lowbit::element_type_of(tensor.scalar_type());
  // Only read through, except for outputs.
  view.data = const_cast<void*>(tensor.const_data_ptr());
  return view;
}

// The output with the given shape, in the memory that the program planned for it. Where that shape is not possible the
// output keeps its own, and the operator, which checks the shape of every argument, says so.
TensorView resized(Tensor& out, const Shape& shape) {
  const Error error = executorch::runtime::resize_tensor(
      out, ArrayRef<int64_t>(shape.size, static_cast<size_t>(shape.ndim)));
  (void)error;
  return view_of(out);
}

// A program's tensor has no memory until the caller provides it.
Status check_memory(std::initializer_list<const TensorView*> tensors) {
  for (const TensorView* tensor : tensors) {
    if (tensor->data == nullptr && tensor->shape.numel() != 0) return Status::error("a tensor has no memory");
  }
  return {};
}

Parallel executorch_threads() {
  Parallel parallel;
  parallel.threads = static_cast<int>(executorch::extension::get_thread_count());
  parallel.run = [](int count, void (*task)(void*, int), void* context) {
    executorch::extension::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) task(context, static_cast<int>(i));
    });
  };
  return parallel;
}

Status run_linear(const Tensor& x, const Tensor& packed_weight, int64_t out_features, Tensor& out) {
  const TensorView x_view = view_of(x), packed_view = view_of(packed_weight);
  Shape shape;
  if (Status status = lowbit::linear_shape(x_view, out_features, &shape); !status.ok()) return status;
  const TensorView out_view = resized(out, shape);
  if (Status status = check_memory({&x_view, &packed_view, &out_view}); !status.ok()) return status;
  return lowbit::linear(x_view, packed_view, out_features, out_view, executorch_threads());
}

Tensor& linear_out(KernelRuntimeContext& context, const Tensor& x, const Tensor& packed_weight, int64_t out_features,
                   Tensor& out) {
  if (Status status = run_linear(x, packed_weight, out_features, out); !status.ok()) {
    fail(context, "lowbit::linear.out", status);
  }
  return out;
}

Status run_embedding(const Tensor& indices, const Tensor& packed_weight, int64_t embedding_dim, Tensor& out) {
  const TensorView indices_view = view_of(indices), packed_view = view_of(packed_weight);
  Shape shape;
  if (Status status = lowbit::embedding_shape(indices_view, embedding_dim, &shape); !status.ok()) return status;
  const TensorView out_view = resized(out, shape);
  if (Status status = check_memory({&indices_view, &packed_view, &out_view}); !status.ok()) return status;
  return lowbit::embedding(indices_view, packed_view, embedding_dim, out_view, executorch_threads());
}

// The dtype is the output's, which export gave the type that `dtype` asks for.
Tensor& embedding_out(KernelRuntimeContext& context, const Tensor& indices, const Tensor& packed_weight,
                      int64_t embedding_dim, std::optional<ScalarType> /*dtype*/, Tensor& out) {
  if (Status status = run_embedding(indices, packed_weight, embedding_dim, out); !status.ok()) {
    fail(context, "lowbit::embedding.out", status);
  }
  return out;
}

}  // namespace

EXECUTORCH_LIBRARY(lowbit, "linear.out", linear_out);
EXECUTORCH_LIBRARY(lowbit, "embedding.out", embedding_out);
