// Shared by the trials of a kernel library: try_kernels.cpp, try_quantize.cpp and try_attention.cpp.
#pragma once

#include <cinttypes>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#include "../kernels/numeric.h"
#include "../kernels/registry.h"
#include "../kernels/status.h"
#include "aligned_memory.h"
#include "sme_threads.h"

namespace lowbit {

// Pseudorandom numbers, the same in each trial.
class Random {
 public:
  uint32_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 32);
  }
  float between(float low, float high) { return low + (high - low) * static_cast<float>(next() >> 8) * 0x1p-24f; }

 private:
  uint64_t state_ = 1;
};

// Memory between two guard areas, reused between trials. Memory that a kernel must not write, including guards, must have the
// same checksum() afterwards.
class GuardedMemory {
 public:
  explicit GuardedMemory(const char* name) : name_(name) {}

  // Provides `count` aligned uninitialized values; an error if there is not enough memory.
  template <class T>
  Status take(int64_t count, T** values) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    if (bytes + 2 * kGuard > capacity_) {
      capacity_ = 0;
      memory_.reset();  // freed before the next allocation
      memory_.reset(static_cast<char*>(allocate_aligned(bytes + 2 * kGuard)));
      if (memory_ == nullptr) return Status::no_memory("no memory for %" PRId64 " bytes of %s in a trial", bytes, name_);
      capacity_ = bytes + 2 * kGuard;
    }
    bytes_ = bytes;
    std::memset(memory_.get(), kPattern, kGuard);
    std::memset(memory_.get() + kGuard + bytes, kPattern, kGuard);
    *values = reinterpret_cast<T*>(memory_.get() + kGuard);
    return {};
  }

  // Whether nothing was written before or after the values.
  bool is_intact() const {
    if (memory_ == nullptr) return true;
    for (int64_t i = 0; i < kGuard; ++i) {
      if (memory_.get()[i] != kPattern || memory_.get()[kGuard + bytes_ + i] != kPattern) return false;
    }
    return true;
  }

  // Checksum of values and guard areas; a change of a single word always changes it.
  uint64_t checksum() const {
    uint64_t sum = 0;
    if (memory_ == nullptr) return sum;
    const int64_t end = bytes_ + 2 * kGuard;
    for (int64_t i = 0; i < end; i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, memory_.get() + i, static_cast<size_t>(end - i < 8 ? end - i : 8));
      sum = (sum ^ word) * 0x9e3779b97f4a7c15u;
    }
    return sum;
  }

  const char* name() const { return name_; }

 private:
  static constexpr int64_t kGuard = 4096;  // a multiple of the alignment
  static constexpr char kPattern = 0x5b;

  const char* name_;
  std::unique_ptr<char, FreeAligned> memory_;
  int64_t bytes_ = 0, capacity_ = 0;
};

inline const char* name_of(DType type) { return type == DType::f32 ? "float32" : type == DType::bf16 ? "bfloat16" : "float16"; }

inline bool same(float a, float b) { return bits_of_float(a) == bits_of_float(b) || (std::isnan(a) && std::isnan(b)); }

// Whether a kernel can run on this CPU under LOWBIT_ISA.
inline bool can_run(IsaBits isa) {
  return (isa & ~active_isa()) == 0 && ((isa & kSme2) == 0 || sme_threads() > 0);
}

// try_kernels() for the kernels that quantize, and for those of attention.
Status try_quantize(const LoadedLibrary& library);
Status try_attention(const LoadedLibrary& library);

}  // namespace lowbit
