// The sums of the AVX2 kernels without VNNI: 16 output rows in two registers.
//
//   line (64 bytes): row 0: 4 codes | row 1: 4 codes | ... | row 15: 4 codes       two ymm registers
//   vpmaddubsw codes, broadcast of 4 activations: 16 rows x 2 sums of 2 products, in int16
//   vpaddw     adds several of these
//   vpmaddwd   with ones: 16 rows x 1 sum, in int32
//
// vpmaddubsw saturates, so codes must be at most 127 (2 * 127 * 127 = 32258). vpaddw wraps, so lines are added only while 2 *
// 127 * (2^b - 1) * lines < 32768. For one row of m, 8-bit codes are split into two nibbles, and the upper one is multiplied by
// 16 instead of 1. Levels + 128 are split too, with a table per nibble. For more rows both operands are widened to int16
// (wide_avx2.h). A segment has up to 16 lines.
//   bits           1    2    3    4    5    6    7    8
//   lines         64   43   18    8    4    2    1    8      (1 bit: codes are doubled)
//
// At 1 to 3 bits a whole segment is summed in int16. The sum starts at minus its offset, 2^(b-1) * A, half of it in each of two
// lanes. With q half the factor of the offset, a lane ends at sum(a * (code - q)) over its own inputs minus q * sum(a) over the
// other lane's. Its magnitude is at most 32 * 127 * (2^b - 1), so wrapping on the way is harmless. At 4 bits a whole block is
// summed in int16: the first block's sum is stored as int32, and the offset is subtracted at the segment's end.
//
// One row of 1 or 2 bits: codes stay at one of two bit positions, which have separate sums. So one shift serves two lines, and
// two lines need none. Several rows would need more registers for this than there are.
//
// 4 rows of activations: 8 int16 sums stay in registers, with a line of weights (2) and the registers for unpacking. A line is
// unpacked once for all rows and never stored (many rows of 6 or 7 bits: unpacked_avx2.h). int32 and float sums are updated
// once per run or segment, and may be in memory. 5 or 6 rows would leave no registers for products and masks.
#pragma once

#include "linear_avx2.h"

namespace lowbit {
namespace {

template <int Bits, bool Affine, bool Halves, int Rows>
struct Sums {
  static constexpr int kBits = Bits, kRows = Rows;
  static constexpr bool kAffine = Affine, kHalves = Halves, kInterleaved = false, kUnpacked = false;
  using Input = int8_t;
  static constexpr bool kNibbles = Bits == 8 || is_by_table(Bits);
  static constexpr int kMaxCode = Bits == 1 ? 2 : (1 << (kNibbles ? 4 : Bits)) - 1;
  static constexpr int kLines = 32767 / (2 * 127 * kMaxCode);  // lines that fit in int16
  static constexpr int kMostLines = Halves ? kBlockLines / 2 : kBlockLines;
  static constexpr bool kWholeSegments = kLines >= kSegmentInputs / 4;
  static constexpr int kPositions = Bits <= 2 && Rows == 1 ? 2 : 1;  // of codes, 0 and Bits
  static constexpr int kStarted = kPositions > 1 && Bits == 1 ? 1 : 0;  // the sum that holds the start value
  static constexpr bool kWholeBlocks = !kWholeSegments && !kNibbles && !Halves && kLines >= kBlockLines;
  static constexpr int kRun = kLines < kMostLines ? kLines : kMostLines;  // lines per run without kWholeSegments
  static constexpr bool kOffsetLate = kWholeBlocks && !(Affine && Rows > 1);
  static constexpr bool kStarts = true;
  static constexpr bool kAsks = asks_for_mins(Bits, Rows) && !kWholeBlocks;  // a late offset needs its own template
  static_assert(kMaxCode <= 127 && kMostLines % kRun == 0 && !(kAsks && Affine));

  Levels<Bits> levels;
  Sums16 pairs[kPositions][Rows][2];  // of the current run
  Sums32* sum;            // of the previous runs
  bool has_sum;           // kWholeBlocks: whether the current block is the second one

  LOWBIT_INLINE void begin(const Layout& layout, Sums32* memory) {
    levels.load(layout.levels);
    sum = memory;
    // Keeps the sums in memory, because they are updated only once per block.
    if constexpr (Rows > 2 && kRun == kMostLines) forget(sum);
  }

  static constexpr Starts starts(bool affine) {
    if (!kWholeSegments) return {affine ? 0 : -level_offset(Bits), Starts::word};
    return {affine ? 0 : Bits > 2 ? -(1 << (Bits - 2)) : -1, Bits == 1 ? Starts::lower : Starts::both};
  }

