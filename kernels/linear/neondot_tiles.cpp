// linear_a8w<b>_2x16_neondot (3x16 at 1 and 8 bits): int8 activations times b-bit weights for many rows of m (gemm_neon.h), by
// sdot. A register of sums belongs to one row of m and one quarter.
//
//   quarter of line j   row 0: 4 codes | row 1: 4 codes | row 2: 4 codes | row 3: 4 codes
//   sdot sums[i], quarter of line j, a[i][j]      a[i][j]: 4 activations of row i of m, one 32-bit lane

#include "../bits/widths.h"
#include "gemm_neon.h"

namespace lowbit {
namespace {

struct DotTile {
  static constexpr int kRowStep = 1;
  template <int Rows>
  static constexpr int kPass = Rows <= 2 ? 4 : Rows <= 5 ? 2 : 1;

  static constexpr int kScales = 1;

  // `Bytes`: bytes by which the pointer advances.
  template <int Bytes>
  LOWBIT_INLINE static void next_scales(const uint8_t*& at, float32x4_t (&to)[1]) {
    __asm__ volatile("ldr %q0, [%1], %2" : "=w"(to[0]), "+r"(at) : "i"(Bytes) : "memory");
  }

  template <int Bytes>
  LOWBIT_INLINE static void next_scales_and_mins(const uint8_t*& at, float32x4_t (&scales)[1], float32x4_t (&mins)[1]) {
    __asm__ volatile("ldp %q0, %q1, [%2], %3" : "=w"(scales[0]), "=w"(mins[0]), "+r"(at) : "i"(Bytes) : "memory");
  }

  // Stores two quarters of a block.
  LOWBIT_INLINE static void store_pairs(uint8_t* (&halves)[2], const Pair (&line)[kBlockLines]) {
    Four<16>::store(halves[0], line[0].q0, line[1].q0, line[2].q0, line[3].q0);
    Four<20>::store(halves[1], line[4].q0, line[5].q0, line[6].q0, line[7].q0);
    Four<24>::store(halves[0], line[0].q1, line[1].q1, line[2].q1, line[3].q1);
    Four<28>::store(halves[1], line[4].q1, line[5].q1, line[6].q1, line[7].q1);
  }

  template <int Rows>
  LOWBIT_INLINE static void copy_block(uint8_t* to, const int8_t* (&from)[Rows]) {
    unroll<Rows / 2>([&](auto p) LOWBIT_INLINE {
      constexpr int kRow = 2 * p;
      int8x16_t row0[2], row1[2];
      next_pair(from[kRow], row0[0], row0[1]);
      next_pair(from[kRow + 1], row1[0], row1[1]);
      store_pair<16 * kRow>(to, row0[0], row1[0]);
      store_pair<16 * (registers_of(Rows) + kRow)>(to, row0[1], row1[1]);
    });
    if constexpr (Rows % 2 != 0) {
      int8x16_t row[2];
      next_pair(from[Rows - 1], row[0], row[1]);
      vst1q_s8(reinterpret_cast<int8_t*>(to) + 16 * (Rows - 1), row[0]);
      vst1q_s8(reinterpret_cast<int8_t*>(to) + 16 * (registers_of(Rows) + Rows - 1), row[1]);
    }
  }

  // Takes one value of each of two rows, in all lanes.
  template <class Vector>
  LOWBIT_INLINE static void arrange(Vector&, Vector&) {}

  // Number of registers for one value of each row.
  static constexpr int scales_of(int rows) { return (rows + 3) / 4; }

  template <int Rows>
  LOWBIT_INLINE static void join(const float32x4_t (&values)[Rows], float32x4_t (&to)[scales_of(Rows)]) {
    unroll<scales_of(Rows)>([&](auto four) LOWBIT_INLINE {
      const auto pair = [&](int row) LOWBIT_INLINE {
        const int last = Rows - 1;
        return vreinterpretq_f64_f32(vzip1q_f32(values[row < last ? row : last], values[row + 1 < last ? row + 1 : last]));
      };
      to[four] = vreinterpretq_f32_f64(vzip1q_f64(pair(4 * four), pair(4 * four + 2)));
    });
  }

  // y + x * the value of row I.
  template <int I>
  LOWBIT_INLINE static float32x4_t add_by_row(float32x4_t y, float32x4_t x, const float32x4_t* values) {
    return vfmaq_laneq_f32(y, x, values[I / 4], I % 4);
  }

  // Loads a row of float sums.
  LOWBIT_INLINE static void rows(const float* acc, float32x4_t (&y)[1][kQuarters]) {
    unroll<kQuarters>([&](auto q) LOWBIT_INLINE { y[0][q] = vld1q_f32(acc + q * kQuarterFloats); });
  }

  template <int Rows>
  LOWBIT_INLINE static void add_half(int32x4_t (&sums)[Rows], const uint8x16_t (&lines)[4],
                                     const uint8x16_t (&inputs)[Rows]) {
    unroll<4>([&](auto j) LOWBIT_INLINE {
      unroll<Rows>([&](auto i) LOWBIT_INLINE {
        constexpr int kLane = j;
        sums[i] = vdotq_laneq_s32(sums[i], vreinterpretq_s8_u8(lines[j]), vreinterpretq_s8_u8(inputs[i]), kLane);
      });
    });
  }
};

// At 1 and 8 bits nearly all fields are read in place, so unpacking to memory saves less.
#define KERNEL(bits, neon, neondot, streams)                                                                    \
  with_levels<LinearKernel>({"linear_a8w" #bits "_" #neondot "x16_neondot", kNeonDot, Format::panel16, bits, neondot, 16, \
                             run_gemm<DotTile, bits>})
constexpr LinearKernel kKernels[] = {LOWBIT_EACH_SET_WIDTH(KERNEL)};
#undef KERNEL

}  // namespace

extern const Table<LinearKernel> kLinearTilesNeonDot;
const Table<LinearKernel> kLinearTilesNeonDot{kKernels, sizeof kKernels / sizeof kKernels[0]};

}  // namespace lowbit
