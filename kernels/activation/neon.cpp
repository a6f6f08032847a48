// quantize_neon: one activation row to int8, one segment at a time (up to 64 values, all in registers). Formula and edge cases:
// ukernel.h.
//
//   t     from the largest magnitude, as an integer: the bits of a NaN are larger than those of every number
//   a     fcvtns(x * inv): rounded to nearest, ties to even. If t is 0 or NaN, inv is 0, and so is a: fcvtns(NaN) is 0
//   A     saddlp adds pairs in int16, sadalp adds the next 16 values: at most 64 * 127 in total
//
// A rounded value fits in 8 bits, so narrowing needs no saturation: uzp1 takes the low halves of two registers at once.
// A segment is whole steps of 16 values, except the last segment of a row, which is copied to a buffer padded with zeros.

#include <arm_neon.h>

#include <type_traits>

#include "../ukernel.h"

namespace lowbit {
namespace {

constexpr int kStep = 16;
constexpr uint32_t kLeast = 0x00800000, kTooLarge = 0x73800000;  // the bits of 2^-126 and of 2^104

// 16 values in the order of memory.
template <DType T>
struct Values {
  uint8x16_t part[size_of(T)];
};

template <DType T>
LOWBIT_INLINE inline Values<T> load16(const uint8_t* at) {
  Values<T> x;
  for (int i = 0; i < size_of(T); ++i) x.part[i] = vld1q_u8(at + 16 * i);
  return x;
}

// The largest magnitudes of four vectors, as integers, one maximum per lane.
template <DType T>
struct Most {
  uint8x16_t bits;

  LOWBIT_INLINE static uint8x16_t magnitude(uint8x16_t x) {
    if constexpr (T == DType::f32) return vreinterpretq_u8_f32(vabsq_f32(vreinterpretq_f32_u8(x)));
    return vreinterpretq_u8_u16(vandq_u16(vreinterpretq_u16_u8(x), vdupq_n_u16(0x7fff)));
  }

  LOWBIT_INLINE static uint8x16_t larger(uint8x16_t x, uint8x16_t y) {
    if constexpr (T == DType::f32) {
      return vreinterpretq_u8_u32(vmaxq_u32(vreinterpretq_u32_u8(x), vreinterpretq_u32_u8(y)));
    }
    return vreinterpretq_u8_u16(vmaxq_u16(vreinterpretq_u16_u8(x), vreinterpretq_u16_u8(y)));
  }

  LOWBIT_INLINE explicit Most(const Values<T>& x) : bits(magnitude(x.part[0])) {
    for (int i = 1; i < size_of(T); ++i) bits = larger(bits, magnitude(x.part[i]));
  }

  LOWBIT_INLINE void add(const Most& other) { bits = larger(bits, other.bits); }

  LOWBIT_INLINE float value() const {
    if constexpr (T == DType::f32) return float_from_bits(vmaxvq_u32(vreinterpretq_u32_u8(bits)));
    const uint16x4_t most = vdup_n_u16(vmaxvq_u16(vreinterpretq_u16_u8(bits)));
    if constexpr (T == DType::f16) return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(most)), 0);
    return vgetq_lane_f32(vreinterpretq_f32_u32(vshll_n_u16(most, 16)), 0);
  }
};

// Half of the values of a part, or all four vectors.
template <DType T, int Which>
LOWBIT_INLINE inline float32x4_t to_f32(const Values<T>& x) {
  if constexpr (T == DType::f32) return vreinterpretq_f32_u8(x.part[Which]);
  const uint16x8_t half = vreinterpretq_u16_u8(x.part[Which / 2]);
  if constexpr (T == DType::bf16) {
    return vreinterpretq_f32_u32(Which % 2 == 0 ? vshll_n_u16(vget_low_u16(half), 16) : vshll_high_n_u16(half, 16));
  }
  const float16x8_t f16 = vreinterpretq_f16_u16(half);
  return Which % 2 == 0 ? vcvt_f32_f16(vget_low_f16(f16)) : vcvt_high_f32_f16(f16);
}

template <DType T, int Which>
LOWBIT_INLINE inline int16x8_t to_int16(const Values<T>& x, float inverse) {
  const int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(to_f32<T, Which>(x), inverse));
  const int32x4_t high = vcvtnq_s32_f32(vmulq_n_f32(to_f32<T, Which + 1>(x), inverse));
  return vuzp1q_s16(vreinterpretq_s16_s32(low), vreinterpretq_s16_s32(high));
}

template <DType T>
LOWBIT_INLINE inline int8x16_t to_int8(const Values<T>& x, float inverse) {
  return vuzp1q_s8(vreinterpretq_s8_s16(to_int16<T, 0>(x, inverse)), vreinterpretq_s8_s16(to_int16<T, 2>(x, inverse)));
}

