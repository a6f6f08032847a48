// Shared by the linear kernels for SME2: entering streaming mode, and loads and stores in it. sme2.cpp explains the kernels.
#pragma once

#include <arm_sme.h>

#include "../bits/unpack_sme.h"
#include "../ukernel.h"

#define LOWBIT_STREAMING __arm_streaming __arm_inout("za")

namespace lowbit {
namespace {

constexpr int64_t kVectorBytes = 64;
// Positions along k are counted in half blocks of 16 inputs, 4 lines.
constexpr int kHalfLines = kBlockLines / 2;
constexpr int64_t kSegmentHalves = kSegmentInputs / kHalfInputs;
enum Halves { kFirstHalf = 1, kSecondHalf = 2, kWholeBlock = 3 };

// Calls body(argument) in streaming mode with ZA enabled. The mode and ZA start with zeroed registers.
[[gnu::noinline]] void run_streaming(const void* body, const void* argument) {
  uint64_t flags;
  __asm__ volatile("mrs %0, fpsr" : "=r"(flags));  // entering the mode sets all flags
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

// The vector length is per thread (Linux: prctl). TPIDR2_EL0 is not zero if a caller has live ZA, which the next user must
// save.
bool has_unit() {
  uint64_t live;
  __asm__ volatile("mrs %0, S3_3_C13_C0_5" : "=r"(live));
  return svcntsb() == kVectorBytes && live == 0;
}

// A number hidden from compilers. ZA is addressed by a register and a small constant; for two constants Clang 19 would use a
// new register each time.
LOWBIT_INLINE inline uint32_t hidden(uint32_t number) __arm_streaming_compatible {
  __asm__ volatile("" : "+r"(number));
  return number;
}

// Number of half blocks of k. If groups are whole blocks, the last one is too, with zero activations at its end.
int64_t half_blocks(const Layout& layout) {
  const int64_t halves = (layout.k + kHalfInputs - 1) / kHalfInputs;
  return layout.group_inputs() % kBlockInputs == 0 ? halves + halves % 2 : halves;
}

constexpr bool is_signed(int bits) { return stored_flip(bits) != 0; }

// The integer part minus the sum of products is this factor times the sum of the group's activations.
template <int Bits, bool Affine>
constexpr int offset() {
  return Affine ? stored_flip(Bits) : stored_flip(Bits) - level_offset(Bits);
}

// Line J, converted to the form that is multiplied.
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

// 4-bit codes stay in the upper half of their bytes, and one shift moves four lower halves up at once. So sums are 16 times as
// large.
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

  // The Head of the next panel.
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
