// The widths and their measured settings, for tables with a kernel for each: KERNEL(1, ...), KERNEL(2, ...), up to
// KERNEL(8, ...). Some tables are split into two files, for narrow and wide codes, so that no file takes long to compile.
#pragma once

// KERNEL(bits, neon, neondot, streams):
//   neon, neondot   the number of rows of m from which unpacking a panel once takes fewer instructions than unpacking it for
//                   each row: NEON's tiles in groups of 32, dot products in all groups (docs/arm_cost.md)
//   streams         the outputs of one row that AVX-512 interleaves; at 1 bit the sums of more outputs do not fit the registers
#define LOWBIT_EACH_NARROW_SET_WIDTH(KERNEL) KERNEL(1, 7, 3, 32), KERNEL(2, 5, 2, 64), KERNEL(3, 4, 2, 64)
#define LOWBIT_EACH_MIDDLE_SET_WIDTH(KERNEL) KERNEL(4, 5, 2, 64), KERNEL(5, 4, 2, 64)
#define LOWBIT_EACH_WIDEST_SET_WIDTH(KERNEL) KERNEL(6, 4, 2, 64), KERNEL(7, 3, 2, 64), KERNEL(8, 6, 3, 64)
#define LOWBIT_EACH_SET_WIDTH(KERNEL) \
  LOWBIT_EACH_NARROW_SET_WIDTH(KERNEL), LOWBIT_EACH_MIDDLE_SET_WIDTH(KERNEL), LOWBIT_EACH_WIDEST_SET_WIDTH(KERNEL)

#define LOWBIT_EACH_NARROW_WIDTH(KERNEL, ...) \
  KERNEL(1 __VA_OPT__(, ) __VA_ARGS__), KERNEL(2 __VA_OPT__(, ) __VA_ARGS__), KERNEL(3 __VA_OPT__(, ) __VA_ARGS__)
#define LOWBIT_EACH_WIDE_WIDTH(KERNEL, ...)                                                                        \
  KERNEL(4 __VA_OPT__(, ) __VA_ARGS__), KERNEL(5 __VA_OPT__(, ) __VA_ARGS__), KERNEL(6 __VA_OPT__(, ) __VA_ARGS__), \
      KERNEL(7 __VA_OPT__(, ) __VA_ARGS__), KERNEL(8 __VA_OPT__(, ) __VA_ARGS__)
#define LOWBIT_EACH_WIDTH(KERNEL, ...) \
  LOWBIT_EACH_NARROW_WIDTH(KERNEL __VA_OPT__(, ) __VA_ARGS__), LOWBIT_EACH_WIDE_WIDTH(KERNEL __VA_OPT__(, ) __VA_ARGS__)
