// PyTorch registration, through the libtorch stable ABI only, so that one library serves torch >= 2.10.
// It only converts tensors, allocates outputs, and turns a Status into an exception.

#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "check.h"
#include "operators.h"
#include "torch_tensors.h"
#include "torch_threads.h"

namespace {

using lowbit::allocate;
using lowbit::changed;
using lowbit::Layout;
using lowbit::raise_unless_ok;
using lowbit::Shape;
using lowbit::Status;
using lowbit::TensorView;
using lowbit::torch_threads;
using lowbit::view_of;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::optional<TensorView> optional_view(const char* name, const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? std::optional(view_of(name, *tensor)) : std::nullopt;
}
const TensorView* pointer(const std::optional<TensorView>& view) { return view ? &*view : nullptr; }

Tensor linear(const Tensor& x, const Tensor& packed_weight, int64_t out_features) {
  const TensorView x_view = view_of("x", x);
  Shape shape;
  raise_unless_ok(linear_shape(x_view, out_features, &shape));
  raise_unless_ok(check_activations("x", x_view));
  const Tensor out = allocate(shape, x.scalar_type());
  raise_unless_ok(lowbit::linear(x_view, view_of("packed_weight", packed_weight), out_features, view_of("out", out),
                                 torch_threads()));
  return out;
}

Tensor linears(const Tensor& x, const std::vector<Tensor>& packed_weights, const std::vector<int64_t>& out_features) {
  const TensorView x_view = view_of("x", x);
  if (packed_weights.size() != out_features.size()) {
    raise_unless_ok(Status::error("there are %zu packed_weights and %zu out_features; expected equal numbers",
                                  packed_weights.size(), out_features.size()));
  }
  const int64_t count = static_cast<int64_t>(out_features.size());
  Shape shape;
  raise_unless_ok(linears_shape(x_view, out_features.data(), count, &shape));
  raise_unless_ok(check_activations("x", x_view));
  TensorView packed[lowbit::kMostMatrices];
  for (size_t i = 0; i < packed_weights.size(); ++i) packed[i] = view_of("packed_weight", packed_weights[i]);
  const Tensor out = allocate(shape, x.scalar_type());
  raise_unless_ok(
      lowbit::linears(x_view, packed, out_features.data(), count, view_of("out", out), torch_threads()));
  return out;
}

Tensor linear_experts(const Tensor& x, const Tensor& packed_weights, const Tensor& experts, int64_t out_features) {
  const TensorView x_view = view_of("x", x), experts_view = view_of("experts", experts);
  Shape shape;
  raise_unless_ok(linear_experts_shape(x_view, experts_view, out_features, &shape));
  raise_unless_ok(check_activations("x", x_view));
  const Tensor out = allocate(shape, x.scalar_type());
  raise_unless_ok(lowbit::linear_experts(x_view, view_of("packed_weights", packed_weights), experts_view, out_features,
                                         view_of("out", out), torch_threads()));
  return out;
}

Tensor embedding(const Tensor& indices, const Tensor& packed_weight, int64_t embedding_dim,
                 std::optional<ScalarType> dtype) {
  const TensorView indices_view = view_of("indices", indices);
  Shape shape;
  raise_unless_ok(embedding_shape(indices_view, embedding_dim, &shape));
  const Tensor out = allocate(shape, dtype.value_or(ScalarType::Float));
  raise_unless_ok(lowbit::embedding(indices_view, view_of("packed_weight", packed_weight), embedding_dim,
                                    view_of("out", out), torch_threads()));
  return out;
}

// [batch, positions, heads, width of v]
Tensor allocate_attended(const Tensor& q, const TensorView& q_view, const TensorView& v_view) {
  Shape shape;
  raise_unless_ok(attention_shape(q_view, v_view, &shape));
  return allocate(shape, q.scalar_type());
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                 const Tensor& start, double scale, int64_t window, double softcap,
                 const std::optional<Tensor>& sinks) {
  const TensorView q_view = view_of("q", q), v_view = view_of("v", v);
  const Tensor out = allocate_attended(q, q_view, v_view);
  const TensorView k_cache_view = changed("k_cache", k_cache), v_cache_view = changed("v_cache", v_cache);
  const auto sinks_view = optional_view("sinks", sinks);
  const lowbit::Scores scores{scale, window, softcap, pointer(sinks_view)};
  raise_unless_ok(lowbit::attention(q_view, view_of("k", k), v_view, k_cache_view, v_cache_view,
                                    view_of("start", start), scores, view_of("out", out), torch_threads()));
  return out;
}

Tensor window_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                        const Tensor& held, const Tensor& start, double scale, int64_t window, double softcap,
                        const std::optional<Tensor>& sinks) {
  const TensorView q_view = view_of("q", q), v_view = view_of("v", v);
  const Tensor out = allocate_attended(q, q_view, v_view);
  const TensorView k_cache_view = changed("k_cache", k_cache), v_cache_view = changed("v_cache", v_cache);
  const TensorView held_view = changed("held", held);
  const auto sinks_view = optional_view("sinks", sinks);
  const lowbit::Scores scores{scale, window, softcap, pointer(sinks_view)};
  raise_unless_ok(lowbit::window_attention(q_view, view_of("k", k), v_view, k_cache_view, v_cache_view, held_view,
                                           view_of("start", start), scores, view_of("out", out), torch_threads()));
  return out;
}

