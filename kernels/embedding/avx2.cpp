// embedding_w<b>_avx2: dequantizes one row of a packed matrix, a block of 32 inputs at a time. Formula: ukernel.h.
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
LOWBIT_INLINE inline __m256 dequantize(__m128i codes, __m256 scale, __m256 min) {
  __m256i level = _mm256_cvtepu8_epi32(codes);
  if constexpr (Affine) return _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(level), min);
  if constexpr (level_factor(Bits) == 2) level = _mm256_add_epi32(level, level);
  level = _mm256_sub_epi32(level, _mm256_set1_epi32(level_offset(Bits)));
  return _mm256_mul_ps(scale, _mm256_cvtepi32_ps(level));
}

template <int Bits, bool Affine>
void read_row(const EmbeddingArgs& args) {
  for_each_half<Bits, Affine>(args, [&](int64_t first, __m128i codes, float scale, float min)
                                        LOWBIT_INLINE {
    const __m256 scales = _mm256_set1_ps(scale), mins = _mm256_set1_ps(min);
    const Float16 values{{dequantize<Bits, Affine>(codes, scales, mins),
                          dequantize<Bits, Affine>(_mm_srli_si128(codes, 8), scales, mins)}};
    store_first(args.out, args.out_dtype, first, values, args.layout.k - first);
  });
}

template <int Bits>
void run(const EmbeddingArgs& args) {
  with_mapping<Bits>(args.layout.mapping, [&](auto bits, auto affine) { read_row<bits(), affine()>(args); });
}

#define KERNEL(bits) \
  with_levels<EmbeddingKernel>({"embedding_w" #bits "_avx2", kAvx2, Format::panel16, bits, run<bits>})
constexpr EmbeddingKernel kKernels[] = {LOWBIT_EACH_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<EmbeddingKernel> kEmbeddingAvx2;
const Table<EmbeddingKernel> kEmbeddingAvx2{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
