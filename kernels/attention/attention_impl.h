// The body of every attention_<isa>, on a vector V of 16 floats (../vector/). Formula: ukernel.h.
//
// Both products, queries by keys and weights by values, are the same loop: up to 4 rows of scalars times vectors. For keys a
// lane is a position and a step one input; for values a lane is an input and a step one position. So no sum crosses lanes, and
// its order is that of the steps, for any number of rows at once.
//
// The type of the caches is a template argument only of the products, which convert every value. The functions around them are
// compiled once for all cache types, and for all types of queries and outputs.
// Scores and weights are multiplied by the scales of codes, so the inner loop has only a conversion and no extra product. 4-bit
// codes belong to rotated keys and values: queries are rotated once, and outputs are rotated back. Products with int8 keys are
// integer sums, with queries that are quantized once (codes.h).
//
// A row may see only some positions. Memory outside of them may hold anything, also NaN: scores outside are replaced, and
// values outside are not read.
#pragma once

#include "../ukernel.h"
#include "codes.h"

namespace lowbit {
namespace {

// tanh(x / (2 log2(e))): with the sign of x, NaN for NaN.
template <class V>
LOWBIT_INLINE inline V tanh2_of(V x) {
  const V zero = V::broadcast(0.0f), one = V::broadcast(1.0f);
  const V e = exp2_of(V::sub(zero, V::max(x, V::sub(zero, x))));
  const V magnitude = V::div(V::sub(one, e), V::add(one, e));
  const V positive = V::zero_below(x, zero, magnitude);
  return V::sub(positive, V::sub(magnitude, positive));
}

// Loads 16 keys or values. 16 bytes of 4-bit codes hold two vectors: `upper` selects one.
template <class V, CacheType C>
LOWBIT_INLINE inline V load_cached(const void* at, [[maybe_unused]] bool upper) {
  if constexpr (C == CacheType::i4) return V::load_levels_as_f32(at, upper);
  else if constexpr (C == CacheType::i8) return V::load_int8_as_f32(at);
  else if constexpr (C == CacheType::f32) return V::template load_as_f32<DType::f32>(at);
  else if constexpr (C == CacheType::bf16) return V::template load_as_f32<DType::bf16>(at);
  else return V::template load_as_f32<DType::f16>(at);
}

// Bytes of a vector. Two vectors of 4-bit codes share their bytes.
constexpr int64_t vector_bytes(CacheType type) { return type == CacheType::i4 ? kLanes : cache_bytes(type, kLanes); }

// The scales of 16 positions. Their memory need not be aligned.
template <class V>
LOWBIT_INLINE inline V load_scales(const void* scales, int64_t position) {
  return V::template load_as_f32<DType::f32>(static_cast<const char*>(scales) + position * 4);
}

// Rows of scalars in float32, times vectors in the type of the cache: queries times keys, or weights times values.
struct Product {
  const float* a;  // row 0, step 0; rows of queries are `steps` apart, rows of weights kAttentionBlock
  const char* b;   // step 0, vector 0
  int64_t steps;   // inputs of a key, or positions
  float* out;      // row 0, vector 0; rows of scores are kAttentionBlock apart, others `vectors` vectors
  int64_t vectors;
};

// Hides the origin of a pointer from the compiler, which would otherwise keep an address for each row and vector.
template <class T>
LOWBIT_INLINE inline void hide(T*& pointer) {
  __asm__("" : "+r"(pointer));
}

// out (+)= a * b for Rows rows and Vectors vectors at `vector`.
template <class V, CacheType C, int Rows, int Vectors, bool Add>
LOWBIT_INLINE inline void multiply(const Product& product, int64_t vector) {
  // With 4-bit codes two steps of keys share bytes, or two vectors of values. An even number of vectors begins at an even one.
  constexpr bool kShareSteps = C == CacheType::i4 && !Add, kShareVectors = C == CacheType::i4 && Add;
  const int64_t odd = kShareVectors && Vectors % 2 != 0 ? vector % 2 : 0;
  const int64_t steps = product.steps, width = product.vectors * kLanes;
  const int64_t a_row = Add ? kAttentionBlock : steps, out_row = Add ? width : kAttentionBlock;
  // Bytes from one step or vector to the next, or from two that share bytes to the next two.
  const int64_t b_step = Add ? cache_bytes(C, width) : vector_bytes(C);
  const int64_t b_vector = Add ? vector_bytes(C) : cache_bytes(C, steps * kLanes);
  // The steps of a vector of keys are adjacent, and the vectors of a step of values: offsets that are constants.
  constexpr int kAddresses = Add ? 1 : Vectors;
  const char* b[kAddresses];
  for (int v = 0; v < kAddresses; ++v) b[v] = product.b + ((kShareVectors ? vector / 2 : vector) + v) * b_vector;
  const auto at = [&](int v) LOWBIT_INLINE { return Add ? b[0] + (kShareVectors ? v / 2 : v) * b_vector : b[v]; };
  const auto advance = [&]() LOWBIT_INLINE {
    for (int v = 0; v < kAddresses; ++v) b[v] += b_step;
  };
  float* const out = product.out + vector * kLanes;
  V sums[Rows][Vectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) sums[r][v] = Add ? V::load(out + r * out_row + v * kLanes) : V::broadcast(0.0f);
  }
  const float* a = product.a;
  // Keys and values mostly come from memory, in pieces that are too short for the CPU's own prefetch. A prefetch past their end
  // reads nothing.
  const int64_t ahead = Add ? 8192 : 4 * b_vector;
  // Vectors in memory gain nothing by four steps at a time. Keys have a multiple of 16 steps, values any number.
  constexpr bool kByFour = V::kSums > 1, kByOne = !kByFour || Add;
  int64_t step = 0;
  for (; kByFour && step + 4 <= steps; step += 4) {
    typename V::Four scalars[Rows];
    for (int r = 0; r < Rows; ++r) scalars[r] = V::load_four(a + r * a_row);
    const auto one = [&](auto lane) LOWBIT_INLINE {
      constexpr bool kOddStep = decltype(lane)::value % 2 != 0;
      V vectors[Vectors];
      for (int v = 0; v < Vectors; ++v) {
        if (!(kShareSteps && kOddStep) && !(kShareVectors && v % 2 != 0)) __builtin_prefetch(at(v) + ahead, 0, 2);
        vectors[v] = load_cached<V, C>(at(v), kShareSteps ? kOddStep : (v + odd) % 2 != 0);
#if defined(__AVX512F__)
        if constexpr (C == CacheType::f32) __asm__("" : "+v"(vectors[v].v));  // GCC 12 would load it again for each row
#endif
      }
      for (int r = 0; r < Rows; ++r) {
        for (int v = 0; v < Vectors; ++v) {
          sums[r][v] = V::template fma_lane<decltype(lane)::value>(vectors[v], scalars[r], sums[r][v]);
        }
      }
      if (!kShareSteps || kOddStep) advance();
    };
    one(std::integral_constant<int, 0>());
    one(std::integral_constant<int, 1>());
    one(std::integral_constant<int, 2>());
    one(std::integral_constant<int, 3>());
    a += 4;
    hide(a);
#if defined(__x86_64__)
    for (int v = 0; v < kAddresses; ++v) hide(b[v]);  // Arm has registers for these addresses
#endif
  }
  for (; kByOne && step < steps; ++step) {
    const bool odd_step = step % 2 != 0;
    for (int v = 0; v < Vectors; ++v) {
      const V vector_b = load_cached<V, C>(at(v), kShareSteps ? odd_step : (v + odd) % 2 != 0);
      for (int r = 0; r < Rows; ++r) sums[r][v] = V::fma(vector_b, V::broadcast(a[r * a_row]), sums[r][v]);
    }
    if (!kShareSteps || odd_step) advance();
    ++a;
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) V::store(out + r * out_row + v * kLanes, sums[r][v]);
  }
}