  LOWBIT_INLINE void start(int i, const int32_t* value) {
    __m256i first = _mm256_setzero_si256();
    if constexpr (Rows > 1) {
      if constexpr (!kWholeBlocks) first = broadcast4(value);
    } else if constexpr (!Affine && kWholeSegments) {
      first = half_offset(value);
    } else if constexpr (!Affine && !kWholeBlocks) {
      first = _mm256_sub_epi32(first, offset<Bits>(value));
    }
    for (int h = 0; h < 2; ++h) {
      if constexpr (kWholeSegments) {
        for (int at = 0; at < kPositions; ++at) pairs[at][i][h] = at == kStarted ? reinterpret_cast<Sums16>(first) : Sums16{};
      } else if constexpr (!kWholeBlocks) {
        sum[2 * i + h] = reinterpret_cast<Sums32>(first);
      }
    }
    has_sum = false;
  }

  LOWBIT_INLINE void next_block() {
    if constexpr (!kWholeBlocks) return;
    for (int i = 0; i < Rows; ++i) {
      for (int h = 0; h < 2; ++h) sum[2 * i + h] = widened(i, h, 1);
    }
    has_sum = true;
  }

  LOWBIT_INLINE void end(Sums32 (&totals)[Rows][2]) const {
    for (int i = 0; i < Rows; ++i) {
      for (int h = 0; h < 2; ++h) totals[i][h] = kWholeSegments || kWholeBlocks ? widened(i, h, 1) : sum[2 * i + h];
    }
    if (!kWholeBlocks || !has_sum) return;
    for (int i = 0; i < Rows; ++i) {
      for (int h = 0; h < 2; ++h) totals[i][h] += sum[2 * i + h];
    }
  }

  template <int First, int Lines>
  LOWBIT_INLINE void add(const uint8_t* block, const int8_t* const (&a)[Rows]) {
    [&]<int... I>(std::integer_sequence<int, I...>) LOWBIT_INLINE {
      (add_line<First + I, false>(block, a), ...);
      if constexpr (kNibbles) (add_line<First + I, true>(block, a), ...);
    }(std::make_integer_sequence<int, Lines>());
  }

 private:
  // Minus the offset, for kWholeSegments: half of it in each of two lanes, or at 1 bit all of it in one lane.
  LOWBIT_INLINE static __m256i half_offset(const int32_t* a_sum) {
    const __m256i sums = _mm256_slli_epi16(_mm256_set1_epi16(static_cast<int16_t>(*a_sum)), Bits > 2 ? Bits - 2 : 0);
    const __m256i zero = _mm256_setzero_si256(), half = _mm256_sub_epi16(zero, sums);
    return Bits == 1 ? _mm256_blend_epi16(half, zero, 0xaa) : half;
  }

  template <bool Upper>
  LOWBIT_INLINE static __m256i nibble(__m256i bytes) {
    if constexpr (Upper) bytes = shift_right<4>(bytes);
    return _mm256_and_si256(bytes, byte_mask(0x0f));
  }

  template <int J, bool Upper>
  LOWBIT_INLINE __m256i line(const uint8_t* packed) const {
    if constexpr (kPositions > 1) return unpack_line<Bits, J, J % 2 * Bits>(packed);
    // The nibbles of the table are constant, so they are computed before the loops.
    if constexpr (is_by_table(Bits)) return read_line<Bits, Affine, J>(packed, {nibble<Upper>(levels.bytes)});
    const __m256i codes = read_line<Bits, Affine, J>(packed, levels);
    return kNibbles ? nibble<Upper>(codes) : codes;
  }

  template <int J, bool Upper>
  LOWBIT_INLINE void add_line(const uint8_t* block, const int8_t* const (&a)[Rows]) {
    const __m256i codes[2] = {line<J, Upper>(block), line<J, Upper>(block + kLineBytes / 2)};
    for (int i = 0; i < Rows; ++i) {
      const __m256i a4 = broadcast4(a[i] + 4 * J);
      for (int h = 0; h < 2; ++h) {
        const Sums16 products = reinterpret_cast<Sums16>(_mm256_maddubs_epi16(codes[h], a4));
        const bool first = !kWholeSegments && J % kRun == 0;
        Sums16& pair = pairs[J % kPositions][i][h];
        pair = first ? products : pair + products;
        if constexpr (kRun > 1) settle(pair);
      }
    }
    if constexpr (!kWholeSegments && !kWholeBlocks && J % kRun == kRun - 1) {
      for (int i = 0; i < Rows; ++i) {
        for (int h = 0; h < 2; ++h) sum[2 * i + h] += widened(i, h, Upper ? 16 : 1);
      }
    }
  }

  LOWBIT_INLINE Sums32 widened(int i, int h, int16_t factor) const {
    Sums16 total = pairs[0][i][h];
    if constexpr (kPositions > 1 && Bits == 1 && !Affine) {
      total += total + pairs[1][i][h];  // twice the codes
    } else if constexpr (kPositions > 1) {
      total += reinterpret_cast<Sums16>(_mm256_srai_epi16(reinterpret_cast<__m256i>(pairs[1][i][h]), Bits));
    }
    return reinterpret_cast<Sums32>(_mm256_madd_epi16(reinterpret_cast<__m256i>(total), _mm256_set1_epi16(factor)));
  }
};

}  // namespace
}  // namespace lowbit
