// The operators, for any host framework: they check their arguments, choose a kernel, divide the work into tiles and run it on
// the host's threads. They return an error instead of reading or writing out of bounds, for example for impossible shapes,
// tensors without memory, outputs that overlap inputs, and threads without a function. They also return one if LOWBIT_ISA has
// an unknown name (isa_cap_status()). Only the caller knows how much memory is behind a pointer, and whether the strides stay
// within it.
//
// Outputs are contiguous tensors that the caller has allocated with the shape from the *_shape function.
#pragma once

#include "../kernels/export.h"
#include "../kernels/format.h"
#include "../kernels/status.h"
#include "parallel.h"
#include "tensor_view.h"

namespace lowbit {

// x [..., k] float32, bfloat16 or float16, any strides;  packed: uint8, contiguous;  out [..., out_features] of x's type.
LOWBIT_API Status linear_shape(const TensorView& x, int64_t out_features, Shape* out);
LOWBIT_API Status linear(const TensorView& x, const TensorView& packed, int64_t out_features, const TensorView& out,
                         const Parallel& parallel);

// The same for 1 to kMostMatrices matrices of k inputs each, of any widths and group sizes: x is quantized once.
// out [..., sum of out_features] has the results next to each other, with the bits of one call per matrix.
inline constexpr int kMostMatrices = 16;
LOWBIT_API Status linears_shape(const TensorView& x, const int64_t* out_features, int64_t count, Shape* out);
LOWBIT_API Status linears(const TensorView& x, const TensorView* packed, const int64_t* out_features, int64_t count,
                          const TensorView& out, const Parallel& parallel);

// Multiplies rows by the matrices of experts. packed [experts, bytes] uint8: each row is one packed matrix of n = out_features
// rows and k inputs, all with the same group size and the format of the first. x [..., k]; experts [..., e] int64: the e
// experts of each row of x; both with any strides. out [..., e, n] of x's type has the bits of linear() for each expert. Only
// the chosen experts are read.
LOWBIT_API Status linear_experts_shape(const TensorView& x, const TensorView& experts, int64_t out_features, Shape* out);
LOWBIT_API Status linear_experts(const TensorView& x, const TensorView& packed, const TensorView& experts,
                                 int64_t out_features, const TensorView& out, const Parallel& parallel);

// indices [...] int32 or int64, any strides;  out [..., embedding_dim] float32, bfloat16 or float16.
LOWBIT_API Status embedding_shape(const TensorView& indices, int64_t embedding_dim, Shape* out);
LOWBIT_API Status embedding(const TensorView& indices, const TensorView& packed, int64_t embedding_dim,
                            const TensorView& out, const Parallel& parallel);

// How scores are converted to weights.
struct Scores {
  double scale;                       // of the products of q and k
  int64_t window = 0;                 // a query sees its own position and window - 1 before it; 0: all earlier positions
  double softcap = 0.0;               // scores become softcap * tanh(score / softcap); 0: unchanged
  const TensorView* sinks = nullptr;  // [heads] of q's type: one additional score per head, without a value; or null
};

// q [batch, heads, positions, width], k [batch, kv_heads, positions, width] and v [batch, kv_heads, positions,
// value_width] of one type, any strides. The caches are contiguous [batch, kv_heads, max_length, width or value_width] of
// float32, bfloat16 or float16, independent of the type of q, or int8. With int8 codes the last dimension is 4 larger: a head
// has the codes of max_length positions and then their scales in float32. With 4-bit codes it is width / 2 + 4, and width a
// multiple of 32; keys and values, or only values, may have 4-bit codes. max_length is a multiple of 16. start int64, one
// element: the number of positions in the caches. Writes k and v after them. out [batch, positions, heads, value_width]: each
// query sees all positions up to its own. The layout of k_cache: AttentionArgs::keys.
LOWBIT_API Status attention_shape(const TensorView& q, const TensorView& v, Shape* out);
LOWBIT_API Status attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& k_cache,
                            const TensorView& v_cache, const TensorView& start, const Scores& scores,
                            const TensorView& out, const Parallel& parallel);

// Attention with a window, over caches that hold only the last positions of a text: max_length is at least window + 512 + 16,
// whatever the length of the text. held: contiguous int64 [2], updated; the caches hold positions held[0] to held[1] - 1. A
// text continues at held[1], at an earlier position whose window is held, or at 0. All else, and the bits, as in attention().
LOWBIT_API Status window_attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& k_cache,
                                   const TensorView& v_cache, const TensorView& held, const TensorView& start,
                                   const Scores& scores, const TensorView& out, const Parallel& parallel);

