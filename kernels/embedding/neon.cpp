// embedding_w<b>_neon: dequantizes one row of a packed matrix, a block of 32 inputs at a time. Formula: ukernel.h.
//
//   row r of a block: 4 bytes (one word) in each of its b packed lines, at byte 4 r, 64 bytes apart
//   tbl spreads the words over two registers: bytes 4 j to 4 j + 3 get the word that holds the codes of unpacked line j
//
// The 32 codes then come out in order. The table of bits/codec.h determines the word for each byte and the shift of its bits,
// once per bit run: one run for most widths, up to 2 for 3 and 5 bits, 3 for 6, 7 for 7 (one line only). ushl shifts every
// byte by its own signed count, so one shift moves a field to its final position. Steps that do nothing for a width are removed
// by the compiler.
//
// Codes are widened to int32 (symmetric codes as levels, which fit a signed byte) and then to float32, exactly. 16 inputs at a
// time, because they share one group. One row at a time: most time is spent on fetching cache lines, of which the row's bytes
// are a small part.

#include <arm_neon.h>

#include "../bits/unpack_neon.h"
#include "../bits/widths.h"
#include "../ukernel.h"

namespace lowbit {
namespace {

// One bit run of the 16 codes of a half block. A byte without this run has an empty mask.
struct ByteRun {
  uint8_t word[16] = {};  // index of its byte among the words of the row
  int8_t shift[16] = {};  // to the left if positive
  uint8_t mask[16] = {};  // after the shift
  bool any = false, shifts = false;
};

template <int Bits>
struct ByteRuns {
  ByteRun run[2][7] = {};

