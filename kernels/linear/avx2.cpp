// linear_a8w<b>_{1,2}x16_avx2: int8 activations times b-bit weights, 16 output rows to two registers, without VNNI.
//
//   line (64 bytes): row 0: 4 codes | row 1: 4 codes | ... | row 15: 4 codes       two ymm registers
//   vpmaddubsw codes, broadcast of 4 activations: 16 rows x 2 sums of 2 products, in int16
//   vpaddw     several of these
//   vpmaddwd   with ones: 16 rows x 1 sum, in int32
//
// vpmaddubsw saturates, so codes must be at most 127 (2 * 127 * -128 = -32512), and vpaddw wraps: lines are added while
// 2 * 128 * (2^b - 1) * lines <= 32768. 8-bit codes go as two nibbles, the upper one with 16 in place of the ones; so
// do levels + 128, each nibble from a table of its own.
//   bits           1    2    3    4    5    6    7    8
//   lines        128   42   18    8    4    2    1    8
//   blocks        16    5    2    1                   1
//
// 4 rows of activations: 8 sums in int16 stay in registers, with a line of weights (2) and what unpacking needs; a line
// is unpacked once for all rows and never stored. The int32 totals and the float accumulators are touched once per run
// or group, and may lie on the stack. 5 or 6 rows would leave no registers for products and masks.

#include "../bits/widths.h"
#include "linear_avx2.h"

namespace lowbit {
namespace {

template <int Bits, int Rows, bool Halves>
struct Sums : Totals<Bits, Rows, 1> {
  static constexpr bool kHalves = Halves;
  static constexpr bool kNibbles = Bits == 8 || is_by_table(Bits);
  static constexpr int kMaxCode = (1 << (kNibbles ? 4 : Bits)) - 1;
  static constexpr int kLines = 32768 / (2 * 128 * kMaxCode);  // that int16 holds
  static constexpr bool kLongRuns = !Halves && kLines >= 2 * kBlockLines;
  static constexpr int kRunBlocks = kLongRuns ? kLines / kBlockLines : 0;
  static constexpr int kMostLines = Halves ? kBlockLines / 2 : kBlockLines;
  static constexpr int kRun = kLines < kMostLines ? kLines : kMostLines;  // of a short run
  static_assert(kMaxCode <= 127 && kMostLines % kRun == 0);
  static_assert(2 * 128 * kMaxCode * (kLongRuns ? kRunBlocks * kBlockLines : kRun) <= 32768);

  __m256i pairs[Rows][2];  // int16 sums of a run

  [[gnu::always_inline]] void begin_run() {
    if constexpr (!kLongRuns) return;
    for (auto& row : pairs) row[0] = row[1] = _mm256_setzero_si256();
  }

  [[gnu::always_inline]] void end_run() {
    if constexpr (kLongRuns) widen(1);
  }

  template <int First, int Lines>
  [[gnu::always_inline]] void add(const uint8_t* block, const int8_t* a, int64_t stride) {
    [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
      (add_line<First + I, false>(block, a, stride), ...);
      if constexpr (kNibbles) (add_line<First + I, true>(block, a, stride), ...);
    }(std::make_integer_sequence<int, Lines>());
  }

 private:
  template <bool Upper>
  [[gnu::always_inline]] static __m256i nibble(__m256i bytes) {
    if constexpr (Upper) bytes = shift_right<4>(bytes);
    return _mm256_and_si256(bytes, byte_mask(0x0f));
  }

  template <int J, bool Upper>
  [[gnu::always_inline]] __m256i line(const uint8_t* packed) const {
    const __m256i codes = unpack_line<code_bits(Bits), J>(packed);
    // The nibbles of the table do not change, so that they are taken before the loops.
    if constexpr (is_by_table(Bits)) return _mm256_shuffle_epi8(nibble<Upper>(this->levels.bytes), codes);
    return kNibbles ? nibble<Upper>(codes) : codes;
  }

  template <int J, bool Upper>
  [[gnu::always_inline]] void add_line(const uint8_t* block, const int8_t* a, int64_t stride) {
    const __m256i codes[2] = {line<J, Upper>(block), line<J, Upper>(block + kLineBytes / 2)};
    for (int i = 0; i < Rows; ++i) {
      const __m256i a4 = broadcast4(a + i * stride + 4 * J);
      for (int h = 0; h < 2; ++h) {
        const __m256i products = _mm256_maddubs_epi16(codes[h], a4);
        const bool first = !kLongRuns && J % kRun == 0;
        pairs[i][h] = first ? products : _mm256_add_epi16(pairs[i][h], products);
      }
    }
    if constexpr (!kLongRuns && J % kRun == kRun - 1) widen(Upper ? 16 : 1);
  }

  [[gnu::always_inline]] void widen(int16_t factor) {
    for (int i = 0; i < Rows; ++i) {
      for (int h = 0; h < 2; ++h) {
        __m256i& total = this->total[i][h][0];
        total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs[i][h], _mm256_set1_epi16(factor)));
      }
    }
  }
};

#define ROW(bits, m, most_rows) \
  with_levels<LinearKernel>(     \
      {"linear_a8w" #bits "_" #m "x16_avx2", kAvx2, Format::panel16, bits, m, 16, run<Sums, bits, most_rows>})
constexpr LinearKernel kRows[] = {LOWBIT_EACH_WIDTH(ROW, 2, 4), LOWBIT_EACH_WIDTH(ROW, 1, 1)};
#undef ROW

}  // namespace

extern const Table<LinearKernel> kLinearAvx2;
const Table<LinearKernel> kLinearAvx2{kRows, sizeof kRows / sizeof kRows[0]};

}  // namespace lowbit