Tensor linear_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& decay,
                        const std::optional<Tensor>& beta, const Tensor& state, const Tensor& start, double scale,
                        double norm_epsilon) {
  const TensorView q_view = view_of("q", q), v_view = view_of("v", v);
  Shape shape;
  raise_unless_ok(linear_attention_shape(q_view, v_view, &shape));
  const Tensor out = allocate(shape, q.scalar_type());
  const TensorView state_view = changed("state", state);
  const auto beta_view = optional_view("beta", beta);
  raise_unless_ok(lowbit::linear_attention(q_view, view_of("k", k), v_view, view_of("decay", decay), pointer(beta_view),
                                           state_view, view_of("start", start), {scale, norm_epsilon}, view_of("out", out),
                                           torch_threads()));
  return out;
}

Tensor short_conv(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& state,
                  const Tensor& start, bool silu) {
  const TensorView x_view = view_of("x", x);
  const Tensor out = allocate(x_view.shape, x.scalar_type());
  const TensorView state_view = changed("state", state);
  const auto bias_view = optional_view("bias", bias);
  raise_unless_ok(lowbit::short_conv(x_view, view_of("weight", weight), pointer(bias_view), state_view,
                                     view_of("start", start), silu, view_of("out", out), torch_threads()));
  return out;
}

Tensor masked_attention(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bounds, double scale,
                        double softcap) {
  const TensorView q_view = view_of("q", q), v_view = view_of("v", v);
  const Tensor out = allocate_attended(q, q_view, v_view);
  const auto bounds_view = optional_view("bounds", bounds);
  raise_unless_ok(lowbit::masked_attention(q_view, view_of("k", k), v_view, pointer(bounds_view), scale, softcap,
                                           view_of("out", out), torch_threads()));
  return out;
}

Tensor activate(const Tensor& x, const std::optional<Tensor>& gate, int64_t activation) {
  const TensorView x_view = view_of("x", x);
  const Tensor out = allocate(x_view.shape, x.scalar_type());
  const auto gate_view = optional_view("gate", gate);
  raise_unless_ok(lowbit::activate(x_view, pointer(gate_view), activation, view_of("out", out), torch_threads()));
  return out;
}

Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double epsilon, double weight_offset) {
  const TensorView x_view = view_of("x", x);
  const Tensor out = allocate(x_view.shape, x.scalar_type());
  const auto weight_view = optional_view("weight", weight);
  raise_unless_ok(lowbit::rms_norm(x_view, pointer(weight_view), epsilon, weight_offset, view_of("out", out),
                                   torch_threads()));
  return out;
}

Tensor layer_norm(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, double epsilon) {
  const TensorView x_view = view_of("x", x);
  const Tensor out = allocate(x_view.shape, x.scalar_type());
  const auto weight_view = optional_view("weight", weight), bias_view = optional_view("bias", bias);
  raise_unless_ok(lowbit::layer_norm(x_view, pointer(weight_view), pointer(bias_view), epsilon, view_of("out", out),
                                     torch_threads()));
  return out;
}

std::tuple<Tensor, Tensor> rotary(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, int64_t heads_dim,
                                  int64_t layout, bool round_once) {
  const TensorView q_view = view_of("q", q), k_view = view_of("k", k);
  const Tensor q_out = allocate(q_view.shape, q.scalar_type()), k_out = allocate(k_view.shape, k.scalar_type());
  raise_unless_ok(lowbit::rotary(q_view, k_view, view_of("cos", cos), view_of("sin", sin), heads_dim, layout, round_once,
                                 view_of("q_out", q_out), view_of("k_out", k_out), torch_threads()));
  return {q_out, k_out};
}

