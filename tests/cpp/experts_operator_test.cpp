// Linear layers of experts: each result has the bits of the portable kernels, run row by row with the expert's matrix. Also
// strides, threads, chunks, refusals. ctest runs this once per LOWBIT_ISA.

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>

#include "support/tensors.h"

namespace lowbit::test {
namespace {

constexpr int64_t kOutputs = 37, kInputs = 50;

struct Model {
  std::vector<Layout> layouts;  // with levels, each expert has its own table
  Tensor packed_weights;

  explicit Model(int64_t experts, int64_t n = kOutputs, int64_t k = kInputs, int bits = 4, int64_t group_size = 32,
                 Mapping mapping = Mapping::symmetric)
      : Model(experts, layout_of(n, k, bits, group_size, mapping, true)) {}
  Model(int64_t experts, const Layout& layout) : packed_weights(make(experts, layout, &layouts)) {}

  static Tensor make(int64_t experts, const Layout& layout, std::vector<Layout>* layouts) {
    Random random(static_cast<uint64_t>(layout.bits));
    Tensor tensor(ElementType::u8, {experts, layout.total_bytes});
    for (int64_t i = 0; i < experts; ++i) {
      const std::vector<uint8_t> bytes = packed(random_weights(layout, random));
      std::memcpy(tensor.memory->data() + i * layout.total_bytes, bytes.data(), bytes.size());
      layouts->emplace_back();
      EXPECT_TRUE(read_header(bytes.data(), layout.total_bytes, &layouts->back()).ok());
    }
    tensor.memory->freeze();
    return tensor;
  }

  int64_t n() const { return layouts[0].n; }

  // `chosen` has the values of `experts` in order.
  std::vector<uint8_t> expected(const TensorView& x, const std::vector<int64_t>& chosen) const {
    const int64_t rows = x.shape.numel() / layouts[0].k, bytes = n() * element_bytes(x.type);
    std::vector<uint8_t> out(chosen.size() * static_cast<size_t>(bytes));
    for (size_t expert = 0; expert < layouts.size(); ++expert) {
      const std::vector<uint8_t> all = expected_linear(
          x, packed_weights.memory->data() + static_cast<int64_t>(expert) * layouts[0].total_bytes, layouts[expert]);
      for (size_t i = 0; i < chosen.size(); ++i) {
        const size_t row = i / (chosen.size() / static_cast<size_t>(rows));
        if (chosen[i] != static_cast<int64_t>(expert)) continue;
        std::memcpy(out.data() + i * static_cast<size_t>(bytes), all.data() + row * static_cast<size_t>(bytes),
                    static_cast<size_t>(bytes));
      }
    }
    return out;
  }

