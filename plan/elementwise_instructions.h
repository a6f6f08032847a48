// The instructions of an elementwise computation: how they are checked, and how they run on registers of values.
#pragma once

#include <algorithm>
#include <cmath>

#include "../kernels/numeric.h"
#include "number_checks.h"
#include "numbers.h"
#include "real_functions.h"

namespace lowbit {
namespace {

constexpr int64_t kBlock = 64;          // values in a register
constexpr int64_t kMostRegisters = 40;  // inputs and results of a computation

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

// How many operands an operator reads.
int arity(Elementwise op) {
  if (op == Elementwise::select) return 3;
  const bool two = (op >= Elementwise::add && op <= Elementwise::maximum) || is_comparison(op) ||
                   op == Elementwise::logical_and || op == Elementwise::logical_or;
  return two ? 2 : 1;
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
}  // namespace lowbit
