// The attention operator: writes to the caches, strides, texts in pieces, threads, refusals. ctest runs this once per
// LOWBIT_ISA.

#include <algorithm>
#include <cmath>
#include <gtest/gtest.h>

#include "../../kernels/registry.h"
#include "support/attention_reference.h"
#include "support/tensors.h"

namespace lowbit::test {
namespace {

constexpr double kScale = 0.3;

constexpr auto kF32 = CacheType::f32, kBf16 = CacheType::bf16, kF16 = CacheType::f16, kI8 = CacheType::i8,
               kI4 = CacheType::i4, kI8I4 = CacheType::i8_i4;

ElementType element_type(CacheType cache) {
  return cache == kF32    ? ElementType::f32
         : cache == kBf16 ? ElementType::bf16
         : cache == kF16  ? ElementType::f16
                          : ElementType::i8;
}

// Keys or values of one position of a head.
int64_t position_bytes(CacheType cache, int64_t width) {
  return cache_bytes(cache, width) + (has_scales(cache) ? 4 : 0);
}

// Location of input i of position j in a cache: byte offset in the head, and for 4-bit codes also the half.
struct Place {
  int64_t at;
  bool upper;
};
Place place(CacheType cache, bool is_key, int64_t width, int64_t j, int64_t i) {
  if (cache == kI8 && is_key) return {(j / 16 * width / 4 + i / 4) * 64 + j % 16 * 4 + i % 4, false};
  if (cache != kI4) return {cache_bytes(cache, is_key ? (j / 16 * width + i) * 16 + j % 16 : j * width + i), false};
  if (is_key) return {(j / 16 * width / 2 + i / 2) * 16 + j % 16, i % 2 != 0};
  return {j * width / 2 + i / 32 * 16 + i % 16, i % 32 >= 16};
}

Tensor start_tensor(int64_t start) { return index_tensor<int64_t>({start}); }

// A view of a tensor from `begin` on in dimension 2.
TensorView positions(TensorView view, int64_t begin, int64_t count) {
  view.data = static_cast<char*>(view.data) + begin * view.stride[2] * element_bytes(view.type);
  view.shape.size[2] = count;
  return view;
}

struct Model {
  int64_t batch, heads, kv_heads, width, length, max_length;
  ElementType type;
  CacheType cache_of;
  Tensor q, k, v;  // of a whole text, [batch, heads, length, width]

  Model(int64_t batch, int64_t heads, int64_t kv_heads, int64_t width, int64_t length, ElementType type,
        CacheType cache_of)
      : batch(batch), heads(heads), kv_heads(kv_heads), width(width), length(length),
        max_length((length + 15) / 16 * 16), type(type), cache_of(cache_of), q(make(heads, 1)), k(make(kv_heads, 2)),
        v(make(kv_heads, 3)) {}

  Tensor make(int64_t heads, uint64_t seed) const {
    Random random(seed);
    return random_tensor(type, {batch, heads, length, width}, random);
  }
  // Unwritten content: 0x5c5c... everywhere.
  Tensor cache(bool is_key) const {
    const CacheType stored = is_key ? key_type(cache_of) : value_type(cache_of);
    const int64_t columns = has_scales(stored) ? position_bytes(stored, width) : width;
    Tensor made(element_type(stored), {batch, kv_heads, max_length, columns});
    // Kernels read whole panels of 16 positions, and drop the scores of unwritten ones. MemorySanitizer reports them anyway if
    // a code is used as an index.
    if (stored == kI4) accept(made.memory->data(), made.memory->size());
    return made;
  }

