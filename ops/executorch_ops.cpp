// ExecuTorch registration of the operator bodies that PyTorch's also uses. It unpacks arguments, resizes outputs, turns
// a Status into a failed call, and nothing else.
//
// The arguments are unpacked by hand: which value of a program is which argument is input from a file, and the code
// that EXECUTORCH_LIBRARY generates ends the process over a value of the wrong kind, and reads on where there are too
// few.

#include <executorch/runtime/core/event_tracer_hooks.h>
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include "operators.h"

namespace {

using executorch::aten::ArrayRef;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::Kernel;
using executorch::runtime::KernelRuntimeContext;
using executorch::runtime::Span;
using executorch::runtime::Tag;
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
// output keeps its own, and the operator, which checks the shape and the memory of every argument, says so. A file can
// name one tensor twice, so inputs are looked at before.
TensorView resized(Tensor& out, const Shape& shape) {
  const Error error = executorch::runtime::resize_tensor(
      out, ArrayRef<int64_t>(shape.size, static_cast<size_t>(shape.ndim)));
  (void)error;
  return view_of(out);
}

TensorView tensor_at(Span<EValue*> values, size_t i) { return view_of(values[i]->toTensor()); }

// An argument that may be none.
class Optional {
 public:
  explicit Optional(const EValue* value) : given_(!value->isNone()) {
    if (given_) view_ = view_of(value->toTensor());
  }
  const TensorView* pointer() const { return given_ ? &view_ : nullptr; }

