// The structures that kernels, and libraries with kernels, share with lowbit. Plain C99, so that C, C++ and Rust can fill them.
// It is the only definition: in C++ the enumerations are those of namespace lowbit, and pointers that are never null are
// references, which have the same binary form. ukernel.h has the arithmetic, docs/format.md the bytes of a packed weight, and
// docs/vendor.md explains how to write a library.
//
// A library defines one function, which is called when it is loaded, on the CPU that will run the kernels:
//
//   const lowbit_library* lowbit_kernels(uint32_t abi);    // C linkage, visible
//
// `abi` is the LOWBIT_KERNEL_ABI of the program that loads it. The result stays valid and constant for the life of the
// process. Return null if the library has nothing for this ABI or this CPU.
//
// Zero means "not given" in each optional field. Within one LOWBIT_KERNEL_ABI a structure grows only at its end, and a library
// states the sizes that it was built with (lowbit_sizes): fields that it does not know are zero.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifndef __cplusplus
#include <stdbool.h>
#endif

#define LOWBIT_KERNEL_ABI 7u

enum { LOWBIT_F32, LOWBIT_BF16, LOWBIT_F16 };               // types of activations and outputs
enum { LOWBIT_SYMMETRIC, LOWBIT_AFFINE, LOWBIT_LEVELS };    // mappings
enum { LOWBIT_PANEL16 };                                    // the built-in format; others: LOWBIT_FORMAT
// Types of keys and values. The last one has keys as in I8 and values as in I4.
enum { LOWBIT_CACHE_F32, LOWBIT_CACHE_BF16, LOWBIT_CACHE_F16, LOWBIT_CACHE_I8, LOWBIT_CACHE_I4, LOWBIT_CACHE_I8_I4 };
// Whether a library's kernels are considered after or before the built-in ones. Among libraries, the first loaded comes first.
// A kernel that comes before the built-in ones gets every call that it supports, on every CPU that can run it.
enum { LOWBIT_AFTER_BUILT_IN, LOWBIT_BEFORE_BUILT_IN };

// The format with a name of four letters, digits, '-' or '_'. Zeros at the end make the name shorter.
#define LOWBIT_FORMAT(a, b, c, d) \
  ((uint32_t)(a) | (uint32_t)(b) << 8 | (uint32_t)(c) << 16 | (uint32_t)(d) << 24)

// Features that a CPU can have, one bit each.
typedef uint32_t lowbit_isa;
#define LOWBIT_ISA_NEON (1u << 0)
#define LOWBIT_ISA_NEONDOT (1u << 1)         // sdot, udot (Armv8.2 dotprod)
#define LOWBIT_ISA_I8MM (1u << 2)            // smmla, usmmla
#define LOWBIT_ISA_SME2 (1u << 3)            // SME2 with vectors of 512 bits
#define LOWBIT_ISA_BF16 (1u << 4)            // bfdot, bfmmla
#define LOWBIT_ISA_SVE2 (1u << 5)            // with vectors of any length
#define LOWBIT_ISA_AVX2 (1u << 8)            // with FMA and F16C
#define LOWBIT_ISA_AVXVNNI (1u << 9)
#define LOWBIT_ISA_AVX512VNNI (1u << 10)     // with F, BW, DQ, VL
#define LOWBIT_ISA_AMX (1u << 11)            // AMX-TILE and AMX-INT8
#define LOWBIT_ISA_AVXVNNIINT8 (1u << 12)    // vpdpbssd and its siblings

enum {
  LOWBIT_PANEL_ROWS = 16,
  LOWBIT_BLOCK_INPUTS = 32,
  LOWBIT_HALF_INPUTS = 16,     // the granularity of group sizes
  LOWBIT_LINE_BYTES = 64,
  LOWBIT_SEGMENT_INPUTS = 64,  // largest number of inputs that share a scale of the activations
  LOWBIT_MOST_LEVELS = 16,
  LOWBIT_LINEAR_SCRATCH_BYTES = 160 << 10
};

