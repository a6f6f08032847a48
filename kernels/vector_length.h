// The length of SME's vectors, which each thread sets for itself.
#pragma once

#include <cstdint>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/prctl.h>
#endif

namespace lowbit {

inline constexpr uint64_t kLongVectorBytes = 64;  // the vector length of the kernels for SME2

// Only call this on CPUs with SME. The asm is volatile, because otherwise compilers may move it before the caller's check for
// SME.
inline uint64_t vector_bytes() {
#if defined(__aarch64__)
  register uint64_t bytes __asm__("x0");
  __asm__ volatile(".inst 0x04bf5820" : "=r"(bytes));  // rdsvl x0, #1: many assemblers do not support it yet
  return bytes;
#else
  return 0;
#endif
}

// By default Linux limits a thread's vectors to 256 bits. During its lifetime, this object gives its thread vectors of 512
// bits, if the CPU and the system support them, and then restores the previous length. Changing the length clears ZA, so a
// thread with live ZA (TPIDR2_EL0) keeps its length.
class LongVectors {
 public:
  // If `has_sme` is false, it does nothing.
  explicit LongVectors(bool has_sme) {
#if defined(__aarch64__) && defined(__linux__)
    if (!has_sme || vector_bytes() == kLongVectorBytes) return;
    uint64_t live;
    __asm__ volatile("mrs %0, S3_3_C13_C0_5" : "=r"(live));
    const int previous = prctl(kGetLength);
    if (live != 0 || previous < 0) return;
    previous_ = previous;
    prctl(kSetLength, (previous & ~kLengthMask) | static_cast<int>(kLongVectorBytes));  // new programs inherit the length too
#else
    (void)has_sme;
#endif
  }
  ~LongVectors() {
#if defined(__aarch64__) && defined(__linux__)
    if (previous_ >= 0) prctl(kSetLength, previous_);
#endif
  }
  LongVectors(const LongVectors&) = delete;
  LongVectors& operator=(const LongVectors&) = delete;

 private:
#if defined(__aarch64__) && defined(__linux__)
  static constexpr int kSetLength = 63, kGetLength = 64, kLengthMask = 0xffff;  // older headers lack these names
  int previous_ = -1;
#endif
};

}  // namespace lowbit
