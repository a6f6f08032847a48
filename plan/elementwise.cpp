#include <algorithm>
#include <cstring>

#include "../kernels/inline.h"
#include "../kernels/isa.h"
#include "../kernels/numeric.h"
#include "../ops/schedule.h"
#include "elementwise_instructions.h"
#include "number_checks.h"
#include "numbers.h"

namespace lowbit {
namespace {

constexpr int64_t kLongBlock = 1024;  // values in a block of a computation without registers
constexpr int64_t kMostInputs = 12;
constexpr int64_t kClaim = 4096;  // values that a thread computes at a time

// The positions of several tensors of one shape, in as few dimensions as possible.
struct Walk {
  int ndim = 0;
  int64_t size[kMaxDims], strides[kMostInputs + 1][kMaxDims];

  Walk(const TensorView* const* tensors, int count) {
    const Shape& shape = tensors[0]->shape;
    for (int d = 0; d < shape.ndim; ++d) {
      if (shape.size[d] == 1) continue;
      bool joins = ndim > 0;
      for (int t = 0; joins && t < count; ++t) joins = strides[t][ndim - 1] == tensors[t]->stride[d] * shape.size[d];
      if (joins) size[ndim - 1] *= shape.size[d];
      else size[ndim++] = shape.size[d];
      for (int t = 0; t < count; ++t) strides[t][ndim - 1] = tensors[t]->stride[d];
    }
    if (ndim == 0) {
      ndim = 1;
      size[0] = 1;
      for (int t = 0; t < count; ++t) strides[t][0] = 0;
    }
    // Blocks run along the last dimension. If it is short, like the taps of a convolution, it is swapped with the one before.
    constexpr int64_t kShort = 8;
    if (ndim > 1 && size[ndim - 1] < kShort && size[ndim - 2] > size[ndim - 1]) {
      std::swap(size[ndim - 1], size[ndim - 2]);
      for (int t = 0; t < count; ++t) std::swap(strides[t][ndim - 1], strides[t][ndim - 2]);
    }
  }

  int64_t inner() const { return size[ndim - 1]; }
  int64_t rows() const {
    int64_t count = 1;
    for (int d = 0; d + 1 < ndim; ++d) count *= size[d];
    return count;
  }
  int64_t offset(int tensor, int64_t row) const {
    int64_t result = 0;
    for (int d = ndim - 2; d >= 0; --d) {
      result += row % size[d] * strides[tensor][d];
      row /= size[d];
    }
    return result;
  }

