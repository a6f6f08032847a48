// Plans for tests, and their bytes. python/lowbit/plan/plan_file.py writes the same format.
#pragma once

#include <string>
#include <vector>

#include "../../../plan/plan.h"

namespace lowbit::test {

// The bytes and their checksum.
inline std::string with_checksum(std::string bytes) {
  const uint32_t sum = checksum(bytes.data(), bytes.size());
  return bytes.append(reinterpret_cast<const char*>(&sum), sizeof sum);
}

class PlanWriter {
 public:
  std::string bytes = "lowbit plan\n";

  void number(int64_t value) {
    uint64_t code = static_cast<uint64_t>(value) << 1 ^ static_cast<uint64_t>(value >> 63);
    for (; code >= 0x80; code >>= 7) bytes += static_cast<char>(code | 0x80);
    bytes += static_cast<char>(code);
  }
  void numbers(std::initializer_list<int64_t> values) {
    for (const int64_t value : values) number(value);
  }
  void extent(const Extent& extent) { numbers({extent.constant, extent.per_row, extent.per_kept}); }
  void text(const std::string& value) {
    number(static_cast<int64_t>(value.size()));
    bytes += value;
  }
};

inline std::string bytes_of(const Plan& plan) {
  PlanWriter to;
  to.numbers({1, static_cast<int64_t>(plan.about.size())});
  for (const auto& [name, values] : plan.about) {
    to.text(name);
    to.number(static_cast<int64_t>(values.size()));
    for (const int64_t value : values) to.number(value);
  }
  to.number(static_cast<int64_t>(plan.buffers.size()));
  for (const Buffer& buffer : plan.buffers) {
    to.number(static_cast<int64_t>(buffer.kind));
    to.extent(buffer.bytes);
    to.numbers({buffer.index, buffer.slot});
    to.text(buffer.name);
    to.text({buffer.content.begin(), buffer.content.end()});
    to.text(buffer.file);
    to.numbers({buffer.offset, buffer.checksum, static_cast<int64_t>(buffer.shape.size())});
    for (const int64_t size : buffer.shape) to.number(size);
    to.number(static_cast<int64_t>(buffer.type));
  }
  to.number(static_cast<int64_t>(plan.steps.size()));
  for (const PlanStep& step : plan.steps) {
    to.numbers({static_cast<int64_t>(step.op), static_cast<int64_t>(step.operands.size())});
    for (const Operand& operand : step.operands) {
      to.number(operand.buffer);
      if (operand.buffer < 0) continue;
      to.numbers({static_cast<int64_t>(operand.type), operand.ndim});
      to.extent(operand.offset);
      for (int d = 0; d < operand.ndim; ++d) {
        to.extent(operand.size[d]);
        to.extent(operand.stride[d]);
      }
    }
    to.number(static_cast<int64_t>(step.integers.size()));
    for (const int64_t integer : step.integers) to.number(integer);
    to.number(static_cast<int64_t>(step.numbers.size()));
    for (const double number : step.numbers) to.bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
  }
  return with_checksum(to.bytes);
}

inline constexpr Extent kRows{0, 1, 0}, kKept{0, 0, 1};

inline Extent times(const Extent& extent, int64_t factor) {
  return {extent.constant * factor, extent.per_row * factor, extent.per_kept * factor};
}

// A contiguous operand, of which only the first size may depend on the call.
inline Operand operand(int64_t buffer, ElementType type, const std::vector<Extent>& sizes) {
  Operand result;
  result.buffer = buffer;
  result.type = type;
  result.ndim = static_cast<int>(sizes.size());
  Extent stride{1};
  for (int d = result.ndim - 1; d >= 0; --d) {
    result.size[d] = sizes[static_cast<size_t>(d)];
    result.stride[d] = stride;
    stride = times(stride, result.size[d].constant);
  }
  return result;
}

inline Operand no_operand() { return {}; }

inline Buffer buffer(BufferKind kind, const Extent& bytes, int64_t index = 0, const std::string& name = "") {
  Buffer result;
  result.kind = kind;
  result.bytes = bytes;
  result.index = index;
  result.name = name;
  return result;
}

inline Buffer floats(const std::vector<float>& values) {
  Buffer result = buffer(BufferKind::constant, {static_cast<int64_t>(4 * values.size())});
  const char* const bytes = reinterpret_cast<const char*>(values.data());
  result.content.assign(bytes, bytes + 4 * values.size());
  return result;
}

// softmax(-(x @ w.T + bias)) of the rows that input 1 names. Input 0: [rows, 8] floats; output 0: [kept, 6].
inline Plan small_plan() {
  constexpr ElementType f32 = ElementType::f32;
  Plan plan;
  plan.buffers = {buffer(BufferKind::input, {}, 0),
                  buffer(BufferKind::weight, {192}, 0, "w"),
                  floats({0.5f, -1.0f, 2.0f, 0.0f, 1.5f, -0.25f}),
                  buffer(BufferKind::temporary, times(kRows, 24)),
                  buffer(BufferKind::temporary, times(kRows, 24)),
                  buffer(BufferKind::temporary, times(kRows, 24)),
                  buffer(BufferKind::input, {}, 1),
                  buffer(BufferKind::output, {}, 0)};
  const auto rows_of_6 = [](int64_t at) { return operand(at, f32, {kRows, {6}}); };
  plan.steps = {
      {Opcode::float_linear, {operand(0, f32, {kRows, {8}}), operand(1, f32, {{6}, {8}}), operand(2, f32, {{6}}), rows_of_6(3)},
       {}, {}},
      {Opcode::compute, {rows_of_6(3), rows_of_6(4)},
       {static_cast<int64_t>(Elementwise::mul), 0, -1, 0, static_cast<int64_t>(f32)}, {-1.0}},
      {Opcode::softmax, {rows_of_6(4), rows_of_6(5)}, {}, {}},
      {Opcode::take, {rows_of_6(5), operand(6, ElementType::i64, {kKept}), operand(7, f32, {kKept, {6}})}, {}, {}}};
  return plan;
}

// A layer of attention [1, heads, rows, 16] over caches, and a short convolution with its state.
inline Plan plan_with_caches() {
  constexpr ElementType f32 = ElementType::f32;
  Plan plan;
  plan.buffers = {buffer(BufferKind::input, {}, 0),      buffer(BufferKind::cache, {}, 0), buffer(BufferKind::cache, {}, 0),
                  buffer(BufferKind::cache, {}, 1),      floats(std::vector<float>(96, 0.5f)),
                  buffer(BufferKind::temporary, times(kRows, 128)), buffer(BufferKind::output, {}, 0)};
  plan.buffers[1].slot = kKeys;
  plan.buffers[2].slot = kValues;
  plan.buffers[3].slot = kFirstState;
  Operand q = operand(0, f32, {{1}, kRows, {2}, {16}});  // [1, rows, 2, 16] as [1, 2, rows, 16]
  std::swap(q.size[1], q.size[2]);
  std::swap(q.stride[1], q.stride[2]);
  plan.steps = {{Opcode::attention, {q, q, q, no_operand(), operand(5, f32, {{1}, kRows, {2}, {16}})}, {0, 0}, {0.25, 0.0}},
                {Opcode::short_conv,
                 {operand(5, f32, {{1}, kRows, {32}}), operand(4, f32, {{3}, {32}}), no_operand(),
                  operand(6, f32, {{1}, kRows, {32}})},
                 {1, kFirstState, 1}, {}}};
  return plan;
}

}  // namespace lowbit::test
