// Kernels of libraries: which are chosen, and their properties.

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "../../kernels/registry.h"
#include "../../ops/load_kernels.h"
#include "support/libraries.h"
#include "support/tensors.h"

namespace lowbit::test {
namespace {

TEST(B_Added, RowsAfterTheBuiltInOnesAreOnlyListed) {
  const LinearKernel& before = choose_linear_of(4, 1, kPortable);
  const size_t count = linear_kernel_count(), others = rows();
  const Status status = load_kernels(path_of("fault_none").c_str());
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(linear_kernel_count(), count + 2);
  EXPECT_EQ(rows(), others + 4);
  EXPECT_STREQ(linear_kernel(count).name, "fault_linear");
  EXPECT_EQ(&choose_linear_of(4, 1, kPortable), &before);
  EXPECT_EQ(library_of(&before), nullptr);
  const LoadedLibrary* const loaded = library_of(&linear_kernel(count + 1));
  ASSERT_NE(loaded, nullptr);
  EXPECT_STREQ(loaded->library->vendor, "fault");
  EXPECT_EQ(loaded->path, path_of("fault_none"));
  EXPECT_TRUE(load_kernels(path_of("fault_none").c_str()).ok());  // loading again changes nothing
  EXPECT_EQ(rows(), others + 4);
}

std::atomic<int> calls_of_one_row{0};

// A preferred kernel with limits gets only calls within them.
TEST(B_Added, LimitsGroupsAndIsaOfAPreferredRow) {
#if defined(__aarch64__)
  constexpr IsaBits kNeeded = kNeon | kNeonDot, kLess = kNeon;
#else
  constexpr IsaBits kNeeded = kAvx2 | kAvx512Vnni, kLess = kAvx2;
#endif
  constexpr auto kCount = [](const LinearArgs& args) {
    ++calls_of_one_row;
    portable_linear(args.layout.bits).run(args);
  };
  constexpr auto kWholeBlocks = [](const void*, const Layout& layout, int64_t, IsaBits) {
    return layout.group_inputs() % kBlockInputs == 0;
  };
  static const LinearKernel kRows[] = {
      {"test_2_to_3", kPortable, Format::panel16, 5, 2, 16, kCount, 3, 1,
       [](const void*, const Layout&, int64_t m, IsaBits) { return m <= 3; }},
      {"test_isa", kNeeded, Format::panel16, 6, 1, 16, kCount},
      {"test_whole_blocks", kPortable, Format::panel16, 7, 1, 16, kCount, 3, 1, kWholeBlocks},
      {"test_any_groups", kPortable, Format::panel16, 7, 3, 16, kCount},
      {"test_no_others", kPortable, vendor_format("LONE"), 7, 5, 16, linear_of_panel16, 3, 1, kWholeBlocks},
      {"test_without_others", kPortable, Format::panel16, 8, 1, 16, kCount, 3, 1,
       [](const void*, const Layout&, int64_t, IsaBits isa) { return (isa & kLess) == 0; }},
  };
  static const PackedFormat kFormats[] = {{vendor_format("LONE"), panel16_bytes, pack_panel16}};
  static KernelLibrary library;
  library.vendor = "test";
  library.preference = Preference::before_built_in;
  library.linear = {kRows, 6};
  library.formats = {kFormats, 1};
  ASSERT_TRUE(add_kernels(library, "linked").ok());
  Layout without_rows = layout_of(16, 64, 4, 32, Mapping::symmetric, false);
  without_rows.format = vendor_format("NONE");
  const LinearKernel& none = choose_linear(without_rows, 1, kPortable);
  for (const int64_t m : {1, 2, 3, 4, 100}) {
    const bool own = m == 2 || m == 3;
    EXPECT_EQ(&choose_linear_of(5, m, kPortable) == &named("test_2_to_3"), own) << m;
    EXPECT_EQ(&choose_linear_of(5, m, kNeeded) == &named("test_2_to_3"), own) << m;
    EXPECT_NE(&choose_linear_of(4, m, kNeeded), &named("test_2_to_3"));
  }
  EXPECT_EQ(&choose_linear_of(6, 1, kNeeded), &named("test_isa"));
  EXPECT_NE(&choose_linear_of(6, 1, kLess), &named("test_isa"));
  EXPECT_NE(&choose_linear_of(6, 1, kPortable), &named("test_isa"));
  EXPECT_EQ(&choose_linear_of(8, 1, kPortable), &named("test_without_others"));
  const LinearKernel& built_in = choose_linear_built_in(layout_of(16, 64, 8, 32, Mapping::symmetric, false), 1, kPortable);
  EXPECT_EQ(library_of(&built_in), nullptr) << built_in.name;
  EXPECT_NE(&choose_linear_of(8, 1, kLess), &named("test_without_others"));
  for (const int64_t group_size : {0, 16, 32, 48, 64, 80, 96}) {
    Layout layout = layout_of(16, 32, 7, group_size, Mapping::symmetric, false);
    const bool whole = group_size % 32 == 0;
    EXPECT_EQ(&choose_linear(layout, 1, kPortable) == &named("test_whole_blocks"), whole) << group_size;
    EXPECT_EQ(&choose_linear(layout, 3, kPortable), &named(whole ? "test_whole_blocks" : "test_any_groups")) << group_size;
    layout.format = vendor_format("LONE");
    // It has a larger tile, so it is preferred; it does not get unsupported calls.
    EXPECT_EQ(&choose_linear(layout, 1, kPortable), whole ? &named("test_no_others") : &none) << group_size;
  }
  EXPECT_EQ(library_of(&named("test_isa"))->path, std::string("linked"));

  // The operator makes the same choice, within LOWBIT_ISA.
  Random random(1);
  const Layout layout = layout_of(16, 32, 6, 32, Mapping::symmetric, false);
  Tensor weight = bytes_tensor(packed(random_weights(layout, random)));
  Tensor x = random_tensor(ElementType::f32, {1, 32}, random), out(ElementType::f32, {1, 16});
  calls_of_one_row = 0;
  ASSERT_TRUE(linear(x.view, weight.view, 16, out.view, {}).ok());
  EXPECT_EQ(calls_of_one_row, (kNeeded & ~active_isa()) == 0 ? 1 : 0);
}

// The pieces for a kernel that computes 64 columns at once: whole steps, except the remainder.
namespace steps {
constexpr int64_t kPanels = 4;
std::atomic<int> calls{0}, wrong{0};

void write_zeros(const LinearArgs& args) {
  for (int64_t row = 0; row < args.m; ++row) {
    for (int64_t i = args.panel_begin * kPanelRows; i < args.panel_end * kPanelRows && i < args.layout.n; ++i) {
      store_from_f32(args.out, args.out_dtype, row * args.out_stride + i, 0.0f);
    }
  }
}
void count(const LinearArgs& args) {
  ++calls;
  const bool rest = args.panel_end == args.layout.panels;
  wrong += args.panel_begin % kPanels != 0 || (args.panel_end % kPanels != 0 && !rest);
  write_zeros(args);
}
// A call for an expert sees only the expert's matrix.
void count_of_expert(const LinearArgs& args) {
  ++calls;
  wrong += args.layout.panels % kPanels != 0 && args.layout.n % kPanelRows == 0;
  right_linear(args);
}
}  // namespace steps

TEST(B_Added, CallsAreWholeStepsOfARowThatPrepares) {
  static const PackedFormat kFormats[] = {{vendor_format("STEP"), [](const void*, const Layout&) { return int64_t{64}; },
                                           pack_nothing,
                                           nullptr, 1.0f}};
  static const LinearKernel kRows[] = {{"test_8x64", kPortable, vendor_format("STEP"), 1, 8, 64, steps::count, 3, 1,
                                        nullptr, nullptr, [](const void*, const Layout&, int64_t) { return int64_t{64}; },
                                        [](const PrepareArgs&) {}}};
  static KernelLibrary library;
  library.vendor = "test";
  library.linear = {kRows, 1};
  library.formats = {kFormats, 1};
  ASSERT_TRUE(add_kernels(library, "linked").ok());
  Random random(1);
  Layout layout = layout_of(37 * kPanelRows - 3, 2048, 1, 32, Mapping::symmetric, false);
  const Tensor weight = bytes_tensor(packed(random_weights(layout, random)));
  ASSERT_TRUE(repack_shape(weight.view, "STEP", &layout).ok());
  Tensor own(ElementType::u8, {layout.total_bytes});
  ASSERT_TRUE(repack(weight.view, "STEP", own.view, {}).ok());
  const Tensor x = random_tensor(ElementType::f32, {8, 2048}, random);
  const Tensor out(ElementType::f32, {8, layout.n});
  steps::calls = steps::wrong = 0;
  ASSERT_TRUE(linear(x.view, own.view, layout.n, out.view, threads(3)).ok());
  EXPECT_GT(steps::calls, 1);
  EXPECT_EQ(steps::wrong, 0);
}

TEST(B_Added, CallsForExpertsAreWholeSteps) {
  static const LinearKernel kRows[] = {
      {"test_1x64", kPortable, Format::panel16, 1, 1, 64, steps::count_of_expert}};
  static KernelLibrary library;
  library.vendor = "test";
  library.preference = Preference::before_built_in;
  library.linear = {kRows, 1};
  ASSERT_TRUE(add_kernels(library, "linked").ok());
  Random random(1);
  const Layout layout = layout_of(41 * kPanelRows - 3, 2048, 1, 32, Mapping::symmetric, false);
  const std::vector<uint8_t> bytes = packed(random_weights(layout, random));
  const Tensor weights(ElementType::u8, {2, layout.total_bytes});
  for (int64_t i = 0; i < 2; ++i) std::memcpy(weights.memory->data() + i * layout.total_bytes, bytes.data(), bytes.size());
  for (const int64_t m : {1, 12}) {  // with several rows, the memory of a tile is also a limit
    const Tensor x = random_tensor(ElementType::f32, {m, 2048}, random), out(ElementType::f32, {m, 2, layout.n});
    std::vector<int64_t> chosen;
    for (int64_t i = 0; i < m; ++i) chosen.insert(chosen.end(), {0, 1});
    Tensor experts = index_tensor(chosen);
    experts.view = view_of(experts.memory->data(), ElementType::i64, {m, 2}, {2, 1});
    steps::calls = steps::wrong = 0;
    const Status status = linear_experts(x.view, weights.view, experts.view, layout.n, out.view, threads(9));
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_GT(steps::calls, 2);
    EXPECT_EQ(steps::wrong, 0) << m;
  }
}

// Kernels of a library with shorter structures: missing fields are zero, the default.
TEST(B_Added, RowsThatEndEarlier) {
  constexpr size_t kShort = offsetof(LinearKernel, run) + sizeof(LinearKernel::run);
  static char memory[2][kShort];
  for (const LinearKernel& row : {LinearKernel{"test_short_0", kPortable, Format::panel16, 4, 1, 16, right_linear},
                                  LinearKernel{"test_short_1", kPortable, Format::panel16, 2, 3, 16, right_linear}}) {
    std::memcpy(memory[row.name[11] - '0'], &row, kShort);
  }
  static KernelLibrary library;
  library.vendor = "test";
  library.sizes.linear_kernel = kShort;
  library.linear = {reinterpret_cast<const LinearKernel*>(memory), 2};
  const Status status = add_kernels(library, "linked");
  ASSERT_TRUE(status.ok()) << status.message();
  const LinearKernel &first = named("test_short_0"), &second = named("test_short_1");
  EXPECT_EQ(first.bits, 4);
  EXPECT_EQ(second.bits, 2);
  EXPECT_EQ(second.m_least, 3);
  EXPECT_EQ(second.run, right_linear);
  EXPECT_EQ(second.mappings, kPlainMappings);
  EXPECT_EQ(second.x_types, bit_of(DType::f32));
  EXPECT_EQ(second.supports, nullptr);
  EXPECT_EQ(second.context, nullptr);
}

// A kernel's context is passed to each of its functions, and it gets the memory that it requests.
namespace own {
struct Context {
  int64_t most_rows, scratch_bytes;
};
constexpr Context kContext = {5, 300 << 10};
std::atomic<int> calls{0}, wrong{0};

bool supports(const void* context, const Layout&, int64_t m, IsaBits) {
  wrong += context != &kContext;
  return m <= static_cast<const Context*>(context)->most_rows;
}
int64_t scratch_bytes(const void* context, const Layout&, int64_t m, int threads) {
  wrong += context != &kContext || m < 1 || threads < 1;
  return static_cast<const Context*>(context)->scratch_bytes;
}
void run(const LinearArgs& args) {
  const int id = ++calls & 0xff;
  wrong += args.context != &kContext || reinterpret_cast<uintptr_t>(args.scratch) % 64 != 0;
  std::memset(args.scratch, id, static_cast<size_t>(kContext.scratch_bytes));
  right_linear(args);
  for (int64_t i = 0; i < kContext.scratch_bytes; ++i) wrong += static_cast<const uint8_t*>(args.scratch)[i] != id;
}
}  // namespace own

TEST(B_Added, ContextAndScratch) {
  static LinearKernel row{"test_context", kPortable, Format::panel16, 3, 1, 16, own::run};
  row.supports = own::supports;
  row.scratch_bytes = own::scratch_bytes;
  row.context = &own::kContext;
  static KernelLibrary library;
  library.vendor = "test";
  library.preference = Preference::before_built_in;
  library.linear = {&row, 1};
  const Status status = add_kernels(library, "linked");
  ASSERT_TRUE(status.ok()) << status.message();
  Random random(1);
  const Layout layout = layout_of(300, 512, 3, 32, Mapping::affine, true);
  const std::vector<uint8_t> bytes = packed(random_weights(layout, random));
  const Tensor weight = bytes_tensor(bytes);
  const Tensor weights(ElementType::u8, {2, layout.total_bytes});
  for (int64_t i = 0; i < 2; ++i) std::memcpy(weights.memory->data() + i * layout.total_bytes, bytes.data(), bytes.size());
  for (const int64_t m : {1, 5, 6}) {
    const Tensor x = random_tensor(ElementType::f32, {m, 512}, random), out(ElementType::f32, {m, 300});
    const std::vector<uint8_t> expected = expected_linear(x.view, bytes.data(), layout);
    own::calls = own::wrong = 0;
    ASSERT_TRUE(linear(x.view, weight.view, 300, out.view, threads(3)).ok());
    EXPECT_EQ(own::calls > 0, m <= 5);
    EXPECT_TRUE(same_bits(out.bytes(), expected, DType::f32));
    Tensor experts = index_tensor(std::vector<int64_t>(static_cast<size_t>(m), 1));
    experts.view = view_of(experts.memory->data(), ElementType::i64, {m, 1}, {1, 1});
    const Tensor of_experts(ElementType::f32, {m, 1, 300});
    own::calls = 0;
    ASSERT_TRUE(linear_experts(x.view, weights.view, experts.view, 300, of_experts.view, threads(3)).ok());
    EXPECT_EQ(own::calls > 0, m <= 5);
    EXPECT_TRUE(same_bits(of_experts.bytes(), expected, DType::f32));
    EXPECT_EQ(own::wrong, 0);
  }
}

// Attention by a vendor's kernel: the same bits, with its context.
std::atomic<int> attention_calls[3];

TEST(B_Added, AttentionRows) {
  static constexpr int kContext = 0;
  static constexpr auto kCount = [](int which, const void* context) { attention_calls[which] += context == &kContext; };
  static const AttentionKernel kRow{"test_attention", kPortable,
                                    [](const AttentionArgs& args) {
                                      kCount(0, args.context);
                                      portable_attention().run(args);
                                    },
                                    [](const AttentionWriteArgs& args) {
                                      kCount(1, args.context);
                                      portable_attention().write(args);
                                    },
                                    [](const AttentionJoinArgs& args) {
                                      kCount(2, args.context);
                                      portable_attention().join(args);
                                    },
                                    &kContext};
  Random random(1);
  constexpr int64_t kLength = 1040, kPositions = 1030, kWidth = 64;
  constexpr int64_t kNew = 5;
  const Tensor q = random_tensor(ElementType::f32, {1, 2, kNew, kWidth}, random);
  const Tensor k = random_tensor(ElementType::f32, {1, 1, kNew, kWidth}, random);
  const Tensor cache = random_tensor(ElementType::f32, {1, 1, kLength, kWidth}, random);
  const Tensor start = index_tensor<int64_t>({kPositions});
  Scores scores{};
  scores.scale = 0.125;
  // Of one new position, whose spans threads share, and of several, which this kernel writes one by one.
  const auto attend = [&] {
    std::vector<uint8_t> all;
    for (const int64_t positions : {int64_t{1}, kNew}) {
      TensorView some_q = q.view, some_k = k.view;
      some_q.shape.size[2] = some_k.shape.size[2] = positions;
      Tensor keys(ElementType::f32, {1, 1, kLength, kWidth}), values(ElementType::f32, {1, 1, kLength, kWidth});
      std::memcpy(keys.memory->data(), cache.memory->data(), static_cast<size_t>(cache.memory->size()));
      std::memcpy(values.memory->data(), cache.memory->data(), static_cast<size_t>(cache.memory->size()));
      Tensor out(ElementType::f32, {1, positions, 2, kWidth});
      const Status status =
          attention(some_q, some_k, some_k, keys.view, values.view, start.view, scores, out.view, threads(3));
      EXPECT_TRUE(status.ok()) << status.message();
      for (const Tensor* tensor : {&out, &keys, &values}) {
        const std::vector<uint8_t> bytes = tensor->bytes();
        all.insert(all.end(), bytes.begin(), bytes.end());
      }
    }
    return all;
  };
  const std::vector<uint8_t> expected = attend();
  static KernelLibrary library;
  library.vendor = "test";
  library.preference = Preference::before_built_in;
  library.attention = {&kRow, 1};
  const Status status = add_kernels(library, "linked");
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_STREQ(choose_attention(kPortable).name, "test_attention");
  EXPECT_EQ(library_of(&choose_attention(active_isa()))->library, &library);
  for (std::atomic<int>& calls : attention_calls) calls = 0;
  EXPECT_EQ(attend(), expected);
  for (std::atomic<int>& calls : attention_calls) EXPECT_GT(calls, 0);
}

// A library without a preference gets no call that a built-in kernel can take.
TEST(B_Added, WithoutAPreferenceTheBuiltInRowsStay) {
  static const LinearKernel kRows[] = {
      {"test_modest", kPortable, Format::panel16, 3, 1, 16, right_linear}};
  static KernelLibrary library;
  library.vendor = "test";
  library.linear = {kRows, 1};
  ASSERT_TRUE(add_kernels(library, "linked").ok());
  for (const int64_t m : {1, 2, 100}) {
    EXPECT_NE(&choose_linear_of(3, m, kPortable), &named("test_modest"));
    EXPECT_NE(&choose_linear_of(3, m, active_isa()), &named("test_modest"));
  }
}

// A format may return 1 to 2^62 bytes; its layout argument has no panel sizes.
TEST(B_Added, LimitsOfAFormatsBytes) {
  static int64_t said = 0;
  static Layout asked;
  static const PackedFormat kFormats[] = {{vendor_format("LIM"),
                                           [](const void*, const Layout& layout) {
                                             asked = layout;
                                             return said;
                                           },
                                           pack_nothing}};
  static KernelLibrary library;
  library.vendor = "test";
  library.formats = {kFormats, 1};
  ASSERT_TRUE(add_kernels(library, "linked").ok());
  Random random(1);
  const Tensor weight = bytes_tensor(packed(random_weights(layout_of(3, 40, 4, 32, Mapping::symmetric, false), random)));
  Layout layout;
  for (const int64_t right : {int64_t{1}, int64_t{64}, int64_t{65}, int64_t{1} << 62}) {
    said = right;
    const Status status = repack_shape(weight.view, "LIM", &layout);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(layout.total_bytes, 64 + (right + 63) / 64 * 64);
    for (const Layout* each : {&asked, &layout}) {
      EXPECT_EQ(each->block_bytes, 0);
      EXPECT_EQ(each->group_bytes, 0);
      EXPECT_EQ(each->head_offset, 0);
      EXPECT_EQ(each->panel_bytes, 0);
    }
    EXPECT_EQ(asked.total_bytes, 0);
  }
  for (const int64_t wrong : {int64_t{0}, int64_t{-1}, (int64_t{1} << 62) + 1, INT64_MAX, INT64_MIN}) {
    said = wrong;
    EXPECT_TRUE(refused(repack_shape(weight.view, "LIM", &layout), "format 'LIM' does not hold 3 x 40 weights"));
  }
}

// Names of formats have one to four letters.
TEST(B_Added, AFormatOfOneLetter) {
  static const PackedFormat kFormats[] = {{vendor_format("L"), [](const void*, const Layout&) { return int64_t{100}; },
                                           pack_nothing}};
  static KernelLibrary library;
  library.vendor = "test";
  library.formats = {kFormats, 1};
  ASSERT_TRUE(add_kernels(library, "linked").ok());
  Random random(1);
  const Tensor weight = bytes_tensor(packed(random_weights(layout_of(3, 40, 4, 32, Mapping::symmetric, false), random)));
  Layout layout;
  const Status status = repack_shape(weight.view, "L", &layout);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(layout.total_bytes, 64 + 128);
}

// A library may have any subset of the tables.
TEST(B_Added, AnyMixOfTables) {
  static char names[16][3][24];
  static LinearKernel linear[16];
  static EmbeddingKernel embedding[16];
  static QuantizeKernel quantize[16];
  static PackedFormat formats[16];
  static KernelLibrary libraries[16];
  for (size_t mix = 1; mix < 16; ++mix) {
    for (int i = 0; i < 3; ++i) std::snprintf(names[mix][i], sizeof names[mix][i], "mix_%zu_%d", mix, i);
    const uint32_t id = 0x0058494d + (static_cast<uint32_t>('a' + mix) << 24);  // "MIX" and a letter
    linear[mix] = {names[mix][0], kPortable, Format::panel16, 4, 1, 16, right_linear};
    embedding[mix] = {names[mix][1], kPortable, Format::panel16, 4, portable_embedding(4).run};
    quantize[mix] = {names[mix][2], kPortable, portable_quantize().run};
    formats[mix] = {static_cast<Format>(id), [](const void*, const Layout&) { return int64_t{0}; },
                    pack_nothing};
    KernelLibrary& library = libraries[mix];
    library.vendor = "test";
    if ((mix & 1) != 0) library.linear = {&linear[mix], 1};
    if ((mix & 2) != 0) library.embedding = {&embedding[mix], 1};
    if ((mix & 4) != 0) library.quantize = {&quantize[mix], 1};
    if ((mix & 8) != 0) library.formats = {&formats[mix], 1};
    const size_t before = rows();
    const Status status = add_kernels(library, names[mix][0]);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(rows(), before + (mix & 1) + (mix >> 1 & 1) + (mix >> 2 & 1));
    EXPECT_EQ(find_format(static_cast<Format>(id)) != nullptr, (mix & 8) != 0);
  }
}

TEST(B_Added, TheExampleGivesTheSameBits) {
  Random random(2);
  const Layout layout = layout_of(50, 100, 4, 32, Mapping::affine, true);
  Tensor weight = bytes_tensor(packed(random_weights(layout, random)));
  Tensor x = random_tensor(ElementType::f32, {9, 100}, random);
  const std::vector<uint8_t> expected = expected_linear(x.view, weight.memory->data(), layout);
  const Status status = load_kernels(path_of("acme_kernels").c_str());
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(&choose_linear_of(4, 9, active_isa()), &named("acme_linear_a8w4"));
  Tensor out(ElementType::f32, {9, 50});
  ASSERT_TRUE(linear(x.view, weight.view, 50, out.view, threads(3)).ok());
  EXPECT_TRUE(same_bits(out.bytes(), expected, DType::f32));
}

}  // namespace
}  // namespace lowbit::test
