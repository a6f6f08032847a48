// The embedding operator: index types, strides and shapes, refusals, threads. ctest runs this once per LOWBIT_ISA.

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>

#include "../../kernels/registry.h"
#include "support/tensors.h"

namespace lowbit::test {
namespace {

constexpr int64_t kRows = 40, kWidth = 50;

struct Model {
  Layout layout;
  Tensor packed_weight;

  explicit Model(int bits = 4, Mapping mapping = Mapping::affine, int64_t width = kWidth)
      : Model(layout_of(kRows, width, bits, 48, mapping, false)) {}
  explicit Model(const Layout& of) : layout(of), packed_weight(make(layout)) {}

  static Tensor make(const Layout& layout) {
    Random random(static_cast<uint64_t>(layout.bits));
    return bytes_tensor(packed(random_weights(layout, random)));
  }

  std::vector<uint8_t> expected(const std::vector<int64_t>& rows, DType dtype) const {
    std::vector<uint8_t> out(rows.size() * static_cast<size_t>(layout.k * size_of(dtype)));
    const uint8_t* const panels = packed_weight.memory->data() + layout.header_bytes;
    for (size_t i = 0; i < rows.size(); ++i) {
      uint8_t* const row = out.data() + i * static_cast<size_t>(layout.k * size_of(dtype));
      std::vector<float> floats(static_cast<size_t>(layout.k));
      const bool is_rotated = layout.rotation != 0;
      choose_embedding(layout, kPortable)
          .run({panels, layout, rows[i], is_rotated ? static_cast<void*>(floats.data()) : row,
                is_rotated ? DType::f32 : dtype});
      if (!is_rotated) continue;
      floats = contract_rotate(floats, layout.rotated_inputs(), true);
      for (int64_t j = 0; j < layout.k; ++j) store_from_f32(row, dtype, j, floats[static_cast<size_t>(j)]);
    }
    return out;
  }

  // Runs the operator and compares; `rows` has the indices in order.
  void check(const TensorView& indices, const std::vector<int64_t>& rows, ElementType type = ElementType::f32,
             const Parallel& parallel = {}) const {
    Shape shape;
    ASSERT_TRUE(embedding_shape(indices, layout.k, &shape).ok());
    ASSERT_EQ(shape.ndim, indices.shape.ndim + 1);
    Tensor out(type, {shape.size, shape.size + shape.ndim});
    const Status status = embedding(indices, packed_weight.view, layout.k, out.view, parallel);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(same_bits(out.bytes(), expected(rows, dtype_of(type)), dtype_of(type)));
    EXPECT_TRUE(out.memory->intact());
  }
};

TEST(Embedding, EveryWidthAndType) {
  const std::vector<int64_t> rows = {0, 39, 16, 15, 17, 39, 0};
  for (int bits = 1; bits <= 8; ++bits) {
    for (const Mapping mapping : mappings_of_width(bits)) {
      const Model model(bits, mapping);
      for (const ElementType type : {ElementType::f32, ElementType::bf16, ElementType::f16}) {
        model.check(index_tensor(rows).view, rows, type);
        model.check(index_tensor<int32_t>({0, 39, 16, 15, 17, 39, 0}).view, rows, type);
      }
    }
  }
}

TEST(Embedding, RotatedInputs) {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < 300; ++i) rows.push_back(i * 7 % kRows);
  for (const int64_t block : {16, 32, 64, 128}) {
    const Model model(rotated(layout_of(kRows, 3 * block, 4, 32, Mapping::affine, false), block));
    for (const ElementType type : {ElementType::f32, ElementType::bf16, ElementType::f16}) {
      model.check(index_tensor(rows).view, rows, type, threads(3));
    }
  }
}

TEST(Embedding, ShapesAndStrides) {
  const Model model;
  const Tensor indices = index_tensor<int64_t>({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  int64_t* const data = indices.memory->as<int64_t>();
  const auto view = [&](std::vector<int64_t> sizes, std::vector<int64_t> strides) {
    return view_of(data, ElementType::i64, sizes, strides);
  };
  model.check(view({}, {}), {0});               // a scalar
  model.check(view({0}, {1}), {});              // nothing
  model.check(view({2, 0, 3}, {3, 3, 1}), {});  // nothing
  model.check(view({2, 3}, {3, 1}), {0, 1, 2, 3, 4, 5});
  model.check(view({2, 3}, {1, 4}), {0, 4, 8, 1, 5, 9});                      // transposed
  model.check(view({4}, {3}), {0, 3, 6, 9});                                  // every third
  model.check(view({2, 2}, {0, 1}), {0, 1, 0, 1});                            // expanded
  model.check(view_of(data + 11, ElementType::i64, {3}, {-1}), {11, 10, 9});  // backwards
  model.check(view({1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 2}, {0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1}),
              {0, 1, 2, 3});
}

TEST(Embedding, AnyNumberOfThreadsGivesTheSameBits) {
  const Model model(3, Mapping::symmetric, 300);
  Random random(1);
  std::vector<int64_t> rows;
  for (int i = 0; i < 500; ++i) rows.push_back(random.below(kRows));
  const Tensor indices = index_tensor(rows);
  for (const int count : {1, 2, 7}) model.check(indices.view, rows, ElementType::f16, threads(count));
}

// The host changes the indices between the check and the lookup, as another thread might. The rows are between inaccessible
// pages.
TEST(Embedding, WhatWasCheckedIsWhatIsRead) {
  static int64_t* memory;
  static constexpr int64_t kCount = 2000;
  const Model model;
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < kCount; ++i) rows.push_back(i % kRows);
  for (const bool wide : {false, true}) {
    Tensor indices(wide ? ElementType::i64 : ElementType::i32, {kCount});
    for (int64_t i = 0; i < kCount; ++i) {
      if (wide) indices.memory->as<int64_t>()[i] = rows[static_cast<size_t>(i)];
      if (!wide) indices.memory->as<int32_t>()[i] = static_cast<int32_t>(rows[static_cast<size_t>(i)]);
    }
    memory = indices.memory->as<int64_t>();
    static int64_t bytes;
    bytes = indices.memory->size();
    const Parallel host{2, [](int tasks, void (*task)(void*, int), void* context) {
                          std::memset(memory, 0x71, static_cast<size_t>(bytes));  // indices far out of range
                          for (int i = 0; i < tasks; ++i) task(context, i);
                        }};
    model.check(indices.view, rows, ElementType::f32, host);
  }
}

TEST(Embedding, IndicesThatChangeMeanwhile) {
  const Model model;
  Tensor indices(ElementType::i64, {64}), out(ElementType::f32, {64, kWidth});
  std::memset(indices.memory->data(), 0, static_cast<size_t>(indices.memory->size()));
  auto* const values = indices.memory->as<std::atomic<int64_t>>();
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t i = 0; !stop; ++i) values[i % 64].store(i % 3 == 0 ? INT64_MAX - 7 : static_cast<int64_t>(i % kRows));
  });
  for (int i = 0; i < 20000; ++i) {
    const Status status = embedding(indices.view, model.packed_weight.view, kWidth, out.view, {});
    EXPECT_TRUE(status.ok() || status.kind() == Status::Kind::out_of_range) << status.message();
  }
  stop = true;
  writer.join();
  EXPECT_TRUE(out.memory->intact());
}

