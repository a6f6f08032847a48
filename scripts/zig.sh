#!/bin/sh
# zig.sh ZIG ARGUMENT...: runs a zig compiler with GCC's and Clang's options for instruction sets (cmake/zig.cmake).
# Zig only has -mcpu: -march=armv8.2-a+dotprod becomes -mcpu=generic+dotprod.
zig=$1
shift
count=$#
while [ "$count" -gt 0 ]; do
  argument=$1
  shift
  case $argument in
    -march=armv*+*) argument=-mcpu=generic+${argument#*+} ;;
    # CMake determines the compiler's name from an object, because linking a program makes zig build its C++ library.
    CMakeC*CompilerId.c*) set -- "$@" -c ;;
  esac
  set -- "$@" "$argument"
  count=$((count - 1))
done
exec "$zig" "$@"
