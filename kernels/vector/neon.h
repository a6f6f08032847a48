// 16 floats in four registers of NEON.
//
// Four scalars of a row are loaded at once and used by lane, which costs nothing in fmla.
#pragma once

#include <arm_neon.h>

#include <cstring>
#include <type_traits>

#include "../bits/unpack_neon.h"
#include "../ukernel.h"

namespace lowbit {
namespace {

struct Vector {
  float32x4_t q[4];

  static constexpr int kSums = 4;  // sums, of four registers each, that fit next to a vector and a register of scalars per row

  template <class Op>
  LOWBIT_INLINE static Vector map_registers(Op op) {
    return {{op(0), op(1), op(2), op(3)}};
  }
  LOWBIT_INLINE static Vector broadcast(float value) {
    return map_registers([=](int) LOWBIT_INLINE { return vdupq_n_f32(value); });
  }
  LOWBIT_INLINE static Vector load(const float* at) {
    return map_registers([=](int i) LOWBIT_INLINE { return vld1q_f32(at + 4 * i); });
  }
  LOWBIT_INLINE static void store(float* at, const Vector& v) {
    for (int i = 0; i < 4; ++i) vst1q_f32(at + 4 * i, v.q[i]);
  }
  template <DType T>
  LOWBIT_INLINE static Vector load_as_f32(const void* from) {
    const auto* at = static_cast<const uint8_t*>(from);
    if constexpr (T == DType::f32) {
      return map_registers([=](int i) LOWBIT_INLINE { return vreinterpretq_f32_u8(vld1q_u8(at + 16 * i)); });
    } else {
      const uint16x8_t h[2] = {vreinterpretq_u16_u8(vld1q_u8(at)), vreinterpretq_u16_u8(vld1q_u8(at + 16))};
      return map_registers([=](int i) LOWBIT_INLINE {
        if constexpr (T == DType::f16) {
          const float16x8_t half = vreinterpretq_f16_u16(h[i / 2]);
          return i % 2 == 0 ? vcvt_f32_f16(vget_low_f16(half)) : vcvt_high_f32_f16(half);
        } else {
          return vreinterpretq_f32_u32(i % 2 == 0 ? vshll_n_u16(vget_low_u16(h[i / 2]), 16)
                                                  : vshll_high_n_u16(h[i / 2], 16));
        }
      });
    }
  }
  LOWBIT_INLINE static Vector load_int8_as_f32(const void* from) {
    return of_int8(vld1q_u8(static_cast<const uint8_t*>(from)));
  }
  LOWBIT_INLINE static Vector load_levels_as_f32(const void* from, bool upper) {
    const uint8x16_t bytes = vld1q_u8(static_cast<const uint8_t*>(from));
    const uint8x16_t codes = upper ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
    return of_int8(vreinterpretq_u8_s8(vqtbl1q_s8(vld1q_s8(kCacheLevels), codes)));
  }
  // tbl puts each byte at the top of a lane, and scvtf converts with 24 fraction bits: two instructions for four values.
  // Widening in two steps takes two and a half.
  LOWBIT_INLINE static Vector of_int8(uint8x16_t bytes) {
    return map_registers([=](int i) LOWBIT_INLINE {
      const uint32x4_t first = {0x00ffffffu, 0x01ffffffu, 0x02ffffffu, 0x03ffffffu};
      const uint32x4_t index = vaddq_u32(first, vdupq_n_u32(static_cast<uint32_t>(i) << 26));
      return vcvtq_n_f32_s32(vreinterpretq_s32_u8(vqtbl1q_u8(bytes, vreinterpretq_u8_u32(index))), 24);
    });
  }
  template <DType T>
  LOWBIT_INLINE static void store_from_f32(void* at, const Vector& v) {
    store16<T>(at, v.q);
  }
  LOWBIT_INLINE static Vector add(const Vector& a, const Vector& b) {
    return map_registers([&](int i) LOWBIT_INLINE { return vaddq_f32(a.q[i], b.q[i]); });
  }
  LOWBIT_INLINE static Vector sub(const Vector& a, const Vector& b) {
    return map_registers([&](int i) LOWBIT_INLINE { return vsubq_f32(a.q[i], b.q[i]); });
  }
  LOWBIT_INLINE static Vector mul(const Vector& a, const Vector& b) {
    return map_registers([&](int i) LOWBIT_INLINE { return vmulq_f32(a.q[i], b.q[i]); });
  }
  LOWBIT_INLINE static Vector div(const Vector& a, const Vector& b) {
    return map_registers([&](int i) LOWBIT_INLINE { return vdivq_f32(a.q[i], b.q[i]); });
  }
  LOWBIT_INLINE static Vector max(const Vector& a, const Vector& b) {
    return map_registers([&](int i) LOWBIT_INLINE { return vmaxq_f32(a.q[i], b.q[i]); });
  }
  LOWBIT_INLINE static Vector fma(const Vector& a, const Vector& b, const Vector& c) {
    return map_registers([&](int i) LOWBIT_INLINE { return vfmaq_f32(c.q[i], a.q[i], b.q[i]); });
  }
  LOWBIT_INLINE static Vector zero_below(const Vector& x, const Vector& bound, const Vector& value) {
    return map_registers([&](int i) LOWBIT_INLINE {
      return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value.q[i]), vcltq_f32(x.q[i], bound.q[i])));
    });
  }
  LOWBIT_INLINE static Vector shift_left_23(const Vector& v) {
    return map_registers([&](int i) LOWBIT_INLINE {
      return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(v.q[i]), 23));
    });
  }
  LOWBIT_INLINE static Vector same_nan(const Vector& v) {
    return map_registers([&](int i) LOWBIT_INLINE {
      return vbslq_f32(vceqq_f32(v.q[i], v.q[i]), v.q[i], vdupq_n_f32(float_from_bits(0x7fc00000u)));
    });
  }

  // Products of int8, four to a lane, by sdot if the file is compiled for it.
  struct Quads {
    int8x16_t q[4];
  };
  struct Integers {
    int32x4_t q[4];
  };
  LOWBIT_INLINE static Quads load_quads(const void* from) {
    const int8_t* const at = static_cast<const int8_t*>(from);
    return {{vld1q_s8(at), vld1q_s8(at + 16), vld1q_s8(at + 32), vld1q_s8(at + 48)}};
  }
  LOWBIT_INLINE static Integers before_products(int32_t) {
    return {{vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)}};
  }
  LOWBIT_INLINE static Integers add_products(const Quads& quads, const int8_t* codes, Integers sums) {
    int32_t quad;
    std::memcpy(&quad, codes, sizeof quad);
    const int8x16_t query = vreinterpretq_s8_s32(vdupq_n_s32(quad));
    for (int i = 0; i < 4; ++i) {
#if defined(__ARM_FEATURE_DOTPROD)
      sums.q[i] = vdotq_s32(sums.q[i], quads.q[i], query);
#else
      // Two products fit in int16: 2 * 127 * 128 < 2^15.
      const int16x8_t low = vmull_s8(vget_low_s8(quads.q[i]), vget_low_s8(query));
      const int16x8_t high = vmull_high_s8(quads.q[i], query);
      sums.q[i] = vpadalq_s16(sums.q[i], vpaddq_s16(low, high));
#endif
    }
    return sums;
  }
  LOWBIT_INLINE static Vector to_floats(const Integers& sums) {
    return map_registers([&](int i) LOWBIT_INLINE { return vcvtq_f32_s32(sums.q[i]); });
  }

  // Lane l gets lane l ^ Half.
  template <int Half>
  LOWBIT_INLINE static Vector swap_lanes(const Vector& v) {
    return map_registers([&](int i) LOWBIT_INLINE {
      if constexpr (Half == 1) return vrev64q_f32(v.q[i]);
      else if constexpr (Half == 2) return vextq_f32(v.q[i], v.q[i], 2);
      else return v.q[i ^ Half / 4];
    });
  }

  using Four = float32x4_t;
  LOWBIT_INLINE static Four load_four(const float* at) { return vld1q_f32(at); }
  template <int Lane>
  LOWBIT_INLINE static Vector fma_lane(const Vector& a, Four four, const Vector& c) {
    // Not the intrinsic, for which GCC 12 copies sums.
    return map_registers([&](int i) LOWBIT_INLINE {
      float32x4_t sum = c.q[i];
      __asm__("fmla %0.4s, %1.4s, %2.s[%c3]" : "+w"(sum) : "w"(a.q[i]), "w"(four), "i"(Lane));
      return sum;
    });
  }
};

}  // namespace
}  // namespace lowbit
