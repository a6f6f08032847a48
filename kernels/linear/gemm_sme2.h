// Many rows of m on SME2: outer products, 16 rows of m by 16 outputs in a tile of ZA. sme2.cpp explains it.
#pragma once

#include <type_traits>

#include "tiles_sme2.h"

namespace lowbit {
namespace {

// Integer sums of `Tile` += activations * line.
template <int Bits, int Tile>
[[gnu::always_inline]] inline void multiply(svint8_t a, svuint8_t line) LOWBIT_STREAMING {
  const svbool_t all = svptrue_b8();
  if constexpr (is_signed(Bits)) svmopa_za32_s8_m(Tile, all, all, a, svreinterpret_s8_u8(line));
  else svsumopa_za32_s8_m(Tile, all, all, a, line);
}

// Lines J to End - 1 of a block of panel `Panel`. a0, a1: activations of 16 rows, and of 16 others if there are two
// tiles of them.
template <int Bits, bool Affine, int Tiles, int Panel, int J, int End>
[[gnu::always_inline]] inline void add_lines(svuint8x4_t low, svuint8x4_t high, svuint8_t table, svint8x4_t a0,
                                             svint8x4_t a1) LOWBIT_STREAMING {
  if constexpr (J < End) {
    svuint8_t w;
    if constexpr (kInPlace<Bits>) w = svget4_u8(J < 4 ? low : high, J % 4);
    else w = line<Bits, Affine, J>(low, high, table);
    multiply<Bits, Panel>(svget4_s8(a0, J % 4), w);
    if constexpr (Tiles == 2) multiply<Bits, 1>(svget4_s8(a1, J % 4), w);
    add_lines<Bits, Affine, Tiles, Panel, J + 1, End>(low, high, table, a0, a1);
  }
}

// A block, or a half of it, of panel `Panel`.
template <int Bits, bool Affine, int Tiles, int Panel, Halves Wanted>
[[gnu::always_inline]] inline void add_panel(const uint8_t* at, svuint8_t table, svint8x4_t first0, svint8x4_t first1,
                                             svint8x4_t second0, svint8x4_t second1) LOWBIT_STREAMING {
  svuint8x4_t low = load_lines<code_bits(Bits), 0>(at), high = load_lines<code_bits(Bits), 4>(at);
  if constexpr (kInPlace<Bits>) {
    high = and_mask(low, 0xf0);
    low = shift_left_all<4>(low);
  }
  if constexpr ((Wanted & kFirstHalf) != 0) {
    add_lines<Bits, Affine, Tiles, Panel, 0, 4>(low, high, table, first0, first1);
  }
  if constexpr ((Wanted & kSecondHalf) != 0) {
    add_lines<Bits, Affine, Tiles, Panel, 4, 8>(low, high, table, second0, second1);
  }
}

// A block, or a half of it, of every panel: the second one is `stride` bytes behind the first. `a`: of its (first)
// half.
template <int Bits, bool Affine, int Tiles, int Panels, Halves Wanted>
[[gnu::always_inline]] inline void add_block(const uint8_t* at, int64_t stride, svuint8_t table, const int8_t* a,
                                             int64_t a_stride) LOWBIT_STREAMING {
  const svcount_t all = svptrue_c8();
  svint8x4_t first0 = svundef4_s8(), first1 = first0, second0 = first0, second1 = first0;
  if constexpr ((Wanted & kFirstHalf) != 0) {
    first0 = svld1_vnum_s8_x4(all, a, 0);
    if constexpr (Tiles == 2) first1 = svld1_vnum_s8_x4(all, a + a_stride, 0);
  }
  if constexpr ((Wanted & kSecondHalf) != 0) {
    constexpr int kAt = Wanted == kWholeBlock ? kHalfLines : 0;
    second0 = svld1_vnum_s8_x4(all, a, kAt);
    if constexpr (Tiles == 2) second1 = svld1_vnum_s8_x4(all, a + a_stride, kAt);
  }
  add_panel<Bits, Affine, Tiles, 0, Wanted>(at, table, first0, first1, second0, second1);
  if constexpr (Panels == 2) {
    add_panel<Bits, Affine, 1, 1, Wanted>(at + stride, table, first0, first0, second0, second0);
  }
}

[[gnu::always_inline]] inline svint16_t load_parts(const int32_t* parts) __arm_streaming {
  return svld1_s16(svptrue_b16(), reinterpret_cast<const int16_t*>(parts));
}

// Integer sums of tile T += Offset * the group's sums of activations, each in two int16.
template <int Offset, int T>
[[gnu::always_inline]] inline void add_offset(svint16_t sums) LOWBIT_STREAMING {
  static_assert(Offset >= -128 && Offset <= 128);  // 256 times as much is an int16, if it is negative
  // -|offset| and 256 times that, in every lane.
  constexpr uint32_t kNegative = static_cast<uint32_t>(Offset < 0 ? Offset : -Offset);
  const svint16_t factors = svreinterpret_s16_u32(svdup_n_u32((kNegative & 0xffff) | kNegative << 24));
  const svbool_t all = svptrue_b16();
  if constexpr (Offset < 0) svmopa_za32_s16_m(T, all, all, sums, factors);
  else svmops_za32_s16_m(T, all, all, sums, factors);
}

// A finished group of tile T to the float sums of tile 2 + T. In registers by name: compilers find none for both of
// ZA's indices, which can be four only, and keep them in memory.
template <bool Affine, int T>
[[gnu::always_inline]] inline void finish(svfloat32_t scale, svfloat32_t min, const int32_t* sum, uint32_t vector0,
                                          uint32_t vector8) LOWBIT_STREAMING {
  __asm__ volatile(
      "mov {z16.d-z19.d}, za.d[%w0, %3, vgx4]\n\t"
      "mov {z20.d-z23.d}, za.d[%w0, %4, vgx4]\n\t"
      "mov {z24.d-z27.d}, za.d[%w1, %3, vgx4]\n\t"
      "mov {z28.d-z31.d}, za.d[%w1, %4, vgx4]\n\t"
      "scvtf {z16.s-z19.s}, {z16.s-z19.s}\n\t"
      "scvtf {z20.s-z23.s}, {z20.s-z23.s}\n\t"
      "scvtf {z24.s-z27.s}, {z24.s-z27.s}\n\t"
      "scvtf {z28.s-z31.s}, {z28.s-z31.s}\n\t"
      "fmla za.s[%w0, %5, vgx4], {z16.s-z19.s}, %2.s\n\t"
      "fmla za.s[%w0, %6, vgx4], {z20.s-z23.s}, %2.s\n\t"
      "fmla za.s[%w1, %5, vgx4], {z24.s-z27.s}, %2.s\n\t"
      "fmla za.s[%w1, %6, vgx4], {z28.s-z31.s}, %2.s"
      :
      : "Uci"(vector0), "Uci"(vector8), "x"(scale), "i"(T), "i"(4 + T), "i"(2 + T), "i"(6 + T)
      : "z16", "z17", "z18", "z19", "z20", "z21", "z22", "z23", "z24", "z25", "z26", "z27", "z28", "z29", "z30", "z31",
        "za", "memory");
  if constexpr (Affine) {
    const svbool_t all = svptrue_b32();
    svmopa_za32_f32_m(2 + T, all, all, svld1_f32(all, reinterpret_cast<const float*>(sum)), min);
  }
}

// Where a piece is read. `at`: in the first panel; the second one is `stride` bytes behind it.
struct Place {
  const uint8_t* at;
  const int8_t* a;
  const int32_t *sums, *parts;
  int64_t stride, a_stride, sums_stride;
};

// Begins a group: integer sums of `Used` tiles.
template <int Bits, bool Affine, int Tiles, int Used>
[[gnu::always_inline]] inline void begin_group(const Place& place) LOWBIT_STREAMING {
  constexpr int kOffset = kFactor<Bits> * offset<Bits, Affine>();
  svzero_mask_za(Used == 2 ? 0x33 : 0x11);  // bits t and t + 4: tile t
  if constexpr (kOffset != 0) {
    const svint16_t sums = load_parts(place.parts);
    add_offset<kOffset, 0>(sums);
    if constexpr (Tiles == 2) add_offset<kOffset, 1>(load_parts(place.parts + place.sums_stride));
    else if constexpr (Used == 2) add_offset<kOffset, 1>(sums);
  }
}

// Some blocks of a group.
template <int Bits, bool Affine, int Tiles, int Panels>
[[gnu::always_inline]] inline void add_blocks(Place& place, int64_t blocks, svuint8_t table) LOWBIT_STREAMING {
#pragma clang loop unroll(disable)
  do {
    add_block<Bits, Affine, Tiles, Panels, kWholeBlock>(place.at, place.stride, table, place.a, place.a_stride);
    place.a += kBlockLines * kVectorBytes;
    place.at += code_bits(Bits) * kLineBytes;
  } while (--blocks != 0);
}

// The same where it need not be fast: of a group that a piece cuts.
template <int Bits, bool Affine, int Tiles, int Panels>
[[gnu::noinline]] void add_cut_blocks(Place& place, int64_t blocks, svuint8_t table) LOWBIT_STREAMING {
  add_blocks<Bits, Affine, Tiles, Panels>(place, blocks, table);
}

// Ends a group, whose scales are at `scales`.
template <int Bits, bool Affine, int Tiles, int Panels>
[[gnu::always_inline]] inline void end_group(Place& place, const uint8_t* scales, uint32_t vector0,
                                             uint32_t vector8) LOWBIT_STREAMING {
  svfloat32_t scale = load_factored_scales<Bits>(scales), min = svundef_f32();
  if constexpr (Affine) min = load_scales(scales, 1);
  finish<Affine, 0>(scale, min, place.sums, vector0, vector8);
  if constexpr (Panels == 2) {
    scale = load_factored_scales<Bits>(scales + place.stride);
    if constexpr (Affine) min = load_scales(scales + place.stride, 1);
  }
  if constexpr (Tiles * Panels == 2) {
    finish<Affine, 1>(scale, min, place.sums + (Tiles == 2 ? place.sums_stride : 0), vector0, vector8);
  }
  if constexpr (Affine) place.sums += kTileRows;
  if constexpr (offset<Bits, Affine>() != 0) place.parts += kTileRows;
}

// A piece of k: one or two tiles of rows times one panel, or one tile times two. `begin`: where it is in the first
// panel. Returns its bytes.
template <int Bits, bool Affine, int Tiles, int Panels, bool Halves>
[[gnu::always_inline]] inline int64_t multiply_piece(const Chunk& chunk, const Piece& piece, int64_t panel,
                                                     const uint8_t* begin) LOWBIT_STREAMING {
  constexpr int kUsed = Tiles * Panels, kPanel1 = Panels - 1, kTile1 = Tiles - 1;
  constexpr int kBlockBytes = code_bits(Bits) * kLineBytes, kGroupBytes = (Affine ? 4 : 2) * kPanelRows;
  const svuint8_t table = load_table(chunk.args.layout);
  const uint32_t vector0 = hidden(0), vector8 = hidden(8);
  Place place{begin, chunk.scratch.a, chunk.scratch.sums, chunk.scratch.parts, chunk.args.layout.panel_bytes,
              chunk.a_stride, chunk.sums_stride};

  svzero_za();
  if (piece.first > 0) {
    load_tile<0>(chunk, !piece.begins, panel, 0);
    if constexpr (kUsed == 2) load_tile<1>(chunk, !piece.begins, panel + kPanel1, kTile1);
  }

  int64_t rest = piece.halves;
  if constexpr (!Halves) {
    const auto end = [&]() __attribute__((always_inline)) LOWBIT_STREAMING {
      end_group<Bits, Affine, Tiles, Panels>(place, place.at, vector0, vector8);
      place.at += kGroupBytes;
    };
    if (!piece.begins) {
      const int64_t count = piece.first_left < rest ? piece.first_left : rest;
      add_cut_blocks<Bits, Affine, Tiles, Panels>(place, count >> 1, table);
      rest -= count;
      if (rest != 0 || !piece.open) end();
    }
    const int64_t blocks = piece.group_halves >> 1, groups = rest / piece.group_halves;
    rest -= groups * piece.group_halves;
    for (int64_t left = groups; left != 0; --left) {
      begin_group<Bits, Affine, Tiles, kUsed>(place);
      add_blocks<Bits, Affine, Tiles, Panels>(place, blocks, table);
      end();
    }
    if (rest != 0) {
      begin_group<Bits, Affine, Tiles, kUsed>(place);
      add_cut_blocks<Bits, Affine, Tiles, Panels>(place, rest >> 1, table);
      if (!piece.open) end();
    }
  } else if (piece.group_halves == 1) {
    const auto add_group = [&](auto half, const uint8_t* scales) __attribute__((always_inline)) LOWBIT_STREAMING {
      begin_group<Bits, Affine, Tiles, kUsed>(place);
      add_block<Bits, Affine, Tiles, Panels, decltype(half)::value>(place.at, place.stride, table, place.a,
                                                                    place.a_stride);
      place.a += kHalfLines * kVectorBytes;
      end_group<Bits, Affine, Tiles, Panels>(place, scales, vector0, vector8);
    };
    for (;;) {
      const uint8_t* scales = place.at + kBlockBytes;
      add_group(std::integral_constant<::lowbit::Halves, kFirstHalf>(), scales);
      if (--rest == 0) break;
      add_group(std::integral_constant<::lowbit::Halves, kSecondHalf>(), scales + kGroupBytes);
      place.at = scales + 2 * kGroupBytes;
      if (--rest == 0) break;
    }
  } else {
    bool begins = piece.begins, second = false;  // second: a block's first half is done
    int64_t left = piece.first_left;
    int64_t skip = 0;  // bytes of the scales behind this block, of the group that its first half ended
    for (;;) {
      if (begins) begin_group<Bits, Affine, Tiles, kUsed>(place);
      int64_t count = left < rest ? left : rest;
      rest -= count;
      const auto add_half = [&](auto half) __attribute__((always_inline)) LOWBIT_STREAMING {
        add_block<Bits, Affine, Tiles, Panels, decltype(half)::value>(place.at, place.stride, table, place.a,
                                                                      place.a_stride);
        place.a += kHalfLines * kVectorBytes;
      };
      if (second) {
        add_half(std::integral_constant<::lowbit::Halves, kSecondHalf>());
        place.at += kBlockBytes + skip;
        --count;
        second = false;
      }
      if (count > 1) add_blocks<Bits, Affine, Tiles, Panels>(place, count >> 1, table);
      const uint8_t* scales = place.at;
      if (count % 2 != 0) {
        add_half(std::integral_constant<::lowbit::Halves, kFirstHalf>());
        scales += kBlockBytes;  // behind the whole block
        skip = kGroupBytes;
        second = true;
      }
      if (rest == 0 && piece.open) break;
      if (!second) place.at += kGroupBytes;
      end_group<Bits, Affine, Tiles, Panels>(place, scales, vector0, vector8);
      if (rest == 0) break;
      begins = true;
      left = piece.group_halves;
    }
  }
  if (piece.last) {
    store_outputs<Tiles, Panels>(chunk, panel);
  } else {
    store_tile<0>(chunk, piece.open, panel, 0);
    if constexpr (kUsed == 2) store_tile<1>(chunk, piece.open, panel + kPanel1, kTile1);
  }
  return place.at - begin;
}

template <int Bits, bool Affine, bool Halves>
void multiply_chunk(const Chunk& chunk) LOWBIT_STREAMING {
  const Layout& layout = chunk.args.layout;
  const int64_t halves = chunk.halves, group_halves = chunk.group_halves;
  const uint8_t* at = chunk.args.panels + chunk.first_panel * layout.panel_bytes;  // of the first panel
  for (int64_t first = 0; first < halves; first += chunk.piece_halves) {
    Piece piece;
    piece.first = first;
    piece.halves = halves - first < chunk.piece_halves ? halves - first : chunk.piece_halves;
    piece.last = first + piece.halves == halves;
    piece.first_group = first / group_halves;
    piece.groups = (first + piece.halves - 1) / group_halves - piece.first_group + 1;
    piece.first_left = group_halves - first % group_halves;
    piece.group_halves = group_halves;
    piece.begins = first % group_halves == 0;
    piece.open = !piece.last && (first + piece.halves) % group_halves != 0;
    transpose_piece<Bits, Affine>(chunk, piece);
    const uint8_t* next = at;
    int64_t panel = 0, moved = 0;
    for (const int64_t step = chunk.tiles == 2 ? 1 : 2; panel + step <= chunk.panels;
         panel += step, next += step * layout.panel_bytes) {
      moved = step == 1 ? multiply_piece<Bits, Affine, 2, 1, Halves>(chunk, piece, panel, next)
                        : multiply_piece<Bits, Affine, 1, 2, Halves>(chunk, piece, panel, next);
    }
    if (panel < chunk.panels) moved = multiply_piece<Bits, Affine, 1, 1, Halves>(chunk, piece, panel, next);
    at += moved;
  }
}

}  // namespace
}  // namespace lowbit