  void check(const TensorView& x, const TensorView& experts, const std::vector<int64_t>& chosen,
             const Parallel& parallel = {}) const {
    Shape shape;
    const Status good = linear_experts_shape(x, experts, n(), &shape);
    ASSERT_TRUE(good.ok()) << good.message();
    Tensor out(x.type, {shape.size, shape.size + shape.ndim});
    const std::vector<uint8_t> wanted = expected(x, chosen);  // computed before a host changes its memory
    const Status status = linear_experts(x, packed_weights.view, experts, n(), out.view, parallel);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(same_bits(out.bytes(), wanted, dtype_of(x.type)));
    EXPECT_TRUE(out.memory->intact());
    EXPECT_TRUE(packed_weights.memory->intact());
  }
};

// Choices among `count` experts; some get many rows and some none.
std::vector<int64_t> choices(int64_t results, int64_t count, Random& random) {
  std::vector<int64_t> chosen;
  for (int64_t i = 0; i < results; ++i) chosen.push_back(random.below(1 + random.below(count)));
  return chosen;
}

Tensor index_tensor(const std::vector<int64_t>& values, const std::vector<int64_t>& sizes) {
  Tensor tensor = test::index_tensor(values);
  tensor.view = view_of(tensor.memory->data(), ElementType::i64, sizes, contiguous_strides(sizes));
  return tensor;
}

TEST(LinearExperts, EveryWidthAndType) {
  Random random(1);
  for (int bits = 1; bits <= 8; ++bits) {
    for (const Mapping mapping : mappings_of_width(bits)) {
      const Model model(5, kOutputs, kInputs, bits, bits % 2 == 0 ? 16 : 0, mapping);
      for (const ElementType type : {ElementType::f32, ElementType::bf16, ElementType::f16}) {
        for (const int64_t rows : {1, 30}) {
          for (const int64_t each : {1, 3}) {
            const std::vector<int64_t> chosen = choices(rows * each, 5, random);
            model.check(random_tensor(type, {rows, kInputs}, random).view, index_tensor(chosen, {rows, each}).view, chosen);
          }
        }
      }
    }
  }
}

TEST(LinearExperts, RotatedInputs) {
  Random random(2);
  const Model model(5, rotated(layout_of(kOutputs, 96, 4, 32, Mapping::symmetric, true), 32));
  for (const ElementType type : {ElementType::f32, ElementType::bf16, ElementType::f16}) {
    const std::vector<int64_t> chosen = choices(60, 5, random);
    const Tensor x = random_tensor(type, {30, 96}, random);
    model.check(x.view, index_tensor(chosen, {30, 2}).view, chosen, threads(2));
    model.check(view_of(x.memory->data(), type, {30, 96}, {1, 30}), index_tensor(chosen, {30, 2}).view, chosen);
  }
}

TEST(LinearExperts, TwoPlanes) {
  Random random(2);
  for (const Mapping mapping : {Mapping::symmetric, Mapping::affine}) {
    for (const int64_t n : {int64_t{1}, kOutputs, int64_t{3000}}) {
      const Model model(5, in_planes(rotated(layout_of(n, 96, 4, 32, mapping, n != 1), n == kOutputs ? 32 : 0)));
      for (const ElementType type : {ElementType::f32, ElementType::bf16, ElementType::f16}) {
        for (const int64_t rows : {1, 30}) {
          const std::vector<int64_t> chosen = choices(2 * rows, 5, random);
          const Tensor x = random_tensor(type, {rows, 96}, random), experts = index_tensor(chosen, {rows, 2});
          model.check(x.view, experts.view, chosen, threads(2));
          model.check(view_of(x.memory->data(), type, {rows, 96}, {1, rows}), experts.view, chosen);
        }
      }
    }
  }
}

// A call keeps data per expert in pieces of 64 bytes, which eight numbers fill.
TEST(LinearExperts, AnyNumberOfExperts) {
  Random random(8);
  for (const int64_t count : {1, 2, 7, 8, 9, 15, 16, 17, 32}) {
    const Model model(count);
    std::vector<int64_t> chosen;
    for (int64_t i = 0; i < 3 * count; ++i) chosen.push_back(i * 5 % count);
    model.check(random_tensor(ElementType::f32, {3 * count, kInputs}, random).view,
                index_tensor(chosen, {3 * count, 1}).view, chosen, threads(2));
  }
}

TEST(LinearExperts, Shapes) {
  Random random(2);
  const Model model(3);
  for (const std::vector<int64_t>& leading :
       std::vector<std::vector<int64_t>>{{}, {0}, {2, 3}, {3, 0, 2}, {1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 2, 1}}) {
    for (const int64_t each : {0, 1, 2}) {
      std::vector<int64_t> x_sizes = leading, index_sizes = leading;
      x_sizes.push_back(kInputs);
      index_sizes.push_back(each);
      int64_t results = each;
      for (const int64_t size : leading) results *= size;
      const std::vector<int64_t> chosen = choices(results, 3, random);
      const Tensor x = random_tensor(ElementType::f32, x_sizes, random), experts = index_tensor(chosen, index_sizes);
      if (results > 0) {
        model.check(x.view, experts.view, chosen);
      } else {
        index_sizes.push_back(kOutputs);
        Tensor out(ElementType::f32, index_sizes);
        EXPECT_TRUE(linear_experts(x.view, model.packed_weights.view, experts.view, kOutputs, out.view, {}).ok());
      }
    }
  }
}

TEST(LinearExperts, AnyStrides) {
  Random random(3);
  const Model model(4);
  const Tensor base = random_tensor(ElementType::bf16, {60, 60}, random);
  const std::vector<int64_t> numbers = choices(40, 4, random);
  const Tensor experts = index_tensor(numbers, {40});
  void* const data = base.memory->data();
  int64_t* const index = experts.memory->as<int64_t>();
  const auto at = [&](std::initializer_list<size_t> places) {
    std::vector<int64_t> chosen;
    for (const size_t place : places) chosen.push_back(numbers[place]);
    return chosen;
  };
  const auto rows = [&](std::vector<int64_t> strides) { return view_of(data, ElementType::bf16, {3, kInputs}, strides); };
  model.check(rows({1, 60}), view_of(index, ElementType::i64, {3, 2}, {1, 3}), at({0, 3, 1, 4, 2, 5}));
  model.check(rows({60, 1}), view_of(index, ElementType::i64, {3, 2}, {0, 1}), at({0, 1, 0, 1, 0, 1}));
  model.check(rows({0, 1}), view_of(index + 8, ElementType::i64, {3, 2}, {-2, -1}), at({8, 7, 6, 5, 4, 3}));
  model.check(rows({0, 0}), view_of(index, ElementType::i64, {3, 1}, {7, 5}), at({0, 7, 14}));
}

TEST(LinearExperts, AnyNumberOfThreadsGivesTheSameBits) {
  Random random(4);
  const Model model(6, 200, 256);
  for (const int64_t rows : {1, 5, 130}) {  // with 130 rows, threads also share the quantization
    const std::vector<int64_t> chosen = choices(rows * 4, 6, random);
    const Tensor x = random_tensor(ElementType::f32, {rows, 256}, random), experts = index_tensor(chosen, {rows, 4});
    for (const int count : {1, 2, 7}) model.check(x.view, experts.view, chosen, threads(count));
    const TensorView turned = view_of(x.memory->data(), ElementType::f32, {rows, 256}, {1, rows});
    model.check(turned, experts.view, chosen, threads(3));  // gathered by threads
  }
}

// Enough rows that their quantized values exceed the operator's scratch memory (16 MiB), and that one expert's rows make
// several parts.
TEST(LinearExperts, ManyRowsInChunks) {
  Random random(5);
  constexpr int64_t kRows = 2600;
  const Model model(2, 3, 4000, 2, 0);
  const std::vector<int64_t> chosen = choices(kRows * 2, 2, random);
  const Tensor x = random_tensor(ElementType::bf16, {kRows, 4000}, random), experts = index_tensor(chosen, {kRows, 2});
  model.check(x.view, experts.view, chosen);
  model.check(x.view, experts.view, chosen, threads(2));
}

// Experts that no row has chosen may contain anything.
TEST(LinearExperts, OnlyChosenOnesAreRead) {
  Random random(6);
  const Model model(4);
  Tensor packed(ElementType::u8, {4, model.layouts[0].total_bytes});
  std::memcpy(packed.memory->data(), model.packed_weights.memory->data(), static_cast<size_t>(packed.memory->size()));
  std::memset(packed.memory->data() + 2 * model.layouts[0].total_bytes, 0, 64);
  const Tensor x = random_tensor(ElementType::f32, {2, kInputs}, random);
  Tensor out(ElementType::f32, {2, 2, kOutputs});
  const auto run = [&](const std::vector<int64_t>& chosen) {
    return linear_experts(x.view, packed.view, index_tensor(chosen, {2, 2}).view, kOutputs, out.view, {});
  };
  ASSERT_TRUE(run({3, 0, 1, 3}).ok());
  EXPECT_TRUE(same_bits(out.bytes(), model.expected(x.view, {3, 0, 1, 3}), DType::f32));
  EXPECT_TRUE(refused(run({3, 0, 2, 3}), "expert 2: "));
}

// The host changes the indices between the check and the computation, as another thread might. Matrices and output are between
// inaccessible pages.
TEST(LinearExperts, WhatWasCheckedIsWhatIsRead) {
  static Tensor* lent;
  Random random(7);
  const Model model(3, 200, 256);
  const std::vector<int64_t> chosen = choices(400, 3, random);
  Tensor experts(ElementType::i64, {200, 2});
  std::memcpy(experts.memory->data(), chosen.data(), chosen.size() * sizeof(int64_t));
  lent = &experts;
  const Parallel host{2, [](int tasks, void (*task)(void*, int), void* context) {
                        std::memset(lent->memory->data(), 0x71, static_cast<size_t>(lent->memory->size()));
                        for (int i = 0; i < tasks; ++i) task(context, i);
                      }};
  model.check(random_tensor(ElementType::f32, {200, 256}, random).view, experts.view, chosen, host);
}

TEST(LinearExperts, IndicesThatChangeMeanwhile) {
  Random random(8);
  const Model model(3);
  const Tensor x = random_tensor(ElementType::f32, {8, kInputs}, random);
  Tensor experts(ElementType::i64, {8, 2}), out(ElementType::f32, {8, 2, kOutputs});
  std::memset(experts.memory->data(), 0, static_cast<size_t>(experts.memory->size()));
  auto* const values = experts.memory->as<std::atomic<int64_t>>();
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t i = 0; !stop; ++i) values[i % 16].store(i % 3 == 0 ? INT64_MAX - 7 : static_cast<int64_t>(i % 3));
  });
  for (int i = 0; i < 2000; ++i) {
    const Status status = linear_experts(x.view, model.packed_weights.view, experts.view, kOutputs, out.view, {});
    EXPECT_TRUE(status.ok() || status.kind() == Status::Kind::out_of_range) << status.message();
  }
  stop = true;
  writer.join();
  EXPECT_TRUE(out.memory->intact());
}