// Multiplies all vectors of a product. Not inlined, so that each is compiled once.
template <class V, CacheType C, int Rows, bool Add>
__attribute__((noinline)) void multiply_all(const Product& product) {
  constexpr int kVectors = kAtOnce<V, Rows>;
  int64_t vector = 0;
  for (; vector + kVectors <= product.vectors; vector += kVectors) multiply<V, C, Rows, kVectors, Add>(product, vector);
  if constexpr (kVectors > 2 && Rows != 3) {
    for (; vector + 2 <= product.vectors; vector += 2) multiply<V, C, Rows, 2, Add>(product, vector);
  }
  if constexpr (kVectors > 1) {
    for (; vector < product.vectors; ++vector) multiply<V, C, Rows, 1, Add>(product, vector);
  }
}

// The number of rows of the next tile.
template <class V>
int tile_rows(int64_t remaining) {
  if (remaining >= 4) return 4;
  return V::kSums == 1 ? 1 : static_cast<int>(remaining);
}

// Calls run(constant) with the number of rows of a tile.
template <class V, class Run>
LOWBIT_INLINE inline void with_rows(int rows, Run run) {
  if (rows == 4) return run(std::integral_constant<int, 4>());
  if constexpr (V::kSums > 1) {
    if (rows == 3) return run(std::integral_constant<int, 3>());
    if (rows == 2) return run(std::integral_constant<int, 2>());
  }
  run(std::integral_constant<int, 1>());
}