  // Runs the text from `start` on in calls of the given numbers of positions; out [batch, length, heads, width].
  std::vector<uint8_t> run(const TensorView& q, const TensorView& k, const TensorView& v,
                           const std::vector<int64_t>& counts, const Parallel& parallel, const Tensor& k_cache,
                           const Tensor& v_cache, int64_t start = 0) const {
    const size_t row = static_cast<size_t>(heads * width * element_bytes(type));
    std::vector<uint8_t> all(static_cast<size_t>(batch * length) * row);
    for (const int64_t count : counts) {
      Tensor out(type, {batch, count, heads, width});
      const Status status =
          attention(positions(q, start, count), positions(k, start, count), positions(v, start, count), k_cache.view,
                    v_cache.view, start_tensor(start).view, {kScale}, out.view, parallel);
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_TRUE(out.memory->intact() && k_cache.memory->intact() && v_cache.memory->intact());
      expect_written(out.memory->data(), out.memory->size());
      const std::vector<uint8_t> bytes = out.bytes();
      const size_t size = static_cast<size_t>(count) * row;
      for (size_t b = 0; b < static_cast<size_t>(batch); ++b) {
        std::copy_n(bytes.data() + b * size, size,
                    all.data() + (b * static_cast<size_t>(length) + static_cast<size_t>(start)) * row);
      }
      start += count;
    }
    EXPECT_EQ(start, length);
    EXPECT_TRUE(this->q.memory->intact() && this->k.memory->intact() && this->v.memory->intact());
    return all;
  }
  std::vector<uint8_t> run(const std::vector<int64_t>& counts, const Parallel& parallel = {}) const {
    return run(q.view, k.view, v.view, counts, parallel, cache(true), cache(false));
  }

  // Keys or values of one head in cache format, surrounded by bytes of `fill`, and the scales of codes.
  std::vector<uint8_t> cached(bool is_key, int64_t cache_head, uint8_t fill, std::vector<float>* scales) const {
    const CacheType stored = is_key ? key_type(cache_of) : value_type(cache_of);
    std::vector<uint8_t> all(static_cast<size_t>(cache_bytes(stored, max_length * width)), fill);
    const Tensor& tensor = is_key ? k : v;
    for (int64_t j = 0; j < length; ++j) {
      std::vector<float> position;
      for (int64_t i = 0; i < width; ++i) {
        position.push_back(load_as_f32(element(tensor.view, (cache_head * length + j) * width), dtype_of(type), i));
      }
      QuantizedPosition quantized;
      if (has_scales(stored)) {
        quantized = stored == kI4 ? contract_quantize_rotated(position) : contract_quantize_position(position);
        scales->push_back(quantized.scale);
      }
      for (int64_t i = 0; i < width; ++i) {
        const auto [at, upper] = place(stored, is_key, width, j, i);
        uint8_t* const to = all.data() + at;
        if (stored == kI4) {
          const int code = quantized.codes[static_cast<size_t>(i)];
          *to = static_cast<uint8_t>(upper ? (*to & 15) | code << 4 : (*to & 0xf0) | code);
        } else if (stored == kI8) {
          *to = static_cast<uint8_t>(quantized.codes[static_cast<size_t>(i)]);
        } else {
          store_from_f32(to, dtype_of(element_type(stored)), 0, position[static_cast<size_t>(i)]);
        }
      }
    }
    scales->resize(static_cast<size_t>(max_length));
    return all;
  }

  // Computes every row alone by the portable kernel, on caches made here.
  std::vector<uint8_t> expected() const {
    const size_t item = static_cast<size_t>(element_bytes(type));
    std::vector<uint8_t> out(q.bytes().size());
    std::vector<float> scratch(static_cast<size_t>(attention_scratch(width, width)));
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t cache_head = b * kv_heads + h / (heads / kv_heads);
        std::vector<float> key_scales, value_scales;
        const std::vector<uint8_t> panels = cached(true, cache_head, 0, &key_scales);
        const std::vector<uint8_t> values = cached(false, cache_head, 0, &value_scales);
        for (int64_t i = 0; i < length; ++i) {
          const void* row = element(q.view, ((b * heads + h) * length + i) * width);
          void* to = out.data() + static_cast<size_t>(((b * length + i) * heads + h) * width) * item;
          const int64_t begin = 0, end = i + 1;
          choose_attention(kPortable)
              .run({1, &row, &to, &begin, &end, nullptr, panels.data(), values.data(), key_scales.data(),
                    value_scales.data(), dtype_of(type), cache_of, width, width,
                    static_cast<float>(kScale * 1.4426950408889634), 0.0f, scratch.data()});
        }
      }
    }
    return out;
  }
};