// The read and write positions. They are copies of QuantizeArgs, because the compiler must assume that stores of int8 change
// QuantizeArgs.
template <DType T>
struct Row {
  const uint8_t* x;
  int8_t* out;
  float* scale;
  int32_t* sum;

  // Quantizes the next segment, of `Steps` steps of 16 values. Returns t * A, or fma(t, A, *before).
  template <int Steps>
  LOWBIT_INLINE float next(const uint8_t* from, const float* before) {
    Values<T> values[Steps];
    values[0] = load16<T>(from);
    Most<T> most(values[0]);
    for (int i = 1; i < Steps; ++i) {
      values[i] = load16<T>(from + kStep * size_of(T) * i);
      most.add(Most<T>(values[i]));
    }
    const uint32_t bits = bits_of_float(most.value() * (1.0f / 127.0f)) & ~3u;
    float t = float_from_bits(bits), inverse = 1.0f / t;
    if (bits - kLeast >= kTooLarge - kLeast) [[unlikely]] {
      t = bits < kLeast ? 0.0f : float_from_bits(0x7fc00000u);
      inverse = 0.0f;
    }
    int16x8_t sums = vdupq_n_s16(0);
    for (int i = 0; i < Steps; ++i) {
      const int8x16_t a = to_int8(values[i], inverse);
      vst1q_s8(out + kStep * i, a);
      sums = i == 0 ? vpaddlq_s8(a) : vpadalq_s8(sums, a);
    }
    x += kStep * size_of(T) * Steps;
    out += kStep * Steps;
    *scale++ = t;
    const int32_t total = vaddvq_s16(sums);
    *sum++ = total;
    const float value = static_cast<float>(total);
    return before == nullptr ? t * value : __builtin_fmaf(t, value, *before);
  }

  // The same for the last `inputs` values.
  float next_short(int64_t inputs, const float* before) {
    uint8_t buffer[kSegmentInputs * size_of(T)] = {};
    const uint8_t* from = x;
    if (inputs % kStep != 0) {
      std::memcpy(buffer, from, static_cast<size_t>(inputs * size_of(T)));
      from = buffer;
    }
    switch ((inputs + kStep - 1) / kStep) {
      case 1: return next<1>(from, before);
      case 2: return next<2>(from, before);
      case 3: return next<3>(from, before);
      default: return next<4>(from, before);
    }
  }
};

template <DType T>
void quantize(const QuantizeArgs& args) {
  Row<T> row{static_cast<const uint8_t*>(args.x), args.a, args.scales, args.sums};
  float* group_sum = args.group_sums;
  const int64_t group_inputs = args.group_inputs;
  int64_t remaining = args.k;
  const auto end_group = [&](float sum) LOWBIT_INLINE {
    if (group_sum != nullptr) *group_sum++ = sum;
  };
  // Whole groups of one segment.
  const auto groups_of = [&](auto steps) LOWBIT_INLINE {
    for (; remaining >= group_inputs; remaining -= group_inputs) end_group(row.template next<steps()>(row.x, nullptr));
  };
  switch (group_inputs) {
    case 16: groups_of(std::integral_constant<int, 1>()); break;
    case 32: groups_of(std::integral_constant<int, 2>()); break;
    case 48: groups_of(std::integral_constant<int, 3>()); break;
    case 64: groups_of(std::integral_constant<int, 4>()); break;
    default: break;
  }
  while (remaining > 0) {
    int64_t in_group = remaining < group_inputs ? remaining : group_inputs;
    remaining -= in_group;
    float sum;
    const float* before = nullptr;
    for (; in_group >= kSegmentInputs; in_group -= kSegmentInputs, before = &sum) {
      sum = row.template next<kSegmentInputs / kStep>(row.x, before);
    }
    if (in_group > 0) sum = row.next_short(in_group, before);
    end_group(sum);
  }
  if (row.out < args.a + args.k_padded) vst1q_s8(row.out, vdupq_n_s8(0));
}

void run(const QuantizeArgs& args) {
  switch (args.x_dtype) {
    case DType::f32: return quantize<DType::f32>(args);
    case DType::bf16: return quantize<DType::bf16>(args);
    case DType::f16: return quantize<DType::f16>(args);
  }
}

constexpr QuantizeKernel kKernels[] = {{"quantize_neon", kNeon, run}};

}  // namespace

extern const Table<QuantizeKernel> kQuantizeNeon;
const Table<QuantizeKernel> kQuantizeNeon{kKernels, 1};

}  // namespace lowbit