// Multiplies the rows of a tile. Types: those that the cache may have.
template <class V, bool Add, CacheType... Types>
void multiply_rows(CacheType type, int rows, const Product& product) {
  const auto multiply_if = [&](auto constant) LOWBIT_INLINE {
    if (type == constant()) with_rows<V>(rows, [&](auto count) { multiply_all<V, constant(), count(), Add>(product); });
  };
  (multiply_if(std::integral_constant<CacheType, Types>()), ...);
}

// Partial results of some rows.
struct Partial {
  float *out, *sums, *most;
  int64_t value_width;

  Partial(float* memory, int64_t rows, int64_t value_width)
      : out(memory), sums(out + rows * value_width), most(sums + rows * kLanes), value_width(value_width) {}

  float* out_of(int64_t row) const { return out + row * value_width; }
  float* sums_of(int64_t row) const { return sums + row * kLanes; }
};

// The memory of some rows between blocks, and the scores of the current rows.
struct State {
  float *q, *scores;
  Partial before, now;  // the earlier spans, and the current span

  explicit State(const AttentionArgs& args)
      : q(args.scratch), scores(q + kAttentionRows * args.width),
        before(scores + 4 * kAttentionBlock, kAttentionRows, args.value_width),
        now(args.partial != nullptr
                ? Partial(args.partial, args.rows, args.value_width)
                : Partial(scores + 4 * kAttentionBlock + attention_partial(kAttentionRows, args.value_width),
                          kAttentionRows, args.value_width)) {}
};

// Visible positions of a block, counted from the block's first position.
struct Seen {
  int64_t begin, end;
};

// Converts the scores of one row and block to weights. The scales of codes begin at the block; other caches have none.
template <class V>
void softmax(float* scores, Seen seen, const char* key_scales, const char* value_scales, float cap, float* most, float* sums,
             float* out, int64_t width) {
  const int64_t first = seen.begin / kLanes * kLanes;
  if (key_scales != nullptr) {
    for (int64_t j = first; j < seen.end; j += kLanes) {
      V::store(scores + j, V::mul(V::load(scores + j), load_scales<V>(key_scales, j)));
    }
  }
  if (cap != 0.0f) {
    for (int64_t j = first; j < seen.end; j += kLanes) {
      V::store(scores + j, V::mul(tanh2_of(V::load(scores + j)), V::broadcast(cap)));
    }
  }
  // Positions outside get the weight exp2(-inf) = 0.
  for (int64_t l = first; l < seen.begin; ++l) scores[l] = float_from_bits(0xff800000u);
  for (int64_t l = seen.end; l % kLanes != 0; ++l) scores[l] = float_from_bits(0xff800000u);
  V lanes_most = V::broadcast(*most);
  for (int64_t j = first; j < seen.end; j += kLanes) lanes_most = V::max(V::load(scores + j), lanes_most);
  const float now = fold(lanes_most, V::max);
  const V most_now = V::broadcast(now), shrink = exp2_of(V::sub(V::broadcast(*most), most_now));
  *most = now;
  V sum = V::mul(V::load(sums), shrink);
  for (int64_t j = first; j < seen.end; j += kLanes) {
    const V weights = exp2_of(V::sub(V::load(scores + j), most_now));
    V::store(scores + j, value_scales != nullptr ? V::mul(weights, load_scales<V>(value_scales, j)) : weights);
    sum = V::add(sum, weights);
  }
  V::store(sums, sum);
  for (int64_t i = 0; i < width; i += kLanes) V::store(out + i, V::mul(V::load(out + i), shrink));
}

