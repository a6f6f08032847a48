// Functions and lambdas that kernels are cut into, and that are no calls in what is compiled.
#pragma once

// Without this, compilers leave some of them calls, whose arguments go through memory: registers are what a kernel lacks.
// In front of a function (`LOWBIT_INLINE inline void f()`) and behind a lambda's parameters (`[&](auto i) LOWBIT_INLINE {`).
#define LOWBIT_INLINE __attribute__((always_inline))
