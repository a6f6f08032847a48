// What the linear kernels for SME2 share: entering the unit's mode, and what is read and written there. sme2.cpp
// explains them.
#pragma once

#include <arm_sme.h>

#include "../bits/unpack_sme.h"
#include "../ukernel.h"

#define LOWBIT_STREAMING __arm_streaming __arm_inout("za")

namespace lowbit {
namespace {

constexpr int64_t kVectorBytes = 64;
// Along k everything is counted in half blocks of 16 inputs, 4 lines.
constexpr int kHalfLines = kBlockLines / 2;
constexpr int64_t kSegmentHalves = kSegmentInputs / kHalfInputs;
enum Halves { kFirstHalf = 1, kSecondHalf = 2, kWholeBlock = 3 };

// Calls body(argument) in streaming mode with ZA on. Both start with all registers zero.
[[gnu::noinline]] void run_streaming(const void* body, const void* argument) {
  uint64_t flags;
  __asm__ volatile("mrs %0, fpsr" : "=r"(flags));  // the mode sets them all
  register const void* x0 __asm__("x0") = argument;
  __asm__ volatile("smstart\n\tblr %1\n\tsmstop"
                   : "+r"(x0)
                   : "r"(body)
                   : "memory", "cc", "x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13",
                     "x14", "x15", "x16", "x17",
#if !defined(__APPLE__) && !defined(__ANDROID__)
                     "x18",
#endif
                     "x30", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13",
                     "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27",
                     "v28", "v29", "v30", "v31");
  __asm__ volatile("msr fpsr, %0" : : "r"(flags));
}

// The length of vectors belongs to a thread (Linux: prctl). TPIDR2_EL0 is not zero where a caller has left live ZA to
// whoever wants to use it next, who has to save it.
bool has_unit() {
  uint64_t live;
  __asm__ volatile("mrs %0, S3_3_C13_C0_5" : "=r"(live));
  return svcntsb() == kVectorBytes && live == 0;
}

// A number that compilers do not know. ZA is addressed by a register and a small constant; of two constants Clang 19
// makes a new register each time.
LOWBIT_INLINE inline uint32_t hidden(uint32_t number) __arm_streaming_compatible {
  __asm__ volatile("" : "+r"(number));
  return number;
}

// Of k. Where groups are whole blocks, so is the last: activations are zero there.
int64_t half_blocks(const Layout& layout) {
  const int64_t halves = (layout.k + kHalfInputs - 1) / kHalfInputs;
  return layout.group_inputs() % kBlockInputs == 0 ? halves + halves % 2 : halves;
}

constexpr bool is_signed(int bits) { return stored_flip(bits) != 0; }

// What an integer part has more than the sum of products: this, times the sum of the group's activations.
template <int Bits, bool Affine>
constexpr int offset() {
  return Affine ? stored_flip(Bits) : stored_flip(Bits) - level_offset(Bits);
}

// Line J as it is multiplied.
template <int Bits, bool Affine, int J>
LOWBIT_INLINE inline svuint8_t line(svuint8x4_t low, svuint8x4_t high, svuint8_t table) __arm_streaming {
  const svuint8_t codes = unpack_line<code_bits(Bits), J, Bits == 1 && !Affine>(low, high);
  if constexpr (is_by_table(Bits)) return svtbl_u8(table, codes);
  else return codes;
}

template <int Bits>
LOWBIT_INLINE inline svuint8x4_t levels_of(svuint8x4_t codes, svuint8_t table) __arm_streaming {
  if constexpr (is_by_table(Bits)) {
    return svcreate4_u8(svtbl_u8(table, svget4(codes, 0)), svtbl_u8(table, svget4(codes, 1)),
                        svtbl_u8(table, svget4(codes, 2)), svtbl_u8(table, svget4(codes, 3)));
  } else {
    return codes;
  }
}

LOWBIT_INLINE inline svfloat32_t load_scales(const uint8_t* at, int64_t vector) __arm_streaming {
  const svbool_t all = svptrue_b32();
  const svuint32_t half = svld1uh_vnum_u32(all, reinterpret_cast<const uint16_t*>(at), vector);
  return svcvt_f32_f16_x(all, svreinterpret_f16_u32(half));
}

// Codes of 4 bits stay in the upper half of their bytes, where one shift moves four lower halves at once: sums are 16
// times as large.
template <int Bits>
constexpr bool kInPlace = Bits == 4;
template <int Bits>
constexpr int kFactor = kInPlace<Bits> ? 16 : 1;

constexpr int64_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// A panel's head, and where row 0 of its outputs begins.
struct Head {
  const float *row_scale, *bias;
  char* out;
  int64_t n;

  LOWBIT_INLINE Head(const LinearArgs& args, int64_t panel) __arm_streaming_compatible
      : row_scale(reinterpret_cast<const float*>(args.panels + panel * args.layout.panel_bytes +
                                                 args.layout.head_offset)),
        bias(row_scale + 2 * kPanelRows),
        out(static_cast<char*>(args.out) + panel * kPanelRows * bytes_of(args.out_dtype)),
        n(args.layout.n - panel * kPanelRows) {}

  // Of the panel behind.
  LOWBIT_INLINE Head next(int64_t panel_bytes, DType dtype) const __arm_streaming_compatible {
    const size_t floats = static_cast<size_t>(panel_bytes) / sizeof(float);
    Head head = *this;
    head.row_scale += floats, head.bias += floats;
    head.out += kPanelRows * bytes_of(dtype);
    head.n -= kPanelRows;
    return head;
  }

  LOWBIT_INLINE svbool_t columns() const __arm_streaming { return svwhilelt_b32(int64_t{0}, n); }
};

LOWBIT_INLINE inline void store_row(char* out, DType dtype, svbool_t columns, svfloat32_t y) __arm_streaming {
  if (dtype == DType::f32) return svst1_f32(columns, reinterpret_cast<float*>(out), y);
  const svbool_t all = svptrue_b32();
  const svuint32_t half = dtype == DType::bf16 ? svreinterpret_u32_bf16(svcvt_bf16_f32_x(all, y))
                                               : svreinterpret_u32_f16(svcvt_f16_f32_x(all, y));
  svst1h_u32(columns, reinterpret_cast<uint16_t*>(out), half);
}

LOWBIT_INLINE inline svuint8_t load_table(const Layout& layout) __arm_streaming {
  return svld1_u8(svwhilelt_b8(0, kMostLevels), reinterpret_cast<const uint8_t*>(layout.levels));
}

}  // namespace
}  // namespace lowbit
