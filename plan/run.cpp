#include <algorithm>
#include <array>
#include <chrono>
#include <cinttypes>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <utility>

#include "../ops/aligned_memory.h"
#include "../ops/check.h"
#include "../ops/operators.h"
#include "../ops/schedule.h"
#include "numbers.h"
#include "plan.h"
#include "team.h"

namespace lowbit {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 24;
constexpr int64_t kAlignTemporaries = 64;
constexpr int64_t kMostBytes = int64_t{1} << 46;

// A size of this call; false if it is negative or does not fit.
bool evaluate(const Extent& extent, int64_t rows, int64_t kept, int64_t* value) {
  int64_t of_rows, of_kept;
  return !__builtin_mul_overflow(extent.per_row, rows, &of_rows) && !__builtin_mul_overflow(extent.per_kept, kept, &of_kept) &&
         !__builtin_add_overflow(extent.constant, of_rows, value) && !__builtin_add_overflow(*value, of_kept, value);
}

using Clock = std::chrono::steady_clock;

// How many operands and parameters each operator has. -1: any number.
struct Signature {
  const char* name;
  int least_operands, most_operands, outputs, integers, numbers;
};
constexpr Signature kSignatures[kOpcodes] = {
    {"linear", 3, 3, 1, 1, 0},                  {"linears", 3, 2 + kMostMatrices, 1, -1, 0},{"linear_experts", 4, 4, 1, 1, 0},
    {"embedding", 3, 3, 1, 1, 0},               {"attention", 5, 5, 1, 2, 2},               {"masked_attention", 5, 5, 1, 0, 2},
    {"fixed_attention", 5, 5, 1, 3, 1},         {"linear_attention", 6, 6, 1, 2, 2},        {"short_conv", 4, 4, 1, 3, 0},
    {"activate", 3, 3, 1, 1, 0},                {"rms_norm", 3, 3, 1, 0, 2},                {"layer_norm", 4, 4, 1, 0, 1},
    {"rotary", 6, 6, 2, 3, 0},                  {"copy", 2, 2, 1, 0, 0},                    {"compute", 1, 13, 1, -1, -1},
    {"float_linear", 4, 4, 1, 0, 0},            {"sum", 2, 2, 1, 0, 0},                     {"softmax", 2, 2, 1, 0, 0},
    {"top", 3, 3, 2, 0, 0},                     {"gather", 3, 3, 1, 0, 0},                  {"take", 3, 3, 1, 0, 0},
    {"scatter", 2, 2, 1, 0, 1},                 {"count_up", 1, 1, 1, 0, 2}};

// The operands that may be missing.
bool is_optional(Opcode op, size_t operand) {
  switch (op) {
    case Opcode::attention:
    case Opcode::masked_attention: return operand == 3;
    case Opcode::linear_attention: return operand == 4;
    case Opcode::short_conv:
    case Opcode::float_linear: return operand == 2;
    case Opcode::activate:
    case Opcode::rms_norm: return operand == 1;
    case Opcode::layer_norm: return operand == 1 || operand == 2;
    default: return false;
  }
}

TensorView between(const TensorView& x, int dim, int64_t begin, int64_t end) {
  TensorView result = x;
  result.data = static_cast<char*>(x.data) + begin * x.stride[dim] * element_bytes(x.type);
  result.shape.size[dim] = end - begin;
  return result;
}

// Operands of operators that separate texts have all rows of a call in one dimension.
Status check_rows(size_t operand, const TensorView& x, int dim, int64_t rows) {
  if (x.shape.ndim > dim && x.shape.size[dim] == rows && x.shape.size[0] == 1) return {};
  return Status::error("operand %zu has shape %s; expected [1, ...] with %" PRId64 " rows in dimension %d", operand,
                       describe(x.shape).text, rows, dim);
}

TensorView one_number(const int64_t* at) {
  TensorView view;
  view.data = const_cast<int64_t*>(at);
  view.type = ElementType::i64;
  view.shape = {1, {1}};
  view.stride[0] = 1;
  return view;
}

// Whether elements of a view may be at the same place: some stride is within the elements of the smaller strides.
bool overlaps_itself(const TensorView& view) {
  if (view.shape.numel() == 0) return false;
  std::array<std::pair<int64_t, int64_t>, kMaxDims> dims;  // stride and size
  int count = 0;
  for (int d = 0; d < view.shape.ndim; ++d) {
    if (view.shape.size[d] > 1) dims[static_cast<size_t>(count++)] = {std::abs(view.stride[d]), view.shape.size[d]};
  }
  std::sort(dims.begin(), dims.begin() + count);
  int64_t last = 0;  // distance of the last element
  for (int d = 0; d < count; ++d) {
    const auto& [stride, size] = dims[static_cast<size_t>(d)];
    if (stride <= last) return true;
    last += stride * (size - 1);
  }
  return false;
}

// When the value of a temporary is first written and last used, in steps.
struct Life {
  int64_t first = -1, last = -1;
};

}  // namespace

