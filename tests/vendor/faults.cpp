// A kernel library with one fault, named on the command line (FAULT_...), or none.

#include "plain.h"

using namespace lowbit;

#if defined(FAULT_needs_another)
extern "C" const char* another_vendor();  // another.cpp
#endif

namespace {

// How a wrong kernel changes the right result.
[[maybe_unused]] float lie(const LinearArgs& args, int64_t row, int64_t column, float value) {
  [[maybe_unused]] const bool last = column == args.layout.n - 1 && row == args.m - 1;
#if defined(FAULT_lies_by_a_hundredth)
  return value * 1.01f;
#elif defined(FAULT_lies_at_three_rows)
  return args.m == 3 && row == 2 ? -value : value;
#elif defined(FAULT_lies_in_the_last_column)
  return last ? float_from_bits(bits_of_float(value) ^ 1u) : value;
#elif defined(FAULT_lies_about_levels)
  return args.layout.mapping == Mapping::levels ? value + 1.0f : value;
#elif defined(FAULT_lies_where_groups_are_cut)
  return args.layout.k % 32 != 0 && args.layout.group_size == 48 ? value + 1.0f : value;
#elif defined(FAULT_lies_in_its_tile)
  return args.m == 11 ? value + 1.0f : value;
#elif defined(FAULT_lies_from_the_second_panel)
  return args.panel_begin > 0 ? value + 1.0f : value;
#elif defined(FAULT_lies_in_bfloat16)
  return args.out_dtype == DType::bf16 ? value * 1.1f : value;
#elif defined(FAULT_lies_about_not_a_number)
  return std::isnan(value) ? 0.0f : value;
#elif defined(FAULT_lies_in_long_rows) || defined(FAULT_lies_where_it_is_asked)
  return args.layout.k >= 512 ? 0.0f : value;
#elif defined(FAULT_lies_in_many_outputs)
  return args.layout.n >= 4096 && column == args.layout.n - 1 ? 0.0f : value;
#elif defined(FAULT_lies_at_seven_rows)
  return args.m == 7 ? 0.0f : value;
#elif defined(FAULT_lies_at_large_sums)
  return args.layout.k < 512 && std::fabs(value) > 12.0f ? std::copysign(12.0f, value) : value;
#elif defined(FAULT_reads_the_outputs)
  return value + 0.0f * load_as_f32(args.out, args.out_dtype, row * args.out_stride + column);
#else
  return value;
#endif
}

void run_linear(const LinearArgs& args) {
#if defined(FAULT_writes_nothing)
  return;
#elif defined(FAULT_writes_the_gap)
  if (args.panel_end == args.layout.panels) store_from_f32(args.out, args.out_dtype, args.layout.n, 1.0f);
#endif
  plain::linear_but(args, lie);
#if defined(FAULT_writes_before_the_outputs)
  static_cast<char*>(args.out)[-1] = 1;
#elif defined(FAULT_writes_behind_the_scratch)
  static_cast<char*>(args.scratch)[kLinearScratchBytes] = 1;
#elif defined(FAULT_writes_in_the_weights)
  ++const_cast<uint8_t*>(args.panels)[0];
#elif defined(FAULT_writes_in_the_activations)
  const_cast<int32_t*>(args.sums)[0] = 0;
#elif defined(FAULT_writes_in_other_panels)
  if (args.panel_begin > 0) store_from_f32(args.out, args.out_dtype, 0, 1.0f);
#elif defined(FAULT_needs_an_empty_scratch)
  if (*static_cast<const int32_t*>(args.scratch) != 0) store_from_f32(args.out, args.out_dtype, 0, 1.0f);
#endif
}
// For its own format, which stores nothing: errors beyond any tolerance.
[[maybe_unused]] void run_infinite(const LinearArgs& args) {
  for (int64_t row = 0; row < args.m; ++row) {
    for (int64_t i = args.panel_begin * kPanelRows; i < args.panel_end * kPanelRows && i < args.layout.n; ++i) {
      store_from_f32(args.out, args.out_dtype, row * args.out_stride + i, INFINITY);
    }
  }
}
[[maybe_unused]] void run_infinite_embedding(const EmbeddingArgs& args) {
  for (int64_t i = 0; i < args.layout.k; ++i) store_from_f32(args.out, args.out_dtype, i, INFINITY);
}
[[maybe_unused]] void run_zero(const LinearArgs& args) {
  for (int64_t row = 0; row < args.m; ++row) {
    for (int64_t i = args.panel_begin * kPanelRows; i < args.panel_end * kPanelRows && i < args.layout.n; ++i) {
      store_from_f32(args.out, args.out_dtype, row * args.out_stride + i, 0.0f);
    }
  }
}
void run_embedding(const EmbeddingArgs& args) {
  plain::embedding(args);
#if defined(FAULT_lies_in_an_embedding)
  if (args.row == args.layout.n - 1) store_from_f32(args.out, args.out_dtype, args.layout.k - 1, 0.5f);
#elif defined(FAULT_lies_in_a_long_embedding)
  if (args.layout.k > 2000) store_from_f32(args.out, args.out_dtype, 2000, 0.5f);
#elif defined(FAULT_writes_behind_an_embedding)
  store_from_f32(args.out, args.out_dtype, args.layout.k, 0.5f);
#endif
}
void run_quantize(const QuantizeArgs& args) {
  plain::quantize(args);
#if defined(FAULT_lies_in_a_sum)
  ++args.sums[0];
#elif defined(FAULT_lies_in_a_scale)
  if (!(args.scales[0] == args.scales[0])) args.scales[0] = 0.0f;
#elif defined(FAULT_lies_about_a_long_row)
  if (args.k > 1000) args.a[args.k - 1] = 0;
#elif defined(FAULT_writes_behind_the_codes)
  args.a[args.k_padded] = 0;
#elif defined(FAULT_writes_in_the_values)
  std::memset(const_cast<void*>(args.x), 0, 2);
#endif
}
[[maybe_unused]] void prepare(const PrepareArgs&) {}
[[maybe_unused]] int64_t activation_bytes(const void*, const Layout&, int64_t) { return 64; }
void run_attention(const AttentionArgs&) {}
[[maybe_unused]] void write_attention(const AttentionWriteArgs&) {}
[[maybe_unused]] void join_attention(const AttentionJoinArgs&) {}
int64_t format_bytes(const void*, const Layout&) { return 64; }
[[maybe_unused]] bool never(const void*, const Layout&, int64_t, IsaBits) { return false; }
[[maybe_unused]] const char* pack_outside(const void*, const Layout&, const PackArgs&, int64_t, int64_t, void* bytes) {
  static_cast<char*>(bytes)[64] = 1;
  return nullptr;
}
[[maybe_unused]] const char* refuse(const void*, const Layout&, const PackArgs&, int64_t, int64_t, void*) { return "never"; }
const char* pack_format(const void*, const Layout&, const PackArgs&, int64_t, int64_t, void*) { return nullptr; }

// ISA bits of another processor family, and all of this one, which hardly any CPU has.
#if defined(__aarch64__)
[[maybe_unused]] constexpr IsaBits kForeignIsa = kAvx2, kMissingIsa = kNeon | kNeonDot | kI8mm | kBf16 | kSve2;
#else
[[maybe_unused]] constexpr IsaBits kForeignIsa = kNeon, kMissingIsa = kAvx2 | kAvxVnni | kAvxVnniInt8 | kAvx512Vnni | kAmx;
#endif

// After the built-in kernels.
struct Rows {
  LinearKernel linear[2] = {{"fault_linear", kPortable, Format::panel16, 4, 1, 16, run_linear},
                            {"fault_linear_2", kPortable, Format::panel16, 4, 4, 16, run_linear}};
  EmbeddingKernel embedding[1] = {{"fault_embedding", kPortable, Format::panel16, 4, run_embedding}};
  AttentionKernel attention[1] = {{"fault_attention", kPortable, run_attention, write_attention, join_attention}};
  QuantizeKernel quantize[1] = {{"fault_quantize", kPortable, run_quantize}};
  PackedFormat formats[2] = {{vendor_format("FLT1"), format_bytes, pack_format},
                             {vendor_format("FLT2"), format_bytes, pack_format}};
  KernelLibrary library;

