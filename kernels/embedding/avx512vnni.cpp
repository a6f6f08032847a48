// embedding_w<b>_avx512vnni: dequantises one row of a packed matrix, a block of 32 inputs at a time. Formula: ukernel.h.
//
// bits/read_row_avx2.h gives the 32 codes of a block in order; they become floats 16 at a time.

#include "../bits/read_row_avx2.h"
#include "../bits/simd_avx512.h"
#include "../bits/widths.h"
#include "../ukernel.h"

namespace lowbit {
namespace {

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
constexpr EmbeddingKernel kRows[] = {LOWBIT_EACH_WIDTH(ROW)};
#undef ROW

}  // namespace

extern const Table<EmbeddingKernel> kEmbeddingAvx512Vnni;
const Table<EmbeddingKernel> kEmbeddingAvx512Vnni{kRows, sizeof kRows / sizeof kRows[0]};

}  // namespace lowbit
