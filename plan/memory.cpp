#include "memory.h"

#include <algorithm>
#include <cinttypes>
#include <cstdlib>
#include <utility>

#include "../ops/check.h"
#include "signatures.h"

namespace lowbit {
namespace {

constexpr int64_t kAlignTemporaries = 64;
constexpr int64_t kMostBytes = int64_t{1} << 46;

// A size of this call; false if it is negative or does not fit.
bool evaluate(const Extent& extent, int64_t rows, int64_t kept, int64_t* value) {
  int64_t of_rows, of_kept;
  return !__builtin_mul_overflow(extent.per_row, rows, &of_rows) && !__builtin_mul_overflow(extent.per_kept, kept, &of_kept) &&
         !__builtin_add_overflow(extent.constant, of_rows, value) && !__builtin_add_overflow(*value, of_kept, value);
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

}  // namespace

PlanMemory::PlanMemory(const Plan& plan) : plan_(plan), weights_(plan.buffers.size()) {}

void PlanMemory::bind(size_t buffer, Memory memory) {
  weights_[buffer] = memory;
  for (PreparedViews& each : prepared_) each.rows = 0;
}

Status PlanMemory::check() {
  lives_.resize(plan_.buffers.size());
  for (size_t i = 0; i < plan_.steps.size(); ++i) {
    const PlanStep& step = plan_.steps[i];
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
      const BufferKind kind = plan_.buffers[at].kind;
      if (kind == BufferKind::cache || (o >= outputs_at && kind != BufferKind::temporary && kind != BufferKind::output)) {
        return Status::error("operand %zu of step %zu, %s, is a buffer that it cannot use", o, i, expected.name);
      }
      Life& life = lives_[at];
      life.last = static_cast<int64_t>(i);
      if (life.first < 0 && o >= outputs_at && step.op != Opcode::scatter) life.first = life.last;  // scatter writes a part
      if (life.first < 0 && (kind == BufferKind::temporary || kind == BufferKind::output)) {
        return Status::error("step %zu, %s, reads buffer %zu before it is written", i, expected.name, at);
      }
    }
  }
  return {};
}

// Places temporaries in the arena, so that those with overlapping lifetimes share no memory, and computes all views.
Status PlanMemory::place(const PlanCall& call, PreparedViews* to) {
  to->rows = 0;
  to->views.clear();
  to->moving.clear();
  to->next_weights.clear();
  to->memory = weights_;
  for (size_t i = 0; i < plan_.buffers.size(); ++i) {
    if (plan_.buffers[i].kind == BufferKind::weight && weights_[i].data == nullptr) {
      return Status::error("the plan's weight %s has no memory", plan_.buffers[i].name.c_str());
    }
  }
  struct Placed {
    int64_t begin, end, last;
  };
  std::vector<Placed> placed;  // those in use, in the order of their memory
  std::vector<std::pair<int64_t, size_t>> order;
  for (size_t i = 0; i < plan_.buffers.size(); ++i) {
    if (plan_.buffers[i].kind == BufferKind::temporary && lives_[i].first >= 0) order.emplace_back(lives_[i].first, i);
  }
  std::sort(order.begin(), order.end());
  std::vector<int64_t> begins(plan_.buffers.size());
  int64_t needed = 0;
  for (const auto& [first, i] : order) {
    int64_t bytes;
    if (!evaluate(plan_.buffers[i].bytes, call.rows, call.kept, &bytes) || bytes < 0 || bytes > kMostBytes) {
      return Status::error("buffer %zu has no possible size for %" PRId64 " rows", i, call.rows);
    }
    to->memory[i].bytes = bytes;
    bytes = (bytes + kAlignTemporaries - 1) / kAlignTemporaries * kAlignTemporaries;
    std::erase_if(placed, [&](const Placed& other) { return other.last < first; });
    int64_t begin = 0;
    auto at = placed.begin();
    for (; at != placed.end() && at->begin - begin < bytes; ++at) begin = at->end;
    placed.insert(at, {begin, begin + bytes, lives_[i].last});
    begins[i] = begin;
    needed = std::max(needed, begin + bytes);
    if (needed > kMostBytes) {
      return Status::no_memory("no memory for the temporaries of a call, more than %" PRId64 " bytes", kMostBytes);
    }
  }
  if (needed > arena_bytes_) {
    for (PreparedViews& other : prepared_) other.rows = 0;
    arena_.reset();
    arena_bytes_ = 0;
    arena_.reset(allocate_aligned(needed));
    if (!arena_) return Status::no_memory("no memory for the temporaries of a call, %" PRId64 " bytes", needed);
    arena_bytes_ = needed;
  }
  for (const auto& [first, i] : order) to->memory[i].data = static_cast<char*>(arena_.get()) + begins[i];
  for (size_t i = 0; i < plan_.buffers.size(); ++i) {
    const Buffer& buffer = plan_.buffers[i];
    if (buffer.kind == BufferKind::constant) {
      to->memory[i] = {const_cast<char*>(buffer.content.data()), static_cast<int64_t>(buffer.content.size())};
    }
  }
  for (size_t i = 0; i < plan_.steps.size(); ++i) {
    const std::vector<Operand>& operands = plan_.steps[i].operands;
    for (size_t o = 0; o < operands.size(); ++o) {
      to->views.emplace_back();
      if (operands[o].buffer < 0) continue;
      if (Status status = view(call, operands[o], i, to); !status.ok()) return status;
      // The result would depend on the order of threads.
      if (o + static_cast<size_t>(kSignatures[static_cast<size_t>(plan_.steps[i].op)].outputs) >= operands.size() &&
          overlaps_itself(to->views.back())) {
        return Status::error("operand %zu of step %zu, %s, shares memory with itself in a call with %" PRId64 " rows", o, i,
                             name_of(plan_.steps[i].op), call.rows);
      }
    }
  }
  to->rows = call.rows;
  to->kept = call.kept;
  return {};
}

// Fills in the last view.
Status PlanMemory::view(const PlanCall& call, const Operand& operand, size_t step, PreparedViews* to) const {
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
  const BufferKind kind = plan_.buffers[at].kind;
  const int64_t end = fits && view.shape.numel() > 0 ? (most + 1) * bytes : 0;
  if (end == 0) offset = 0;
  if (kind == BufferKind::input || kind == BufferKind::output) {
    memory.bytes = std::max(memory.bytes, end);  // compared with the size of each call's memory
  } else {
    fits = fits && end <= memory.bytes;
  }
  if (!fits) {
    return Status::error("step %zu, %s, reads or writes beyond buffer %zu of %" PRId64 " bytes in a call with %" PRId64
                         " rows", step, name_of(plan_.steps[step].op), at, memory.bytes, call.rows);
  }
  if (kind == BufferKind::input || kind == BufferKind::output) to->moving.push_back({to->views.size() - 1, at, offset * bytes});
  else view.data = static_cast<char*>(memory.data) + offset * bytes;
  return {};
}

Status PlanMemory::prepare(const PlanCall& call, PreparedViews** views) {
  PreparedViews* chosen = &prepared_[0];
  for (PreparedViews& each : prepared_) {
    if (each.rows == call.rows && each.kept == call.kept) {
      chosen = &each;
      break;
    }
    if (each.used < chosen->used) chosen = &each;
  }
  if (chosen->rows != call.rows || chosen->kept != call.kept) {
    if (Status status = place(call, chosen); !status.ok()) return status;
  }
  chosen->used = ++calls_;
  for (size_t i = 0; i < plan_.buffers.size(); ++i) {
    const Buffer& buffer = plan_.buffers[i];
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
  for (const auto& [view, buffer, offset] : chosen->moving) {
    chosen->views[view].data = static_cast<char*>(chosen->memory[buffer].data) + offset;
  }
  *views = chosen;
  return {};
}

}  // namespace lowbit
