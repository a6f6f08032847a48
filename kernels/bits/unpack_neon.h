// Shared by the NEON kernels: unpacking a quarter of a block, and storing float32 results in any output type. Uses only Armv8-A
// baseline instructions, so that every Arm kernel can include it.
//
// A quarter is 4 rows: 16 bytes of each of the `Bits` packed lines (codec.h), unpacked to 16 bytes of each of the 8
// lines. Line j is code times 2^shift[j]: a field stays at its bit position and takes one AND, and the kernel divides its sum
// by 2^shift once per group. The dot products read signed bytes, so such a field must stay below 128; the topmost field of a
// byte takes a shift instead, which needs no mask. Scattered codes are joined under the top field by shift-and-insert (sri). At
// 1 bit the bytes are 0 or -1, the results of cmtst. Instructions per quarter (128 weights), without the loads:
//   bits   1    2    3    4    5    6    7    8
//          8    8   11    8   14   12   14    0
// With a table, lines are levels, as signed bytes: one tbl per line, from codes that are shifted down. This takes 12, 21 and 16
// instructions at 2, 3 and 4 bits, because the table repeats itself so that an index may have extra bits. tbl of two registers
// would save an AND three times, but GCC 12 copies the pair of registers each time.
#pragma once

#include <arm_neon.h>

#include <utility>

#include "../numeric.h"
#include "codec.h"

