// Linear attention and short convolutions over states of a fixed size; kernels/recurrence.h has the formulas.
#include <cmath>

#include "../kernels/registry.h"
#include "check.h"
#include "operators.h"
#include "schedule.h"
#include "scores.h"
#include "scratch.h"
#include "tiles.h"

namespace lowbit {
namespace {

constexpr int64_t kColumns = 16;  // of a panel of a state

constexpr int64_t panels_of(int64_t columns) { return (columns + kColumns - 1) / kColumns; }

// Whether no positions of the text came before a call.
Status begins_text(const TensorView& start, bool* fresh) {
  int64_t position;
  if (Status status = read_start(start, &position); !status.ok()) return status;
  if (position < 0) return Status::out_of_range("start is %" PRId64 "; expected 0 or more", position);
  *fresh = position == 0;
  return {};
}

const char* at(const TensorView& tensor, int64_t a, int64_t b, int64_t c) {
  return static_cast<const char*>(tensor.data) +
         (a * tensor.stride[0] + b * tensor.stride[1] + c * tensor.stride[2]) * element_bytes(tensor.type);
}

}  // namespace

Status linear_attention_shape(const TensorView& q, const TensorView& v, Shape* out) {
  for (const auto& [name, tensor] : {NamedTensor{"q", &q}, NamedTensor{"v", &v}}) {
    constexpr char kExpected[] = "[batch, positions, heads, width]";
    if (Status status = check_dimensions(name, *tensor, 4, kExpected); !status.ok()) return status;
  }
  *out = v.shape;
  return {};
}

Status linear_attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& decay,
                        const TensorView* beta, const TensorView& state, const TensorView& start,
                        const DeltaRule& rule, const TensorView& out, const Parallel& parallel) {
  if (Status status = check_isa_cap(); !status.ok()) return status;
  if (Status status = check_parallel(parallel); !status.ok()) return status;
  Shape out_shape;
  if (Status status = linear_attention_shape(q, v, &out_shape); !status.ok()) return status;
  if (Status status = check_activations("q", q); !status.ok()) return status;
  const int64_t batch = v.shape.size[0], positions = v.shape.size[1], heads = v.shape.size[2], columns = v.shape.size[3];
  const int64_t key_heads = q.shape.size[2], width = q.shape.size[3];
  if (key_heads < 1 || heads < 1 || heads % key_heads != 0) {
    return Status::error("v has %" PRId64 " heads; expected 1 or more times %" PRId64 ", the heads of q and k", heads,
                         key_heads);
  }
  if (width < 1 || columns < 1 || width > kMostStateWidth || columns > kMostStateWidth) {
    return Status::error("q has width %" PRId64 " and v %" PRId64 "; expected 1 to %" PRId64, width, columns,
                         kMostStateWidth);
  }
  const Shape keys{4, {batch, positions, key_heads, width}};
  if (Status status = check_rows_of("q", q, q.type, keys); !status.ok()) return status;
  if (Status status = check_rows_of("k", k, q.type, keys); !status.ok()) return status;
  if (Status status = check_rows_of("v", v, q.type, out_shape); !status.ok()) return status;
  const bool per_row = decay.shape.ndim == 4;
  const Shape numbers{3, {batch, positions, heads}}, rows{4, {batch, positions, heads, width}};
  if (per_row) {
    if (Status status = check_rows_of("decay", decay, ElementType::f32, rows); !status.ok()) return status;
  } else if (Status status = check_tensor("decay", decay, ElementType::f32, numbers); !status.ok()) {
    return status;
  }
  if (beta != nullptr) {
    if (Status status = check_tensor("beta", *beta, ElementType::f32, numbers); !status.ok()) return status;
  }
  const Shape panels{5, {batch, heads, panels_of(columns), width, kColumns}};
  if (Status status = check_tensor("state", state, ElementType::f32, panels); !status.ok()) return status;
  if (Status status = check_tensor("out", out, q.type, out_shape); !status.ok()) return status;
  if (!(std::fabs(rule.scale) <= kLargestScale) || !(rule.norm_epsilon >= 0.0 && rule.norm_epsilon <= 1.0)) {
    return Status::error("scale is %g and norm_epsilon %g; expected a scale from -%g to %g and a norm_epsilon from 0 to 1",
                         rule.scale, rule.norm_epsilon, kLargestScale, kLargestScale);
  }
  bool fresh;
  if (Status status = begins_text(start, &fresh); !status.ok()) return status;
  if (Status status = check_apart({{"out", &out}, {"state", &state}},
                                  {{"q", &q}, {"k", &k}, {"v", &v}, {"decay", &decay}, {"beta", beta}, {"start", &start}});
      !status.ok()) {
    return status;
  }
  if (batch * positions == 0) return {};

  const int64_t products = batch * positions * heads * width * columns * (beta == nullptr ? 2 : 3);
  const Parallel alone;
  const Parallel& threads = products < kParallelProducts ? alone : parallel;
  // A unit is a head, or some pairs of a head's panels if there are few heads. Each unit converts q and k.
  const int64_t all_panels = panels_of(columns);
  const int64_t wanted = threads.threads == 1 ? 1 : (2 * threads.threads + batch * heads - 1) / (batch * heads);
  const int64_t step = wanted == 1 ? all_panels : rounded_up((all_panels + wanted - 1) / wanted, 2);
  const int64_t pieces = (all_panels + step - 1) / step;
  const int64_t worker_bytes = rounded_up(linear_attention_scratch(width) * static_cast<int64_t>(sizeof(float)), 64);
  const Scratch scratch(threads.threads * worker_bytes);
  if (scratch.data() == nullptr) return Status::no_memory("no memory for %" PRId64 " bytes", threads.threads * worker_bytes);
  const RecurrenceKernel& kernel = choose_recurrence(active_isa());
  const auto* const betas = beta == nullptr ? nullptr : static_cast<const float*>(beta->data);
  parallel_1d(threads, batch * heads * pieces, 1, [&](int worker, int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t row = unit / pieces, b = row / heads, head = row % heads, panel = unit % pieces * step;
      const int64_t key_head = head / (heads / key_heads), first = panel * kColumns;
      const int64_t some = step * kColumns < columns - first ? step * kColumns : columns - first;
      LinearAttentionArgs args{};
      args.q = at(q, b, 0, key_head);
      args.k = at(k, b, 0, key_head);
      args.v = at(v, b, 0, head) + first * element_bytes(v.type);
      args.q_step = q.stride[1];
      args.k_step = k.stride[1];
      args.v_step = v.stride[1];
      args.decay = reinterpret_cast<const float*>(at(decay, b, 0, head));
      args.decay_step = decay.stride[1];
      args.beta = betas == nullptr ? nullptr : betas + b * positions * heads + head;
      args.beta_step = heads;
      args.decay_per_row = per_row;
      args.fresh = fresh;
      args.state = static_cast<float*>(state.data) + (row * all_panels + panel) * width * kColumns;
      args.out = static_cast<char*>(out.data) + ((b * positions * heads + head) * columns + first) * element_bytes(out.type);
      args.out_step = heads * columns;
      args.dtype = dtype_of(q.type);
      args.tokens = positions;
      args.width = width;
      args.value_width = some;
      args.scale = static_cast<float>(rule.scale);
      args.norm_epsilon = static_cast<float>(rule.norm_epsilon);
      args.scratch = reinterpret_cast<float*>(scratch.data() + worker * worker_bytes);
      kernel.linear_attention(args);
    }
  });
  return {};
}

