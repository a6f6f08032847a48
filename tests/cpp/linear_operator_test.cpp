// The linear operator: strides and shapes, refusals, threads and chunks; always with the bits of the portable kernels
// run row by row. ctest runs this once per LOWBIT_ISA.

#include <gtest/gtest.h>

#include <atomic>

#include "support/tensors.h"

namespace lowbit::test {
namespace {

struct Model {
  Layout layout;
  Tensor packed_weight;

  Model(int64_t n, int64_t k, int bits = 4, int64_t group_size = 32, Mapping mapping = Mapping::symmetric)
      : layout(layout_of(n, k, bits, group_size, mapping, true)), packed_weight(make(layout)) {}

  static Tensor make(const Layout& layout) {
    Random random(static_cast<uint64_t>(layout.bits));
    return bytes_tensor(packed(random_weights(layout, random)));
  }

  // Runs the operator with a new output and compares.
  void check(const TensorView& x, const Parallel& parallel = {}) const {
    Shape shape;
    const Status good = linear_shape(x, layout.n, &shape);
    ASSERT_TRUE(good.ok()) << good.message();
    Tensor out(x.type, {shape.size, shape.size + shape.ndim});
    const Status status = linear(x, packed_weight.view, layout.n, out.view, parallel);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(same_bits(out.bytes(), expected_linear(x, packed_weight.memory->data(), layout), dtype_of(x.type)));
    EXPECT_TRUE(out.memory->intact());
    EXPECT_TRUE(packed_weight.memory->intact());
  }
};

constexpr ElementType kTypes[] = {ElementType::f32, ElementType::bf16, ElementType::f16};

TEST(Linear, EveryWidthAndType) {
  Random random(1);
  for (int bits = 1; bits <= 8; ++bits) {
    for (const Mapping mapping : {Mapping::symmetric, Mapping::affine}) {
      const Model model(37, 50, bits, 16, mapping);
      for (const ElementType type : kTypes) {
        for (const int64_t m : {1, 3, 6}) model.check(random_tensor(type, {m, 50}, random).view);
      }
    }
  }
}

TEST(Linear, LeadingDimensions) {
  Random random(2);
  const Model model(20, 33);
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{33},
                                         {1, 33},
                                         {2, 3, 33},
                                         {2, 1, 3, 1, 33},
                                         {0, 33},
                                         {3, 0, 33},
                                         {1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 33}}) {
    model.check(random_tensor(ElementType::f32, sizes, random).view);
  }
}

TEST(Linear, AnyStrides) {
  Random random(3);
  constexpr int64_t kInputs = 50;
  const Model model(20, kInputs);
  for (const ElementType type : kTypes) {
    const Tensor base = random_tensor(type, {60, 60, 4}, random);
    void* const data = base.memory->data();
    char* const last = static_cast<char*>(data) + (60 * 60 * 4 - 1) * element_bytes(type);
    model.check(view_of(data, type, {7, kInputs}, {1, 60}));           // transposed
    model.check(view_of(data, type, {7, kInputs}, {64, 1}));           // rows of a wider tensor
    model.check(view_of(data, type, {7, kInputs}, {120, 2}));          // every second input
    model.check(view_of(data, type, {7, kInputs}, {0, 1}));            // one row, expanded
    model.check(view_of(data, type, {7, kInputs}, {1, 0}));            // one input, expanded
    model.check(view_of(data, type, {7, kInputs}, {0, 0}));            // one value, expanded
    model.check(view_of(data, type, {3, 4, kInputs}, {50, 1000, 1}));  // leading dimensions in another order
    model.check(view_of(data, type, {3, 4, kInputs}, {1, 3, 240}));    // nothing in order
    model.check(view_of(last, type, {7, kInputs}, {-60, -1}));         // backwards
    EXPECT_TRUE(base.memory->intact());
  }
  const Model one_input(20, 1, 4, 0);
  const Tensor column = random_tensor(ElementType::f32, {9, 8}, random);
  one_input.check(view_of(column.memory->data(), ElementType::f32, {9, 1}, {8, 8}));
  one_input.check(view_of(column.memory->data(), ElementType::f32, {9, 1}, {8, 0}));
}

