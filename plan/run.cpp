#include <chrono>
#include <cinttypes>
#include <map>
#include <new>
#include <utility>

#include "../ops/check.h"
#include "../ops/first_weights.h"
#include "../ops/operators.h"
#include "../ops/schedule.h"
#include "memory.h"
#include "numbers.h"
#include "plan.h"
#include "signatures.h"
#include "team.h"

namespace lowbit {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 24;

using Clock = std::chrono::steady_clock;

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

}  // namespace

struct PlanRun::Implementation {
  const Plan plan;
  Team team;
  PlanMemory memory;
  std::map<std::pair<int64_t, int64_t>, size_t> caches;  // layer and slot -> number among a text's tensors
  Status refusal;                                        // why the plan cannot run
  std::vector<double> times;                             // one for each operator, if times are measured

  Implementation(Plan given, const Threads& threads)
      : plan(std::move(given)), team(threads), memory(plan), refusal(memory.check()) {
    for (const Buffer& buffer : plan.buffers) {
      if (buffer.kind == BufferKind::cache && !caches.emplace(std::pair(buffer.index, buffer.slot), caches.size()).second) {
        refusal = Status::error("layer %" PRId64 " has two caches of slot %" PRId64, buffer.index, buffer.slot);
        return;
      }
    }
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
    PreparedViews* prepared = nullptr;
    if (Status status = memory.prepare(call, &prepared); !status.ok()) return status;
    const TensorView* views = prepared->views.data();
    const Team::Awake awake(team);
    const Parallel parallel = awake.parallel();
    if (parallel.part != nullptr && prepared->next_weights.empty()) look_ahead(prepared, parallel);
    const FirstWeights* next = prepared->next_weights.data();
    for (size_t i = 0; i < plan.steps.size(); ++i) {
      const PlanStep& step = plan.steps[i];
      if (parallel.part != nullptr && is_linear(step)) {
        awake.prefetch(next);
        next += parallel.threads - 1;
      }
      const auto begin = times.empty() ? Clock::time_point() : Clock::now();
      const Status status = run(step, views, call, parallel);
      if (!times.empty()) {
        times[static_cast<size_t>(step.op)] += std::chrono::duration<double>(Clock::now() - begin).count();
      }
      if (!status.ok()) {
        char where[64];
        std::snprintf(where, sizeof where, "step %zu, %s: ", i, name_of(step.op));
        return status.with_prefix(where);
      }
      views += step.operands.size();
    }
    return {};
  }

  static bool is_linear(const PlanStep& step) { return step.op == Opcode::linear || step.op == Opcode::linears; }

  void look_ahead(PreparedViews* prepared, const Parallel& parallel) const {
    const TensorView* v = prepared->views.data();
    std::vector<FirstWeights>& found = prepared->next_weights;
    bool first = true;
    for (const PlanStep& step : plan.steps) {
      const int64_t matrices = static_cast<int64_t>(step.operands.size()) - 2;
      if (is_linear(step)) {
        const bool fits = step.integers.size() == static_cast<size_t>(matrices);
        for (int part = 1; part < parallel.threads && !first; ++part) {
          found.push_back(fits ? first_weights(v[0], v + 1, step.integers.data(), matrices, v[matrices + 1], parallel, part)
                               : FirstWeights());
        }
        first = false;
      }
      v += step.operands.size();
    }
    found.resize(found.size() + static_cast<size_t>(parallel.threads - 1));  // the last operator has no next one
  }

  // A text's tensor, or null.
  const TensorView* cache(const PlanText& text, int64_t layer, int64_t slot) const {
    const auto found = caches.find({layer, slot});
    return found == caches.end() ? nullptr : text.caches + found->second;
  }

  // The tensor of all texts of a call, or null if it is not the same one.
  const TensorView* shared_cache(const PlanCall& call, int64_t layer, int64_t slot) const {
    const TensorView* const first = cache(call.texts[0], layer, slot);
    for (int64_t t = 1; first != nullptr && t < call.text_count; ++t) {
      if (cache(call.texts[t], layer, slot)->data != first->data) return nullptr;
    }
    return first;
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
        const TensorView* const keys = shared_cache(call, n[0], n[1]);
        const TensorView* const values = shared_cache(call, n[0], n[2]);
        if (keys == nullptr || values == nullptr) {
          return Status::error("it needs caches of layer %" PRId64 " that all texts share", n[0]);
        }
        Scores scores{x[0]};
        scores.window = n[3];
        return attention(v[0], v[1], v[2], *keys, *values, v[3], scores, v[4], parallel);
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
      case Opcode::pool: return pool(v[0], v[1], n[0], v[2], parallel);
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
    return Status::error("buffer %" PRId64 " of a plan with %" PRId64 " is not a weight", buffer, count);
  }
  const Buffer& weight = plan.buffers[static_cast<size_t>(buffer)];
  if (memory.data == nullptr || memory.bytes != weight.bytes.constant) {
    return Status::error("weight %s has %" PRId64 " bytes; expected %" PRId64, weight.name.c_str(), memory.bytes,
                         weight.bytes.constant);
  }
  implementation_->memory.bind(static_cast<size_t>(buffer), memory);
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
