// The ukernel table: what a kernel row promises, and the arguments that it takes. This header is the whole contract
// between the operators and the kernels; neither knows anything else of the other.
//
// Arithmetic (every kernel returns the same bits; the order of float operations is part of the contract):
//
//   segments         each group of inputs is cut, from its first input on, into segments of kSegmentInputs (64) inputs; the
//                    last one of a group may be shorter. Groups of up to 64 inputs are one segment each
//   activation row   of each segment: m = max |x|,  t = m * float(1/127), the two lowest bits of its mantissa cleared,
//                    inv = 1/t,  a = rint(x * inv), from -127 to 127;
//                    t < 2^-126: t = 0, a = 0;  m is NaN or t >= 2^104: t = NaN (0x7fc00000), a = 0
//   integer part     I[s] = sum of a * level(code) over segment s (symmetric: codec.h; levels: the table's) or of
//                    a * code (affine), below 2^22;  A[s] = sum of a over segment s
//   linear           acc = 0;  for each group g in order, with the segments s of g in order:
//                      P = t[s] * float(I[s]) for the first s, then P = fma(t[s], float(I[s]), P)
//                      acc = fma(scale[g], P, acc)
//                      affine: acc = fma(min[g], S[g], acc), where S is to A what P is to I
//                    y = fma(row_scale, acc, bias);  the sign and payload of a NaN are not part of the contract
//                    With t of 22 significant bits, fma(t, c + I, -c * t) is t * float(I) for c = 1.5 * 2^23: kernels whose
//                    integer sums start at the bits of c need no conversion of the first product.
//   embedding        symmetric, levels: (row_scale * scale) * level;
//                    affine: fma(row_scale * scale, code, row_scale * min)
//   attention        one row q over the positions that it sees; 16 lanes, position j is lane j % 16:
//                    q = q * factor;  x[j] = 0, for i in order: x[j] = fma(k[j][i], q[i], x[j])
//                    caches of codes: k and v are the codes, 4-bit ones the level of each, and x[j] = x[j] * key_scale[j];
//                    4-bit caches: behind the factor q is rotated, q = rotate(q)
//                    with a cap: x[j] = tanh2(x[j]) * cap
//                    for each span of 512 positions (0 to 511, 512 to 1023, ...) of which it sees some:
//                      m = -FLT_MAX, sums[16] = 0, o = 0;  with a sink, in the first: m = max(m, sink), sums[0] = 1
//                      for each block of 256 positions (0 to 255, 256 to 511, ...) of which it sees some:
//                        M = max(m, the block's x);  c = exp2(m - M), sums *= c, o *= c, m = M;  for j in order:
//                          p = exp2(x[j] - m), sums[j % 16] += p, caches of codes: p = p * value_scale[j],
//                          for all i: o[i] = fma(v[j][i], p, o[i])
//                      behind another, which came to m', sums' and o':  M = max(m', m), a = exp2(m' - M),
//                        b = exp2(m - M), sums = fma(sums', a, sums * b), o = fma(o', a, o * b), m = M
//                    4-bit caches: o = rotate(o)
//                    y = o * (1 / sum);  sum: lanes l and l + 8 are added, then l and l + 4, l + 2, l + 1
//   tanh2(x)         e = exp2(-|x|), (1 - e) / (1 + e), with the sign of x: the tanh of x / (2 log2(e))
//   keys and values  to 16-bit caches: rounded as outputs are. To int8, a position of a head: s = max |x| / 127,
//                    inv = 1/s, code = rint(x * inv), ties to even, from -127 to 127; s < 2^-126: s = 0, codes 0; a
//                    value that is not finite: s = NaN (0x7fc00000), codes 0
//                    To 4 bits: x = rotate(x * (1 / block)), s as above, and with its inv the code is the number of
//                    thresholds in kCacheThresholds below x * inv; x * inv is t, level(code) is L, both in order of i:
//                      a[i % 16] = fma(t[i], L[i], a[i % 16]),  b = sum of L * L;  s = s * (a / b), a folded as sums are
//                    s < 2^-126 or not finite: s as above, codes 8
//   rotate(x)        each block of x, as many values as the largest power of two that divides the width, times the
//                    Hadamard matrix of that size: for h = 1, 2, 4, ... below the size, all pairs (i, i + h) of which i
//                    has no bit h: x[i], x[i + h] = x[i] + x[i + h], x[i] - x[i + h]
//   exp2(x), x <= 0  below -126: 0;  n = rint(x), r = x - n, 2^n * polynomial(r): attention/attention_impl.h
//   16-bit outputs   rounded from the float32 result, to nearest, ties to even; NaN of attention: 0x7fc00000
//
// Preconditions are the operators' to check: kernels only assert them. Panels and outputs may lie at any address.
#pragma once

#include <cstddef>
#include <cstdint>

#include "export.h"
#include "format.h"
#include "isa.h"
#include "numeric.h"

