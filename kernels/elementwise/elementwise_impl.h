// The bodies of every elementwise_<isa>, on a vector V of 16 floats (../vector/). Formulas: ../elementwise.h.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "../elementwise.h"
#include "../vector/vector.h"

namespace lowbit {
namespace {

// x * Phi(x), with Phi of the normal distribution. The coefficients are a minimax fit: |Phi| is off by less than 1e-8 before
// rounding.
template <class V>
LOWBIT_INLINE inline V gelu_of(V x) {
  constexpr float kMost = 5.6f;
  const V zero = V::broadcast(0.0f), least = V::broadcast(-kMost);
  const V above = V::max(x, least);
  const V c = V::sub(zero, V::max(V::sub(zero, above), least)), t = V::mul(c, c);
  V p = V::broadcast(0x1.7c6fb8p-26f), q = V::broadcast(0x1.3cca7ep-20f);
  p = V::fma(p, t, V::broadcast(0x1.aa8a4ep-18f));
  q = V::fma(q, t, V::broadcast(0x1.3af544p-14f));
  p = V::fma(p, t, V::broadcast(0x1.6c8a62p-13f));
  q = V::fma(q, t, V::broadcast(0x1.f570dep-10f));
  p = V::fma(p, t, V::broadcast(0x1.347c38p-8f));
  q = V::fma(q, t, V::broadcast(0x1.da2298p-6f));
  p = V::fma(p, t, V::broadcast(0x1.1997eap-5f));
  q = V::fma(q, t, V::broadcast(0x1.02e59ep-2f));
  p = V::fma(p, t, V::broadcast(0x1.98845p-2f));
  q = V::fma(q, t, V::broadcast(1.0f));
  return V::zero_below(x, least, V::mul(x, V::fma(c, V::div(p, q), V::broadcast(0.5f))));
}

template <class V, Activation A>
LOWBIT_INLINE inline V activation_of(V x) {
  if constexpr (A == Activation::gelu) {
    return gelu_of(x);
  } else if constexpr (A == Activation::gelu_tanh) {
    // 2 sqrt(2 / pi), alone and times 0.044715
    const V factor = V::fma(V::mul(x, x), V::broadcast(0x1.2444c2p-4f), V::broadcast(0x1.988454p+0f));
    return times_sigmoid(x, V::mul(x, factor));
  } else if constexpr (A == Activation::gelu_quick) {
    return times_sigmoid(x, V::mul(x, V::broadcast(1.702f)));
  } else {
    return times_sigmoid(x, x);
  }
}

// Loads up to `count` of 16 consecutive numbers of type T; whole vectors without a call.
template <class V, DType T>
LOWBIT_INLINE inline V load_piece(const char* at, int64_t count) {
  return count >= kLanes ? V::template load_as_f32<T>(at) : load_some<V>(at, T, count);
}

template <class V, DType T>
LOWBIT_INLINE inline void store_piece(char* at, int64_t count, V v) {
  if (count >= kLanes) V::template store_from_f32<T>(at, V::same_nan(v));
  else store_some<V>(at, T, count, V::same_nan(v));
}

// f with the type as a constant.
template <class F>
void with_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f32: return f(std::integral_constant<DType, DType::f32>());
    case DType::bf16: return f(std::integral_constant<DType, DType::bf16>());
    case DType::f16: return f(std::integral_constant<DType, DType::f16>());
  }
}

template <class V, Activation A, DType T>
void activate_rows(const ActivateArgs& args) {
  constexpr int64_t kBytes = size_of(T);
  const int64_t width = args.width;
  for (int64_t row = 0; row < args.rows; ++row) {
    const char* const x = element(args.x, T, row * args.x_step);
    const char* const gate = args.gate == nullptr ? nullptr : element(args.gate, T, row * args.gate_step);
    char* const out = const_cast<char*>(element(args.out, T, row * args.out_step));
    if (gate == nullptr) {
      for (int64_t i = 0; i < width; i += kLanes) {
        store_piece<V, T>(out + i * kBytes, width - i, activation_of<V, A>(load_piece<V, T>(x + i * kBytes, width - i)));
      }
    } else {
      for (int64_t i = 0; i < width; i += kLanes) {
        const V y = activation_of<V, A>(load_piece<V, T>(x + i * kBytes, width - i));
        store_piece<V, T>(out + i * kBytes, width - i, V::mul(y, load_piece<V, T>(gate + i * kBytes, width - i)));
      }
    }
  }
}

