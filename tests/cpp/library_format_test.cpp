// Kernel libraries' own formats in the operators, and threads that load libraries while others choose kernels.

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../../kernels/registry.h"
#include "../../ops/load_kernels.h"
#include "support/libraries.h"
#include "support/tensors.h"

namespace lowbit::test {
namespace {

// "ROWS" of tests/vendor/own_format.cpp. All buffers are guarded, so that every length is checked.
TEST(C_OwnFormat, GoesThroughTheOperators) {
  Random random(3);
  const Layout layout = layout_of(50, 100, 8, 32, Mapping::affine, true);
  const Weights weights = random_weights(layout, random);
  Tensor weight = bytes_tensor(packed(weights));
  Layout own;
  EXPECT_TRUE(refused(repack_shape(weight.view, "ROWS", &own), "there is no format 'ROWS'"));
  const Status status = load_kernels(path_of("own_format").c_str());
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_TRUE(repack_shape(weight.view, "ROWS", &own).ok());
  EXPECT_TRUE(refused(repack_shape(weight.view, "ROWSX", &own), "there is no format 'ROWSX'"));
  EXPECT_TRUE(refused(repack_shape(weight.view, "", &own), "there is no format ''"));
  ASSERT_TRUE(repack_shape(weight.view, "ROWS", &own).ok());
  EXPECT_EQ(own.total_bytes, 64 + (50 * 100 + 2 * 50 * 4 * 4 + 50 * 4 + 63) / 64 * 64);
  Tensor rows(ElementType::u8, {own.total_bytes});
  ASSERT_TRUE(repack(weight.view, "ROWS", rows.view, {}).ok());
  EXPECT_TRUE(rows.memory->intact());
  rows.memory->freeze();

  Layout read;
  ASSERT_TRUE(read_packed(rows.view, &read).ok());
  EXPECT_EQ(name_of(read.format).text, std::string("ROWS"));
  EXPECT_TRUE(verify_payload(rows.view.data, read).ok());
  Tensor back(ElementType::u8, {layout.total_bytes});
  ASSERT_TRUE(repack(rows.view, "panel16", back.view, {}).ok());
  EXPECT_EQ(back.bytes(), weight.bytes());

  const Decoded decoded = decode(weight.memory->data(), layout);
  for (const int64_t m : {1, 4, 70}) {  // m = 1 is below the tile of its only kernel
    Tensor x = random_tensor(ElementType::f32, {m, 100}, random), out(ElementType::f32, {m, 50});
    const Status result = linear(x.view, rows.view, 50, out.view, threads(3));
    ASSERT_TRUE(result.ok()) << result.message();
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t row = 0; row < 50; ++row) {
        double sum = decoded.bias[static_cast<size_t>(row)], magnitude = std::fabs(sum);
        for (int64_t j = 0; j < 100; ++j) {
          const double product = x.memory->as<float>()[i * 100 + j] * decoded.weight(row, j);
          sum += product;
          magnitude += std::fabs(product);
        }
        EXPECT_NEAR(out.memory->as<float>()[i * 50 + row], sum, 4e-7 * magnitude + 1e-6) << i << " " << row;
      }
    }
  }
  Tensor out(ElementType::f32, {1, 100});
  Tensor index = index_tensor<int64_t>({7});
  EXPECT_TRUE(refused(embedding(index.view, rows.view, 100, out.view, {}),
                      "no embedding kernel for weights of 8 bits in format 'ROWS'"));
}

