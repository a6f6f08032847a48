// linear_a8w<b>_{1,2}x16_avxvnni: int8 activations times b-bit weights, 16 output rows to two registers.
//
//   line (64 bytes): row 0: 4 codes | row 1: 4 codes | ... | row 15: 4 codes       two ymm registers
//   vpdpbusd sums, codes, broadcast of 4 activations: 16 rows x 4 products, one int32 lane per row, no horizontal adds
//
// Nothing saturates and every width goes the same way. Two rows of activations have 8 accumulators, to hide the latency of
// vpdpbusd (5 cycles, up to 2 per cycle), and 4 rows have as many without splitting. One row has 4: a segment is short, and
// the products of the next one do not wait.

#include "../bits/widths.h"
#include "linear_avx2.h"

namespace lowbit {
namespace {

constexpr int split_for(int rows) { return rows <= 2 ? 2 : 1; }

template <int Bits, bool Affine, bool Halves, int Rows>
struct Sums {
  static constexpr int kBits = Bits, kRows = Rows, kSplit = split_for(Rows);
  static constexpr bool kAffine = Affine, kHalves = Halves, kOffsetLate = false, kInterleaved = false, kUnpacked = false;
  using Input = int8_t;
  Levels<Bits> levels;
  Sums32 sum[Rows][2][kSplit];  // of the two halves of a line

  LOWBIT_INLINE void begin(const Layout& layout, Sums32*) { levels.load(layout.levels); }

  LOWBIT_INLINE void start(int i, const int32_t* a_sum) {
    __m256i first = _mm256_setzero_si256();
    if constexpr (!Affine) first = _mm256_sub_epi32(first, offset<Bits>(a_sum));
    for (auto& half : sum[i]) {
      for (int s = 0; s < kSplit; ++s) half[s] = s == 0 ? reinterpret_cast<Sums32>(first) : Sums32{};
    }
  }

  LOWBIT_INLINE void next_block() {}

  LOWBIT_INLINE void end(Sums32 (&totals)[Rows][2]) const {
    for (int i = 0; i < Rows; ++i) {
      for (int h = 0; h < 2; ++h) {
        totals[i][h] = sum[i][h][0];
        for (int s = 1; s < kSplit; ++s) totals[i][h] += sum[i][h][s];
      }
    }
  }

  template <int First, int Lines>
  LOWBIT_INLINE void add(const uint8_t* block, const int8_t* const (&a)[Rows]) {
    [&]<int... I>(std::integer_sequence<int, I...>) LOWBIT_INLINE {
      (add_line<First + I>(block, a), ...);
    }(std::make_integer_sequence<int, Lines>());
  }

 private:
  template <int J>
  LOWBIT_INLINE void add_line(const uint8_t* block, const int8_t* const (&a)[Rows]) {
    const __m256i codes[2] = {read_line<Bits, Affine, J>(block, levels),
                              read_line<Bits, Affine, J>(block + kLineBytes / 2, levels)};
    for (int i = 0; i < Rows; ++i) {
      const __m256i a4 = broadcast4(a[i] + 4 * J);
      for (int h = 0; h < 2; ++h) {
        Sums32& to = sum[i][h][J % kSplit];
        to = reinterpret_cast<Sums32>(_mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(to), codes[h], a4));
      }
    }
  }
};

#define ROW(bits, m, most_rows) \
  with_levels<LinearKernel>(     \
      {"linear_a8w" #bits "_" #m "x16_avxvnni", kAvxVnni, Format::panel16, bits, m, 16, run<Sums, bits, most_rows>})
constexpr LinearKernel kRows[] = {LOWBIT_EACH_WIDTH(ROW, 2, 4), LOWBIT_EACH_WIDTH(ROW, 1, 1)};
#undef ROW

}  // namespace

extern const Table<LinearKernel> kLinearAvxVnni;
const Table<LinearKernel> kLinearAvxVnni{kRows, sizeof kRows / sizeof kRows[0]};

}  // namespace lowbit
