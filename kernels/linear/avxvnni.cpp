// linear_a8w<b>_{1,2}x16_avxvnni: int8 activations times b-bit weights by vpdpbusd, which takes codes as unsigned bytes.

#include "../bits/widths.h"
#include "sums_vnni256.h"

namespace lowbit {
namespace {

template <int Bits, bool Affine, int Rows>
struct Products {
  using Codes = __m256i;
  Levels<Bits> levels;

  LOWBIT_INLINE void begin(const Layout& layout) { levels.load(layout.levels); }

  LOWBIT_INLINE __m256i start(const int32_t* a_sum) const {
    const __m256i zero = _mm256_setzero_si256();
    return Affine ? zero : _mm256_sub_epi32(zero, offset<Bits>(a_sum));
  }

  static constexpr int32_t start_factor(bool affine) { return affine ? 0 : -level_offset(Bits); }

  template <int J>
  LOWBIT_INLINE __m256i read(const uint8_t* half) const {
    return read_line<Bits, Affine, J>(half, levels);
  }

  LOWBIT_INLINE void add(Sums32& sum, __m256i codes, __m256i a4) const {
    sum = reinterpret_cast<Sums32>(_mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sum), codes, a4));
  }
};

template <int Bits, bool Affine, bool Halves, int Rows>
using Sums = VnniSums<Products, Bits, Affine, Halves, Rows>;

template <int Bits>
void run_row(const LinearArgs& args) {
  run_one<Sums, Bits>(args);
}

template <int Bits>
void run_rows(const LinearArgs& args) {
  run_many<Sums, Bits>(args, run_row<Bits>);
}

#define KERNEL(bits, m, run)        \
  with_levels<LinearKernel>( \
      {"linear_a8w" #bits "_" #m "x16_avxvnni", kAvxVnni, Format::panel16, bits, m, 16, run<bits>})
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_WIDTH(KERNEL, 2, run_rows), LOWBIT_EACH_WIDTH(KERNEL, 1, run_row)};
#undef KERNEL

}  // namespace

extern const Table<LinearKernel> kLinearAvxVnni;
const Table<LinearKernel> kLinearAvxVnni{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
