// linear_a8w<b>_2x16_i8mm: int8 activations times b-bit weights for many rows of m (gemm_neon.h), by smmla.
//
//   line (64 bytes): row 0: 4 codes | row 1: 4 codes | ... | row 15: 4 codes
//   two lines, zipped by 32-bit lanes: row 0: 8 codes | row 1: 8 codes ... row 15: a 2x8 operand per pair of rows
//   activations: two rows of m, zipped by 64-bit lanes: row 0: 8 inputs | row 1: 8 inputs
//   smmla sums[2 i + c], activations of pair i, weights of pair c: 2 rows of m x 2 rows of weights, 8 inputs
//
// Float sums stay in this 2x2 order until the heads, with every pair of scales in both halves of a register. Weights are zipped
// by the store that unpacks them (st2), activations when they are copied, and sums at the heads. A last single row is paired
// with a copy of itself. gemm_neon.h has the bounds of the sums.

#include <arm_neon.h>

#include "../bits/widths.h"
#include "gemm_neon.h"

namespace lowbit {

namespace {

// Stores two registers by one instruction that also advances the pointer. It requires adjacent registers. They are named, so
// that codes are unpacked into them.
template <int First>
struct Two;

#define LOWBIT_TWO(first, second)                                                                        \
  template <>                                                                                            \
  struct Two<first> {                                                                                    \
    /* Zipped by 32-bit lanes. */                                                                        \
    LOWBIT_INLINE static void store_zipped(uint8_t*& at, uint8x16_t even, uint8x16_t odd) {              \
      register uint8x16_t v0 __asm__("v" #first) = even;                                                 \
      register uint8x16_t v1 __asm__("v" #second) = odd;                                                 \
      __asm__ volatile("st2 {%1.4s, %2.4s}, [%0], #32" : "+r"(at) : "w"(v0), "w"(v1) : "memory");        \
    }                                                                                                    \
    /* The same by 64-bit lanes. */                                                                      \
    LOWBIT_INLINE static void store_zipped_halves(uint8_t*& at, uint8x16_t even, uint8x16_t odd) {         \
      register uint8x16_t v0 __asm__("v" #first) = even;                                                 \
      register uint8x16_t v1 __asm__("v" #second) = odd;                                                 \
      __asm__ volatile("st2 {%1.2d, %2.2d}, [%0], #32" : "+r"(at) : "w"(v0), "w"(v1) : "memory");        \
    }                                                                                                    \
  }
LOWBIT_TWO(16, 17);
LOWBIT_TWO(18, 19);
LOWBIT_TWO(20, 21);
LOWBIT_TWO(22, 23);
LOWBIT_TWO(24, 25);
LOWBIT_TWO(26, 27);
LOWBIT_TWO(28, 29);
LOWBIT_TWO(30, 31);
#undef LOWBIT_TWO

struct MatrixTile {
  static constexpr int kRowStep = 2;
  template <int Rows>
  static constexpr int kPass = Rows <= 2 ? 4 : Rows <= 4 ? 2 : 1;

  static constexpr int kScales = 2;

  // Loads each pair of scales twice. `Bytes`: bytes by which the pointer advances.
  template <int64_t Bytes>
  LOWBIT_INLINE static void next_scales(const uint8_t*& at, float32x4_t (&to)[2]) {
    register float32x4_t v0 __asm__("v0"), v1 __asm__("v1");
    if constexpr (Bytes == 16) {
      __asm__ volatile("ld2r {%0.2d, %1.2d}, [%2], #16" : "=w"(v0), "=w"(v1), "+r"(at) : : "memory");
    } else {
      __asm__ volatile("ld2r {%0.2d, %1.2d}, [%2], %3" : "=w"(v0), "=w"(v1), "+r"(at) : "r"(Bytes) : "memory");
    }
    to[0] = v0, to[1] = v1;
  }

  // The same for scales and the mins after them.
  template <int64_t Bytes>
  LOWBIT_INLINE static void next_scales_and_mins(const uint8_t*& at, float32x4_t (&scales)[2], float32x4_t (&mins)[2]) {
    register float32x4_t v0 __asm__("v0"), v1 __asm__("v1"), v2 __asm__("v2"), v3 __asm__("v3");
    if constexpr (Bytes == 32) {
      __asm__ volatile("ld4r {%0.2d, %1.2d, %2.2d, %3.2d}, [%4], #32"
                       : "=w"(v0), "=w"(v1), "=w"(v2), "=w"(v3), "+r"(at) : : "memory");
    } else {
      __asm__ volatile("ld4r {%0.2d, %1.2d, %2.2d, %3.2d}, [%4], %5"
                       : "=w"(v0), "=w"(v1), "=w"(v2), "=w"(v3), "+r"(at) : "r"(Bytes) : "memory");
    }
    scales[0] = v0, scales[1] = v1, mins[0] = v2, mins[1] = v3;
  }

  // Stores two quarters of a block; the lines of each are zipped in pairs.
  LOWBIT_INLINE static void store_pairs(uint8_t* (&halves)[2], const Pair (&line)[kBlockLines]) {
    Two<16>::store_zipped(halves[0], line[0].q0, line[1].q0);
    Two<18>::store_zipped(halves[0], line[2].q0, line[3].q0);
    Two<20>::store_zipped(halves[1], line[4].q0, line[5].q0);
    Two<22>::store_zipped(halves[1], line[6].q0, line[7].q0);
    Two<24>::store_zipped(halves[0], line[0].q1, line[1].q1);
    Two<26>::store_zipped(halves[0], line[2].q1, line[3].q1);
    Two<28>::store_zipped(halves[1], line[4].q1, line[5].q1);
    Two<30>::store_zipped(halves[1], line[6].q1, line[7].q1);
  }

  template <int Rows>
  LOWBIT_INLINE static void copy_block(uint8_t* to, const int8_t* (&from)[Rows]) {
    uint8x16_t row[Rows][2];
    unroll<Rows>([&](auto r) LOWBIT_INLINE { next_pair(from[r], row[r][0], row[r][1]); });
    unroll<2>([&](auto half) LOWBIT_INLINE {
      uint8_t* at = to + 16 * registers_of(Rows) * half;
      unroll<Rows / 2>([&](auto p) LOWBIT_INLINE {
        Two<16 + 4 * p + 2 * half>::store_zipped_halves(at, row[2 * p][half], row[2 * p + 1][half]);
      });
    });
  }

  // Converts one value per row, in all lanes, to the order of the sums of two rows.
  template <class Vector>
  LOWBIT_INLINE static void arrange(Vector& value0, Vector& value1) {
    const auto halves0 = reinterpret_cast<float64x2_t>(value0), halves1 = reinterpret_cast<float64x2_t>(value1);
    value0 = value1 = reinterpret_cast<Vector>(vzip1q_f64(halves0, halves1));
  }

  // Number of registers for one value of each row.
  static constexpr int scales_of(int rows) { return rows / 2; }

  template <int Rows>
  LOWBIT_INLINE static void join(const float32x4_t (&values)[Rows], float32x4_t (&to)[scales_of(Rows)]) {
    unroll<Rows / 2>([&](auto p) LOWBIT_INLINE { to[p] = values[2 * p]; });
  }

  // y + x * the values of the two rows that sums I belong to.
  template <int I>
  LOWBIT_INLINE static float32x4_t add_by_row(float32x4_t y, float32x4_t x, const float32x4_t* values) {
    return vfmaq_f32(y, x, values[I / 2]);
  }

  // Loads two rows of float sums.
  LOWBIT_INLINE static void rows(const float* acc, float32x4_t (&y)[2][kQuarters]) {
    unroll<kQuarters>([&](auto q) LOWBIT_INLINE {
      float64x2_t pair0, pair1;
      load_pair<q * kQuarterFloats * 4>(acc, pair0, pair1);
      y[0][q] = vreinterpretq_f32_f64(vzip1q_f64(pair0, pair1));
      y[1][q] = vreinterpretq_f32_f64(vzip2q_f64(pair0, pair1));
    });
  }

  template <int Rows>
  LOWBIT_INLINE static void add_half(int32x4_t (&sums)[Rows], const uint8x16_t (&lines)[4],
                                     const uint8x16_t (&inputs)[Rows]) {
    unroll<2>([&](auto eight) LOWBIT_INLINE {
      unroll<Rows>([&](auto i) LOWBIT_INLINE {
        constexpr int kPair = i / 2, kColumns = i % 2;
        sums[i] = vmmlaq_s32(sums[i], vreinterpretq_s8_u8(inputs[2 * kPair + eight]),
                             vreinterpretq_s8_u8(lines[2 * eight + kColumns]));
      });
    });
  }
};

#define KERNEL(bits) \
  with_levels<LinearKernel>({"linear_a8w" #bits "_2x16_i8mm", kI8mm, Format::panel16, bits, 2, 16, run_gemm<MatrixTile, bits>})
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<LinearKernel> kLinearI8mm;
const Table<LinearKernel> kLinearI8mm{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
