// The bodies of every recurrence_<isa>, on a vector V of 16 floats (../vector/). Formulas: ../recurrence.h.
//
// The columns of a state do not depend on each other: a kernel takes some panels of 16 columns, which stay in the first-level
// cache, through all tokens. So prompts need no chunked algorithm, and a prompt gives the same bits as its tokens one by one.
#pragma once

#include <cmath>

#include "../recurrence.h"
#include "../vector/vector.h"

namespace lowbit {
namespace {

// Loads one token's q or k in float32, normalized, times `scale`.
template <class V>
void load_row(const void* from, DType dtype, int64_t width, float norm_epsilon, float scale, float* to) {
  V squares = V::broadcast(0.0f);
  for (int64_t i = 0; i < width; i += kLanes) {
    const V x = load_some<V>(element(from, dtype, i), dtype, width - i);
    squares = V::fma(x, x, squares);
    V::store(to + i, x);
  }
  float norm = 1.0f;
  if (norm_epsilon != 0.0f) {
    norm = 1.0f / std::sqrt(fold(squares, V::add) + norm_epsilon);
  }
  for (int64_t i = 0; i < width; i += kLanes) {
    V::store(to + i, V::mul(V::mul(V::load(to + i), V::broadcast(norm)), V::broadcast(scale)));
  }
}

// exp of numbers up to 0; a larger one counts as 0.
template <class V>
V decay_of(V log_decay) {
  const V zero = V::broadcast(0.0f);
  const V x = V::mul(log_decay, V::broadcast(0x1.715476p+0f));
  return exp2_of(V::zero_below(zero, x, x));
}

// The operands of a tile of tokens.
struct LinearAttentionTile {
  const float *q, *k, *kd, *d;  // [tokens, padded width]; d: [tokens] with one decay per token
  int64_t padded;
};

template <class V, int Panels, bool Delta, bool PerRow>
void linear_attention_token(const LinearAttentionArgs& args, const LinearAttentionTile& tile, int64_t token, int64_t panel,
                            int64_t at) {
  const int64_t width = args.width, step = width * kLanes;
  const float* const q = tile.q + at * tile.padded;
  const float* const k = tile.k + at * tile.padded;
  const float* const d = tile.d + (PerRow ? at * tile.padded : at);
  float* const state = args.state + panel * step;
  V u[Panels], out[Panels];
  for (int p = 0; p < Panels; ++p) {
    const int64_t column = (panel + p) * kLanes;
    u[p] = load_some<V>(element(args.v, args.dtype, token * args.v_step + column), args.dtype, args.value_width - column);
    out[p] = V::broadcast(0.0f);
  }
  if constexpr (Delta) {
    const float* const kd = tile.kd + at * tile.padded;
    V sums[Panels];
    for (int p = 0; p < Panels; ++p) sums[p] = V::broadcast(0.0f);
    for (int64_t i = 0; i < width; ++i) {
      const V scalar = V::broadcast(kd[i]);
      for (int p = 0; p < Panels; ++p) sums[p] = V::fma(V::load(state + p * step + i * kLanes), scalar, sums[p]);
    }
    const V beta = V::broadcast(args.beta[token * args.beta_step]);
    for (int p = 0; p < Panels; ++p) u[p] = V::mul(beta, V::sub(u[p], sums[p]));
  }
  V decay = V::broadcast(d[0]);
  for (int64_t i = 0; i < width; ++i) {
    const V k_i = V::broadcast(k[i]), q_i = V::broadcast(q[i]);
    if constexpr (PerRow) decay = V::broadcast(d[i]);
    // At many widths panels are a multiple of 4 KiB apart, and Intel's CPUs delay a load after a store whose address has the
    // same last 12 bits. So all loads come first.
    V next[Panels];
    for (int p = 0; p < Panels; ++p) next[p] = V::load(state + p * step + i * kLanes);
    for (int p = 0; p < Panels; ++p) {
      next[p] = V::fma(k_i, u[p], V::mul(decay, next[p]));
      V::store(state + p * step + i * kLanes, next[p]);
      out[p] = V::fma(q_i, next[p], out[p]);
    }
  }
  for (int p = 0; p < Panels; ++p) {
    const int64_t column = (panel + p) * kLanes;
    store_some<V>(const_cast<char*>(element(args.out, args.dtype, token * args.out_step + column)), args.dtype,
                  args.value_width - column, V::same_nan(out[p]));
  }
}

// Panels from `panel` on, up to Panels at a time, through all tokens. Each sum is one chain of fma. AVX-512 needs four panels
// to hide the latency of fma, smaller registers two.
template <class V, int Panels, bool Delta, bool PerRow>
void linear_attention_panels(const LinearAttentionArgs& args, const LinearAttentionTile& tile, int64_t begin, int64_t end,
                             int64_t panel) {
  const int64_t panels = (args.value_width + kLanes - 1) / kLanes;
  for (; panel + Panels <= panels; panel += Panels) {
    for (int64_t t = begin; t < end; ++t) linear_attention_token<V, Panels, Delta, PerRow>(args, tile, t, panel, t - begin);
  }
  if constexpr (Panels > 1) linear_attention_panels<V, Panels / 2, Delta, PerRow>(args, tile, begin, end, panel);
}

template <class V, bool Delta, bool PerRow>
void linear_attention_tile(const LinearAttentionArgs& args, const LinearAttentionTile& tile, int64_t begin, int64_t end) {
  linear_attention_panels<V, V::kSums == 1 ? 1 : V::kSums == 4 ? 2 : 4, Delta, PerRow>(args, tile, begin, end, 0);
}

template <class V>
void linear_attention(const LinearAttentionArgs& args) {
  const int64_t width = args.width, padded = (width + kLanes - 1) / kLanes * kLanes;
  if (args.fresh) {
    const int64_t numbers = (args.value_width + kLanes - 1) / kLanes * kLanes * width;
    for (int64_t i = 0; i < numbers; ++i) args.state[i] = 0.0f;
  }
  float* const q = args.scratch;
  float* const k = q + kLinearAttentionTokens * padded;
  float* const kd = k + kLinearAttentionTokens * padded;
  float* const d = kd + kLinearAttentionTokens * padded;
  for (int64_t begin = 0; begin < args.tokens; begin += kLinearAttentionTokens) {
    const int64_t remaining = args.tokens - begin;
    const int64_t count = remaining < kLinearAttentionTokens ? remaining : kLinearAttentionTokens;
    for (int64_t at = 0; at < count; ++at) {
      const int64_t token = begin + at, row = at * padded;
      load_row<V>(element(args.q, args.dtype, token * args.q_step), args.dtype, width, args.norm_epsilon, args.scale, q + row);
      load_row<V>(element(args.k, args.dtype, token * args.k_step), args.dtype, width, args.norm_epsilon, 1.0f, k + row);
      const float* const decay = args.decay + token * args.decay_step;
      if (args.decay_per_row) {
        for (int64_t i = 0; i < width; i += kLanes) {
          const V x = decay_of(load_some<V>(decay + i, DType::f32, width - i));
          V::store(d + row + i, x);
          V::store(kd + row + i, V::mul(V::load(k + row + i), x));
        }
      } else {
        const V x = decay_of(V::broadcast(*decay));
        alignas(64) float lanes[kLanes];
        V::store(lanes, x);
        d[at] = lanes[0];
        for (int64_t i = 0; i < width; i += kLanes) V::store(kd + row + i, V::mul(V::load(k + row + i), x));
      }
    }
    const LinearAttentionTile tile{q, k, kd, d, padded};
    const int64_t end = begin + count;
    if (args.beta != nullptr) {
      if (args.decay_per_row) linear_attention_tile<V, true, true>(args, tile, begin, end);
      else linear_attention_tile<V, true, false>(args, tile, begin, end);
    } else {
      if (args.decay_per_row) linear_attention_tile<V, false, true>(args, tile, begin, end);
      else linear_attention_tile<V, false, false>(args, tile, begin, end);
    }
  }
}

template <class V>
void short_conv(const ShortConvArgs& args) {
  const DType dtype = args.dtype;
  const int64_t before = args.taps - 1;
  for (int64_t channel = 0; channel < args.channels; channel += kLanes) {
    const int64_t count = args.channels - channel;
    const auto at = [&](const void* base, int64_t index) { return element(base, dtype, index + channel); };
    V weights[kMostTaps], inputs[kMostTaps];  // inputs: those of the last `taps` tokens, the oldest first
    for (int64_t j = 0; j < args.taps; ++j) {
      weights[j] = load_some<V>(at(args.weight, j * args.weight_step), dtype, count);
    }
    for (int64_t j = 0; j < before; ++j) {
      inputs[j] = args.fresh ? V::broadcast(0.0f) : load_some<V>(at(args.state, j * args.state_step), dtype, count);
    }
    const V bias = args.bias == nullptr ? V::broadcast(0.0f) : load_some<V>(at(args.bias, 0), dtype, count);
    for (int64_t t = 0; t < args.tokens; ++t) {
      inputs[before] = load_some<V>(at(args.x, t * args.x_step), dtype, count);
      V y = bias;
      for (int64_t j = 0; j < args.taps; ++j) y = V::fma(weights[j], inputs[j], y);
      if (args.silu) y = times_sigmoid(y, y);
      store_some<V>(const_cast<char*>(at(args.out, t * args.out_step)), dtype, count, V::same_nan(y));
      for (int64_t j = 0; j < before; ++j) inputs[j] = inputs[j + 1];
    }
    for (int64_t j = 0; j < before; ++j) {
      store_some<V>(const_cast<char*>(at(args.state, j * args.state_step)), dtype, count, inputs[j]);
    }
  }
}

}  // namespace
}  // namespace lowbit
