// For libraries that must load with a glibc older than the build's (cmake/manylinux_2_28.cmake). Since 2.34 some functions are
// in libc. Older systems have them in libdl and libpthread, under their first version, which newer systems also provide.
#pragma once

#ifdef LOWBIT_MANYLINUX_2_28
#ifdef __x86_64__
#define LOWBIT_FIRST_GLIBC(function) __asm__(".symver " #function "," #function "@GLIBC_2.2.5")
#else
#define LOWBIT_FIRST_GLIBC(function) __asm__(".symver " #function "," #function "@GLIBC_2.17")
#endif
#else
#define LOWBIT_FIRST_GLIBC(function) static_assert(true)
#endif
