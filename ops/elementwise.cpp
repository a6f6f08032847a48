// Activation functions, norms and rotary positions; kernels/elementwise.h has the formulas.
#include "../kernels/registry.h"
#include "check.h"
#include "operators.h"
#include "rows.h"
#include "schedule.h"
#include "tiles.h"

namespace lowbit {
namespace {

// A tensor as rows of its last dimension.
struct RowsOf {
  int64_t rows, width, step;
};

// Checks for an activation type, a contiguous last dimension, and equidistant rows.
Status rows_of(const char* name, const TensorView& tensor, RowsOf* rows) {
  if (Status status = check_activations(name, tensor); !status.ok()) return status;
  const int last = tensor.shape.ndim - 1;
  if (last < 0) return Status::error("%s has no dimension; expected one or more", name);
  *rows = {1, tensor.shape.size[last], tensor.shape.size[last]};
  if (tensor.shape.numel() == 0) return {};
  bool even = rows->width == 1 || tensor.stride[last] == 1;
  bool first = true;
  for (int d = last - 1; d >= 0; --d) {
    const int64_t size = tensor.shape.size[d];
    if (size == 1) continue;
    if (first) rows->step = tensor.stride[d];
    even = even && tensor.stride[d] == rows->step * rows->rows;
    first = false;
    rows->rows *= size;
  }
  if (!even) {
    return Status::error("%s has strides that are not those of rows at equal distances; expected a contiguous last dimension",
                         name);
  }
  return {};
}

char* row_of(const TensorView& tensor, const RowsOf& rows, int64_t row) {
  return static_cast<char*>(tensor.data) + row * rows.step * element_bytes(tensor.type);
}

// Rows per claim, and the useful number of threads.
int64_t claimed(int64_t width) { return at_least_1(kClaimValues / at_least_1(width)); }

Parallel threads_for(const TensorView& x, const Parallel& parallel) {
  return x.shape.numel() < kParallelValues ? Parallel() : parallel;
}

// Checks a norm's tensors and runs its kernel. The caller has checked the numbers and set `args`, except for the fields that
// describe rows. `parameters` are [width], or null.
template <class Args>
Status run_norm(const TensorView& x, std::initializer_list<NamedTensor> parameters, const TensorView& out,
                const Parallel& parallel, void (*ElementwiseKernel::*norm)(const Args&), Args args) {
  if (Status status = check_isa_cap(); !status.ok()) return status;
  if (Status status = check_parallel(parallel); !status.ok()) return status;
  RowsOf rows;
  if (Status status = rows_of("x", x, &rows); !status.ok()) return status;
  for (const NamedTensor& each : parameters) {
    if (each.tensor == nullptr) continue;
    if (Status status = check_tensor(each.name, *each.tensor, x.type, {1, {rows.width}}); !status.ok()) return status;
  }
  if (Status status = check_tensor("out", out, x.type, x.shape); !status.ok()) return status;
  if (Status status = check_apart({{"out", &out}}, {{"x", &x}}); !status.ok()) return status;
  if (Status status = check_apart({{"out", &out}}, parameters); !status.ok()) return status;
  if (x.shape.numel() == 0) return {};
  args.x_step = rows.step;
  args.out_step = args.width = rows.width;
  args.dtype = dtype_of(x.type);
  const auto run = choose_elementwise(active_isa()).*norm;
  parallel_1d(threads_for(x, parallel), rows.rows, claimed(rows.width), [&](int, int64_t begin, int64_t end) {
    Args claim = args;
    claim.x = row_of(x, rows, begin);
    claim.out = static_cast<char*>(out.data) + begin * rows.width * element_bytes(x.type);
    claim.rows = end - begin;
    run(claim);
  });
  return {};
}

}  // namespace

Status activate(const TensorView& x, const TensorView* gate, int64_t activation, const TensorView& out,
                const Parallel& parallel) {
  if (Status status = check_isa_cap(); !status.ok()) return status;
  if (Status status = check_parallel(parallel); !status.ok()) return status;
  RowsOf rows, gate_rows{};
  if (Status status = rows_of("x", x, &rows); !status.ok()) return status;
  if (gate != nullptr) {
    if (Status status = check_type_and_shape("gate", *gate, x.type, x.shape); !status.ok()) return status;
    if (Status status = rows_of("gate", *gate, &gate_rows); !status.ok()) return status;
  }
  if (activation < 0 || activation >= kActivations) {
    return Status::error("activation is %" PRId64 "; expected 0 to %d", activation, kActivations - 1);
  }
  if (Status status = check_tensor("out", out, x.type, x.shape); !status.ok()) return status;
  if (Status status = check_apart({{"out", &out}}, {{"x", &x}, {"gate", gate}}); !status.ok()) return status;
  if (x.shape.numel() == 0) return {};
  const ElementwiseKernel& kernel = choose_elementwise(active_isa());
  parallel_1d(threads_for(x, parallel), rows.rows, claimed(rows.width), [&](int, int64_t begin, int64_t end) {
    ActivateArgs args{};
    args.x = row_of(x, rows, begin);
    args.gate = gate == nullptr ? nullptr : row_of(*gate, gate_rows, begin);
    args.out = static_cast<char*>(out.data) + begin * rows.width * element_bytes(x.type);
    args.x_step = rows.step;
    args.gate_step = gate_rows.step;
    args.out_step = rows.width;
    args.rows = end - begin;
    args.width = rows.width;
    args.dtype = dtype_of(x.type);
    args.activation = static_cast<Activation>(activation);
    kernel.activate(args);
  });
  return {};
}

Status rms_norm(const TensorView& x, const TensorView* weight, double epsilon, double weight_offset, const TensorView& out,
                const Parallel& parallel) {
  if (!(epsilon >= 0.0 && epsilon <= 1.0) || !(weight_offset >= -1.0 && weight_offset <= 1.0)) {
    return Status::error("epsilon is %g and weight_offset %g; expected an epsilon from 0 to 1 and an offset from -1 to 1",
                         epsilon, weight_offset);
  }
  RmsNormArgs args{};
  args.weight = weight == nullptr ? nullptr : weight->data;
  args.epsilon = static_cast<float>(epsilon);
  args.weight_offset = static_cast<float>(weight_offset);
  return run_norm(x, {{"weight", weight}}, out, parallel, &ElementwiseKernel::rms_norm, args);
}

Status layer_norm(const TensorView& x, const TensorView* weight, const TensorView* bias, double epsilon, const TensorView& out,
                  const Parallel& parallel) {
  if (!(epsilon >= 0.0 && epsilon <= 1.0)) return Status::error("epsilon is %g; expected 0 to 1", epsilon);
  LayerNormArgs args{};
  args.weight = weight == nullptr ? nullptr : weight->data;
  args.bias = bias == nullptr ? nullptr : bias->data;
  args.epsilon = static_cast<float>(epsilon);
  return run_norm(x, {{"weight", weight}, {"bias", bias}}, out, parallel, &ElementwiseKernel::layer_norm, args);
}

Status rotary(const TensorView& q, const TensorView& k, const TensorView& cos, const TensorView& sin, int64_t heads_dim,
              int64_t layout, bool round_once, const TensorView& q_out, const TensorView& k_out, const Parallel& parallel) {
  if (Status status = check_isa_cap(); !status.ok()) return status;
  if (Status status = check_parallel(parallel); !status.ok()) return status;
  if (heads_dim != 1 && heads_dim != 2) return Status::error("heads_dim is %" PRId64 "; expected 1 or 2", heads_dim);
  if (layout < 0 || layout >= kRotaryLayouts) {
    return Status::error("layout is %" PRId64 "; expected 0 to %d", layout, kRotaryLayouts - 1);
  }
  const char* const expected = heads_dim == 1 ? "[batch, heads, positions, width]" : "[batch, positions, heads, width]";
  if (Status status = check_activations("q", q); !status.ok()) return status;
  if (Status status = check_dimensions("q", q, 4, expected); !status.ok()) return status;
  if (Status status = check_dimensions("k", k, 4, expected); !status.ok()) return status;
  if (Status status = check_dimensions("cos", cos, 3, "[batch or 1, positions, rotary]"); !status.ok()) return status;
  const int heads_at = static_cast<int>(heads_dim), positions_at = 3 - heads_at;
  const int64_t batch = q.shape.size[0], positions = q.shape.size[positions_at], rotary = cos.shape.size[2];
  Shape k_shape = q.shape;  // its heads and width may differ
  k_shape.size[heads_at] = k.shape.size[heads_at];
  k_shape.size[3] = k.shape.size[3];
  const int64_t rows = cos.shape.size[0] == 1 ? 1 : batch;
  const ElementType table = round_once && cos.type == ElementType::f32 ? ElementType::f32 : q.type;
  if (Status status = check_rows_of("q", q, q.type, q.shape); !status.ok()) return status;
  if (Status status = check_rows_of("k", k, q.type, k_shape); !status.ok()) return status;
  if (Status status = check_rows_of("cos", cos, table, {3, {rows, positions, rotary}}); !status.ok()) return status;
  if (Status status = check_rows_of("sin", sin, table, cos.shape); !status.ok()) return status;
  if (rotary < 2 || rotary % 2 != 0 || rotary > q.shape.size[3] || rotary > k.shape.size[3]) {
    return Status::error("cos has %" PRId64 " numbers per position, q a width of %" PRId64 " and k of %" PRId64
                         "; expected an even number from 2 to the widths", rotary, q.shape.size[3], k.shape.size[3]);
  }
  if (Status status = check_tensor("q_out", q_out, q.type, q.shape); !status.ok()) return status;
  if (Status status = check_tensor("k_out", k_out, q.type, k.shape); !status.ok()) return status;
  if (Status status = check_apart({{"q_out", &q_out}, {"k_out", &k_out}}, {{"q", &q}, {"k", &k}, {"cos", &cos}, {"sin", &sin}});
      !status.ok()) {
    return status;
  }
  const int64_t values = q.shape.numel() + k.shape.numel(), count = batch * positions;
  if (values == 0) return {};
  const ElementwiseKernel& kernel = choose_elementwise(active_isa());
  const auto at = [&](const TensorView& tensor, int64_t text, int64_t position, int position_dim) {
    const int64_t offset = text * tensor.stride[0] + position * tensor.stride[position_dim];
    return static_cast<char*>(tensor.data) + offset * element_bytes(tensor.type);
  };
  const auto run = [&](const TensorView& x, const TensorView& out, int64_t text, int64_t position) {
    RotaryArgs args{};
    args.x = at(x, text, position, positions_at);
    args.cos = at(cos, rows == 1 ? 0 : text, position, 1);
    args.sin = at(sin, rows == 1 ? 0 : text, position, 1);
    args.out = at(out, text, position, positions_at);
    args.x_step = x.stride[heads_at];
    args.out_step = out.stride[heads_at];
    args.heads = x.shape.size[heads_at];
    args.width = x.shape.size[3];
    args.rotary = rotary;
    args.dtype = dtype_of(x.type);
    args.table_dtype = dtype_of(table);
    args.layout = static_cast<RotaryLayout>(layout);
    args.round_once = round_once;
    kernel.rotary(args);
  };
  const Parallel threads = values < kParallelValues ? Parallel() : parallel;
  parallel_1d(threads, count, claimed(values / count), [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      run(q, q_out, i / positions, i % positions);
      run(k, k_out, i / positions, i % positions);
    }
  });
  return {};
}

}  // namespace lowbit