template <class V, Activation A>
void activate_as(const ActivateArgs& args) {
  with_type(args.dtype, [&](auto type) { activate_rows<V, A, decltype(type)::value>(args); });
}

template <class V>
void activate(const ActivateArgs& args) {
  switch (args.activation) {
    case Activation::gelu: return activate_as<V, Activation::gelu>(args);
    case Activation::gelu_tanh: return activate_as<V, Activation::gelu_tanh>(args);
    case Activation::gelu_quick: return activate_as<V, Activation::gelu_quick>(args);
    case Activation::silu: return activate_as<V, Activation::silu>(args);
  }
}

template <class V, DType T>
void rms_norm_rows(const RmsNormArgs& args) {
  constexpr int64_t kBytes = size_of(T);
  const int64_t width = args.width;
  const char* const weight = static_cast<const char*>(args.weight);
  const V offset = V::broadcast(args.weight_offset);
  for (int64_t row = 0; row < args.rows; ++row) {
    const char* const x = element(args.x, T, row * args.x_step);
    char* const out = const_cast<char*>(element(args.out, T, row * args.out_step));
    V squares = V::broadcast(0.0f);
    for (int64_t i = 0; i < width; i += kLanes) {
      const V v = load_piece<V, T>(x + i * kBytes, width - i);
      squares = V::fma(v, v, squares);
    }
    const float mean = fold(squares, V::add) * (1.0f / static_cast<float>(width));
    const V factor = V::broadcast(1.0f / std::sqrt(mean + args.epsilon));
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t at = i * kBytes, count = width - i;
      V v = V::mul(load_piece<V, T>(x + at, count), factor);
      if (weight != nullptr) v = V::mul(v, V::add(load_piece<V, T>(weight + at, count), offset));
      store_piece<V, T>(out + at, count, v);
    }
  }
}

template <class V>
void rms_norm(const RmsNormArgs& args) {
  with_type(args.dtype, [&](auto type) { rms_norm_rows<V, decltype(type)::value>(args); });
}

// Keeps the first `count` lanes; the others become 0.
template <class V>
LOWBIT_INLINE inline V first_lanes(V v, int64_t count) {
  if (count >= kLanes) return v;
  alignas(64) float lanes[kLanes];
  V::store(lanes, v);
  return load_some<V>(lanes, DType::f32, count);
}

template <class V, DType T>
void layer_norm_rows(const LayerNormArgs& args) {
  constexpr int64_t kBytes = size_of(T);
  const int64_t width = args.width;
  const char* const weight = static_cast<const char*>(args.weight);
  const char* const bias = static_cast<const char*>(args.bias);
  for (int64_t row = 0; row < args.rows; ++row) {
    const char* const x = element(args.x, T, row * args.x_step);
    char* const out = const_cast<char*>(element(args.out, T, row * args.out_step));
    V sum = V::broadcast(0.0f), squares = sum;
    for (int64_t i = 0; i < width; i += kLanes) sum = V::add(sum, load_piece<V, T>(x + i * kBytes, width - i));
    const V mean = V::broadcast(fold(sum, V::add) / static_cast<float>(width));
    for (int64_t i = 0; i < width; i += kLanes) {
      const V v = first_lanes(V::sub(load_piece<V, T>(x + i * kBytes, width - i), mean), width - i);
      squares = V::fma(v, v, squares);
    }
    const float variance = fold(squares, V::add) / static_cast<float>(width);
    const V factor = V::broadcast(1.0f / std::sqrt(variance + args.epsilon));
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t at = i * kBytes, count = width - i;
      const V v = V::mul(V::sub(load_piece<V, T>(x + at, count), mean), factor);
      const V w = weight == nullptr ? V::broadcast(1.0f) : load_piece<V, T>(weight + at, count);
      const V b = bias == nullptr ? V::broadcast(-0.0f) : load_piece<V, T>(bias + at, count);
      store_piece<V, T>(out + at, count, V::fma(v, w, b));
    }
  }
}

