// embedding_w<b>_avx512vnni: dequantizes one row of a packed matrix, a block of 32 inputs at a time. Formula: ukernel.h.
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
  for_each_half<Bits, Affine>(args, [&](int64_t first, __m128i codes, float scale, float min)
                                        LOWBIT_INLINE {
    const __m512 scales = _mm512_set1_ps(scale);
    __m512i level = _mm512_cvtepu8_epi32(codes);
    __m512 value;
    if constexpr (Affine) {
      value = _mm512_fmadd_ps(scales, _mm512_cvtepi32_ps(level), _mm512_set1_ps(min));
    } else {
      if constexpr (level_factor(Bits) == 2) level = _mm512_slli_epi32(level, 1);
      level = _mm512_sub_epi32(level, _mm512_set1_epi32(level_offset(Bits)));
      value = _mm512_mul_ps(scales, _mm512_cvtepi32_ps(level));
    }
    store16(args.out, args.out_dtype, first, value, first_lanes(args.layout.k - first));
  });
}

template <int Bits>
void run(const EmbeddingArgs& args) {
  with_mapping<Bits>(args.layout.mapping, [&](auto bits, auto affine) { read_row<bits(), affine()>(args); });
}

#define KERNEL(bits) \
  with_levels<EmbeddingKernel>({"embedding_w" #bits "_avx512vnni", kAvx512Vnni, Format::panel16, bits, run<bits>})
constexpr EmbeddingKernel kKernels[] = {LOWBIT_EACH_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<EmbeddingKernel> kEmbeddingAvx512Vnni;
const Table<EmbeddingKernel> kEmbeddingAvx512Vnni{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