namespace lowbit {
namespace {

// An index that is a constant in every function that receives it. An array of registers that is only indexed by such constants
// stays in registers.
template <int I>
struct Index {
  constexpr operator int() const { return I; }
};

template <int Count, class Body>
LOWBIT_INLINE inline void unroll(Body body) {
  [&]<int... I>(std::integer_sequence<int, I...>) LOWBIT_INLINE {
    (body(Index<I>{}), ...);
  }(std::make_integer_sequence<int, Count>());
}

// Two adjacent quarters of a line, which one ldp loads.
struct Pair {
  uint8x16_t q0, q1;
};

LOWBIT_INLINE inline Pair and_mask(const Pair& v, int mask) {
  const uint8x16_t masks = vdupq_n_u8(static_cast<uint8_t>(mask));
  return {vandq_u8(v.q0, masks), vandq_u8(v.q1, masks)};
}

LOWBIT_INLINE inline Pair test(const Pair& v, int mask) {
  uint8x16_t masks = vdupq_n_u8(static_cast<uint8_t>(mask));
  if (mask == 1) __asm__("" : "+w"(masks));  // hidden from Clang, which would use an AND and a negation
  return {vtstq_u8(v.q0, masks), vtstq_u8(v.q1, masks)};
}

template <int Count>
LOWBIT_INLINE inline Pair shift_left(const Pair& v) {
  if constexpr (Count == 0) return v;
  return {vshlq_n_u8(v.q0, Count), vshlq_n_u8(v.q1, Count)};
}

template <int Count>
LOWBIT_INLINE inline Pair shift_right(const Pair& v) {
  return {vshrq_n_u8(v.q0, Count), vshrq_n_u8(v.q1, Count)};
}

// The top `Count` bits of `upper`, and below them the top bits of `lower`.
template <int Count>
LOWBIT_INLINE inline Pair insert_below(const Pair& upper, const Pair& lower) {
  return {vsriq_n_u8(upper.q0, lower.q0, Count), vsriq_n_u8(upper.q1, lower.q1, Count)};
}

// The lowest `Count` bits of `lower`, and above them the lowest bits of `upper`.
template <int Count>
LOWBIT_INLINE inline Pair insert_above(const Pair& lower, const Pair& upper) {
  return {vsliq_n_u8(lower.q0, upper.q0, Count), vsliq_n_u8(lower.q1, upper.q1, Count)};
}

// Bit position of line j's codes in its bytes.
constexpr int field_shift(int bits, int j) {
  const CodePlacement where = placement(bits, j);
  const BitRun run = where.run[0];
  return bits == 1 || !is_whole(where) || run.line_bit + run.length == 8 ? 0 : run.line_bit;
}

// Joins run `Run` of line J's codes to the earlier runs, from the top of a byte down. A tree would have less latency, but keep
// more lines in registers.
template <int Bits, int J, int Run>
LOWBIT_INLINE inline Pair join_run(const Pair& codes, const Pair& packed) {
  constexpr CodePlacement where = placement(Bits, J);
  constexpr BitRun run = where.run[Run];
  if constexpr (Run == 0) return packed;
  else if constexpr (ends_lowest(where)) return insert_above<run.length>(packed, shift_right<where.run[0].line_bit>(codes));
  else return insert_below<bits_of_runs(where, Run)>(codes, shift_left<8 - run.line_bit - run.length>(packed));
}

// Line J, from all runs of its codes.
template <int Bits, int J>
LOWBIT_INLINE inline Pair finish_line(const Pair& codes) {
  constexpr CodePlacement where = placement(Bits, J);
  constexpr BitRun first = where.run[0];
  if constexpr (Bits == 1) return test(codes, 1 << first.line_bit);
  else if constexpr (Bits == 8 || ends_lowest(where)) return codes;  // 8 bits: code - 128 (stored_flip), already signed
  else if constexpr (!is_whole(where)) return shift_right<8 - Bits>(codes);
  else if constexpr (first.line_bit + Bits == 8) return shift_right<first.line_bit>(codes);
  else return and_mask(codes, ((1 << Bits) - 1) << first.line_bit);
}

// lines() loads every packed line once, by block.load(i), and passes each unpacked line j on as soon as possible, by
// block.use(Index<j>, line), so that few registers are in use at any time.
template <int Bits>
struct Unpack {
  static constexpr int shift[8] = {field_shift(Bits, 0), field_shift(Bits, 1), field_shift(Bits, 2), field_shift(Bits, 3),
                                   field_shift(Bits, 4), field_shift(Bits, 5), field_shift(Bits, 6), field_shift(Bits, 7)};
  template <class Block>
  LOWBIT_INLINE static void lines(Block block) {
    Pair packed[Bits], codes[kBlockLines];
    unroll<Bits>([&](auto step) LOWBIT_INLINE {
      constexpr int kLine = line_of_step(Bits, step);
      packed[kLine] = block.load(kLine);
      unroll<kBlockLines>([&](auto j) LOWBIT_INLINE {
        constexpr CodePlacement where = placement(Bits, j);
        unroll<where.count>([&](auto run) LOWBIT_INLINE {
          if constexpr (join_step(Bits, j, run) == step) {
            codes[j] = join_run<Bits, j, run>(codes[j], packed[where.run[run].line]);
          }
        });
        if constexpr (join_step(Bits, j, where.count - 1) == step) block.use(j, finish_line<Bits, j>(codes[j]));
      });
    });
  }
};

// The registers for tbl: a table of levels, in the orders that the width needs. Empty for other weights.
template <int Bits>
struct Tables {
  LOWBIT_INLINE explicit Tables(const int8_t*) {}
};

template <int Count>
struct TableRegisters {
  uint8x16_t table[Count];
};

// The level of each code.
LOWBIT_INLINE inline uint8x16_t levels_of(const int8_t* levels, const uint8_t (&codes)[16]) {
  return vqtbl1q_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(levels)), vld1q_u8(codes));
}

// Indices of two codes: of the lower one, of the upper one.
template <>
struct Tables<by_table(2)> : TableRegisters<2> {
  LOWBIT_INLINE explicit Tables(const int8_t* levels)
      : TableRegisters{{levels_of(levels, {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3}),
                        levels_of(levels, {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3})}} {}
};

// Two kinds of indices: the code in the lower three bits; or two upper bits, an ignored bit, and the lowest bit of the code.
template <>
struct Tables<by_table(3)> : TableRegisters<2> {
  LOWBIT_INLINE explicit Tables(const int8_t* levels)
      : TableRegisters{{levels_of(levels, {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7}),
                        levels_of(levels, {0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7})}} {}
};

template <>
struct Tables<by_table(4)> : TableRegisters<1> {
  LOWBIT_INLINE explicit Tables(const int8_t* levels)
      : TableRegisters{{vld1q_u8(reinterpret_cast<const uint8_t*>(levels))}} {}
};