struct PlanRun::Implementation {
  // The views of all operands, step after step, for the sizes of a call.
  struct Prepared {
    int64_t rows = 0, kept = 0;
    uint64_t used = 0;  // by which call
    std::vector<TensorView> views;
    std::vector<Memory> memory;                       // of each buffer; inputs and outputs have the bytes that views need
    std::vector<std::pair<size_t, int64_t>> moving;   // views of inputs and outputs, and their offsets in bytes
  };

  const Plan plan;
  Team team;
  std::vector<Memory> weights;  // of each buffer
  std::vector<Life> lives;      // of each buffer
  std::map<std::pair<int64_t, int64_t>, size_t> caches;  // layer and slot -> number among a text's tensors
  std::unique_ptr<void, FreeAligned> arena;              // of temporaries
  int64_t arena_bytes = 0;
  std::array<Prepared, 4> prepared;
  uint64_t calls = 0;
  std::vector<double> times;  // of each operator, if they are measured
  Status refusal;  // why the plan cannot run

  Implementation(Plan given, const Threads& threads) : plan(std::move(given)), team(threads), weights(plan.buffers.size()) {
    for (size_t i = 0; i < plan.buffers.size(); ++i) {
      const Buffer& buffer = plan.buffers[i];
      if (buffer.kind == BufferKind::cache && !caches.emplace(std::pair(buffer.index, buffer.slot), caches.size()).second) {
        refusal = Status::error("layer %" PRId64 " has two caches of slot %" PRId64, buffer.index, buffer.slot);
        return;
      }
    }
    refusal = check();
  }

  // Checks the number of operands, and that no temporary is read before it is written; finds their lives.
  Status check() {
    lives.resize(plan.buffers.size());
    for (size_t i = 0; i < plan.steps.size(); ++i) {
      const PlanStep& step = plan.steps[i];
      const Signature& expected = kSignatures[static_cast<size_t>(step.op)];
      const auto fits = [](size_t count, int wanted) { return wanted < 0 || count == static_cast<size_t>(wanted); };
      if (step.operands.size() < static_cast<size_t>(expected.least_operands) ||
          step.operands.size() > static_cast<size_t>(expected.most_operands) ||
          !fits(step.integers.size(), expected.integers) || !fits(step.numbers.size(), expected.numbers)) {
        return Status::error("step %zu, %s, has %zu operands, %zu integers and %zu numbers; expected other numbers of them", i,
                             expected.name, step.operands.size(), step.integers.size(), step.numbers.size());
      }
      const size_t outputs_at = step.operands.size() - static_cast<size_t>(expected.outputs);
      for (size_t o = 0; o < step.operands.size(); ++o) {
        const Operand& operand = step.operands[o];
        if (operand.buffer < 0) {
          if (is_optional(step.op, o)) continue;
          return Status::error("step %zu, %s, has no operand %zu", i, expected.name, o);
        }
        const size_t at = static_cast<size_t>(operand.buffer);
        const BufferKind kind = plan.buffers[at].kind;
        if (kind == BufferKind::cache || (o >= outputs_at && kind != BufferKind::temporary && kind != BufferKind::output)) {
          return Status::error("operand %zu of step %zu, %s, is a buffer that it cannot use", o, i, expected.name);
        }
        Life& life = lives[at];
        life.last = static_cast<int64_t>(i);
        if (life.first < 0 && o >= outputs_at && step.op != Opcode::scatter) life.first = life.last;  // scatter keeps the rest
        if (life.first < 0 && (kind == BufferKind::temporary || kind == BufferKind::output)) {
          return Status::error("step %zu, %s, reads buffer %zu before it is written", i, expected.name, at);
        }
      }
    }
    return {};
  }