#ifdef __cplusplus
namespace lowbit {
enum class DType : uint8_t { f32 = LOWBIT_F32, bf16 = LOWBIT_BF16, f16 = LOWBIT_F16 };
enum class Mapping : uint8_t { symmetric = LOWBIT_SYMMETRIC, affine = LOWBIT_AFFINE, levels = LOWBIT_LEVELS };
enum class Format : uint32_t { panel16 = LOWBIT_PANEL16 };
enum class CacheType : uint8_t {
  f32 = LOWBIT_CACHE_F32, bf16 = LOWBIT_CACHE_BF16, f16 = LOWBIT_CACHE_F16, i8 = LOWBIT_CACHE_I8, i4 = LOWBIT_CACHE_I4,
  i8_i4 = LOWBIT_CACHE_I8_I4
};
enum class Preference : uint32_t { after_built_in = LOWBIT_AFTER_BUILT_IN, before_built_in = LOWBIT_BEFORE_BUILT_IN };
}  // namespace lowbit
#define LOWBIT_AS(cpp, c) lowbit::cpp
#define LOWBIT_REF(type) const type&
#define LOWBIT_DEFAULT(value) = value
#define LOWBIT_CONSTEXPR static constexpr
#else
#define LOWBIT_AS(cpp, c) c
#define LOWBIT_REF(type) const type*
#define LOWBIT_DEFAULT(value)
#define LOWBIT_CONSTEXPR static inline
#endif

typedef struct lowbit_layout lowbit_layout;

// The inputs of a group, and the segments of a group that k does not cut short.
static inline int64_t lowbit_group_inputs(const lowbit_layout* layout);
static inline int64_t lowbit_group_segments(const lowbit_layout* layout);
// Offsets in a panel. A group ends in the block that holds its last input; a short last group ends in the last block.
static inline int64_t lowbit_block_offset(const lowbit_layout* layout, int64_t block);
static inline int64_t lowbit_scales_offset(const lowbit_layout* layout, int64_t group);

// A packed weight matrix: the values of its header, and the sizes that follow from them. In a vendor's format the sizes of a
// panel's parts are zero.
struct lowbit_layout {
  LOWBIT_AS(Format, uint32_t) format;
  int bits;            // 1-8
  LOWBIT_AS(Mapping, uint8_t) mapping;
  bool has_bias;
  uint8_t rotation;    // log2 of the inputs in a rotated block, or 0. Kernels can ignore it: they get rotated inputs
  bool two_planes;     // activations of 16 bits: two int8 planes. Kernels can ignore it: they get two rows for each row of x
  int64_t n, k;        // output rows, inputs
  int64_t group_size;  // inputs per group, a multiple of 16; 0: one group per row (per channel)

  int64_t groups;        // per row
  int64_t segments;      // per row: ukernel.h
  int64_t blocks;        // of 32 inputs, per row
  int64_t panels;        // of 16 rows
  int64_t block_bytes;   // codes of one block of a panel
  int64_t group_bytes;   // scales (and mins) of one group of a panel
  int64_t head_offset;   // in a panel
  int64_t panel_bytes;
  int64_t total_bytes;   // header included
  int64_t header_bytes;  // before panel 0

  int8_t levels[LOWBIT_MOST_LEVELS];  // mapping levels: 2^bits values from -127 to 127; all others are zero

#ifdef __cplusplus
  int64_t rotated_inputs() const { return rotation == 0 ? 0 : int64_t{1} << rotation; }  // inputs of a rotated block
  int planes() const { return two_planes ? 2 : 1; }  // int8 planes of the activations
  int activation_bits() const { return 8 * planes(); }
  int64_t group_inputs() const { return lowbit_group_inputs(this); }
  int64_t group_segments() const { return lowbit_group_segments(this); }
  static constexpr int64_t segments_of(int64_t inputs) {
    return (inputs + LOWBIT_SEGMENT_INPUTS - 1) / LOWBIT_SEGMENT_INPUTS;
  }
  int64_t block_offset(int64_t block) const { return lowbit_block_offset(this, block); }
  int64_t scales_offset(int64_t group) const { return lowbit_scales_offset(this, group); }
#endif
};