// Experts, slices and joins of a vendor's format give the results of panel16.
TEST(C_OwnFormat, ExpertsAndSlices) {
  ASSERT_TRUE(load_kernels(path_of("own_format").c_str()).ok());
  Random random(4);
  const auto to_rows = [](const Tensor& weight) {
    Layout own;
    EXPECT_TRUE(repack_shape(weight.view, "ROWS", &own).ok());
    Tensor rows(ElementType::u8, {own.total_bytes});
    EXPECT_TRUE(repack(weight.view, "ROWS", rows.view, threads(3)).ok());
    return rows;
  };
  const auto cut = [](const std::vector<const Tensor*>& parts, int dim, int64_t begin, int64_t end) {
    std::vector<TensorView> views;
    for (const Tensor* part : parts) views.push_back(part->view);
    const int64_t count = static_cast<int64_t>(views.size());
    Layout layout;
    Status status = splice_shape(views.data(), count, dim, begin, end, &layout);
    EXPECT_TRUE(status.ok()) << status.message();
    Tensor out(ElementType::u8, {layout.total_bytes});
    status = splice(views.data(), count, dim, begin, end, out.view, threads(3));
    EXPECT_TRUE(status.ok()) << status.message();
    return out;
  };
  for (const Mapping mapping : {Mapping::symmetric, Mapping::affine}) {
    for (const int64_t group_size : {0, 32}) {
      std::vector<Tensor> panels, own;
      for (int i = 0; i < 2; ++i) {
        panels.push_back(bytes_tensor(packed(random_weights(layout_of(37, 96, 8, group_size, mapping, true), random))));
        own.push_back(to_rows(panels.back()));
      }
      const auto same = [&](const std::vector<int>& which, int dim, int64_t begin, int64_t end) {
        std::vector<const Tensor*> a, b;
        for (const int i : which) a.push_back(&panels[static_cast<size_t>(i)]), b.push_back(&own[static_cast<size_t>(i)]);
        const Tensor expected = to_rows(cut(a, dim, begin, end)), found = cut(b, dim, begin, end);
        EXPECT_EQ(found.bytes(), expected.bytes()) << dim << " " << begin << " " << end;
        EXPECT_TRUE(found.memory->intact());
      };
      same({0}, 0, 3, 30);
      same({0, 1}, 0, 5, 70);
      same({0, 1}, 0, 0, 74);
      if (group_size == 0) continue;
      same({0}, 1, 32, 96);
      same({0}, 1, 0, 64);
    }
  }

  constexpr int64_t kExperts = 3, kM = 40;
  const Layout layout = layout_of(37, 100, 4, 32, Mapping::affine, true);
  std::vector<Tensor> own;
  for (int i = 0; i < kExperts; ++i) own.push_back(to_rows(bytes_tensor(packed(random_weights(layout, random)))));
  const int64_t bytes = own[0].memory->size();
  const Tensor weights(ElementType::u8, {kExperts, bytes});
  for (int64_t i = 0; i < kExperts; ++i) {
    std::memcpy(weights.memory->data() + i * bytes, own[static_cast<size_t>(i)].memory->data(), static_cast<size_t>(bytes));
  }
  for (const ElementType type : {ElementType::f32, ElementType::bf16}) {
    const Tensor x = random_tensor(type, {kM, 100}, random);
    std::vector<int64_t> chosen;
    for (int64_t i = 0; i < 2 * kM; ++i) chosen.push_back(i * i % 5 % kExperts);
    Tensor experts = index_tensor(chosen);
    experts.view = view_of(experts.memory->data(), ElementType::i64, {kM, 2}, {2, 1});
    Tensor out(type, {kM, 2, 37});
    const Status status = linear_experts(x.view, weights.view, experts.view, 37, out.view, threads(3));
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(out.memory->intact());
    for (int64_t expert = 0; expert < kExperts; ++expert) {
      const Tensor all(type, {kM, 37});
      ASSERT_TRUE(linear(x.view, own[static_cast<size_t>(expert)].view, 37, all.view, {}).ok());
      const size_t row = static_cast<size_t>(37 * element_bytes(type));
      for (size_t i = 0; i < chosen.size(); ++i) {
        if (chosen[i] != expert) continue;
        EXPECT_EQ(std::memcmp(out.memory->data() + i * row, all.memory->data() + i / 2 * row, row), 0) << i;
      }
    }
    Tensor wrong = index_tensor(std::vector<int64_t>(2 * kM, kExperts));
    wrong.view = experts.view;
    wrong.view.data = wrong.memory->data();
    EXPECT_TRUE(refused(linear_experts(x.view, weights.view, wrong.view, 37, out.view, {}), "expert 3 (number 0 of 80) is out",
                        Status::Kind::out_of_range));
  }
}

TEST(C_OwnFormat, WithoutUnpackItIsNotCut) {
  static const PackedFormat kFormats[] = {
      {vendor_format("NOUN"), [](const void*, const Layout&) { return int64_t{64}; }, pack_nothing}};
  static KernelLibrary library;
  library.vendor = "test";
  library.formats = {kFormats, 1};
  ASSERT_TRUE(add_kernels(library, "linked").ok());
  Random random(1);
  const Tensor weight = bytes_tensor(packed(random_weights(layout_of(8, 32, 4, 32, Mapping::symmetric, false), random)));
  Layout layout;
  ASSERT_TRUE(repack_shape(weight.view, "NOUN", &layout).ok());
  Tensor own(ElementType::u8, {layout.total_bytes});
  ASSERT_TRUE(repack(weight.view, "NOUN", own.view, {}).ok());
  EXPECT_TRUE(refused(splice_shape(&own.view, 1, 0, 0, 4, &layout), "format 'NOUN' cannot be cut or joined"));
  const TensorView both[] = {weight.view, own.view};
  EXPECT_TRUE(refused(splice_shape(both, 2, 0, 0, 4, &layout),
                      "matrix 1 is in format 'NOUN'; expected 'panel16', as matrix 0"));
}