  // Places temporaries in the arena, where the lives of those that share memory do not overlap, and makes all views.
  Status prepare(const PlanCall& call, Prepared* to) {
    to->rows = 0;
    to->views.clear();
    to->moving.clear();
    to->memory = weights;
    for (size_t i = 0; i < plan.buffers.size(); ++i) {
      if (plan.buffers[i].kind == BufferKind::weight && weights[i].data == nullptr) {
        return Status::error("the plan's weight %s has no memory", plan.buffers[i].name.c_str());
      }
    }
    struct Placed {
      int64_t begin, end, last;
    };
    std::vector<Placed> placed;  // those in use, in the order of their memory
    std::vector<std::pair<int64_t, size_t>> order;
    for (size_t i = 0; i < plan.buffers.size(); ++i) {
      if (plan.buffers[i].kind == BufferKind::temporary && lives[i].first >= 0) order.emplace_back(lives[i].first, i);
    }
    std::sort(order.begin(), order.end());
    std::vector<int64_t> begins(plan.buffers.size());
    int64_t needed = 0;
    for (const auto& [first, i] : order) {
      int64_t bytes;
      if (!evaluate(plan.buffers[i].bytes, call.rows, call.kept, &bytes) || bytes < 0 || bytes > kMostBytes) {
        return Status::error("buffer %zu has no possible size for %" PRId64 " rows", i, call.rows);
      }
      to->memory[i].bytes = bytes;
      bytes = (bytes + kAlignTemporaries - 1) / kAlignTemporaries * kAlignTemporaries;
      std::erase_if(placed, [&](const Placed& other) { return other.last < first; });
      int64_t begin = 0;
      auto at = placed.begin();
      for (; at != placed.end() && at->begin - begin < bytes; ++at) begin = at->end;
      placed.insert(at, {begin, begin + bytes, lives[i].last});
      begins[i] = begin;
      needed = std::max(needed, begin + bytes);
      if (needed > kMostBytes) {
        return Status::no_memory("no memory for the temporaries of a call, more than %" PRId64 " bytes", kMostBytes);
      }
    }
    if (needed > arena_bytes) {
      for (Prepared& other : prepared) other.rows = 0;
      arena.reset();
      arena_bytes = 0;
      arena.reset(allocate_aligned(needed));
      if (!arena) return Status::no_memory("no memory for the temporaries of a call, %" PRId64 " bytes", needed);
      arena_bytes = needed;
    }
    for (const auto& [first, i] : order) to->memory[i].data = static_cast<char*>(arena.get()) + begins[i];
    for (size_t i = 0; i < plan.buffers.size(); ++i) {
      const Buffer& buffer = plan.buffers[i];
      if (buffer.kind == BufferKind::constant) {
        to->memory[i] = {const_cast<char*>(buffer.content.data()), static_cast<int64_t>(buffer.content.size())};
      }
    }
    for (size_t i = 0; i < plan.steps.size(); ++i) {
      const std::vector<Operand>& operands = plan.steps[i].operands;
      for (size_t o = 0; o < operands.size(); ++o) {
        to->views.emplace_back();
        if (operands[o].buffer < 0) continue;
        if (Status status = view(call, operands[o], i, to); !status.ok()) return status;
        // The result would depend on the order of threads.
        if (o + static_cast<size_t>(kSignatures[static_cast<size_t>(plan.steps[i].op)].outputs) >= operands.size() &&
            overlaps_itself(to->views.back())) {
          return Status::error("operand %zu of step %zu, %s, shares memory with itself in a call with %" PRId64 " rows", o, i,
                               name_of(plan.steps[i].op), call.rows);
        }
      }
    }
    to->rows = call.rows;
    to->kept = call.kept;
    return {};
  }