// Types of queries and outputs, and of the caches.
struct Kind {
  ElementType type;
  CacheType cache;
};
constexpr ElementType kTypes[] = {ElementType::f32, ElementType::bf16, ElementType::f16};
constexpr Kind kKinds[] = {{ElementType::f32, kF32}, {ElementType::bf16, kBf16}, {ElementType::f16, kF16},
                           {ElementType::f32, kBf16}, {ElementType::f32, kF16}, {ElementType::f32, kI8},
                           {ElementType::bf16, kI8}, {ElementType::bf16, kF32}, {ElementType::f32, kI4},
                           {ElementType::bf16, kI8I4}};

TEST(Attention, ShapesTypesAndCuts) {
  for (const auto& [type, cache] : kKinds) {
    const int64_t more = value_type(cache) == kI4 ? 16 : 0;  // 4 bits are for multiples of 32
    for (const Model& model :
         {Model(1, 4, 2, 32, 40, type, cache), Model(2, 3, 3, 16 + more, 20, type, cache),
          Model(1, 5, 1, 80 + more, 23, type, cache), Model(3, 4, 1, 48 + more, 7, type, cache),
          Model(1, 36, 36, 16 + more, 5, type, cache)}) {
      const std::vector<uint8_t> expected = model.expected();
      const DType dtype = dtype_of(type);
      EXPECT_TRUE(same_bits(model.run({model.length}), expected, dtype));
      EXPECT_TRUE(same_bits(model.run(std::vector<int64_t>(static_cast<size_t>(model.length), 1)), expected, dtype));
      EXPECT_TRUE(same_bits(model.run({3, 0, 1, model.length - 5, 1}), expected, dtype));
    }
  }
}

TEST(Attention, AnyNumberOfThreadsGivesTheSameBits) {
  for (const CacheType cache : {kBf16, kI8I4, kI4}) {
    const Model model(2, 4, 2, 32, 210, ElementType::bf16, cache);
    const std::vector<uint8_t> expected = model.run({210});
    for (const int count : {1, 2, 7}) {
      EXPECT_TRUE(same_bits(model.run({210}, threads(count)), expected, DType::bf16)) << count << " threads";
      EXPECT_TRUE(same_bits(model.run({17, 180, 13}, threads(count)), expected, DType::bf16)) << count << " threads";
    }
  }
}

