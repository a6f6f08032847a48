// A kernel library with one fault, or none. The name of the file determines the fault (fault_bad_bits.so), so it is compiled
// only once. FAULT names the fault of a library that tests rename.

#include <string>

#include "plain.h"

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

using namespace lowbit;

#if defined(FAULT_needs_another)
extern "C" const char* another_vendor();  // another.cpp
#endif

namespace {

std::string name_of_this_fault() {
#if defined(FAULT)
  return FAULT;
#else
  static const char here = 0;
  std::string path;
#if defined(_WIN32)
  HMODULE module = nullptr;
  char buffer[MAX_PATH] = "";
  GetModuleHandleExA(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT, &here, &module);
  GetModuleFileNameA(module, buffer, sizeof(buffer));
  path = buffer;
#else
  Dl_info info{};
  if (dladdr(&here, &info) != 0) path = info.dli_fname;
#endif
  const size_t begin = path.rfind("fault_") + 6;
  return path.substr(begin, path.rfind('.') - begin);
#endif
}

bool is(const char* fault) {
  static const std::string name = name_of_this_fault();
  return name == fault;
}

// How a wrong kernel changes the right result.
float lie(const LinearArgs& args, int64_t row, int64_t column, float value) {
  const bool last = column == args.layout.n - 1 && row == args.m - 1;
  if (is("lies_by_a_hundredth")) {
    return value * 1.01f;
  } else if (is("lies_at_three_rows")) {
    return args.m == 3 && row == 2 ? -value : value;
  } else if (is("lies_in_the_last_column")) {
    return last ? float_from_bits(bits_of_float(value) ^ 1u) : value;
  } else if (is("lies_about_levels")) {
    return args.layout.mapping == Mapping::levels ? value + 1.0f : value;
  } else if (is("lies_where_groups_are_cut")) {
    return args.layout.k % 32 != 0 && args.layout.group_size == 48 ? value + 1.0f : value;
  } else if (is("lies_in_its_tile")) {
    return args.m == 11 ? value + 1.0f : value;
  } else if (is("lies_from_the_second_panel")) {
    return args.panel_begin > 0 ? value + 1.0f : value;
  } else if (is("lies_in_bfloat16")) {
    return args.out_dtype == DType::bf16 ? value * 1.1f : value;
  } else if (is("lies_about_not_a_number")) {
    return std::isnan(value) ? 0.0f : value;
  } else if (is("lies_in_long_rows") || is("lies_where_it_is_asked")) {
    return args.layout.k >= 512 ? 0.0f : value;
  } else if (is("lies_in_many_outputs")) {
    return args.layout.n >= 4096 && column == args.layout.n - 1 ? 0.0f : value;
  } else if (is("lies_at_seven_rows")) {
    return args.m == 7 ? 0.0f : value;
  } else if (is("lies_at_large_sums")) {
    return args.layout.k < 512 && std::fabs(value) > 12.0f ? std::copysign(12.0f, value) : value;
  } else if (is("reads_the_outputs")) {
    return value + 0.0f * load_as_f32(args.out, args.out_dtype, row * args.out_stride + column);
  } else {
    return value;
  }
}

void run_linear(const LinearArgs& args) {
  if (is("writes_nothing")) {
    return;
  } else if (is("writes_the_gap")) {
    if (args.panel_end == args.layout.panels) store_from_f32(args.out, args.out_dtype, args.layout.n, 1.0f);
  }
  plain::linear_but(args, lie);
  if (is("writes_before_the_outputs")) {
    static_cast<char*>(args.out)[-1] = 1;
  } else if (is("writes_behind_the_scratch")) {
    static_cast<char*>(args.scratch)[kLinearScratchBytes] = 1;
  } else if (is("writes_in_the_weights")) {
    ++const_cast<uint8_t*>(args.panels)[0];
  } else if (is("writes_in_the_activations")) {
    const_cast<int32_t*>(args.sums)[0] = 0;
  } else if (is("writes_in_other_panels")) {
    if (args.panel_begin > 0) store_from_f32(args.out, args.out_dtype, 0, 1.0f);
  } else if (is("needs_an_empty_scratch")) {
    if (*static_cast<const int32_t*>(args.scratch) != 0) store_from_f32(args.out, args.out_dtype, 0, 1.0f);
  }
}
// For a library's own format, which stores nothing: errors beyond any tolerance.
void run_infinite(const LinearArgs& args) {
  for (int64_t row = 0; row < args.m; ++row) {
    for (int64_t i = args.panel_begin * kPanelRows; i < args.panel_end * kPanelRows && i < args.layout.n; ++i) {
      store_from_f32(args.out, args.out_dtype, row * args.out_stride + i, INFINITY);
    }
  }
}
void run_infinite_embedding(const EmbeddingArgs& args) {
  for (int64_t i = 0; i < args.layout.k; ++i) store_from_f32(args.out, args.out_dtype, i, INFINITY);
}
void run_zero(const LinearArgs& args) {
  for (int64_t row = 0; row < args.m; ++row) {
    for (int64_t i = args.panel_begin * kPanelRows; i < args.panel_end * kPanelRows && i < args.layout.n; ++i) {
      store_from_f32(args.out, args.out_dtype, row * args.out_stride + i, 0.0f);
    }
  }
}
void run_embedding(const EmbeddingArgs& args) {
  plain::embedding(args);
  if (is("lies_in_an_embedding")) {
    if (args.row == args.layout.n - 1) store_from_f32(args.out, args.out_dtype, args.layout.k - 1, 0.5f);
  } else if (is("lies_in_a_long_embedding")) {
    if (args.layout.k > 2000) store_from_f32(args.out, args.out_dtype, 2000, 0.5f);
  } else if (is("writes_behind_an_embedding")) {
    store_from_f32(args.out, args.out_dtype, args.layout.k, 0.5f);
  }
}
void run_quantize(const QuantizeArgs& args) {
  plain::quantize(args);
  if (is("lies_in_a_sum")) {
    ++args.sums[0];
  } else if (is("lies_in_a_scale")) {
    if (!(args.scales[0] == args.scales[0])) args.scales[0] = 0.0f;
  } else if (is("lies_about_a_long_row")) {
    if (args.k > 1000) args.a[args.k - 1] = 0;
  } else if (is("writes_behind_the_codes")) {
    args.a[args.k_padded] = 0;
  } else if (is("writes_in_the_values")) {
    std::memset(const_cast<void*>(args.x), 0, 2);
  }
}
void prepare(const PrepareArgs&) {}
int64_t activation_bytes(const void*, const Layout&, int64_t) { return 64; }
void run_attention(const AttentionArgs&) {}
void write_attention(const AttentionWriteArgs&) {}
void join_attention(const AttentionJoinArgs&) {}
int64_t format_bytes(const void*, const Layout&) { return 64; }
bool never(const void*, const Layout&, int64_t, IsaBits) { return false; }
const char* pack_outside(const void*, const Layout&, const PackArgs&, int64_t, int64_t, void* bytes) {
  static_cast<char*>(bytes)[64] = 1;
  return nullptr;
}
const char* refuse(const void*, const Layout&, const PackArgs&, int64_t, int64_t, void*) { return "never"; }
const char* pack_format(const void*, const Layout&, const PackArgs&, int64_t, int64_t, void*) { return nullptr; }

// ISA bits of another processor family, and all bits of this one, which hardly any CPU has.
#if defined(__aarch64__)
constexpr IsaBits kForeignIsa = kAvx2;
#else
constexpr IsaBits kForeignIsa = kNeon;
#endif
#define LOWBIT_BIT(Name, NAME, name) k##Name |
constexpr IsaBits kMissingIsa = LOWBIT_ISAS(LOWBIT_BIT) kPortable;
#undef LOWBIT_BIT

// Comes after the built-in kernels.
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
#if defined(FAULT_needs_another)
    library.vendor = another_vendor();
#endif
    if (is("other_abi")) {
      library.abi = 8;
    } else if (is("other_size")) {
      library.sizes.linear_kernel += 8;
    } else if (is("small_size")) {
      library.sizes.linear_args -= 16;
    } else if (is("odd_size")) {
      library.sizes.format -= 1;
    } else if (is("no_vendor")) {
      library.vendor = nullptr;
    } else if (is("bad_preference")) {
      library.preference = static_cast<Preference>(9);
    } else if (is("no_rows")) {
      library.linear = {};
      library.embedding = {};
      library.quantize = {};
      library.formats = {};
    } else if (is("null_rows")) {
      library.linear.entries = nullptr;
    } else if (is("too_many_rows")) {
      library.embedding.count = size_t{1} << 60;
    } else if (is("null_function")) {
      linear[0].run = nullptr;
    } else if (is("no_name")) {
      linear[0].name = nullptr;
    } else if (is("empty_name")) {
      linear[0].name = "";
    } else if (is("long_name")) {
      linear[0].name = "a_name_of_64_characters_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    } else if (is("bad_character")) {
      linear[0].name = "a name";
    } else if (is("foreign_format")) {
      linear[0].format = vendor_format("ELSE");
    } else if (is("bad_bits")) {
      linear[0].bits = 9;
    } else if (is("bad_m_least")) {
      linear[0].m_least = 0;
    } else if (is("bad_n_step")) {
      linear[0].n_step = 24;
    } else if (is("bad_x_types")) {
      linear[1].x_types = 8;
    } else if (is("bad_scratch")) {
      linear[1].scratch_bytes = [](const void*, const Layout&, int64_t, int) { return int64_t{-1}; };
    } else if (is("bad_activation_bytes")) {
      linear[0].format = vendor_format("FLT1");
      linear[0].prepare = prepare;
      linear[0].activation_bytes = [](const void*, const Layout&, int64_t) { return INT64_MAX; };
    } else if (is("bad_rows_at_once")) {
      formats[0].rows_at_once = -1;
    } else if (is("null_attention")) {
      library.attention = {attention, 1};
      attention[0].run = nullptr;
    } else if (is("null_attention_write")) {
      library.attention = {attention, 1};
      attention[0].write = nullptr;
    } else if (is("null_attention_join")) {
      library.attention = {attention, 1};
      attention[0].join = nullptr;
    } else if (is("half_prepare")) {
      linear[0].format = vendor_format("FLT1");
      linear[0].prepare = prepare;
    } else if (is("prepare_panel16")) {
      linear[0].prepare = prepare;
      linear[0].activation_bytes = activation_bytes;
    } else if (is("unknown_isa")) {
      linear[0].isa = kForeignIsa;
    } else if (is("missing_isa")) {
      library.preference = Preference::before_built_in;
      library.quantize = {};
      library.embedding = {};
      library.linear.count = 1;
      linear[0].isa = kMissingIsa;
    } else if (is("one_mapping")) {
      library.preference = Preference::before_built_in;
      library.quantize = {};
      linear[0].mappings = bit_of(Mapping::affine);
      linear[1].mappings = bit_of(Mapping::levels);
      embedding[0].mappings = bit_of(Mapping::levels);
    } else if (is("some_sizes")) {
      library.preference = Preference::before_built_in;
      library.quantize = {};
      library.embedding = {};
      linear[0].supports = [](const void*, const Layout& layout, int64_t m, IsaBits) {
        return layout.n == 14336 && layout.k == 4096 && m == 3;
      };
      linear[1].supports = [](const void*, const Layout& layout, int64_t, IsaBits) { return layout.n == 17; };
    } else if (is("built_in_name")) {
      linear[0].name = "linear_a8w4_1x16_portable";
    } else if (is("twice_named")) {
      embedding[0].name = "fault_linear";
    } else if (is("null_embedding")) {
      embedding[0].run = nullptr;
    } else if (is("bad_embedding_bits")) {
      embedding[0].bits = 0;
    } else if (is("null_quantize")) {
      quantize[0].run = nullptr;
    } else if (is("bad_format_id")) {
      formats[0].format = Format::panel16;
    } else if (is("null_format_bytes")) {
      formats[0].bytes = nullptr;
    } else if (is("null_format_pack")) {
      formats[1].pack = nullptr;
    } else if (is("twice_formatted")) {
      formats[1].format = formats[0].format;
    } else if (is("bad_tolerance")) {
      formats[1].tolerance = 1.5f;
    } else if (is("lies_about_levels")) {
      linear[1].mappings = kAllMappings;
    } else if (is("lies_in_its_tile")) {
      linear[1].m_least = 11;
    } else if (is("second_row_bad")) {
      linear[1].bits = 0;
    } else if (is("lies_where_it_is_asked")) {
      linear[0].supports = [](const void*, const Layout& layout, int64_t, IsaBits) { return layout.k >= 512; };
    } else if (is("lies_in_many_outputs")) {
      linear[0].supports = [](const void*, const Layout& layout, int64_t, IsaBits) { return layout.n >= 4096; };
    } else if (is("never_asked")) {
      linear[1].supports = never;
    } else if (is("only_impossible_levels")) {
      linear[1].bits = 7;
      linear[1].mappings = bit_of(Mapping::levels);
    } else if (is("changes_its_mind")) {
      linear[0].supports = [](const void*, const Layout&, int64_t, IsaBits) {
        static bool answer = false;
        return answer = !answer;
      };
    } else if (is("holds_nothing")) {
      linear[0].format = vendor_format("FLT1");
      formats[0].pack = refuse;
    } else if (is("packs_outside")) {
      linear[0].format = vendor_format("FLT1");
      formats[0].pack = pack_outside;
    } else if (is("infinite")) {
      linear[0].format = vendor_format("FLT1");
      linear[0].run = run_infinite;
      formats[0].tolerance = 1.0f;
    } else if (is("infinite_embedding")) {
      embedding[0].format = vendor_format("FLT1");
      embedding[0].run = run_infinite_embedding;
      formats[0].tolerance = 1.0f;
    } else if (is("zero_within_a_tolerance")) {
      linear[0].format = vendor_format("FLT1");
      linear[0].run = run_zero;
      formats[0].tolerance = 0.75f;
    }
  }
};

}  // namespace

#if !defined(FAULT_no_function)
extern "C" LOWBIT_API const KernelLibrary* lowbit_kernels(uint32_t) {
  static const Rows rows;
  return is("null_library") ? nullptr : &rows.library;
}
#endif
