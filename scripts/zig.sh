#!/bin/sh
# zig.sh ZIG ARGUMENT...: a compiler of zig that takes instruction sets in GCC's and Clang's words (cmake/zig.cmake).
# Zig has a name for a processor only: -march=armv8.2-a+dotprod becomes -mcpu=generic+dotprod.
zig=$1
shift
count=$#
while [ "$count" -gt 0 ]; do
  argument=$1
  shift
  case $argument in
    -march=armv*+*) argument=-mcpu=generic+${argument#*+} ;;
    # CMake asks which compiler this is, and an object says it too. A program would have zig build its C++ library.
    CMakeC*CompilerId.c*) set -- "$@" -c ;;
  esac
  set -- "$@" "$argument"
  count=$((count - 1))
done
exec "$zig" "$@"