static inline int64_t lowbit_group_inputs(const lowbit_layout* layout) {
  return layout->group_size == 0 ? layout->blocks * LOWBIT_BLOCK_INPUTS : layout->group_size;
}
static inline int64_t lowbit_group_segments(const lowbit_layout* layout) {
  return (lowbit_group_inputs(layout) + LOWBIT_SEGMENT_INPUTS - 1) / LOWBIT_SEGMENT_INPUTS;
}
static inline int64_t lowbit_block_offset(const lowbit_layout* layout, int64_t block) {
  return block * layout->block_bytes + block * LOWBIT_BLOCK_INPUTS / lowbit_group_inputs(layout) * layout->group_bytes;
}
static inline int64_t lowbit_scales_offset(const lowbit_layout* layout, int64_t group) {
  const int64_t inputs = (group + 1) * lowbit_group_inputs(layout);
  const int64_t end = (inputs + LOWBIT_BLOCK_INPUTS - 1) / LOWBIT_BLOCK_INPUTS;  // in blocks
  return (end < layout->blocks ? end : layout->blocks) * layout->block_bytes + group * layout->group_bytes;
}

// Arguments. `context` is always that of the kernel or format whose function is called. Only fields that say so are aligned.

// Converts one row of activations to int8, with a scale and a sum for each segment. Only x may be unaligned.
typedef struct lowbit_quantize_args {
  const void* x;         // k values of x_dtype
  LOWBIT_AS(DType, uint8_t) x_dtype;
  int64_t k;
  int64_t k_padded;      // a multiple of 32, less than k + 32
  int64_t group_inputs;  // a multiple of 16; the last group may be short
  int8_t* a;             // out: k_padded values, zero from k on
  float* scales;         // out: t, one per segment
  int32_t* sums;         // out: A, one per segment
  float* group_sums;     // out: S, one per group, ceil(k / group_inputs); null if not needed
  const void* context LOWBIT_DEFAULT(nullptr);
} lowbit_quantize_args;

// Multiplies some rows of activations by some panels of a packed matrix.
typedef struct lowbit_linear_args {
  const uint8_t* panels;     // panel 0 of the matrix (after the header)
  lowbit_layout layout;
  int64_t panel_begin, panel_end;
  const int8_t* a;           // m rows of layout.blocks * 32 values
  const float* scales;       // m rows of layout.segments values
  const int32_t* sums;       // m rows of layout.segments values
  const float* group_sums;   // m rows of layout.groups values; null unless layout.mapping is affine
  int64_t m;                 // at least 1
  void* out;                 // row 0, column 0 of the whole output, in out_dtype
  LOWBIT_AS(DType, uint8_t) out_dtype;
  int64_t out_stride;        // elements from one row of the output to the next, at least layout.n
  // Written by the kernel's own prepare(), 64-byte aligned; then a, scales, sums and group_sums are null.
  const void* activations LOWBIT_DEFAULT(nullptr);
  // scratch_bytes() of the kernel, at least LOWBIT_LINEAR_SCRATCH_BYTES; 64-byte aligned, of undefined content, used by this
  // call alone. Threads may have little stack (musl's have 128 KiB), and a kernel allocates nothing.
  void* scratch LOWBIT_DEFAULT(nullptr);
  const void* context LOWBIT_DEFAULT(nullptr);
} lowbit_linear_args;

// Converts some rows of activations to the form that a kernel of a vendor's packed format reads.
typedef struct lowbit_prepare_args {
  const void* x;       // row 0: k values of x_dtype
  LOWBIT_AS(DType, uint8_t) x_dtype;
  int64_t x_stride;    // elements from one row to the next
  lowbit_layout layout;
  int64_t m;           // number of all rows
  int64_t begin, end;  // rows to prepare; begin is a multiple of the kernel's m_least, and so is end unless it is m
  void* activations;   // activation_bytes(layout, m) bytes for all rows, 64-byte aligned
  const void* context LOWBIT_DEFAULT(nullptr);
} lowbit_prepare_args;

// Dequantizes one row of a packed matrix.
typedef struct lowbit_embedding_args {
  const uint8_t* panels;
  lowbit_layout layout;
  int64_t row;               // in [0, layout.n)
  void* out;                 // layout.k values of out_dtype
  LOWBIT_AS(DType, uint8_t) out_dtype;
  const void* context LOWBIT_DEFAULT(nullptr);
} lowbit_embedding_args;

// Sizes of attention. Blocks and spans are part of the arithmetic, panels part of the layout of keys.
enum {
  LOWBIT_KEY_POSITIONS = 16,      // positions of a panel
  LOWBIT_ATTENTION_BLOCK = 256,   // positions of a block
  LOWBIT_ATTENTION_SPAN = 512,    // positions of a span; spans do not depend on each other, so threads may divide them
  LOWBIT_ATTENTION_ROWS = 16,     // rows at once
  LOWBIT_ATTENTION_WIDTH = 512    // largest width of a head's keys or values; a multiple of 16
};

