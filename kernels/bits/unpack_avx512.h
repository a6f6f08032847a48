// Unpacking a block with AVX-512: 8 lines of 64 unsigned bytes from the `Bits` packed lines (codec.h).
//
// A field is taken where it lies: the byte of unpacked line j is its code times 2^shift[j]. vpdpbusd takes unsigned bytes,
// so any position does, and the kernel divides each sum by 2^shift once per group. AND runs on every vector port, shifts do
// not. Scattered codes are merged with vpternlog. Instructions per 512 weights beside the loads:
//   bits   1    2    3    4    5    6    7    8
//          9    8   12    8   16   16   20    8
#pragma once

#include <immintrin.h>

#include "codec.h"

namespace lowbit {
namespace {

LOWBIT_INLINE inline __m512i byte_mask(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }

LOWBIT_INLINE inline __m512i and_mask(__m512i v, int mask) { return _mm512_and_si512(v, byte_mask(mask)); }

// The bits of `a` where the mask is set, of `b` elsewhere.
LOWBIT_INLINE inline __m512i pick(int mask, __m512i a, __m512i b) {
  return _mm512_ternarylogic_epi64(byte_mask(mask), a, b, 0xca);
}

// Moves bits between positions of a byte; what crosses in from the neighboring byte is masked away by the caller.
template <int Count>
LOWBIT_INLINE inline __m512i shift_right(__m512i v) {
  if constexpr (Count > 0) return _mm512_srli_epi16(v, Count);
  if constexpr (Count < 0) return _mm512_slli_epi16(v, -Count);
  return v;
}

template <int Bits>
struct Unpack;

template <>
struct Unpack<1> {
  static constexpr int shift[8] = {0, 1, 2, 3, 0, 1, 2, 3};
  LOWBIT_INLINE static void lines(const __m512i (&p)[1], __m512i (&v)[8]) {
    const __m512i upper = shift_right<4>(p[0]);
    for (int j = 0; j < 4; ++j) {
      v[j] = and_mask(p[0], 1 << j);
      v[4 + j] = and_mask(upper, 1 << j);
    }
  }
};

template <>
struct Unpack<2> {
  static constexpr int shift[8] = {0, 2, 4, 6, 0, 2, 4, 6};
  LOWBIT_INLINE static void lines(const __m512i (&p)[2], __m512i (&v)[8]) {
    for (int j = 0; j < 8; ++j) v[j] = and_mask(p[j / 4], 3 << (2 * (j % 4)));
  }
};

template <>
struct Unpack<3> {
  static constexpr int shift[8] = {0, 0, 0, 3, 3, 3, 5, 5};
  LOWBIT_INLINE static void lines(const __m512i (&p)[3], __m512i (&v)[8]) {
    for (int j = 0; j < 3; ++j) {
      v[j] = and_mask(p[j], 0x07);
      v[3 + j] = and_mask(p[j], 0x38);
    }
    v[6] = and_mask(pick(0xc0, p[0], shift_right<2>(p[1])), 0xe0);
    v[7] = and_mask(pick(0xc0, p[2], shift_right<1>(p[1])), 0xe0);
  }
};

template <>
struct Unpack<4> {
  static constexpr int shift[8] = {0, 0, 0, 0, 4, 4, 4, 4};
  LOWBIT_INLINE static void lines(const __m512i (&p)[4], __m512i (&v)[8]) {
    for (int j = 0; j < 4; ++j) {
      v[j] = and_mask(p[j], 0x0f);
      v[4 + j] = and_mask(p[j], 0xf0);
    }
  }
};

template <>
struct Unpack<5> {
  static constexpr int shift[8] = {0, 0, 0, 0, 3, 3, 3, 3};
  LOWBIT_INLINE static void lines(const __m512i (&p)[5], __m512i (&v)[8]) {
    for (int j = 0; j < 4; ++j) v[j] = and_mask(p[j], 0x1f);
    v[4] = and_mask(pick(0xe0, p[0], shift_right<-3>(p[4])), 0xf8);
    v[5] = and_mask(pick(0xe0, p[1], shift_right<-1>(p[4])), 0xf8);
    v[6] = and_mask(pick(0xe0, p[2], shift_right<1>(p[4])), 0xf8);
    v[7] = and_mask(pick(0xe0, p[3], shift_right<3>(p[4])), 0xf8);
  }
};

template <>
struct Unpack<6> {
  static constexpr int shift[8] = {0, 0, 0, 2, 0, 0, 0, 2};
  LOWBIT_INLINE static void lines(const __m512i (&p)[6], __m512i (&v)[8]) {
    for (int h = 0; h < 2; ++h) {
      for (int j = 0; j < 3; ++j) v[4 * h + j] = and_mask(p[3 * h + j], 0x3f);
      const __m512i upper = pick(0xc0, p[3 * h], shift_right<2>(p[3 * h + 1]));
      v[4 * h + 3] = and_mask(pick(0xf0, upper, shift_right<4>(p[3 * h + 2])), 0xfc);
    }
  }
};

template <>
struct Unpack<7> {
  static constexpr int shift[8] = {0, 0, 0, 0, 0, 0, 0, 1};
  LOWBIT_INLINE static void lines(const __m512i (&p)[7], __m512i (&v)[8]) {
    for (int j = 0; j < 7; ++j) v[j] = and_mask(p[j], 0x7f);
    const __m512i bits76 = pick(0x80, p[0], shift_right<1>(p[1]));
    const __m512i bits54 = pick(0x20, shift_right<2>(p[2]), shift_right<3>(p[3]));
    const __m512i bits32 = pick(0x08, shift_right<4>(p[4]), shift_right<5>(p[5]));
    const __m512i bits7654 = pick(0xc0, bits76, bits54);
    const __m512i bits321 = pick(0x0c, bits32, shift_right<6>(p[6]));
    v[7] = and_mask(pick(0xf0, bits7654, bits321), 0xfe);
  }
};

template <>
struct Unpack<8> {
  static constexpr int shift[8] = {};
  LOWBIT_INLINE static void lines(const __m512i (&p)[8], __m512i (&v)[8]) {
    for (int j = 0; j < 8; ++j) v[j] = _mm512_xor_si512(p[j], byte_mask(0x80));
  }
};

}  // namespace
}  // namespace lowbit