TEST(Linear, UnalignedMemory) {
  Random random(3);
  const Layout layout = layout_of(20, 50, 5, 48, Mapping::affine, true);
  const std::vector<uint8_t> bytes = packed(random_weights(layout, random));
  for (const int64_t gap : {1, 2, 4, 33}) {
    Guarded weight(layout.total_bytes, Wall::after, gap), x(3 * 50 * 2, Wall::after, gap);
    std::memcpy(weight.data(), bytes.data(), bytes.size());
    for (int64_t i = 0; i < 150; ++i) store_from_f32(x.data(), DType::bf16, i, random.normal());
    const TensorView x_view = view_of(x.data(), ElementType::bf16, {3, 50}, {50, 1});
    Tensor out(ElementType::bf16, {3, 20});
    const TensorView packed_view = view_of(weight.data(), ElementType::u8, {layout.total_bytes}, {1});
    ASSERT_TRUE(linear(x_view, packed_view, 20, out.view, {}).ok());
    EXPECT_TRUE(same_bits(out.bytes(), expected_linear(x_view, weight.data(), layout), DType::bf16));
  }
}

std::atomic<int> regions;

TEST(Linear, AnyNumberOfThreadsGivesTheSameBits) {
  Random random(4);
  const auto counted = [](int count) {
    Parallel parallel = threads(count);
    parallel.run = [](int tasks, void (*task)(void*, int), void* context) {
      ++regions;
      threads(tasks).run(tasks, task, context);
    };
    return parallel;
  };
  const Model model(200, 256);
  for (const int64_t m : {1, 5, 150}) {  // only the matrix product, and with 150 rows also the quantisation is divided
    const Tensor x = random_tensor(ElementType::f32, {m, 256}, random);
    for (const int count : {1, 2, 7}) {
      regions = 0;
      model.check(x.view, counted(count));
      EXPECT_EQ(regions, count > 1 && m > 1 ? 1 : 0) << m << " rows, " << count << " threads";
    }
    model.check(view_of(x.memory->data(), ElementType::f32, {m, 256}, {0, m}), threads(3));  // gathered by threads
  }
}

// So many rows that their quantised values do not fit the operator's scratch memory (24 MiB) at once.
TEST(Linear, ManyRowsInChunks) {
  Random random(5);
  constexpr int64_t kRows = 150000;  // of 128 bytes of values and at most 192 of sums and scales
  const Model model(3, 100, 2, 0);
  const Tensor x = random_tensor(ElementType::bf16, {kRows, 100}, random);
  model.check(x.view);
  model.check(view_of(x.memory->data(), ElementType::bf16, {kRows, 100}, {1, 100}), threads(2));
}

TEST(Linear, LongRowsInChunks) {
  Random random(6);
  constexpr int64_t kInputs = 800000;  // 32 rows make a chunk
  const Model model(1, kInputs, 1, 65536);
  const Tensor x = random_tensor(ElementType::f32, {1, kInputs}, random);
  const Tensor other = random_tensor(ElementType::f32, {1, 2 * kInputs}, random);
  model.check(x.view);
  model.check(view_of(other.memory->data(), ElementType::f32, {34, kInputs}, {997, 1}), threads(2));
}

TEST(Linear, RowsThatAreNotFiniteStayAlone) {
  Random random(7);
  const Model model(20, 50);
  Tensor x(ElementType::f32, {3, 50});
  for (int64_t i = 0; i < 150; ++i) x.memory->as<float>()[i] = random.normal();
  x.memory->as<float>()[60] = float_from_bits(0x7f800000u);
  for (int64_t i = 100; i < 150; ++i) x.memory->as<float>()[i] = 0.0f;
  model.check(x.view);
}

