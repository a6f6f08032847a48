// Many rows of m on SME2: outer products, 16 rows of m by 16 outputs in a tile of ZA. sme2.cpp explains it.
#pragma once

#include <type_traits>

#include "tiles_sme2.h"

namespace lowbit {
namespace {

// Integer sums of `Tile` += activations * line.
template <int Bits, int Tile>
LOWBIT_INLINE inline void multiply(svint8_t a, svuint8_t line) LOWBIT_STREAMING {
  const svbool_t all = svptrue_b8();
  if constexpr (is_signed(Bits)) svmopa_za32_s8_m(Tile, all, all, a, svreinterpret_s8_u8(line));
  else svsumopa_za32_s8_m(Tile, all, all, a, line);
}

// Lines J to End - 1 of a block of panel `Panel`. a0: activations of 16 rows; a1: of the next 16 if there are two tiles of
// rows.
template <int Bits, bool Affine, int Tiles, int Panel, int J, int End>
LOWBIT_INLINE inline void add_lines(svuint8x4_t low, svuint8x4_t high, svuint8_t table, svint8x4_t a0,
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
LOWBIT_INLINE inline void add_panel(const uint8_t* at, svuint8_t table, svint8x4_t first0, svint8x4_t first1,
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

// A block, or half of it, of every panel; the second panel is `stride` bytes after the first. `a`: the block's activations.
template <int Bits, bool Affine, int Tiles, int Panels, Halves Wanted>
LOWBIT_INLINE inline void add_block(const uint8_t* at, int64_t stride, svuint8_t table, const int8_t* a) LOWBIT_STREAMING {
  const svcount_t all = svptrue_c8();
  svint8x4_t first0 = svundef4_s8(), first1 = first0, second0 = first0, second1 = first0;
  if constexpr ((Wanted & kFirstHalf) != 0) {
    first0 = svld1_vnum_s8_x4(all, a, 0);
    if constexpr (Tiles == 2) first1 = svld1_vnum_s8_x4(all, a, kBlockLines);
  }
  if constexpr ((Wanted & kSecondHalf) != 0) {
    second0 = svld1_vnum_s8_x4(all, a, kHalfLines);
    if constexpr (Tiles == 2) second1 = svld1_vnum_s8_x4(all, a, kBlockLines + kHalfLines);
  }
  add_panel<Bits, Affine, Tiles, 0, Wanted>(at, table, first0, first1, second0, second1);
  if constexpr (Panels == 2) {
    add_panel<Bits, Affine, 1, 1, Wanted>(at + stride, table, first0, first0, second0, second0);
  }
}

using Whole = std::integral_constant<Halves, kWholeBlock>;
using FirstHalf = std::integral_constant<Halves, kFirstHalf>;
using SecondHalf = std::integral_constant<Halves, kSecondHalf>;
using Tile0 = std::integral_constant<int, 0>;
using Tile1 = std::integral_constant<int, 1>;

// Read position in a piece. `at` is in the first panel; the second panel is `stride` bytes after it.
struct Place {
  int64_t stride;
  const uint8_t* at;
  const int8_t* a;
  const float *segment, *sums;
};

// Lanes that put the 16-bit scales into the swapped order of outputs, each in the lower half of a word. Hidden from Clang,
// which would recompute them for each group.
template <int First>
LOWBIT_INLINE inline svuint16_t scale_lanes() __arm_streaming {
  svuint32_t lanes = svorr_n_u32_x(svptrue_b32(), swapped_lanes(), 0xffff0000u | First);
  __asm__ volatile("" : "+w"(lanes));
  return svreinterpret_u16_u32(lanes);
}

LOWBIT_INLINE inline svfloat32_t swapped_scales(svuint16_t scales, svuint16_t lanes) __arm_streaming {
  return svcvt_f32_f16_x(svptrue_b32(), svreinterpret_f16_u16(svtbl_u16(scales, lanes)));
}

template <bool Affine>
LOWBIT_INLINE inline svuint16_t load_group(const uint8_t* at) __arm_streaming {
  return svld1_u16(Affine ? svptrue_b16() : svptrue_pat_b16(SV_VL16), reinterpret_cast<const uint16_t*>(at));
}

// The c of the contract. If sums are 16 times as large and a group is one segment, the sums start at the bits of c / 16, so
// that they count sixteenths. Longer groups divide their scales by 16 instead, because later segments are converted.
template <int Bits, Segments Of>
constexpr int start_exponent() {
  return kInPlace<Bits> && Of == Segments::one ? 19 : 23;
}

template <int Bits, Segments Of>
LOWBIT_INLINE inline svfloat32_t start_value() __arm_streaming {
  return svdup_n_f32(1.5f * static_cast<float>(1 << start_exponent<Bits, Of>()));
}

LOWBIT_INLINE inline svint16_t load_start(const float* segment, int64_t vector) __arm_streaming {
  return svreinterpret_s16_f32(svld1_vnum_f32(svptrue_b32(), segment, vector));
}

// Starts integer sums: at the bits of -c in a group's first segment, otherwise at 0, plus the part that the products lack.
// One product of two pairs of int16 computes both, because A is at most 64 * 127.
template <int Bits, bool Affine, Segments Of, int Tiles, int Panels, bool First>
LOWBIT_INLINE inline void begin_segment(const Place& place) LOWBIT_STREAMING {
  svzero_mask_za(Tiles * Panels == 2 ? 0x33 : 0x11);  // bits t and t + 4 select tile t
  constexpr int kOffset = kFactor<Bits> * offset<Bits, Affine>();
  if constexpr (First || kOffset != 0) {
    constexpr uint32_t kStart = uint32_t{127 + start_exponent<Bits, Of>()} << 23 | 0x400000;
    constexpr uint32_t kColumn = First ? (0x80000000 - kStart) / -kStartRow : 0;
    const svint16_t column = svreinterpret_s16_u32(svdup_n_u32(kColumn << 16 | (kOffset & 0xffff)));
    const svbool_t all = svptrue_b16();
    svint16_t row0, row1;
    if constexpr (kOffset == 0) row0 = row1 = svreinterpret_s16_u32(svdup_n_u32(uint32_t{kStartRow & 0xffff} << 16));
    else row0 = row1 = load_start(place.segment, Tiles);
    if constexpr (kOffset != 0 && Tiles == 2) row1 = load_start(place.segment, Tiles + 1);
    svmopa_za32_s16_m(0, all, all, row0, column);
    if constexpr (Tiles * Panels == 2) svmopa_za32_s16_m(1, all, all, row1, column);
  }
}

// Ends a group: calls finish(tile number, scale) for each tile. Affine: adds the mins' part to the float sums in tiles kAcc and
// kAcc + 1.
template <int Bits, bool Affine, Segments Of, int Tiles, int Panels, class Finish>
LOWBIT_INLINE inline void end_group(Place& place, const uint8_t* scales, svuint16_t lanes, svuint16_t min_lanes,
                                    Finish finish) LOWBIT_STREAMING {
  constexpr int kAcc = Of == Segments::many ? 0 : 2;
  const svbool_t all = svptrue_b32();
  svuint16_t group0 = load_group<Affine>(scales), group1 = group0;
  if constexpr (Panels == 2) group1 = load_group<Affine>(scales + place.stride);
  svfloat32_t scale0 = swapped_scales(group0, lanes), scale1 = swapped_scales(group1, lanes);
  if constexpr (kInPlace<Bits> && Of != Segments::one) {
    scale0 = svmul_n_f32_x(all, scale0, 1.0f / kFactor<Bits>);
    scale1 = svmul_n_f32_x(all, scale1, 1.0f / kFactor<Bits>);
  }
  finish(std::integral_constant<int, 0>(), scale0);
  if constexpr (Affine) svmopa_za32_f32_m(kAcc, all, all, svld1_f32(all, place.sums), swapped_scales(group0, min_lanes));
  if constexpr (Tiles * Panels == 2) {
    finish(std::integral_constant<int, 1>(), scale1);
    if constexpr (Affine) {
      svmopa_za32_f32_m(kAcc + 1, all, all, svld1_vnum_f32(all, place.sums, Tiles - 1), swapped_scales(group1, min_lanes));
    }
  }
  if constexpr (Affine) place.sums += Tiles * kTileRows;
}

// Multiplies a piece of k: one or two tiles of rows by one panel, or one tile by two panels. `begin` is the piece's start in
// the first panel. Returns its number of bytes.
template <int Bits, bool Affine, bool Halves, Segments Of, int Tiles, int Panels>
LOWBIT_INLINE inline int64_t multiply_piece(const Chunk& chunk, const Piece& piece, int64_t panel,
                                            const uint8_t* begin) LOWBIT_STREAMING {
  constexpr int kUsed = Tiles * Panels;
  constexpr bool kMany = Of == Segments::many;
  constexpr int kBlockBytes = code_bits(Bits) * kLineBytes, kGroupBytes = group_bytes(Affine);
  const svuint8_t table = load_table(chunk.args.layout);
  const svuint16_t lanes = scale_lanes<0>(), min_lanes = Affine ? scale_lanes<kPanelRows>() : lanes;
  const svfloat32_t c = start_value<Bits, Of>();
  const Indices indices;
  Scratch& scratch = chunk.scratch;
  Place place{chunk.args.layout.panel_bytes, begin, scratch.a, scratch.segments, scratch.sums};
  float *const acc0 = scratch.acc[panel][0], *const acc1 = scratch.acc[panel + Panels - 1][Tiles - 1];
  float *const open0 = scratch.open[panel][0], *const open1 = scratch.open[panel + Panels - 1][Tiles - 1];
  // Tiles 2 and 3 keep float sums, or P.
  float *const kept0 = kMany ? open0 : acc0, *const kept1 = kMany ? open1 : acc1;
  if (piece.first == 0) {
    svzero_za();
    if constexpr (kMany) {
      store_tile<0>(indices, acc0);
      if constexpr (kUsed == 2) store_tile<1>(indices, acc1);
    }
  } else if (!kMany || !piece.begins) {
    load_tile<2>(indices, kept0);
    if constexpr (kUsed == 2) load_tile<3>(indices, kept1);
  }

  bool second = Halves && piece.first % 2 != 0;  // whether a block's first half is done
  // Bytes of scales after this block that belong to the group that the block's first half ended.
  int64_t skip = second && piece.begins ? kGroupBytes : 0;
  // The position of the scales of a group that ends here; pass_scales() moves past them.
  const auto scales = [&]() LOWBIT_INLINE LOWBIT_STREAMING {
    return second ? place.at + kBlockBytes : place.at;
  };
  const auto pass_scales = [&]() LOWBIT_INLINE LOWBIT_STREAMING {
    if (second) skip = kGroupBytes;
    else place.at += kGroupBytes;
  };
  const auto add = [&](auto wanted) LOWBIT_INLINE LOWBIT_STREAMING {
    constexpr auto kWanted = decltype(wanted)::value;
    add_block<Bits, Affine, Tiles, Panels, kWanted>(place.at, place.stride, table, place.a);
    if (kWanted == kFirstHalf) return;
    place.a += Tiles * kBlockLines * kVectorBytes;
    place.at += kBlockBytes;
  };
  // Starts the integer sums of a segment. `first`: whether it is the first of its group.
  const auto begin_sums = [&](auto first) LOWBIT_INLINE LOWBIT_STREAMING {
    begin_segment<Bits, Affine, Of, Tiles, Panels, decltype(first)::value>(place);
  };
  const auto add_segment = [&](int64_t count) LOWBIT_INLINE LOWBIT_STREAMING {
    if constexpr (!Halves) {
      if (count > 2) add(Whole());
      return add(Whole());
    }
    if (second) {
      add(SecondHalf());
      place.at += skip;
      skip = 0;
      --count;
      second = false;
    }
#pragma clang loop unroll(disable)
    for (; count > 1; count -= 2) add(Whole());
    if (count != 0) {
      add(FirstHalf());
      second = true;
    }
  };
  constexpr int64_t kSegmentVectors = (offset<Bits, Affine>() != 0 ? 2 : 1) * Tiles;
  // t of a tile's rows, for this segment or the one `back` segments earlier.
  const auto t = [&](auto tile, int64_t back = 0) LOWBIT_INLINE LOWBIT_STREAMING {
    const int64_t vector = Tiles == 2 ? decltype(tile)::value : 0;
    return svld1_vnum_f32(svptrue_b32(), place.segment, vector - back * kSegmentVectors);
  };
  const auto end = [&](const uint8_t* at, auto finish) LOWBIT_INLINE LOWBIT_STREAMING {
    end_group<Bits, Affine, Of, Tiles, Panels>(place, at, lanes, min_lanes, finish);
  };
  const auto end_one = [&](const uint8_t* at) LOWBIT_INLINE LOWBIT_STREAMING {
    const svfloat32_t t0 = t(Tile0()), t1 = Tiles == 2 ? t(Tile1()) : t0;
    end(at, [&](auto tile, svfloat32_t scale) LOWBIT_INLINE LOWBIT_STREAMING {
      constexpr int kTile = decltype(tile)::value;
      finish_group<kTile>(indices, c, kTile == 0 ? t0 : t1, scale);
    });
    place.segment += kSegmentVectors * kTileRows;
  };

  const int64_t group_halves = chunk.group_halves;
  int64_t rest = piece.halves;
  if constexpr (Of == Segments::one && !Halves) {
    const auto groups = [&](auto blocks, int64_t count) LOWBIT_INLINE LOWBIT_STREAMING {
#pragma clang loop unroll(disable)
      for (; count != 0; --count) {
        begin_sums(std::true_type());
        if constexpr (decltype(blocks)::value == 2) add(Whole());
        add(Whole());
        end_one(place.at);
        place.at += kGroupBytes;
      }
    };
    const int64_t of_two = group_halves == kSegmentHalves ? rest / kSegmentHalves : 0;
    groups(std::integral_constant<int, 2>(), of_two);
    groups(std::integral_constant<int, 1>(), (rest - of_two * kSegmentHalves) / 2);
  } else if (Of == Segments::one && group_halves == 1) {
    const auto group = [&](auto half, int64_t scales_offset) LOWBIT_INLINE LOWBIT_STREAMING {
      begin_sums(std::true_type());
      add(half);
      end_one(place.at + scales_offset);
    };
    for (;;) {
      group(FirstHalf(), kBlockBytes);
      if (--rest == 0) break;
      group(SecondHalf(), kGroupBytes);
      place.at += 2 * kGroupBytes;
      if (--rest == 0) break;
    }
  } else if constexpr (Of == Segments::one) {
    for (; rest > 0; rest -= group_halves) {
      begin_sums(std::true_type());
      add_segment(group_halves < rest ? group_halves : rest);
      end_one(scales());
      pass_scales();
    }
  } else if constexpr (Of == Segments::two) {
    for (; rest > kSegmentHalves; rest -= group_halves) {
      begin_sums(std::true_type());
      add_segment(kSegmentHalves);
      keep_sums<0>(indices, open0);
      if constexpr (kUsed == 2) keep_sums<1>(indices, open1);
      place.segment += kSegmentVectors * kTileRows;
      begin_sums(std::false_type());
      add_segment((group_halves < rest ? group_halves : rest) - kSegmentHalves);
      end(scales(), [&](auto tile, svfloat32_t scale) LOWBIT_INLINE LOWBIT_STREAMING {
        constexpr int kTile = decltype(tile)::value;
        finish_two<kTile>(indices, kTile == 0 ? open0 : open1, c, t(tile, 1), t(tile), scale);
      });
      place.segment += kSegmentVectors * kTileRows;
      pass_scales();
    }
    if (rest > 0) {  // a short last group
      begin_sums(std::true_type());
      add_segment(rest);
      end_one(scales());
      pass_scales();
    }
  } else {
    int64_t remaining = piece.first_left;
    bool begins = piece.begins;
    while (rest != 0) {
      int64_t here = remaining < rest ? remaining : rest;
      rest -= here;
      const auto finish = [&](auto first) LOWBIT_INLINE LOWBIT_STREAMING {
        finish_segment<0, decltype(first)::value>(indices, c, t(Tile0()));
        if constexpr (kUsed == 2) finish_segment<1, decltype(first)::value>(indices, c, t(Tile1()));
      };
      while (here > 0) {
        begins ? begin_sums(std::true_type()) : begin_sums(std::false_type());
        add_segment(here < kSegmentHalves ? here : kSegmentHalves);
        begins ? finish(std::true_type()) : finish(std::false_type());
        begins = false;
        place.segment += kSegmentVectors * kTileRows;
        here -= kSegmentHalves;
      }
      if (rest == 0 && piece.open) break;
      end(scales(), [&](auto tile, svfloat32_t scale) LOWBIT_INLINE LOWBIT_STREAMING {
        constexpr int kTile = decltype(tile)::value;
        load_tile<kTile>(indices, kTile == 0 ? acc0 : acc1);
        add_products<kTile>(indices, scale);
      });
      store_tile<0>(indices, acc0);
      if constexpr (kUsed == 2) store_tile<1>(indices, acc1);
      pass_scales();
      begins = true;
      remaining = group_halves;
    }
  }
  if (piece.last) {
    store_outputs<Tiles, Panels, kMany ? 0 : 2>(chunk, panel);
  } else if (!kMany || piece.open) {
    store_tile<2>(indices, kept0);
    if constexpr (kUsed == 2) store_tile<3>(indices, kept1);
  }
  return place.at - begin;
}

template <int Bits, bool Affine, bool Halves, Segments Of>
void multiply_chunk(const Chunk& chunk) LOWBIT_STREAMING {
  const int64_t panel_bytes = chunk.args.layout.panel_bytes;
  const uint8_t* at = chunk.args.panels + chunk.first_panel * panel_bytes;  // in the first panel
  for (int64_t first = 0; first < chunk.halves;) {
    const Piece piece = next_piece(chunk, first);
    transpose_piece<Bits, Affine>(chunk, piece);
    const uint8_t* next = at;
    int64_t panel = 0, moved = 0;
    for (const int64_t step = chunk.tiles == 2 ? 1 : 2; panel + step <= chunk.panels;
         panel += step, next += step * panel_bytes) {
      moved = step == 1 ? multiply_piece<Bits, Affine, Halves, Of, 2, 1>(chunk, piece, panel, next)
                        : multiply_piece<Bits, Affine, Halves, Of, 1, 2>(chunk, piece, panel, next);
    }
    if (panel < chunk.panels) moved = multiply_piece<Bits, Affine, Halves, Of, 1, 1>(chunk, piece, panel, next);
    at += moved;
    first += piece.halves;
  }
}

}  // namespace
}  // namespace lowbit
