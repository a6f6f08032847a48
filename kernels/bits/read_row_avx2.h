// The 32 codes of one row of a block, with AVX2 (also for AVX-512 kernels): what an embedding reads.
//
// A row has one 32-bit word (4 codes) in every packed line. They are collected in one register; lane j then takes the
// word that holds the codes of unpacked line j, so that the 32 codes of the block come out in order. Where each lane
// finds its bits is read off the table of bits/codec.h, one permutation per bit run (1 for most widths, 2 for 3 and 5
// bits, 3 for 6, 7 for 7). Not a gather per run: that loads eight words each time, and is slow on many CPUs (measured
// with an AMD EPYC: 1.2 to 2.9 times the time for a row).
#pragma once

#include <immintrin.h>

#include <cstring>

#include "codec.h"

namespace lowbit {
namespace {

// Run i of all eight lines. A lane whose line has fewer runs gets an empty mask and reads line 0.
struct LaneRun {
  alignas(32) uint32_t line[8] = {};
  alignas(32) uint32_t right[8] = {}, mask[8] = {}, left[8] = {};
};

template <int Bits>
struct LaneRuns {
  int count = 0;
  LaneRun run[7] = {};

  constexpr LaneRuns() {
    for (int j = 0; j < 8; ++j) {
      const CodePlacement where = placement(Bits, j);
      if (where.count > count) count = where.count;
      for (int i = 0; i < where.count; ++i) {
        const BitRun bits = where.run[i];
        run[i].line[j] = bits.line;
        run[i].right[j] = bits.line_bit;
        run[i].mask[j] = ((1u << bits.length) - 1u) * 0x01010101u;
        run[i].left[j] = bits.code_bit;
      }
    }
  }
};

[[gnu::always_inline]] inline __m256i load8(const uint32_t* values) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(values));
}

// The words of packed lines First to First + 3; zeros beyond `Bits`. By inserts, because GCC builds an array of eight
// words on the stack in small pieces, and reading it back as one waits for all of them to arrive.
template <int Bits, int First>
[[gnu::always_inline]] inline __m128i four_words(const uint8_t* at) {
  const auto word = [at](int line) __attribute__((always_inline)) {
    int32_t value;
    std::memcpy(&value, at + line * kLineBytes, 4);
    return value;
  };
  if constexpr (First >= Bits) return _mm_setzero_si128();
  __m128i v = _mm_cvtsi32_si128(word(First));
  if constexpr (First + 1 < Bits) v = _mm_insert_epi32(v, word(First + 1), 1);
  if constexpr (First + 2 < Bits) v = _mm_insert_epi32(v, word(First + 2), 2);
  if constexpr (First + 3 < Bits) v = _mm_insert_epi32(v, word(First + 3), 3);
  return v;
}

// The 32 codes of row `r`, in the order of the inputs.
template <int Bits>
[[gnu::always_inline]] inline __m256i read_block(const uint8_t* block, int64_t r) {
  static constexpr LaneRuns<Bits> kRuns{};
  const __m256i words = _mm256_setr_m128i(four_words<Bits, 0>(block + 4 * r), four_words<Bits, 4>(block + 4 * r));
  __m256i codes = _mm256_setzero_si256();
  for (int i = 0; i < kRuns.count; ++i) {
    const LaneRun& run = kRuns.run[i];
    __m256i v = _mm256_permutevar8x32_epi32(words, load8(run.line));
    v = _mm256_and_si256(_mm256_srlv_epi32(v, load8(run.right)), load8(run.mask));
    codes = _mm256_or_si256(codes, _mm256_sllv_epi32(v, load8(run.left)));
  }
  return _mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(stored_flip(Bits))));
}

}  // namespace
}  // namespace lowbit