TEST(Linear, Refusals) {
  Random random(8);
  const Model model(20, 50);
  const TensorView& w = model.packed_weight.view;
  const Tensor x = random_tensor(ElementType::f32, {3, 50}, random);
  Tensor out(ElementType::f32, {3, 20});
  const auto run = [&](const TensorView& x_view, const TensorView& weight, int64_t n, const TensorView& to) {
    return linear(x_view, weight, n, to, {});
  };
  const auto changed = [](TensorView view, auto change) {
    change(view);
    return view;
  };
  ASSERT_TRUE(run(x.view, w, 20, out.view).ok());

  EXPECT_TRUE(refused(run(x.view, w, 21, out.view), "out_features is 21; expected 20"));
  EXPECT_TRUE(refused(run(x.view, w, 0, out.view), "out_features is 0"));
  EXPECT_TRUE(refused(run(x.view, w, -20, out.view), "out_features is -20"));
  EXPECT_TRUE(refused(run(changed(x.view, [](auto& v) { v.shape.size[1] = 49; }), w, 20, out.view),
                      "x has shape [3, 49]; expected [..., 50]"));
  EXPECT_TRUE(refused(run(changed(x.view, [](auto& v) { v.shape.ndim = 0; }), w, 20, out.view), "x has no dimensions"));
  for (const ElementType type : {ElementType::u8, ElementType::i32, ElementType::i64, ElementType::other}) {
    EXPECT_TRUE(refused(run(changed(x.view, [&](auto& v) { v.type = type; }), w, 20, out.view), "x has dtype"));
  }
  EXPECT_TRUE(refused(run(changed(x.view, [](auto& v) { v.on_cpu = false; }), w, 20, out.view), "x is not on the CPU"));

  EXPECT_TRUE(
      refused(run(x.view, changed(w, [](auto& v) { v.on_cpu = false; }), 20, out.view), "packed_weight is not on"));
  EXPECT_TRUE(refused(run(x.view, changed(w, [](auto& v) { v.type = ElementType::f32; }), 20, out.view),
                      "packed_weight has dtype float32"));
  EXPECT_TRUE(refused(run(x.view, view_of(w.data, ElementType::u8, {1, w.shape.size[0]}, {1, 1}), 20, out.view),
                      "expected uint8 and one dimension"));
  EXPECT_TRUE(refused(run(x.view, changed(w, [](auto& v) { v.stride[0] = 2; }), 20, out.view),
                      "packed_weight is not contiguous"));
  EXPECT_TRUE(
      refused(run(x.view, changed(w, [](auto& v) { v.shape.size[0] -= 64; }), 20, out.view), "packed weight has"));
  EXPECT_TRUE(refused(run(x.view, changed(w, [](auto& v) { v.shape.size[0] = 63; }), 20, out.view), "has 63 bytes"));
  EXPECT_TRUE(refused(run(x.view, changed(w, [](auto& v) { v.shape.size[0] = 0; }), 20, out.view), "has 0 bytes"));
  std::vector<uint8_t> altered = model.packed_weight.bytes();
  altered[30] ^= 1;
  EXPECT_TRUE(refused(run(x.view, bytes_tensor(altered).view, 20, out.view), "altered header"));

  EXPECT_TRUE(refused(run(x.view, w, 20, changed(out.view, [](auto& v) { v.type = ElementType::f16; })),
                      "out has dtype float16; expected float32"));
  EXPECT_TRUE(refused(run(x.view, w, 20, changed(out.view, [](auto& v) { v.shape.size[0] = 2; })),
                      "out has shape [2, 20]; expected [3, 20]"));
  EXPECT_TRUE(
      refused(run(x.view, w, 20, changed(out.view, [](auto& v) { v.stride[0] = 21; })), "out is not contiguous"));
  EXPECT_TRUE(
      refused(run(x.view, w, 20, changed(out.view, [](auto& v) { v.on_cpu = false; })), "out is not on the CPU"));
}

// A refused call writes nothing.
TEST(Linear, RefusalsLeaveTheOutputAlone) {
  Random random(9);
  const Model model(20, 50);
  const Tensor x = random_tensor(ElementType::f32, {3, 50}, random);
  Tensor out(ElementType::f32, {3, 20});
  out.memory->freeze();
  EXPECT_FALSE(linear(x.view, model.packed_weight.view, 19, out.view, {}).ok());
  EXPECT_TRUE(out.memory->intact());
}

}  // namespace
}  // namespace lowbit::test