// A header that changes between two reads: the first read counts. The format's function changes it, at a moment when another
// thread could.
namespace changing {
uint8_t* header = nullptr;
uint8_t headers[2][kHeaderBytes];
int readings = 0, changed_at = 0;  // another matrix's header, between this read and the next
bool mixed = false;
constexpr int64_t kRows = 20;

int64_t bytes(const void*, const Layout&) {
  if (header != nullptr) std::memcpy(header, headers[++readings == changed_at], kHeaderBytes);
  return 4096;
}
const char* pack(const void*, const Layout& layout, const PackArgs&, int64_t, int64_t, void*) {
  mixed = mixed || layout.n != kRows;
  return nullptr;
}
const char* unpack(const void*, const Layout&, const void*, int64_t, int64_t, const UnpackArgs&) { return nullptr; }
}  // namespace changing

TEST(C_OwnFormat, AHeaderThatChangesIsReadOnce) {
  static const PackedFormat kFormats[] = {{vendor_format("CHNG"), changing::bytes, changing::pack, changing::unpack}};
  static KernelLibrary library;
  library.vendor = "test";
  library.formats = {kFormats, 1};
  ASSERT_TRUE(add_kernels(library, "linked").ok());
  Random random(3);
  Tensor weights[2] = {Tensor(ElementType::u8, {kHeaderBytes + 4096}), Tensor(ElementType::u8, {kHeaderBytes + 4096})};
  for (int i = 0; i < 2; ++i) {
    const Layout layout = layout_of(i == 0 ? changing::kRows : 10 * changing::kRows, 64, 4, 32, Mapping::symmetric, false);
    const Tensor source = bytes_tensor(packed(random_weights(layout, random)));
    ASSERT_TRUE(repack(source.view, "CHNG", weights[i].view, {}).ok());
    std::memcpy(changing::headers[i], weights[i].memory->data(), kHeaderBytes);
  }
  changing::mixed = false;
  changing::header = weights[0].memory->data();
  Tensor out(ElementType::u8, {kHeaderBytes + 4096});
  for (int i = 1; i <= 4; ++i) {  // may be refused, but must not use the sizes of one header with the memory of the other
    std::memcpy(changing::header, changing::headers[0], kHeaderBytes);
    changing::readings = 0;
    changing::changed_at = i;
    const Status status = repack(weights[0].view, "CHNG", out.view, {});
    EXPECT_FALSE(changing::mixed) << status.message();
  }
  changing::header = nullptr;
  EXPECT_TRUE(out.memory->intact());
}

TEST(D_Threads, ChooseWhileRowsAreAdded) {
  constexpr int kLibraries = 32;
  static char names[kLibraries][32];
  static LinearKernel rows_of[kLibraries];
  static KernelLibrary libraries[kLibraries];
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> readers;
  for (int t = 0; t < 3; ++t) {
    readers.emplace_back([&] {
      while (!stop) {
        const LinearKernel& chosen = choose_linear_of(2, 1, kPortable);
        if (chosen.run == nullptr || chosen.bits != 2) ++wrong;
        const size_t count = linear_kernel_count();
        if (linear_kernel(count - 1).name == nullptr) ++wrong;
      }
    });
  }
  std::vector<std::thread> writers;
  for (int t = 0; t < 2; ++t) {
    writers.emplace_back([&, t] {
      for (int i = t; i < kLibraries; i += 2) {
        std::snprintf(names[i], sizeof names[i], "added_%d", i);
        rows_of[i] = {names[i], kPortable, Format::panel16, 2, 1, 16, right_linear};
        libraries[i].vendor = "test";
        libraries[i].preference = Preference::before_built_in;
        libraries[i].linear = {&rows_of[i], 1};
        if (!add_kernels(libraries[i], names[i]).ok()) ++wrong;
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  stop = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0);
  for (int i = 0; i < kLibraries; ++i) EXPECT_EQ(library_of(&named(names[i]))->library, &libraries[i]);
}

TEST(D_Threads, RoomForSixtyFour) {
  static char names[64][32];
  static QuantizeKernel rows_of[64];
  static KernelLibrary libraries[64];
  for (int i = 0; i < 64; ++i) {
    std::snprintf(names[i], sizeof names[i], "more_%d", i);
    rows_of[i] = {names[i], kPortable, portable_quantize().run};
    libraries[i].vendor = "test";
    libraries[i].quantize = {&rows_of[i], 1};
    const size_t before = rows();
    const Status status = add_kernels(libraries[i], names[i]);
    if (status.ok()) continue;
    EXPECT_TRUE(refused(status, "64 kernel libraries are loaded"));
    EXPECT_EQ(rows(), before);
    return;
  }
  ADD_FAILURE() << "all were taken";
}

}  // namespace
}  // namespace lowbit::test
