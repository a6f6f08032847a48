// Kernel libraries in C++: which rows are chosen, formats of their own, what is refused. Loading is for good, so these
// tests run in a process of their own, in the order of this file: first what must leave no trace.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "../../kernels/registry.h"
#include "../../ops/load_kernels.h"
#include "support/build.h"
#include "support/tensors.h"

namespace lowbit::test {
namespace {

std::string path_of(const char* library) { return std::string(kTestLibraries) + library + ".so"; }

size_t rows() { return linear_kernel_count() + embedding_kernel_count() + quantize_kernel_count(); }

struct Fault {
  const char* library;
  const char* message;
};

TEST(A_Refused, BrokenLibraries) {
  const Fault faults[] = {
      {"no_function", "has no function 'lowbit_kernels'"},
      {"null_library", "has no kernels for version 3"},
      {"other_abi", "its kernel interface is version 7; this build of lowbit has version 3"},
      {"other_size", "its structure LinearKernel has 56 bytes; expected 64"},
      {"no_vendor", "the vendor has no name"},
      {"bad_preference", "its preference is 9; expected 0 or 1"},
      {"no_rows", "no rows and no formats"},
      {"null_rows", "2 linear rows at a null address"},
      {"too_many_rows", "embedding rows; expected at most 1024"},
      {"null_function", "row 'fault_linear' has no function"},
      {"no_name", "linear row 0 has no name"},
      {"empty_name", "linear row 0 has an empty name"},
      {"long_name", "expected at most 63 characters"},
      {"bad_character", "byte 0x20 in its name"},
      {"foreign_format", "is of the format 'ELSE'"},
      {"bad_bits", "has 9 bits; expected 1 to 8"},
      {"bad_m_least", "has the tile 0 x 16"},
      {"bad_n_step", "has the tile 1 x 24"},
      {"bad_m_most", "at most 3 rows of m"},
      {"bad_group_step", "for groups of multiples of 24 inputs; expected 16 or 32"},
      {"half_prepare", "only one of prepare and activation_bytes"},
      {"prepare_panel16", "prepares activations in its own way"},
      {"unknown_isa", "requires the ISA bits 0x"},
      {"built_in_name", "has the name of another row"},
      {"twice_named", "has the name of another row"},
      {"null_embedding", "row 'fault_embedding' has no function"},
      {"bad_embedding_bits", "row 'fault_embedding' has 0 bits"},
      {"null_quantize", "row 'fault_quantize' has no function"},
      {"bad_format_id", "a format has the id 0x0"},
      {"null_format_bytes", "has no function bytes"},
      {"null_format_pack", "has no function pack"},
      {"twice_formatted", "format 'FLT1' is there twice"},
      {"second_row_bad", "row 'fault_linear_2' has 0 bits"},
  };
  const size_t before = rows();
  for (const Fault& fault : faults) {
    const std::string path = path_of((std::string("fault_") + fault.library).c_str());
    EXPECT_TRUE(refused(load_kernels(path.c_str()), fault.message));
    EXPECT_EQ(rows(), before);
    EXPECT_EQ(find_format(vendor_format("FLT1")), nullptr);
    EXPECT_EQ(find_format(vendor_format("FLT2")), nullptr);
  }
}

TEST(A_Refused, WhatIsNoLibrary) {
  EXPECT_TRUE(refused(load_kernels("/nowhere/missing.so"), "missing.so", Status::Kind::system));
  EXPECT_TRUE(refused(load_kernels(kTestLibraries), "does not load", Status::Kind::system));
  EXPECT_TRUE(refused(load_kernels(""), "the path of the kernel library is empty"));
}

// Each single bit of an id, and ids with a gap, a foreign letter or none.
TEST(A_Refused, FormatIds) {
  for (const uint32_t id : {0x0u, 0x20u, 0x41004100u, 0x410041u, 0x4141ffu, 0x2e414141u, 0x41u << 8}) {
    PackedFormat format{static_cast<Format>(id), [](const Layout&) { return int64_t{64}; },
                        [](const Layout&, const PackArgs&, void*) { return static_cast<const char*>(nullptr); }};
    KernelLibrary library;
    library.vendor = "test";
    library.formats = {&format, 1};
    EXPECT_TRUE(refused(add_kernels(library, "ids"), "a format has the id 0x"));
  }
  EXPECT_STREQ(name_of(vendor_format("A")).text, "A");
  EXPECT_STREQ(name_of(vendor_format("ab-9")).text, "ab-9");
  EXPECT_STREQ(name_of(Format::panel16).text, "panel16");
}

// A table with a few fields that no library has, at random: what is refused names one of them, and the others are not read. The
// last thing that is looked at is always wrong, so that no table is taken.
TEST(A_Refused, TablesOfRandomFaults) {
  struct Rows {
    char names[6][80] = {"walk_a", "walk_b", "walk_c", "walk_d", "walk_e", "linear_a8w4_1x16_portable"};
    LinearKernel linear[3];
    EmbeddingKernel embedding[2];
    QuantizeKernel quantize[1];
    PackedFormat formats[2];
    KernelLibrary library;
  };
  static const auto run_linear = [](const LinearArgs&) {};
  static const auto run_embedding = [](const EmbeddingArgs&) {};
  static const auto bytes = [](const Layout&) { return int64_t{64}; };
  static const auto pack = [](const Layout&, const PackArgs&, void*) { return static_cast<const char*>(nullptr); };
  static const auto activation_bytes = [](const Layout&, int64_t) { return int64_t{64}; };
  Random random(5);
  const auto far = [&] { return random.below(2) == 0 ? random.next() : uint64_t{1} << random.below(64); };
  struct Damage {
    std::function<bool(Rows&)> apply;  // whether the table is wrong now
    const char* message;
  };
  const Damage damages[] = {
      {[&](Rows& r) { return (r.library.abi = static_cast<uint32_t>(far())) != kKernelAbi; }, "kernel interface is version"},
      {[&](Rows& r) {
         uint32_t sizes[sizeof(AbiSizes) / 4];
         std::memcpy(sizes, &r.library.sizes, sizeof sizes);
         uint32_t& size = sizes[random.below(11)];
         const uint32_t before = size;
         size = static_cast<uint32_t>(far());
         const bool wrong = size != before;
         std::memcpy(&r.library.sizes, sizes, sizeof sizes);
         return wrong;
       },
       "its structure "},
      {[&](Rows& r) { return (r.library.vendor = random.below(2) == 0 ? nullptr : "") == nullptr || true; }, "the vendor has"},
      {[&](Rows& r) {
         r.library.preference = static_cast<Preference>(far());
         return static_cast<uint32_t>(r.library.preference) > 1;
       },
       "its preference is"},
      {[&](Rows& r) { return (r.library.linear.count = 1025 + (far() >> 2)) > 0; }, "linear rows; expected at most 1024"},
      {[&](Rows& r) { return (r.library.embedding.count = 1025 + (far() >> 2)) > 0; }, "embedding rows; expected at most"},
      {[&](Rows& r) { return (r.library.formats.count = 1025 + (far() >> 2)) > 0; }, "format rows; expected at most 1024"},
      {[&](Rows& r) { return (r.library.linear.rows = nullptr) == nullptr; }, "linear rows at a null address"},
      {[&](Rows& r) { return (r.library.quantize.rows = nullptr) == nullptr; }, "quantize rows at a null address"},
      {[&](Rows& r) {
         const int row = static_cast<int>(random.below(5));  // its name: any bytes, with an end or without
         for (char& c : r.names[row]) c = static_cast<char>(random.next());
         r.names[row][0] = '.';  // which a name may have elsewhere
         r.names[row][random.below(64)] = '\0';
         if (random.below(2) == 0) std::memset(r.names[row], 'a', 64);
         return true;
       },
       " name"},
      {[&](Rows& r) { return (r.linear[random.below(3)].run = nullptr) == nullptr; }, "has no function"},
      {[&](Rows& r) { return (r.quantize[0].isa = ~IsaBits{0}) != 0; }, "requires the ISA bits"},
      {[&](Rows& r) {
         r.embedding[random.below(2)].bits = static_cast<uint8_t>(random.below(2) == 0 ? 0 : 9 + random.below(247));
         return true;
       },
       "bits; expected 1 to 8"},
      {[&](Rows& r) { return (r.linear[1].mappings = static_cast<uint8_t>(random.below(2) * 0x80)) != 1; }, "reads the mappings"},
      {[&](Rows& r) { return (r.linear[2].m_least = 0) == 0; }, "has the tile"},
      {[&](Rows& r) { return (r.linear[0].n_step = static_cast<uint8_t>(9 + random.below(7))) > 0; }, "has the tile"},
      {[&](Rows& r) { return (r.linear[1].m_most = 3) == 3; }, "is for at most 3 rows of m"},
      {[&](Rows& r) { return (r.linear[1].group_step = static_cast<uint8_t>(33 + random.below(223))) > 0; }, "is for groups"},
      {[&](Rows& r) { return (r.linear[2].activation_bytes = nullptr) == nullptr; }, "only one of prepare"},
      {[&](Rows& r) { return (r.linear[2].format = Format::panel16) == Format::panel16; }, "prepares activations"},
      {[&](Rows& r) { return (r.embedding[1].format = static_cast<Format>(far() | 0x80000000u)) != Format::panel16; },
       "is of the format"},
      {[&](Rows& r) { return (r.formats[1].format = static_cast<Format>(far() & 0xffffff00u)) != r.formats[0].format; },
       "a format has the id"},
      {[&](Rows& r) { return (r.formats[1].format = r.formats[0].format) == r.formats[0].format; }, "is there twice"},
      {[&](Rows& r) { return (r.formats[random.below(2)].bytes = nullptr) == nullptr; }, "has no function bytes"},
  };
  constexpr size_t kDamages = sizeof damages / sizeof damages[0];
  const size_t before = rows();
  std::vector<int> seen(kDamages + 1);
  for (int execution = 0; execution < 20000; ++execution) {
    Rows r;
    r.linear[0] = {r.names[0], kPortable, Format::panel16, 4, 1, 16, run_linear};
    r.linear[1] = {r.names[1], kPortable, Format::panel16, 4, 4, 16, run_linear};
    r.linear[2] = {r.names[2], kPortable, vendor_format("WLK1"), 4, 1, 16, run_linear, 0, activation_bytes,
                   [](const PrepareArgs&) {}};
    r.embedding[0] = {r.names[3], kPortable, Format::panel16, 4, run_embedding};
    r.embedding[1] = {r.names[4], kPortable, vendor_format("WLK2"), 4, run_embedding};
    r.quantize[0] = {r.names[5], kPortable, [](const QuantizeArgs&) {}};
    r.formats[0] = {vendor_format("WLK1"), bytes, pack};
    r.formats[1] = {vendor_format("WLK2"), bytes, pack};
    r.library.vendor = "walk";
    r.library.linear = {r.linear, 3};
    r.library.embedding = {r.embedding, 2};
    r.library.quantize = {r.quantize, 1};
    r.library.formats = {r.formats, 2};
    std::vector<size_t> wrong;
    for (int64_t left = random.below(4); left > 0; --left) {
      const size_t damage = static_cast<size_t>(random.below(kDamages));
      if (std::count(wrong.begin(), wrong.end(), damage) != 0) continue;  // it could make good what it did
      if (damages[damage].apply(r)) wrong.push_back(damage);
    }
    const Status status = add_kernels(r.library, "walk");
    ASSERT_FALSE(status.ok()) << execution;
    const std::string message = status.message();
    bool named = wrong.empty() && message.find("has the name of another row") != std::string::npos;
    seen[kDamages] += named;
    for (const size_t damage : wrong) {
      const bool found = message.find(damages[damage].message) != std::string::npos;
      named = named || found;
      seen[damage] += found;
    }
    // Rows of a format that is not there any more, and those behind a name that is.
    named = named || (!wrong.empty() && message.find("is of the format 'WLK") != std::string::npos);
    ASSERT_TRUE(named) << execution << ": " << message;
    for (const char c : message) ASSERT_TRUE(c >= ' ' && c <= '~') << execution;
  }
  EXPECT_EQ(rows(), before);
  for (size_t damage = 0; damage <= kDamages; ++damage) {
    EXPECT_GT(seen[damage], 0) << (damage < kDamages ? damages[damage].message : "none");
  }
}

// The structures that libraries are compiled with. A change here needs another kKernelAbi.
TEST(A_Refused, TheInterfaceIsVersion3) {
  EXPECT_EQ(kKernelAbi, 3u);
  const AbiSizes sizes = KernelLibrary{}.sizes;
  EXPECT_EQ(offsetof(KernelLibrary, abi), 0u);
  EXPECT_EQ(offsetof(KernelLibrary, sizes), 4u);
  EXPECT_EQ(sizes.library, 128u);
  EXPECT_EQ(sizes.format, 32u);
  EXPECT_EQ(sizes.quantize_row, 24u);
  EXPECT_EQ(sizes.linear_row, 64u);
  EXPECT_EQ(sizes.embedding_row, 40u);
  EXPECT_EQ(sizes.quantize_args, 72u);
  EXPECT_EQ(sizes.prepare_args, 176u);
  EXPECT_EQ(sizes.linear_args, 232u);
  EXPECT_EQ(sizes.embedding_args, 160u);
  EXPECT_EQ(sizes.pack_args, 32u);
  EXPECT_EQ(sizes.unpack_args, 32u);
}

const LinearKernel& choose_linear_of(int bits, int64_t m, IsaBits isa) {
  return choose_linear(layout_of(16, 64, bits, 32, Mapping::symmetric, false), m, isa);
}

const LinearKernel& named(const char* name) {
  for (size_t i = 0; i < linear_kernel_count(); ++i) {
    if (std::strcmp(linear_kernel(i).name, name) == 0) return linear_kernel(i);
  }
  ADD_FAILURE() << "there is no row " << name;
  return linear_kernel(0);
}

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
  EXPECT_TRUE(load_kernels(path_of("fault_none").c_str()).ok());  // again: nothing changes
  EXPECT_EQ(rows(), others + 4);
}

std::atomic<int> calls_of_one_row{0};

// A preferred row with limits: only what fits them is its own.
TEST(B_Added, LimitsGroupsAndIsaOfAPreferredRow) {
#if defined(__aarch64__)
  constexpr IsaBits kNeeded = kNeon | kNeonDot, kLess = kNeon;
#else
  constexpr IsaBits kNeeded = kAvx2 | kAvx512Vnni, kLess = kAvx2;
#endif
  constexpr auto kCount = [](const LinearArgs&) { ++calls_of_one_row; };
  static const LinearKernel kRows[] = {
      {"test_2_to_3", kPortable, Format::panel16, 5, 2, 16, kCount, 3},
      {"test_isa", kNeeded, Format::panel16, 6, 1, 16, kCount},
      {"test_whole_blocks", kPortable, Format::panel16, 7, 1, 16, kCount, 0, nullptr, nullptr, 32},
      {"test_any_groups", kPortable, Format::panel16, 7, 3, 16, kCount, 0, nullptr, nullptr, 16},
      {"test_no_others", kPortable, vendor_format("LONE"), 7, 1, 16, kCount, 0, nullptr, nullptr, 32},
  };
  static const PackedFormat kFormats[] = {{vendor_format("LONE"), [](const Layout&) { return int64_t{1}; },
                                           [](const Layout&, const PackArgs&, void*) -> const char* { return ""; }}};
  static KernelLibrary library;
  library.vendor = "test";
  library.preference = Preference::before_built_in;
  library.linear = {kRows, 5};
  library.formats = {kFormats, 1};
  ASSERT_TRUE(add_kernels(library, "linked").ok());
  for (const int64_t m : {1, 2, 3, 4, 100}) {
    const bool own = m == 2 || m == 3;
    EXPECT_EQ(&choose_linear_of(5, m, kPortable) == &kRows[0], own) << m;
    EXPECT_EQ(&choose_linear_of(5, m, kNeeded) == &kRows[0], own) << m;
    EXPECT_NE(&choose_linear_of(4, m, kNeeded), &kRows[0]);
  }
  EXPECT_EQ(&choose_linear_of(6, 1, kNeeded), &kRows[1]);
  EXPECT_NE(&choose_linear_of(6, 1, kLess), &kRows[1]);
  EXPECT_NE(&choose_linear_of(6, 1, kPortable), &kRows[1]);
  for (const int64_t group_size : {0, 16, 32, 48, 64, 80, 96}) {
    Layout layout = layout_of(16, 32, 7, group_size, Mapping::symmetric, false);
    const bool whole = group_size % 32 == 0;
    EXPECT_EQ(&choose_linear(layout, 1, kPortable) == &kRows[2], whole) << group_size;
    EXPECT_EQ(&choose_linear(layout, 3, kPortable), whole ? &kRows[2] : &kRows[3]) << group_size;
    layout.format = vendor_format("LONE");
    EXPECT_EQ(&choose_linear(layout, 1, kPortable), &kRows[4]) << "better than none, for groups of " << group_size;
  }
  EXPECT_EQ(library_of(&kRows[1])->path, std::string("linked"));

  // The operator asks the same question, with LOWBIT_ISA's answer.
  Random random(1);
  const Layout layout = layout_of(16, 32, 6, 32, Mapping::symmetric, false);
  Tensor weight = bytes_tensor(packed(random_weights(layout, random)));
  Tensor x = random_tensor(ElementType::f32, {1, 32}, random), out(ElementType::f32, {1, 16});
  calls_of_one_row = 0;
  ASSERT_TRUE(linear(x.view, weight.view, 16, out.view, {}).ok());
  EXPECT_EQ(calls_of_one_row, (kNeeded & ~active_isa()) == 0 ? 1 : 0);
}

// A library that says nothing of its place takes no call that a built-in row could have.
TEST(B_Added, WithoutAPreferenceTheBuiltInRowsStay) {
  static const LinearKernel kRows[] = {
      {"test_modest", kPortable, Format::panel16, 3, 1, 16, [](const LinearArgs&) {}}};
  static KernelLibrary library;
  library.vendor = "test";
  library.linear = {kRows, 1};
  ASSERT_TRUE(add_kernels(library, "linked").ok());
  for (const int64_t m : {1, 2, 100}) {
    EXPECT_NE(&choose_linear_of(3, m, kPortable), &kRows[0]);
    EXPECT_NE(&choose_linear_of(3, m, active_isa()), &kRows[0]);
  }
}

// A format may say 1 to 2^62 bytes, and is asked with a layout that says nothing of panels.
TEST(B_Added, LimitsOfAFormatsBytes) {
  static int64_t said = 0;
  static Layout asked;
  static const PackedFormat kFormats[] = {{vendor_format("LIM"),
                                           [](const Layout& layout) {
                                             asked = layout;
                                             return said;
                                           },
                                           [](const Layout&, const PackArgs&, void*) -> const char* { return nullptr; }}};
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

// Names of formats have one letter to four.
TEST(B_Added, AFormatOfOneLetter) {
  static const PackedFormat kFormats[] = {{vendor_format("L"), [](const Layout&) { return int64_t{100}; },
                                           [](const Layout&, const PackArgs&, void*) -> const char* { return nullptr; }}};
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

// A library may have any of the tables, alone and with others.
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
    linear[mix] = {names[mix][0], kPortable, Format::panel16, 4, 1, 16, [](const LinearArgs&) {}};
    embedding[mix] = {names[mix][1], kPortable, Format::panel16, 4, [](const EmbeddingArgs&) {}};
    quantize[mix] = {names[mix][2], kPortable, [](const QuantizeArgs&) {}};
    formats[mix] = {static_cast<Format>(id), [](const Layout&) { return int64_t{0}; },
                    [](const Layout&, const PackArgs&, void*) -> const char* { return nullptr; }};
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

// "ROWS" of tests/vendor/own_format.cpp: everything lies between walls, so that no length is taken on trust.
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
  for (const int64_t m : {1, 4, 70}) {  // m = 1 is below the tile of its only row
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

// A header that changes between two readings of it: what is packed is what was read first. The format's own function
// changes it, which is when another thread could.
namespace changing {
uint8_t* header = nullptr;
uint8_t headers[2][kHeaderBytes];
int readings = 0, changed_at = 0;  // another matrix's header, after this reading and until the next
bool mixed = false;
constexpr int64_t kRows = 20;

int64_t bytes(const Layout&) {
  if (header != nullptr) std::memcpy(header, headers[++readings == changed_at], kHeaderBytes);
  return 4096;
}
const char* pack(const Layout& layout, const PackArgs&, void*) {
  mixed = mixed || layout.n != kRows;
  return nullptr;
}
const char* unpack(const Layout&, const void*, const UnpackArgs&) { return nullptr; }
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
  for (int i = 1; i <= 4; ++i) {  // may be refused; but never the sizes of one with the memory of the other
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
  constexpr int kLibraries = 40;
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
        rows_of[i] = {names[i], kPortable, Format::panel16, 2, 1, 16, [](const LinearArgs&) {}};
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
    rows_of[i] = {names[i], kPortable, [](const QuantizeArgs&) {}};
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