Status short_conv(const TensorView& x, const TensorView& weight, const TensorView* bias, const TensorView& state,
                  const TensorView& start, bool silu, const TensorView& out, const Parallel& parallel) {
  if (Status status = check_isa_cap(); !status.ok()) return status;
  if (Status status = check_parallel(parallel); !status.ok()) return status;
  if (Status status = check_activations("x", x); !status.ok()) return status;
  if (x.shape.ndim != 3) {
    return Status::error("x has shape %s; expected [batch, positions, channels]", describe(x.shape).text);
  }
  const int64_t batch = x.shape.size[0], positions = x.shape.size[1], channels = x.shape.size[2];
  if (Status status = check_rows_of("x", x, x.type, x.shape); !status.ok()) return status;
  if (Status status = check_memory("weight", weight); !status.ok()) return status;
  const int64_t taps = weight.shape.ndim == 2 ? weight.shape.size[0] : 0;
  if (taps < 1 || taps > kMostTaps) {
    return Status::error("weight has shape %s; expected [taps, channels] with 1 to %" PRId64 " taps",
                         describe(weight.shape).text, kMostTaps);
  }
  if (Status status = check_tensor("weight", weight, x.type, {2, {taps, channels}}); !status.ok()) return status;
  if (bias != nullptr) {
    if (Status status = check_tensor("bias", *bias, x.type, {1, {channels}}); !status.ok()) return status;
  }
  if (Status status = check_tensor("state", state, x.type, {3, {batch, taps - 1, channels}}); !status.ok()) return status;
  if (Status status = check_tensor("out", out, x.type, x.shape); !status.ok()) return status;
  bool fresh;
  if (Status status = begins_text(start, &fresh); !status.ok()) return status;
  if (Status status = check_apart({{"out", &out}, {"state", &state}},
                                  {{"x", &x}, {"weight", &weight}, {"bias", bias}, {"start", &start}});
      !status.ok()) {
    return status;
  }
  if (batch * positions * channels == 0) return {};

  const int64_t item = element_bytes(x.type);
  const RecurrenceKernel& kernel = choose_recurrence(active_isa());
  const Parallel alone;
  const Parallel& threads = batch * positions * channels * taps < kParallelProducts ? alone : parallel;
  constexpr int64_t kChannels = 64;  // per unit
  const int64_t pieces = (channels + kChannels - 1) / kChannels;
  parallel_1d(threads, batch * pieces, 1, [&](int, int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t b = begin / pieces, first = begin % pieces * kChannels;
      const int64_t last = b < (end - 1) / pieces ? channels : ((end - 1) % pieces + 1) * kChannels;
      const auto from = [&](const TensorView& tensor, int64_t index) {
        return static_cast<char*>(tensor.data) + (index + first) * item;
      };
      ShortConvArgs args{};
      args.x = from(x, b * x.stride[0]);
      args.x_step = x.stride[1];
      args.weight = from(weight, 0);
      args.weight_step = channels;
      args.bias = bias == nullptr ? nullptr : from(*bias, 0);
      args.state = from(state, b * (taps - 1) * channels);
      args.state_step = channels;
      args.out = from(out, b * positions * channels);
      args.out_step = channels;
      args.dtype = dtype_of(x.type);
      args.tokens = positions;
      args.taps = taps;
      args.channels = (last < channels ? last : channels) - first;
      args.silu = silu;
      args.fresh = fresh;
      kernel.short_conv(args);
      begin = last < channels ? end : (b + 1) * pieces;
    }
  });
  return {};
}

}  // namespace lowbit