template <class V>
void layer_norm(const LayerNormArgs& args) {
  with_type(args.dtype, [&](auto type) { layer_norm_rows<V, decltype(type)::value>(args); });
}

template <class V>
struct PairsOf {
  V a, b;
};

// Pairs `i` to `i` + 15 of a row with `half` pairs, or as many as are left. Adjacent numbers are moved one by one, which costs
// little: this layout is rare.
template <class V, DType T>
LOWBIT_INLINE inline PairsOf<V> load_pairs(const char* row, int64_t i, int64_t half, bool adjacent) {
  const int64_t count = half - i;
  if (!adjacent) return {load_piece<V, T>(element(row, T, i), count), load_piece<V, T>(element(row, T, half + i), count)};
  alignas(64) float a[kLanes] = {}, b[kLanes] = {};
  for (int64_t l = 0; l < kLanes && l < count; ++l) {
    a[l] = load_as_f32(row, T, 2 * (i + l));
    b[l] = load_as_f32(row, T, 2 * (i + l) + 1);
  }
  return {V::load(a), V::load(b)};
}

template <class V, DType T>
LOWBIT_INLINE inline void store_pairs(char* row, int64_t i, int64_t half, bool adjacent, const PairsOf<V>& pairs) {
  constexpr int64_t kBytes = size_of(T);
  const int64_t count = half - i;
  if (!adjacent) {
    store_piece<V, T>(row + i * kBytes, count, pairs.a);
    store_piece<V, T>(row + (half + i) * kBytes, count, pairs.b);
    return;
  }
  alignas(64) float a[kLanes], b[kLanes];
  V::store(a, V::same_nan(pairs.a));
  V::store(b, V::same_nan(pairs.b));
  for (int64_t l = 0; l < kLanes && l < count; ++l) {
    store_from_f32(row, T, 2 * (i + l), a[l]);
    store_from_f32(row, T, 2 * (i + l) + 1, b[l]);
  }
}

template <class V, DType T>
LOWBIT_INLINE inline V rounded_to(V v) {
  alignas(64) char numbers[kLanes * size_of(T)];
  V::template store_from_f32<T>(numbers, V::same_nan(v));
  return V::template load_as_f32<T>(numbers);
}

// kStep: the type of products, that of the numbers or float32.
template <class V, DType T, DType kTable, DType kStep>
void rotary_heads(const RotaryArgs& args) {
  const auto round = [](V v) LOWBIT_INLINE {
    if constexpr (kStep == DType::f32) return v;
    else return rounded_to<V, kStep>(v);
  };
  const bool adjacent = args.layout != RotaryLayout::halves;
  const bool adjacent_out = adjacent && args.layout != RotaryLayout::adjacent_to_halves;
  const bool whole_table = args.layout == RotaryLayout::halves || args.layout == RotaryLayout::adjacent;
  const char* const cos = static_cast<const char*>(args.cos);
  const char* const sin = static_cast<const char*>(args.sin);
  const int64_t half = args.rotary / 2;
  for (int64_t head = 0; head < args.heads; ++head) {
    const char* const x = element(args.x, T, head * args.x_step);
    char* const out = const_cast<char*>(element(args.out, T, head * args.out_step));
    for (int64_t i = 0; i < half; i += kLanes) {
      const PairsOf<V> pairs = load_pairs<V, T>(x, i, half, adjacent);
      PairsOf<V> c, s;
      if (whole_table) {
        c = load_pairs<V, kTable>(cos, i, half, adjacent);
        s = load_pairs<V, kTable>(sin, i, half, adjacent);
      } else {
        c.a = c.b = load_piece<V, kTable>(element(cos, kTable, i), half - i);
        s.a = s.b = load_piece<V, kTable>(element(sin, kTable, i), half - i);
      }
      const V a = V::sub(round(V::mul(pairs.a, c.a)), round(V::mul(pairs.b, s.a)));
      const V b = V::add(round(V::mul(pairs.b, c.b)), round(V::mul(pairs.a, s.b)));
      store_pairs<V, T>(out, i, half, adjacent_out, {a, b});
    }
    std::memcpy(out + args.rotary * size_of(T), x + args.rotary * size_of(T),
                static_cast<size_t>((args.width - args.rotary) * size_of(T)));
  }
}

