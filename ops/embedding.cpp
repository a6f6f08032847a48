#include "../kernels/registry.h"
#include "check.h"
#include "operators.h"
#include "rotate.h"
#include "rows.h"
#include "schedule.h"
#include "scratch.h"
#include "tiles.h"

namespace lowbit {

Status embedding_shape(const TensorView& indices, int64_t embedding_dim, Shape* out) {
  if (Status status = check_shape("indices", indices.shape); !status.ok()) return status;
  if (embedding_dim < 1) return Status::error("embedding_dim is %" PRId64 "; expected 1 or more", embedding_dim);
  if (indices.shape.ndim >= kMaxDims) {
    return Status::error("indices have %d dimensions; expected at most %d", indices.shape.ndim, kMaxDims - 1);
  }
  *out = indices.shape;
  out->size[out->ndim++] = embedding_dim;
  return {};
}

Status embedding(const TensorView& indices, const TensorView& packed, int64_t embedding_dim, const TensorView& out,
                 const Parallel& parallel) {
  Layout layout;
  if (Status status = read_packed(packed, &layout); !status.ok()) return status;
  if (Status status = check_parallel(parallel); !status.ok()) return status;
  Shape out_shape;
  if (Status status = embedding_shape(indices, embedding_dim, &out_shape); !status.ok()) return status;
  if (Status status = check_memory("indices", indices); !status.ok()) return status;
  if (indices.type != ElementType::i32 && indices.type != ElementType::i64) {
    return Status::error("indices have dtype %s; expected int32 or int64", name_of(indices.type));
  }
  if (embedding_dim != layout.k) {
    return Status::error("embedding_dim is %" PRId64 "; expected %" PRId64 ", the inputs of the packed weight",
                         embedding_dim, layout.k);
  }
  if (!is_activation_type(out.type)) {
    return Status::error("the output dtype is %s; expected float32, bfloat16 or float16", name_of(out.type));
  }
  if (Status status = check_tensor("out", out, out.type, out_shape); !status.ok()) return status;
  if (Status status = check_apart({{"out", &out}}, {{"indices", &indices}, {"packed_weight", &packed}}); !status.ok()) {
    return status;
  }

  // All indices are checked before a row is written, so that a refused call writes nothing. The checked copy is used, because
  // another thread may change the caller's indices meanwhile.
  const int64_t count = indices.shape.numel();
  if (count == 0) return {};
  // A row with rotated inputs is rotated back before it is rounded.
  const int64_t index_bytes = aligned(count * static_cast<int64_t>(sizeof(int64_t)));
  const int64_t worker_bytes = layout.rotation == 0 ? 0 : aligned(layout.k * static_cast<int64_t>(sizeof(float)));
  const Parallel threads = count * layout.k < kParallelValues ? Parallel() : parallel;
  const Scratch scratch(index_bytes + threads.threads * worker_bytes);
  if (scratch.data() == nullptr) return Status::no_memory("no memory for %" PRId64 " indices", count);
  int64_t* const rows = reinterpret_cast<int64_t*>(scratch.data());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = index_at(indices, i);
    if (index < 0 || index >= layout.n) {
      return Status::out_of_range("index %" PRId64 " (number %" PRId64 " of %" PRId64 ") is out of range; expected 0 to %"
                                  PRId64, index, i, count, layout.n - 1);
    }
    rows[i] = index;
  }

  const EmbeddingKernel& kernel = choose_embedding(layout, active_isa());
  if (kernel.run == nullptr) return no_kernel("embedding", layout);
  EmbeddingArgs args{};
  args.panels = static_cast<const uint8_t*>(packed.data) + layout.header_bytes;
  args.layout = layout;
  args.out_dtype = dtype_of(out.type);
  args.context = kernel.context;
  const int64_t row_bytes = layout.k * element_bytes(out.type);
  const DType dtype = args.out_dtype;
  if (layout.rotation != 0) args.out_dtype = DType::f32;
  parallel_1d(threads, count, 1 + kParallelValues / 4 / layout.k, [&](int worker, int64_t begin, int64_t end) {
    float* const rotated = reinterpret_cast<float*>(scratch.data() + index_bytes + worker * worker_bytes);
    EmbeddingArgs row = args;
    for (int64_t i = begin; i < end; ++i) {
      char* const to = static_cast<char*>(out.data) + i * row_bytes;
      row.row = rows[i];
      row.out = layout.rotation == 0 ? to : reinterpret_cast<char*>(rotated);
      kernel.run(row);
      if (layout.rotation == 0) continue;
      rotate_row(rotated, DType::f32, rotated, layout.k, layout.rotated_inputs(), true);
      for (int64_t j = 0; j < layout.k; ++j) store_from_f32(to, dtype, j, rotated[j]);
    }
  });
  return {};
}

}  // namespace lowbit