// Attention without caches. q [batch, heads, positions, width], k [batch, kv_heads, length, width] and v [batch, kv_heads,
// length, value_width] of one type, consecutive numbers in the last dimension. bounds: null if each query sees all keys;
// otherwise contiguous int32 [batch, positions, 3], with as many keys as queries. Its numbers for a position: 1, or 0 for
// padding; the first position that it sees as a query; one past the last position that it sees. The last two must not decrease.
// Padding is not seen. out [batch, positions, heads, value_width] is 0 for padding and for queries that see nothing. The bits
// of a text do not depend on padding or on other texts; those of a query are those of attention() over the keys that it sees.
// attention_shape() gives the shape of out.
LOWBIT_API Status masked_attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView* bounds,
                                   double scale, double softcap, const TensorView& out, const Parallel& parallel);

// out = f(x), or f(x) * gate. `activation` is the number of an Activation of kernels/elementwise.h. x and gate: equidistant
// rows, consecutive numbers in the last dimension; out contiguous.
LOWBIT_API Status activate(const TensorView& x, const TensorView* gate, int64_t activation, const TensorView& out,
                           const Parallel& parallel);

// RMSNorm over the last dimension; kernels/elementwise.h has the formula. x as above; weight [width] of x's type, or null.
LOWBIT_API Status rms_norm(const TensorView& x, const TensorView* weight, double epsilon, double weight_offset,
                           const TensorView& out, const Parallel& parallel);

// LayerNorm over the last dimension, likewise; weight and bias [width] of x's type, or null.
LOWBIT_API Status layer_norm(const TensorView& x, const TensorView* weight, const TensorView* bias, double epsilon,
                             const TensorView& out, const Parallel& parallel);

// Rotary position embedding of queries and keys; kernels/elementwise.h has the formula. q [batch, heads, positions, width] and
// k [batch, kv_heads, positions, width of k] of one type, or with heads_dim 2 [batch, positions, heads, width]; consecutive
// numbers in the last dimension. cos and sin [batch or 1, positions, rotary] of q's type, or of float32 with round_once,
// likewise. `layout` is the number of a RotaryLayout. q_out and k_out like q and k, contiguous.
LOWBIT_API Status rotary(const TensorView& q, const TensorView& k, const TensorView& cos, const TensorView& sin,
                         int64_t heads_dim, int64_t layout, bool round_once, const TensorView& q_out, const TensorView& k_out,
                         const Parallel& parallel);

// How states are updated and read; kernels/recurrence.h has the formulas.
struct DeltaRule {
  double scale;               // of q
  double norm_epsilon = 0.0;  // q and k are divided by their norms; 0: they are not
};

inline constexpr int64_t kMostStateWidth = 1024;

// Linear attention with a state of fixed size. q and k [batch, positions, key_heads, width], v [batch, positions, heads,
// value_width] of one type; head h belongs to head h / (heads / key_heads) of q and k. decay [batch, positions, heads] or
// [..., heads, width] and beta [batch, positions, heads], or null, of float32. state: contiguous float32 [batch, heads,
// ceil(value_width / 16), width, 16]; updated. start int64, one element: the number of earlier positions; 0: the state counts
// as zeros. out like v, contiguous. All have consecutive numbers in the last dimension.
LOWBIT_API Status linear_attention_shape(const TensorView& q, const TensorView& v, Shape* out);
LOWBIT_API Status linear_attention(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& decay,
                                   const TensorView* beta, const TensorView& state, const TensorView& start,
                                   const DeltaRule& rule, const TensorView& out, const Parallel& parallel);

// A causal convolution of each channel. x [batch, positions, channels], weight [taps, channels], bias [channels] or null,
// state [batch, taps - 1, channels]: the inputs before x, the oldest first; updated. out like x; all of one type. start as
// above. silu: out becomes out / (1 + exp(-out)).
LOWBIT_API Status short_conv(const TensorView& x, const TensorView& weight, const TensorView* bias, const TensorView& state,
                             const TensorView& start, bool silu, const TensorView& out, const Parallel& parallel);

