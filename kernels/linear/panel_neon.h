// Shared by the linear kernels for Arm: a panel's scales, heads and outputs. Formulas: ukernel.h.
#pragma once

#include <type_traits>

#include "../bits/unpack_neon.h"
#include "../ukernel.h"

namespace lowbit {
namespace {

constexpr int kQuarters = 4;  // of a line, 4 rows each

// If the integer sums of a segment start at the bits of the float c, they end as the bits of c + I, without a conversion
// (ukernel.h). Cores from Neoverse N1 to V2 add four times as fast as they convert.
constexpr float kShift = 0x1.8p23f;
constexpr int32_t kShiftBits = 0x4b400000;

// The 16 float16 values at `scales`.
struct Scales {
  float32x4_t q[kQuarters];
};

LOWBIT_INLINE inline Scales load_scales(const uint8_t* scales) {
  const float16x8_t half0 = vreinterpretq_f16_u8(vld1q_u8(scales));
  const float16x8_t half1 = vreinterpretq_f16_u8(vld1q_u8(scales + 16));
  return {{vcvt_f32_f16(vget_low_f16(half0)), vcvt_high_f32_f16(half0), vcvt_f32_f16(vget_low_f16(half1)),
           vcvt_high_f32_f16(half1)}};
}

// Loads the scales of two quarters.
LOWBIT_INLINE inline void load_two_scales(const uint8_t* scales, float32x4_t (&to)[2]) {
  const float16x8_t half = vreinterpretq_f16_u8(vld1q_u8(scales));
  to[0] = vcvt_f32_f16(vget_low_f16(half));
  to[1] = vcvt_high_f32_f16(half);
}

struct Heads {
  float32x4_t row_scale[kQuarters], bias[kQuarters];
};

// 16 float32 values of the head. `which`: 0 for the row scales, 2 for the biases.
LOWBIT_INLINE inline const uint8_t* head(const LinearArgs& args, int64_t panel, int which) {
  return args.panels + panel * args.layout.panel_bytes + args.layout.head_offset + 4 * which * kPanelRows;
}

LOWBIT_INLINE inline Heads load_heads(const LinearArgs& args, int64_t panel) {
  Heads heads;
  unroll<kQuarters>([&](auto q) LOWBIT_INLINE {
    heads.row_scale[q] = vreinterpretq_f32_u8(vld1q_u8(head(args, panel, 0) + 16 * q));
    heads.bias[q] = vreinterpretq_f32_u8(vld1q_u8(head(args, panel, 2) + 16 * q));
  });
  return heads;
}

// Stores the first `columns` outputs of a row of m and a panel, from the sums over all groups.
template <DType T>
LOWBIT_INLINE inline void store_outputs(const LinearArgs& args, int64_t panel, int64_t row,
                                        const Heads& heads, float32x4_t (&y)[kQuarters], int64_t columns) {
  unroll<kQuarters>([&](auto q) LOWBIT_INLINE {
    y[q] = vfmaq_f32(heads.bias[q], heads.row_scale[q], y[q]);
  });
  store_first<T>(args.out, row * args.out_stride + panel * kPanelRows, y, columns);
}

template <class Body>
LOWBIT_INLINE inline void with_dtype(DType dtype, Body body) {
  switch (dtype) {
    case DType::f32: return body(std::integral_constant<DType, DType::f32>());
    case DType::bf16: return body(std::integral_constant<DType, DType::bf16>());
    case DType::f16: return body(std::integral_constant<DType, DType::f16>());
  }
}

LOWBIT_INLINE inline void store_outputs(const LinearArgs& args, int64_t panel, int64_t row, float32x4_t (&y)[kQuarters]) {
  with_dtype(args.out_dtype, [&](auto dtype) LOWBIT_INLINE {
    store_outputs<dtype()>(args, panel, row, load_heads(args, panel), y, args.layout.n - panel * kPanelRows);
  });
}

}  // namespace
}  // namespace lowbit
