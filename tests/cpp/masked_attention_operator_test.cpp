// Attention without caches: the bits of attention() with caches, for any padding and any other texts in the batch; threads,
// refusals. ctest runs this once per LOWBIT_ISA.

#include <algorithm>
#include <gtest/gtest.h>
#include <limits>

#include "support/tensors.h"

namespace lowbit::test {
namespace {

constexpr double kScale = 0.3;

struct Case {
  ElementType type;
  int64_t heads, kv_heads, width, value_width, length;
};
constexpr Case kCases[] = {{ElementType::f32, 2, 2, 32, 32, 21}, {ElementType::bf16, 4, 1, 16, 48, 33},
                           {ElementType::f16, 2, 1, 16, 16, 530}, {ElementType::f32, 3, 1, 80, 80, 1},
                           {ElementType::f32, 8, 8, 16, 16, 9}};  // with three texts, threads claim whole heads

// q, k and v of one text.
struct Text {
  Tensor q, k, v;

  Text(const Case& one, uint64_t seed)
      : q(make(one, one.heads, one.width, seed)), k(make(one, one.kv_heads, one.width, seed + 1)),
        v(make(one, one.kv_heads, one.value_width, seed + 2)) {}

  static Tensor make(const Case& one, int64_t heads, int64_t width, uint64_t seed) {
    Random random(seed);
    return random_tensor(one.type, {1, heads, one.length, width}, random);
  }
};

// Bounds of texts of `positions` tokens with padding at the beginning or the end.
Tensor bounds_of(const std::vector<std::vector<int32_t>>& shown, bool causal, int64_t window) {
  const int64_t positions = static_cast<int64_t>(shown[0].size());
  std::vector<int32_t> values;
  for (const auto& text : shown) {
    for (int64_t i = 0; i < positions; ++i) {
      const int64_t begin = window == 0 ? 0 : std::max<int64_t>(0, i - window);
      const int64_t end = causal ? i + 1 : window == 0 ? positions : std::min(positions, i + window + 1);
      for (const int64_t value : {static_cast<int64_t>(text[static_cast<size_t>(i)]), begin, end}) {
        values.push_back(static_cast<int32_t>(value));
      }
    }
  }
  Tensor tensor(ElementType::i32, {static_cast<int64_t>(shown.size()), positions, 3});
  std::memcpy(tensor.memory->data(), values.data(), values.size() * 4);
  tensor.memory->freeze();
  return tensor;
}

std::vector<uint8_t> run(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView* bounds,
                         const Parallel& parallel = {}) {
  Shape shape;
  EXPECT_TRUE(attention_shape(q, v, &shape).ok());
  Tensor out(q.type, {shape.size[0], shape.size[1], shape.size[2], shape.size[3]});
  const Status status = masked_attention(q, k, v, bounds, kScale, 0.0, out.view, parallel);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(out.memory->intact());
  expect_written(out.memory->data(), out.memory->size());
  return out.bytes();
}

TEST(MaskedAttention, CausalBoundsGiveTheBitsOfAttention) {
  for (const Case& one : kCases) {
    const Text text(one, 1);
    const int64_t room = (one.length + 15) / 16 * 16;
    Tensor k_cache(one.type, {1, one.kv_heads, room, one.width}), v_cache(one.type, {1, one.kv_heads, room, one.value_width});
    Tensor expected(one.type, {1, one.length, one.heads, one.value_width});
    ASSERT_TRUE(attention(text.q.view, text.k.view, text.v.view, k_cache.view, v_cache.view, index_tensor<int64_t>({0}).view,
                          {kScale}, expected.view, {})
                    .ok());
    const Tensor bounds = bounds_of({std::vector<int32_t>(static_cast<size_t>(one.length), 1)}, true, 0);
    for (const int count : {1, 3}) {
      EXPECT_EQ(run(text.q.view, text.k.view, text.v.view, &bounds.view, threads(count)), expected.bytes());
    }
  }
}

TEST(MaskedAttention, ATextDoesNotDependOnPaddingAndOnOtherTexts) {
  for (const Case& one : kCases) {
    for (const auto& [causal, window] : {std::pair<bool, int64_t>{false, 0}, {true, 0}, {false, 3}}) {
      const Text text(one, 5);
      const Tensor whole = bounds_of({std::vector<int32_t>(static_cast<size_t>(one.length), 1)}, causal, window);
      const std::vector<uint8_t> alone = run(text.q.view, text.k.view, text.v.view, &whole.view);
      if (!causal && window == 0) {
        EXPECT_EQ(run(text.q.view, text.k.view, text.v.view, nullptr), alone);
      }

      // Three texts: with padding at the beginning, at the end, and only padding. Padding is NaN.
      const int64_t padding = 5, positions = one.length + padding;
      std::vector<std::vector<int32_t>> shown(3, std::vector<int32_t>(static_cast<size_t>(positions), 0));
      std::fill(shown[0].begin() + padding, shown[0].end(), 1);
      std::fill(shown[1].begin(), shown[1].end() - padding, 1);
      const auto padded = [&](const TensorView& from) {
        const int64_t heads = from.shape.size[1], width = from.shape.size[3];
        Tensor to(one.type, {3, heads, positions, width});
        for (int64_t i = 0; i < to.memory->size() / element_bytes(one.type); ++i) {
          store_from_f32(to.memory->data(), dtype_of(one.type), i, std::numeric_limits<float>::quiet_NaN());
        }
        const size_t bytes = static_cast<size_t>(one.length * width * element_bytes(one.type));
        for (int64_t b = 0; b < 2; ++b) {
          for (int64_t h = 0; h < heads; ++h) {
            const int64_t at = ((b * heads + h) * positions + (b == 0 ? padding : 0)) * width * element_bytes(one.type);
            std::memcpy(to.memory->data() + at, element(from, h * one.length * width), bytes);
          }
        }
        to.memory->freeze();
        return to;
      };
      const Tensor q = padded(text.q.view), k = padded(text.k.view), v = padded(text.v.view);
      const Tensor bounds = bounds_of(shown, causal, window);
      for (const int count : {1, 4}) {
        const std::vector<uint8_t> all = run(q.view, k.view, v.view, &bounds.view, threads(count));
        const size_t row = all.size() / static_cast<size_t>(3 * positions), text_bytes = static_cast<size_t>(positions) * row;
        std::vector<uint8_t> expected(all.size(), 0);
        std::copy(alone.begin(), alone.end(), expected.begin() + static_cast<int64_t>(static_cast<size_t>(padding) * row));
        std::copy(alone.begin(), alone.end(), expected.begin() + static_cast<int64_t>(text_bytes));
        EXPECT_EQ(all, expected);
      }
    }
  }
}

TEST(MaskedAttention, OtherNumbersOfKeysAndNoKeys) {
  const Case few{ElementType::f32, 2, 1, 32, 16, 3}, many{ElementType::f32, 2, 1, 32, 16, 40};
  const Text a(few, 1), b(many, 2);
  const std::vector<uint8_t> out = run(a.q.view, b.k.view, b.v.view, nullptr);
  TensorView last = a.q.view;  // a single query has the same bits
  last.data = static_cast<float*>(last.data) + 2 * 32;
  last.shape.size[2] = 1;
  const std::vector<uint8_t> alone = run(last, b.k.view, b.v.view, nullptr);
  EXPECT_TRUE(std::equal(alone.begin(), alone.end(), out.end() - static_cast<int64_t>(alone.size())));
  Tensor no_k(ElementType::f32, {1, 1, 0, 32}), no_v(ElementType::f32, {1, 1, 0, 16});
  const std::vector<uint8_t> nothing = run(a.q.view, no_k.view, no_v.view, nullptr);
  EXPECT_EQ(nothing, std::vector<uint8_t>(nothing.size(), 0));
}

TEST(MaskedAttention, Refusals) {
  const Case one{ElementType::f32, 2, 1, 32, 16, 4};
  const Text text(one, 1);
  Tensor out(ElementType::f32, {1, 4, 2, 16});
  const auto call = [&](const TensorView& q, const TensorView& v, const TensorView* bounds, double scale, double cap = 0.0) {
    return masked_attention(q, text.k.view, v, bounds, scale, cap, out.view, {});
  };
  const std::vector<int32_t> all(4, 1);
  Tensor bad = bounds_of({all}, false, 0), good = bounds_of({all}, false, 0);
  const auto set = [&](int64_t at, int32_t value) {
    Tensor changed(ElementType::i32, {1, 4, 3});
    std::memcpy(changed.memory->data(), good.memory->data(), 48);
    changed.memory->as<int32_t>()[at] = value;
    bad = std::move(changed);
    return call(text.q.view, text.v.view, &bad.view, kScale);
  };
  EXPECT_TRUE(refused(set(0, 2), "bounds of position 0 of text 0 are 2, 0 and 4; expected 0 or 1, and 0 <= begin <= end <= 4"));
  EXPECT_TRUE(refused(set(4, -1), "bounds of position 1 of text 0 are 1, -1 and 4"));
  EXPECT_TRUE(refused(set(5, 5), "bounds of position 1 of text 0 are 1, 0 and 5"));
  EXPECT_TRUE(refused(set(11, 3), "bounds of position 3 of text 0 begin or end before those of an earlier position"));
  TensorView changed = text.q.view;
  changed.type = ElementType::i32;
  EXPECT_TRUE(refused(call(changed, text.v.view, nullptr, kScale), "q has dtype int32; expected float32, bfloat16 or float16"));
  changed = text.q.view;
  changed.stride[3] = 2;
  EXPECT_TRUE(refused(call(changed, text.v.view, nullptr, kScale), "q has stride 2 in its last dimension; expected 1"));
  changed = text.v.view;
  changed.shape.size[3] = 8;
  EXPECT_TRUE(refused(call(text.q.view, changed, nullptr, kScale), "v has width 8; expected a multiple of 16 from 16 to"));
  EXPECT_TRUE(refused(call(text.q.view, text.v.view, nullptr, 1e40), "scale is 1e+40"));
  EXPECT_TRUE(refused(call(text.q.view, text.v.view, nullptr, kScale, -1.0), "softcap -1"));
  const TensorView &q = text.q.view, &v = text.v.view;
  EXPECT_TRUE(refused(masked_attention(q, text.k.view, v, nullptr, kScale, 0.0, q, {}), "out has shape"));
}

}  // namespace
}  // namespace lowbit::test
