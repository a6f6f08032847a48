// quantize_neon: one activation row to int8 and its group sums, 16 values at a time. Formula and edge cases: ukernel.h.
//
//   pass 1   the range, by integer maxima of the values as they lie in memory; a NaN becomes an end of it, so that
//            the range itself tells whether the row is finite
//   pass 2   a = sat8(fcvtns(fma(x, inv, z))): rounded to nearest, ties to even, in four registers of four values
//
// A rounded value lies in [-129, 128], give or take a rounding error, so the step from 32 to 16 bits needs no
// saturation (uzp1 takes the low halves of two registers at once); the step from 16 to 8 bits does (sqxtn). Group sums:
// saddlp adds neighbours in int16, sadalp adds pairs of those to four int32 lanes, at most 65536 * 128 = 2^23 in size.
//
// 16 values because that is the granularity of group sizes and one store of bytes. The last, partial 16 go through a
// buffer, so that nothing is read beyond the row.

#include <arm_neon.h>

#include "../ukernel.h"

namespace lowbit {
namespace {

constexpr int kStep = 16;

struct Values {
  float32x4_t q0, q1, q2, q3;
};

template <DType T>
[[gnu::always_inline]] inline Values load16(const void* base, int64_t index) {
  const auto* at = static_cast<const uint8_t*>(base) + size_of(T) * index;
  if constexpr (T == DType::f32) {
    return {vreinterpretq_f32_u8(vld1q_u8(at)), vreinterpretq_f32_u8(vld1q_u8(at + 16)),
            vreinterpretq_f32_u8(vld1q_u8(at + 32)), vreinterpretq_f32_u8(vld1q_u8(at + 48))};
  } else if constexpr (T == DType::f16) {
    const float16x8_t h0 = vreinterpretq_f16_u8(vld1q_u8(at)), h1 = vreinterpretq_f16_u8(vld1q_u8(at + 16));
    return {vcvt_f32_f16(vget_low_f16(h0)), vcvt_high_f32_f16(h0),
            vcvt_f32_f16(vget_low_f16(h1)), vcvt_high_f32_f16(h1)};
  } else {
    const uint16x8_t h0 = vreinterpretq_u16_u8(vld1q_u8(at)), h1 = vreinterpretq_u16_u8(vld1q_u8(at + 16));
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h0), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(h0, 16)),
            vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h1), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(h1, 16))};
  }
}

// The first `count` < 16 of 16 values; the others are zero.
template <DType T>
[[gnu::always_inline]] inline Values load_first(const void* base, int64_t index, int64_t count) {
  uint32_t buffer[kStep] = {};
  std::memcpy(buffer, static_cast<const char*>(base) + size_of(T) * index, static_cast<size_t>(size_of(T) * count));
  return load16<T>(buffer, 0);
}

// The least and the greatest value and 0, by integers: as unsigned ones, negative values are above all others, in the
// reverse order; as signed ones, the others are, in order. NaN is beyond infinity on both sides.
template <DType T>
struct Range {
  uint8x16_t lo[2] = {}, hi[2] = {};

  template <int I>
  [[gnu::always_inline]] void add(uint8x16_t x) {
    if constexpr (T == DType::f32) {
      const uint32x4_t u = vmaxq_u32(vreinterpretq_u32_u8(lo[I]), vreinterpretq_u32_u8(x));
      const int32x4_t s = vmaxq_s32(vreinterpretq_s32_u8(hi[I]), vreinterpretq_s32_u8(x));
      lo[I] = vreinterpretq_u8_u32(u), hi[I] = vreinterpretq_u8_s32(s);
    } else {
      const uint16x8_t u = vmaxq_u16(vreinterpretq_u16_u8(lo[I]), vreinterpretq_u16_u8(x));
      const int16x8_t s = vmaxq_s16(vreinterpretq_s16_u8(hi[I]), vreinterpretq_s16_u8(x));
      lo[I] = vreinterpretq_u8_u16(u), hi[I] = vreinterpretq_u8_s16(s);
    }
  }

  // Or GCC computes in other registers and copies.
  [[gnu::always_inline]] void settle() {
    __asm__("" : "+w"(lo[0]), "+w"(lo[1]), "+w"(hi[0]), "+w"(hi[1]));
  }

  [[gnu::always_inline]] void reduce(float& least, float& greatest) {
    add<0>(lo[1]);  // neither changes the other's result
    add<0>(hi[1]);
    if constexpr (T == DType::f32) {
      const uint32_t u = vmaxvq_u32(vreinterpretq_u32_u8(lo[0]));
      least = u >> 31 != 0 ? float_from_bits(u) : 0.0f;
      greatest = float_from_bits(static_cast<uint32_t>(vmaxvq_s32(vreinterpretq_s32_u8(hi[0]))));
    } else {
      const uint16_t u = vmaxvq_u16(vreinterpretq_u16_u8(lo[0]));
      const int16_t s = vmaxvq_s16(vreinterpretq_s16_u8(hi[0]));
      least = u >> 15 != 0 ? load_as_f32(&u, T, 0) : 0.0f;
      greatest = load_as_f32(&s, T, 0);
    }
  }
};