TEST(LinearExperts, Refusals) {
  Random random(9);
  const Model model(3);
  const TensorView& w = model.packed_weights.view;
  const Tensor x = random_tensor(ElementType::f32, {2, kInputs}, random), experts = index_tensor({0, 1, 2, 0}, {2, 2});
  Tensor out(ElementType::f32, {2, 2, kOutputs});
  const auto run = [&](const TensorView& rows, const TensorView& weights, const TensorView& index, int64_t n) {
    return linear_experts(rows, weights, index, n, out.view, {});
  };
  const auto changed = [](TensorView view, auto change) {
    change(view);
    return view;
  };
  ASSERT_TRUE(run(x.view, w, experts.view, kOutputs).ok());
  out.memory->freeze();
  const auto kind = Status::Kind::out_of_range;
  EXPECT_TRUE(refused(run(x.view, w, index_tensor({0, 1, 3, 0}, {2, 2}).view, kOutputs),
                      "expert 3 (number 2 of 4) is out of range; expected 0 to 2", kind));
  EXPECT_TRUE(refused(run(x.view, w, index_tensor({0, -1, 0, 0}, {2, 2}).view, kOutputs), "expert -1 (number 1", kind));
  EXPECT_TRUE(refused(run(x.view, w, index_tensor({INT64_MIN, 0, 0, 0}, {2, 2}).view, kOutputs), "out of range", kind));
  EXPECT_TRUE(refused(run(x.view, w, experts.view, 36), "out_features is 36; expected 37, the rows of expert 0"));
  EXPECT_TRUE(refused(run(x.view, w, experts.view, 0), "out_features is 0; expected 1 or more"));
  EXPECT_TRUE(refused(run(changed(x.view, [](auto& v) { v.shape.size[1] = 49; }), w, experts.view, kOutputs),
                      "x has shape [2, 49]; expected [..., 50], the inputs of expert 0"));
  EXPECT_TRUE(refused(run(changed(x.view, [](auto& v) { v.shape.ndim = 0; }), w, experts.view, kOutputs), "no dimensions"));
  EXPECT_TRUE(refused(run(changed(x.view, [](auto& v) { v.type = ElementType::i32; }), w, experts.view, kOutputs),
                      "x has dtype int32"));
  EXPECT_TRUE(refused(run(x.view, w, changed(experts.view, [](auto& v) { v.type = ElementType::i32; }), kOutputs),
                      "experts has dtype int32; expected int64"));
  EXPECT_TRUE(refused(run(x.view, w, changed(experts.view, [](auto& v) { v.shape.size[0] = 1; }), kOutputs),
                      "experts has shape [1, 2]; expected that of x, [2, 50]"));
  EXPECT_TRUE(refused(run(x.view, w, changed(experts.view, [](auto& v) { v.shape.ndim = 1; }), kOutputs),
                      "experts has shape [2]"));
  for (const auto& [index, name] : {std::pair{0, "x"}, {1, "packed_weights"}, {2, "experts"}}) {
    TensorView views[] = {x.view, w, experts.view};
    views[index].on_cpu = false;
    EXPECT_TRUE(refused(run(views[0], views[1], views[2], kOutputs), (std::string(name) + " is not on the CPU").c_str()));
  }
  EXPECT_TRUE(refused(run(x.view, changed(w, [](auto& v) { v.shape.ndim = 1; }), experts.view, kOutputs),
                      "expected uint8 and [experts, bytes]"));
  EXPECT_TRUE(refused(run(x.view, changed(w, [](auto& v) { v.shape.size[0] = 0; }), experts.view, kOutputs),
                      "expected uint8 and [experts, bytes]"));
  EXPECT_TRUE(refused(run(x.view, changed(w, [](auto& v) { v.stride[0] += 1; }), experts.view, kOutputs), "not contiguous"));
  EXPECT_TRUE(refused(run(x.view,
                          changed(w, [](auto& v) { v.stride[0] = v.shape.size[1] -= 64; }), experts.view, kOutputs),
                      "expert 0: packed weight has"));
  EXPECT_TRUE(refused(linear_experts(x.view, w, experts.view, kOutputs,
                                     changed(out.view, [](auto& v) { v.shape.size[1] = 1; }), {}),
                      "out has shape [2, 1, 37]; expected [2, 2, 37]"));
  // Experts packed differently: the same number of bytes, but another group size.
  const Layout one = layout_of(kOutputs, 64, 4, 48, Mapping::symmetric, true);
  const Layout other = layout_of(kOutputs, 64, 4, 32, Mapping::symmetric, true);
  ASSERT_EQ(one.total_bytes, other.total_bytes);
  Tensor unlike(ElementType::u8, {2, one.total_bytes});
  const std::vector<uint8_t> bytes[] = {packed(random_weights(one, random)), packed(random_weights(other, random))};
  for (int i : {0, 1}) {
    std::memcpy(unlike.memory->data() + i * one.total_bytes, bytes[i].data(), static_cast<size_t>(one.total_bytes));
  }
  EXPECT_TRUE(refused(run(random_tensor(ElementType::f32, {2, 64}, random).view, unlike.view,
                          index_tensor({0, 1, 1, 0}, {2, 2}).view, kOutputs),
                      "expert 1 has groups of 32 inputs; expected 48, as expert 0"));
  Tensor turned(ElementType::u8, {2, other.total_bytes});
  for (const int64_t block : {0, 32}) {
    const std::vector<uint8_t> expert = packed(random_weights(rotated(other, block), random));
    std::memcpy(turned.memory->data() + (block == 0 ? 0 : other.total_bytes), expert.data(), expert.size());
  }
  EXPECT_TRUE(refused(run(random_tensor(ElementType::f32, {2, 64}, random).view, turned.view,
                          index_tensor({0, 1, 1, 0}, {2, 2}).view, kOutputs),
                      "expert 1 has inputs in rotated blocks of 32; expected 0, as expert 0"));
  EXPECT_TRUE(refused(run(random_tensor(ElementType::f32, {2, 64}, random).view, turned.view,
                          index_tensor({1, 0, 1, 0}, {2, 2}).view, kOutputs),
                      "expert 0 has inputs in rotated blocks of 0; expected 32, as expert 1"));
  const std::vector<uint8_t> planes = packed(random_weights(in_planes(other), random));
  std::memcpy(turned.memory->data() + other.total_bytes, planes.data(), planes.size());
  EXPECT_TRUE(refused(run(random_tensor(ElementType::f32, {2, 64}, random).view, turned.view,
                          index_tensor({0, 1, 1, 0}, {2, 2}).view, kOutputs),
                      "expert 1 has activations of 16 bits; expected 8, as expert 0"));
  EXPECT_TRUE(out.memory->intact()) << "a refused call writes nothing";
}

