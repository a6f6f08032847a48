// Kernel libraries that are refused and leave no trace; runs first of library_tests.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "../../kernels/registry.h"
#include "../../ops/load_kernels.h"
#include "support/build.h"
#include "support/libraries.h"
#include "support/tensors.h"

namespace lowbit::test {
namespace {

struct Fault {
  const char* library;
  const char* message;
};

template <size_t N>
void expect_refused(const Fault (&faults)[N]) {
  const size_t before = rows();
  for (const Fault& fault : faults) {
    const std::string path = path_of((std::string("fault_") + fault.library).c_str());
    EXPECT_TRUE(refused(load_kernels(path.c_str()), fault.message));
    EXPECT_EQ(rows(), before);
    EXPECT_EQ(find_format(vendor_format("FLT1")), nullptr);
    EXPECT_EQ(find_format(vendor_format("FLT2")), nullptr);
  }
}

TEST(A_Refused, BrokenLibraries) {
  const Fault faults[] = {
      {"no_function", "has no function 'lowbit_kernels'"},
      {"null_library", "has no kernels for version 7"},
      {"other_abi", "its kernel interface is version 8; this build of lowbit has version 7"},
      {"other_size", "its structure lowbit_linear_kernel has 96 bytes; expected 32 to 88, a multiple of 8"},
      {"small_size", "its structure lowbit_linear_args has 232 bytes; expected 240 to 248"},
      {"odd_size", "its structure lowbit_format has 47 bytes; expected 24 to 48, a multiple of 8"},
      {"no_vendor", "the vendor has no name"},
      {"bad_preference", "its preference is 9; expected 0 or 1"},
      {"no_rows", "no kernels and no formats"},
      {"null_rows", "2 linear kernels at a null address"},
      {"too_many_rows", "embedding kernels; expected at most 1024"},
      {"null_function", "kernel 'fault_linear' has no function"},
      {"no_name", "linear kernel 0 has no name"},
      {"empty_name", "linear kernel 0 has an empty name"},
      {"long_name", "expected at most 63 characters"},
      {"bad_character", "byte 0x20 in its name"},
      {"foreign_format", "is of the format 'ELSE'"},
      {"bad_bits", "has 9 bits; expected 1 to 8"},
      {"bad_m_least", "has the tile 0 x 16"},
      {"bad_n_step", "has the tile 1 x 24"},
      {"bad_x_types", "kernel 'fault_linear_2' prepares the types 0x08; expected some of 0x07"},
      {"bad_scratch", "kernel 'fault_linear_2' requests -1 bytes of scratch; expected 0 to 2^40"},
      {"bad_activation_bytes", "kernel 'fault_linear' requests 9223372036854775807 bytes of activations; expected 1 to 2^40"},
      {"bad_rows_at_once", "format 'FLT1' has rows_at_once -1; expected 0 or more"},
      {"null_attention", "kernel 'fault_attention' has no function"},
      {"null_attention_write", "kernel 'fault_attention' has no function write"},
      {"null_attention_join", "kernel 'fault_attention' has no function join"},
      {"half_prepare", "only one of prepare and activation_bytes"},
      {"prepare_panel16", "prepares activations in its own way"},
      {"unknown_isa", "requires the ISA bits 0x"},
      {"built_in_name", "has the name of another kernel"},
      {"twice_named", "has the name of another kernel"},
      {"null_embedding", "kernel 'fault_embedding' has no function"},
      {"bad_embedding_bits", "kernel 'fault_embedding' has 0 bits"},
      {"null_quantize", "kernel 'fault_quantize' has no function"},
      {"bad_format_id", "a format has the id 0x0"},
      {"null_format_bytes", "has no function bytes"},
      {"null_format_pack", "has no function pack"},
      {"twice_formatted", "format 'FLT1' occurs twice"},
      {"second_row_bad", "kernel 'fault_linear_2' has 0 bits"},
      {"bad_tolerance", "format 'FLT2' has the tolerance 1.5; expected 0 to 1"},
  };
  expect_refused(faults);
}

// Kernels with wrong results in special cases, and kernels that write out of bounds.
TEST(A_Refused, KernelsThatLie) {
  const Fault faults[] = {
      {"lies_by_a_hundredth",
       "kernel 'fault_linear' differs from the portable kernel: 21 x 128 weights of 4 bits, symmetric, group "
       "size 32, 1 row of activations, float32 outputs: [0, 0] is "},
      {"lies_at_three_rows", ", 3 rows of activations, float32 outputs: [2, 0] is "},
      {"lies_in_the_last_column", ", symmetric, group size 32, 1 row of activations, float32 outputs: [0, 20] is "},
      {"lies_about_levels",
       "kernel 'fault_linear_2' differs from the portable kernel: 21 x 128 weights of 4 bits, levels"},
      {"lies_where_groups_are_cut", ": 21 x 130 weights of 4 bits, symmetric, group size 48, 1 row of activations"},
      {"lies_in_its_tile",
       "kernel 'fault_linear_2' differs from the portable kernel: 21 x 128 weights of 4 bits, symmetric, group "
       "size 32, 11 rows of activations, float32 outputs: [0, 0] is "},
      {"lies_from_the_second_panel", ", 1 row of activations, float32 outputs: [0, 16] is "},
      {"lies_in_bfloat16", ", group size 64, 1 row of activations, bfloat16 outputs: [0, 0] is "},
      {"lies_about_not_a_number", "is 0; expected nan"},
      {"writes_nothing", "float32 outputs: [0, 0] is -nan"},
      {"writes_the_gap", "float32 outputs: [0, 21] is 1; expected -nan"},
      {"lies_in_an_embedding",
       "kernel 'fault_embedding' differs from the portable kernel: 21 x 128 weights of 4 bits, symmetric, group "
       "size 32, float32 outputs: [20, 127] is 0.5; expected "},
      {"lies_in_a_sum",
       "kernel 'fault_quantize' differs from the portable kernel: 128 float32 values, group size 32: sums[0] "},
      {"lies_in_a_scale", "values, group size 32: scales[0] is 0; expected nan"},
      {"lies_in_long_rows", "520 weights of 4 bits, symmetric, group size 96, 1 row of activations"},
      {"lies_where_it_is_asked", "520 weights of 4 bits, symmetric, group size 96, 1 row of activations"},
      {"lies_in_many_outputs", "4096 x 1 weights of 4 bits, symmetric, group size "},
      {"lies_at_seven_rows", ": 21 x 128 weights of 4 bits, symmetric, group size 32, 7 rows of activations"},
      {"lies_at_large_sums", ": 21 x 128 weights of 4 bits, symmetric, group size 32, 1 row of activations, "},
      {"lies_in_a_long_embedding", "x 2080 weights of 4 bits, symmetric, group size 64, "},
      {"lies_about_a_long_row", "1100 float32 values, group size 32: a[1099] is 0; expected "},
      {"writes_before_the_outputs", "kernel 'fault_linear' writes outside of its outputs: 21 x 128 weights of 4 bits"},
      {"writes_behind_the_scratch", "kernel 'fault_linear' writes outside of its scratch: 21 x 128 weights"},
      {"writes_in_the_weights", "kernel 'fault_linear' changes its inputs: 21 x 128 weights"},
      {"writes_in_the_activations", "kernel 'fault_linear' changes its inputs: 21 x 128 weights"},
      {"writes_in_other_panels", "[0, 0] is 1; expected "},
      {"needs_an_empty_scratch", "[0, 0] is 1; expected "},
      {"reads_the_outputs", "[0, 0] is -nan; expected "},
      {"writes_behind_an_embedding", "kernel 'fault_embedding' writes outside of its outputs: 21 x 128 weights"},
      {"writes_behind_the_codes", "kernel 'fault_quantize' writes outside of its outputs: 128 float32 values, group size 32"},
      {"writes_in_the_values", "kernel 'fault_quantize' changes its inputs: 128 float32 values, group size 32"},
      {"never_asked", "kernel 'fault_linear_2' was never run: it supports no matrix of the trial at load"},
      {"only_impossible_levels", "kernel 'fault_linear_2' was never run"},
      {"changes_its_mind", "kernel 'fault_linear' contradicts itself: supports() said yes, then no to 21 x 128 weights"},
      {"holds_nothing", "kernel 'fault_linear' was never run: it supports no matrix of the trial at load"},
      {"packs_outside", "format 'FLT1' writes outside of its 64 bytes: 21 x 128 weights of 4 bits"},
      {"infinite", "[0, 0] is inf; expected "},
      {"infinite_embedding", "kernel 'fault_embedding' differs from the portable kernel"},
      {"zero_within_a_tolerance", "is 0; expected "},
  };
  expect_refused(faults);
}

TEST(A_Refused, AttentionKernelsThatLie) {
  static AttentionKernel kernel;
  const AttentionKernel right{"test_attention", kPortable, portable_attention().run, portable_attention().write,
                              portable_attention().join};
  const auto refuses = [&](const char* message) {
    static KernelLibrary library;
    library.vendor = "test";
    library.attention = {&kernel, 1};
    EXPECT_TRUE(refused(add_kernels(library, "linked"), message));
    kernel = right;
  };
  kernel = right;
  const auto runs = [&](void (*run)(const AttentionArgs&), const char* message) {
    kernel.run = run;
    refuses(message);
  };
  runs(
      [](const AttentionArgs& args) {
        portable_attention().run(args);
        if (args.cap > 0.0f && args.cache == CacheType::i8) store_from_f32(args.out[args.rows - 1], args.dtype, 31, 1.0f);
      },
      "'test_attention' differs from the portable kernel: keys of 64 and values of 32 values, 600 positions of "
      "float32 in a cache of int8, softcap 2: [2, 31] is 1; expected ");
  // Right with the widths of the first case, wrong with all others.
  static int64_t wrong_width;
  for (const int64_t width : {16, 32, 48, 80, 96, 112, 128, 160, 192, 224, 256, 320, 512}) {
    wrong_width = width;
    runs(
        [](const AttentionArgs& args) {
          portable_attention().run(args);
          if (args.width == wrong_width && args.partial == nullptr) store_from_f32(args.out[0], args.dtype, 0, 9.0f);
        },
        (": keys of " + std::to_string(width) + " and values of ").c_str());
    // The same for each type of cache that has such widths.
    static CacheType wrong_cache;
    for (const CacheType cache : {CacheType::bf16, CacheType::f16, CacheType::i8, CacheType::i4, CacheType::i8_i4}) {
      // 4-bit caches have multiples of 32.
      if (cache >= CacheType::i4 && width % 32 != 0) continue;
      wrong_cache = cache;
      kernel.write = [](const AttentionWriteArgs& args) {
        portable_attention().write(args);
        if (args.width == wrong_width && args.cache == wrong_cache) ++static_cast<uint8_t*>(args.keys)[3];
      };
      refuses(("keys of " + std::to_string(width) + " and values of ").c_str());
    }
  }
  runs([](const AttentionArgs& args) {
    AttentionArgs unlimited = args;
    int64_t begins[kAttentionRows] = {};
    if (args.partial == nullptr && args.begins[0] > 3) unlimited.begins = begins;
    portable_attention().run(unlimited);
  }, " is ");
  runs([](const AttentionArgs& args) {
    AttentionArgs without = args;
    without.sinks = nullptr;
    portable_attention().run(without);
  }, ": keys of 64 and values of 32 values, 600 positions of float32 in a cache of float32, softcap 0: [0, ");
  runs([](const AttentionArgs& args) {
    portable_attention().run(args);
    if (args.rows > 8 && args.partial == nullptr) store_from_f32(args.out[args.rows - 1], args.dtype, 0, 9.0f);
  }, "[15, 0] is 9; expected ");
  runs([](const AttentionArgs& args) {
    portable_attention().run(args);
    if (args.partial == nullptr) store_from_f32(args.out[0], args.dtype, args.value_width, 9.0f);
  }, "[0, 32] is 9; expected ");
  runs([](const AttentionArgs& args) {
    const float first = args.scratch[0];
    portable_attention().run(args);
    if (args.partial == nullptr && first != 0.0f) store_from_f32(args.out[0], args.dtype, 0, 9.0f);
  }, "[0, 0] is 9; expected ");
  runs([](const AttentionArgs& args) {
    portable_attention().run(args);
    args.scratch[lowbit_attention_scratch(args.width, args.value_width)] = 1.0f;
  }, "writes outside of its outputs or its scratch: keys of 64 and values of 32 values, 600 positions");
  runs([](const AttentionArgs& args) {
    portable_attention().run(args);
    store_from_f32(const_cast<void*>(args.q[0]), args.dtype, 0, 0.5f);
  }, "changes its inputs: keys of 64");
  kernel.join = [](const AttentionJoinArgs& args) {
    portable_attention().join(args);
    store_from_f32(args.out[0], args.dtype, 0, 1.0f);
  };
  refuses("600 positions of float32 in a cache of float32, softcap 0 in spans: [0, 0] is 1; expected ");
  kernel.write = [](const AttentionWriteArgs& args) {
    portable_attention().write(args);
    if (args.cache == CacheType::i4 && args.position == 599) ++static_cast<uint8_t*>(args.values)[599 * 16];
  };
  refuses("writes other bytes than the portable kernel: keys of 64 and values of 32 values, 600 positions of float32 to a "
          "cache of int4: byte 9584 of the values is 0x");
  kernel.write = [](const AttentionWriteArgs& args) {
    AttentionWriteArgs next = args;
    next.v_step = 1;
    portable_attention().write(next);
  };
  refuses("of the values is 0x");
  kernel.write = [](const AttentionWriteArgs& args) {
    portable_attention().write(args);
    static_cast<char*>(args.keys)[-1] = 0;
  };
  refuses("writes outside of the cache: keys of 64");
  kernel.writes_several = true;  // one position less than asked for
  kernel.write = [](const AttentionWriteArgs& args) {
    AttentionWriteArgs fewer = args;
    if (args.positions > 16) --fewer.positions;
    portable_attention().write(fewer);
  };
  refuses("writes other bytes than the portable kernel: keys of 64 and values of 32 values, 600 positions of float32 to a "
          "cache of float32: byte ");
}

TEST(A_Refused, WhatIsNoLibrary) {
  EXPECT_TRUE(refused(load_kernels("/nowhere/missing.so"), "missing.so", Status::Kind::system));
  EXPECT_TRUE(refused(load_kernels(kTestLibraries), "does not load", Status::Kind::system));
  EXPECT_TRUE(refused(load_kernels(""), "the path of the kernel library is empty"));
}

// Each single bit of an id, and ids with a gap, an invalid character or no letter.
TEST(A_Refused, FormatIds) {
  for (const uint32_t id : {0x0u, 0x20u, 0x41004100u, 0x410041u, 0x4141ffu, 0x2e414141u, 0x41u << 8}) {
    PackedFormat format{static_cast<Format>(id), [](const void*, const Layout&) { return int64_t{64}; }, pack_nothing};
    KernelLibrary library;
    library.vendor = "test";
    library.formats = {&format, 1};
    EXPECT_TRUE(refused(add_kernels(library, "ids"), "a format has the id 0x"));
  }
  EXPECT_STREQ(name_of(vendor_format("A")).text, "A");
  EXPECT_STREQ(name_of(vendor_format("ab-9")).text, "ab-9");
  EXPECT_STREQ(name_of(Format::panel16).text, "panel16");
}

// Every pointer of every structure is null in turn: a sentence, or the meaning in the header. The last kernel has the name of a
// built-in one, so that no table is accepted.
TEST(A_Refused, ANullInAnyField) {
  struct Rows {
    LinearKernel linear;
    EmbeddingKernel embedding;
    QuantizeKernel quantize;
    AttentionKernel attention;
    PackedFormat format;
    KernelLibrary library;
  };
  const char* const allowed = "kernel 'linear_a8w4_1x16_portable' has the name of another kernel";
  int context = 0;
  Rows whole{};
  whole.linear = {"null_linear", kPortable, vendor_format("NUL1"), 4, 1, 16, right_linear};
  whole.linear.supports = [](const void*, const Layout&, int64_t, IsaBits) { return true; };
  whole.linear.scratch_bytes = [](const void*, const Layout&, int64_t, int) { return int64_t{64}; };
  whole.linear.activation_bytes = [](const void*, const Layout&, int64_t) { return int64_t{64}; };
  whole.linear.prepare = [](const PrepareArgs&) {};
  whole.embedding = {"null_embedding", kPortable, Format::panel16, 4, [](const EmbeddingArgs&) {}};
  whole.quantize = {"null_quantize", kPortable, [](const QuantizeArgs&) {}};
  whole.attention = {"linear_a8w4_1x16_portable", kPortable, portable_attention().run, portable_attention().write,
                     portable_attention().join};
  whole.format = {vendor_format("NUL1"), [](const void*, const Layout&) { return int64_t{64}; }, pack_nothing};
  whole.format.unpack = [](const void*, const Layout&, const void*, int64_t, int64_t, const UnpackArgs&) { return ""; };
  whole.library.vendor = "null";
  whole.linear.context = whole.embedding.context = whole.quantize.context = &context;
  whole.attention.context = whole.format.context = &context;
  const struct {
    size_t offset;
    const char* message;
  } fields[] = {
      {offsetof(Rows, library.vendor), "'nulls' cannot be used: the vendor has no name"},
      {offsetof(Rows, library.linear.entries), "it has 1 linear kernels at a null address"},
      {offsetof(Rows, library.embedding.entries), "it has 1 embedding kernels at a null address"},
      {offsetof(Rows, library.quantize.entries), "it has 1 quantize kernels at a null address"},
      {offsetof(Rows, library.attention.entries), "it has 1 attention kernels at a null address"},
      {offsetof(Rows, library.formats.entries), "it has 1 formats at a null address"},
      {offsetof(Rows, linear.name), "linear kernel 0 has no name"},
      {offsetof(Rows, linear.run), "kernel 'null_linear' has no function"},
      {offsetof(Rows, linear.supports), allowed},
      {offsetof(Rows, linear.scratch_bytes), allowed},
      {offsetof(Rows, linear.activation_bytes), "kernel 'null_linear' has only one of prepare and activation_bytes"},
      {offsetof(Rows, linear.prepare), "kernel 'null_linear' has only one of prepare and activation_bytes"},
      {offsetof(Rows, linear.context), allowed},
      {offsetof(Rows, embedding.name), "embedding kernel 0 has no name"},
      {offsetof(Rows, embedding.run), "kernel 'null_embedding' has no function"},
      {offsetof(Rows, embedding.context), allowed},
      {offsetof(Rows, quantize.name), "quantize kernel 0 has no name"},
      {offsetof(Rows, quantize.run), "kernel 'null_quantize' has no function"},
      {offsetof(Rows, quantize.context), allowed},
      {offsetof(Rows, attention.name), "attention kernel 0 has no name"},
      {offsetof(Rows, attention.run), "kernel 'linear_a8w4_1x16_portable' has no function"},
      {offsetof(Rows, attention.write), "kernel 'linear_a8w4_1x16_portable' has no function write"},
      {offsetof(Rows, attention.join), "kernel 'linear_a8w4_1x16_portable' has no function join"},
      {offsetof(Rows, attention.context), allowed},
      {offsetof(Rows, format.bytes), "format 'NUL1' has no function bytes"},
      {offsetof(Rows, format.pack), "format 'NUL1' has no function pack"},
      {offsetof(Rows, format.unpack), allowed},
      {offsetof(Rows, format.context), allowed},
  };
  const size_t before = rows();
  for (const auto& field : fields) {
    Rows r = whole;
    r.library.linear = {&r.linear, 1};
    r.library.embedding = {&r.embedding, 1};
    r.library.quantize = {&r.quantize, 1};
    r.library.attention = {&r.attention, 1};
    r.library.formats = {&r.format, 1};
    void* pointer;
    std::memcpy(&pointer, reinterpret_cast<char*>(&r) + field.offset, sizeof pointer);
    ASSERT_NE(pointer, nullptr) << field.offset;
    std::memset(reinterpret_cast<char*>(&r) + field.offset, 0, sizeof pointer);
    EXPECT_TRUE(refused(add_kernels(r.library, "nulls"), field.message)) << field.offset;
  }
  EXPECT_EQ(rows(), before);
  EXPECT_EQ(find_format(vendor_format("NUL1")), nullptr);
  EXPECT_TRUE(refused(load_kernels(nullptr), "the path of the kernel library is empty"));
  EXPECT_TRUE(refused(add_kernels(whole.library, nullptr), "the kernel library has no name; expected one"));
}

// Tables with a few random invalid fields: the refusal names one of them, and the others are not read. The last field that is
// checked is always wrong, so that no table is accepted.
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
  static const auto bytes = [](const void*, const Layout&) { return int64_t{64}; };
  static const auto activation_bytes = [](const void*, const Layout&, int64_t) { return int64_t{64}; };
  Random random(5);
  const auto far = [&] { return random.below(2) == 0 ? random.next() : uint64_t{1} << random.below(64); };
  struct Damage {
    std::function<bool(Rows&)> apply;  // whether the table is wrong now
    const char* message;
  };
  const Damage damages[] = {
      {[&](Rows& r) { return (r.library.abi = static_cast<uint32_t>(far())) != kKernelAbi; }, "kernel interface is version"},
      {[&](Rows& r) {
         uint32_t sizes[sizeof(lowbit_sizes) / 4];
         std::memcpy(sizes, &r.library.sizes, sizeof sizes);
         uint32_t& size = sizes[random.below(16)];
         const uint32_t before = size;
         size = static_cast<uint32_t>(far() | 1);  // odd, so it is invalid even if it is large enough
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
      {[&](Rows& r) { return (r.library.linear.count = 1025 + (far() >> 2)) > 0; }, "linear kernels; expected at most 1024"},
      {[&](Rows& r) { return (r.library.embedding.count = 1025 + (far() >> 2)) > 0; }, "embedding kernels; expected at most"},
      {[&](Rows& r) { return (r.library.formats.count = 1025 + (far() >> 2)) > 0; }, "formats; expected at most 1024"},
      {[&](Rows& r) { return (r.library.linear.entries = nullptr) == nullptr; }, "linear kernels at a null address"},
      {[&](Rows& r) { return (r.library.quantize.entries = nullptr) == nullptr; }, "quantize kernels at a null address"},
      {[&](Rows& r) {
         const int row = static_cast<int>(random.below(5));  // its name: any bytes, with or without a terminator
         for (char& c : r.names[row]) c = static_cast<char>(random.next());
         r.names[row][0] = '.';  // allowed in a name, but not at the start
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
      {[&](Rows& r) { return (r.linear[1].mappings = static_cast<uint8_t>(0x80 | random.below(8))) != 1; },
       "reads the mappings"},
      {[&](Rows& r) { return (r.linear[2].m_least = 0) == 0; }, "has the tile"},
      {[&](Rows& r) { return (r.linear[0].n_step = static_cast<uint8_t>(9 + random.below(7))) > 0; }, "has the tile"},
      {[&](Rows& r) { return (r.linear[1].x_types = static_cast<uint8_t>(8 + random.below(248))) > 0; }, "prepares the types"},
      {[&](Rows& r) { return (r.linear[2].activation_bytes = nullptr) == nullptr; }, "only one of prepare"},
      {[&](Rows& r) { return (r.linear[2].format = Format::panel16) == Format::panel16; }, "prepares activations"},
      {[&](Rows& r) { return (r.embedding[1].format = static_cast<Format>(far() | 0x80000000u)) != Format::panel16; },
       "is of the format"},
      {[&](Rows& r) { return (r.formats[1].format = static_cast<Format>(far() & 0xffffff00u)) != r.formats[0].format; },
       "a format has the id"},
      {[&](Rows& r) { return (r.formats[1].format = r.formats[0].format) == r.formats[0].format; }, "occurs twice"},
      {[&](Rows& r) { return (r.formats[random.below(2)].bytes = nullptr) == nullptr; }, "has no function bytes"},
  };
  constexpr size_t kDamages = sizeof damages / sizeof damages[0];
  const size_t before = rows();
  std::vector<int> seen(kDamages + 1);
  for (int execution = 0; execution < 20000; ++execution) {
    Rows r;
    r.linear[0] = {r.names[0], kPortable, Format::panel16, 4, 1, 16, run_linear};
    r.linear[1] = {r.names[1], kPortable, Format::panel16, 4, 4, 16, run_linear};
    r.linear[2] = {r.names[2], kPortable, vendor_format("WLK1"), 4, 1, 16, run_linear, 3, 1, nullptr, nullptr,
                   activation_bytes, [](const PrepareArgs&) {}};
    r.embedding[0] = {r.names[3], kPortable, Format::panel16, 4, run_embedding};
    r.embedding[1] = {r.names[4], kPortable, vendor_format("WLK2"), 4, run_embedding};
    r.quantize[0] = {r.names[5], kPortable, [](const QuantizeArgs&) {}};
    r.formats[0] = {vendor_format("WLK1"), bytes, pack_nothing};
    r.formats[1] = {vendor_format("WLK2"), bytes, pack_nothing};
    r.library.vendor = "walk";
    r.library.linear = {r.linear, 3};
    r.library.embedding = {r.embedding, 2};
    r.library.quantize = {r.quantize, 1};
    r.library.formats = {r.formats, 2};
    std::vector<size_t> wrong;
    for (int64_t left = random.below(4); left > 0; --left) {
      const size_t damage = static_cast<size_t>(random.below(kDamages));
      if (std::count(wrong.begin(), wrong.end(), damage) != 0) continue;  // the damage could cancel
      if (damages[damage].apply(r)) wrong.push_back(damage);
    }
    const Status status = add_kernels(r.library, "walk");
    ASSERT_FALSE(status.ok()) << execution;
    const std::string message = status.message();
    bool named = wrong.empty() && message.find("has the name of another kernel") != std::string::npos;
    seen[kDamages] += named;
    for (const size_t damage : wrong) {
      const bool found = message.find(damages[damage].message) != std::string::npos;
      named = named || found;
      seen[damage] += found;
    }
    // Kernels of a format that no longer exists, and kernels after an existing name.
    named = named || (!wrong.empty() && message.find("is of the format 'WLK") != std::string::npos);
    ASSERT_TRUE(named) << execution << ": " << message;
    for (const char c : message) ASSERT_TRUE(c >= ' ' && c <= '~') << execution;
  }
  EXPECT_EQ(rows(), before);
  for (size_t damage = 0; damage <= kDamages; ++damage) {
    EXPECT_GT(seen[damage], 0) << (damage < kDamages ? damages[damage].message : "none");
  }
}

// The structures in the libraries' ABI. A change here requires another kKernelAbi.
TEST(A_Refused, TheInterfaceIsVersion7) {
  EXPECT_EQ(kKernelAbi, 7u);
  const lowbit_sizes sizes = KernelLibrary{}.sizes;
  EXPECT_EQ(offsetof(lowbit_library, abi), 0u);
  EXPECT_EQ(offsetof(lowbit_library, sizes), 4u);
  EXPECT_EQ(sizes.library, 168u);
  EXPECT_EQ(sizes.format, 48u);
  EXPECT_EQ(sizes.quantize_kernel, 32u);
  EXPECT_EQ(sizes.linear_kernel, 88u);
  EXPECT_EQ(sizes.embedding_kernel, 48u);
  EXPECT_EQ(sizes.attention_kernel, 56u);
  EXPECT_EQ(sizes.layout, 136u);
  EXPECT_EQ(sizes.quantize_args, 80u);
  EXPECT_EQ(sizes.prepare_args, 200u);
  EXPECT_EQ(sizes.linear_args, 248u);
  EXPECT_EQ(sizes.embedding_args, 176u);
  EXPECT_EQ(sizes.attention_args, 136u);
  EXPECT_EQ(sizes.attention_join_args, 56u);
  EXPECT_EQ(sizes.attention_write_args, 128u);
  EXPECT_EQ(sizes.pack_args, 32u);
  EXPECT_EQ(sizes.unpack_args, 32u);
}

}  // namespace
}  // namespace lowbit::test