[[gnu::always_inline]] inline int16x8_t to_int16(float32x4_t x0, float32x4_t x1, float32x4_t inverse,
                                                 float32x4_t zero) {
  const int32x4_t low = vcvtnq_s32_f32(vfmaq_f32(zero, x0, inverse));
  const int32x4_t high = vcvtnq_s32_f32(vfmaq_f32(zero, x1, inverse));
  return vuzp1q_s16(vreinterpretq_s16_s32(low), vreinterpretq_s16_s32(high));
}

[[gnu::always_inline]] inline int8x16_t to_int8(const Values& x, float32x4_t inverse, float32x4_t zero) {
  return vqmovn_high_s16(vqmovn_s16(to_int16(x.q0, x.q1, inverse, zero)), to_int16(x.q2, x.q3, inverse, zero));
}

[[gnu::always_inline]] inline int32x4_t add_all(int32x4_t sums, int8x16_t a) {
  return vpadalq_s16(sums, vpaddlq_s8(a));
}

// 0xff in the first `count` bytes.
[[gnu::always_inline]] inline int8x16_t first_bytes(int64_t count) {
  static constexpr int8_t kIndex[kStep] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return vreinterpretq_s8_u8(vcltq_s8(vld1q_s8(kIndex), vdupq_n_s8(static_cast<int8_t>(count))));
}

template <DType T>
[[gnu::always_inline]] inline Range<T> find_range(const void* x, int64_t k) {
  Range<T> range;
  const auto* at = static_cast<const uint8_t*>(x);
  int64_t bytes = k * size_of(T);
  for (; bytes >= 128; bytes -= 128, at += 128) {
    for (int i = 0; i < 128; i += 32) {
      range.template add<0>(vld1q_u8(at + i));
      range.template add<1>(vld1q_u8(at + i + 16));
    }
    range.settle();
  }
  for (; bytes >= 16; bytes -= 16, at += 16) range.template add<0>(vld1q_u8(at));
  if (bytes > 0) {
    uint8_t buffer[16] = {};
    std::memcpy(buffer, at, static_cast<size_t>(bytes));
    range.template add<0>(vld1q_u8(buffer));
  }
  return range;
}

template <DType T>
void quantize(const QuantizeArgs& args) {
  // Copies: the compiler must take every store of int8 values for one that may change `args`.
  const void* const x = args.x;
  int8_t* const out = args.a;
  int32_t* group_sum = args.group_sums;
  const int64_t k = args.k, group_inputs = args.group_inputs, k_padded = args.k_padded;

  float lo, hi;
  find_range<T>(x, k).reduce(lo, hi);
  float scale = hi / 255.0f - lo / 255.0f;
  const bool finite = lo >= -0x1.fffffep127f && hi <= 0x1.fffffep127f;  // false for NaN
  if (!finite || scale < 0x1p-126f) {
    *args.scale = finite ? 0.0f : float_from_bits(0x7fc00000u);
    *args.zero = 0.0f;
    std::memset(out, 0, static_cast<size_t>(k_padded));
    std::memset(group_sum, 0, static_cast<size_t>((k + group_inputs - 1) / group_inputs) * sizeof(int32_t));
    return;
  }
  const float inverse = 1.0f / scale;
  const float unlimited = vrndns_f32(-lo * inverse) - 128.0f;
  const float zero = unlimited < 127.0f ? unlimited : 127.0f;
  *args.scale = scale;
  *args.zero = zero;

  const float32x4_t inverses = vdupq_n_f32(inverse), zeros = vdupq_n_f32(zero);
  const auto step = [&](int64_t at, int32x4_t sums) __attribute__((always_inline)) {
    const int8x16_t a = to_int8(load16<T>(x, at), inverses, zeros);
    vst1q_s8(out + at, a);
    return add_all(sums, a);
  };
  const int64_t whole = k / kStep * kStep;
  int64_t i = 0;
  while (i < k) {
    const int64_t group_end = i + group_inputs;
    const int64_t end = group_end < whole ? group_end : whole;
    int32x4_t sums = vdupq_n_s32(0);
    for (; i + 2 * kStep <= end; i += 2 * kStep) sums = step(i + kStep, step(i, sums));
    if (i < end) {
      sums = step(i, sums);
      i += kStep;
    }
    if (i == whole && i < group_end && i < k) {  // the partial 16 belong to this group
      const int8x16_t a = vandq_s8(to_int8(load_first<T>(x, i, k - i), inverses, zeros), first_bytes(k - i));
      vst1q_s8(out + i, a);
      sums = add_all(sums, a);
      i += kStep;
    }
    *group_sum++ = vaddvq_s32(sums);
  }
  if (i < k_padded) vst1q_s8(out + i, vdupq_n_s8(0));
}

void run(const QuantizeArgs& args) {
  switch (args.x_dtype) {
    case DType::f32: return quantize<DType::f32>(args);
    case DType::bf16: return quantize<DType::bf16>(args);
    case DType::f16: return quantize<DType::f16>(args);
  }
}

constexpr QuantizeKernel kRows[] = {{"quantize_neon", kNeon, run}};

}  // namespace

extern const Table<QuantizeKernel> kQuantizeNeon;
const Table<QuantizeKernel> kQuantizeNeon{kRows, 1};

}  // namespace lowbit
