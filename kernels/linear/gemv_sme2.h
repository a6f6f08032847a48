// Up to 4 rows of m on SME2: dot products of four panels at once, in vectors of ZA. sme2.cpp explains it.
#pragma once

#include "streaming_sme2.h"

namespace lowbit {
namespace {

constexpr int kFewRows = 4;
constexpr int kFewPanels = 4;

// Up to 4 rows of m times some panels.
struct Few {
  const LinearArgs& args;
  int64_t first_row, rows;
  int64_t first_panel, panels;
  int64_t halves = half_blocks(args.layout), group_halves = args.layout.group_inputs() / kHalfInputs;
};

// Adds line * activations 4 J to 4 J + 3 of a half block to the integer sums of row `row` of m.
template <int Bits, int J>
LOWBIT_INLINE inline void dot(uint32_t row, svuint8x4_t w, svint8_t a) LOWBIT_STREAMING {
  if constexpr (is_signed(Bits)) {
    const svint8x4_t levels = svcreate4_s8(svreinterpret_s8_u8(svget4_u8(w, 0)), svreinterpret_s8_u8(svget4_u8(w, 1)),
                                           svreinterpret_s8_u8(svget4_u8(w, 2)), svreinterpret_s8_u8(svget4_u8(w, 3)));
    svdot_lane_za32_s8_vg1x4(row, levels, a, J);
  } else {
    svusdot_lane_za32_u8_vg1x4(row, w, a, J);
  }
}

// 16 inputs of each row, repeated in every quarter of a vector.
template <int Rows>
LOWBIT_INLINE inline svint8x4_t load_rows(const int8_t* const* a, int64_t input) __arm_streaming {
  const svbool_t all = svptrue_b8();
  svint8x4_t rows = svset4_s8(svundef4_s8(), 0, svld1rq_s8(all, a[0] + input));
  if constexpr (Rows > 1) rows = svset4_s8(rows, 1, svld1rq_s8(all, a[1] + input));
  if constexpr (Rows > 2) rows = svset4_s8(rows, 2, svld1rq_s8(all, a[2] + input));
  if constexpr (Rows > 2) rows = svset4_s8(rows, 3, svld1rq_s8(all, a[3] + input));
  return rows;
}

// Packed line I of four panels, `at` bytes after their beginnings.
template <int I>
LOWBIT_INLINE inline svuint8x4_t load_four(const uint8_t* const* panel, int64_t at) __arm_streaming {
  const svbool_t all = svptrue_b8();
  if constexpr (I == 0) {  // needs no register for the address
    return svcreate4_u8(svld1_u8(all, panel[0] + at), svld1_u8(all, panel[1] + at), svld1_u8(all, panel[2] + at),
                        svld1_u8(all, panel[3] + at));
  } else {
    return svcreate4_u8(svld1_vnum_u8(all, panel[0] + at, I), svld1_vnum_u8(all, panel[1] + at, I),
                        svld1_vnum_u8(all, panel[2] + at, I), svld1_vnum_u8(all, panel[3] + at, I));
  }
}

// Packed lines 0 to 3 of four panels, from `at` on. One load puts four lines of a panel in registers four apart, so that one
// line of all panels is in four adjacent registers, as dot products need. Compilers do not find this, so the registers are
// named.
struct FourLines {
  LOWBIT_INLINE static void load(const uint8_t* const* panel, int64_t at, svuint8x4_t& line0,
                                 svuint8x4_t& line1, svuint8x4_t& line2,
                                 svuint8x4_t& line3) __arm_streaming {
    register svuint8_t p0l0 __asm__("z16"), p0l1 __asm__("z20"), p0l2 __asm__("z24"), p0l3 __asm__("z28");
    register svuint8_t p1l0 __asm__("z17"), p1l1 __asm__("z21"), p1l2 __asm__("z25"), p1l3 __asm__("z29");
    register svuint8_t p2l0 __asm__("z18"), p2l1 __asm__("z22"), p2l2 __asm__("z26"), p2l3 __asm__("z30");
    register svuint8_t p3l0 __asm__("z19"), p3l1 __asm__("z23"), p3l2 __asm__("z27"), p3l3 __asm__("z31");
    __asm__ volatile(
        "ld1b {z16.b, z20.b, z24.b, z28.b}, %21/z, [%16, %20]\n\t"
        "ld1b {z17.b, z21.b, z25.b, z29.b}, %21/z, [%17, %20]\n\t"
        "ld1b {z18.b, z22.b, z26.b, z30.b}, %21/z, [%18, %20]\n\t"
        "ld1b {z19.b, z23.b, z27.b, z31.b}, %21/z, [%19, %20]"
        : "=w"(p0l0), "=w"(p0l1), "=w"(p0l2), "=w"(p0l3), "=w"(p1l0), "=w"(p1l1), "=w"(p1l2), "=w"(p1l3), "=w"(p2l0),
          "=w"(p2l1), "=w"(p2l2), "=w"(p2l3), "=w"(p3l0), "=w"(p3l1), "=w"(p3l2), "=w"(p3l3)
        : "r"(panel[0]), "r"(panel[1]), "r"(panel[2]), "r"(panel[3]), "r"(at), "Uph"(svptrue_c8())
        : "memory");
    line0 = svcreate4_u8(p0l0, p1l0, p2l0, p3l0);
    line1 = svcreate4_u8(p0l1, p1l1, p2l1, p3l1);
    line2 = svcreate4_u8(p0l2, p1l2, p2l2, p3l2);
    line3 = svcreate4_u8(p0l3, p1l3, p2l3, p3l3);
  }
};

// A barrier: results of these vectors are not computed before it. Otherwise Clang would compute all lines of a block at once
// and run out of registers.
LOWBIT_INLINE inline svuint8x4_t settled(svuint8x4_t v) __arm_streaming {
  svuint8_t v0 = svget4_u8(v, 0), v1 = svget4_u8(v, 1), v2 = svget4_u8(v, 2), v3 = svget4_u8(v, 3);
  __asm__ volatile("" : "+w"(v0), "+w"(v1), "+w"(v2), "+w"(v3));
  return svcreate4_u8(v0, v1, v2, v3);
}

// Line J of four panels times the activations of all rows.
template <int Bits, bool Affine, int Rows, Halves Wanted, int J>
LOWBIT_INLINE inline void use(svuint8x4_t codes, svuint8_t table, svint8x4_t a0, svint8x4_t a1) LOWBIT_STREAMING {
  if constexpr ((Wanted & (J < 4 ? kFirstHalf : kSecondHalf)) != 0) {
    const svuint8x4_t w = levels_of<Bits>(codes, table);
    const svint8x4_t a = J < 4 ? a0 : a1;
    dot<Bits, J % 4>(0, w, svget4_s8(a, 0));
    if constexpr (Rows > 1) dot<Bits, J % 4>(1, w, svget4_s8(a, 1));
    if constexpr (Rows > 2) dot<Bits, J % 4>(2, w, svget4_s8(a, 2));
    if constexpr (Rows > 2) dot<Bits, J % 4>(3, w, svget4_s8(a, 3));
  }
}

// Line number `Index` of the lines read so far.
template <int Index, class... Lines>
LOWBIT_INLINE inline svuint8x4_t pick_line(svuint8x4_t line, Lines... lines) __arm_streaming {
  if constexpr (Index == 0) return line;
  else return pick_line<Index - 1>(lines...);
}

// Joins the runs of line J's codes, from run `Run` on, that are joined after the line of Step.
template <int Bits, int J, int Step, int Run, class... Lines>
LOWBIT_INLINE inline svuint8x4_t join_at(svuint8x4_t codes, Lines... lines) __arm_streaming {
  constexpr CodePlacement where = placement(Bits, J);
  if constexpr (Run < where.count) {
    if constexpr (join_step(Bits, J, Run) == Step) {
      codes = join_run<Bits, J, Run>(codes, pick_line<line_of_step(Bits, where.run[Run].line)>(lines...));
    }
    return join_at<Bits, J, Step, Run + 1>(codes, lines...);
  } else {
    return codes;
  }
}

// Adds the products of the lines from J on that the packed line of Step completes. Returns codes that wait for a later line.
template <int Bits, bool Affine, int Rows, Halves Wanted, int Step, int J, class... Lines>
LOWBIT_INLINE inline svuint8x4_t use_lines(svuint8_t table, svint8x4_t a0, svint8x4_t a1, svuint8x4_t waiting,
                                           Lines... lines) LOWBIT_STREAMING {
  constexpr int kBits = code_bits(Bits);
  if constexpr (J < kBlockLines) {
    const svuint8x4_t codes = join_at<kBits, J, Step, 0>(waiting, lines...);
    if constexpr (join_step(kBits, J, placement(kBits, J).count - 1) == Step) {
      use<Bits, Affine, Rows, Wanted, J>(finish_line<kBits, J>(codes), table, a0, a1);
      return use_lines<Bits, Affine, Rows, Wanted, Step, J + 1>(table, a0, a1, waiting, lines...);
    } else {
      return use_lines<Bits, Affine, Rows, Wanted, Step, J + 1>(table, a0, a1, codes, lines...);
    }
  } else {
    return waiting;
  }
}

// Multiplies packed lines in the order of line_of_step(), after the `sizeof...(lines)` lines read so far. Whole blocks of
// 6 bits read three lines at a time, because Clang would copy them otherwise.
template <int Bits, bool Affine, int Rows, Halves Wanted, class... Lines>
LOWBIT_INLINE inline void dot_lines(const uint8_t* const* panel, int64_t at, svuint8_t table, svint8x4_t a0, svint8x4_t a1,
                                    svuint8x4_t waiting, Lines... lines) LOWBIT_STREAMING {
  constexpr int kBits = code_bits(Bits), kStep = sizeof...(lines);
  if constexpr (kStep < kBits && kBits == 6 && Wanted == kWholeBlock) {
    const svuint8x4_t line0 = load_four<line_of_step(6, kStep)>(panel, at);
    const svuint8x4_t line1 = load_four<line_of_step(6, kStep + 1)>(panel, at);
    const svuint8x4_t line2 = load_four<line_of_step(6, kStep + 2)>(panel, at);
    waiting = use_lines<Bits, Affine, Rows, Wanted, kStep, 0>(table, a0, a1, waiting, lines..., line0);
    waiting = use_lines<Bits, Affine, Rows, Wanted, kStep + 1, 0>(table, a0, a1, waiting, lines..., line0, line1);
    waiting = use_lines<Bits, Affine, Rows, Wanted, kStep + 2, 0>(table, a0, a1, waiting, lines..., line0, line1, line2);
    dot_lines<Bits, Affine, Rows, Wanted>(panel, at, table, a0, a1, waiting, lines..., line0, line1, line2);
  } else if constexpr (kStep < kBits) {
    const svuint8x4_t line = load_four<line_of_step(kBits, kStep)>(panel, at);
    waiting = use_lines<Bits, Affine, Rows, Wanted, kStep, 0>(table, a0, a1, waiting, lines..., line);
    dot_lines<Bits, Affine, Rows, Wanted>(panel, at, table, a0, a1, waiting, lines..., line);
  }
}

// The lines from J on of a 1-bit block, which share one packed line; two lines at a time.
template <int Bits, bool Affine, int Rows, Halves Wanted, int J>
LOWBIT_INLINE inline void dot_bits(svuint8x4_t packed, svuint8_t table, svint8x4_t a0, svint8x4_t a1) LOWBIT_STREAMING {
  if constexpr (J < kBlockLines) {
    use<Bits, Affine, Rows, Wanted, J>(finish_line<1, J, !Affine>(packed), table, a0, a1);
    use<Bits, Affine, Rows, Wanted, J + 1>(finish_line<1, J + 1, !Affine>(packed), table, a0, a1);
    dot_bits<Bits, Affine, Rows, Wanted, J + 2>(settled(packed), table, a0, a1);
  }
}

// Lines J and J + 4 of a block of 4 bits, which share a packed line.
template <int Bits, bool Affine, int Rows, Halves Wanted, int J>
LOWBIT_INLINE inline void dot_nibbles(svuint8x4_t packed, svuint8_t table, svint8x4_t a0, svint8x4_t a1) LOWBIT_STREAMING {
  if constexpr (kInPlace<Bits>) {
    use<Bits, Affine, Rows, Wanted, J + 4>(and_mask(packed, 0xf0), table, a0, a1);
    use<Bits, Affine, Rows, Wanted, J>(shift_left_all<4>(packed), table, a0, a1);
  } else {
    if constexpr (J > 0) packed = settled(packed);
    use<Bits, Affine, Rows, Wanted, J>(finish_line<4, J>(packed), table, a0, a1);
    use<Bits, Affine, Rows, Wanted, J + 4>(finish_line<4, J + 4>(packed), table, a0, a1);
  }
}

// Multiplies a block, or half of it, of four panels. A packed line is loaded when it is first needed, so few are in registers
// at a time. Computations for lines of an unused half are dead code.
template <int Bits, bool Affine, int Rows, Halves Wanted>
LOWBIT_INLINE inline void dot_block(const uint8_t* const* panel, int64_t at, svuint8_t table, const int8_t* const* a,
                                    int64_t input) LOWBIT_STREAMING {
  __asm__ volatile("" : "+r"(at));  // one offset for all panels; compilers would compute four addresses
  svint8x4_t a0 = svundef4_s8(), a1 = a0;
  if constexpr ((Wanted & kFirstHalf) != 0) a0 = load_rows<Rows>(a, input);
  if constexpr ((Wanted & kSecondHalf) != 0) a1 = load_rows<Rows>(a, input + kHalfInputs);
  svuint8x4_t q0, q1, q2, q3;
  if constexpr (code_bits(Bits) == 1) {
    dot_bits<Bits, Affine, Rows, Wanted, 0>(load_four<0>(panel, at), table, a0, a1);
  } else if constexpr (code_bits(Bits) == 4) {
    FourLines::load(panel, at, q0, q1, q2, q3);
    dot_nibbles<Bits, Affine, Rows, Wanted, 0>(q0, table, a0, a1);
    dot_nibbles<Bits, Affine, Rows, Wanted, 1>(q1, table, a0, a1);
    dot_nibbles<Bits, Affine, Rows, Wanted, 2>(q2, table, a0, a1);
    dot_nibbles<Bits, Affine, Rows, Wanted, 3>(q3, table, a0, a1);
  } else if constexpr (Bits == 8) {
    if constexpr ((Wanted & kFirstHalf) != 0) {
      FourLines::load(panel, at, q0, q1, q2, q3);
      use<Bits, Affine, Rows, Wanted, 0>(q0, table, a0, a1);
      use<Bits, Affine, Rows, Wanted, 1>(q1, table, a0, a1);
      use<Bits, Affine, Rows, Wanted, 2>(q2, table, a0, a1);
      use<Bits, Affine, Rows, Wanted, 3>(q3, table, a0, a1);
    }
    if constexpr ((Wanted & kSecondHalf) != 0) {
      FourLines::load(panel, at + 4 * kLineBytes, q0, q1, q2, q3);
      use<Bits, Affine, Rows, Wanted, 4>(q0, table, a0, a1);
      use<Bits, Affine, Rows, Wanted, 5>(q1, table, a0, a1);
      use<Bits, Affine, Rows, Wanted, 6>(q2, table, a0, a1);
      use<Bits, Affine, Rows, Wanted, 7>(q3, table, a0, a1);
    }
  } else {
    dot_lines<Bits, Affine, Rows, Wanted>(panel, at, table, a0, a1, svundef4_u8());
  }
}

LOWBIT_INLINE inline svfloat32x4_t load_four_mins(const uint8_t* const* panel, int64_t at) __arm_streaming {
  return svcreate4_f32(load_scales(panel[0] + at, 1), load_scales(panel[1] + at, 1), load_scales(panel[2] + at, 1),
                       load_scales(panel[3] + at, 1));
}

LOWBIT_INLINE inline svfloat32x4_t load_four_scales(const uint8_t* const* panel, int64_t at) __arm_streaming {
  return svcreate4_f32(load_scales(panel[0] + at, 0), load_scales(panel[1] + at, 0), load_scales(panel[2] + at, 0),
                       load_scales(panel[3] + at, 0));
}

LOWBIT_INLINE inline void store_outputs(const Few& few, int64_t panel, int64_t row, svfloat32_t sum) __arm_streaming {
  if (panel >= few.panels) return;
  const LinearArgs& args = few.args;
  const Head head(args, few.first_panel + panel);
  const svbool_t all = svptrue_b32();
  store_row(head.out + (few.first_row + row) * args.out_stride * bytes_of(args.out_dtype), args.out_dtype, head.columns(),
            svmad_f32_x(all, sum, svld1_f32(all, head.row_scale), svld1_f32(all, head.bias)));
}

// Stores the float sums of four panels.
[[gnu::noinline]] void store_outputs(const Few& few, int64_t first) LOWBIT_STREAMING {
  for (int64_t row = 0; row < few.rows; ++row) {
    const svfloat32x4_t total = svread_za32_f32_vg1x4(static_cast<uint32_t>(4 + row));
    store_outputs(few, first, row, svget4_f32(total, 0));
    store_outputs(few, first + 1, row, svget4_f32(total, 1));
    store_outputs(few, first + 2, row, svget4_f32(total, 2));
    store_outputs(few, first + 3, row, svget4_f32(total, 3));
  }
}

// Vectors 0 to 3 hold integer sums, one per row of m; 4 to 7 hold float sums. P of a group's first segment is in 8 to 11, which
// are zeroed together with the integer sums; in groups of several segments it moves to 12 to 15.
template <int Bits, bool Affine, int Rows, bool Halves, bool OneSegment>
LOWBIT_INLINE inline void dot_four(const Few& few, int64_t first) LOWBIT_STREAMING {
  constexpr int kBlockBytes = code_bits(Bits) * kLineBytes, kGroupBytes = group_bytes(Affine);
  const LinearArgs& args = few.args;
  const Layout& layout = args.layout;
  const svuint8_t table = load_table(layout);
  const svbool_t all = svptrue_b32();
  const uint8_t* panel[kFewPanels];
  for (int64_t p = 0; p < kFewPanels; ++p) {
    const int64_t panel_index = first + p < few.panels ? first + p : few.panels - 1;  // repeats the last panel
    panel[p] = args.panels + (few.first_panel + panel_index) * layout.panel_bytes;
  }
  const int8_t* a[Rows];
  const float *scales[Rows], *group_sums[Rows];
  const int32_t* sums[Rows];
  for (int64_t row = 0; row < Rows; ++row) {
    const int64_t row_index = few.first_row + (row < few.rows ? row : few.rows - 1);
    a[row] = args.a + row_index * layout.blocks * kBlockInputs;
    scales[row] = args.scales + row_index * layout.segments;
    sums[row] = args.sums + row_index * layout.segments;
    if constexpr (Affine) group_sums[row] = args.group_sums + row_index * layout.groups;
  }

  svzero_za();
  int64_t rest = few.halves, remaining = few.group_halves, at = 0, skip = 0, input = 0;
  int64_t segment = 0, group = 0;
  bool begins = true;   // whether this is the group's first segment
  bool second = false;  // whether a block's first half is done
  for (; rest != 0; ++segment) {
    int64_t count = remaining < rest ? remaining : rest;
    if (!OneSegment && count > kSegmentHalves) count = kSegmentHalves;
    rest -= count;
    remaining -= count;
    svzero_mask_za((1 << Rows) - 1);  // 64-bit tiles: the vectors 0 to 3, 8 to 11 and so on
    if (Halves && second) {
      dot_block<Bits, Affine, Rows, kSecondHalf>(panel, at, table, a, input);
      at += kBlockBytes + skip;
      skip = 0;
      input += kBlockInputs;
      --count;
      second = false;
    }
    const auto add_block = [&]() LOWBIT_INLINE LOWBIT_STREAMING {
      dot_block<Bits, Affine, Rows, kWholeBlock>(panel, at, table, a, input);
      at += kBlockBytes;
      input += kBlockInputs;
    };
    if constexpr (!Halves) {
      if (count > 2) add_block();
      add_block();
    } else {
#pragma clang loop unroll(disable)
      for (; count > 1; count -= 2) add_block();
    }
    int64_t scales_at = at;
    if (Halves && count != 0) {
      dot_block<Bits, Affine, Rows, kFirstHalf>(panel, at, table, a, input);
      scales_at += kBlockBytes;  // after the whole block
      second = true;
    }
    const uint32_t vector0 = hidden(0), vector8 = hidden(8);
    const auto add_products = [&](uint32_t products) LOWBIT_INLINE LOWBIT_STREAMING {
#pragma clang loop unroll(full)
      for (uint32_t row = 0; row < Rows; ++row) {
        svint32x4_t total = svread_za32_s32_vg1x4(vector0 + row);
        if constexpr (kInPlace<Bits>) total = svrshl_single_s32_x4(total, svdup_n_s32(-4));
        if constexpr (offset<Bits, Affine>() != 0) {
          const svint32_t sum = svdup_n_s32(sums[row][segment]);
          total = svadd_single_s32_x4(total, svmul_n_s32_x(all, sum, offset<Bits, Affine>()));
        }
        svmla_single_za32_f32_vg1x4(products + row, svcvt_f32_s32_x4(total), svdup_n_f32(scales[row][segment]));
      }
    };
    if (OneSegment || begins) {
      add_products(vector8);
      if (!OneSegment) {
#pragma clang loop unroll(full)
        for (uint32_t row = 0; row < Rows; ++row) {
          svwrite_za32_f32_vg1x4(vector8 + 4 + row, svread_za32_f32_vg1x4(vector8 + row));
        }
      }
    } else {
      add_products(vector8 + 4);
    }
    begins = false;
    if (!OneSegment && remaining != 0 && rest != 0) continue;
    const svfloat32x4_t scale = load_four_scales(panel, scales_at);
    svfloat32x4_t min = svundef4_f32();
    if constexpr (Affine) min = load_four_mins(panel, scales_at);
#pragma clang loop unroll(full)
    for (uint32_t row = 0; row < Rows; ++row) {
      svmla_za32_f32_vg1x4(vector0 + 4 + row, svread_za32_f32_vg1x4(vector8 + (OneSegment ? 0 : 4) + row), scale);
      if constexpr (Affine) svmla_single_za32_f32_vg1x4(vector0 + 4 + row, min, svdup_n_f32(group_sums[row][group]));
    }
    if (second) skip = kGroupBytes;
    else at += kGroupBytes;
    remaining = few.group_halves;
    begins = true;
    ++group;
  }
  store_outputs(few, first);
}

template <int Bits, bool Affine, int Rows, bool Halves>
void dot_panels(const Few& few) LOWBIT_STREAMING {
  const bool one_segment = Rows == 1 && few.group_halves <= kSegmentHalves;
  for (int64_t first = 0; first < few.panels; first += kFewPanels) {
    one_segment ? dot_four<Bits, Affine, Rows, Halves, Rows == 1>(few, first)
                : dot_four<Bits, Affine, Rows, Halves, false>(few, first);
  }
}

}  // namespace
}  // namespace lowbit
