#include "calls.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "tensors.h"

namespace lowbit::test {
namespace {

// Offsets of the concatenated results of a call.
class Outputs {
 public:
  explicit Outputs(uint8_t* memory) : memory_(memory) {}
  // Allocates nothing, so that all allocations of a call are the operator's.
  TensorView take(ElementType type, std::initializer_list<int64_t> sizes) {
    TensorView view;
    view.data = memory_;
    view.type = type;
    for (const int64_t size : sizes) view.shape.size[view.shape.ndim++] = size;
    int64_t count = 1;
    for (int d = view.shape.ndim - 1; d >= 0; count *= view.shape.size[d--]) view.stride[d] = count;
    memory_ += (count * element_bytes(type) + 15) / 16 * 16;
    return view;
  }

 private:
  uint8_t* memory_;
};

using Run = std::function<Status(const Parallel&, Outputs&)>;

class List {
 public:
  void add(const std::string& name, int64_t bytes, const Run& run) {
    Call call{name, [run](const Parallel& parallel, uint8_t* out) {
                Outputs outputs(out);
                return run(parallel, outputs);
              }, {}};
    call.expected.resize(static_cast<size_t>(bytes));
    const Status status = call.run({}, call.expected.data());
    EXPECT_TRUE(status.ok()) << name << ": " << status.message();
    calls_.push_back(std::move(call));
  }
  std::vector<Call> calls_;
};

std::shared_ptr<Tensor> shared(Tensor tensor) { return std::make_shared<Tensor>(std::move(tensor)); }

std::shared_ptr<Tensor> floats(const std::vector<float>& values, const std::vector<int64_t>& sizes) {
  Tensor tensor(ElementType::f32, sizes);
  std::memcpy(tensor.memory->data(), values.data(), values.size() * sizeof(float));
  return shared(std::move(tensor));
}

struct Matrix {
  Layout layout;
  Weights weights;
  std::shared_ptr<Tensor> bytes;