  // Fills in the last view.
  Status view(const PlanCall& call, const Operand& operand, size_t step, Prepared* to) {
    const size_t at = static_cast<size_t>(operand.buffer);
    Memory& memory = to->memory[at];
    TensorView& view = to->views.back();
    view.type = operand.type;
    view.shape.ndim = operand.ndim;
    int64_t offset, least, most;
    bool fits = evaluate(operand.offset, call.rows, call.kept, &offset) && offset >= 0;
    least = most = offset;
    for (int d = 0; fits && d < operand.ndim; ++d) {
      int64_t& size = view.shape.size[d];
      int64_t& stride = view.stride[d];
      int64_t distance;
      fits = evaluate(operand.size[d], call.rows, call.kept, &size) && size >= 0 &&
             evaluate(operand.stride[d], call.rows, call.kept, &stride) &&
             !__builtin_mul_overflow(stride, std::max<int64_t>(size - 1, 0), &distance) &&
             !__builtin_add_overflow(distance < 0 ? least : most, distance, distance < 0 ? &least : &most);
    }
    const int64_t bytes = element_bytes(operand.type);
    fits = fits && check_shape("", view.shape).ok() && least >= 0 && most < kMostBytes / bytes;
    const BufferKind kind = plan.buffers[at].kind;
    const int64_t end = fits && view.shape.numel() > 0 ? (most + 1) * bytes : 0;
    if (end == 0) offset = 0;
    if (kind == BufferKind::input || kind == BufferKind::output) {
      memory.bytes = std::max(memory.bytes, end);  // compared with what each call gives
    } else {
      fits = fits && end <= memory.bytes;
    }
    if (!fits) {
      return Status::error("step %zu, %s, reads or writes beyond buffer %zu of %" PRId64 " bytes in a call with %" PRId64
                           " rows", step, name_of(plan.steps[step].op), at, memory.bytes, call.rows);
    }
    if (kind == BufferKind::input || kind == BufferKind::output) to->moving.emplace_back(to->views.size() - 1, offset * bytes);
    else view.data = static_cast<char*>(memory.data) + offset * bytes;
    return {};
  }

