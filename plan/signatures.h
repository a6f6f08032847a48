// How many operands and parameters each operator of a plan has.
#pragma once

#include "../ops/operators.h"
#include "plan.h"

namespace lowbit {

// -1: any number.
struct Signature {
  const char* name;
  int least_operands, most_operands, outputs, integers, numbers;
};
inline constexpr Signature kSignatures[kOpcodes] = {
    {"linear", 3, 3, 1, 1, 0},                  {"linears", 3, 2 + kMostMatrices, 1, -1, 0},{"linear_experts", 4, 4, 1, 1, 0},
    {"embedding", 3, 3, 1, 1, 0},               {"attention", 5, 5, 1, 2, 2},               {"masked_attention", 5, 5, 1, 0, 2},
    {"fixed_attention", 5, 5, 1, 4, 1},         {"linear_attention", 6, 6, 1, 2, 2},        {"short_conv", 4, 4, 1, 3, 0},
    {"activate", 3, 3, 1, 1, 0},                {"rms_norm", 3, 3, 1, 0, 2},                {"layer_norm", 4, 4, 1, 0, 1},
    {"rotary", 6, 6, 2, 3, 0},                  {"copy", 2, 2, 1, 0, 0},                    {"compute", 1, 13, 1, -1, -1},
    {"float_linear", 4, 4, 1, 0, 0},            {"sum", 2, 2, 1, 0, 0},                     {"softmax", 2, 2, 1, 0, 0},
    {"top", 3, 3, 2, 0, 0},                     {"gather", 3, 3, 1, 0, 0},                  {"take", 3, 3, 1, 0, 0},
    {"scatter", 2, 2, 1, 0, 1},                 {"count_up", 1, 1, 1, 0, 2},                {"pool", 3, 3, 1, 1, 0}};

// The operands that may be missing.
inline bool is_optional(Opcode op, size_t operand) {
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

}  // namespace lowbit