// A width beyond int is as invalid as 0.
int width_of(int64_t bits) { return bits < 0 || bits > 64 ? 0 : static_cast<int>(bits); }

Tensor pack(const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& mins,
            const std::optional<Tensor>& bias, int64_t bits, int64_t group_size, const std::optional<Tensor>& levels,
            int64_t rotated_inputs) {
  const TensorView codes_view = view_of("codes", codes);
  const auto mins_view = optional_view("mins", mins), bias_view = optional_view("bias", bias);
  const auto levels_view = optional_view("levels", levels);
  Layout layout;
  raise_unless_ok(
      pack_shape(codes_view, width_of(bits), group_size, mins.has_value(), bias.has_value(), &layout, pointer(levels_view),
                 rotated_inputs));
  const Tensor out = allocate({1, {layout.total_bytes}}, ScalarType::Byte);
  raise_unless_ok(lowbit::pack(codes_view, view_of("scales", scales), pointer(mins_view), pointer(bias_view),
                               layout.bits, group_size, view_of("out", out), torch_threads(), pointer(levels_view),
                               rotated_inputs));
  return out;
}

// The codes of a matrix, and the scales and mins of its groups; without mins unless it is affine.
std::tuple<Tensor, Tensor, Tensor> allocate_codes(const Layout& layout, bool affine) {
  const Shape per_group{2, {layout.n, layout.groups}};
  return {allocate({2, {layout.n, layout.k}}, ScalarType::Byte), allocate(per_group, ScalarType::Float),
          allocate(affine ? per_group : Shape{2, {0, 0}}, ScalarType::Float)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> unpack(const Tensor& packed_weight) {
  const TensorView packed = view_of("packed_weight", packed_weight);
  Layout layout;
  raise_unless_ok(read_packed(packed, &layout));
  const bool affine = lowbit::has_mins(layout.mapping);
  const auto [codes, scales, mins] = allocate_codes(layout, affine);
  const Tensor bias = allocate(layout.has_bias ? Shape{1, {layout.n}} : Shape{1, {0}}, ScalarType::Float);
  raise_unless_ok(lowbit::unpack(packed, view_of("codes", codes), view_of("scales", scales), view_of("mins", mins),
                                 view_of("bias", bias), torch_threads()));
  return {codes, scales, mins, bias};
}

std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& weight, int64_t bits, int64_t group_size, bool affine,
                                            bool search) {
  const TensorView weight_view = view_of("weight", weight);
  Layout layout;
  raise_unless_ok(quantize_shape(weight_view, width_of(bits), group_size, affine, &layout));
  const auto [codes, scales, mins] = allocate_codes(layout, affine);
  raise_unless_ok(lowbit::quantize(weight_view, layout.bits, group_size, affine, search, view_of("codes", codes),
                                   view_of("scales", scales), view_of("mins", mins), torch_threads()));
  return {codes, scales, mins};
}

std::tuple<Tensor, Tensor> search_groups(const Tensor& weights, const Tensor& importance, int64_t bits, bool affine) {
  const TensorView weights_view = view_of("weights", weights);
  const int64_t groups = weights_view.shape.ndim == 2 ? weights_view.shape.size[0] : 0;
  const Tensor scales = allocate({1, {groups}}, ScalarType::Float);
  const Tensor mins = allocate({1, {affine ? groups : 0}}, ScalarType::Float);
  raise_unless_ok(lowbit::search_groups(weights_view, view_of("importance", importance), width_of(bits), affine,
                                        view_of("scales", scales), view_of("mins", mins), torch_threads()));
  return {scales, mins};
}

std::tuple<Tensor, Tensor, Tensor> error_feedback(const Tensor& weights, const Tensor& factor,
                                                  const std::optional<Tensor>& pull, const Tensor& scales,
                                                  const std::optional<Tensor>& mins, const std::optional<Tensor>& levels,
                                                  int64_t bits) {
  const TensorView weights_view = view_of("weights", weights);
  const auto pull_view = optional_view("pull", pull), mins_view = optional_view("mins", mins);
  const auto levels_view = optional_view("levels", levels);
  const Tensor values = allocate(weights_view.shape, ScalarType::Float);
  const Tensor out_levels = allocate(weights_view.shape, ScalarType::Float);
  const Tensor errors = allocate(weights_view.shape, ScalarType::Float);
  raise_unless_ok(lowbit::error_feedback(weights_view, view_of("factor", factor), pointer(pull_view),
                                         view_of("scales", scales), pointer(mins_view), pointer(levels_view),
                                         width_of(bits), view_of("values", values), view_of("out_levels", out_levels),
                                         view_of("errors", errors), torch_threads()));
  return {values, out_levels, errors};
}

// The same with an output tensor from the caller. ExecuTorch's kernels have this form, and its export looks them up here.
void check_apart_from(const TensorView& out, const Tensor& argument) {
  const TensorView view = view_of("an argument", argument);
  raise_unless_ok(lowbit::check_apart({{"out", &out}}, {{"another argument", &view}}));
}
void check_apart_from(const TensorView& out, const std::optional<Tensor>& argument) {
  if (argument.has_value()) check_apart_from(out, *argument);
}
void check_apart_from(const TensorView& out, const std::vector<Tensor>& arguments) {
  for (const Tensor& argument : arguments) check_apart_from(out, argument);
}
template <class Other>
void check_apart_from(const TensorView&, const Other&) {}

void copy_to(const char* name, const Tensor& out, const Tensor& result) {
  const TensorView expected = view_of("result", result);
  raise_unless_ok(lowbit::check_type_and_shape(name, view_of(name, out), expected.type, expected.shape));
  TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(out.get(), result.get(), 0));
}