// Adds the block that starts at position `block` to the rows of a tile from `row` on. Each row sees some of the block.
// Int8Keys: caches have int8 keys.
template <class V, bool Int8Keys>
void attend(const AttentionArgs& args, const State& state, int64_t row, int rows, int64_t block) {
  const int64_t width = args.width, value_width = args.value_width;
  Seen seen[4];
  for (int r = 0; r < rows; ++r) {
    const int64_t begin = args.begins[row + r] - block, end = args.ends[row + r] - block;
    seen[r] = {begin > 0 ? begin : 0, end < kAttentionBlock ? end : kAttentionBlock};
  }
  const int64_t first = seen[0].begin / kLanes, vectors = (seen[rows - 1].end + kLanes - 1) / kLanes - first;
  const CacheType key = key_type(args.cache), value = value_type(args.cache);
  const char* const keys = static_cast<const char*>(args.keys) + cache_bytes(key, (block + first * kLanes) * width);
  float* const q = state.q + row * width;
  float* const scores = state.scores + first * kLanes;
  if (Int8Keys || key == CacheType::i8) {
    with_rows<V>(rows, [&](auto count) { score_all_codes<V, count()>(q, keys, width, scores, vectors); });
  } else if constexpr (!Int8Keys) {
    multiply_rows<V, false, CacheType::f32, CacheType::bf16, CacheType::f16, CacheType::i4>(
        key, rows, {q, keys, width, scores, vectors});
  }
  const char *key_scales = nullptr, *value_scales = nullptr;
  if (has_scales(args.cache)) {
    key_scales = static_cast<const char*>(args.key_scales) + block * 4;
    value_scales = static_cast<const char*>(args.value_scales) + block * 4;
  }
  for (int r = 0; r < rows; ++r) {
    softmax<V>(state.scores + r * kAttentionBlock, seen[r], key_scales, value_scales, args.cap, state.now.most + row + r,
               state.now.sums_of(row + r), state.now.out_of(row + r), value_width);
  }
  // Values that all rows see are added for all rows at once, earlier and later ones row by row. Each row keeps its order of
  // positions.
  const char* const values = static_cast<const char*>(args.values) + cache_bytes(value, block * value_width);
  const auto add = [&](int count, int r, int64_t begin, int64_t end) {
    if (begin >= end) return;
    const Product product{state.scores + r * kAttentionBlock + begin, values + cache_bytes(value, begin * value_width),
                          end - begin, state.now.out_of(row + r), value_width / kLanes};
    if constexpr (Int8Keys) {
      multiply_rows<V, true, CacheType::i8, CacheType::i4>(value, count, product);
    } else {
      multiply_rows<V, true, CacheType::f32, CacheType::bf16, CacheType::f16, CacheType::i8, CacheType::i4>(value, count,
                                                                                                            product);
    }
  };
  const int64_t begin = seen[rows - 1].begin, end = seen[0].end;
  if (rows == 1 || begin >= end) {
    for (int r = 0; r < rows; ++r) add(1, r, seen[r].begin, seen[r].end);
    return;
  }
  for (int r = 0; r < rows; ++r) add(1, r, seen[r].begin, begin);
  add(rows, 0, begin, end);
  for (int r = 0; r < rows; ++r) add(1, r, end, seen[r].end);
}

// The partial result before the first position.
template <class V>
void clear(const Partial& partial, int64_t row, const float* sinks) {
  float* const out = partial.out_of(row);
  for (int64_t i = 0; i < partial.value_width; i += kLanes) V::store(out + i, V::broadcast(0.0f));
  float* const sums = partial.sums_of(row);
  V::store(sums, V::broadcast(0.0f));
  partial.most[row] = -0x1.fffffep127f;
  if (sinks != nullptr) {
    sums[0] = 1.0f;
    if (!(sinks[row] <= partial.most[row])) partial.most[row] = sinks[row];  // also if the sink is NaN
  }
}

template <class V>
void copy(const Partial& from, const Partial& to, int64_t row) {
  for (int64_t i = 0; i < from.value_width; i += kLanes) V::store(to.out_of(row) + i, V::load(from.out_of(row) + i));
  V::store(to.sums_of(row), V::load(from.sums_of(row)));
  to.most[row] = from.most[row];
}