  Rows() {
    library.vendor = "fault";
    library.preference = Preference::after_built_in;
    library.linear = {linear, 2};
    library.embedding = {embedding, 1};
    library.quantize = {quantize, 1};
    library.formats = {formats, 2};
#if defined(FAULT_other_abi)
    library.abi = 8;
#elif defined(FAULT_other_size)
    library.sizes.linear_row += 8;
#elif defined(FAULT_small_size)
    library.sizes.linear_args -= 16;
#elif defined(FAULT_odd_size)
    library.sizes.format -= 1;
#elif defined(FAULT_no_vendor)
    library.vendor = nullptr;
#elif defined(FAULT_needs_another)
    library.vendor = another_vendor();
#elif defined(FAULT_bad_preference)
    library.preference = static_cast<Preference>(9);
#elif defined(FAULT_no_rows)
    library.linear = {};
    library.embedding = {};
    library.quantize = {};
    library.formats = {};
#elif defined(FAULT_null_rows)
    library.linear.rows = nullptr;
#elif defined(FAULT_too_many_rows)
    library.embedding.count = size_t{1} << 60;
#elif defined(FAULT_null_function)
    linear[0].run = nullptr;
#elif defined(FAULT_no_name)
    linear[0].name = nullptr;
#elif defined(FAULT_empty_name)
    linear[0].name = "";
#elif defined(FAULT_long_name)
    linear[0].name = "a_name_of_64_characters_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
#elif defined(FAULT_bad_character)
    linear[0].name = "a name";
#elif defined(FAULT_foreign_format)
    linear[0].format = vendor_format("ELSE");
#elif defined(FAULT_bad_bits)
    linear[0].bits = 9;
#elif defined(FAULT_bad_m_least)
    linear[0].m_least = 0;
#elif defined(FAULT_bad_n_step)
    linear[0].n_step = 24;
#elif defined(FAULT_bad_x_types)
    linear[1].x_types = 8;
#elif defined(FAULT_bad_scratch)
    linear[1].scratch_bytes = [](const void*, const Layout&, int64_t, int) { return int64_t{-1}; };
#elif defined(FAULT_bad_activation_bytes)
    linear[0].format = vendor_format("FLT1");
    linear[0].prepare = prepare;
    linear[0].activation_bytes = [](const void*, const Layout&, int64_t) { return INT64_MAX; };
#elif defined(FAULT_bad_rows_at_once)
    formats[0].rows_at_once = -1;
#elif defined(FAULT_null_attention)
    library.attention = {attention, 1};
    attention[0].run = nullptr;
#elif defined(FAULT_null_attention_write)
    library.attention = {attention, 1};
    attention[0].write = nullptr;
#elif defined(FAULT_null_attention_join)
    library.attention = {attention, 1};
    attention[0].join = nullptr;
#elif defined(FAULT_half_prepare)
    linear[0].format = vendor_format("FLT1");
    linear[0].prepare = prepare;
#elif defined(FAULT_prepare_panel16)
    linear[0].prepare = prepare;
    linear[0].activation_bytes = activation_bytes;
#elif defined(FAULT_unknown_isa)
    linear[0].isa = kForeignIsa;
#elif defined(FAULT_missing_isa)
    library.preference = Preference::before_built_in;
    library.quantize = {};
    library.embedding = {};
    library.linear.count = 1;
    linear[0].isa = kMissingIsa;
#elif defined(FAULT_one_mapping)
    library.preference = Preference::before_built_in;
    library.quantize = {};
    linear[0].mappings = bit_of(Mapping::affine);
    linear[1].mappings = bit_of(Mapping::levels);
    embedding[0].mappings = bit_of(Mapping::levels);
#elif defined(FAULT_some_sizes)
    library.preference = Preference::before_built_in;
    library.quantize = {};
    library.embedding = {};
    linear[0].supports = [](const void*, const Layout& layout, int64_t m, IsaBits) {
      return layout.n == 14336 && layout.k == 4096 && m == 3;
    };
    linear[1].supports = [](const void*, const Layout& layout, int64_t, IsaBits) { return layout.n == 17; };
#elif defined(FAULT_built_in_name)
    linear[0].name = "linear_a8w4_1x16_portable";
#elif defined(FAULT_twice_named)
    embedding[0].name = "fault_linear";
#elif defined(FAULT_null_embedding)
    embedding[0].run = nullptr;
#elif defined(FAULT_bad_embedding_bits)
    embedding[0].bits = 0;
#elif defined(FAULT_null_quantize)
    quantize[0].run = nullptr;
#elif defined(FAULT_bad_format_id)
    formats[0].format = Format::panel16;
#elif defined(FAULT_null_format_bytes)
    formats[0].bytes = nullptr;
#elif defined(FAULT_null_format_pack)
    formats[1].pack = nullptr;
#elif defined(FAULT_twice_formatted)
    formats[1].format = formats[0].format;
#elif defined(FAULT_bad_tolerance)
    formats[1].tolerance = 1.5f;
#elif defined(FAULT_lies_about_levels)
    linear[1].mappings = kAllMappings;
#elif defined(FAULT_lies_in_its_tile)
    linear[1].m_least = 11;
#elif defined(FAULT_second_row_bad)
    linear[1].bits = 0;
#elif defined(FAULT_lies_where_it_is_asked)
    linear[0].supports = [](const void*, const Layout& layout, int64_t, IsaBits) { return layout.k >= 512; };
#elif defined(FAULT_lies_in_many_outputs)
    linear[0].supports = [](const void*, const Layout& layout, int64_t, IsaBits) { return layout.n >= 4096; };
#elif defined(FAULT_never_asked)
    linear[1].supports = never;
#elif defined(FAULT_only_impossible_levels)
    linear[1].bits = 7;
    linear[1].mappings = bit_of(Mapping::levels);
#elif defined(FAULT_changes_its_mind)
    linear[0].supports = [](const void*, const Layout&, int64_t, IsaBits) {
      static bool answer = false;
      return answer = !answer;
    };
#elif defined(FAULT_holds_nothing)
    linear[0].format = vendor_format("FLT1");
    formats[0].pack = refuse;
#elif defined(FAULT_packs_outside)
    linear[0].format = vendor_format("FLT1");
    formats[0].pack = pack_outside;
#elif defined(FAULT_infinite)
    linear[0].format = vendor_format("FLT1");
    linear[0].run = run_infinite;
    formats[0].tolerance = 1.0f;
#elif defined(FAULT_infinite_embedding)
    embedding[0].format = vendor_format("FLT1");
    embedding[0].run = run_infinite_embedding;
    formats[0].tolerance = 1.0f;
#elif defined(FAULT_zero_within_a_tolerance)
    linear[0].format = vendor_format("FLT1");
    linear[0].run = run_zero;
    formats[0].tolerance = 0.75f;
#endif
  }
};

}  // namespace

#if !defined(FAULT_no_function)
extern "C" LOWBIT_API const KernelLibrary* lowbit_kernels(uint32_t) {
  static const Rows rows;
#if defined(FAULT_null_library)
  return nullptr;
#endif
  return &rows.library;
}
#endif
