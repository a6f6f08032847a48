// Instructions that load or store several registers, for the tiles of gemm_neon.h. Compilers do not generate them, or only with
// copies.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "../bits/unpack_neon.h"

namespace lowbit {
namespace {

// Loads four adjacent registers (64 bytes) by one instruction that also advances the pointer. The registers are named, because
// GCC would choose other adjacent registers and copy the values to them.
template <int First>
struct Four;

#define LOWBIT_FOUR(first, second, third, fourth)                                                      \
  template <>                                                                                          \
  struct Four<first> {                                                                                 \
    /* `Step`: bytes by which the pointer advances. */                                                 \
    template <int64_t Step = 64, class Vector>                                                         \
    LOWBIT_INLINE static void load(const uint8_t*& at, Vector* to) {                                   \
      register Vector v0 __asm__("v" #first), v1 __asm__("v" #second);                                 \
      register Vector v2 __asm__("v" #third), v3 __asm__("v" #fourth);                                 \
      if constexpr (Step == 0) {                                                                       \
        __asm__ volatile("ld1 {%0.16b, %1.16b, %2.16b, %3.16b}, [%4]"                                  \
                         : "=w"(v0), "=w"(v1), "=w"(v2), "=w"(v3) : "r"(at) : "memory");               \
      } else if constexpr (Step == 64) {                                                               \
        __asm__ volatile("ld1 {%0.16b, %1.16b, %2.16b, %3.16b}, [%4], #64"                             \
                         : "=w"(v0), "=w"(v1), "=w"(v2), "=w"(v3), "+r"(at) : : "memory");             \
      } else {                                                                                         \
        __asm__ volatile("ld1 {%0.16b, %1.16b, %2.16b, %3.16b}, [%4], %5"                              \
                         : "=w"(v0), "=w"(v1), "=w"(v2), "=w"(v3), "+r"(at) : "r"(Step) : "memory");   \
      }                                                                                                \
      to[0] = v0, to[1] = v1, to[2] = v2, to[3] = v3;                                                  \
    }                                                                                                  \
    /* Four values of 32 bits, each in all lanes of its register. */                                   \
    template <class Vector>                                                                            \
    LOWBIT_INLINE static void load_each(const uint8_t*& at, Vector* to) {                              \
      register Vector v0 __asm__("v" #first), v1 __asm__("v" #second);                                 \
      register Vector v2 __asm__("v" #third), v3 __asm__("v" #fourth);                                 \
      __asm__ volatile("ld4r {%0.4s, %1.4s, %2.4s, %3.4s}, [%4], #16"                                  \
                       : "=w"(v0), "=w"(v1), "=w"(v2), "=w"(v3), "+r"(at) : : "memory");               \
      to[0] = v0, to[1] = v1, to[2] = v2, to[3] = v3;                                                  \
    }                                                                                                  \
    template <int Count, class Vector>                                                                 \
    LOWBIT_INLINE static void pin(Vector* v) {                                                         \
      if constexpr (Count > 0) {                                                                       \
        register Vector v0 __asm__("v" #first) = v[0];                                                 \
        __asm__ volatile("" : "+w"(v0));                                                               \
        v[0] = v0;                                                                                     \
      }                                                                                                \
      if constexpr (Count > 1) {                                                                       \
        register Vector v1 __asm__("v" #second) = v[1];                                                \
        __asm__ volatile("" : "+w"(v1));                                                               \
        v[1] = v1;                                                                                     \
      }                                                                                                \
      if constexpr (Count > 2) {                                                                       \
        register Vector v2 __asm__("v" #third) = v[2];                                                 \
        __asm__ volatile("" : "+w"(v2));                                                               \
        v[2] = v2;                                                                                     \
      }                                                                                                \
      if constexpr (Count > 3) {                                                                       \
        register Vector v3 __asm__("v" #fourth) = v[3];                                                \
        __asm__ volatile("" : "+w"(v3));                                                               \
        v[3] = v3;                                                                                     \
      }                                                                                                \
    }                                                                                                  \
    template <class Vector>                                                                            \
    LOWBIT_INLINE static void store(uint8_t*& at, Vector a, Vector b, Vector c, Vector d) {            \
      register Vector v0 __asm__("v" #first) = a, v1 __asm__("v" #second) = b;                         \
      register Vector v2 __asm__("v" #third) = c, v3 __asm__("v" #fourth) = d;                         \
      __asm__ volatile("st1 {%1.16b, %2.16b, %3.16b, %4.16b}, [%0], #64"                               \
                       : "+r"(at) : "w"(v0), "w"(v1), "w"(v2), "w"(v3) : "memory");                    \
    }                                                                                                  \
  }
LOWBIT_FOUR(0, 1, 2, 3);
LOWBIT_FOUR(4, 5, 6, 7);
LOWBIT_FOUR(8, 9, 10, 11);
LOWBIT_FOUR(16, 17, 18, 19);
LOWBIT_FOUR(20, 21, 22, 23);
LOWBIT_FOUR(24, 25, 26, 27);
LOWBIT_FOUR(28, 29, 30, 31);
#undef LOWBIT_FOUR

// Loads adjacent registers, four at a time. The first is v<First>.
template <int Count, int First, class Vector>
LOWBIT_INLINE inline void next(const uint8_t*& at, Vector* to) {
  if constexpr (Count >= 4) {
    Four<First>::load(at, to);
    if constexpr (Count > 4) next<Count - 4, First + 4>(at, to + 4);
  } else if constexpr (Count >= 2) {
    __asm__ volatile("ldp %q0, %q1, [%2], #32" : "=w"(to[0]), "=w"(to[1]), "+r"(at) : : "memory");
    if constexpr (Count > 2) next<Count - 2, First>(at, to + 2);
  } else {
    __asm__ volatile("ldr %q0, [%1], #16" : "=w"(to[0]), "+r"(at) : : "memory");
  }
}

// A barrier for the compiler, after which `v` is in the registers from v<First> on. For values that loops load and replace
// there, because GCC would copy them to other registers.
template <int Count, int First, class Vector>
LOWBIT_INLINE inline void pin(Vector* v) {
  unroll<(Count + 3) / 4>([&](auto four) LOWBIT_INLINE {
    constexpr int kCount = Count - 4 * four < 4 ? Count - 4 * four : 4;
    Four<First + 4 * four>::template pin<kCount>(v + 4 * four);
  });
}

// Loads two registers by one instruction, because GCC 12 does not combine the loads.
template <class Vector>
LOWBIT_INLINE inline void next_pair(const int8_t*& at, Vector& v0, Vector& v1) {
  __asm__ volatile("ldp %q0, %q1, [%2], #32" : "=w"(v0), "=w"(v1), "+r"(at) : : "memory");
}

// Loads registers from `At` bytes after `from`.
template <int At, class Vector>
LOWBIT_INLINE inline void load_at(const void* from, Vector& v) {
  __asm__ volatile("ldr %q0, [%1, %2]" : "=w"(v) : "r"(from), "i"(At) : "memory");
}

template <int At, bool Both = true, class Vector>
LOWBIT_INLINE inline void load_pair(const void* from, Vector& v0, Vector& v1) {
  if constexpr (Both) {
    __asm__ volatile("ldp %q0, %q1, [%2, %3]" : "=w"(v0), "=w"(v1) : "r"(from), "i"(At) : "memory");
  } else {
    load_at<At>(from, v0);
  }
}

template <int At, bool Both = true, class Vector>
LOWBIT_INLINE inline void store_pair(void* to, Vector v0, Vector v1) {
  if constexpr (Both) {
    __asm__ volatile("stp %q0, %q1, [%2, %3]" : : "w"(v0), "w"(v1), "r"(to), "i"(At) : "memory");
  } else {
    __asm__ volatile("str %q0, [%1, %2]" : : "w"(v0), "r"(to), "i"(At) : "memory");
  }
}

// Loads one 32-bit value to all lanes. `Bytes`: bytes by which the pointer advances.
template <class Vector, int64_t Bytes = 4>
LOWBIT_INLINE inline Vector next_dup(const uint8_t*& at) {
  Vector v;
  if constexpr (Bytes == 4) {
    __asm__ volatile("ld1r {%0.4s}, [%1], #4" : "=w"(v), "+r"(at) : : "memory");
  } else {
    __asm__ volatile("ld1r {%0.4s}, [%1], %2" : "=w"(v), "+r"(at) : "r"(Bytes) : "memory");
  }
  return v;
}

// A barrier for the compiler, which would otherwise load ahead and run out of registers.
template <int Count, class Vector>
LOWBIT_INLINE inline void in_order(Vector (&v)[Count]) {
  unroll<Count>([&](auto i) LOWBIT_INLINE {
    Vector& value = v[i];
    __asm__ volatile("" : "+w"(value));
  });
}

}  // namespace
}  // namespace lowbit