template <auto function>
struct Into;
template <class... Arguments, Tensor (*function)(Arguments...)>
struct Into<function> {
  static Tensor run(Arguments... arguments, const Tensor& out) {
    const TensorView view = view_of("out", out);
    (check_apart_from(view, arguments), ...);
    copy_to("out", out, function(arguments...));
    return out;
  }
};

std::tuple<Tensor, Tensor> rotary_out(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, int64_t heads_dim,
                                      int64_t layout, bool round_once, const Tensor& q_out, const Tensor& k_out) {
  const TensorView q_out_view = view_of("q_out", q_out), k_out_view = view_of("k_out", k_out);
  raise_unless_ok(lowbit::check_apart({{"q_out", &q_out_view}}, {{"k_out", &k_out_view}}));
  for (const Tensor* input : {&q, &k, &cos, &sin}) {
    check_apart_from(q_out_view, *input);
    check_apart_from(k_out_view, *input);
  }
  const auto [q_result, k_result] = rotary(q, k, cos, sin, heads_dim, layout, round_once);
  copy_to("q_out", q_out, q_result);
  copy_to("k_out", k_out, k_result);
  return {q_out, k_out};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(LOWBIT_NAMESPACE, library) {
  library.def("linear(Tensor x, Tensor packed_weight, int out_features) -> Tensor");
  library.def("linear.out(Tensor x, Tensor packed_weight, int out_features, *, Tensor(a!) out) -> Tensor(a!)");
  library.def("linears(Tensor x, Tensor[] packed_weights, int[] out_features) -> Tensor");
  library.def(
      "linears.out(Tensor x, Tensor[] packed_weights, int[] out_features, *, Tensor(a!) out) -> Tensor(a!)");
  library.def("linear_experts(Tensor x, Tensor packed_weights, Tensor experts, int out_features) -> Tensor");
  library.def(
      "linear_experts.out(Tensor x, Tensor packed_weights, Tensor experts, int out_features, *, Tensor(a!) out) -> "
      "Tensor(a!)");
  library.def("embedding(Tensor indices, Tensor packed_weight, int embedding_dim, *, ScalarType? dtype=None) -> Tensor");
  library.def(
      "embedding.out(Tensor indices, Tensor packed_weight, int embedding_dim, *, ScalarType? dtype=None, "
      "Tensor(a!) out) -> Tensor(a!)");
  library.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor start, float scale, "
      "int window=0, float softcap=0., Tensor? sinks=None) -> Tensor");
  library.def(
      "attention.out(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor start, float scale, "
      "int window=0, float softcap=0., Tensor? sinks=None, *, Tensor(c!) out) -> Tensor(c!)");
  library.def(
      "window_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) held, Tensor start, "
      "float scale, int window, float softcap=0., Tensor? sinks=None) -> Tensor");
  library.def(
      "window_attention.out(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) held, "
      "Tensor start, float scale, int window, float softcap=0., Tensor? sinks=None, *, Tensor(d!) out) -> Tensor(d!)");
  library.def(
      "linear_attention(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta, Tensor(a!) state, Tensor start, "
      "float scale, float norm_epsilon=0.) -> Tensor");
  library.def(
      "linear_attention.out(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta, Tensor(a!) state, Tensor start, "
      "float scale, float norm_epsilon=0., *, Tensor(b!) out) -> Tensor(b!)");
  library.def(
      "short_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor start, bool silu=False) -> Tensor");
  library.def(
      "short_conv.out(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor start, bool silu=False, *, "
      "Tensor(b!) out) -> Tensor(b!)");
  library.def("masked_attention(Tensor q, Tensor k, Tensor v, Tensor? bounds, float scale, float softcap=0.) -> Tensor");
  library.def(
      "masked_attention.out(Tensor q, Tensor k, Tensor v, Tensor? bounds, float scale, float softcap=0., *, Tensor(a!) out) -> "
      "Tensor(a!)");
  library.def("activate(Tensor x, Tensor? gate, int activation) -> Tensor");
  library.def("activate.out(Tensor x, Tensor? gate, int activation, *, Tensor(a!) out) -> Tensor(a!)");
  library.def("rms_norm(Tensor x, Tensor? weight, float epsilon, float weight_offset=0.) -> Tensor");
  library.def(
      "rms_norm.out(Tensor x, Tensor? weight, float epsilon, float weight_offset=0., *, Tensor(a!) out) -> Tensor(a!)");
  library.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float epsilon) -> Tensor");
  library.def("layer_norm.out(Tensor x, Tensor? weight, Tensor? bias, float epsilon, *, Tensor(a!) out) -> Tensor(a!)");
  library.def(
      "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, int heads_dim=1, int layout=0, bool round_once=False) -> "
      "(Tensor q_out, Tensor k_out)");
  library.def(
      "rotary.out(Tensor q, Tensor k, Tensor cos, Tensor sin, int heads_dim=1, int layout=0, bool round_once=False, *, "
      "Tensor(a!) q_out, Tensor(b!) k_out) -> (Tensor(a!), Tensor(b!))");
  library.def(
      "pack(Tensor codes, Tensor scales, Tensor? mins, Tensor? bias, int bits, int group_size, Tensor? levels=None, "
      "int rotated_inputs=0) -> Tensor");
  library.def(
      "quantize(Tensor weight, int bits, int group_size, bool affine, bool search) -> "
      "(Tensor codes, Tensor scales, Tensor mins)");
  library.def(
      "search_groups(Tensor weights, Tensor importance, int bits, bool affine) -> (Tensor scales, Tensor mins)");
  library.def(
      "error_feedback(Tensor weights, Tensor factor, Tensor? pull, Tensor scales, Tensor? mins, Tensor? levels, int bits) -> "
      "(Tensor values, Tensor levels, Tensor errors)");
  library.def("unpack(Tensor packed_weight) -> (Tensor codes, Tensor scales, Tensor mins, Tensor bias)");
}