// Some rows of queries that read the same keys and values. Rows, keys, values and scales may be unaligned.
typedef struct lowbit_attention_args {
  int64_t rows;            // 1 to LOWBIT_ATTENTION_ROWS
  const void* const* q;    // a pointer for each row: `width` values
  void* const* out;        // a pointer for each row: `value_width` values
  const int64_t* begins;   // the first position that each row sees, at least that of the previous row
  const int64_t* ends;     // one past the last position that each row sees: above its begin, at least that of the previous row
  const float* sinks;      // per row a score times log2(e) that has no value; null: none
  const void* keys;        // panels: position p, input i at element (p / 16 * width + i) * 16 + p % 16; whole panels
                           // int8 has four inputs of a position together: byte (p / 16 * width / 4 + i / 4) * 64 +
                           // p % 16 * 4 + i % 4
  const void* values;      // position p, input i at element p * value_width + i
                           // 4 bits: two inputs of a position in a byte, so that no byte has two positions. Keys: byte
                           // (p / 16 * width / 2 + i / 2) * 16 + p % 16, the upper half for odd i. Values: byte
                           // p * value_width / 2 + i / 32 * 16 + i % 16, the upper half where i % 32 is 16 or more
  const void* key_scales;  // caches of codes: a float32 per position, whole panels of 16; otherwise null
  const void* value_scales;
  LOWBIT_AS(DType, uint8_t) dtype;      // of q and out
  LOWBIT_AS(CacheType, uint8_t) cache;  // of keys and values
  int64_t width, value_width;
  float factor;            // scale * log2(e), or with a cap: scale / softcap * 2 log2(e)
  float cap;               // softcap * log2(e); 0: none
  float* scratch;          // attention_scratch(width, value_width) floats, 64-byte aligned
  // If null, outputs are written. Otherwise all rows see the same positions of one span, sinks are null except in a row's first
  // span, and the partial result of the span is written here, for join: attention_partial(rows, value_width) floats, 64-byte
  // aligned.
  float* partial LOWBIT_DEFAULT(nullptr);
  const void* context LOWBIT_DEFAULT(nullptr);
} lowbit_attention_args;

// Joins the results in lowbit_attention_args.partial of some rows: of all spans that they see, in order. Overwrites them.
typedef struct lowbit_attention_join_args {
  int64_t rows, spans;
  float* partials;   // 64-byte aligned
  void* const* out;  // as in lowbit_attention_args
  LOWBIT_AS(DType, uint8_t) dtype;
  LOWBIT_AS(CacheType, uint8_t) cache;
  int64_t value_width;
  const void* context LOWBIT_DEFAULT(nullptr);
} lowbit_attention_join_args;

// Writes new positions of one head to the keys and values of lowbit_attention_args. `k`, `v` and the caches may be unaligned.
typedef struct lowbit_attention_write_args {
  const void* k;     // `width` values, k_step elements from one to the next
  const void* v;     // `value_width` values
  int64_t k_step, v_step;
  void* keys;        // position 0
  void* values;
  void* key_scales;  // position 0; null unless the cache has codes
  void* value_scales;
  int64_t position;
  LOWBIT_AS(DType, uint8_t) dtype;      // of k and v
  LOWBIT_AS(CacheType, uint8_t) cache;  // of keys and values
  int64_t width, value_width;
  const void* context LOWBIT_DEFAULT(nullptr);
  // Consecutive positions from `position` on, and elements from one to the next in k and v. 0 means one position, which is all
  // that kernels without writes_several get.
  int64_t positions LOWBIT_DEFAULT(0), k_position_step LOWBIT_DEFAULT(0), v_position_step LOWBIT_DEFAULT(0);
} lowbit_attention_write_args;

// Outputs, 16 sums and a maximum per row. There is always room for 16 maxima, so that the next part is aligned.
LOWBIT_CONSTEXPR int64_t lowbit_attention_partial(int64_t rows, int64_t value_width) {
  return rows * (value_width + LOWBIT_KEY_POSITIONS) + LOWBIT_ATTENTION_ROWS;
}