  Status run(const PlanCall& call) {
    if (!refusal.ok()) return refusal;
    if (call.rows < 1 || call.rows > kMostRows || call.kept < 0 || call.kept > call.rows) {
      return Status::error("a call has %" PRId64 " rows of which %" PRId64 " are kept; expected 1 to %" PRId64 " rows",
                           call.rows, call.kept, kMostRows);
    }
    int64_t done = 0;
    for (int64_t t = 0; t < call.text_count; ++t) {
      const PlanText& text = call.texts[t];
      if (text.begin != done || text.end <= text.begin || text.end > call.rows) {
        return Status::error("text %" PRId64 " has rows %" PRId64 " to %" PRId64 "; expected texts that follow each other", t,
                             text.begin, text.end);
      }
      done = text.end;
    }
    if (done != call.rows) {
      return Status::error("the texts of a call have %" PRId64 " rows; expected %" PRId64, done, call.rows);
    }
    Prepared* chosen = &prepared[0];
    for (Prepared& each : prepared) {
      if (each.rows == call.rows && each.kept == call.kept) {
        chosen = &each;
        break;
      }
      if (each.used < chosen->used) chosen = &each;
    }
    if (chosen->rows != call.rows || chosen->kept != call.kept) {
      if (Status status = prepare(call, chosen); !status.ok()) return status;
    }
    chosen->used = ++calls;
    for (size_t i = 0; i < plan.buffers.size(); ++i) {
      const Buffer& buffer = plan.buffers[i];
      if (buffer.kind != BufferKind::input && buffer.kind != BufferKind::output) continue;
      const bool is_input = buffer.kind == BufferKind::input;
      const Memory* const given = is_input ? call.inputs : call.outputs;
      if (buffer.index >= (is_input ? call.input_count : call.output_count) ||
          given[buffer.index].bytes < chosen->memory[i].bytes) {
        return Status::error("%s %" PRId64 " of a call is missing or too small; expected %" PRId64 " bytes",
                             is_input ? "input" : "output", buffer.index, chosen->memory[i].bytes);
      }
      chosen->memory[i].data = given[buffer.index].data;
    }
    size_t first = 0;
    auto moving = chosen->moving.begin();
    const Team::Awake awake(team);
    const Parallel parallel = awake.parallel();
    for (size_t i = 0; i < plan.steps.size(); ++i) {
      const PlanStep& step = plan.steps[i];
      for (; moving != chosen->moving.end() && moving->first < first + step.operands.size(); ++moving) {
        const size_t buffer = static_cast<size_t>(step.operands[moving->first - first].buffer);
        chosen->views[moving->first].data = static_cast<char*>(chosen->memory[buffer].data) + moving->second;
      }
      const auto begin = times.empty() ? Clock::time_point() : Clock::now();
      const Status status = run(step, &chosen->views[first], call, parallel);
      if (!times.empty()) {
        times[static_cast<size_t>(step.op)] += std::chrono::duration<double>(Clock::now() - begin).count();
      }
      if (!status.ok()) {
        char where[64];
        std::snprintf(where, sizeof where, "step %zu, %s: ", i, name_of(step.op));
        return status.with_prefix(where);
      }
      first += step.operands.size();
    }
    return {};
  }

  // A text's tensor, or null.
  const TensorView* cache(const PlanText& text, int64_t layer, int64_t slot) const {
    const auto found = caches.find({layer, slot});
    return found == caches.end() ? nullptr : text.caches + found->second;
  }

