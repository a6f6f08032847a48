// What the tiles of gemm_neon.h read, for one piece of k: activations and the starts of their sums, copied in the order
// in which tiles read them, and a panel's codes as bytes with its scales as float32.
#pragma once

#include "gemm_tiles_neon.h"

namespace lowbit {
namespace {

constexpr int kChunkRows = 64;
constexpr int kChunkPanels = 8;
// Of starts (and float sums) of a piece, in registers. 64 rows: 2 for each row and group of up to 16; where 8 rows have
// 4 starts, for up to 32 groups. 62 rows are the most for those: seven tiles with 4, and 6 rows with 8.
constexpr int kMostStarts = 36 * 2 * 32;

struct Scratch {
  alignas(64) uint8_t weights[2 * kHalvesBytes];
  alignas(64) uint8_t a[kChunkRows * kPieceBlocks * kBlockInputs];
  alignas(64) int32_t starts[kMostStarts * 4];
  alignas(64) float scales[2 * kPieceBlocks * kPanelRows * 2];
  alignas(64) float acc[kChunkPanels * kChunkRows * kPanelRows];

  // The int32 sums of a group that is longer than a piece: behind its starts, where those of other groups would lie.
  int32_t* parts() { return starts + kChunkRows * 8; }
  static_assert(kChunkRows * (8 + kChunkPanels * kPanelRows) <= kMostStarts * 4);
};

static_assert(sizeof(Scratch) <= kLinearScratchBytes);

// Two quarters of a block, for Unpack::lines(): the eight lines as bytes.
template <int Bits, bool Affine>
struct BytePairs {
  const uint8_t* block;
  const Tables<Bits>& tables;
  Pair (&line)[kBlockLines];

  // The barriers keep the order of Unpack: GCC would take the AND of a line after the sri that overwrites it.
  [[gnu::always_inline]] static Pair in_order(Pair pair) {
    __asm__ volatile("" : "+w"(pair.q0), "+w"(pair.q1));
    return pair;
  }

  [[gnu::always_inline]] Pair load(int i) const {
    return in_order({vld1q_u8(block + i * kLineBytes), vld1q_u8(block + i * kLineBytes + 16)});
  }