  // Threads claim blocks. Calls work(each) for every claim; each(body) then calls body(offsets, values) for every block of the
  // claim, which has up to `Most` values. Offsets are in elements.
  template <int64_t Most, class Work>
  void claims(int tensors, const Parallel& parallel, const Work& work) const {
    const int64_t per_row = (inner() + Most - 1) / Most;
    parallel_1d(parallel, rows() * per_row, kClaim / Most, [&](int, int64_t begin, int64_t end) {
      work([&](const auto& body) {
        int64_t bases[kMostInputs + 1], offsets[kMostInputs + 1], based_on = -1;
        for (int64_t block = begin; block < end; ++block) {
          const int64_t row = block / per_row, first = block % per_row * Most;
          for (int t = 0; t < tensors; ++t) {
            if (row != based_on) bases[t] = offset(t, row);
            offsets[t] = bases[t] + first * strides[t][ndim - 1];
          }
          based_on = row;
          body(offsets, std::min(Most, inner() - first));
        }
      });
    });
  }
};

// Single operations, such as the sums and products between layers, which need no registers.
template <class Op>
LOWBIT_INLINE inline void write_pairs(const float* a, int64_t a_step, const float* b, int64_t b_step, int64_t count, float* to,
                                      const Op& op) {
  const float nan = float_from_bits(0x7fc00000);
  const auto value = [&](float x, float y) LOWBIT_INLINE {
    const float result = op(x, y);
    return result == result ? result : nan;
  };
  if (a_step == 1 && b_step == 1) {
    for (int64_t i = 0; i < count; ++i) to[i] = value(a[i], b[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = value(a[i * a_step], b[i * b_step]);
  }
}

LOWBIT_INLINE inline void write_pairs_of(Elementwise op, const float* a, int64_t a_step, const float* b, int64_t b_step,
                                         int64_t count, float* to) {
  switch (op) {
    case Elementwise::add:
      return write_pairs(a, a_step, b, b_step, count, to, [](float x, float y) LOWBIT_INLINE { return x + y; });
    case Elementwise::sub:
      return write_pairs(a, a_step, b, b_step, count, to, [](float x, float y) LOWBIT_INLINE { return x - y; });
    case Elementwise::mul:
      return write_pairs(a, a_step, b, b_step, count, to, [](float x, float y) LOWBIT_INLINE { return x * y; });
    default: return write_pairs(a, a_step, b, b_step, count, to, [](float x, float y) LOWBIT_INLINE { return x / y; });
  }
}

using WritePairs = void (*)(Elementwise op, const float* a, int64_t a_step, const float* b, int64_t b_step, int64_t count,
                            float* to);

void write_pairs_here(Elementwise op, const float* a, int64_t a_step, const float* b, int64_t b_step, int64_t count,
                      float* to) {
  write_pairs_of(op, a, a_step, b, b_step, count, to);
}

#ifdef __x86_64__
// The same with registers of 8 numbers. Single sums and products have the same bits on every CPU.
__attribute__((target("avx2"))) void write_pairs_avx2(Elementwise op, const float* a, int64_t a_step, const float* b,
                                                      int64_t b_step, int64_t count, float* to) {
  write_pairs_of(op, a, a_step, b, b_step, count, to);
}

WritePairs choose_write_pairs() { return (active_isa() & kAvx2) != 0 ? write_pairs_avx2 : write_pairs_here; }
#else
WritePairs choose_write_pairs() { return write_pairs_here; }
#endif

// An elementwise result may replace an input, but not overlap one in another way.
Status check_elementwise(const TensorView& x, const TensorView& out) {
  bool same = x.data == out.data && x.type == out.type;
  for (int d = 0; d < out.shape.ndim; ++d) same = same && (out.shape.size[d] == 1 || x.stride[d] == out.stride[d]);
  return same ? Status() : check_apart({{"out", &out}}, {{"x", &x}});
}

template <class T>
void copy_values(const TensorView& x, const TensorView& out, const Parallel& parallel) {
  const TensorView* const tensors[] = {&out, &x};
  const Walk walk(tensors, 2);
  const int64_t to_step = walk.strides[0][walk.ndim - 1], from_step = walk.strides[1][walk.ndim - 1];
  walk.claims<kLongBlock>(2, parallel, [&](const auto& each) {
    each([&](const int64_t* offsets, int64_t count) {
      T* const to = static_cast<T*>(out.data) + offsets[0];
      const T* const from = static_cast<const T*>(x.data) + offsets[1];
      if (to_step == 1 && from_step == 1) {
        std::memcpy(to, from, static_cast<size_t>(count) * sizeof(T));
      } else {
        for (int64_t i = 0; i < count; ++i) to[i * to_step] = from[i * from_step];
      }
    });
  });
}

}  // namespace

Status copy(const TensorView& x, const TensorView& out, const Parallel& parallel) {
  if (x.type != out.type) {
    const Instruction convert{static_cast<int64_t>(Elementwise::convert), 0, 0, 0, static_cast<int64_t>(out.type)};
    return compute(&x, 1, &convert, 1, nullptr, 0, out, parallel);
  }
  if (Status status = check_number("x", x); !status.ok()) return status;
  if (Status status = check_number("out", out); !status.ok()) return status;
  if (Status status = check_shape_is("out", out, x.shape); !status.ok()) return status;
  if (Status status = check_elementwise(x, out); !status.ok()) return status;
  if (x.shape.numel() == 0) return {};
  switch (element_bytes(x.type)) {
    case 8: copy_values<int64_t>(x, out, parallel); break;
    case 4: copy_values<int32_t>(x, out, parallel); break;
    case 2: copy_values<int16_t>(x, out, parallel); break;
    default: copy_values<int8_t>(x, out, parallel);
  }
  return {};
}

Status compute(const TensorView* x, int64_t count, const Instruction* instructions, int64_t instruction_count,
               const double* constants, int64_t constant_count, const TensorView& out, const Parallel& parallel) {
  if (count < 0 || count > kMostInputs || instruction_count < 1 || constant_count < 0 ||
      count + instruction_count + 2 * constant_count > kMostRegisters) {
    return Status::error("a computation has %" PRId64 " inputs, %" PRId64 " instructions and %" PRId64 " constants; expected "
                         "at most %" PRId64 " inputs and %" PRId64 " registers", count, instruction_count, constant_count,
                         kMostInputs, kMostRegisters);
  }
  ElementType types[kMostRegisters];
  const TensorView* tensors[kMostInputs + 1] = {&out};
  if (Status status = check_number("out", out); !status.ok()) return status;
  for (int64_t i = 0; i < count; ++i) {
    if (Status status = check_number("x", x[i]); !status.ok()) return status;
    if (Status status = check_shape_is("x", x[i], out.shape); !status.ok()) return status;
    if (Status status = check_elementwise(x[i], out); !status.ok()) return status;
    types[i] = x[i].type;
    tensors[i + 1] = &x[i];
  }
  Plain plain[kMostRegisters];
  if (Status status = check_instructions(instructions, instruction_count, constant_count, count, types, plain); !status.ok()) {
    return status;
  }
  const int64_t first_constant = count + instruction_count;
  if (types[first_constant - 1] != out.type) {
    return Status::error("a computation gives %s; expected %s", name_of(types[first_constant - 1]), name_of(out.type));
  }
  if (out.shape.numel() == 0) return {};
  const Walk walk(tensors, static_cast<int>(count) + 1);
  const Plain& only = plain[0];
  if (instruction_count == 1 && out.type == ElementType::f32 && only.from_floats && arity(only.op) == 2 &&
      only.op <= Elementwise::div && walk.strides[0][walk.ndim - 1] == 1) {
    // A constant is a number that is repeated.
    float values[2];
    const float* at[2];
    int64_t step[2];
    bool floats = true;
    const int64_t operands[2] = {instructions[0].a, instructions[0].b};
    for (int o = 0; o < 2; ++o) {
      const int64_t which = operands[o];
      values[o] = which < 0 ? static_cast<float>(constants[-1 - which]) : 0.0f;
      at[o] = which < 0 ? &values[o] : static_cast<const float*>(x[which].data);
      step[o] = which < 0 ? 0 : walk.strides[which + 1][walk.ndim - 1];
      floats = floats && (which < 0 || x[which].type == ElementType::f32);
    }
    if (floats) {
      const WritePairs write = choose_write_pairs();
      walk.claims<kLongBlock>(static_cast<int>(count) + 1, parallel, [&](const auto& each) {
        each([&](const int64_t* offsets, int64_t number) {
          const float* from[2];
          for (int o = 0; o < 2; ++o) from[o] = operands[o] < 0 ? at[o] : at[o] + offsets[operands[o] + 1];
          write(only.op, from[0], step[0], from[1], step[1], number, static_cast<float*>(out.data) + offsets[0]);
        });
      });
      return {};
    }
  }
  walk.claims<kBlock>(static_cast<int>(count) + 1, parallel, [&](const auto& each) {
    Register registers[kMostRegisters];
    Ready ready[kMostRegisters];
    for (int64_t c = 0; c < constant_count; ++c) {
      std::fill_n(registers[first_constant + 2 * c].f, kBlock, static_cast<float>(constants[c]));
      std::fill_n(registers[first_constant + 2 * c + 1].i, kBlock, to_integer(constants[c]));
    }
    for (int64_t i = 0; i < instruction_count; ++i) {
      const Plain& p = plain[i];
      ready[i] = {p.op, p.type, p.from_floats, &registers[p.operand[0]], &registers[p.operand[1]], &registers[p.operand[2]],
                  &registers[count + i]};
    }
    each([&](const int64_t* offsets, int64_t values) {
      for (int64_t i = 0; i < count; ++i) {
        load(x[i], offsets[i + 1], walk.strides[i + 1][walk.ndim - 1], values, &registers[i]);
      }
      for (int64_t i = 0; i < instruction_count; ++i) run(ready[i], values);
      store(out, offsets[0], walk.strides[0][walk.ndim - 1], values, registers[first_constant - 1]);
    });
  });
  return {};
}

Status count_up(double start, double step, const TensorView& out) {
  if (Status status = check_number("out", out); !status.ok()) return status;
  if (out.type != ElementType::i64 || out.shape.ndim != 1) {
    return Status::error("out is %s %s; expected int64 with one dimension", name_of(out.type), describe(out.shape).text);
  }
  uint64_t value = static_cast<uint64_t>(to_integer(start));  // wraps on overflow
  for (int64_t i = 0; i < out.shape.size[0]; ++i, value += static_cast<uint64_t>(to_integer(step))) {
    static_cast<int64_t*>(out.data)[i * out.stride[0]] = wrapped(value);
  }
  return {};
}

}  // namespace lowbit