// Queries, the results of the current span and of the earlier ones, and the scores of 4 rows in a block.
LOWBIT_CONSTEXPR int64_t lowbit_attention_scratch(int64_t width, int64_t value_width) {
  return LOWBIT_ATTENTION_ROWS * width + 2 * lowbit_attention_partial(LOWBIT_ATTENTION_ROWS, value_width) +
         4 * LOWBIT_ATTENTION_BLOCK;
}

// Row-major inputs (pack) or outputs (unpack) of a whole matrix, contiguous, aligned as their types require.
typedef struct lowbit_pack_args {
  const uint8_t* codes;  // n x k, below 2^bits
  const float* scales;   // n x groups, finite
  const float* mins;     // n x groups, finite; null unless affine
  const float* bias;     // n, finite; null without bias
} lowbit_pack_args;

typedef struct lowbit_unpack_args {
  uint8_t* codes;
  float* scales;
  float* mins;  // null unless affine
  float* bias;  // null without bias
} lowbit_unpack_args;

// Kernels: entries of the kernel table. Names are unique and have up to 63 letters, digits, '-', '_' and '.'. `isa` has every
// bit that the code needs: the kernel is used if the CPU has all of them and LOWBIT_ISA allows them. If a kernel needs features
// that have no bit, lowbit_kernels() must omit it on CPUs without them. Fields after `run` may be zero.

typedef struct lowbit_quantize_kernel {
  const char* name;  // quantize_<isa>
  lowbit_isa isa;
  void (*run)(LOWBIT_REF(lowbit_quantize_args));
  const void* context LOWBIT_DEFAULT(nullptr);
} lowbit_quantize_kernel;

typedef struct lowbit_linear_kernel {
  const char* name;  // linear_a8w<bits>_<m_least>x<n_step>_<isa>
  lowbit_isa isa;
  LOWBIT_AS(Format, uint32_t) format;
  uint8_t bits;
  // Its tile. m_least: the kernel is chosen from that many rows of m on, or if no other is left; it must accept any m. n_step:
  // rows of weights at once, a divisor or multiple of 16. Calls begin and (except at n) end at multiples of it where possible.
  uint8_t m_least, n_step;
  void (*run)(LOWBIT_REF(lowbit_linear_args));
  uint8_t mappings LOWBIT_DEFAULT(3);  // mappings that it reads: 1 << LOWBIT_AFFINE, ...; 0: symmetric and affine
  uint8_t x_types LOWBIT_DEFAULT(1);   // types that prepare reads: 1 << LOWBIT_BF16, ...; others become float32. 0: float32
  // Whether it accepts calls of m rows with such a matrix, on a CPU whose usable bits are `isa`; null: always. Called before
  // each run(): it must be fast, always give the same answer, and accept the matrices of the trial (docs/vendor.md).
  bool (*supports)(const void* context, LOWBIT_REF(lowbit_layout), int64_t m, lowbit_isa isa) LOWBIT_DEFAULT(nullptr);
  // Bytes of lowbit_linear_args.scratch for calls of up to m rows, of which `threads` run at the same time; null:
  // LOWBIT_LINEAR_SCRATCH_BYTES.
  int64_t (*scratch_bytes)(const void* context, LOWBIT_REF(lowbit_layout), int64_t m, int threads) LOWBIT_DEFAULT(nullptr);
  // Both or neither, and only for a vendor's packed format: its own form of activations instead of lowbit_quantize_args'.
  int64_t (*activation_bytes)(const void* context, LOWBIT_REF(lowbit_layout), int64_t m) LOWBIT_DEFAULT(nullptr);
  void (*prepare)(LOWBIT_REF(lowbit_prepare_args)) LOWBIT_DEFAULT(nullptr);
  const void* context LOWBIT_DEFAULT(nullptr);
  // Whether it reads several panels at a time, interleaved. It is chosen only if streams() of isa.h is Streams::several.
  bool several_streams LOWBIT_DEFAULT(false);
} lowbit_linear_kernel;

typedef struct lowbit_embedding_kernel {
  const char* name;  // embedding_w<bits>_<isa>
  lowbit_isa isa;
  LOWBIT_AS(Format, uint32_t) format;
  uint8_t bits;
  void (*run)(LOWBIT_REF(lowbit_embedding_args));
  uint8_t mappings LOWBIT_DEFAULT(3);  // as in lowbit_linear_kernel
  const void* context LOWBIT_DEFAULT(nullptr);
} lowbit_embedding_kernel;