template <class V>
void rotary(const RotaryArgs& args) {
  with_type(args.dtype, [&](auto type) {
    constexpr DType kType = decltype(type)::value;
    if (!args.round_once) return rotary_heads<V, kType, kType, kType>(args);
    if (args.table_dtype == DType::f32) return rotary_heads<V, kType, DType::f32, DType::f32>(args);
    rotary_heads<V, kType, kType, DType::f32>(args);
  });
}

template <class V>
void rotate_inputs(const RotateArgs& args) {
  const int64_t block = args.block;
  alignas(64) float factors[kMostRotation];
  float factor = 1.0f;
  for (int64_t size = block; size > 1; size /= 4) factor *= 0.5f;
  for (int64_t i = 0; i < block; ++i) factors[i] = (kRotationSigns[i / 32] >> i % 32 & 1) != 0 ? -factor : factor;
  for (int64_t first = 0; first < args.width; first += block) {
    float* const out = args.out + first;
    const char* const x = element(args.x, args.dtype, first);
    if (!args.back) {
      for (int64_t i = 0; i < block; i += kLanes) {
        V::store(out + i, V::mul(load_floats<V>(x + i * size_of(args.dtype), args.dtype), V::load(factors + i)));
      }
      hadamard<V>(out, block);
      continue;
    }
    for (int64_t i = 0; i < block; i += kLanes) V::store(out + i, load_floats<V>(x + i * size_of(args.dtype), args.dtype));
    hadamard<V>(out, block);
    for (int64_t i = 0; i < block; i += kLanes) V::store(out + i, V::mul(V::load(out + i), V::load(factors + i)));
  }
}

template <class V, DType T>
void residual_row(const ResidualArgs& args) {
  const char* const x = static_cast<const char*>(args.x);
  const float* scale = args.scales;
  for (int64_t i = 0; i < args.k; ++scale) {
    const int64_t group_left = args.group_inputs - i % args.group_inputs;
    int64_t end = i + (group_left < kSegmentInputs ? group_left : kSegmentInputs);
    if (end > args.k) end = args.k;
    for (const V t = V::broadcast(-*scale); i < end; i += kLanes) {
      const V rest = V::fma(t, V::load_int8_as_f32(args.a + i), load_piece<V, T>(x + i * size_of(T), args.k - i));
      store_piece<V, DType::f32>(reinterpret_cast<char*>(args.out + i), args.k - i, rest);
    }
  }
}

template <class V>
void residual(const ResidualArgs& args) {
  with_type(args.dtype, [&](auto type) { residual_row<V, decltype(type)::value>(args); });
}

template <class V, DType T>
void add_planes_rows(const AddPlanesArgs& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    const float* const y1 = args.planes + 2 * row * args.planes_step;
    const float* const y2 = y1 + args.planes_step;
    const uint8_t* bias = args.biases;
    char* const out = const_cast<char*>(element(args.out, T, row * args.out_step));
    for (int64_t i = 0; i < args.width; i += kLanes) {
      const V second = load_piece<V, DType::f32>(reinterpret_cast<const char*>(y2 + i), args.width - i);
      const V rest = V::sub(second, V::template load_as_f32<DType::f32>(bias));
      bias += args.biases_step;
      const V first = load_piece<V, DType::f32>(reinterpret_cast<const char*>(y1 + i), args.width - i);
      store_piece<V, T>(out + i * size_of(T), args.width - i, V::add(first, rest));
    }
  }
}