  Status run(const PlanStep& step, const TensorView* v, const PlanCall& call, const Parallel& parallel) {
    const size_t count = step.operands.size();
    const int64_t* const n = step.integers.data();
    const double* const x = step.numbers.data();
    const auto optional = [&](size_t i) { return step.operands[i].buffer < 0 ? nullptr : v + i; };
    switch (step.op) {
      case Opcode::linear: return linear(v[0], v[1], n[0], v[2], parallel);
      case Opcode::linears: {
        const int64_t matrices = static_cast<int64_t>(count) - 2;
        if (static_cast<int64_t>(step.integers.size()) != matrices) {
          return Status::error("it has %zu sizes for %" PRId64 " matrices", step.integers.size(), matrices);
        }
        return linears(v[0], v + 1, n, matrices, v[count - 1], parallel);
      }
      case Opcode::linear_experts: return linear_experts(v[0], v[1], v[2], n[0], v[3], parallel);
      case Opcode::embedding: return embedding(v[0], v[1], n[0], v[2], parallel);
      case Opcode::masked_attention:
        if (call.text_count > 1) return masked_texts(step, v, call, parallel);
        return masked_attention(v[0], v[1], v[2], optional(3), x[0], x[1], v[4], parallel);
      case Opcode::fixed_attention: {
        const TensorView* const keys = call.text_count == 1 ? cache(call.texts[0], n[0], n[1]) : nullptr;
        const TensorView* const values = call.text_count == 1 ? cache(call.texts[0], n[0], n[2]) : nullptr;
        if (keys == nullptr || values == nullptr) return Status::error("it needs one text with caches of layer %" PRId64, n[0]);
        return attention(v[0], v[1], v[2], *keys, *values, v[3], Scores{x[0]}, v[4], parallel);
      }
      case Opcode::activate: return activate(v[0], optional(1), n[0], v[2], parallel);
      case Opcode::rms_norm: return rms_norm(v[0], optional(1), x[0], x[1], v[2], parallel);
      case Opcode::layer_norm: return layer_norm(v[0], optional(1), optional(2), x[0], v[3], parallel);
      case Opcode::rotary: return rotary(v[0], v[1], v[2], v[3], n[0], n[1], n[2] != 0, v[4], v[5], parallel);
      case Opcode::copy: return copy(v[0], v[1], parallel);
      case Opcode::compute: {
        if (step.integers.size() % 5 != 0) return Status::error("it has %zu integers for instructions", step.integers.size());
        static_assert(sizeof(Instruction) == 5 * sizeof(int64_t));
        return compute(v, static_cast<int64_t>(count) - 1, reinterpret_cast<const Instruction*>(n),
                       static_cast<int64_t>(step.integers.size()) / 5, x, static_cast<int64_t>(step.numbers.size()),
                       v[count - 1], parallel);
      }
      case Opcode::float_linear: return float_linear(v[0], v[1], optional(2), v[3], parallel);
      case Opcode::sum: return sum(v[0], v[1], parallel);
      case Opcode::softmax: return softmax(v[0], v[1], parallel);
      case Opcode::top: return top(v[0], v[1], v[2], parallel);
      case Opcode::gather: return gather(v[0], v[1], v[2], parallel);
      case Opcode::take: return take(v[0], v[1], v[2], parallel);
      case Opcode::scatter: return scatter(v[0], x[0], v[1], parallel);
      case Opcode::count_up: return count_up(x[0], x[1], v[0]);
      case Opcode::attention:
      case Opcode::linear_attention:
      case Opcode::short_conv: break;
    }
    for (int64_t t = 0; t < call.text_count; ++t) {
      if (Status status = run(step, v, call.rows, call.texts[t], parallel); !status.ok()) return status;
    }
    return {};
  }

