// Arguments that only a C++ program can pass: impossible shapes, null memory, outputs that overlap inputs, threads without a
// function. Every operator refuses each of them, in every argument, and writes nothing. ctest runs this once per LOWBIT_ISA.

#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <functional>
#include <string>

#include "../../ops/load_kernels.h"
#include "support/tensors.h"
#include "support/written.h"

namespace lowbit::test {
namespace {

// A call with all its tensors, outputs first.
struct Operator {
  std::string name;
  std::vector<Tensor> tensors;
  size_t outputs;
  std::function<Status(const std::vector<TensorView>&, const Parallel&)> run;

  std::vector<TensorView> views() const {
    std::vector<TensorView> result;
    for (const Tensor& tensor : tensors) result.push_back(tensor.view);
    return result;
  }
  std::vector<std::vector<uint8_t>> written() const {
    std::vector<std::vector<uint8_t>> result;
    for (size_t i = 0; i < outputs; ++i) {
      accept(tensors[i].memory->data(), tensors[i].memory->size());  // only compared
      result.push_back(tensors[i].bytes());
    }
    return result;
  }
};

template <class... Ts>
std::vector<Tensor> list(Ts&&... tensors) {
  std::vector<Tensor> result;
  (result.push_back(std::forward<Ts>(tensors)), ...);
  return result;
}

Tensor zeros(ElementType type, const std::vector<int64_t>& sizes) {
  Tensor tensor(type, sizes);
  std::memset(tensor.memory->data(), 0, static_cast<size_t>(tensor.memory->size()));
  return tensor;
}

std::vector<Operator> operators() {
  constexpr int64_t kOutputs = 20, kInputs = 64;
  const Layout layout = layout_of(kOutputs, kInputs, 4, 32, Mapping::affine, true);
  Random random(1);
  const std::vector<uint8_t> bytes = packed(random_weights(layout, random));
  const int64_t size = layout.total_bytes, groups = layout.groups;
  const auto f32 = ElementType::f32;
  std::vector<Operator> all;
  all.push_back({"linear", list(Tensor(f32, {3, kOutputs}), random_tensor(f32, {3, kInputs}, random), bytes_tensor(bytes)), 1,
                 [](const auto& t, const auto& parallel) { return linear(t[1], t[2], kOutputs, t[0], parallel); }});
  all.push_back({"linears",
                 list(Tensor(f32, {3, 2 * kOutputs}), random_tensor(f32, {3, kInputs}, random), bytes_tensor(bytes),
                      bytes_tensor(bytes)),
                 1, [](const auto& t, const auto& parallel) {
                   const int64_t out_features[] = {kOutputs, kOutputs};
                   return linears(t[1], &t[2], out_features, 2, t[0], parallel);
                 }});
  Tensor experts(ElementType::u8, {1, size});
  std::memcpy(experts.memory->data(), bytes.data(), bytes.size());
  all.push_back({"linear_experts",
                 list(Tensor(f32, {3, 1, kOutputs}), random_tensor(f32, {3, kInputs}, random), std::move(experts),
                      zeros(ElementType::i64, {3, 1})),
                 1, [](const auto& t, const auto& parallel) {
                   return linear_experts(t[1], t[2], t[3], kOutputs, t[0], parallel);
                 }});
  all.push_back({"embedding", list(Tensor(f32, {3, kInputs}), zeros(ElementType::i64, {3}), bytes_tensor(bytes)), 1,
                 [](const auto& t, const auto& parallel) { return embedding(t[1], t[2], kInputs, t[0], parallel); }});
  all.push_back({"attention",
                 list(Tensor(f32, {1, 2, 4, 16}), zeros(f32, {1, 2, 32, 16}), zeros(f32, {1, 2, 32, 16}),
                      random_tensor(f32, {1, 4, 2, 16}, random), random_tensor(f32, {1, 2, 2, 16}, random),
                      random_tensor(f32, {1, 2, 2, 16}, random), zeros(ElementType::i64, {1}), random_tensor(f32, {4}, random)),
                 3, [](const auto& t, const auto& parallel) {
                   const Scores scores{0.25, 0, 0.0, &t[7]};
                   return attention(t[3], t[4], t[5], t[1], t[2], t[6], scores, t[0], parallel);
                 }});
  all.push_back({"pack",
                 list(Tensor(ElementType::u8, {size}), zeros(ElementType::u8, {kOutputs, kInputs}),
                      zeros(f32, {kOutputs, groups}), zeros(f32, {kOutputs, groups}), zeros(f32, {kOutputs})),
                 1, [](const auto& t, const auto& parallel) {
                   return pack(t[1], t[2], &t[3], &t[4], 4, 32, t[0], parallel);
                 }});
  const Layout with_levels = layout_of(kOutputs, kInputs, 4, 32, Mapping::levels, false);
  all.push_back({"pack with levels",
                 list(Tensor(ElementType::u8, {with_levels.total_bytes}), zeros(ElementType::u8, {kOutputs, kInputs}),
                      zeros(f32, {kOutputs, groups}), zeros(ElementType::i8, {16})),
                 1, [](const auto& t, const auto& parallel) {
                   return pack(t[1], t[2], nullptr, nullptr, 4, 32, t[0], parallel, &t[3]);
                 }});
  all.push_back({"unpack",
                 list(Tensor(ElementType::u8, {kOutputs, kInputs}), Tensor(f32, {kOutputs, groups}),
                      Tensor(f32, {kOutputs, groups}), Tensor(f32, {kOutputs}), bytes_tensor(bytes)),
                 4, [](const auto& t, const auto& parallel) { return unpack(t[4], t[0], t[1], t[2], t[3], parallel); }});
  all.push_back({"repack", list(Tensor(ElementType::u8, {size}), bytes_tensor(bytes)), 1,
                 [](const auto& t, const auto& parallel) { return repack(t[1], "panel16", t[0], parallel); }});
  const int64_t joined = layout_of(2 * kOutputs, kInputs, 4, 32, Mapping::affine, true).total_bytes;
  all.push_back({"splice", list(Tensor(ElementType::u8, {joined}), bytes_tensor(bytes), bytes_tensor(bytes)),
                 1, [](const auto& t, const auto& parallel) {
                   return splice(&t[1], 2, 0, 0, 2 * kOutputs, t[0], parallel);
                 }});
  all.push_back({"quantize",
                 list(Tensor(ElementType::u8, {kOutputs, kInputs}), Tensor(f32, {kOutputs, groups}),
                      Tensor(f32, {kOutputs, groups}), random_tensor(f32, {kOutputs, kInputs}, random)),
                 3, [](const auto& t, const auto& parallel) {
                   return quantize(t[3], 4, 32, true, false, t[0], t[1], t[2], parallel);
                 }});
  return all;
}

// Each operator accepts its arguments, and refuses them after `change`.
void expect_refused(const std::function<void(std::vector<TensorView>&, size_t)>& change, const char* says) {
  for (const Operator& op : operators()) {
    for (size_t i = 0; i < op.tensors.size(); ++i) {
      SCOPED_TRACE(op.name + ", tensor " + std::to_string(i));
      std::vector<TensorView> views = op.views();
      change(views, i);
      const auto before = op.written();
      EXPECT_TRUE(refused(op.run(views, {}), says));
      EXPECT_EQ(op.written(), before);
    }
  }
}

TEST(Arguments, AreTakenAsTheyShouldBe) {
  for (const Operator& op : operators()) {
    for (const Parallel& parallel : {Parallel(), threads(2)}) {
      const Status status = op.run(op.views(), parallel);
      EXPECT_TRUE(status.ok()) << op.name << ": " << status.message();
    }
  }
}

TEST(Arguments, ShapesThatCannotBe) {
  for (const int dims : {-1, kMaxDims + 1, 1 << 30}) {
    expect_refused([&](auto& views, size_t i) { views[i].shape.ndim = dims; }, "dimensions");
  }
  for (const int64_t size : {int64_t{-1}, INT64_MIN, INT64_MAX}) {
    expect_refused([&](auto& views, size_t i) { views[i].shape.size[0] = size; }, "");
  }
}

TEST(Arguments, StridesThatCannotBe) {
  for (const Operator& op : operators()) {
    for (size_t i = 0; i < op.tensors.size(); ++i) {
      for (int d = 0; d < op.views()[i].shape.ndim; ++d) {
        if (op.views()[i].shape.size[d] < 2) continue;
        for (const int64_t stride : {INT64_MIN, INT64_MIN / 8, INT64_MAX / 4, INT64_MAX}) {
          SCOPED_TRACE(op.name + ", tensor " + std::to_string(i) + ", stride " + std::to_string(stride));
          std::vector<TensorView> views = op.views();
          views[i].stride[d] = stride;
          const auto before = op.written();
          EXPECT_TRUE(refused(op.run(views, {}), "elements between the first and the last"));
          EXPECT_EQ(op.written(), before);
        }
      }
    }
  }
}

TEST(Arguments, NoMemory) {
  expect_refused([](auto& views, size_t i) { views[i].data = nullptr; }, "no memory");
}

TEST(Arguments, OutputsOverOthers) {
  for (const Operator& op : operators()) {
    for (size_t out = 0; out < op.outputs; ++out) {
      for (size_t i = 0; i < op.tensors.size(); ++i) {
        if (i == out) continue;
        SCOPED_TRACE(op.name + ", output " + std::to_string(out) + " over " + std::to_string(i));
        std::vector<TensorView> views = op.views();
        // The last byte of one is the first of the other, in both orders.
        const int64_t out_bytes = op.tensors[out].memory->size(), bytes = op.tensors[i].memory->size();
        Guarded both(out_bytes + bytes - 1);
        for (const bool first : {true, false}) {
          views[out].data = both.data() + (first ? 0 : bytes - 1);
          views[i].data = both.data() + (first ? out_bytes - 1 : 0);
          std::memcpy(views[i].data, op.tensors[i].memory->data(), static_cast<size_t>(bytes));
          EXPECT_TRUE(refused(op.run(views, {}), "share memory"));
        }
      }
    }
  }
}

// Rows backwards in memory end where the output begins; one more row would overlap.
TEST(Arguments, NextToEachOther) {
  const std::vector<Operator> all = operators();
  const Operator& op = all[0];
  std::vector<TensorView> views = op.views();
  const int64_t row = views[1].stride[0], bytes = op.tensors[1].memory->size();
  Guarded both(bytes + op.tensors[0].memory->size());
  std::memcpy(both.data(), op.tensors[1].memory->data(), static_cast<size_t>(bytes));
  views[0].data = both.data() + bytes;
  views[1].data = both.as<float>() + 2 * row;
  views[1].stride[0] = -row;
  const Status status = op.run(views, {});
  EXPECT_TRUE(status.ok()) << status.message();
  views[0].data = both.data() + bytes - 1;
  EXPECT_TRUE(refused(op.run(views, {}), "share memory"));
}

TEST(Arguments, ThreadsThatCannotBe) {
  const auto run = threads(2).run;
  for (const Operator& op : operators()) {
    SCOPED_TRACE(op.name);
    const auto before = op.written();
    for (const int count : {0, -1, INT_MIN, INT_MAX}) {
      EXPECT_TRUE(refused(op.run(op.views(), {count, run}), "threads; expected 1 to "));
    }
    EXPECT_TRUE(refused(op.run(op.views(), {2, nullptr}), "2 threads and no function"));
    EXPECT_EQ(op.written(), before);
  }
}

TEST(Arguments, NamesThatAreNone) {
  const std::vector<Operator> all = operators();
  const Operator& op = *std::find_if(all.begin(), all.end(), [](const auto& o) { return o.name == "repack"; });
  Layout layout;
  EXPECT_TRUE(refused(repack_shape(op.views()[1], nullptr, &layout), "the name of the format is null"));
  EXPECT_TRUE(refused(repack(op.views()[1], nullptr, op.views()[0], {}), "the name of the format is null"));
  EXPECT_TRUE(refused(load_kernels(nullptr), "the path of the kernel library is empty"));
  EXPECT_TRUE(refused(add_kernels(KernelLibrary(), nullptr), "the kernel library has no name"));
}

}  // namespace
}  // namespace lowbit::test