template <class V>
void add_planes(const AddPlanesArgs& args) {
  with_type(args.dtype, [&](auto type) { add_planes_rows<V, decltype(type)::value>(args); });
}

// Blocks of products whose lanes, rows and weights of a piece of k fit into 32 KiB together.
constexpr int64_t kBlockRows = 8, kBlockColumns = 8, kBlockInputs = 384;
using ProductLanes = float[kBlockRows][kBlockColumns][kLanes];

// Adds the products of inputs `begin` to `end` - 1 of Rows rows and Columns columns.
template <class V, int Rows, int Columns>
LOWBIT_INLINE inline void add_products(const FloatProductsArgs& args, int64_t row, int64_t column, int64_t begin, int64_t end,
                                       float (*lanes)[kBlockColumns][kLanes]) {
  const float* const x = args.x + row * args.x_step;
  const float* const weights = args.weights + column * args.weights_step;
  V sums[Rows][Columns];
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < Columns; ++c) sums[r][c] = begin == 0 ? V::broadcast(0.0f) : V::load(lanes[r][c]);
  }
  const auto add = [&](int64_t i, const auto& load) LOWBIT_INLINE {
    V inputs[Rows];
    for (int r = 0; r < Rows; ++r) inputs[r] = load(x + r * args.x_step + i);
    for (int c = 0; c < Columns; ++c) {
      const V weight = load(weights + c * args.weights_step + i);
      for (int r = 0; r < Rows; ++r) sums[r][c] = V::fma(inputs[r], weight, sums[r][c]);
    }
  };
  const int64_t whole = begin + (end - begin) / kLanes * kLanes;
  for (int64_t i = begin; i < whole; i += kLanes) add(i, [](const float* at) LOWBIT_INLINE { return V::load(at); });
  if (whole < end) add(whole, [&](const float* at) LOWBIT_INLINE { return load_some<V>(at, DType::f32, end - whole); });
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < Columns; ++c) V::store(lanes[r][c], sums[r][c]);
  }
}

template <class V, int Rows>
void add_products_of_rows(const FloatProductsArgs& args, int64_t row, int64_t column, int64_t columns, int64_t begin,
                          int64_t end, float (*lanes)[kBlockColumns][kLanes]) {
  constexpr int kColumns = V::kSums / Rows < 1 ? 1 : V::kSums / Rows < 4 ? V::kSums / Rows : 4;
  int64_t c = 0;
  const auto at = [&] { return reinterpret_cast<float(*)[kBlockColumns][kLanes]>(lanes[0][c]); };
  for (; c + kColumns <= columns; c += kColumns) add_products<V, Rows, kColumns>(args, row, column + c, begin, end, at());
  for (; c < columns; ++c) add_products<V, Rows, 1>(args, row, column + c, begin, end, at());
}

template <class V>
void float_products(const FloatProductsArgs& args) {
  constexpr int kRows = V::kSums >= 16 ? 4 : V::kSums >= 4 ? 2 : 1;
  alignas(64) ProductLanes lanes;
  for (int64_t row = 0; row < args.rows; row += kBlockRows) {
    const int64_t rows = args.rows - row < kBlockRows ? args.rows - row : kBlockRows;
    for (int64_t column = 0; column < args.columns; column += kBlockColumns) {
      const int64_t columns = args.columns - column < kBlockColumns ? args.columns - column : kBlockColumns;
      int64_t begin = 0;
      do {
        const int64_t end = args.k - begin < kBlockInputs ? args.k : begin + kBlockInputs;
        int64_t r = 0;
        for (; r + kRows <= rows; r += kRows) {
          add_products_of_rows<V, kRows>(args, row + r, column, columns, begin, end, lanes + r);
        }
        for (; r < rows; ++r) add_products_of_rows<V, 1>(args, row + r, column, columns, begin, end, lanes + r);
        begin = end;
      } while (begin < args.k);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
          args.out[(row + r) * args.out_step + column + c] = fold(V::load(lanes[r][c]), V::add);
        }
      }
    }
  }
}

}  // namespace
}  // namespace lowbit
