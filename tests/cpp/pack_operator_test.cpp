// The pack and unpack operators: the bytes of pack_panels() on any number of threads, and refusals.

#include <gtest/gtest.h>

#include <algorithm>

#include "support/tensors.h"

namespace lowbit::test {
namespace {

template <class T>
Tensor tensor_of(const std::vector<T>& values, const std::vector<int64_t>& sizes) {
  Tensor tensor(sizeof(T) == 1 ? ElementType::u8 : ElementType::f32, sizes);
  std::copy(values.begin(), values.end(), tensor.memory->as<T>());
  tensor.memory->freeze();
  return tensor;
}

struct Inputs {
  Layout layout;
  Weights weights;
  Tensor codes, scales, mins, bias;

  explicit Inputs(const Layout& l, Random random = Random(3))
      : layout(l),
        weights(random_weights(l, random)),
        codes(tensor_of(weights.codes, {l.n, l.k})),
        scales(tensor_of(weights.scales, {l.n, l.groups})),
        mins(tensor_of(weights.mins, l.mapping == Mapping::affine ? std::vector<int64_t>{l.n, l.groups}
                                                                  : std::vector<int64_t>{0, 0})),
        bias(tensor_of(weights.bias, {l.has_bias ? l.n : 0})) {}

  Status pack_into(const Tensor& out, const Parallel& parallel) const {
    return pack(codes.view, scales.view, layout.mapping == Mapping::affine ? &mins.view : nullptr,
                layout.has_bias ? &bias.view : nullptr, layout.bits, layout.group_size, out.view, parallel);
  }
};

TEST(PackOperator, SameBytesOnAnyNumberOfThreads) {
  for (const auto& [bits, mapping, has_bias] :
       {std::tuple{1, Mapping::symmetric, true}, {3, Mapping::affine, false}, {8, Mapping::affine, true}}) {
    const Inputs in(layout_of(300, 1100, bits, 48, mapping, has_bias));  // 18 panels per claim
    const std::vector<uint8_t> expected = packed(in.weights);
    for (const int count : {1, 2, 7}) {
      Tensor out(ElementType::u8, {in.layout.total_bytes});
      const Status status = in.pack_into(out, threads(count));
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(out.bytes(), expected) << count << " threads";
      EXPECT_TRUE(out.memory->intact());

      Tensor codes(ElementType::u8, {300, 1100}), scales(ElementType::f32, {300, in.layout.groups});
      Tensor mins(ElementType::f32, {in.mins.view.shape.size, in.mins.view.shape.size + in.mins.view.shape.ndim});
      Tensor bias(ElementType::f32, {has_bias ? 300 : 0});
      const Status back = unpack(out.view, codes.view, scales.view, mins.view, bias.view, threads(count));
      ASSERT_TRUE(back.ok()) << back.message();
      EXPECT_EQ(codes.bytes(), in.codes.bytes());
      const Weights direct = unpacked(in.layout, expected);
      EXPECT_EQ(scales.bytes(), tensor_of(direct.scales, {300, in.layout.groups}).bytes());
      EXPECT_EQ(bias.bytes(), in.bias.bytes());
      for (const Tensor* tensor : {&codes, &scales, &mins, &bias}) EXPECT_TRUE(tensor->memory->intact());
    }
  }
}

// On any number of threads the error names the first bad panel.
TEST(PackOperator, TheFirstErrorIsReported) {
  const Layout layout = layout_of(600, 1100, 4, 0, Mapping::symmetric, false);
  Random random(1);
  Weights weights = random_weights(layout, random);
  for (const int64_t row : {599, 333, 200}) weights.codes[static_cast<size_t>(row * 1100 + 7)] = 16;
  const Tensor codes = tensor_of(weights.codes, {600, 1100}), scales = tensor_of(weights.scales, {600, 1});
  for (const int count : {1, 2, 7}) {
    Tensor out(ElementType::u8, {layout.total_bytes});
    const Status status = pack(codes.view, scales.view, nullptr, nullptr, 4, 0, out.view, threads(count));
    EXPECT_TRUE(refused(status, "code [200, 7] is 16; expected less than 16 at 4 bits")) << count << " threads";
  }
}

TEST(PackOperator, TablesOfLevels) {
  for (const int bits : {2, 3, 4}) {
    const Inputs in(layout_of(20, 70, bits, 32, Mapping::levels, true));
    const int64_t count = int64_t{1} << bits;
    Tensor levels(ElementType::i8, {count}), more(ElementType::i8, {count + 1}), out(ElementType::u8, {in.layout.total_bytes});
    for (Tensor* table : {&levels, &more}) std::memcpy(table->memory->data(), test_levels(bits), static_cast<size_t>(count));
    const auto run = [&](const TensorView& table, const TensorView* mins) {
      return pack(in.codes.view, in.scales.view, mins, &in.bias.view, bits, 32, out.view, {}, &table);
    };
    const Status status = run(levels.view, nullptr);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(out.bytes(), packed(in.weights));
    EXPECT_TRUE(refused(run(more.view, nullptr), "levels has shape ["));
    EXPECT_TRUE(refused(run(in.codes.view, nullptr), "levels has dtype uint8; expected int8"));
    EXPECT_TRUE(refused(run(levels.view, &in.scales.view), "levels and mins are both given"));
  }
}

TEST(PackOperator, Refusals) {
  const Inputs in(layout_of(20, 70, 4, 32, Mapping::affine, true));
  Tensor out(ElementType::u8, {in.layout.total_bytes});
  ASSERT_TRUE(in.pack_into(out, {}).ok());
  const auto changed = [](TensorView view, auto change) {
    change(view);
    return view;
  };
  const auto run = [&](const TensorView& codes, const TensorView& scales, const TensorView& mins,
                       const TensorView& bias, int bits, int64_t group_size,
                       const TensorView& to) { return pack(codes, scales, &mins, &bias, bits, group_size, to, {}); };
  const TensorView &c = in.codes.view, &s = in.scales.view, &m = in.mins.view, &b = in.bias.view, &o = out.view;
  EXPECT_TRUE(refused(run(c, s, m, b, 9, 32, o), "bits is 9"));
  EXPECT_TRUE(refused(run(c, s, m, b, 4, 8, o), "group size is 8"));
  EXPECT_TRUE(
      refused(run(changed(c, [](auto& v) { v.shape.ndim = 1; }), s, m, b, 4, 32, o), "expected two dimensions"));
  EXPECT_TRUE(
      refused(run(changed(c, [](auto& v) { v.type = ElementType::i32; }), s, m, b, 4, 32, o), "codes has dtype int32"));
  EXPECT_TRUE(refused(run(changed(c, [](auto& v) { std::swap(v.stride[0], v.stride[1]); }), s, m, b, 4, 32, o),
                      "codes is not contiguous"));
  EXPECT_TRUE(refused(run(changed(c, [](auto& v) { v.shape.size[0] = 0; }), s, m, b, 4, 32, o), "output rows is 0"));
  EXPECT_TRUE(refused(run(c, changed(s, [](auto& v) { v.shape.size[1] = 2; }), m, b, 4, 32, o),
                      "scales has shape [20, 2]; expected [20, 3]"));
  EXPECT_TRUE(refused(run(c, changed(s, [](auto& v) { v.type = ElementType::f16; }), m, b, 4, 32, o),
                      "scales has dtype float16"));
  EXPECT_TRUE(
      refused(run(c, s, changed(m, [](auto& v) { v.shape.size[0] = 19; }), b, 4, 32, o), "mins has shape [19, 3]"));
  EXPECT_TRUE(
      refused(run(c, s, m, changed(b, [](auto& v) { v.shape.size[0] = 21; }), 4, 32, o), "bias has shape [21]"));
  EXPECT_TRUE(refused(run(c, s, m, b, 4, 32, changed(o, [](auto& v) { v.shape.size[0] -= 64; })), "out has shape"));
  EXPECT_TRUE(refused(run(c, s, m, b, 4, 32, changed(o, [](auto& v) { v.on_cpu = false; })), "out is not on the CPU"));
}

TEST(PackOperator, UnpackVerifies) {
  const Inputs in(layout_of(20, 70, 4, 32, Mapping::symmetric, true));
  const std::vector<uint8_t> good = packed(in.weights);
  Tensor codes(ElementType::u8, {20, 70}), scales(ElementType::f32, {20, 3}), no_mins(ElementType::f32, {0, 0});
  Tensor bias(ElementType::f32, {20}), no_bias(ElementType::f32, {0});
  const auto run = [&](const std::vector<uint8_t>& bytes, const Tensor& mins, const Tensor& to_bias) {
    return unpack(bytes_tensor(bytes).view, codes.view, scales.view, mins.view, to_bias.view, {});
  };
  EXPECT_TRUE(run(good, no_mins, bias).ok());
  EXPECT_TRUE(refused(run(good, scales, bias), "mins has shape [20, 3]; expected [0, 0]"));
  EXPECT_TRUE(refused(run(good, no_mins, no_bias), "bias has shape [0]; expected [20]"));
  const Tensor source = bytes_tensor(good), few_codes(ElementType::u8, {19, 70}), few_scales(ElementType::f32, {20, 2});
  EXPECT_TRUE(refused(unpack(source.view, few_codes.view, scales.view, no_mins.view, bias.view, {}),
                      "codes has shape [19, 70]; expected [20, 70]"));
  EXPECT_TRUE(refused(unpack(source.view, codes.view, few_scales.view, no_mins.view, bias.view, {}),
                      "scales has shape [20, 2]; expected [20, 3]"));
  for (const size_t at : {size_t{64}, size_t{500}, good.size() - 1}) {
    std::vector<uint8_t> altered = good;
    altered[at] ^= 0x10;
    EXPECT_TRUE(refused(run(altered, no_mins, bias), "altered bytes"));
  }
}

// Pieces of rows or inputs, one of them without a whole panel, and their join.
TEST(SpliceOperator, SlicesJoinToTheSameBytesOnAnyNumberOfThreads) {
  for (const auto& [bits, mapping] : {std::pair{1, Mapping::affine}, {3, Mapping::symmetric}, {8, Mapping::affine}}) {
    const Inputs in(layout_of(300, 1100, bits, 48, mapping, true));
    const std::vector<uint8_t> whole = packed(in.weights);
    const Tensor source = bytes_tensor(whole);
    for (const auto& [dim, places] : {std::pair{0, std::vector<int64_t>{0, 160, 167, 300}}, {1, {0, 48, 960, 1100}}}) {
      for (const int count : {1, 7}) {
        std::vector<Tensor> parts;
        for (size_t i = 0; i + 1 < places.size(); ++i) {
          Layout layout;
          ASSERT_TRUE(splice_shape(&source.view, 1, dim, places[i], places[i + 1], &layout).ok());
          parts.emplace_back(ElementType::u8, std::vector<int64_t>{layout.total_bytes});
          const Status status =
              splice(&source.view, 1, dim, places[i], places[i + 1], parts.back().view, threads(count));
          ASSERT_TRUE(status.ok()) << status.message();
          EXPECT_TRUE(parts.back().memory->intact());
        }
        const std::vector<TensorView> views{parts[0].view, parts[1].view, parts[2].view};
        Tensor joined(ElementType::u8, {in.layout.total_bytes});
        const Status status = splice(views.data(), 3, dim, 0, places.back(), joined.view, threads(count));
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_EQ(joined.bytes(), whole) << bits << " bits, dim " << dim << ", " << count << " threads";
        EXPECT_TRUE(joined.memory->intact());
      }
    }
  }
}

TEST(SpliceOperator, RotationsStay) {
  const Inputs in(rotated(layout_of(20, 128, 4, 16, Mapping::symmetric, false), 32));
  const Tensor source = bytes_tensor(packed(in.weights));
  Layout layout;
  EXPECT_TRUE(refused(splice_shape(&source.view, 1, 1, 32, 80, &layout), "inputs 32 to 80 cut a rotated block of 32"));
  for (const int dim : {0, 1}) {
    ASSERT_TRUE(splice_shape(&source.view, 1, dim, 0, dim == 0 ? 17 : 64, &layout).ok());
    EXPECT_EQ(layout.rotated_inputs(), 32);
  }
  Tensor out(ElementType::u8, {layout.total_bytes});
  ASSERT_TRUE(splice(&source.view, 1, 1, 0, 64, out.view, {}).ok());
  Layout read;
  ASSERT_TRUE(read_packed(out.view, &read).ok());
  EXPECT_EQ(read.rotated_inputs(), 32);
}

TEST(SpliceOperator, ActivationBitsStay) {
  const Inputs in(in_planes(layout_of(20, 128, 4, 16, Mapping::symmetric, false)));
  const Tensor source = bytes_tensor(packed(in.weights));
  Layout layout, read;
  for (const int dim : {0, 1}) {
    ASSERT_TRUE(splice_shape(&source.view, 1, dim, 0, dim == 0 ? 17 : 64, &layout).ok());
    Tensor out(ElementType::u8, {layout.total_bytes});
    ASSERT_TRUE(splice(&source.view, 1, dim, 0, dim == 0 ? 17 : 64, out.view, {}).ok());
    ASSERT_TRUE(read_packed(out.view, &read).ok());
    EXPECT_EQ(read.activation_bits(), 16);
  }
  Tensor again(ElementType::u8, {in.layout.total_bytes});
  ASSERT_TRUE(repack(source.view, "panel16", again.view, {}).ok());
  EXPECT_EQ(again.bytes(), source.bytes());
  ASSERT_TRUE(set_activation_bits(again.view, 8).ok());
  ASSERT_TRUE(read_packed(again.view, &read).ok());
  EXPECT_EQ(read.activation_bits(), 8);
  EXPECT_TRUE(refused(set_activation_bits(again.view, 12), "activation bits are 12; expected 8 or 16"));
}

TEST(SpliceOperator, Refusals) {
  const Inputs in(layout_of(20, 70, 4, 32, Mapping::affine, true));
  const std::vector<uint8_t> good = packed(in.weights);
  const Tensor source = bytes_tensor(good);
  Tensor out(ElementType::u8, {in.layout.total_bytes});
  Layout layout;
  EXPECT_TRUE(refused(splice_shape(&source.view, 0, 0, 0, 1, &layout), "there are 0 matrices"));
  EXPECT_TRUE(refused(splice_shape(&source.view, 1, 2, 0, 1, &layout), "dim is 2"));
  EXPECT_TRUE(refused(splice_shape(&source.view, 1, 0, 0, INT64_MAX, &layout), "expected 0 <= begin < end <= 20"));
  EXPECT_TRUE(refused(splice_shape(&source.view, 1, 1, 32, 48, &layout), "cut a group of 32"));
  EXPECT_TRUE(refused(splice(&source.view, 1, 0, 0, 16, out.view, {}), "out has shape"));
  std::vector<uint8_t> altered = good;
  altered.back() ^= 1;
  const Tensor changed = bytes_tensor(altered);
  EXPECT_TRUE(refused(splice(&changed.view, 1, 0, 0, 20, out.view, {}), "altered bytes"));

  // Incompatible matrices.
  const auto joined = [&](int dim, const Layout& first, const Layout& second) {
    Random random(1);
    const Tensor a = bytes_tensor(packed(random_weights(first, random)));
    const Tensor b = bytes_tensor(packed(random_weights(second, random)));
    const TensorView both[] = {a.view, b.view};
    return splice_shape(both, 2, dim, 0, 1, &layout);
  };
  const Layout first = layout_of(20, 64, 4, 32, Mapping::affine, false);
  EXPECT_TRUE(joined(0, first, first).ok());
  EXPECT_TRUE(refused(joined(0, first, layout_of(20, 96, 4, 32, Mapping::affine, false)),
                      "matrix 1 has 96 inputs; expected 64, as matrix 0"));
  EXPECT_TRUE(refused(joined(1, first, layout_of(21, 64, 4, 32, Mapping::affine, false)),
                      "matrix 1 has 21 rows; expected 20, as matrix 0"));
  for (const Layout& other :
       {layout_of(20, 64, 3, 32, Mapping::affine, false), layout_of(20, 64, 4, 16, Mapping::affine, false),
        layout_of(20, 64, 4, 32, Mapping::symmetric, false)}) {
    EXPECT_TRUE(refused(joined(0, first, other), "expected 4, affine and 32, as matrix 0"));
    EXPECT_TRUE(refused(joined(1, first, other), "expected 4, affine and 32, as matrix 0"));
  }
  EXPECT_TRUE(refused(joined(1, first, layout_of(20, 64, 4, 32, Mapping::affine, true)),
                      "matrix 1 has a bias; expected one in the first only"));
  EXPECT_TRUE(refused(joined(1, layout_of(20, 70, 4, 32, Mapping::affine, false), first),
                      "matrix 0 has 70 inputs, which end inside a group of 32"));
  EXPECT_TRUE(refused(joined(0, rotated(first, 64), first), "matrix 1 has inputs in rotated blocks of 0; expected 64"));
  EXPECT_TRUE(refused(joined(1, rotated(first, 64), rotated(first, 32)), "rotated blocks of 32; expected 64"));
  EXPECT_TRUE(refused(joined(0, in_planes(first), first), "matrix 1 has activations of 8 bits; expected 16, as matrix 0"));
  Layout levels = layout_of(20, 64, 4, 32, Mapping::levels, false), others = levels;
  others.levels[3] = 5;
  EXPECT_TRUE(joined(0, levels, levels).ok());
  EXPECT_TRUE(refused(joined(0, levels, others), "matrix 1 has another table of levels than matrix 0"));
}

}  // namespace
}  // namespace lowbit::test
