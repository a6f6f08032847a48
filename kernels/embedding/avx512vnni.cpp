// embedding_w<b>_avx512vnni: dequantises one row of a packed matrix, a block of 32 inputs at a time. Formula: ukernel.h.
//
// A row has one 32-bit word (4 codes) in every packed line. Lane j of a 256-bit register collects the word of unpacked line j, so
// that the 32 codes of the block come out in order. Where each lane finds its bits is read off the table of bits/codec.h,
// one gather per bit run (1 for most widths, 2 for 3 and 5 bits, 3 for 6, 7 for 7).

#include <immintrin.h>

#include "../bits/simd_avx512.h"
#include "../ukernel.h"

namespace lowbit {
namespace {

// Run i of all eight lines. A lane whose line has fewer runs gets an empty mask and reads line 0.
struct LaneRun {
  alignas(32) uint32_t word[8] = {};  // index of the 32-bit word, from the block's start
  alignas(32) uint32_t right[8] = {}, mask[8] = {}, left[8] = {};
};

template <int Bits>
struct LaneRuns {
  int count = 0;
  LaneRun run[7] = {};

  constexpr LaneRuns() {
    for (int j = 0; j < 8; ++j) {
      const CodePlacement where = placement(Bits, j);
      if (where.count > count) count = where.count;
      for (int i = 0; i < where.count; ++i) {
        const BitRun bits = where.run[i];
        run[i].word[j] = bits.line * kLineBytes / 4u;
        run[i].right[j] = bits.line_bit;
        run[i].mask[j] = ((1u << bits.length) - 1u) * 0x01010101u;
        run[i].left[j] = bits.code_bit;
      }
    }
  }
};

[[gnu::always_inline]] inline __m256i load8(const uint32_t* values) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(values));
}

template <int Bits>
[[gnu::always_inline]] inline __m256i read_block(const uint8_t* block, int64_t r) {
  static constexpr LaneRuns<Bits> kRuns{};
  __m256i codes = _mm256_setzero_si256();
  for (int i = 0; i < kRuns.count; ++i) {
    const LaneRun& run = kRuns.run[i];
    __m256i words = _mm256_i32gather_epi32(reinterpret_cast<const int*>(block + 4 * r), load8(run.word), 4);
    words = _mm256_and_si256(_mm256_srlv_epi32(words, load8(run.right)), load8(run.mask));
    codes = _mm256_or_si256(codes, _mm256_sllv_epi32(words, load8(run.left)));
  }
  return _mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(stored_flip(Bits))));
}

template <int Bits, bool Affine>
void read_row(const EmbeddingArgs& args) {
  const Layout& layout = args.layout;
  const uint8_t* panel = args.panels + (args.row / kPanelRows) * layout.panel_bytes;
  const int64_t r = args.row % kPanelRows;
  const float row_scale = load_as_f32(panel + layout.head_offset, DType::f32, r);
  const int64_t group_inputs = layout.group_inputs();
  int64_t group = -1;
  __m512 scale = _mm512_setzero_ps(), min = _mm512_setzero_ps();

  // 16 inputs lie in one group.
  const auto half = [&](int64_t first, __m128i codes) __attribute__((always_inline)) {
    if (first >= layout.k) return;
    if (first == (group + 1) * group_inputs) {
      const uint8_t* scales = panel + layout.scales_offset(++group);
      scale = _mm512_set1_ps(row_scale * load_as_f32(scales, DType::f16, r));
      if constexpr (Affine) min = _mm512_set1_ps(row_scale * load_as_f32(scales, DType::f16, kPanelRows + r));
    }
    __m512i level = _mm512_cvtepu8_epi32(codes);
    __m512 value;
    if constexpr (Affine) {
      value = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(level), min);
    } else {
      if constexpr (level_factor(Bits) == 2) level = _mm512_slli_epi32(level, 1);
      level = _mm512_sub_epi32(level, _mm512_set1_epi32(level_offset(Bits)));
      value = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(level));
    }
    store16(args.out, args.out_dtype, first, value, first_lanes(layout.k - first));
  };

  for (int64_t b = 0; b < layout.blocks; ++b) {
    const __m256i codes = read_block<Bits>(panel + layout.block_offset(b), r);
    half(b * kBlockInputs, _mm256_castsi256_si128(codes));
    half(b * kBlockInputs + kHalfInputs, _mm256_extracti128_si256(codes, 1));
  }
}

template <int Bits>
void run(const EmbeddingArgs& args) {
  args.layout.mapping == Mapping::affine ? read_row<Bits, true>(args) : read_row<Bits, false>(args);
}

#define ROW(bits) {"embedding_w" #bits "_avx512vnni", kAvx512Vnni, Format::panel16, bits, run<bits>}
constexpr EmbeddingKernel kRows[] = {ROW(1), ROW(2), ROW(3), ROW(4), ROW(5), ROW(6), ROW(7), ROW(8)};
#undef ROW

}  // namespace

extern const Table<EmbeddingKernel> kEmbeddingAvx512Vnni;
const Table<EmbeddingKernel> kEmbeddingAvx512Vnni{kRows, sizeof kRows / sizeof kRows[0]};

}  // namespace lowbit
