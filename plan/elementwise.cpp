#include <algorithm>
#include <cmath>
#include <cstring>

#include "../kernels/inline.h"
#include "../kernels/isa.h"
#include "../kernels/numeric.h"
#include "../ops/schedule.h"
#include "number_checks.h"
#include "numbers.h"
#include "real_functions.h"

namespace lowbit {
namespace {

constexpr int64_t kBlock = 64;          // values in a register
constexpr int64_t kLongBlock = 1024;    // values in a block of a computation without registers
constexpr int64_t kMostRegisters = 40;  // inputs and results of a computation
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

struct alignas(64) Register {
  union {
    float f[kBlock];
    int64_t i[kBlock];
  };
};

template <class T, class To>
void read(const void* data, int64_t offset, int64_t stride, int64_t count, To* to) {
  const T* const from = static_cast<const T*>(data) + offset;
  if (stride == 1) {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(from[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(from[i * stride]);
  }
}

void load(const TensorView& x, int64_t offset, int64_t stride, int64_t count, Register* to) {
  switch (x.type) {
    case ElementType::f32: return read<float>(x.data, offset, stride, count, to->f);
    case ElementType::i32: return read<int32_t>(x.data, offset, stride, count, to->i);
    case ElementType::i64: return read<int64_t>(x.data, offset, stride, count, to->i);
    case ElementType::boolean: return read<uint8_t>(x.data, offset, stride, count, to->i);
    default:
      for (int64_t i = 0; i < count; ++i) to->f[i] = load_as_f32(x.data, dtype_of(x.type), offset + i * stride);
  }
}

template <class T, class From>
void write(void* data, int64_t offset, int64_t stride, int64_t count, const From* from) {
  T* const to = static_cast<T*>(data) + offset;
  for (int64_t i = 0; i < count; ++i) to[i * stride] = static_cast<T>(from[i]);
}

void store(const TensorView& out, int64_t offset, int64_t stride, int64_t count, const Register& from) {
  switch (out.type) {
    case ElementType::f32: return write<float>(out.data, offset, stride, count, from.f);
    case ElementType::i32: return write<int32_t>(out.data, offset, stride, count, from.i);
    case ElementType::i64: return write<int64_t>(out.data, offset, stride, count, from.i);
    case ElementType::boolean: return write<uint8_t>(out.data, offset, stride, count, from.i);
    default:
      for (int64_t i = 0; i < count; ++i) store_from_f32(out.data, dtype_of(out.type), offset + i * stride, from.f[i]);
  }
}

int64_t to_integer(double value) {  // because C++ does not define the conversion of large numbers
  return value > -9e18 && value < 9e18 ? static_cast<int64_t>(value) : INT64_MIN;
}

template <class Op>
void each_float(const Register& a, const Register& b, int64_t count, Register* to, const Op& op) {
  for (int64_t i = 0; i < count; ++i) to->f[i] = op(a.f[i], b.f[i]);
}

template <class Op>
void each_integer(const Register& a, const Register& b, int64_t count, Register* to, const Op& op) {
  for (int64_t i = 0; i < count; ++i) to->i[i] = op(a.i[i], b.i[i]);
}

template <class Op>
void each_real(const Register& a, int64_t count, Register* to, const Op& op) {
  for (int64_t i = 0; i < count; ++i) to->f[i] = static_cast<float>(op(static_cast<double>(a.f[i])));
}

// Rounds a result to a smaller type; every NaN becomes the same NaN.
void round_to(ElementType type, int64_t count, Register* r) {
  for (int64_t i = 0; i < count; ++i) r->f[i] = r->f[i] == r->f[i] ? r->f[i] : float_from_bits(0x7fc00000);
  if (type == ElementType::bf16) {
    for (int64_t i = 0; i < count; ++i) r->f[i] = f32_from_bf16(bf16_from_f32(r->f[i]));
  } else if (type == ElementType::f16) {
    for (int64_t i = 0; i < count; ++i) r->f[i] = f32_from_f16(f16_from_f32(r->f[i]));
  }
}

void compute_floats(Elementwise op, const Register& a, const Register& b, int64_t count, Register* to) {
  switch (op) {
    case Elementwise::add: return each_float(a, b, count, to, [](float x, float y) { return x + y; });
    case Elementwise::sub: return each_float(a, b, count, to, [](float x, float y) { return x - y; });
    case Elementwise::mul: return each_float(a, b, count, to, [](float x, float y) { return x * y; });
    case Elementwise::div: return each_float(a, b, count, to, [](float x, float y) { return x / y; });
    // If an operand is NaN, so is the result.
    case Elementwise::minimum: return each_float(a, b, count, to, [](float x, float y) { return x < y || x != x ? x : y; });
    case Elementwise::maximum: return each_float(a, b, count, to, [](float x, float y) { return x > y || x != x ? x : y; });
    case Elementwise::neg: return each_float(a, a, count, to, [](float x, float) { return -x; });
    case Elementwise::abs: return each_float(a, a, count, to, [](float x, float) { return std::fabs(x); });
    case Elementwise::reciprocal: return each_float(a, a, count, to, [](float x, float) { return 1.0f / x; });
    case Elementwise::sqrt: return each_float(a, a, count, to, [](float x, float) { return std::sqrt(x); });
    case Elementwise::rsqrt: return each_float(a, a, count, to, [](float x, float) { return 1.0f / std::sqrt(x); });
    case Elementwise::floor: return each_float(a, a, count, to, [](float x, float) { return std::floor(x); });
    case Elementwise::exp: return each_real(a, count, to, [](double x) { return exp_of(x); });
    case Elementwise::log: return each_real(a, count, to, [](double x) { return log_of(x); });
    case Elementwise::log1p: return each_real(a, count, to, [](double x) { return log1p_of(x); });
    case Elementwise::expm1: return each_real(a, count, to, [](double x) { return expm1_of(x); });
    case Elementwise::tanh: return each_real(a, count, to, [](double x) { return tanh_of(x); });
    case Elementwise::sigmoid: return each_real(a, count, to, [](double x) { return sigmoid_of(x); });
    case Elementwise::softplus: return each_real(a, count, to, [](double x) { return softplus_of(x); });
    case Elementwise::sin: return each_real(a, count, to, [](double x) { return sine_of(x, 0); });
    case Elementwise::cos: return each_real(a, count, to, [](double x) { return sine_of(x, 1); });
    default: return;
  }
}

template <class T>
bool compares(Elementwise op, T x, T y) {
  switch (op) {
    case Elementwise::equal: return x == y;
    case Elementwise::not_equal: return x != y;
    case Elementwise::less: return x < y;
    case Elementwise::less_equal: return x <= y;
    case Elementwise::greater: return x > y;
    default: return x >= y;
  }
}

int64_t wrapped(uint64_t value) { return static_cast<int64_t>(value); }

void compute_integers(Elementwise op, ElementType type, const Register& a, const Register& b, int64_t count, Register* to) {
  const auto u = [](int64_t x) { return static_cast<uint64_t>(x); };  // wraps on overflow, as torch does
  switch (op) {
    case Elementwise::add: return each_integer(a, b, count, to, [&](int64_t x, int64_t y) { return wrapped(u(x) + u(y)); });
    case Elementwise::sub: return each_integer(a, b, count, to, [&](int64_t x, int64_t y) { return wrapped(u(x) - u(y)); });
    case Elementwise::mul: return each_integer(a, b, count, to, [&](int64_t x, int64_t y) { return wrapped(u(x) * u(y)); });
    case Elementwise::minimum: return each_integer(a, b, count, to, [](int64_t x, int64_t y) { return std::min(x, y); });
    case Elementwise::maximum: return each_integer(a, b, count, to, [](int64_t x, int64_t y) { return std::max(x, y); });
    case Elementwise::neg: return each_integer(a, a, count, to, [&](int64_t x, int64_t) { return wrapped(0 - u(x)); });
    case Elementwise::abs:
      return each_integer(a, a, count, to, [&](int64_t x, int64_t) { return wrapped(x < 0 ? 0 - u(x) : u(x)); });
    case Elementwise::logical_and:
      if (type == ElementType::boolean) {
        return each_integer(a, b, count, to, [](int64_t x, int64_t y) { return int64_t{x != 0 && y != 0}; });
      }
      return each_integer(a, b, count, to, [](int64_t x, int64_t y) { return x & y; });
    case Elementwise::logical_or: return each_integer(a, b, count, to, [](int64_t x, int64_t y) { return x | y; });
    case Elementwise::logical_not: return each_integer(a, a, count, to, [](int64_t x, int64_t) { return int64_t{x == 0}; });
    default: return;
  }
}

bool is_comparison(Elementwise op) { return op >= Elementwise::equal && op <= Elementwise::greater_equal; }

bool is_for_integers(Elementwise op) {
  return (op >= Elementwise::add && op <= Elementwise::abs && op != Elementwise::div) ||
         (op >= Elementwise::logical_and && op <= Elementwise::logical_not);
}

// A checked instruction: registers for a, b and c, where constants have registers of their own.
struct Ready {
  Elementwise op;
  ElementType type;
  bool from_floats;  // a, or for select b and c
  const Register *a, *b, *c;
  Register* to;
};

void run(const Ready& ready, int64_t count) {
  const bool floats = is_activation_type(ready.type);
  Register* const to = ready.to;
  if (is_comparison(ready.op)) {
    for (int64_t i = 0; i < count; ++i) {
      to->i[i] = ready.from_floats ? compares(ready.op, ready.a->f[i], ready.b->f[i])
                                   : compares(ready.op, ready.a->i[i], ready.b->i[i]);
    }
  } else if (ready.op == Elementwise::select) {
    for (int64_t i = 0; i < count; ++i) {
      if (floats) to->f[i] = ready.a->i[i] != 0 ? ready.b->f[i] : ready.c->f[i];
      else to->i[i] = ready.a->i[i] != 0 ? ready.b->i[i] : ready.c->i[i];
    }
  } else if (ready.op == Elementwise::convert) {
    for (int64_t i = 0; i < count; ++i) {
      if (floats) to->f[i] = ready.from_floats ? ready.a->f[i] : static_cast<float>(ready.a->i[i]);
      else if (ready.type == ElementType::boolean && ready.from_floats) to->i[i] = ready.a->f[i] != 0.0f;
      else to->i[i] = ready.from_floats ? to_integer(static_cast<double>(ready.a->f[i])) : ready.a->i[i];
    }
  } else if (floats) {
    compute_floats(ready.op, *ready.a, *ready.b, count, to);
  } else {
    compute_integers(ready.op, ready.type, *ready.a, *ready.b, count, to);
  }
  if (floats) {
    round_to(ready.type, count, to);
  } else if (ready.type == ElementType::i32) {
    for (int64_t i = 0; i < count; ++i) to->i[i] = static_cast<int32_t>(to->i[i]);
  } else if (ready.type == ElementType::boolean) {
    for (int64_t i = 0; i < count; ++i) to->i[i] = to->i[i] != 0;
  }
}

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

// How many operands an operator reads.
int arity(Elementwise op) {
  if (op == Elementwise::select) return 3;
  const bool two = (op >= Elementwise::add && op <= Elementwise::maximum) || is_comparison(op) ||
                   op == Elementwise::logical_and || op == Elementwise::logical_or;
  return two ? 2 : 1;
}

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

// A checked instruction; the registers of its operands.
struct Plain {
  Elementwise op;
  ElementType type;
  bool from_floats;
  int64_t operand[3];
};

// Checks instructions. Registers: `count` inputs, whose types are given, then the results. Each constant has a register of
// floats and one of integers after them.
Status check_instructions(const Instruction* instructions, int64_t instruction_count, int64_t constant_count, int64_t count,
                          ElementType* types, Plain* plain) {
  const int64_t first_constant = count + instruction_count;
  for (int64_t i = 0; i < instruction_count; ++i) {
    const Instruction& in = instructions[i];
    const int64_t most_type = static_cast<int64_t>(ElementType::boolean);
    if (in.op < 0 || in.op >= kElementwise || in.type < 0 || in.type > most_type ||
        !is_number(static_cast<ElementType>(in.type))) {
      return Status::error("instruction %" PRId64 " has operator %" PRId64 " and type %" PRId64 "; expected operators below %d "
                           "and a type of numbers", i, in.op, in.type, kElementwise);
    }
    Plain& p = plain[i];
    p.op = static_cast<Elementwise>(in.op);
    p.type = types[count + i] = static_cast<ElementType>(in.type);
    const bool makes_floats = is_activation_type(p.type);
    const int64_t operands[3] = {in.a, in.b, in.c};
    const int used = arity(p.op);
    // The kind of operands: floats or integers, the same for all but the condition of select.
    int kind = -1;
    for (int o = 0; o < used; ++o) {
      const int64_t at = operands[o];
      if (at >= count + i || at < -constant_count) {
        return Status::error("instruction %" PRId64 " reads register %" PRId64 "; expected one of %" PRId64 " constants or %"
                             PRId64 " earlier registers", i, at, constant_count, count + i);
      }
      if (at < 0) continue;
      const bool floats = is_activation_type(types[at]);
      if (p.op == Elementwise::select && o == 0) {
        if (floats) return Status::error("instruction %" PRId64 " selects by floats; expected integers or bool", i);
        continue;
      }
      if (kind >= 0 && kind != static_cast<int>(floats)) {
        return Status::error("instruction %" PRId64 " mixes floats and integers; expected one kind", i);
      }
      kind = static_cast<int>(floats);
    }
    if (kind < 0) kind = static_cast<int>(makes_floats);
    p.from_floats = kind == 1;
    const bool fits = p.op == Elementwise::convert ? true
                      : is_comparison(p.op)        ? p.type == ElementType::boolean
                      : p.from_floats != makes_floats ? false
                      : p.op == Elementwise::select   ? true
                      : makes_floats ? p.op < Elementwise::equal || p.op >= Elementwise::log1p
                                     : is_for_integers(p.op);
    if (!fits) {
      return Status::error("instruction %" PRId64 " has operator %" PRId64 ", which has no result of %s from these operands", i,
                           in.op, name_of(p.type));
    }
    for (int o = 0; o < 3; ++o) {
      const int64_t at = o < used ? operands[o] : operands[0];
      const bool condition = p.op == Elementwise::select && o == 0;
      p.operand[o] = at >= 0 ? at : first_constant + 2 * (-1 - at) + (p.from_floats && !condition ? 0 : 1);
    }
  }
  return {};
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
