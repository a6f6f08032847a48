// Prepares the operands of gemm_neon.h's tiles for one piece of k: activations and the initial values of their sums, copied
// in the order in which tiles read them; a panel's codes as bytes, and its scales as float32.
#pragma once

#include "gemm_tiles_neon.h"

namespace lowbit {
namespace {

constexpr int kChunkRows = 64;
constexpr int kChunkPanels = 8;
constexpr int64_t kStreamBytes = 36 << 10;  // for all tiles of a piece

struct Scratch {
  alignas(64) uint8_t weights[2 * kHalvesBytes];
  alignas(64) uint8_t a[kChunkRows * kPieceBlocks * kBlockInputs];
  alignas(64) uint8_t stream[kStreamBytes];
  alignas(64) float scales[2 * kPieceBlocks * kPanelRows * 2];
  alignas(64) float acc[kChunkPanels * kChunkRows * kPanelRows];
};

static_assert(sizeof(Scratch) <= kLinearScratchBytes);

// Stores the eight lines of two quarters of a block as bytes, for Unpack::lines().
template <int Bits, bool Affine>
struct BytePairs {
  const uint8_t* block;
  const Tables<Bits>& tables;
  Pair (&line)[kBlockLines];

  // The barriers keep the order of Unpack: GCC would move the AND of a line behind the sri that overwrites it.
  LOWBIT_INLINE static Pair in_order(Pair pair) {
    __asm__ volatile("" : "+w"(pair.q0), "+w"(pair.q1));
    return pair;
  }

  LOWBIT_INLINE Pair load(int i) const {
    return in_order({vld1q_u8(block + i * kLineBytes), vld1q_u8(block + i * kLineBytes + 16)});
  }

  template <int J>
  LOWBIT_INLINE void use(Index<J>, const Pair& fields) const {
    const uint8x16_t one = vdupq_n_u8(1);
    Pair bytes = fields;
    if constexpr (Bits == 1 && Affine) bytes = {vandq_u8(fields.q0, one), vandq_u8(fields.q1, one)};
    if constexpr (Bits == 1 && !Affine) bytes = {vornq_u8(one, fields.q0), vornq_u8(one, fields.q1)};
    if constexpr (Unpack<Bits>::shift[J] != 0) bytes = shift_right<Unpack<Bits>::shift[J]>(fields);
    line[J] = in_order(bytes);
  }
};

// Copies the activations of a tile, and fills TileArgs::stream. `first` and `last` are the tile's rows; the tile is padded with
// copies of the last row, whose results are not used. `block`, `segment` and `group` are the start of the piece in each row.
template <class Tile, int Rows, bool Affine>
[[gnu::noinline]] void copy_tile(const LinearArgs& args, const TileArgs& tile, int64_t first, int64_t last, int64_t block,
                                 int64_t segment, int64_t group, int32_t factor, uint8_t* to, uint8_t* stream) {
  const int8_t* from[Rows];
  const uint8_t *sums[Rows], *scales[Rows], *group_sums[Rows];
  unroll<Rows>([&](auto i) LOWBIT_INLINE {
    const int64_t row = first + i < last ? first + i : last;
    from[i] = args.a + (row * args.layout.blocks + block) * kBlockInputs;
    sums[i] = reinterpret_cast<const uint8_t*>(args.sums + row * args.layout.segments + segment);
    scales[i] = reinterpret_cast<const uint8_t*>(args.scales + row * args.layout.segments + segment);
    if constexpr (Affine) {
      group_sums[i] = reinterpret_cast<const uint8_t*>(args.group_sums + row * args.layout.groups + group);
    }
  });
  for (int64_t blocks = tile.blocks; blocks != 0; --blocks, to += registers_of(Rows) * kBlockInputs) {
    Tile::template copy_block<Rows>(to, from);
  }
  // One vector per row (the value in all lanes) or per pair of rows, depending on Tile.
  const auto next_values = [](const uint8_t* (&at)[Rows], auto (&values)[Rows]) LOWBIT_INLINE {
    using Vector = std::remove_reference_t<decltype(values[0])>;
    unroll<Rows>([&](auto i) LOWBIT_INLINE { values[i] = next_dup<Vector>(at[i]); });
    unroll<Rows / 2>([&](auto p) LOWBIT_INLINE { Tile::arrange(values[2 * p], values[2 * p + 1]); });
  };
  const auto store_starts = [&](const auto (&values)[Rows]) LOWBIT_INLINE {
    if constexpr (starts_once<Tile>(Rows)) {
      Four<16>::store(stream, values[0], values[2], values[4], values[6]);
    } else {
      store_rows(stream, values);
      stream += 16 * registers_of(Rows);
    }
  };
  const auto store_scales = [&](const float32x4_t (&values)[Rows]) LOWBIT_INLINE {
    float32x4_t joined[Tile::scales_of(Rows)];
    Tile::join(values, joined);
    store_rows(stream, joined);
    stream += 16 * Tile::scales_of(Rows);
  };
  const int32x4_t factors = vdupq_n_s32(factor), shift = vdupq_n_s32(kShiftBits);
  for (int64_t groups = tile.groups; groups != 0; --groups) {
    bool begins = tile.begins;
    for (int64_t segments = tile.segments(); segments != 0; --segments) {
      int32x4_t start[Rows];
      float32x4_t t[Rows];
      next_values(sums, start);
      unroll<Rows>([&](auto i) LOWBIT_INLINE { start[i] = vmlaq_s32(shift, start[i], factors); });
      store_starts(start);
      next_values(scales, t);
      store_scales(t);
      if (begins) {
        unroll<Rows>([&](auto i) LOWBIT_INLINE { t[i] = vmulq_n_f32(t[i], -kShift); });
        store_starts(t);
        begins = false;
      }
    }
    if constexpr (Affine) {
      float32x4_t sum[Rows];
      if (!tile.ends) return;
      next_values(group_sums, sum);
      store_scales(sum);
    }
  }
}

// Unpacks the codes and the scales of a piece.
template <class Tile, Step Size, int Bits, bool Affine>
[[gnu::noinline]] void unpack(const uint8_t* block, const TileArgs& piece, Scratch& scratch, const int8_t* levels) {
  const Tables<Bits> tables(levels);
  constexpr int kGroupBytes = group_bytes(Affine);
  uint8_t* halves[2] = {scratch.weights, scratch.weights + kHalvesBytes};
  uint8_t* scales = reinterpret_cast<uint8_t*>(scratch.scales);
  const auto unpack_block = [&]() LOWBIT_INLINE {
    unroll<2>([&](auto pair) LOWBIT_INLINE {
      Pair line[kBlockLines];
      Unpack<Bits>::lines(BytePairs<Bits, Affine>{block + 32 * pair, tables, line});
      Tile::store_pairs(halves, line);  // moves on
    });
    block += code_bits(Bits) * kLineBytes;
  };
  const auto unpack_scales = [&]() LOWBIT_INLINE {
    if constexpr (Affine) {
      unroll<2>([&](auto half) LOWBIT_INLINE {
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
  if constexpr (Size == Step::half) {
    for (; groups > 0; groups -= 2) {
      unpack_block();
      unpack_scales();
      if (groups > 1) unpack_scales();
    }
    return;
  }
  const int64_t group_steps = piece.group_steps;
  const bool ends = piece.ends;
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