 private:
  bool given_;
  TensorView view_;
};

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

struct Argument {
  const char* name;
  Tag kind;
  bool may_be_none = false;
};

// The runtime hands over the arguments, and behind them the results, which are the output again.
template <size_t count>
Status check_arguments(Span<EValue*> values, const Argument (&arguments)[count]) {
  if (values.size() < count) return Status::error("the call has %zu values; expected %zu", values.size(), count);
  for (size_t i = 0; i < count; ++i) {
    const Argument& argument = arguments[i];
    const Tag tag = values[i]->tag;
    if (tag == argument.kind || (tag == Tag::None && argument.may_be_none)) continue;
    char tag_name[executorch::runtime::kTagNameBufferSize], expected_name[executorch::runtime::kTagNameBufferSize];
    executorch::runtime::tag_to_string(tag, tag_name, sizeof tag_name);
    executorch::runtime::tag_to_string(argument.kind, expected_name, sizeof expected_name);
    return Status::error("argument %s is of kind %s; expected %s", argument.name, tag_name, expected_name);
  }
  return {};
}

Status run_linear(Span<EValue*> values) {
  if (Status status = check_arguments(values, {{"x", Tag::Tensor},
                                               {"packed_weight", Tag::Tensor},
                                               {"out_features", Tag::Int},
                                               {"out", Tag::Tensor}});
      !status.ok()) {
    return status;
  }
  const Tensor &x = values[0]->toTensor(), &packed_weight = values[1]->toTensor();
  const int64_t out_features = values[2]->toInt();
  Tensor& out = values[3]->toTensor();

  const TensorView x_view = view_of(x), packed_view = view_of(packed_weight);
  Shape shape;
  if (Status status = lowbit::linear_shape(x_view, out_features, &shape); !status.ok()) return status;
  return lowbit::linear(x_view, packed_view, out_features, resized(out, shape), executorch_threads());
}

Status run_linears(Span<EValue*> values) {
  if (Status status = check_arguments(values, {{"x", Tag::Tensor},
                                               {"packed_weights", Tag::ListTensor},
                                               {"out_features", Tag::ListInt},
                                               {"out", Tag::Tensor}});
      !status.ok()) {
    return status;
  }
  const Tensor& x = values[0]->toTensor();
  const auto weight_list = values[1]->tryToTensorList();
  const auto size_list = values[2]->tryToIntList();
  if (!weight_list.ok() || !size_list.ok()) return Status::error("a list has elements of another kind");
  const ArrayRef<Tensor> packed_weights = *weight_list;
  const ArrayRef<int64_t> out_features = *size_list;
  Tensor& out = values[3]->toTensor();
  if (packed_weights.size() != out_features.size()) {
    return Status::error("there are %zu packed_weights and %zu out_features; expected equal numbers", packed_weights.size(),
                         out_features.size());
  }

  const TensorView x_view = view_of(x);
  const int64_t count = static_cast<int64_t>(out_features.size());
  Shape shape;
  if (Status status = lowbit::linears_shape(x_view, out_features.data(), count, &shape); !status.ok()) return status;
  TensorView packed[lowbit::kMostMatrices];  // as many as linears_shape() lets pass
  for (size_t i = 0; i < packed_weights.size(); ++i) packed[i] = view_of(packed_weights[i]);
  return lowbit::linears(x_view, packed, out_features.data(), count, resized(out, shape), executorch_threads());
}

Status run_linear_experts(Span<EValue*> values) {
  if (Status status = check_arguments(values, {{"x", Tag::Tensor},
                                               {"packed_weights", Tag::Tensor},
                                               {"experts", Tag::Tensor},
                                               {"out_features", Tag::Int},
                                               {"out", Tag::Tensor}});
      !status.ok()) {
    return status;
  }
  const Tensor &x = values[0]->toTensor(), &packed_weights = values[1]->toTensor(), &experts = values[2]->toTensor();
  const int64_t out_features = values[3]->toInt();
  Tensor& out = values[4]->toTensor();

  const TensorView x_view = view_of(x), packed_view = view_of(packed_weights), experts_view = view_of(experts);
  Shape shape;
  if (Status status = lowbit::linear_experts_shape(x_view, experts_view, out_features, &shape); !status.ok()) {
    return status;
  }
  return lowbit::linear_experts(x_view, packed_view, experts_view, out_features, resized(out, shape),
                                executorch_threads());
}

// The dtype is the output's, which export gave the type that `dtype` asks for.
Status run_embedding(Span<EValue*> values) {
  if (Status status = check_arguments(values, {{"indices", Tag::Tensor},
                                               {"packed_weight", Tag::Tensor},
                                               {"embedding_dim", Tag::Int},
                                               {"dtype", Tag::Int, true},
                                               {"out", Tag::Tensor}});
      !status.ok()) {
    return status;
  }
  const Tensor &indices = values[0]->toTensor(), &packed_weight = values[1]->toTensor();
  const int64_t embedding_dim = values[2]->toInt();
  Tensor& out = values[4]->toTensor();

  const TensorView indices_view = view_of(indices), packed_view = view_of(packed_weight);
  Shape shape;
  if (Status status = lowbit::embedding_shape(indices_view, embedding_dim, &shape); !status.ok()) return status;
  return lowbit::embedding(indices_view, packed_view, embedding_dim, resized(out, shape), executorch_threads());
}

// The caches are changed in place: export leaves the buffers of the program itself to be arguments. With a window's caches
// there is the tensor `held` after them.
template <bool kHeld>
Status run_attention(Span<EValue*> values) {
  constexpr size_t kCaches = 5, kStart = kHeld ? 6 : 5, kAll = kStart + 6;
  const Argument both[] = {{"q", Tag::Tensor},       {"k", Tag::Tensor},         {"v", Tag::Tensor},
                           {"k_cache", Tag::Tensor}, {"v_cache", Tag::Tensor},   {"start", Tag::Tensor},
                           {"scale", Tag::Double},   {"window", Tag::Int},       {"softcap", Tag::Double},
                           {"sinks", Tag::Tensor, true}, {"out", Tag::Tensor}};
  Argument arguments[kAll];
  for (size_t i = 0; i < kCaches; ++i) arguments[i] = both[i];
  if (kHeld) arguments[kCaches] = {"held", Tag::Tensor};
  for (size_t i = kStart; i < kAll; ++i) arguments[i] = both[i - kStart + kCaches];
  if (Status status = check_arguments(values, arguments); !status.ok()) return status;
  TensorView views[kStart + 1];
  for (size_t i = 0; i <= kStart; ++i) views[i] = tensor_at(values, i);
  const Optional sinks(values[kStart + 4]);
  const lowbit::Scores scores{values[kStart + 1]->toDouble(), values[kStart + 2]->toInt(), values[kStart + 3]->toDouble(),
                              sinks.pointer()};
  Tensor& out = values[kStart + 5]->toTensor();
  Shape shape;
  if (Status status = lowbit::attention_shape(views[0], views[2], &shape); !status.ok()) return status;
  if constexpr (kHeld) {
    return lowbit::window_attention(views[0], views[1], views[2], views[3], views[4], views[5], views[6], scores,
                                    resized(out, shape), executorch_threads());
  } else {
    return lowbit::attention(views[0], views[1], views[2], views[3], views[4], views[5], scores, resized(out, shape),
                             executorch_threads());
  }
}

// The state is changed in place, as caches are.
Status run_linear_attention(Span<EValue*> values) {
  if (Status status = check_arguments(values, {{"q", Tag::Tensor},
                                               {"k", Tag::Tensor},
                                               {"v", Tag::Tensor},
                                               {"decay", Tag::Tensor},
                                               {"beta", Tag::Tensor, true},
                                               {"state", Tag::Tensor},
                                               {"start", Tag::Tensor},
                                               {"scale", Tag::Double},
                                               {"norm_epsilon", Tag::Double},
                                               {"out", Tag::Tensor}});
      !status.ok()) {
    return status;
  }
  const TensorView q = tensor_at(values, 0), k = tensor_at(values, 1), v = tensor_at(values, 2);
  const TensorView decay = tensor_at(values, 3);
  const Optional beta(values[4]);
  const TensorView state = tensor_at(values, 5), start = tensor_at(values, 6);
  Tensor& out = values[9]->toTensor();
  Shape shape;
  if (Status status = lowbit::linear_attention_shape(q, v, &shape); !status.ok()) return status;
  return lowbit::linear_attention(q, k, v, decay, beta.pointer(), state, start,
                                  {values[7]->toDouble(), values[8]->toDouble()}, resized(out, shape), executorch_threads());
}

Status run_short_conv(Span<EValue*> values) {
  if (Status status = check_arguments(values, {{"x", Tag::Tensor},
                                               {"weight", Tag::Tensor},
                                               {"bias", Tag::Tensor, true},
                                               {"state", Tag::Tensor},
                                               {"start", Tag::Tensor},
                                               {"silu", Tag::Bool},
                                               {"out", Tag::Tensor}});
      !status.ok()) {
    return status;
  }
  const TensorView x = tensor_at(values, 0), weight = tensor_at(values, 1);
  const Optional bias(values[2]);
  const TensorView state = tensor_at(values, 3), start = tensor_at(values, 4);
  Tensor& out = values[6]->toTensor();
  return lowbit::short_conv(x, weight, bias.pointer(), state, start, values[5]->toBool(), resized(out, x.shape),
                            executorch_threads());
}

Status run_masked_attention(Span<EValue*> values) {
  if (Status status = check_arguments(values, {{"q", Tag::Tensor},
                                               {"k", Tag::Tensor},
                                               {"v", Tag::Tensor},
                                               {"bounds", Tag::Tensor, true},
                                               {"scale", Tag::Double},
                                               {"softcap", Tag::Double},
                                               {"out", Tag::Tensor}});
      !status.ok()) {
    return status;
  }
  const TensorView q = tensor_at(values, 0), k = tensor_at(values, 1), v = tensor_at(values, 2);
  const Optional bounds(values[3]);
  Tensor& out = values[6]->toTensor();
  Shape shape;
  if (Status status = lowbit::attention_shape(q, v, &shape); !status.ok()) return status;
  return lowbit::masked_attention(q, k, v, bounds.pointer(), values[4]->toDouble(), values[5]->toDouble(),
                                  resized(out, shape), executorch_threads());
}

Status run_activate(Span<EValue*> values) {
  if (Status status = check_arguments(values, {{"x", Tag::Tensor},
                                               {"gate", Tag::Tensor, true},
                                               {"activation", Tag::Int},
                                               {"out", Tag::Tensor}});
      !status.ok()) {
    return status;
  }
  const TensorView x = tensor_at(values, 0);
  const Optional gate(values[1]);
  Tensor& out = values[3]->toTensor();
  return lowbit::activate(x, gate.pointer(), values[2]->toInt(), resized(out, x.shape), executorch_threads());
}

Status run_rms_norm(Span<EValue*> values) {
  if (Status status = check_arguments(values, {{"x", Tag::Tensor},
                                               {"weight", Tag::Tensor, true},
                                               {"epsilon", Tag::Double},
                                               {"weight_offset", Tag::Double},
                                               {"out", Tag::Tensor}});
      !status.ok()) {
    return status;
  }
  const TensorView x = tensor_at(values, 0);
  const Optional weight(values[1]);
  Tensor& out = values[4]->toTensor();
  return lowbit::rms_norm(x, weight.pointer(), values[2]->toDouble(), values[3]->toDouble(),
                          resized(out, x.shape), executorch_threads());
}

constexpr char kLinear[] = "lowbit::linear.out", kLinears[] = "lowbit::linears.out", kEmbedding[] = "lowbit::embedding.out";
constexpr char kAttention[] = "lowbit::attention.out", kLinearExperts[] = "lowbit::linear_experts.out";
constexpr char kWindowAttention[] = "lowbit::window_attention.out";
constexpr char kLinearAttention[] = "lowbit::linear_attention.out", kShortConv[] = "lowbit::short_conv.out";
constexpr char kMaskedAttention[] = "lowbit::masked_attention.out";
constexpr char kActivate[] = "lowbit::activate.out", kRmsNorm[] = "lowbit::rms_norm.out";

template <const char* name, Status (*run)(Span<EValue*>), size_t out>
void kernel(KernelRuntimeContext& context, Span<EValue*> values) {
  namespace internal = executorch::runtime::internal;  // what generated code calls, for ExecuTorch's profiler
  const internal::EventTracerProfileOpScope profiled(context.internal_event_tracer(), name);
  if (Status status = run(values); !status.ok()) return fail(context, name, status);
  internal::event_tracer_log_evalue(context.internal_event_tracer(), *values[out]);
}

const Kernel kKernels[] = {Kernel(kLinear, kernel<kLinear, run_linear, 3>),
                           Kernel(kLinears, kernel<kLinears, run_linears, 3>),
                           Kernel(kLinearExperts, kernel<kLinearExperts, run_linear_experts, 4>),
                           Kernel(kEmbedding, kernel<kEmbedding, run_embedding, 4>),
                           Kernel(kAttention, kernel<kAttention, run_attention<false>, 10>),
                           Kernel(kWindowAttention, kernel<kWindowAttention, run_attention<true>, 11>),
                           Kernel(kLinearAttention, kernel<kLinearAttention, run_linear_attention, 9>),
                           Kernel(kShortConv, kernel<kShortConv, run_short_conv, 6>),
                           Kernel(kMaskedAttention, kernel<kMaskedAttention, run_masked_attention, 6>),
                           Kernel(kActivate, kernel<kActivate, run_activate, 3>),
                           Kernel(kRmsNorm, kernel<kRmsNorm, run_rms_norm, 4>)};
[[maybe_unused]] const Error registered =
    executorch::runtime::register_kernels(Span<const Kernel>(kKernels, sizeof kKernels / sizeof *kKernels));

}  // namespace
