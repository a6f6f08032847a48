// The computations between the linear layers of a model: activation functions and norms. Also the conversions of a linear
// layer's inputs and outputs before and after the kernels. Every kernel gives the same bits.
#pragma once

#include "ukernel.h"

namespace lowbit {

// out = f(x), or f(x) * gate, rounded once. All computed in float32:
//   gelu        x * Phi(x): Phi(x) = 1/2 + c P(c^2) / Q(c^2), where c is x clamped to +-5.6, within 2e-7; 0 below -5.6
//   gelu_tanh   x * s(1.5957691 (x + 0.044715 x^3))
//   gelu_quick  x * s(1.702 x)
//   silu        x * s(x)
// where s(z) = 1 / (1 + exp(-z)), computed with exp of numbers up to 0 only.
enum class Activation : uint8_t { gelu, gelu_tanh, gelu_quick, silu };
inline constexpr int kActivations = 4;

struct ActivateArgs {
  const void* x;     // row 0, [rows, width] of `dtype`; the numbers of a row are consecutive
  const void* gate;  // like x, or null
  void* out;
  int64_t x_step, gate_step, out_step;  // elements from one row to the next
  int64_t rows, width;
  DType dtype;
  Activation activation;
};

// out = x * f * (weight_offset + weight), with f = 1 / sqrt(mean of squares + epsilon). The sum has 16 lanes, element i in lane
// i % 16, folded as in attention. The weights of Gemma are stored minus 1.
struct RmsNormArgs {
  const void* x;       // row 0, [rows, width]; all arrays have the type `dtype`
  const void* weight;  // [width], or null: out = x * f
  void* out;
  int64_t x_step, out_step;  // elements from one row to the next
  int64_t rows, width;
  DType dtype;
  float epsilon, weight_offset;
};

// out = (x - m) * f * weight + bias, with m the mean and f = 1 / sqrt(mean of (x - m)^2 + epsilon). Sums as in RmsNormArgs.
// The product with the weight and the bias are one fma.
struct LayerNormArgs {
  const void* x;       // row 0, [rows, width]; all arrays have the type `dtype`
  const void* weight;  // [width], or null: 1
  const void* bias;    // [width], or null: 0
  void* out;
  int64_t x_step, out_step;  // elements from one row to the next
  int64_t rows, width;
  DType dtype;
  float epsilon;
};

// Rotary position embedding of the heads of one position. The first `rotary` numbers of a head are pairs (a, b), which become
//   a' = a * cos(a) - b * sin(a)
//   b' = b * cos(b) + a * sin(b)
// and the others are copied. Each product and each sum is rounded to `dtype`, or with `round_once` only the result is; there is
// no fma. So the bits are those of separate operators.
//   halves       a is element i and b element i + rotary / 2; their factors have the same indices (Llama, GPT-NeoX)
//   adjacent     a is element 2 i and b element 2 i + 1; their factors have the same indices (Cohere)
//   adjacent_half_table  as adjacent, but both factors have index i, so only the first half of a table is read (GLM)
//   adjacent_to_halves   as adjacent_half_table, but a' is element i of the result and b' element i + rotary / 2 (DeepSeek)
enum class RotaryLayout : uint8_t { halves, adjacent, adjacent_half_table, adjacent_to_halves };
inline constexpr int kRotaryLayouts = 4;

struct RotaryArgs {
  const void* x;  // head 0, [heads, width] of `dtype`; the numbers of a head are consecutive
  const void* cos;  // [rotary] of `table_dtype`
  const void* sin;  // likewise
  void* out;        // head 0
  int64_t x_step, out_step;  // elements from one head to the next
  int64_t heads, width, rotary;  // rotary is even, from 2 to width
  DType dtype, table_dtype;      // table_dtype is `dtype`, or float32 with `round_once`
  RotaryLayout layout;
  bool round_once;
};

// One row: rotate_inputs() of ukernel.h, or with `back` its inverse for weights.
struct RotateArgs {
  const void* x;  // [width] of `dtype`; may equal `out` if `dtype` is float32
  float* out;     // [width]
  int64_t width, block;  // a power of two from 16 to 128, which divides the width
  DType dtype;
  bool back;
};

// Plane 2 of an activation row, before it is quantized: out = fma(-t, a, x), with a and t of plane 1.
struct ResidualArgs {
  const void* x;        // [k] of `dtype`
  const int8_t* a;      // [k], readable up to the next multiple of 16
  const float* scales;  // t, one per segment
  float* out;           // [k]
  int64_t k, group_inputs;
  DType dtype;
};

// out = y1 + (y2 - bias): joins the results of the two planes of each row. Both contain the bias, which counts once.
struct AddPlanesArgs {
  const float* planes;    // y1 of row i in row 2i, y2 in row 2i + 1
  const uint8_t* biases;  // 16 float32 of the first 16 columns, unaligned
  void* out;              // row 0, of `dtype`
  int64_t planes_step, out_step;  // elements from one row to the next
  int64_t biases_step;    // bytes from the biases of 16 columns to those of the next
  int64_t rows, width;
  DType dtype;
};

// out[r][c] = the sum of x[r][i] * weights[c][i] in 16 lanes: element i is added to lane i % 16 by fma, and the lanes are
// folded as in attention. The last 16 elements of a row are padded with zeros.
struct FloatProductsArgs {
  const float* x;        // [rows, k]
  const float* weights;  // [columns, k]
  float* out;            // [rows, columns]
  int64_t x_step, weights_step, out_step;  // elements from one row to the next
  int64_t rows, columns, k;
};

struct ElementwiseKernel {
  const char* name;  // elementwise_<isa>
  IsaBits isa;
  void (*activate)(const ActivateArgs&);
  void (*rms_norm)(const RmsNormArgs&);
  void (*layer_norm)(const LayerNormArgs&);
  void (*rotary)(const RotaryArgs&);
  void (*rotate)(const RotateArgs&);
  void (*residual)(const ResidualArgs&);
  void (*add_planes)(const AddPlanesArgs&);
  void (*float_products)(const FloatProductsArgs&);
};

}  // namespace lowbit