  template <int J>
  [[gnu::always_inline]] void use(Index<J>, const Pair& fields) const {
    const uint8x16_t one = vdupq_n_u8(1);
    Pair bytes = fields;
    if constexpr (Bits == 1 && Affine) bytes = {vandq_u8(fields.q0, one), vandq_u8(fields.q1, one)};
    if constexpr (Bits == 1 && !Affine) bytes = {vornq_u8(one, fields.q0), vornq_u8(one, fields.q1)};
    if constexpr (Unpack<Bits>::shift[J] != 0) bytes = shift_right<Unpack<Bits>::shift[J]>(fields);
    line[J] = in_order(bytes);
  }
};

// Copies the activations and the group sums of a tile. `last`: its last row; rows behind it are copies of that, whose
// results nobody reads.
template <class Tile, int Rows, bool Affine>
[[gnu::noinline]] void copy_tile(const LinearArgs& args, const TileArgs& tile, int64_t first, int64_t last,
                                 int64_t block, int64_t group, int32_t factor, uint8_t* to, uint8_t* starts) {
  const int8_t* from[Rows];
  const int32_t* sums[Rows];
  unroll<Rows>([&](auto i) __attribute__((always_inline)) {
    const int64_t row = first + i < last ? first + i : last;
    from[i] = args.a + (row * args.layout.blocks + block) * kBlockInputs;
    sums[i] = args.group_sums + row * args.layout.groups + group;
  });
  constexpr int kRegisters = registers_of(Rows);
  for (int64_t blocks = tile.blocks; blocks != 0; --blocks, to += kRegisters * kBlockInputs) {
    Tile::template copy_block<Rows>(to, from);
  }
  const int32x4_t factors = vdupq_n_s32(tile.begins ? factor : 0);
  const int32x4_t shift = vdupq_n_s32(tile.begins && tile.shifted ? kShiftBits : 0);
  for (int64_t groups = tile.groups; groups != 0; --groups) {
    if constexpr (kStartsOnce<Tile, Rows>) {
      int32x4_t start[4];
      float32x4_t sum[4];
      unroll<4>([&](auto p) __attribute__((always_inline)) {
        int32x4_t sum0 = next_dup(sums[2 * p]), sum1 = next_dup(sums[2 * p + 1]);
        Tile::arrange(sum0, sum1);
        start[p] = vmlaq_s32(shift, sum0, factors);
        if constexpr (Affine) sum[p] = vcvtq_f32_s32(sum0);
      });
      Four<16>::store(starts, start[0], start[1], start[2], start[3]);
      if constexpr (Affine) Four<20>::store(starts, sum[0], sum[1], sum[2], sum[3]);
    } else {
      unroll<(Rows + 1) / 2>([&](auto p) __attribute__((always_inline)) {
        constexpr int kRow = 2 * p, kNext = kRow + 1 < Rows ? kRow + 1 : kRow;
        int32x4_t sum0 = next_dup(sums[kRow]), sum1 = sum0;
        if constexpr (kNext != kRow) sum1 = next_dup(sums[kNext]);
        Tile::arrange(sum0, sum1);
        constexpr bool kPair = kNext != kRow;
        store_pair<16 * kRow, kPair>(starts, vmlaq_s32(shift, sum0, factors), vmlaq_s32(shift, sum1, factors));
        if constexpr (Affine) {
          store_pair<16 * (kRegisters + kRow), kPair>(starts, vcvtq_f32_s32(sum0), vcvtq_f32_s32(sum1));
        }
      });
      starts += kRegisters * (Affine ? 32 : 16);
    }
  }
}

// Unpacks the codes and the scales of a piece.
template <class Tile, Step Each, int Bits, bool Affine>
[[gnu::noinline]] void unpack(const uint8_t* block, const TileArgs& piece, Scratch& scratch, const int8_t* levels) {
  const Tables<Bits> tables(levels);
  constexpr int kGroupBytes = (Affine ? 4 : 2) * kPanelRows;
  uint8_t* halves[2] = {scratch.weights, scratch.weights + kHalvesBytes};
  uint8_t* scales = reinterpret_cast<uint8_t*>(scratch.scales);
  const auto unpack_block = [&]() __attribute__((always_inline)) {
    unroll<2>([&](auto pair) __attribute__((always_inline)) {
      Pair line[kBlockLines];
      Unpack<Bits>::lines(BytePairs<Bits, Affine>{block + 32 * pair, tables, line});
      Tile::store_pairs(halves, line);  // moves on
    });
    block += code_bits(Bits) * kLineBytes;
  };
  const auto unpack_scales = [&]() __attribute__((always_inline)) {
    if constexpr (Affine) {
      unroll<2>([&](auto half) __attribute__((always_inline)) {
        float16x8_t scale, min;
        load_at<16 * half>(block, scale);
        load_at<16 * half + 2 * kPanelRows>(block, min);
        Four<16>::store(scales, vcvt_f32_f16(vget_low_f16(scale)), vcvt_f32_f16(vget_low_f16(min)),
                        vcvt_high_f32_f16(scale), vcvt_high_f32_f16(min));
      });
    } else {
      const Scales scale = load_scales(block);
      Four<16>::store(scales, scale.q[0], scale.q[1], scale.q[2], scale.q[3]);
    }
    block += kGroupBytes;
  };
  int64_t groups = piece.groups;
  const int64_t group_steps = piece.group_steps;
  const bool ends = piece.ends;
  if constexpr (Each == Step::half) {
    if (group_steps == 1 && ends) {
      for (; groups >= 2; groups -= 2) {
        unpack_block();
        unpack_scales();
        unpack_scales();
      }
    }
    int64_t blocks = group_steps == 1 ? groups : piece.blocks;
    int64_t left = piece.odd + group_steps;  // from this block to the end of the group
    // The scales of the group that ends where this piece begins.
    int64_t passed = piece.odd ? kGroupBytes : 0;
    for (; blocks != 0; --blocks) {
      unpack_block();
      block += passed;
      passed = 0;
      left -= 2;
      if (!ends) continue;
      for (; left <= 0 && groups != 0; left += group_steps, --groups) unpack_scales();
    }
    return;
  }
  if (group_steps == 1 && ends) {
    do {
      unpack_block();
      unpack_scales();
    } while (--groups != 0);
    return;
  }
  do {
    int64_t blocks = group_steps;
    do {
      unpack_block();
    } while (--blocks != 0);
    if (ends) unpack_scales();
  } while (--groups != 0);
}

}  // namespace
}  // namespace lowbit
