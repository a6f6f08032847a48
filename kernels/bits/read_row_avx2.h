// Reads one row of a panel for embeddings, with AVX2 (also for AVX-512 kernels), 32 codes of a block at a time.
//
// A row has one 32-bit word (4 codes) in every packed line. The words are collected in one register. Lane j then takes the word
// that holds the codes of unpacked line j, so that the 32 codes of the block come out in order. The positions of the bits come
// from the table of bits/codec.h: one permutation per bit run (1 for most widths, 2 for 3 and 5 bits, 3 for 6, 7 for 7). A
// gather per run would load eight words each time, and is slow on many CPUs (on an AMD EPYC a row took 1.2 to 2.9 times as
// long).
#pragma once

#include <immintrin.h>

#include <cstring>

#include "../ukernel.h"

namespace lowbit {
namespace {

// Run i of all eight lines. A lane whose line has fewer runs gets an empty mask and reads line 0.
struct LaneRun {
  alignas(32) uint32_t line[8] = {};
  alignas(32) uint32_t shift_right[8] = {}, mask[8] = {}, shift_left[8] = {};
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
        run[i].shift_right[j] = bits.line_bit;
        run[i].mask[j] = ((1u << bits.length) - 1u) * 0x01010101u;
        run[i].shift_left[j] = bits.code_bit;
      }
    }
  }
};

LOWBIT_INLINE inline __m256i load8(const uint32_t* values) {
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(values));
}

// The words of packed lines First to First + 3; zeros beyond `Bits`. Uses inserts, because GCC would build an array of eight
// words on the stack by small stores, and the wide load would stall until all are done.
template <int Bits, int First>
LOWBIT_INLINE inline __m128i four_words(const uint8_t* at) {
  const auto word = [at](int line) LOWBIT_INLINE {
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
LOWBIT_INLINE inline __m256i read_block(const uint8_t* block, int64_t r) {
  static constexpr LaneRuns<Bits> kRuns{};
  const __m256i words = _mm256_setr_m128i(four_words<Bits, 0>(block + 4 * r), four_words<Bits, 4>(block + 4 * r));
  __m256i codes = _mm256_setzero_si256();
  for (int i = 0; i < kRuns.count; ++i) {
    const LaneRun& run = kRuns.run[i];
    __m256i v = _mm256_permutevar8x32_epi32(words, load8(run.line));
    v = _mm256_and_si256(_mm256_srlv_epi32(v, load8(run.shift_right)), load8(run.mask));
    codes = _mm256_or_si256(codes, _mm256_sllv_epi32(v, load8(run.shift_left)));
  }
  return _mm256_xor_si256(codes, _mm256_set1_epi8(static_cast<char>(stored_flip(Bits))));
}

// Calls half(first, codes, scale, min) for each 16 inputs of the row, which start at input `first` and are in one group.
// `codes` are 16 bytes (levels + 128 with a table); scale and min are those of the group, including the row scale.
template <int Bits, bool Affine, class Half>
LOWBIT_INLINE inline void for_each_half(const EmbeddingArgs& args, Half half) {
  const Layout& layout = args.layout;
  const uint8_t* panel = args.panels + (args.row / kPanelRows) * layout.panel_bytes;
  const int64_t r = args.row % kPanelRows;
  const float row_scale = load_as_f32(panel + layout.head_offset, DType::f32, r);
  const int64_t group_inputs = layout.group_inputs();
  int64_t group = 0, group_end = 0;
  float scale = 0, min = 0;
  __m256i levels = _mm256_setzero_si256();
  if constexpr (is_by_table(Bits)) {
    levels = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(layout.levels)));
    levels = _mm256_xor_si256(levels, _mm256_set1_epi8(static_cast<char>(0x80)));
  }

  const auto next = [&](int64_t first, __m128i codes) LOWBIT_INLINE {
    if (first >= layout.k) return;
    if (first == group_end) {
      const uint8_t* scales = panel + layout.scales_offset(group++);
      scale = row_scale * load_as_f32(scales, DType::f16, r);
      if constexpr (Affine) min = row_scale * load_as_f32(scales, DType::f16, kPanelRows + r);
      group_end += group_inputs;
    }
    half(first, codes, scale, min);
  };

  for (int64_t b = 0; b < layout.blocks; ++b) {
    // Like layout.block_offset(b), without the division.
    const int64_t ended = group_end <= b * kBlockInputs ? group : group - 1;
    const uint8_t* block = panel + b * layout.block_bytes + ended * layout.group_bytes;
    __m256i codes = read_block<code_bits(Bits)>(block, r);
    if constexpr (is_by_table(Bits)) codes = _mm256_shuffle_epi8(levels, codes);
    next(b * kBlockInputs, _mm256_castsi256_si128(codes));
    next(b * kBlockInputs + kHalfInputs, _mm256_extracti128_si256(codes, 1));
  }
}

}  // namespace
}  // namespace lowbit
