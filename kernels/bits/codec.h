// The bit layout of format v1: the position of each code's bits, per width. This table is the definition, and every unpacking
// routine is tested with it.
//
// A block holds 16 rows x 32 inputs as 8 unpacked lines of 64 bytes (line j, byte 4 r + i: the code of row r and
// input 4 j + i), stored as b packed lines of 64 bytes. Packing is vertical: byte p of the b packed lines holds exactly the
// codes of byte p of the 8 unpacked lines. So the layout of one position describes all 64 positions.
//
// The placement lets SIMD code take most fields with a single AND (a field at bit position p counts 2^p times, which
// the accumulator undoes) and rebuild the scattered ones with shift-and-insert: docs/format.md draws it.
#pragma once

#include <cstdint>

#include "../inline.h"

namespace lowbit {

inline constexpr int kPanelRows = 16;
inline constexpr int kBlockInputs = 32;
inline constexpr int kBlockLines = 8;   // unpacked
inline constexpr int kHalfInputs = 16;  // the granularity of group sizes: half a block, 4 unpacked lines
inline constexpr int kLineBytes = 64;

// Weights with a table of levels have codes of 2, 3 or 4 bits.
inline constexpr int kMostLevels = 16;
constexpr bool can_have_levels(int bits) { return bits >= 2 && bits <= 4; }

namespace {

// `length` bits of a code, starting at bit `code_bit` of the code, are in packed line `line`, starting at bit `line_bit`.
struct BitRun {
  uint8_t line, line_bit, length, code_bit;
};

struct CodePlacement {
  int count;
  BitRun run[7];
};

// The position of the code of unpacked line `j` (0-7) in the `bits` packed lines.
constexpr CodePlacement placement(int bits, int j) {
  const auto u8 = [](int value) { return static_cast<uint8_t>(value); };
  switch (bits) {
    case 1:
      return {1, {{0, u8(j), 1, 0}}};
    case 2:
      return {1, {{u8(j / 4), u8(2 * (j % 4)), 2, 0}}};
    case 3:
      if (j < 6) return {1, {{u8(j % 3), u8(3 * (j / 3)), 3, 0}}};
      if (j == 6) return {2, {{0, 6, 2, 1}, {1, 7, 1, 0}}};
      return {2, {{2, 6, 2, 1}, {1, 6, 1, 0}}};
    case 4:
      return {1, {{u8(j % 4), u8(4 * (j / 4)), 4, 0}}};
    case 5:
      if (j < 4) return {1, {{u8(j), 0, 5, 0}}};
      return {2, {{u8(j - 4), 5, 3, 2}, {4, u8(2 * (j - 4)), 2, 0}}};
    case 6: {
      const int first = 3 * (j / 4);
      if (j % 4 < 3) return {1, {{u8(first + j % 4), 0, 6, 0}}};
      return {3, {{u8(first), 6, 2, 4}, {u8(first + 1), 6, 2, 2}, {u8(first + 2), 6, 2, 0}}};
    }
    case 7:
      if (j < 7) return {1, {{u8(j), 0, 7, 0}}};
      return {7, {{0, 7, 1, 6}, {1, 7, 1, 5}, {2, 7, 1, 4}, {3, 7, 1, 3}, {4, 7, 1, 2}, {5, 7, 1, 1}, {6, 7, 1, 0}}};
    default:
      return {1, {{u8(j), 0, 8, 0}}};
  }
}

// Whether all bits of a code are adjacent.
constexpr bool is_whole(const CodePlacement& where) { return where.count == 1; }

// Whether there are two runs, the lower one at bit 0 of its byte, so that shift-left-and-insert can put the upper one above it.
constexpr bool ends_lowest(const CodePlacement& where) { return where.count == 2 && where.run[1].line_bit == 0; }

// Number of bits of a code in its first `runs` runs, which are its top bits.
constexpr int bits_of_runs(const CodePlacement& where, int runs) {
  int bits = 0;
  for (int i = 0; i < runs; ++i) bits += where.run[i].length;
  return bits;
}

// The order in which kernels that unpack line by line read the packed lines: step `step` of `bits` reads the result. At 5 bits
// four codes have bits in the last line, which therefore comes first. The order is its own inverse.
constexpr int line_of_step(int bits, int step) { return bits == 5 ? bits - 1 - step : step; }

// The step of that order after which kernels join run `run` of line j's codes to the earlier runs. Usually it is the step by
// which all runs have been read. Codes with many runs are joined run by run, because waiting packed lines take registers.
constexpr int join_step(int bits, int j, int run) {
  const CodePlacement where = placement(bits, j);
  const int runs = where.count > 3 ? run + 1 : where.count;
  int last = 0;
  for (int step = 0; step < bits; ++step) {
    for (int i = 0; i < runs; ++i) {
      if (where.run[i].line == line_of_step(bits, step)) last = step;
    }
  }
  return last;
}

// Kernels are templates on the width. by_table(b) stands for codes of b bits that a table maps to levels. Such a kernel
// multiplies bytes level + 128, like 8-bit codes; signed dot products read them as levels.
constexpr int by_table(int bits) { return 16 + bits; }
constexpr bool is_by_table(int bits) { return bits >= 16; }
constexpr int code_bits(int bits) { return bits % 16; }

// At 8 bits the byte is stored as code - 128: signed dot products use it directly, unsigned ones flip the top bit.
constexpr uint8_t stored_flip(int bits) { return bits == 8 || is_by_table(bits) ? 0x80 : 0; }

// A symmetric weight is scale x level(code): code - 2^(bits - 1), or +-1 at 1 bit.
constexpr int level_factor(int bits) { return bits == 1 ? 2 : 1; }
constexpr int level_offset(int bits) { return bits == 1 ? 1 : is_by_table(bits) ? 128 : 1 << (bits - 1); }

// The code of unpacked line J at one position; `packed` is the byte of packed line 0 there, lines are kLineBytes apart.
template <int Bits, int J>
LOWBIT_INLINE inline uint8_t read_code(const uint8_t* packed) {
  constexpr CodePlacement where = placement(Bits, J);
  unsigned code = 0;
  for (int i = 0; i < where.count; ++i) {
    const BitRun run = where.run[i];
    code |= ((unsigned{packed[run.line * kLineBytes]} >> run.line_bit) & ((1u << run.length) - 1u)) << run.code_bit;
  }
  return static_cast<uint8_t>(code ^ stored_flip(Bits));
}

// The inverse: ORs the code into the packed bytes of one position, which must be zero at the start.
template <int Bits, int J>
LOWBIT_INLINE inline void write_code(uint8_t* packed, uint8_t code) {
  constexpr CodePlacement where = placement(Bits, J);
  const unsigned value = unsigned{code} ^ stored_flip(Bits);
  for (int i = 0; i < where.count; ++i) {
    const BitRun run = where.run[i];
    const unsigned field = (value >> run.code_bit) & ((1u << run.length) - 1u);
    packed[run.line * kLineBytes] |= static_cast<uint8_t>(field << run.line_bit);
  }
}

}  // namespace
}  // namespace lowbit
