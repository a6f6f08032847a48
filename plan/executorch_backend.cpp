// An ExecuTorch backend: a whole step of a decoder as one call of its plan. The delegate's bytes are the plan and its weights;
// the loaded program has the caches of one text.

#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>
#include <executorch/runtime/platform/log.h>

#include <algorithm>
#include <cinttypes>
#include <memory>
#include <new>
#include <vector>

#include "../ops/tensor_view.h"
#include "model.h"

namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::runtime::ArrayRef;
using executorch::runtime::BackendExecutionContext;
using executorch::runtime::BackendInitContext;
using executorch::runtime::BackendInterface;
using executorch::runtime::CompileSpec;
using executorch::runtime::DelegateHandle;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::FreeableBuffer;
using executorch::runtime::Result;
using executorch::runtime::Span;
using lowbit::ElementType;
using lowbit::Status;

constexpr char kName[] = "LowbitPlan";

Error error_of(const Status& status) {
  if (status.ok()) return Error::Ok;
  ET_LOG(Error, "%s: %s", kName, status.message());
  return status.kind() == Status::Kind::no_memory ? Error::MemoryAllocationFailed : Error::InvalidArgument;
}

// A tensor [size] or, with two dimensions, [1, size]. The types of arguments come from a file.
Status read_row(const char* name, EValue* value, int dims, const Tensor** row) {
  if (!value->isTensor()) return Status::error("%s is not a tensor", name);
  const Tensor& tensor = value->toTensor();
  const bool fits = tensor.dim() == dims && (dims == 1 || tensor.size(0) == 1) && tensor.numel() > 0 &&
                    (tensor.numel() == 1 || tensor.strides()[static_cast<size_t>(dims - 1)] == 1);
  if (!fits) return Status::error("%s is not a contiguous tensor of shape %s", name, dims == 1 ? "[n]" : "[1, n]");
  if (tensor.const_data_ptr() == nullptr) return Status::error("%s has no memory", name);
  *row = &tensor;
  return {};
}

struct Text {
  std::unique_ptr<lowbit::PlanModel> model;
  std::unique_ptr<lowbit::PlanSession> session;
  std::vector<float> logits;

  Status run(Span<EValue*> values) {
    if (values.size() != 3) {
      return Status::error("a call has %zu values; expected tokens, start and logits", values.size());
    }
    const Tensor *tokens, *start, *out;
    if (Status status = read_row("tokens", values[0], 2, &tokens); !status.ok()) return status;
    if (Status status = read_row("start", values[1], 1, &start); !status.ok()) return status;
    if (Status status = read_row("logits", values[2], 2, &out); !status.ok()) return status;
    if (tokens->scalar_type() != ScalarType::Long || start->scalar_type() != ScalarType::Long || start->numel() != 1) {
      return Status::error("tokens [1, s] or start [1] is not int64");
    }
    const ElementType type = lowbit::element_type_of(out->scalar_type());
    const int64_t size = static_cast<int64_t>(logits.size());
    if (!lowbit::is_activation_type(type) || out->numel() != size) {
      return Status::error("logits has dtype %s and %" PRId64 " elements; expected floats and %" PRId64, lowbit::name_of(type),
                           static_cast<int64_t>(out->numel()), size);
    }
    if (Status status = session->cut(*start->const_data_ptr<int64_t>()); !status.ok()) return status;
    const int64_t* const ids = tokens->const_data_ptr<int64_t>();
    if (Status status = model->feed(*session, ids, tokens->numel(), logits.data()); !status.ok()) return status;
    void* const to = out->mutable_data_ptr();
    for (int64_t i = 0; i < size; ++i) lowbit::store_from_f32(to, lowbit::dtype_of(type), i, logits[static_cast<size_t>(i)]);
    return {};
  }
};

class PlanBackend final : public BackendInterface {
 public:
  bool is_available() const override { return true; }

  // The runtime keeps the delegate's bytes until destroy(), because they are not freed here.
  Result<DelegateHandle*> init(BackendInitContext&, FreeableBuffer* processed, ArrayRef<CompileSpec>) const override {
    const Result<const void*> bytes = processed->data_safe();
    if (!bytes.ok()) return bytes.error();
    // Plans have threads of their own, which begin an operator sooner than the pool's. There are as many as in the pool, so
    // that programs have one setting. The pool's sleep meanwhile.
    const int threads = static_cast<int>(std::min<int64_t>(executorch::extension::get_thread_count(), 1024));
    try {
      auto text = std::make_unique<Text>();
      if (Status status = lowbit::PlanModel::open(*bytes, processed->size(), threads, &text->model); !status.ok()) {
        return error_of(status);
      }
      if (Status status = text->model->begin(&text->session); !status.ok()) return error_of(status);
      text->logits.resize(static_cast<size_t>(text->model->vocabulary()));
      return text.release();
    } catch (const std::bad_alloc&) {
      return error_of(Status::no_memory("no memory for a text"));
    }
  }

  Error execute(BackendExecutionContext&, DelegateHandle* handle, Span<EValue*> values) const override {
    return error_of(static_cast<Text*>(handle)->run(values));
  }

  void destroy(DelegateHandle* handle) const override { delete static_cast<Text*>(handle); }
};

PlanBackend backend;
[[maybe_unused]] const Error registered = executorch::runtime::register_backend({kName, &backend});

}  // namespace