TEST(Embedding, IndicesOutOfRangeAreRefused) {
  const Model model;
  Tensor out(ElementType::f32, {3, kWidth});
  out.memory->freeze();
  const auto run = [&](const Tensor& indices) {
    return embedding(indices.view, model.packed_weight.view, kWidth, out.view, {});
  };
  const auto kind = Status::Kind::out_of_range;
  EXPECT_TRUE(refused(run(index_tensor<int64_t>({0, 40, 1})),
                      "index 40 (number 1 of 3) is out of range; expected 0 to 39", kind));
  EXPECT_TRUE(refused(run(index_tensor<int64_t>({0, 1, -1})), "index -1 (number 2 of 3)", kind));
  EXPECT_TRUE(
      refused(run(index_tensor<int64_t>({INT64_MIN, 1, 1})), "index -9223372036854775808 (number 0 of 3)", kind));
  EXPECT_TRUE(refused(run(index_tensor<int64_t>({int64_t{1} << 32, 1, 1})), "index 4294967296", kind));
  EXPECT_TRUE(refused(run(index_tensor<int32_t>({0, INT32_MAX, 1})), "index 2147483647", kind));
  EXPECT_TRUE(refused(run(index_tensor<int32_t>({0, 1, -40})), "index -40", kind));
  EXPECT_TRUE(out.memory->intact()) << "a refused call writes nothing";
}

TEST(Embedding, Refusals) {
  const Model model;
  const TensorView& w = model.packed_weight.view;
  const Tensor indices = index_tensor<int64_t>({1, 2, 3});
  Tensor out(ElementType::f32, {3, kWidth});
  const auto changed = [](TensorView view, auto change) {
    change(view);
    return view;
  };
  const auto run = [&](const TensorView& i, const TensorView& weight, int64_t dim, const TensorView& to) {
    return embedding(i, weight, dim, to, {});
  };
  ASSERT_TRUE(run(indices.view, w, kWidth, out.view).ok());
  EXPECT_TRUE(refused(run(indices.view, w, 49, out.view), "embedding_dim is 49; expected 50"));
  EXPECT_TRUE(refused(run(indices.view, w, 0, out.view), "embedding_dim is 0"));
  for (const ElementType type : {ElementType::f32, ElementType::u8, ElementType::other}) {
    EXPECT_TRUE(refused(run(changed(indices.view, [&](auto& v) { v.type = type; }), w, kWidth, out.view),
                        "indices have dtype"));
  }
  EXPECT_TRUE(
      refused(run(changed(indices.view, [](auto& v) { v.on_cpu = false; }), w, kWidth, out.view), "indices is not on"));
  const TensorView many =
      view_of(indices.view.data, ElementType::i64, std::vector<int64_t>(16, 1), std::vector<int64_t>(16, 1));
  EXPECT_TRUE(refused(run(many, w, kWidth, out.view), "indices have 16 dimensions; expected at most 15"));
  EXPECT_TRUE(
      refused(run(indices.view, changed(w, [](auto& v) { v.stride[0] = 2; }), kWidth, out.view), "not contiguous"));
  EXPECT_TRUE(refused(run(indices.view, changed(w, [](auto& v) { v.shape.size[0] -= 1; }), kWidth, out.view), "bytes"));
  EXPECT_TRUE(refused(run(indices.view, w, kWidth, changed(out.view, [](auto& v) { v.type = ElementType::i32; })),
                      "the output dtype is int32"));
  EXPECT_TRUE(refused(run(indices.view, w, kWidth, changed(out.view, [](auto& v) { v.shape.size[0] = 4; })),
                      "out has shape [4, 50]; expected [3, 50]"));
  EXPECT_TRUE(refused(run(indices.view, w, kWidth, changed(out.view, [](auto& v) { v.stride[0] = 64; })),
                      "out is not contiguous"));
}

}  // namespace
}  // namespace lowbit::test