namespace lowbit {

// One row of activations to int8, with a scale and a sum for each segment. Only x may be unaligned.
struct QuantizeArgs {
  const void* x;         // k values of x_dtype
  DType x_dtype;
  int64_t k;
  int64_t k_padded;      // a multiple of 32, less than k + 32
  int64_t group_inputs;  // a multiple of 16; the last group may be short
  int8_t* a;             // out: k_padded values, zero from k on
  float* scales;         // out: t, one per segment
  int32_t* sums;         // out: A, one per segment
  float* group_sums;     // out: S, one per group, ceil(k / group_inputs); null: not wanted
};

// Memory for a linear row's own use during a call. The operator owns it: threads may have little stack (musl's have 128
// KiB), and a row allocates nothing.
inline constexpr int64_t kLinearScratchBytes = 160 << 10;

// Some rows of activations times some panels of a packed matrix.
struct LinearArgs {
  const uint8_t* panels;     // panel 0 of the matrix (behind the header)
  Layout layout;
  int64_t panel_begin, panel_end;
  const int8_t* a;           // m rows of layout.blocks * 32 values
  const float* scales;       // m rows of layout.segments values
  const int32_t* sums;       // m rows of layout.segments values
  const float* group_sums;   // m rows of layout.groups values; null unless layout.mapping is affine
  int64_t m;                 // at least 1
  void* out;                 // row 0, column 0 of the whole output, in out_dtype
  DType out_dtype;
  int64_t out_stride;        // elements from one row of the output to the next, at least layout.n
  // What the row's own prepare() wrote, 64-byte aligned; then a, scales, sums and group_sums are null.
  const void* activations = nullptr;
  void* scratch = nullptr;   // kLinearScratchBytes, 64-byte aligned, of undefined content; of this call alone
};

// Some rows of activations into the form that a row of a vendor's packed format wants.
struct PrepareArgs {
  const float* x;      // row 0: k values
  int64_t x_stride;    // elements from one row to the next
  Layout layout;
  int64_t m;           // rows in all
  int64_t begin, end;  // those to prepare; begin is a multiple of the row's m_least, and so is end unless it is m
  void* activations;   // activation_bytes(layout, m) bytes for all rows
};

// One row of a packed matrix, dequantized.
struct EmbeddingArgs {
  const uint8_t* panels;
  Layout layout;
  int64_t row;               // in [0, layout.n)
  void* out;                 // layout.k values of out_dtype
  DType out_dtype;
};

// Sizes of attention. Blocks and spans are part of the arithmetic, and a panel of the layout of keys.
inline constexpr int64_t kKeyPositions = 16;      // of a panel
inline constexpr int64_t kAttentionBlock = 256;   // positions
inline constexpr int64_t kAttentionSpan = 512;    // positions that nothing before them enters: threads may share spans
inline constexpr int64_t kAttentionRows = 16;     // at once
inline constexpr int64_t kAttentionWidth = 512;   // of a head's keys or values, at most; a multiple of 16

// What keys and values are kept in. int8: codes from -127 to 127, and a scale for each position of a head. 4 bits: rotated,
// codes from 0 to 15, which stand for kCacheLevels, and such a scale; widths are multiples of 32.
enum class CacheType : uint8_t { f32, bf16, f16, i8, i4 };

constexpr bool has_scales(CacheType type) { return type == CacheType::i8 || type == CacheType::i4; }

// Of so many keys or values, without their scales.
constexpr int64_t cache_bytes(CacheType type, int64_t values) {
  return type == CacheType::i4 ? values / 2 : values * (type == CacheType::f32 ? 4 : type == CacheType::i8 ? 1 : 2);
}

// The quantizer with 16 levels that has the least squared error for normally distributed values (Max, 1960), which the
// values of a rotated position nearly are. The largest magnitude of a position is at its end. Not inline: then the
// linker would take one table for all files, where files of different ISAs share nothing.
constexpr int8_t kCacheLevels[16] = {-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127};
// Halfway between two levels.
constexpr float kCacheThresholds[15] = {-111.5f, -85.5f, -66.5f, -51.0f, -37.5f, -24.5f, -12.0f, 0.0f,
                                        12.0f,   24.5f,  37.5f,  51.0f,  66.5f,  85.5f,  111.5f};

constexpr CacheType cache_type_of(DType dtype) {
  return dtype == DType::f32 ? CacheType::f32 : dtype == DType::bf16 ? CacheType::bf16 : CacheType::f16;
}

// Some rows of queries that read the same keys and values. Rows, keys, values and scales may be unaligned.
struct AttentionArgs {
  int64_t rows;            // 1 to kAttentionRows
  const void* const* q;    // a pointer for each row: `width` values
  void* const* out;        // a pointer for each row: `value_width` values
  const int64_t* begins;   // the first position that each row sees, not less than that of the row before
  const int64_t* ends;     // the position behind the last that it sees: more than its begin, not less than the row before
  const float* sinks;      // for each row a score times log2(e) that has no value; null: none
  const void* keys;        // panels: position p, input i at element (p / 16 * width + i) * 16 + p % 16; whole panels
  const void* values;      // position p, input i at element p * value_width + i
                           // 4 bits: two inputs of a position in a byte, so that no byte has two positions. Keys: byte
                           // (p / 16 * width / 2 + i / 2) * 16 + p % 16, the upper half for odd i. Values: byte
                           // p * value_width / 2 + i / 32 * 16 + i % 16, the upper half where i % 32 is 16 or more
  const void* key_scales;  // codes: a float32 for each position, whole panels of 16; else null
  const void* value_scales;
  DType dtype;             // of q and out
  CacheType cache;         // of keys and values
  int64_t width, value_width;
  float factor;            // scale * log2(e), or with a cap: scale / softcap * 2 log2(e)
  float cap;               // softcap * log2(e); 0: none
  float* scratch;          // attention_scratch(width, value_width) floats, 64-byte aligned
  // Null: outputs are written. Else all rows see the same positions, those of one span; sinks are null but for a row's
  // first span; and what the span comes to is written here, for AttentionKernel::join: attention_partial(rows,
  // value_width) floats, 64-byte aligned.
  float* partial = nullptr;
};

// What AttentionArgs::partial has of some rows, of all spans that they see, one behind the other. Changed.
struct AttentionJoinArgs {
  int64_t rows, spans;
  float* partials;   // 64-byte aligned
  void* const* out;  // as in AttentionArgs
  DType dtype;
  CacheType cache;
  int64_t value_width;
};

// A new position of one head: into the keys and values that AttentionArgs has. `k`, `v` and the caches may be unaligned.
struct AttentionWriteArgs {
  const void* k;     // `width` values, k_step elements from one to the next
  const void* v;     // `value_width` values
  int64_t k_step, v_step;
  void* keys;        // position 0
  void* values;
  void* key_scales;  // position 0; null unless the cache has codes
  void* value_scales;
  int64_t position;
  DType dtype;       // of k and v
  CacheType cache;   // of keys and values
  int64_t width, value_width;
};

// Outputs, 16 sums and a maximum per row; there are 16 maxima always, so that what follows is aligned.
constexpr int64_t attention_partial(int64_t rows, int64_t value_width) {
  return rows * (value_width + kKeyPositions) + kAttentionRows;
}

// Queries, what a span and those before it come to, and the scores of 4 rows in a block.
constexpr int64_t attention_scratch(int64_t width, int64_t value_width) {
  return kAttentionRows * width + 2 * attention_partial(kAttentionRows, value_width) + 4 * kAttentionBlock;
}

struct QuantizeKernel {
  const char* name;  // quantize_<isa>
  IsaBits isa;
  void (*run)(const QuantizeArgs&);
};

struct LinearKernel {
  const char* name;  // linear_a8w<bits>_<m_least>x<n_step>_<isa>
  IsaBits isa;
  Format format;
  uint8_t bits;
  uint8_t m_least, n_step;  // chosen from so many rows of m on; rows of weights at once. It takes any m, and all of n
  void (*run)(const LinearArgs&);
  // Calls of more rows than this go to another row of the table if one fits; 0: no limit.
  uint8_t m_most = 0;
  // Both or none, and only for a vendor's packed format: activations in a form of its own instead of QuantizeArgs'.
  int64_t (*activation_bytes)(const Layout&, int64_t m) = nullptr;
  void (*prepare)(const PrepareArgs&) = nullptr;
  // Made for groups of so many inputs or a multiple: 32, whole blocks, or 16, all groups. Other groups go to another row
  // if one fits, but a row is right for any.
  uint8_t group_step = kHalfInputs;
  uint8_t mappings = kPlainMappings;  // that it reads: bit_of() each. Weights with others go to another row
};

struct EmbeddingKernel {
  const char* name;  // embedding_w<bits>_<isa>
  IsaBits isa;
  Format format;
  uint8_t bits;
  void (*run)(const EmbeddingArgs&);
  uint8_t mappings = kPlainMappings;
};

struct AttentionKernel {
  const char* name;  // attention_<isa>
  IsaBits isa;
  void (*run)(const AttentionArgs&);
  void (*write)(const AttentionWriteArgs&);
  void (*join)(const AttentionJoinArgs&);
};

// A row that reads every mapping that its width can have.
template <class Kernel>
constexpr Kernel with_levels(Kernel row) {
  if (can_have_levels(row.bits)) row.mappings = kAllMappings;
  return row;
}

// What an ISA file exports.
template <class Kernel>
struct Table {
  const Kernel* rows;
  size_t count;

  const Kernel* begin() const { return rows; }
  const Kernel* end() const { return rows + count; }
};

}  // namespace lowbit
