// The widths, for tables with a row for each: ROW(1, ...), ROW(2, ...), up to ROW(8, ...). Narrow and wide ones are for
// files that share them, so that none takes long to compile.
#pragma once

#define LOWBIT_EACH_NARROW_WIDTH(ROW, ...) \
  ROW(1 __VA_OPT__(, ) __VA_ARGS__), ROW(2 __VA_OPT__(, ) __VA_ARGS__), ROW(3 __VA_OPT__(, ) __VA_ARGS__)
#define LOWBIT_EACH_WIDE_WIDTH(ROW, ...)                                                                                    \
  ROW(4 __VA_OPT__(, ) __VA_ARGS__), ROW(5 __VA_OPT__(, ) __VA_ARGS__), ROW(6 __VA_OPT__(, ) __VA_ARGS__),                  \
      ROW(7 __VA_OPT__(, ) __VA_ARGS__), ROW(8 __VA_OPT__(, ) __VA_ARGS__)
#define LOWBIT_EACH_WIDTH(ROW, ...) \
  LOWBIT_EACH_NARROW_WIDTH(ROW __VA_OPT__(, ) __VA_ARGS__), LOWBIT_EACH_WIDE_WIDTH(ROW __VA_OPT__(, ) __VA_ARGS__)
