// CPython's pyconfig.h for macOS on 64-bit Arm, with the macros that its public headers use: for cross builds of the module _C.
// All other headers come from a CPython of the same version for Linux; they are the same on all systems.
//
// Written by hand; `configure` writes the real one on a Mac. Macros that the headers do not use are left out:
// scripts/wheel_macos.py reads the headers of each version, and refuses one that uses a macro that is not defined or undefined
// here. CPython's pymacconfig.h is included next, and has the sizes of time_t, pthread_t and bool on a Mac.
#pragma once
#if !defined(__APPLE__) || !defined(__aarch64__)
#error "for macOS on 64-bit Arm"
#endif

#define _DARWIN_C_SOURCE 1

// Sizes come from the compiler. Two differ from Linux on Arm: a long double is a double, so the strictest alignment is 8.
#define SIZEOF_INT __SIZEOF_INT__
#define SIZEOF_LONG __SIZEOF_LONG__
#define SIZEOF_LONG_LONG __SIZEOF_LONG_LONG__
#define SIZEOF_LONG_DOUBLE __SIZEOF_LONG_DOUBLE__
#define SIZEOF_SIZE_T __SIZEOF_SIZE_T__
#define SIZEOF_VOID_P __SIZEOF_POINTER__
#define SIZEOF_WCHAR_T __SIZEOF_WCHAR_T__
#define SIZEOF_PID_T 4
#define ALIGNOF_MAX_ALIGN_T 8
#if SIZEOF_LONG != 8 || SIZEOF_VOID_P != 8 || SIZEOF_LONG_DOUBLE != 8 || SIZEOF_WCHAR_T != 4
#error "not the sizes of macOS on 64-bit Arm"
#endif

// Macros for features of macOS.
#define HAVE_CLOCK_GETTIME 1
#define HAVE_FORK 1
#define HAVE_KQUEUE 1
#define HAVE_PTHREAD_H 1
#define HAVE_SSIZE_T 1
#define HAVE_STDDEF_H 1
#define HAVE_SYS_SELECT_H 1
#define HAVE_SYS_STAT_H 1
#define HAVE_SYS_TIME_H 1
#define HAVE_SYS_TYPES_H 1
#define HAVE_WCHAR_H 1
#define _Py_STACK_GROWS_DOWN 1  // since 3.14

// Macros for features that macOS lacks: unsigned wchar_t, stub threads, big-endian numbers.
#undef HAVE_ALIGNED_REQUIRED
#undef HAVE_IEEEFP_H
#undef HAVE_PTHREAD_STUBS
#undef HAVE_SYS_TERMIO_H
#undef HAVE_USABLE_WCHAR_T
#undef HAVE__GETPTY
#undef SIGNED_RIGHT_SHIFT_ZERO_FILLS

// CPython's default build: release, with the global lock, 30 bits per digit.
#define WITH_DOC_STRINGS 1
#define WITH_MIMALLOC 1
#define WITH_PYMALLOC 1
#undef ALT_SOABI
#undef PYLONG_BITS_IN_DIGIT
#undef PY_FORMAT_SIZE_T
#undef Py_DEBUG
#undef Py_ENABLE_SHARED
#undef Py_GIL_DISABLED
#undef Py_HASH_ALGORITHM
#undef Py_STATS
#undef Py_TRACE_REFS
#undef WITH_DTRACE

// Defined by the system's headers.
#undef _POSIX_THREADS
#undef _XOPEN_SOURCE_EXTENDED