// A matrix without rows is not read.
TEST(LinearExperts, ADamagedHeaderOfAnExpertThatIsNotChosen) {
  Random random(5);
  for (const int64_t damaged : {0, 1, 2}) {
    const Model model(3);
    Tensor weights(ElementType::u8, {3, model.packed_weights.view.shape.size[1]});
    std::memcpy(weights.memory->data(), model.packed_weights.view.data, static_cast<size_t>(weights.view.shape.numel()));
    const Tensor x = random_tensor(ElementType::f32, {2, kInputs}, random);
    const Tensor out(ElementType::f32, {2, 2, kOutputs}), expected(ElementType::f32, {2, 2, kOutputs});
    const int64_t a = (damaged + 1) % 3, b = (damaged + 2) % 3;
    const Tensor experts = index_tensor({a, b, b, a}, {2, 2});
    ASSERT_TRUE(linear_experts(x.view, weights.view, experts.view, kOutputs, expected.view, {}).ok());
    std::memset(weights.memory->data() + damaged * weights.view.shape.size[1], 7, 64);
    ASSERT_TRUE(linear_experts(x.view, weights.view, experts.view, kOutputs, out.view, {}).ok()) << damaged;
    EXPECT_EQ(std::memcmp(out.view.data, expected.view.data, 4 * 2 * 2 * kOutputs), 0) << damaged;
    const std::string says = "expert " + std::to_string(damaged) + ": ";
    for (const int64_t place : {0, 3}) {
      int64_t chosen[] = {a, b, b, a};
      chosen[place] = damaged;
      EXPECT_TRUE(refused(linear_experts(x.view, weights.view,
                                         index_tensor({chosen[0], chosen[1], chosen[2], chosen[3]}, {2, 2}).view, kOutputs,
                                         out.view, {}),
                          says.c_str()));
    }
  }
}

}  // namespace
}  // namespace lowbit::test