// If there are fewer heads than threads, threads share the positions of a token, with the same bits.
TEST(Attention, ATokenWithFewHeadsOfKeys) {
  static int most;  // largest number of tasks that a call requested
  const Parallel counting{4, [](int count, void (*task)(void*, int), void* context) {
                            most = std::max(most, count);
                            for (int i = count - 1; i >= 0; --i) task(context, i);
                          }};
  // The last 16 of 1032 positions, which see two spans and then three.
  const Model models[] = {Model(1, 5, 1, 16, 1032, ElementType::f32, kF32),
                          Model(1, 17, 1, 32, 1032, ElementType::bf16, kI8I4),
                          Model(1, 4, 2, 16, 1032, ElementType::f32, kF16),
                          Model(1, 5, 1, 32, 1032, ElementType::f32, kI4)};
  for (const Model& model : models) {
    const DType dtype = dtype_of(model.type);
    // Earlier content of the caches, computed with as many query heads as KV heads, which is the least work.
    const Model before(1, model.kv_heads, model.kv_heads, model.width, 1016, model.type, model.cache_of);
    const Tensor k_before = model.cache(true), v_before = model.cache(false);
    EXPECT_TRUE(same_bits(before.run(before.q.view, before.k.view, before.v.view, {500, 516}, {}, k_before, v_before),
                          before.run({1016}), dtype));
    const auto copy = [&](const Tensor& cache, bool is_key) {
      Tensor same = model.cache(is_key);
      std::memcpy(same.memory->data(), cache.memory->data(), static_cast<size_t>(same.memory->size()));
      return same;
    };
    const auto end = [&](const std::vector<int64_t>& counts, const Parallel& parallel) {
      return model.run(model.q.view, model.k.view, model.v.view, counts, parallel, copy(k_before, true),
                       copy(v_before, false), 1016);
    };
    const std::vector<uint8_t> expected = end({16}, {});
    for (const Parallel& parallel : {Parallel(), threads(7), counting}) {
      EXPECT_TRUE(same_bits(end({1, 1, 13, 1}, parallel), expected, dtype));
    }
  }
  // Three spans and one head make three tasks.
  const Model model(1, 4, 1, 64, 1290, ElementType::f32, kF32);
  const Tensor k_cache = model.cache(true), v_cache = model.cache(false);
  for (const Tensor* cache : {&k_cache, &v_cache}) accept(cache->memory->data(), cache->memory->size());  // only counted
  Tensor out(ElementType::f32, {1, 1, 4, 64});
  most = 0;
  EXPECT_TRUE(attention(positions(model.q.view, 1289, 1), positions(model.k.view, 1289, 1),
                        positions(model.v.view, 1289, 1), k_cache.view, v_cache.view, start_tensor(1289).view, {kScale},
                        out.view, counting).ok());
  EXPECT_EQ(most, 3);
}

TEST(Attention, TheCachesHoldTheText) {
  for (const ElementType type : kTypes) {
    const Model model(2, 2, 2, 32, 37, type, cache_type_of(dtype_of(type)));
    for (const int count : {1, 3}) {
      const Tensor k_cache = model.cache(true), v_cache = model.cache(false), untouched = model.cache(true);
      model.run(model.q.view, model.k.view, model.v.view, {20, 1, 16}, threads(count), k_cache, v_cache);
      const int64_t head_values = model.max_length * 32;
      for (int64_t i = 0; i < 4 * head_values; ++i) {
        const int64_t head = i / head_values, position = i % head_values / 32, input = i % 32;
        const int64_t panel_at = head * head_values + (position / 16 * 32 + input) * 16 + position % 16;
        const bool written = position < model.length;
        const int64_t source = (head * model.length + position) * 32 + input;
        const size_t item = static_cast<size_t>(element_bytes(type));
        for (const auto& [cache, at] : {std::pair(&k_cache, panel_at), std::pair(&v_cache, i)}) {
          if (!written) accept(element(cache->view, at), element_bytes(type));
        }
        accept(untouched.memory->data(), element_bytes(type));
        const auto is = [&](const Tensor& cache, int64_t at, const Tensor& from) {
          return std::memcmp(element(cache.view, at), written ? element(from.view, source) : untouched.memory->data(),
                             item) == 0;
        };
        ASSERT_TRUE(is(k_cache, panel_at, model.k)) << "key " << i;
        ASSERT_TRUE(is(v_cache, i, model.v)) << "value " << i;
      }
    }
  }
}