// Both forms of an operator.
#define IMPLEMENT(library, name)                \
  library.impl(#name, TORCH_BOX(&name));        \
  library.impl(#name ".out", TORCH_BOX(&Into<&name>::run))

namespace {

void implement(torch::stable::detail::StableLibrary& library) {
  IMPLEMENT(library, linear);
  IMPLEMENT(library, linears);
  IMPLEMENT(library, linear_experts);
  IMPLEMENT(library, embedding);
  IMPLEMENT(library, attention);
  IMPLEMENT(library, window_attention);
  IMPLEMENT(library, linear_attention);
  IMPLEMENT(library, short_conv);
  IMPLEMENT(library, masked_attention);
  IMPLEMENT(library, activate);
  IMPLEMENT(library, rms_norm);
  IMPLEMENT(library, layer_norm);
  library.impl("rotary", TORCH_BOX(&rotary));
  library.impl("rotary.out", TORCH_BOX(&rotary_out));
  library.impl("pack", TORCH_BOX(&pack));
  library.impl("quantize", TORCH_BOX(&quantize));
  library.impl("search_groups", TORCH_BOX(&search_groups));
  library.impl("error_feedback", TORCH_BOX(&error_feedback));
  library.impl("unpack", TORCH_BOX(&unpack));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(LOWBIT_NAMESPACE, CPU, library) { implement(library); }
// Tensors that view_of() refuses by name; the dispatcher's error would not say what is wrong.
STABLE_TORCH_LIBRARY_IMPL(LOWBIT_NAMESPACE, SparseCPU, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(LOWBIT_NAMESPACE, SparseCsrCPU, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(LOWBIT_NAMESPACE, MkldnnCPU, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(LOWBIT_NAMESPACE, QuantizedCPU, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(LOWBIT_NAMESPACE, NestedTensorCPU, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(LOWBIT_NAMESPACE, AutogradNestedTensor, library) { implement(library); }