// codes [n, k] uint8, scales and mins [n, groups] float32, bias [n] float32, levels [2^bits] int8, all contiguous; mins, bias
// and levels may be null. group_size 0: one group per row. rotated_inputs: inputs of a rotated block, 16 to 128, if the weights
// are those of rotated inputs (kernels/ukernel.h), otherwise 0. out: uint8 [packed_bytes].
LOWBIT_API Status pack_shape(const TensorView& codes, int bits, int64_t group_size, bool affine, bool has_bias,
                             Layout* layout, const TensorView* levels = nullptr, int64_t rotated_inputs = 0);
LOWBIT_API Status pack(const TensorView& codes, const TensorView& scales, const TensorView* mins, const TensorView* bias,
                       int bits, int64_t group_size, const TensorView& out, const Parallel& parallel,
                       const TensorView* levels = nullptr, int64_t rotated_inputs = 0);

// Sets activations of 8 bits, or of 16: two int8 planes (kernels/ukernel.h). Changes only the header of `packed`.
LOWBIT_API Status set_activation_bits(const TensorView& packed, int64_t bits);

// The inverse of pack(); verifies the checksum first. The outputs have the shapes of pack's inputs; mins and bias are empty if
// the matrix has none. The header has the levels, the rotation and the activation bits.
LOWBIT_API Status unpack(const TensorView& packed, const TensorView& codes, const TensorView& scales,
                         const TensorView& mins, const TensorView& bias, const Parallel& parallel);

// The same weights in another packed format: "panel16" or one of a loaded library. out: uint8 [total_bytes].
LOWBIT_API Status repack_shape(const TensorView& packed, const char* format, Layout* layout);
LOWBIT_API Status repack(const TensorView& packed, const char* format, const TensorView& out, const Parallel& parallel);

// Rows (dim 0) or inputs (dim 1) begin to end - 1 of `count` packed matrices, which are joined below each other (dim 0) or side
// by side (dim 1): a slice of one matrix, all of several, or both. Codes, scales and row scales are unchanged; row sums and
// checksums are new. All matrices have the same format, width, mapping, levels, group size and activation bits, and the same
// number of inputs (dim 0) or rows (dim 1). Those in a vendor's format are unpacked and packed again, if its library can.
// Inputs can only be cut between groups.
// Side by side, only the first matrix may have a bias, and a slice without the first input has none: so the sum of the slices'
// results contains the bias once.
// Checksums are verified first.  out: uint8 [total_bytes].
LOWBIT_API Status splice_shape(const TensorView* packed, int64_t count, int dim, int64_t begin, int64_t end,
                               Layout* layout);
LOWBIT_API Status splice(const TensorView* packed, int64_t count, int dim, int64_t begin, int64_t end,
                         const TensorView& out, const Parallel& parallel);

// weight [n, k] float32, bfloat16 or float16, inputs contiguous;  codes [n, k] uint8, scales and mins [n, groups] float32
// (mins [0, 0] if symmetric): the inputs of pack().
LOWBIT_API Status quantize_shape(const TensorView& weight, int bits, int64_t group_size, bool affine, Layout* layout);
LOWBIT_API Status quantize(const TensorView& weight, int bits, int64_t group_size, bool affine, bool search,
                           const TensorView& codes, const TensorView& scales, const TensorView& mins,
                           const Parallel& parallel);

// Scales and minimums by weighted search (kernels/rounding/weighted_search.h).  weights [m, inputs] and importance [p, inputs]
// float32, m a multiple of p: row i % p of the importance belongs to row i of the weights;  scales [m] float32, mins [m]
// (symmetric [0]).
LOWBIT_API Status search_groups(const TensorView& weights, const TensorView& importance, int bits, bool affine,
                                const TensorView& scales, const TensorView& mins, const Parallel& parallel);

// Rounding in order with error feedback (kernels/rounding/error_feedback.h), all float32.  weights [inputs, rows];  factor
// and pull [inputs, inputs];  scales and mins [inputs, rows] or [1, rows];  levels [2^bits], ascending;  values, out_levels and
// errors [inputs, rows]. pull, mins and levels may be null.
LOWBIT_API Status error_feedback(const TensorView& weights, const TensorView& factor, const TensorView* pull,
                                 const TensorView& scales, const TensorView* mins, const TensorView* levels, int bits,
                                 const TensorView& values, const TensorView& out_levels, const TensorView& errors,
                                 const Parallel& parallel);

// Reads the header of a packed tensor, the first step of every operator.
LOWBIT_API Status read_packed(const TensorView& packed, Layout* layout);

}  // namespace lowbit
