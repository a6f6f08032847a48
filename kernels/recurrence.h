// Layers with a state of fixed size: linear attention (the gated delta rule, Mamba-2's scan, retention) and short causal
// convolutions. Results have the same bits for every kernel and for any split of a text into calls.
#pragma once

#include "ukernel.h"

namespace lowbit {

// One head of linear attention over consecutive tokens. With S the state, [width, value_width], for each token:
//   S   = diag(d) S                      d = exp2(log2(e) * decay), one number or one per row of S
//   u   = beta * (v - k S)               without beta: u = v
//   S   = S + k^T u
//   out = scale * q S
// Computed in float32, each sum as one chain of fma in the order of the rows i of S, from 0, with q' = q * scale:
//   r[j] = sum of fma(k[i] * d[i], S[i][j]);  u[j] = beta * (v[j] - r[j])
//   S[i][j] = fma(k[i], u[j], d[i] * S[i][j]);  out[j] = sum of fma(q'[i], S[i][j])
// With norm_epsilon, q and k are first multiplied by 1 / sqrt(sum of squares + norm_epsilon). That sum has 16 lanes, element i
// in lane i % 16, folded as in attention.
struct LinearAttentionArgs {
  const void *q, *k, *v;           // of `dtype`; token 0
  int64_t q_step, k_step, v_step;  // elements from one token to the next; the numbers of a token are consecutive
  const float *decay, *beta;       // beta: null without the delta rule
  int64_t decay_step, beta_step;
  bool decay_per_row;  // decay has `width` numbers per token, not one
  bool fresh;          // the state is treated as zeros
  float* state;        // panels of 16 columns: [ceil(value_width / 16), width, 16]; changed
  void* out;           // [tokens, value_width] of `dtype`
  int64_t out_step;
  DType dtype;
  int64_t tokens, width, value_width;
  float scale, norm_epsilon;  // norm_epsilon 0: no norm
  float* scratch;             // linear_attention_scratch(width) floats, 64-byte aligned
};

inline constexpr int64_t kLinearAttentionTokens = 16;  // tokens whose q and k are converted at a time

constexpr int64_t linear_attention_scratch(int64_t width) {
  return kLinearAttentionTokens * 4 * ((width + 15) / 16 * 16) + 64;
}

// Channels of a short causal convolution: out[t] = bias + sum over taps j of fma(weight[j], x[t - taps + 1 + j]), in the order
// of j. If `silu`, out[t] = y / (1 + exp(-y)) of that sum y.
struct ShortConvArgs {
  const void* x;  // [tokens, channels]
  int64_t x_step;
  const void* weight;  // [taps, channels]
  int64_t weight_step;
  const void* bias;  // [channels], or null
  void* state;       // [taps - 1, channels]: the inputs before x, oldest first; updated to the latest inputs
  int64_t state_step;
  void* out;  // [tokens, channels]
  int64_t out_step;
  DType dtype;  // type of all arrays
  int64_t tokens, taps, channels;
  bool silu, fresh;
};

inline constexpr int64_t kMostTaps = 16;

struct RecurrenceKernel {
  const char* name;  // recurrence_<isa>
  IsaBits isa;
  void (*linear_attention)(const LinearAttentionArgs&);
  void (*short_conv)(const ShortConvArgs&);
};

}  // namespace lowbit