// Joins the partial results of earlier spans and of the current span.
template <class V>
void join(const Partial& before, const Partial& now, int64_t row) {
  const float was = before.most[row], is = now.most[row], most = is > was ? is : was;  // keeps NaN, which a sink may be
  const V a = exp2_of(V::broadcast(was - most)), b = exp2_of(V::broadcast(is - most));
  const auto add = [&](const float* from, float* to) LOWBIT_INLINE {
    V::store(to, V::fma(V::load(from), a, V::mul(V::load(to), b)));
  };
  add(before.sums_of(row), now.sums_of(row));
  for (int64_t i = 0; i < now.value_width; i += kLanes) add(before.out_of(row) + i, now.out_of(row) + i);
  now.most[row] = most;
}

template <class V>
void finish(const Partial& partial, int64_t row, void* to, DType dtype, CacheType cache) {
  if (value_type(cache) == CacheType::i4) rotate<V>(partial.out_of(row), partial.value_width);
  const float sum = fold(V::load(partial.sums_of(row)), V::add);
  const V inverse = V::broadcast(1.0f / sum);
  char* const out = static_cast<char*>(to);
  for (int64_t i = 0; i < partial.value_width; i += kLanes) {
    store_floats(out + i * size_of(dtype), dtype, V::same_nan(V::mul(V::load(partial.out_of(row) + i), inverse)));
  }
}

// Int8Keys: only for caches with int8 keys.
template <class V, bool Int8Keys = false>
void attention(const AttentionArgs& args) {
  const int64_t width = args.width, rows = args.rows, length = args.ends[rows - 1];
  const CacheType key = key_type(args.cache);
  const State state(args);
  for (int64_t r = 0; r < rows; ++r) {
    const char* q = static_cast<const char*>(args.q[r]);
    for (int64_t i = 0; i < width; i += kLanes) {
      const V values = load_floats<V>(q + i * size_of(args.dtype), args.dtype);
      V::store(state.q + r * width + i, V::mul(values, V::broadcast(args.factor)));
    }
    if (key == CacheType::i4) rotate<V>(state.q + r * width, width);
    if (key == CacheType::i8) CodedQuery(state.q + r * width, width).code();
  }
  int64_t block = args.begins[0] / kAttentionBlock * kAttentionBlock;
  int64_t first = 0, last = 0;              // rows [first, last) see some of the block
  int64_t span_first = 0, span_last = 0;    // rows [span_first, span_last) see some of the span
  for (int64_t span = block / kAttentionSpan * kAttentionSpan; span < length; span += kAttentionSpan) {
    while (args.ends[span_first] <= span) ++span_first;
    while (span_last < rows && args.begins[span_last] < span + kAttentionSpan) ++span_last;
    for (int64_t r = span_first; r < span_last; ++r) {
      const bool continues = args.partial == nullptr && args.begins[r] < span;
      if (continues) copy<V>(state.now, state.before, r);
      clear<V>(state.now, r, continues ? nullptr : args.sinks);
    }
    for (; block < length && block < span + kAttentionSpan; block += kAttentionBlock) {
      while (args.ends[first] <= block) ++first;
      while (last < rows && args.begins[last] < block + kAttentionBlock) ++last;
      for (int64_t row = first; row < last;) {
        const int rows = tile_rows<V>(last - row);
        attend<V, Int8Keys>(args, state, row, rows, block);
        row += rows;
      }
    }
    for (int64_t r = span_first; r < span_last; ++r) {
      if (args.partial == nullptr && args.begins[r] < span) join<V>(state.before, state.now, r);
    }
  }
  for (int64_t r = 0; r < rows && args.partial == nullptr; ++r) finish<V>(state.now, r, args.out[r], args.dtype, args.cache);
}

template <class V>
void join_spans(const AttentionJoinArgs& args) {
  const int64_t size = attention_partial(args.rows, args.value_width);
  for (int64_t s = 1; s < args.spans; ++s) {
    const Partial before(args.partials + (s - 1) * size, args.rows, args.value_width);
    const Partial now(args.partials + s * size, args.rows, args.value_width);
    for (int64_t r = 0; r < args.rows; ++r) join<V>(before, now, r);
  }
  const Partial all(args.partials + (args.spans - 1) * size, args.rows, args.value_width);
  for (int64_t r = 0; r < args.rows; ++r) finish<V>(all, r, args.out[r], args.dtype, args.cache);
}

}  // namespace
}  // namespace lowbit