// Each head has the codes of all positions, then their scales; nothing else is written.
TEST(Attention, CachesHoldCodesAndScales) {
  for (const CacheType cache : {kI8, kI4, kI8I4}) {
    const Model model(2, 2, 2, 32, 37, ElementType::f32, cache);
    for (const int count : {1, 3}) {
      const Tensor k_cache = model.cache(true), v_cache = model.cache(false), untouched = model.cache(true);
      model.run(model.q.view, model.k.view, model.v.view, {20, 1, 16}, threads(count), k_cache, v_cache);
      for (const Tensor* each : {&k_cache, &v_cache, &untouched}) accept(each->memory->data(), each->memory->size());
      const uint8_t fill = untouched.bytes()[0];
      for (int64_t head = 0; head < 4; ++head) {
        for (const bool is_key : {true, false}) {
          const int64_t head_bytes = model.max_length * position_bytes(is_key ? key_type(cache) : value_type(cache), 32);
          std::vector<float> scales;
          std::vector<uint8_t> expected = model.cached(is_key, head, fill, &scales);
          const size_t codes = expected.size();
          expected.resize(static_cast<size_t>(head_bytes), fill);
          for (int64_t i = 0; i < model.length; ++i) {
            store_from_f32(expected.data() + codes, DType::f32, i, scales[static_cast<size_t>(i)]);
          }
          const uint8_t* found = element((is_key ? k_cache : v_cache).view, head * head_bytes);
          EXPECT_TRUE(std::equal(expected.begin(), expected.end(), found)) << "head " << head << ", keys: " << is_key;
        }
      }
    }
  }
}

TEST(Attention, Strides) {
  for (const auto& [type, cache] : {Kind{ElementType::f32, kI8}, {ElementType::bf16, kI8I4}, {ElementType::f16, kI4}}) {
    const Model model(2, 4, 2, value_type(cache) == kI4 ? 64 : 48, 21, type, cache);
    const std::vector<uint8_t> expected = model.expected();
    // The same values with other orders of dimensions in memory, including the last dimension first.
    for (const std::vector<int>& order : {std::vector<int>{0, 2, 1, 3}, {3, 2, 1, 0}, {1, 3, 0, 2}}) {
      std::vector<Tensor> kept;
      const auto reordered = [&](const Tensor& tensor) {
        std::vector<int64_t> sizes, strides(4);
        for (const int d : order) sizes.push_back(tensor.view.shape.size[d]);
        const std::vector<int64_t> dense = contiguous_strides(sizes);
        for (size_t i = 0; i < 4; ++i) strides[static_cast<size_t>(order[i])] = dense[i];
        kept.emplace_back(type, sizes);
        TensorView view = tensor.view;
        view.data = kept.back().memory->data();
        for (size_t d = 0; d < 4; ++d) view.stride[d] = strides[d];
        for (int64_t i = 0; i < tensor.view.shape.numel(); ++i) {
          std::memcpy(const_cast<uint8_t*>(element(view, i)), element(tensor.view, i),
                      static_cast<size_t>(element_bytes(type)));
        }
        return view;
      };
      const TensorView q = reordered(model.q), k = reordered(model.k), v = reordered(model.v);
      EXPECT_TRUE(
          same_bits(model.run(q, k, v, {13, 8}, {}, model.cache(true), model.cache(false)), expected, dtype_of(type)));
      for (const Tensor& tensor : kept) EXPECT_TRUE(tensor.memory->intact());
    }
  }
}