  Matrix(int64_t n, int64_t k, int bits, int64_t group_size, Mapping mapping, bool has_bias, uint64_t seed)
      : layout(layout_of(n, k, bits, group_size, mapping, has_bias)) {
    Random random(seed);
    weights = random_weights(layout, random);
    bytes = shared(bytes_tensor(packed(weights)));
  }
};

constexpr int64_t kSlack = 256;  // results are aligned to 16 bytes

void add_linear(List& list, const Matrix& matrix, ElementType type, int64_t m, bool strided) {
  Random random(static_cast<uint64_t>(m));
  const Layout layout = matrix.layout;
  const auto x = shared(strided ? random_tensor(type, {layout.k, m}, random) : random_tensor(type, {m, layout.k}, random));
  TensorView view = x->view;
  if (strided) view = view_of(view.data, type, {m, layout.k}, {1, m});
  const std::string name = "linear, " + std::to_string(layout.bits) + " bits, " + name_of(layout.mapping) + ", " +
                           std::to_string(m) + " rows" + (strided ? " by columns" : "");
  const int64_t bytes = m * layout.n * element_bytes(type);
  list.add(name, (bytes + 15) / 16 * 16, [=, weight = matrix.bytes](const Parallel& parallel, Outputs& out) {
    (void)x;
    return linear(view, weight->view, layout.n, out.take(type, {m, layout.n}), parallel);
  });
  std::vector<uint8_t> portable = expected_linear(view, matrix.bytes->memory->data(), layout);
  portable.resize(list.calls_.back().expected.size());
  EXPECT_EQ(list.calls_.back().expected, portable) << name;
}

void add_linears(List& list) {
  const Matrix a(72, 112, 4, 32, Mapping::symmetric, false, 1), b(40, 112, 3, 16, Mapping::affine, true, 2);
  Random random(9);
  const auto x = shared(random_tensor(ElementType::f32, {20, 112}, random));
  list.add("linears", 20 * 112 * 4, [=](const Parallel& parallel, Outputs& out) {
    const TensorView packed[] = {a.bytes->view, b.bytes->view};
    const int64_t features[] = {72, 40};
    return linears(x->view, packed, features, 2, out.take(ElementType::f32, {20, 112}), parallel);
  });
}

void add_experts(List& list) {
  const Matrix first(37, 50, 4, 32, Mapping::symmetric, true, 3), second(37, 50, 4, 32, Mapping::symmetric, true, 4);
  const int64_t bytes = first.layout.total_bytes;
  Tensor both(ElementType::u8, {2, bytes});
  std::memcpy(both.memory->data(), first.bytes->memory->data(), static_cast<size_t>(bytes));
  std::memcpy(both.memory->data() + bytes, second.bytes->memory->data(), static_cast<size_t>(bytes));
  const auto weights = shared(std::move(both));
  for (const int64_t m : {1, 40}) {
    Random random(static_cast<uint64_t>(m));
    const auto x = shared(random_tensor(ElementType::bf16, {m, 50}, random));
    std::vector<int64_t> chosen;
    for (int64_t i = 0; i < 2 * m; ++i) chosen.push_back(random.below(2));
    const auto experts = shared(index_tensor(chosen));
    experts->view = view_of(experts->view.data, ElementType::i64, {m, 2}, {2, 1});
    list.add("linear_experts, " + std::to_string(m) + " rows", (m * 2 * 37 * 2 + 15) / 16 * 16,
             [=](const Parallel& parallel, Outputs& out) {
               return linear_experts(x->view, weights->view, experts->view, 37,
                                     out.take(ElementType::bf16, {m, 2, 37}), parallel);
             });
  }
}

void add_embedding(List& list) {
  const Matrix matrix(72, 112, 4, 32, Mapping::levels, false, 5);
  for (const int64_t count : {0, 3, 300}) {
    Random random(static_cast<uint64_t>(count));
    std::vector<int64_t> rows;
    for (int64_t i = 0; i < count; ++i) rows.push_back(random.below(72));
    const auto indices = shared(index_tensor(rows));
    list.add("embedding, " + std::to_string(count) + " rows", (count * 112 * 4 + 15) / 16 * 16,
             [=](const Parallel& parallel, Outputs& out) {
               return embedding(indices->view, matrix.bytes->view, 112, out.take(ElementType::f32, {count, 112}), parallel);
             });
  }
}

void add_attention(List& list) {
  constexpr int64_t kHeads = 4, kCaches = 2, kWidth = 16, kLength = 64, kStart = 32;
  for (const int64_t positions : {1, 20}) {
    Random random(static_cast<uint64_t>(positions));
    const auto q = shared(random_tensor(ElementType::f32, {1, kHeads, positions, kWidth}, random));
    const auto k = shared(random_tensor(ElementType::f32, {1, kCaches, positions, kWidth}, random));
    const auto v = shared(random_tensor(ElementType::f32, {1, kCaches, positions, kWidth}, random));
    const auto start = shared(index_tensor<int64_t>({kStart}));
    list.add("attention, " + std::to_string(positions) + " positions",
             (positions * kHeads + 2 * kCaches * kLength) * kWidth * 4, [=](const Parallel& parallel, Outputs& out) {
               const TensorView result = out.take(ElementType::f32, {1, positions, kHeads, kWidth});
               const TensorView keys = out.take(ElementType::f32, {1, kCaches, kLength, kWidth});
               const TensorView values = out.take(ElementType::f32, {1, kCaches, kLength, kWidth});
               for (int64_t i = 0; i < kCaches * kLength * kWidth; ++i) {
                 static_cast<float*>(keys.data)[i] = static_cast<float*>(values.data)[i] = 0.25f;
               }
               return attention(q->view, k->view, v->view, keys, values, start->view, {0.3}, result, parallel);
             });
  }
}

// Several claims of panels and of rows.
void add_packing(List& list) {
  constexpr int64_t kRows = 100, kInputs = 4096, kGroups = kInputs / 64;
  const Matrix matrix(kRows, kInputs, 3, 64, Mapping::affine, true, 6);
  const auto codes = shared(Tensor(ElementType::u8, {kRows, kInputs}));
  std::memcpy(codes->memory->data(), matrix.weights.codes.data(), matrix.weights.codes.size());
  const auto scales = floats(matrix.weights.scales, {kRows, kGroups}), mins = floats(matrix.weights.mins, {kRows, kGroups});
  const auto bias = floats(matrix.weights.bias, {kRows});
  const int64_t bytes = matrix.layout.total_bytes;
  list.add("pack", bytes, [=](const Parallel& parallel, Outputs& out) {
    return pack(codes->view, scales->view, &mins->view, &bias->view, 3, 64, out.take(ElementType::u8, {bytes}), parallel);
  });
  list.add("unpack", kRows * kInputs + 2 * kRows * kGroups * 4 + kRows * 4 + kSlack,
           [=](const Parallel& parallel, Outputs& out) {
             const TensorView to = out.take(ElementType::u8, {kRows, kInputs});
             const TensorView s = out.take(ElementType::f32, {kRows, kGroups});
             const TensorView m = out.take(ElementType::f32, {kRows, kGroups});
             return unpack(matrix.bytes->view, to, s, m, out.take(ElementType::f32, {kRows}), parallel);
           });
  list.add("repack", bytes, [=](const Parallel& parallel, Outputs& out) {
    return repack(matrix.bytes->view, "panel16", out.take(ElementType::u8, {bytes}), parallel);
  });
  for (const int dim : {0, 1}) {
    const int64_t begin = dim == 0 ? 7 : 64, end = dim == 0 ? 93 : 2048;
    Layout part;
    const Status status = splice_shape(&matrix.bytes->view, 1, dim, begin, end, &part);
    EXPECT_TRUE(status.ok()) << status.message();
    const int64_t size = part.total_bytes;
    list.add("splice along " + std::to_string(dim), size, [=](const Parallel& parallel, Outputs& out) {
      return splice(&matrix.bytes->view, 1, dim, begin, end, out.take(ElementType::u8, {size}), parallel);
    });
  }
  Random random(7);
  const auto weight = shared(random_tensor(ElementType::f32, {40, kInputs}, random));
  for (const bool search : {false, true}) {
    const int64_t rows = search ? 3 : 40;
    const TensorView view = view_of(weight->view.data, ElementType::f32, {rows, kInputs}, {kInputs, 1});
    list.add(search ? "quantize, searching" : "quantize", rows * kInputs + 2 * rows * kGroups * 4,
             [=](const Parallel& parallel, Outputs& out) {
               (void)weight;
               const TensorView to = out.take(ElementType::u8, {rows, kInputs});
               const TensorView s = out.take(ElementType::f32, {rows, kGroups});
               const TensorView m = out.take(ElementType::f32, {rows, kGroups});
               return quantize(view, 4, 64, true, search, to, s, m, parallel);
             });
  }
}

}  // namespace

std::vector<Call> make_calls() {
  List list;
  for (int bits = 1; bits <= 8; ++bits) {
    for (const Mapping mapping : mappings_of_width(bits)) {
      const Matrix matrix(72, 112, bits, bits % 2 == 0 ? 32 : 48, mapping, bits % 3 == 0, static_cast<uint64_t>(bits));
      add_linear(list, matrix, ElementType::f32, 1, false);
      add_linear(list, matrix, ElementType::f16, 20, false);
    }
  }
  const Matrix matrix(72, 112, 4, 0, Mapping::symmetric, true, 8);
  add_linear(list, matrix, ElementType::bf16, 300, false);  // several threads quantize rows
  add_linear(list, matrix, ElementType::f32, 20, true);
  add_linears(list);
  add_experts(list);
  add_embedding(list);
  add_attention(list);
  add_packing(list);
  return std::move(list.calls_);
}

}  // namespace lowbit::test
