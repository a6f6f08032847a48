// The linear operator: strides and shapes, refusals, threads and chunks, always with the bits of the portable kernels run row
// by row. ctest runs this once per LOWBIT_ISA.

#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "support/build.h"
#include "support/tensors.h"

namespace lowbit::test {
namespace {

struct Model {
  Layout layout;
  Tensor packed_weight;

  Model(int64_t n, int64_t k, int bits = 4, int64_t group_size = 32, Mapping mapping = Mapping::symmetric)
      : Model(layout_of(n, k, bits, group_size, mapping, true)) {}
  explicit Model(const Layout& of) : layout(of), packed_weight(make(layout)) {}

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

TEST(Linear, RotatedInputs) {
  Random random(3);
  for (const Mapping mapping : mappings_of_width(4)) {
    for (const int64_t block : {16, 32, 64, 128}) {
      const int64_t k = 3 * block;
      const Model model(rotated(layout_of(37, k, 4, 32, mapping, true), block));
      for (const ElementType type : kTypes) {
        for (const int64_t m : {1, 3, 40}) {
          const Tensor x = random_tensor(type, {m, k}, random);
          model.check(x.view);
          model.check(view_of(x.memory->data(), type, {m, k}, {1, m}), threads(3));
        }
      }
    }
  }
}

TEST(Linear, TwoPlanes) {
  Random random(3);
  for (int bits = 1; bits <= 8; ++bits) {
    for (const Mapping mapping : mappings_of_width(bits)) {
      for (const int64_t group_size : {16, 48, 0}) {
        Layout layout = in_planes(layout_of(37, 96, bits, group_size, mapping, group_size != 48));
        if (group_size == 48) layout = rotated(layout, 32);
        const Model model(layout);
        for (const ElementType type : kTypes) {
          const Tensor x = random_tensor(type, {5, 96}, random);
          model.check(x.view);
          model.check(view_of(x.memory->data(), type, {5, 96}, {1, 5}), threads(3));
        }
      }
    }
  }
}

// One row and many, several bands, and more panels than are computed at once; short groups, and rows that do not end with a
// block.
TEST(Linear, TwoPlanesOfAnySize) {
  Random random(4);
  for (const int64_t k : {1, 17, 50, 1000}) {
    for (const int64_t n : {1, 16, 200, 2500}) {
      const Model model(in_planes(layout_of(n, k, 4, 32, Mapping::affine, true)));
      for (const int64_t m : {1, 2, 7, 40}) {
        if (m * n * k > 4'000'000) continue;
        model.check(random_tensor(ElementType::bf16, {m, k}, random).view, threads(m % 2 == 0 ? 3 : 1));
      }
    }
  }
  const Model narrow(in_planes(layout_of(33, 16, 8, 16, Mapping::symmetric, false)));
  narrow.check(random_tensor(ElementType::f32, {1200, 16}, random).view, threads(2));
  const Model wide(in_planes(layout_of(34000, 16, 2, 16, Mapping::symmetric, true)));
  wide.check(random_tensor(ElementType::f32, {1, 16}, random).view);
}

// Values that a plane cannot represent: a segment of zeros, tiny and huge values, and values that are not finite.
TEST(Linear, TwoPlanesOfOddValues) {
  const Model model(in_planes(layout_of(20, 96, 4, 32, Mapping::affine, true)));
  for (const float odd : {0.0f, -0.0f, 1e-40f, 1e-37f, 3e33f, std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    Random random(5);
    const Tensor x = random_tensor(ElementType::f32, {2, 96}, random);
    for (int64_t i = 0; i < 32; ++i) store_from_f32(x.memory->data(), DType::f32, i, i % 3 == 0 ? odd : 0.0f);
    Tensor out(ElementType::f32, {2, 20});
    ASSERT_TRUE(linear(x.view, model.packed_weight.view, 20, out.view, {}).ok());
    const std::vector<uint8_t> expected = expected_linear(x.view, model.packed_weight.memory->data(), model.layout);
    for (int64_t i = 0; i < 40; ++i) {  // the sign and payload of a NaN are not part of the contract
      const float found = load_as_f32(out.bytes().data(), DType::f32, i), wanted = load_as_f32(expected.data(), DType::f32, i);
      if (std::isnan(wanted)) EXPECT_TRUE(std::isnan(found)) << odd;
      else EXPECT_EQ(bits_of_float(found), bits_of_float(wanted)) << odd << " " << i;
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

// A list of matrices of all widths and group sizes gives the concatenated results of single calls.
TEST(Linears, GiveTheBitsOfEach) {
  Random random(11);
  for (const int64_t k : {50, 256}) {
    std::vector<Model> models;
    models.reserve(9);
    models.emplace_back(37, k, 4, 32);
    models.emplace_back(1, k, 8, 32, Mapping::affine);
    models.emplace_back(100, k, 3, 48, Mapping::affine);
    models.emplace_back(16, k, 1, 0);
    models.emplace_back(20, k, 4, 16);
    for (const int64_t block : {16, 64}) {  // together with others of the same group sizes
      const Layout layout = layout_of(20, k, 4, block, Mapping::symmetric, false);
      models.emplace_back(k % block == 0 ? rotated(layout, block) : layout);
    }
    models.emplace_back(in_planes(layout_of(50, k, 8, 32, Mapping::symmetric, true)));
    models.emplace_back(in_planes(layout_of(20, k, 4, 16, Mapping::affine, false)));
    std::vector<TensorView> weights;
    std::vector<int64_t> out_features;
    int64_t outputs = 0;
    for (const Model& model : models) {
      weights.push_back(model.packed_weight.view);
      out_features.push_back(model.layout.n);
      outputs += model.layout.n;
    }
    for (const ElementType type : kTypes) {
      for (const int64_t m : {1, 3, 150}) {
        const Tensor x = random_tensor(type, {m, k}, random);
        for (const TensorView& view : {x.view, view_of(x.memory->data(), type, {m, k}, {1, m})}) {
          std::vector<uint8_t> expected(static_cast<size_t>(m * outputs * element_bytes(type)));
          int64_t column = 0;
          for (const Model& model : models) {
            const std::vector<uint8_t> one = expected_linear(view, model.packed_weight.memory->data(), model.layout);
            const int64_t bytes = model.layout.n * element_bytes(type);
            for (int64_t i = 0; i < m; ++i) {
              std::memcpy(expected.data() + (i * outputs + column) * element_bytes(type), one.data() + i * bytes,
                          static_cast<size_t>(bytes));
            }
            column += model.layout.n;
          }
          for (const int count : {1, 3}) {
            Tensor out(type, {m, outputs});
            const Status status =
                linears(view, weights.data(), out_features.data(), std::ssize(models), out.view, threads(count));
            ASSERT_TRUE(status.ok()) << status.message();
            EXPECT_TRUE(same_bits(out.bytes(), expected, dtype_of(type))) << m << " rows, " << count << " threads";
            EXPECT_TRUE(out.memory->intact());
          }
        }
      }
    }
  }
}

TEST(Linears, Refusals) {
  Random random(12);
  const Model model(20, 50), other_inputs(20, 51);
  const Tensor x = random_tensor(ElementType::f32, {3, 50}, random);
  Tensor out(ElementType::f32, {3, 40});
  const TensorView& w = model.packed_weight.view;
  const auto run = [&](std::vector<TensorView> weights, std::vector<int64_t> sizes) {
    return linears(x.view, weights.data(), sizes.data(), static_cast<int64_t>(sizes.size()), out.view, {});
  };
  ASSERT_TRUE(run({w, w}, {20, 20}).ok());
  out.memory->freeze();
  EXPECT_TRUE(refused(run({}, {}), "there are 0 out_features; expected 1 to 16"));
  EXPECT_TRUE(refused(run(std::vector<TensorView>(17, w), std::vector<int64_t>(17, 20)), "there are 17 out_features"));
  EXPECT_TRUE(refused(run({w, w}, {20, 21}), "out_features is 21; expected 20"));
  EXPECT_TRUE(refused(run({w, w}, {INT64_MAX, INT64_MAX}), "out_features is 9223372036854775807; expected less"));
  EXPECT_TRUE(refused(run({w, w}, {20, -20}), "out_features is -20"));
  EXPECT_TRUE(refused(run({w, w, w}, {20, 20, 20}), "out has shape [3, 40]; expected [3, 60]"));
  EXPECT_TRUE(refused(run({w, other_inputs.packed_weight.view}, {20, 20}), "expected [..., 51]"));
  EXPECT_TRUE(out.memory->intact());
}

#ifdef __GLIBC__
// Memory kept after a call with strided inputs, in a block of the next power of two: the quantized rows (a byte per input, and
// a scale and a sum per 64 inputs), and a row and the kernel's scratch memory per thread; but no copy of x. For few long rows,
// no memory for more rows is kept.
TEST(Linear, MemoryOfACall) {
  if (kSanitized) return;  // sanitizers have their own allocator
  mallopt(M_MMAP_THRESHOLD, 1 << 17);  // from here on every large block is a separate mapping, which mallinfo2 counts
  const auto kept = [](int64_t m, int64_t k) {
    int64_t bytes = -1;
    std::thread([&] {
      Random random(13);
      const Model model(5, k, 1, 65536);
      const Tensor x = random_tensor(ElementType::f32, {k, m}, random), out(ElementType::f32, {m, 5});
      const size_t before = mallinfo2().hblkhd;
      const Status status = linear(view_of(x.memory->data(), ElementType::f32, {m, k}, {1, m}),
                                   model.packed_weight.view, 5, out.view, {});
      bytes = static_cast<int64_t>(mallinfo2().hblkhd - before);
      EXPECT_TRUE(status.ok()) << status.message();
    }).join();
    return bytes;
  };
  const int64_t rows_of_8_mib = kept(1000, 4096);
  const auto row = [](int64_t k) { return k + (k + 63) / 64 * 8; };
  EXPECT_GE(rows_of_8_mib, 1000 * row(4096));
  const auto block = [](int64_t bytes) {
    return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes))) + (1 << 16);
  };
  EXPECT_LE(rows_of_8_mib, block(1000 * row(4096) + (1 << 20)));
  const int64_t long_rows = kept(6, 1500000);  // 5 of them are 8 MiB
  EXPECT_LE(long_rows, block(6 * row(1500000) + 1500000 * 4 + (1 << 18)));
  EXPECT_GE(long_rows, 6 * row(1500000));
}
#endif

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
  for (const int64_t m : {1, 5, 150}) {  // threads share the matrix product, and with 150 rows also the quantization
    const Tensor x = random_tensor(ElementType::f32, {m, 256}, random);
    for (const int count : {1, 2, 7}) {
      regions = 0;
      model.check(x.view, counted(count));
      EXPECT_EQ(regions, count > 1 && m > 1 ? 1 : 0) << m << " rows, " << count << " threads";
    }
    model.check(view_of(x.memory->data(), ElementType::f32, {m, 256}, {0, m}), threads(3));  // gathered by threads
  }
}

// Enough rows that their quantized values exceed the operator's scratch memory (8 MiB).
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
