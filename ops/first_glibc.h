// For libraries that must load where glibc is older than the one at hand (cmake/manylinux_2_28.cmake): since 2.34 some
// functions are in libc. Old systems have them in libdl and libpthread, under their first version, and new ones know
// that one too.
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
