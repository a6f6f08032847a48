# Cross-compiles for 64-bit Arm Linux with Debian's GCC, or with a Clang that uses the same libraries; tests then run under
# QEMU's user-mode emulation.
#   cmake -B build/arm -G Ninja -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake [-DLOWBIT_QEMU_CPU=cortex-a76] \
#     [-DLOWBIT_ARM_CLANG=clang++-19]
# The emulated CPU decides which kernels can run: cortex-a53 has no dot products, cortex-a76 has, max has everything.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)

set(LOWBIT_ARM_CLANG "" CACHE STRING "A clang++ to build with (Debian's GCC when empty)")
if(LOWBIT_ARM_CLANG)
  string(REPLACE "clang++" "clang" CMAKE_C_COMPILER "${LOWBIT_ARM_CLANG}")
  set(CMAKE_C_COMPILER_TARGET aarch64-linux-gnu)
  set(CMAKE_CXX_COMPILER "${LOWBIT_ARM_CLANG}")
  set(CMAKE_CXX_COMPILER_TARGET aarch64-linux-gnu)
else()
  set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
  set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
endif()

# Use the host's programs, and the target's libraries, headers and packages.
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

set(LOWBIT_QEMU_CPU "" CACHE STRING "The CPU that QEMU models when it runs tests (its default when empty)")
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
if(LOWBIT_QEMU_CPU)
  list(APPEND CMAKE_CROSSCOMPILING_EMULATOR -cpu "${LOWBIT_QEMU_CPU}")
endif()
# CMake's compiler checks read this file again, in a project without our cache.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES LOWBIT_QEMU_CPU LOWBIT_ARM_CLANG)