  constexpr ByteRuns() {
    for (int p = 0; p < kBlockInputs; ++p) {
      const CodePlacement where = placement(Bits, p / 4);
      for (int i = 0; i < where.count; ++i) {
        const BitRun bits = where.run[i];
        ByteRun& run_i = run[p / 16][i];
        run_i.word[p % 16] = static_cast<uint8_t>(4 * bits.line + p % 4);
        run_i.shift[p % 16] = static_cast<int8_t>(bits.code_bit - bits.line_bit);
        run_i.mask[p % 16] = static_cast<uint8_t>(((1u << bits.length) - 1u) << bits.code_bit);
        run_i.any = true;
        run_i.shifts |= bits.code_bit != bits.line_bit;
      }
    }
  }
};

template <int Bits>
constexpr ByteRuns<Bits> kRuns{};

// Loads the row's words of up to eight packed lines.
template <int Bits>
LOWBIT_INLINE inline uint8x16x2_t load_words(const uint8_t* at) {
  uint32_t word[8] = {};
  for (int i = 0; i < Bits; ++i) std::memcpy(&word[i], at + i * kLineBytes, 4);
  const auto four = [&](int i) LOWBIT_INLINE {
    uint32x4_t v = vdupq_n_u32(word[i]);
    v = vsetq_lane_u32(word[i + 1], v, 1);
    v = vsetq_lane_u32(word[i + 2], v, 2);
    return vreinterpretq_u8_u32(vsetq_lane_u32(word[i + 3], v, 3));
  };
  uint8x16x2_t words;
  words.val[0] = four(0);
  words.val[1] = four(4);
  return words;
}

template <int Bits, int Half, int Run>
LOWBIT_INLINE inline uint8x16_t read_run(const uint8x16x2_t& words) {
  constexpr const ByteRun& run = kRuns<Bits>.run[Half][Run];
  const uint8x16_t index = vld1q_u8(run.word);
  uint8x16_t bytes = 4 * Bits <= 16 ? vqtbl1q_u8(words.val[0], index) : vqtbl2q_u8(words, index);
  if constexpr (run.shifts) bytes = vshlq_u8(bytes, vld1q_s8(run.shift));
  return vandq_u8(bytes, vld1q_u8(run.mask));
}

// The stored codes of half a block (at 8 bits, code - 128).
template <int Bits, int Half, int Run = 0>
LOWBIT_INLINE inline uint8x16_t read_half(const uint8x16x2_t& words) {
  const uint8x16_t codes = read_run<Bits, Half, Run>(words);
  if constexpr (Run + 1 < 7) {
    if constexpr (kRuns<Bits>.run[Half][Run + 1].any) return vorrq_u8(codes, read_half<Bits, Half, Run + 1>(words));
  }
  return codes;
}

template <int Bits>
LOWBIT_INLINE inline int8x16_t levels(uint8x16_t stored, int8x16_t table) {
  const int8x16_t codes = vreinterpretq_s8_u8(stored);
  if constexpr (is_by_table(Bits)) return vqtbl1q_s8(table, stored);
  if constexpr (Bits == 8) return codes;
  const int8x16_t scaled = level_factor(Bits) == 2 ? vaddq_s8(codes, codes) : codes;
  return vsubq_s8(scaled, vdupq_n_s8(static_cast<int8_t>(level_offset(Bits))));
}

template <int Bits, bool Affine>
LOWBIT_INLINE inline void dequantize(uint8x16_t stored, int8x16_t table, float scale, float min, float32x4_t (&value)[4]) {
  if constexpr (Affine) {
    const uint8x16_t codes = Bits == 8 ? veorq_u8(stored, vdupq_n_u8(stored_flip(Bits))) : stored;
    const uint16x8_t half[2] = {vmovl_u8(vget_low_u8(codes)), vmovl_high_u8(codes)};
    for (int q = 0; q < 4; ++q) {
      const uint32x4_t code = q % 2 == 0 ? vmovl_u16(vget_low_u16(half[q / 2])) : vmovl_high_u16(half[q / 2]);
      value[q] = vfmaq_n_f32(vdupq_n_f32(min), vcvtq_f32_u32(code), scale);
    }
  } else {
    const int8x16_t level = levels<Bits>(stored, table);
    const int16x8_t half[2] = {vmovl_s8(vget_low_s8(level)), vmovl_high_s8(level)};
    for (int q = 0; q < 4; ++q) {
      const int32x4_t wide = q % 2 == 0 ? vmovl_s16(vget_low_s16(half[q / 2])) : vmovl_high_s16(half[q / 2]);
      value[q] = vmulq_n_f32(vcvtq_f32_s32(wide), scale);
    }
  }
}

LOWBIT_INLINE inline float load_scale(const uint8_t* at) {
  uint16_t half;
  std::memcpy(&half, at, 2);
  return vgetq_lane_f32(f32_from_f16x4(vdup_n_u16(half)), 0);
}

template <int Bits, bool Affine, DType T>
void read_row(const EmbeddingArgs& args) {
  const Layout& layout = args.layout;
  const uint8_t* panel = args.panels + (args.row / kPanelRows) * layout.panel_bytes;
  const int64_t r = args.row % kPanelRows;
  const float row_scale = load_as_f32(panel + layout.head_offset, DType::f32, r);
  const int64_t group_inputs = layout.group_inputs();
  int64_t group = -1, group_end = 0;
  float scale = 0.0f, min = 0.0f;
  const int8x16_t table = vld1q_s8(layout.levels);

  const auto half = [&](int64_t first, uint8x16_t stored) LOWBIT_INLINE {
    if (first == group_end) {
      const uint8_t* scales = panel + layout.scales_offset(++group) + 2 * r;
      scale = row_scale * load_scale(scales);
      if constexpr (Affine) min = row_scale * load_scale(scales + 2 * kPanelRows);
      group_end += group_inputs;
    }
    float32x4_t value[4];
    dequantize<Bits, Affine>(stored, table, scale, min, value);
    store_first<T>(args.out, first, value, layout.k - first);
  };

  for (int64_t block = 0; block < layout.blocks; ++block) {
    const int64_t first = block * kBlockInputs;
    const uint8x16x2_t words = load_words<code_bits(Bits)>(panel + layout.block_offset(block) + 4 * r);
    half(first, read_half<code_bits(Bits), 0>(words));
    if (first + kHalfInputs < layout.k) half(first + kHalfInputs, read_half<code_bits(Bits), 1>(words));
  }
}

template <int Bits, DType T>
void read_row(const EmbeddingArgs& args) {
  with_mapping<Bits>(args.layout.mapping, [&](auto bits, auto affine) { read_row<bits(), affine(), T>(args); });
}

template <int Bits>
void run(const EmbeddingArgs& args) {
  switch (args.out_dtype) {
    case DType::f32: return read_row<Bits, DType::f32>(args);
    case DType::bf16: return read_row<Bits, DType::bf16>(args);
    case DType::f16: return read_row<Bits, DType::f16>(args);
  }
}

#define KERNEL(bits) \
  with_levels<EmbeddingKernel>({"embedding_w" #bits "_neon", kNeon, Format::panel16, bits, run<bits>})
constexpr EmbeddingKernel kKernels[] = {LOWBIT_EACH_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<EmbeddingKernel> kEmbeddingNeon;
const Table<EmbeddingKernel> kEmbeddingNeon{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
