// Unpacking a block with AVX-512: 8 lines of 64 unsigned bytes from the `Bits` packed lines (codec.h).
//
// A field stays at its bit position: the byte of unpacked line j is its code times 2^shift[j]. vpdpbusd takes unsigned bytes,
// so any position works, and the kernel divides each sum by 2^shift once per group. AND runs on every vector port, shifts do
// not. Scattered codes are merged with vpternlog. The placement table determines everything; no width has special code.
// Instructions per 512 weights, without the loads:
//   bits   1    2    3    4    5    6    7    8
//          9    8   12    8   16   16   20    8
#pragma once

#include <immintrin.h>

#include <utility>

#include "codec.h"

namespace lowbit {
namespace {

LOWBIT_INLINE inline __m512i byte_mask(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }

LOWBIT_INLINE inline __m512i and_mask(__m512i v, int mask) { return _mm512_and_si512(v, byte_mask(mask)); }

// The bits of `a` where the mask is set, and the bits of `b` elsewhere.
LOWBIT_INLINE inline __m512i pick(int mask, __m512i a, __m512i b) {
  return _mm512_ternarylogic_epi64(byte_mask(mask), a, b, 0xca);
}

// Moves bits within bytes; the caller must mask away bits from the neighboring byte.
template <int Count>
LOWBIT_INLINE inline __m512i shift_right(__m512i v) {
  if constexpr (Count > 0) return _mm512_srli_epi16(v, Count);
  if constexpr (Count < 0) return _mm512_slli_epi16(v, -Count);
  return v;
}

// Bit position of line j's codes in its bytes: the first run does not move. At 1 bit the upper four lines move down by four
// bits; otherwise each line would need its own shift, and so its own sum.
constexpr int field_shift(int bits, int j) {
  const BitRun run = placement(bits, j).run[0];
  const int shift = run.line_bit - run.code_bit;
  return bits == 1 ? shift % 4 : shift;
}

// Runs First to First + Count - 1 of line J's codes, joined pair by pair: a chain would have more latency.
template <int Bits, int J, int First, int Count>
LOWBIT_INLINE inline __m512i join_runs(const __m512i (&packed)[Bits]) {
  constexpr CodePlacement where = placement(Bits, J);
  constexpr BitRun run = where.run[First];
  constexpr int kShift = field_shift(Bits, J);
  if constexpr (Count == 1) {
    return shift_right<run.line_bit - run.code_bit - kShift>(packed[run.line]);
  } else {
    constexpr int kUpper = Count > 4 ? 4 : Count > 2 ? 2 : 1;
    constexpr int kLowest = where.run[First + kUpper - 1].code_bit;
    constexpr int kMask = ((1 << (run.code_bit + run.length)) - (1 << kLowest)) << kShift;
    return pick(kMask, join_runs<Bits, J, First, kUpper>(packed),
                join_runs<Bits, J, First + kUpper, Count - kUpper>(packed));
  }
}

template <int Bits>
struct Unpack {
  static constexpr int shift[8] = {field_shift(Bits, 0), field_shift(Bits, 1), field_shift(Bits, 2), field_shift(Bits, 3),
                                   field_shift(Bits, 4), field_shift(Bits, 5), field_shift(Bits, 6), field_shift(Bits, 7)};

  LOWBIT_INLINE static void lines(const __m512i (&packed)[Bits], __m512i (&line)[8]) {
    [&]<int... J>(std::integer_sequence<int, J...>) LOWBIT_INLINE {
      ((line[J] = unpack<J>(packed)), ...);
    }(std::make_integer_sequence<int, 8>());
  }

 private:
  template <int J>
  LOWBIT_INLINE static __m512i unpack(const __m512i (&packed)[Bits]) {
    const __m512i codes = join_runs<Bits, J, 0, placement(Bits, J).count>(packed);
    if constexpr (stored_flip(Bits) != 0) return _mm512_xor_si512(codes, byte_mask(stored_flip(Bits)));
    return and_mask(codes, ((1 << Bits) - 1) << shift[J]);
  }
};

}  // namespace
}  // namespace lowbit
