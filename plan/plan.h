// A plan: a whole call of a model as a list of operators, its steps, over one table of buffers; and the class that runs it.
//
// Sizes depend on two numbers of a call: its rows (tokens), and how many of them are kept for the output. A call has one or
// more texts, each with a range of rows and caches of its own; only attention and operators with states separate them.
// docs/internals/plan.md describes the file.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../kernels/export.h"
#include "../kernels/status.h"
#include "../ops/tensor_view.h"
#include "threads.h"

namespace lowbit {

inline constexpr int kPlanDims = 8;

// A size that depends on a call: constant + rows * per_row + kept * per_kept.
struct Extent {
  int64_t constant = 0, per_row = 0, per_kept = 0;
};

enum class BufferKind : uint8_t { input, output, weight, cache, constant, temporary };
inline constexpr int kBufferKinds = 6;

// A layer's caches, in the order of a text's tensors. `held` is for caches of a window; states follow.
enum CacheSlot : int64_t { kKeys, kValues, kHeld, kFirstState };

struct Buffer {
  BufferKind kind = BufferKind::temporary;
  Extent bytes;             // unknown, 0, for caches
  int64_t index = 0;        // the number of an input or output; the layer of a cache
  int64_t slot = 0;         // CacheSlot of a cache
  std::string name;         // a weight's name in the model's state
  // Where a weight is stored: in this file next to the plan's, unless empty. The checksum is that of its first kChecked
  // bytes.
  std::string file;
  int64_t offset = 0;
  uint32_t checksum = 0;
  // Of a cache: keys and values [heads, width] of one text, whose type a program chooses; states as they are.
  std::vector<int64_t> shape;
  ElementType type = ElementType::f32;  // if the buffer is a state
  std::vector<char> content;            // bytes of a constant
};

// A strided view of a buffer.
struct Operand {
  int64_t buffer = -1;  // -1: there is none
  ElementType type = ElementType::f32;
  int ndim = 0;
  Extent offset, size[kPlanDims], stride[kPlanDims];  // offset and strides in elements
};

// The operands of each, those in brackets optional; then its integers and its numbers. Outputs come last. What ops/operators.h
// has is described there.
enum class Opcode : uint8_t {
  linear,            // x packed out; out_features
  linears,           // x packed... out; out_features of each
  linear_experts,    // x packed experts out; out_features
  embedding,         // indices packed out; embedding_dim
  attention,         // q k v [sinks] out; layer window; scale softcap
  masked_attention,  // q k v [bounds] out; ; scale softcap; within each text: bounds count from its first row
  fixed_attention,   // q k v start out; layer, slots of keys and values, window; scale: over caches that all texts share
  linear_attention,  // q k v decay [beta] out; layer slot; scale norm_epsilon
  short_conv,        // x weight [bias] out; layer slot silu
  activate,          // x [gate] out; activation
  rms_norm,          // x [weight] out; ; epsilon weight_offset
  layer_norm,        // x [weight] [bias] out; ; epsilon
  rotary,            // q k cos sin q_out k_out; heads_dim layout round_once
  copy,              // x out, of the same sizes; converts the type
  compute,           // x... out: elementwise, see Instruction; the instructions; constants
  float_linear,      // x weight [bias] out
  sum,               // x [..., n] out [...]
  softmax,           // x out, over the last dimension
  top,               // x [..., n] values [..., k] indices [..., k]: the largest, in descending order
  gather,            // x [..., n] indices [..., k] out [..., k]
  take,              // x [n, ...] indices [...] out [..., ...]: slices of x
  scatter,           // indices [..., k] out [..., n]; ; value: written where indices say; the rest of out stays
  count_up,          // out [n] int64; start step
  pool,              // x [1, rows, width] ranges [texts, 2] out [texts, width]; mode
};
inline constexpr int kOpcodes = 24;

// One instruction of an elementwise computation: register r = op(a, b, c). The first registers are the inputs, the others the
// results of earlier instructions; -1 - i is constant i. A float result is computed in float32 and rounded to `type`; others in
// int64.
struct Instruction {
  int64_t op, a, b, c, type;
};
enum class Elementwise : uint8_t {
  convert, add, sub, mul, div, minimum, maximum, neg, abs, reciprocal, sqrt, rsqrt, exp, log, tanh, sigmoid, softplus, sin, cos,
  floor, equal, not_equal, less, less_equal, greater, greater_equal, logical_and, logical_or, logical_not,
  select,  // a ? b : c
  log1p, expm1,
};
inline constexpr int kElementwise = 32;

struct PlanStep {
  Opcode op = Opcode::copy;
  std::vector<Operand> operands;
  std::vector<int64_t> integers;
  std::vector<double> numbers;
};

// How the rows of a text become one: their mean, the largest number of each column, the sum divided by the root of their
// number, or the mean with weights 1, 2, 3, ...
enum class Pooling : int64_t { mean, largest, root, weighted };

inline constexpr int64_t kChecked = 4096;

struct Plan {
  std::map<std::string, std::vector<int64_t>> about;  // for programs: "vocabulary", "positions", "stop"
  std::vector<Buffer> buffers;
  std::vector<PlanStep> steps;
};

// Sets *type to the type of a plan's output. False if it has none.
inline bool type_of_output(const Plan& plan, ElementType* type) {
  bool found = false;
  for (const PlanStep& step : plan.steps) {
    const Operand& last = step.operands.back();
    if (last.buffer < 0 || plan.buffers[static_cast<size_t>(last.buffer)].kind != BufferKind::output) continue;
    *type = last.type;
    found = true;
  }
  return found;
}

LOWBIT_API const char* name_of(Opcode op);

// CRC-32 (ISO 3309), as in zip files, continued from an earlier result.
LOWBIT_API uint32_t checksum(const void* bytes, size_t size, uint32_t from = 0);

// Reads a plan's bytes, which need not be trusted.
LOWBIT_API Status read_plan(const void* bytes, size_t size, Plan* plan);

struct Memory {
  void* data = nullptr;
  int64_t bytes = 0;
};

// One text of a call: its rows are begin to end - 1, and `start` tokens precede them. It has a tensor for each cache buffer of
// the plan, in their order; without memory for `held` if the caches have room for the whole text.
struct PlanText {
  int64_t begin, end, start;
  const TensorView* caches;
};

struct PlanCall {
  int64_t rows, kept;
  const Memory* inputs;
  int64_t input_count;
  const Memory* outputs;
  int64_t output_count;
  const PlanText* texts;
  int64_t text_count;
};

// Runs a plan. One call at a time.
class LOWBIT_API PlanRun {
 public:
  // Throws std::bad_alloc or std::system_error.
  PlanRun(Plan plan, const Threads& threads);
  ~PlanRun();
  PlanRun(const PlanRun&) = delete;
  PlanRun& operator=(const PlanRun&) = delete;

  const Plan& plan() const;
  // The memory of a weight: buffers()[buffer]. It must stay where it is.
  Status bind(int64_t buffer, Memory memory);
  Status run(const PlanCall& call);

  // From now on, calls add the seconds of each operator: measured()[opcode].
  void measure();
  const std::vector<double>& measured() const;

 private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace lowbit
