// The widths, for tables with a row for each: ROW(1, ...), ROW(2, ...), up to ROW(8, ...).
#pragma once

#define LOWBIT_EACH_WIDTH(ROW, ...)                                               \
  ROW(1 __VA_OPT__(, ) __VA_ARGS__), ROW(2 __VA_OPT__(, ) __VA_ARGS__),           \
      ROW(3 __VA_OPT__(, ) __VA_ARGS__), ROW(4 __VA_OPT__(, ) __VA_ARGS__),       \
      ROW(5 __VA_OPT__(, ) __VA_ARGS__), ROW(6 __VA_OPT__(, ) __VA_ARGS__),       \
      ROW(7 __VA_OPT__(, ) __VA_ARGS__), ROW(8 __VA_OPT__(, ) __VA_ARGS__)
