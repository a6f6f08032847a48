// The contract of the kernels. lowbit_ukernel.h has the structures of kernels and their arguments, for C as well. These two
// files are the whole contract between the operators and the kernels, and neither side uses anything else of the other.
//
// Arithmetic (every kernel returns the same bits; the order of float operations is part of the contract):
//
//   segments         each group of inputs is cut, from its first input on, into segments of kSegmentInputs (64) inputs; the
//                    last segment of a group may be shorter. Groups of up to 64 inputs are one segment each
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
//   two planes       if the packed weight requires it (format.h): plane 1 is the activation row of x, plane 2 that of
//                    r = fma(-t, a, x), with t and a of plane 1, which is exact except for underflow. Each plane gives a y as
//                    above, y1 and y2 in float32, and y = y1 + (y2 - bias). The operators do this: kernels get two rows
//   embedding        symmetric, levels: (row_scale * scale) * level;
//                    affine: fma(row_scale * scale, code, row_scale * min)
//   attention        one row q over the positions that it sees; 16 lanes, position j is lane j % 16:
//                    q = q * factor;  x[j] = 0, for i in order: x[j] = fma(k[j][i], q[i], x[j])
//                    caches of codes: k and v are the codes (4 bits: the level of each), and x[j] = x[j] * key_scale[j];
//                    4-bit keys: after the factor q is rotated, q = rotate(q)
//                    int8 keys: after the factor each segment of 64 inputs of q (the last may be shorter) gets codes c and a
//                    scale t as int8 keys do, and for the segments in order: x[j] = fma(t, float(sum of k[j][i] * c[i]), x[j])
//                    with a cap: x[j] = tanh2(x[j]) * cap
//                    for each span of 512 positions (0 to 511, 512 to 1023, ...) of which the row sees some:
//                      m = -FLT_MAX, sums[16] = 0, o = 0;  with a sink, in the first span: m = max(m, sink), sums[0] = 1
//                      for each block of 256 positions (0 to 255, 256 to 511, ...) of which the row sees some:
//                        M = max(m, the block's x);  c = exp2(m - M), sums *= c, o *= c, m = M;  for j in order:
//                          p = exp2(x[j] - m), sums[j % 16] += p, caches of codes: p = p * value_scale[j],
//                          for all i: o[i] = fma(v[j][i], p, o[i])
//                      after an earlier span with the results m', sums' and o':  M = max(m', m), a = exp2(m' - M),
//                        b = exp2(m - M), sums = fma(sums', a, sums * b), o = fma(o', a, o * b), m = M
//                    4-bit values: o = rotate(o)
//                    y = o * (1 / sum);  sum: lanes l and l + 8 are added, then l and l + 4, l + 2, l + 1
//   tanh2(x)         e = exp2(-|x|), (1 - e) / (1 + e), with the sign of x: the tanh of x / (2 log2(e))
//   keys and values  in 16-bit caches: rounded like outputs. In int8, per position of a head: s = max |x| / 127,
//                    inv = 1/s, code = rint(x * inv), ties to even, from -127 to 127; s < 2^-126: s = 0, codes 0; a
//                    value that is not finite: s = NaN (0x7fc00000), codes 0
//                    In 4 bits: x = rotate(x * (1 / block)), s as above, and with its inv the code is the number of
//                    thresholds in kCacheThresholds below x * inv. With t = x * inv and L = level(code), both in order of i:
//                      a[i % 16] = fma(t[i], L[i], a[i % 16]),  b = sum of L * L;  s = s * (a / b), a folded like sums
//                    s < 2^-126 or not finite: s as above, codes 8
//   rotate(x)        each block of x (the largest power of two that divides the width, in values) times the Hadamard matrix
//                    of that size: for h = 1, 2, 4, ... below the size, for all pairs (i, i + h) where bit h of i is 0:
//                    x[i], x[i + h] = x[i] + x[i + h], x[i] - x[i + h]
//   rotate_inputs(x) if the packed weight requires it (format.h), applied to a row x before it becomes an activation row, in
//                    blocks of `size` inputs: x[i] = x[i] * f, with f = 2^-ceil(log2(size) / 2), negative if bit
//                    i % size of kRotationSigns is set; then rotate() of the block. The operators do this, in float32.
//                    The inverse, for a row of such a weight (embedding): rotate() of the block, then w[i] = w[i] * f
//   exp2(x), x <= 0  below -126: 0;  n = rint(x), r = x - n, 2^n * polynomial(r): attention/attention_impl.h
//   16-bit outputs   rounded from the float32 result, to nearest, ties to even; NaN of attention: 0x7fc00000
//
// The operators check preconditions: kernels only assert them. Panels and outputs may have any address.
#pragma once