typedef struct lowbit_attention_kernel {
  const char* name;  // attention_<isa>
  lowbit_isa isa;
  void (*run)(LOWBIT_REF(lowbit_attention_args));
  void (*write)(LOWBIT_REF(lowbit_attention_write_args));
  void (*join)(LOWBIT_REF(lowbit_attention_join_args));
  const void* context LOWBIT_DEFAULT(nullptr);
  bool writes_several LOWBIT_DEFAULT(false);  // `write` takes several positions at a time
} lowbit_attention_kernel;

// A vendor's layout of the bytes after lowbit's 64-byte header. `bytes` is called on each operator call, with sizes that come
// from outside: it must accept any n and k up to 2^31.
typedef struct lowbit_format {
  LOWBIT_AS(Format, uint32_t) format;  // LOWBIT_FORMAT
  // Number of bytes of such a matrix, or 0 if the format does not support it.
  int64_t (*bytes)(const void* context, LOWBIT_REF(lowbit_layout));
  // Writes rows [begin, end) of a matrix (all bytes start as zeros) / reads them back. Returns null, or a sentence with the
  // reason of a failure. `args` has the whole matrix. If unpack is null, weights of this format cannot be unpacked.
  const char* (*pack)(const void* context, LOWBIT_REF(lowbit_layout), LOWBIT_REF(lowbit_pack_args), int64_t begin,
                      int64_t end, void* bytes);
  const char* (*unpack)(const void* context, LOWBIT_REF(lowbit_layout), const void* bytes, int64_t begin, int64_t end,
                        LOWBIT_REF(lowbit_unpack_args)) LOWBIT_DEFAULT(nullptr);
  // How much results of its kernels may differ from those of the portable kernels with the same weights in panel16, in the
  // trial when the library is loaded (ops/try_kernels.h). For linear kernels as a share of the summed magnitudes of all
  // products and the bias, for embedding kernels of the largest value of the row. 0: only by output rounding. At most 1.
  float tolerance LOWBIT_DEFAULT(0.0f);
  // If not 0, threads pack and unpack in parallel: ranges of rows begin and (except the last) end at multiples of it.
  int32_t rows_at_once LOWBIT_DEFAULT(0);
  const void* context LOWBIT_DEFAULT(nullptr);
} lowbit_format;

// The size of each structure when the library was built.
typedef struct lowbit_sizes {
  uint32_t library, format, quantize_kernel, linear_kernel, embedding_kernel, attention_kernel;
  uint32_t layout, quantize_args, prepare_args, linear_args, embedding_args;
  uint32_t attention_args, attention_join_args, attention_write_args, pack_args, unpack_args;
} lowbit_sizes;

typedef struct lowbit_library {
  uint32_t abi;        // LOWBIT_KERNEL_ABI: the first field of every version
  lowbit_sizes sizes;  // LOWBIT_SIZES
  const char* vendor;  // as lowbit.kernels() shows it
  LOWBIT_AS(Preference, uint32_t) preference;
  struct {
    const lowbit_linear_kernel* entries;
    size_t count;
  } linear;
  struct {
    const lowbit_embedding_kernel* entries;
    size_t count;
  } embedding;
  struct {
    const lowbit_quantize_kernel* entries;
    size_t count;
  } quantize;
  struct {
    const lowbit_attention_kernel* entries;
    size_t count;
  } attention;
  struct {
    const lowbit_format* entries;
    size_t count;
  } formats;
} lowbit_library;

#define LOWBIT_SIZES                                                                                              \
  {                                                                                                               \
    sizeof(lowbit_library), sizeof(lowbit_format), sizeof(lowbit_quantize_kernel), sizeof(lowbit_linear_kernel),  \
        sizeof(lowbit_embedding_kernel), sizeof(lowbit_attention_kernel), sizeof(lowbit_layout),                  \
        sizeof(lowbit_quantize_args), sizeof(lowbit_prepare_args), sizeof(lowbit_linear_args),                    \
        sizeof(lowbit_embedding_args), sizeof(lowbit_attention_args), sizeof(lowbit_attention_join_args),         \
        sizeof(lowbit_attention_write_args), sizeof(lowbit_pack_args), sizeof(lowbit_unpack_args)                 \
  }

typedef const lowbit_library* lowbit_kernels_function(uint32_t abi);