LOWBIT_INLINE inline Pair look_up(uint8x16_t table, const Pair& index) {
  return {vqtbl1q_u8(table, index.q0), vqtbl1q_u8(table, index.q1)};
}

// With a table, `block` also has tables.
template <>
struct Unpack<by_table(2)> {
  static constexpr int shift[8] = {};
  template <class Block>
  LOWBIT_INLINE static void lines(Block block) {
    unroll<2>([&](auto h) LOWBIT_INLINE {
      const Pair p = block.load(h);
      const Pair lower = and_mask(p, 0x0f), upper = shift_right<4>(p);
      block.use(Index<4 * h>{}, look_up(block.tables.table[0], lower));
      block.use(Index<4 * h + 1>{}, look_up(block.tables.table[1], lower));
      block.use(Index<4 * h + 2>{}, look_up(block.tables.table[0], upper));
      block.use(Index<4 * h + 3>{}, look_up(block.tables.table[1], upper));
    });
  }
};

template <>
struct Unpack<by_table(3)> {
  static constexpr int shift[8] = {};
  template <class Block>
  LOWBIT_INLINE static void lines(Block block) {
    const auto next = [&](auto j) LOWBIT_INLINE {
      const Pair p = block.load(j);
      block.use(j, look_up(block.tables.table[0], and_mask(p, 0x07)));
      block.use(Index<3 + j>{}, look_up(block.tables.table[0], and_mask(shift_right<3>(p), 0x07)));
      return p;
    };
    const Pair p0 = next(Index<0>{}), p1 = next(Index<1>{});
    block.use(Index<6>{}, look_up(block.tables.table[0], shift_right<5>(insert_below<2>(p0, p1))));
    const Pair p2 = next(Index<2>{});
    block.use(Index<7>{}, look_up(block.tables.table[1], shift_right<4>(insert_below<2>(p2, p1))));
  }
};

template <>
struct Unpack<by_table(4)> {
  static constexpr int shift[8] = {};
  template <class Block>
  LOWBIT_INLINE static void lines(Block block) {
    unroll<4>([&](auto j) LOWBIT_INLINE {
      const Pair p = block.load(j);
      block.use(j, look_up(block.tables.table[0], and_mask(p, 0x0f)));
      block.use(Index<4 + j>{}, look_up(block.tables.table[0], shift_right<4>(p)));
    });
  }
};

// Converts four float16 values, given as their bits.
LOWBIT_INLINE inline float32x4_t f32_from_f16x4(uint16x4_t h) { return vcvt_f32_f16(vreinterpret_f16_u16(h)); }

LOWBIT_INLINE inline uint16x4_t bf16_from_f32x4(float32x4_t value) {
  // bfcvtn is not a baseline instruction, so this rounds with integers.
  const uint32x4_t bits = vreinterpretq_u32_f32(value);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(value, value), rounded, quiet), 16);
}

// Loads 16 adjacent values.
template <DType T>
LOWBIT_INLINE inline void store16(void* at, const float32x4_t (&value)[4]) {
  unroll<4>([&](auto q) LOWBIT_INLINE {
    auto* to = static_cast<uint8_t*>(at) + 4 * size_of(T) * q;
    if constexpr (T == DType::f32) {
      vst1q_u8(to, vreinterpretq_u8_f32(value[q]));
    } else {
      const uint16x4_t half =
          T == DType::bf16 ? bf16_from_f32x4(value[q]) : vreinterpret_u16_f16(vcvt_f16_f32(value[q]));
      vst1_u8(to, vreinterpret_u8_u16(half));
    }
  });
}

// Stores the first `count` of 16 values from element `index` of `base` on, and writes nothing after them.
template <DType T>
LOWBIT_INLINE inline void store_first(void* base, int64_t index, const float32x4_t (&value)[4], int64_t count) {
  char* at = static_cast<char*>(base) + size_of(T) * index;
  if (count >= 16) return store16<T>(at, value);
  uint32_t buffer[16];
  store16<T>(buffer, value);
  std::memcpy(at, buffer, static_cast<size_t>(size_of(T) * count));
}

}  // namespace
}  // namespace lowbit
