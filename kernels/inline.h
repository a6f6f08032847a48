// Marks functions and lambdas of kernels that must be inlined.
#pragma once

// Without it compilers keep some of them as calls, whose arguments go through memory, and kernels run short of registers.
// Write it before a function (`LOWBIT_INLINE inline void f()`) or after a lambda's parameters (`[&](auto i) LOWBIT_INLINE {`).
#define LOWBIT_INLINE __attribute__((always_inline))