TEST(Attention, Refusals) {
  const Model model(1, 4, 2, 32, 10, ElementType::f32, kF32);
  Tensor k_cache = model.cache(true), v_cache = model.cache(false), out(ElementType::f32, {1, 10, 4, 32});
  const Tensor zero = start_tensor(0);
  const auto good = [&] {
    return attention(model.q.view, model.k.view, model.v.view, k_cache.view, v_cache.view, zero.view, {kScale}, out.view,
                     {});
  };
  ASSERT_TRUE(good().ok());
  for (Tensor* tensor : {&k_cache, &v_cache, &out}) tensor->memory->freeze();

  // The arguments in order, with one changed.
  const auto with = [&](size_t index, auto change) {
    TensorView views[7] = {model.q.view, model.k.view, model.v.view, k_cache.view, v_cache.view, zero.view, out.view};
    change(views[index]);
    return attention(views[0], views[1], views[2], views[3], views[4], views[5], {kScale}, views[6], {});
  };
  const char* const names[] = {"q", "k", "v", "k_cache", "v_cache", "start", "out"};
  for (size_t i = 0; i < 7; ++i) {
    const std::string name = names[i];
    EXPECT_TRUE(refused(with(i, [](auto& t) { t.on_cpu = false; }), (name + " is not on the CPU").c_str()));
    for (const ElementType type : {ElementType::f16, ElementType::f64, ElementType::i32, ElementType::i8}) {
      EXPECT_FALSE(with(i, [&](auto& t) { t.type = type; }).ok()) << name;
    }
    EXPECT_FALSE(with(i, [](auto& t) { t.shape.ndim = 3; }).ok()) << name;
    EXPECT_FALSE(with(i, [](auto& t) { t.shape.ndim = 5; t.shape.size[4] = 2; }).ok()) << name;
    for (int d = 0; d < (i == 5 ? 1 : 4); ++d) {
      for (const int64_t change : {-1, 1, 16}) {
        // More query heads than the output has.
        EXPECT_FALSE(with(i, [&](auto& t) { t.shape.size[d] += change; }).ok()) << name << " dimension " << d;
      }
    }
  }
  for (const size_t i : {3, 4, 6}) {
    const std::string message = std::string(names[i]) + " is not contiguous";
    EXPECT_TRUE(refused(with(i, [](auto& t) { t.stride[2] += 1; }), message.c_str()));
  }
  EXPECT_TRUE(refused(with(4, [&](auto& t) { t.data = k_cache.view.data; }), "share memory"));
  EXPECT_TRUE(refused(with(6, [&](auto& t) { t.data = k_cache.memory->data() + 100; }), "share memory"));
  EXPECT_TRUE(refused(with(6, [&](auto& t) { t.data = v_cache.view.data; }), "share memory"));

  // int8 caches have 4 more bytes per position; both caches are int8, or neither.
  const auto over = [&](const Tensor& keys, const Tensor& values) {
    return attention(model.q.view, model.k.view, model.v.view, keys.view, values.view, zero.view, {kScale}, out.view, {});
  };
  const auto int8_cache = [](int64_t width) { return Tensor(ElementType::i8, {1, 2, 16, width}); };
  const Tensor codes = int8_cache(36), more_codes = int8_cache(36), no_scales = int8_cache(32), pairs = int8_cache(20);
  EXPECT_TRUE(refused(over(no_scales, codes), "k_cache has shape [1, 2, 16, 32]; expected [1, 2, 16, 36], or 20 for 4 bits"));
  // Caches of 4-bit codes have half the bytes: for keys and values, or only for values.
  EXPECT_TRUE(refused(over(pairs, codes), "k_cache has 4-bit codes and v_cache has shape [1, 2, 16, 36], int8; expected 20"));
  EXPECT_TRUE(refused(over(pairs, no_scales), "v_cache has shape [1, 2, 16, 32]; expected [1, 2, 16, 36], or 20 for 4 bits"));
  Tensor another(ElementType::f32, {1, 10, 4, 32});
  EXPECT_TRUE(attention(model.q.view, model.k.view, model.v.view, codes.view, pairs.view, zero.view, {kScale}, another.view, {})
                  .ok());
  EXPECT_TRUE(refused(over(pairs, v_cache), "v_cache has dtype float32; expected int8"));
  EXPECT_TRUE(refused(over(pairs, pairs), "share memory"));
  EXPECT_TRUE(refused(over(codes, no_scales), "v_cache has shape [1, 2, 16, 32]; expected [1, 2, 16, 36], or 20 for 4 bits"));
  EXPECT_TRUE(refused(over(codes, v_cache), "v_cache has dtype float32; expected int8"));
  EXPECT_TRUE(refused(over(k_cache, codes), "v_cache has dtype int8; expected float32"));
  EXPECT_TRUE(refused(over(codes, codes), "share memory"));

  // Zero KV heads must be refused, not ignored with unchanged caches.
  EXPECT_TRUE(refused(
      [&] {
        TensorView q = model.q.view, to = out.view;
        q.shape.size[1] = to.shape.size[2] = 0;
        return attention(q, model.k.view, model.v.view, k_cache.view, v_cache.view, zero.view, {kScale}, to, {});
      }(),
      "q has 0 heads; expected 1 or more times 2"));

  for (const int64_t start : {int64_t{-1}, int64_t{7}, int64_t{16}, INT64_MIN, INT64_MAX, INT64_MAX - 9}) {
    const Tensor wrong = start_tensor(start);
    const Status status = with(5, [&](auto& t) { t = wrong.view; });
    const std::string message = "start is " + std::to_string(start) + " with 10 new positions; expected 0 to 6";
    EXPECT_TRUE(refused(status, message.c_str(), Status::Kind::out_of_range));
  }
  const auto scored = [&](const Scores& scores) {
    return attention(model.q.view, model.k.view, model.v.view, k_cache.view, v_cache.view, zero.view, scores, out.view,
                     {});
  };
  EXPECT_TRUE(refused(scored({kScale, -1}), "window is -1; expected 1 or more, or 0 for none"));
  for (const double cap : {-1.0, double{NAN}, double{INFINITY}, 1e-320, 1e-7, 1e31}) {
    EXPECT_TRUE(refused(scored({kScale, 0, cap}), "softcap is "));
  }
  for (const double scale : {double{NAN}, -double{INFINITY}, 1e31}) {
    EXPECT_TRUE(refused(scored({scale}), "scale is "));
  }
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{3}, {4, 1}, {0}}) {
    const Tensor sinks(ElementType::f32, shape);
    EXPECT_TRUE(refused(scored({kScale, 0, 0.0, &sinks.view}), "sinks has dtype float32 and shape"));
  }
  const Tensor half(ElementType::f16, {4});
  EXPECT_TRUE(refused(scored({kScale, 0, 0.0, &half.view}), "sinks has dtype float16 and shape [4]; expected float32"));
  Tensor far(ElementType::f32, {4});
  far.view.on_cpu = false;
  EXPECT_TRUE(refused(scored({kScale, 0, 0.0, &far.view}), "sinks is not on the CPU"));
  EXPECT_TRUE(out.memory->intact() && k_cache.memory->intact() && v_cache.memory->intact())
      << "a refused call writes nothing";
  EXPECT_TRUE(good().ok());
}