#include <cstddef>
#include <cstdint>

#include "export.h"
#include "format.h"
#include "isa.h"
#include "numeric.h"

namespace lowbit {

using QuantizeArgs = ::lowbit_quantize_args;
using LinearArgs = ::lowbit_linear_args;
using PrepareArgs = ::lowbit_prepare_args;
using EmbeddingArgs = ::lowbit_embedding_args;
using AttentionArgs = ::lowbit_attention_args;
using AttentionJoinArgs = ::lowbit_attention_join_args;
using AttentionWriteArgs = ::lowbit_attention_write_args;
using QuantizeKernel = ::lowbit_quantize_kernel;
using LinearKernel = ::lowbit_linear_kernel;
using EmbeddingKernel = ::lowbit_embedding_kernel;
using AttentionKernel = ::lowbit_attention_kernel;

inline constexpr int64_t kLinearScratchBytes = LOWBIT_LINEAR_SCRATCH_BYTES;
inline constexpr int64_t kKeyPositions = LOWBIT_KEY_POSITIONS;
inline constexpr int64_t kAttentionBlock = LOWBIT_ATTENTION_BLOCK;
inline constexpr int64_t kAttentionSpan = LOWBIT_ATTENTION_SPAN;
inline constexpr int64_t kAttentionRows = LOWBIT_ATTENTION_ROWS;
inline constexpr int64_t kAttentionWidth = LOWBIT_ATTENTION_WIDTH;

// The types of keys and values. int8: codes from -127 to 127, and a scale per position of a head. 4 bits: rotated, codes from 0
// to 15 that stand for kCacheLevels, and a scale per position of a head; widths are multiples of 32.
constexpr bool has_scales(CacheType type) { return type >= CacheType::i8; }
constexpr CacheType key_type(CacheType type) { return type == CacheType::i8_i4 ? CacheType::i8 : type; }
constexpr CacheType value_type(CacheType type) { return type == CacheType::i8_i4 ? CacheType::i4 : type; }

// Bytes of `values` keys or values, without their scales. `type` is that of either.
constexpr int64_t cache_bytes(CacheType type, int64_t values) {
  return type == CacheType::i4 ? values / 2 : values * (type == CacheType::f32 ? 4 : type == CacheType::i8 ? 1 : 2);
}

// The quantizer with 16 levels that has the least squared error for normally distributed values (Max, 1960), because the
// values of a rotated position are nearly normal. The largest magnitude of a position maps to an end. Not inline, because the
// linker would share one table among all files, and files of different ISAs must share nothing.
constexpr int8_t kCacheLevels[16] = {-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127};
// Midpoints between adjacent levels.
constexpr float kCacheThresholds[15] = {-111.5f, -85.5f, -66.5f, -51.0f, -37.5f, -24.5f, -12.0f, 0.0f,
                                        12.0f,   24.5f,  37.5f,  51.0f,  66.5f,  85.5f,  111.5f};

// The signs of rotated inputs: the first bits of pi after the binary point, 32 inputs per word.
constexpr uint32_t kRotationSigns[kMostRotation / 32] = {0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u};

constexpr CacheType cache_type_of(DType dtype) {
  return dtype == DType::f32 ? CacheType::f32 : dtype == DType::bf16 ? CacheType::bf16 : CacheType::f16;
}

constexpr int64_t attention_partial(int64_t rows, int64_t value_width) {
  return lowbit_attention_partial(rows, value_width);
}

constexpr int64_t attention_scratch(int64_t width, int64_t value_width) {
  return lowbit_attention_scratch(width, value_width);
}

constexpr uint8_t bit_of(DType type) { return static_cast<uint8_t>(1u << static_cast<unsigned>(type)); }

// A kernel that reads every mapping that its width can have.
template <class Kernel>
constexpr Kernel with_levels(Kernel kernel) {
  if (can_have_levels(kernel.bits)) kernel.mappings = kAllMappings;
  return kernel;
}

// The table that an ISA file exports.
template <class Kernel>
struct Table {
  const Kernel* entries;
  size_t count;

  const Kernel* begin() const { return entries; }
  const Kernel* end() const { return entries + count; }
};

}  // namespace lowbit