  // Attention within each text, whose bits do not depend on other texts: its bounds and blocks of keys begin with its own rows.
  Status masked_texts(const PlanStep& step, const TensorView* v, const PlanCall& call, const Parallel& parallel) {
    const bool has_bounds = step.operands[3].buffer >= 0;
    const auto dim_of = [](size_t i) { return i < 3 ? 2 : 1; };
    for (size_t i = 0; i < 5; ++i) {
      if (i == 3 && !has_bounds) continue;
      if (Status status = check_rows(i, v[i], dim_of(i), call.rows); !status.ok()) return status;
    }
    const auto run_text = [&](int64_t t, const Parallel& threads) {
      TensorView part[5];
      for (size_t i = 0; i < 5; ++i) {
        if (i != 3 || has_bounds) part[i] = between(v[i], dim_of(i), call.texts[t].begin, call.texts[t].end);
      }
      return masked_attention(part[0], part[1], part[2], has_bounds ? &part[3] : nullptr, step.numbers[0], step.numbers[1],
                              part[4], threads);
    };
    const bool at_once = call.text_count >= 2 * parallel.threads;  // short texts have too little work for several threads
    std::vector<Status> results(static_cast<size_t>(call.text_count));
    parallel_1d(at_once ? parallel : Parallel(), call.text_count, 1, [&](int, int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) results[static_cast<size_t>(t)] = run_text(t, at_once ? Parallel() : parallel);
    });
    for (const Status& status : results) {
      if (!status.ok()) return status;
    }
    return {};
  }

  // An operator that separates texts, for one of them.
  Status run(const PlanStep& step, const TensorView* v, int64_t rows, const PlanText& text, const Parallel& parallel) {
    TensorView part[6];
    const size_t count = step.operands.size();
    const bool whole = text.begin == 0 && text.end == rows;
    const auto optional = [&](size_t i) { return step.operands[i].buffer < 0 ? nullptr : part + i; };
    for (size_t i = 0; i < count; ++i) {
      part[i] = v[i];
      const bool has_rows =
          step.op == Opcode::attention ? i != 3 : step.op == Opcode::linear_attention || i == 0 || i == count - 1;
      if (step.operands[i].buffer < 0 || !has_rows) continue;
      const int dim = step.op == Opcode::attention && i != count - 1 ? 2 : 1;
      if (Status status = check_rows(i, v[i], dim, rows); !status.ok()) return status;
      if (!whole) part[i] = between(v[i], dim, text.begin, text.end);
    }
    const int64_t* const n = step.integers.data();
    const TensorView start = one_number(&text.start);
    if (step.op == Opcode::attention) {
      const TensorView* const keys = cache(text, n[0], kKeys);
      const TensorView* const values = cache(text, n[0], kValues);
      const TensorView* const held = cache(text, n[0], kHeld);
      if (keys == nullptr || values == nullptr) return Status::error("layer %" PRId64 " has no keys and values", n[0]);
      Scores scores{step.numbers[0]};
      scores.window = n[1];
      scores.softcap = step.numbers[1];
      scores.sinks = optional(3);
      if (held == nullptr || held->data == nullptr) {
        return attention(part[0], part[1], part[2], *keys, *values, start, scores, part[4], parallel);
      }
      return window_attention(part[0], part[1], part[2], *keys, *values, *held, start, scores, part[4], parallel);
    }
    const TensorView* const state = cache(text, n[0], n[1]);
    if (state == nullptr) return Status::error("layer %" PRId64 " has no state %" PRId64, n[0], n[1]);
    if (step.op == Opcode::short_conv) {
      return short_conv(part[0], part[1], optional(2), *state, start, n[2] != 0, part[3], parallel);
    }
    return linear_attention(part[0], part[1], part[2], part[3], optional(4), *state, start,
                            {step.numbers[0], step.numbers[1]}, part[5], parallel);
  }
};

const char* name_of(Opcode op) { return kSignatures[static_cast<size_t>(op)].name; }

PlanRun::PlanRun(Plan plan, const Threads& threads)
    : implementation_(std::make_unique<Implementation>(std::move(plan), threads)) {}
PlanRun::~PlanRun() = default;

const Plan& PlanRun::plan() const { return implementation_->plan; }

Status PlanRun::bind(int64_t buffer, Memory memory) {
  const Plan& plan = implementation_->plan;
  const int64_t count = static_cast<int64_t>(plan.buffers.size());
  if (buffer < 0 || buffer >= count || plan.buffers[static_cast<size_t>(buffer)].kind != BufferKind::weight) {
    return Status::error("buffer %" PRId64 " of a plan with %" PRId64 " is no weight", buffer, count);
  }
  const Buffer& weight = plan.buffers[static_cast<size_t>(buffer)];
  if (memory.data == nullptr || memory.bytes != weight.bytes.constant) {
    return Status::error("weight %s has %" PRId64 " bytes; expected %" PRId64, weight.name.c_str(), memory.bytes,
                         weight.bytes.constant);
  }
  implementation_->weights[static_cast<size_t>(buffer)] = memory;
  for (auto& prepared : implementation_->prepared) prepared.rows = 0;
  return {};
}

void PlanRun::measure() { implementation_->times.resize(kOpcodes); }
const std::vector<double>& PlanRun::measured() const { return implementation_->times; }

Status PlanRun::run(const PlanCall& call) {
  try {
    return implementation_->run(call);
  } catch (const std::bad_alloc&) {
    return Status::no_memory("no memory to prepare a call of %" PRId64 " rows", call.rows);
  }
}

}  // namespace lowbit
