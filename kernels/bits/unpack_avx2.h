// Unpacking a line with AVX2: the 32 codes of half a line of 64 bytes, from the packed lines (codec.h).
//
// The code is derived from the placement table: each bit run takes a shift and an AND, and the runs of a scattered code are
// joined by OR. Codes move down to bit 0 or near it, because vpmaddubsw saturates for higher fields, and because more small
// products fit in 16 bits. Each line is used right after it is unpacked, because eight lines of two registers each would fill
// the register file. Packed lines are read again for each of their fields, as memory operands of the ANDs without a shift.
// Instructions per 512 weights, without the loads:
//   bits   1    2    3    4    5    6    7    8
//         30   28   38   24   46   44   54   16
#pragma once

#include <immintrin.h>

#include "codec.h"

namespace lowbit {
namespace {

LOWBIT_INLINE inline __m256i byte_mask(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }

LOWBIT_INLINE inline __m256i load32(const void* at) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(at));
}

// Moves bits within bytes; the caller must mask away bits from the neighboring byte.
template <int Count>
LOWBIT_INLINE inline __m256i shift_right(__m256i v) {
  if constexpr (Count > 0) return _mm256_srli_epi16(v, Count);
  if constexpr (Count < 0) return _mm256_slli_epi16(v, -Count);
  return v;
}

// The codes of unpacked line J, times 2^At, from bit run `Run` on. `packed` points to byte 0 or 32 of the packed lines.
template <int Bits, int J, int At = 0, int Run = 0>
LOWBIT_INLINE inline __m256i unpack_line(const uint8_t* packed) {
  constexpr CodePlacement where = placement(Bits, J);
  constexpr BitRun run = where.run[Run];
  constexpr int kBit = run.code_bit + At;
  __m256i v = shift_right<run.line_bit - kBit>(load32(packed + run.line * kLineBytes));
  if constexpr (run.length < 8) v = _mm256_and_si256(v, byte_mask(((1 << run.length) - 1) << kBit));
  if constexpr (Run + 1 < where.count) v = _mm256_or_si256(v, unpack_line<Bits, J, At, Run + 1>(packed));
  if constexpr (Run == 0 && stored_flip(Bits) != 0) v = _mm256_xor_si256(v, byte_mask(stored_flip(Bits)));
  return v;
}

// A table of levels as bytes level + 128, in which vpshufb looks up a register of codes. Empty for other weights.
template <int Bits>
struct Levels {
  LOWBIT_INLINE void load(const int8_t*) {}
};

template <int Bits>
  requires(is_by_table(Bits))
struct Levels<Bits> {
  __m256i bytes;

  LOWBIT_INLINE void load(const int8_t* levels) {
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(levels));
    bytes = _mm256_xor_si256(_mm256_broadcastsi128_si256(table), byte_mask(0x80));
  }
};

// The multiplied bytes of unpacked line J: the codes, or the levels + 128. A symmetric weight of 1 bit is 2 * code - 1, so its
// codes are doubled.
template <int Bits, bool Affine, int J>
LOWBIT_INLINE inline __m256i read_line(const uint8_t* packed, const Levels<Bits>& levels) {
  const __m256i codes = unpack_line<code_bits(Bits), J, Affine ? 0 : level_factor(Bits) - 1>(packed);
  if constexpr (is_by_table(Bits)) return _mm256_shuffle_epi8(levels.bytes, codes);
  return codes;
}

}  // namespace
}  // namespace lowbit
