// What the linear kernels for Arm share: a panel's scales and heads, and its outputs. Formulas: ukernel.h.
#pragma once

#include <type_traits>

#include "../bits/unpack_neon.h"
#include "../ukernel.h"

namespace lowbit {
namespace {

constexpr int kQuarters = 4;  // of a line: 4 rows each

// The 16 float16 values at `scales`.
struct Scales {
  float32x4_t q[kQuarters];
};

[[gnu::always_inline]] inline Scales load_scales(const uint8_t* scales) {
  const float16x8_t half0 = vreinterpretq_f16_u8(vld1q_u8(scales));
  const float16x8_t half1 = vreinterpretq_f16_u8(vld1q_u8(scales + 16));
  return {{vcvt_f32_f16(vget_low_f16(half0)), vcvt_high_f32_f16(half0), vcvt_f32_f16(vget_low_f16(half1)),
           vcvt_high_f32_f16(half1)}};
}

// Of two quarters.
[[gnu::always_inline]] inline void load_two_scales(const uint8_t* scales, float32x4_t (&to)[2]) {
  const float16x8_t half = vreinterpretq_f16_u8(vld1q_u8(scales));
  to[0] = vcvt_f32_f16(vget_low_f16(half));
  to[1] = vcvt_high_f32_f16(half);
}

// Adds an affine group's mins, times the sum of its activations, to the float sums.
[[gnu::always_inline]] inline void add_mins(float32x4_t (&acc)[kQuarters], const uint8_t* mins, float32x4_t group_sum) {
  const Scales min = load_scales(mins);
  unroll<kQuarters>([&](auto q) __attribute__((always_inline)) { acc[q] = vfmaq_f32(acc[q], min.q[q], group_sum); });
}

struct Heads {
  float32x4_t row_scale[kQuarters], row_sum[kQuarters], bias[kQuarters];
};

// 16 float32 values: row scales, row sums, biases.
[[gnu::always_inline]] inline const uint8_t* head(const LinearArgs& args, int64_t panel, int which) {
  return args.panels + panel * args.layout.panel_bytes + args.layout.head_offset + 4 * which * kPanelRows;
}

[[gnu::always_inline]] inline Heads load_heads(const LinearArgs& args, int64_t panel) {
  Heads heads;
  unroll<kQuarters>([&](auto q) __attribute__((always_inline)) {
    heads.row_scale[q] = vreinterpretq_f32_u8(vld1q_u8(head(args, panel, 0) + 16 * q));
    heads.row_sum[q] = vreinterpretq_f32_u8(vld1q_u8(head(args, panel, 1) + 16 * q));
    heads.bias[q] = vreinterpretq_f32_u8(vld1q_u8(head(args, panel, 2) + 16 * q));
  });
  return heads;
}

// The outputs of a row of m and a panel, from their sums over all groups; the first `columns` of them.
template <DType T>
[[gnu::always_inline]] inline void store_outputs(const LinearArgs& args, int64_t panel, int64_t row,
                                                 const Heads& heads, float32x4_t (&y)[kQuarters], int64_t columns) {
  unroll<kQuarters>([&](auto q) __attribute__((always_inline)) {
    const float32x4_t corrected = vfmsq_n_f32(y[q], heads.row_sum[q], args.zeros[row]);
    const float32x4_t scale = vmulq_n_f32(heads.row_scale[q], args.scales[row]);
    y[q] = vfmaq_f32(heads.bias[q], scale, corrected);
  });
  store_first<T>(args.out, row * args.out_stride + panel * kPanelRows, y, columns);
}

template <DType T>
[[gnu::always_inline]] inline void store_outputs(const LinearArgs& args, int64_t panel, int64_t row,
                                                 const Heads& heads, float32x4_t (&y)[kQuarters]) {
  store_outputs<T>(args, panel, row, heads, y, args.layout.n - panel * kPanelRows);
}

template <class Body>
[[gnu::always_inline]] inline void with_dtype(DType dtype, Body body) {
  switch (dtype) {
    case DType::f32: return body(std::integral_constant<DType, DType::f32>());
    case DType::bf16: return body(std::integral_constant<DType, DType::bf16>());
    case DType::f16: return body(std::integral_constant<DType, DType::f16>());
  }
}

}  // namespace
}  // namespace lowbit
