// embedding_w<b>_avx2: dequantises one row of a packed matrix, a block of 32 inputs at a time. Formula: ukernel.h.
//
// bits/read_row_avx2.h gives the 32 codes of a block in order. They become floats 16 at a time, because 16 inputs share
// a group; codes and levels are small integers, exact in float32.

#include "../bits/read_row_avx2.h"
#include "../bits/simd_avx2.h"
#include "../bits/widths.h"
#include "../ukernel.h"

namespace lowbit {
namespace {

template <int Bits, bool Affine>
[[gnu::always_inline]] inline __m256 dequantize(__m128i codes, __m256 scale, __m256 min) {
  __m256i level = _mm256_cvtepu8_epi32(codes);
  if constexpr (Affine) return _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(level), min);
  if constexpr (level_factor(Bits) == 2) level = _mm256_add_epi32(level, level);
  level = _mm256_sub_epi32(level, _mm256_set1_epi32(level_offset(Bits)));
  return _mm256_mul_ps(scale, _mm256_cvtepi32_ps(level));
}

template <int Bits, bool Affine>
void read_row(const EmbeddingArgs& args) {
  const Layout& layout = args.layout;
  const uint8_t* panel = args.panels + (args.row / kPanelRows) * layout.panel_bytes;
  const int64_t r = args.row % kPanelRows;
  const float row_scale = load_as_f32(panel + layout.head_offset, DType::f32, r);
  const int64_t group_inputs = layout.group_inputs();
  int64_t group = 0, group_end = 0;
  __m256 scale = _mm256_setzero_ps(), min = _mm256_setzero_ps();

  const auto half = [&](int64_t first, __m128i codes) __attribute__((always_inline)) {
    if (first >= layout.k) return;
    if (first == group_end) {
      const uint8_t* scales = panel + layout.scales_offset(group++);
      scale = _mm256_set1_ps(row_scale * load_as_f32(scales, DType::f16, r));
      if constexpr (Affine) min = _mm256_set1_ps(row_scale * load_as_f32(scales, DType::f16, kPanelRows + r));
      group_end += group_inputs;
    }
    const Float16 values{{dequantize<Bits, Affine>(codes, scale, min),
                          dequantize<Bits, Affine>(_mm_srli_si128(codes, 8), scale, min)}};
    store_first(args.out, args.out_dtype, first, values, layout.k - first);
  };

  for (int64_t b = 0; b < layout.blocks; ++b) {
    // As layout.block_offset(b), without its division.
    const int64_t ended = group_end <= b * kBlockInputs ? group : group - 1;
    const uint8_t* block = panel + b * layout.block_bytes + ended * layout.group_bytes;
    const __m256i codes = read_block<Bits>(block, r);
    half(b * kBlockInputs, _mm256_castsi256_si128(codes));
    half(b * kBlockInputs + kHalfInputs, _mm256_extracti128_si256(codes, 1));
  }
}

template <int Bits>
void run(const EmbeddingArgs& args) {
  args.layout.mapping == Mapping::affine ? read_row<Bits, true>(args) : read_row<Bits, false>(args);
}

#define ROW(bits) {"embedding_w" #bits "_avx2", kAvx2, Format::panel16, bits, run<bits>}
constexpr EmbeddingKernel kRows[] = {LOWBIT_EACH_WIDTH(ROW)};
#undef ROW

}  // namespace

extern const Table<EmbeddingKernel> kEmbeddingAvx2;
const Table<EmbeddingKernel> kEmbeddingAvx2{kRows, sizeof kRows / sizeof kRows[0]};

}  // namespace lowbit