// Tensors with more elements than an int can count. The call is refused for its actual error, without touching memory.
TEST(WindowAttention, StridesBeyondAnInt) {
  const auto at = [](uintptr_t tebibyte, const Shape& shape) {
    TensorView view{reinterpret_cast<void*>(tebibyte << 40), ElementType::f32, true, shape, {}};
    int64_t stride = 1;
    for (int d = shape.ndim - 1; d >= 0; --d) {
      view.stride[d] = stride;
      stride *= shape.size[d];
    }
    return view;
  };
  constexpr int64_t kPositions = 65536, kHeads = 64, kWidth = 512, kWindow = 16;
  const Shape rows{4, {2, kHeads, kPositions, kWidth}}, cache{4, {2, kHeads, kPositions + kWindow + 512, kWidth}};
  const TensorView out = at(1, {4, {2, kPositions, kHeads, kWidth}});
  int64_t positions[] = {0, 0};
  const TensorView held{positions, ElementType::i64, true, {1, {2}}, {1}};
  const TensorView start{positions + 1, ElementType::i64, true, {1, {1}}, {1}};
  EXPECT_TRUE(refused(window_attention(at(1, rows), at(2, rows), at(3, rows), at(4, cache), at(5, cache), held, start,
                                       {1.0, kWindow}, out, {}),
                      "out and q share memory"));
}

}  // namespace
}  // namespace lowbit::test
